"""A small host application with the router in it: what a user's own app looks like, and workers to try it on.

`app.py` is the part to copy. The rest makes a demonstration of it on one machine: `python -m example_app`.
"""

"""The router's own scheduler against a recorded load and simulated workers: which policy fits this traffic?

`asgi-router replay TRACE` is the way in (`cli.py`). The classes that choose are the product's, not copies; only the
workers and the clock are simulated.
"""

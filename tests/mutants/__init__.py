"""Deliberate breakages of the package that the test suite must notice: see `__main__.py`."""

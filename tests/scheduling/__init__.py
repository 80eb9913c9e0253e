"""The tests of choosing and counting: no event loop, no network, no clock but the one in `builders.py`."""

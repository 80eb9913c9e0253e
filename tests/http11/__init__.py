"""Tests of our own HTTP/1.1 client, against raw sockets: `responses.py` is the table of what workers may send."""

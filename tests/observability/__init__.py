"""Tests of what is seen from outside: metrics, the log of requests, and what is in neither of them."""

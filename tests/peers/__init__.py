"""Tests of the host app as a worker, and of several such processes that route for each other."""

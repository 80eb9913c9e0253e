"""Tests of what the benchmarks compute from their readings. Nothing here is timed."""

"""Tests of disaggregated mode: prefill and decode apart."""

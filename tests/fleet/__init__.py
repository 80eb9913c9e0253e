"""Tests of the fleet: who the workers are, and how they are."""

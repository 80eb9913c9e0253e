"""Choosing a worker and counting the request, as one plain step: no await, no I/O, no clock of its own."""

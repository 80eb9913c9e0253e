"""The Python servers among the candidates: `python -m benchmarks.datapath.apps.NAME ARGUMENTS`, one process each."""

"""The tests of replay: traces, the simulated worker, rivals, and the command. No trace of anybody is needed."""

"""Fake engines that prefill and decode apart, in the dialects of FastDeploy, vLLM and SGLang, as real processes.

`processes.py` is what tests use. The rest runs in the engines' processes: `engine.py` serves, `dialects.py` checks what
was received, `hand_over.py` ties a decode to its prefill, `job.py` says what a request may ask to go wrong.
"""

"""Owns a real worker: llama.cpp's own HTTP server, with its prefix cache, in this process.

    python -m example_app.llama_worker --model .demo/tiny-1.gguf --port 9001

It ends on SIGINT and SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import signal

import xllamacpp

from example_app.parent import stop_when_stdin_closes
from example_app.say import say

SLOTS = 4
TOKENS_PER_SLOT = 4096


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m example_app.llama_worker", description=__doc__)
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument(
        "--slots", type=int, default=SLOTS, help="requests at once; each keeps the KV cache of the last prompt it saw"
    )
    parser.add_argument("--tokens-per-slot", type=int, default=TOKENS_PER_SLOT, help="of a prompt and its answer")
    parser.add_argument("--until-stdin-closes", action="store_true", help="end with the launcher")
    options = parser.parse_args()

    # Blocked before the server starts its threads, which inherit this: the signals wait for `sigwait` below.
    stop_signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals)
    if options.until_stdin_closes:
        stop_when_stdin_closes()

    server = xllamacpp.Server(_parameters(options))
    say(f"llama.cpp worker: {server.listening_address}")
    signal.sigwait(stop_signals)
    # Not a normal exit: that destroys the server, which waits for streams that clients still read.
    os._exit(0)


def _parameters(options: argparse.Namespace) -> xllamacpp.CommonParams:
    parameters = xllamacpp.CommonParams()
    parameters.model.path = options.model
    parameters.model_alias = {"tiny"}
    parameters.hostnames = [options.host]
    parameters.port = options.port
    parameters.n_parallel = options.slots
    parameters.n_ctx = options.slots * options.tokens_per_slot
    # Evicted means gone. By default llama.cpp parks up to 8 GiB of old prompts in host memory, and a prompt
    # that the worker should have forgotten still hits.
    parameters.cache_ram_mib = 0
    # Random weights seldom end a sentence.
    parameters.n_predict = 512
    # Two workers and the app share this machine, and the model is too small to gain from threads.
    parameters.cpuparams.n_threads = 1
    parameters.cpuparams_batch.n_threads = 1
    # With fewer it closes more idle connections just as a request comes.
    parameters.n_threads_http = max(8, 2 * options.slots)
    parameters.endpoint_metrics = True
    # The default lets every web page that you visit talk to the worker.
    parameters.cors_origins = "localhost"
    parameters.warmup = False
    parameters.verbosity = 1  # errors only
    return parameters


if __name__ == "__main__":
    main()

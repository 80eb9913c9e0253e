"""Owns the demonstration: two workers, the app in front of them, and the end of all three.

python -m example_app [--port 8000] [--workers 2] [--simulated]
"""

from __future__ import annotations

import argparse
import functools
import importlib
import logging
import os
import signal
import socket
import sys

import uvicorn

from asgi_router.settings import SettingsError
from example_app.worker_processes import ROOT, WorkerFailed, free_ports, running, wait_until_healthy

HOST = "127.0.0.1"
READY_SECONDS = 60.0
DRAIN_SECONDS = 5

say = functools.partial(print, flush=True)  # at once, also into a pipe

INTRODUCTION = """
Ready: {url}   (Ctrl-C stops everything)

# One answer
curl {url}/v1/chat/completions {key}-H 'content-type: application/json' -d '
  {{"model": "tiny", "max_tokens": 16, "messages": [{{"role": "user", "content": "Hello"}}]}}'

# The same as a stream
curl -N {url}/v1/chat/completions {key}-H 'content-type: application/json' -d '
  {{"model": "tiny", "max_tokens": 16, "messages": [{{"role": "user", "content": "Hello"}}], "stream": true}}'

# A long prompt, twice: the second time it goes to the worker that has it in its cache
LONG=$(printf 'A cache remembers what it has read. %.0s' $(seq 100))
for turn in 1 2; do
  curl -si {url}/v1/completions {key}-H 'content-type: application/json' \\
    -d "{{\\"model\\": \\"tiny\\", \\"max_tokens\\": 4, \\"prompt\\": \\"$LONG\\"}}" |
    grep -oE 'x-router-worker: [^[:space:]]*|"cached_tokens": ?[0-9]+'
done

# What the router has in flight
curl {key}{url}/router-stats
"""


def main() -> int:
    options = parse_options()
    # SIGTERM ends this like Ctrl-C does: by an exception, which takes the workers along on its way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")  # the router tells of broken workers

    try:
        listener = socket.create_server((HOST, options.port))
    except OSError as exc:
        reason = os.strerror(exc.errno or 0)  # without the address, which Python adds to `exc.strerror`
        print(f"Can't listen on {HOST}:{options.port}: {reason}. Try --port N.", file=sys.stderr)
        return 1

    with listener:
        try:
            demonstrate(listener, options.workers, simulated=options.simulated)
        except (SettingsError, WorkerFailed) as exc:
            print(exc, file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            pass

    say("Stopped: the app and its workers have ended.")
    return 0


def demonstrate(listener: socket.socket, count: int, *, simulated: bool) -> None:
    """Serve the app on `listener`, with `count` workers behind it, until a signal comes."""
    command = worker_command(simulated=simulated)
    ports = free_ports(count)
    urls = [f"http://{HOST}:{port}" for port in ports]
    os.environ["ASGI_ROUTER_WORKERS"] = ",".join(urls)
    os.environ["ASGI_ROUTER_DECISION_HEADERS"] = "true"
    from example_app.app import api_keys, app  # only now: it reads the environment

    with running([[*command, "--host", HOST, "--port", str(port)] for port in ports]) as workers:
        for worker, url in zip(workers, urls, strict=True):
            wait_until_healthy(worker, url, timeout=READY_SECONDS)

        key = "-H 'authorization: Bearer YOUR_KEY' " if api_keys() else ""
        if not key:
            say("EXAMPLE_API_KEYS is not set: everyone on this machine is let in without a key.")
        url = f"http://{HOST}:{listener.getsockname()[1]}"
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=DRAIN_SECONDS)
        Server(config, INTRODUCTION.format(url=url, key=key)).run(sockets=[listener])


class Server(uvicorn.Server):
    """A uvicorn that says `introduction` when it is ready, and not a moment earlier."""

    def __init__(self, config: uvicorn.Config, introduction: str) -> None:
        super().__init__(config)
        self._introduction = introduction

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            say(self._introduction)


def worker_command(*, simulated: bool) -> list[str]:
    """Return the command that runs a worker, up to its address: llama.cpp if possible."""
    if not simulated:
        try:
            importlib.import_module("xllamacpp")
            from example_app.tiny_model import ensure_tiny_model
        except ImportError as exc:
            say(f"llama.cpp can't be loaded here ({exc}), so the workers are simulated.")
        else:
            model = ensure_tiny_model(ROOT / ".demo")
            say("Workers: llama.cpp with random weights. Its answers are gibberish, its prefix cache is real.")
            return [sys.executable, "-m", "example_app.llama_worker", "--model", str(model)]

    say("Workers: simulated. No model is behind the answers.")
    return [sys.executable, "-m", "example_app.simulated_worker"]


def parse_options() -> argparse.Namespace:
    def port(text: str) -> int:
        if not 0 <= (number := int(text)) <= 65535:
            raise ValueError
        return number

    def count(text: str) -> int:
        if not 1 <= (number := int(text)) <= 16:
            raise ValueError
        return number

    parser = argparse.ArgumentParser(prog="python -m example_app", description="The router, tried on one machine.")
    parser.add_argument("--port", type=port, default=8000, help="port on 127.0.0.1; 0 takes a free one")
    parser.add_argument("--workers", type=count, default=2, help="how many workers to start, 1 to 16")
    parser.add_argument("--simulated", action="store_true", help="no llama.cpp: workers with canned answers")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""Owns the demonstration: its workers, the app in front of them, and the end of them all.

python -m example_app [--port 8000] [--workers 2] [--simulated | --disaggregated]
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import signal
import socket
import sys

import uvicorn

from asgi_router.settings import SettingsError
from example_app.say import say
from example_app.worker_processes import ROOT, WorkerFailed, free_ports, running, wait_until_healthy

HOST = "127.0.0.1"
READY_SECONDS = 60.0
DRAIN_SECONDS = 5

INTRODUCTION = """
Ready: {url}   (Ctrl-C stops everything; what is being answered has {drain} seconds)

# One answer
curl {url}/v1/chat/completions {key}-H 'content-type: application/json' -d '
  {{"model": "tiny", "max_tokens": 16, "messages": [{{"role": "user", "content": "Hello"}}]}}'

# The same as a stream
curl -N {url}/v1/chat/completions {key}-H 'content-type: application/json' -d '
  {{"model": "tiny", "max_tokens": 16, "messages": [{{"role": "user", "content": "Hello"}}], "stream": true}}'

{special}

# What the router has in flight
curl {key}{url}/router-stats
"""

CACHE = """
# A long prompt, twice: the second time it goes to the worker that has it in its cache
LONG=$(printf 'A cache remembers what it has read. %.0s' $(seq 100))
for turn in 1 2; do
  curl -si {url}/v1/completions {key}-H 'content-type: application/json' \\
    -d "{{\\"model\\": \\"tiny\\", \\"max_tokens\\": 4, \\"prompt\\": \\"$LONG\\"}}" |
    grep -oE 'x-router-worker: [^[:space:]]*|"cached_tokens": ?[0-9]+'
done
"""

PAIR = """
# Which two workers served it; what is cached for the second one has been handed over by the first one
curl -si {url}/v1/completions {key}-H 'content-type: application/json' -d '
  {{"model": "tiny", "max_tokens": 4, "prompt": "Each of you does one half of the work"}}' |
  grep -oE 'x-router-(prefill|decode)-url: [^[:space:]]*|"cached_tokens": ?[0-9]+'
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
            demonstrate(listener, options.workers, simulated=options.simulated, disaggregated=options.disaggregated)
        except (SettingsError, WorkerFailed) as exc:
            print(exc, file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            pass

    say("Stopped: the app and its workers have ended.")
    return 0


def demonstrate(listener: socket.socket, count: int, *, simulated: bool, disaggregated: bool) -> None:
    """Serve the app on `listener`, with `count` workers behind it, until a signal comes.

    When `disaggregated`, these decode, and one more prefills.
    """
    command = worker_command(simulated=simulated, disaggregated=disaggregated)
    ports = free_ports(count + disaggregated)
    urls = [f"http://{HOST}:{port}" for port in ports]
    commands = [[*command, "--host", HOST, "--port", str(port)] for port in ports]
    os.environ["ASGI_ROUTER_WORKERS"] = ",".join(urls)
    os.environ["ASGI_ROUTER_DECISION_HEADERS"] = "true"
    if disaggregated:
        roles = ["prefill", *["decode"] * count]
        commands = [[*command, "--role", role] for command, role in zip(commands, roles, strict=True)]
        described = [{"url": url, "role": role} for url, role in zip(urls, roles, strict=True)]
        os.environ["ASGI_ROUTER_WORKERS"] = json.dumps(described)
        os.environ["ASGI_ROUTER_MODE"] = "disaggregated"
        os.environ["ASGI_ROUTER_PD_DIALECT"] = "vllm"
    from example_app.app import api_keys, app  # only now: it reads the environment

    with running(commands) as workers:
        for worker, url in zip(workers, urls, strict=True):
            wait_until_healthy(worker, url, timeout=READY_SECONDS)

        key = "-H 'authorization: Bearer YOUR_KEY' " if api_keys() else ""
        if not key:
            say("EXAMPLE_API_KEYS is not set: everyone on this machine is let in without a key.")
        url = f"http://{HOST}:{listener.getsockname()[1]}"
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=DRAIN_SECONDS)
        special = (PAIR if disaggregated else CACHE).strip().format(url=url, key=key)
        Server(config, INTRODUCTION.format(drain=DRAIN_SECONDS, url=url, key=key, special=special)).run(
            sockets=[listener]
        )


class Server(uvicorn.Server):
    """A uvicorn that says `introduction` when it is ready, and not a moment earlier."""

    def __init__(self, config: uvicorn.Config, introduction: str) -> None:
        super().__init__(config)
        self._introduction = introduction

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            say(self._introduction)


def worker_command(*, simulated: bool, disaggregated: bool = False) -> list[str]:
    """Return the command that runs a worker, up to its address: llama.cpp if possible."""
    if disaggregated:
        say("llama.cpp can't prefill and decode apart. These workers speak as vLLM's do, and hand over a number.")
    elif not simulated:
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
    parser.add_argument("--disaggregated", action="store_true", help="one worker more, which prefills for the others")
    parser.add_argument("--simulated", action="store_true", help="no llama.cpp: workers with canned answers")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

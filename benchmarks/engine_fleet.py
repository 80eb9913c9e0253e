"""Owns what a benchmark on real engines runs: llama.cpp workers, our router or another one, and the end of them all."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import threading
import time
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette

from asgi_router import Router, RouterMiddleware
from example_app.__main__ import worker_command
from example_app.worker_processes import WorkerFailed, free_ports, running, wait_until_healthy

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from asgi_router import RouterSettings

WORKERS = 4
SLOTS = 2
TOKENS_PER_SLOT = 4096
READY_SECONDS = 40.0


@contextlib.contextmanager
def workers(count: int = WORKERS, slots: int = SLOTS) -> Iterator[list[str]]:
    """Start real workers with empty caches, and give their URLs.

    Raises:
        WorkerFailed: llama.cpp is not installed, or one of them did not start.
    """
    command = worker_command(simulated=False)
    if "example_app.llama_worker" not in command:
        raise WorkerFailed("This needs llama.cpp: pip install -e '.[demo]'.")

    ports = free_ports(count)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    size = ["--slots", str(slots), "--tokens-per-slot", str(TOKENS_PER_SLOT)]
    commands = [[*command, *size, "--host", "127.0.0.1", "--port", str(port)] for port in ports]
    with running(commands) as processes:
        for process, url in zip(processes, urls, strict=True):
            wait_until_healthy(process, url, timeout=READY_SECONDS)
        yield urls


@contextlib.contextmanager
def own_router(settings: RouterSettings) -> Iterator[str]:
    """Serve an app with the router in it by a uvicorn in a thread, and give its URL."""
    app = Starlette()
    app.add_middleware(RouterMiddleware, router=Router(settings))
    (port,) = free_ports(1)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, name="uvicorn", daemon=True)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise WorkerFailed("The router's server did not start.")
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(READY_SECONDS)


@contextlib.contextmanager
def foreign_router(command: str, urls: Sequence[str]) -> Iterator[str]:
    """Run another router by its command, in which {urls}, {port} and {metrics_port} are filled in, and give its URL."""
    port, metrics_port = free_ports(2)
    filled = shlex.split(command.format(urls=" ".join(urls), port=port, metrics_port=metrics_port))
    # It knows nothing of us, so a shell ties it to us: its standard input closes with this process, however that ends.
    tied = ["sh", "-c", '"$@" & read -r _; kill -9 $!', "sh", *filled]
    process = subprocess.Popen(tied, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_until_healthy(process, f"http://127.0.0.1:{port}", timeout=READY_SECONDS)
        yield f"http://127.0.0.1:{port}"
    finally:
        with process:  # closes the pipe, and waits
            pass

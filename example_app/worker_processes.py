"""Owns the workers' processes: started together, waited for, and gone when the launcher is."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
STOP_SECONDS = 5.0


class WorkerFailed(Exception):
    """A worker ended, or did not answer in time, before it was ready."""


def free_ports(count: int) -> list[int]:
    """Return `count` different loopback ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [sock.getsockname()[1] for sock in sockets]


@contextlib.contextmanager
def running(commands: list[list[str]]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run `commands` side by side for the time of the `with` block."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            # A session of its own: Ctrl-C in the terminal reaches the launcher alone, and the workers are
            # still there while the app finishes its requests. What ties them to the launcher is in parent.py.
            process = subprocess.Popen(
                [*command, "--until-stdin-closes"], cwd=ROOT, stdin=subprocess.PIPE, start_new_session=True
            )
            processes.append(process)
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            with process:  # closes the pipe, and waits
                try:
                    process.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()


def wait_until_healthy(process: subprocess.Popen[bytes], url: str, *, timeout: float) -> None:
    """Return when the worker at `url` answers its health check.

    Raises:
        WorkerFailed: its process has ended, or `timeout` seconds have passed.
    """
    deadline = time.monotonic() + timeout
    with httpx.Client(trust_env=False) as client:  # no proxy stands between us and our own machine
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise WorkerFailed(f"The worker for {url} ended with exit code {process.returncode}.")
            with contextlib.suppress(httpx.TransportError):
                if client.get(f"{url}/health").is_success:
                    return
            time.sleep(0.05)

    raise WorkerFailed(f"The worker for {url} is not ready after {timeout:.0f} seconds.")

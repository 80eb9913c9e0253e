"""Owns the processes of a run: each bound to a core, ready before it is used, ended with its children at the end."""

from __future__ import annotations

import ctypes
import http.client
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from benchmarks.datapath.native import LoadResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

ROOT = Path(__file__).parents[2]
READY_WITHIN = 90.0
END_WITHIN = 5.0
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
PROBE = b'{"model": "mock", "max_tokens": 1, "messages": [{"role": "user", "content": "Hello"}]}'
PROBE_HEADERS = {"content-type": "application/json", "authorization": "Bearer sk-test", "connection": "close"}


class CannotStart(Exception):
    """A process ended at once, or doesn't answer. The text says what it printed last."""


def raise_file_limit() -> None:
    """Let this process and its children open as many files as the system allows: a thousand streams need them."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def stop_on_signals() -> None:
    """Let SIGTERM, and SIGINT also where a shell ignores it for us, be a KeyboardInterrupt: all that runs is ended."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def free_port() -> int:
    """Return a port of loopback that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Server:
    """A process that listens on a port of loopback, and dies with all its children when this context ends.

    Args:
        command: as for `subprocess`.
        port: where it will listen.
        core: where it runs, with all it starts.
        log: a file for what it prints.
        environment: variables beside ours.
    """

    def __init__(
        self, command: Sequence[str], port: int, *, core: int, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.port = port
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=_environment() | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own, to be ended as a whole
                preexec_fn=_bound_to(core),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End it and its children: politely, then not."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_WITHIN)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def end(self) -> str:
        """Return how it ended, and what it printed last; empty while it runs."""
        code = self._process.poll()
        return "" if code is None else f"it ended with {code}: {self._last_words()}"

    def wait_until_it_answers(self, within: float = READY_WITHIN) -> None:
        """Wait for the first completion.

        Raises:
            CannotStart: none came within that many seconds.
        """
        deadline = time.monotonic() + within
        said = "no connection"
        while time.monotonic() < deadline:
            if ended := self.end():
                raise CannotStart(ended)
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5.0)
            try:
                connection.request("POST", "/v1/chat/completions", PROBE, PROBE_HEADERS)
                status = connection.getresponse().status
                if status == http.HTTPStatus.OK:
                    return
                said = f"status {status}"
            except OSError as exc:
                said = str(exc)
            except http.client.HTTPException as exc:
                said = repr(exc)
            finally:
                connection.close()
            time.sleep(0.1)
        raise CannotStart(f"no answer within {within:.0f} s ({said}): {self._last_words()}")

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")[:200]


def run_load(
    program: Path, port: int, arguments: Sequence[str], core: int, meanwhile: Callable[[], None] | None = None
) -> LoadResult:
    """Run the load to its end on `core`. `meanwhile` is called every 50 ms."""
    command = [str(program), *arguments, str(port)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=_bound_to(core)
    ) as process:
        try:
            while meanwhile and process.poll() is None:
                meanwhile()
                time.sleep(0.05)
            output, _ = process.communicate()
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise CannotStart(f"{' '.join(command)} ended with {process.returncode}")
    return LoadResult.parse(output)


@contextmanager
def awake(cores: Iterable[int]) -> Iterator[dict[int, int]]:
    """Keep `cores` from halting by loops of the lowest priority there is; yields their process ids by core.

    A halted core of a virtual machine wakes late, by milliseconds, which would be measured as the latency of a router.
    """
    command = [sys.executable, "-c", "while True: pass"]
    loops = {core: subprocess.Popen(command, preexec_fn=_bound_to(core, idle=True)) for core in cores}
    try:
        yield {core: loop.pid for core, loop in loops.items()}
    finally:
        for loop in loops.values():
            loop.kill()
            loop.wait()


def _environment() -> dict[str, str]:
    # Settings of the person who runs this are no part of the benchmark.
    return {name: value for name, value in os.environ.items() if not name.startswith("ASGI_ROUTER_")}


def _bound_to(core: int, *, idle: bool = False) -> Callable[[], None]:
    def bind() -> None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # who starts it may be killed, too
        os.sched_setaffinity(0, {core})
        if niceness := os.getpriority(os.PRIO_PROCESS, 0):
            # Linux may weigh sessions first, and processes only within one (sched_autogroup): then this is what counts.
            with suppress(OSError):
                Path("/proc/self/autogroup").write_text(str(niceness))
        if idle:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))

    return bind

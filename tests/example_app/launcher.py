"""Owns a running demonstration: `python -m example_app` in a process of its own, with a bound on every wait."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import signal

ROOT = Path(__file__).resolve().parent.parent.parent
START_SECONDS = 40.0
END_SECONDS = 15.0


class Launcher:
    """The launcher on a free port, with real llama.cpp workers where its wheel is installed.

    `start` returns once it says that it is ready. Its workers write to the same pipe as it does, so the end of
    that pipe is the end of them all.

    Attributes:
        url: where the app listens.
        workers: where its workers listen.
        output: what launcher and workers have printed.
    """

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("ASGI_", "EXAMPLE_"))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "example_app", "--port", "0", *arguments],
            cwd=ROOT,
            env={**inherited, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.url = ""
        self.output = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.communicate(timeout=END_SECONDS)

    @property
    def workers(self) -> list[str]:
        return re.findall(r"worker.*: (http://\S+)", self.output)

    def start(self) -> Self:
        """Wait until the app is ready."""
        assert self._process.stdout is not None
        timer = threading.Timer(START_SECONDS, self._process.kill)
        timer.start()
        try:
            for line in self._process.stdout:
                self.output += line
                if ready := re.match(r"Ready: (\S+)", line):
                    self.url = ready[1]
                    return self
        finally:
            timer.cancel()

        raise AssertionError(f"the launcher ended or was too slow; it printed:\n{self.output}")

    def end(self, signal_number: signal.Signals | None = None) -> int:
        """Send a signal if there is one, wait until no process of the demonstration is left, return the exit code.

        Raises:
            subprocess.TimeoutExpired: one of them lives on.
        """
        if signal_number is not None:
            self._process.send_signal(signal_number)
        rest, _ = self._process.communicate(timeout=END_SECONDS)
        self.output += rest
        return self._process.returncode

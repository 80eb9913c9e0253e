"""Owns a worker's tie to the launcher: a pipe on standard input that closes when the launcher is gone."""

from __future__ import annotations

import os
import signal
import threading


def stop_when_stdin_closes() -> None:
    """Send this process SIGTERM once standard input is at its end.

    The launcher holds the other end of that pipe and never writes. The system closes it with the launcher,
    even after `kill -9`, which leaves a process no other way to take its children along.
    """

    def wait() -> None:
        # Not `sys.stdin.read()`: a thread that sits in a buffered read upsets the interpreter's shutdown.
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="stop-when-stdin-closes", daemon=True).start()

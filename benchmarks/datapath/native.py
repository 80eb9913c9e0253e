"""Owns the two C programs: the mock worker and the load, compiled with the C compiler that is here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass, fields
from pathlib import Path

SOURCES = Path(__file__).with_name("native")
COMPILERS = ("cc", "gcc", "clang")


class CannotBuild(Exception):
    """There is no C compiler, or it refuses our programs. The text is for the person who runs the benchmark."""


@dataclass(frozen=True)
class Programs:
    """Where the compiled programs are."""

    worker: Path
    load: Path


def build(folder: Path) -> Programs:
    """Compile both into `folder`, with `$CC` or the first compiler on PATH.

    Raises:
        CannotBuild: see there.
    """
    named = os.environ.get("CC")
    compiler = next(filter(None, map(shutil.which, (named,) if named else COMPILERS)), None)
    if compiler is None:
        raise CannotBuild(
            f"The mock worker and the load generator are C programs, and there is no C compiler on PATH "
            f"({named or ', '.join(COMPILERS)}). On Debian: apt install gcc libc6-dev. $CC names another one."
        )
    programs = Programs(folder / "worker", folder / "load")
    for program in (programs.worker, programs.load):
        command = [compiler, "-O2", "-o", str(program), str(SOURCES / f"{program.name}.c")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotBuild(f"{' '.join(command)} failed:\n{done.stderr}")
    return programs


@dataclass(frozen=True)
class LoadResult:
    """What the load says of one run. Latencies in microseconds; 0 where there was nothing to measure."""

    done: int
    errors: int
    """Connections that could not be made, or broke before the end of an answer."""
    not_ok: int
    """Answers with another status than 200, which `done` counts too."""
    unfinished: int
    """Requests that had no end a grace of five seconds after the time was over."""
    seconds: float
    events: int
    latency_p50: float
    latency_p99: float
    latency_max: float
    first_event_p50: float
    first_event_p99: float
    first_event_max: float
    late_p50: float
    """Microseconds from the worker to the client, of single events."""
    late_p99: float
    late_max: float

    @classmethod
    def parse(cls, line: str) -> LoadResult:
        """Return what the load's one line of JSON says."""
        said = json.loads(line)
        return cls(**{field.name: said[field.name] for field in fields(cls)})

"""Owns the leak checks: `python -m benchmarks.datapath.endurance`. README.md says what is looked at."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.datapath import rivals
from benchmarks.datapath.candidates import candidates
from benchmarks.datapath.kernel import open_files, resident_bytes
from benchmarks.datapath.leaving import leave
from benchmarks.datapath.measure import Cores
from benchmarks.datapath.native import CannotBuild, build
from benchmarks.datapath.processes import CannotStart, Server, raise_file_limit, run_load, stop_on_signals
from benchmarks.datapath.scenarios import Scenario
from benchmarks.datapath.suite import Suite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

STEPS = 10
ENOUGH = 10_000
"""Requests or disconnects below which a tenth of them doesn't fill the caches, and growing memory says nothing."""

TOLERANCE = 5_000_000
"""Bytes that memory may grow from the second step on and count as flat: allocators keep what they have for a while."""

SETTLE_WITHIN = 30.0
"""Seconds within which all has to be as before. Idle connections to workers go after `KEEPALIVE_EXPIRY`, when the next
request or health probe looks at them: five seconds later at the most."""

LOAD = Scenario("endurance", "", 32, body_bytes=1000, different_prompts=0)
SLOWEST, AT_LEAST = 50, 60.0
"""Requests a second, and seconds: a load that isn't done by then hangs."""


@dataclass(frozen=True)
class Held:
    """What the router holds at one moment."""

    memory: int
    files: int
    at_workers: int
    """Connections that the workers have."""

    def __str__(self) -> str:
        return f"{self.memory / 1e6:7.1f} MB, {self.files} files, {self.at_workers} files of the workers"


class Checks:
    """The checks of one router in front of two mock workers."""

    def __init__(self, router: Server, workers: Sequence[Server], load: Path, core: int) -> None:
        self._router = router
        self._workers = workers
        self._load = load
        self._core = core
        self.faults: list[str] = []

    def held(self) -> Held:
        """Return what is held now."""
        at_workers = sum(len(open_files(worker.pid)) for worker in self._workers)
        return Held(resident_bytes(self._router.pid), len(open_files(self._router.pid)), at_workers)

    def requests(self, total: int) -> None:
        """Send `total` requests of different prompts, and look at the memory on the way."""
        memory: list[int] = []
        before = self._quiet()
        for step in range(STEPS):
            count = total // STEPS
            arguments = ["-n", str(count), *LOAD.arguments(AT_LEAST + count / SLOWEST, step * count)]
            result = run_load(self._load, self._router.port, arguments, self._core)
            held = self.held()
            memory.append(held.memory)
            pace = f"{result.done / result.seconds:,.0f} a second, the slowest {result.latency_max / 1e6:.2f} s"
            print(f"{(step + 1) * count:>12,} requests {held}  ({pace})", flush=True)
            if result.errors or result.not_ok or result.unfinished or result.done != count:
                self.faults.append(f"of {count:,} requests {result.done:,} were done: {result}")
        self._look_for_leftovers(before, memory, total, "requests")

    def disconnects(self, total: int, at_once: int, seed: int) -> None:
        """Let `total` clients leave at random moments, and look at what stays behind."""
        memory: list[int] = []
        before = self._quiet()
        for step in range(STEPS):
            count = total // STEPS
            began = time.monotonic()
            tally = asyncio.run(leave(self._router.port, count, at_once, seed + step))
            held = self.held()
            memory.append(held.memory)
            moments = ", ".join(f"{number:,} {moment}" for moment, number in sorted(tally.items()))
            rate = count / (time.monotonic() - began)
            print(f"{(step + 1) * count:>12,} left     {held}  ({rate:,.0f} a second: {moments})", flush=True)
            if tally["hung"] or tally["refused"]:
                self.faults.append(f"of {count:,} clients {tally['hung']} hung, {tally['refused']} were refused")
        self._look_for_leftovers(before, memory, total, "disconnects")

    def _quiet(self) -> Held:
        """Return the least that is held within some seconds in which nobody asks for anything."""
        readings = []
        for _ in range(16):
            readings.append(self.held())
            time.sleep(0.5)
        return Held(
            min(reading.memory for reading in readings),
            min(reading.files for reading in readings),
            min(reading.at_workers for reading in readings),
        )

    def _look_for_leftovers(self, before: Held, memory: Sequence[int], total: int, kind: str) -> None:
        what = f"{total:,} {kind}"
        grown = growth(memory)
        print(f"memory grew by {grown / 1e6:.1f} MB from step 2 on")
        if grown > TOLERANCE and total >= ENOUGH:
            self.faults.append(f"memory grew by {grown / 1e6:.1f} MB over {what}")

        def as_before() -> bool:
            now = self.held()
            return now.files <= before.files and now.at_workers <= before.at_workers and not [*counted(self._stats())]

        if wait_until(as_before, SETTLE_WITHIN):
            print(f"after {what}: no file more than before, all counters zero\n", flush=True)
            return
        now = self.held()
        for name, had, has in (
            ("files", before.files, now.files),
            ("files of the workers", before.at_workers, now.at_workers),
        ):
            if has > had:
                self.faults.append(f"after {what}: {has} {name}, {had} before")
        self.faults += [f"after {what}: {counter}" for counter in counted(self._stats())]

    def _stats(self) -> Mapping[str, object]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._router.port}/bench/stats", timeout=10) as answer:
            stats: Mapping[str, object] = json.load(answer)
            return stats


def growth(memory: Sequence[int]) -> int:
    """Return by how much memory grew from the second step to the last; the first one fills caches."""
    return memory[-1] - memory[min(1, len(memory) - 1)]


def counted(stats: Mapping[str, object]) -> Iterator[str]:
    """Yield each counter of `router.stats()` that isn't zero, though no request is in flight."""
    for name in ("exchanges", "leases", "queued"):
        if stats[name]:
            yield f"{name} is {stats[name]}"
    workers = stats["workers"]
    assert isinstance(workers, list)
    for worker in workers:
        for name in ("requests", "prefill_tokens", "waiting_requests", "pending_prefill_tokens"):
            if worker[name]:
                yield f"{name} of {worker['url']} is {worker[name]}"


def wait_until(condition: Callable[[], bool], within: float) -> bool:
    """Return whether `condition` came true within so many seconds."""
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.25)
    return True


def main(argv: Sequence[str]) -> int:
    """Run the checks; 1 if something was left over."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.datapath.endurance", description="Does anything stay behind in the router?"
    )
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--disconnects", type=int, default=100_000)
    parser.add_argument("--at-once", type=int, default=64, help="clients that are about to leave at one time (64)")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments (0)")
    parser.add_argument("--candidate", choices=("asgi-router", "asgi-router-httpx"), default="asgi-router")
    options = parser.parse_args(argv)
    raise_file_limit()
    stop_on_signals()
    cores = Cores(0, 1)
    with tempfile.TemporaryDirectory(prefix="datapath-") as folder:
        try:
            suite = Suite(build(Path(folder)), Path(folder), cores, seconds=0, rounds=0)
        except CannotBuild as exc:
            print(exc, file=sys.stderr)
            return 2
        os.sched_setaffinity(0, {cores.load})
        known = {candidate.name: candidate for candidate in candidates(rivals.Environments(rivals.FOLDER))}
        with suite.new_worker() as one, suite.new_worker() as other:
            try:
                router = suite.start(known[options.candidate], (one, other))
            except CannotStart as exc:
                print(exc, file=sys.stderr)
                return 2
            with router:
                checks = Checks(router, (one, other), suite.programs.load, cores.load)
                if options.requests:
                    checks.requests(options.requests)
                if options.disconnects:
                    checks.disconnects(options.disconnects, options.at_once, options.seed)
    for fault in checks.faults:
        print(f"LEFT OVER: {fault}")
    return 1 if checks.faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

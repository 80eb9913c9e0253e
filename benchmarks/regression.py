"""Fails if an operation of the router has become slower, measured against a loop that never changes.

Run as `python -m benchmarks.regression [--record]`. The loop and the operations take turns in one process, each for
about a millisecond, for some seconds, so that what else runs on the machine slows all of them. Of each, the time counts
that a tenth of the turns stays below: the shortest comes from a moment that the others may not have had. The ratios are
compared with those in `reference.json`, which `--record` writes anew. What seems slower is measured again in other
processes: where one's memory happens to lie changes some ratios by a seventh for as long as it lives.

They hold for one version of Python on one kind of processor. Where none were recorded the check says so, and passes.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.operations import (
    KB,
    Operation,
    chat_body,
    extraction,
    hashing,
    image_body,
    leasing,
    pass_through,
    selection,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
REFERENCE = Path(__file__).with_name("reference.json")

LIMIT = 1.16
"""Times the recorded ratio at which the check fails: below a regression of 20 %, above what a busy machine does."""

ROUNDS = 150
"""Turns of each in one attempt, which takes three seconds of processor time."""

ATTEMPTS = 3
"""How often an operation must be found slower, each time by another process, a little later."""


def operations() -> list[Operation]:
    _, through = pass_through()
    return [
        extraction("extract 4 KB", chat_body(4 * KB), 150),
        extraction("extract 100 KB", chat_body(100 * KB), 10),
        extraction("extract 120 KB with an image", image_body(120 * KB), 8),
        hashing(),
        selection(32_000),  # small, or the ratio would show who else uses the processor's cache
        leasing(),
        through,
    ]


TEXT = b"all work and no play makes a dull day. " * 650


def reference() -> None:
    """Do a fixed amount of what the operations do: calls, dicts and numbers, and bytes that are copied and hashed."""
    known: dict[int, int] = {}
    for number in range(1_200):
        known[number & 31] = known.get(number & 31, 0) + len(str(number))

    for _ in range(6):
        text = TEXT.decode().encode()
        chain = 0
        for start in range(0, len(text), 500):
            chain = hash((chain, text[start : start + 500]))


def times_of(
    operations: Sequence[Operation], turns: int, clock: Callable[[], int] = time.thread_time_ns
) -> dict[str, float]:
    """Return the time of one call of each that a tenth of the turns stays below, in the clock's units."""
    samples: dict[str, list[float]] = {operation.name: [] for operation in operations}
    for _ in range(turns):
        for operation in operations:
            start = clock()
            for _ in range(operation.times):
                operation.run()
            samples[operation.name].append((clock() - start) / operation.times)

    return {name: sorted(taken)[len(taken) // 10] for name, taken in samples.items()}


def ratios_of(operations: Sequence[Operation], turns: int = ROUNDS) -> dict[str, float]:
    """Return how many times as long as the reference each takes."""
    loop = Operation("reference", reference, 1)
    # Before each of them, so that both see the machine in the same moments.
    times = times_of([turn for operation in operations for turn in (loop, operation)], turns)
    return {operation.name: times[operation.name] / times[loop.name] for operation in operations}


def ratios_elsewhere(names: Sequence[str]) -> dict[str, float]:
    """Return the ratios of some operations as another process finds them."""
    command = [sys.executable, "-m", "benchmarks.regression", "--print", *names]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=REFERENCE.parents[1])
    found: dict[str, float] = json.loads(done.stdout)
    return found


def slower(ratios: Mapping[str, float], recorded: Mapping[str, float]) -> list[str]:
    """Return the operations that take at least `LIMIT` times what was recorded."""
    return [name for name, ratio in ratios.items() if name in recorded and ratio >= LIMIT * recorded[name]]


def machine() -> str:
    """Return what ratios depend on: the version of Python, and the processor."""
    processor = platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), processor)
    version = ".".join(platform.python_version_tuple()[:2])
    return f"{platform.python_implementation()} {version}, {model}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Fail if an operation has become slower by a fifth.")
    parser.add_argument("--record", action="store_true", help="write what is measured to reference.json")
    parser.add_argument("--print", nargs="+", metavar="NAME", help="print the ratios of these operations, and no more")
    arguments = parser.parse_args()
    gc.disable()  # its time goes with what else is alive in this process
    if arguments.print:
        print(json.dumps(ratios_of([operation for operation in operations() if operation.name in arguments.print])))
        return 0

    references: dict[str, dict[str, float]] = json.loads(REFERENCE.read_text(encoding="utf-8"))
    recorded = references.get(machine(), {})
    if not recorded and not arguments.record:
        print(f"Nothing recorded for {machine()}: not checked. Record it with --record.")
        return 0

    ratios = ratios_of(operations())
    if arguments.record:
        attempts = [ratios, *(ratios_elsewhere(list(ratios)) for _ in range(ATTEMPTS - 1))]
        ratios = {name: statistics.median(attempt[name] for attempt in attempts) for name in ratios}
        references[machine()] = {name: round(ratio, 6) for name, ratio in ratios.items()}
        REFERENCE.write_text(json.dumps(references, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        recorded = references[machine()]
    for _ in range(ATTEMPTS - 1):
        if not (suspects := slower(ratios, recorded)):
            break
        again = ratios_elsewhere(suspects)
        ratios |= {name: min(ratio, ratios[name]) for name, ratio in again.items()}

    failed = slower(ratios, recorded)
    for name, ratio in ratios.items():
        change = f"{ratio / recorded[name] - 1:+.1%}" if name in recorded else "not recorded"
        print(f"{name:30} {ratio:9.5f} {change:>12}{'  SLOWER' if name in failed else ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

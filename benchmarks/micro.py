"""Measures what the steps of a request cost, each by itself and without any network.

Run as `python -m benchmarks.micro [--json FILE]`; README.md says what the numbers mean.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.operations import MB, extractions, hashing, leasing, pass_through, selection
from benchmarks.selection import SETTINGS, Figure, print_table

if TYPE_CHECKING:
    from benchmarks.operations import Operation


@dataclass(frozen=True)
class Cost:
    """Microseconds of processor time that an operation takes, and milliseconds for each megabyte that it reads."""

    name: str
    microseconds: Figure
    body_bytes: int

    @property
    def milliseconds_per_megabyte(self) -> float | None:
        return self.microseconds.median / 1_000 / (self.body_bytes / MB) if self.body_bytes else None


def measure(operation: Operation, rounds: int) -> Cost:
    samples = []
    for _ in range(rounds if operation.body_bytes <= 20 * MB else 3):
        start = time.thread_time_ns()
        for _ in range(operation.times):
            operation.run()
        samples.append((time.thread_time_ns() - start) / operation.times / 1_000)
    return Cost(operation.name, Figure.of(samples), operation.body_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what the steps of a request cost.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file, too")
    parser.add_argument("--rounds", type=int, default=51, help="rounds of each, of about a millisecond (default: 51)")
    arguments = parser.parse_args()

    direct, through = pass_through()
    _, through_all = pass_through(metrics_path="/metrics", admin_prefix="/admin", serve_models=True)
    everything = [
        *extractions(),
        hashing(),
        selection(SETTINGS.prefix_capacity_tokens),
        leasing(),
        direct,
        through,
        through_all,
    ]
    costs = [measure(operation, arguments.rounds) for operation in everything]

    print(f"Python {platform.python_version()}, {platform.machine()}. Processor time: median (min-max).\n")
    print_table(
        ["operation", "µs", "ms/MB"],
        [
            [cost.name, str(cost.microseconds), f"{per_megabyte:.2f}" if per_megabyte is not None else ""]
            for cost in costs
            for per_megabyte in [cost.milliseconds_per_megabyte]
        ],
    )

    if arguments.json:
        figures = {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "costs": [{**asdict(cost), "ms_per_mb": cost.milliseconds_per_megabyte} for cost in costs],
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Owns how results are shown: tables for people, JSON for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from benchmarks.datapath.candidates import DIRECT
from benchmarks.datapath.figures import DISTURBED, Figure

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchmarks.datapath.candidates import Candidate
    from benchmarks.datapath.figures import Results
    from benchmarks.datapath.scenarios import Scenario

NOTHING = "-"


def tables(
    results: Results, candidates: Sequence[Candidate], scenarios: Sequence[Scenario], reference: str
) -> Iterator[str]:
    """Yield the report, a line at a time."""
    measured = {sample.scenario for sample in results.samples}
    names = [candidate.name for candidate in candidates]
    names = [name for name in names if any(sample.candidate == name for sample in results.samples)]
    # What memory is measured under says nothing of CPU time: there each router is as busy as the streams are.
    costs = [scenario for scenario in scenarios if scenario.name in measured and not scenario.memory]
    if costs:
        heads = [f"{scenario.title}" for scenario in costs]
        yield "CPU time of the router in microseconds, for a request or an event: median (lowest-highest) of the rounds"
        yield from _table(["", *heads], ([name, *_costs(results, name, costs)] for name in names))
        yield ""
        yield f"The same as a multiple of {reference}'s: median of the ratios within each round"
        yield from _table(["", *heads], ([name, *_ratios(results, name, reference, costs)] for name in names))
        yield ""
    if {"c32", "c128"} <= measured:
        yield "What c=128 costs above c=32: " + ", ".join(_growths(results, names))
        yield ""
    for scenario in scenarios:
        if scenario.first_byte and scenario.name in measured:
            yield f"Milliseconds, {scenario.clients:,} streams: {scenario.events} events, {scenario.gap_ms} ms apart"
            heads = ["", "first byte p50", "above no router", "first byte p99", "event late p50", "event late p99"]
            yield from _table(heads, ([name, *_latencies(results, name, scenario)] for name in names))
            yield ""
        if scenario.lasting and scenario.name in measured:
            yield f"Prompts of {scenario.title}, {scenario.clients} at once"
            heads = ["", "CPU us", f"of {reference}'s", "requests", "idle MB", "above idle MB at the most"]
            yield from _table(heads, ([name, *_lasting(results, name, reference, scenario)] for name in names))
            yield ""
        elif scenario.memory and scenario.name in measured:
            yield f"{scenario.clients:,} streams at once: {scenario.events} events each, {scenario.gap_ms} ms apart"
            heads = ["", "idle MB", "above idle MB", "finished", "unfinished", "event late p99 ms", "latest event ms"]
            yield from _table(heads, ([name, *_memory(results, name, scenario)] for name in names))
            yield ""
    yield from _remarks(results)


def report(
    results: Results, candidates: Sequence[Candidate], missing: Mapping[str, str], run: Mapping[str, object]
) -> dict[str, object]:
    """Return all that was measured, and under which conditions, for `--json`."""
    return {
        "run": dict(run),
        "candidates": {
            candidate.name: {"about": candidate.about, "version": candidate.version} for candidate in candidates
        },
        "missing": dict(missing),
        "samples": [asdict(sample) | {"disturbed": sample.disturbed} for sample in results.samples],
    }


def _costs(results: Results, name: str, scenarios: Sequence[Scenario]) -> Iterator[str]:
    for scenario in scenarios:
        yield _spread(results.figure(name, scenario.name, "cpu_us"))


def _ratios(results: Results, name: str, reference: str, scenarios: Sequence[Scenario]) -> Iterator[str]:
    for scenario in scenarios:
        yield _median(results.ratio(name, reference, scenario.name, "cpu_us"), ".2f")


def _growths(results: Results, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        if growth := results.growth(name, "c32", "c128", "cpu_us"):
            yield f"{name} {growth.median:+.0%}"


def _latencies(results: Results, name: str, scenario: Scenario) -> Iterator[str]:
    yield _median(results.figure(name, scenario.name, "first_event_p50_ms"), ".2f")
    yield _median(results.added(name, DIRECT, scenario.name, "first_event_p50_ms"), ".2f")
    for value in ("first_event_p99_ms", "late_p50_ms", "late_p99_ms"):
        yield _median(results.figure(name, scenario.name, value), ".2f")


def _lasting(results: Results, name: str, reference: str, scenario: Scenario) -> Iterator[str]:
    yield _spread(results.figure(name, scenario.name, "cpu_us"))
    yield _median(results.ratio(name, reference, scenario.name, "cpu_us"), ".2f")
    for value in ("done", "idle_mb", "added_mb"):
        yield _median(results.figure(name, scenario.name, value), ",.0f")


def _memory(results: Results, name: str, scenario: Scenario) -> Iterator[str]:
    for value in ("idle_mb", "added_mb", "done", "unfinished", "late_p99_ms", "late_max_ms"):
        yield _median(results.figure(name, scenario.name, value), ",.0f")


def _remarks(results: Results) -> Iterator[str]:
    problems: dict[tuple[str, str], list[str]] = {}
    for sample in results.samples:
        for problem in sample.problems:
            problems.setdefault((sample.candidate, sample.scenario), []).append(
                f"{problem} in round {sample.round + 1}"
            )
    for (candidate, scenario), found in problems.items():
        yield f"{candidate}, {scenario}: {', '.join(found)}"
    count = f"{len(results.disturbed())} of {len(results.samples)}"
    yield f"{count} runs were disturbed: over {DISTURBED:.0%} of the router's core went to others, or was stolen"
    for what in ("others", "steal"):
        if spread := Figure.of(getattr(sample, what) for sample in results.samples):
            yield f"  {what}: {spread.median:.0%} of the router's core in the median, {spread.high:.0%} at the most"
    if any(sample.cpu_source == "stat" for sample in results.samples):
        yield "Some CPU times are in clock ticks: threads ended during a run, or this kernel has no schedstat"


def _median(figure: Figure | None, form: str) -> str:
    return NOTHING if figure is None else format(figure.median, form)


def _spread(figure: Figure | None) -> str:
    if figure is None:
        return NOTHING
    form = ".1f" if figure.median < 10 else ",.0f"
    if figure.rounds == 1:
        return format(figure.median, form)
    return f"{figure.median:{form}} ({figure.low:{form}}-{figure.high:{form}})"


def _table(heads: Sequence[str], rows: Iterator[list[str]]) -> Iterator[str]:
    lines = [list(heads), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    for cells in lines:
        first, *others = (
            cell.ljust(widths[0]) if not place else cell.rjust(widths[place]) for place, cell in enumerate(cells)
        )
        yield "| " + " | ".join([first, *others]) + " |"

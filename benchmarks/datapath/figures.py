"""Owns what becomes of the readings: figures of one run, medians of several, ratios between candidates. No I/O."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

DISTURBED = 0.05
"""Share of the router's core that others had, or that was stolen, above which a run counts as disturbed."""


@dataclass(frozen=True)
class Sample:
    """One candidate under one scenario in one round."""

    candidate: str
    scenario: str
    round: int
    values: dict[str, float]
    """By the figure's name: "cpu_us" of one request or event, "first_event_p50_ms", and so on."""
    cpu_source: str
    """"schedstat" or "stat": from where the CPU time is known."""
    steal: float
    """The share of the run that the hypervisor took from the router's core."""
    others: float
    """The share of the run in which other processes ran on the router's core."""
    load_core_busy: float
    """The share of the run in which the core of the load and the workers was busy, with whatever."""
    problems: tuple[str, ...] = ()
    """What did not go as it should, for people."""

    @property
    def disturbed(self) -> bool:
        """Whether others were in its way."""
        return self.steal > DISTURBED or self.others > DISTURBED


@dataclass(frozen=True)
class Figure:
    """One figure of one candidate, over all rounds."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Figure | None:
        """Return the median and the extremes; None of nothing."""
        values = list(values)
        if not values:
            return None
        return cls(statistics.median(values), min(values), max(values), len(values))


def micros_per_unit(cpu_seconds: float, units: int) -> float | None:
    """Return microseconds of CPU time for one request or event; None if there were none."""
    return cpu_seconds * 1e6 / units if units else None


def share_of_others(core_busy: float, own: float, elapsed: float) -> float:
    """Return the share of a core that went to others, who can't have had less than nothing.

    Args:
        core_busy: seconds in which the core ran any process.
        own: seconds of the processes that belong there.
        elapsed: seconds of the run.
    """
    return max(0.0, core_busy - own) / elapsed if elapsed else 0.0


class Results:
    """All samples of a run, and what they amount to."""

    def __init__(self, samples: Iterable[Sample] = ()) -> None:
        self.samples: list[Sample] = list(samples)

    def figure(self, candidate: str, scenario: str, name: str) -> Figure | None:
        """Return the median of the rounds; None if the candidate has no such figure."""
        return Figure.of(self._by_round(scenario, name)[candidate].values())

    def ratio(self, candidate: str, reference: str, scenario: str, name: str) -> Figure | None:
        """Return the median of the rounds' own ratios, since a round's runs stood next to each other."""
        rounds = self._by_round(scenario, name)
        theirs = rounds[reference]
        return Figure.of(value / theirs[n] for n, value in rounds[candidate].items() if theirs.get(n))

    def added(self, candidate: str, reference: str, scenario: str, name: str) -> Figure | None:
        """Return the median of what a figure is above the reference's, round by round."""
        rounds = self._by_round(scenario, name)
        theirs = rounds[reference]
        return Figure.of(value - theirs[n] for n, value in rounds[candidate].items() if n in theirs)

    def growth(self, candidate: str, small: str, large: str, name: str) -> Figure | None:
        """Return what a figure is under one scenario above another, as a share, round by round."""
        before, after = self._by_round(small, name)[candidate], self._by_round(large, name)[candidate]
        return Figure.of(value / before[n] - 1 for n, value in after.items() if before.get(n))

    def disturbed(self) -> list[Sample]:
        """Return the samples that others were in the way of."""
        return [sample for sample in self.samples if sample.disturbed]

    def _by_round(self, scenario: str, name: str) -> defaultdict[str, dict[int, float]]:
        found: defaultdict[str, dict[int, float]] = defaultdict(dict)
        for sample in self.samples:
            if sample.scenario == scenario and name in sample.values:
                found[sample.candidate][sample.round] = sample.values[name]
        return found

"""Shows how readings of the data path's benchmark become figures, and figures a report."""

from __future__ import annotations

import json

import pytest

from benchmarks.datapath.__main__ import chosen, parse
from benchmarks.datapath.candidates import Candidate
from benchmarks.datapath.endurance import counted, growth
from benchmarks.datapath.figures import Figure, Results, Sample, micros_per_unit, share_of_others
from benchmarks.datapath.kernel import CpuTime
from benchmarks.datapath.native import LoadResult
from benchmarks.datapath.report import report, tables
from benchmarks.datapath.scenarios import QUICK, SCENARIOS

LINE = {
    "done": 7, "errors": 1, "not_ok": 2, "unfinished": 3, "seconds": 0.5, "events": 140,
    "latency_p50": 1.0, "latency_p99": 2.0, "latency_max": 3.0, "first_event_p50": 4.0, "first_event_p99": 5.0,
    "first_event_max": 6.0, "late_p50": 7.0, "late_p99": 8.0, "late_max": 9.0,
}  # fmt: skip
C32 = SCENARIOS[0]


def sample(candidate: str, number: int, cpu_us: float, scenario: str = "c32", *, others: float = 0.0) -> Sample:
    """Return one measurement."""
    return Sample(candidate, scenario, number, {"cpu_us": cpu_us}, "schedstat", 0.0, others, 0.5)


def candidate(name: str) -> Candidate:
    """Return a candidate that can't be started."""
    return Candidate(name, "a router", "1.0", None)


def test_cpu_time_is_divided_by_what_was_done() -> None:
    """Three milliseconds for ten requests are 300 microseconds each; for no request there is no figure."""
    assert micros_per_unit(0.003, 10) == pytest.approx(300)
    assert micros_per_unit(0.003, 0) is None


def test_others_are_what_the_core_did_beside_us() -> None:
    """Two clocks of different grain never make a negative share."""
    assert share_of_others(1.5, 1.0, 2.0) == pytest.approx(0.25)
    assert share_of_others(0.99, 1.0, 2.0) == 0.0


def test_a_figure_is_the_median_of_its_rounds() -> None:
    """One round in which the machine was busy moves the extremes only."""
    results = Results([sample("a", 0, 10.0), sample("a", 1, 90.0), sample("a", 2, 12.0)])
    assert results.figure("a", "c32", "cpu_us") == Figure(12.0, 10.0, 90.0, 3)
    assert results.figure("b", "c32", "cpu_us") is None


def test_a_ratio_is_taken_within_a_round() -> None:
    """Where the machine is twice as slow in one round, the ratio stays; a round that only one has doesn't count."""
    results = Results(
        [sample("a", 0, 10.0), sample("b", 0, 5.0), sample("a", 1, 20.0), sample("b", 1, 10.0), sample("a", 2, 99.0)]
    )
    assert results.ratio("a", "b", "c32", "cpu_us") == Figure(2.0, 2.0, 2.0, 2)


def test_what_is_added_and_how_it_grows() -> None:
    """Both compare readings of one round: with another candidate's, and with another scenario's."""
    results = Results([sample("a", 0, 10.0), sample("direct", 0, 4.0), sample("a", 0, 12.0, "c128")])
    added = results.added("a", "direct", "c32", "cpu_us")
    growth_found = results.growth("a", "c32", "c128", "cpu_us")
    assert added is not None
    assert growth_found is not None
    assert added.median == pytest.approx(6.0)
    assert growth_found.median == pytest.approx(0.2)


def test_a_run_with_others_on_its_core_is_disturbed() -> None:
    """A reader is told which runs stood in a crowd."""
    crowded = sample("a", 1, 10.0, others=0.4)
    assert Results([sample("a", 0, 10.0), crowded]).disturbed() == [crowded]


def test_cpu_time_counts_threads_that_began_meanwhile() -> None:
    """Nanoseconds of all threads alive at the end, as long as none has ended."""
    before = CpuTime({1: 1_000_000_000}, 1.0)
    assert before.until(CpuTime({1: 1_500_000_000, 2: 250_000_000}, 1.7)) == (0.75, "schedstat")


def test_cpu_time_of_an_ended_thread_is_in_the_ticks() -> None:
    """Its nanoseconds went with it, so the ticks of its process count."""
    seconds, source = CpuTime({1: 10, 2: 10}, 1.0).until(CpuTime({1: 20}, 1.7))
    assert seconds == pytest.approx(0.7)
    assert source == "stat"


def test_the_loads_line_is_read() -> None:
    """Every field has its place; one that is missing is an error and no zero."""
    assert LoadResult.parse(json.dumps(LINE)) == LoadResult(7, 1, 2, 3, 0.5, 140, *map(float, range(1, 10)))
    with pytest.raises(KeyError):
        LoadResult.parse("{}")


def test_the_tables_show_what_was_measured() -> None:
    """A row for each candidate with a sample, and none for one that is missing."""
    results = Results([sample("a", 0, 100.0), sample("a", 0, 110.0, "c128"), sample("b", 0, 50.0)])
    lines = [*tables(results, [candidate("a"), candidate("b"), candidate("absent")], SCENARIOS, "b")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    assert ["a", "100", "110"] in rows
    assert ["a", "2.00", "-"] in rows
    assert ["b", "50", "-"] in rows
    assert "What c=128 costs above c=32: a +10%" in lines
    assert not any("absent" in line for line in lines)


def test_what_lasts_has_a_table_of_its_own() -> None:
    """Minutes of new prompts are shown with the memory that they take, and are no column among the short runs."""
    values = {"cpu_us": 100.0, "done": 5_000.0, "idle_mb": 60.0, "added_mb": 20_000.0}
    lasting = Sample("a", "100k-lasting", 0, values, "schedstat", 0.0, 0.0, 0.5)
    results = Results([sample("a", 0, 30.0), sample("b", 0, 50.0), lasting, sample("b", 0, 50.0, "100k-lasting")])
    lines = [*tables(results, [candidate("a"), candidate("b")], SCENARIOS, "b")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    assert ["a", "30"] in rows
    assert ["a", "100", "2.00", "5,000", "60", "20,000"] in rows
    assert ["b", "50", "1.00", "-", "-", "-"] in rows


def test_the_report_is_json() -> None:
    """All readings are in it, with why a candidate is missing."""
    results = Results([sample("a", 0, 100.0, others=0.4)])
    said = json.loads(json.dumps(report(results, [candidate("a")], {"b": "not installed"}, {"rounds": 1})))
    assert said["missing"] == {"b": "not installed"}
    assert said["samples"][0]["values"] == {"cpu_us": 100.0}
    assert said["samples"][0]["disturbed"] is True


def test_the_options_choose() -> None:
    """Names choose in the order of the tables; a name that isn't known is an error that says which are."""
    options = parse(["--quick", "--scenarios", "c128,c32"])
    assert options.quick
    assert [scenario.name for scenario in chosen(SCENARIOS, options.scenarios, QUICK, "scenario")] == ["c32", "c128"]
    assert [scenario.name for scenario in chosen(SCENARIOS, None, QUICK, "scenario")] == [*QUICK]
    with pytest.raises(ValueError, match="no such scenario: c33"):
        chosen(SCENARIOS, ["c33"], QUICK, "scenario")


def test_a_quick_run_is_shorter() -> None:
    """No scenario takes longer, or sends more, than in a whole run."""
    for scenario in SCENARIOS:
        quick = scenario.quick()
        assert quick.seconds <= scenario.seconds
        assert quick.clients <= scenario.clients
        assert (quick.requests or 0) <= (scenario.requests or 0)


def test_runs_never_share_prompts() -> None:
    """The number of the first prompt reaches the load, or a router would know the prompts of the run before."""
    arguments = C32.arguments(1.0, 3_000_000)
    assert arguments[arguments.index("-i") + 1] == "3000000"


def test_growth_leaves_out_the_first_step() -> None:
    """Caches fill at the beginning: what comes after must be flat."""
    assert growth([10, 50, 51, 52]) == 2
    assert growth([10]) == 0


def test_counters_left_over_are_named() -> None:
    """Each counter that isn't zero is told with its worker; what the index holds is no counter."""
    worker = {"url": "http://w", "requests": 0, "prefill_tokens": 7, "waiting_requests": 0, "pending_prefill_tokens": 0}
    stats = {"exchanges": 1, "leases": 0, "queued": 0, "workers": [worker | {"prefix_blocks": 9}]}
    assert [*counted(stats)] == ["exchanges is 1", "prefill_tokens of http://w is 7"]

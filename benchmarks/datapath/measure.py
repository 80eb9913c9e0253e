"""Owns one measurement: one candidate under one load, with the kernel's accounts before and after."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.datapath.figures import Sample, micros_per_unit, share_of_others
from benchmarks.datapath.kernel import CoreTime, CpuTime, resident_bytes
from benchmarks.datapath.processes import awake, run_load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from benchmarks.datapath.native import LoadResult
    from benchmarks.datapath.scenarios import Scenario

SETTLE = 0.3
"""Seconds between a warm-up and the reading of idle memory."""

PROMPTS_A_RUN = 1_000_000
"""The numbers of prompts that a run may use, so that no other run has the same."""


@dataclass(frozen=True)
class Cores:
    """Where things run."""

    router: int
    load: int
    """The load, the mock workers, and the benchmark itself."""


@dataclass(frozen=True)
class Target:
    """What is measured: a process tree that listens on a port, and the core to which it is bound."""

    candidate: str
    pid: int
    port: int
    core: int


class Meter:
    """Measures, one run after the other.

    Args:
        load: the compiled load.
        cores: where things run.
        seconds: the length of a run.
    """

    def __init__(self, load: Path, cores: Cores, seconds: float) -> None:
        self._load = load
        self._cores = cores
        self._seconds = seconds
        self._runs = 0

    def sample(self, target: Target, scenario: Scenario, round_number: int) -> Sample:
        """Warm up, then measure."""
        warm_up = scenario.warm_up()
        self._run(warm_up, target.port, min(self._seconds * warm_up.seconds, max(0.3, self._seconds / 4)))
        if scenario.memory:
            time.sleep(SETTLE)
        idle = peak = resident_bytes(target.pid)

        def look_at_memory() -> None:
            nonlocal peak
            peak = max(peak, resident_bytes(target.pid))

        with ExitStack() as stack:
            loops = stack.enter_context(awake({target.core, self._cores.load})) if scenario.first_byte else {}
            account = _Account(target, self._cores.load, loops.get(target.core))
            seconds = self._seconds * scenario.seconds
            result = self._run(scenario, target.port, seconds, look_at_memory if scenario.memory else None)
            used = account.close()

        return Sample(
            candidate=target.candidate,
            scenario=scenario.name,
            round=round_number,
            values=dict(_values(scenario, result, used.cpu, idle, peak)),
            cpu_source=used.source,
            steal=used.steal,
            # On the core of the load nobody can tell what belongs there and what doesn't.
            others=used.others if target.core != self._cores.load else 0.0,
            load_core_busy=used.load_core_busy,
            problems=tuple(_problems(scenario, result)),
        )

    def _run(
        self, scenario: Scenario, port: int, seconds: float, meanwhile: Callable[[], None] | None = None
    ) -> LoadResult:
        self._runs += 1
        arguments = scenario.arguments(seconds, self._runs * PROMPTS_A_RUN)
        return run_load(self._load, port, arguments, self._cores.load, meanwhile)


@dataclass(frozen=True)
class _Used:
    cpu: float
    source: str
    steal: float
    others: float
    load_core_busy: float


class _Account:
    """The kernel's accounts from its making to `close`; `loop` is the process that keeps the core awake, if any."""

    def __init__(self, target: Target, load_core: int, loop: int | None) -> None:
        self._target = target
        self._load_core = load_core
        self._loop = loop
        self._loop_cpu = CpuTime.read(loop) if loop else None
        self._core, self._other_core = CoreTime.read(target.core), CoreTime.read(load_core)
        self._cpu = CpuTime.read(target.pid)
        self._began = time.monotonic()

    def close(self) -> _Used:
        cpu, source = self._cpu.until(CpuTime.read(self._target.pid))
        elapsed = time.monotonic() - self._began
        core, other_core = CoreTime.read(self._target.core), CoreTime.read(self._load_core)
        loop_cpu = self._loop_cpu.until(CpuTime.read(self._loop))[0] if self._loop and self._loop_cpu else 0.0
        return _Used(
            cpu,
            source,
            steal=(core.steal - self._core.steal) / elapsed,
            others=share_of_others(core.busy - self._core.busy, cpu + loop_cpu, elapsed),
            load_core_busy=(other_core.busy - self._other_core.busy) / elapsed,
        )


def _values(scenario: Scenario, result: LoadResult, cpu: float, idle: int, peak: int) -> Iterator[tuple[str, float]]:
    per_unit = micros_per_unit(cpu, result.events if scenario.unit == "event" else result.done)
    if per_unit is not None:
        yield "cpu_us", per_unit
    yield "cpu_s", cpu
    yield "done", result.done
    yield "unfinished", result.unfinished
    yield "per_second", result.done / result.seconds if result.seconds else 0.0
    yield "latency_p50_ms", result.latency_p50 / 1000
    yield "latency_p99_ms", result.latency_p99 / 1000
    if scenario.events:
        yield "first_event_p50_ms", result.first_event_p50 / 1000
        yield "first_event_p99_ms", result.first_event_p99 / 1000
        yield "late_p50_ms", result.late_p50 / 1000
        yield "late_p99_ms", result.late_p99 / 1000
        yield "late_max_ms", result.late_max / 1000
    if scenario.memory:
        yield "idle_mb", idle / 1e6
        yield "added_mb", (peak - idle) / 1e6


def _problems(scenario: Scenario, result: LoadResult) -> Iterator[str]:
    if result.errors:
        yield f"{result.errors} broken connections"
    if result.not_ok:
        yield f"{result.not_ok} answers that are not 200"
    if result.unfinished:
        yield f"{result.unfinished} unfinished"
    if scenario.events and result.done and result.events < scenario.events * result.done:
        yield f"{scenario.events * result.done - result.events} events are missing"

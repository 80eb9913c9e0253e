"""Owns the order of a run: all are started, then scenario by scenario, round by round, candidate by candidate."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from benchmarks.datapath.figures import Results
from benchmarks.datapath.measure import Meter, Target
from benchmarks.datapath.processes import CannotStart, Server, free_port

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.datapath.candidates import Candidate
    from benchmarks.datapath.figures import Sample
    from benchmarks.datapath.measure import Cores
    from benchmarks.datapath.native import Programs
    from benchmarks.datapath.scenarios import Scenario

WORKERS = 2


@dataclass
class Suite:
    """One run of the benchmark.

    Attributes:
        programs: the mock worker and the load.
        folder: for logs and files of the candidates.
        cores: where things run.
        seconds: the length of a run.
        rounds: how often all is measured.
        results: what has been measured so far.
        missing: why a candidate could not be measured, by its name.
    """

    programs: Programs
    folder: Path
    cores: Cores
    seconds: float
    rounds: int
    results: Results = field(default_factory=Results)
    missing: dict[str, str] = field(default_factory=dict)

    def run(self, candidates: Sequence[Candidate], scenarios: Sequence[Scenario]) -> None:
        """Measure all candidates under all scenarios. One that doesn't start is noted as missing from then on."""
        meter = Meter(self.programs.load, self.cores, self.seconds)
        self.missing |= {candidate.name: candidate.missing for candidate in candidates if candidate.missing}
        with ExitStack() as stack:
            workers = [stack.enter_context(self.new_worker()) for _ in range(WORKERS)]
            for worker in workers:
                worker.wait_until_it_answers()
            running = stack.enter_context(_Running(self, workers))
            for scenario in scenarios:
                for number in range(min(self.rounds, scenario.rounds or self.rounds)):
                    present = [one for one in candidates if one.streams or not scenario.events]
                    # There and back, so that a drift of the machine doesn't go with a place in the order.
                    for candidate in present if number % 2 == 0 else reversed(present):
                        if candidate.name not in self.missing:
                            self._measure(meter, candidate, running, scenario, number)

    def new_worker(self) -> Server:
        """Start a mock worker on a port of its own."""
        port = free_port()
        command = [str(self.programs.worker), str(port)]
        return Server(command, port, core=self.cores.load, log=self.folder / f"worker-{port}.log")

    def start(self, candidate: Candidate, workers: Sequence[Server]) -> Server:
        """Start `candidate` in front of `workers`, and return it when it has answered.

        Raises:
            CannotStart: it doesn't.
        """
        assert candidate.launch is not None
        port = free_port()
        launch = candidate.launch(port, [worker.port for worker in workers], self.folder)
        log = self.folder / f"{candidate.name}.log"
        server = Server(launch.command, port, core=self.cores.router, log=log, environment=launch.environment)
        with ExitStack() as stack:
            stack.push(server)
            server.wait_until_it_answers()
            stack.pop_all()
        return server

    def _measure(self, meter: Meter, candidate: Candidate, running: _Running, scenario: Scenario, number: int) -> None:
        try:
            server = running.server(candidate, anew=scenario.memory)
            core = self.cores.router if candidate.launch else self.cores.load
            sample = meter.sample(Target(candidate.name, server.pid, server.port, core), scenario, number)
        except (CannotStart, OSError) as exc:
            self.missing[candidate.name] = str(exc)
            say(f"{candidate.name}: {exc}")
            return
        if ended := server.end():
            sample = replace(sample, problems=(*sample.problems, ended))
        self.results.samples.append(sample)
        say(line_of(sample))


class _Running:
    """The candidates that run: each from its first measurement to the end, or until it breaks down."""

    def __init__(self, suite: Suite, workers: Sequence[Server]) -> None:
        self._suite = suite
        self._workers = workers
        self._servers: dict[str, Server] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            for server in self._servers.values():
                stack.push(server)

    def server(self, candidate: Candidate, *, anew: bool) -> Server:
        """Return where `candidate` answers. It is started if it doesn't run, or if it is wanted `anew`.

        Raises:
            CannotStart: it doesn't start.
        """
        if candidate.launch is None:
            return self._workers[0]
        server = self._servers.get(candidate.name)
        if server is not None and (anew or server.end()):
            del self._servers[candidate.name]
            server.stop()
            server = None
        if server is None:
            say(f"starting {candidate.name}")
            server = self._servers[candidate.name] = self._suite.start(candidate, self._workers)
        return server


def line_of(sample: Sample) -> str:
    """Return one measurement in one line."""
    cost = f"{sample.values['cpu_us']:10.1f} us" if "cpu_us" in sample.values else "   nothing done"
    others = f"others {sample.others:.0%}, stolen {sample.steal:.0%}"
    problems = "".join(f"; {problem}" for problem in sample.problems)
    return f"{sample.scenario:>12} {sample.round + 1} {sample.candidate:18}{cost}  ({others}{problems})"


def say(text: str) -> None:
    """Tell how far the run is; the figures themselves go to standard output."""
    print(text, file=sys.stderr, flush=True)

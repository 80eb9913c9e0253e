"""Owns the command `python -m benchmarks.datapath`: what is measured, and where the report goes."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from benchmarks.datapath import rivals
from benchmarks.datapath.candidates import DIRECT, candidates
from benchmarks.datapath.measure import Cores
from benchmarks.datapath.native import CannotBuild, build
from benchmarks.datapath.processes import raise_file_limit, stop_on_signals
from benchmarks.datapath.report import report, tables
from benchmarks.datapath.scenarios import QUICK, SCENARIOS
from benchmarks.datapath.suite import Suite, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.datapath.candidates import Candidate
    from benchmarks.datapath.figures import Results
    from benchmarks.datapath.scenarios import Scenario

One = TypeVar("One", "Candidate", "Scenario")

REFERENCES = ("sglang-router", "asgi-router", "empty-asgi", DIRECT)
"""What the others are compared with, unless `--reference` names another: the first that was measured."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.datapath", description="CPU time of a request on its way through a router."
    )
    parser.add_argument("--candidates", type=_names, metavar="A,B", help="who is measured (all that are here)")
    parser.add_argument("--scenarios", type=_names, metavar="A,B", help="under which loads (all but those that last)")
    parser.add_argument("--rounds", type=int, help="how often (5; quick: 1)")
    parser.add_argument("--seconds", type=float, help="length of a run (1; quick: 0.5)")
    parser.add_argument("--reference", help="whom the others are compared with (sglang-router, if it is here)")
    parser.add_argument(
        "--quick", action="store_true", help="two minutes, to see that all works; the figures say little"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where all readings go")
    parser.add_argument(
        "--rivals", nargs="?", type=Path, const=rivals.FOLDER, metavar="FOLDER",
        help=f"install the rivals there first, if they aren't there ({rivals.FOLDER.name})",
    )  # fmt: skip
    parser.add_argument(
        "--python", default=sys.executable, metavar="FILE",
        help="the interpreter of our own candidates, which has what the project needs and uvicorn[standard] (this one)",
    )  # fmt: skip
    parser.add_argument("--router-core", type=int, default=0, help="the core of the routers (0)")
    parser.add_argument("--load-core", type=int, default=1, help="the core of load and workers (1)")
    parser.add_argument("--nice", type=int, help="niceness of everything that is measured; below 0 asks for rights")
    parser.add_argument("--list", action="store_true", help="say who and what there is, and end")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; the exit status."""
    options = parse(argv)
    environments = rivals.Environments((options.rivals or rivals.FOLDER).absolute())
    failed = install(environments) if options.rivals else {}
    known = candidates(environments, options.python)
    if options.list:
        print(listing(known))
        return 0

    cores = Cores(options.router_core, options.load_core)
    try:
        here = chosen(known, options.candidates, [c.name for c in known if not (options.quick and c.slow)], "candidate")
        usual = QUICK if options.quick else [load.name for load in SCENARIOS if not load.lasting]
        loads = chosen(SCENARIOS, options.scenarios, usual, "scenario")
        check(cores)
    except ValueError as exc:
        say(str(exc))
        return 2
    loads = [load.quick() for load in loads] if options.quick else loads
    raise_file_limit()
    stop_on_signals()
    os.sched_setaffinity(0, {cores.load})
    if options.nice is not None:
        os.setpriority(os.PRIO_PROCESS, 0, options.nice)  # and what we start inherits it
    conditions: dict[str, object] = {
        "began": datetime.now(UTC).isoformat(),
        "load_average": os.getloadavg(),
        "nice": options.nice,
    }
    with tempfile.TemporaryDirectory(prefix="datapath-") as folder:
        try:
            programs = build(Path(folder))
        except CannotBuild as exc:
            say(str(exc))
            return 2
        seconds = options.seconds or (0.5 if options.quick else 1.0)
        suite = Suite(programs, Path(folder), cores, seconds, options.rounds or (1 if options.quick else 5))
        suite.missing |= failed
        try:
            suite.run(here, loads)
        except KeyboardInterrupt:
            say("stopped: this is what there is so far")

    print(heading(suite, here))
    for line in tables(suite.results, here, loads, options.reference or reference(suite.results)):
        print(line)
    if options.json:
        conditions |= {"machine": machine(), "cores": asdict(cores), "rounds": suite.rounds, "seconds": seconds}
        options.json.write_text(json.dumps(report(suite.results, here, suite.missing, conditions), indent=1) + "\n")
    return 0


def heading(suite: Suite, here: Sequence[Candidate]) -> str:
    """Return what stands above the tables: where this was measured, and who it was."""
    lines = [f"{machine()}; router on core {suite.cores.router}; {suite.rounds} rounds of {suite.seconds:g} s"]
    for one in here:
        missing = suite.missing.get(one.name)
        known = f"missing: {missing}" if missing else one.version
        lines.append(f"  {one.name}: " + "; ".join(filter(None, (one.about, known))))
    return "\n".join([*lines, ""])


def reference(results: Results) -> str:
    """Return whom the others are compared with, if nobody is named."""
    measured = {sample.candidate for sample in results.samples}
    return next((name for name in REFERENCES if name in measured), DIRECT)


def install(environments: rivals.Environments) -> dict[str, str]:
    """Install the rivals that aren't there; why some can't be, by their names."""
    failed = {}
    for rival in rivals.REQUIREMENTS:
        if environments.is_made(rival):
            continue
        say(f"installing {rival} into {environments.folder}")
        if why := environments.make(rival):
            failed["aiohttp-proxy" if rival == "aiohttp" else rival] = why
    return failed


def chosen(known: Sequence[One], names: Sequence[str] | None, default: Sequence[str], kind: str) -> list[One]:
    """Return those of `known` that are named, in the order of `known`."""
    names = default if names is None else names
    if unknown := set(names) - {one.name for one in known}:
        raise ValueError(
            f"no such {kind}: {', '.join(sorted(unknown))}; there are {', '.join(one.name for one in known)}"
        )
    return [one for one in known if one.name in names]


def check(cores: Cores) -> None:
    """See that the cores are there, and apart."""
    if not {cores.router, cores.load} <= os.sched_getaffinity(0):
        raise ValueError(f"cores {cores.router} and {cores.load} are wanted, but there are {os.sched_getaffinity(0)}")
    if cores.router == cores.load:
        raise ValueError("the router needs a core of its own: --router-core and --load-core are the same")


def machine() -> str:
    """Return what this runs on."""
    models = {
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith(("model name", "Model"))
    }
    return f"{os.cpu_count()} cores of {', '.join(models) or platform.machine()}, Linux {platform.release()}"


def listing(known: Sequence[Candidate]) -> str:
    """Return who and what there is."""
    lines = ["candidates"]
    lines += ["; ".join(filter(None, (f"  {one.name:18} {one.about}", one.missing or one.version))) for one in known]
    lines += ["scenarios", *(f"  {one.name:18} {one.title}" for one in SCENARIOS)]
    return "\n".join(lines)


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

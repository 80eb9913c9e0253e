"""Owns the command `asgi-router`: what is read, what is run, what is printed."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from asgi_router.replay.apart import replay_of
from asgi_router.replay.arguments import add_options, setup_of
from asgi_router.replay.choosers import OWN, chooser
from asgi_router.replay.generated import GENERATED
from asgi_router.replay.report import COLUMNS, Figures, as_json, cells, figures, plain_table
from asgi_router.replay.traces import Trace, read_trace
from asgi_router.scheduling.policies import PolicyOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.progress import Progress, TaskID

    from asgi_router.replay.simulate import Outcome, Setup

SHOWN_BROKEN_LINES = 10
EXTRA = "pip install 'asgi-router[replay]'"


class Failed(Exception):
    """The command can't go on; its text says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status: 0, or 2 where something in the arguments or the trace is wrong."""
    parser = argparse.ArgumentParser(prog="asgi-router", description="A cache-aware router for LLM workers.")
    commands = parser.add_subparsers(dest="command", required=True)
    text = "Replay a trace against simulated workers, and compare what each policy would have done."
    add_options(commands.add_parser("replay", help=text, description=text))
    options = parser.parse_args(arguments)
    try:
        _replay(options)
    except (Failed, argparse.ArgumentTypeError) as exc:
        sys.stderr.write(f"asgi-router: {exc}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _replay(options: argparse.Namespace) -> None:
    if options.plot is not None:
        _check_matplotlib()  # before minutes are spent on what can't be drawn
    trace = _trace(options)
    setup = setup_of(options, trace.seconds)
    outcomes = _run(trace, setup, options.policy)
    lines = [figures(outcome) for outcome in outcomes]
    best = trace.best_hit_rate()
    if options.json:
        summary = {
            "trace": options.trace,
            "requests": len(trace.requests),
            "broken_lines": len(trace.broken),
            "best_hit_rate": best,
            "policies": as_json(lines),
        }
        sys.stdout.write(json.dumps(summary, indent=2) + "\n")
    else:
        _print(lines, _title(options, trace, setup), _notes(lines, best))
    if options.plot is not None:
        _plot(outcomes, options, trace, setup, best)


def _trace(options: argparse.Namespace) -> Trace:
    made = GENERATED.get(options.trace)
    if made is not None:
        count = min(options.requests, options.limit or options.requests)
        return made(requests=count, rate=options.rate or 60.0, seed=options.seed)
    try:
        trace = read_trace(Path(options.trace), seed=options.seed, rate=options.rate or 1.0, limit=options.limit)
    except OSError as exc:
        raise Failed(f"{options.trace}: {exc.strerror or 'cannot be read'}") from None
    for line in trace.broken[:SHOWN_BROKEN_LINES]:
        sys.stderr.write(f"{options.trace}, line {line.number}: {line.reason}; passed over\n")
    if len(trace.broken) > SHOWN_BROKEN_LINES:
        sys.stderr.write(f"{options.trace}: {len(trace.broken)} lines passed over in all\n")
    if not trace.requests:
        raise Failed(f"{options.trace}: no requests in it")
    return trace


def _run(trace: Trace, setup: Setup, names: Sequence[str]) -> list[Outcome]:
    # Others' rules were not made for a picture that changes its size: they are told how much the caches hold.
    told = replace(setup, index_tokens=None, adapt=False)

    def run(name: str, tell: Callable[[int], None] = lambda done: None) -> Outcome:
        return replay_of(trace, setup if name in OWN else told, name, chooser(name, PolicyOptions()), tell)

    try:
        from rich.console import Console  # what needs an extra is loaded where it is used
        from rich.progress import Progress
    except ImportError:
        return [run(name) for name in names]
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        outcomes = []
        for name in names:
            task = progress.add_task(name, total=len(trace.requests))
            outcomes.append(run(name, partial(_advance, progress, task)))
        return outcomes


def _advance(progress: Progress, task: TaskID, done: int) -> None:
    progress.update(task, completed=done)


def _title(options: argparse.Namespace, trace: Trace, setup: Setup) -> str:
    rate = len(trace.requests) / trace.seconds * setup.speed if trace.seconds else 0.0
    workers = f"{setup.workers} workers" + (f", {setup.prefill_workers} for prefill," if setup.prefill_workers else "")
    return (
        f"{Path(options.trace).name}: {len(trace.requests)} requests, {rate:.2f} a second, to {workers} "
        f"with {setup.model.cache_tokens:,} tokens of cache"
    )


def _notes(lines: Sequence[Figures], best: float) -> str:
    notes = [f"One cache that never forgets would hit {best * 100:.1f} %. Seconds to the first token (TTFT)."]
    notes += [
        f"{line.policy}: {line.failed} answers cut, {line.retried} requests tried anew, "
        f"{line.refused} refused as longer than a worker's cache"
        for line in lines
        if line.failed or line.retried or line.refused
    ]
    return "\n".join(notes)


def _print(lines: Sequence[Figures], title: str, notes: str) -> None:
    if sys.stdout.isatty():
        try:
            from rich.console import Console  # what needs an extra is loaded where it is used
            from rich.table import Table
        except ImportError:
            pass
        else:
            table = Table(title=title, caption=notes, caption_justify="left")
            for at, column in enumerate(COLUMNS):
                table.add_column(column, justify="right" if at else "left", no_wrap=True)
            fastest = min(lines, key=lambda line: line.ttft_mean)
            for line in lines:
                table.add_row(*cells(line), style="bold" if line is fastest else "")
            Console().print(table)
            return
    sys.stdout.write(f"{title}\n\n{plain_table(lines)}\n\n{notes}\n")


def _check_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise Failed(f"--plot needs matplotlib: {EXTRA}") from None


def _plot(outcomes: Sequence[Outcome], options: argparse.Namespace, trace: Trace, setup: Setup, best: float) -> None:
    from asgi_router.replay.plot import plot

    try:
        plot(outcomes, options.plot, _title(options, trace, setup), best)
    except (OSError, ValueError) as exc:
        raise Failed(f"--plot: {exc}") from None

"""Owns the options of `asgi-router replay`: what they are called, what they mean, which values make sense."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from asgi_router.replay.choosers import NAMES, ORACLE, OWN
from asgi_router.replay.generated import GENERATED
from asgi_router.replay.rivals import RIVALS
from asgi_router.replay.simulate import Restart, Setup
from asgi_router.replay.worker_model import WorkerModel
from asgi_router.settings import RouterSettings

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT_POLICIES = "prefill_cost,cache_aware,process_tokens,request_num,round_robin"
_MODEL = WorkerModel()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "trace",
        metavar="TRACE",
        help="a file: Mooncake's JSON lines, Azure's CSV, logged OpenAI-style requests in JSON lines, or this router's "
        f"log `asgi_router.requests`. Or a made load: {', '.join(GENERATED)}",
    )
    add = parser.add_argument
    add("--policy", type=_policies, default=DEFAULT_POLICIES, metavar="A,B,...", help=_policy_help())
    add("--workers", type=_whole(1, 1_000), default=8, help="how many workers (default: %(default)s)")
    add("--prefill-workers", type=_whole(1), metavar="N", help="N of them prefill only, and the others decode only")
    add("--speed", type=_positive, default=1.0, help="by which requests come faster than recorded (default: 1)")
    add(
        "--cache-tokens",
        type=_whole(1),
        default=_MODEL.cache_tokens,
        help="KV cache of a worker (default: %(default)s)",
    )
    add(
        "--index-tokens",
        type=_whole(0),
        default=RouterSettings.model_fields["prefix_capacity_tokens"].default,
        help="what our router believes at first that a worker can hold, its PREFIX_CAPACITY_TOKENS "
        "(default: %(default)s); others are told the truth",
    )
    add(
        "--no-adapt", action="store_true", help="and doesn't learn better from the workers' answers: PREFIX_ADAPT=false"
    )
    add(
        "--prefill-rate",
        type=_positive,
        default=_MODEL.prefill_rate,
        help="tokens a second that a worker prefills, attention apart (default: %(default).0f)",
    )
    add(
        "--batch-penalty",
        type=_not_negative,
        default=_MODEL.batch_penalty,
        help="milliseconds by which 100,000 tokens of context in the batch make a step longer (default: %(default)s)",
    )
    add("--worker-speeds", type=_speeds, default=(), metavar="A,B,...", help="of workers that aren't alike: 1,1,0.5")
    add(
        "--restart-worker",
        type=_restart,
        metavar="N[@SECONDS]",
        help="worker N, counted from 0, restarts then (default: in the middle), and is away for 10 s",
    )
    add("--seed", type=_whole(0), default=0, help="for all that is left to chance (default: 0)")
    add("--limit", type=_whole(1), help="read so many requests at the most")
    add("--requests", type=_whole(1, 10_000_000), default=20_000, help="of a made load (default: %(default)s)")
    add(
        "--rate",
        type=_positive,
        default=None,
        help="requests a second, of a made load (default: 60) and where a trace has no times (default: 1)",
    )
    add("--json", action="store_true", help="print JSON in place of the table")
    add("--plot", type=Path, metavar="FILE", help="draw a picture, too (needs asgi-router[replay])")


def setup_of(options: argparse.Namespace, seconds: float) -> Setup:
    """Return what the options ask for, of a trace that is `seconds` long.

    Raises:
        argparse.ArgumentTypeError: some of them don't go together.
    """
    restart = None
    if options.restart_worker is not None:
        worker, at = options.restart_worker
        if worker >= options.workers:
            raise argparse.ArgumentTypeError(f"--restart-worker: there are only {options.workers} workers, from 0 on")
        restart = Restart(worker=worker, at=seconds / options.speed / 2 if at is None else at)
    if len(options.worker_speeds) > options.workers:
        raise argparse.ArgumentTypeError(f"--worker-speeds: there are only {options.workers} workers")
    prefill_workers = options.prefill_workers or 0
    if prefill_workers >= options.workers:
        raise argparse.ArgumentTypeError("--prefill-workers: none of the --workers would be left to decode")
    if prefill_workers and restart is not None:
        raise argparse.ArgumentTypeError("--restart-worker is simulated only without --prefill-workers")
    return Setup(
        workers=options.workers,
        prefill_workers=prefill_workers,
        model=WorkerModel(
            cache_tokens=options.cache_tokens,
            prefill_rate=options.prefill_rate,
            batch_penalty=options.batch_penalty,
        ),
        speeds=options.worker_speeds,
        speed=options.speed,
        index_tokens=options.index_tokens,
        adapt=not options.no_adapt,
        seed=options.seed,
        restart=restart,
    )


def _policy_help() -> str:
    return (
        f"which policies, or `all`. Ours: {', '.join(OWN)}. Others' published rules: {', '.join(sorted(RIVALS))}. "
        f"{ORACLE}, which knows all queues and caches, is always added. (default: {DEFAULT_POLICIES})"
    )


def _policies(text: str) -> list[str]:
    names = list(NAMES) if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    for name in names or [text]:
        if name not in NAMES:
            raise argparse.ArgumentTypeError(f"no policy is called {name!r}: there are {', '.join(NAMES)}, and all")
    return list(dict.fromkeys([*(name for name in names if name != ORACLE), ORACLE]))


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no number")
    return value


def _positive(text: str) -> float:
    value = _number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def _not_negative(text: str) -> float:
    value = _number(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must not be below 0")
    return value


def _whole(least: int, most: int = 10**12) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be from {least} to {most}")
        return value

    return read


def _speeds(text: str) -> tuple[float, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _restart(text: str) -> tuple[int, float | None]:
    worker, at, seconds = text.partition("@")
    return _whole(0)(worker), _not_negative(seconds) if at else None

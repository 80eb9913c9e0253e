"""Owns the reading of a trace: a file in any of the known formats becomes requests in the order of their arrival.

A line that can't be used is noted with its number and passed over: a log of a million requests has a broken line.
What is kept of a request is its lengths and the hashes of its blocks; its text is gone when the line has been read.
"""

from __future__ import annotations

import csv
import random
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from asgi_router.replay.formats import BadLine, Line, read_csv, read_json
from asgi_router.replay.traced_request import TracedRequest, traced

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

MAX_SPREAD = 10.0
"""Seconds over which requests with one time stamp are spread at the most, whenever the next one comes."""


@dataclass(frozen=True, slots=True)
class BrokenLine:
    """A line that was passed over."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded requests, by arrival; the first one arrives at 0."""

    requests: list[TracedRequest]
    block_tokens: int
    broken: list[BrokenLine]

    @property
    def tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return self.requests[-1].arrival if self.requests else 0.0

    def best_hit_rate(self) -> float:
        """Return the share of prompt tokens that one cache which never forgets would have."""
        seen: set[int] = set()
        hits = 0
        for request in self.requests:
            matchable = min(len(request.blocks), (request.prompt_tokens - 1) // self.block_tokens)
            for block in request.blocks[:matchable]:
                if block not in seen:
                    break
                hits += self.block_tokens
            seen.update(request.blocks)
        return hits / max(1, self.tokens)


def read_trace(path: Path, *, seed: int = 0, rate: float = 1.0, limit: int | None = None) -> Trace:
    """Read the trace at `path`.

    Args:
        seed: for the arrivals that the trace leaves open.
        rate: requests a second, where the trace says no times.
        limit: how many requests are read at the most.

    Raises:
        OSError: the file can't be read.
    """
    broken: list[BrokenLine] = []
    lines: list[Line] = []
    sizes: set[int] = set()
    parents: dict[int, int | None] = {}
    for number, line in _lines(path):
        if isinstance(line, BadLine):
            broken.append(BrokenLine(number, str(line)))
            continue
        if sizes and line.block_tokens not in sizes:
            broken.append(BrokenLine(number, "blocks of another size than those before"))
            continue
        # A cache finds a block by what precedes it, too. An id that follows now this one and now that is no such hash.
        before = (None, *line.blocks)
        if any(parents.setdefault(block, parent) != parent for parent, block in zip(before, line.blocks, strict=False)):
            broken.append(BrokenLine(number, "a block's hash stands behind another one than before"))
            continue
        sizes.add(line.block_tokens)
        lines.append(line)
        if len(lines) == limit:
            break
    return Trace(list(_requests(lines, random.Random(seed), rate)), sizes.pop() if sizes else 1, broken)


def _lines(path: Path) -> Iterator[tuple[int, Line | BadLine]]:
    with path.open("rb") as file:
        columns: list[str] | None = None
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            if number == 1 and raw.lstrip(b"\xef\xbb\xbf").startswith(b"TIMESTAMP,"):
                columns = raw.decode("utf-8-sig", "replace").strip().split(",")
                continue
            try:
                yield number, read_json(raw) if columns is None else read_csv(_row(columns, raw))
            except BadLine as exc:
                yield number, exc


def _row(columns: list[str], raw: bytes) -> dict[str, str | None]:
    try:
        values = next(csv.reader([raw.decode()]))
    except (ValueError, csv.Error):
        raise BadLine("no valid row") from None
    if len(values) != len(columns):
        raise BadLine(f"{len(values)} columns, not {len(columns)}")
    return dict(zip(columns, values, strict=True))


def _requests(lines: list[Line], rng: random.Random, rate: float) -> Iterator[TracedRequest]:
    """Yield the requests in order, and let go of the lines."""
    if any(line.arrival is None for line in lines):
        arrivals = _at_rate(len(lines), rng, rate)
    else:
        lines.sort(key=_arrival)
        arrivals = _spread([_arrival(line) for line in lines], rng)
    first = 0.0
    lines.reverse()
    for number, arrival in enumerate(arrivals):
        first = arrival if number == 0 else first
        line = lines.pop()
        yield traced(
            arrival=arrival - first,
            tokens=line.tokens,
            output_tokens=line.output_tokens,
            blocks=line.blocks,
            model=line.model,
            session_id=line.session_id,
        )


def _arrival(line: Line) -> float:
    assert line.arrival is not None
    return line.arrival


def _at_rate(count: int, rng: random.Random, rate: float) -> Iterator[float]:
    now = 0.0
    for _ in range(count):
        yield now
        now += rng.expovariate(rate)


def _spread(arrivals: Iterable[float], rng: random.Random) -> Iterator[float]:
    """Yield the arrivals, those at one time spread at random over the time to the next.

    Mooncake's time stamps, for one, come in steps of three seconds, and no traffic does.
    """
    groups = [(time, len(list(group))) for time, group in groupby(arrivals)]
    for at, (time, count) in enumerate(groups):
        width = min(MAX_SPREAD, groups[at + 1][0] - time) if at + 1 < len(groups) else 0.0
        yield from sorted(time + rng.random() * width for _ in range(count)) if count > 1 else (time,)

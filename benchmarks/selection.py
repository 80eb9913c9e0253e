"""Measures what choosing a worker costs: the time of each step, and the memory of the prefix index.

Run as `python -m benchmarks.selection [--json FILE]`; README.md says what the numbers mean.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import time
import tracemalloc
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from asgi_router import RouterSettings, Worker
from asgi_router.body_fields import read_fields
from asgi_router.extraction import extract
from asgi_router.prefix_key import BYTES_PER_TOKEN, chat_key
from asgi_router.rope import Rope
from asgi_router.scheduling.blocks import block_hashes, weigh
from asgi_router.scheduling.breaker import Breaker
from asgi_router.scheduling.policies import POLICIES, PolicyOptions
from asgi_router.scheduling.prefix_index import PrefixIndex
from asgi_router.scheduling.scheduler import Scheduler
from asgi_router.scheduling.state import WorkerState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from asgi_router.scheduling.picture import Picture

    Blocks = tuple[int, ...]

PATH = "/v1/chat/completions"
MODEL = "model"
SETTINGS = RouterSettings()
BLOCK_BYTES = SETTINGS.prefix_block_bytes
CAPACITIES = sorted({62_500, 500_000, 1_000_000, 2_000_000, SETTINGS.prefix_capacity_tokens})


@dataclass(frozen=True)
class Figure:
    """Microseconds, or bytes: the median of the rounds, and the two extremes."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, rounds: Sequence[float]) -> Figure:
        return cls(statistics.median(rounds), min(rounds), max(rounds))

    def __str__(self) -> str:
        return f"{self.median:.1f} ({self.low:.1f}-{self.high:.1f})"


@dataclass(frozen=True)
class Selection:
    """Microseconds of one request's steps."""

    characters: int
    workers: int
    warm: bool
    parse: Figure
    key: Figure
    hash: Figure
    select: Figure
    release: Figure
    decision: Figure
    extract: Figure


@dataclass(frozen=True)
class Memory:
    """Bytes of one full index for each base block of its capacity, after or during one kind of traffic."""

    capacity_tokens: int
    capacity_blocks: int
    traffic: str
    bytes_per_block: float


def index_of(capacity_tokens: int) -> PrefixIndex:
    return PrefixIndex(capacity_tokens * BYTES_PER_TOKEN // BLOCK_BYTES, SETTINGS.prefix_ttl, time.monotonic)


def body_of(rng: random.Random, characters: int) -> bytes:
    """Return a chat request whose one message is this long, and shares its first block with no other."""
    words = f"{rng.random()} " + "".join(rng.choices(("all ", "work ", "and ", "no ", "play "), k=characters // 3))
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": words[:characters]}]}).encode()


def blocks_of(body: bytes) -> Blocks:
    return block_hashes(extract(body, PATH).key, BLOCK_BYTES, (MODEL,))


def record(index: Picture, blocks: Blocks) -> None:
    """Let a request with these blocks come and succeed."""
    index.unpin(blocks[: index.pin(blocks)], prefilled=True)


class Fleet:
    """Workers with full indexes and some requests in flight, as in the middle of a busy day."""

    def __init__(self, size: int, rng: random.Random, capacity: int = SETTINGS.prefix_capacity_tokens) -> None:
        self.states = [
            WorkerState(Worker(url=f"http://w{at}"), index_of(capacity), Breaker(5, 10.0, time.monotonic))
            for at in range(size)
        ]
        self.scheduler = Scheduler(POLICIES[SETTINGS.policy](PolicyOptions(), rng), block_bytes=BLOCK_BYTES)
        # Three times over, or the tables would have the good shape of new ones.
        for _ in range(3 * capacity * BYTES_PER_TOKEN // 8_000):
            blocks = blocks_of(body_of(rng, 8_000))
            for state in self.states:
                record(state.prefixes, blocks)
        for _ in range(4 * size):
            self.scheduler.select(self.states, extract(body_of(rng, rng.randrange(100, 2_000)), PATH))

    def warm(self, bodies: Sequence[bytes]) -> None:
        """Let worker i of n hold the first i/n of each prompt, so that each match needs its whole search."""
        for body in bodies:
            blocks = blocks_of(body)
            for at, state in enumerate(self.states, start=1):
                record(state.prefixes, blocks[: len(blocks) * at // len(self.states)])


STEPS = ("parse", "key", "hash", "select", "release", "decision", "extract")


def measure_selection(characters: int, workers: int, *, warm: bool, rounds: int) -> Selection:
    rng = random.Random(f"{characters} {workers} {warm}")
    fleet = Fleet(workers, rng)
    batch = max(4, 100_000 // characters)  # few enough that a warm batch does not push itself out of the index
    samples: dict[str, list[float]] = {step: [] for step in STEPS}
    for _ in range(rounds):
        total = dict.fromkeys(STEPS, 0)
        batches = 5
        for _ in range(batches):
            bodies = [body_of(rng, characters) for _ in range(batch)]
            if warm:
                fleet.warm(bodies)
            for body in bodies:
                for step, nanoseconds in zip(STEPS, time_one(fleet, body), strict=True):
                    total[step] += nanoseconds
        for step in STEPS:
            samples[step].append(total[step] / (batches * batch) / 1_000)

    figures = {step: Figure.of(samples[step]) for step in STEPS}
    return Selection(characters, workers, warm, **figures)


def time_one(fleet: Fleet, body: bytes) -> tuple[int, ...]:
    """Take one request through all steps; return the nanoseconds of each, in the order of `STEPS`."""
    clock = time.perf_counter_ns
    start = clock()
    request = extract(body, PATH)
    extracted = clock()
    parsed = read_fields(body)
    parse = clock()
    key = chat_key(parsed)
    keyed = clock()
    block_hashes(key.key, BLOCK_BYTES, (MODEL,))  # `select` does this once more
    hashed = clock()
    lease = fleet.scheduler.select(fleet.states, request)
    selected = clock()
    lease.first_byte(prefilled=True)
    lease.release()
    end = clock()
    steps = parse - extracted, keyed - parse, hashed - keyed, selected - hashed, end - selected
    return (*steps, keyed - parse + end - hashed, extracted - start)


def short_prompts(rng: random.Random) -> Iterator[Blocks]:
    """Yield different prompts of one block: none shares anything."""
    while True:
        yield block_hashes(Rope.of(rng.randbytes(BLOCK_BYTES)), BLOCK_BYTES)


def conversations(rng: random.Random) -> Iterator[Blocks]:
    """Yield turns of 40 conversations under 5 system prompts; a conversation ends after 8 turns on the average."""
    systems = [rng.randbytes(rng.choice((500, 2_000, 4_000, 8_000, 16_000))) for _ in range(5)]
    texts = [rng.choice(systems) for _ in range(40)]
    while True:
        at = rng.randrange(len(texts))
        texts[at] += rng.randbytes(int(rng.lognormvariate(7, 1)))
        yield block_hashes(Rope.of(texts[at]), BLOCK_BYTES)
        if rng.random() < 1 / 8:
            texts[at] = rng.choice(systems)


def long_prompts(rng: random.Random) -> Iterator[Blocks]:
    """Yield different prompts of 100,000 bytes."""
    while True:
        yield block_hashes(Rope.of(rng.randbytes(100_000)), BLOCK_BYTES)


TRAFFIC: dict[str, Callable[[random.Random], Iterator[Blocks]]] = {
    "conversations": conversations,
    "one-block prompts": short_prompts,
    "burst of 100,000-byte prompts in flight": long_prompts,
}


def measure_memory(capacity_tokens: int, traffic: str) -> Memory:
    rng = random.Random(traffic)
    prompts = TRAFFIC[traffic](rng)
    capacity = capacity_tokens * BYTES_PER_TOKEN // BLOCK_BYTES
    burst = traffic.startswith("burst")
    gc.collect()
    tracemalloc.start()
    try:
        empty = tracemalloc.get_traced_memory()[0]
        index = index_of(capacity_tokens)
        fresh = 0
        in_flight: deque[Blocks] = deque()
        # Ten times the capacity, or the tables would have the good shape of new ones.
        while fresh < 10 * capacity:
            blocks = next(prompts)
            fresh += weigh(blocks[index.match(blocks, len(blocks)) :])
            in_flight.append(blocks[: index.pin(blocks)])
            # Eight run at a time. The burst comes when the index is full of ended ones, and nothing ends any more.
            if len(in_flight) > 8 and not (burst and fresh > 9 * capacity):
                index.unpin(in_flight.popleft(), prefilled=True)
        if not burst:
            while in_flight:
                index.unpin(in_flight.popleft(), prefilled=True)
        held = len(index)
        del prompts, blocks, in_flight
        gc.collect()  # empties the interpreter's free lists, too: what is left is the index and its hashes
        size = tracemalloc.get_traced_memory()[0] - empty
    finally:
        tracemalloc.stop()

    if held < 0.95 * capacity:  # a longer block that goes as a whole leaves a hole
        raise RuntimeError(f"the index is not full: {index!r}")
    return Memory(capacity_tokens, capacity, traffic, size / capacity)


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, ["-" * width for width in widths], *rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the time of a selection and the memory of the prefix index.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file, too")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each time (default: 9)")
    arguments = parser.parse_args()

    selections = [
        measure_selection(characters, workers, warm=warm, rounds=arguments.rounds)
        for characters in (4_000, 100_000)
        for workers in (8, 64)
        for warm in (False, True)
    ]
    print(f"Python {platform.python_version()}, {platform.machine()}. Microseconds: median (min-max).\n")
    print_table(
        ["characters", "workers", "prompt", *STEPS],
        [
            [f"{row.characters:,}", str(row.workers), "warm" if row.warm else "cold"]
            + [str(getattr(row, step)) for step in STEPS]
            for row in selections
        ],
    )

    memory = [measure_memory(capacity, traffic) for capacity in CAPACITIES for traffic in TRAFFIC]
    print("\nMemory of a full index.\n")
    print_table(
        ["tokens", "blocks", "traffic", "bytes a block"],
        [
            [f"{row.capacity_tokens:,}", f"{row.capacity_blocks:,}", row.traffic, f"{row.bytes_per_block:.1f}"]
            for row in memory
        ],
    )

    if arguments.json:
        figures = {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "block_bytes": BLOCK_BYTES,
            "selection_us": [asdict(row) for row in selections],
            "memory": [asdict(row) for row in memory],
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

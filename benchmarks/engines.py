"""Measures how many prompt tokens real engines find in their caches, under each policy.

Run as `python -m benchmarks.engines [--json FILE]`; README.md says what the numbers mean.

Four llama.cpp workers of two slots each, freshly started for each contender, a router before them on a real uvicorn,
and clients that hold the conversations of `conversations.py`. What counts is what the workers themselves say, in
`usage.prompt_tokens_details.cached_tokens`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from asgi_router import RouterSettings, Worker
from benchmarks.conversations import Load, schedule
from benchmarks.engine_fleet import SLOTS, TOKENS_PER_SLOT, WORKERS, foreign_router, own_router, workers
from example_app.worker_processes import WorkerFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.conversations import Conversation

REQUEST_SECONDS = 60.0
ATTEMPTS = 3
PATH = "/v1/chat/completions"

POLICIES = (
    "prefill_cost slots",
    "prefill_cost",
    f"prefill_cost prefix_capacity_tokens={SLOTS * TOKENS_PER_SLOT}",
    "cache_aware",
    "round_robin",
    "round_robin sessions",
)
LOADS = {
    "as many as slots": Load(),
    "fewer than slots": Load(active=5),
    "twice the slots": Load(active=16),
    "all slots busy": Load(families=6, active=12, in_flight=8),
    "long system prompts": Load(families=8, active=16, turns=(3, 6), system_words=800, message_words=(20, 60)),
}
"""By the conversations that are active at any time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One request and what came of it. Tokens are counted by the worker, but for those that the router predicted."""

    conversation: str
    family: int
    turn: int
    worker: str
    """The URL, where the router says it."""
    predicted_tokens: int | None
    """Cached ones, by the router's estimate."""
    predicted_prompt_tokens: int | None
    prompt_tokens: int
    cached_tokens: int
    first_byte: float
    """Seconds."""
    whole: float
    asked: int
    """How often, until there was an answer."""


class NotAnswered(Exception):
    """The router gave an error instead of an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """A contender under a load. Times are seconds to the first byte of an answer, and to its end."""

    load: str
    contender: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    predicted_tokens: int | None
    """None: the router doesn't say."""
    first_byte_mean: float
    first_byte_p50: float
    first_byte_p90: float
    whole_mean: float
    repeated: int
    """Requests that got an error first."""
    seconds: float


def figures(load: str, contender: str, answers: Sequence[Answer], seconds: float) -> Figures:
    """Add up what came of all requests."""
    first = [answer.first_byte for answer in answers]
    tenths = statistics.quantiles(first, n=10)
    predicted = [answer.predicted_tokens for answer in answers if answer.predicted_tokens is not None]
    return Figures(
        load=load,
        contender=contender,
        requests=len(answers),
        prompt_tokens=sum(answer.prompt_tokens for answer in answers),
        cached_tokens=sum(answer.cached_tokens for answer in answers),
        predicted_tokens=sum(predicted) if predicted else None,
        first_byte_mean=statistics.fmean(first),
        first_byte_p50=tenths[4],
        first_byte_p90=tenths[8],
        whole_mean=statistics.fmean(answer.whole for answer in answers),
        repeated=sum(answer.asked > 1 for answer in answers),
        seconds=seconds,
    )


async def hold(load: Load, url: str, *, sessions: bool = False, seed: int = 0) -> list[Answer]:
    """Hold the conversations of `load` with the router at `url`; with `sessions`, each says which one it is."""
    answers: list[Answer] = []
    turns: dict[str, asyncio.Lock] = {}
    order = iter(schedule(load, seed))

    async def client(http: httpx.AsyncClient) -> None:
        for conversation in order:
            async with turns.setdefault(conversation.name, asyncio.Lock()):  # first come, first served
                answers.append(await _ask(http, conversation, load.answer_tokens, sessions=sessions))

    limits = httpx.Limits(max_connections=load.in_flight, max_keepalive_connections=load.in_flight)
    async with (
        httpx.AsyncClient(base_url=url, timeout=REQUEST_SECONDS, limits=limits, trust_env=False) as http,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(load.in_flight):
            group.create_task(client(http))
    return answers


async def _ask(http: httpx.AsyncClient, conversation: Conversation, max_tokens: int, *, sessions: bool) -> Answer:
    body: dict[str, object] = {
        "model": "tiny",
        "messages": conversation.ask(),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if sessions:
        body["session_id"] = conversation.name
    for asked in range(1, ATTEMPTS + 1):
        try:
            return await _answer(http, conversation, body, asked)
        except NotAnswered:
            # llama.cpp closes a connection now and then just as a request comes; OpenAI's clients repeat it, too.
            if asked == ATTEMPTS:
                raise
    raise AssertionError


async def _answer(http: httpx.AsyncClient, conversation: Conversation, body: dict[str, object], asked: int) -> Answer:
    said: list[str] = []
    usage: dict[str, object] = {}
    first_byte: float | None = None
    began = time.perf_counter()
    async with http.stream("POST", PATH, json=body) as response:
        if response.status_code != 200:
            raise NotAnswered(f"{response.status_code}: {(await response.aread())[:500]!r}")
        async for line in response.aiter_lines():
            if first_byte is None:
                first_byte = time.perf_counter() - began
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                said.extend(choice["delta"].get("content") or "" for choice in event["choices"])
    whole = time.perf_counter() - began
    conversation.hear("".join(said))
    predicted = re.search(r"cached=(\d+)/(\d+)", response.headers.get("x-router-decision", ""))
    details = usage.get("prompt_tokens_details")
    return Answer(
        conversation=conversation.name,
        family=conversation.family,
        turn=sum(message["role"] == "user" for message in conversation.history),
        worker=response.headers.get("x-router-worker", ""),
        predicted_tokens=int(predicted[1]) if predicted else None,
        predicted_prompt_tokens=int(predicted[2]) if predicted else None,
        prompt_tokens=_count(usage.get("prompt_tokens")),
        cached_tokens=_count(details.get("cached_tokens") if isinstance(details, dict) else None),
        first_byte=whole if first_byte is None else first_byte,
        whole=whole,
        asked=asked,
    )


def _count(value: object) -> int:
    """Return a count that the worker said. One that is missing must not pass for a nought."""
    if not isinstance(value, int):
        raise TypeError("An answer without usage: what the cache held is not known.")
    return value


def run_policy(text: str, load: Load, *, seed: int = 0, count: int = WORKERS) -> list[Answer]:
    """Hold the conversations with fresh workers behind our router.

    Args:
        text: a policy; then, apart by spaces, settings (`name=value`), `sessions` if conversations are to be named, and
            `slots` if the router is to be told how many each worker has.
        load: what is asked.
        seed: of the load.
        count: how many workers.
    """
    policy, *more = text.split()
    values: dict[str, object] = {}
    for word in more:
        if word not in ("sessions", "slots"):
            name, _, value = word.partition("=")
            values[name] = value
    with workers(count) as urls:
        fleet = [Worker(url=url, slots=SLOTS if "slots" in more else None) for url in urls]
        settings = RouterSettings(workers=fleet, policy=policy, decision_headers=True, **values)
        with own_router(settings) as url:
            return asyncio.run(hold(load, url, sessions="sessions" in more, seed=seed))


def run_foreign(command: str, load: Load, *, seed: int = 0) -> list[Answer]:
    """Hold the conversations with fresh workers behind another router."""
    with workers() as urls, foreign_router(command, urls) as url:
        return asyncio.run(hold(load, url, seed=seed))


def main() -> int:
    """Measure, print a table for each load."""
    options = parse_options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: the workers end with us
    base = {name: LOADS[name] for name in options.load or LOADS}
    loads = {name: replace(load, requests=options.requests) for name, load in base.items()}
    contenders: list[tuple[str, str]] = [(text, "") for text in options.policy or POLICIES]
    contenders += [(name, command) for name, command in (router.split("=", 1) for router in options.router)]
    told: list[Figures] = []
    details: list[dict[str, object]] = []
    code = 0
    try:
        for load_name, load in loads.items():
            for name, command in contenders:
                began = time.perf_counter()
                answers: list[Answer] = []
                for seed in range(options.seeds):
                    run = run_foreign(command, load, seed=seed) if command else run_policy(name, load, seed=seed)
                    answers += run
                    details += [
                        {"load": load_name, "contender": name, "seed": seed, **asdict(answer)} for answer in run
                    ]
                told.append(figures(load_name, name, answers, time.perf_counter() - began))
    except WorkerFailed as exc:
        print(exc, file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        code = 130

    print_tables(told)  # of what there is
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in told], indent=2) + "\n")
    if options.answers:
        options.answers.write_text("".join(json.dumps(row) + "\n" for row in details))
    return code


def print_tables(told: Sequence[Figures]) -> None:
    """Print a table of Markdown for each load, with the cached tokens as a multiple of those under round robin."""
    for load in dict.fromkeys(row.load for row in told):
        rows = [row for row in told if row.load == load]
        base = next((row.cached_tokens for row in rows if row.contender == "round_robin"), 0)
        print(f"\n{load}: {rows[0].requests} requests\n")
        print(
            "| contender | prompt tokens | cached | share | x round robin | predicted | first byte, ms | repeated | s |"
        )
        print("|---" * 9 + "|")
        for row in rows:
            ratio = f"{row.cached_tokens / base:.2f}" if base else ""
            predicted = "" if row.predicted_tokens is None else f"{row.predicted_tokens:,}"
            times = "/".join(f"{1000 * t:.0f}" for t in (row.first_byte_mean, row.first_byte_p50, row.first_byte_p90))
            share = f"{row.cached_tokens / row.prompt_tokens:.1%}"
            print(
                f"| {row.contender} | {row.prompt_tokens:,} | {row.cached_tokens:,} | {share} "
                f"| {ratio} | {predicted} | {times} | {row.repeated} | {row.seconds:.0f} |"
            )


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description=__doc__)
    parser.add_argument("--policy", action="append", help="a policy, settings, `sessions`, `slots`; again for more")
    parser.add_argument(
        "--router",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="another router: {urls} {port} {metrics_port} are filled in",
    )
    parser.add_argument("--load", action="append", choices=[*LOADS], help="default: all")
    parser.add_argument("--requests", type=int, default=Load().requests)
    parser.add_argument("--seeds", type=int, default=3, help="how many loads of each kind; the figures are of all")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--answers", type=Path, help="file for each request, in JSON lines")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

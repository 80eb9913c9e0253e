"""Owns the clients: what they ask for, when they leave, and what they make of the bytes that they get."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from tests.chaos.worker import Job, Kind
from tests.instruments.raw_http import Head, RawClient, connect

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPTS = [f"You are ledger number {number}. " * 80 for number in range(6)]
"""Each is several prefix blocks long, so that blocks are pinned and matched."""

WORKER_CODES = ("storm", "loading")


@dataclass(frozen=True)
class Plan:
    """One request of a client, whether it may be repeated, and when it leaves (None: it stays)."""

    job: Job
    prompt: str
    leave_after: float | None
    leave_by_reset: bool
    marked: bool = False


@dataclass(frozen=True)
class Limits:
    """Seconds that a client may have to wait, by the router's time-outs."""

    first_byte: float
    pause: float


@dataclass
class Answer:
    """What a client saw, and when. `raw` holds everything until the end, whatever kind of end that was."""

    plan: Plan
    started: float
    ended: float = 0.0
    raw: bytes = b""
    left: bool = False
    hung: bool = False
    first_byte: float = 0.0
    """When it came; 0: it didn't."""
    longest_pause: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.started


class WrongAnswer(Exception):
    """The answer breaks a rule: it is cut and looks whole, or is none that a worker or the router gives."""


def plans(seed: str, first_number: int) -> Iterator[Plan]:
    """Yield what one client does, for ever. Numbers count from `first_number`."""
    rng = random.Random(seed)
    kinds: list[Kind] = ["stream", "stream", "chunked", "plain"]
    while True:
        job = Job(first_number, rng.choice(kinds), rng.randint(2, 8), rng.uniform(0.005, 0.06))
        leaves = rng.random() < 0.2
        leave_after = rng.uniform(0.0, 0.5) if leaves else None
        yield Plan(job, rng.choice(PROMPTS), leave_after, rng.random() < 0.5, marked=rng.random() < 0.5)
        first_number += 1


async def ask(host: str, port: int, plan: Plan, limits: Limits) -> Answer:
    """Send the request on a connection of its own, and read until its end."""
    answer = Answer(plan, started=anyio.current_time())
    headers = [("content-type", "application/json"), ("connection", "close"), ("x-number", str(plan.job.number))]
    if plan.marked:
        headers.append(("idempotency-key", str(plan.job.number)))
    async with connect(host, port) as client:
        try:
            with anyio.move_on_after(plan.leave_after) as stay:
                await client.post(plan.job.request(plan.prompt), headers=headers)
                await _read(client, answer, limits)
            if stay.cancelled_caught:
                answer.left = True
                if plan.leave_by_reset:
                    client.reset()
        except OSError:
            pass  # a reset: what came before it will show what it means
        answer.raw = bytes(client.buffer)
    answer.ended = anyio.current_time()
    return answer


async def _read(client: RawClient, answer: Answer, limits: Limits) -> None:
    before, limit, more = anyio.current_time(), limits.first_byte, True
    while more:
        with anyio.move_on_after(limit) as wait:
            more = await client.fill()
        if wait.cancelled_caught:
            answer.hung = True
            return
        now = anyio.current_time()
        if not answer.first_byte:
            answer.first_byte = now
        else:
            answer.longest_pause = max(answer.longest_pause, now - before)
        before, limit = now, limits.pause


def outcome(answer: Answer) -> tuple[str, str | None]:
    """Tell how a request ended, and the router's error code if that was it.

    Raises:
        WrongAnswer: it mustn't end like this.
    """
    if answer.hung:
        raise WrongAnswer("hangs")
    if answer.left:
        return "left", None

    raw_head, mark, rest = answer.raw.partition(b"\r\n\r\n")
    if not mark:
        raise WrongAnswer("no answer")

    head = Head.parse(raw_head)
    body, whole = _unframe(head, rest)
    if head.status != 200:
        return _error(head.status, body, whole)

    expected = b"".join(answer.plan.job.answer())
    if whole:
        if body != expected:
            raise WrongAnswer("whole by its framing, but not the right answer")
        return "whole", None

    part, event, error = body.partition(b'data: {"error"')
    if event:
        part = part if expected.startswith(part) else part.removesuffix(b"\n\n")
        code: str = json.loads(b'{"error"' + error)["error"]["code"]
        if code not in ("worker_failed", "worker_timeout") or error.count(b"\n\n") != 1:
            raise WrongAnswer("cut, with an odd error event")
    elif answer.plan.job.kind == "stream":
        raise WrongAnswer("a stream cut without an error event")
    if not expected.startswith(part):
        raise WrongAnswer("cut, and wrong before that")
    return f"cut {answer.plan.job.kind}" + (f": {code}" if event else ""), None


def _error(status: int, body: bytes, whole: bool) -> tuple[str, str | None]:
    if not whole:
        raise WrongAnswer(f"a broken error {status}")
    code: str = json.loads(body)["error"]["code"]
    return (f"worker's {status}", None) if code in WORKER_CODES else (f"{status} {code}", code)


def _unframe(head: Head, rest: bytes) -> tuple[bytes, bool]:
    """Return the body, and whether its framing says that it is whole."""
    if lengths := head.header("content-length"):
        return rest, len(rest) == int(lengths[0])

    body = b""
    while True:
        size, mark, after = rest.partition(b"\r\n")
        if not mark:
            return body, False
        length = int(size, 16)
        if length == 0:
            return body, after == b"\r\n"
        body += after[:length]
        if len(after) < length + 2:
            return body, False
        rest = after[length + 2 :]

"""Owns sessions as clients and operators see them: by body or header, with workers that come and go, and in events."""

from __future__ import annotations

import gzip
import json
import logging
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import httpx
import pytest
from anyio.lowlevel import checkpoint

from asgi_router import Worker
from tests.instruments.asgi_client import Exchange
from tests.routed import OTHER, PROMPT, WORKER, Routed, answer, completion_body
from tests.scheduling.builders import Clock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asgi_router.observability.events import RequestFinished

pytestmark = pytest.mark.anyio

THIRD = "http://w3:8000"
GOOD = answer("json")
HEADER = "x-session"


def body_with(prompt: object = PROMPT, **fields: object) -> bytes:
    """A request with these fields."""
    return completion_body(str(prompt), **fields)


class Service:
    """A router before three workers that take turns, so that what stays in one place does so by its session."""

    def __init__(self, **settings: object) -> None:
        scripts = {WORKER: GOOD, OTHER: GOOD, THIRD: GOOD}
        self.routed = Routed(scripts, **{"policy": "round_robin", "decision_headers": True, **settings})
        self.events: list[RequestFinished] = []
        self.routed.router.observers.append(self.events.append)

    async def ask(self, *headers: tuple[str, str], body: object = None, **fields: object) -> str:
        """Send a request; return the worker that answered."""
        exchange = Exchange(headers=headers, body=body if isinstance(body, bytes) else body_with(**fields))
        worker = await self.send(exchange)
        (decision,) = exchange.header("x-router-decision")
        assert decision.decode().startswith(f"{self.events[-1].reason}; ")
        self.routed.assert_released(exchange)
        return worker

    async def send(self, exchange: Exchange) -> str:
        """Send this request; return the worker that answered."""
        await exchange.run(self.routed.app)
        assert exchange.status == 200
        (worker,) = exchange.header("x-router-worker")
        return worker.decode()

    async def places(self, *headers: tuple[str, str], **fields: object) -> set[str]:
        """Send as many requests as there are workers; return those that answered."""
        return {await self.ask(*headers, **fields) for _ in range(3)}


@pytest.mark.parametrize(
    "fields",
    [{"session_id": "s"}, {"extra_body": {"session_id": "s"}}, {"session_id": "", "extra_body": {"session_id": "s"}}],
    ids=["top", "nested", "empty"],
)
async def test_the_body_names_a_session(fields: dict[str, object]) -> None:
    """Its requests stay together, the answers say why, and the worker gets the body as it was."""
    service = Service(session_header=HEADER)
    assert len(await service.places(**fields)) == 1
    assert [event.reason for event in service.events] == ["round_robin", "session", "session"]
    assert {event.session_id for event in service.events} == {"s"}
    assert {call.body for worker in service.routed.fleet.workers.values() for call in worker.calls} == {
        body_with(**fields)
    }


async def test_a_header_names_a_session() -> None:
    """The one that is configured, in any case; it goes on to the worker; a compressed body needs no other mark."""
    service = Service(session_header="X-Session")
    assert len(await service.places((HEADER, "s"))) == 1
    packed = ((HEADER, "gz"), ("content-encoding", "gzip"))
    assert len({await service.ask(*packed, body=gzip.compress(completion_body())) for _ in range(3)}) == 1
    assert [event.session_id for event in service.events] == ["s"] * 3 + ["gz"] * 3
    worker = next(worker for worker in service.routed.fleet.workers.values() if worker.calls)
    assert (b"x-session", b"s") in [(name.lower(), value) for name, value in worker.calls[0].headers]


async def test_the_body_wins() -> None:
    """Where both name a session the header doesn't count: neither for the place, nor in what is told."""
    service = Service(session_header=HEADER)
    home = await service.ask(session_id="body")
    assert {await service.ask((HEADER, str(number)), session_id="body") for number in range(3)} == {home}
    assert {event.session_id for event in service.events} == {"body"}
    assert len({await service.ask((HEADER, "0")) for _ in range(3)}) == 1


@pytest.mark.parametrize(
    ("settings", "headers", "fields"),
    [
        ({}, [(HEADER, "s")], {}),
        ({"session_header": "x-other"}, [(HEADER, "s")], {}),
        ({"session_header": HEADER}, [(HEADER, "")], {}),
        ({"session_header": HEADER, "session_ttl": 0}, [(HEADER, "s")], {"session_id": "s"}),
        ({}, [], {"session_id": 7}),
        ({}, [], {"metadata": {"session_id": "s"}, "user": "s"}),
    ],
    ids=["not configured", "another header", "empty header", "switched off", "a number", "elsewhere"],
)
async def test_what_is_no_session(
    settings: dict[str, object], headers: Sequence[tuple[str, str]], fields: dict[str, object]
) -> None:
    """The policy alone chooses."""
    service = Service(**settings)
    assert await service.places(*headers, **fields) == {WORKER, OTHER, THIRD}
    assert {event.reason for event in service.events} == {"round_robin"}


async def test_a_prompt_that_speaks_of_sessions_names_none() -> None:
    """vllm-project/router (its own benchmark note): the body is parsed, and not searched for a key's name."""
    service = Service(session_header=HEADER)
    prompt = '","session_id":"s","user":"s" \n\n"session_id": "s"'
    assert await service.places(prompt=prompt) == {WORKER, OTHER, THIRD}
    assert {event.session_id for event in service.events} == {""}


@pytest.mark.parametrize(
    "name", ["two words", "tab\there", "\x1b[31m", "snow\u2603man", "x" * 129, "y" * 100_000], ids=str.split
)
@pytest.mark.parametrize("where", ["body", "header"])
async def test_names_that_are_not_shown(name: str, where: str, caplog: pytest.LogCaptureFixture) -> None:
    """One that isn't printable, or is longer than 128, pins as any other does, and is in no log and no event."""
    caplog.set_level(logging.DEBUG)
    service = Service(session_header=HEADER)
    value = name.encode().decode("latin-1")
    headers, fields = ([(HEADER, value)], {}) if where == "header" else ([], {"session_id": name})
    assert len(await service.places(*headers, **fields)) == 1
    assert [event.reason for event in service.events] == ["round_robin", "session", "session"]
    assert {event.session_id for event in service.events} == {""}
    records = [record.getMessage() for record in caplog.records if record.name == "asgi_router.requests"]
    assert len(records) == 3
    assert {json.loads(record)["session_id"] for record in records} == {""}
    assert value[:50] not in caplog.text
    assert json.dumps(name)[1:50] not in caplog.text


async def test_a_session_moves_with_a_retry() -> None:
    """When its worker can't be reached another one answers, and keeps the session when the first is back."""
    service = Service()
    home = await service.ask(session_id="s")
    service.routed.fleet[home].scripts = replace(GOOD, connect=[httpx.ConnectError("refused")])
    moved = await service.ask(session_id="s")
    assert moved != home
    assert (service.events[-1].attempts, service.events[-1].reason) == (2, "round_robin")
    service.routed.fleet[home].scripts = GOOD
    assert await service.places(session_id="s") == {moved}


async def test_a_session_leaves_a_worker_that_wants_to_be_left_alone() -> None:
    """`Retry-After` weighs more than a warm cache."""
    clock = Clock()
    service = Service(clock=clock)
    home = await service.ask(session_id="s")
    service.routed.fleet[home].scripts = replace(GOOD, status=503, headers=[("retry-after", "30")], body=[])
    moved = await service.ask(session_id="s")
    service.routed.fleet[home].scripts = GOOD
    clock.now += 31
    assert await service.places(session_id="s") == {moved} != {home}


async def test_a_session_does_not_wait_for_its_worker() -> None:
    """Where its worker is full it goes on another one at once, and doesn't queue."""
    service = Service(max_concurrent_per_worker=1)
    gate = anyio.Event()
    home = await service.ask(session_id="s")
    service.routed.fleet[home].scripts = replace(GOOD, head=[gate])
    exchange = Exchange(body=completion_body(session_id="s"))
    async with exchange.running(service.routed.app):
        await service.routed.fleet[home].received(2)
        other = Exchange(body=completion_body(session_id="s"))
        await other.run(service.routed.app)
        assert other.header("x-router-worker") != [home.encode()]
        gate.set()
    assert exchange.header("x-router-worker") == [home.encode()]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", ["prefill_cost", "request_num", "random"])
async def test_sessions_stick_under_load(seed: int, policy: str) -> None:
    """Conversations at once, while workers drain, leave and come back: one changes its worker only if it must."""
    rng = random.Random(seed)
    service = Service(policy=policy)
    workers = service.routed.router.workers
    changes = {WORKER: 0, OTHER: 0, THIRD: 0}
    stayed = 0

    async def conversation(name: str) -> None:
        nonlocal stayed
        last, changes_then = "", dict(changes)
        for turn in range(1, 9):
            for _ in range(rng.randrange(20)):
                await checkpoint()
            changes_now = dict(changes)
            worker = await service.send(Exchange(body=body_with(f"{name} " * 300 * turn, session_id=name)))
            if last and changes[last] == changes_then[last]:
                assert worker == last
                stayed += 1
            last, changes_then = worker, changes_now

    async def operator() -> None:
        for _ in range(30):
            for _ in range(rng.randrange(40)):
                await checkpoint()
            url = rng.choice([OTHER, THIRD])
            changes[url] += 1
            here = url in {state.worker.url for state in workers}
            match rng.randrange(4):
                case 0 if here:
                    workers.remove(url)
                case 1 if here:
                    workers.drain(url, draining=rng.random() < 0.5)
                case _:
                    workers.add(Worker(url=url))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(operator)
        for number in range(12):
            tasks.start_soon(conversation, f"conversation {number}")
    assert len(service.events) == 12 * 8
    assert stayed > 30
    service.routed.assert_released()

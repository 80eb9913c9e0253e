"""Owns what in-process tests of disaggregated mode share: a router before scripted pairs, and legs led step by step.

A `Walk` is one request, of which a test decides what happens next, and asks at any moment who is leased:

    walk = Walk("fastdeploy", "stream")
    async with walk.going():
        await walk.to("p.take d.take p.head")
        assert walk.held == "PD"  # who is leased; "-D" once the prefill worker is released
        await walk.to("d.fail")
    assert walk.exchange.status == 502
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import anyio
import anyio.lowlevel
import httpx

from asgi_router import Role, Router, RouterMiddleware, RouterSettings
from asgi_router.errors import AnswerCut
from tests.abort.calls import ABORT_PATH, engine
from tests.instruments.asgi_client import Exchange
from tests.instruments.fake_worker import FakeFleet, Script
from tests.routed import PROMPT, Kind, Routed, completion_body, unreachable_app
from tests.test_state_machine import SETTLE_TURNS, Feed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from asgi_router.observability.events import RequestFinished
    from asgi_router.scheduling.state import WorkerState
    from tests.instruments.fake_worker import FakeWorker, Scripts
    from tests.instruments.steps import Pause

Dialect = Literal["fastdeploy", "sglang", "vllm"]
DIALECTS: tuple[Dialect, ...] = ("fastdeploy", "sglang", "vllm")
AT_ONCE: tuple[Dialect, ...] = ("fastdeploy", "sglang")
"""Dialects that ask both workers at the same time."""

PREFILL = "http://p1:8000"
PREFILL_2 = "http://p2:8000"
DECODE = "http://d1:8000"
DECODE_2 = "http://d2:8000"

REFUSED = httpx.ConnectError("refused")
RESET = httpx.ReadError("reset")

PREFILLED = Script.json({"kv_transfer_params": {"remote_host": "p1"}})
"""A prefill worker's good answer, in any dialect: who doesn't ask for what is in it throws it away."""


def request(kind: Kind = "stream", **fields: object) -> Exchange:
    """Return a client's request for an answer of this kind."""
    return Exchange(body=completion_body(PROMPT, stream=kind == "stream", **fields))


class RoutedApart(Routed):
    """A router in disaggregated mode before scripted workers."""

    def __init__(
        self,
        prefill: Mapping[str, Scripts] | Scripts,
        decode: Mapping[str, Scripts] | Scripts,
        fields: Mapping[str, Mapping[str, object]] | None = None,
        **settings: object,
    ) -> None:
        """Take how workers answer (or the only one of a role does), what else is known of them, and as `Routed`."""
        clock = cast("Callable[[], float]", settings.pop("clock", time.monotonic))
        prefills = prefill if isinstance(prefill, Mapping) else {PREFILL: prefill}
        decodes = decode if isinstance(decode, Mapping) else {DECODE: decode}
        roles = {**dict.fromkeys(prefills, Role.PREFILL), **dict.fromkeys(decodes, Role.DECODE)}
        workers = [{"url": url, "role": role.value, **(fields or {}).get(url, {})} for url, role in roles.items()]
        self.fleet = FakeFleet({**prefills, **decodes})
        settings = {"mode": "disaggregated", "workers": workers, **settings}
        self.router = Router(RouterSettings(**settings), transport=self.fleet, clock=clock)
        self.app = RouterMiddleware(unreachable_app, router=self.router)
        self.events: list[RequestFinished] = []
        self.router.observers.append(self.events.append)

    @property
    def prefill(self) -> FakeWorker:
        """The first prefill worker."""
        return self.fleet[PREFILL]

    @property
    def decode(self) -> FakeWorker:
        """The first decode worker."""
        return self.fleet[DECODE]

    @property
    def requests(self) -> dict[str, int]:
        """How many requests each worker has; those that have some have prefill tokens, and the others none."""
        for worker in self.router.stats().workers:
            assert (worker.prefill_tokens > 900) == (worker.requests > 0), worker
            assert (worker.prefill_tokens > 0) == (worker.requests > 0), worker
        return {worker.url: worker.requests for worker in self.router.stats().workers}

    @property
    def calls(self) -> dict[str, int]:
        """How many requests each worker has received."""
        return {worker.url: len(self.fleet[worker.url].calls) for worker in self.router.stats().workers}

    def state(self, url: str) -> WorkerState:
        """What the router knows of a worker."""
        return self.router.workers.get(url)

    def failures(self, url: str) -> int:
        """How many failures in a row a worker's circuit breaker has noted."""
        return self.state(url).breaker._failures


async def settle() -> None:
    """Let the loop run until nothing moves any more."""
    for _ in range(SETTLE_TURNS):
        await anyio.lowlevel.checkpoint()


@dataclass(eq=False)
class Leg:
    """A worker's answer, given step by step."""

    script: Script
    connect: Feed[Exception]
    head: Feed[Exception]
    body: Feed[bytes | Exception]
    chunks: list[bytes]
    last: bytes
    at: Literal["connect", "head", "body", "over"] = "connect"

    @classmethod
    def of(cls, kind: Kind, status: int, *, kv: bool) -> Leg:
        """A leg whose answer is of this kind and status; with `kv` it is what vLLM's prefill workers answer."""
        connect, head, body = Feed[Exception](), Feed[Exception](), Feed[bytes | Exception]()
        content_type = "text/event-stream" if kind == "stream" and not kv else "application/json"
        headers = [("content-type", content_type)]
        script = Script(status=status, headers=headers, connect=cast("Sequence[Pause]", connect), head=head, body=body)
        chunks = [b'{"kv_transfer_params":', b' {"remote_host": "p1"}'] if kv else [b"data: 1\n\n", b"data: 2\n\n"]
        return cls(script, connect, head, body, chunks, b"}" if kv else b"data: [DONE]\n\n")

    def do(self, *steps: str) -> None:
        """Take the request, give the head, a chunk, or the rest; or break off where it is."""
        for step in steps:
            self._do(step)

    def _do(self, step: str) -> None:
        if step == "fail":
            if self.at == "body":
                self.body.push(RESET, end=True)
            else:
                feed, error = (self.connect, REFUSED) if self.at == "connect" else (self.head, RESET)
                feed.push(error, end=True)
            self.at = "over"
        elif step == "take":
            self.connect.push(end=True)
            self.at = "head"
        elif step == "head":
            self.head.push(end=True)
            self.at = "body"
        elif step == "chunk":
            self.body.push(self.chunks.pop(0))
        else:
            assert step == "end"
            self.body.push(*self.chunks, self.last, end=True)
            self.at = "over"


class Walk:
    """One request of a client, whose legs and whose client do what they are told, one step after the other.

    Steps: `p.take`, `p.head`, `p.chunk`, `p.end`, `p.fail`, the same with `d` for the decode worker, and `leave`,
    `cancel` (the host cancels the request's scope), `abort`, `shutdown`. `cut` says that no last message was sent.
    """

    def __init__(
        self, dialect: Dialect, kind: Kind, *, prefill_status: int = 200, decode_status: int = 200, **settings: object
    ) -> None:
        self.legs = {
            "p": Leg.of(kind, prefill_status, kv=dialect == "vllm"),
            "d": Leg.of(kind, decode_status, kv=False),
        }
        prefill, decode = (engine(self.legs[name].script) for name in "pd")
        fixed = {"pd_dialect": dialect, "retry_attempts": 0, "drain_timeout": 0}
        self.routed = RoutedApart(prefill, decode, None, **{**fixed, **settings})
        self.exchange = request(kind)
        self.cut = False

    @property
    def held(self) -> str:
        """Who is leased, with both counters: `PD`, `-D`, `P-` or `--`."""
        requests = self.routed.requests
        return "".join(name if requests[url] else "-" for name, url in (("P", PREFILL), ("D", DECODE)))

    @property
    def outcome(self) -> str:
        """How the request ended."""
        (event,) = self.routed.events
        return event.outcome

    @asynccontextmanager
    async def going(self) -> AsyncIterator[None]:
        """Run the request beside the block, at whose end nothing may be left of it."""
        try:
            async with self.exchange.running(self.routed.app):
                await settle()
                yield
        except AnswerCut:
            self.cut = True
        self.routed.assert_released(self.exchange)

    async def to(self, steps: str) -> None:
        """Let these things happen, each of them after all that follows from the one before."""
        for step in steps.split():
            await self.step(step)

    async def step(self, step: str) -> None:
        """Let this happen, and what follows from it."""
        who, _, what = step.rpartition(".")
        if who:
            self.legs[who].do(what)
        elif step == "leave":
            self.exchange.disconnect()
        elif step == "cancel":
            self.exchange.cancel()
        elif step == "abort":
            asking = Exchange(path=ABORT_PATH, body=b'{"abort_all": true}')
            assert (await asking.run(self.routed.app)).status == 200
        else:
            assert step == "shutdown"
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.routed.router.drain)
                await settle()
                tasks.cancel_scope.cancel()
        await settle()

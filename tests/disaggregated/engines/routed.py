"""Owns what tests of the router over fake engines share: the router, its requests, and what must hold afterwards."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Literal

from asgi_router import Router, RouterMiddleware, RouterSettings
from tests.disaggregated.engines.job import Job
from tests.disaggregated.engines.processes import SOON
from tests.instruments.asgi_client import Exchange
from tests.routed import counters, unreachable_app

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from tests.disaggregated.engines.dialects import Body
    from tests.disaggregated.engines.job import Role, Stage
    from tests.disaggregated.engines.processes import EngineProcess, Engines

Kind = Literal["stream", "json"]
KINDS: tuple[Kind, ...] = ("stream", "json")
WHOLE = "0 1 2 "
"""The text of a whole answer."""


class RoutedEngines:
    """A router before fake engines, for the time of an `async with` block; called as an ASGI app, it is the middleware.

    At the end of the block nothing may be left: no counter, no request on any engine, no refusal that isn't expected.

    Attributes:
        states: what the engines have told of themselves then, the prefill engine first.
    """

    def __init__(self, engines: Engines, *, refusals: bool = False, **settings: object) -> None:
        self.engines = engines
        self.states: list[Body] = []
        self._refusals = refusals
        fields = {"mode": "disaggregated", "pd_dialect": engines.dialect, "decision_headers": True, **settings}
        self.router = Router(RouterSettings(workers=engines.registrations, **fields))
        self.app = RouterMiddleware(unreachable_app, router=self.router)

    async def __aenter__(self) -> Self:
        self._open = AsyncExitStack()
        await self._open.enter_async_context(self.router)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        async with self._open:
            if error is None:
                await self.assert_nothing_is_left()

    async def assert_nothing_is_left(self) -> None:
        """All counters are at zero, and no engine works on anything."""
        stats = self.router.stats()
        assert [counters(worker) for worker in stats.workers] == [(0, 0, 0, 0)] * len(self.engines.all)
        assert (stats.exchanges, stats.leases) == (0, 0)
        assert all(state.prefixes.pinned == 0 for state in self.router.workers)
        self.states = await self.engines.idle()
        for state in self.states:
            assert (state["waiting"], state["stuck"]) == (0, 0)
            assert self._refusals or state["refused"] == []

    async def run(self, exchange: Exchange) -> Exchange:
        """Let a client have its answer, or what it gets instead."""
        return await exchange.run(self.app, timeout=SOON)


def request_for(kind: Kind, job: Job | None = None, *, chat: bool = True, **options: object) -> Exchange:
    """Return a client's request for a job; `options` are the client's."""
    prompt: Body = {"messages": [{"role": "user", "content": "Hello " * 300}]} if chat else {"prompt": "Hello " * 300}
    body: Body = {"model": "m", "max_tokens": 9, "seed": 9007199254740993, **prompt, "stream": kind == "stream"}
    if kind == "stream":
        body["stream_options"] = {"include_usage": True}
    body["job"] = (job or Job()).field()
    path = "/v1/chat/completions" if chat else "/v1/completions"
    return Exchange(path=path, body=json.dumps(body).encode(), **options)  # type: ignore[arg-type]


def text_of(exchange: Exchange) -> str:
    """The words of a whole answer; fails on any other."""
    assert exchange.status == 200
    assert exchange.finished_cleanly
    if exchange.header("content-type") == [b"application/json"]:
        choice = json.loads(exchange.body)["choices"][0]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])

    *events, done, nothing = exchange.body.decode().split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    return "".join(choice["delta"]["content"] if "delta" in choice else choice["text"] for choice in choices)


def decode_needs(dialect: str, role: Role, at: Stage, kind: Kind) -> bool:
    """Whether an answer can't come when this leg fails at this stage.

    Decode itself has to come to its end. Prefill is over for it when it has fetched the cache: in vLLM's dialect after
    the whole answer, which is no stream there; in the others before the first byte of the body.
    """
    if role == "decode" or dialect == "vllm":
        return True
    return at == "begin" or (at == "head" and kind == "stream")


def engines_of(engines: Engines, role: Role) -> list[EngineProcess]:
    """The engines of a role."""
    return [engines.prefill] if role == "prefill" else engines.decodes

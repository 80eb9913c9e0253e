"""Owns what the tests of `local` share: a scripted app, and a router around it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asgi_router import Router, RouterMiddleware, RouterSettings
from tests.instruments.fake_worker import FakeFleet
from tests.routed import answer, counters

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from asgi_router.observability.events import RequestFinished

SSE = [(b"content-type", b"text/event-stream")]
REQUEST_ID = ("x-request-id", "id-1")


class Engine:
    """A scripted app. `steps` are its messages, or what is awaited or raised between them."""

    def __init__(self, *steps: Message | Callable[[], Awaitable[object]] | BaseException) -> None:
        self.steps = steps
        self.scopes: list[Scope] = []
        self.bodies: list[bytes] = []
        self.after: list[Message] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        message = await receive()
        self.bodies.append(message["body"])
        assert not message["more_body"]
        for step in self.steps:
            if isinstance(step, BaseException):
                raise step
            await (step() if callable(step) else send(step))
        self.after.append(await receive())


def start(status: int = 200) -> Message:
    return {"type": "http.response.start", "status": status, "headers": SSE}


def body(chunk: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": chunk, "more_body": more}


GOOD = (start(), body(b"data: one\n\n"), body(b"data: [DONE]\n\n", more=False))


class Local:
    """A router around an engine, with `local` and maybe others as workers."""

    def __init__(self, engine: ASGIApp, *others: str, **settings: object) -> None:
        self.fleet = FakeFleet(dict.fromkeys(others, answer("stream")))
        self.router = Router(RouterSettings(workers=["local", *others], **settings), transport=self.fleet)
        self.app = RouterMiddleware(engine, router=self.router)
        self.events: list[RequestFinished] = []
        self.router.observers.append(self.events.append)

    def assert_released(self) -> None:
        assert [counters(worker) for worker in self.router.stats().workers] == [(0,) * 4] * len(self.router.workers)
        assert self.router.stats().exchanges == 0
        assert all(state.prefixes.pinned == 0 for state in self.router.workers)
        self.fleet.assert_clean()

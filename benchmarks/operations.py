"""Owns the operations that a request takes through the router, each by itself and without any network."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING

from asgi_router import RouterMiddleware, RouterSettings
from asgi_router.extraction import extract
from asgi_router.scheduling.lease import Lease
from asgi_router.scheduling.prompt import Prompt
from benchmarks.selection import BLOCK_BYTES, PATH, Fleet, body_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

KB, MB = 1_000, 1_000_000


@dataclass(frozen=True)
class Operation:
    """Something that is measured by doing it again and again.

    Attributes:
        name: what it is.
        run: does it once.
        times: how often it is done in about a millisecond.
        body_bytes: size of the body that it reads, if it reads one.
    """

    name: str
    run: Callable[[], object]
    times: int
    body_bytes: int = 0


def chat_body(size: int) -> bytes:
    """Return a conversation of messages of 2,000 characters, or of one if it is shorter."""
    rng = random.Random(size)
    words = ("all ", "work ", "and ", "no ", "play\n")
    text = "".join(rng.choices(words, k=min(size, 2_000) // 4))
    turn = [{"role": role, "content": text} for role in ("user", "assistant")]
    fields = {"model": "model", "stream": True, "messages": (turn * (size // 2_000 + 1))[: max(1, size // 2_000)]}
    return json.dumps(fields).encode()


def image_body(size: int) -> bytes:
    """Return a question about one image of this size in base64."""
    url = "data:image/png;base64," + "iVBORw0KGgoAAAA" * (size // 15)
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
    return json.dumps({"model": "model", "messages": [{"role": "user", "content": parts}]}).encode()


def ids_body(size: int) -> bytes:
    """Return a prompt of token ids."""
    rng = random.Random(size)
    return json.dumps({"model": "model", "prompt": [rng.randrange(150_000) for _ in range(size // 7)]}).encode()


def tiny_values_body(size: int, name: str = "unknown", value: str = "1") -> bytes:
    """Return a body that is one array of the same value over and over."""
    return f'{{"{name}": [{",".join([value] * (size // (len(value) + 1)))}]}}'.encode()


def extraction(name: str, body: bytes, times: int) -> Operation:
    path = "/v1/completions" if b'"prompt"' in body[:100] else PATH
    return Operation(name, lambda: extract(body, path), times, len(body))


def extractions() -> list[Operation]:
    return [
        extraction("extract 200 B", chat_body(100), 600),
        extraction("extract 4 KB", chat_body(4 * KB), 150),
        extraction("extract 100 KB", chat_body(100 * KB), 10),
        extraction("extract 1 MB", chat_body(MB), 1),
        extraction("extract 10 MB", chat_body(10 * MB), 1),
        extraction("extract 10 MB with an image", image_body(10 * MB), 1),
        extraction("extract 1 MB of token ids", ids_body(MB), 1),
        extraction("extract 60 MB of tiny values, in a field unknown", tiny_values_body(60 * MB), 1),
        extraction("extract 60 MB of tiny values, as messages", tiny_values_body(60 * MB, "messages"), 1),
        extraction("extract 60 MB of tiny values, as prompt", tiny_values_body(60 * MB, "prompt"), 1),
        extraction("extract 60 MB of tiny messages", tiny_values_body(60 * MB, "messages", '{"role":"user"}'), 1),
    ]


def hashing() -> Operation:
    request = extract(chat_body(100 * KB), PATH)
    return Operation("blocks of 100 KB", lambda: Prompt(request, BLOCK_BYTES), 25)


def selection(capacity: int) -> Operation:
    """Choose, count, first byte and release: 4,000 characters, 8 workers, each of which holds a part of the prompt.

    Args:
        capacity: tokens that each worker is believed to hold, of which many don't fit into a processor's cache.
    """
    rng = random.Random(0)
    fleet = Fleet(8, rng, capacity)
    bodies = [body_of(rng, 4_000) for _ in range(16)]
    fleet.warm(bodies)
    requests = cycle([extract(body, PATH) for body in bodies])

    def run() -> None:
        lease = fleet.scheduler.select(fleet.states, next(requests))
        lease.first_byte(prefilled=True)
        lease.release()

    for _ in range(500):  # until every prompt has found its worker
        run()
    return Operation("select, first byte, release", run, 40)


def leasing() -> Operation:
    """Take a lease on a worker that is known, and give it back; without a prompt's blocks."""
    state = Fleet(1, random.Random(0)).states[0]
    prompt = Prompt.of_blocks((), tokens=100, block_tokens=128.0)

    def run() -> None:
        lease = Lease(state, prompt)
        lease.first_byte(prefilled=True)
        lease.release()

    return Operation("lease, first byte, release", run, 600)


def call(app: ASGIApp, scope: Scope) -> Callable[[], None]:
    """Return what calls an app that never waits, without an event loop."""

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        pass

    def run() -> None:
        coroutine = app(scope, receive, send)
        try:
            coroutine.send(None)  # type: ignore[attr-defined]
        except StopIteration:
            return
        raise RuntimeError("the app waits")

    return run


async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """An app that does nothing."""


def pass_through(**settings: str | bool) -> tuple[Operation, Operation]:
    """Return the call of an app, and the same call through the middleware: a request that isn't the router's."""
    given = RouterSettings.model_validate({"workers": ["http://worker"], **settings})
    middleware = RouterMiddleware(nothing, settings=given)
    scope: Scope = {"type": "http", "method": "GET", "path": "/v1/items/42", "root_path": "", "headers": []}
    name = "through the middleware" + (f" with {', '.join(settings)}" if settings else "")
    return (
        Operation("an app, called directly", call(nothing, scope), 2_000),
        Operation(name, call(middleware, scope), 800),
    )

"""Owns the table of ways out that the tests of logs and secrets share: what is set up, and how the request ends."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import httpx

from asgi_router import Worker
from asgi_router.errors import AnswerCut
from tests.instruments.asgi_client import DISCONNECT, HANG, Exchange
from tests.instruments.fake_worker import Script
from tests.routed import WORKER, Routed, answer, completion_body, interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

IN_EXCEPTIONS = "PLANTED-EXCEPTION"
"""In the text of all exceptions of the transport: other libraries quote headers and bodies there."""

BROKEN = httpx.ReadError(IN_EXCEPTIONS)
REFUSED = httpx.ConnectError(IN_EXCEPTIONS)
GOOD = answer("json")


@dataclass(frozen=True)
class Way:
    """A way out: what is set up, and the status and the outcome that are logged."""

    status: int
    outcome: str
    script: Script = GOOD
    client: Mapping[str, object] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    prepare: Callable[[Routed], object] = lambda routed: None
    leave: Literal["disconnect", "cancel"] | None = None
    """What ends it from outside, once the worker has the request."""
    worker: str = WORKER

    async def take(self, routed: Routed, **options: object) -> Exchange:
        """Send a request that ends in this way, with these options of `Exchange`."""
        self.prepare(routed)
        exchange = Exchange(**{"body": completion_body(), **options, **self.client})  # type: ignore[arg-type]
        with suppress(AnswerCut):
            async with exchange.running(routed.app):
                if self.leave:
                    await routed.worker.received(1)
                    (exchange.disconnect if self.leave == "disconnect" else exchange.cancel)()
        return exchange


def only_other_models(routed: Routed) -> None:
    routed.router.workers.add(Worker(url=WORKER, models=("other",)))


HANGING = replace(answer("json"), head=[HANG])

WAYS = {
    "stream": Way(200, "ok", answer("stream")),
    "json": Way(200, "ok"),
    "worker's error": Way(500, "ok", Script.json({}, status=500)),
    "worker busy": Way(429, "ok", Script.json({}, status=429)),
    "refused": Way(502, "worker_unreachable", replace(answer("json"), connect=[REFUSED])),
    "reset": Way(502, "worker_failed", replace(answer("json"), head=[BROKEN])),
    "late": Way(504, "worker_timeout", HANGING, settings={"first_byte_timeout": 0.05}),
    "stream cut": Way(200, "worker_failed", interrupted("stream", BROKEN)),
    "json cut": Way(200, "worker_failed", interrupted("json", BROKEN)),
    "paused": Way(200, "worker_timeout", interrupted("stream", HANG), settings={"idle_timeout": 0.05}),
    "not json": Way(400, "invalid_request", client={"body": b"["}, worker=""),
    "too large": Way(413, "request_too_large", settings={"max_body_bytes": 10}, worker=""),
    "no such model": Way(404, "model_not_found", prepare=only_other_models, worker=""),
    "no worker": Way(
        503, "no_worker_available", prepare=lambda routed: routed.router.workers.remove(WORKER), worker=""
    ),
    "gone in upload": Way(0, "client_gone", client={"body": [b"{", DISCONNECT]}, worker=""),
    "gone in prefill": Way(0, "client_gone", HANGING, leave="disconnect"),
    "gone in answer": Way(200, "client_gone", client={"at": {1: DISCONNECT}}),
    "send raises": Way(200, "client_gone", client={"at": {"start": OSError("gone")}}),
    "client stuck": Way(200, "client_gone", client={"at": {1: HANG}}, settings={"send_timeout": 0.05}),
    "cancelled": Way(0, "cancelled", HANGING, leave="cancel"),
}

"""Owns what is noted of a request while it goes on, so that it can be told at its end."""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING

from asgi_router.observability.events import RequestFinished
from asgi_router.observability.usage import Usage, read_usage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from asgi_router.exchange import Exchange

_ID = re.compile("[!-~]{1,128}")
_TRACEPARENT = re.compile("[0-9a-f]{2}-(?P<trace>(?!0{32})[0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


class Ids:
    """What a request is called by: its own id, and that of the trace which it belongs to (W3C Trace Context)."""

    __slots__ = ("request_id", "trace_id")

    def __init__(self, request_id: str, trace_id: str) -> None:
        self.request_id = request_id or os.urandom(16).hex()
        self.trace_id = trace_id

    def use_body_id(self, request_id: str) -> None:
        """Take the id that FastDeploy's clients put into the body, if there is one that is fit to be shown."""
        if _ID.fullmatch(request_id):
            self.request_id = request_id


def read_ids(headers: Mapping[bytes, bytes]) -> Ids:
    """Read the ids in request headers. One that isn't printable ASCII, or is longer than 128, is none."""
    request_id = trace_id = ""
    if value := headers.get(b"x-request-id"):
        text = value.decode("latin-1")
        request_id = text if _ID.fullmatch(text) else ""
    if value := headers.get(b"traceparent"):
        match = _TRACEPARENT.fullmatch(value.decode("latin-1"))
        trace_id = match["trace"] if match else ""
    return Ids(request_id, trace_id)


class Times:
    """What took how long, in seconds of one clock.

    Attributes:
        began: when the request came.
        selecting: seconds spent on reading the prompt and choosing.
        queued: seconds spent waiting for a place.
        first_byte: when the answer's first byte came.
    """

    __slots__ = ("began", "clock", "first_byte", "queued", "selecting")

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.began = clock()
        self.selecting = 0.0
        self.queued = 0.0
        self.first_byte: float | None = None


def reported_usage(exchange: Exchange) -> Usage:
    """Return what the answer to a request that is over says of its tokens."""
    client = exchange.client
    return read_usage(client.end_of_answer) if client.status == 200 and exchange.outcome == "ok" else Usage()


def finished(exchange: Exchange, usage: Usage) -> RequestFinished:
    """Return what is told of a request that is over."""
    request, lease, client, times = exchange.request, exchange.lease, exchange.client, exchange.times
    chosen = exchange.prefill or lease  # the cache that matters is that of the worker that prefills
    duration = times.clock() - times.began
    # By position, in the order of the fields: 24 keywords would take longer than all the rest of this.
    return RequestFinished(
        exchange.ids.request_id,
        request.session_id if request and request.session_id and _ID.fullmatch(request.session_id) else "",
        exchange.ids.trace_id,
        exchange.path,
        request.model if request else "",
        request.stream if request else False,
        lease.state.worker.url if lease else "",
        lease.state.worker.role.value if lease else "",
        exchange.prefill.state.worker.url if exchange.prefill else "",
        chosen.reason if chosen else "",
        chosen.candidates if chosen else 0,
        exchange.attempts,
        client.status,
        exchange.outcome,
        chosen.prefill_tokens if chosen else request.prompt_tokens if request else 0,
        chosen.cached_tokens if chosen else 0,
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.completion_tokens,
        time.time() - duration,
        times.selecting,
        times.queued,
        None if times.first_byte is None else times.first_byte - times.began,
        duration,
    )

"""Owns the meaning of a transport's exceptions, and the one repetition there is: of a stale connection's request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest

from asgi_router.errors import RouterError, WorkerError, WorkerUnreachable
from asgi_router.upstream import transport as module
from asgi_router.upstream.transport import open_response

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

pytestmark = pytest.mark.anyio

CLOSED = httpx.RemoteProtocolError("Server disconnected without sending a response.")
CONNECT, SENT = "connection.connect_tcp.started", "http11.send_request_headers.started"


class Attempts(httpx.AsyncBaseTransport):
    """Each attempt tells the trace extension its events, and then fails or answers."""

    def __init__(self, *attempts: tuple[list[str], Exception | None]) -> None:
        self.attempts = list(attempts)
        self.made = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        events, error = self.attempts[self.made]
        self.made += 1
        trace: Callable[[str, dict[str, object]], Awaitable[None]] = request.extensions["trace"]
        for event in events:
            await trace(event, {})
        if error is not None:
            raise error
        return httpx.Response(200)


async def outcome(transport: Attempts) -> int | RouterError:
    """The status, or the error that the client is told."""
    try:
        response = await open_response(transport, httpx.Request("POST", "http://w:1", content=b"{}"))
    except RouterError as error:
        return error
    return response.status_code


@pytest.mark.parametrize("error", [CLOSED, httpx.ReadError("reset"), httpx.WriteError("broken pipe")], ids=repr)
async def test_stale_connection(error: Exception) -> None:
    """A request that met a connection which was just being closed is sent once more."""
    transport = Attempts(([SENT], error), ([CONNECT, SENT], None))
    assert await outcome(transport) == 200
    assert transport.made == 2


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ([CONNECT, SENT], CLOSED),  # a new connection: the worker may have begun
        ([], CLOSED),  # a transport that doesn't tell
        ([SENT], httpx.RemoteProtocolError("illegal status line")),  # it did answer
        ([SENT], httpx.ReadTimeout("late")),
    ],
)
async def test_anything_else_is_not_sent_again(events: list[str], error: Exception) -> None:
    """Once a worker may have started on a request it is not sent again."""
    transport = Attempts((events, error), ([SENT], None))
    assert isinstance(await outcome(transport), WorkerError)
    assert transport.made == 1


async def test_a_late_break_is_no_stale_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that dies in the middle of a prefill, on a connection that was used before, is not asked again."""
    times = iter([0.0, module.STALE_WITHIN])
    monkeypatch.setattr(module, "current_time", lambda: next(times))
    transport = Attempts(([SENT], CLOSED), ([SENT], None))
    assert isinstance(await outcome(transport), WorkerError)
    assert transport.made == 1


async def test_a_request_that_brings_its_worker_down_is_not_passed_on_to_the_next() -> None:
    """The second attempt finds nobody listening, but the first was sent: the lease must not move on."""
    transport = Attempts(([SENT], CLOSED), ([], httpx.ConnectError("refused")))
    error = await outcome(transport)
    assert isinstance(error, WorkerError)
    assert not isinstance(error, WorkerUnreachable)
    assert error.status == 502

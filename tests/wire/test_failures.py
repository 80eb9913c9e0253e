"""Owns what a client sees of a worker that fails: a clean error before the answer, never a clean end in it."""

from __future__ import annotations

import json
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.routing import Mount

from asgi_router.errors import AnswerCut
from tests.instruments.raw_http import Truncated
from tests.instruments.raw_server import CLOSE, HANG, REQUEST, RESET, raw_server
from tests.routed import completion_body
from tests.wire.served import OK, SSE_HEAD, Http, chunk, on_both_servers, serve, serve_scripts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.middleware.base import RequestResponseEndpoint
    from starlette.requests import Request
    from starlette.responses import Response

    from asgi_router import RouterMiddleware
    from tests.instruments.raw_http import RawClient
    from tests.instruments.raw_server import Step

pytestmark = on_both_servers

JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


async def read_error(client: RawClient) -> tuple[int, str, str]:
    """Read a whole answer that is an OpenAI-shaped error; return its status, type and code."""
    head = await client.read_head()
    error = json.loads(await client.read_body(head))["error"]
    assert head.header("content-type") == [b"application/json"]
    assert set(error) == {"message", "type", "param", "code"}
    return head.status, error["type"], error["code"]


@contextmanager
def refusing_port() -> Iterator[str]:
    """A worker's URL where nobody listens; the port stays taken, so that nobody can."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"


FAILED = (502, "upstream_error", "worker_failed")
UNSENT = (502, "upstream_error", "worker_unreachable")
LATE = (504, "upstream_error", "worker_timeout")
# Each script is one connection's; a worker that ...
FAILS_BEFORE: dict[str, list[Step]] = {
    "closes without an answer": [REQUEST, CLOSE],
    "closes at once": [CLOSE],
    "resets": [REQUEST, RESET],
    "closes in its head": [REQUEST, b"HTTP/1.1 200 OK\r\ncontent-ty"],
    "resets in its head": [REQUEST, b"HTTP/1.1 200 OK\r\ncontent-ty", RESET],
    "closes after an interim answer": [REQUEST, b"HTTP/1.1 100 Continue\r\n\r\n"],
    "closes after its head": [REQUEST, SSE_HEAD],
    "closes before a declared body": [REQUEST, JSON_HEAD + b"content-length: 9\r\n\r\n"],
    "closes in its first chunk's size": [REQUEST, SSE_HEAD + b"1f"],
    "speaks no HTTP": [REQUEST, b"SSH-2.0-OpenSSH_9.6\r\n\r\n", HANG],
    "speaks HTTP/2": [REQUEST, b"\x00\x00\x12\x04\x00\x00\x00\x00\x00" + bytes(18), CLOSE],
    "sends a bad header": [REQUEST, b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n", HANG],
    "sends two lengths": [REQUEST, JSON_HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\n{}", HANG],
    "sends an endless head": [REQUEST, b"HTTP/1.1 200 OK\r\nx: " + b"a" * 200_000, HANG],
    "sends a bad first chunk": [REQUEST, SSE_HEAD + b"zz\r\n", HANG],
    "switches protocols": [REQUEST, b"HTTP/1.1 101 Go\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", HANG],
    "has an unknown status": [REQUEST, b"HTTP/1.1 999 Odd\r\ncontent-length: 2\r\n\r\n{}", HANG],
}
LATE_BEFORE: dict[str, list[Step]] = {
    "is silent": [REQUEST, HANG],
    "is silent in its head": [REQUEST, b"HTTP/1.1 200 OK\r\n", HANG],
    "is silent after its head": [REQUEST, SSE_HEAD, HANG],
    "is silent in its first chunk": [REQUEST, SSE_HEAD + b"1f\r\n", HANG],
}


@pytest.mark.parametrize("late", [False, True])
async def test_failure_before_the_answer(http: Http, late: bool) -> None:
    """The client gets one clean error, the worker one request, and the client's connection goes on."""
    cases, expected = (LATE_BEFORE, LATE) if late else (FAILS_BEFORE, FAILED)
    settings = {"first_byte_timeout": 0.1} if late else {}
    async with serve_scripts(*cases.values(), http=http, **settings) as (worker, served, client):
        for count, case in enumerate(cases, start=1):
            await client.post(completion_body(stream=True))
            error = await read_error(client)
            if case == "closes at once" and error == UNSENT:
                error = FAILED  # the end was seen before anything was sent, and that is what the client is told
            assert (case, error) == (case, expected)
            await served.assert_released()
            assert (case, len(worker.connections)) == (case, count)
        assert len(client.buffer) == 0


async def test_nobody_listens(http: Http) -> None:
    """A worker that refuses connections is a clean 502."""
    with refusing_port() as url:
        async with serve(url, http=http) as served, served.connect() as client:
            await client.post(completion_body())
            assert await read_error(client) == (502, "upstream_error", "worker_unreachable")


async def test_f08_one_of_two_workers_is_down(http: Http) -> None:
    """F-08: every request succeeds on the worker that is up; one that failed to connect has been counted nowhere.

    The fault was one of disaggregated mode, which is not in this version: this is what holds in mixed mode.
    """
    with refusing_port() as down:
        script: list[Step] = [REQUEST, OK] * 4
        async with (
            raw_server([*script, HANG]) as up,
            serve(down, up, http=http, settings={"policy": "round_robin"}) as served,
            served.connect() as client,
        ):
            for _ in range(4):
                await client.post(completion_body())
                assert await client.read_body(await client.read_head()) == b'{"answer":42}'
            assert len(up.connections[0].requests) == 4


# --- in the answer -------------------------------------------------------------------------------------------

FAILS_LATER: dict[str, list[Step]] = {
    "closes": [CLOSE],
    "resets": [RESET],
    "closes in a chunk": [b"ff\r\ndata: 2", CLOSE],
    "resets in a chunk": [b"ff\r\ndata: 2", RESET],
    "sends a bad chunk": [b"zz\r\n", HANG],
}
LATE_LATER: dict[str, list[Step]] = {"is silent": [HANG], "is silent in a chunk": [b"ff\r\ndata: 2", HANG]}


async def read_cut(client: RawClient) -> bytes:
    """Read a chunked body that is cut between two chunks; return what came."""
    body = b""
    with pytest.raises(Truncated) as cut:  # noqa: PT012 - the loop is the call
        while (data := await client.read_chunk()) is not None:
            body += data
    assert cut.value.partial == b""
    return body


def error_event(data: bytes) -> str:
    """Return the code in an event that is an OpenAI-shaped error."""
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    error = json.loads(data.removeprefix(b"data: "))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    code: str = error["code"]
    return code


@pytest.mark.parametrize("late", [False, True])
async def test_failure_in_a_stream(http: Http, late: bool) -> None:
    """An event stream gets an error event and no `[DONE]`, and its body no end; the connection is closed."""
    cases = LATE_LATER if late else FAILS_LATER
    settings = {"idle_timeout": 0.1} if late else {}
    gates = [anyio.Event() for _ in cases]
    begun = SSE_HEAD + chunk(b"data: 1\n\n")
    scripts: list[list[Step]] = [
        [REQUEST, begun, gate, *rest] for gate, rest in zip(gates, cases.values(), strict=True)
    ]
    async with raw_server(*scripts) as worker, serve(worker, http=http, settings=settings) as served:
        for case, gate in zip(cases, gates, strict=True):
            async with served.connect() as client:
                await client.post(completion_body(stream=True))
                assert (await client.read_head()).status == 200
                assert await client.read_chunk() == b"data: 1\n\n"
                gate.set()
                before, _, event = (await read_cut(client)).rpartition(b"data: ")
                assert (case, before) in [(case, b""), (case, b"data: 2\n\n")]
                assert error_event(b"data: " + event) == ("worker_timeout" if late else "worker_failed")
                await served.assert_released()


FRAMINGS = {
    "chunked": b"transfer-encoding: chunked\r\n\r\n" + chunk(b'{"text": "'),
    "length": b'content-length: 99\r\n\r\n{"text": "',
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("framing", FRAMINGS)
async def test_failure_in_a_json_answer(http: Http, framing: str, late: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Anything but an event stream is cut, neither padded nor ended; the host sees why, as an exception."""
    cases = {**LATE_LATER} if late else {**FAILS_LATER}
    if framing == "length":
        cases.pop("sends a bad chunk", None)  # in a body of declared length no bytes are bad
    settings = {"idle_timeout": 0.1} if late else {}
    gates = [anyio.Event() for _ in cases]
    begun = JSON_HEAD + FRAMINGS[framing]
    scripts: list[list[Step]] = [
        [REQUEST, begun, gate, *rest] for gate, rest in zip(gates, cases.values(), strict=True)
    ]
    async with raw_server(*scripts) as worker, serve(worker, http=http, settings=settings) as served:
        for case, gate in zip(cases, gates, strict=True):
            async with served.connect() as client:
                await client.post(completion_body("a secret"))
                head = await client.read_head()
                if framing == "length":
                    assert head.header("content-length") == [b"99"]
                    assert await client.read_exactly(10) == b'{"text": "'
                    gate.set()
                    assert (case, await client.read_to_end()) in [(case, b""), (case, b"ff\r\ndata: 2")]
                else:
                    assert head.header("content-length") == []
                    assert await client.read_chunk() == b'{"text": "'
                    gate.set()
                    assert (case, await read_cut(client)) in [(case, b""), (case, b"data: 2")]
                await served.assert_released()

    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [AnswerCut] * len(cases)
    assert "a secret" not in caplog.text


async def test_error_event_is_kept_apart_from_an_unfinished_event(http: Http) -> None:
    """Whatever the stream's last bytes were, the error is an event of its own, that every reader sees."""
    cases = {b"data: 1\n\n": b"", b"data: 1\r\n\r\n": b"", b"data: 1\n": b"\n\n", b"dat": b"\n\n"}
    gates = [anyio.Event() for _ in cases]
    scripts: list[list[Step]] = [
        [REQUEST, SSE_HEAD + chunk(last), gate, CLOSE] for last, gate in zip(cases, gates, strict=True)
    ]
    async with raw_server(*scripts) as worker, serve(worker, http=http) as served:
        for (last, gap), gate in zip(cases.items(), gates, strict=True):
            async with served.connect() as client:
                await client.post(completion_body(stream=True))
                await client.read_head()
                assert await client.read_chunk() == last
                gate.set()
                rest = await read_cut(client)
                assert rest.startswith(gap)
                assert error_event(rest[len(gap) :]) == "worker_failed"


class PassThrough(BaseHTTPMiddleware):
    """Host middleware that does nothing, in the way that most host middleware does it."""

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        """Pass the request on."""
        return await call_next(request)


def behind_base_http_middleware(app: RouterMiddleware) -> Starlette:
    """Put the router into a host app of that kind."""
    return Starlette(routes=[Mount("/", app)], middleware=[Middleware(PassThrough)])


async def test_stream_cut_behind_base_http_middleware(http: Http) -> None:
    """`BaseHTTPMiddleware` ends cut streams as if they were whole; the error event is in them all the same."""
    script: list[Step] = [REQUEST, SSE_HEAD + chunk(b"data: 1\n\n"), RESET]
    async with (
        raw_server(script) as worker,
        serve(worker, http=http, wrap=behind_base_http_middleware) as served,
        served.connect() as client,
    ):
        await client.post(completion_body(stream=True))
        body = await client.read_body(await client.read_head())
    assert body.startswith(b"data: 1\n\n")
    assert error_event(body.removeprefix(b"data: 1\n\n")) == "worker_failed"

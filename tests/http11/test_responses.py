"""Owns the proof of the table of responses: on real sockets, in pieces of a byte, and beside stock httpx."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import httpx
import pytest

from asgi_router.upstream.http11 import AnswerCutShort, Http11Transport, InvalidAnswer
from tests.http11.memory import Line
from tests.http11.responses import CASES, REFUSED, VALID, Case
from tests.http11.wire import NO_TLS, SOON, fetch, on_asyncio, served
from tests.instruments.raw_server import CLOSE, HANG, REQUEST, raw_server

if TYPE_CHECKING:
    from tests.http11.memory import Outcome
    from tests.instruments.raw_server import Step

pytestmark = on_asyncio

READ = 262144
"""What both loops read at once, at most."""


def script(case: Case) -> list[Step]:
    """What a worker plays that sends this response."""
    return [REQUEST, case.wire, CLOSE if case.ends else HANG]


@pytest.mark.parametrize("name", VALID)
async def test_a_response_that_is_valid(name: str) -> None:
    """Its reader gets it whole, and its connection is kept exactly if there can be no doubt of where it ended."""
    case = VALID[name]
    async with served(script(case)) as (_, pool, origin):
        got = await fetch(pool, origin, method=case.method)
        assert (got.status, got.body) == (case.status, case.body)
        assert all(name == name.lower() and value == value.strip() for name, value in got.headers)
        assert (pool.active, pool.idle) == (0, int(case.reused))


@pytest.mark.parametrize("name", REFUSED)
async def test_a_response_that_is_refused(name: str) -> None:
    """It is an error at once, though the worker says nothing more; the error is of the kind that it should be."""
    case = REFUSED[name]
    async with served(script(case)) as (server, pool, origin):
        with pytest.raises((InvalidAnswer, AnswerCutShort)):
            await fetch(pool, origin, method=case.method)
        assert (pool.active, pool.idle) == (0, 0)
        await server.connections[0].gone()


async def outcome(case: Case, pieces: list[bytes]) -> tuple[Outcome, bool]:
    """What becomes of a response that comes in these pieces, and whether its connection is kept."""
    line = Line()
    pieces = [piece[at : at + READ] for piece in pieces for at in range(0, len(piece), READ)]
    seen = await line.play(pieces, ends=case.ends, bodiless=case.method == "HEAD")
    for end in ("gone", "closed"):
        assert line.log.told.count(end) == int(not case.reused or case.body is None)
    return seen, "gone" not in line.log.told


@pytest.mark.parametrize("name", CASES)
async def test_segments(name: str) -> None:
    """In pieces of one byte, of two, or cut in two anywhere near its lines' ends, it is the same as in one."""
    case = CASES[name]
    wire = case.wire
    whole = await outcome(case, [wire])
    if case.body is not None:
        status, _, body, end = whole[0]
        assert (status, body, end) == (case.status, case.body, "ended")
    elif whole[0][0]:
        assert whole[0][3] in ("InvalidAnswer", "AnswerCutShort")
    for size in (1, 2):
        if len(wire) < 80_000:
            assert await outcome(case, [wire[at : at + size] for at in range(0, len(wire), size)]) == whole
    ends = [at for at in range(len(wire)) if wire[at] in b"\r\n"]
    for at in {end + shift for end in ends[:60] for shift in (0, 1)} - {0, len(wire)}:
        assert await outcome(case, [wire[:at], wire[at:]]) == whole


async def asked(transport: httpx.AsyncBaseTransport, url: str, method: str) -> object:
    """What a transport makes of a response: status, headers (names in lower case), body; or nothing if it refuses."""
    timeouts = {"connect": SOON, "read": 0.3, "write": SOON, "pool": SOON}
    request = httpx.Request(method, url, extensions={"timeout": timeouts})
    try:
        response = await transport.handle_async_request(request)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        try:
            body = b"".join([chunk async for chunk in response.stream])
        finally:
            await response.aclose()
    except httpx.TransportError:
        return None
    return response.status_code, [(name.lower(), value) for name, value in response.headers.raw], body


@pytest.mark.parametrize("name", CASES)
async def test_beside_stock_httpx(name: str) -> None:
    """The same result and the same use of the connection as stock httpx has, or what the table says, and safer.

    Safer: what it takes and we don't is refused, and what it uses again and we don't is closed. The one exception is
    HTTP/1.0 with `keep-alive`, which is as safe as HTTP/1.1.
    """
    case = CASES[name]
    ours = Http11Transport(keepalive_expiry=3.0, ssl_context=NO_TLS)
    stock = httpx.AsyncHTTPTransport(verify=NO_TLS, trust_env=False)
    async with raw_server(script(case)) as server, ours, stock:
        with anyio.fail_after(SOON):
            seen, theirs = [await asked(transport, server.url, case.method) for transport in (ours, stock)]
        pool = ours.pool()
        assert pool is not None
        kept, stock_kept = bool(pool.idle), bool(stock._pool.connections)
        assert ((seen, kept) != (theirs, stock_kept)) == bool(case.stock), (seen, kept, theirs, stock_kept)
        if case.stock:
            assert seen == theirs or seen is None or name == "chunked in capitals"
            assert stock_kept or not kept or name == "HTTP/1.0 that stays"

"""Owns the request: its bytes, written no faster than the worker takes them, and answers that come in between."""

from __future__ import annotations

import asyncio
import socket
import tracemalloc
from typing import TYPE_CHECKING

import anyio
import pytest

from asgi_router.upstream.http11 import (
    ConnectionBroken,
    RequestRefused,
    SendTimedOut,
    request_head,
)
from asgi_router.upstream.http11.connection import JOINED, PIECE, PIECE_TLS
from tests.http11.memory import Line
from tests.http11.slow_worker import LARGE, OK, accepted, slow_worker
from tests.http11.wire import fetch, head, on_asyncio, read_all, served, until
from tests.instruments.raw_server import CLOSE, HANG, REQUEST

if TYPE_CHECKING:
    from collections.abc import Iterable


pytestmark = on_asyncio

EARLY = b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno"


@pytest.mark.parametrize("size", [0, 2, JOINED, JOINED + 1, PIECE, PIECE + 1, 3 * PIECE, 3 * PIECE + 7])
async def test_the_bytes_of_a_request(size: int) -> None:
    """Head and body as they were given, whatever the size."""
    body = LARGE[:size]
    async with served([REQUEST, OK, HANG]) as (server, pool, origin):
        assert (await fetch(pool, origin, body)).body == b"ok"
        assert bytes(server.connections[0].received) == head(origin, body) + body
        assert pool.idle == 1


@pytest.mark.parametrize("size", [0, 2, JOINED, JOINED + 1, PIECE])
async def test_one_write(size: int) -> None:
    """Head and body are handed over together: one system call, and a worker that needs one read."""
    line = Line()
    task = asyncio.create_task(line.connection.ask(b"head", LARGE[:size]))
    await asyncio.sleep(0)
    assert line.transport.writes == 1
    assert bytes(line.transport.written) == b"head" + LARGE[:size]
    line.connection.data_received(OK)
    assert (await task).take() == b"ok"


@pytest.mark.parametrize(("extra", "piece"), [({}, PIECE), ({"sslcontext": object()}, PIECE_TLS)], ids=["plain", "tls"])
async def test_pieces(extra: dict[str, object], piece: int) -> None:
    """Less at once under TLS: what doesn't leave within the send time-out can't be told from a worker that is stuck."""
    line = Line()
    line.transport.get_extra_info = lambda name, default=None: extra.get(name, default)  # type: ignore[method-assign]
    line.connection.pause_writing()
    task = asyncio.create_task(line.connection.ask(b"head", LARGE))
    await asyncio.sleep(0)
    assert len(line.transport.written) == len(b"head") + piece
    line.connection.resume_writing()
    await until(lambda: len(line.transport.written) == len(b"head") + len(LARGE))
    assert line.transport.writes == len(LARGE) // piece
    line.connection.data_received(OK)
    assert (await task).take() == b"ok"


async def test_a_large_body_to_a_worker_that_is_slow() -> None:
    """It is handed over in pieces, as the worker takes them; what is held a second time is bounded."""
    async with slow_worker() as (listener, pool, origin), anyio.create_task_group() as group:
        got = []

        async def send() -> None:
            got.append(await fetch(pool, origin, LARGE))

        tracemalloc.start()
        try:
            group.start_soon(send)
            async with accepted(listener) as worker:
                await until(lambda: any(connection._writing_paused for connection in pool._open))
                await anyio.sleep(0.05)  # nothing more may happen in it
                assert tracemalloc.get_traced_memory()[1] < 4 * PIECE
                tracemalloc.stop()
                request = head(origin, LARGE)
                assert await worker.read(len(request) + len(LARGE))
                assert bytes(worker.got) == request + LARGE
                await worker.send(OK)
                await until(lambda: bool(got))
                assert (got[0].body, pool.idle) == (b"ok", 1)
        finally:
            tracemalloc.stop()


async def test_a_worker_that_takes_nothing() -> None:
    """After `send_timeout` that is an error; one that takes a little now and then may go on."""
    async with slow_worker() as (listener, pool, origin), anyio.create_task_group() as group:
        outcomes: list[object] = []

        async def send() -> None:
            try:
                outcomes.append(await pool.request(origin, head(origin, LARGE), LARGE, send_timeout=0.3))
            except SendTimedOut as exc:
                outcomes.append(exc)

        group.start_soon(send)
        async with accepted(listener) as worker:
            for _ in range(10):
                assert await worker.read(1_000_000)
                await anyio.sleep(0.06)
            assert outcomes == []
            await until(lambda: bool(outcomes))
            assert isinstance(outcomes[0], SendTimedOut)
            assert not await worker.read()
        assert (pool.active, pool.idle) == (0, 0)


async def test_a_worker_that_takes_a_little() -> None:
    """What counts is whether any byte was taken in the time, not whether there is room for more already."""
    line = Line()
    sizes = iter([3, 2, 2, 2])  # before and after each wait
    line.transport.get_write_buffer_size = lambda: next(sizes)  # type: ignore[method-assign]
    line.connection.pause_writing()
    with pytest.raises(SendTimedOut):
        await line.connection.ask(b"head", LARGE, send_timeout=0.01)
    assert list(sizes) == []


@pytest.mark.parametrize("ends", [False, True], ids=["stays", "closes"])
async def test_an_answer_before_the_body_is_sent(ends: bool) -> None:
    """It is delivered, no more is sent, and the connection isn't used again: the worker waits for more of a body."""
    async with slow_worker() as (listener, pool, origin), anyio.create_task_group() as group:
        got = []

        async def send() -> None:
            got.append(await fetch(pool, origin, LARGE))

        group.start_soon(send)
        async with accepted(listener) as worker:
            assert await worker.read(1000)
            await worker.send(EARLY)
            if ends:
                worker.sock.shutdown(socket.SHUT_WR)
            await until(lambda: bool(got))
            assert (got[0].status, got[0].body) == (413, b"no")
            assert (pool.active, pool.idle) == (0, 0)
            assert not await worker.read()
            assert len(worker.got) < len(LARGE)


async def test_a_worker_that_ends_in_its_answer_and_does_not_read_on() -> None:
    """The socket is closed at once: the loop's own close would wait until the worker takes the rest of the body."""
    async with slow_worker() as (listener, pool, origin), anyio.create_task_group() as group:
        failed = asyncio.Event()

        async def send() -> None:
            answer = await pool.request(origin, head(origin), LARGE)
            with pytest.raises(ConnectionBroken):
                await read_all(answer)
            answer.close()
            failed.set()

        group.start_soon(send)
        async with accepted(listener) as worker:
            assert await worker.read(1000)
            await worker.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nbegun")
            worker.sock.shutdown(socket.SHUT_WR)
            await failed.wait()
            await until(lambda: pool.sockets == 0)


async def test_an_answer_before_the_body_has_come() -> None:
    """The same when all is sent that there is, and the caller has more of it; it isn't asked for that any more."""
    begun = anyio.Event()
    async with served([begun, EARLY, HANG]) as (_, pool, origin):

        class Rest:
            """It comes when the answer has."""

            asked = 0

            def __aiter__(self) -> Rest:
                return self

            async def __anext__(self) -> bytes:
                self.asked += 1
                begun.set()
                await until(lambda: pool.active == 0)
                return b"rest"

        rest = Rest()
        answer = await pool.request(origin, head(origin, b"first, rest"), b"first, ", more=rest)
        assert (answer.status, await answer.read(), rest.asked) == (413, b"no", 1)
        assert pool.idle == 0


async def test_an_answer_while_the_end_of_a_body_is_with_the_loop() -> None:
    """What was handed over is not what was sent: such a connection isn't used again either."""
    line = Line()
    line.transport.unsent = 1
    assert (await line.play([OK]))[2:] == (b"ok", "ended")
    assert line.log.told == ["opened", "gone", "closed"]


async def test_an_interim_answer_before_the_body_is_sent() -> None:
    """100 is no answer: the body goes on."""
    async with slow_worker() as (listener, pool, origin), anyio.create_task_group() as group:
        got = []

        async def send() -> None:
            got.append(await fetch(pool, origin, LARGE))

        group.start_soon(send)
        async with accepted(listener) as worker:
            assert await worker.read(1000)
            await worker.send(b"HTTP/1.1 100 Continue\r\n\r\n")
            assert await worker.read(len(head(origin, LARGE)) + len(LARGE) - 1000)
            await worker.send(OK)
            await until(lambda: bool(got))
            assert (got[0].body, pool.idle) == (b"ok", 1)


@pytest.mark.parametrize("reset", [False, True], ids=["close", "reset"])
async def test_a_worker_that_goes_while_the_body_is_sent(reset: bool) -> None:
    """An error, which tells that the request was not sent whole."""
    async with slow_worker() as (listener, pool, origin), anyio.create_task_group() as group:
        caught: list[ConnectionBroken] = []

        async def send() -> None:
            try:
                await fetch(pool, origin, LARGE)
            except ConnectionBroken as exc:
                caught.append(exc)

        group.start_soon(send)
        async with accepted(listener) as worker:
            assert await worker.read(1000)
            if reset:
                worker.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        await until(lambda: bool(caught))
        assert caught[0].sending


async def test_nothing_is_written_to_a_connection_that_is_lost() -> None:
    """The loop tells of the loss in its next turn; until then it would take, and throw away, a whole large body."""
    line = Line()
    writelines = line.transport.writelines

    def lose(list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        writelines(list_of_data)
        line.transport.abort()

    line.transport.writelines = lose  # type: ignore[method-assign]
    with pytest.raises(ConnectionBroken):
        await line.connection.ask(b"head", LARGE)
    assert line.transport.writes == 1


async def test_a_body_that_comes_in_pieces() -> None:
    """It is sent as it comes, behind what was there at the beginning, and never a second time."""

    class Pieces:
        """Three pieces."""

        def __init__(self) -> None:
            self.left = [b"a" * PIECE * 2, b"b", b"c" * 100]

        def __aiter__(self) -> Pieces:
            return self

        async def __anext__(self) -> bytes:
            await anyio.lowlevel.checkpoint()
            if not self.left:
                raise StopAsyncIteration
            return self.left.pop(0)

    body = b"first" + b"".join(Pieces().left)
    async with served([REQUEST, OK, REQUEST, CLOSE], [REQUEST, OK, HANG]) as (server, pool, origin):
        answer = await pool.request(origin, head(origin, body), b"first", more=Pieces())
        assert (await read_all(answer)).body == b"ok"
        assert server.connections[0].requests[0][1] == body
        with pytest.raises(ConnectionBroken):
            await pool.request(origin, head(origin, body), b"first", more=Pieces())
        assert len(server.connections) == 1


BAD_HEADS: dict[str, tuple[bytes, bytes, list[tuple[bytes, bytes]]]] = {
    "line end in a value": (b"GET", b"/", [(b"x", b"a\r\ny: b")]),
    "line feed in a value": (b"GET", b"/", [(b"x", b"a\ny: b")]),
    "carriage return in a value": (b"GET", b"/", [(b"x", b"a\ry: b")]),
    "NUL in a value": (b"GET", b"/", [(b"x", b"a\0b")]),
    "DEL in a value": (b"GET", b"/", [(b"x", b"a\x7fb")]),
    "line end at the end of a value": (b"GET", b"/", [(b"x", b"a\r\n")]),
    "line end in a name": (b"GET", b"/", [(b"x: a\r\ny", b"b")]),
    "colon in a name": (b"GET", b"/", [(b"x:", b"b")]),
    "space in a name": (b"GET", b"/", [(b"x ", b"b")]),
    "space before a name": (b"GET", b"/", [(b" x", b"b")]),
    "no name": (b"GET", b"/", [(b"", b"b")]),
    "non-ASCII name": (b"GET", b"/", [(b"caf\xe9", b"b")]),
    "line end in the target": (b"GET", b"/ HTTP/1.1\r\nx: y\r\n\r\n", []),
    "space in the target": (b"GET", b"/a b", []),
    "NUL in the target": (b"GET", b"/a\0b", []),
    "non-ASCII target": (b"GET", b"/caf\xe9", []),
    "no target": (b"GET", b"", []),
    "space in the method": (b"GET /", b"/", []),
    "line end in the method": (b"GET\r\n", b"/", []),
    "no method": (b"", b"/", []),
}


@pytest.mark.parametrize("name", BAD_HEADS)
async def test_a_head_that_would_be_something_else(name: str) -> None:
    """Whatever let it through before: a request has the lines that it was given, or it isn't sent."""
    with pytest.raises(RequestRefused):
        request_head(*BAD_HEADS[name])


async def test_a_head_as_it_is_given() -> None:
    """Order, case, repetition, white space and Latin-1 are the caller's."""
    headers = [(b"Host", b"w"), (b"x", b" a\tb "), (b"X", b"caf\xe9"), (b"x-e", b""), (b"!#$%&'*+-.^_`|~0", b"1")]
    assert request_head(b"POST", b"/%2F?a=[{}]|'\"", headers) == (
        b"POST /%2F?a=[{}]|'\" HTTP/1.1\r\nHost: w\r\nx:  a\tb \r\nX: caf\xe9\r\nx-e: \r\n!#$%&'*+-.^_`|~0: 1\r\n\r\n"
    )

"""Owns the answer as its reader gets it: no faster than it is taken, and at once what is there."""

from __future__ import annotations

import asyncio
import socket

import anyio
import pytest

from asgi_router.upstream.http11 import (
    ConnectionBroken,
    ReadTimedOut,
)
from asgi_router.upstream.http11.connection import PAUSE_ABOVE
from tests.http11.memory import Line
from tests.http11.slow_worker import LARGE, READ, accepted, slow_worker
from tests.http11.wire import head, on_asyncio, served, until
from tests.instruments.raw_server import HANG, REQUEST

pytestmark = on_asyncio


async def test_an_answer_that_nobody_reads() -> None:
    """The worker has to wait: what is held is bounded. Read on, and nothing is missing."""
    start = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(LARGE)
    async with slow_worker() as (listener, pool, origin), anyio.create_task_group() as group:

        async def serve() -> None:
            async with accepted(listener) as worker:
                assert await worker.read(len(head(origin)) + 2)
                worker.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
                await worker.send(start + LARGE)
                await worker.read()

        group.start_soon(serve)
        answer = await pool.request(origin, head(origin), b"{}")
        (connection,) = pool._open
        await until(lambda: connection.reading_paused)
        await anyio.sleep(0.05)  # nothing more may come in it
        assert answer.size <= PAUSE_ABOVE + READ
        body = bytearray()
        while data := await answer.read():
            assert len(data) <= PAUSE_ABOVE + READ
            body += data
        assert bytes(body) == LARGE
        assert (pool.active, pool.idle) == (0, 1)
        answer.close()
        await pool.aclose()


async def test_a_paused_answer_that_is_closed() -> None:
    """Its connection is closed, whatever is left of it."""
    start = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(LARGE)
    async with served([REQUEST, start + LARGE, HANG]) as (_, pool, origin):
        answer = await pool.request(origin, head(origin), b"{}")
        (connection,) = pool._open
        await until(lambda: connection.reading_paused)
        for _ in range(3):
            answer.close()
        assert (pool.active, pool.idle) == (0, 0)
        with pytest.raises(ConnectionBroken):
            await answer.read()


async def test_what_is_there_is_read_without_a_turn_of_the_loop() -> None:
    """In one piece, however it came; `take` tells when one would have to wait, and `complete` when nothing follows."""
    line = Line()
    task = asyncio.create_task(line.connection.ask(b"", b""))
    await asyncio.sleep(0)
    line.connection.data_received(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n1\r\nb\r\n")
    answer = await task
    for piece in (b"1\r\nc\r\n", b"1\r\nd", b"\r\n"):
        line.connection.data_received(piece)
    with pytest.raises(StopIteration) as stopped:
        answer.read().send(None)
    assert stopped.value.value == b"abcd"
    assert (answer.complete, answer.take()) == (False, None)
    line.connection.data_received(b"1\r\ne\r\n0\r\n\r\n")
    assert bool(answer.complete)
    assert [answer.take(), answer.take(), answer.take()] == [b"e", b"", b""]
    answer.close()
    assert answer.take() == b""
    assert line.log.told == ["opened", "freed"]


async def test_two_readers_of_one_answer() -> None:
    """That is a mistake, and is told."""
    line = Line()
    task = asyncio.create_task(line.connection.ask(b"", b""))
    await asyncio.sleep(0)
    line.connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n")
    answer = await task
    reader = asyncio.create_task(answer.read())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError):
        await answer.read()
    line.connection.data_received(b"more")
    assert await reader == b"more"
    assert repr(answer) == "<Answer 200 open, 0 bytes to read>"


async def test_what_came_before_a_failure_is_read_before_it() -> None:
    """Every byte that came counts; the failure stays."""
    begun = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nbegun\r\nzz\r\n"
    async with served([REQUEST, begun, HANG]) as (_, pool, origin):
        answer = await pool.request(origin, head(origin), b"{}")
        assert await answer.read() == b"begun"
        for _ in range(2):
            with pytest.raises(Exception, match="not valid in HTTP"):
                await answer.read()
        answer.close()


async def test_read_timeout() -> None:
    """It is one for each wait, for the head and in the body; in the body one may read again."""
    gate = anyio.Event()
    begun = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nbe"
    async with served([REQUEST, HANG], [REQUEST, begun, gate, b"go", HANG]) as (_, pool, origin):
        with pytest.raises(ReadTimedOut):
            await pool.request(origin, head(origin), b"{}", read_timeout=0.05)
        assert pool.active == 0
        answer = await pool.request(origin, head(origin), b"{}", read_timeout=5)
        assert await answer.read(0.05) == b"be"
        with pytest.raises(ReadTimedOut):
            await answer.read(0.05)
        gate.set()
        assert await answer.read(5) == b"go"
        assert pool.idle == 1

"""Owns which connection a request gets: when one is used again, when a request is repeated, what is left behind."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from typing import TYPE_CHECKING

import anyio
import pytest
import uvloop

from asgi_router.upstream.http11 import ConnectFailed, ConnectionBroken, Http11Error, Http11Transport, Origin
from asgi_router.upstream.http11 import pool as module
from asgi_router.upstream.http11.connection import Connection
from asgi_router.upstream.http11.dial import Dial
from tests.http11.wire import NO_TLS, fetch, head, on_asyncio, served, until
from tests.instruments.raw_server import CLOSE, HANG, REQUEST, RESET

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from asgi_router.upstream.http11 import Pool
    from tests.instruments.raw_server import Step

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
TURN: list[Step] = [REQUEST, OK]
ENDS = pytest.mark.parametrize("end", [CLOSE, RESET], ids=["close", "reset"])


async def fetch_together(pool: Pool, origin: Origin, count: int, gate: anyio.Event) -> None:
    """Send that many requests at once, which are answered when the gate is opened."""
    async with anyio.create_task_group() as group:
        for _ in range(count):
            group.start_soon(fetch, pool, origin)
        await until(lambda: pool.active == count and pool.sockets == count)
        gate.set()


class TestReuse:
    """What becomes of a connection after an answer, and before the next request."""

    pytestmark = on_asyncio

    async def test_a_connection_is_used_again(self) -> None:
        """One after the other, requests go over one connection, and the answer knows it."""
        async with served([*TURN * 5, HANG]) as (server, pool, origin):
            reused = []
            for _ in range(5):
                answer = await pool.request(origin, head(origin), b"{}")
                reused.append(answer.reused)
                assert await answer.read() == b"ok"
            assert reused == [False] + [True] * 4
            assert [len(connection.requests) for connection in server.connections] == [5]

    async def test_the_last_used_is_used_first(self) -> None:
        """So those that aren't needed any more get old, and are closed."""
        gate = anyio.Event()
        async with served([REQUEST, gate, OK, *TURN * 8, HANG]) as (server, pool, origin):
            await fetch_together(pool, origin, 3, gate)
            assert pool.idle == 3
            for _ in range(6):
                await fetch(pool, origin)
            assert sorted(len(connection.requests) for connection in server.connections) == [1, 1, 7]

    async def test_a_connection_is_free_before_its_answer_is_read(self) -> None:
        """When all of an answer has come, another request may use the connection, and neither disturbs the other."""
        second = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nyes"
        async with served([REQUEST, OK, REQUEST, second, HANG]) as (server, pool, origin):
            first = await pool.request(origin, head(origin), b"{}")
            await until(lambda: first.complete)
            assert (pool.active, pool.idle) == (0, 1)
            assert (await fetch(pool, origin)).body == b"yes"
            first_body = await first.read()
            first.close()
            assert (first_body, pool.idle) == (b"ok", 1)
            assert len(server.connections) == 1

    @ENDS
    async def test_a_worker_that_closes_while_idle(self, end: Step) -> None:
        """Such a connection leaves the pool at once."""
        gate = anyio.Event()
        async with served([REQUEST, OK, gate, end], [REQUEST, OK, HANG]) as (server, pool, origin):
            await fetch(pool, origin)
            assert pool.idle == 1
            gate.set()
            await until(lambda: pool.idle == 0)
            assert pool.sockets == 0
            await fetch(pool, origin)
            assert len(server.connections) == 2

    async def test_bytes_from_an_idle_connection(self) -> None:
        """An answer that nobody has asked for is no answer to the next request: the connection is closed."""
        gate = anyio.Event()
        evil = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"
        async with served([REQUEST, OK, gate, evil, HANG], [REQUEST, OK, HANG]) as (_, pool, origin):
            await fetch(pool, origin)
            gate.set()
            await until(lambda: pool.idle == 0)
            assert (await fetch(pool, origin)).body == b"ok"

    async def test_an_idle_connection_gets_old(self) -> None:
        """It is closed by itself after `keepalive_expiry`; there is one timer for all, and none without them."""
        gate = anyio.Event()
        async with served([REQUEST, gate, OK, HANG], keepalive_expiry=0.05) as (_, pool, origin):
            await fetch_together(pool, origin, 3, gate)
            assert pool.idle == 3
            assert bool(pool._timer)
            await until(lambda: pool.idle == 0)
            assert not pool._timer
            assert not pool._lanes

    async def test_an_old_connection_is_not_used(self) -> None:
        """Not even if its timer is late."""
        async with served([REQUEST, OK, HANG], keepalive_expiry=0.05) as (server, pool, origin):
            await fetch(pool, origin)
            pool._stop_timer()
            await anyio.sleep(0.06)
            await fetch(pool, origin)
            assert len(server.connections) == 2

    async def test_none_is_kept_without_an_expiry(self) -> None:
        """With 0 each request has a connection of its own."""
        async with served([REQUEST, OK, HANG], keepalive_expiry=0) as (server, pool, origin):
            for count in (1, 2):
                await fetch(pool, origin)
                assert (pool.active, pool.idle, len(server.connections)) == (0, 0, count)

    async def test_idle_connections_are_bounded(self) -> None:
        """What is above the limit is closed."""
        gate = anyio.Event()
        async with served([REQUEST, gate, OK, HANG], max_idle=2) as (_, pool, origin):
            await fetch_together(pool, origin, 5, gate)
            assert (pool.active, pool.idle) == (0, 2)

    async def test_no_request_looks_at_all_connections(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whatever their number, one is looked at: the time of a request doesn't grow with the pool (httpx#3215)."""
        looks = 0
        usable = Connection.usable

        def note(connection: Connection) -> bool:
            nonlocal looks
            looks += 1
            return bool(usable.__get__(connection))

        gate = anyio.Event()
        async with served([REQUEST, gate, OK, *TURN * 5, HANG]) as (_, pool, origin):
            await fetch_together(pool, origin, 50, gate)
            assert pool.idle == 50
            monkeypatch.setattr(Connection, "usable", property(note))
            for _ in range(4):
                await fetch(pool, origin)
            assert looks == 4

    async def test_its_repr_tells_its_state(self) -> None:
        """How many are active and idle, for each origin."""
        async with served([REQUEST, OK, REQUEST, HANG]) as (_, pool, origin):
            assert repr(pool) == "<Pool []>"
            await fetch(pool, origin)
            where = origin.authority.decode()
            assert repr(pool) == f"<Pool [{where}: 0 active, 1 idle]>"
            async with anyio.create_task_group() as group:
                group.start_soon(pool.request, origin, head(origin), b"{}")
                await until(lambda: pool.active == 1)
                assert repr(pool) == f"<Pool [{where}: 1 active, 0 idle]>"
                assert [repr(c) for c in pool._open] == ["<Connection waiting for a head, used before>"]
                group.cancel_scope.cancel()


class TestStale:
    """A request that meets a connection which the worker is just closing."""

    pytestmark = on_asyncio

    @ENDS
    async def test_it_is_sent_once_more_on_a_new_connection(self, end: Step) -> None:
        """Not on another idle one, which is as old: stock httpx fails there (httpx#2983)."""
        gate = anyio.Event()
        old: list[Step] = [REQUEST, gate, OK, REQUEST, end]
        async with served(old, old, old, [REQUEST, OK, HANG]) as (server, pool, origin):
            await fetch_together(pool, origin, 3, gate)
            assert pool.idle == 3
            assert (await fetch(pool, origin)).body == b"ok"
            counts = sorted(len(connection.requests) for connection in server.connections)
            assert counts == [1, 1, 1, 2]
            assert server.connections[3].requests == [server.connections[0].requests[0]]

    async def test_it_is_not_sent_a_third_time(self) -> None:
        """A worker that does so on the new connection, too, has failed."""
        async with served([REQUEST, OK, REQUEST, CLOSE], [REQUEST, CLOSE]) as (server, pool, origin):
            await fetch(pool, origin)
            with pytest.raises(ConnectionBroken):
                await fetch(pool, origin)
            assert [len(connection.requests) for connection in server.connections] == [2, 1]

    @ENDS
    async def test_a_new_connection_is_not_stale(self, end: Step) -> None:
        """There the worker may have begun."""
        async with served([REQUEST, end], [REQUEST, OK, HANG]) as (server, pool, origin):
            with pytest.raises(ConnectionBroken):
                await fetch(pool, origin)
            assert len(server.connections) == 1

    @pytest.mark.parametrize("answer", [b"H", b"HTTP/1.1 100 Continue\r\n\r\n", OK[:-1]])
    async def test_an_answer_that_has_begun(self, answer: bytes) -> None:
        """A single byte of it shows that the worker has seen the request."""
        async with served([REQUEST, OK, REQUEST, answer, CLOSE], [REQUEST, OK, HANG]) as (server, pool, origin):
            await fetch(pool, origin)
            with pytest.raises(ConnectionBroken) as caught:
                await fetch(pool, origin)
            assert caught.value.answered
            assert len(server.connections) == 1

    async def test_a_late_break(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """After a second it is no race: the worker may have died of this very request."""
        monkeypatch.setattr(module, "STALE_WITHIN", 0.0)
        async with served([REQUEST, OK, REQUEST, CLOSE], [REQUEST, OK, HANG]) as (server, pool, origin):
            await fetch(pool, origin)
            with pytest.raises(ConnectionBroken):
                await fetch(pool, origin)
            assert len(server.connections) == 1

    async def test_a_worker_that_is_gone_then(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Not "unreachable", for that would mean that nothing was sent: the first attempt was."""
        async with served([REQUEST, OK, REQUEST, CLOSE]) as (_, pool, origin):
            await fetch(pool, origin)

            async def refuse(*_: object) -> None:
                raise ConnectionRefusedError

            monkeypatch.setattr(Dial, "_try", refuse)
            with pytest.raises(ConnectionBroken):
                await fetch(pool, origin)
            with pytest.raises(ConnectFailed):
                await fetch(pool, origin)

    async def test_progress(self) -> None:
        """Connecting and sending are told as they begin. A repetition tells of no connecting: something was sent."""
        told: list[bool] = []

        def progress(*, sending: bool) -> None:
            told.append(sending)

        async with served([REQUEST, OK, REQUEST, CLOSE], [REQUEST, OK, HANG]) as (_, pool, origin):
            for _ in range(2):
                answer = await pool.request(origin, head(origin), b"{}", progress=progress)
                answer.close()
                told.append(answer.reused)
            assert told == [False, True, False, True, True, False]


class TestEnd:
    """What the end of a pool, or of its loop, leaves behind."""

    pytestmark = on_asyncio

    async def test_requests_in_flight(self) -> None:
        """They fail, whatever they are at; nothing is left, and nothing can be asked any more."""
        begun = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nbegun"
        async with served([REQUEST, HANG], [REQUEST, begun, HANG]) as (server, pool, origin):
            failures: list[Http11Error] = []

            async def fail() -> None:
                with pytest.raises(ConnectionBroken) as caught:
                    await fetch(pool, origin)
                failures.append(caught.value)

            async with anyio.create_task_group() as group:
                group.start_soon(fail)
                await server.connected(1)
                group.start_soon(fail)
                await server.connected(2)
                await server.connections[1].received_requests(1)
                await pool.aclose()
            assert len(failures) == 2
            with pytest.raises(ConnectFailed):
                await fetch(pool, origin)
            await pool.aclose()

    async def test_a_cancelled_end(self) -> None:
        """All is closed though nobody waits for it."""
        async with served([REQUEST, OK, HANG]) as (server, pool, origin):
            await fetch(pool, origin)
            with anyio.CancelScope() as scope:
                scope.cancel()
                await pool.aclose()
            assert pool.idle == 0
            await server.connections[0].gone()
            await until(lambda: pool.sockets == 0)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_loop_that_ends(run: Callable[[Coroutine[None, None, None]], None]) -> None:
    """Nobody has closed the pool: its sockets are closed without a warning, and the next loop gets its own."""
    transport = Http11Transport(keepalive_expiry=3.0, ssl_context=NO_TLS)
    ended = threading.Event()

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(2):
                sock, _ = listener.accept()
                with sock:
                    while sock.recv(65536):
                        sock.sendall(OK)
            ended.set()

        threading.Thread(target=serve, daemon=True).start()
        origin = Origin(f"http://127.0.0.1:{listener.getsockname()[1]}")

        async def use() -> None:
            pool = transport.pool()
            assert pool is not None
            for _ in range(2):
                assert (await fetch(pool, origin)).body == b"ok"

        for _ in range(2):
            run(use())
            gc.collect()  # what was left open would warn now, and warnings are errors
        assert ended.wait(5)
        assert len(transport._pools) == 1

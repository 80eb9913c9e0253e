"""Owns the proof that a caller may be cancelled at any point: the connection is closed, and nothing else is left."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
from contextlib import asynccontextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

import anyio
import pytest

from asgi_router.upstream.http11 import Http11Error, Origin
from tests.http11.certificate import server_context
from tests.http11.test_connecting import listening, tls_pool
from tests.http11.wire import SOON, descriptors, fetch, head, new_pool, on_asyncio, read_all, served, until
from tests.instruments.cancel import cancel_in_scope, cancel_natively
from tests.instruments.raw_server import CLOSE, HANG, REQUEST, raw_server
from tests.instruments.servers import run_uvicorn

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from starlette.types import Receive, Scope, Send

    from asgi_router.upstream.http11 import Pool
    from tests.instruments.raw_server import Step

pytestmark = on_asyncio

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
BEGUN = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nbegun\r\n"
TURNS = 40  # more than any of the requests here takes to where it hangs

KINDS = pytest.mark.parametrize("kind", ["scope", "once", "three times"])


async def cancelled(pool: Pool, origin: Origin, kind: str, turn: int, body: bytes = b"{}") -> bool:
    """Run a request that is cancelled after so many turns of the loop; tell whether that came before its end."""
    try:
        if kind == "scope":
            outcome = await cancel_in_scope(lambda: fetch(pool, origin, body), at=turn)
        else:
            moments: Sequence[int] = [turn] if kind == "once" else [turn, 0, 1]
            outcome = await cancel_natively(fetch(pool, origin, body), at=moments)
    except AssertionError as exc:
        assert "before it could be cancelled" in str(exc)  # noqa: PT017 - it is the instrument's
        return False
    # anyio cancels no task that is about to run: such a request may come to its end without another wait.
    assert kind == "scope" or not outcome.swallowed
    assert outcome.exception is None
    return outcome.cancelled


def close_all(pool: Pool) -> None:
    """Let the next request find no connection."""
    for connection in tuple(pool._open):
        connection.abort()


@asynccontextmanager
async def nothing_left(pool: Pool) -> AsyncIterator[None]:
    """The pool has the sockets that it knows of, and no task survives."""
    tasks = asyncio.all_tasks()
    yield
    assert pool.active == 0
    await until(lambda: pool.sockets == pool.idle)
    await until(lambda: not [task for task in asyncio.all_tasks() - tasks if "dial" in repr(task)])
    assert not pool._dials
    gc.collect()  # an exception that nobody has fetched would be told now, and make the test fail


@KINDS
@pytest.mark.parametrize(
    "script",
    [
        pytest.param([REQUEST, HANG], id="no answer"),
        pytest.param([REQUEST, BEGUN, HANG], id="in the answer"),
        pytest.param([REQUEST, b"HTTP/1.1 100 Continue\r\n\r\n", HANG], id="interim"),
        pytest.param([HANG], id="nothing read"),
    ],
)
async def test_at_every_turn_on_a_new_connection(kind: str, script: list[Step]) -> None:
    """While connecting, sending, waiting and reading."""
    async with served(script) as (_, pool, origin), nothing_left(pool):
        for turn in range(TURNS):
            assert await cancelled(pool, origin, kind, turn)
            assert (pool.active, pool.idle) == (0, 0)


@KINDS
async def test_at_every_turn_on_a_used_connection(kind: str) -> None:
    """The connection is closed if it was given to the request, and kept if it wasn't."""
    async with served([REQUEST, OK, REQUEST, HANG]) as (_, pool, origin), nothing_left(pool):
        for turn in range(TURNS):
            await fetch(pool, origin)
            assert pool.idle == 1
            assert await cancelled(pool, origin, kind, turn)
            assert pool.active == 0
            assert kind == "scope" or pool.idle == int(turn == 0)
            close_all(pool)


@KINDS
async def test_at_every_turn_of_a_large_body(kind: str) -> None:
    """In the middle of it, too."""
    body = b"x" * 3_000_000
    async with raw_server([HANG]) as server, new_pool() as pool, nothing_left(pool):
        for turn in range(TURNS):
            assert await cancelled(pool, Origin(server.url), kind, turn, body)
            assert (pool.active, pool.idle) == (0, 0)


@KINDS
async def test_at_every_turn_of_a_request_that_succeeds(kind: str) -> None:
    """Whichever comes first, the end or the cancellation: the connection is idle or closed."""
    ended = 0
    async with served([REQUEST, OK, HANG]) as (_, pool, origin), nothing_left(pool):
        for turn in range(100):
            ended += not await cancelled(pool, origin, kind, turn)
            assert pool.active == 0
            close_all(pool)
    assert ended > 0


@KINDS
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_at_every_turn_of_a_handshake(kind: str, host: str) -> None:
    """TLS takes the most turns, and its connection is nobody's before it is made. A name is looked up in a thread."""
    before = 0
    async with listening(ssl_context=server_context()) as port, tls_pool() as pool, nothing_left(pool):
        for turn in range(TURNS):
            await cancelled(pool, Origin(f"https://{host}:{port}"), kind, turn)
            close_all(pool)
            if turn == 20:
                await until(lambda: pool.sockets == 0)
                before = descriptors()
        await until(lambda: pool.sockets == 0)
        await until(lambda: descriptors() <= before)


async def test_at_every_turn_of_a_repetition() -> None:
    """Of a request that met a stale connection."""
    async with raw_server([REQUEST, OK, REQUEST], [REQUEST, HANG], [REQUEST, OK, REQUEST], [REQUEST, HANG]) as server:
        origin = Origin(server.url)
        for turn in range(0, 24, 2):
            async with new_pool() as pool, nothing_left(pool):
                with anyio.move_on_after(SOON):
                    server.connections.clear()  # the scripts begin anew
                    await fetch(pool, origin)
                    assert await cancelled(pool, origin, "once", turn)


async def test_a_reader_that_is_cancelled_may_go_on() -> None:
    """Cancelling a `read` closes nothing: whoever holds the answer decides."""
    gate = anyio.Event()
    async with served([REQUEST, BEGUN, gate, b"0\r\n\r\n", HANG]) as (_, pool, origin):
        answer = await pool.request(origin, head(origin), b"{}")
        assert await answer.read() == b"begun"
        with anyio.move_on_after(0.01):
            await answer.read()
        gate.set()
        assert (await read_all(answer)).body == b""
        assert pool.idle == 1


async def test_a_failure_holds_no_prompt() -> None:
    """What was raised is gone with its handler, and with it the frames that hold the prompt: no cycle is left."""
    bad: list[Step] = [REQUEST, b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nbegun", CLOSE]
    late: list[Step] = [REQUEST, HANG]
    invalid: list[Step] = [REQUEST, b"SSH-2.0\r\n"]
    async with served(bad, late, invalid, [REQUEST, CLOSE]) as (_, pool, origin):
        body = b"a prompt"
        request = head(origin, body)
        gc.collect()
        gc.disable()
        try:
            for timeout in (None, 0.02, None, None):
                with suppress(Http11Error):
                    await read_all(await pool.request(origin, request, body, read_timeout=timeout))
            with socket.socket() as sock, suppress(Http11Error):
                sock.bind(("127.0.0.1", 0))
                await pool.request(Origin(f"http://127.0.0.1:{sock.getsockname()[1]}"), request, body)
            await until(lambda: pool.sockets == 0)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            holders = [thing for thing in gc.garbage if isinstance(thing, Http11Error | FrameType)]
            assert holders == []
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()


class Wavering:
    """An ASGI worker that takes a random number of turns for each of its steps."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(5):
            for _ in range(self.random.randrange(8)):
                await anyio.lowlevel.checkpoint()
            await send({"type": "http.response.body", "body": b"data: %d\n\n" % number, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@pytest.mark.usefixtures("late_worker")
@pytest.mark.parametrize("seed", range(2))
async def test_at_random_moments_under_load(seed: int) -> None:
    """Hundreds of requests, ten at a time, are cancelled anywhere: no descriptor is left, the next one works."""
    rng = random.Random(seed)
    outcomes: set[str] = set()
    async with run_uvicorn(Wavering(seed), lifespan="off", http="httptools") as worker, new_pool() as pool:
        origin = Origin(worker.url)
        before = descriptors()

        async def visit() -> None:
            for _ in range(40):
                task = asyncio.create_task(fetch(pool, origin, b"x" * rng.choice([2, 2, 20_000, 400_000])))
                for _ in range(rng.choice([0, 1, 2, 5, 10, 20, 50])):
                    await anyio.lowlevel.checkpoint()
                for _ in range(rng.randrange(3)):
                    task.cancel()
                await asyncio.wait([task])
                if task.cancelled():
                    outcomes.add("cancelled")
                else:
                    assert not isinstance(task.exception(), Http11Error)
                    assert len(task.result().body) == 45
                    outcomes.add("served")

        async with nothing_left(pool), anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(visit)
        assert outcomes == {"cancelled", "served"}
        assert (await fetch(pool, origin)).status == 200
        close_all(pool)
        await until(lambda: not worker.server_state.connections)
        await until(lambda: descriptors() <= before)

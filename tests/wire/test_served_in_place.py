"""Shows requests over our own transport, which are served in the server's task: ended at any turn, in any way.

Nothing is left: no lease, no pin, no connection in use, no cancellation that comes out later.
"""

from __future__ import annotations

import asyncio
import gc
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, cast

import anyio
import pytest

from asgi_router import Router, RouterMiddleware, RouterSettings
from asgi_router.errors import ShuttingDown
from asgi_router.exchange import Exchange
from tests.instruments import asyncio_only
from tests.instruments.raw_server import HANG, REQUEST, raw_server
from tests.routed import completion_body, counters, unreachable_app
from tests.wire.served import LAST_CHUNK, OK, SSE_HEAD, chunk

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.types import Message, Scope

    from asgi_router.upstream.http11 import Http11Transport
    from tests.instruments.raw_server import Step

pytestmark = [pytest.mark.anyio, asyncio_only]

TURNS = 40
STREAM: list[Step] = [REQUEST, SSE_HEAD + chunk(b"data: x\n\n"), chunk(b"data: y\n\n"), HANG]
WHOLE: list[Step] = [REQUEST, OK, REQUEST, OK, HANG]
ENDLESS: list[Step] = [REQUEST, SSE_HEAD, HANG]


class Call:
    """One request to the router, as a server would make it, in a task of its own."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.gone = asyncio.Event()
        self.sent: list[Message] = []
        self._unread = [completion_body(stream=True)]
        self.task = asyncio.create_task(self._run(RouterMiddleware(unreachable_app, router=router)))

    async def _run(self, app: RouterMiddleware) -> str:
        scope: Scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "client": None}
        await app(scope, self._receive, self._send)
        await asyncio.sleep(0)  # a cancellation that was forgotten would come out here
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        return "returned"

    async def _receive(self) -> Message:
        if self._unread:
            return {"type": "http.request", "body": self._unread.pop(), "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    async def ended(self) -> str:
        """Wait for its end; return how it came."""
        with anyio.fail_after(5):
            await asyncio.wait([self.task])
        return "cancelled" if self.task.cancelled() else self.task.result()


def cancelled(call: Call) -> None:
    call.task.cancel()


def left(call: Call) -> None:
    call.gone.set()


def shut_down(call: Call) -> None:
    for exchange in call.router._exchanges:
        exchange.stop(ShuttingDown("The server is shutting down."))


def late(call: Call) -> None:
    for exchange in call.router._exchanges:
        if exchange._attempt is not None:
            exchange._attempt.scope.cancel()


WAYS: dict[str, tuple[Callable[[Call], None], ...]] = {
    "cancelled": (cancelled,),
    "cancelled twice": (cancelled, cancelled),
    "left": (left,),
    "shut down": (shut_down,),
    "late": (late,),
    "left and cancelled": (left, cancelled),
    "late and left": (late, left),
    "late and cancelled": (late, cancelled),
    "shut down and late": (shut_down, late),
}


@asynccontextmanager
async def routed(script: list[Step]) -> AsyncIterator[Router]:
    """A router before a worker, each of whose connections follows the script."""
    async with raw_server(*[script] * (4 * TURNS)) as worker:
        settings = RouterSettings(workers=[worker.url], health_interval=0)
        async with Router(settings) as router:
            yield router


async def assert_nothing_left(router: Router) -> None:
    """Every counter is back, every connection idle or closed, no task goes on."""
    pool = cast("Http11Transport", router._transport).pool()
    assert pool is not None
    assert {counters(worker) for worker in router.stats().workers} == {(0, 0, 0, 0)}
    assert all(state.prefixes.pinned == 0 for state in router.workers)
    assert router.stats().exchanges == 0
    assert pool.active == 0
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    names = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]  # type: ignore[union-attr]
    assert not [name for name in names if "Dispatcher" in name], names


@pytest.mark.parametrize("script", [STREAM, WHOLE, ENDLESS], ids=["stream", "whole", "endless"])
@pytest.mark.parametrize("way", WAYS)
async def test_ended_at_any_turn(way: str, script: list[Step]) -> None:
    """Whatever ends it, whenever: it ends, by that, and nothing is left."""
    async with routed(script) as router:
        for turn in range(TURNS):
            call = Call(router)
            for _ in range(turn):
                await asyncio.sleep(0)
            if call.task.done():
                assert await call.ended() == "returned"  # it was whole before its turn came
                continue
            for act in WAYS[way]:
                act(call)
            if script is ENDLESS or script is STREAM:
                left(call)  # should the way have come too early to find anything
            outcome = await call.ended()
            assert outcome == "returned" or cancelled in WAYS[way]
            await assert_nothing_left(router)


@pytest.mark.parametrize("slow", ["http.response.start", "http.response.body"])
async def test_what_comes_while_a_message_is_sent_is_sent_too(slow: str) -> None:
    """A `send` takes its time, and meanwhile the answer goes on and ends: none of it is lost, in either framing."""
    for head, rest in (
        (SSE_HEAD + chunk(b"data: 1\n\n"), [chunk(b"data: 2\n\n"), chunk(b"data: 3\n\n") + LAST_CHUNK]),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 27\r\n\r\ndata: 1\n\n", [b"data: 2\n\n", b"data: 3\n\n"]),
    ):
        sending = anyio.Event()
        async with routed([REQUEST, head, sending, *rest, HANG]) as router:
            call = Call(router)

            async def send(message: Message, call: Call = call, sending: anyio.Event = sending) -> None:
                call.sent.append(message)
                if message["type"] == slow and not sending.is_set():
                    sending.set()
                    await anyio.sleep(0.05)  # the worker's rest comes within

            call._send = send  # type: ignore[method-assign]
            assert await call.ended() == "returned"
            assert b"".join(message.get("body", b"") for message in call.sent) == b"data: 1\n\ndata: 2\n\ndata: 3\n\n"
            assert call.sent[-1]["more_body"] is False
            await assert_nothing_left(router)


async def test_a_cancellation_of_the_hosts_own_goes_on() -> None:
    """A host's time-out around the app is the host's: it comes out as that."""
    async with routed(ENDLESS) as router:
        call = Call(router)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await call._run(RouterMiddleware(unreachable_app, router=router))
        call.gone.set()
        await call.ended()
        await assert_nothing_left(router)


async def test_a_send_that_swallows_the_cancellation_ends_with_the_client() -> None:
    """A host that catches everything around its `send` can't keep a stream alive whose client has left."""
    script: list[Step] = [REQUEST, SSE_HEAD + chunk(b"data: x\n\n"), *[chunk(b"data: y\n\n")] * 50, LAST_CHUNK, HANG]
    async with routed(script) as router:
        call = Call(router)
        begun = asyncio.Event()

        async def swallowing(message: Message) -> None:
            call.sent.append(message)
            if message["type"] == "http.response.body":
                begun.set()
                try:
                    await asyncio.sleep(0.01)
                except asyncio.CancelledError:
                    return

        call._send = swallowing  # type: ignore[method-assign]
        await begun.wait()
        left(call)
        assert await call.ended() == "returned"
        assert call.sent[-1].get("more_body", True)  # it does not look whole
        await assert_nothing_left(router)


async def test_a_send_that_swallows_its_time_out_ends_the_request() -> None:
    """Nor can it keep one alive that was late: its time limit is over, and no other would follow."""
    async with routed(STREAM) as router:
        call = Call(router)

        async def swallowing(message: Message) -> None:
            call.sent.append(message)
            if message["type"] == "http.response.body":
                asyncio.get_running_loop().call_soon(late, call)
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(5)

        call._send = swallowing  # type: ignore[method-assign]
        assert await call.ended() == "returned"
        assert call.sent[-1]["more_body"] is True
        await assert_nothing_left(router)


async def test_a_receive_that_swallows_a_shutdown_ends_the_request() -> None:
    """A host's `receive` that catches the cancellation can't bring a request to a worker that was to be ended."""
    async with routed(ENDLESS) as router:
        call = Call(router)
        receive = call._receive

        async def swallowing() -> Message:
            if call._unread:
                asyncio.get_running_loop().call_soon(shut_down, call)
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(5)
            return await receive()

        call._receive = swallowing  # type: ignore[method-assign]
        assert await call.ended() == "returned"
        assert call.sent[0]["status"] == 503
        await assert_nothing_left(router)


def living_exchanges() -> set[int]:
    return {id(thing) for thing in gc.get_objects() if isinstance(thing, Exchange)}


@pytest.mark.parametrize("end", [left, shut_down])
async def test_an_ended_request_holds_no_prompt(end: Callable[[Call], None]) -> None:
    """The reason is gone with the request, and with it the frames that hold the prompt: no cycle is left."""
    async with routed(ENDLESS) as router:
        gc.collect()
        gc.disable()
        try:
            before = living_exchanges()  # other tests' own
            call = Call(router)
            while not any(exchange.attempts for exchange in router._exchanges):  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0)
            end(call)
            assert await call.ended() == "returned"
            await assert_nothing_left(router)
            assert living_exchanges() <= before
        finally:
            gc.enable()

"""Shows what the instruments are for: each known way to get a streaming relay wrong fails at least one check here.

The relay is a stand-in of forty lines with one switch per fault; the counter plays the part of a lease.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import anyio
import httpx
import pytest

from tests.instruments import asyncio_only
from tests.instruments.asgi_client import DISCONNECT, Exchange
from tests.instruments.cancel import cancel_in_scope, cancel_natively
from tests.instruments.fake_worker import HANG, FakeFleet, Script

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

pytestmark = pytest.mark.anyio

URL = "http://w1:8000"
STREAM = Script(body=[b"a", b"b"])


@dataclass
class Relay:
    """An ASGI app that relays the fleet's one worker. Each switch that is not at its default is a fault."""

    fleet: FakeFleet
    release_after_close: bool = False
    shield: bool = True
    finished_before_end: bool = True
    watch_from_start: bool = True
    close: bool = True
    held: int = 0
    outcome: str = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Relay one request."""
        while (await receive()).get("more_body", False):
            pass
        self.held += 1
        try:
            await self._relay(receive, send)
        finally:
            if not self.release_after_close:
                self.held -= 1

    async def _relay(self, receive: Receive, send: Send) -> None:
        self.outcome, finished = "", False
        request = httpx.Request("POST", URL)
        async with anyio.create_task_group() as group:
            with anyio.CancelScope() as scope:

                async def watch() -> None:
                    await receive()
                    if not finished:
                        scope.cancel()

                if self.watch_from_start:
                    group.start_soon(watch)
                response = await self.fleet.handle_async_request(request)
                if not self.watch_from_start:
                    group.start_soon(watch)
                try:
                    await send({"type": "http.response.start", "status": response.status_code, "headers": []})
                    assert isinstance(response.stream, httpx.AsyncByteStream)
                    async for chunk in response.stream:
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    finished = self.finished_before_end
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                    finished = True
                finally:
                    if self.close:
                        with anyio.move_on_after(0.05, shield=self.shield):
                            await response.aclose()
                    if self.release_after_close:
                        self.held -= 1
            self.outcome = "gone" if scope.cancelled_caught else "done"
            group.cancel_scope.cancel()


def relays(script: Script, *faults: str) -> Relay:
    """A relay to one worker with the named faults switched on."""
    relay = Relay(FakeFleet({URL: script}))
    for fault in faults:
        setattr(relay, fault, not getattr(relay, fault))
    return relay


async def whole_answer(*faults: str) -> None:
    """A normal end is no disconnect, and leaves nothing open."""
    relay = relays(STREAM, *faults)
    exchange = await Exchange().run(relay)
    assert exchange.finished_cleanly
    assert (relay.outcome, relay.held) == ("done", 0)
    relay.fleet.assert_clean()


async def gone_in_prefill(*faults: str) -> None:
    """A client that leaves before the head is let go at once."""
    relay = relays(Script(head=[HANG]), *faults)
    exchange = Exchange()
    async with exchange.running(relay, timeout=0.2):
        await relay.fleet[URL].received(1)
        exchange.disconnect()
    assert (relay.outcome, relay.held) == ("gone", 0)


async def gone_in_stream(*faults: str) -> None:
    """A client that leaves in mid-stream ends the worker's response, too."""
    relay = relays(Script(body=[b"a", HANG]), *faults)
    await Exchange(at={1: DISCONNECT}).run(relay, timeout=0.2)
    assert (relay.outcome, relay.held) == ("gone", 0)
    relay.fleet.assert_clean()


async def close_raises(*faults: str) -> None:
    """A worker whose close fails costs no counter."""
    relay = relays(replace(STREAM, close=[httpx.ReadError("broken")]), *faults)
    with pytest.raises(ExceptionGroup):
        await Exchange().run(relay)
    assert relay.held == 0


async def slow_close_in_cancelled_scope(*faults: str) -> None:
    """A slow close comes to its end although the host has cancelled the request."""
    gate = anyio.Event()
    relay = relays(Script(body=[b"a", HANG], close=[gate]), *faults)
    exchange = Exchange()

    async def end_of_close() -> None:
        await relay.fleet[URL].closing(1)
        gate.set()

    async with anyio.create_task_group() as group:
        group.start_soon(end_of_close)
        outcome = await cancel_in_scope(lambda: exchange.run(relay), at=lambda: exchange.body_at_least(1))
    assert outcome.cancelled
    relay.fleet.assert_clean()


async def two_native_cancels(*faults: str) -> None:
    """A second native cancel, inside the shielded close, costs no counter either."""
    relay = relays(Script(body=[b"a", HANG], close=[HANG]), *faults)
    exchange = Exchange()
    moments = [lambda: exchange.body_at_least(1), lambda: relay.fleet[URL].closing(1)]
    outcome = await cancel_natively(exchange.run(relay), at=moments)
    assert (outcome.cancelled, outcome.sent) == (True, 2)
    assert relay.held == 0


Check = Callable[..., Awaitable[None]]
CHECKS: list[Check] = [whole_answer, gone_in_prefill, gone_in_stream, close_raises, slow_close_in_cancelled_scope]


@pytest.mark.parametrize("check", CHECKS)
async def test_the_right_relay_passes(check: Check) -> None:
    """No check blames a relay without faults."""
    await check()


@asyncio_only
async def test_the_right_relay_passes_native_cancels() -> None:
    """Nor does the one that needs asyncio."""
    await two_native_cancels()


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("release_after_close", close_raises),
        ("shield", slow_close_in_cancelled_scope),
        ("shield", gone_in_stream),
        ("finished_before_end", whole_answer),
        ("watch_from_start", gone_in_prefill),
        ("close", whole_answer),
        ("close", gone_in_stream),
    ],
)
async def test_each_fault_is_noticed(fault: str, check: Check) -> None:
    """The relay with one fault fails the check that is there for it."""
    with pytest.raises((AssertionError, TimeoutError)):
        await check(fault)


@asyncio_only
async def test_a_release_behind_the_close_is_noticed_by_native_cancels() -> None:
    """It is skipped when the second cancel interrupts the close."""
    with pytest.raises(AssertionError):
        await two_native_cancels("release_after_close")

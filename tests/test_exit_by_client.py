"""Owns the ways out that begin with the client or the host: it leaves, its `send` raises, its scope is cancelled.

The table of `test_exit_paths.py` goes on here; native cancellation is in `test_native_cancel.py`.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.instruments.asgi_client import DISCONNECT, HANG, Exchange
from tests.routed import (
    KINDS,
    Kind,
    Routed,
    answer,
    completion_body,
    exchange_for,
    interrupted,
)

if TYPE_CHECKING:
    from starlette.types import Message

    from tests.instruments.fake_worker import Script

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.usefixtures("short_graces"),
    pytest.mark.parametrize("kind", KINDS),
]


def silent(kind: Kind, phase: str) -> Script:
    """A worker of which nothing more is heard, from this phase on."""
    return {
        "connect": replace(answer(kind), connect=[HANG]),
        "head": replace(answer(kind), head=[HANG]),
        "first byte": interrupted(kind, HANG, after=0),
    }[phase]


# --- the client leaves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("server", ["uvicorn", "hypercorn"])
async def test_disconnect_in_the_upload(kind: Kind, server: str) -> None:
    """Half a prompt is never sent to a worker."""
    routed = Routed(answer(kind))
    exchange = Exchange(body=[completion_body()[:100], DISCONNECT], server=server)  # type: ignore[arg-type]
    await exchange.run(routed.app)
    assert (exchange.starts, routed.worker.connects) == (0, 0)
    routed.assert_released(exchange)


@pytest.mark.parametrize("server", ["uvicorn", "hypercorn"])
@pytest.mark.parametrize("phase", ["connect", "head", "first byte"])
async def test_disconnect_in_prefill(kind: Kind, server: str, phase: str) -> None:
    """The worker is let go at once, not at its first token (vllm-project/router#215, smg#2136)."""
    routed = Routed(silent(kind, phase))
    exchange = exchange_for(server=server)
    async with exchange.running(routed.app):
        await routed.worker.changes.until(
            lambda: routed.worker.connects == 1 and (phase == "connect" or bool(routed.worker.calls))
        )
        assert routed.counters[0][2] == 1
        exchange.disconnect()

    assert exchange.starts == 0
    routed.assert_released(exchange)


@pytest.mark.parametrize("phase", ["connect", "head", "first byte"])
async def test_a_client_that_left_leaves_no_prompt(kind: Kind, phase: str) -> None:
    """Not even for a while: a collection of garbage finds nothing that holds the prompt, whatever is in circles.

    anyio's task groups keep the exception of a task that was cancelled in one.
    """
    routed = Routed(silent(kind, phase))
    body = completion_body("x" * 300_000)
    gc.collect()
    gc.disable()
    try:
        exchange = Exchange(body=body)
        async with exchange.running(routed.app):
            await routed.worker.changes.until(
                lambda: routed.worker.connects == 1 and (phase == "connect" or bool(routed.worker.calls))
            )
            exchange.disconnect()
        routed.assert_released(exchange)
        held = sys.getrefcount(body)
        gc.collect()
        assert held == sys.getrefcount(body)
    finally:
        gc.enable()


async def test_disconnect_before_a_worker_is_contacted(kind: Kind) -> None:
    """A client that has gone when its body is complete costs no prefill."""
    routed = Routed(answer(kind))
    exchange = exchange_for()
    inner_receive = exchange.receive

    async def receive() -> object:
        if exchange.disconnected:  # uvicorn doesn't suspend either when there is something to tell
            return {"type": "http.disconnect"}
        message = await inner_receive()
        exchange.disconnect()
        return message

    exchange.receive = receive  # type: ignore[assignment,method-assign]
    await exchange.run(routed.app)
    assert routed.worker.connects == 0
    routed.assert_released(exchange)


@pytest.mark.parametrize("spec_version", ["2.3", "2.4", None])
@pytest.mark.parametrize("late_send", [None, OSError("gone")], ids=["silent", "raising"])
async def test_disconnect_mid_answer(kind: Kind, spec_version: str | None, late_send: Exception | None) -> None:
    """Whether `send` tells or not, the disconnect ends the request (litellm#30244)."""
    routed = Routed(interrupted(kind, HANG))
    exchange = exchange_for(spec_version=spec_version, late_send=late_send)
    async with exchange.running(routed.app):
        await exchange.body_at_least(1)
        assert routed.counters[0][0] == 1
        exchange.disconnect()

    assert (exchange.starts, exchange.ends) == (1, 0)
    routed.assert_released(exchange)


async def test_disconnect_while_send_blocks(kind: Kind) -> None:
    """A client that stopped reading and then left is noticed."""
    routed = Routed(answer(kind))
    exchange = exchange_for(at={1: HANG})
    async with exchange.running(routed.app):
        await exchange.hung()
        exchange.disconnect()

    routed.assert_released(exchange)


async def test_disconnect_with_the_last_message_is_a_success(kind: Kind) -> None:
    """Servers report a disconnect once the answer is complete; it is none, and the last `send` may return."""
    routed = Routed(answer(kind))
    exchange = exchange_for(at={"end": DISCONNECT})
    inner_send = exchange.send
    returned: list[object] = []

    async def send(message: Message) -> None:
        await inner_send(message)
        returned.append(message)

    exchange.send = send  # type: ignore[method-assign]
    await exchange.run(routed.app)
    assert exchange.finished_cleanly
    assert returned == exchange.sent
    routed.assert_released(exchange)


async def test_endless_answer_without_a_pause(kind: Kind) -> None:
    """A worker whose bytes never have to be waited for doesn't starve the watcher (pitfall 1.8)."""
    routed = Routed(answer(kind))
    chunks = 0

    class Endless(httpx.AsyncByteStream):
        def __aiter__(self) -> Endless:
            return self

        async def __anext__(self) -> bytes:
            nonlocal chunks
            chunks += 1
            return b"data: x\n\n"

    class Transport(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Endless())

    routed.router._mode._upstream.transport = Transport()
    exchange = await exchange_for(at={3: DISCONNECT}, send_suspends=False).run(routed.app)
    assert 3 <= chunks < 1000
    routed.assert_released(exchange)


# --- send and receive raise ----------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["start", 1, "end"])
async def test_send_raises_oserror(kind: Kind, moment: str | int) -> None:
    """An OSError out of `send` is a disconnect (ASGI 2.4), even if `receive` never tells."""
    routed = Routed(answer(kind))
    exchange = await exchange_for(at={moment: OSError("gone")}, server="hypercorn").run(routed.app)
    assert not exchange.complete
    routed.assert_released(exchange)


@pytest.mark.parametrize("moment", ["start", 1, "end"])
async def test_send_raises_anything_else(kind: Kind, moment: str | int) -> None:
    """Another exception is the host's: it comes out bare, not in a group, and the lease is released."""
    routed = Routed(answer(kind))
    exchange = exchange_for(at={moment: LookupError("odd")})
    with pytest.raises(LookupError, match="odd"):
        await exchange.run(routed.app)

    routed.assert_released(exchange)


async def test_receive_raises(kind: Kind) -> None:
    """A `receive` that breaks will never tell of a disconnect, so the request ends."""
    routed = Routed(replace(answer(kind), head=[HANG]))
    exchange = exchange_for()
    inner_receive = exchange.receive

    async def receive() -> object:
        message = await inner_receive()
        if message["type"] == "http.disconnect":
            raise LookupError("broken")
        return message

    exchange.receive = receive  # type: ignore[assignment,method-assign]
    async with exchange.running(routed.app):
        await routed.worker.received(1)
        exchange.disconnect()

    routed.assert_released(exchange)


# --- cancellation by a scope -----------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["connect", "head", "first byte", "mid", "send"])
async def test_scope_cancellation(kind: Kind, phase: str) -> None:
    """A host that cancels the request's scope gets the lease back at once (vllm-project/vllm-ascend#8836)."""
    script = {
        "connect": replace(answer(kind), connect=[HANG]),
        "head": replace(answer(kind), head=[HANG]),
        "first byte": interrupted(kind, HANG, after=0),
        "mid": interrupted(kind, HANG),
        "send": answer(kind),
    }[phase]
    routed = Routed(script)
    exchange = exchange_for(at={1: HANG} if phase == "send" else {})
    async with exchange.running(routed.app):
        if phase == "mid":
            await exchange.body_at_least(1)
        elif phase == "send":
            await exchange.hung()
        else:
            await routed.worker.changes.until(
                lambda: routed.worker.connects == 1 and (phase == "connect" or bool(routed.worker.calls))
            )
        assert routed.counters[0][0] == 1
        exchange.cancel()

    assert exchange.cancelled
    routed.assert_released(exchange)

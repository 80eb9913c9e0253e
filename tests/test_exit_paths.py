"""Owns the table of ways out: however a request ends, both counters are back, and the response is closed.

Each test looks at the counters while the request is in flight, so that zero afterwards means something.
Native cancellation is in `test_native_cancel.py`, real sockets in `test_wire.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import httpx
import pytest

from asgi_router.errors import AnswerCut
from tests.instruments.asgi_client import HANG
from tests.routed import (
    KINDS,
    OTHER,
    WORKER,
    Kind,
    Routed,
    answer,
    error_of,
    exchange_for,
    interrupted,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.instruments.steps import Pause

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.usefixtures("short_graces"),
    pytest.mark.parametrize("kind", KINDS),
]


# --- success -----------------------------------------------------------------------------------------------


async def test_success(kind: Kind) -> None:
    """A whole answer releases the lease; while it runs, the request and its tokens are counted."""
    gate = anyio.Event()
    routed = Routed(replace(answer(kind), head=[gate]))
    exchange = exchange_for()
    async with exchange.running(routed.app):
        await routed.worker.received(1)
        requests, tokens, waiting, pending = routed.counters[0]
        assert (requests, waiting) == (1, 1)
        assert tokens == pending > 900
        gate.set()

    assert exchange.finished_cleanly
    assert exchange.body == b"".join(chunk for chunk in answer(kind).body if isinstance(chunk, bytes))
    routed.assert_released(exchange)


async def test_first_byte_takes_the_request_out_of_the_queue_and_no_more(kind: Kind) -> None:
    """At the first body byte the pending tokens go, and both counters stay."""
    gate = anyio.Event()
    routed = Routed(interrupted(kind, gate, *list(answer(kind).body)[1:]))
    exchange = exchange_for()
    async with exchange.running(routed.app):
        await exchange.body_at_least(1)
        requests, tokens, waiting, pending = routed.counters[0]
        assert (requests, waiting, pending) == (1, 0, 0)
        assert tokens > 900
        gate.set()

    assert exchange.finished_cleanly
    routed.assert_released(exchange)


async def test_counters_are_back_before_the_client_has_the_end(kind: Kind) -> None:
    """Whoever has seen a whole answer finds the counters as they were."""
    routed = Routed(answer(kind))
    exchange = exchange_for(at={"end": HANG})
    async with exchange.running(routed.app):
        await exchange.hung()
        assert routed.counters == [(0, 0, 0, 0)]
        exchange.disconnect()

    routed.assert_released(exchange)


@pytest.mark.parametrize("status", [201, 400, 401, 404, 422, 429, 500, 503])
async def test_worker_status_is_the_clients_status(kind: Kind, status: int) -> None:
    """A worker's own error is an answer like any other: status and bytes unchanged (F-01)."""
    routed = Routed({WORKER: replace(answer(kind), status=status), OTHER: answer(kind)})
    routed.router.workers.remove(OTHER)
    exchange = await exchange_for().run(routed.app)
    assert exchange.status == status
    assert exchange.body == b"".join(chunk for chunk in answer(kind).body if isinstance(chunk, bytes))
    routed.assert_released(exchange)


@pytest.mark.parametrize("status", [200, 204, 304])
async def test_empty_answer(kind: Kind, status: int) -> None:
    """An answer without a body is relayed as such."""
    routed = Routed(replace(answer(kind), status=status, body=[], headers=[]))
    exchange = await exchange_for().run(routed.app)
    assert (exchange.status, exchange.body, exchange.ends) == (status, b"", 1)
    routed.assert_released(exchange)


# --- closing the worker's response ---------------------------------------------------------------------------


@pytest.mark.parametrize("close", [[httpx.ReadError("broken")], [HANG], [RuntimeError("odd")]], ids=repr)
async def test_close_that_raises_or_hangs_after_success(kind: Kind, close: Sequence[Pause]) -> None:
    """A response that can't be closed costs a bounded time, and no counter (sgl-project/sglang-omni#931)."""
    routed = Routed(replace(answer(kind), close=close))
    exchange = await exchange_for().run(routed.app)
    assert exchange.finished_cleanly
    assert routed.worker.never_closed == 0
    routed.assert_released(exchange, responses_closed=close != [HANG])


@pytest.mark.parametrize("close", [[httpx.ReadError("broken")], [HANG], [RuntimeError("odd")]], ids=repr)
async def test_close_that_raises_or_hangs_after_disconnect(kind: Kind, close: Sequence[Pause]) -> None:
    """The same when the client has gone (sgl-project/sglang-omni#931)."""
    routed = Routed(replace(interrupted(kind, HANG), close=close))
    exchange = exchange_for()
    async with exchange.running(routed.app):
        await exchange.body_at_least(1)
        assert routed.counters[0][0] == 1
        exchange.disconnect()

    assert routed.worker.never_closed == 0
    routed.assert_released(exchange, responses_closed=close != [HANG])


async def test_slow_close_finishes_although_the_scope_is_cancelled(kind: Kind) -> None:
    """The close is shielded: a cancelled anyio scope doesn't cut it short."""
    gate = anyio.Event()
    routed = Routed(replace(interrupted(kind, HANG), close=[gate]))
    exchange = exchange_for()
    async with exchange.running(routed.app):
        await exchange.body_at_least(1)
        exchange.cancel()
        await routed.worker.closing(1)
        gate.set()

    assert exchange.cancelled
    routed.assert_released(exchange)


# --- the worker fails ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [httpx.ConnectError("refused"), httpx.ConnectTimeout("late")], ids=repr)
async def test_connect_error(kind: Kind, error: Exception) -> None:
    """No worker can be connected to: 502."""
    routed = Routed(replace(answer(kind), connect=[error]))
    exchange = await exchange_for().run(routed.app)
    assert error_of(exchange) == (502, "worker_unreachable")
    routed.assert_released(exchange)


async def test_f07_a_connect_error_moves_the_lease(kind: Kind) -> None:
    """F-07: after a connect error the next worker gets the request, and the lease with both counters."""
    gate = anyio.Event()
    scripts = {
        WORKER: replace(answer(kind), connect=[httpx.ConnectError("refused")]),
        OTHER: replace(answer(kind), head=[gate]),
    }
    routed = Routed(scripts, policy="round_robin")
    exchange = exchange_for()
    async with exchange.running(routed.app):
        await routed.fleet[OTHER].received(1)
        assert routed.counters[0] == (0, 0, 0, 0)
        assert routed.counters[1][0] == 1
        gate.set()

    assert exchange.finished_cleanly
    assert routed.worker.connects == 1
    routed.assert_released(exchange)


@pytest.mark.parametrize(("attempts", "tried"), [(0, 1), (1, 2), (2, 3), (9, 4)])
async def test_f07_each_worker_is_tried_once(kind: Kind, attempts: int, tried: int) -> None:
    """F-07: at most RETRY_ATTEMPTS further workers are tried, each once; then 502."""
    dead = replace(answer(kind), connect=[httpx.ConnectError("refused")])
    routed = Routed({f"http://w{n}:1": dead for n in range(4)}, retry_attempts=attempts)
    exchange = await exchange_for().run(routed.app)
    assert error_of(exchange) == (502, "worker_unreachable")
    connects = [worker.connects for worker in routed.fleet.workers.values()]
    assert sum(connects) == tried
    assert max(connects) == 1
    routed.assert_released(exchange)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (httpx.ReadError("reset"), (502, "worker_failed")),
        (httpx.WriteError("reset"), (502, "worker_failed")),
        (httpx.RemoteProtocolError("garbage"), (502, "worker_failed")),
        (httpx.ReadTimeout("late"), (504, "worker_timeout")),
        (httpx.WriteTimeout("late"), (504, "worker_timeout")),
        (httpx.LocalProtocolError("bad header"), (400, "invalid_request")),
        (OSError("odd"), (502, "worker_failed")),
        (RuntimeError("the client has been closed"), (502, "worker_failed")),
    ],
    ids=lambda value: repr(value)[:30],
)
async def test_f06_error_before_the_head(kind: Kind, error: Exception, expected: tuple[int, str]) -> None:
    """F-06: the worker may have begun, so the request is not sent again; the client gets one clean error."""
    failing = replace(answer(kind), head=[error])
    routed = Routed({WORKER: failing, OTHER: failing})
    exchange = await exchange_for().run(routed.app)
    assert error_of(exchange) == expected
    assert sum(worker.connects for worker in routed.fleet.workers.values()) == 1
    routed.assert_released(exchange)


async def test_error_between_head_and_first_byte(kind: Kind) -> None:
    """The client has seen nothing yet, so the answer is an honest 502 and not a broken 200."""
    routed = Routed(interrupted(kind, httpx.ReadError("reset"), after=0))
    exchange = await exchange_for().run(routed.app)
    assert error_of(exchange) == (502, "worker_failed")
    routed.assert_released(exchange)


@pytest.mark.parametrize("error", [httpx.ReadError("reset"), httpx.ReadTimeout("late"), ValueError("odd")], ids=repr)
async def test_f25_error_mid_answer(kind: Kind, error: Exception) -> None:
    """F-25: an answer that broke off never looks whole: an error event in a stream, a cut otherwise."""
    routed = Routed(interrupted(kind, error))
    exchange = exchange_for()
    if kind == "stream":
        await exchange.run(routed.app)
        assert exchange.body.count(b'data: {"error": {') == 1
        assert exchange.body.endswith(b"}}\n\n")
        assert b"[DONE]" not in exchange.body
    else:
        with pytest.raises(AnswerCut):
            await exchange.run(routed.app)

    assert (exchange.status, exchange.ends) == (200, 0)
    routed.assert_released(exchange)


@pytest.mark.parametrize("announced", ["13", "15", "7", "1"])
async def test_answer_of_another_length_than_announced(kind: Kind, announced: str) -> None:
    """An answer that is longer or shorter than its Content-Length is cut, whatever the transport lets through."""
    script = replace(answer("json"), headers=[("content-type", "text/event-stream"), ("content-length", announced)])
    routed = Routed(script)
    exchange = exchange_for()
    with pytest.raises(AnswerCut):
        await exchange.run(routed.app)

    assert exchange.ends == 0
    assert len(exchange.body) <= int(announced)
    routed.assert_released(exchange)


# --- time-outs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", ["head", "body"])
async def test_f05_first_byte_timeout(kind: Kind, late: str) -> None:
    """F-05: a worker that takes a request and never answers ends with FIRST_BYTE_TIMEOUT, head or no head: 504."""
    script = replace(answer(kind), head=[HANG]) if late == "head" else interrupted(kind, HANG, after=0)
    routed = Routed(script, first_byte_timeout=0.05)
    exchange = await exchange_for().run(routed.app)
    assert error_of(exchange) == (504, "worker_timeout")
    routed.assert_released(exchange)


async def test_f05_idle_timeout(kind: Kind) -> None:
    """F-05: a worker that pauses for IDLE_TIMEOUT in the middle of an answer is given up."""
    routed = Routed(interrupted(kind, HANG), idle_timeout=0.05)
    exchange = exchange_for()
    if kind == "stream":
        await exchange.run(routed.app)
        assert b'"code": "worker_timeout"' in exchange.body
    else:
        with pytest.raises(AnswerCut):
            await exchange.run(routed.app)

    assert (exchange.status, exchange.ends) == (200, 0)
    routed.assert_released(exchange)


async def test_idle_timeout_does_not_limit_the_first_byte_or_the_client(kind: Kind) -> None:
    """Neither a long prefill nor a client that reads slowly counts as the worker's pause."""
    gate, reading = anyio.Event(), anyio.Event()
    routed = Routed(replace(answer(kind), head=[gate]), idle_timeout=0.05)
    exchange = exchange_for(at={2: reading})
    async with exchange.running(routed.app):
        await routed.worker.received(1)
        await anyio.sleep(0.15)  # three time-outs long: nothing may happen, so there is no event to wait for
        gate.set()
        await exchange.started()
        await anyio.sleep(0.15)
        reading.set()

    assert exchange.finished_cleanly
    routed.assert_released(exchange)


@pytest.mark.parametrize("moment", ["start", 1, "end"])
async def test_send_timeout(kind: Kind, moment: str | int) -> None:
    """A client that is connected but doesn't read is given up after SEND_TIMEOUT (askalf/dario#910)."""
    routed = Routed(answer(kind), send_timeout=0.05)
    exchange = await exchange_for(at={moment: HANG}).run(routed.app)
    assert not exchange.complete
    routed.assert_released(exchange)


async def test_send_timeout_covers_our_own_errors(kind: Kind) -> None:
    """An error answer to a client that doesn't read ends too."""
    routed = Routed(replace(answer(kind), head=[httpx.ReadError("reset")]), send_timeout=0.05)
    exchange = await exchange_for(at={"start": HANG}).run(routed.app)
    routed.assert_released(exchange)


# --- no worker -----------------------------------------------------------------------------------------------


async def test_f23_no_worker(kind: Kind) -> None:
    """F-23: without a worker 503, and when to come back."""
    routed = Routed(answer(kind))
    routed.router.workers.remove(WORKER)
    exchange = await exchange_for().run(routed.app)
    assert error_of(exchange) == (503, "no_worker_available")
    assert exchange.header("retry-after") == [b"1"]
    routed.assert_released(exchange)

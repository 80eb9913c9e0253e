"""Owns the ways out where prefill and decode are apart: whatever ends a request, at any moment, ends both legs at once.

The first test goes through all of them, step by step. Those below it show what steps can't: time-outs, a client that
doesn't read, closes that hang. Native cancellation is in `test_native_cancel_apart.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.disaggregated.routed_apart import (
    AT_ONCE,
    DECODE,
    DIALECTS,
    PREFILL,
    PREFILLED,
    RESET,
    RoutedApart,
    Walk,
    request,
)
from tests.instruments.asgi_client import DISCONNECT, HANG, Exchange
from tests.routed import KINDS, answer, completion_body, error_of, interrupted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import Message

    from tests.disaggregated.routed_apart import Dialect
    from tests.instruments.fake_worker import Script
    from tests.instruments.steps import Pause
    from tests.routed import Kind

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("short_graces")]

every_kind = pytest.mark.parametrize("kind", KINDS)
every_dialect = pytest.mark.parametrize("dialect", DIALECTS)
at_once = pytest.mark.parametrize("dialect", AT_ONCE)

# The orders in which two workers can come to the middle of an answer.
ORDERS = {
    "prefill first": "p.take d.take p.head p.chunk d.head d.chunk",
    "decode first": "d.take d.head d.chunk p.take p.head p.chunk",
    "by turns": "p.take d.take d.head p.head d.chunk p.chunk",
    "prefill ends": "p.take p.head p.end d.take d.head d.chunk",
}
ALWAYS = {"leave": (0, "client_gone"), "abort": (410, "request_aborted"), "shutdown": (503, "shutting_down")}
"""What ends a request at any time: the status of a client that has nothing yet, and the outcome."""


@pytest.fixture(autouse=True)
def short_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait 50 ms for the rest of a prefill answer that nobody waits for."""
    monkeypatch.setattr("asgi_router.disaggregated.mode.REST_GRACE", 0.05)


# --- every event at every step ----------------------------------------------------------------------------------


async def end_after(steps: list[str], event: str, dialect: Dialect, kind: Kind) -> None:
    """Go these steps, let the event happen, and see that it ends what it has to end, and blames whom it has to."""
    walk = Walk(dialect, kind)
    where = f"{event} after {' '.join(steps)}"
    async with walk.going():
        await walk.to(" ".join(steps))
        begun = walk.exchange.status is not None
        connected = f"{event[0]}.take" in steps
        ended_well = event == "p.fail" and begun
        await walk.step(event)
        if ended_well:
            assert walk.held == "-D", where
            assert walk.routed.prefill.open_responses == 0
            await walk.step("d.end")
        assert walk.exchange.ended, where
        assert walk.held == "--", where
        assert sum(worker.open_responses for worker in walk.routed.fleet.workers.values()) == 0, where
        assert {call.stage for worker in walk.routed.fleet.workers.values() for call in worker.calls} <= {
            "answered",
            "failed",
            "cancelled",
        }

    failed = {PREFILL: event == "p.fail", DECODE: event == "d.fail"}
    assert {url: walk.routed.failures(url) for url in failed} == failed, where
    if event == "cancel":
        assert (walk.exchange.cancelled, walk.outcome) == (True, "cancelled")
        return
    if ended_well:
        assert (walk.exchange.finished_cleanly, walk.outcome) == (True, "ok"), where
        return

    status, code = ALWAYS.get(event, (502, "worker_failed" if connected else "worker_unreachable"))
    assert walk.outcome == code, where
    assert (walk.exchange.status or 0) == (200 if begun else status), where
    assert walk.exchange.finished_cleanly == (status > 0 and not begun), where
    if begun and event != "leave":
        assert walk.cut == (kind == "json"), where
        assert kind == "json" or f'"code": "{code}"'.encode() in walk.exchange.body, where


@pytest.mark.parametrize("event", ["p.fail", "d.fail", "leave", "cancel", "abort", "shutdown"])
@every_kind
@pytest.mark.parametrize(("dialect", "order"), [*(("fastdeploy", order) for order in ORDERS), ("sglang", "by turns")])
async def test_every_way_out_at_every_step(order: str, dialect: Dialect, kind: Kind, event: str) -> None:
    """Either leg breaks off, or the request is ended: both workers are let go at once, and the right one is blamed."""
    steps = ORDERS[order].split()
    for count in range(len(steps) + 1):
        done = steps[:count]
        prefill_is_over = event == "p.fail" and "p.end" in done
        not_read = event == "d.fail" and "d.chunk" in done and "p.head" not in done  # see the test below
        if not prefill_is_over and not not_read:
            await end_after(done, event, dialect, kind)


@every_kind
async def test_decode_that_breaks_off_ahead_of_prefill(kind: Kind) -> None:
    """A decode worker whose first byte waits for the prefill worker isn't read on: its end is noticed after that."""
    walk = Walk("fastdeploy", kind)
    async with walk.going():
        await walk.to("d.take d.head d.chunk d.fail p.take")
        assert (walk.held, walk.exchange.starts) == ("PD", 0)
        await walk.step("p.head")
        assert walk.held == "--"
    assert (walk.exchange.ends, walk.outcome) == (0, "worker_failed")
    assert (walk.routed.failures(PREFILL), walk.routed.failures(DECODE)) == (0, 1)


@pytest.mark.parametrize("event", ["p.fail", "d.fail", "leave", "cancel", "abort", "shutdown"])
@every_kind
async def test_every_way_out_at_every_step_in_turn(kind: Kind, event: str) -> None:
    """The same where decode is asked when prefill has answered."""
    steps = ["p.take", "p.head", "p.chunk", "p.end", "d.take", "d.head", "d.chunk", "d.chunk"]
    for count in range(len(steps) + 1):
        if (event != "p.fail" or count < 4) and (event != "d.fail" or count >= 4):
            await end_after(steps[:count], event, "vllm", kind)


# --- time-outs --------------------------------------------------------------------------------------------------


def stuck(script: Script, at: str) -> Script:
    """The same worker, hanging at this stage; at "" it doesn't."""
    body = list(script.body)
    return {
        "": script,
        "connect": replace(script, connect=[HANG]),
        "head": replace(script, head=[HANG]),
        "first byte": replace(script, body=[HANG]),
        "mid": replace(script, body=[*body[:1], HANG]),
    }[at]


def prefilled(dialect: Dialect, kind: Kind) -> Script:
    """A good answer of a prefill worker."""
    return PREFILLED if dialect == "vllm" else answer(kind)


@pytest.mark.parametrize(
    ("prefill", "decode", "blamed"),
    [
        ("connect", "", PREFILL),
        ("head", "", PREFILL),
        ("head", "connect", PREFILL),
        ("head", "head", PREFILL),
        ("", "connect", DECODE),
        ("", "head", DECODE),
        ("", "first byte", DECODE),
        ("first byte", "head", DECODE),
        ("mid", "first byte", DECODE),
    ],
)
@every_kind
@pytest.mark.parametrize("dialect", ["fastdeploy", "vllm"])
async def test_first_byte_timeout(dialect: Dialect, kind: Kind, prefill: str, decode: str, blamed: str) -> None:
    """FIRST_BYTE_TIMEOUT ends both legs, whichever hangs: 504, and the one that keeps the other waiting is blamed."""
    scripts = stuck(prefilled(dialect, kind), prefill), stuck(answer(kind), decode)
    routed = RoutedApart(*scripts, pd_dialect=dialect, first_byte_timeout=0.25)
    if dialect == "vllm" and prefill:
        blamed = PREFILL  # its answer has to be whole
    exchange = await request(kind).run(routed.app)
    assert error_of(exchange) == (504, "worker_timeout")
    assert {url for url in (PREFILL, DECODE) if routed.failures(url)} == {blamed}
    routed.assert_released(exchange)


@every_kind
@every_dialect
async def test_idle_timeout(dialect: Dialect, kind: Kind) -> None:
    """A decode worker that pauses for IDLE_TIMEOUT is given up, and the prefill leg with it."""
    scripts = stuck(prefilled(dialect, kind), "" if dialect == "vllm" else "mid"), stuck(answer(kind), "mid")
    walk = Walk(dialect, kind)
    walk.routed = routed = RoutedApart(*scripts, pd_dialect=dialect, idle_timeout=0.1)
    walk.exchange = exchange = request(kind)
    async with walk.going():
        pass
    assert walk.cut == (kind == "json")
    assert exchange.ends == 0
    assert (routed.events[0].outcome, routed.failures(PREFILL), routed.failures(DECODE)) == ("worker_timeout", 0, 1)


@every_kind
@at_once
@pytest.mark.parametrize("at", ["first byte", "mid"])
async def test_prefill_answer_that_never_ends(dialect: Dialect, kind: Kind, at: str) -> None:
    """When the client has its answer the rest of prefill's is waited for a moment and no longer; that is no failure."""
    routed = RoutedApart(stuck(answer(kind), at), answer(kind), pd_dialect=dialect)
    exchange = await request(kind).run(routed.app)
    assert exchange.finished_cleanly
    assert routed.events[0].outcome == "ok"
    assert (routed.failures(PREFILL), routed.failures(DECODE)) == (0, 0)
    routed.assert_released(exchange)


@every_kind
async def test_a_client_that_leaves_with_its_whole_answer_is_not_gone(kind: Kind) -> None:
    """What looks like a disconnect while the rest of prefill's answer is read is how servers report the end."""
    routed = RoutedApart(stuck(answer(kind), "mid"), answer(kind))
    exchange = Exchange(body=completion_body(stream=kind == "stream"), at={"end": DISCONNECT})
    await exchange.run(routed.app)
    assert exchange.finished_cleanly
    assert routed.events[0].outcome == "ok"
    routed.assert_released(exchange)


@every_kind
async def test_send_timeout_ends_with_the_answer(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEND_TIMEOUT doesn't count while the rest of prefill's answer is read, and the server tells of no disconnect."""
    monkeypatch.setattr("asgi_router.disaggregated.mode.REST_GRACE", 0.4)
    routed = RoutedApart(stuck(answer(kind), "mid"), answer(kind), send_timeout=0.2)
    exchange = Exchange(body=completion_body(stream=kind == "stream"), server="hypercorn")
    await exchange.run(routed.app)
    assert exchange.finished_cleanly
    assert routed.events[0].outcome == "ok"
    routed.assert_released(exchange)


@every_kind
@pytest.mark.parametrize("dialect", ["fastdeploy", "vllm"])
@pytest.mark.parametrize("moment", ["start", 1, "end"])
async def test_send_timeout(dialect: Dialect, kind: Kind, moment: str | int) -> None:
    """A client that is connected but doesn't read is given up after SEND_TIMEOUT, with both legs."""
    scripts = stuck(prefilled(dialect, kind), "" if dialect == "vllm" else "mid"), answer(kind)
    routed = RoutedApart(*scripts, pd_dialect=dialect, send_timeout=0.1)
    exchange = Exchange(body=completion_body(stream=kind == "stream"), at={moment: HANG})  # type: ignore[dict-item]
    await exchange.run(routed.app)
    assert not exchange.complete
    assert routed.events[0].outcome == "client_gone"
    assert (routed.failures(PREFILL), routed.failures(DECODE)) == (0, 0)
    routed.assert_released(exchange)


# --- closing, sending, receiving --------------------------------------------------------------------------------


@every_kind
@at_once
@pytest.mark.parametrize("close", [[RESET], [HANG], [RuntimeError("odd")]], ids=repr)
@pytest.mark.parametrize("failing", ["prefill", "decode"])
async def test_other_leg_that_can_not_be_closed(
    dialect: Dialect, kind: Kind, close: Sequence[Pause], failing: str
) -> None:
    """A leg whose close raises or hangs costs a bounded time, and the client hears of the other leg's failure."""
    broken = interrupted(kind, RESET, after=0)
    other = replace(stuck(answer(kind), "first byte"), close=close)
    scripts = (broken, other) if failing == "prefill" else (other, broken)
    routed = RoutedApart(*scripts, pd_dialect=dialect, retry_attempts=0)
    exchange = await request(kind).run(routed.app)
    assert error_of(exchange) == (502, "worker_failed")
    assert all(worker.never_closed == 0 for worker in routed.fleet.workers.values())
    routed.assert_released(exchange, responses_closed=close != [HANG])


@every_kind
@every_dialect
@pytest.mark.parametrize("moment", ["start", 1, "end"])
@pytest.mark.parametrize("error", [OSError("gone"), LookupError("odd")], ids=repr)
async def test_send_raises(dialect: Dialect, kind: Kind, moment: str | int, error: Exception) -> None:
    """An OSError out of `send` is a disconnect; anything else is the host's, and comes out bare."""
    scripts = stuck(prefilled(dialect, kind), "" if dialect == "vllm" else "mid"), answer(kind)
    routed = RoutedApart(*scripts, pd_dialect=dialect)
    body = completion_body(stream=kind == "stream")
    exchange = Exchange(body=body, at={moment: error}, server="hypercorn")  # type: ignore[dict-item]
    if isinstance(error, OSError):
        await exchange.run(routed.app)
    else:
        with pytest.raises(LookupError, match="odd"):
            await exchange.run(routed.app)
    assert not exchange.complete
    routed.assert_released(exchange)


@every_kind
@every_dialect
async def test_client_that_has_gone_costs_no_prefill(dialect: Dialect, kind: Kind) -> None:
    """Neither worker hears of a request whose client leaves with the end of its upload."""
    routed = RoutedApart(prefilled(dialect, kind), answer(kind), pd_dialect=dialect)
    exchange = request(kind)
    inner_receive = exchange.receive

    async def receive() -> Message:
        if exchange.disconnected:
            return {"type": "http.disconnect"}
        message = await inner_receive()
        exchange.disconnect()
        return message

    exchange.receive = receive  # type: ignore[method-assign]
    await exchange.run(routed.app)
    assert routed.prefill.connects == routed.decode.connects == 0
    routed.assert_released(exchange)


@every_kind
@every_dialect
async def test_errors_of_a_transport_mean_the_same_on_either_leg(dialect: Dialect, kind: Kind) -> None:
    """A leg's exception of whatever kind becomes one clean error of ours."""
    for error, expected in {
        httpx.ConnectTimeout("late"): (502, "worker_unreachable"),
        httpx.ReadTimeout("late"): (504, "worker_timeout"),
        httpx.RemoteProtocolError("garbage"): (502, "worker_failed"),
        httpx.LocalProtocolError("bad header"): (400, "invalid_request"),
        OSError("odd"): (502, "worker_failed"),
    }.items():
        bad = replace(answer(kind), head=[error])
        for scripts in ((bad, stuck(answer(kind), "head")), (prefilled(dialect, kind), bad)):
            routed = RoutedApart(*scripts, pd_dialect=dialect)
            exchange = await request(kind).run(routed.app)
            assert error_of(exchange) == expected
            routed.assert_released(exchange)


async def test_a_prefill_answer_that_stalls_is_given_up() -> None:
    """Where a prefill worker's answer is read whole, IDLE_TIMEOUT holds within it: it has to end by itself."""
    scripts = stuck(prefilled("vllm", "json"), "mid"), answer("json")
    routed = RoutedApart(*scripts, pd_dialect="vllm", idle_timeout=0.1)
    exchange = await request("json").run(routed.app)
    assert error_of(exchange) == (504, "worker_timeout")
    assert (routed.failures(PREFILL), routed.failures(DECODE)) == (1, 0)
    routed.assert_released(exchange)

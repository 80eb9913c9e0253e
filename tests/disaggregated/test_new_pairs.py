"""Owns what becomes of a pair of which one worker fails or refuses: who is blamed, and who is tried next.

A refusal (an answer of 400 or above) is passed on as it is. Any other failure before the client has a byte takes a new
pair, without the worker that has failed; the other one may be in it again. After a byte nothing does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import pytest

from asgi_router.scheduling.breaker import BreakerState
from tests.disaggregated.routed_apart import (
    AT_ONCE,
    DECODE,
    DECODE_2,
    DIALECTS,
    PREFILL,
    PREFILL_2,
    PREFILLED,
    REFUSED,
    RESET,
    RoutedApart,
    request,
)
from tests.instruments.asgi_client import HANG, Exchange
from tests.instruments.fake_worker import Script
from tests.routed import KINDS, answer, completion_body, error_of, interrupted
from tests.scheduling.builders import Clock
from tests.test_native_cancel import set_event

if TYPE_CHECKING:
    from tests.disaggregated.routed_apart import Dialect
    from tests.instruments.fake_worker import Scripts
    from tests.routed import Kind

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("short_graces")]

every_kind = pytest.mark.parametrize("kind", KINDS)
every_dialect = pytest.mark.parametrize("dialect", DIALECTS)
at_once = pytest.mark.parametrize("dialect", AT_ONCE)

BROKEN = {
    "refused": replace(PREFILLED, connect=[REFUSED]),
    "reset before the head": replace(PREFILLED, head=[RESET]),
    "reset before the first byte": replace(PREFILLED, body=[RESET]),
    "no such status": replace(PREFILLED, status=799),
}
STUCK = replace(answer("stream"), head=[HANG])
ERROR = Script(
    status=422,
    headers=[("content-type", "application/problem+json"), ("x-request-id", "engine-7"), ("x-why", "too long")],
    body=[b'{"error" :  {"message":"\xc3\xbc"', b', "code": 422}}\n'],
)


def prefilled(dialect: Dialect, kind: Kind) -> Script:
    """A good answer of a prefill worker."""
    return PREFILLED if dialect == "vllm" else answer(kind)


def two_pairs(prefill: tuple[Scripts, Scripts], decode: tuple[Scripts, Scripts], **settings: object) -> RoutedApart:
    """Two workers of each role, asked by turns."""
    fixed: dict[str, object] = {"prefill_policy": "round_robin", "decode_policy": "round_robin"}
    prefills = dict(zip((PREFILL, PREFILL_2), prefill, strict=True))
    decodes = dict(zip((DECODE, DECODE_2), decode, strict=True))
    return RoutedApart(prefills, decodes, None, **{**fixed, **settings})


async def ask(routed: RoutedApart, kind: Kind, *headers: tuple[str, str]) -> Exchange:
    """Send one request, and see that nothing of it is left."""
    exchange = await Exchange(body=completion_body(stream=kind == "stream"), headers=headers).run(routed.app)
    routed.assert_released(exchange)
    return exchange


# --- refusals ---------------------------------------------------------------------------------------------------


@every_kind
@every_dialect
@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 500, 503])
async def test_f03_a_prefill_error_reaches_the_client(dialect: Dialect, kind: Kind, status: int) -> None:
    """F-03, sgl-project/sglang#9726 (peer entry 34): status, headers and bytes, while decode would wait for ever."""
    routed = RoutedApart(replace(ERROR, status=status), STUCK, pd_dialect=dialect)
    exchange = await ask(routed, kind)
    assert (exchange.status, exchange.body) == (status, b"".join(ERROR.body))  # type: ignore[arg-type]
    assert exchange.header("content-type") == [b"application/problem+json"]
    assert exchange.header("x-why") == [b"too long"]
    assert exchange.finished_cleanly
    assert [call.stage for call in routed.decode.calls] == ([] if dialect == "vllm" else ["cancelled"])
    assert routed.failures(PREFILL) == (status == 500)
    assert routed.failures(DECODE) == 0


@every_kind
@at_once
async def test_prefill_error_after_decode_has_a_byte(dialect: Dialect, kind: Kind) -> None:
    """No byte of an answer goes out before the prefill worker has accepted: its error is the whole answer then."""
    gate = anyio.Event()
    routed = RoutedApart(replace(ERROR, head=[gate]), answer(kind), pd_dialect=dialect)
    exchange = request(kind)
    async with exchange.running(routed.app):
        await routed.decode.changes.until(lambda: bool(routed.decode.streams and routed.decode.streams[0].chunks_given))
        assert exchange.starts == 0
        gate.set()
    assert (exchange.status, exchange.body) == (422, b"".join(ERROR.body))  # type: ignore[arg-type]
    routed.assert_released(exchange)


@every_kind
@every_dialect
@pytest.mark.parametrize("status", [400, 404, 500])
async def test_a_decode_error_reaches_the_client(dialect: Dialect, kind: Kind, status: int) -> None:
    """Also if prefill would go on for ever."""
    prefill = PREFILLED if dialect == "vllm" else STUCK
    routed = RoutedApart(prefill, replace(ERROR, status=status, head=[set_event()] * 5), pd_dialect=dialect)
    exchange = await ask(routed, kind)
    assert (exchange.status, exchange.body) == (status, b"".join(ERROR.body))  # type: ignore[arg-type]
    assert routed.prefill.calls[0].stage == ("answered" if dialect == "vllm" else "cancelled")
    assert (routed.failures(PREFILL), routed.failures(DECODE)) == (0, status == 500)


@every_kind
@at_once
@pytest.mark.parametrize("turns", range(8))
async def test_two_refusals_are_one_answer(dialect: Dialect, kind: Kind, turns: int) -> None:
    """Both refuse, one `turns` turns of the loop after the other: the client gets one of the two answers, whole."""
    later = replace(ERROR, status=400, head=[set_event()] * turns, body=[b"from decode"] * 3)
    for scripts in ((ERROR, later), (later, ERROR)):
        routed = RoutedApart(*scripts, pd_dialect=dialect)
        exchange = await ask(routed, kind)
        assert exchange.body in {b"".join(script.body) for script in scripts}  # type: ignore[arg-type]
        assert exchange.finished_cleanly


@every_kind
@every_dialect
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_busy_worker_is_left_alone(dialect: Dialect, kind: Kind, role: str) -> None:
    """The Retry-After of a 503 counts for the worker that said it, and for no other."""
    busy = replace(ERROR, status=503, headers=[("retry-after", "7")])
    scripts = (busy, STUCK) if role == "prefill" else (prefilled(dialect, kind), busy)
    routed = RoutedApart(*scripts, pd_dialect=dialect)
    exchange = await ask(routed, kind)
    assert (exchange.status, exchange.header("retry-after")) == (503, [b"7"])
    assert [worker.backing_off for worker in routed.router.stats().workers] == [role == "prefill", role == "decode"]


@every_kind
@every_dialect
async def test_a_refusal_that_breaks_off(dialect: Dialect, kind: Kind) -> None:
    """A prefill error that never comes to its first byte is a failure of that worker like any other."""
    broken = replace(ERROR, body=[RESET])
    routed = two_pairs((broken, prefilled(dialect, kind)), (STUCK, answer(kind)), pd_dialect=dialect)
    routed.decode.scripts = answer(kind)
    exchange = await ask(routed, kind)
    assert exchange.status == 200
    assert (routed.failures(PREFILL), routed.failures(DECODE)) == (1, 0)


# --- a new pair -------------------------------------------------------------------------------------------------


@every_kind
@every_dialect
@pytest.mark.parametrize("broken", BROKEN)
async def test_f08_a_decode_failure_takes_a_new_pair(dialect: Dialect, kind: Kind, broken: str) -> None:
    """F-08: what a decode worker didn't begin to answer another one does; the first pair is let go before that."""
    gate = anyio.Event()
    routed = RoutedApart(
        prefilled(dialect, kind),
        {DECODE: BROKEN[broken], DECODE_2: replace(answer(kind), head=[gate])},
        decode_policy="round_robin",
        pd_dialect=dialect,
        decision_headers=True,
    )
    exchange = request(kind)
    async with exchange.running(routed.app):
        await routed.fleet[DECODE_2].received(1)
        await routed.prefill.received(1)
        assert (routed.requests[DECODE], routed.requests[DECODE_2]) == (0, 1)
        assert routed.requests[PREFILL] <= 1
        assert routed.decode.open_responses == 0
        gate.set()
    assert exchange.finished_cleanly
    assert exchange.header("x-router-decode-url") == [DECODE_2.encode()]
    assert {url: routed.failures(url) for url in (PREFILL, DECODE, DECODE_2)} == {PREFILL: 0, DECODE: 1, DECODE_2: 0}
    assert (routed.events[0].attempts, routed.events[0].worker) == (2, DECODE_2)
    routed.assert_released(exchange)


@every_kind
@every_dialect
@pytest.mark.parametrize("broken", BROKEN)
async def test_f08_a_prefill_failure_takes_a_new_pair(dialect: Dialect, kind: Kind, broken: str) -> None:
    """F-08: the same for the prefill worker; only the one that has failed is passed over, the decode worker is not."""
    prefills = {PREFILL: BROKEN[broken], PREFILL_2: prefilled(dialect, kind)}
    decode = answer(kind) if dialect == "vllm" else [STUCK, answer(kind)]  # as a real one, that would wait for ever
    routed = RoutedApart(prefills, decode, pd_dialect=dialect, prefill_policy="round_robin")
    exchange = await ask(routed, kind)
    assert exchange.status == 200
    assert exchange.finished_cleanly
    assert {url: routed.failures(url) for url in (PREFILL, PREFILL_2, DECODE)} == {PREFILL: 1, PREFILL_2: 0, DECODE: 0}
    assert (routed.events[0].attempts, routed.events[0].prefill_worker) == (2, PREFILL_2)


@every_kind
@at_once
@pytest.mark.parametrize(("attempts", "tried"), [(0, 1), (1, 2), (2, 3), (9, 4)])
async def test_new_pairs_are_bounded(dialect: Dialect, kind: Kind, attempts: int, tried: int) -> None:
    """At most RETRY_ATTEMPTS further pairs are tried, each failing worker once; then 502."""
    decodes = dict.fromkeys([f"http://d{n}:1" for n in range(4)], replace(answer(kind), head=[RESET]))
    routed = RoutedApart(answer(kind), decodes, pd_dialect=dialect, retry_attempts=attempts)
    assert error_of(await ask(routed, kind)) == (502, "worker_failed")
    counts = [len(routed.fleet[url].calls) for url in decodes]
    assert (sum(counts), max(counts)) == (tried, 1)
    assert routed.failures(PREFILL) == 0


@every_kind
@every_dialect
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_without_another_worker_of_its_role(dialect: Dialect, kind: Kind, role: str) -> None:
    """Nobody is asked again if the one that failed is the only one: 502, and not 503."""
    good, bad = prefilled(dialect, kind), BROKEN["reset before the head"]
    pools = ((bad, good), (answer(kind), answer(kind))) if role == "prefill" else ((good, good), (bad, answer(kind)))
    routed = two_pairs(*pools, pd_dialect=dialect)
    routed.router.workers.remove(PREFILL_2 if role == "prefill" else DECODE_2)
    assert error_of(await ask(routed, kind)) == (502, "worker_failed")
    assert routed.events[0].attempts == 1


@every_kind
async def test_without_another_worker_that_fits(kind: Kind) -> None:
    """A worker that fits none of the other role is no reason to try again: the client hears what has happened."""
    decodes = {DECODE: replace(answer(kind), head=[RESET]), DECODE_2: answer(kind)}
    routed = RoutedApart(answer(kind), decodes, {DECODE_2: {"tp_size": 4}})
    assert error_of(await ask(routed, kind)) == (502, "worker_failed")
    assert routed.calls[DECODE_2] == 0


@every_kind
@every_dialect
async def test_never_after_a_byte(dialect: Dialect, kind: Kind) -> None:
    """An answer that has begun is cut, even if the client has marked its request."""
    decodes = {DECODE: interrupted("stream", RESET), DECODE_2: answer("stream")}
    routed = RoutedApart(prefilled(dialect, kind), decodes, pd_dialect=dialect, decode_policy="round_robin")
    exchange = await ask(routed, kind, ("idempotency-key", "7"))
    assert exchange.ends == 0
    assert b'"worker_failed"' in exchange.body
    assert routed.calls[DECODE_2] == 0
    assert (routed.failures(PREFILL), routed.failures(DECODE)) == (0, 1)


@every_kind
@pytest.mark.parametrize("dialect", ["fastdeploy", "vllm"])
@pytest.mark.parametrize("late", ["prefill", "decode"])
async def test_what_is_late_is_repeated_only_if_it_may_be(dialect: Dialect, kind: Kind, late: str) -> None:
    """A pair that is late may still work: another one is asked only for a request that says it may be repeated."""
    good, bad = prefilled(dialect, kind), replace(PREFILLED, head=[HANG])
    pools = ((bad, good), (answer(kind),) * 2) if late == "prefill" else ((good, good), (bad, answer(kind)))
    routed = two_pairs(*pools, pd_dialect=dialect, first_byte_timeout=0.15)
    assert error_of(await ask(routed, kind)) == (504, "worker_timeout")

    routed = two_pairs(*pools, pd_dialect=dialect, first_byte_timeout=0.15)
    assert (await ask(routed, kind, ("idempotency-key", "7"))).status == 200
    blamed, spared = (PREFILL, DECODE) if late == "prefill" else (DECODE, PREFILL)
    assert (routed.failures(blamed), routed.failures(spared)) == (1, 0)


@every_kind
@every_dialect
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_the_breaker_of_the_one_that_fails(dialect: Dialect, kind: Kind, role: str) -> None:
    """Of a pair that fails again and again only the worker at fault is put aside, until its cool-down is over."""
    clock = Clock()
    good, bad = prefilled(dialect, kind), BROKEN["reset before the head"]
    scripts = (bad, answer(kind)) if role == "prefill" else (good, bad)
    routed = RoutedApart(*scripts, pd_dialect=dialect, breaker_failures=2, clock=clock)
    for _ in range(2):
        assert (await ask(routed, kind)).status == 502
    faulty, sound = (PREFILL, DECODE) if role == "prefill" else (DECODE, PREFILL)
    assert routed.state(faulty).breaker.state is BreakerState.OPEN
    assert routed.state(sound).breaker.state is BreakerState.CLOSED

    clock.now += 60
    routed.fleet[faulty].scripts = good if role == "prefill" else answer(kind)
    assert (await ask(routed, kind)).status == 200
    assert routed.state(faulty).breaker.state is BreakerState.CLOSED

"""Owns the faults that others have had with prefill and decode apart: each test pulls the trigger, and asks for better.

F-numbers are the seed's, peer entries those of other routers. What a test elsewhere shows already is there:

- F-03, peer entry 34 (a prefill error is lost, decode waits) also in `test_new_pairs.py` and `test_release_matrix.py`
- F-08 (no other pair is tried) in `test_new_pairs.py`
- F-11 (bodies that can't be made leak both leases) in `test_release_matrix.py`
- F-12 (no decode worker leaks the prefill lease) in `test_pairing.py` and `test_release_matrix.py`
- F-50, F-87, peer entry 35 in `test_pairing.py` and `test_pairs_in_service.py`
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import httpx
import pytest

from asgi_router import Router, RouterMiddleware, RouterSettings
from tests.disaggregated.routed_apart import (
    AT_ONCE,
    DECODE,
    DIALECTS,
    PREFILL,
    PREFILLED,
    REFUSED,
    RESET,
    RoutedApart,
    Walk,
    request,
)
from tests.instruments.asgi_client import HANG, Exchange
from tests.instruments.fake_worker import FakeFleet, Script
from tests.routed import KINDS, answer, completion_body, error_of, unreachable_app

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.disaggregated.routed_apart import Dialect
    from tests.routed import Kind

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("short_graces")]

every_kind = pytest.mark.parametrize("kind", KINDS)
every_dialect = pytest.mark.parametrize("dialect", DIALECTS)
at_once = pytest.mark.parametrize("dialect", AT_ONCE)

HANGING: Mapping[str, Script] = {
    "connect": Script(connect=[HANG]),
    "head": Script(head=[HANG]),
    "first byte": Script(body=[HANG]),
    "mid": Script(body=[b"data: 1\n\n", HANG]),
}
FAILING: Mapping[str, Script] = {
    "refused": Script(connect=[REFUSED]),
    "no head": Script(head=[RESET]),
    "no byte": Script(body=[RESET]),
}


@every_kind
@at_once
@pytest.mark.parametrize("hanging", HANGING)
@pytest.mark.parametrize("failing", FAILING)
async def test_f04_decode_fails_and_prefill_hangs(dialect: Dialect, kind: Kind, hanging: str, failing: str) -> None:
    """F-04: the seed waits for prefill first; the first failure ends the other leg, and the client hears at once."""
    routed = RoutedApart(HANGING[hanging], FAILING[failing], pd_dialect=dialect)
    with anyio.fail_after(3):  # there are no time-outs
        exchange = await request(kind).run(routed.app)
    assert error_of(exchange) == (502, "worker_unreachable" if failing == "refused" else "worker_failed")
    assert (routed.failures(PREFILL), routed.failures(DECODE)) == (0, 1)
    routed.assert_released(exchange)


@every_kind
@at_once
@pytest.mark.parametrize("hanging", HANGING)
@pytest.mark.parametrize("failing", FAILING)
async def test_f04_prefill_fails_and_decode_hangs(dialect: Dialect, kind: Kind, hanging: str, failing: str) -> None:
    """F-04, the other way round: a decode worker that waits for a prefill that has failed isn't waited for."""
    decode = replace(HANGING[hanging], body=[HANG]) if hanging == "mid" else HANGING[hanging]
    routed = RoutedApart(FAILING[failing], decode, pd_dialect=dialect)
    with anyio.fail_after(3):
        exchange = await request(kind).run(routed.app)
    assert error_of(exchange) == (502, "worker_unreachable" if failing == "refused" else "worker_failed")
    assert (routed.failures(PREFILL), routed.failures(DECODE)) == (1, 0)
    routed.assert_released(exchange)


@every_kind
@at_once
async def test_peer_33_decode_is_killed(dialect: Dialect, kind: Kind) -> None:
    """lightseekorg/smg#831, sgl-project/sglang#29482 (peer entry 33): prefill hung for 1800 s; it is let go at once."""
    walk = Walk(dialect, kind)
    async with walk.going():
        await walk.to("p.take d.take d.head")
        assert walk.held == "PD"
        await walk.step("d.fail")
        assert walk.held == "--"
        assert walk.exchange.ended
    assert [call.stage for call in walk.routed.prefill.calls] == ["cancelled"]


@every_kind
@every_dialect
async def test_peer_34_a_bad_request(dialect: Dialect, kind: Kind) -> None:
    """sgl-project/sglang#9726, #29017 (peer entry 34): the client gets prefill's 400, and decode isn't left waiting."""
    refusal = Script.json({"error": {"message": "too long", "code": 400}}, status=400)
    routed = RoutedApart(refusal, HANGING["head"], pd_dialect=dialect)
    exchange = await request(kind).run(routed.app)
    assert exchange.status == 400
    assert exchange.body == b"".join(refusal.body)  # type: ignore[arg-type]
    assert {call.stage for call in routed.decode.calls} <= {"cancelled"}
    routed.assert_released(exchange)


@every_dialect
async def test_f09_success_without_a_stream(dialect: Dialect) -> None:
    """F-09: requests that aren't streamed never gave back the prefill worker's counters."""
    routed = RoutedApart(PREFILLED, answer("json"), pd_dialect=dialect)
    for _ in range(3):
        exchange = await request("json").run(routed.app)
        assert exchange.status == 200
        assert routed.requests == {PREFILL: 0, DECODE: 0}
        routed.assert_released(exchange)


@every_kind
@every_dialect
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_f10_connect_error(dialect: Dialect, kind: Kind, role: str) -> None:
    """F-10: when either worker couldn't be connected to, the prefill worker's counters stayed."""
    scripts = (FAILING["refused"], answer(kind)) if role == "prefill" else (PREFILLED, FAILING["refused"])
    routed = RoutedApart(*scripts, pd_dialect=dialect)
    for _ in range(3):
        exchange = await request(kind).run(routed.app)
        assert error_of(exchange) == (502, "worker_unreachable")
        assert routed.requests == {PREFILL: 0, DECODE: 0}
        routed.assert_released(exchange)


class Idle(httpx.AsyncBaseTransport):
    """A fleet behind connections that some workers have closed while they were idle: each shows when it is used."""

    def __init__(self, fleet: FakeFleet, stale: Mapping[str, int]) -> None:
        self.fleet = fleet
        self.stale = dict(stale)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        origin = f"{request.url.scheme}://{request.url.netloc.decode()}"
        if self.stale.get(origin):
            self.stale[origin] -= 1
            await request.extensions["trace"]("http11.send_request_headers.started", {})
            raise httpx.RemoteProtocolError("Server disconnected without sending a response.")
        return await self.fleet.handle_async_request(request)


@every_kind
@every_dialect
@pytest.mark.parametrize("stale", [(PREFILL,), (DECODE,), (PREFILL, DECODE)], ids=["prefill", "decode", "both"])
async def test_peer_39_after_an_idle_time(dialect: Dialect, kind: Kind, stale: tuple[str, ...]) -> None:
    """sgl-project/sglang#9926 (peer entry 39): a leg that meets a dead connection is sent again, that leg alone."""
    routed = RoutedApart(PREFILLED, answer(kind), pd_dialect=dialect)
    routed.router._mode._upstream.transport = Idle(routed.fleet, dict.fromkeys(stale, 1))
    exchange = await request(kind).run(routed.app)
    assert exchange.status == 200
    assert exchange.finished_cleanly
    assert routed.calls == {PREFILL: 1, DECODE: 1}
    assert routed.events[0].attempts == 1
    routed.assert_released(exchange)


@every_kind
@every_dialect
@pytest.mark.parametrize("stale", [PREFILL, DECODE])
async def test_peer_39_once_and_no_more(dialect: Dialect, kind: Kind, stale: str) -> None:
    """Peer entry 39: a worker that closes every connection is a failing worker, and is blamed for it."""
    routed = RoutedApart(PREFILLED, answer(kind), pd_dialect=dialect)
    routed.router._mode._upstream.transport = Idle(routed.fleet, {stale: 2})
    exchange = await request(kind).run(routed.app)
    assert error_of(exchange) == (502, "worker_failed")
    assert {url: routed.failures(url) for url in (PREFILL, DECODE)} == {
        PREFILL: stale == PREFILL,
        DECODE: stale == DECODE,
    }
    routed.assert_released(exchange)


async def test_33_a_client_that_leaves_is_told_of_to_both_workers() -> None:
    """smg#831, the abort part: with ABORT_ON_DISCONNECT both workers hear of it, after the release."""
    hanging, told = Script(head=[HANG]), Script(body=[b"ok"])
    scripts = {PREFILL: [hanging, told], DECODE: [hanging, told]}
    fleet = FakeFleet(scripts)
    workers = [{"url": PREFILL, "role": "prefill"}, {"url": DECODE, "role": "decode"}]
    settings = RouterSettings(mode="disaggregated", workers=workers, abort_on_disconnect=True)
    router = Router(settings, transport=fleet)
    exchange = Exchange(body=completion_body(request_id="mine"))
    async with exchange.running(RouterMiddleware(unreachable_app, router=router)):
        await fleet[PREFILL].received(1)
        await fleet[DECODE].received(1)
        exchange.disconnect()
    for url in (PREFILL, DECODE):
        assert fleet[url].calls[1].url == f"{url}/v1/abort_requests"
        assert json.loads(fleet[url].calls[1].body) == {"req_ids": ["mine"]}


async def test_38_a_common_system_prompt_does_not_send_all_to_one_worker() -> None:
    """sgl-project/sglang#26263: the whole conversation is the key, so many that begin alike use all prefill workers."""
    other = "http://p2:1"
    fleet = FakeFleet({PREFILL: Script(head=[HANG]), other: Script(head=[HANG]), DECODE: Script(head=[HANG])})
    workers = [
        {"url": PREFILL, "role": "prefill"},
        {"url": other, "role": "prefill"},
        {"url": DECODE, "role": "decode"},
    ]
    router = Router(RouterSettings(mode="disaggregated", workers=workers), transport=fleet)
    app = RouterMiddleware(unreachable_app, router=router)
    system = {"role": "system", "content": "You are a clerk. " * 40}
    async with anyio.create_task_group() as tasks:
        for number in range(8):
            messages = [system, {"role": "user", "content": f"{number} " * 800}]
            body = json.dumps({"model": "m", "messages": messages}).encode()
            tasks.start_soon(Exchange(body=body).run, app)
        for url, requests in ((DECODE, 8), (PREFILL, 4), (other, 4)):
            await fleet[url].received(requests)
        assert [len(fleet[url].calls) for url in (PREFILL, other)] == [4, 4]
        tasks.cancel_scope.cancel()
    assert [worker.requests for worker in router.stats().workers] == [0, 0, 0]

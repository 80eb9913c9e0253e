"""Owns the abort of the router's own requests: by which name, in which number, and what is answered."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace

import anyio
import pytest

from asgi_router.scheduling.breaker import BreakerState
from tests.abort.calls import (
    ABORT_PATH,
    abort,
    aborted,
    ask,
    engine,
    outcomes,
    request,
    stuck,
    told,
    until,
)
from tests.instruments.asgi_client import HANG, Exchange
from tests.routed import OTHER, WORKER, Routed, answer, completion_body, error_of

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("short_graces")]

ENDLESS = replace(answer("stream"), head=[HANG])


@pytest.mark.parametrize("asked", ["job-1", "chatcmpl-job-1", "cmpl-job-1"])
async def test_f33_a_request_is_aborted_by_its_id(asked: str) -> None:
    """F-33: the client's own x-request-id ends its request, as does the id that an engine makes of that."""
    routed = Routed(engine(ENDLESS))
    ended = outcomes(routed)
    exchange = request("job-1")
    async with exchange.running(routed.app):
        await routed.worker.received(1)
        assert routed.counters[0][0] == 1
        result = await abort(routed, asked)

    assert aborted(result) == {asked: None}
    assert result["not_found"] == result["unconfirmed"] == []
    assert error_of(exchange) == (410, "request_aborted")
    assert ended == [("job-1", "request_aborted")]
    routed.assert_released(exchange)


async def test_a_request_is_aborted_by_the_id_in_its_body() -> None:
    """FastDeploy's clients name a request in its body; that name counts, and the header's goes on to count."""
    for asked in ("from-body", "from-header"):
        routed = Routed(engine(ENDLESS))
        exchange = request("from-header", body_id="from-body")
        async with exchange.running(routed.app):
            await routed.worker.received(1)
            assert aborted(await abort(routed, asked)) == {asked: None}

        assert told(routed.worker)[0] == {"req_ids": list(dict.fromkeys((asked, "from-body"))), "abort_all": False}
        routed.assert_released(exchange)


async def test_a_request_is_aborted_by_the_id_that_was_made_for_it() -> None:
    """A request without an id gets one, which DECISION_HEADERS tells the client; it can be aborted by that."""
    script, taken = stuck()
    routed = Routed(engine(script), decision_headers=True)
    exchange = Exchange(body=completion_body())
    async with exchange.running(routed.app):
        await taken.wait()
        (name,) = exchange.header("x-request-id")
        assert aborted(await abort(routed, name.decode())) == {name.decode(): None}

    assert b'"code": "request_aborted"' in exchange.body
    routed.assert_released(exchange)


async def test_an_unknown_id_aborts_nothing() -> None:
    """An id that nobody knows is reported as such, and requests with other ids go on."""
    gate = anyio.Event()
    routed = Routed(engine(replace(answer("json"), head=[gate])))
    exchange = request("job-1")
    async with exchange.running(routed.app):
        await routed.worker.received(1)
        for unknown in ("job-2", "job", "job-11", "JOB-1"):
            result = await abort(routed, unknown)
            assert (aborted(result), result["not_found"]) == ({}, [unknown])
        gate.set()

    assert exchange.finished_cleanly
    routed.assert_released(exchange)


async def test_abort_twice() -> None:
    """An abort of what is being aborted, or was, changes nothing and is no error."""
    closing = anyio.Event()
    script, taken = stuck(close=[closing])
    routed = Routed(engine(script))
    ended = outcomes(routed)
    exchange = request("job-1")
    async with exchange.running(routed.app):
        await taken.wait()
        assert aborted(await abort(routed, "job-1")) == {"job-1": None}
        await routed.worker.closing(1)
        await abort(routed, "job-1")
        closing.set()

    assert (await abort(routed, "job-1"))["not_found"] == ["job-1"]
    assert exchange.body.count(b"request_aborted") == 2  # type and code of one event
    assert ended == [("job-1", "request_aborted")]
    routed.assert_released(exchange)


async def test_requests_that_share_an_id_are_all_aborted() -> None:
    """Clients choose ids, so two requests may have the same one: both end."""
    routed = Routed(engine(ENDLESS))
    first, second, third = request("twin"), request("twin"), request("other")
    async with third.running(routed.app):
        async with first.running(routed.app), second.running(routed.app):
            await routed.worker.received(3)
            assert aborted(await abort(routed, "twin")) == {"twin": None}

        assert error_of(first) == error_of(second) == (410, "request_aborted")
        assert not third.ended
        await abort(routed, "other")

    routed.assert_released(third)


async def test_abort_all_ends_fifty_requests() -> None:
    """`abort_all` ends every request in flight, on all workers, and none that comes later."""
    routed = Routed({WORKER: engine(ENDLESS), OTHER: engine(ENDLESS)}, policy="round_robin")
    ended = outcomes(routed)
    exchanges = [request(f"job-{number}") for number in range(50)]
    async with AsyncExitStack() as stack:
        for exchange in exchanges:
            await stack.enter_async_context(exchange.running(routed.app))
        await until(lambda: sum(len(worker.calls) for worker in routed.fleet.workers.values()) == 50)
        assert [counted[0] for counted in routed.counters] == [25, 25]
        result = await abort(routed)

    names = {f"job-{number}" for number in range(50)}
    assert set(aborted(result)) == names
    assert {error_of(exchange) for exchange in exchanges} == {(410, "request_aborted")}
    assert set(ended) == {(name, "request_aborted") for name in names}
    assert told(routed.worker) == told(routed.fleet[OTHER]) == [{"req_ids": [], "abort_all": True}]
    routed.assert_released()

    routed.worker.scripts = routed.fleet[OTHER].scripts = engine(answer("json"))
    assert (await request("job-1").run(routed.app)).status == 200


async def test_an_abort_is_not_the_workers_failure() -> None:
    """However many requests are aborted on a worker, its breaker stays closed, and a probe may come anew."""
    now = [0.0]
    routed = Routed(engine(ENDLESS), breaker_failures=1, breaker_cooldown=1, clock=lambda: now[0])
    (state,) = routed.router.workers
    for half_open in (False, True):
        if half_open:
            state.breaker.open()
            now[0] += 2
        exchange = request()
        async with exchange.running(routed.app):
            await routed.worker.received(len(routed.worker.calls) + 1)
            await abort(routed, "job-1")

        assert error_of(exchange) == (410, "request_aborted")
        assert state.breaker.state is (BreakerState.HALF_OPEN if half_open else BreakerState.CLOSED)
        assert state.breaker.admits
    routed.assert_released()


async def test_an_aborted_request_is_not_tried_elsewhere() -> None:
    """A request that may be repeated is not repeated when it is aborted."""
    routed = Routed({WORKER: engine(ENDLESS), OTHER: engine(ENDLESS)})
    exchange = Exchange(body=completion_body(), headers=[("x-request-id", "job-1"), ("idempotency-key", "k")])
    async with exchange.running(routed.app):
        await until(lambda: any(worker.calls for worker in routed.fleet.workers.values()))
        await abort(routed, "job-1")

    assert sum(len(worker.calls) - len(told(worker)) for worker in routed.fleet.workers.values()) == 1
    assert error_of(exchange) == (410, "request_aborted")
    routed.assert_released(exchange)


async def test_a_draining_router_aborts() -> None:
    """A shutdown that waits for long answers ends at once when they are aborted."""
    routed = Routed(engine(ENDLESS), drain_timeout=3600)
    exchange = request()
    with anyio.fail_after(5):
        async with exchange.running(routed.app), anyio.create_task_group() as tasks:
            await routed.worker.received(1)
            tasks.start_soon(routed.router.drain)
            await until(lambda: routed.router.stats().draining)
            await abort(routed)

    assert error_of(exchange) == (410, "request_aborted")
    routed.assert_released(exchange)


# --- the door ------------------------------------------------------------------------------------------------


async def test_abort_path_none_leaves_it_to_the_app() -> None:
    """ABORT_PATH none: the path belongs to the host app; so do other methods, and other paths, in any case."""
    off, on, moved = (
        Routed(engine(ENDLESS), **options) for options in ({"abort_path": None}, {}, {"abort_path": "/a"})
    )
    cases = [
        (off, "POST", ABORT_PATH),
        (on, "GET", ABORT_PATH),
        (on, "POST", ABORT_PATH + "/"),
        (moved, "POST", ABORT_PATH),
    ]
    for routed, method, path in cases:
        with pytest.raises(AssertionError, match="passed on"):
            await Exchange(method=method, path=path, body=b'{"abort_all": true}').run(routed.app)


async def test_abort_path_may_be_another_one() -> None:
    """ABORT_PATH names our own path; workers are told at theirs."""
    routed = Routed(engine(ENDLESS), abort_path="/stop")
    exchange = await Exchange(path="/llm/stop", root_path="/llm", body=b'{"abort_all": true}').run(routed.app)
    assert exchange.status == 200
    assert told(routed.worker) == [{"req_ids": [], "abort_all": True}]


@pytest.mark.parametrize(
    "payload", [{}, {"req_ids": []}, {"abort_all": False}, {"req_ids": [], "abort_all": False}, {"req_ids": None}]
)
async def test_f33_a_body_that_asks_for_nothing_is_refused(payload: object) -> None:
    """F-33: neither ids nor abort_all is 400, and no worker hears of it: it broke engines (FastDeploy#7615)."""
    routed = Routed(engine(ENDLESS))
    exchange = request()
    async with exchange.running(routed.app):
        await routed.worker.received(1)
        assert error_of(await ask(routed, payload)) == (400, "invalid_request")
        assert routed.counters[0][0] == 1
        assert told(routed.worker) == []
        exchange.disconnect()

    routed.assert_released(exchange)


async def test_a_client_that_leaves_while_it_asks() -> None:
    """Half an abort aborts nothing; one that was asked for whole is carried out, whoever waits for the answer."""
    routed = Routed(engine(ENDLESS))
    exchange = request()
    async with exchange.running(routed.app):
        await routed.worker.received(1)
        half = Exchange(path=ABORT_PATH, body=[b'{"abort_all": true}'])
        half.scope["headers"] = []
        half.disconnect()
        await half.run(routed.app)
        assert (half.starts, told(routed.worker), routed.counters[0][0]) == (0, [], 1)

        whole = Exchange(
            path=ABORT_PATH, body=b'{"abort_all": true}', at={"start": OSError("gone")}, server="hypercorn"
        )
        await whole.run(routed.app)

    assert error_of(exchange) == (410, "request_aborted")
    routed.assert_released(exchange)


async def test_an_abort_after_the_last_byte_is_too_late() -> None:
    """A request whose whole answer is on its way is over: it is not found, and ends well."""
    gate = anyio.Event()
    routed = Routed(engine(answer("json")))
    exchange = request(at={"end": gate})
    async with exchange.running(routed.app):
        await exchange.started()
        await until(lambda: exchange.ends == 1)
        result = await abort(routed, "job-1")
        gate.set()

    assert (aborted(result), result["not_found"]) == ({}, ["job-1"])
    assert exchange.finished_cleanly
    routed.assert_released(exchange)


async def test_a_router_without_workers_aborts() -> None:
    """With nobody to tell, the answer is an empty one."""
    routed = Routed(engine(ENDLESS))
    routed.router.workers.remove(WORKER)
    assert await abort(routed, "x") == {"aborted": [], "not_found": ["x"], "unconfirmed": [], "workers": []}

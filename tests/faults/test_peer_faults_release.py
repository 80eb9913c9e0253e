"""Owns the faults of release that peers have had in public (entries 9 to 12, 16 to 18, 20): each trigger, played to us.

Shown elsewhere, with the reference in the test's docstring:

- entry 9 (vllm-project/vllm-ascend#8836) in tests/test_exit_by_client.py
- entry 10 (vllm-project/vllm-ascend#13214) in tests/scheduling/test_lease.py
- entry 16 (llm-d/llm-d-router#1739, llm-d/llm-d#1950) in tests/scheduling/test_lease.py and tests/test_lifecycle.py
- entry 18 (sgl-project/sglang-omni#931) in tests/test_exit_paths.py

Entries 11 and 12 are about pairs of workers, which this version doesn't have. What applies is shown: a request whose
worker refuses it, or breaks in its prefill, goes on to another one.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import httpx
import pytest

from tests.faults.test_peer_faults_counters import (
    BY_LOAD,
    GOOD,
    SILENT,
    TURNS,
    burst,
    connects,
    requests,
    until,
)
from tests.instruments.asgi_client import Exchange
from tests.instruments.fake_worker import Script
from tests.routed import OTHER, WORKER, Routed, completion_body, exchange_for

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

pytestmark = pytest.mark.anyio

REFUSED = replace(GOOD, connect=[httpx.ConnectError("refused")])
BROKEN = replace(GOOD, body=[httpx.ReadError("reset")])
MAY_MOVE_ON = pytest.mark.parametrize("first", [REFUSED, BROKEN], ids=["refused", "broken in prefill"])


def repeatable() -> Exchange:
    """A request that may be sent again although a worker has begun with it."""
    return exchange_for(headers=[("idempotency-key", "1")])


# --- what is counted down twice ------------------------------------------------------------------------------


@MAY_MOVE_ON
async def test_11_a_request_that_moves_on_takes_only_its_own_share(first: Script) -> None:
    """vllm-project/vllm-ascend#14967: a request that is given another worker releases each lease once.

    Requests that were on the two workers keep their shares, at every step of it.
    """
    gates = [anyio.Event() for _ in range(4)]
    moved = replace(GOOD, head=[gates[1]], body=[b"data: 1\n\n", gates[2], b"data: [DONE]\n\n"])
    held = replace(GOOD, head=[gates[3]])
    failing = replace(first, connect=[gates[0], *first.connect])
    routed = Routed({WORKER: [held, failing], OTHER: [held, moved]}, policy="round_robin")
    other = routed.fleet[OTHER]
    bystanders = [Exchange(body=completion_body(text * 600)) for text in ("a", "bc")]
    exchange = repeatable()
    async with bystanders[0].running(routed.app), bystanders[1].running(routed.app):
        await routed.worker.received(1)
        await other.received(1)
        shares = routed.counters
        async with exchange.running(routed.app):
            await routed.worker.changes.until(lambda: routed.worker.connects == 2)
            own = tuple(now - before for now, before in zip(routed.counters[0], shares[0], strict=True))
            assert own[0] == own[2] == 1
            assert own[1] == own[3] > 900
            gates[0].set()
            await other.received(2)
            assert routed.counters == [shares[0], tuple(map(sum, zip(shares[1], own, strict=True)))]
            gates[1].set()
            await exchange.body_at_least(1)
            answering = (own[0], own[1], 0, 0)
            assert routed.counters == [shares[0], tuple(map(sum, zip(shares[1], answering, strict=True)))]
            gates[2].set()
        assert exchange.finished_cleanly
        assert routed.counters == shares
        gates[3].set()
    routed.assert_released()


ENDINGS = {
    "refused": REFUSED,
    "fails": replace(GOOD, head=[httpx.ReadError("reset")]),
    "client leaves": SILENT,
    "is cancelled": SILENT,
}


@MAY_MOVE_ON
@pytest.mark.parametrize("ending", ENDINGS)
async def test_12_a_second_try_that_fails_as_well_leaves_no_skew(first: Script, ending: str) -> None:
    """vllm-project/vllm-ascend#16517: requests whose second worker fails too, or is left, make no counter negative.

    What follows is spread evenly: no worker seems less busy than it is.
    """
    tries = itertools.count()

    def script(request: httpx.Request) -> Script:
        return ENDINGS[ending] if next(tries) % 2 else first

    routed = Routed({WORKER: script, OTHER: script}, policy="request_num", breaker_failures=0)
    for number in range(1, 11):
        exchange = repeatable()
        async with exchange.running(routed.app):
            if ENDINGS[ending] is SILENT:
                await until(lambda number=number: connects(routed) == 2 * number)  # type: ignore[misc]
                assert sorted(requests(routed)) == [0, 1]
                if ending == "is cancelled":
                    exchange.cancel()
                else:
                    exchange.disconnect()
        assert exchange.status == (None if ENDINGS[ending] is SILENT else 502)
        routed.assert_released()

    assert connects(routed) == 20
    assert await burst(routed, 12) == [6, 6]


@pytest.mark.parametrize("policy", BY_LOAD)
async def test_17_requests_that_end_at_the_same_time(policy: str) -> None:
    """BerriAI/litellm#25323, #25393, #39322: requests with a cached prompt end all at once; no counter goes below zero.

    It is looked at whenever anything is sent to a client, and what follows is spread evenly.
    """
    routed = Routed({WORKER: GOOD, OTHER: GOOD}, policy=policy)
    seen: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def look_and_send(message: Message) -> None:
            seen.extend(itertools.chain(*routed.counters))
            await send(message)
            seen.extend(itertools.chain(*routed.counters))

        await routed.app(scope, receive, look_and_send)

    for _ in range(4):  # both workers, or one of them, hold the prompt now
        await exchange_for().run(app)
    gate = anyio.Event()
    for worker in routed.fleet.workers.values():
        worker.scripts = replace(GOOD, head=[gate])
    exchanges = [exchange_for() for _ in range(30)]
    async with anyio.create_task_group() as tasks:
        for exchange in exchanges:
            tasks.start_soon(exchange.run, app)
        await until(lambda: connects(routed) == 34)
        assert sum(requests(routed)) == 30
        gate.set()

    assert all(exchange.finished_cleanly for exchange in exchanges)
    assert min(seen) == 0
    assert max(seen) > 30
    routed.assert_released()
    assert await burst(routed, 12) == [6, 6]


# --- when an answer is over ----------------------------------------------------------------------------------


async def test_20_a_stream_without_its_end_mark() -> None:
    """sgl-project/sglang#8972: an engine ends its stream without `[DONE]`; the end of the body releases the lease.

    Nor is it the mark that does: a text that contains it releases nothing.
    """
    gate = anyio.Event()
    quoting = b'data: {"choices": [{"delta": {"content": "data: [DONE]\\n\\n"}}]}\n\ndata: [DONE]\n\n'
    routed = Routed(replace(GOOD, body=[quoting, gate, b"data: 2\n\n"]))
    exchange = exchange_for()
    async with exchange.running(routed.app):
        await exchange.body_at_least(1)
        for _ in range(TURNS):
            await anyio.lowlevel.checkpoint()
        assert requests(routed) == [1]
        gate.set()

    assert exchange.finished_cleanly
    assert exchange.body == quoting + b"data: 2\n\n"
    routed.assert_released(exchange)


@pytest.mark.parametrize("status", [400, 401, 404, 408, 413, 422])
async def test_20_a_plain_4xx_is_not_asked_for_again(status: int) -> None:
    """sgl-project/sglang#8972: what the client did wrong it is told, by the one worker that was asked."""
    routed = Routed(dict.fromkeys((WORKER, OTHER), Script.json({"error": "yours"}, status=status)))
    exchange = await exchange_for().run(routed.app)
    assert (exchange.status, exchange.json()) == (status, {"error": "yours"})
    assert connects(routed) == 1
    routed.assert_released(exchange)

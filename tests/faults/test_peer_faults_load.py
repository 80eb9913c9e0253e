"""Owns the faults of stale load that peers have had in public (entries 3, 4 and 13 to 15): each trigger, played to us.

Entries 3 and 4 for the router's own counts are in `test_peer_faults_counters.py`. Entries 13 to 15 are of disaggregated
prefill workers; what applies to every worker is shown: a prompt counts as work to be done until its answer begins.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import anyio
import pytest

from tests.faults.test_peer_faults_counters import FLEET, burst, until
from tests.fleet.test_load import REMOTE, routed_by_load, saying
from tests.instruments.asgi_client import Exchange
from tests.instruments.fake_worker import HANG, Script
from tests.routed import OTHER, WORKER, Routed, answer, completion_body, interrupted

pytestmark = pytest.mark.anyio

GOOD = answer("stream")
LONG, SHORT = "A long prompt. " * 400, "A short prompt."


@pytest.mark.parametrize("policy", REMOTE)
async def test_03_a_burst_between_two_polls_is_spread(policy: str) -> None:
    """vllm-project/router#177: a burst faster than the poll went to one worker; ours count on top of the poll."""
    metrics = dict(zip(FLEET, (saying(6), saying(0), saying(0), saying(0)), strict=True))
    routed, monitor = routed_by_load(metrics, policy=policy)
    await monitor.ask_all()
    assert await burst(routed, 30) == [3, 9, 9, 9]


@pytest.mark.parametrize("policy", REMOTE)
async def test_04_engines_without_the_path_that_is_polled(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    """vllm-project/router#174: engines that answer 404 were chosen at random, in silence; now by our counts, aloud."""
    routed, monitor = routed_by_load(dict.fromkeys(FLEET, Script(status=404, body=[b"not found"])), policy=policy)
    await monitor.ask_all()
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert sorted(told) == [f"{url}: doesn't say how busy it is (status 404); own counts are used" for url in FLEET]
    assert await burst(routed, 24) == [6, 6, 6, 6]


@pytest.mark.parametrize("policy", ["prefill_cost", "process_tokens"])
async def test_13_a_long_prompt_counts_while_it_is_prefilled(policy: str) -> None:
    """vllm-project/vllm-ascend#13338: a worker with a long prompt looked like an idle one; the next ones avoid it."""
    routed = Routed({WORKER: replace(GOOD, head=[HANG]), OTHER: GOOD}, policy=policy)
    routed.router.workers.drain(OTHER)
    long = Exchange(body=completion_body(LONG))
    async with long.running(routed.app):
        await routed.worker.received(1)
        busy, idle = routed.router.stats().workers
        assert busy.pending_prefill_tokens >= len(LONG) / 4
        assert idle.pending_prefill_tokens == 0
        routed.router.workers.drain(OTHER, draining=False)
        for _ in range(10):
            await Exchange(body=completion_body(SHORT)).run(routed.app)
        assert (len(routed.worker.calls), len(routed.fleet[OTHER].calls)) == (1, 10)
        long.disconnect()
    routed.assert_released(long)


@pytest.mark.parametrize(
    ("policy", "settings"),
    [("prefill_cost", {}), ("fd_metrics_score", {"waiting_weight": 9.0})],
    ids=["14: sgl-project/sglang#39951, tokens", "15: llm-d/llm-d-router#2243, requests"],
)
async def test_14_and_15_the_first_byte_ends_the_waiting(policy: str, settings: dict[str, float]) -> None:
    """sgl-project/sglang#39951, llm-d/llm-d-router#2243: a prompt counted as pending until its answer's end.

    From the first byte of a long answer on, its prompt is no work in front of others: its worker is preferred to one
    that still prefills a shorter prompt, though both have one request.
    """
    gate = anyio.Event()
    routed = Routed({WORKER: interrupted("stream", gate), OTHER: replace(GOOD, head=[HANG])}, policy=policy, **settings)
    answering, prefilling = Exchange(body=completion_body(LONG)), Exchange(body=completion_body(LONG[:3000]))
    routed.router.workers.drain(OTHER)
    async with answering.running(routed.app):
        await until(lambda: routed.counters[0][2] == 0 and len(routed.worker.calls) == 1)
        (requests, tokens, waiting, pending), _ = routed.counters
        assert (requests, waiting, pending) == (1, 0, 0)
        assert tokens > 0

        routed.router.workers.drain(OTHER, draining=False)
        routed.router.workers.drain(WORKER)
        async with prefilling.running(routed.app):
            await routed.fleet[OTHER].received(1)
            routed.router.workers.drain(WORKER, draining=False)
            next_one = Exchange(body=completion_body(SHORT))
            async with next_one.running(routed.app):
                await until(lambda: sum(requests for requests, *_ in routed.counters) == 3)
                assert [requests for requests, *_ in routed.counters] == [2, 1]
                gate.set()
            prefilling.disconnect()

    assert answering.finished_cleanly
    routed.assert_released()

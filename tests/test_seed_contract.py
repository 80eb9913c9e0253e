"""Owns the contract of the seed's own repair: cache-aware selection in mixed mode.

FastDeploy's Go router chose mixed workers with an empty message, and released one counter of two; its pull
request #7129 mended both. These are the five things that must hold since then, and the fault itself (F-02).
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import httpx
import pytest

from asgi_router.scheduling.scheduler import Scheduler
from tests.instruments.asgi_client import HANG, Exchange
from tests.routed import OTHER, WORKER, Routed, answer, completion_body

if TYPE_CHECKING:
    from asgi_router.extraction import CompletionRequest
    from asgi_router.scheduling.lease import Lease
    from tests.instruments.fake_worker import Script

pytestmark = pytest.mark.anyio

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def selections(monkeypatch: pytest.MonkeyPatch) -> list[tuple[CompletionRequest, Lease]]:
    """Every selection that is made: what it was told of the request, and the lease that it returned."""
    seen: list[tuple[CompletionRequest, Lease]] = []
    select = Scheduler.select

    def recording_select(self: Scheduler, workers: object, request: CompletionRequest, **options: object) -> Lease:
        lease = select(self, workers, request, **options)  # type: ignore[arg-type]
        seen.append((request, lease))
        return lease

    monkeypatch.setattr(Scheduler, "select", recording_select)
    return seen


def served_by(routed: Routed) -> list[int]:
    """How many requests each worker got."""
    return [len(worker.calls) for worker in routed.fleet.workers.values()]


async def test_1_the_same_prompt_returns_to_its_worker() -> None:
    """Of two workers the second of two equal prompts goes where the first went; another prompt by load."""
    gate = anyio.Event()
    routed = Routed({WORKER: answer("json"), OTHER: answer("json")}, policy="cache_aware")
    for _ in range(6):
        await Exchange(body=completion_body()).run(routed.app)
    assert sorted(served_by(routed)) == [0, 6]

    busy = max(routed.fleet.workers.values(), key=lambda worker: len(worker.calls))
    busy.scripts = replace(answer("json"), head=[gate])
    blocked = Exchange(body=completion_body())
    async with blocked.running(routed.app):
        await busy.received(7)
        await Exchange(body=completion_body("Something else. " * 200)).run(routed.app)
        gate.set()
    assert sorted(served_by(routed)) == [1, 7]
    routed.assert_released()


@pytest.mark.parametrize(
    "ending",
    [
        answer("json"),
        answer("stream"),
        replace(answer("json"), status=500),
        replace(answer("json"), connect=[httpx.ConnectError("refused")]),
        replace(answer("json"), head=[httpx.ReadError("reset")]),
        replace(answer("json"), head=[HANG]),
    ],
    ids=["success", "stream", "500", "refused", "reset", "client leaves"],
)
@pytest.mark.parametrize("policy", ["cache_aware", "process_tokens", "prefill_cost"])
async def test_2_both_counters_go_up_and_down_together(ending: Script, policy: str) -> None:
    """While a request runs its worker carries one request and its tokens; on every exit both are gone."""
    gate = anyio.Event()
    routed = Routed(replace(ending, connect=[gate, *ending.connect]), policy=policy)
    exchange = Exchange(body=completion_body())
    async with exchange.running(routed.app):
        await routed.worker.changes.until(lambda: routed.worker.connects == 1)
        requests, tokens, *_ = routed.counters[0]
        assert requests == 1
        assert tokens > 900
        gate.set()
        if HANG in ending.head:
            await routed.worker.received(1)
            exchange.disconnect()

    routed.assert_released(exchange)


@pytest.mark.parametrize(
    ("path", "message"),
    [(CHAT, "from the chat"), (TEXT, "from the prompt")],
)
async def test_3_the_extractor_follows_the_endpoint(
    path: str, message: str, selections: list[tuple[CompletionRequest, Lease]]
) -> None:
    """Selection sees the message of the endpoint that was called, not of the other, and not an empty one."""
    routed = Routed(answer("json"), policy="cache_aware")
    body = json.dumps({"messages": [{"role": "user", "content": " from the chat "}], "prompt": "from the prompt"})
    await Exchange(body=body.encode(), path=path).run(routed.app)
    assert [request.message for request, _ in selections] == [message]
    assert routed.worker.calls[0].url == WORKER + path


@pytest.mark.parametrize("body", [b"{}", b'{"messages": []}', b'{"messages": [{"role": "user", "content": ""}]}'])
async def test_4_an_empty_message(body: bytes) -> None:
    """Nothing to match: the load decides, and whatever is taken is given back."""
    routed = Routed({WORKER: answer("json"), OTHER: answer("json")}, policy="cache_aware")
    (first, second) = routed.router.workers
    first.prefill_tokens += 1000  # as if it were busy
    for _ in range(4):
        await Exchange(body=body).run(routed.app)
    assert served_by(routed) == [0, 4]

    first.prefill_tokens -= 1000
    assert second.prefill_tokens == 0
    routed.assert_released()


async def test_5_what_is_released_is_what_was_acquired(selections: list[tuple[CompletionRequest, Lease]]) -> None:
    """On a retry each worker gets back its own amount, from the object that was charged."""
    gates = anyio.Event(), anyio.Event()
    refused = httpx.ConnectError("refused")
    routed = Routed(
        {
            WORKER: replace(answer("json"), connect=[gates[0], refused]),
            OTHER: replace(answer("json"), head=[gates[1]]),
        },
        policy="round_robin",
    )
    exchange = Exchange(body=completion_body())
    async with exchange.running(routed.app):
        await routed.worker.changes.until(lambda: routed.worker.connects == 1)
        charged = routed.counters[0]
        assert (charged[0], routed.counters[1]) == (1, (0, 0, 0, 0))
        routed.router.workers.remove(WORKER)  # its URL means nothing any more, its object does
        gates[0].set()
        await routed.fleet[OTHER].received(1)
        assert routed.counters == [charged]
        gates[1].set()

    first, second = (lease for _, lease in selections)
    assert first.prefill_tokens == second.prefill_tokens == charged[1]
    assert (first.state.requests, first.state.prefill_tokens) == (0, 0)
    routed.assert_released(exchange)


@pytest.mark.parametrize("policy", ["cache_aware", "process_tokens", "prefill_cost"])
async def test_f_02_traffic_does_not_pile_up_on_the_first_url(policy: str) -> None:
    """Requests in flight spread over the fleet: the message and the tokens count in mixed mode (F-02)."""
    gate = anyio.Event()
    urls = [f"http://w{n}:1" for n in range(4)]
    routed = Routed(dict.fromkeys(urls, replace(answer("json"), head=[gate])), policy=policy)
    async with anyio.create_task_group() as tasks:
        for number in range(8):
            exchange = Exchange(body=completion_body(f"Prompt number {number}. " * 100))
            tasks.start_soon(exchange.run, routed.app)
        while sum(served_by(routed)) < 8:
            await anyio.lowlevel.checkpoint()
        gate.set()

    assert served_by(routed) == [2, 2, 2, 2]
    routed.assert_released()

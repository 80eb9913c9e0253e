"""Owns the second start of what its workers gave up: which answers say so, what the next pair gets, how often."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from asgi_router import Router, RouterMiddleware, RouterSettings
from asgi_router.disaggregated import preemption
from tests.instruments.asgi_client import Exchange
from tests.instruments.fake_worker import FakeFleet, Script
from tests.routed import completion_body, counters, unreachable_app

if TYPE_CHECKING:
    from tests.instruments.fake_worker import Scripts

pytestmark = pytest.mark.anyio

PREFILL, DECODE, OTHER = "http://p:1", "http://d1:1", "http://d2:1"
GIVEN_UP = {
    "choices": [{"finish_reason": "pd_reschedule", "message": {"content": "He", "completion_token_ids": [7, 8]}}]
}
WHOLE = {"choices": [{"finish_reason": "stop", "message": {"content": "Hello"}}]}


class Preempted:
    """A router before one prefill and two decode workers."""

    def __init__(self, decode: Scripts, **settings: object) -> None:
        self.fleet = FakeFleet({PREFILL: Script.json({"choices": []}), DECODE: decode, OTHER: decode})
        workers = [{"url": PREFILL, "role": "prefill"}, *({"url": url, "role": "decode"} for url in (DECODE, OTHER))]
        options = {"mode": "disaggregated", "decode_policy": "round_robin", "pd_preempt_retries": 3, **settings}
        self.router = Router(RouterSettings(workers=workers, **options), transport=self.fleet)

    async def ask(self, **fields: object) -> Exchange:
        """Send a request, and see that nothing of it is left."""
        exchange = await Exchange(body=completion_body(**fields)).run(  # type: ignore[arg-type]
            RouterMiddleware(unreachable_app, router=self.router)
        )
        assert [counters(worker) for worker in self.router.stats().workers] == [(0,) * 4] * 3
        assert [worker.breaker for worker in self.router.stats().workers] == ["closed"] * 3
        self.fleet.assert_clean()
        return exchange

    @property
    def bodies(self) -> list[dict[str, object]]:
        """What the decode workers got, in the order of the prefill worker's requests."""
        return [json.loads(call.body) for call in self.fleet[PREFILL].calls]


async def test_it_goes_on_with_another_pair() -> None:
    """The next pair gets another id, and the tokens of all tries so far; the client sees the last answer only."""
    seen: list[str] = []

    def decode(request: object) -> Script:
        seen.append("decode")
        return Script.json(GIVEN_UP if len(seen) < 3 else WHOLE)

    routed = Preempted(decode)
    exchange = await routed.ask(request_id="mine", seed=2**60 + 1)
    assert (exchange.status, exchange.json(), exchange.starts) == (200, WHOLE, 1)
    assert [body["request_id"] for body in routed.bodies] == ["mine", "mine-retry1", "mine-retry2"]
    assert [body.get("completion_token_ids") for body in routed.bodies] == [None, [7, 8], [7, 8, 7, 8]]
    assert [body["seed"] for body in routed.bodies] == [2**60 + 1] * 3
    assert sum(len(routed.fleet[url].calls) for url in (DECODE, OTHER)) == 3


async def test_it_is_bounded_and_the_last_word_is_passed_on() -> None:
    """After PD_PREEMPT_RETRIES new pairs the client gets what the workers say."""
    routed = Preempted(Script.json(GIVEN_UP), pd_preempt_retries=2)
    exchange = await routed.ask()
    assert exchange.json() == GIVEN_UP
    assert len(routed.bodies) == 3


@pytest.mark.parametrize("status", [200, 500])
async def test_a_pd_error_says_so_too(status: int) -> None:
    """An error that speaks of a "PD Error" is given up, with any status; one try is enough to show it."""
    routed = Preempted(Script.json({"error": {"message": "PD Error: no block"}}, status=status), pd_preempt_retries=1)
    await routed.ask()
    assert sum(len(routed.fleet[url].calls) for url in (DECODE, OTHER)) == 2


@pytest.mark.parametrize(("settings", "fields"), [({"pd_preempt_retries": 0}, {}), ({}, {"stream": True})])
async def test_off_by_default_and_for_streams(settings: dict[str, object], fields: dict[str, object]) -> None:
    """Without the setting, and for a stream, the answer is passed on as it comes."""
    routed = Preempted(Script.json(GIVEN_UP), **settings)
    assert (await routed.ask(**fields)).json() == GIVEN_UP
    assert len(routed.bodies) == 1


async def test_large_answers_are_passed_on_without_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more is held than the limit; what was read goes out, and the rest after it."""
    monkeypatch.setattr(preemption, "MAX_ANSWER_BYTES", 8)
    routed = Preempted(Script(headers=[], body=[b"12345", b"67890", b"abc", b"def"]))
    assert (await routed.ask()).body == b"1234567890abcdef"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b"nonsense",
        b'{"choices": []}',
        b'{"choices": 7}',
        b'{"choices": [7]}',
        b'{"error": "PD Error"}',
        b"[" * 99_999,
    ],
)
def test_other_answers_are_answers(answer: bytes) -> None:
    """Whatever a worker says that doesn't say so is passed on."""
    assert preemption.given_up(answer) == (False, [])

"""Shows a router that learns from `usage` in its workers' answers: how long prompts are, and how much caches hold."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.instruments.asgi_client import Exchange
from tests.instruments.fake_worker import Script
from tests.routed import WORKER, Kind, Routed, completion_body

if TYPE_CHECKING:
    from asgi_router.observability.events import RequestFinished

pytestmark = pytest.mark.anyio

PROMPT = "You are a ledger. " * 500
ESTIMATED = len(PROMPT) // 4


def usage(prompt_tokens: int, cached_tokens: int | None) -> dict[str, object]:
    """Return what a worker says."""
    details = {} if cached_tokens is None else {"prompt_tokens_details": {"cached_tokens": cached_tokens}}
    return {"prompt_tokens": prompt_tokens, "completion_tokens": 3, **details}


def answer(kind: Kind, said: dict[str, object], *, status: int = 200) -> Script:
    """Return a worker's answer that ends with its usage."""
    if kind == "stream":
        script = Script.sse("Hel", "lo")
        last = f"data: {json.dumps({'choices': [], 'usage': said})}\n\n".encode()
        return replace(script, body=[*list(script.body)[:-1], last, b"data: [DONE]\n\n"])
    body = json.dumps({"choices": [{"text": "Hello"}], "usage": said}).encode()
    return Script(status=status, headers=[("content-type", "application/json")], body=[body])


async def ask(routed: Routed, **fields: object) -> None:
    """Send the same long prompt once more."""
    exchange = Exchange(body=completion_body(PROMPT, **fields))
    await exchange.run(routed.app)
    routed.assert_released(exchange)


@pytest.mark.parametrize("kind", ["stream", "json"])
async def test_prompts_are_as_long_as_workers_say(kind: Kind) -> None:
    """After an answer the next prompt of that model is estimated by what the worker has counted in the first."""
    routed = Routed(answer(kind, usage(3 * ESTIMATED, None)))
    events: list[RequestFinished] = []
    routed.router.observers.append(events.append)
    await ask(routed)
    await ask(routed)
    first, second = events
    assert first.prompt_tokens == pytest.approx(ESTIMATED, rel=0.05)
    assert second.prompt_tokens == pytest.approx(3 * ESTIMATED, rel=0.05)
    assert second.predicted_cached_tokens == pytest.approx(3 * ESTIMATED, rel=0.1)


@pytest.mark.parametrize("kind", ["stream", "json"])
async def test_a_cache_that_forgets_is_believed_to_hold_less(kind: Kind) -> None:
    """A prompt that should have been cached and wasn't makes the worker's picture smaller."""
    routed = Routed(answer(kind, usage(ESTIMATED, 0)))
    (state,) = routed.router.workers
    before = state.prefixes.capacity
    await ask(routed)
    assert state.prefixes.capacity == before  # nothing was believed of the first one
    await ask(routed)
    assert state.prefixes.capacity < before
    assert routed.router.stats().workers[0].prefix_capacity == state.prefixes.capacity


async def test_a_cache_that_keeps_its_word_keeps_its_size() -> None:
    """What was believed to be there and was changes nothing."""
    routed = Routed(answer("json", usage(ESTIMATED, ESTIMATED - 1)))
    (state,) = routed.router.workers
    before = state.prefixes.capacity
    for _ in range(5):
        await ask(routed)
    assert state.prefixes.capacity == before


async def test_a_cache_that_holds_more_is_believed_to_hold_more() -> None:
    """A prompt that was forgotten here for want of room, and is still cached there, makes the picture larger."""
    room = ESTIMATED * 2
    routed = Routed(answer("json", usage(ESTIMATED, ESTIMATED - 1)), prefix_capacity_tokens=room)
    (state,) = routed.router.workers
    before = state.prefixes.capacity
    for number in [*range(4)] * 2:
        exchange = Exchange(body=completion_body(f"{number} {PROMPT}"))
        await exchange.run(routed.app)
    assert before < state.prefixes.capacity <= 4 * before


@pytest.mark.parametrize("said", [usage(ESTIMATED, None), {}, {"prompt_tokens": 0}, {"prompt_tokens": "many"}])
async def test_a_worker_that_does_not_say_changes_nothing(said: dict[str, object]) -> None:
    """Where answers don't tell of cached tokens the setting is all there is."""
    routed = Routed(answer("json", said))
    (state,) = routed.router.workers
    before = state.prefixes.capacity
    for _ in range(3):
        await ask(routed)
    assert state.prefixes.capacity == before


async def test_learning_can_be_turned_off() -> None:
    """PREFIX_ADAPT=false: estimates and capacities stay what the settings make them."""
    routed = Routed(answer("json", usage(5 * ESTIMATED, 0)), prefix_adapt=False)
    events: list[RequestFinished] = []
    routed.router.observers.append(events.append)
    (state,) = routed.router.workers
    before = state.prefixes.capacity
    for _ in range(3):
        await ask(routed)
    assert {event.prompt_tokens for event in events} == {events[0].prompt_tokens}
    assert state.prefixes.capacity == before


async def test_an_error_teaches_nothing() -> None:
    """Only a whole answer with status 200 is taken at its word."""
    routed = Routed({WORKER: answer("json", usage(5 * ESTIMATED, 0), status=400)})
    events: list[RequestFinished] = []
    routed.router.observers.append(events.append)
    await ask(routed)
    await ask(routed)
    assert [event.real_prompt_tokens for event in events] == [None, None]
    assert events[0].prompt_tokens == events[1].prompt_tokens


async def test_a_longer_prompt_than_a_cache_can_hold_is_served() -> None:
    """A picture that has shrunk to its least takes part of a prompt, and the request goes on as any other."""
    routed = Routed(answer("json", usage(ESTIMATED, 0)), prefix_block_bytes=64)
    for _ in range(100):
        await ask(routed)
    (state,) = routed.router.workers
    exchange = Exchange(body=completion_body(PROMPT * 20))
    await exchange.run(routed.app)
    assert exchange.status == 200
    assert len(state.prefixes) <= state.prefixes.capacity == 32
    routed.assert_released(exchange)

"""Shows that a simulated worker takes the time that its model says, by cases that can be reckoned by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from asgi_router.replay.worker_model import NEVER, SimulatedWorker, WorkerModel
from tests.replay.builders import PLAIN, Watched, asked


def test_a_prompt_takes_its_tokens() -> None:
    """At 1,000 tokens a second, 500 tokens take half a second, and each token of the answer a millisecond."""
    watched = Watched()
    watched.ask(asked(500, 11, arrival=2.0))
    watched.run()
    assert watched.first[0] == pytest.approx(2.5)
    assert watched.last[0] == pytest.approx(2.51)
    assert watched.worker.until == NEVER
    assert watched.worker.busy == pytest.approx(0.51)


def test_prompts_are_prefilled_in_their_order() -> None:
    """With room for one prompt in a step, the second waits for the first."""
    watched = Watched(replace(PLAIN, step_tokens=500))
    watched.ask(asked(500))
    watched.ask(asked(500, arrival=0.1))
    watched.run()
    assert watched.first == pytest.approx({0: 0.5, 1: 1.0})


def test_a_step_has_a_budget_that_the_batch_shares() -> None:
    """What decodes takes its token of each step, the rest goes to the prompts in pieces."""
    watched = Watched(replace(PLAIN, step_tokens=101))
    watched.ask(asked(101, 1_000))
    watched.ask(asked(201, arrival=0.05))
    watched.run(0.304)
    assert watched.first == {0: pytest.approx(0.101)}
    watched.run(0.306)  # two more steps of 101 tokens, one of the first's and 100 of the second's; then one of two
    assert watched.first[1] == pytest.approx(0.305)


def test_cached_blocks_are_not_computed_again() -> None:
    """A prompt whose beginning is cached takes the time of the rest, and of one token at the least."""
    watched = Watched()
    watched.ask(asked(300, blocks=(1, 2, 3)))
    second = watched.ask(asked(350, blocks=(1, 2, 4), arrival=1.0))
    third = watched.ask(asked(300, blocks=(1, 2, 3), arrival=2.0))
    watched.run()
    assert second.cached == 200
    assert watched.first[1] == pytest.approx(1.15)
    assert third.cached == 200  # the third block ends the prompt, whose last token is computed in any case
    assert watched.first[2] == pytest.approx(2.1)


def test_attention_and_context_take_time() -> None:
    """Pairs of tokens in a prompt, and the context of those that decode, make steps longer."""
    watched = Watched(replace(PLAIN, attention_penalty=1_000.0, batch_penalty=100_000.0))
    watched.ask(asked(1_000, 3))
    watched.run()
    assert watched.first[0] == pytest.approx(1.0 + 1_000 * 500 * 1e-6)
    # In pieces it takes the same: each has all tokens before it to look at.
    pieces = Watched(replace(PLAIN, attention_penalty=1_000.0, step_tokens=300))
    pieces.ask(asked(1_000))
    pieces.run()
    assert pieces.first[0] == pytest.approx(watched.first[0])
    # Two steps: a millisecond for the token, and one for each token of context, 1,001 and 1,002.
    assert watched.last[0] - watched.first[0] == pytest.approx(0.002 + 1.001 + 1.002)


def test_a_faster_worker_is_faster_in_everything() -> None:
    """At twice the speed all times are half."""
    model = WorkerModel()
    times = []
    for speed in (1.0, 2.0):
        watched = Watched(replace(model, speed=speed))
        watched.ask(asked(3_000, 50))
        watched.run()
        times.append((watched.first[0], watched.last[0]))
    assert times[0] == pytest.approx((2 * times[1][0], 2 * times[1][1]))


def test_a_sequence_waits_for_room_in_the_cache() -> None:
    """A prompt that doesn't fit beside the one that runs begins when that has ended; one that never fits is told."""
    watched = Watched(replace(PLAIN, cache_tokens=1_000))
    watched.ask(asked(500, 400))
    second = watched.ask(asked(500, 400, arrival=0.1))
    watched.run()
    assert watched.first[1] == pytest.approx(watched.last[0] + 0.5)
    assert watched.worker.fits(second)
    assert not Watched(replace(PLAIN, cache_tokens=800)).worker.fits(second)


def test_a_batch_has_room_for_so_many() -> None:
    """With `max_batch` sequences the next one waits."""
    watched = Watched(replace(PLAIN, max_batch=1))
    watched.ask(asked(100, 101))
    watched.ask(asked(100, arrival=0.01))
    watched.run()
    assert watched.last[0] == pytest.approx(0.2)
    assert watched.first[1] == pytest.approx(0.3)


def test_a_restart_loses_everything() -> None:
    """All sequences come back, and nothing is cached any more."""
    watched = Watched(replace(PLAIN, batch_penalty=1_000.0))
    watched.ask(asked(100, 50, blocks=(1,)))
    watched.run(0.12)
    watched.ask(asked(1_000, blocks=(1,), arrival=0.13))
    watched.ask(asked(1_000, blocks=(1,), arrival=0.14))
    assert watched.worker.restart() == watched.sequences
    assert watched.worker.until == NEVER
    assert len(watched.worker.cache) == 0
    assert watched.worker.step_seconds() == 0.0
    again = watched.ask(asked(100, blocks=(1,), arrival=1.0))
    watched.run()
    assert again.cached == 0
    assert watched.first[3] == pytest.approx(1.1)


def test_a_long_answer_is_no_long_simulation() -> None:
    """A stretch in which nothing happens is one event, however many tokens are decoded in it."""
    watched = Watched(WorkerModel())
    for number in range(20):
        watched.ask(asked(1_000, 10_000, arrival=number * 0.5))
    events = 0
    while watched.worker.until < NEVER:
        watched.worker.advance()
        events += 1
    assert len(watched.last) == 20
    assert events < 100


class StepByStep(SimulatedWorker):
    """A worker that takes each step by itself."""

    __slots__ = ()

    def _begin(self, now: float) -> None:
        super()._begin(now)
        if self._steps > 1:
            self._steps = 1
            self.until = now + self._seconds(1)


@pytest.mark.parametrize("seed", range(5))
def test_steps_taken_together_are_the_steps_taken_one_by_one(seed: int) -> None:
    """The short cut through steps in which nothing but the lengths changes is exact."""
    rng = random.Random(seed)
    model = WorkerModel(cache_tokens=40_000, step_tokens=2_048, max_batch=8)
    fast, slow = Watched(model), Watched(model, StepByStep)
    now = 0.0
    for _ in range(60):
        now += rng.expovariate(3.0)
        head = rng.randrange(4) * 10
        blocks = (*range(head, head + rng.randint(1, 10)), *range(1_000 + int(now * 1e6), 1_000 + int(now * 1e6) + 5))
        request = asked(len(blocks) * 100 + rng.randrange(100), rng.randint(1, 400), blocks, arrival=now)
        fast.ask(request)
        slow.ask(request)
    fast.run()
    slow.run()
    assert len(fast.last) == 60
    assert fast.first == pytest.approx(slow.first, abs=1e-6)
    assert fast.last == pytest.approx(slow.last, abs=1e-6)
    assert [one.cached for one in fast.sequences] == [one.cached for one in slow.sequences]
    assert fast.worker.cache.held == 0
    assert fast.worker.step_seconds() == slow.worker.step_seconds() == pytest.approx(model.step_ms / 1e3)

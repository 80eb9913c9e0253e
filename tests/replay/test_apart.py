"""Shows the replay of prefill and decode apart: who does what, when, and that both leases are given back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asgi_router.replay.apart import TRANSFER_RATE, Apart, Transfers, replay_of
from asgi_router.replay.choosers import NAMES, chooser
from asgi_router.replay.generated import conversations
from asgi_router.replay.simulate import Replay, Setup
from asgi_router.replay.worker_model import NEVER
from asgi_router.scheduling.policies import PolicyOptions
from asgi_router.worker import Role
from tests.replay.builders import PLAIN, asked, trace_of

BUSY = conversations(requests=400, rate=20.0, seed=3)


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_chooses_who_prefills(name: str) -> None:
    """All requests are served, prompts are prefilled on the prefill workers, and nothing stays behind."""
    run = Apart(BUSY, Setup(workers=5, prefill_workers=3), name, chooser(name, PolicyOptions()))
    outcome = run.run()
    assert len(outcome.ttft) == 400
    assert len(outcome.chosen) == 3
    assert sum(outcome.chosen) == 400
    assert len(outcome.per_token) == sum(request.output_tokens > 1 for request in BUSY.requests)
    for state, worker in run.workers.items():
        assert (state.requests, state.prefill_tokens, state.pending_prefill_tokens, state.waiting_requests) == (0,) * 4
        assert state.prefixes.pinned == 0
        assert worker.cache.held == 0
    roles = [state.worker.role for state in run.workers]
    assert roles == [Role.PREFILL] * 3 + [Role.DECODE] * 2
    assert all(seconds > 0 for seconds in outcome.busy)


def test_the_times_of_a_request() -> None:
    """First token at the end of the prefill; then the transfer, and a step for each further token."""
    setup = Setup(workers=2, prefill_workers=1, model=PLAIN)
    outcome = replay_of(trace_of(asked(1_000, 11)), setup, "random", chooser("random", PolicyOptions()))
    assert list(outcome.ttft) == pytest.approx([1.0])
    assert outcome.seconds == pytest.approx(1.0 + 1_000 / TRANSFER_RATE + 10 * 0.001)
    assert list(outcome.per_token) == pytest.approx([(outcome.seconds - 1.0) / 10])
    assert outcome.busy == pytest.approx([1.0, 0.01])


def test_decoding_does_not_slow_the_prefill() -> None:
    """What a mixed worker would do between steps, another one does: prompts take their own time only."""
    requests = [asked(100, 2_000), asked(1_000, 1, arrival=0.5), asked(1_000, 1, arrival=2.0)]
    model = replace(PLAIN, step_tokens=1_000, step_ms=10.0)
    setup = Setup(workers=2, prefill_workers=1, model=model)
    outcome = replay_of(trace_of(*requests), setup, "random", chooser("random", PolicyOptions()))
    assert list(outcome.ttft) == pytest.approx([0.11, 1.01, 1.01])


def test_an_answer_of_one_token_needs_no_transfer() -> None:
    """It is over with its prefill, and so is what is too long for a worker."""
    run = Apart(
        trace_of(asked(100, 1), asked(1_000_000, 5)),
        Setup(workers=2, prefill_workers=1, model=PLAIN),
        "random",
        chooser("random", PolicyOptions()),
    )
    outcome = run.run()
    assert (len(outcome.ttft), outcome.refused, outcome.busy[1]) == (1, 1, 0.0)
    assert all(state.requests == 0 for state in run.workers)


def test_the_mode_is_that_of_the_setup() -> None:
    """Without prefill workers all do both."""
    maker = chooser("random", PolicyOptions())
    assert replay_of(BUSY, Setup(), "random", maker) == Replay(BUSY, Setup(), "random", maker).run()
    assert replay_of(BUSY, Setup(prefill_workers=2), "random", maker) != replay_of(BUSY, Setup(), "random", maker)


def test_transfers_arrive_in_the_order_of_their_ends() -> None:
    """A short one overtakes a long one, and without any there is nothing to wait for."""
    came: list[float] = []
    transfers = Transfers(lambda sequence, now: came.append(now))
    run = Replay(trace_of(), Setup(), "random", chooser("random", PolicyOptions()))
    sequence = run._sequence(asked(), 0.0, run._lease(asked(), ()))
    transfers.begin(2.0, sequence)
    transfers.begin(1.0, sequence)
    while transfers.until < NEVER:
        transfers.advance()
    assert came == [1.0, 2.0]

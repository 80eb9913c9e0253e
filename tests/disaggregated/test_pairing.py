"""Shows the one step from a request to a pair: two leases that fit each other, or none at all."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asgi_router.disaggregated import DIALECTS
from asgi_router.disaggregated.pairing import Pairing
from asgi_router.errors import AllBusy, NoWorker, UnknownModel
from asgi_router.scheduling.breaker import Breaker, BreakerState
from asgi_router.scheduling.policies import POLICIES, PolicyOptions
from asgi_router.scheduling.scheduler import Scheduler
from asgi_router.scheduling.state import WorkerState
from asgi_router.worker import Role, Worker
from tests.scheduling.builders import BLOCK_BYTES, Clock, counters, new_index, request, text, warm

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from asgi_router.disaggregated.pairing import Pair

PROMPT = text("ABC")
LONG = 60.0


def state(name: str, *, tp_size: int = 1, models: tuple[str, ...] = (), clock: Clock | None = None) -> WorkerState:
    """A worker whose role is the first letter of its name, `p` or `d`; its breaker opens at one failure."""
    role = Role.PREFILL if name.startswith("p") else Role.DECODE
    described = Worker(url=f"http://{name}", role=role, models=models, tp_size=tp_size)
    return WorkerState(described, new_index(), Breaker(1, LONG, clock or Clock()))


def pairing(
    states: Collection[WorkerState],
    *,
    policies: tuple[str, str] = ("request_num", "request_num"),
    dialect: str = "fastdeploy",
    skip_below: int = 0,
    max_concurrent: int | None = None,
    on_release: Callable[[], None] | None = None,
) -> Pairing:
    """Return what chooses among these workers."""
    prefill, decode = (
        Scheduler(
            POLICIES[policy](PolicyOptions(), random.Random(1)),
            policy_name=policy,
            block_bytes=BLOCK_BYTES,
            max_concurrent=max_concurrent,
            on_release=on_release,
        )
        for policy in policies
    )
    return Pairing(states, prefill, decode, DIALECTS[dialect], skip_below)


def names(pair: Pair) -> tuple[str, str]:
    """The workers of a pair, the prefill worker first."""
    prefill = pair.prefill.state.worker.url.removeprefix("http://") if pair.prefill else ""
    return prefill, pair.decode.state.worker.url.removeprefix("http://")


def assert_idle(states: Sequence[WorkerState]) -> None:
    """Nothing is counted on any of them, and nothing is pinned."""
    assert [counters(one) for one in states] == [(0, 0, 0, 0)] * len(states)
    assert all(one.prefixes.pinned == 0 for one in states)


def test_both_are_counted_in_one_step_and_given_back_in_one() -> None:
    """A pair is one request, with its tokens, on each of two workers of different roles."""
    states = [state("p1"), state("d1")]
    pair = pairing(states).select(request(PROMPT), ())
    assert names(pair) == ("p1", "d1")
    assert [counters(one)[0] for one in states] == [1, 1]
    assert all(counters(one)[1] == request(PROMPT).prompt_tokens for one in states)
    pair.release()
    assert_idle(states)
    pair.release()
    assert_idle(states)


@pytest.mark.parametrize("role", ["p", "d"])
@pytest.mark.parametrize(
    ("why", "error"),
    [
        ("there is none", NoWorker),
        ("unhealthy", NoWorker),
        ("draining", NoWorker),
        ("tried", NoWorker),
        ("another model", UnknownModel),
        ("full", AllBusy),
        ("does not fit", NoWorker),
    ],
)
def test_f12_two_leases_or_none(role: str, why: str, error: type[Exception]) -> None:
    """F-12: where one role has nobody for the request nothing is counted on the other, and the error says why."""
    lacking = state(
        f"{role}1", tp_size=3 if why == "does not fit" else 1, models=("x",) if why == "another model" else ()
    )
    other = state("d1" if role == "p" else "p1", tp_size=2 if why == "does not fit" else 1)
    states = [other] if why == "there is none" else [other, lacking]
    lacking.healthy = why != "unhealthy"
    lacking.draining = why == "draining"
    lacking.requests = int(why == "full")
    chooser = pairing(states, max_concurrent=1)
    with pytest.raises(error) as caught:
        chooser.select(request(PROMPT, model="m"), {lacking} if why == "tried" else set())
    assert type(caught.value) is error
    lacking.requests = 0
    assert_idle(states)


@pytest.mark.parametrize("role", ["p", "d"])
def test_the_models_of_both_count(role: str) -> None:
    """A request goes to workers that both serve its model; a model that one role doesn't list is unknown."""
    states = [
        state("p1", models=("m",)),
        state("p2", models=("n",)),
        state("d1", models=("n",)),
        state("d2", models=("m",)),
    ]
    assert names(pairing(states).select(request(PROMPT, model="n"), ())) == ("p2", "d1")
    listed = [one for one in states if not one.worker.url.startswith(f"http://{role}")]
    with pytest.raises(UnknownModel):
        pairing([*listed, state(f"{role}9", models=("x",))]).select(request(PROMPT, model="n"), ())


def test_a_prefill_worker_without_a_partner_is_passed_over() -> None:
    """F-87: of two prefill workers the idle one fits no decode worker, so the busy one is taken."""
    states = [state("p1", tp_size=4), state("p2", tp_size=2), state("d1", tp_size=2)]
    states[1].requests = 5
    for _ in range(4):
        assert names(pairing(states).select(request(PROMPT), ())) == ("p2", "d1")


def test_a_partner_that_is_full_or_out_of_reach_is_none() -> None:
    """A prefill worker is chosen for a decode worker that can take the request now, if any prefill worker has one."""
    states = [state("p1", tp_size=4), state("d1", tp_size=4), state("p2", tp_size=2), state("d2", tp_size=2)]
    states[1].requests = 1
    assert names(pairing(states, max_concurrent=1).select(request(PROMPT), ())) == ("p2", "d2")
    states[1].requests = states[2].requests = states[3].requests = 0
    states[1].breaker.open()
    for _ in range(3):
        assert names(pairing(states).select(request(PROMPT), ())) == ("p2", "d2")


def test_peer_35_an_open_breaker_is_not_half_of_a_pair() -> None:
    """sgl-project/sglang#31206 (peer entry 35): the worker behind the open breaker is passed over in either role."""
    states = [state("p1"), state("p2"), state("d1"), state("d2")]
    states[0].breaker.open()
    states[2].breaker.open()
    for _ in range(3):
        assert names(pairing(states).select(request(PROMPT), ())) == ("p2", "d2")


@pytest.mark.parametrize("why", ["full", "draining"])
def test_peer_35_a_probe_without_a_partner_is_given_back(why: str) -> None:
    """Peer entry 35: a half-open breaker's one probe isn't spent on a pair that never was, so it can still close."""
    clock = Clock()
    prefill, decode = state("p1", clock=clock), state("d1")
    prefill.breaker.open()
    clock.now += LONG
    decode.draining = why == "draining"
    decode.requests = int(why == "full")
    chooser = pairing([prefill, decode], max_concurrent=1)
    for _ in range(3):
        with pytest.raises(NoWorker):
            chooser.select(request(PROMPT), ())
    assert (prefill.breaker.state, prefill.breaker.admits) == (BreakerState.HALF_OPEN, True)

    decode.draining, decode.requests = False, 0
    pair = chooser.select(request(PROMPT), ())
    assert pair.prefill is not None
    assert not prefill.breaker.admits
    pair.prefill.first_byte(prefilled=True)
    assert prefill.breaker.state is BreakerState.CLOSED


def test_nobody_is_told_of_a_place_where_there_was_none() -> None:
    """Full decode workers are noticed before a prefill worker is leased: its return would look like a free place."""
    told: list[None] = []
    states = [state("p1"), state("p2"), state("d1")]
    states[2].requests = 1
    chooser = pairing(states, max_concurrent=1, on_release=lambda: told.append(None))
    with pytest.raises(AllBusy):
        chooser.select(request(PROMPT), ())
    assert not told


def test_f50_each_role_takes_its_own_turns() -> None:
    """F-50: with `round_robin` in both roles all workers of both get their turn."""
    states = [state("p1"), state("p2"), state("d1"), state("d2"), state("d3")]
    chooser = pairing(states, policies=("round_robin", "round_robin"))
    pairs = [names(chooser.select(request(PROMPT), ())) for _ in range(6)]
    assert [prefill for prefill, _ in pairs] == ["p1", "p2"] * 3
    assert [decode for _, decode in pairs] == ["d1", "d2", "d3"] * 2


def test_f50_no_turn_is_lost_to_a_look_at_the_cache() -> None:
    """F-50, with `skip_below`: the decode worker that was looked at is the one that serves."""
    states = [state("p1"), state("d1"), state("d2")]
    chooser = pairing(states, policies=("round_robin", "round_robin"), dialect="vllm", skip_below=4)
    pairs = [names(chooser.select(request(text(blocks)), ())) for blocks in ("ABC", "DEF", "GHI", "JKL")]
    assert pairs == [("p1", "d1"), ("p1", "d2")] * 2


def test_each_role_has_its_policy() -> None:
    """The prefill worker is chosen for its cache, the decode worker for its load."""
    states = [state("p1"), state("p2"), state("d1"), state("d2")]
    warm(states[0], "ABC")
    warm(states[2], "ABC")
    states[2].requests = 1
    pair = pairing(states, policies=("prefill_cost", "request_num")).select(request(PROMPT), ())
    assert names(pair) == ("p1", "d2")
    assert pair.prefill is not None
    assert (pair.prefill.reason, pair.decode.reason) == ("prefill_cost", "request_num")
    assert pair.prefill.cached_tokens > 0 == pair.decode.cached_tokens


@pytest.mark.parametrize(("below", "skips"), [(0, False), (1, False), (2, True), (100, True)])
def test_skip_below(below: int, skips: bool) -> None:
    """A decode worker that holds all but one token of a prompt needs no prefill worker, if that is few enough."""
    states = [state("p1"), state("d1")]
    warm(states[1], "ABC")
    pair = pairing(states, dialect="vllm", skip_below=below).select(request(PROMPT), ())
    assert pair.decode.uncached_tokens == 1
    assert names(pair) == ("" if skips else "p1", "d1")
    assert counters(states[0])[0] == (not skips)
    pair.release()
    assert_idle(states)


@pytest.mark.parametrize("dialect", ["fastdeploy", "sglang"])
def test_skip_below_where_the_dialect_has_no_use_for_it(dialect: str) -> None:
    """Decode workers that can't prefill never serve alone."""
    states = [state("p1"), state("d1")]
    warm(states[1], "ABC")
    assert names(pairing(states, dialect=dialect, skip_below=100).select(request(PROMPT), ())) == ("p1", "d1")


def test_skip_below_without_a_prefill_worker() -> None:
    """A prompt that is not short enough needs one: no lease is left on the decode worker that was looked at."""
    states = [state("d1")]
    chooser = pairing(states, dialect="vllm", skip_below=10)
    with pytest.raises(NoWorker):
        chooser.select(request(PROMPT), ())
    assert_idle(states)
    assert names(chooser.select(request("Hi"), ())) == ("", "d1")


def test_others_are_pairs() -> None:
    """Another try is worth it only if there is a pair without the workers that were tried, and that fits."""
    states = [state("p1"), state("p2", tp_size=4), state("d1"), state("d2", tp_size=4)]
    chooser = pairing(states)
    assert chooser.others(request(PROMPT), set())
    assert chooser.others(request(PROMPT), {states[0]})  # p2 with either
    assert chooser.others(request(PROMPT), {states[1], states[3]})
    assert not chooser.others(request(PROMPT), {states[1], states[2]})  # p1 with d2
    assert not chooser.others(request(PROMPT), {states[0], states[1]})
    states[1].healthy = False
    assert not chooser.others(request(PROMPT), {states[0]})


CONDITIONS = st.tuples(st.booleans(), st.booleans(), st.booleans(), st.integers(0, 2), st.integers(1, 3))


@given(st.lists(CONDITIONS, max_size=4), st.lists(CONDITIONS, max_size=4), st.integers(0, 1))
def test_a_pair_is_found_if_there_is_one(
    prefills: list[tuple[bool, bool, bool, int, int]], decodes: list[tuple[bool, bool, bool, int, int]], seed: int
) -> None:
    """Whatever state the workers are in: a ready pair is found, an impossible one is not, and no count is lost."""
    states: list[WorkerState] = []
    for letter, conditions in (("p", prefills), ("d", decodes)):
        for number, (unhealthy, draining, open_breaker, requests, size) in enumerate(conditions):
            one = state(f"{letter}{number}", tp_size=size)
            one.healthy, one.draining, one.requests = not unhealthy, draining, requests
            if open_breaker:
                one.breaker.open()
            states.append(one)
    before = [counters(one) for one in states]
    dialect = DIALECTS["fastdeploy"]()
    able = [one for one in states if one.healthy and not one.draining]
    possible = [
        (one, other)
        for one in able
        for other in able
        if (one.worker.role, other.worker.role) == (Role.PREFILL, Role.DECODE)
        and dialect.fits(one.worker, other.worker)
    ]
    ready = [pair for pair in possible if all(one.breaker.admits and one.requests < 2 for one in pair)]
    policies = (("request_num", "request_num"), ("round_robin", "random"))[seed]
    chooser = pairing(states, policies=policies, max_concurrent=2)
    if not possible:
        with pytest.raises(NoWorker):
            chooser.select(request(PROMPT), ())
    elif not ready:
        with suppress(AllBusy):
            chooser.select(request(PROMPT), ()).release()
    else:
        pair = chooser.select(request(PROMPT), ())
        assert pair.prefill is not None
        assert (pair.prefill.state, pair.decode.state) in possible
        assert pair.prefill.state.requests <= 2
        assert pair.decode.state.requests <= 2
        pair.release()
    assert [counters(one) for one in states] == before

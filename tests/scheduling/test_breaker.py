"""Owns the circuit breaker: when it opens, how one probe closes it, and that nothing gets lost in between."""

from __future__ import annotations

import pytest

from asgi_router.scheduling.breaker import Breaker, BreakerState
from asgi_router.scheduling.lease import Lease
from tests.scheduling.builders import Clock, fleet, prompt, request, text
from tests.scheduling.test_scheduler import new_scheduler

COOLDOWN = 10.0


def new_breaker(clock: Clock, failures: int = 3) -> Breaker:
    """Return a closed breaker that opens after three failures."""
    return Breaker(failures, COOLDOWN, clock)


def opened(clock: Clock) -> Breaker:
    """Return a breaker that has just opened."""
    breaker = new_breaker(clock)
    for _ in range(3):
        breaker.failed(breaker.enter())
    return breaker


def test_failures_in_a_row_open_it() -> None:
    """The third of three failures in a row opens it; a whole answer between them starts the count anew."""
    breaker = new_breaker(Clock())
    for _ in range(5):
        breaker.failed(breaker.enter())
        breaker.failed(breaker.enter())
        breaker.succeeded(breaker.enter())
    assert (breaker.state, breaker.admits) == (BreakerState.CLOSED, True)

    breaker.failed(breaker.enter())
    breaker.failed(breaker.enter())
    assert breaker.admits
    breaker.failed(breaker.enter())
    assert (breaker.state, breaker.admits) == (BreakerState.OPEN, False)


def test_zero_failures_never_open_it() -> None:
    """A breaker can be switched off."""
    breaker = new_breaker(Clock(), failures=0)
    for _ in range(100):
        breaker.failed(breaker.enter())
    assert breaker.admits


def test_after_the_cooldown_one_probe_is_let_in() -> None:
    """Half-open admits one request at a time, not all that wait."""
    clock = Clock()
    breaker = opened(clock)
    clock.now += COOLDOWN - 1
    assert not breaker.admits
    clock.now += 1
    assert (breaker.state, breaker.admits) == (BreakerState.HALF_OPEN, True)
    probe = breaker.enter()
    assert [breaker.is_probe(probe), breaker.admits] == [True, False]
    assert not breaker.is_probe(breaker.enter())


def test_probe_succeeds() -> None:
    """The probe's success closes it for all."""
    clock = Clock()
    breaker = opened(clock)
    clock.now += COOLDOWN
    probe = breaker.enter()
    breaker.succeeded(probe)
    breaker.leave(probe)
    assert (breaker.state, breaker.admits) == (BreakerState.CLOSED, True)
    breaker.failed(breaker.enter())
    assert breaker.admits


def test_probe_fails() -> None:
    """The probe's failure opens it for another cool-down."""
    clock = Clock()
    breaker = opened(clock)
    clock.now += COOLDOWN
    probe = breaker.enter()
    breaker.failed(probe)
    breaker.leave(probe)
    assert breaker.state is BreakerState.OPEN
    clock.now += COOLDOWN
    assert breaker.admits


def test_probe_that_ends_without_a_result_makes_room_for_the_next() -> None:
    """A client that leaves during the probe can't keep the breaker half-open for ever (sglang#31206)."""
    clock = Clock()
    breaker = opened(clock)
    clock.now += COOLDOWN
    breaker.leave(breaker.enter())
    assert (breaker.state, breaker.admits) == (BreakerState.HALF_OPEN, True)


def test_by_hand() -> None:
    """Its state can be set as well as read (litellm#25504)."""
    breaker = new_breaker(Clock())
    breaker.open()
    assert breaker.state is BreakerState.OPEN
    breaker.close()
    assert (breaker.state, breaker.admits) == (BreakerState.CLOSED, True)


@pytest.mark.parametrize("ending", ["first byte", "released", "failed"])
def test_lease_is_the_probe(ending: str) -> None:
    """The request that is let in holds the probe's place for as long as its lease, and not longer."""
    clock = Clock()
    (state,) = fleet("a")
    state.breaker = opened(clock)
    clock.now += COOLDOWN
    lease = Lease(state, prompt("ABCD"))
    assert not state.breaker.admits
    if ending == "first byte":
        lease.first_byte(prefilled=True)
        assert state.breaker.state is BreakerState.CLOSED
    elif ending == "failed":
        lease.failed()
    lease.release()
    lease.release()
    assert state.breaker.admits == (ending != "failed")


def test_scheduler_passes_over_an_open_breaker() -> None:
    """Also a warm cache doesn't attract requests to a worker that can't be reached (Infera#82)."""
    broken, sound = states = fleet("ab")
    scheduler = new_scheduler()
    Lease(broken, prompt("ABCD")).first_byte(prefilled=True)
    broken.breaker = opened(Clock())
    assert scheduler.select(states, request(text("ABCD"))).state is sound


def test_any_try_is_better_than_none() -> None:
    """With every breaker open a request is still tried (litellm#3646)."""
    states = fleet("ab")
    for state in states:
        state.breaker = opened(Clock())
    assert new_scheduler().select(states, request("x")).state in states
    sound, broken = fleet("cd")
    broken.breaker = opened(Clock())
    assert new_scheduler().select([sound, broken], request("x"), exclude=[sound]).state is broken


def test_backing_off_apart_from_the_breaker() -> None:
    """The longest wish counts (litellm#40130), up to a minute; it neither opens nor closes the breaker."""
    clock = Clock()
    breaker = new_breaker(clock)
    breaker.back_off(5)
    breaker.back_off(2)
    assert [breaker.state, breaker.admits, breaker.backing_off] == [BreakerState.CLOSED, False, True]
    breaker.succeeded(breaker.enter())
    assert [breaker.admits, breaker.backing_off] == [False, True]
    clock.now += 5
    assert [breaker.admits, breaker.backing_off] == [True, False]
    breaker.back_off(1e9)
    clock.now += 60
    assert [breaker.admits, breaker.backing_off] == [True, False]


def test_half_open_probe_waits_for_the_end_of_a_back_off() -> None:
    """A worker that may be probed by the breaker's time is left alone for as long as it has asked for."""
    clock = Clock()
    breaker = opened(clock)
    breaker.back_off(COOLDOWN + 5)
    clock.now += COOLDOWN
    assert (breaker.state, breaker.admits) == (BreakerState.HALF_OPEN, False)
    clock.now += 5
    assert breaker.enter()


def test_an_answer_from_before_does_not_close_it() -> None:
    """What began before the breaker opened, by failures or by hand, says nothing of the worker since."""
    clock = Clock()
    breaker = new_breaker(clock)
    old = breaker.enter()
    breaker.open()
    breaker.succeeded(old)
    assert not breaker.admits
    breaker.succeeded(breaker.enter())  # one that was let in although it is open, as there was no other worker
    assert breaker.admits


def test_a_probe_that_lives_on_does_not_keep_the_next_one_out() -> None:
    """The probe of an earlier opening may stream for an hour: a later opening has a probe of its own."""
    clock = Clock()
    breaker = opened(clock)
    clock.now += COOLDOWN
    first = breaker.enter()
    breaker.succeeded(first)
    for _ in range(3):
        breaker.failed(breaker.enter())
    clock.now += COOLDOWN
    assert breaker.admits
    second = breaker.enter()
    breaker.leave(first)
    assert [breaker.is_probe(second), breaker.admits] == [True, False]


def test_a_failure_from_before_does_not_open_it_anew() -> None:
    """Old streams that break one by one tell nothing of the worker since: its cool-down ends, its probe goes on."""
    clock = Clock()
    breaker = new_breaker(clock)
    old = [breaker.enter() for _ in range(5)]
    for number in old[:3]:
        breaker.failed(number)
    clock.now += COOLDOWN - 1
    breaker.failed(old[3])
    clock.now += 1
    probe = breaker.enter()
    assert breaker.is_probe(probe)
    breaker.failed(old[4])
    assert breaker.is_probe(probe)
    breaker.succeeded(probe)
    assert breaker.state is BreakerState.CLOSED

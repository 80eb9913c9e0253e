"""Shows what a session's pin is worth: when it holds, when it gives way, and that the table of pins stays small."""

from __future__ import annotations

import gc
import random
import tracemalloc
import weakref
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from asgi_router.errors import AllBusy
from asgi_router.scheduling.policies import POLICIES, PolicyOptions
from asgi_router.scheduling.scheduler import Scheduler
from asgi_router.scheduling.sessions import GAP_SHARE, MAX_SESSIONS, REQUESTS_GAP, TOKENS_GAP, Sessions
from tests.scheduling.builders import BLOCK_BYTES, TTL, Clock, fleet, request, text, worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asgi_router.extraction import CompletionRequest
    from asgi_router.scheduling.lease import Lease
    from asgi_router.scheduling.state import WorkerState


def in_session(name: str = "s", *, model: str = "") -> CompletionRequest:
    """A request of this session."""
    return replace(request(text("AB"), model=model), session_id=name)


class Chooser:
    """A scheduler with sessions, before the workers of a fleet."""

    def __init__(self, states: Sequence[WorkerState], policy: str = "request_num", **options: int) -> None:
        self.states = list(states)
        self.clock = Clock()
        self.sessions = Sessions(TTL, self.clock)
        self.scheduler = Scheduler(
            POLICIES[policy](PolicyOptions(), random.Random(1)),
            policy_name=policy,
            block_bytes=BLOCK_BYTES,
            max_concurrent=options.get("max_concurrent"),
            sessions=self.sessions,
        )

    def select(self, request: CompletionRequest, exclude: Sequence[WorkerState] = ()) -> Lease:
        return self.scheduler.select(self.states, request, exclude=exclude)

    def serve(self, request: CompletionRequest) -> WorkerState:
        """Let a request come and end; return who served it."""
        lease = self.select(request)
        lease.first_byte(prefilled=False)  # so that no cache tells a policy where to go
        lease.release()
        return lease.state


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_session_returns_to_its_worker(policy: str) -> None:
    """Whatever the policy would do: also while its worker is busier than the others; a new session is the policy's."""
    chooser = Chooser(fleet("abcd"), policy)
    first = chooser.select(in_session())
    assert first.reason != "session"
    first.state.requests += 3
    again = [chooser.select(in_session()) for _ in range(5)]
    assert [(lease.state, lease.reason, lease.candidates) for lease in again] == [(first.state, "session", 4)] * 5
    assert chooser.select(in_session("other")).reason != "session"
    assert chooser.select(request(text("AB"))).reason != "session"


def test_without_sessions_none_is_kept() -> None:
    """A scheduler without them, as SESSION_TTL=0 makes it, goes by its policy alone."""
    states = fleet("ab")
    scheduler = Scheduler(POLICIES["round_robin"](PolicyOptions(), random.Random(1)), block_bytes=BLOCK_BYTES)
    assert [scheduler.select(states, in_session()).state for _ in range(4)] == states * 2


@pytest.mark.parametrize("why", ["unhealthy", "draining", "tried", "breaker", "full", "left"])
def test_a_session_moves_when_its_worker_may_not_be_chosen(why: str) -> None:
    """The policy chooses, and the session stays where it then is, also when the old worker is back."""
    chooser = Chooser(fleet("abc"), max_concurrent=2)
    old = chooser.serve(in_session())
    exclude: list[WorkerState] = []
    match why:
        case "unhealthy":
            old.healthy = False
        case "draining":
            old.draining = True
        case "tried":
            exclude = [old]
        case "breaker":
            old.breaker.open()
        case "full":
            old.requests = 2
        case "left":
            chooser.states.remove(old)

    moved = chooser.select(in_session(), exclude)
    assert moved.state is not old
    assert moved.reason == "request_num"
    old.healthy, old.draining, old.requests = True, False, 0
    old.breaker.close()
    if old not in chooser.states:
        chooser.states.append(old)
    assert chooser.select(in_session()).state is moved.state


def test_the_only_candidate_is_pinned_too() -> None:
    """A session that had no choice stays with its worker when there is one."""
    chooser = Chooser(fleet("a"))
    (only,) = chooser.states
    assert chooser.select(in_session()).reason == "only_candidate"
    chooser.states.append(worker("b"))
    assert (chooser.select(in_session()).state, chooser.select(in_session()).reason) == (only, "session")


def test_models_have_sessions_of_their_own() -> None:
    """The session's name with another model is another session; its worker need not serve that model."""
    chooser = Chooser([worker("a", models=("m",)), worker("b", models=("m", "n")), worker("c", models=("n",))])
    first, second, third = chooser.states
    second.requests = third.requests = 1
    assert chooser.serve(in_session(model="m")) is first
    second.requests = 0
    assert chooser.serve(in_session(model="n")) is second
    assert chooser.serve(in_session(model="m")) is first
    third.requests = 0
    assert [chooser.select(in_session(model="n")).state for _ in range(3)] == [second] * 3


@pytest.mark.parametrize(
    ("own", "least", "stays"),
    [
        ((16, 0), (0, 0), True),
        ((17, 0), (0, 0), False),
        ((34, 0), (17, 0), True),
        ((35, 0), (17, 0), False),
        ((100, 0), (50, 0), True),
        ((101, 0), (50, 0), False),
        ((1, 32_768), (0, 0), True),
        ((1, 32_769), (0, 0), False),
        ((1, 80_000), (0, 40_000), True),
        ((1, 80_001), (0, 40_000), False),
        ((0, 0), (40, 200_000), True),
    ],
)
def test_what_is_clearly_overloaded(own: tuple[int, int], least: tuple[int, int], stays: bool) -> None:
    """More than 16 requests or 32,768 queued tokens above the emptiest candidate, and more than half of its own."""
    assert (REQUESTS_GAP, TOKENS_GAP, GAP_SHARE) == (16, 32_768, 0.5)
    chooser = Chooser(fleet("abc"))
    pinned = chooser.serve(in_session())
    for state in chooser.states:
        state.requests, state.pending_prefill_tokens = own if state is pinned else least
    # The emptiest candidate counts, and no worker that may not be chosen.
    others = [state for state in chooser.states if state is not pinned]
    others[0].requests, others[0].pending_prefill_tokens, others[0].draining = 0, 0, True
    lease = chooser.select(in_session())
    assert (lease.state is pinned) == (lease.reason == "session") == stays
    assert chooser.sessions.worker_for(in_session(), [lease.state]) is lease.state


def test_a_hot_session_spreads() -> None:
    """Requests of one session that are all in flight at once don't stay on one worker."""
    chooser = Chooser(fleet("abcd"))
    for _ in range(200):
        chooser.select(in_session()).first_byte(prefilled=True)
    assert sum(state.requests for state in chooser.states) == 200
    assert min(state.requests for state in chooser.states) >= 20


def test_a_session_ends_after_its_last_use() -> None:
    """Each request begins its time anew; when that is over the policy chooses."""
    chooser = Chooser(fleet("ab"))
    first = chooser.serve(in_session())
    for _ in range(3):
        first.requests = 1
        chooser.clock.now += TTL - 1
        assert chooser.serve(in_session()) is first
    chooser.clock.now += TTL
    assert chooser.serve(in_session()) is not first


def test_nothing_is_pinned_without_a_lease() -> None:
    """Where all are full nobody is chosen, and the pin stays what it was."""
    chooser = Chooser(fleet("ab"), max_concurrent=1)
    first = chooser.select(in_session())
    other = chooser.select(in_session())
    assert other.state is not first.state
    with pytest.raises(AllBusy):
        chooser.select(in_session())
    with pytest.raises(AllBusy):
        chooser.select(in_session("new"))
    assert len(chooser.sessions) == 1
    first.release()
    other.release()
    assert chooser.select(in_session()).state is other.state


def test_a_worker_that_was_chosen_elsewhere_is_pinned() -> None:
    """What a peer's router has placed here is where the session's worker is."""
    chooser = Chooser(fleet("abc"))
    placed = chooser.states[2]
    chooser.scheduler.place(placed, in_session(), "placed_by_peer").release()
    assert chooser.select(in_session()).reason == "session"
    assert chooser.select(in_session()).state is placed


# --- How much is kept ----------------------------------------------------------------------------------------


def test_a_million_sessions() -> None:
    """The number is bounded when a session comes, and those that were used last are there."""
    sessions = Sessions(TTL, Clock())
    states = fleet("ab")
    model = in_session()
    for number in range(1_000_000):
        sessions.note(replace(model, session_id=str(number)), states[number % 2])
        assert len(sessions) <= MAX_SESSIONS
    assert len(sessions) == MAX_SESSIONS
    assert sessions.worker_for(in_session(str(1_000_000 - MAX_SESSIONS)), states) is states[0]
    assert sessions.worker_for(in_session(str(999_999 - MAX_SESSIONS)), states) is None


def test_long_names_take_no_room() -> None:
    """A session takes some 300 bytes, whatever its name and its model's."""
    sessions = Sessions(TTL, Clock(), capacity=5_000)
    states = fleet("a")
    tracemalloc.start()
    try:
        for number in range(15_000):
            sessions.note(in_session(f"{number}" * 2_000, model=f"{number}" * 2_000), states[0])
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(sessions) == 5_000
    assert held < 5_000 * 400


def test_the_table_shrinks() -> None:
    """Sessions that are over go as new ones come, two for each: none has to wait for a sweep."""
    chooser = Chooser(fleet("ab"))
    for number in range(1_000):
        chooser.serve(in_session(str(number)))
    chooser.clock.now += TTL
    sizes = []
    for number in range(1_500):
        chooser.serve(in_session(f"later {number % 10}"))
        sizes.append(len(chooser.sessions))
    assert max(sizes) <= 1_000
    assert sizes[-1] == 10


def test_a_session_that_is_used_outlives_those_that_are_not() -> None:
    """At the capacity the least recently used one goes, not the oldest."""
    sessions = Sessions(TTL, Clock(), capacity=3)
    states = fleet("a")
    for name in "abcadaeaf":
        sessions.note(in_session(name), states[0])
    assert [name for name in "abcdef" if sessions.worker_for(in_session(name), states)] == ["a", "e", "f"]


def test_no_worker_is_kept_alive() -> None:
    """A worker that has left goes, with its prefix blocks, while sessions still remember it."""
    chooser = Chooser([worker("a")])
    chooser.serve(in_session())
    left = weakref.ref(chooser.states.pop())
    gc.collect()
    assert left() is None
    chooser.states.append(worker("a"))
    assert chooser.select(in_session()).state is chooser.states[0]


# --- Any order of events -------------------------------------------------------------------------------------

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("select"), st.integers(0, 4), st.integers(0, 1)),
        st.tuples(st.just("release"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("load"), st.integers(0, 3), st.integers(0, 50)),
        st.tuples(st.just("queue"), st.integers(0, 3), st.integers(0, 100_000)),
        st.tuples(st.just("health"), st.integers(0, 3), st.integers(0, 1)),
        st.tuples(st.just("drain"), st.integers(0, 3), st.integers(0, 1)),
        st.tuples(st.just("replace"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("wait"), st.integers(0, int(TTL)), st.just(0)),
    ),
    max_size=60,
)


@given(events=EVENTS, policy=st.sampled_from(sorted(POLICIES)))
def test_pins_follow_the_rule(events: list[tuple[str, int, int]], policy: str) -> None:
    """Under any load, and whoever comes and goes: a session is where it last was if the rule says so, and only then."""
    chooser = Chooser(fleet("abcd"), policy)
    states = chooser.states
    pins: dict[str, tuple[WorkerState, float]] = {}
    leases: list[Lease] = []
    for event, number, value in events:
        match event:
            case "release":
                if leases:
                    leases.pop(number % len(leases)).release()
            case "load":
                states[number].requests = value
                leases.clear()
            case "queue":
                states[number].pending_prefill_tokens = value
            case "health":
                states[number].healthy = bool(value)
            case "drain":
                states[number].draining = bool(value)
            case "replace":
                states[number] = worker("abcd"[number])
            case "wait":
                chooser.clock.now += number
            case "select":
                candidates = [state for state in states if state.healthy and not state.draining]
                if not candidates:
                    continue
                name = f"session {number}"
                pinned, since = pins.get(name, (None, 0.0))
                stays = (
                    pinned in candidates
                    and pinned is not None
                    and chooser.clock.now - since < TTL
                    and all(
                        own - least <= limit or 2 * (own - least) <= own
                        for own, least, limit in (
                            (pinned.requests, min(state.requests for state in candidates), 16),
                            (
                                pinned.pending_prefill_tokens,
                                min(state.pending_prefill_tokens for state in candidates),
                                32_768,
                            ),
                        )
                    )
                )
                lease = chooser.select(in_session(name))
                leases.append(lease)
                assert lease.state in candidates
                assert (lease.reason == "session") == (stays and len(candidates) > 1)
                if stays:
                    assert lease.state is pinned
                pins[name] = lease.state, chooser.clock.now

"""Shows the rules that open `lease.py`: both counters, together, exactly once, on the object that was counted."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asgi_router
from asgi_router.fleet.registry import Registry
from asgi_router.scheduling.lease import Lease
from asgi_router.worker import Worker
from tests.scheduling.builders import counters, fleet, fresh_state, prompt, warm, worker

COUNTERS = {"requests", "prefill_tokens", "waiting_requests", "pending_prefill_tokens"}
TOKENS = prompt("ABCD").tokens  # 65: four blocks of 16, and the byte behind them
IDLE = (0, 0, 0, 0)


def test_a_lease_counts_when_it_is_made() -> None:
    """Requests and tokens are counted together, before anything else happens; on a cold worker all is uncached."""
    state = worker()
    lease = Lease(state, prompt("ABCD"))
    assert counters(state) == (1, TOKENS, 1, TOKENS)
    assert (lease.state, lease.prefill_tokens, lease.uncached_tokens) == (state, TOKENS, TOKENS)


def test_only_uncached_tokens_are_pending() -> None:
    """The queue counts what the worker has to compute, the other counter the whole prompt."""
    state = worker()
    warm(state, "ABC")
    Lease(state, prompt("ABCD"))
    assert counters(state) == (1, TOKENS, 1, TOKENS - 3 * 16)


def test_a_lease_does_not_see_its_own_blocks() -> None:
    """The first of two equal prompts is uncached, the second finds what the first will bring."""
    state = worker()
    first, second = Lease(state, prompt("ABCD")), Lease(state, prompt("ABCD"))
    assert (first.uncached_tokens, second.uncached_tokens) == (TOKENS, 1)
    first.release()
    second.release()
    assert counters(state) == IDLE


def test_release_before_the_first_byte_gives_all_back() -> None:
    """A request that fails before its answer leaves every counter as it was, and no blocks."""
    state = worker()
    Lease(state, prompt("ABCD")).release()
    assert counters(state) == IDLE
    assert len(state.prefixes) == 0


def test_the_first_byte_ends_the_waiting_and_nothing_else() -> None:
    """At the first byte the request leaves the queue; its prompt tokens stay counted to the end."""
    state = worker()
    lease = Lease(state, prompt("ABCD"))
    lease.first_byte(prefilled=True)
    assert counters(state) == (1, TOKENS, 0, 0)
    lease.release()
    assert counters(state) == IDLE


def test_the_first_byte_comes_once() -> None:
    """A second first byte changes nothing, not even what the first said of the prefill."""
    state = worker()
    lease = Lease(state, prompt("ABCD"))
    lease.first_byte(prefilled=False)
    lease.first_byte(prefilled=True)
    assert counters(state) == (1, TOKENS, 0, 0)
    lease.release()
    assert counters(state) == IDLE
    assert len(state.prefixes) == 0


def test_a_first_byte_after_the_release_changes_nothing() -> None:
    """A late first byte finds the request ended: no counter moves and nothing is recorded."""
    state = worker()
    lease = Lease(state, prompt("ABCD"))
    lease.release()
    lease.first_byte(prefilled=True)
    lease.release()
    assert counters(state) == IDLE
    assert len(state.prefixes) == 0


@pytest.mark.parametrize("answered", [False, True])
def test_f43_release_is_idempotent(answered: bool) -> None:
    """F-43: the second release of one lease takes nothing from another request on the same worker.

    vllm-project/vllm-ascend#13214: a decoder's tokens went below zero.
    """
    state = worker()
    lease, other = Lease(state, prompt("ABCD")), Lease(state, prompt("ABCD"))
    if answered:
        lease.first_byte(prefilled=True)
    for _ in range(3):
        lease.release()
        assert counters(state) == (1, other.prefill_tokens, 1, other.uncached_tokens)
        assert state.prefixes.pinned == 4
    other.release()
    assert counters(state) == IDLE


@pytest.mark.parametrize(("prefilled", "blocks"), [(True, 4), (False, 0)])
def test_only_a_prefilled_prompt_is_remembered(prefilled: bool, blocks: int) -> None:
    """Blocks match while the request runs; afterwards only if the worker answered with a success."""
    state = worker()
    lease = Lease(state, prompt("ABCD"))
    assert prompt("ABCD").hit_ratio(state) == 1.0
    lease.first_byte(prefilled=prefilled)
    lease.release()
    assert len(state.prefixes) == blocks
    assert state.prefixes.pinned == 0


def test_a_prompt_that_was_recorded_in_part_is_given_back_in_part() -> None:
    """Where the index had no room for the tail, release unpins the head alone."""
    state = worker(capacity=3)
    first, second = Lease(state, prompt("ABCDE")), Lease(state, prompt("XY"))
    assert state.prefixes.pinned == 3
    second.release()
    assert state.prefixes.pinned == 3
    first.release()
    assert (state.prefixes.pinned, counters(state)) == (0, IDLE)


def test_f42_release_is_on_the_object_that_was_counted() -> None:
    """F-42: a worker leaves and comes back; the old request's end takes nothing from the new one.

    llm-d/llm-d-router#1739, llm-d/llm-d#1950: what was released was looked up by name.
    """
    registry = Registry(fresh_state)
    old_state = registry.add(Worker(url="http://a"))
    old = Lease(old_state, prompt("ABCD"))
    registry.remove("http://a")
    new_state = registry.add(Worker(url="http://a"))
    new = Lease(new_state, prompt("ABCD"))

    old.first_byte(prefilled=True)
    old.release()
    assert counters(new_state) == (1, TOKENS, 1, TOKENS)
    assert counters(old_state) == IDLE
    assert new_state.prefixes.pinned == 4

    new.release()
    assert counters(new_state) == IDLE
    assert len(new_state.prefixes) == 0


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 7),
            st.sampled_from(["release", "first byte", "error byte"]),
        ),
        max_size=40,
    )
)
def test_counters_are_the_sum_over_the_leases(steps: list[tuple[int, str]]) -> None:
    """In whatever order leases go through their lives, the counters are their sum, and zero at the end."""
    states = fleet("ab", capacity=6)
    leases = [Lease(states[at % 2], prompt(letters)) for at, letters in enumerate(["AB", "ABC", "AX", "Y"] * 2)]
    waiting, open_ = set(leases), set(leases)
    for at, step in [*steps, *((at, "release") for at in range(8))]:
        lease = leases[at]
        waiting.discard(lease)
        if step == "release":
            open_.discard(lease)
            lease.release()
        else:
            lease.first_byte(prefilled=step == "first byte")

        for state in states:
            own = [lease for lease in open_ if lease.state is state]
            queue = [lease for lease in own if lease in waiting]
            assert counters(state) == (
                len(own),
                sum(lease.prefill_tokens for lease in own),
                len(queue),
                sum(lease.uncached_tokens for lease in queue),
            )

    assert [counters(state) for state in states] == [IDLE, IDLE]
    assert [state.prefixes.pinned for state in states] == [0, 0]


def test_repr_shows_worker_tokens_and_phase() -> None:
    """The first debugger."""
    lease = Lease(worker("w"), prompt("ABCD"))
    phases = [repr(lease)]
    lease.first_byte(prefilled=True)
    phases.append(repr(lease))
    lease.release()
    phases.append(repr(lease))
    assert phases == [f"<Lease on http://w: 65 tokens, {phase}>" for phase in ("waiting", "answering", "released")]


def counter_writes(tree: ast.AST) -> set[str]:
    """Return the counters that a module assigns, deletes, or sets by name on any object, or starts a worker with."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name, ctx=ast.Store() | ast.Del()):
                found.add(name)
            case (
                ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[_, name_node, *_])
                | ast.Call(func=ast.Attribute(attr="__setattr__" | "__delattr__"), args=[*_, name_node, _])
            ):
                # A name that is computed may be any of them.
                found |= {str(name_node.value)} if isinstance(name_node, ast.Constant) else COUNTERS
            case ast.Call(func=ast.Name(id="WorkerState" | "replace"), args=args, keywords=keywords):
                found |= COUNTERS if len(args) > 3 else set()
                found |= {keyword.arg for keyword in keywords if keyword.arg}

    return found & COUNTERS


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("state.requests += 1", True),
        ("state.requests = n = 0", True),
        ("a.b.pending_prefill_tokens, x = 1, 2", True),
        ("del state.waiting_requests", True),
        ("setattr(state, 'requests', 1)", True),
        ("setattr(state, name, 1)", True),
        ("object.__setattr__(state, 'prefill_tokens', 1)", True),
        ("WorkerState(worker, index, breaker, requests=1)", True),
        ("WorkerState(worker, index, breaker, 1)", True),
        ("WorkerState(worker, index, breaker)", False),
        ("WorkerStats(requests=state.requests)", False),
        ("requests = state.requests", False),
        ("state.healthy = False", False),
    ],
)
def test_the_search_for_counter_writes_finds_them(source: str, found: bool) -> None:
    """The check below sees each way to write a counter, and takes no reading for a writing."""
    assert bool(counter_writes(ast.parse(source))) is found


def test_nothing_but_the_lease_writes_the_counters() -> None:
    """Rule 1: in the whole package only `lease.py` assigns a counter of a worker."""
    package = Path(asgi_router.__file__).parent
    writers = {
        path.relative_to(package).as_posix(): found
        for path in package.rglob("*.py")
        if (found := counter_writes(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert writers == {"scheduling/lease.py": COUNTERS}

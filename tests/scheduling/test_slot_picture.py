"""Shows the picture of a worker with slots, one rule at a time; `test_slot_model.py` checks that they hold together."""

from __future__ import annotations

import gc
import random
from typing import TYPE_CHECKING

import pytest

from asgi_router import Router, RouterSettings, Worker
from asgi_router.scheduling.lease import Lease
from asgi_router.scheduling.policies import PolicyOptions, PrefillCost
from asgi_router.scheduling.slot_picture import SlotClock, SlotPicture
from tests.scheduling.builders import BLOCK_TOKENS, counters, prompt, warm, worker

if TYPE_CHECKING:
    from asgi_router.scheduling.state import WorkerState

PREFILL_COST = PrefillCost(PolicyOptions(), random.Random(1))


def slotted(name: str = "a", slots: int = 2, capacity: int = 1_000, *, clock: SlotClock | None = None) -> WorkerState:
    """Return a worker with so many empty slots."""
    state = worker(name)
    state.prefixes = SlotPicture(slots, capacity, clock)
    return state


def cached(state: WorkerState, letters: str) -> int:
    """Return how many blocks of a prompt with one block for each letter the worker would find."""
    return prompt(letters).cached_blocks(state)


def begun(state: WorkerState, letters: str) -> Lease:
    """Return the lease of such a prompt."""
    return Lease(state, prompt(letters))


def test_a_sibling_takes_the_slot_of_its_family_though_another_is_free() -> None:
    """The longest common prefix decides; what the slot held behind it is gone, and nothing is shared."""
    state = slotted()
    warm(state, "SSAAAA")
    assert cached(state, "SSAAAAAA") == 6
    warm(state, "SSBB")
    assert (cached(state, "SSAAAAAA"), cached(state, "SSBBBB"), len(state.prefixes)) == (2, 4, 4)


def test_a_stranger_takes_the_slot_that_was_used_least_recently() -> None:
    """A prompt that has nothing in common with any slot gets an empty one, then the one that ended longest ago."""
    state = slotted(slots=3)
    for letters in ("AA", "BB", "CC", "AAA", "DD"):
        warm(state, letters)
    assert [cached(state, letters * 4) for letters in "ABCD"] == [3, 0, 2, 2]


@pytest.mark.parametrize(("length", "found"), [(9, 0), (8, 1)])
def test_a_tenth_of_the_prompt_does_not_decide(length: int, found: int) -> None:
    """A common prefix of a tenth is too little: the prompt gets the other slot, which has been free for longer."""
    state = slotted()
    warm(state, "XX")
    warm(state, "SB")
    assert cached(state, "S" + "A" * length) == found


def test_a_busy_slot_is_not_taken_while_another_is_idle() -> None:
    """What is being computed in one slot helps no prompt in another."""
    state = slotted()
    first = begun(state, "SSA")
    assert cached(state, "SSB") == 0
    second = begun(state, "SSB")
    assert second.cached_tokens == 0
    for lease in (first, second):
        lease.first_byte(prefilled=True)
        lease.release()
    assert (cached(state, "SSAA"), cached(state, "SSBB"), len(state.prefixes)) == (3, 3, 6)


def test_a_prompt_waits_while_all_slots_are_busy() -> None:
    """It takes none; the first of those that wait gets the first slot that becomes idle."""
    state = slotted()
    leases = [begun(state, letters) for letters in ("AA", "BB", "CC", "DD")]
    assert (len(state.prefixes), state.prefixes.pinned) == (4, 8)
    for lease in leases:
        lease.first_byte(prefilled=True)
    leases[1].release()
    leases[0].release()
    assert [cached(state, letters * 3) for letters in "ABCD"] == [0, 0, 2, 2]
    leases[3].release()
    leases[2].release()
    assert (len(state.prefixes), state.prefixes.pinned, counters(state)) == (4, 0, (0, 0, 0, 0))


def test_a_request_that_waits_may_end_before_it_has_a_slot() -> None:
    """A client that leaves the line has taken no slot, and holds up nobody behind it."""
    state = slotted(slots=1)
    first, second, third = (begun(state, letters) for letters in ("AA", "BB", "CC"))
    second.release()
    first.release()
    third.first_byte(prefilled=True)
    third.release()
    assert [cached(state, letters * 3) for letters in "ABC"] == [0, 0, 2]


def test_a_request_that_fails_changes_nothing() -> None:
    """Its slot holds what it held, and its turn comes when it would have come."""
    state = slotted()
    warm(state, "SSAAAA")
    warm(state, "BB")
    begun(state, "SSCC").release()
    assert [cached(state, letters) for letters in ("SSAAAAA", "BBB", "SSCCC")] == [6, 2, 2]
    warm(state, "DD")
    assert [cached(state, letters) for letters in ("SSAAAAA", "BBB", "DDD")] == [0, 2, 2]


def test_equal_prompts_are_given_back_one_by_one() -> None:
    """Each of two requests with the same blocks gives back one slot, and a second release none."""
    state = slotted()
    first, second = begun(state, "AA"), begun(state, "AA")
    for lease in (first, first, first):
        lease.release()
    assert (state.prefixes.pinned, state.requests) == (2, 1)
    second.release()
    assert (state.prefixes.pinned, state.requests) == (0, 0)


def test_a_lease_ends_on_the_picture_in_which_it_began() -> None:
    """A worker may get another picture while requests are in flight: each picture gets back its own."""
    state = worker()
    paged = state.prefixes
    old = begun(state, "AA")
    state.prefixes = slots = SlotPicture(2, 1_000)
    new = begun(state, "AA")
    for lease in (old, new):
        lease.first_byte(prefilled=True)
        lease.release()
    assert (len(paged), paged.pinned, len(slots), slots.pinned) == (2, 0, 2, 0)


def test_slots_share_the_capacity() -> None:
    """A prompt is recorded as far as its slot's part of the capacity reaches, and memory stays bounded."""
    state = slotted(slots=3, capacity=10)
    for letter in "ABCDEFGH":
        warm(state, letter * 8)
        assert len(state.prefixes) <= state.prefixes.capacity == 9
    assert cached(state, "HHHHHHHH") == 3
    nothing = slotted(capacity=0)
    warm(nothing, "AA")
    assert (cached(nothing, "AA"), len(nothing.prefixes), nothing.prefixes.capacity) == (0, 0, 0)


def test_a_restart_empties_the_slots() -> None:
    """All is forgotten but what requests in flight are about to bring; one that fails brings nothing back."""
    state = slotted()
    warm(state, "AAAA")
    warm(state, "BBBB")
    failing, lasting = begun(state, "AAAAA"), begun(state, "BB")
    state.prefixes.clear()
    failing.release()
    lasting.first_byte(prefilled=True)
    lasting.release()
    assert [cached(state, letters) for letters in ("AAAAA", "BBBB")] == [0, 2]


def test_what_a_worker_finds_teaches_nothing() -> None:
    """The number of slots is known: an answer that found less than was believed leaves the picture as it is."""
    state = slotted()
    warm(state, "AAAA")
    before = state.prefixes.capacity
    lease = begun(state, "AAAAA")
    lease.first_byte(prefilled=True)
    lease.found(0.0)
    lease.release()
    assert (state.prefixes.capacity, cached(state, "AAAAAA")) == (before, 5)
    assert not state.prefixes.evicted(prompt("BB").blocks, 0, 2)


def test_only_what_was_prefilled_is_confirmed() -> None:
    """A block that is held counts as computed once its request has ended, and not before."""
    state = slotted()
    (block,) = prompt("A").blocks
    lease = begun(state, "A")
    assert not state.prefixes.confirmed(block)
    lease.first_byte(prefilled=True)
    lease.release()
    assert state.prefixes.confirmed(block)


def test_losses_are_what_the_slot_would_lose() -> None:
    """Going on with one's own conversation costs nothing; a sibling costs what is behind the common prefix."""
    state = slotted()
    warm(state, "SSAAAA")
    assert prompt("SSAAAAAA").lost_tokens(state) == 0
    assert prompt("SSBB").lost_tokens(state) == 4 * BLOCK_TOKENS
    assert prompt("CC").lost_tokens(state) == 0


def test_losses_fade() -> None:
    """A slot that others have passed by is missed less with each request that is served."""
    state = slotted()
    warm(state, "SSAAAA")
    losses = []
    for turn in range(1, 9):
        warm(state, "B" * turn)
        losses.append(prompt("SSCC").lost_tokens(state))
    assert losses == sorted(losses, reverse=True)
    assert losses[3] == pytest.approx(4 * BLOCK_TOKENS / 2.71828, rel=1e-4)  # two requests for each slot


def test_slots_age_with_the_fleet() -> None:
    """A slot is missed less also while others are chosen; the more slots a fleet has, the slower."""
    clock = SlotClock()
    avoided, busy = slotted("a", clock=clock), slotted("b", slots=6, clock=clock)
    warm(avoided, "SSAAAA")
    for turn in range(1, 17):
        warm(busy, "B" * turn)
    assert prompt("SSCC").lost_tokens(avoided) == pytest.approx(4 * BLOCK_TOKENS / 2.71828, rel=1e-4)
    del busy
    gc.collect()
    warm(avoided, "DD")
    assert prompt("SSCC").lost_tokens(avoided) == pytest.approx(4 * BLOCK_TOKENS * 2.71828 ** (-17 / 4), rel=1e-4)


def test_prefill_cost_spares_the_slot_of_a_living_sibling() -> None:
    """A conversation begins on a worker with a free slot, not in that of a sibling, but goes on where it is."""
    for paged in (False, True):
        workers = [worker(name) if paged else slotted(name) for name in "ab"]
        warm(workers[0], "SSAAAA")
        assert PREFILL_COST.choose(workers, prompt("SSBB")) is workers[0 if paged else 1]
        assert PREFILL_COST.choose(workers, prompt("SSAAAABB")) is workers[0]


def test_prefill_cost_takes_the_slot_of_a_sibling_that_is_gone() -> None:
    """Once others have had many turns, if only elsewhere, the shared prefix is worth more than what the slot holds."""
    clock = SlotClock()
    workers = [slotted(name, clock=clock) for name in "ab"]
    warm(workers[0], "SSAA")
    for turn in range(1, 33):
        warm(workers[1], "C" * turn)
    assert PREFILL_COST.choose(workers, prompt("SSDD")) is workers[0]


def test_paged_workers_lose_nothing() -> None:
    """Their scores have nothing added to them, however full they are."""
    state = worker(capacity=4)
    warm(state, "AAAA")
    assert prompt("BBBB").lost_tokens(state) == 0.0


def test_a_router_pictures_each_worker_by_its_slots() -> None:
    """`slots` in a worker's description decides; together they hold no more blocks than a paged picture may."""
    workers = [Worker(url="http://a", slots=3), Worker(url="http://b")]
    settings = RouterSettings(workers=workers, prefix_capacity_tokens=12_800, prefix_adapt=False)
    slots, paged = (state.prefixes for state in Router(settings).workers)
    assert (repr(slots), slots.capacity) == ("<SlotPicture 0 blocks in 3 slots, 0 busy, 0 waiting>", 99)
    assert (type(paged).__name__, paged.capacity) == ("PrefixIndex", 100)


def test_the_workers_of_a_router_age_together() -> None:
    """What one worker serves makes the slots of the others older."""
    avoided, busy = Router(RouterSettings(workers=[Worker(url=url, slots=2) for url in "ab"])).workers
    warm(avoided, "SSAAAA")
    before = prompt("SSCC").lost_tokens(avoided)
    warm(busy, "BB")
    assert 0 < prompt("SSCC").lost_tokens(avoided) < before

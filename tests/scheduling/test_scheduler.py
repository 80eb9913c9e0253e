"""Shows the one step from a request to a lease: who may be chosen, and that choosing counts and records."""

from __future__ import annotations

import ast
import builtins
import inspect
import random
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

import asgi_router.scheduling
from asgi_router.errors import NoWorker, UnknownModel
from asgi_router.scheduling.lease import Lease
from asgi_router.scheduling.policies import POLICIES, PolicyOptions, RoundRobin
from asgi_router.scheduling.prompt import Prompt
from asgi_router.scheduling.scheduler import LONG_PROMPT, Scheduler
from tests.scheduling.builders import BLOCK_BYTES, Clock, counters, fleet, prompt, request, text, warm, worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asgi_router.scheduling.state import WorkerState


class Spy:
    """A policy that takes the last worker, and remembers what it was offered."""

    def __init__(self) -> None:
        self.workers: list[WorkerState] = []
        self.prompts: list[Prompt] = []

    def choose(self, workers: Sequence[WorkerState], prompt: Prompt) -> WorkerState:
        self.workers = list(workers)
        self.prompts.append(prompt)
        return workers[-1]


def new_scheduler(name: str = "request_num") -> Scheduler:
    """Return a scheduler with this policy at its defaults."""
    return Scheduler(POLICIES[name](PolicyOptions(), random.Random(1)), block_bytes=BLOCK_BYTES)


def test_the_policy_is_offered_those_that_may_be_chosen() -> None:
    """Unhealthy and draining workers, those that were tried, and those without the model are passed over, in order."""
    states = [worker(name, models=("m",) if name < "g" else ("other",)) for name in "abcdefgh"]
    states[1].healthy = False
    states[3].draining = True
    spy = Spy()
    scheduler = Scheduler(spy, block_bytes=BLOCK_BYTES)
    lease = scheduler.select(states, request(text("AB"), model="m"), exclude={states[0]})
    assert spy.workers == [states[2], states[4], states[5]]
    assert spy.workers == scheduler.able(states, request("", model="m"), exclude=[states[0]])
    assert lease.state is states[5]


def test_the_policy_is_offered_the_prompt() -> None:
    """The policy sees the prompt in the blocks of this scheduler, under the model's name."""
    spy = Spy()
    Scheduler(spy, block_bytes=BLOCK_BYTES).select(fleet("ab"), request(text("ABC"), model="m"))
    assert [seen.blocks for seen in spy.prompts] == [prompt("ABC", model="m").blocks]


def test_a_worker_without_models_serves_every_model() -> None:
    """An empty list of models means all, also where another worker lists some."""
    states = [worker("lists", models=("other",)), worker("any")]
    assert new_scheduler().select(states, request("x", model="m")).state is states[1]


def test_a_request_that_names_no_model_may_go_anywhere() -> None:
    """Its worker knows its own default; a body that was not read, being compressed, names none either."""
    (only,) = states = [worker("lists", models=("m",))]
    assert new_scheduler().select(states, request("x", model="")).state is only


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        ({"a": ("m",), "b": ("m", "n")}, UnknownModel),
        ({"a": ("m",), "b": ()}, None),
        ({"a": ("m",), "b": ("x",)}, None),
        ({}, NoWorker),
    ],
)
def test_an_unknown_model_is_told_from_a_missing_worker(
    models: dict[str, tuple[str, ...]], expected: type[Exception] | None
) -> None:
    """Where workers are and all list models but not this one, the client is wrong; without workers nobody is."""
    states = [worker(name, models=listed) for name, listed in models.items()]
    if expected is None:
        assert new_scheduler().select(states, request("x", model="x")).state is states[1]
    else:
        with pytest.raises(expected) as caught:
            new_scheduler().select(states, request("x", model="x"))
        assert type(caught.value) is expected


@pytest.mark.parametrize("why", ["unhealthy", "draining", "tried"])
def test_no_worker_is_not_an_unknown_model(why: str) -> None:
    """If the model's only worker can't be chosen now, that is a missing worker, whatever the others serve."""
    busy, other = worker("a", models=("m",)), worker("b", models=("n",))
    busy.healthy = why != "unhealthy"
    busy.draining = why == "draining"
    with pytest.raises(NoWorker):
        new_scheduler().select([busy, other], request("x", model="m"), exclude=[busy] if why == "tried" else ())
    assert counters(busy) == counters(other) == (0, 0, 0, 0)


def test_nothing_is_counted_without_a_lease() -> None:
    """Looking for candidates counts and records nothing."""
    states = fleet("ab")
    new_scheduler().able(states, request(text("AB")))
    assert [(*counters(state), len(state.prefixes)) for state in states] == [(0, 0, 0, 0, 0)] * 2


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_f67_the_prompt_is_recorded_whatever_policy_chose(name: str) -> None:
    """F-67: the worker that was chosen will cache the prompt, so it is counted and recorded there on every path."""
    states = fleet("abc")
    lease = new_scheduler(name).select(states, request(text("ABCD")))
    for state in states:
        expected = (1, 65, 1, 65, 4) if state is lease.state else (0, 0, 0, 0, 0)
        assert (*counters(state), state.prefixes.pinned) == expected


def test_f67_the_prompt_is_recorded_where_the_cache_was_ignored() -> None:
    """F-67: also when cache_aware chose by load, because the fleet was out of balance."""
    states = [worker("full", requests=40), worker("empty")]
    warm(states[0], "ABCD")
    lease = new_scheduler("cache_aware").select(states, request(text("ABCD")))
    assert lease.state is states[1]
    assert prompt("ABCD").hit_ratio(states[1]) == 1.0


def test_the_fleet_may_be_any_collection() -> None:
    """The scheduler looks at a fleet anew for each selection, whatever holds it."""
    states = fleet("ab")
    chooser = Scheduler(RoundRobin(PolicyOptions(), random.Random(1)), block_bytes=BLOCK_BYTES)
    assert [chooser.select(dict.fromkeys(states), request("x")).state for _ in range(3)] == [
        states[0],
        states[1],
        states[0],
    ]


def test_select_is_a_plain_function() -> None:
    """Nothing can come between choosing and counting: `select` returns the lease itself, not a promise of it."""
    assert not inspect.iscoroutinefunction(Scheduler.select)
    assert type(new_scheduler().select(fleet("a"), request("x"))) is Lease


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_condensed_prompt_is_chosen_for_alike(name: str) -> None:
    """Without the bytes of a long prompt all is chosen, counted and recorded as with them; a shorter one keeps them."""
    said = text("".join(chr(33 + number % 90) for number in range(LONG_PROMPT // BLOCK_BYTES + 1)))

    def lives(*, condensed: bool) -> list[tuple[object, ...]]:
        scheduler, states, found = new_scheduler(name), fleet("abcd", capacity=10_000), []
        for end in ("", "", "more" * 100):
            asked = request(said + end, model="m")
            if condensed:
                asked = scheduler.condense(asked)
                assert (asked.key.size, asked.prefix_key, scheduler.condense(asked)) == (0, b"", asked)
            lease = scheduler.select(states, asked)
            found.append((lease.state.worker.url, lease.reason, lease.cached_tokens, lease.prefill_tokens))
            lease.first_byte(prefilled=True)
            lease.release()
        blocks = Prompt(request(said, model="m"), BLOCK_BYTES).blocks
        return [*found, *((state.prefixes.match(blocks, len(blocks)), len(state.prefixes)) for state in states)]

    assert lives(condensed=True) == lives(condensed=False)
    short = request("x" * LONG_PROMPT)
    assert new_scheduler(name).condense(short) is short


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_select_reads_no_clock_but_the_one_passed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole life of a lease works where time, files and sockets are out of reach."""

    def out_of_reach(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("out of reach")

    clock = Clock()
    states = [worker("a", clock=clock), worker("b", clock=clock)]
    with monkeypatch.context() as patch:
        for clock_name in ("time", "monotonic", "perf_counter", "process_time", "sleep", "time_ns", "monotonic_ns"):
            patch.setattr(time, clock_name, out_of_reach)
        patch.setattr(socket, "socket", out_of_reach)
        patch.setattr(builtins, "open", out_of_reach)
        lease = new_scheduler(name).select(states, request(text("ABCD")))
        lease.first_byte(prefilled=True)
        lease.release()

    assert clock.reads > 0
    assert len(lease.state.prefixes) == 4


def test_the_scheduling_package_can_not_wait() -> None:
    """No module of it has a coroutine or imports what could wait; outward it knows plain data and nothing else."""
    allowed = {
        "asgi_router.errors",
        "asgi_router.prefix_key",
        "asgi_router.rope",
        "bisect",
        "collections",
        "dataclasses",
        "enum",
        "hashlib",
        "itertools",
        "math",
        "struct",
        "typing",
        "weakref",
    }
    directory = Path(asgi_router.scheduling.__file__).parent
    modules = sorted(directory.glob("*.py"))
    assert len(modules) > 5
    for module in modules:
        tree = ast.parse(module.read_text(encoding="utf-8"))
        type_checking = [node for node in ast.walk(tree) if isinstance(node, ast.If) and is_type_checking(node)]
        for_types = {id(inner) for node in type_checking for inner in ast.walk(node)}
        for node in ast.walk(tree):
            assert not isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith), module
            if id(node) not in for_types:
                for name in imported(node):
                    known = name in allowed or name.startswith("asgi_router.scheduling.") or name == "__future__"
                    assert known, f"{module} imports {name}"


def is_type_checking(node: ast.If) -> bool:
    """Tell whether the block is for the type checker alone."""
    return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imported(node: ast.AST) -> list[str]:
    """Return the modules that a node imports."""
    match node:
        case ast.Import(names=names):
            return [name.name for name in names]
        case ast.ImportFrom(module=str(module)):
            return [module]
    return []

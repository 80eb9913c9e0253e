"""The router over fake engines of each dialect: whatever becomes of a leg, the request ends, and nothing is left."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, cast

import anyio
import anyio.lowlevel
import pytest

from asgi_router.errors import AnswerCut
from tests.disaggregated.engines.dialects import DIALECTS
from tests.disaggregated.engines.job import STAGES, Job, Trouble
from tests.disaggregated.engines.processes import SOON, Engines
from tests.disaggregated.engines.routed import (
    KINDS,
    WHOLE,
    RoutedEngines,
    decode_needs,
    engines_of,
    request_for,
    text_of,
)
from tests.instruments import BACKENDS
from tests.instruments.asgi_client import DISCONNECT
from tests.routed import error_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.disaggregated.engines.job import Role, Stage
    from tests.disaggregated.engines.routed import Kind
    from tests.instruments.asgi_client import Exchange

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.usefixtures("short_graces"),
    # Where a body is closed in its middle, httpcore leaves it to the garbage collector to end its inner generators.
    pytest.mark.filterwarnings("ignore:Async generator 'httpcore:ResourceWarning"),
]

every_kind = pytest.mark.parametrize("kind", KINDS)
every_role = pytest.mark.parametrize("role", ["prefill", "decode"])
every_death = pytest.mark.parametrize(
    ("what", "anyio_backend"),
    [("reset", BACKENDS[0].values[0]), ("reset", BACKENDS[2].values[0]), ("exit", BACKENDS[0].values[0])],
    ids=["reset-asyncio", "reset-trio", "exit-asyncio"],  # a new process for each death takes its time
)
every_stage = pytest.mark.parametrize("at", STAGES)

LATE = 0.5
"""Seconds of a time-out that has to pass for the test to go on; much more than a good answer takes."""


@pytest.fixture(params=BACKENDS[::2])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """Both families of event loops: uvloop is asyncio to what is shown here."""
    return cast("tuple[str, dict[str, bool]]", request.param)


@pytest.fixture(scope="module", params=sorted(DIALECTS))
def processes(request: pytest.FixtureRequest) -> Iterator[Engines]:
    """Engines for all tests of a dialect."""
    with Engines(request.param) as engines:
        yield engines


@pytest.fixture
async def engines(processes: Engines) -> Engines:
    """The same, all alive and idle, and as if they were new."""
    await processes.fresh()
    return processes


def job_for(role: Role, trouble: Trouble) -> Job:
    return Job(prefill=trouble) if role == "prefill" else Job(decode=trouble)


# --- success ---------------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completions"])
async def test_success(engines: Engines, kind: Kind, chat: bool) -> None:
    """Both legs get what their engines want, and the client gets the decode engine's answer and both addresses."""
    async with RoutedEngines(engines) as routed:
        exchange = await routed.run(request_for(kind, chat=chat))
        assert text_of(exchange) == WHOLE
        assert exchange.header("x-router-prefill-url") == [engines.prefill.url.encode()]
        assert exchange.header("x-router-decode-url")[0].decode() in [engine.url for engine in engines.decodes]

    for body in _received(routed):
        assert '"seed": 9007199254740993' in body  # as it was written: a double has no such number
    assert routed.states[0]["served"] == 1
    assert sorted(state["served"] == 1 for state in routed.states[1:]) == [False, True]
    assert routed.states[0]["kept"] == []


@every_kind
async def test_many_at_once(engines: Engines, kind: Kind) -> None:
    """Requests that are served side by side don't meet: each gets its own answer from its own pair."""
    exchanges = [request_for(kind) for _ in range(12)]
    async with RoutedEngines(engines) as routed, anyio.create_task_group() as tasks:
        for exchange in exchanges:
            tasks.start_soon(routed.run, exchange)

    assert [text_of(exchange) for exchange in exchanges] == [WHOLE] * len(exchanges)
    assert routed.states[0]["served"] == len(exchanges)
    assert all(state["served"] for state in routed.states[1:])


@every_kind
async def test_the_prefill_lease_ends_first(engines: Engines, kind: Kind) -> None:
    """While the answer goes on, the decode worker alone is counted; before, both are."""
    async with RoutedEngines(engines) as routed:
        exchange = request_for(kind, Job(decode=Trouble(what="hang", at="middle")))
        async with exchange.running(routed.app, timeout=SOON):
            await exchange.body_at_least(1)
            await engines.prefill.state(running=0)
            with anyio.fail_after(SOON):
                while (stats := routed.router.stats()).workers[0].requests:  # the end has come, and is to be read
                    await anyio.lowlevel.checkpoint()
            assert stats.workers[0].prefill_tokens == 0
            assert sum(worker.requests for worker in stats.workers[1:]) == 1
            exchange.disconnect()


@every_kind
async def test_decode_alone(engines: Engines, kind: Kind) -> None:
    """Where little is left to prefill the decode engine does it, in the dialect in which it can."""
    async with RoutedEngines(engines, pd_skip_prefill_below=1_000_000) as routed:
        exchange = await routed.run(request_for(kind))
        assert text_of(exchange) == WHOLE
        alone = engines.dialect == "vllm"
        assert (exchange.header("x-router-prefill-url") == []) == alone

    assert sum(cast("int", state["alone"]) for state in routed.states) == alone
    assert routed.states[0]["served"] == (not alone)


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completions"])
async def test_preempted(engines: Engines, chat: bool) -> None:
    """A request that its engines give up twice goes to new pairs, with another id and the tokens so far."""
    async with RoutedEngines(engines, pd_preempt_retries=2) as routed:
        exchange = await routed.run(request_for("json", Job(reschedules=2), chat=chat))
        assert text_of(exchange) == WHOLE

    last = json.loads(_received(routed)[2])  # of the prefill engine
    if engines.dialect == "fastdeploy":  # the others know a request by the header
        assert str(last["request_id"]).endswith("-retry2")
    assert last["completion_token_ids"] == [0, 1]


def _received(routed: RoutedEngines) -> list[str]:
    """The bodies that the engines have got, the prefill engine's first."""
    return [body for state in routed.states for body in cast("list[str]", state["received"])]


# --- errors ----------------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("status", [400, 429, 500, 503])
async def test_f03_prefill_error(engines: Engines, kind: Kind, status: int) -> None:
    """An error of the prefill engine reaches the client as it is, and the decode engine stops waiting (F-03)."""
    async with RoutedEngines(engines) as routed:
        exchange = await routed.run(request_for(kind, Job(prefill=Trouble(what="error", status=status))))
        assert exchange.status == status
        assert json.loads(exchange.body)["error"]["message"] == "prefill failed as it was asked to"

    assert all(state["served"] == 0 for state in routed.states[1:])


@every_kind
@pytest.mark.parametrize("status", [400, 500])
async def test_decode_error(engines: Engines, kind: Kind, status: int) -> None:
    """An error of the decode engine reaches the client as it is, and the prefill engine stops waiting."""
    async with RoutedEngines(engines) as routed:
        exchange = await routed.run(request_for(kind, Job(decode=Trouble(what="error", status=status))))
        assert exchange.status == status
        assert json.loads(exchange.body)["error"]["message"] == "decode failed as it was asked to"

    # vLLM's prefill was over; its engine keeps the cache until its own time-out.
    assert len(routed.states[0]["kept"]) == (engines.dialect == "vllm")  # type: ignore[arg-type]


# --- legs that hang or die -------------------------------------------------------------------------------------


@every_kind
@every_role
async def test_hang(engines: Engines, kind: Kind, role: Role) -> None:
    """A leg that hangs ends with a time-out, both legs at once, unless decode has all it needs from it."""

    async def hang(at: Stage) -> None:
        exchange = request_for(kind, job_for(role, Trouble(what="hang", at=at)))
        if role == "decode" and at == "middle":
            await _cut(routed, exchange, kind, "worker_timeout")
            return

        await routed.run(exchange)
        if decode_needs(engines.dialect, role, at, kind):
            assert (at, *error_of(exchange)) == (at, 504, "worker_timeout")
        else:
            assert (at, text_of(exchange)) == (at, WHOLE)

    async with (
        RoutedEngines(engines, first_byte_timeout=LATE, idle_timeout=LATE) as routed,
        anyio.create_task_group() as stages,
    ):
        for at in STAGES:  # side by side, for the time that it takes
            stages.start_soon(hang, at)


@every_kind
@every_role
@every_stage
@every_death
async def test_death(engines: Engines, kind: Kind, role: Role, at: Stage, what: str) -> None:
    """A leg that dies ends the other one, unless the answer has come so far that it doesn't matter any more."""
    async with RoutedEngines(engines) as routed:
        exchange = request_for(kind, job_for(role, Trouble(what=what, at=at)))  # type: ignore[arg-type]
        if role == "decode" and at == "middle":
            await _cut(routed, exchange, kind, "worker_failed")
        elif decode_needs(engines.dialect, role, at, kind):
            await routed.run(exchange)
            assert error_of(exchange) == (502, "worker_failed")
        else:  # whichever is noticed first: that decode has begun to answer, or that prefill has died
            await routed.run(exchange)
            assert exchange.status == 502 or text_of(exchange) == WHOLE

    assert all(engine.alive for engine in engines_of(engines, role)) == (what == "reset")


async def _cut(routed: RoutedEngines, exchange: Exchange, kind: Kind, code: str) -> None:
    """A stream ends with an error event, JSON breaks off."""
    if kind == "stream":
        await routed.run(exchange)
        assert f'"code": "{code}"'.encode() in exchange.body
        assert b"[DONE]" not in exchange.body
    else:
        with pytest.raises(AnswerCut):
            await routed.run(exchange)
    assert (exchange.status, exchange.ends) == (200, 0)


@every_kind
@every_role
@pytest.mark.parametrize("anyio_backend", BACKENDS[:1])
async def test_an_engine_that_is_not_there(engines: Engines, kind: Kind, role: Role) -> None:
    """Where nobody listens the client is told at once, and the other leg ends (F-04)."""
    async with RoutedEngines(engines) as routed:
        for engine in engines_of(engines, role):
            engine.kill()
        exchange = await routed.run(request_for(kind))
        assert error_of(exchange) == (502, "worker_unreachable")


@every_kind
@every_death
@pytest.mark.parametrize("at", ["begin", "head"])
async def test_f08_a_new_pair(engines: Engines, kind: Kind, what: str, at: Stage) -> None:
    """When a decode engine fails before its first byte, another one serves the request, as far as there is one."""
    broken = engines.decodes[0]
    trouble = Trouble(what=what, at=at, port=broken.place.port)  # type: ignore[arg-type]
    async with RoutedEngines(engines, decode_policy="round_robin") as routed:
        for _ in engines.decodes:  # by turns: one of the requests meets the broken one first
            exchange = await routed.run(request_for(kind, Job(decode=trouble)))
            assert text_of(exchange) == WHOLE
            assert exchange.header("x-router-decode-url") == [engines.decodes[1].url.encode()]

    assert broken.alive == (what == "reset")


# --- clients that leave ----------------------------------------------------------------------------------------


@every_kind
@every_role
@every_stage
async def test_client_leaves(engines: Engines, kind: Kind, role: Role, at: Stage) -> None:
    """A client that leaves while either leg is at any stage takes both along."""
    async with RoutedEngines(engines) as routed:
        exchange = request_for(kind, job_for(role, Trouble(what="hang", at=at)))
        async with exchange.running(routed.app, timeout=SOON):
            with anyio.fail_after(SOON):
                await _stuck(engines, role)
            exchange.disconnect()
        if role == "decode" or decode_needs(engines.dialect, role, at, kind):
            assert not exchange.complete

    assert any(state["aborted"] for state in routed.states)


async def _stuck(engines: Engines, role: Role) -> None:
    """Return when one of the engines of a role hangs."""
    async with anyio.create_task_group() as tasks:

        async def wait(number: int) -> None:
            await engines_of(engines, role)[number].state(stuck=1)
            tasks.cancel_scope.cancel()

        for number in range(len(engines_of(engines, role))):
            tasks.start_soon(wait, number)


@every_kind
@pytest.mark.parametrize("moment", ["start", 1])
async def test_client_leaves_within_its_answer(engines: Engines, kind: Kind, moment: int | str) -> None:
    """A client that leaves as its answer comes ends the decode leg in the middle of it."""
    async with RoutedEngines(engines) as routed:
        job = Job(decode=Trouble(what="hang", at="middle"))
        exchange = await routed.run(request_for(kind, job, at={moment: DISCONNECT}))
        assert not exchange.complete

    assert sum(int(state["aborted"]) for state in routed.states[1:]) == 1  # type: ignore[call-overload]


@every_kind
async def test_client_leaves_before_it_has_sent_its_request(engines: Engines, kind: Kind) -> None:
    """Of a request that never came whole no engine hears."""
    async with RoutedEngines(engines) as routed:
        exchange = request_for(kind)
        exchange._upload = [b'{"messages": ', DISCONNECT]
        await routed.run(exchange)

    assert [state["received"] for state in routed.states] == [[], [], []]

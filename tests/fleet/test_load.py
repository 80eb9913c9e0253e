"""Shows how workers are asked for their load in the background, and a router that goes by the answers."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import httpx
import pytest

from asgi_router import Router, RouterSettings, Worker
from asgi_router.scheduling.lease import Lease
from asgi_router.scheduling.policies import POLICIES, REMOTE_POLICIES
from asgi_router.scheduling.remote_load import Load
from asgi_router.settings import SettingsError
from asgi_router.upstream.calls import MAX_ANSWER_BYTES
from tests.instruments.fake_worker import HANG, FakeFleet, Script
from tests.routed import OTHER, WORKER, Routed, answer, exchange_for
from tests.scheduling.builders import Clock, prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from asgi_router.fleet.load import LoadMonitor
    from tests.instruments.fake_worker import Scripts

GOOD = answer("json")
REMOTE = sorted(REMOTE_POLICIES)
RECORDED = Path(__file__).parent / "recorded"


def saying(running: int, waiting: int = 0) -> Script:
    """A worker's metrics: as many requests as these, and something else."""
    text = f"llamacpp:n_decode_total 9\nllamacpp:requests_processing {running}\nllamacpp:requests_deferred {waiting}\n"
    return Script(headers=[("content-type", "text/plain; version=0.0.4")], body=[text.encode()])


def serving(metrics: Script, completion: Script = GOOD) -> Callable[[httpx.Request], Script]:
    """A worker with these metrics; anything else that is read is its health."""

    def script(request: httpx.Request) -> Script:
        if request.method == "POST":
            return completion
        return metrics if request.url.path == "/metrics" else GOOD

    return script


def routed_by_load(workers: Mapping[str, Scripts], **settings: object) -> tuple[Routed, LoadMonitor]:
    """A router with a policy that goes by the workers' word, and what asks them, run by hand."""
    routed = Routed(workers, **{"policy": "fd_remote_metrics_score", **settings})
    monitor = routed.router.load_monitor
    assert monitor is not None
    return routed, monitor


def said(routed: Routed) -> list[tuple[int | None, int | None]]:
    """What each worker has said of its load, by the router's stats."""
    return [(worker.remote_running, worker.remote_waiting) for worker in routed.router.stats().workers]


def posts(routed: Routed) -> list[int]:
    """How many completion requests each worker has got."""
    return [sum(call.method == "POST" for call in worker.calls) for worker in routed.fleet.workers.values()]


# --- asking ----------------------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("engine", "load"), [("vllm", (21, 4)), ("sglang", (13, 3)), ("fastdeploy", (15, 2)), ("llamacpp", (4, 11))]
)
async def test_what_a_worker_says_is_in_the_stats(engine: str, load: tuple[int, int]) -> None:
    """Each engine's metrics are understood; asking changes no counter, and leaves nothing open."""
    metrics = Script(body=[(RECORDED / f"{engine}.txt").read_bytes()])
    routed, monitor = routed_by_load({WORKER: metrics, OTHER: Script(status=404)})
    assert said(routed) == [(None, None), (None, None)]
    await monitor.ask_all()
    assert said(routed) == [load, (None, None)]
    routed.assert_released()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("worker", "asked"),
    [
        (Worker(url="http://w1:8000"), "http://w1:8000/load"),
        (Worker(url="http://w1:8000/base"), "http://w1:8000/base/load"),
        (Worker(url="http://w1:8000", metrics_port=8000), "http://w1:8000/load"),
        (Worker(url="http://w1:8000", metrics_port=9100), "http://w1:9100/load"),
        (Worker(url="https://w1:8000/base", metrics_port=9100), "https://w1:9100/load"),
        (Worker(url="http://[::1]:8000", metrics_port=9100), "http://[::1]:9100/load"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_where_a_worker_is_asked(worker: Worker, asked: str) -> None:
    """At LOAD_PATH below its URL, or on its host's metrics port with the same scheme; with the key for workers."""
    fleet = FakeFleet({asked: saying(3)})
    settings = RouterSettings(workers=[worker], policy=REMOTE[0], load_path="/load", worker_api_key="K")
    router = Router(settings, transport=fleet)
    assert router.load_monitor is not None
    await router.load_monitor.ask_all()
    (call,) = fleet[asked].calls
    assert (call.method, call.url, call.body) == ("GET", asked, b"")
    assert (b"authorization", b"Bearer K") in [(name.lower(), value) for name, value in call.headers]
    assert router.stats().workers[0].remote_running == 3


NO_WORD = {
    "404": Script(status=404, body=[b"Not Found\n"]),
    "metrics with a 500": replace(saying(3), status=500),
    "401": Script(status=401),
    "redirect": Script(status=302, headers=[("location", "/elsewhere")]),
    "refused": replace(saying(3), connect=[httpx.ConnectError("refused")]),
    "no answer": replace(saying(3), head=[HANG]),
    "stops within": replace(saying(3), body=[b"llamacpp:requests_processing 3\n", HANG]),
    "breaks within": replace(saying(3), body=[b"llamacpp:requests_processing 3\n", httpx.ReadError("reset")]),
    "HTML": Script(body=[b"<html></html>\n"]),
    "empty": Script(body=[]),
    "cut off": replace(saying(3), body=[b"llamacpp:requests_processing 3\nllamacpp:requests_deferred 2"]),
    "without end": replace(saying(3), body=[*saying(3).body, *[b"\n" * 2**20] * 4]),
}


@pytest.mark.anyio
@pytest.mark.parametrize("script", NO_WORD.values(), ids=NO_WORD)
async def test_what_is_no_word(script: Script) -> None:
    """An error, silence, or anything that can't be read leaves the load unknown, and the worker where it is."""
    assert sum(len(chunk) for chunk in NO_WORD["without end"].body if isinstance(chunk, bytes)) > MAX_ANSWER_BYTES
    routed, monitor = routed_by_load({WORKER: script, OTHER: saying(7)}, load_max_age=0.1)
    with anyio.fail_after(5):
        await monitor.ask_all()
    assert routed.router.stats().workers[0].remote_running is None
    assert all(worker.healthy for worker in routed.router.stats().workers)
    routed.assert_released()


@pytest.mark.anyio
async def test_f46_the_last_word_counts_until_it_is_stale() -> None:
    """F-46: when a worker stops answering, what it said last is taken for LOAD_MAX_AGE seconds, and not longer."""
    clock = Clock()
    routed, monitor = routed_by_load({WORKER: saying(3, 1)}, clock=clock, load_max_age=5)
    await monitor.ask_all()
    routed.worker.scripts = NO_WORD["refused"]
    for seconds, word in ((4.9, (3, 1)), (0.1, (None, None))):
        clock.now += seconds
        await monitor.ask_all()
        assert said(routed) == [word]

    routed.worker.scripts = saying(4)
    await monitor.ask_all()
    assert said(routed) == [(4, 0)]


@pytest.mark.anyio
async def test_the_age_counts_from_the_question() -> None:
    """An answer that was long on its way is that much older."""
    clock, gate = Clock(), anyio.Event()
    routed, monitor = routed_by_load({WORKER: replace(saying(3), head=[gate])}, clock=clock, load_max_age=5)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(monitor.ask_all)
        await routed.worker.received(1)
        clock.now += 2
        gate.set()
    assert said(routed) == [(3, 0)]
    clock.now += 3
    assert said(routed) == [(None, None)]


@pytest.mark.anyio
async def test_f48_requests_that_come_or_go_while_a_worker_answers() -> None:
    """F-48: whether the answer has them nobody knows, so they count on top of it: no busy worker looks idle."""
    gate = anyio.Event()
    routed, monitor = routed_by_load({WORKER: replace(saying(2), head=[gate]), OTHER: replace(saying(2), head=[gate])})
    comes, goes = routed.router.workers
    leases = [Lease(goes, prompt("A")) for _ in range(2)]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(monitor.ask_all)
        await routed.worker.received(1)
        for lease in leases:
            lease.release()
        leases = [Lease(comes, prompt("A")) for _ in range(2)]
        gate.set()

    assert (comes.remote_load, goes.remote_load) == (Load(4, 0), Load(2, 0))


@pytest.mark.anyio
async def test_a_worker_that_joins_again_has_said_nothing() -> None:
    """The word of a worker that was replaced is not taken for that of the new one at its URL."""
    routed, monitor = routed_by_load({WORKER: saying(3)})
    await monitor.ask_all()
    routed.router.workers.add(Worker(url=WORKER))
    assert said(routed) == [(None, None)]
    await monitor.ask_all()
    assert said(routed) == [(3, 0)]


@pytest.mark.anyio
async def test_silence_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A worker that doesn't tell its load is named in the log once, with the reason, and once when it does again."""
    clock = Clock()
    routed, monitor = routed_by_load({WORKER: NO_WORD["404"]}, clock=clock)
    for script in (NO_WORD["404"], NO_WORD["refused"], saying(1), NO_WORD["HTML"]):
        routed.worker.scripts = script
        await monitor.ask_all()
    silent = f"{WORKER}: doesn't say how busy it is (status 404); own counts are used"
    assert warnings(caplog) == [silent, f"{WORKER}: says again how busy it is"]

    clock.now += 100
    for _ in range(2):
        await monitor.ask_all()
    assert [text.partition("(")[2] for text in warnings(caplog)[2:]] == [
        "none of the metrics that are known); own counts are used"
    ]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged to be seen by default."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_without_the_extra(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that needs the parser says at once what to install; the others don't need it."""
    for name in [name for name in sys.modules if name.split(".")[0] == "prometheus_client"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    settings = RouterSettings(workers=[WORKER], policy=policy)
    if policy in REMOTE_POLICIES:
        with pytest.raises(SettingsError, match=rf"^ASGI_ROUTER_POLICY: {policy} needs .*'asgi-router\[prometheus\]'$"):
            Router(settings)
    else:
        assert Router(settings).load_monitor is None


# --- in service ------------------------------------------------------------------------------------------------


async def all_have_spoken(routed: Routed) -> None:
    """Return when the router knows every worker's load."""
    while (None, None) in said(routed):
        await anyio.lowlevel.checkpoint()


@pytest.mark.anyio
@pytest.mark.parametrize("policy", REMOTE)
async def test_requests_go_to_the_worker_that_others_leave_alone(policy: str) -> None:
    """Of two workers one is busy with 20 requests of other routers: ours go to the other, until it is as busy."""
    gate = anyio.Event()
    waits = replace(GOOD, head=[gate])
    routed, _ = routed_by_load(
        {WORKER: serving(saying(20), waits), OTHER: serving(saying(0), waits)}, policy=policy, decision_headers=True
    )
    exchanges = [exchange_for() for _ in range(12)]
    async with routed.router, anyio.create_task_group() as tasks:
        await all_have_spoken(routed)
        for exchange in exchanges:
            tasks.start_soon(exchange.run, routed.app)
        while sum(posts(routed)) < 12:
            await anyio.lowlevel.checkpoint()
        assert posts(routed) == [0, 12]
        gate.set()

    assert [exchange.status for exchange in exchanges] == [200] * 12
    assert {exchange.header("x-router-worker")[0] for exchange in exchanges} == {OTHER.encode()}
    routed.assert_released()


@pytest.mark.anyio
@pytest.mark.parametrize("policy", REMOTE)
async def test_the_load_is_asked_for_again_and_again(policy: str) -> None:
    """While the router is open each worker is asked at once and once an interval, and a new answer replaces the old."""
    routed, _ = routed_by_load({WORKER: saying(1)}, policy=policy, load_interval=0.001, health_interval=0)
    async with routed.router:
        await routed.worker.received(3)
        routed.worker.scripts = saying(2, 5)
        while said(routed) != [(2, 5)]:
            await anyio.lowlevel.checkpoint()
    asked = len(routed.worker.calls)
    await anyio.wait_all_tasks_blocked()
    assert len(routed.worker.calls) == asked
    assert {call.url for call in routed.worker.calls} == {f"{WORKER}/metrics"}


@pytest.mark.anyio
@pytest.mark.parametrize("policy", REMOTE)
@pytest.mark.parametrize("dead", ["no answer", "refused", "stops within"])
async def test_f45_metrics_that_hang_delay_no_choice(policy: str, dead: str) -> None:
    """F-45: each selection asked every worker in turn, for 5 seconds each; now none waits, or asks, at all."""
    workers = {WORKER: serving(NO_WORD[dead]), OTHER: serving(saying(0))}
    routed, _ = routed_by_load(workers, policy=policy, load_interval=1000, load_max_age=1000)
    async with routed.router:
        with anyio.fail_after(5):
            while sum(worker.connects for worker in routed.fleet.workers.values()) < 2:
                await anyio.lowlevel.checkpoint()
            for _ in range(20):
                assert (await exchange_for().run(routed.app)).status == 200
    sent = posts(routed)
    assert sum(sent) == 20
    assert [worker.connects for worker in routed.fleet.workers.values()] == [sent[0] + 1, sent[1] + 1]
    routed.assert_released()


@pytest.mark.anyio
async def test_nobody_is_asked_where_the_policy_doesn_t_want_to_know() -> None:
    """With any other policy the workers' metrics are left alone."""
    routed = Routed({WORKER: GOOD}, health_interval=0.001, load_interval=0.001)
    async with routed.router:
        await routed.worker.received(5)
    assert {call.url for call in routed.worker.calls} == {f"{WORKER}/health"}

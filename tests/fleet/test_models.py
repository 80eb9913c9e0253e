"""Owns what is known of the workers' models: when they are asked, and who gets a request."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import httpx
import pytest
from anyio.lowlevel import checkpoint
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from asgi_router import Router, RouterMiddleware, RouterSettings, Worker
from asgi_router.fleet import models
from tests.fleet.admin_calls import PAYLOAD, administered, call
from tests.instruments.asgi_client import HANG, Exchange
from tests.instruments.fake_worker import FakeFleet, Script
from tests.routed import OTHER, WORKER, Routed, answer, completion_body, error_of
from tests.scheduling.builders import Clock

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request

pytestmark = pytest.mark.anyio

THIRD = "http://w3:8000"
URLS = (WORKER, OTHER, THIRD)


def listed(*names: str) -> Script:
    """A worker's list of its models."""
    return Script.json(
        {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "me"} for name in names]}
    )


class Fleet:
    """A router before workers whose lists of models can be changed."""

    def __init__(self, *lists: Script, **settings: object) -> None:
        self.lists = dict(zip(URLS, lists, strict=False))
        self.answers = dict.fromkeys(URLS, answer("json"))
        self.clock = Clock()
        self.routed = Routed(
            {url: self.worker(url) for url in self.lists},
            clock=self.clock,
            **{"discover_models": True, "health_interval": 0, "policy": "round_robin", **settings},
        )
        self.router = self.routed.router

    def worker(self, url: str) -> Callable[[httpx.Request], Script]:
        return lambda request: self.lists[url] if request.method == "GET" else self.answers[url]

    async def ask(self) -> None:
        """Let an interval pass, and the workers be asked."""
        self.clock.now += self.router.settings.models_interval
        await self.router.models.ask()

    async def served_by(self, model: str) -> set[str]:
        """Send requests for this model, and return the workers that got one."""
        before = {url: len(self.posts(url)) for url in self.lists}
        for _ in range(2 * len(self.lists)):
            exchange = await Exchange(body=completion_body(model=model)).run(self.routed.app)
            assert exchange.status == 200
            self.routed.assert_released(exchange)
        return {url for url in self.lists if len(self.posts(url)) > before[url]}

    async def refused(self, model: str) -> tuple[int | None, object]:
        """Send a request for this model, and return status and code of its error."""
        return error_of(await Exchange(body=completion_body(model=model)).run(self.routed.app))

    def posts(self, url: str) -> list[bytes]:
        """The bodies that a worker has got."""
        return [call.body for call in self.routed.fleet[url].calls if call.method == "POST"]

    def questions(self, url: str) -> list[str]:
        """What a worker was asked for."""
        return [call.url for call in self.routed.fleet[url].calls if call.method == "GET"]


# --- Where requests go ---------------------------------------------------------------------------------------


async def test_requests_go_to_those_that_serve_the_model() -> None:
    """What the workers say decides; a model that none of them names is refused in OpenAI's words."""
    fleet = Fleet(listed("a", "b"), listed("b", "org/c:8b"))
    assert await fleet.served_by("b") == {WORKER, OTHER}
    await fleet.ask()
    assert await fleet.served_by("a") == {WORKER}
    assert await fleet.served_by("b") == {WORKER, OTHER}
    assert await fleet.served_by("org/c:8b") == {OTHER}
    assert await fleet.refused("d") == (404, "model_not_found")
    assert [fleet.questions(url) for url in (WORKER, OTHER)] == [[f"{url}/v1/models"] for url in (WORKER, OTHER)]


async def test_nothing_is_refused_while_a_list_is_not_known() -> None:
    """Before the first answer, and of a worker that gives none, nobody knows what it doesn't serve."""
    fleet = Fleet(listed("a"), Script(status=404))
    assert await fleet.served_by("x") == {WORKER, OTHER}
    await fleet.ask()
    assert await fleet.served_by("x") == {OTHER}
    assert await fleet.served_by("a") == {WORKER, OTHER}

    fleet.router.workers.drain(OTHER)
    assert await fleet.refused("x") == (503, "no_worker_available")
    fleet.lists[OTHER] = listed("b")
    await fleet.ask()
    assert await fleet.refused("x") == (404, "model_not_found")
    assert await fleet.refused("b") == (503, "no_worker_available")


async def test_the_newest_answer_counts() -> None:
    """Adapters come and go; a worker that has unloaded all it had serves none."""
    fleet = Fleet(listed("base"), listed("base", "adapter"))
    await fleet.ask()
    assert await fleet.served_by("adapter") == {OTHER}
    fleet.lists.update({WORKER: listed("base", "adapter"), OTHER: listed("base")})
    await fleet.ask()
    assert await fleet.served_by("adapter") == {WORKER}
    fleet.lists[WORKER] = listed()
    await fleet.ask()
    assert await fleet.refused("adapter") == (404, "model_not_found")
    assert await fleet.served_by("base") == {OTHER}


@pytest.mark.parametrize(
    "silence",
    [
        replace(listed("b"), connect=[httpx.ConnectError("refused")]),
        replace(listed("b"), body=[b'{"data": [', httpx.ReadError("reset")]),
        replace(listed("b"), status=500),
        replace(listed("b"), status=401),
        replace(listed("b"), body=[HANG]),
        Script.json([{"id": "b"}]),
        Script.json({"data": [{"name": "b"}]}),
    ],
    ids=["refused", "reset", "500", "401", "hangs", "no object", "no names"],
)
async def test_a_question_that_fails_changes_nothing(silence: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was known of a worker stays known, and what wasn't isn't."""
    monkeypatch.setattr(models, "ASK_TIMEOUT", 0.02)
    fleet = Fleet(listed("a"), silence)
    await fleet.ask()
    assert await fleet.served_by("x") == {OTHER}
    fleet.lists[WORKER] = silence
    await fleet.ask()
    assert await fleet.served_by("a") == {WORKER, OTHER}
    assert await fleet.served_by("x") == {OTHER}


async def test_a_given_list_is_not_asked_for() -> None:
    """Its operator knows better, also when other workers are asked."""
    fleet = Fleet(listed("a"), listed("b"))
    fleet.router.workers.add(Worker(url=OTHER, models=("given",)))
    await fleet.ask()
    assert fleet.questions(OTHER) == []
    assert await fleet.served_by("given") == {OTHER}
    assert await fleet.refused("b") == (404, "model_not_found")


async def test_registering_again_forgets_nothing() -> None:
    """An engine that registers while it serves goes on serving its models only, and is asked again soon."""
    routed = administered(discover_models=True, health_interval=0)
    answers = {"/v1/models": listed("a"), "/health": answer("json")}
    for url in (WORKER, OTHER):
        routed.fleet[url].scripts = lambda request: answers.get(request.url.path, answer("json"))
    await call(routed, "POST", "/register", PAYLOAD)
    await routed.router.models.ask()
    answers["/v1/models"] = listed("b")
    before = routed.router.workers.get(OTHER)
    assert (await call(routed, "POST", "/register", PAYLOAD)).status == 200
    assert routed.router.workers.get(OTHER) is not before
    assert not any(state.serves("b") for state in routed.router.workers)
    assert (await Exchange(body=completion_body(model="b")).run(routed.app)).status == 404
    await routed.router.models.ask()
    assert [state.serves("b") for state in routed.router.workers] == [False, True]


async def test_requests_that_wait_hear_of_a_model() -> None:
    """A request in the queue is served as soon as a worker is known to serve its model."""
    fleet = Fleet(listed("a", "b"), listed("a"), max_concurrent_per_worker=1)
    await fleet.ask()
    gate = anyio.Event()
    fleet.answers[WORKER] = replace(answer("json"), head=[gate])
    first, second = (Exchange(body=completion_body(model="b")) for _ in range(2))
    async with first.running(fleet.routed.app), second.running(fleet.routed.app):
        await fleet.routed.worker.received(2)
        while fleet.router.stats().queued == 0:
            await checkpoint()
        fleet.lists[OTHER] = listed("a", "b")
        await fleet.ask()
        await anyio.wait_all_tasks_blocked()
        assert (len(fleet.posts(WORKER)), len(fleet.posts(OTHER))) == (1, 1)
        gate.set()
    assert (first.status, second.status) == (200, 200)
    fleet.routed.assert_released()


# --- When workers are asked ----------------------------------------------------------------------------------


async def test_asked_at_once_and_once_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the router opens, for one app or another, when a worker joins, and after each interval; not before."""
    monkeypatch.setattr(models, "LOOK_EVERY", 0.001)
    fleet = Fleet(listed("a"), listed("b"))
    fleet.router.workers.remove(OTHER)
    first, second = fleet.routed.worker, fleet.routed.fleet[OTHER]
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks, fleet.router:
            await first.received(1)
            fleet.router.workers.add(Worker(url=OTHER))
            await second.received(1)
            fleet.clock.now += fleet.router.settings.models_interval - 1
            await anyio.sleep(0.02)  # some twenty looks
            assert (len(first.calls), len(second.calls)) == (1, 1)
            fleet.clock.now += 1
            await first.received(2)
            await second.received(2)
            tasks.start_soon(fleet.router.watch)
            await first.received(3)
            tasks.cancel_scope.cancel()
    assert {call.method for call in first.calls} == {"GET"}
    fleet.routed.assert_released()


@pytest.mark.parametrize("setting", ["discover_models", "serve_models", ""])
async def test_only_asked_where_somebody_wants_to_know(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two settings makes the router ask; without them no worker is asked."""
    monkeypatch.setattr(models, "LOOK_EVERY", 0.001)
    routed = Routed(listed("a"), health_interval=0, **{setting: True} if setting else {})
    async with routed.router:
        with anyio.move_on_after(5 if setting else 0.02):
            await routed.worker.received(1)
    assert len(routed.worker.calls) == (1 if setting else 0)


async def test_a_slow_worker_holds_up_nobody() -> None:
    """Others are asked meanwhile, and it is not asked again before it has answered."""
    fleet = Fleet(listed("a"), replace(listed("b"), head=[HANG]))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fleet.ask)
        await fleet.routed.fleet[OTHER].received(1)
        await fleet.routed.worker.changes.until(lambda: fleet.router.workers.get(WORKER).discovered is not None)
        fleet.lists[WORKER] = listed("c")
        await fleet.ask()
        assert [len(fleet.questions(url)) for url in (WORKER, OTHER)] == [2, 1]
        assert await fleet.served_by("c") == {WORKER, OTHER}
        tasks.cancel_scope.cancel()


async def test_the_workers_key_is_sent_and_no_name_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """WORKER_API_KEY opens the list; the log says how many models there are, and who doesn't tell, once."""
    caplog.set_level(logging.DEBUG, logger="asgi_router")
    fleet = Fleet(listed("PLANTED-NAME\n"), Script(status=401), worker_api_key="PLANTED-KEY")
    await fleet.ask()
    await fleet.ask()
    (_, headers) = (call.headers for call in fleet.routed.worker.calls)
    assert (b"Authorization", b"Bearer PLANTED-KEY") in [(name.title(), value) for name, value in headers]
    assert f"{WORKER}: serves 1 models" in caplog.messages
    assert [record.levelname for record in caplog.records if "status 401" in record.message] == ["WARNING"]
    assert "PLANTED" not in caplog.text


async def test_the_local_worker_is_asked_within_the_process() -> None:
    """The wrapped app's own list counts for the worker `local`, with the key that workers want."""
    keys = []

    async def engine(request: Request) -> JSONResponse:
        keys.append(request.headers["authorization"])
        return JSONResponse({"data": [{"id": "mine"}]})

    settings = RouterSettings(workers=["local", OTHER], discover_models=True, worker_api_key="k")
    router = Router(settings, transport=FakeFleet({OTHER: listed("its")}))
    RouterMiddleware(Starlette(routes=[Route("/v1/models", engine)]), router=router)
    await router.models.ask()
    assert keys == ["Bearer k"]
    local, other = router.workers
    assert [local.serves("mine"), local.serves("its")] == [True, False]
    assert [other.serves("mine"), other.serves("its")] == [False, True]


async def test_prompts_of_two_models_do_not_match() -> None:
    """The same prompt for another model is another prompt, though the worker that serves both holds it."""
    fleet = Fleet(listed("a", "b"))
    await fleet.ask()
    cached = []
    fleet.router.observers.append(lambda event: cached.append((event.model, event.predicted_cached_tokens > 0)))
    for model in ("a", "b", "a", "b"):
        await fleet.served_by(model)
    assert [hit for model, hit in cached if model == "a"] == [False, True, True, True]
    assert [hit for model, hit in cached if model == "b"] == [False, True, True, True]

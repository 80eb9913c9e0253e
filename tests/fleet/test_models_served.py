"""Owns what clients are told of the models: `GET /v1/models` and `GET /v1/models/{id}`, and what stays the app's."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import openai
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

from asgi_router import Router, RouterMiddleware, RouterSettings, Worker
from tests.instruments.asgi_client import HANG, Exchange
from tests.instruments.fake_worker import FakeFleet, Script
from tests.instruments.servers import run_uvicorn_in_thread
from tests.routed import OTHER, WORKER, completion_body
from tests.scheduling.builders import Clock

if TYPE_CHECKING:
    from starlette.requests import Request

pytestmark = pytest.mark.anyio

THIRD = "http://w3:8000"


def model(name: str, **fields: object) -> dict[str, object]:
    """A model as a worker describes it."""
    return {"id": name, "object": "model", "created": 7, "owned_by": "vllm", **fields}


def listing(*models: dict[str, object]) -> Script:
    """A worker's list."""
    return Script.json({"object": "list", "data": list(models)})


def synthesised(name: str) -> dict[str, object]:
    """A model of which only the name is known."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "asgi-router"}


LISTS = {
    WORKER: listing(model("a", max_model_len=4096), model("org/b", root="/models/b")),
    OTHER: listing(model("a", max_model_len=8192), model("c")),
    THIRD: Script(status=500),
}


async def host_page(request: Request) -> PlainTextResponse:
    """What the host app has to say at any path."""
    return PlainTextResponse(f"host: {request.method}")


class Served:
    """The middleware around a host app that answers everything, before three workers; the third has a given list."""

    def __init__(self, **settings: object) -> None:
        self.clock = Clock()
        self.fleet = FakeFleet(LISTS)
        workers = [WORKER, OTHER, Worker(url=THIRD, models=("given", "c", "/models/x"))]
        self.router = Router(
            RouterSettings(workers=workers, **{"serve_models": True, "health_interval": 0, **settings}),
            transport=self.fleet,
            clock=self.clock,
        )
        host = Starlette(routes=[Route("/{path:path}", host_page, methods=["GET", "POST", "PUT", "OPTIONS"])])
        self.app = RouterMiddleware(host, router=self.router)

    async def get(self, path: str, method: str = "GET", **options: object) -> Exchange:
        """Call the app."""
        exchange = Exchange(method=method, path=path, body=b"", **options)  # type: ignore[arg-type]
        await exchange.run(self.app)
        self.fleet.assert_clean()
        return exchange


UNION = [
    model("org/b", root="/models/b"),
    model("a", max_model_len=4096),
    model("c"),
    synthesised("given"),
    synthesised("/models/x"),
]


def by_id(models: object) -> list[dict[str, object]]:
    assert isinstance(models, list)
    return sorted(models, key=lambda model: str(model["id"]))


async def test_the_union_of_all_models() -> None:
    """In OpenAI's shape, each once: as the first worker describes it, and by us where only a list was given."""
    exchange = await Served().get("/v1/models")
    assert exchange.status == 200
    assert exchange.header("content-type") == [b"application/json"]
    answer = exchange.json()
    assert isinstance(answer, dict)
    assert (set(answer), answer["object"]) == ({"object", "data"}, "list")
    assert [model["id"] for model in answer["data"]] == ["a", "org/b", "c", "given", "/models/x"]
    assert by_id(answer["data"]) == by_id(UNION)


@pytest.mark.parametrize("said", UNION, ids=lambda said: str(said["id"]))
async def test_one_model(said: dict[str, object]) -> None:
    """By its id, which may have slashes in it and at its start."""
    exchange = await Served().get(f"/v1/models/{said['id']}")
    assert (exchange.status, exchange.json()) == (200, said)


@pytest.mark.parametrize("name", ["d", "A", "a/", "a/b", "org", "b", "/a"])
async def test_no_such_model(name: str) -> None:
    """An id that no worker has is refused as a completion for it is."""
    served = Served()
    shown = await served.get(f"/v1/models/{name}")
    assert shown.status == 404
    error = shown.json()
    assert isinstance(error, dict)
    assert error["error"]["code"] == "model_not_found"
    assert error["error"]["param"] == "model"
    completion = await Exchange(body=completion_body(model=name)).run(served.app)
    assert completion.status == 404


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/org/b", "/v1/models/none"])
async def test_head(path: str) -> None:
    """HEAD is answered as GET is, its length included, without the body."""
    served = Served()
    get, head = await served.get(path), await served.get(path, "HEAD")
    assert (head.status, head.headers, head.body) == (get.status, get.headers, b"")
    assert head.header("content-length") == [str(len(get.body)).encode()]


@pytest.mark.parametrize(
    ("method", "path", "settings"),
    [
        ("GET", "/v1/models", {"serve_models": False}),
        ("GET", "/v1/models/a", {"serve_models": False, "discover_models": True}),
        ("POST", "/v1/models", {}),
        ("PUT", "/v1/models/a", {}),
        ("OPTIONS", "/v1/models", {}),
        ("GET", "/v1/models/", {}),
        ("GET", "/v1/modelsx", {}),
        ("GET", "/v1/model", {}),
        ("GET", "/x/v1/models", {}),
    ],
)
async def test_what_stays_the_apps(method: str, path: str, settings: dict[str, object]) -> None:
    """Everything but GET and HEAD, every other path, and all of it where SERVE_MODELS is off."""
    served = Served(**settings)
    exchange = await served.get(path, method)
    assert exchange.body == f"host: {method}".encode()
    assert sum(len(worker.calls) for worker in served.fleet.workers.values()) == 0


async def test_models_of_workers_that_get_no_requests() -> None:
    """They are listed: a request for one is answered with 503 and Retry-After, and not with 404. Then they leave."""
    served = Served()
    await served.get("/v1/models")
    served.router.workers.get(WORKER).healthy = False
    served.router.workers.drain(OTHER)
    assert len(json.loads((await served.get("/v1/models")).body)["data"]) == 5
    for name in ("a", "org/b"):
        refused = await Exchange(body=completion_body(model=name)).run(served.app)
        assert (refused.status, refused.header("retry-after")) == (503, [b"1"])

    served.router.workers.remove(WORKER)
    answer = json.loads((await served.get("/v1/models")).body)
    assert by_id(answer["data"]) == by_id(
        [model("a", max_model_len=8192), model("c"), synthesised("given"), synthesised("/models/x")]
    )
    assert (await served.get("/v1/models/org/b")).status == 404


async def test_asked_when_nobody_else_asks() -> None:
    """Where the router isn't open, a client's question is passed on, once an interval and no more."""
    served = Served()
    for _ in range(3):
        await served.get("/v1/models")
    assert [len(worker.calls) for worker in served.fleet.workers.values()] == [1, 1, 0]
    served.fleet[OTHER].scripts = listing(model("new"))
    served.clock.now += served.router.settings.models_interval
    for _ in range(3):
        assert (await served.get("/v1/models/new")).status == 200
    assert [len(worker.calls) for worker in served.fleet.workers.values()] == [2, 2, 0]


async def test_an_answer_that_is_under_way_is_waited_for() -> None:
    """A client that comes with the first question to a worker gets its models, too. Later ones don't wait for it."""
    served = Served()
    gate = anyio.Event()
    served.fleet[OTHER].scripts = replace(LISTS[OTHER], head=[gate])
    exchange = Exchange(method="GET", path="/v1/models", body=b"")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(served.router.models.ask)
        await served.fleet[OTHER].received(1)
        async with exchange.running(served.app):
            await anyio.wait_all_tasks_blocked()
            assert exchange.status is None
            gate.set()
    assert len(json.loads(exchange.body)["data"]) == 5

    served.clock.now += served.router.settings.models_interval
    served.fleet[OTHER].scripts = replace(LISTS[OTHER], head=[HANG])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(served.router.models.ask)
        await served.fleet[OTHER].received(2)
        assert len(json.loads((await Exchange(method="GET", path="/v1/models").run(served.app)).body)["data"]) == 5
        tasks.cancel_scope.cancel()


async def test_no_workers() -> None:
    """A router without workers has no models, and says so."""
    app = RouterMiddleware(Starlette(), settings=RouterSettings(workers=[], serve_models=True))
    exchange = await Exchange(method="GET", path="/v1/models", body=b"").run(app)
    assert exchange.json() == {"object": "list", "data": []}


@pytest.mark.parametrize("local", [True, False])
async def test_a_router_asks_a_router(local: bool) -> None:
    """One with a worker `local` answers for that one: what it has heard of others would come back to them for ever."""
    served = Served()
    if local:
        served.router.workers.add(Worker(url="local", models=("mine",)))
    exchange = await served.get("/v1/models", headers=[("x-router-models", "1")])
    assert exchange.status == 200
    assert exchange.body.startswith(b"host: GET" if local else b'{"object": "list"')


async def test_a_router_is_told_all_or_nothing() -> None:
    """While a worker's models are not known another router gets 503, a client what is known."""
    served = Served()
    served.fleet[OTHER].scripts = Script(status=404)
    for headers, status in (([("x-router-models", "1")], 503), ([], 200)):
        exchange = await served.get("/v1/models", headers=headers)
        assert exchange.status == status
    served.router.workers.add(Worker(url=OTHER, models=("c",)))
    assert (await served.get("/v1/models", headers=[("x-router-models", "1")])).status == 200


def test_under_a_mount() -> None:
    """The path counts from where the middleware is mounted."""
    served = Served()
    with TestClient(Starlette(routes=[Mount("/team", served.app)])) as client:
        assert len(client.get("/team/v1/models").json()["data"]) == 5
        assert client.get("/team/v1/models/org/b").json()["id"] == "org/b"
        assert client.get("/v1/models").status_code == 404


# --- On the wire ---------------------------------------------------------------------------------------------


def test_the_openai_client_reads_it() -> None:
    """The official client lists the models, and finds one by a name with a slash, which it escapes."""
    served = Served()
    with (
        run_uvicorn_in_thread(served.app) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=20) as client,
    ):
        assert {model.id for model in client.models.list()} == {str(said["id"]) for said in UNION}
        assert client.models.retrieve("org/b").owned_by == "vllm"
        assert client.models.retrieve("given").owned_by == "asgi-router"
        with pytest.raises(openai.NotFoundError, match="No worker serves this model"):
            client.models.retrieve("none")

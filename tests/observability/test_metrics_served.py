"""Shows where metrics are had from (METRICS_PATH, a mount, a registry of the host), and in which format."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from asgi_router import Router, RouterMiddleware, RouterSettings, Worker
from asgi_router.observability.metrics import prefers_openmetrics
from asgi_router.settings import SettingsError
from tests.instruments import asyncio_only
from tests.instruments.asgi_client import Exchange
from tests.instruments.raw_http import connect
from tests.instruments.servers import run_uvicorn
from tests.observability.scraping import OPENMETRICS, finished, scrape
from tests.routed import WORKER, Routed, answer, completion_body
from tests.wire.served import until

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.types import Receive, Scope, Send

TEXT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=0.0.1;"
    "q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
"""What Prometheus 3 sends."""


async def host(scope: Scope, receive: Receive, send: Send) -> None:
    """A host app that answers everything."""
    await PlainTextResponse("host")(scope, receive, send)


def hosted(**settings: object) -> RouterMiddleware:
    return RouterMiddleware(host, router=Routed(answer("json"), **settings).router)


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        (PROMETHEUS, True),
        (OPENMETRICS, True),
        ("Application/OpenMetrics-Text; Q=0.1", True),
        ("text/plain, application/openmetrics-text", True),
        ("text/plain;version=0.0.4;q=0.6, application/openmetrics-text;version=1.0.0;q=0.3", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=x", False),
        ("application/openmetrics-text;q=nan", False),
        ("text/plain;q=nan, application/openmetrics-text", True),
        ("text/html,*/*;q=0.8", False),
        ("", False),
        (";,;q=,", False),
    ],
)
def test_the_format_is_the_one_that_is_accepted(accept: str, wanted: bool) -> None:
    """OpenMetrics goes to those who prefer it, plain text to all others, however odd their header is."""
    assert prefers_openmetrics(accept) is wanted


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("accept", "content_type"),
    [(PROMETHEUS, b"application/openmetrics-text; version=1.0.0"), ("", TEXT_TYPE), ("a\xff;version=9", TEXT_TYPE)],
)
async def test_the_answer_names_its_format(accept: str, content_type: bytes) -> None:
    """The content type is one of two, with nothing of what the client asked with."""
    found = await scrape(hosted(metrics_path="/metrics"), accept)
    assert found.exchange.header("content-type")[0].startswith(content_type)
    assert found.exchange.header("content-length") == [str(len(found.exchange.body)).encode()]
    assert found.exchange.body.endswith(b"# EOF\n") is content_type.startswith(OPENMETRICS.encode())


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("method", "path", "root_path", "served"),
    [
        ("GET", "/metrics", "", True),
        ("GET", "/v2/metrics", "/v2", True),
        ("GET", "/metrics", "/proxied", True),
        ("GET", "/v2/metrics", "", False),
        ("GET", "/metrics/", "", False),
        ("GET", "/metrics/x", "", False),
        ("POST", "/metrics", "", False),
        ("OPTIONS", "/metrics", "", False),
        ("GET", "/v1/chat/completions", "", False),
    ],
)
async def test_what_is_served(method: str, path: str, root_path: str, served: bool) -> None:
    """GET on METRICS_PATH within the app is ours, below any mount; all else there is the host's."""
    exchange = Exchange(method=method, path=path, root_path=root_path, body=b"")
    await exchange.run(hosted(metrics_path="/metrics"))
    assert exchange.status == 200
    assert (exchange.body == b"host") is not served
    assert (b"asgi_router_requests_total" in exchange.body) is served


@pytest.mark.anyio
async def test_head_is_get_without_its_body() -> None:
    """HEAD tells type and length, and sends no byte."""
    app = hosted(metrics_path="/metrics")
    head = await Exchange(method="HEAD", path="/metrics", body=b"").run(app)
    found = await scrape(app)
    assert head.body == b""
    assert head.headers == found.exchange.headers


@pytest.mark.anyio
@pytest.mark.parametrize("settings", [{}, {"metrics_path": "/stats/prometheus"}])
async def test_there_are_none_unless_asked_for(settings: dict[str, object]) -> None:
    """Without METRICS_PATH, or at another path, `/metrics` is the host's; the router then has no observer."""
    app = hosted(**settings)
    exchange = await Exchange(method="GET", path="/metrics", body=b"").run(app)
    assert exchange.body == b"host"
    assert len(app.router.observers) == len(settings)


@pytest.mark.anyio
async def test_a_path_under_the_admin_prefix_is_not_behind_its_token() -> None:
    """METRICS_PATH says where metrics are, also if that is below ADMIN_PREFIX."""
    app = hosted(metrics_path="/router/metrics", admin_prefix="/router", admin_token="t")
    assert (await scrape(app, path="/router/metrics")).value("retries_total") == 0


def test_mounted_by_the_host() -> None:
    """`router.metrics` can be mounted in any app, behind its own login say; there it refuses all but GET and HEAD."""
    router = Routed(answer("json")).router
    app = Starlette()
    app.mount("/internal", router.metrics)
    client = TestClient(app)
    assert "asgi_router_requests" in client.get("/internal/").text
    assert client.head("/internal/").text == ""
    refused = client.post("/internal/")
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.anyio
@asyncio_only
async def test_a_real_server_serves_them() -> None:
    """Over uvicorn and a socket: a request, then a scrape that counts it, on the same connection."""
    routed = Routed(answer("json"), metrics_path="/metrics")
    async with run_uvicorn(routed.app) as server, connect(server.host, server.port) as client:
        await client.post(completion_body())
        asked = await client.read_head()
        await client.read_body(asked)
        await until(lambda: not routed.router.stats().exchanges)  # it is counted after its end
        await client.send(f"GET /metrics HTTP/1.1\r\nhost: h\r\naccept: {PROMETHEUS}\r\n\r\n".encode())
        found = await client.read_head()
        text = await client.read_body(found)
    assert asked.status == found.status == 200
    assert (
        f'asgi_router_requests_total{{outcome="ok",role="mixed",status="200",worker="{WORKER}"}} 1.0\n'.encode() in text
    )
    assert text.endswith(b"# EOF\n")


class TestWithoutTheExtra:
    """`prometheus_client` isn't there."""

    @pytest.fixture(autouse=True)
    def no_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let imports of it fail, and forget what had imported it."""
        for name in [name for name in sys.modules if name.startswith("prometheus_client")]:
            monkeypatch.setitem(sys.modules, name, None)
        for name in ("metrics", "fastdeploy_metrics"):
            monkeypatch.delitem(sys.modules, f"asgi_router.observability.{name}", raising=False)

    @pytest.mark.parametrize("make", [Router, lambda settings: RouterMiddleware(host, settings=settings)])
    def test_metrics_path_is_refused_when_the_router_is_made(self, make: type[Router]) -> None:
        """The error names the variable and the extra: not at the first scrape, when nobody is looking."""
        settings = RouterSettings(workers=[WORKER], metrics_path="/metrics")
        with pytest.raises(SettingsError, match=r"^ASGI_ROUTER_METRICS_PATH: .*'asgi-router\[prometheus\]'$"):
            make(settings)

    def test_metrics_from_python_are_refused(self) -> None:
        """`router.metrics` says which extra it needs, and the router works without."""
        router = Router(RouterSettings(workers=[WORKER]))
        with pytest.raises(ImportError, match=r"asgi-router\[prometheus\]"):
            _ = router.metrics
        assert router.observers == []


@pytest.mark.anyio
async def test_a_host_registers_them_in_its_own_registry() -> None:
    """`router.metrics` is a collector, without METRICS_PATH too; it counts from its first use on, and once."""
    routed = Routed(answer("json"))
    await Exchange(body=completion_body()).run(routed.app)
    registry = CollectorRegistry(auto_describe=True)
    registry.register(routed.router.metrics)
    labels = {"worker": WORKER, "role": "mixed", "status": "200", "outcome": "ok"}
    assert registry.get_sample_value("asgi_router_requests_total", labels) is None
    await Exchange(body=completion_body()).run(routed.app)
    assert routed.router.metrics is routed.router.metrics
    assert registry.get_sample_value("asgi_router_requests_total", labels) == 1
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(Routed(answer("json")).router.metrics)


def test_multiprocess_mode_of_the_client_library_changes_nothing(tmp_path: Path) -> None:
    """In a process with PROMETHEUS_MULTIPROC_DIR, as vLLM's server is one, routers keep apart and write no files."""
    program = (
        "from asgi_router import Router, RouterSettings\n"
        "from tests.observability.scraping import finished\n"
        "from prometheus_client import generate_latest\n"
        "one, two = (Router(RouterSettings(workers=['http://w1:8000'], metrics_path='/metrics')) for _ in range(2))\n"
        "one.metrics.observe(finished())\n"
        "print(b'requests_total{' in generate_latest(one.metrics), b'requests_total{' in generate_latest(two.metrics))"
    )
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.split() == ["True", "False"]
    assert list(tmp_path.iterdir()) == []


def test_the_extra_is_loaded_only_where_it_is_wanted() -> None:
    """A router without metrics doesn't load `prometheus_client`."""
    program = (
        "import sys\nfrom asgi_router import Router, RouterSettings\n"
        "Router(RouterSettings(workers=['http://w1:8000']))\nprint('prometheus_client' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "False"


def test_metrics_of_a_fleet_can_be_read_in_another_thread() -> None:
    """A host's exporter may scrape in a thread of its own, while requests are counted and workers come and go."""
    router = Router(RouterSettings(workers=[WORKER], metrics_path="/metrics"))
    registry = CollectorRegistry()
    registry.register(router.metrics)
    failures: list[Exception] = []

    def read() -> None:
        try:
            for _ in range(200):
                sum(len(family.samples) for family in registry.collect())
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    number = 0
    while thread.is_alive():
        number += 1
        url = f"http://w{number % 7}:8000"
        router.workers.add(Worker(url=url))
        router.metrics.observe(finished(worker=url, outcome=f"o{number % 50}", status=number % 600))
        router.workers.remove(url)
    thread.join()
    assert not failures
    assert number > 0

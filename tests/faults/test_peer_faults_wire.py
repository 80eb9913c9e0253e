"""Owns the faults that peers have had in public with headers, encodings and addresses (entries 52 to 60).

Shown elsewhere, with the reference in the test's docstring:

- entry 52 (BerriAI/litellm#25624, #25655, #7108) in tests/wire/test_fidelity.py
- entry 55 (sgl-project/sglang#29206) in tests/wire/test_heads.py
- entry 59 (THUDM/slime#1714) in tests/wire/test_pool.py
- entry 60 (ThunderAgent-org/ThunderAgent#35, agentscope-runtime#468, llm-d/llm-d#1564) in tests/wire/test_pool.py
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest
from starlette.applications import Starlette

from asgi_router import RouterMiddleware, RouterSettings, Worker
from asgi_router.fleet.registration import RegistrationError, read_registration
from asgi_router.scheduling.breaker import BreakerState
from asgi_router.settings import SettingsError
from tests.instruments.raw_server import CLOSE, HANG, REQUEST
from tests.instruments.servers import run_uvicorn
from tests.routed import completion_body
from tests.wire.served import LAST_CHUNK, OK, Http, chunk, on_both_servers, serve, serve_scripts

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send


BODY = completion_body()

NO_TEXT = b"".join([b"\x8b\x03\x80", random.Random(3).randbytes(3000), b"\x03"])
"""What only a decoder could make sense of, and nobody on this machine need have one."""


async def answer_json(send: Send, status: int, value: object) -> None:
    """Send a whole answer."""
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": json.dumps(value).encode()})


class TestBodies:
    """What is said of a body stays true of the body that arrives."""

    pytestmark = on_both_servers

    @pytest.mark.parametrize("coding", [b"br", b"zstd", b"gzip"])
    @pytest.mark.parametrize("framing", ["length", "chunked"])
    async def test_53_an_encoding_that_nobody_here_can_undo(self, http: Http, coding: bytes, framing: str) -> None:
        """BerriAI/litellm#37058: the client accepts brotli, the worker sends it, and no byte of it is touched."""
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-encoding: " + coding + b"\r\n"
        half = len(NO_TEXT) // 2
        bodies = {
            "length": b"content-length: %d\r\n\r\n" % len(NO_TEXT) + NO_TEXT,
            "chunked": b"transfer-encoding: chunked\r\n\r\n"
            + b"".join([chunk(NO_TEXT[:half]), chunk(NO_TEXT[half:]), LAST_CHUNK]),
        }
        async with serve_scripts([REQUEST, head + bodies[framing], HANG], http=http) as (worker, _, client):
            await client.post(BODY, headers=[("accept-encoding", "br, zstd, gzip")])
            seen = await client.read_head()
            assert (seen.status, seen.header("content-encoding")) == (200, [coding])
            assert await client.read_body(seen) == NO_TEXT
            assert worker.connections[0].requests[0][0].header("accept-encoding") == [b"br, zstd, gzip"]

    @pytest.mark.parametrize("stale", [b"1", b"99999"])
    async def test_54_our_error_has_its_own_length(self, http: Http, stale: bytes) -> None:
        """sgl-project/sglang#27523: the worker says how long its answer is, and dies; our error isn't that long.

        Nothing else that the worker said of its body is said of ours, and the client's connection goes on.
        """
        head = (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: gzip\r\netag: 1\r\n"
            b"content-length: " + stale + b"\r\n\r\n"
        )
        async with serve_scripts([REQUEST, head, CLOSE], [REQUEST, OK, HANG], http=http) as (_, _, client):
            await client.post(BODY)
            seen = await client.read_head()
            body = await client.read_body(seen)
            assert seen.status == 502
            assert json.loads(body)["error"]["code"] == "worker_failed"
            assert seen.header("content-length") == [str(len(body)).encode()]
            assert seen.header("content-type") == [b"application/json"]
            for name in ("content-encoding", "etag", "transfer-encoding"):
                assert seen.header(name) == []
            await client.post(BODY)
            assert await client.read_body(await client.read_head()) == b'{"answer":42}'
            assert client.buffer == b""

    async def test_54_nothing_is_added_to_a_body_of_declared_length(self, http: Http) -> None:
        """radixark/miles#851: an event stream with a length breaks off; an error event would not fit into it.

        A client that gets fewer bytes than it was promised knows; one that gets others doesn't.
        """
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 400\r\n\r\n"
        async with serve_scripts([REQUEST, head + b"data: 1\n\n", CLOSE], http=http) as (_, _, client):
            await client.post(BODY)
            seen = await client.read_head()
            assert (seen.status, seen.header("content-length")) == (200, [b"400"])
            assert await client.read_to_end() == b"data: 1\n\n"


class KeyedEngine:
    """A worker that was started with an API key: without it, it tells nobody anything, not even that it is well."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        while (await receive()).get("more_body"):
            pass
        self.asked.append(scope["path"])
        known = (b"authorization", b"Bearer right") in scope["headers"]
        await answer_json(send, *((200, {"ok": True}) if known else (401, {"error": "who are you?"})))


class Ingress:
    """A server before several workers that knows them by the `Host` header alone, as ingress controllers do."""

    def __init__(self) -> None:
        self.hosts: set[str] = set()
        self.unknown: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        while (await receive()).get("more_body"):
            pass
        hosts = [value.decode() for name, value in scope["headers"] if name == b"host"]
        if len(hosts) == 1 and hosts[0] in self.hosts:
            await answer_json(send, 200, {"served by": hosts[0]})
        else:
            self.unknown += hosts
            await answer_json(send, 502, {"error": "no such host"})


class TestHeads:
    """What the worker is told."""

    pytestmark = on_both_servers

    async def test_56_engines_with_an_api_key(self, http: Http) -> None:
        """sgl-project/sglang#3031, #3070: the client's key reaches the engine, and a 401 puts no engine out of service.

        Neither one that answers a probe, which has no key, nor one that answers a client with a wrong key.
        """
        engine = KeyedEngine()
        settings = {"health_interval": 0, "health_failures": 1, "breaker_failures": 1}
        async with (
            run_uvicorn(engine, http=http, lifespan="off") as worker,
            serve(worker, http=http, settings=settings) as served,
            served.connect() as client,
        ):
            await served.router.monitor.probe_all()
            for key, status in [("wrong", 401), ("right", 200), ("wrong", 401), ("right", 200)]:
                await client.post(BODY, headers=[("authorization", f"Bearer {key}")])
                head = await client.read_head()
                assert (key, head.status) == (key, status)
                await client.read_body(head)
                await served.router.monitor.probe_all()
                (stats,) = served.router.stats().workers
                assert (key, stats.healthy, stats.breaker) == (key, True, BreakerState.CLOSED)
        assert engine.asked.count("/health") == 5

    async def test_57_workers_behind_an_ingress_that_goes_by_host(self, http: Http) -> None:
        """vllm-project/router#158: the worker's own host is asked for, not the one that the client asked."""
        ingress = Ingress()
        async with run_uvicorn(ingress, http=http, lifespan="off") as server:
            urls = [server.url, f"http://localhost:{server.port}"]
            ingress.hosts = {url.removeprefix("http://") for url in urls}
            async with (
                serve(*urls, http=http, settings={"policy": "round_robin"}) as served,
                served.connect() as client,
            ):
                served_by = set()
                for _ in urls:
                    await client.send(
                        b"POST /v1/chat/completions HTTP/1.1\r\nhost: api.example.com\r\n"
                        b"x-forwarded-host: api.example.com\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)
                    )
                    head = await client.read_head()
                    assert (head.status, ingress.unknown) == (200, [])
                    served_by.add(json.loads(await client.read_body(head))["served by"])
        assert served_by == ingress.hosts


# --- addresses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["http://h:p@0", "http://h:8000@0", "10.0.0.1:8000@1", "https://h@rank3", "[::1]:8000@0", "h:1@10.0.0.9"]
)
def test_58_a_rank_behind_an_at_sign_is_no_user_info(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """sgl-project/sglang#26237: `host:port@rank` is refused wherever a worker is named, or host `0` would be asked."""
    with pytest.raises(ValueError, match="worker URL"):
        Worker(url=url)
    for workers in ([url], url, f"http://fine:8000,{url}", json.dumps([{"url": url}])):
        with pytest.raises(SettingsError, match="ASGI_ROUTER_WORKERS"):
            RouterSettings(workers=workers)
    with pytest.raises(SettingsError, match="ASGI_ROUTER_WORKERS"):
        RouterMiddleware(Starlette(), workers=[url])
    with pytest.raises(RegistrationError, match="host_ip"):
        read_registration(json.dumps({"role": "mixed", "host_ip": url, "port": 8000}).encode(), mode="mixed")

    monkeypatch.setenv("ASGI_ROUTER_WORKERS", url)
    with pytest.raises(SettingsError, match="ASGI_ROUTER_WORKERS"):
        RouterSettings()

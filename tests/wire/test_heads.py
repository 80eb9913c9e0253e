"""Owns the proof that only what may cross does: headers, framing and targets, as they are on the wire."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from tests.instruments.raw_server import HANG, REQUEST, raw_server
from tests.routed import completion_body
from tests.wire.served import LAST_CHUNK, OK, Http, chunk, on_both_servers, serve, serve_scripts
from tests.wire.test_failures import read_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Receive, Scope, Send

    from asgi_router import RouterMiddleware
    from tests.instruments.raw_server import Step

pytestmark = on_both_servers

BODY = completion_body("x")
LENGTH = str(len(BODY)).encode()
CHUNKED = chunk(BODY) + LAST_CHUNK


async def test_the_worker_gets_the_clients_headers_and_nothing_of_ours(http: Http) -> None:
    """End-to-end headers cross in order, repeated ones too; those of the connection, and only those, don't.

    sgl-project/sglang#29206: custom headers were lost, as only known ones crossed.

    Nothing is added but the worker's own host, a length, the client's address, an id for a request that has
    none, and `via`: no user-agent, no accept-encoding, no connection.
    """
    sent = [
        ("authorization", "Bearer t"),
        ("X-Custom", "1"),
        ("x-custom", "2"),
        ("x-latin", "caf\xe9"),
        ("connection", "keep-alive, x-listed, authorization"),
        ("x-listed", "1"),
        ("keep-alive", "timeout=5"),
        ("proxy-connection", "keep-alive"),
        ("proxy-authorization", "Basic x"),
        ("te", "trailers"),
        ("trailer", "x-sum"),
        ("expect", "100-continue"),
        ("x-forwarded-for", "203.0.113.9"),
        ("cookie", "a=1"),
        ("content-type", "application/json"),
    ]
    async with serve_scripts([REQUEST, OK, HANG], http=http) as (worker, _, client):
        await client.post(BODY, headers=sent)
        assert (await client.read_head()).status == 100  # the server's own answer to `expect`
        assert (await client.read_head()).status == 200
        head, body = worker.connections[0].requests[0]
        assert body == BODY
        got = [(name.lower(), value) for name, value in head.headers]
        ((_, request_id),) = [added for added in got if added[0] == b"x-request-id"]
        assert len(request_id) == 32
        assert sorted(got) == sorted(
            [
                (b"host", worker.url.removeprefix("http://").encode()),
                (b"content-length", LENGTH),
                (b"authorization", b"Bearer t"),
                (b"x-custom", b"1"),
                (b"x-custom", b"2"),
                (b"x-latin", b"caf\xe9"),
                (b"x-forwarded-for", b"203.0.113.9, 127.0.0.1"),
                (b"cookie", b"a=1"),
                (b"content-type", b"application/json"),
                (b"x-request-id", request_id),
                (b"via", b"1.1 asgi-router"),
            ]
        )


# What uvicorn lets through differs between its two implementations, and may change.
ODD_FRAMINGS = {
    "short length and chunked": (b"content-length: 5\r\ntransfer-encoding: chunked", CHUNKED),
    "chunked and length": (b"transfer-encoding: chunked\r\ncontent-length: %d" % len(CHUNKED), CHUNKED),
    "length twice": (b"content-length: %b\r\ncontent-length: %b" % (LENGTH, LENGTH), BODY),
    "two lengths": (b"content-length: %b\r\ncontent-length: 3" % LENGTH, BODY),
    "length list": (b"content-length: %b, %b" % (LENGTH, LENGTH), BODY),
    "signed length": (b"content-length: +%b" % LENGTH, BODY),
    "xchunked": (b"transfer-encoding: xchunked\r\ncontent-length: %b" % LENGTH, BODY),
    "identity, chunked": (b"transfer-encoding: identity, chunked", CHUNKED),
    "chunked, identity": (b"transfer-encoding: chunked, identity\r\ncontent-length: %b" % LENGTH, BODY),
    "two encodings": (b"transfer-encoding: chunked\r\ntransfer-encoding: identity", CHUNKED),
    "space before colon": (b"transfer-encoding : chunked\r\ncontent-length: %b" % LENGTH, BODY),
    "folded": (b"x: a\r\n transfer-encoding: chunked\r\ncontent-length: %b" % LENGTH, BODY),
    "bare line feed": (b"x: a\ntransfer-encoding: chunked\r\ncontent-length: 5", CHUNKED),
}
GOOD_FRAMINGS = {
    "tab and case": (b"Transfer-Encoding:\tChUnKeD", CHUNKED),
    "length listed": (b"connection: content-length, host\r\ncontent-length: %b" % LENGTH, BODY),
    "encoding listed": (b"connection: transfer-encoding\r\ntransfer-encoding: chunked", CHUNKED),
}


async def test_no_framing_can_smuggle_a_request(http: Http) -> None:
    """Two framings, or an odd one: the server refuses the request, or the worker gets one body with one length."""
    script: list[Step] = [REQUEST, OK] * (len(ODD_FRAMINGS) + len(GOOD_FRAMINGS))
    async with raw_server([*script, HANG]) as worker, serve(worker, http=http) as served:
        forwarded = 0
        for name, (framing, payload) in {**ODD_FRAMINGS, **GOOD_FRAMINGS}.items():
            async with served.connect() as client:
                head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\n%b\r\n\r\n"
                await client.send(head % framing + payload)
                status = (await client.read_head()).status
            if status == 400 and name in ODD_FRAMINGS:
                continue

            assert (name, status) == (name, 200)
            forwarded += 1
            connection = worker.connections[0]
            assert (name, len(connection.requests), bytes(connection.buffer)) == (name, forwarded, b"")
            seen, body = connection.requests[-1]
            assert (name, body) == (name, BODY)
            assert (name, seen.header("content-length")) == (name, [LENGTH])
            assert (name, seen.header("transfer-encoding")) == (name, [])
            assert (name, len(seen.header("host"))) == (name, 1)
        assert len(worker.connections) == 1
        assert len(worker.connections[0].requests) == forwarded


async def test_the_client_gets_the_workers_headers_but_those_of_the_connection(http: Http) -> None:
    """Repeated headers stay apart; date and server are there once; the worker's framing stays with the worker.

    Its `connection: close` doesn't close the client's connection.
    """
    answer = (
        b"HTTP/1.1 200 Fine\r\nDate: yesterday\r\nServer: worker\r\nSet-Cookie: a=1; Path=/\r\nset-cookie: b=2\r\n"
        b"connection: close, x-listed\r\nkeep-alive: timeout=1\r\nx-listed: 1\r\nX-Request-Id: 7\r\n"
        b"transfer-encoding: chunked\r\ntrailer: x-sum\r\ncontent-type: application/json\r\n\r\n"
    )
    script: list[Step] = [REQUEST, answer + chunk(b"{}") + b"0\r\nx-sum: 1\r\n\r\n"]
    async with serve_scripts(script, http=http) as (worker, _, client):
        for turn in (1, 2):
            await client.post(BODY)
            head = await client.read_head()
            names = sorted(name.lower() for name, _ in head.headers)
            assert names == [
                *[b"content-type", b"date", b"server", b"set-cookie", b"set-cookie", b"transfer-encoding"],
                b"x-request-id",
            ]
            assert head.header("set-cookie") == [b"a=1; Path=/", b"b=2"]
            assert head.header("server") == [b"uvicorn"]
            assert head.header("date") != [b"yesterday"]
            assert await client.read_body(head) == b"{}"
            assert len(worker.connections) == turn


async def test_an_answer_with_two_framings_is_refused(http: Http) -> None:
    """It could be read in two ways, and who reads it otherwise takes its rest for another (RFC 9112, 6.3)."""
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n"
    async with serve_scripts([REQUEST, answer + chunk(b"12345678") + LAST_CHUNK, HANG], http=http) as (_, _, client):
        await client.post(BODY)
        assert await read_error(client) == (502, "upstream_error", "worker_failed")


async def test_interim_answers_are_not_the_answer(http: Http) -> None:
    """100 and 103 from a worker are passed over; the client gets the final answer alone."""
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n"
    async with serve_scripts([REQUEST, interim, OK, HANG], http=http) as (_, _, client):
        await client.post(BODY)
        head = await client.read_head()
        assert (head.status, head.header("link")) == (200, [])
        assert await client.read_body(head) == b'{"answer":42}'


async def test_cookies_are_not_kept(http: Http) -> None:
    """What a worker sets for one client, no other client sends (encode/httpx#2992)."""
    sets = b"HTTP/1.1 200 OK\r\nset-cookie: sid=alice; Path=/\r\ncontent-length: 2\r\n\r\n{}"
    async with serve_scripts([REQUEST, sets, REQUEST, sets, REQUEST, OK, HANG], http=http) as (worker, served, alice):
        await alice.post(BODY)
        assert (await alice.read_head()).header("set-cookie") == [b"sid=alice; Path=/"]
        async with served.connect() as bob:
            await bob.post(BODY)
            await bob.read_head()
            await bob.read_exactly(2)
            await bob.post(BODY, headers=[("cookie", "own=1")])
            await bob.read_head()
        cookies = [head.header("cookie") for head, _ in worker.connections[0].requests]
        assert cookies == [[], [], [b"own=1"]]


MOUNTS: dict[str, tuple[str, Callable[[RouterMiddleware], ASGIApp]]] = {
    "top": ("/v1/completions", lambda app: app),
    "mount": ("/llm/v1/completions", lambda app: Starlette(routes=[Mount("/llm", app)])),
    "nested": (
        "/a/b%20c/v1/completions",
        lambda app: Starlette(routes=[Mount("/a", Starlette(routes=[Mount("/b c", app)]))]),
    ),
    "encoded": ("/v1/%63ompletions", lambda app: app),
}


@pytest.mark.parametrize("base", ["", "/engine/v0"])
@pytest.mark.parametrize("mount", MOUNTS)
async def test_f26_target(http: Http, mount: str, base: str) -> None:
    """F-26: wherever the middleware is mounted, the worker gets the path after the mount, after its own base path.

    The query crosses byte by byte, also where it could be written otherwise.
    """
    path, wrap = MOUNTS[mount]
    query = "a=1&b=%2F//x%7E+y&c&d=%zz&e={}|'[1]^`"
    async with raw_server([REQUEST, OK, HANG]) as worker, serve(worker.url + base, http=http, wrap=wrap) as served:
        async with served.connect() as client:
            await client.post(BODY, path=f"{path}?{query}")
            assert (await client.read_head()).status == 200
        head, _ = worker.connections[0].requests[0]
        assert head.first_line == f"POST {base}/v1/completions?{query} HTTP/1.1".encode()


async def test_root_path_of_the_server_and_of_the_app(http: Http) -> None:
    """uvicorn's own root path is in front of the path, a proxy's is not: both are told apart from the route."""
    apps: list[tuple[str, Callable[[RouterMiddleware], ASGIApp]]] = [("/api", lambda app: app), ("", behind_a_proxy)]
    for root_path, wrap in apps:
        async with raw_server([REQUEST, OK, HANG]) as worker:
            async with serve(worker, http=http, root_path=root_path, wrap=wrap) as served, served.connect() as client:
                await client.post(BODY)
                assert (await client.read_head()).status == 200
            assert worker.connections[0].requests[0][0].first_line == b"POST /v1/chat/completions HTTP/1.1"


def behind_a_proxy(app: ASGIApp) -> ASGIApp:
    """Tell the app, as FastAPI's `root_path` does, of a prefix that a proxy has removed from the path already."""

    async def tell(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "root_path": "/api"}, receive, send)

    return tell

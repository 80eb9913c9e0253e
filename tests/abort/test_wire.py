"""Owns aborts over real sockets: the worker's connection closes, and the pool is there as long as it is needed."""

from __future__ import annotations

import json

import anyio
import pytest

from asgi_router import Router, RouterMiddleware, RouterSettings
from tests.abort.calls import ABORT_PATH, request, results
from tests.instruments.asgi_client import Exchange
from tests.instruments.raw_server import HANG, REQUEST, raw_server
from tests.routed import completion_body, error_of, unreachable_app
from tests.wire.served import SOON, SSE_HEAD, TEST_LIMIT, Http, chunk, on_both_servers, serve

pytestmark = on_both_servers

KNOWS = b'{"aborted": [], "not_found": []}'
TOLD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(KNOWS), KNOWS)
HEAD = b"POST %s HTTP/1.1\r\nhost: t\r\nx-request-id: job-1\r\ncontent-length: %d\r\n\r\n%s"


def post(path: bytes, body: bytes) -> bytes:
    """A request with an id."""
    return HEAD % (path, len(body), body)


async def test_an_abort_closes_the_workers_connection(http: Http) -> None:
    """Closing its connection is what stops an engine; the client sees an error event, and the end without `[DONE]`."""
    async with (
        raw_server([REQUEST, SSE_HEAD + chunk(b"data: 1\n\n"), HANG], [REQUEST, TOLD]) as worker,
        serve(worker, http=http) as served,
        served.connect() as client,
        served.connect() as other,
    ):
        await client.send(post(b"/v1/chat/completions", completion_body()))
        assert (await client.read_head()).status == 200
        assert await client.read_chunk() == b"data: 1\n\n"
        await other.send(post(ABORT_PATH.encode(), b'{"req_ids": ["job-1"]}'))
        assert (await other.read_head()).status == 200
        with anyio.fail_after(SOON):
            await worker.connections[0].gone()
        assert b'"code": "request_aborted"' in (await client.read_chunk() or b"")
        await served.assert_released()


async def test_f32_the_worker_is_told_on_disconnect(http: Http) -> None:
    """F-32: a client that leaves is told of to its worker, on another connection."""
    async with (
        raw_server([REQUEST, HANG], [REQUEST, TOLD]) as worker,
        serve(worker, http=http, settings={"abort_on_disconnect": True}) as served,
        served.connect() as client,
    ):
        await client.send(post(b"/v1/chat/completions", completion_body()))
        await worker.connected(1)
        await worker.connections[0].received_requests(1)
        client.close()
        await worker.connected(2)
        await worker.connections[1].received_requests(1)
        ((head, body),) = worker.connections[1].requests
        assert head.first_line == f"POST {ABORT_PATH} HTTP/1.1".encode()
        assert json.loads(body) == {"req_ids": ["job-1"]}
        await served.assert_released()


@pytest.mark.usefixtures("short_graces")
async def test_the_pool_stays_while_workers_are_told(http: Http) -> None:
    """Without a lifespan the pool is closed with the last request, but not under an abort that has ended that one."""
    answer_it = anyio.Event()
    async with raw_server([REQUEST, HANG], [REQUEST, answer_it, TOLD]) as worker:
        router = Router(RouterSettings(workers=[worker.url]))
        app = RouterMiddleware(unreachable_app, router=router)
        exchange = request("job-1")
        asking = Exchange(path=ABORT_PATH, body=b'{"req_ids": ["job-1"]}')
        with anyio.fail_after(TEST_LIMIT):
            async with exchange.running(app):
                await worker.connected(1)
                await worker.connections[0].received_requests(1)
                async with asking.running(app):
                    await exchange.over()
                    await worker.connected(2)
                    await worker.connections[1].received_requests(1)
                    answer_it.set()

            assert error_of(exchange) == (410, "request_aborted")
            answered = asking.json()
            assert isinstance(answered, dict)
            assert results(answered) == [("ok", 200)]
            for connection in worker.connections:
                await connection.gone()  # and with the last of all, it is closed

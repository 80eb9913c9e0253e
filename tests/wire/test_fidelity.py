"""Owns the proof that bodies cross unchanged, chunk by chunk. Heads are in `test_heads.py`."""

from __future__ import annotations

import gzip
import random
from typing import TYPE_CHECKING

import anyio
import pytest

from tests.instruments.raw_server import HANG, REQUEST
from tests.instruments.servers import run_uvicorn
from tests.routed import completion_body
from tests.wire.served import LAST_CHUNK, OK, SSE_HEAD, Http, chunk, on_both_servers, serve, serve_scripts

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from tests.instruments.raw_server import Step

pytestmark = on_both_servers

EVERY_BYTE = bytes(range(256)) * 40

ODD_JSON = [
    b'{"prompt": "x", "stream": false, "stream": true, "seed": 9007199254740993, "t": 1.0, "u": 1E400}',
    b' \r\n\t{ "prompt" :\t"\\u00e9\\ud83d\\ude00\\/" ,"z":0.10,"a":-0 }\n\n',
    '{"prompt": "é 😀 \u2028 \u202e"}'.encode(),
    b'{"prompt": "lone \\ud800 and \\u0000"}',
    b'\xef\xbb\xbf{"prompt": "with a byte order mark"}',
    '{"prompt": "utf-16"}'.encode("utf-16"),
    completion_body("many words " * 200_000),
]


async def test_request_body_is_never_rewritten(http: Http) -> None:
    """Duplicate keys, big integers, odd white space, other encodings: the worker gets the client's own bytes."""
    script: list[Step] = [REQUEST, OK] * len(ODD_JSON)
    async with serve_scripts([*script, HANG], http=http) as (worker, _, client):
        for turn, body in enumerate(ODD_JSON):
            await client.post(body)
            assert await client.read_body(await client.read_head()) == b'{"answer":42}'
            head, received = worker.connections[0].requests[turn]
            assert received == body
            assert head.header("content-length") == [str(len(body)).encode()]


async def test_compressed_request_is_forwarded_as_it_is(http: Http) -> None:
    """A body with a content-encoding is not unpacked, whatever is in it: it may not even be what it says."""
    body = random.Random(1).randbytes(300_000)
    async with serve_scripts([REQUEST, OK, HANG], http=http) as (worker, _, client):
        await client.post(body, headers=[("content-encoding", "gzip")])
        assert (await client.read_head()).status == 200
        head, received = worker.connections[0].requests[0]
        assert received == body
        assert head.header("content-encoding") == [b"gzip"]


@pytest.mark.parametrize("sizes", [[1], [7, 1, 65536, 3, 70_000]], ids=["one byte each", "mixed"])
async def test_chunked_upload(http: Http, sizes: list[int]) -> None:
    """A body that comes in chunks of any size arrives whole, with its length, and is not chunked any more."""
    body = completion_body("é" * (100 if sizes == [1] else 100_000))
    framed, rest, turn = b"", body, 0
    while rest:
        size = sizes[turn % len(sizes)]
        framed, rest, turn = framed + chunk(rest[:size]), rest[size:], turn + 1
    async with serve_scripts([REQUEST, OK, HANG], http=http) as (worker, _, client):
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n"
        await client.send(head + framed + LAST_CHUNK)
        assert (await client.read_head()).status == 200
        forwarded, received = worker.connections[0].requests[0]
        assert received == body
        assert forwarded.header("content-length") == [str(len(body)).encode()]
        assert forwarded.header("transfer-encoding") == []


async def test_statuses_and_bodies_of_known_length(http: Http) -> None:
    """Whatever the worker answers, its status and its bytes are the client's; the length stays declared."""
    statuses = [200, 201, 299, 302, 400, 401, 404, 408, 422, 429, 500, 502, 503, 599]
    script: list[Step] = []
    for status in statuses:
        head = b"HTTP/1.1 %d Odd Reason\r\ncontent-length: %d\r\nretry-after: 7\r\nlocation: /x\r\n\r\n"
        script += [REQUEST, head % (status, len(EVERY_BYTE)) + EVERY_BYTE]
    async with serve_scripts([*script, HANG], http=http) as (worker, _, client):
        for status in statuses:
            await client.post(completion_body())
            head_seen = await client.read_head()
            assert head_seen.status == status
            assert head_seen.header("content-length") == [str(len(EVERY_BYTE)).encode()]
            assert head_seen.header("transfer-encoding") == []
            assert head_seen.header("retry-after") == [b"7"]
            assert await client.read_body(head_seen) == EVERY_BYTE
        assert len(worker.connections) == 1


async def test_answers_that_have_no_body(http: Http) -> None:
    """204 and 304 are relayed without one, whatever length they declare, and both connections go on."""
    answers = [
        (code, b"HTTP/1.1 %d No\r\netag: 1\r\n%b\r\n" % (code, length))
        for code in (204, 304)
        for length in (b"", b"content-length: 0\r\n", b"content-length: 99\r\n")
    ]
    script: list[Step] = [step for _, answer in answers for step in (REQUEST, answer)]
    async with serve_scripts([*script, REQUEST, OK, HANG], http=http) as (_, _, client):
        for status, _ in answers:
            await client.post(completion_body())
            head = await client.read_head()
            assert (head.status, head.header("etag"), head.header("content-length")) == (status, [b"1"], [])
        await client.post(completion_body())
        assert (await client.read_head()).status == 200


async def test_answer_that_ends_with_the_connection(http: Http) -> None:
    """A body of unknown length is whole when the worker closes; the client gets it chunked, with a real end."""
    scripts: list[list[Step]] = [
        [REQUEST, b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + EVERY_BYTE],
        [REQUEST, b"HTTP/1.0 200 OK\r\n\r\n" + EVERY_BYTE],
    ]
    async with serve_scripts(*scripts, http=http) as (_, _, client):
        for _ in scripts:
            await client.post(completion_body())
            head = await client.read_head()
            assert head.header("transfer-encoding") == [b"chunked"]
            assert await client.read_body(head) == EVERY_BYTE


EVENTS = [
    [b"data: a\n\n", b"data: b\n\n", b"data: [DONE]\n\n"],
    [b"data: a\r\n\r\n", b": ping\r\r", b"id: 1\r\ndata: b\r\n\r\n"],
    [b"data: a\n", b"data: b\n\nda", b"ta: no newline at the end"],
    [b"data: a\n\ndata: b\n\n", b"\n\n\n"],
    [bytes([byte]) for byte in 'data: {"é😀"}\r\n\r\n'.encode()],
]


async def test_each_chunk_arrives_before_the_next_one_is_sent(http: Http) -> None:
    """One worker chunk is one client chunk, at once: nothing is held back, joined, split or mended."""
    gates = [[anyio.Event() for _ in events] for events in EVENTS]
    script: list[Step] = []
    for events, waits in zip(EVENTS, gates, strict=True):
        script += [REQUEST, SSE_HEAD]
        for event, gate in zip(events, waits, strict=True):
            script += [chunk(event), gate]
        script += [LAST_CHUNK]
    async with serve_scripts([*script, HANG], http=http) as (_, _, client):
        for events, waits in zip(EVENTS, gates, strict=True):
            await client.post(completion_body(stream=True))
            assert (await client.read_head()).header("content-type") == [b"text/event-stream"]
            for event, gate in zip(events, waits, strict=True):
                assert await client.read_chunk() == event
                gate.set()
            assert await client.read_chunk() is None


async def test_a_line_of_twelve_megabytes(http: Http) -> None:
    """An event of any size passes; no part of the router collects lines (F-17)."""
    event = b"data: " + random.Random(2).randbytes(1_500_000).hex().encode() * 4 + b"\n\n"
    script: list[Step] = [REQUEST, SSE_HEAD, chunk(event) + chunk(b"data: [DONE]\n\n") + LAST_CHUNK, HANG]
    async with serve_scripts(script, http=http) as (_, _, client):
        await client.post(completion_body(stream=True))
        assert (await client.read_head()).status == 200
        parts = []
        while (part := await client.read_chunk()) is not None:
            parts.append(part)
        assert b"".join(parts) == event + b"data: [DONE]\n\n"


@pytest.mark.parametrize("content_type", [b"application/json", b"text/event-stream"])
async def test_compressed_answer_is_relayed_compressed(http: Http, content_type: bytes) -> None:
    """The bytes, their encoding and their length stay together; nobody unpacks (F-18).

    BerriAI/litellm#25624, #25655, #7108: unpacked bytes went out under the old encoding and length.
    """
    body = gzip.compress(b"data: [DONE]\n\n" * 5000)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\nContent-Encoding: gzip\r\ncontent-length: %d\r\n\r\n"
    script: list[Step] = [REQUEST, head % (content_type, len(body)) + body, HANG]
    async with serve_scripts(script, http=http) as (worker, _, client):
        await client.post(completion_body(), headers=[("accept-encoding", "br, gzip;q=0.5")])
        head_seen = await client.read_head()
        assert head_seen.header("content-encoding") == [b"gzip"]
        assert head_seen.header("content-length") == [str(len(body)).encode()]
        assert await client.read_body(head_seen) == body
        assert worker.connections[0].requests[0][0].header("accept-encoding") == [b"br, gzip;q=0.5"]


class StreamingWorker:
    """An ASGI worker that gives each chunk when the client has had the one before; empty ones go between."""

    def __init__(self, chunks: list[bytes]) -> None:
        self.chunks = chunks
        self.taken = [anyio.Event() for _ in chunks]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        while (await receive()).get("more_body"):
            pass
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for data, taken in zip(self.chunks, self.taken, strict=True):
            await send({"type": "http.response.body", "body": b"", "more_body": True})
            await send({"type": "http.response.body", "body": data, "more_body": True})
            await taken.wait()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def test_a_real_worker_streams_through(http: Http) -> None:
    """The same with uvicorn on both sides, and with empty messages from the worker, which are no end."""
    app = StreamingWorker([b"data: %d\n\n" % number for number in range(20)])
    async with (
        run_uvicorn(app, http=http, lifespan="off") as worker,
        serve(worker, http=http) as served,
        served.connect() as client,
    ):
        await client.post(completion_body(stream=True))
        head = await client.read_head()
        for data, taken in zip(app.chunks, app.taken, strict=True):
            assert await client.read_chunk() == data
            assert served.requests == 1
            taken.set()
        assert await client.read_chunk() is None
        assert [len(head.header(name)) for name in ("date", "server", "content-type")] == [1, 1, 1]

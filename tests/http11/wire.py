"""Owns what these tests share: a pool before a scripted worker on a real socket, and what must hold afterwards."""

from __future__ import annotations

import gc
import os
import ssl
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
import pytest

from asgi_router.upstream.http11 import Origin, Pool, request_head
from tests.instruments import asyncio_only
from tests.instruments.raw_server import RawServer, raw_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from asgi_router.upstream.http11 import Answer
    from tests.instruments.raw_server import Step

on_asyncio = [pytest.mark.anyio, asyncio_only]
"""Marks of a test that runs on asyncio and on uvloop."""

SOON = 10.0
"""Seconds within which everything that is awaited here has to happen; most of it takes milliseconds."""

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""A context that trusts nobody: loading real certificates takes 10 ms for each test."""


@dataclass(frozen=True)
class Got:
    """A whole answer."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


def head(origin: Origin, body: bytes = b"{}", method: bytes = b"POST") -> bytes:
    """Return the head of a small request."""
    return request_head(method, b"/", [(b"host", origin.authority), (b"content-length", b"%d" % len(body))])


async def fetch(pool: Pool, origin: Origin, body: bytes = b"{}", method: str = "POST") -> Got:
    """Send a request, and read its answer to the end."""
    head_bytes = head(origin, body, method.encode())
    answer = await pool.request(origin, head_bytes, body, bodiless=method == "HEAD", connect_timeout=SOON)
    return await read_all(answer)


async def read_all(answer: Answer) -> Got:
    """Read an answer to its end, and close it."""
    body = b""
    try:
        while data := await answer.read():
            body += data
    finally:
        answer.close()
    return Got(answer.status, tuple(answer.headers), body)


async def until(condition: Callable[[], bool]) -> None:
    """Return once the condition holds. For what nobody tells of, as the closing of a socket."""
    with anyio.fail_after(SOON):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await anyio.sleep(0.001)


@asynccontextmanager
async def new_pool(**options: float) -> AsyncIterator[Pool]:
    """A pool that leaves nothing behind."""
    pool = Pool(keepalive_expiry=options.get("keepalive_expiry", 3.0), max_idle=int(options.get("max_idle", 1024)))
    try:
        yield pool
        assert pool.active == 0, pool
    finally:
        await pool.aclose()
    assert (pool.active, pool.idle, pool.sockets) == (0, 0, 0), pool


@asynccontextmanager
async def served(*scripts: Sequence[Step], **options: float) -> AsyncIterator[tuple[RawServer, Pool, Origin]]:
    """A scripted worker (one script for each connection), and a pool that reaches it. No connection may survive."""
    with anyio.fail_after(SOON):
        async with raw_server(*scripts) as server:
            async with new_pool(**options) as pool:
                yield server, pool, Origin(server.url)
            for connection in server.connections:
                await connection.gone()


def descriptors() -> int:
    """How many files and sockets this process has open."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))

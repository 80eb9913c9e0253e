"""Owns the long proof that nothing is left: requests that end anywhere, from either side, by the hundred thousand.

    python -m tests.http11.disconnects --count 100000 [--seed N] [--uvloop]

Each request is cancelled natively, or its answer closed, after a random number of the loop's turns; the worker, on real
sockets, answers in pieces, and at random closes or resets instead. Prints the rate, and what was left: nothing may be.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import socket
import time
from typing import cast

from asgi_router.upstream.http11 import Http11Error, Origin, Pool
from tests.http11.wire import descriptors, head

AT_ONCE = 50
ANSWER = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
SIZES = (2, 2, 2, 20_000, 400_000)


class Worker(asyncio.Protocol):
    """Answers each request with five chunks, or leaves on the way."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"POST "):
            size, _, rest = data.partition(b"content-length: ")[2].partition(b"\r\n\r\n")
            self.left = int(size) - len(rest)
        else:
            self.left -= len(data)
        if self.left == 0:
            self.step([ANSWER, *[b"5\r\nhello\r\n"] * 5, b"0\r\n\r\n"])

    def step(self, pieces: list[bytes]) -> None:
        """Send one or more pieces, or leave."""
        if self.transport.is_closing():
            return
        if self.rng.random() < 0.01:
            if self.rng.random() < 0.5:
                sock = self.transport.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            self.transport.abort()
            return
        count = self.rng.randint(1, len(pieces))
        self.transport.write(b"".join(pieces[:count]))
        if pieces[count:]:
            asyncio.get_running_loop().call_soon(self.step, pieces[count:])


async def visit(pool: Pool, origin: Origin, rng: random.Random) -> str:
    """Send one request, and leave at some point of it."""
    body = b"x" * rng.choice(SIZES)

    async def ask() -> str:
        answer = await pool.request(origin, head(origin, body), body, connect_timeout=5.0)
        try:
            for _ in range(rng.choice([0, 1, 3, 100])):
                if not await answer.read():
                    return "whole"
        finally:
            answer.close()
        return "closed"

    task = asyncio.create_task(ask())
    for _ in range(rng.choice([0, 1, 2, 3, 5, 8, 13, 30, 30])):
        if task.done():
            break
        await asyncio.sleep(0)
    else:
        if rng.random() < 0.7:
            for _ in range(rng.randint(1, 3)):
                task.cancel()
    await asyncio.wait([task])
    if task.cancelled():
        return "cancelled"
    if (failure := task.exception()) is not None:
        assert isinstance(failure, Http11Error), failure
        return "failed"
    return task.result()


async def main(count: int, seed: int) -> None:
    """Send that many requests."""
    rng = random.Random(seed)
    outcomes: dict[str, int] = {}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Worker(rng), "127.0.0.1", 0)
    origin = Origin("http://{}:{}".format(*server.sockets[0].getsockname()))
    before = descriptors()
    began = time.monotonic()
    memory = 0
    async with asyncio.timeout(60 + count / 100):
        pool = Pool(keepalive_expiry=3.0)

        async def visits() -> None:
            nonlocal count, memory
            while count > 0:
                count -= 1
                outcome = await visit(pool, origin, rng)
                outcomes[outcome] = outcomes.get(outcome, 0) + 1
                if sum(outcomes.values()) == 5_000:
                    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(visits())
        for _ in range(5):
            await asyncio.sleep(0.01)
        assert (pool.active, pool.sockets) == (0, pool.idle), pool
        await pool.aclose()
        await asyncio.sleep(0.1)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory if memory else 0
    tasks = len(asyncio.all_tasks()) - 1
    left = descriptors() - before
    print(  # noqa: T201
        f"{outcomes}: {sum(outcomes.values()) / (time.monotonic() - began):.0f} requests/s; "
        f"left: {left} descriptors, {tasks} tasks; the largest size of the process grew by {grown} KB after 5,000"
    )
    assert (left, tasks) == (0, 0)
    server.close()
    await server.wait_closed()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--uvloop", action="store_true")
    arguments = parser.parse_args()
    run = asyncio.run
    if arguments.uvloop:
        import uvloop

        run = uvloop.run
    run(main(arguments.count, arguments.seed))

"""Owns clients that leave at moments left to chance: during the upload, before the answer, during the answer."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections import Counter

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER that makes `close` send a reset: how a client ends that is killed."""

UPLOAD_BYTES = 20_000
EVENTS, GAP_MS = 20, 5
LONGEST_WAIT = 0.01
"""Seconds after the upload within which a client leaves that doesn't wait for anything."""

PATIENCE = 30.0
"""Seconds that a client takes for all of it; more is a hang, and is counted as one."""


async def leave(port: int, clients: int, at_once: int, seed: int) -> Counter[str]:
    """Let `clients` clients ask for a completion and leave, so many of them at once.

    Half of them close their connection, half reset it.

    Returns: how many left during the upload, before the answer, during the answer, and after it; how many were refused,
    and how many hung.
    """
    rng = random.Random(seed)
    tally: Counter[str] = Counter()
    left = clients

    async def one_after_the_other() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            try:
                async with asyncio.timeout(PATIENCE):
                    tally[await _visit(port, rng, clients - left)] += 1
            except TimeoutError:
                tally["hung"] += 1
            except ConnectionError:
                tally["refused"] += 1

    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(one_after_the_other())
    return tally


async def _visit(port: int, rng: random.Random, number: int) -> str:
    loop = asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setblocking(False)
        if rng.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        await loop.sock_connect(connection, ("127.0.0.1", port))
        request = _request(port, number, stream=rng.random() < 0.7)
        moment = rng.choice(("upload", "wait", "answer"))
        if moment == "upload":
            await loop.sock_sendall(connection, request[: rng.randrange(len(request))])
            await asyncio.sleep(rng.random() * LONGEST_WAIT)
            return "during the upload"

        await loop.sock_sendall(connection, request)
        if moment == "wait":
            await asyncio.sleep(rng.random() * LONGEST_WAIT)
            try:
                return "during the answer" if connection.recv(1, socket.MSG_PEEK) else "after it was cut"
            except BlockingIOError:
                return "before the answer"

        enough = rng.randrange(1, EVENTS * 200)
        while enough > 0:
            data = await loop.sock_recv(connection, enough)
            if not data or data.endswith((b"0\r\n\r\n", b"}")):
                return "after the answer"
            enough -= len(data)
        return "during the answer"


def _request(port: int, number: int, *, stream: bool) -> bytes:
    prompt = f"{number} " + "word " * ((UPLOAD_BYTES - 300) // 5)
    messages = [{"role": "user", "content": prompt}]
    body = json.dumps(
        {"model": "mock", "stream": stream, "max_tokens": EVENTS, "seed": GAP_MS, "messages": messages},
        separators=(",", ":"),
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

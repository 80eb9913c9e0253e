"""Owns the fleet of engines that route for each other: three processes, each with `local` and its two peers."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 60.0
TOKEN = "PLANTED-PEER-TOKEN"
ADMIN = {"authorization": "Bearer admin"}
LOADED = ("requests", "prefill_tokens", "waiting_requests", "pending_prefill_tokens")


def free_ports(count: int) -> list[int]:
    """Ports that are free now, all at the same time."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


@contextmanager
def fleet() -> Iterator[list[str]]:
    """Three engines, each of which knows itself as `local` and the others by their URLs."""
    ports = free_ports(3)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    processes = []
    try:
        for port, url in zip(ports, urls, strict=True):
            settings = {
                "WORKERS": ",".join(["local", *(other for other in urls if other != url)]),
                "LOCAL_URL": url,
                "PEER_TOKEN": TOKEN,
                "DECISION_HEADERS": "true",
                "ADMIN_PREFIX": "/router",
                "ADMIN_TOKEN": "admin",
            }
            environment = {**os.environ, **{f"ASGI_ROUTER_{name}": value for name, value in settings.items()}}
            command = [sys.executable, "-m", "tests.peers.engine", str(port)]
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE))
        for url in urls:
            wait_until_up(url)
        yield urls
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=START_SECONDS)


def wait_until_up(url: str) -> None:
    """Ask until it answers."""
    limit = time.monotonic() + START_SECONDS
    while True:
        try:
            httpx.get(f"{url}/health", trust_env=False)
            return
        except httpx.TransportError:
            assert time.monotonic() < limit
            time.sleep(0.05)


def chat(number: int, question: int) -> dict[str, object]:
    """A chat with a system prompt of its own, 600 words long."""
    system = f"You are clerk number {number}. " * 120
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"Question {question}?"}]
    return {"model": "m", "messages": messages, "max_tokens": 2, "stream": question % 2 == 0}


def test_three_engines_route_for_each_other() -> None:
    """Prompts enter anywhere, each is served once, equal beginnings by the same engine; in the end nothing is left."""
    rng = random.Random(5)
    homes: dict[int, Counter[str]] = {number: Counter() for number in range(40)}
    hops: Counter[str] = Counter()
    with fleet() as urls, httpx.Client(trust_env=False, timeout=30) as client:
        asked = 0
        for question in range(4):
            for number in rng.sample(sorted(homes), len(homes)):
                entry = rng.choice(urls)
                answer = client.post(f"{entry}/v1/chat/completions", json=chat(number, question))
                assert answer.status_code == 200, answer.text
                asked += 1
                (worker,) = answer.headers.get_list("x-router-worker")  # by the router that was asked
                homes[number][entry if worker == "local" else worker] += 1
                hops["local" if worker == "local" else "peer"] += 1
                if question % 2:  # not streamed
                    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 500

        served = [client.get(f"{url}/served").json() for url in urls]
        stats = [client.get(f"{url}/router/workers", headers=ADMIN).json() for url in urls]
        # A client that makes up a hop is not believed.
        forged = client.post(
            f"{urls[0]}/v1/chat/completions", json=chat(0, 1), headers={"x-router-hop": TOKEN, "x-request-id": "7"}
        )
        assert "placed_by_peer" not in forged.headers["x-router-decision"]

    assert sum(served) == asked
    assert min(served) > 0
    assert min(hops.values()) > asked / 10
    assert [len(home) for home in homes.values()] == [1] * len(homes), homes
    for router in stats:
        assert router["exchanges"] == 0
        for worker in router["workers"]:
            assert [worker[name] for name in LOADED] == [0] * len(LOADED)


@pytest.mark.parametrize("name", ["PEER_TOKEN", "LOCAL_URL"])
def test_the_engine_starts_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of the two is needed by an engine whose workers are itself and plain engines."""
    monkeypatch.delenv(f"ASGI_ROUTER_{name}", raising=False)
    from asgi_router import Router, RouterSettings

    router = Router(RouterSettings(workers="local,http://10.0.0.2:8000"))
    assert [state.worker.url for state in router.workers] == ["local", "http://10.0.0.2:8000"]

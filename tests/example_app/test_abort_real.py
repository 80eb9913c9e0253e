"""An abort on a real worker: llama.cpp where its wheel is installed, else the simulated one, which has no slots."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx
import openai
import pytest
from starlette.applications import Starlette

from asgi_router import Router, RouterMiddleware, RouterSettings
from example_app.__main__ import worker_command
from example_app.worker_processes import free_ports, running, wait_until_healthy
from tests.instruments.servers import run_uvicorn_in_thread

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKENS = 3900
"""What the requests here ask for: all that fits into a slot, and about a second's work for llama.cpp."""

ABORT = "/v1/abort_requests"
LONG: dict[str, object] = {"model": "tiny", "prompt": "Hello", "max_tokens": TOKENS, "ignore_eos": True}


class Worker:
    """A worker in a process of its own, and what it says of its work."""

    def __init__(self, url: str, *, real: bool) -> None:
        self.url = url
        self.real = real

    def busy_slots(self) -> int:
        """How many requests it is working on now."""
        slots = httpx.get(f"{self.url}/slots", trust_env=False).json() if self.real else []
        return sum(bool(slot["is_processing"]) for slot in slots)

    def metric(self, name: str) -> float:
        """One of its own counters."""
        text = httpx.get(f"{self.url}/metrics", trust_env=False).text if self.real else f"llamacpp:{name} 0"
        (line,) = (line for line in text.splitlines() if line.startswith(f"llamacpp:{name} "))
        return float(line.split()[1])


class Fleet:
    """The worker, the router before it, and a client of that."""

    def __init__(self, worker: Worker, router: Router, http: httpx.Client) -> None:
        self.worker = worker
        self.router = router
        self.http = http
        self.outcomes: list[tuple[str, str]] = []
        router.observers.append(lambda event: self.outcomes.append((event.request_id, event.outcome)))

    def abort(self, request_id: str) -> None:
        """Abort a request that is running, and see that the worker doesn't take aborts by HTTP."""
        answer = self.http.post(ABORT, json={"req_ids": [request_id]}).json()
        assert answer == {
            "aborted": [{"request_id": request_id, "output_token_count": None}],
            "not_found": [],
            "unconfirmed": [],
            "workers": [{"result": "unsupported", "status": 404, "aborted": 0, "not_found": 0}],
        }

    def assert_free(self) -> None:
        """The worker soon has nothing to do, and the router counts nothing."""
        deadline = time.monotonic() + 10
        while (self.worker.busy_slots() or not self.outcomes) and time.monotonic() < deadline:
            pass
        assert self.worker.busy_slots() == self.worker.metric("requests_processing") == 0
        assert [(state.requests, state.prefill_tokens) for state in self.router.stats().workers] == [(0, 0)]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """One worker for all tests here."""
    command = worker_command(simulated=False)
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with running([[*command, "--host", "127.0.0.1", "--port", str(port)]]) as (process,):
        wait_until_healthy(process, url, timeout=40)
        yield Worker(url, real="example_app.llama_worker" in command)


@pytest.fixture
def fleet(worker: Worker) -> Iterator[Fleet]:
    """The router before that worker, on a real server."""
    router = Router(RouterSettings(workers=[worker.url], health_interval=0))
    with (
        run_uvicorn_in_thread(RouterMiddleware(Starlette(), router=router)) as server,
        httpx.Client(base_url=server.url, timeout=20, trust_env=False) as http,
    ):
        yield Fleet(worker, router, http)


def test_a_generation_stops_when_it_is_aborted(fleet: Fleet) -> None:
    """Aborted by its x-request-id in mid-stream: tokens stop, the slot is free, the stream ends with an error event."""
    before = fleet.worker.metric("tokens_predicted_total")
    headers = {"x-request-id": "long-1"}
    with fleet.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}, headers=headers) as answer:
        lines = answer.iter_lines()
        seen = [next(lines) for _ in range(9)]
        assert fleet.worker.busy_slots() == fleet.worker.metric("requests_processing") == int(fleet.worker.real)
        fleet.abort("long-1")
        with pytest.raises(httpx.RemoteProtocolError):  # cut, not ended: an ending would look like success
            seen.extend(lines)

    fleet.assert_free()
    written = fleet.worker.metric("tokens_predicted_total")
    assert written - before < TOKENS / 2
    assert '"code": "request_aborted"' in seen[-2]
    assert "data: [DONE]" not in seen
    assert len(seen) < TOKENS
    assert fleet.outcomes == [("long-1", "request_aborted")]


def test_the_official_client_does_not_repeat_an_aborted_request(fleet: Fleet) -> None:
    """A whole answer that is aborted is one error for OpenAI's client, which tries nothing again that is 410.

    (llama.cpp looks once a second whether somebody still waits for such an answer, and this one takes about that long.)
    """
    base = str(fleet.http.base_url).rstrip("/")
    with (
        openai.OpenAI(base_url=f"{base}/v1", api_key="any", max_retries=2, timeout=20) as sdk,
        ThreadPoolExecutor() as pool,
    ):
        asking = pool.submit(
            sdk.completions.create,
            model="tiny",
            prompt="Hello",
            max_tokens=TOKENS,
            extra_body={"ignore_eos": True},
            extra_headers={"x-request-id": "long-2"},
        )
        at_work = fleet.worker.busy_slots if fleet.worker.real else lambda: fleet.router.stats().leases
        while not at_work() and not asking.done():
            pass
        fleet.abort("long-2")
        with pytest.raises(openai.APIStatusError) as caught:
            asking.result(timeout=20)

    assert caught.value.status_code == 410
    assert caught.value.code == "request_aborted"
    fleet.assert_free()
    assert fleet.outcomes == [("long-2", "request_aborted")]


def test_the_slot_serves_the_next_request(fleet: Fleet) -> None:
    """After an abort the worker answers as ever."""
    answer = fleet.http.post("/v1/completions", json={**LONG, "max_tokens": 8})
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 8

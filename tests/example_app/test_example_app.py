"""The demonstration as its user sees it: over HTTP, by the official client, and in the terminal."""

from __future__ import annotations

import json
import signal
import socket
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from example_app.worker_processes import WorkerFailed, running, wait_until_healthy
from tests.example_app.launcher import Launcher

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHAT = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}
COMPLETION = {"model": "tiny", "max_tokens": 8, "prompt": "Hello"}
LONG_PROMPT = "A cache remembers what it has read. " * 100

every_route = pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", COMPLETION),
        ("/team/v1/chat/completions", CHAT),
        ("/team/v1/completions", COMPLETION),
    ],
)


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    """One demonstration for all tests that only talk to it."""
    with Launcher() as launcher:
        yield launcher.start()


@pytest.fixture
def http(launcher: Launcher) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=launcher.url, timeout=20, trust_env=False) as client:
        yield client


@pytest.fixture
def sdk(launcher: Launcher) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{launcher.url}/v1", api_key="any", max_retries=0, timeout=20) as client:
        yield client


# --- Over HTTP ------------------------------------------------------------------------------------------------


@every_route
def test_an_answer_comes_from_a_worker(
    launcher: Launcher, http: httpx.Client, path: str, body: dict[str, object]
) -> None:
    """A completion, on the app's own paths and on the mounted app's, is a worker's answer, and says which one's."""
    answer = http.post(path, json=body)

    assert answer.status_code == 200
    assert answer.headers["x-router-worker"] in launcher.workers
    assert answer.json()["usage"]["completion_tokens"] >= 1


@every_route
def test_a_stream_comes_from_a_worker(
    launcher: Launcher, http: httpx.Client, path: str, body: dict[str, object]
) -> None:
    """A streamed completion arrives as server-sent events and ends as OpenAI's streams do."""
    with http.stream("POST", path, json={**body, "stream": True}) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]

    assert answer.status_code == 200
    assert answer.headers["x-router-worker"] in launcher.workers
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert len(events) > 2
    assert all(json.loads(event)["choices"] for event in events[:-1])
    assert events[-1] == "[DONE]"


def test_a_repeated_prompt_finds_the_cache(http: httpx.Client) -> None:
    """The same long prompt goes to the same worker again, and that worker has nearly all of it in its cache."""
    body = {**COMPLETION, "prompt": LONG_PROMPT}
    first, second = (http.post("/v1/completions", json=body) for _ in range(2))

    assert second.headers["x-router-worker"] == first.headers["x-router-worker"]
    usage = second.json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 1 > 500


def test_the_other_routes_belong_to_the_app(http: httpx.Client) -> None:
    """What is no completion is answered by the host app, and by the app mounted in it, with no worker involved."""
    assert "POST /v1/completions" in http.get("/").json()["routed"]
    assert http.get("/healthz").json() == {"status": "ok"}
    assert http.get("/team/about").json() == {"app": "team"}
    assert http.get("/v1/models").status_code == 404
    assert "x-router-worker" not in http.get("/").headers


def test_a_browser_of_this_machine_may_call(http: httpx.Client) -> None:
    """CORS is the host app's matter: pages of this machine may read answers, others not, whatever workers say."""
    allowed = http.post("/v1/completions", json=COMPLETION, headers={"origin": "http://localhost:3000"})
    foreign = http.post("/v1/completions", json=COMPLETION, headers={"origin": "https://elsewhere.example"})

    assert allowed.headers.get_list("access-control-allow-origin") == ["http://localhost:3000"]
    assert allowed.headers["access-control-expose-headers"] == "x-router-worker"
    assert "access-control-allow-origin" not in foreign.headers


# --- By the official client -----------------------------------------------------------------------------------


def test_the_openai_client_reads_chat_completions(sdk: openai.OpenAI) -> None:
    """The official client gets a chat answer in one piece."""
    answer = sdk.chat.completions.create(model="tiny", max_tokens=8, messages=[{"role": "user", "content": "Hello"}])

    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.completion_tokens >= 1


def test_the_openai_client_reads_chat_streams(sdk: openai.OpenAI) -> None:
    """The official client gets a chat answer as a stream, up to its finish reason and its usage."""
    with sdk.chat.completions.create(
        model="tiny",
        max_tokens=8,
        messages=[{"role": "user", "content": "Hello"}],
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)

    finish_reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert finish_reasons[-1] in ("length", "stop")
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens >= 1


def test_the_openai_client_reads_completions(sdk: openai.OpenAI) -> None:
    """The official client gets a plain completion in one piece."""
    answer = sdk.completions.create(model="tiny", max_tokens=8, prompt="Hello")

    assert answer.choices[0].finish_reason in ("length", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens >= 1


def test_the_openai_client_reads_completion_streams(sdk: openai.OpenAI) -> None:
    """The official client gets a plain completion as a stream."""
    with sdk.completions.create(model="tiny", max_tokens=8, prompt="Hello", stream=True) as stream:
        chunks = list(stream)

    assert len(chunks) > 1
    assert chunks[-1].choices[0].finish_reason in ("length", "stop")


# --- Counters -------------------------------------------------------------------------------------------------


def test_the_counters_return_to_zero(http: httpx.Client) -> None:
    """After answers, a refusal, and a client that leaves in the middle of a stream, nothing is in flight."""
    http.post("/v1/chat/completions", json=CHAT).raise_for_status()
    assert http.post("/v1/completions", content=b"no JSON").status_code == 400
    with http.stream("POST", "/v1/completions", json={**COMPLETION, "max_tokens": 400, "stream": True}) as answer:
        next(answer.iter_bytes())

    # The app hears of the client's leaving a moment later than the client left.
    deadline = time.monotonic() + 10
    while (left := in_flight(http)) and time.monotonic() < deadline:
        pass
    assert left == 0


def in_flight(http: httpx.Client) -> int:
    stats = http.get("/router-stats").json()
    assert len(stats["workers"]) == 2
    counters = ("requests", "prefill_tokens", "waiting_requests", "pending_prefill_tokens")
    return int(stats["exchanges"]) + sum(int(worker[name]) for worker in stats["workers"] for name in counters)


# --- In the terminal ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_of_it(signal_number: signal.Signals) -> None:
    """Ctrl-C or SIGTERM ends launcher and workers: the pipe that they share is at its end, the ports are free."""
    with Launcher() as launcher:
        launcher.start()
        assert len(launcher.workers) == 2

        assert launcher.end(signal_number) == 0
        assert launcher.output.endswith("Stopped: the app and its workers have ended.\n")
        assert all(falls_silent(url) for url in (launcher.url, *launcher.workers))


@pytest.mark.parametrize("arguments", [[], ["--simulated"]], ids=["llama.cpp", "simulated"])
def test_workers_end_with_a_killed_launcher(arguments: list[str]) -> None:
    """`kill -9` on the launcher leaves it no time to stop its workers, and they end all the same."""
    with Launcher(*arguments) as launcher:
        launcher.start()
        assert len(launcher.workers) == 2

        assert launcher.end(signal.SIGKILL) == -signal.SIGKILL
        assert all(falls_silent(url) for url in launcher.workers)


def falls_silent(url: str) -> bool:
    """Tell whether nobody listens at `url`, now or soon: a dying process closes its files one after the other."""
    address = urlsplit(url)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            socket.create_connection((address.hostname or "", address.port or 0), timeout=5).close()
        except ConnectionRefusedError:
            return True

    return False


def test_a_busy_port_is_one_clear_line() -> None:
    """When the port is taken, the launcher says so in one line and starts nothing."""
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with Launcher("--port", str(port)) as launcher:
            assert launcher.end() == 1

    assert launcher.output == f"Can't listen on 127.0.0.1:{port}: Address already in use. Try --port N.\n"


def test_wrong_settings_are_one_clear_line() -> None:
    """A mistake in the router's environment ends the launcher with the variable's name, and without a traceback."""
    with Launcher("--simulated", environment={"ASGI_ROUTER_POLICY": "round_robbin"}) as launcher:
        assert launcher.end() == 1

    assert "ASGI_ROUTER_POLICY" in launcher.output
    assert "Traceback" not in launcher.output


def test_without_the_wheel_the_workers_are_simulated(tmp_path: Path) -> None:
    """Where llama.cpp can't be imported, the demonstration runs on simulated workers and says so."""
    (tmp_path / "xllamacpp.py").write_text("raise ImportError('no wheel for this platform')")
    with Launcher(environment={"PYTHONPATH": str(tmp_path)}) as launcher:
        launcher.start()
        answer = httpx.post(f"{launcher.url}/v1/completions", json=COMPLETION, trust_env=False)

    assert "no wheel for this platform" in launcher.output
    assert "Workers: simulated." in launcher.output
    assert answer.json()["model"] == "simulated"


def test_keys_in_the_environment_close_the_app() -> None:
    """With EXAMPLE_API_KEYS set, a completion needs one of the keys, and the launcher doesn't print them."""
    with Launcher("--simulated", environment={"EXAMPLE_API_KEYS": "key-one,key-two"}) as launcher:
        launcher.start()
        with httpx.Client(base_url=launcher.url, trust_env=False) as http:
            refused = http.post("/v1/completions", json=COMPLETION)
            answered = http.post("/v1/completions", json=COMPLETION, headers={"authorization": "Bearer key-two"})

    assert refused.status_code == 401
    assert answered.status_code == 200
    assert "key-one" not in launcher.output
    assert "key-two" not in launcher.output


def test_a_worker_that_dies_at_once_is_told() -> None:
    """A worker that ends before it is ready is reported with its exit code, not waited for."""
    dying = [sys.executable, "-c", "raise SystemExit(3)"]
    with running([dying]) as (process,), pytest.raises(WorkerFailed, match="exit code 3"):
        wait_until_healthy(process, "http://127.0.0.1:1", timeout=20)


def test_a_worker_that_is_never_ready_is_told() -> None:
    """A worker that lives but does not answer is given up at the deadline, and stopped."""
    silent = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with running([silent]) as (process,), pytest.raises(WorkerFailed, match="not ready"):
        wait_until_healthy(process, "http://127.0.0.1:1", timeout=0.2)

    assert process.returncode == -signal.SIGTERM

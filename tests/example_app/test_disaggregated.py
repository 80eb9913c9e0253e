"""`scripts/run --disaggregated` as its user sees it: one simulated worker prefills, and one of two others decodes."""

from __future__ import annotations

import json
import re
import signal
import time
from typing import TYPE_CHECKING

import httpx
import pytest

from example_app.__main__ import PAIR
from tests.example_app.launcher import Launcher
from tests.example_app.test_example_app import CHAT, COMPLETION, falls_silent

if TYPE_CHECKING:
    from collections.abc import Iterator

SECONDS = 20
WORDS = 40
PROMPT = {**COMPLETION, "prompt": "word " * WORDS}


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher("--disaggregated") as launcher:
        yield launcher.start()


@pytest.fixture
def http(launcher: Launcher) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=launcher.url, timeout=SECONDS, trust_env=False) as client:
        yield client


def test_it_says_what_is_real(launcher: Launcher) -> None:
    """There are three workers, by their roles; that no model is behind them is said first of all."""
    assert launcher.output.startswith("llama.cpp can't prefill and decode apart.")
    assert launcher.output.index("Workers: simulated.") < launcher.output.index("Ready:")
    assert re.findall(r"simulated (\w+) worker", launcher.output).count("decode") == 2
    assert re.findall(r"simulated (\w+) worker", launcher.output).count("prefill") == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/team/v1/completions"])
def test_two_workers_serve_a_request(launcher: Launcher, http: httpx.Client, path: str) -> None:
    """An answer comes from a decode worker, which has the whole prompt from the prefill worker."""
    prefill = re.findall(r"simulated prefill worker.*: (http://\S+)", launcher.output)
    for _ in range(2):
        answer = http.post(path, json=PROMPT).raise_for_status()

        assert [answer.headers["x-router-prefill-url"]] == prefill
        assert answer.headers["x-router-decode-url"] in set(launcher.workers) - set(prefill)
        usage = answer.json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (WORDS, 8)
        assert usage["prompt_tokens_details"]["cached_tokens"] == WORDS


def test_an_answer_as_a_stream(http: httpx.Client) -> None:
    """A stream with its usage arrives as from one worker."""
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["usage"]["completion_tokens"] == 8


def test_the_command_that_it_shows_works(launcher: Launcher, http: httpx.Client) -> None:
    """What it prints to try finds, in the answer that it asks for, both workers and what was handed over."""
    command = PAIR.format(url=launcher.url, key="")
    shown = re.search(r"(/v1/\S+) .*-d '(.*?)'.*-oE '(.*)'", command, re.DOTALL)
    assert shown is not None
    path, body, pattern = shown.groups()
    answer = http.post(path, content=body)
    text = "".join(f"{name}: {value}\n" for name, value in answer.headers.items()) + answer.text
    found = [match[0] for match in re.finditer(pattern.replace("[^[:space:]]", r"\S"), text)]

    assert [line.partition(":")[0] for line in sorted(found)] == [
        '"cached_tokens"',
        "x-router-decode-url",
        "x-router-prefill-url",
    ]
    assert not found[-1].endswith(" 0")


def test_the_counters_return_to_zero(http: httpx.Client) -> None:
    """After answers and a client that leaves in the middle of a stream, nothing is in flight on any worker."""
    http.post("/v1/chat/completions", json=CHAT).raise_for_status()
    with http.stream("POST", "/v1/completions", json={**COMPLETION, "max_tokens": 400, "stream": True}) as answer:
        next(answer.iter_bytes())

    deadline = time.monotonic() + SECONDS
    while (left := in_flight(http)) and time.monotonic() < deadline:
        pass
    assert left == 0


def in_flight(http: httpx.Client) -> int:
    stats = http.get("/router-stats").json()
    assert [worker["role"] for worker in stats["workers"]].count("decode") == 2
    counters = ("requests", "prefill_tokens", "waiting_requests", "pending_prefill_tokens")
    return int(stats["exchanges"]) + sum(int(worker[name]) for worker in stats["workers"] for name in counters)


def test_ctrl_c_stops_all_of_it() -> None:
    """One signal ends the app and all three workers."""
    with Launcher("--disaggregated") as launcher:
        launcher.start()
        assert len(launcher.workers) == 3

        assert launcher.end(signal.SIGINT) == 0
        assert all(falls_silent(url) for url in (launcher.url, *launcher.workers))

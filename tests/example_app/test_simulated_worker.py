"""The simulated worker on its own: what it remembers, what it says, and that it says what it is."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from starlette.testclient import TestClient

from asgi_router.fleet.load_text import read_load
from asgi_router.scheduling.remote_load import Load
from example_app.simulated_worker import PrefixCache, create_app

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT = "one two three four five six seven eight"


@pytest.fixture
def http() -> Iterator[TestClient]:
    with TestClient(create_app()) as client:
        yield client


def cached_tokens(http: TestClient, prompt: str) -> int:
    usage = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}).json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_cached_tokens_rise_with_what_is_known(http: TestClient) -> None:
    """Tokens count as cached from the prompt's start up to the first that differs; the last is always computed."""
    assert cached_tokens(http, PROMPT) == 0
    assert cached_tokens(http, PROMPT) == 7
    assert cached_tokens(http, f"{PROMPT} nine ten") == 8
    assert cached_tokens(http, "one two THREE four five") == 2
    assert cached_tokens(http, "two three four") == 0


def test_two_workers_share_nothing(http: TestClient) -> None:
    """Each worker has a cache of its own: what one has read, the other has not."""
    cached_tokens(http, PROMPT)
    with TestClient(create_app()) as other:
        assert cached_tokens(other, PROMPT) == 0


def test_the_cache_forgets_the_least_recently_used() -> None:
    """A full cache drops what was not used for longest: another prompt, and of that one the tail."""
    cache = PrefixCache(capacity=6)
    for prompt in ("a b c", "x y z", "a b c", "p q"):
        cache.read(prompt.split())

    assert cache.read(["a", "b", "c", "!"]) == 3
    assert cache.read(["x", "y", "z", "!"]) == 0


def test_a_prompt_is_forgotten_from_its_end() -> None:
    """What is left of a prompt that is being dropped is its start, the only part that is still of use."""
    cache = PrefixCache(capacity=4)
    for prompt in ("a b c", "x y"):
        cache.read(prompt.split())

    assert cache.read(["a", "b", "c", "!"]) == 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 3}),
    ],
)
def test_every_answer_says_that_it_is_simulated(http: TestClient, path: str, body: dict[str, object]) -> None:
    """Model, fingerprint and text say it, whatever model was asked for, streamed or in one piece."""
    body = {"model": "tiny", **body}
    whole = http.post(path, json=body).json()
    stream = http.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}}).text
    *events, end, nothing = stream.split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]

    assert "Simulated" in json.dumps(whole["choices"])
    for answer in (whole, *chunks):
        assert answer["model"] == answer["system_fingerprint"] == "simulated"
    assert (end, nothing) == ("data: [DONE]", "")
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("body", [b"", b"no JSON", b"[]", b"{}", b'{"prompt": "x", "max_tokens": "many"}'])
def test_a_bad_request_is_refused(http: TestClient, body: bytes) -> None:
    """What can't be read is a 400 in OpenAI's shape."""
    answer = http.post("/v1/completions", content=body)

    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_it_is_healthy_and_names_its_model(http: TestClient) -> None:
    """The routes that launchers and clients ask first are there."""
    assert http.get("/health").status_code == 200
    assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["simulated"]


def test_it_tells_how_busy_it_is(http: TestClient) -> None:
    """Its metrics count the completions that are being answered, by llama.cpp's names, and go back to none."""
    assert read_load(http.get("/metrics").content) == Load(0, 0)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(http.post, "/v1/completions", json={"prompt": PROMPT, "max_tokens": 512})
        while read_load(http.get("/metrics").content) != Load(1, 0):
            assert not answer.done()
    assert read_load(http.get("/metrics").content) == Load(0, 0)


def test_it_hands_a_prompt_over_once(http: TestClient) -> None:
    """Asked to prefill, it says where the prompt is to be had, and gives it away to the first who comes."""
    answer = http.post("/v1/completions", json={"prompt": PROMPT, "kv_transfer_params": {"do_remote_decode": True}})
    where = answer.json()["kv_transfer_params"]
    key = where["remote_request_id"]

    assert (where["remote_host"], where["remote_port"]) == ("testserver", 80)
    assert http.get(f"/kv/{key}").json() == {"tokens": 8}
    assert http.get(f"/kv/{key}").status_code == 404


@pytest.mark.parametrize("where", [{}, {"remote_host": "]", "remote_port": 1}, {"remote_request_id": []}])
def test_what_is_not_handed_over_is_computed(http: TestClient, where: dict[str, object]) -> None:
    """A decode worker that can't fetch the prompt reads it itself, as it does when it was told nothing."""
    params = {"do_remote_prefill": True, "remote_request_id": "k", **where}
    answer = http.post("/v1/completions", json={"prompt": PROMPT, "kv_transfer_params": params})

    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_what_nobody_fetches_is_not_kept_for_ever(http: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only so many prompts wait to be fetched: the oldest go first."""
    monkeypatch.setattr("example_app.simulated_hand_over.MOST_KEPT", 1)
    body = {"prompt": PROMPT, "kv_transfer_params": {"do_remote_decode": True}}
    first, second = (http.post("/v1/completions", json=body).json()["kv_transfer_params"] for _ in range(2))

    assert http.get(f"/kv/{first['remote_request_id']}").status_code == 404
    assert http.get(f"/kv/{second['remote_request_id']}").status_code == 200

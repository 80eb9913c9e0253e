"""Owns the proof that workers are read from text, JSON and Python alike, and refused when they can't serve."""

from __future__ import annotations

import json

import pytest

from asgi_router.settings import RouterSettings, SettingsError
from asgi_router.worker import Role, Worker
from tests.test_settings import from_environment, refusal


@pytest.mark.parametrize(
    ("text", "urls"),
    [
        ("http://a:1", ["http://a:1"]),
        ("http://a:1, b:2 ,https://c/base/", ["http://a:1", "http://b:2", "https://c/base"]),
        ("http://a:1,,", ["http://a:1"]),
        (" , ", []),
        ("[::1]:8000,[fe80::1]:8000", ["http://[::1]:8000", "http://[fe80::1]:8000"]),
        ("[]", []),
        (' ["http://a:1", {"url": "b:2"}] ', ["http://a:1", "http://b:2"]),
    ],
)
def test_workers_are_read_from_text(text: str, urls: list[str]) -> None:
    """Workers come as a comma list or as a JSON list; items without text are left out."""
    assert [worker.url for worker in from_environment(workers=text).workers] == urls
    assert [worker.url for worker in RouterSettings(workers=text).workers] == urls


def test_workers_are_taken_from_python() -> None:
    """A list may mix URLs, mappings and workers, and a worker in it stays the same object."""
    worker = Worker(url="http://c:3", models=("m",))
    settings = RouterSettings(workers=["a:1", {"url": "b:2", "role": Role.MIXED}, worker])
    assert settings.workers == (Worker(url="http://a:1"), Worker(url="http://b:2"), worker)
    assert settings.workers[2] is worker
    assert RouterSettings(workers=(worker,)).workers == (worker,)


def test_worker_object_takes_every_registration_field() -> None:
    """An object sets all fields of a worker, with ports as numbers or text and lists turned into text."""
    item = {
        "url": "10.0.0.1:8000",
        "role": "Mixed",
        "models": ["llama", "qwen"],
        "connector_port": 8001,
        "engine_worker_queue_port": "8002",
        "metrics_port": " 8003 ",
        "transfer_protocol": ["ipc", "rdma"],
        "rdma_ports": [9001, "9002"],
        "device_ids": ["0", 1],
        "tp_size": 2,
        "slots": "4",
    }
    expected = Worker(
        url="http://10.0.0.1:8000",
        role=Role.MIXED,
        models=("llama", "qwen"),
        connector_port=8001,
        engine_worker_queue_port=8002,
        metrics_port=8003,
        transfer_protocol=("ipc", "rdma"),
        rdma_ports=("9001", "9002"),
        device_ids=("0", "1"),
        tp_size=2,
        slots=4,
    )
    assert from_environment(workers=json.dumps([item])).workers == (expected,)
    assert RouterSettings(workers=[item]).workers == (expected,)


@pytest.mark.parametrize("key", ["connector_port", "engine_worker_queue_port", "metrics_port", "tp_size", "slots"])
@pytest.mark.parametrize("value", [0, "0", "", " ", None])
def test_zero_and_empty_ports_are_unset(key: str, value: object) -> None:
    """A port that an engine registers as 0, "0" or empty is one it doesn't have (F-86)."""
    assert RouterSettings(workers=[{"url": "a", key: value}]).workers == (Worker(url="http://a"),)


@pytest.mark.parametrize("key", ["models", "transfer_protocol", "rdma_ports", "device_ids"])
def test_null_list_is_empty(key: str) -> None:
    """FastDeploy writes lists that it doesn't have as null (F-88)."""
    assert RouterSettings(workers=[{"url": "a", key: None}]).workers == (Worker(url="http://a"),)


@pytest.mark.parametrize("role", ["mixed", "MIXED", " Mixed ", 0, Role.MIXED])
def test_mixed_role_by_name_or_number(role: object) -> None:
    """The mixed role is known by its name in any case and by its number."""
    assert RouterSettings(workers=[{"url": "a", "role": role}]).workers[0].role is Role.MIXED


@pytest.mark.parametrize(
    ("role", "name"), [("prefill", "prefill"), ("Decode", "decode"), (1, "prefill"), (2, "decode")]
)
def test_mixed_mode_refuses_other_roles(role: object, name: str) -> None:
    """In mixed mode a prefill or decode worker is refused, with its URL, its role and the mode."""
    message = refusal("workers", ["http://a:1", {"url": "http://b:2", "role": role}])
    assert "http://b:2" in message
    assert "http://a:1" not in message
    assert name in message
    assert "the mode is mixed" in message


def test_mixed_mode_refuses_other_roles_of_ready_workers() -> None:
    """A worker made in Python is held to the mode too."""
    assert "the mode is mixed" in refusal("workers", [Worker(url="b", role=Role.DECODE)])


def test_role_is_not_held_against_a_wrong_mode() -> None:
    """Where the mode itself is refused, a prefill worker isn't reported as a second mistake."""
    with pytest.raises(SettingsError) as caught:
        RouterSettings(mode="disagregated", workers=[{"url": "a", "role": "prefill"}])

    assert str(caught.value).startswith("ASGI_ROUTER_MODE: ")
    assert "WORKERS" not in str(caught.value)


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({}, "url"),
        ({"role": "mixed"}, "url"),
        ({"url": None}, "url must be a string"),
        ({"url": 8000}, "url must be a string"),
        ({"url": ""}, "a worker URL must be like"),
        ("ftp://a", "a worker URL must be like"),
        ("http://a:99999", "port"),
        ("http://a b", "a worker URL must be like"),
        (8000, "a URL or an object"),
        (None, "a URL or an object"),
        (["a"], "a URL or an object"),
        ({"url": "a", "role": None}, "role must be"),
        ({"url": "a", "role": ""}, "role must be"),
        ({"url": "a", "role": "both"}, "role must be"),
        ({"url": "a", "role": 3}, "role must be"),
        ({"url": "a", "role": -1}, "role must be"),
        ({"url": "a", "role": True}, "role must be"),
        ({"url": "a", "role": 1.0}, "role must be"),
        ({"url": "a", "role": "1"}, "role must be"),
        ({"url": "a", "metrics_port": 65536}, "metrics_port must be"),
        ({"url": "a", "metrics_port": "65536"}, "metrics_port must be"),
        ({"url": "a", "metrics_port": -1}, "metrics_port must be"),
        ({"url": "a", "metrics_port": "-1"}, "metrics_port must be"),
        ({"url": "a", "metrics_port": "http"}, "metrics_port must be"),
        ({"url": "a", "metrics_port": "9" * 5000}, "metrics_port must be"),
        ({"url": "a", "metrics_port": True}, "metrics_port must be"),
        ({"url": "a", "metrics_port": 8000.0}, "metrics_port must be"),
        ({"url": "a", "tp_size": "two"}, "tp_size must be"),
        ({"url": "a", "slots": "two"}, "slots must be a whole number from 1 to 256"),
        ({"url": "a", "slots": 257}, "slots must be a whole number from 1 to 256"),
        ({"url": "a", "slots": -1}, "slots must be a whole number from 1 to 256"),
        ({"url": "a", "slots": True}, "slots must be a whole number from 1 to 256"),
        ({"url": "a", "models": "llama"}, "models must be a list"),
        ({"url": "a", "models": [""]}, "models must be a list"),
        ({"url": "a", "device_ids": [True]}, "device_ids must be a list"),
        ({"url": "a", "device_ids": [1.5]}, "device_ids must be a list"),
        ({"url": "a", "device_ids": [None]}, "device_ids must be a list"),
        ({"url": "a", "device_ids": {"0": 1}}, "device_ids must be a list"),
        ({"url": "a", "rol": "mixed"}, "unknown key 'rol'; did you mean role?"),
        ({"url": "a", "zzz": 1}, "unknown key 'zzz'"),
        ({"url": "a", 7: 1}, "unknown key 7"),
    ],
)
def test_bad_worker_is_refused(item: object, words: str) -> None:
    """A worker that can't be understood is refused with its place in the list and what is wrong."""
    message = refusal("workers", ["http://fine:1", item])
    assert "item 2: " in message
    assert "item 1: " not in message
    assert words in message


def test_all_mistakes_of_a_worker_are_reported() -> None:
    """Each wrong key of each worker has a line of its own."""
    message = refusal("workers", [{"url": "a", "rol": 1, "metrics_port": "x"}, {"url": "b", "role": None}])
    assert [line.split(": ")[1] for line in message.split("\n")] == ["item 1", "item 1", "item 2"]


@pytest.mark.parametrize("twin", ["http://a:1", "a:1", "HTTP://A:1/", {"url": "http://a:1", "models": ["m"]}])
def test_duplicated_url_is_refused(twin: object) -> None:
    """Two workers with one URL, however it is written, are a mistake: they would share one set of counters."""
    message = refusal("workers", ["http://b:2", "http://a:1", twin])
    assert message == "ASGI_ROUTER_WORKERS: item 3: 'http://a:1' is there twice"


@pytest.mark.parametrize("field", ["workers", "paths"])
@pytest.mark.parametrize(
    "value",
    [
        None,
        5,
        {"url": "a"},
        {"/a"},
        '{"url": "http://a"}',
        "[",
        '["/a"',
        pytest.param("[" * 100_000, id="deep"),
        pytest.param("[1" + "0" * 5000, id="huge"),
    ],
)
def test_what_is_no_list_is_refused(field: str, value: object) -> None:
    """Neither broken JSON nor another type passes for a list, and the text isn't repeated."""
    message = refusal(field, value)
    assert "list" in message or "not valid JSON" in message
    assert "url" not in message
    assert len(message) < 300

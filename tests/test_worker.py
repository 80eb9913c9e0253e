"""Owns the proof that a worker is described by one spelling of a plain http(s) base URL."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import pytest

from asgi_router.worker import Role, Worker, normalise_url


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://a", "http://a"),
        ("http://a/", "http://a"),
        ("http://a:8000", "http://a:8000"),
        ("https://a:8443//", "https://a:8443"),
        ("a:8000", "http://a:8000"),
        ("localhost", "http://localhost"),
        ("10.0.0.1:8000/base/", "http://10.0.0.1:8000/base"),
        ("  http://a:1\n", "http://a:1"),
        ("HTTP://Worker-1.Example:8000", "http://worker-1.example:8000"),
        ("http://a/Base/Path", "http://a/Base/Path"),
        ("http://a:80", "http://a"),
        ("http://a:0080/", "http://a"),
        ("https://a:443/base", "https://a/base"),
        ("https://a:80", "https://a:80"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("[FE80::1]:8000", "http://[fe80::1]:8000"),
        ("[0:0::1]:8000", "http://[::1]:8000"),
        ("http://my_worker:65535", "http://my_worker:65535"),
    ],
)
def test_url_has_one_spelling(url: str, expected: str) -> None:
    """A URL gets its scheme and a lower-case host and loses its last slash; doing it twice changes nothing."""
    assert normalise_url(url) == expected
    assert normalise_url(expected) == expected
    assert Worker(url=url).url == expected


@pytest.mark.parametrize(
    "url",
    [
        "",
        "   ",
        "http://",
        "http:///path",
        "http://:8000",
        "/path",
        "http://a:0",
        "http://a:65536",
        "http://a:-1",
        "http://a:http",
        "http://a:1:2",
        "::1:8000",
        "http://[::1",
        "http://[zz]:1",
        "ftp://a",
        "unix:///run/worker.sock",
        "http://a?b=c",
        "http://a/?",
        "http://a#b",
        "http://a/#",
        "http://a b",
        "http://ho\u017ft",
        "http\u017f://a",
        "http://a\t:1",
        "http://a\r\nx:y",
        "http://a/\x00",
        "http://a\\b",
        "http://a:",
        "http:/a:8000",
        "http://[::1]x:80",
        "http://{host}:1",
        "http://$HOST:1",
        "http://\uff41",
        "http://a/\ud800",
        "http://a/\u00e9",
        "http://user:8/s@cret",
        "http://a:99999999",
        "http://300.1.1.1",
        "http://1.2.3",
        "http://a:8000/v1",
        "http://a:8000/base/v1/",
    ],
)
def test_what_is_no_base_url_is_refused(url: str) -> None:
    """Whatever can't be the beginning of a request's URL is refused, and not repeated."""
    with pytest.raises(ValueError, match="worker URL") as caught:
        Worker(url=url)

    assert caught.value.__cause__ is None
    assert len(url) < 8 or url not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://bob:hunter2@a:1",
        "bob:hunter2@a",
        "http://hunter2@a",
        "http://:hunter2@a",
        "http://b:hunter2@a:x",
        "http://u:8?hunter2@host",
        "http:///u:hunter2@h",
        "http://user:8/hunter2@host",
        "http://a?key=hunter2",
    ],
)
def test_user_info_is_refused_and_not_repeated(url: str) -> None:
    """A URL with a user name or password is refused, and neither is in the message."""
    with pytest.raises(ValueError, match="worker URL") as caught:
        normalise_url(url)

    assert "hunter2" not in str(caught.value)


def test_only_the_url_is_needed() -> None:
    """A worker is mixed, serves every model and has no registration data unless told otherwise."""
    assert dataclasses.asdict(Worker(url="a")) == {
        "url": "http://a",
        "role": Role.MIXED,
        "models": (),
        "connector_port": None,
        "engine_worker_queue_port": None,
        "metrics_port": None,
        "transfer_protocol": (),
        "rdma_ports": (),
        "device_ids": (),
        "tp_size": None,
        "slots": None,
    }


def test_roles_are_their_names() -> None:
    """A role equals its name, so that it can be written to JSON and labels as it is."""
    assert [str(role) for role in Role] == ["mixed", "prefill", "decode"]
    assert json.dumps([Role.PREFILL]) == '["prefill"]'


def test_role_given_by_name_becomes_a_role() -> None:
    """A role read from somewhere as text becomes the member; another text is refused."""
    fields = {"url": "a", "role": "decode"}
    assert Worker(**fields).role is Role.DECODE  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="both"):
        Worker(**{**fields, "role": "both"})  # type: ignore[arg-type]


def test_one_model_name_is_no_list_of_models() -> None:
    """A text would be searched for the model's name as a part of it."""
    with pytest.raises(ValueError, match="models"):
        Worker(url="a", models="gpt")  # type: ignore[arg-type]


@pytest.mark.parametrize("slots", [0, -1, 257])
def test_slots_are_as_many_as_an_engine_can_have(slots: int) -> None:
    """A worker has from 1 to 256 of them, or none that are known."""
    assert [Worker(url="a", slots=right).slots for right in (1, 256, None)] == [1, 256, None]
    with pytest.raises(ValueError, match="slots must be from 1 to 256"):
        Worker(url="a", slots=slots)


def test_workers_are_values() -> None:
    """Equal descriptions are equal and hash alike; a changed copy is checked again; nothing can be assigned."""
    worker = Worker(url="http://a:1", models=("m",))
    assert len({worker, Worker(url="a:1/", models=("m",)), Worker(url="a:1")}) == 2
    assert [pickle.loads(pickle.dumps(worker)), copy.deepcopy(worker)] == [worker, worker]
    assert dataclasses.replace(worker, url="B:2").url == "http://b:2"
    with pytest.raises(dataclasses.FrozenInstanceError):
        worker.url = "http://b:2"  # type: ignore[misc]

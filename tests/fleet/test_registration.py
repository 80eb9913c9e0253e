"""Owns the proof that FastDeploy's registration is read as its engines send it, and refused with the reason."""

from __future__ import annotations

import json
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from asgi_router.fleet.registration import RegistrationError, read_registration
from asgi_router.worker import Role, Worker

ENGINE: dict[str, object] = {
    "role": "mixed",
    "host_ip": "10.0.0.5",
    "port": "8180",
    "metrics_port": 8181,
    "connector_port": "8182",
    "engine_worker_queue_port": 8183,
    "transfer_protocol": ["ipc", "rdma"],
    "rdma_ports": [7671, "7672"],
    "device_ids": ["0", "1"],
    "tp_size": 2,
    "version": "2.3.0",
    "is_paused": False,
    "connected_decodes": [],
}
"""What a FastDeploy engine sends, with all that only its newer or older versions have."""
LEAST: dict[str, object] = {"role": "mixed", "host_ip": "10.0.0.5", "port": 8180}
MISSING = object()


def read(mode: str = "mixed", /, **changes: object) -> Worker:
    """Read the least payload there is, with changes."""
    payload = {name: value for name, value in (LEAST | changes).items() if value is not MISSING}
    return read_registration(json.dumps(payload).encode(), mode=mode)


def reason(mode: str = "mixed", /, **changes: object) -> str:
    """Return why the least payload, with changes, is refused."""
    with pytest.raises(RegistrationError) as caught:
        read(mode, **changes)
    return str(caught.value)


def test_engine_as_it_registers() -> None:
    """Every field that an engine sends is kept, and what we don't know is ignored."""
    assert read_registration(json.dumps(ENGINE).encode(), mode="mixed") == Worker(
        url="http://10.0.0.5:8180",
        metrics_port=8181,
        connector_port=8182,
        engine_worker_queue_port=8183,
        transfer_protocol=("ipc", "rdma"),
        rdma_ports=("7671", "7672"),
        device_ids=("0", "1"),
        tp_size=2,
    )


def test_least_that_can_be_registered() -> None:
    """Role, host and port suffice; metrics are on the same port."""
    assert read() == Worker(url="http://10.0.0.5:8180", metrics_port=8180)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("10.0.0.5", "http://10.0.0.5:8180"),
        (" 10.0.0.5\n", "http://10.0.0.5:8180"),
        ("http://10.0.0.5", "http://10.0.0.5:8180"),
        ("https://10.0.0.5", "https://10.0.0.5:8180"),
        ("fd00::5", "http://[fd00::5]:8180"),
        ("FD00:0:0::5", "http://[fd00::5]:8180"),
        ("[fd00::5]", "http://[fd00::5]:8180"),
        ("http://fd00::5", "http://[fd00::5]:8180"),
        ("https://[fd00::5]", "https://[fd00::5]:8180"),
        ("::ffff:10.0.0.5", "http://[::ffff:a00:5]:8180"),
        ("engine-0.engines.default.svc", "http://engine-0.engines.default.svc:8180"),
        ("HTTP://Engine_0", "http://engine_0:8180"),
    ],
)
def test_hosts(host: str, url: str) -> None:
    """IPv4, IPv6 with or without brackets and host names, with or without a scheme (F-85)."""
    assert read(host_ip=host).url == url


@pytest.mark.parametrize(
    "host",
    [
        MISSING,
        None,
        "",
        5,
        ["10.0.0.5"],
        "10.0.0.5:80",
        "[10.0.0.5]",
        "10.0.0",
        "010.0.0.5",
        "167772165",
        "0x0a000005",
        "0XA.5",
        "10.0x5",
        "10.0.0.5/x",
        "10.0.0.5?x",
        "10.0.0.5#",
        "user@host",
        "http://",
        "ftp://host",
        "http://http://host",
        "host name",
        "host\x00",
        "höst",
        "ho\u017ft",
        "fd00::5::",
        "fe80::1%eth0",
        "a" * 254,
    ],
    ids=repr,
)
def test_what_is_no_host(host: object) -> None:
    """Ports, paths, user names, zones and other spellings of an address are no host, and aren't repeated."""
    message = reason(host_ip=host)
    assert message.startswith("invalid InstanceInfo format: host_ip ")
    assert "10.0.0.5" not in message


@pytest.mark.parametrize(
    ("role", "mode", "expected"),
    [
        ("mixed", "mixed", Role.MIXED),
        ("MIXED", "mixed", Role.MIXED),
        (0, "mixed", Role.MIXED),
        ("Prefill", "disaggregated", Role.PREFILL),
        (1, "disaggregated", Role.PREFILL),
        ("decode", "disaggregated", Role.DECODE),
        (2, "disaggregated", Role.DECODE),
    ],
)
def test_roles(role: object, mode: str, expected: Role) -> None:
    """A role is known by its name in any case and by its number."""
    assert read(mode, role=role).role is expected


@pytest.mark.parametrize("role", [MISSING, None, "", "both", "0", 3, -1, True, 0.0, ["mixed"], {}])
def test_what_is_no_role(role: object) -> None:
    """Null isn't mixed (F-89), and neither is anything else."""
    assert reason(role=role).startswith("invalid InstanceInfo format: role ")


@pytest.mark.parametrize(
    ("role", "mode", "message"),
    [
        ("prefill", "mixed", "only MIXED instances are allowed"),
        (2, "mixed", "only MIXED instances are allowed"),
        ("mixed", "disaggregated", "splitwise mode only supports PREFILL/DECODE instances"),
    ],
)
def test_role_that_does_not_fit_the_mode(role: object, mode: str, message: str) -> None:
    """A worker of another role than the router's mode has use for is refused, in the seed's words."""
    assert reason(mode, role=role) == message


@pytest.mark.parametrize("port", [MISSING, None, 0, "0", "", -1, 65536, "65536", "http", 80.0, True, [80], "9" * 5000])
def test_what_is_no_port(port: object) -> None:
    """The port is required, from 1 to 65535."""
    assert reason(port=port).startswith("invalid InstanceInfo format: port ")


@pytest.mark.parametrize("unset", [MISSING, None, 0, "0", ""])
@pytest.mark.parametrize("name", ["connector_port", "engine_worker_queue_port", "metrics_port", "tp_size"])
@pytest.mark.parametrize("mode", ["mixed", "disaggregated"])
def test_ports_that_an_engine_does_not_have(name: str, unset: object, mode: str) -> None:
    """0 and "" are unset (F-86); metrics are then on the port itself."""
    role = "mixed" if mode == "mixed" else "decode"
    expected = Worker(url="http://10.0.0.5:8180", role=Role(role), metrics_port=8180)
    assert read(mode, role=role, **{name: unset}) == expected


@pytest.mark.parametrize("name", ["connector_port", "engine_worker_queue_port"])
@pytest.mark.parametrize("value", [65536, "-1", "8001,8002"])
def test_ports_between_prefill_and_decode(name: str, value: object) -> None:
    """In mixed mode nobody uses them, so one that is out of range is unset; else it is refused."""
    assert getattr(read(**{name: value}), name) is None
    assert reason("disaggregated", role="decode", **{name: value}).startswith(f"invalid InstanceInfo format: {name} ")


@pytest.mark.parametrize("name", ["connector_port", "engine_worker_queue_port", "metrics_port", "tp_size"])
@pytest.mark.parametrize("value", [True, 1.5, [1], {"a": 1}])
def test_what_is_no_number(name: str, value: object) -> None:
    """Another type is refused in every mode."""
    assert reason(**{name: value}).startswith(f"invalid InstanceInfo format: {name} must be a whole number")


@pytest.mark.parametrize("name", ["rdma_ports", "transfer_protocol", "device_ids"])
@pytest.mark.parametrize("empty", [MISSING, None, []])
def test_lists_that_an_engine_does_not_have(name: str, empty: object) -> None:
    """A list that is missing or null is empty (F-88)."""
    assert getattr(read(**{name: empty}), name) == ()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("device_ids", [0, "1", 2.0], ("0", "1", "2")),
        ("transfer_protocol", ["IPC", " rdma"], ("ipc", "rdma")),
        ("rdma_ports", [7671, "7672"], ("7671", "7672")),
    ],
)
def test_lists(name: str, value: object, expected: tuple[str, ...]) -> None:
    """Lists hold text or whole numbers, and become text."""
    assert getattr(read(**{name: value}), name) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device_ids", "0,1"),
        ("device_ids", [0.5]),
        ("device_ids", [float("inf")]),
        ("device_ids", [None]),
        ("device_ids", [True]),
        ("transfer_protocol", ["tcp"]),
        ("transfer_protocol", "rdma"),
        ("rdma_ports", 7671),
        ("rdma_ports", [{}]),
    ],
)
def test_what_is_no_list(name: str, value: object) -> None:
    """A list of the wrong things, and what is no list, is refused."""
    assert reason(**{name: value}).startswith(f"invalid InstanceInfo format: {name} must be ")


def test_rdma_ports_between_prefill_and_decode() -> None:
    """They have to be ports where they are used."""
    assert read(rdma_ports=["70000"]).rdma_ports == ("70000",)
    assert "rdma_ports must be" in reason("disaggregated", role="prefill", rdma_ports=[7671, "70000"])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe{", "not valid JSON"),
        (b'{"role": "\xff"}', "not valid JSON"),
        (b"[" * 60_000, "not valid JSON"),
        (b'{"port": ' + b"1" * 60_000 + b"}", "not valid JSON"),
        (b"null", "not an object"),
        (b"[]", "not an object"),
        (b'"mixed"', "not an object"),
        (b"{}", "role is required"),
    ],
    ids=lambda value: repr(value[:12]),
)
def test_what_is_no_registration(body: bytes, words: str) -> None:
    """Broken JSON, of any kind and depth, and other JSON than an object."""
    with pytest.raises(RegistrationError, match=words):
        read_registration(body, mode="mixed")


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@hypothesis.given(
    st.dictionaries(st.sampled_from(sorted(ENGINE)), json_values).map(lambda odd: json.dumps(ENGINE | odd).encode())
    | st.binary(max_size=200),
    st.sampled_from(["mixed", "disaggregated"]),
)
@hypothesis.settings(deadline=None)
def test_hostile_bodies(body: bytes, mode: str) -> None:
    """Whatever comes, it is a worker with a proper URL or a refusal in one short line, and nothing else."""
    worker, message = None, ""
    try:
        worker = read_registration(body, mode=mode)
    except RegistrationError as error:
        message = str(error)

    if worker is None:
        assert 0 < len(message) < 150
        assert message.isprintable()
    else:
        assert worker.url.startswith(("http://", "https://"))
        assert worker.url.isascii()
        assert (worker.role is Role.MIXED) is (mode == "mixed")

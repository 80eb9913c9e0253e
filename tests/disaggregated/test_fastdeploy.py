"""Owns the proof of FastDeploy's dialect, field by field."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from asgi_router.disaggregated import DIALECTS
from asgi_router.disaggregated.fastdeploy import FastDeploy, disaggregate_info
from asgi_router.errors import InvalidRequest
from asgi_router.worker import Worker
from tests.disaggregated.bodies import DECODE, ODD, ODD_MEMBERS, PREFILL, body, read

FULL_PREFILL = replace(PREFILL, connector_port=2334, device_ids=("0", "1"), transfer_protocol=("ipc", "rdma"))
FULL_DECODE = replace(
    DECODE,
    url="http://10.0.0.1:9000",
    connector_port=2335,
    device_ids=("2", "3"),
    rdma_ports=("7001", "7002"),
    transfer_protocol=("rdma", "ipc"),
)


def prefill_body(data: bytes, request_id: str = "ours") -> bytes:
    """What the prefill worker gets for a client's body."""
    return FastDeploy().prefill_body(data, PREFILL, DECODE, request_id)


def test_both_legs_get_the_same_bytes() -> None:
    """Both legs go out at once with one body; no decode worker serves alone."""
    dialect = DIALECTS["fastdeploy"]()

    first = dialect.prefill_body(ODD, PREFILL, DECODE, "ours")
    second = dialect.decode_body(ODD, PREFILL, DECODE, "ours", b"")

    assert first is second
    assert not dialect.prefill_first
    assert not dialect.decodes_alone


def test_f15_every_other_byte_is_kept() -> None:
    """F-15: numbers above 2^53, `<>&`, duplicate keys and white space are the client's, the new fields stand behind."""
    info = json.dumps(disaggregate_info(PREFILL, DECODE)).encode()

    assert prefill_body(ODD) == b"{" + ODD_MEMBERS + b',"disaggregate_info":' + info + b',"request_id":"ours"}\n'


def test_info_of_two_whole_descriptions() -> None:
    """Every field of `disaggregate_info`, of two workers on one host that both know ipc."""
    assert disaggregate_info(FULL_PREFILL, FULL_DECODE) == {
        "prefill_ip": "10.0.0.1",
        "decode_ip": "10.0.0.1",
        "prefill_connector_port": 2334,
        "decode_connector_port": 2335,
        "decode_device_ids": ["2", "3"],
        "decode_rdma_ports": ["7001", "7002"],
        "transfer_protocol": "ipc",
        "decode_tp_size": 2,
    }


def test_f88_absent_lists_are_empty_lists() -> None:
    """F-88: what a worker has not registered is an empty list or 0, never null."""
    assert read(prefill_body(b"{}"))["disaggregate_info"] == {
        "prefill_ip": "10.0.0.1",
        "decode_ip": "10.0.0.2",
        "prefill_connector_port": 0,
        "decode_connector_port": 0,
        "decode_device_ids": [],
        "decode_rdma_ports": [],
        "transfer_protocol": "rdma",
        "decode_tp_size": 1,
    }


@pytest.mark.parametrize(
    ("prefill", "decode", "protocol"),
    [
        (FULL_PREFILL, FULL_DECODE, "ipc"),
        (FULL_PREFILL, replace(FULL_DECODE, device_ids=("2",)), "ipc"),
        (FULL_PREFILL, replace(FULL_DECODE, url="http://10.0.0.2:9000"), "rdma"),
        (FULL_PREFILL, replace(FULL_DECODE, transfer_protocol=("rdma",)), "rdma"),
        (replace(FULL_PREFILL, transfer_protocol=()), FULL_DECODE, "rdma"),
        (FULL_PREFILL, replace(FULL_DECODE, tp_size=4), "rdma"),
        (replace(FULL_PREFILL, url="local"), replace(FULL_DECODE, url="local"), "rdma"),
    ],
)
def test_transfer_protocol(prefill: Worker, decode: Worker, protocol: str) -> None:
    """It is ipc on one known host, where both know ipc and their sizes fit; else rdma."""
    assert disaggregate_info(prefill, decode)["transfer_protocol"] == protocol


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "fits"), [(1, 1, True), (4, 4, True), (4, 1, True), (1, 4, False), (4, 2, False)]
)
def test_f87_sizes_that_fit(prefill_tp: int, decode_tp: int, fits: bool) -> None:
    """F-87: a pair has the same tensor parallel size, or its decode worker has 1; whichever field says so."""
    dialect = FastDeploy()
    by_size = (replace(PREFILL, tp_size=prefill_tp), replace(DECODE, tp_size=decode_tp))
    by_devices = (
        replace(PREFILL, device_ids=("0",) * prefill_tp),
        replace(DECODE, device_ids=("0",) * decode_tp),
    )

    assert dialect.fits(*by_size) == dialect.fits(*by_devices) == fits


def test_size_wins_over_devices() -> None:
    """A registered `tp_size` counts before the number of devices."""
    decode = replace(DECODE, tp_size=1, device_ids=("0", "1"))

    assert disaggregate_info(PREFILL, decode)["decode_tp_size"] == 1


def test_the_wrapped_app_fits_nobody() -> None:
    """A worker that is this process has no address that the other could be told."""
    local = Worker(url="local")

    assert not FastDeploy().fits(local, DECODE)
    assert not FastDeploy().fits(PREFILL, local)


def test_ipv6_and_names() -> None:
    """Hosts are given without brackets, as FastDeploy's engines register them."""
    info = disaggregate_info(Worker(url="http://[2001:db8::1]:8000"), Worker(url="https://node-2.example/base"))

    assert (info["prefill_ip"], info["decode_ip"]) == ("2001:db8::1", "node-2.example")


def test_own_request_id_is_kept() -> None:
    """A client's `request_id` stays as and where it is written."""
    data = b'{"request_id": "a\\u0062\\n%s", "n": 2}'

    assert prefill_body(data).startswith(data[:-1] + b',"disaggregate_info":')
    assert read(prefill_body(data))["request_id"] == "ab\n%s"


@pytest.mark.parametrize("data", [b"{}", b'{"request_id": ""}', b'{"request_id": "a", "request_id": ""}'])
def test_request_id_is_given(data: bytes) -> None:
    """Where there is none, or an empty one that others may have too, the legs are told the router's."""
    assert read(prefill_body(data, 'o"urs'))["request_id"] == 'o"urs'


@pytest.mark.parametrize("value", [b"123", b"null", b"true", b'["a"]', b'{"a": 1}', b"1e400"])
def test_f13_request_id_that_is_no_string(value: bytes) -> None:
    """F-13: a `request_id` that is no string is refused with a message that says so."""
    with pytest.raises(InvalidRequest, match="request_id must be a string"):
        prefill_body(b'{"request_id": ' + value + b"}")


@pytest.mark.parametrize("data", [b"null", b"[]", b"1", b""])
def test_f14_body_that_is_no_object(data: bytes) -> None:
    """F-14: `null` is refused, not written to."""
    with pytest.raises(InvalidRequest):
        prefill_body(data)


def test_own_disaggregate_info_is_replaced() -> None:
    """A client doesn't say where KV blocks go."""
    data = body(disaggregate_info={"decode_ip": "6.6.6.6"}, stream=True)

    assert b"6.6.6.6" not in prefill_body(data)
    assert read(prefill_body(data))["stream"] is True


def test_a_retry_under_another_id() -> None:
    """A new attempt has a new object, and takes over nothing of the one before."""
    first = FastDeploy().prefill_body(b"{}", PREFILL, DECODE, "ours")
    second = FastDeploy().decode_body(b"{}", PREFILL, FULL_DECODE, "ours-retry1")

    assert read(first)["request_id"] == "ours"
    assert read(second)["request_id"] == "ours-retry1"
    assert read(second)["disaggregate_info"] == disaggregate_info(PREFILL, FULL_DECODE)

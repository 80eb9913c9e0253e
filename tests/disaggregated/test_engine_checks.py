"""What the fake engines refuse: one wrong field at a time, on the leg where it matters."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, cast

import pytest

from tests.disaggregated.engines.dialects import DIALECTS, HOST, Place
from tests.disaggregated.engines.hand_over import Refused

if TYPE_CHECKING:
    from tests.disaggregated.engines.dialects import Body
    from tests.disaggregated.engines.job import Role

PREFILL, DECODE = Place("prefill", 1001, 1002), Place("decode", 2001, 2002)
CHAT: Body = {"messages": [{"role": "user", "content": "Hello"}]}

FASTDEPLOY: Body = {
    **CHAT,
    "request_id": "r1",
    "disaggregate_info": {
        "prefill_ip": HOST,
        "decode_ip": HOST,
        "prefill_connector_port": 1002,
        "decode_connector_port": 2002,
        "decode_device_ids": ["1"],
        "decode_rdma_ports": ["7001"],
        "decode_tp_size": 1,
        "transfer_protocol": "ipc",
    },
}
SGLANG: Body = {**CHAT, "bootstrap_host": HOST, "bootstrap_port": 1002, "bootstrap_room": 2**63 - 1}
BATCH: Body = {
    "prompt": ["a", "b"],
    "bootstrap_host": [HOST] * 2,
    "bootstrap_port": [1002] * 2,
    "bootstrap_room": [1, 2],
}
VLLM_PREFILL: Body = {
    **CHAT,
    "max_tokens": 1,
    "max_completion_tokens": 1,
    "stream": False,
    "kv_transfer_params": {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    },
}
VLLM_DECODE: Body = {
    **CHAT,
    "stream": True,
    "kv_transfer_params": {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_request_id": "k",
        "remote_host": HOST,
        "remote_port": 1002,
    },
}
ABSENT = object()

WRONG: list[tuple[str, Role, Body, str, object]] = [
    ("fastdeploy", "prefill", FASTDEPLOY, "request_id", ABSENT),
    ("fastdeploy", "decode", FASTDEPLOY, "request_id", 123),
    ("fastdeploy", "prefill", FASTDEPLOY, "disaggregate_info", ABSENT),
    ("fastdeploy", "prefill", FASTDEPLOY, "disaggregate_info.prefill_ip", f"http://{HOST}"),
    ("fastdeploy", "decode", FASTDEPLOY, "disaggregate_info.decode_ip", ""),
    ("fastdeploy", "prefill", FASTDEPLOY, "disaggregate_info.prefill_connector_port", 2002),
    ("fastdeploy", "decode", FASTDEPLOY, "disaggregate_info.prefill_connector_port", 0),
    ("fastdeploy", "decode", FASTDEPLOY, "disaggregate_info.decode_connector_port", 1002),
    ("fastdeploy", "decode", FASTDEPLOY, "disaggregate_info.decode_connector_port", "2002"),
    ("fastdeploy", "prefill", FASTDEPLOY, "disaggregate_info.decode_device_ids", ["0"]),
    ("fastdeploy", "decode", FASTDEPLOY, "disaggregate_info.decode_device_ids", None),
    ("fastdeploy", "decode", FASTDEPLOY, "disaggregate_info.decode_rdma_ports", [7001]),
    ("fastdeploy", "decode", FASTDEPLOY, "disaggregate_info.decode_tp_size", 2),
    ("fastdeploy", "decode", FASTDEPLOY, "disaggregate_info.transfer_protocol", "rdma"),
    ("fastdeploy", "decode", FASTDEPLOY, "disaggregate_info.transfer_protocol", ABSENT),
    ("fastdeploy", "decode", FASTDEPLOY, "disaggregate_info.more", 1),
    ("sglang", "prefill", SGLANG, "bootstrap_host", ABSENT),
    ("sglang", "decode", SGLANG, "bootstrap_host", f"{HOST}:1001"),
    ("sglang", "prefill", SGLANG, "bootstrap_port", 8998),
    ("sglang", "decode", SGLANG, "bootstrap_port", None),
    ("sglang", "decode", SGLANG, "bootstrap_room", 2**63),
    ("sglang", "decode", SGLANG, "bootstrap_room", -1),
    ("sglang", "decode", SGLANG, "bootstrap_room", "1"),
    ("sglang", "decode", SGLANG, "bootstrap_room", [1]),
    ("sglang", "decode", SGLANG, "n", 2),
    ("sglang", "prefill", BATCH, "bootstrap_room", 1),
    ("sglang", "prefill", BATCH, "bootstrap_room", [1]),
    ("sglang", "prefill", BATCH, "bootstrap_room", [1, 1]),
    ("sglang", "prefill", BATCH, "bootstrap_port", [1002, 1003]),
    ("sglang", "prefill", BATCH, "bootstrap_host", HOST),
    ("vllm", "prefill", VLLM_PREFILL, "max_tokens", ABSENT),
    ("vllm", "prefill", VLLM_PREFILL, "max_tokens", 2),
    ("vllm", "prefill", VLLM_PREFILL, "max_completion_tokens", 2),
    ("vllm", "prefill", VLLM_PREFILL, "stream", True),
    ("vllm", "prefill", VLLM_PREFILL, "stream_options", {"include_usage": True}),
    ("vllm", "prefill", VLLM_PREFILL, "min_tokens", 1),
    ("vllm", "prefill", VLLM_PREFILL, "kv_transfer_params", ABSENT),
    ("vllm", "prefill", VLLM_PREFILL, "kv_transfer_params.do_remote_decode", False),
    ("vllm", "prefill", VLLM_PREFILL, "kv_transfer_params.remote_port", ABSENT),
    ("vllm", "decode", VLLM_DECODE, "kv_transfer_params", []),
    ("vllm", "decode", VLLM_DECODE, "kv_transfer_params.do_remote_decode", True),
    ("vllm", "decode", VLLM_DECODE, "kv_transfer_params.remote_port", None),
    ("vllm", "decode", VLLM_DECODE, "kv_transfer_params.remote_request_id", ABSENT),
]


def read(dialect: str, role: Role, body: Body) -> tuple[str, ...]:
    """Let an engine read a request; return the keys of its cache."""
    engine = DIALECTS[dialect](PREFILL if role == "prefill" else DECODE)
    hand_over = engine.read(body, json.dumps(body).encode(), chat="messages" in body)
    assert hand_over is not None
    assert (hand_over.host, hand_over.port) == (HOST, 1002)
    return hand_over.keys


def test_what_is_right_is_taken() -> None:
    """Requests as they should be are read, on both legs, for as many caches as they have prompts."""
    assert read("fastdeploy", "prefill", FASTDEPLOY) == read("fastdeploy", "decode", FASTDEPLOY) == ("r1",)
    assert read("sglang", "prefill", SGLANG) == read("sglang", "decode", SGLANG) == (str(2**63 - 1),)
    assert read("sglang", "prefill", BATCH) == read("sglang", "decode", BATCH) == ("1", "2")
    assert len(read("vllm", "prefill", VLLM_PREFILL)) == 1
    assert read("vllm", "decode", VLLM_DECODE) == ("k",)


@pytest.mark.parametrize(("dialect", "role", "body", "name", "value"), WRONG)
def test_what_is_wrong_is_refused(dialect: str, role: Role, body: Body, name: str, value: object) -> None:
    """A field that is missing, of another type or of another worker is refused, and named."""
    changed = cast("Body", json.loads(json.dumps(body)))
    *outer, last = name.split(".")
    members = cast("Body", changed[outer[0]]) if outer else changed
    if value is ABSENT:
        del members[last]
    else:
        members[last] = value

    with pytest.raises(Refused, match="disaggregate_info" if last == "more" else last):
        read(dialect, role, changed)

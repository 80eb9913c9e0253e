"""Owns what engines of each dialect expect to receive: every field of it, on either leg."""

from __future__ import annotations

import hashlib
import json
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from tests.disaggregated.engines.hand_over import HandOver, Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.disaggregated.engines.job import Role

HOST = "127.0.0.1"

Body = dict[str, object]


@dataclass(frozen=True)
class Place:
    """Who an engine is, and what it registers with.

    Attributes:
        connector_port: where caches are fetched; every engine has one, only prefill engines are asked.
    """

    role: Role
    port: int
    connector_port: int

    @property
    def devices(self) -> list[str]:
        """Device ids that no engine of the other role has."""
        return ["0"] if self.role == "prefill" else ["1"]

    @property
    def rdma_ports(self) -> list[str]:
        """RDMA ports that no engine of the other role has."""
        return ["7000"] if self.role == "prefill" else ["7001"]

    def registration(self) -> dict[str, object]:
        """Return the engine as an element of the setting `WORKERS`."""
        return {
            "url": f"http://{HOST}:{self.port}",
            "role": self.role,
            "connector_port": self.connector_port,
            "device_ids": self.devices,
            "rdma_ports": self.rdma_ports,
            "transfer_protocol": ["ipc", "rdma"],
        }


class EngineDialect(Protocol):
    """What one engine knows of its dialect."""

    at_once: bool
    """Prefill begins when the decode engine has asked, and ends when that has fetched: both legs go side by side."""

    def read(self, body: Body, raw: bytes, *, chat: bool) -> HandOver | None:
        """Check a request, and return what it says of the cache. None: it is served here alone.

        Raises:
            Refused: it is not what it should be on this leg.
        """
        ...

    def answer(self, hand_over: HandOver) -> Mapping[str, object]:
        """Return what the prefill engine adds to its answer."""
        ...


class FastDeploy:
    """The same bytes on both legs, with `disaggregate_info` and `request_id`."""

    at_once = True

    def __init__(self, me: Place) -> None:
        self._me = me

    def read(self, body: Body, raw: bytes, *, chat: bool) -> HandOver | None:
        me, info = self._me, _object(body, "disaggregate_info")
        _require(isinstance(body.get("request_id"), str) and body["request_id"] != "", "request_id must be a text")
        names = {"prefill_ip", "decode_ip", "prefill_connector_port", "decode_connector_port"}
        names |= {"decode_device_ids", "decode_rdma_ports", "decode_tp_size", "transfer_protocol"}
        _require(set(info) == names, f"disaggregate_info must have just {sorted(names)}")
        for role in ("prefill", "decode"):
            _require(_is_port(info[f"{role}_connector_port"]), f"{role}_connector_port must be a port")
        expected: Body = {"prefill_ip": HOST, "decode_ip": HOST, "transfer_protocol": "ipc"}
        expected[f"{me.role}_connector_port"] = me.connector_port
        decode = Place("decode", 0, 0) if me.role == "prefill" else me
        expected |= {"decode_device_ids": decode.devices, "decode_rdma_ports": decode.rdma_ports, "decode_tp_size": 1}
        _require_equal(info, expected)
        port = cast("int", info["prefill_connector_port"])
        return HandOver(HOST, port, (cast("str", body["request_id"]),), hashlib.sha256(raw).hexdigest())

    def answer(self, hand_over: HandOver) -> Mapping[str, object]:
        return {}


class SGLang:
    """Both legs name the prefill engine's bootstrap server, and a room there for each prompt."""

    at_once = True

    def __init__(self, me: Place) -> None:
        self._me = me

    def read(self, body: Body, raw: bytes, *, chat: bool) -> HandOver | None:
        prompt = body.get("prompt")
        batch = not chat and isinstance(prompt, list) and prompt != [] and not isinstance(prompt[0], int)
        count = len(cast("list[object]", prompt)) if batch else 1
        _require(body.get("n") in (None, 1), "n must be 1")
        columns: list[list[object]] = []
        for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room"):
            value = body.get(name)
            _require(isinstance(value, list) == batch, f"{name} must be a list for a list of prompts, and only then")
            columns.append(cast("list[object]", value) if batch else [value])
            _require(len(columns[-1]) == count, f"{name} must have one entry for each prompt")

        hosts, ports, rooms = columns
        _require(all(host == HOST for host in hosts), "bootstrap_host must be the prefill engine's")
        _require(all(_is_port(port) and port == ports[0] for port in ports), "bootstrap_port must be one port")
        if self._me.role == "prefill":
            _require(ports[0] == self._me.connector_port, "bootstrap_port must be the prefill engine's")
        _require(all(type(room) is int and 0 <= room < 2**63 for room in rooms), "bootstrap_room must be of 63 bits")
        _require(len(set(rooms)) == count, "bootstrap_room must be another one for each prompt")
        return HandOver(HOST, cast("int", ports[0]), tuple(map(str, rooms)), "")

    def answer(self, hand_over: HandOver) -> Mapping[str, object]:
        return {}


class Vllm:
    """Prefill is asked for one token and answers where the cache is; decode is told that."""

    at_once = False

    def __init__(self, me: Place) -> None:
        self._me = me

    def read(self, body: Body, raw: bytes, *, chat: bool) -> HandOver | None:
        return self._read_prefill(body, chat=chat) if self._me.role == "prefill" else self._read_decode(body)

    def _read_prefill(self, body: Body, *, chat: bool) -> HandOver:
        limits = {"max_tokens": 1, "max_completion_tokens": 1} if chat else {"max_tokens": 1}
        _require_equal(body, {**limits, "stream": False})
        _require(body.get("max_completion_tokens", 1) == 1, "max_completion_tokens must be 1")
        for name in ("stream_options", "min_tokens"):
            _require(name not in body, f"{name} must not be sent to prefill")
        expected: Body = {"do_remote_decode": True, "do_remote_prefill": False}
        expected |= dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        params = _object(body, "kv_transfer_params")
        _require(params == expected, f"kv_transfer_params must be {expected}")
        key = str(uuid.uuid4())
        return HandOver(HOST, self._me.connector_port, (key,), json.dumps(self._params(key), sort_keys=True))

    def _read_decode(self, body: Body) -> HandOver | None:
        if body.get("kv_transfer_params") is None:
            return None

        params = _object(body, "kv_transfer_params")
        _require(isinstance(params.get("remote_request_id"), str), "remote_request_id must be a text")
        key = cast("str", params["remote_request_id"])
        _require_equal(params, {"do_remote_decode": False, "do_remote_prefill": True, "remote_host": HOST})
        _require(_is_port(params.get("remote_port")), "remote_port must be a port")
        # What is in it is between the engines: whoever carries it must not change a bit of it.
        return HandOver(HOST, cast("int", params["remote_port"]), (key,), json.dumps(params, sort_keys=True))

    def _params(self, key: str) -> Body:
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [9007199254740993, 2**63 + 1],  # none of them survives a double
            "remote_engine_id": "\u20ac \U0001f600 </engine>",
            "remote_request_id": key,
            "remote_host": HOST,
            "remote_port": self._me.connector_port,
            "tp_size": 1,
        }

    def answer(self, hand_over: HandOver) -> Mapping[str, object]:
        return {"kv_transfer_params": self._params(hand_over.keys[0])}


DIALECTS: Mapping[str, Callable[[Place], EngineDialect]] = {
    "fastdeploy": FastDeploy,
    "sglang": SGLang,
    "vllm": Vllm,
}


def _require(condition: bool, complaint: str) -> None:
    if not condition:
        raise Refused(complaint)


def _require_equal(received: Body, expected: Body) -> None:
    for name, value in expected.items():
        same = name in received and received[name] == value and type(received[name]) is type(value)
        _require(same, f"{name} must be {value!r}, not {received.get(name)!r}")


def _object(body: Body, name: str) -> Body:
    value = body.get(name)
    _require(isinstance(value, dict), f"{name} must be an object")
    return cast("Body", value)


def _is_port(value: object) -> bool:
    return type(value) is int and 0 < value < 65536

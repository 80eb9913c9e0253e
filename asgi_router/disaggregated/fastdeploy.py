"""Owns FastDeploy's dialect: both legs get the same body at once, and find each other by what is added to it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from asgi_router.disaggregated.dialect import host_of
from asgi_router.disaggregated.json_edit import JsonObject
from asgi_router.errors import InvalidRequest

if TYPE_CHECKING:
    from asgi_router.worker import Worker


class FastDeploy:
    """`disaggregate_info` says who and how, `request_id` what: the engines know a request by that one alone."""

    prefill_first = False
    decodes_alone = False

    def __init__(self) -> None:
        self._body: bytes | None = None

    def fits(self, prefill: Worker, decode: Worker) -> bool:
        """Return whether they have the same tensor parallel size, or the decode worker 1; and both an address."""
        sizes_fit = _tp_size(decode) in (_tp_size(prefill), 1)
        return sizes_fit and host_of(prefill) != "" and host_of(decode) != ""

    def prefill_body(self, body: bytes, prefill: Worker, decode: Worker, request_id: str) -> bytes:
        """Return the client's body with `disaggregate_info`, and a `request_id` where it has none.

        Raises:
            InvalidRequest: its own `request_id` is not a string.
        """
        fields = JsonObject(body)
        add = {"disaggregate_info": json.dumps(disaggregate_info(prefill, decode)).encode()}
        own_id = fields.get("request_id")
        if own_id is not None and not own_id.startswith(b'"'):
            raise InvalidRequest("request_id must be a string.")
        if own_id in (None, b'""'):  # two requests of the same name are taken for one
            add["request_id"] = json.dumps(request_id).encode()

        self._body = fields.edited(add=add)
        return self._body

    def decode_body(
        self, body: bytes, prefill: Worker, decode: Worker, request_id: str, prefill_answer: bytes = b""
    ) -> bytes:
        """Return the same bytes as for the prefill worker."""
        return self.prefill_body(body, prefill, decode, request_id) if self._body is None else self._body


def disaggregate_info(prefill: Worker, decode: Worker) -> dict[str, object]:
    """Return what FastDeploy's engines want to know of the two workers. A port that is not known is 0."""
    prefill_ip, decode_ip = host_of(prefill), host_of(decode)
    shares_memory = (
        prefill_ip == decode_ip != ""
        and "ipc" in prefill.transfer_protocol
        and "ipc" in decode.transfer_protocol
        and _tp_size(decode) in (_tp_size(prefill), 1)
    )
    return {
        "prefill_ip": prefill_ip,
        "decode_ip": decode_ip,
        "prefill_connector_port": prefill.connector_port or 0,
        "decode_connector_port": decode.connector_port or 0,
        "decode_device_ids": list(decode.device_ids),
        "decode_rdma_ports": list(decode.rdma_ports),
        "transfer_protocol": "ipc" if shares_memory else "rdma",
        "decode_tp_size": _tp_size(decode),
    }


def _tp_size(worker: Worker) -> int:
    return worker.tp_size or len(worker.device_ids) or 1

"""Owns SGLang's dialect: both legs get the same body at once, and meet in a room of the prefill worker's."""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING

from asgi_router.disaggregated.dialect import asks_for_one_answer, host_of
from asgi_router.disaggregated.json_edit import JsonObject
from asgi_router.errors import InvalidRequest

if TYPE_CHECKING:
    from asgi_router.worker import Worker

BOOTSTRAP_PORT = 8998
"""SGLang's own default for `--disaggregation-bootstrap-port`."""

MAX_PROMPTS = 2048
"""Prompts in one request. Each takes a host, a port and a room, many times what an empty prompt takes."""

_ROOM_BITS = 63  # a room is a signed integer of 64 bits in SGLang


class SGLang:
    """`bootstrap_host` and `bootstrap_port` say where the two legs meet, `bootstrap_room` for which prompt."""

    prefill_first = False
    decodes_alone = False

    def __init__(self) -> None:
        self._body: bytes | None = None

    def fits(self, prefill: Worker, decode: Worker) -> bool:
        """Return that any two do, if the prefill worker has an address."""
        return host_of(prefill) != ""

    def prefill_body(self, body: bytes, prefill: Worker, decode: Worker, request_id: str) -> bytes:
        """Return the client's body with a new room for each of its prompts.

        Raises:
            InvalidRequest: it asks for several answers to a prompt, which hang in SGLang as all of them are told to
                meet in one room (sgl-project/sglang#26486), or has more than `MAX_PROMPTS` prompts.
        """
        fields = JsonObject(body)
        if not asks_for_one_answer(fields):
            raise InvalidRequest("n must be 1 where SGLang's prefill and decode workers serve a request together.")
        prompts = fields.batch_size("prompt")
        if prompts is not None and prompts > MAX_PROMPTS:
            raise InvalidRequest(f"A request may have {MAX_PROMPTS} prompts at most.")

        host = host_of(prefill)
        address = f"[{host}]" if ":" in host else host  # SGLang puts a colon and the port behind it
        port = prefill.connector_port or BOOTSTRAP_PORT
        rooms = [secrets.randbits(_ROOM_BITS) for _ in range(1 if prompts is None else prompts)]
        values: dict[str, object] = {"host": address, "port": port, "room": rooms[0]}
        if prompts is not None:
            values = {"host": [address] * prompts, "port": [port] * prompts, "room": rooms}

        self._body = fields.edited(
            add={f"bootstrap_{name}": json.dumps(value).encode() for name, value in values.items()}
        )
        return self._body

    def decode_body(
        self, body: bytes, prefill: Worker, decode: Worker, request_id: str, prefill_answer: bytes = b""
    ) -> bytes:
        """Return the same bytes as for the prefill worker."""
        return self.prefill_body(body, prefill, decode, request_id) if self._body is None else self._body

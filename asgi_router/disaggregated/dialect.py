"""Owns what a dialect is: how prefill and decode workers of one engine are told that they serve a request together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from asgi_router.disaggregated.json_edit import JsonObject
    from asgi_router.worker import Worker


class Dialect(Protocol):
    """What the two legs of one attempt are told.

    An object serves one attempt, with one `body`: it may keep what it has made for the first leg until the second one
    needs it. That lives as long as the object does, which is to be let go when both legs have their bodies.
    """

    @property
    def prefill_first(self) -> bool:
        """Whether the decode worker is asked only when the prefill worker has answered."""
        ...

    @property
    def decodes_alone(self) -> bool:
        """Whether a decode worker can serve a request without a prefill worker."""
        ...

    def fits(self, prefill: Worker, decode: Worker) -> bool:
        """Return whether these two can work together."""
        ...

    def prefill_body(self, body: bytes, prefill: Worker, decode: Worker, request_id: str) -> bytes | None:
        """Return the body for the prefill worker, for a client's `body` that is known here by `request_id`.

        None: this request can't be divided, and is for the decode worker alone. Only where `decodes_alone`.

        Raises:
            InvalidRequest: the request can't be served.
        """
        ...

    def decode_body(
        self, body: bytes, prefill: Worker, decode: Worker, request_id: str, prefill_answer: bytes
    ) -> bytes:
        """Return the body for the decode worker, which belongs to what `prefill_body` has returned.

        `prefill_answer` is the whole of the prefill worker's answer where `prefill_first`. Empty where it is not, and
        where there is no prefill leg.

        Raises:
            InvalidRequest: the request can't be served.
            WorkerError: the answer of the prefill worker can't be read.
        """
        ...


def host_of(worker: Worker) -> str:
    """Return the host in a worker's URL, an IPv6 address without brackets; empty for the wrapped app."""
    return "" if worker.is_local else urlsplit(worker.url).hostname or ""


def asks_for_one_answer(fields: JsonObject) -> bool:
    """Return whether a request asks for one answer to a prompt: its `n` is 1, null or absent."""
    return not fields.has("n") or fields.get("n") in (b"1", b"1.0")

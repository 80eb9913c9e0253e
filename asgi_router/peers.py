"""Owns the trust between the routers of one fleet: a request that one of them has placed is not placed again.

Each router that forwards a request signs it with `PEER_TOKEN` in the header `x-router-hop`. One that gets a request
with a good signature serves it by its own worker, `local`. A header without one is a client's invention: it is
never believed, and never passed on.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asgi_router.headers import RawHeaders

HOP = b"x-router-hop"


class Peers:
    """The routers of one fleet, by the secret that they share.

    Args:
        token: the secret; None: this router has no peers. It is never sent: what is sent is the request's id, keyed
            with it. So a worker that sees the header can have requests with that id served in place, and no more.
    """

    def __init__(self, token: str | None) -> None:
        self._key = None if token is None else token.encode()

    def signed(self, request_id: str) -> RawHeaders:
        """Return the headers that tell a peer of a request that it is placed."""
        return [] if self._key is None else [(HOP, self._signature(self._key, request_id))]

    def have_placed(self, headers: Iterable[tuple[bytes, bytes]], request_id: str) -> bool:
        """Tell whether a request comes from a peer that has chosen this process for it."""
        if self._key is None:
            return False
        given = [value for name, value in headers if name == HOP]
        if len(given) != 1:
            return False
        return hmac.compare_digest(given[0], self._signature(self._key, request_id))

    @staticmethod
    def _signature(key: bytes, request_id: str) -> bytes:
        return hmac.digest(key, request_id.encode(), "sha256").hex().encode()


def without_hop(headers: Iterable[tuple[bytes, bytes]]) -> RawHeaders:
    """Return the headers without what peers say to each other."""
    return [(name, value) for name, value in headers if name.lower() != HOP]

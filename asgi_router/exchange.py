"""Owns the state of one request in flight: its lease, and what may stop it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import anyio

from asgi_router.client import ClientGone

if TYPE_CHECKING:
    from asgi_router.client import Client
    from asgi_router.extraction import CompletionRequest
    from asgi_router.scheduling.lease import Lease

END_GRACE = 1.0
"""Seconds that the last `send` may take once the client has gone."""


class Exchange:
    """One client's request, from its upload to the end of the answer.

    All that may end it from outside (client gone, time-out, shutdown) cancels one scope, and leaves the reason.

    Attributes:
        body: the client's request body; empty once no worker can be asked any more.
        request: what was read in it; None likewise.
        lease: the current claim on a worker. A retry releases it and puts the next one here.
        scope: encloses all that is done for this request: upload, queue, worker and answer.
        reason: why the scope was cancelled; `late` of the last `allow` if it was the deadline.
    """

    __slots__ = ("_late", "_stopped", "body", "client", "lease", "request", "scope")

    def __init__(self, client: Client) -> None:
        self.client = client
        self.body = b""
        self.request: CompletionRequest | None = None
        self.lease: Lease | None = None
        self.scope = anyio.CancelScope()
        self._late: Exception | None = None
        self._stopped: Exception | None = None

    @property
    def reason(self) -> Exception | None:
        return self._stopped or self._late

    def allow(self, seconds: float | None, late: Exception) -> None:
        """Give what follows `seconds` (None: no limit), and say what it means if they pass."""
        if self.scope.cancel_called:
            return  # it is too late: the reason stays
        self._late = late
        self.scope.deadline = math.inf if seconds is None else anyio.current_time() + seconds

    def stop(self, reason: Exception) -> None:
        """End the request now.

        If the last message is on its way the request is over, and what looks like a disconnect may be how the
        server reports that. Then the `send` of that message gets a moment to return by itself.
        """
        if self.client.finished:
            self.allow(END_GRACE, ClientGone())
        elif self._stopped is None:
            self._stopped = reason
            self.scope.cancel()

    def forget_prompt(self) -> None:
        """Let the prompt go: a worker has it, and an answer may take minutes to write."""
        self.body = b""
        self.request = None

    def release(self) -> None:
        """Release the lease, if there is one. Synchronous and idempotent, as the lease's own release."""
        if self.lease is not None:
            self.lease.release()

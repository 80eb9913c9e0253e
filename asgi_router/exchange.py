"""Owns the state of one request in flight: its lease, and what may stop it."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio

from asgi_router.client import ClientGone
from asgi_router.errors import silent, unreachable
from asgi_router.headers import first_values
from asgi_router.observability.record import Times, read_ids
from asgi_router.time_limit import TaskScope, TimeLimit

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from starlette.types import ASGIApp

    from asgi_router.client import Client
    from asgi_router.extraction import CompletionRequest
    from asgi_router.scheduling.lease import Lease
    from asgi_router.scheduling.state import WorkerState
    from asgi_router.time_limit import Scope
    from asgi_router.upstream.http11 import Pool

END_GRACE = 1.0
"""Seconds that the last `send` may take once the client has gone."""


class HeldBody:
    """The body of a request to a worker, until the prompt is forgotten: transports keep requests for much longer."""

    __slots__ = ("content",)

    def __init__(self, content: bytes) -> None:
        self.content = content


class Exchange:
    """One client's request, from its upload to the end of the answer.

    All that may end it from outside (client gone, time-out, shutdown) cancels one scope, and leaves the reason.

    Attributes:
        body: the client's request body; empty once no worker can be asked any more.
        request: what was read in it; likewise without the prompt.
        pool: the connections of its event loop, if it bears native cancellation: then it is ended by that, too.
        lease: the current claim on a worker. A retry releases it and puts the next one here.
        app: the app that the middleware wraps, for the worker `local`.
        prefill: the claim on the worker that prefills for it, where prefill and decode are apart.
        blamed: of the two the one whose worker has failed; None: `lease`.
        tried: workers that this request need not try again.
        attempts: how many workers have been asked.
        preempted: how often its workers have given it up.
        placed: a peer has chosen this process for it.
        in_app: the wrapped app serves it, which may go on when its answer is whole.
        sent: to how many workers it was sent, all of which have failed or were busy.
        scope: encloses all that is done for this request: upload, queue, worker and answer.
        reason: why the scope was cancelled.
        headers: the first value of each of its headers, by name in lower case.
        ids: what the request is called by.
        worker_id: what workers know it by, if that isn't its own id.
        times: what took how long.
        outcome: how it ended, in a word; see `RequestFinished`.
    """

    __slots__ = (
        "_attempt",
        "_held",
        "_late",
        "app",
        "attempts",
        "blamed",
        "body",
        "client",
        "headers",
        "ids",
        "in_app",
        "lease",
        "outcome",
        "path",
        "placed",
        "pool",
        "preempted",
        "prefill",
        "reason",
        "request",
        "scope",
        "sent",
        "times",
        "tried",
        "worker_id",
    )

    def __init__(
        self, client: Client, path: str, app: ASGIApp, clock: Callable[[], float], pool: Pool | None = None
    ) -> None:
        self.client = client
        self.app = app
        self.path = path
        self.headers = first_values(client.scope.get("headers") or ())
        self.ids = read_ids(self.headers)
        self.times = Times(clock)
        self.outcome = "cancelled"
        self.worker_id = ""
        self.body = b""
        self.request: CompletionRequest | None = None
        self.lease: Lease | None = None
        self.prefill: Lease | None = None
        self.blamed: Lease | None = None
        self.tried: set[WorkerState] = set()
        self.attempts = 0
        self.placed = False
        self.preempted = 0
        self.in_app = False
        self.sent = 0
        self.pool = pool
        self.scope: Scope = anyio.CancelScope() if pool is None else TaskScope(pool.loop)
        self.reason: Exception | None = None
        self._attempt: TimeLimit | None = None
        self._late: Callable[[], Exception] | None = None
        self._held: list[HeldBody] = []

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop of `pool`; None: it must not be cancelled natively."""
        return None if self.pool is None else self.pool.loop

    @property
    def attempt_id(self) -> str:
        """The id of this attempt: after the first one not the request's own, which an engine may still hold."""
        retry = f"-retry{self.attempts - 1}" if self.attempts > 1 else ""
        return self.ids.request_id + retry

    def attempt(self) -> Attempt:
        """Return what encloses one try at a worker, which may run out of time.

        Raises:
            Exception: at its end, what the last `allow` gave.
        """
        self._attempt = attempt = Attempt(self)
        return attempt

    def allow(self, seconds: float | None, late: Callable[[], Exception]) -> None:
        """Give what follows in this attempt `seconds` (None: no limit); `late` makes the error for when they pass."""
        attempt = self._attempt
        if attempt is None or attempt.passed:
            return  # it is too late: the reason stays
        self._late = late
        if seconds is not None or attempt.until != math.inf:
            attempt.allow(seconds)

    def stop(self, reason: Exception) -> None:
        """End the request now.

        If the last message is on its way the request is over, and what looks like a disconnect may be how the
        server reports that. Then the `send` of that message gets a moment to return by itself.
        """
        if self.client.finished:
            if not self.in_app:
                self.allow(END_GRACE, ClientGone)
        elif self.reason is None:
            self.reason = reason
            self.scope.cancel()

    def check(self) -> None:
        """Raise what ought to have ended the request already, had nobody swallowed its cancellation.

        The host's `send` and `receive` may do so: `asyncio.wait_for` does, before Python 3.12, if what it waits for
        ends in the same turn. Native cancellation is not repeated.
        """
        if self.reason is not None:
            raise self.reason
        if self._attempt is not None and self._attempt.passed and self._late is not None:
            raise self._late()

    def leave(self, gone: ClientGone) -> None:
        """Note that the client was found to be gone while a message was sent to it, the last one maybe."""
        if self.reason is None:
            self.reason = gone
            self.scope.cancel()

    @contextmanager
    def pausing(self, seconds: float | None, late: Callable[[], Exception]) -> Iterator[None]:
        """Give what is enclosed `seconds`, as `allow`, and go on with the present time limit after it."""
        attempt, before = self._attempt, self._late
        assert attempt is not None  # requests are served in one
        until = attempt.until
        self.allow(seconds, late)
        try:
            yield
        finally:
            if not attempt.passed:
                self._late = before
                attempt.move(until)

    def progress(self, *, sending: bool) -> None:
        """Note how far the transport is: it connects, or it begins to send. What is late means something else then."""
        attempt = self._attempt
        if attempt is None or attempt.passed or attempt.until == math.inf:
            return
        if sending:
            self._late = silent
        else:
            self._late = unreachable

    def hold(self, body: bytes) -> HeldBody:
        """Return what keeps the body of a request to a worker until the prompt is forgotten."""
        self._held.append(HeldBody(body))
        return self._held[-1]

    def forget_prompt(self) -> None:
        """Let the prompt go: a worker has it, and an answer may take minutes to write."""
        self.body = b""
        for held in self._held:
            held.content = b""
        if self.request is not None:
            self.request = self.request.without_text()

    def release_prefill(self) -> None:
        """Release the claim on the prefill worker: it isn't needed."""
        if self.prefill is not None:
            self.prefill.release()
            self.prefill = None

    def release(self) -> None:
        """Release what is leased. Synchronous and idempotent, as the lease's own release."""
        if self.prefill is not None:
            self.prefill.release()
        if self.lease is not None:
            self.lease.release()


class Attempt(TimeLimit):
    """Encloses one try at a worker."""

    __slots__ = ("_exchange",)

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange.loop)
        self._exchange = exchange

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        exchange = self._exchange
        exchange._attempt = None  # no circle: that would keep the prompt until a collection of garbage
        handled = super().__exit__(exc_type, exc, traceback)
        if self.scope.cancelled_caught and exchange._late is not None:
            raise exchange._late()
        return handled

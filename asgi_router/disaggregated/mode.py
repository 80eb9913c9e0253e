"""Owns disaggregated mode: one worker prefills a request and another one decodes it, each under a lease of its own."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

import anyio

from asgi_router.admission import Admission
from asgi_router.disaggregated import DIALECTS
from asgi_router.disaggregated.json_edit import edit_object, member
from asgi_router.disaggregated.preemption import begin_again, given_up, read_ahead
from asgi_router.disaggregated.prefill_leg import PrefillLeg
from asgi_router.errors import WorkerError, WorkerPreempted, WorkerTimeout, paused, silent
from asgi_router.headers import retry_after
from asgi_router.mixed import MAX_ATTEMPTS, note_status
from asgi_router.upstream.answer import close, read
from asgi_router.upstream.local import BUSY
from asgi_router.upstream.relay import relay

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asgi_router.disaggregated.dialect import Dialect
    from asgi_router.disaggregated.pairing import Pair, Pairing
    from asgi_router.exchange import Exchange
    from asgi_router.headers import RawHeaders
    from asgi_router.scheduling.lease import Lease
    from asgi_router.settings import RouterSettings
    from asgi_router.upstream.answer import WorkerAnswer
    from asgi_router.upstream.transport import Progress
    from asgi_router.upstream.upstream import Upstream

MAX_PREFILL_ANSWER_BYTES = 1024 * 1024
"""A prefill worker's answer that has to be read whole holds one token, and the addresses of what is in its cache."""

REST_GRACE = 0.5
"""Seconds for the rest of a prefill worker's answer once the client has its own. Less than `exchange.END_GRACE`: a
client that leaves meanwhile has got what it wanted."""


class Disaggregated:
    """Chooses a pair of workers for a request, and asks both.

    Args:
        settings: the router's.
        pairing: chooses.
        upstream: how requests reach the workers.

    Attributes:
        admission: gives a request its pair of leases, or lets it wait for one.
    """

    def __init__(self, settings: RouterSettings, pairing: Pairing, upstream: Upstream) -> None:
        self._settings = settings
        self._pairing = pairing
        self._upstream = upstream
        self._dialect = DIALECTS[settings.pd_dialect]
        self.admission: Admission[Pair] = Admission(
            pairing.select, queue_size=settings.queue_size, queue_timeout=settings.queue_timeout
        )

    def native_pool(self) -> None:
        """Return None: two legs run in a task group, which native cancellation would tear apart; see `Mode`."""

    async def choose(self, exchange: Exchange) -> None:
        """Lease a pair for the request; see `Mode`."""
        assert exchange.request is not None  # it was read before a worker is asked
        exchange.request = request = self._pairing.condense(exchange.request)
        pair = await self.admission.acquire(request, exchange.times, exchange.tried)
        exchange.prefill, exchange.lease = pair.prefill, pair.decode

    def others(self, exchange: Exchange) -> bool:
        """Tell whether another pair may be tried; see `Mode`."""
        too_often = len(exchange.tried) > self._settings.retry_attempts or exchange.attempts > MAX_ATTEMPTS
        if exchange.request is None or too_often:
            return False
        return self._pairing.others(exchange.request, exchange.tried)

    def repeats(self, error: WorkerError) -> bool:
        """Tell whether a failure may be repeated with another pair; see `Mode`. One of time may not: it may go on."""
        return not isinstance(error, WorkerTimeout)

    async def ask(self, exchange: Exchange, path: str) -> None:
        """Send the request to both workers, and pass the decode worker's answer on; see `Mode`."""
        prefill, decode = exchange.prefill, exchange.lease
        assert decode is not None  # it was chosen
        exchange.allow(self._settings.first_byte_timeout, silent)
        dialect = self._dialect()
        request_id = exchange.worker_id = exchange.attempt_id
        if exchange.attempts > 1 and (exchange.preempted or member(exchange.body, "request_id") is not None):
            exchange.body = edit_object(exchange.body, add={"request_id": json.dumps(request_id).encode()})
        workers = (prefill or decode).state.worker, decode.state.worker
        first = None
        if prefill is not None:
            first = dialect.prefill_body(exchange.body, *workers, request_id)
        if prefill is None or first is None:
            exchange.release_prefill()
            alone = dialect.decode_body(exchange.body, *workers, request_id, b"")
            await self._decode(exchange, path, decode, alone)
        elif dialect.prefill_first:
            await self._ask_in_turn(exchange, path, prefill, decode, dialect, first, request_id)
        else:
            await self._ask_both(exchange, path, prefill, decode, dialect, first, request_id)

    async def _ask_in_turn(
        self,
        exchange: Exchange,
        path: str,
        prefill: Lease,
        decode: Lease,
        dialect: Dialect,
        first: bytes,
        request_id: str,
    ) -> None:
        exchange.blamed = prefill
        answer = await self._open(exchange, path, prefill, first)
        if answer.status >= 400:
            await self._pass_on_refusal(answer, exchange, prefill)
            return

        whole = await self._read_whole(answer, exchange, prefill)
        second = dialect.decode_body(exchange.body, prefill.state.worker, decode.state.worker, request_id, whole)
        exchange.blamed = None
        exchange.allow(self._settings.first_byte_timeout, silent)
        await self._decode(exchange, path, decode, second)

    async def _ask_both(
        self,
        exchange: Exchange,
        path: str,
        prefill: Lease,
        decode: Lease,
        dialect: Dialect,
        first: bytes,
        request_id: str,
    ) -> None:
        """Ask both at once. The first leg to fail ends the other."""
        second = dialect.decode_body(exchange.body, prefill.state.worker, decode.state.worker, request_id, b"")
        leg = PrefillLeg(partial(self._open, exchange, path, prefill, first), exchange, prefill)
        failure: Exception | None = None
        exchange.blamed = prefill  # if time runs out; when it is accepted it isn't to blame any more
        try:
            async with anyio.create_task_group() as legs:
                legs.start_soon(leg.run, legs.cancel_scope)
                try:
                    await self._decode(exchange, path, decode, second, leg)
                    exchange.allow(None, silent)
                    with anyio.move_on_after(REST_GRACE):
                        await leg.ended.wait()  # a connection that is read to its end can be used again
                except Exception as exc:  # carried out by hand: a task group would wrap it
                    failure = exc
                legs.cancel_scope.cancel()

            exchange.blamed = prefill if leg.refusal or leg.failure else None
            if leg.refusal is not None:
                await self._pass_on_refusal(leg.refusal, exchange, prefill)
            elif leg.failure is not None:
                raise leg.failure
            elif failure is not None:
                raise failure
        finally:
            failure = None
            if leg.refusal is not None:
                await close(leg.refusal)

    async def _decode(
        self,
        exchange: Exchange,
        path: str,
        decode: Lease,
        body: bytes,
        leg: PrefillLeg | None = None,
    ) -> None:
        def progress(*, sending: bool) -> None:
            # While this worker can't be reached it is to blame, whatever the other one does.
            exchange.blamed = leg.lease if sending and leg is not None and not leg.accepted.is_set() else None
            exchange.progress(sending=sending)

        answer = await self._open(exchange, path, decode, body, progress)
        if leg is not None and answer.status >= 400:
            # Passed on at once. Anything else may still turn out to be the prefill worker's failure.
            exchange.blamed = None
            leg.stop()
            leg = None
        if self._may_begin_again(exchange):
            whole, answer = await read_ahead(answer, lambda: self._allow_pause(exchange))
            gave_up, tokens = given_up(whole)
            if gave_up:
                await close(answer)
                begin_again(exchange, tokens)
                raise WorkerPreempted("The workers gave the request up.")
        await self._pass_on(answer, exchange, decode, None if leg is None else leg.accepted.wait)

    def _may_begin_again(self, exchange: Exchange) -> bool:
        request = exchange.request
        return request is not None and not request.stream and exchange.preempted < self._settings.pd_preempt_retries

    async def _pass_on_refusal(self, answer: WorkerAnswer, exchange: Exchange, prefill: Lease) -> None:
        """Pass on a prefill worker's error. Nothing is decoded then."""
        if exchange.lease is not None:
            exchange.lease.release()
        await self._pass_on(answer, exchange, prefill)

    async def _pass_on(
        self,
        answer: WorkerAnswer,
        exchange: Exchange,
        lease: Lease,
        before_start: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        if answer.status in BUSY:
            lease.state.breaker.back_off(retry_after(answer.headers))
        await relay(
            answer,
            exchange,
            lease,
            own_headers=decision_headers(exchange) if self._settings.decision_headers else [],
            idle_timeout=self._settings.idle_timeout,
            send_timeout=self._settings.send_timeout,
            before_start=before_start,
        )
        note_status(lease, answer.status)

    async def _open(
        self,
        exchange: Exchange,
        path: str,
        lease: Lease,
        body: bytes,
        progress: Progress = lambda *, sending: None,
    ) -> WorkerAnswer:
        headers = [(b"x-request-id", exchange.attempt_id.encode())]
        if lease is exchange.prefill or self._may_begin_again(exchange):
            headers.append((b"accept-encoding", b"identity"))  # it is read here, or by nobody
        url = lease.state.worker.url + path
        return await self._upstream.open(exchange, url, body, own_headers=headers, progress=progress)

    def _allow_pause(self, exchange: Exchange) -> None:
        """Bound the wait for more of an answer that is read here, where the client's wait isn't bounded as a whole."""
        if self._settings.first_byte_timeout is None:
            exchange.allow(self._settings.idle_timeout, paused)

    async def _read_whole(self, answer: WorkerAnswer, exchange: Exchange, lease: Lease) -> bytes:
        whole = bytearray()
        try:
            while chunk := await read(answer):
                lease.first_byte(prefilled=True)
                self._allow_pause(exchange)
                whole += chunk
                if len(whole) > MAX_PREFILL_ANSWER_BYTES:
                    raise WorkerError("The prefill worker's answer is too large.")
            lease.succeeded()
        finally:
            lease.release()
            await close(answer)
        return bytes(whole)


def decision_headers(exchange: Exchange) -> RawHeaders:
    """Return what a client is told of the choice: who, why, and by which id it can be found in log and workers."""
    decode, prefill = exchange.lease, exchange.prefill
    assert decode is not None  # it was chosen
    headers = [(b"x-router-decode-url", decode.state.worker.url.encode())]
    why = f"decode={decode.reason}; candidates={decode.candidates}; attempt={exchange.attempts}"
    if prefill is not None:
        headers.insert(0, (b"x-router-prefill-url", prefill.state.worker.url.encode()))
        cached = f"cached={prefill.cached_tokens}/{prefill.prefill_tokens}"
        why = f"prefill={prefill.reason}; candidates={prefill.candidates}; {cached}; {why}"
    return [*headers, (b"x-router-decision", why.encode()), (b"x-request-id", exchange.ids.request_id.encode())]

"""Owns disaggregated mode: one worker prefills a request and another one decodes it, each under a lease of its own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, cast

import anyio

from asgi_router.admission import Admission
from asgi_router.disaggregated import DIALECTS
from asgi_router.disaggregated.json_edit import edit_object, member
from asgi_router.disaggregated.preemption import begin_again, given_up, read_ahead
from asgi_router.disaggregated.prefill_leg import PrefillLeg
from asgi_router.errors import WorkerError, WorkerPreempted, WorkerTimeout
from asgi_router.headers import retry_after
from asgi_router.mixed import MAX_ATTEMPTS, note_status
from asgi_router.upstream.local import BUSY
from asgi_router.upstream.relay import close_response, read_chunk, relay
from asgi_router.upstream.request import upstream_request
from asgi_router.upstream.transport import open_response

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import httpx

    from asgi_router.disaggregated.dialect import Dialect
    from asgi_router.disaggregated.pairing import Pair, Pairing
    from asgi_router.exchange import Exchange
    from asgi_router.headers import RawHeaders
    from asgi_router.scheduling.lease import Lease
    from asgi_router.settings import RouterSettings

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
        transport: how requests reach the workers.

    Attributes:
        admission: gives a request its pair of leases, or lets it wait for one.
    """

    def __init__(self, settings: RouterSettings, pairing: Pairing, transport: httpx.AsyncBaseTransport) -> None:
        self._settings = settings
        self._pairing = pairing
        self._transport = transport
        self._dialect = DIALECTS[settings.pd_dialect]
        self.admission: Admission[Pair] = Admission(
            pairing.select, queue_size=settings.queue_size, queue_timeout=settings.queue_timeout
        )

    async def choose(self, exchange: Exchange) -> None:
        """Lease a pair for the request; see `Mode`."""
        assert exchange.request is not None  # it was read before a worker is asked
        pair = await self.admission.acquire(exchange.request, exchange.times, exchange.tried)
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
        exchange.allow(self._settings.first_byte_timeout, late=WorkerTimeout("The workers did not answer in time."))
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
        response = await open_response(self._transport, self._request(exchange, path, prefill, first))
        if response.status_code >= 400:
            await self._pass_on_refusal(response, exchange, prefill)
            return

        answer = await self._read_whole(response, exchange, prefill)
        second = dialect.decode_body(exchange.body, prefill.state.worker, decode.state.worker, request_id, answer)
        exchange.blamed = None
        exchange.allow(self._settings.first_byte_timeout, late=WorkerTimeout("The worker did not answer in time."))
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
        leg = PrefillLeg(self._transport, self._request(exchange, path, prefill, first), exchange, prefill)
        failure: Exception | None = None
        exchange.blamed = prefill  # if time runs out; when it is accepted it isn't to blame any more
        try:
            async with anyio.create_task_group() as legs:
                legs.start_soon(leg.run, legs.cancel_scope)
                try:
                    await self._decode(exchange, path, decode, second, leg)
                    exchange.allow(None, late=WorkerTimeout("Nothing is late any more."))
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
                await close_response(leg.refusal)

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

        response = await open_response(self._transport, self._request(exchange, path, decode, body), progress)
        if leg is not None and response.status_code >= 400:
            # Passed on at once. Anything else may still turn out to be the prefill worker's failure.
            exchange.blamed = None
            leg.stop()
            leg = None
        if self._may_begin_again(exchange):
            answer, response = await read_ahead(response, lambda: self._allow_pause(exchange))
            gave_up, tokens = given_up(answer)
            if gave_up:
                await close_response(response)
                begin_again(exchange, tokens)
                raise WorkerPreempted("The workers gave the request up.")
        await self._pass_on(response, exchange, decode, None if leg is None else leg.accepted.wait)

    def _may_begin_again(self, exchange: Exchange) -> bool:
        request = exchange.request
        return request is not None and not request.stream and exchange.preempted < self._settings.pd_preempt_retries

    async def _pass_on_refusal(self, response: httpx.Response, exchange: Exchange, prefill: Lease) -> None:
        """Pass on a prefill worker's error. Nothing is decoded then."""
        if exchange.lease is not None:
            exchange.lease.release()
        await self._pass_on(response, exchange, prefill)

    async def _pass_on(
        self,
        response: httpx.Response,
        exchange: Exchange,
        lease: Lease,
        before_start: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        if response.status_code in BUSY:
            lease.state.breaker.back_off(retry_after(response.headers.raw))
        await relay(
            response,
            exchange,
            lease,
            own_headers=decision_headers(exchange) if self._settings.decision_headers else [],
            idle_timeout=self._settings.idle_timeout,
            send_timeout=self._settings.send_timeout,
            before_start=before_start,
        )
        note_status(lease, response.status_code)

    def _request(self, exchange: Exchange, path: str, lease: Lease, body: bytes) -> httpx.Request:
        headers = [(b"x-request-id", exchange.attempt_id.encode())]
        if lease is exchange.prefill or self._may_begin_again(exchange):
            headers.append((b"accept-encoding", b"identity"))  # it is read here, or by nobody
        return upstream_request(
            exchange,
            lease.state.worker.url + path,
            body,
            own_headers=headers,
            connect_timeout=self._settings.connect_timeout,
            write_timeout=self._settings.idle_timeout,
        )

    def _allow_pause(self, exchange: Exchange) -> None:
        """Bound the wait for more of an answer that is read here, where the client's wait isn't bounded as a whole."""
        if self._settings.first_byte_timeout is None:
            exchange.allow(self._settings.idle_timeout, WorkerTimeout("The worker paused for too long."))

    async def _read_whole(self, response: httpx.Response, exchange: Exchange, lease: Lease) -> bytes:
        answer = bytearray()
        chunks = aiter(cast("httpx.AsyncByteStream", response.stream))
        try:
            while chunk := await read_chunk(chunks):
                lease.first_byte(prefilled=True)
                self._allow_pause(exchange)
                answer += chunk
                if len(answer) > MAX_PREFILL_ANSWER_BYTES:
                    raise WorkerError("The prefill worker's answer is too large.")
            lease.succeeded()
        finally:
            lease.release()
            await close_response(response, chunks)
        return bytes(answer)


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

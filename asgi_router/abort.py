"""Owns aborts: requests that are ended because somebody asks for it, and what workers are told of those that were left.

What ends a request in an engine is its connection: llama.cpp, vLLM and SGLang stop when it is closed, and the router
closes it for every request that it stops. FastDeploy can be told besides, by the request's id; so can another router.
"""

from __future__ import annotations

import json
import logging
import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
import httpx

from asgi_router.client import Client, ClientGone
from asgi_router.errors import InvalidRequest, RequestAborted
from asgi_router.headers import first_values, header
from asgi_router.upstream.calls import WorkerCalls
from asgi_router.worker import LOCAL

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from starlette.types import ASGIApp, Receive, Scope, Send

    from asgi_router.exchange import Exchange
    from asgi_router.scheduling.state import WorkerState
    from asgi_router.upstream.calls import WholeAnswer

WORKER_PATH = "/v1/abort_requests"
"""Where FastDeploy's engines take aborts, whatever our own path is."""

PASSED_ON = "x-router-abort"
"""A header that says: a router has told all workers. It is not signed. All that a forger wins is an abort of less."""

MAX_BODY_BYTES = 512 * 1024
MAX_IDS = 1000
_ID = re.compile("[!-~]{1,256}")

FAN_OUT_TIMEOUT = 5.0
"""Seconds for all workers together."""
AT_ONCE = 32  # workers that are being told
LEFT_TIMEOUT = 2.0
"""Seconds to tell a worker that a request of its has been left."""

_ENGINE_PREFIXES = ("chatcmpl-", "cmpl-")  # of the id in an answer, which is all that some clients know

logger = logging.getLogger("asgi_router")


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """Which requests are to be aborted."""

    req_ids: tuple[str, ...]
    abort_all: bool


@dataclass(frozen=True, slots=True)
class Report:
    """What one worker says of an abort.

    Attributes:
        result: `ok`; `accepted`, which is a success without a word about requests; `unsupported`: it has no such
            path; or `failed`.
        status: what it answered; None: nothing, in time.
        aborted: by id, how many tokens a request had got; None if the worker doesn't say.
        not_found: ids that it doesn't know.
    """

    result: str = "failed"
    status: int | None = None
    aborted: dict[str, int | None] = field(default_factory=dict)
    not_found: tuple[str, ...] = ()


class Aborts:
    """Ends requests of one router, and tells workers to.

    Args:
        exchanges: the requests in flight, at any time.
        workers: the fleet.
        calls: how workers are told.
        name_workers: whether answers give the workers' URLs.
        on_disconnect: whether a worker is told of a request that was left.

    Attributes:
        busy: how many times workers are being told something at this moment.
    """

    def __init__(
        self,
        exchanges: Collection[Exchange],
        workers: Collection[WorkerState],
        calls: WorkerCalls,
        *,
        name_workers: bool,
        on_disconnect: bool,
    ) -> None:
        self._exchanges = exchanges
        self._workers = workers
        self._calls = calls
        self._name_workers = name_workers
        self._on_disconnect = on_disconnect
        self.busy = 0

    async def answer(self, scope: Scope, receive: Receive, send: Send, app: ASGIApp) -> None:
        """Do what a `POST` to `ABORT_PATH` asks for, and answer it. What a worker makes of it is told, never raised.

        `app` is the worker `local`, if there is one.
        """
        client = Client(scope, receive, send)
        with suppress(ClientGone):
            try:
                announced = first_values(scope.get("headers") or ()).get(b"content-length", b"")
                wanted = read_abort(await client.read_body(MAX_BODY_BYTES, announced))
            except InvalidRequest as error:
                await client.fail(error)
                return

            stopped, ids = self._stop(wanted)
            told = {"req_ids": ids, "abort_all": wanted.abort_all}
            reports = await self._tell_all(told, scope.get("headers") or (), app)
            failed = sum(report.result == "failed" for report in reports.values())
            logger.info("abort: %d requests stopped, %d of %d workers failed", len(stopped), failed, len(reports))

            body = json.dumps(self._summary(wanted, stopped, reports)).encode()
            length = (b"content-length", str(len(body)).encode())
            await client.start(200, [(b"content-type", b"application/json"), length])
            await client.end(body)

    async def after(self, exchange: Exchange) -> None:
        """Tell the worker of a request that was left by its client, or by us as we shut down, to stop working on it.

        To be called when all is over. It takes `LEFT_TIMEOUT` at most; only a native cancellation comes out.
        """
        if not self._on_disconnect or exchange.lease is None or not _was_left(exchange):
            return

        workers = [lease.state.worker for lease in (exchange.prefill, exchange.lease) if lease is not None]
        request_id = exchange.worker_id or exchange.ids.request_id
        # The wrapped app was cancelled itself. And a client may have come back already, with the same id.
        if workers[0].is_local or any(other.ids.request_id == exchange.ids.request_id for other in self._exchanges):
            return

        self.busy += 1
        try:
            with anyio.move_on_after(LEFT_TIMEOUT, shield=True):
                # In a task of its own a native cancellation doesn't reach the connection pool (`Dispatcher` says why).
                async with anyio.create_task_group() as tasks:
                    for worker in workers:
                        tasks.start_soon(self._tell_left, worker.url, request_id)
        finally:
            self.busy -= 1

    def _stop(self, wanted: AbortRequest) -> tuple[set[str], list[str]]:
        """Stop our own requests; return their names (those that were asked for), and the ids to be told to workers."""
        asked = set(wanted.req_ids)
        stopped: set[str] = set()
        ids = dict.fromkeys(wanted.req_ids)
        for exchange in list(self._exchanges):
            found = {exchange.ids.request_id} if wanted.abort_all else asked.intersection(_names(exchange))
            if found and not exchange.client.finished:
                exchange.stop(RequestAborted("The request was aborted."))
                stopped |= found
                ids[exchange.worker_id or exchange.ids.request_id] = None
        return stopped, list(wanted.req_ids if wanted.abort_all else ids)

    async def _tell_all(
        self, told: Mapping[str, object], headers: Iterable[tuple[bytes, bytes]], app: ASGIApp
    ) -> dict[str, Report]:
        """Tell all workers at the same time, those that are draining or ill included; return their reports by URL."""
        # Routers that are each other's workers would pass an abort on for ever.
        passed_on = bool(header(headers, PASSED_ON.encode()))
        reports = {state.worker.url: Report() for state in self._workers if state.worker.is_local or not passed_on}
        key = header(headers, b"authorization")
        limiter = anyio.Semaphore(AT_ONCE)

        async def tell(url: str) -> None:
            # The wrapped app may ask for the client's key, as it would without us. Other workers never see it here.
            local = url == LOCAL
            calls = WorkerCalls(httpx.ASGITransport(app)) if local else self._calls
            own = {"authorization": key} if local and key else {PASSED_ON: "1"}
            async with limiter:
                answer = await calls.call(
                    "POST",
                    ("http://local" if local else url) + WORKER_PATH,
                    timeout=FAN_OUT_TIMEOUT,
                    json=told,
                    headers=own,
                )
            reports[url] = read_report(answer)

        self.busy += 1
        try:
            with anyio.move_on_after(FAN_OUT_TIMEOUT):
                async with anyio.create_task_group() as tasks:
                    for url in reports:
                        tasks.start_soon(tell, url)
        finally:
            self.busy -= 1
        return reports

    async def _tell_left(self, url: str, request_id: str) -> None:
        answer = await self._calls.call(
            "POST", url + WORKER_PATH, timeout=LEFT_TIMEOUT, json={"req_ids": [request_id]}, headers={PASSED_ON: "1"}
        )
        logger.debug("%s: told of a request that was left: %s", url, read_report(answer).result)

    def _summary(self, wanted: AbortRequest, stopped: set[str], reports: dict[str, Report]) -> dict[str, object]:
        aborted: dict[str, int | None] = dict.fromkeys(sorted(stopped))
        for report in reports.values():
            for request_id, tokens in report.aborted.items():
                # Prefill and decode workers both know a request. The second has written its tokens.
                known = aborted.get(request_id)
                aborted[request_id] = tokens if known is None else max(known, tokens or 0)

        missing = [request_id for request_id in wanted.req_ids if request_id not in aborted]
        sure = not any(report.result in ("accepted", "failed") for report in reports.values())
        return {
            "aborted": [{"request_id": key, "output_token_count": tokens} for key, tokens in aborted.items()],
            "not_found": missing if sure else [],
            "unconfirmed": [] if sure else missing,
            "workers": [
                {
                    **({"worker": url} if self._name_workers else {}),
                    "result": report.result,
                    "status": report.status,
                    "aborted": len(report.aborted),
                    "not_found": len(report.not_found),
                }
                for url, report in reports.items()
            ],
        }


def read_abort(body: bytes) -> AbortRequest:
    """Read what `POST /v1/abort_requests` takes: `req_ids`, a list of ids, or `abort_all`. Other fields don't count.

    Raises:
        InvalidRequest: it is no such thing, asks for nothing at all, or for more than `MAX_IDS` requests.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise InvalidRequest("The request body is not valid JSON.") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("The request body must be a JSON object.")

    ids, abort_all = fields.get("req_ids"), fields.get("abort_all")
    if not isinstance(abort_all, bool | None):
        raise InvalidRequest("abort_all must be true or false.")
    if not isinstance(ids, list | None):
        raise InvalidRequest("req_ids must be a list of strings.")
    ids = ids or []
    if len(ids) > MAX_IDS:
        raise InvalidRequest(f"req_ids has more than {MAX_IDS} items.")
    # An empty id is no id: there are engines that take it for all of them.
    if not all(isinstance(request_id, str) and _ID.fullmatch(request_id) for request_id in ids):
        raise InvalidRequest("An id in req_ids must be 1 to 256 printable ASCII characters, without spaces.")
    if not ids and not abort_all:
        raise InvalidRequest("req_ids must name a request, or abort_all be true.")

    return AbortRequest(tuple(dict.fromkeys(ids)), bool(abort_all))


def read_report(answer: WholeAnswer | None) -> Report:
    """Read a worker's answer: FastDeploy's, with `aborted` and `not_found` in `result`, or one like our own."""
    if answer is None:
        return Report()
    if answer.status in (404, 405):
        return Report("unsupported", answer.status)
    if not 200 <= answer.status < 300:
        return Report("failed", answer.status)

    try:
        fields = json.loads(answer.body)
    except (ValueError, RecursionError):
        fields = None
    if isinstance(fields, dict) and isinstance(fields.get("result"), dict):
        fields = fields["result"]
    if not isinstance(fields, dict) or not {"aborted", "not_found"} & fields.keys():
        return Report("accepted", answer.status)

    return Report("ok", answer.status, dict(_aborted(fields.get("aborted"))), _ids(fields.get("not_found")))


def _aborted(items: object) -> Iterator[tuple[str, int | None]]:
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict):
            tokens = item.get("output_token_count")
            for request_id in _ids([item.get("request_id")]):
                yield request_id, tokens if isinstance(tokens, int) and not isinstance(tokens, bool) else None


def _ids(items: object) -> tuple[str, ...]:
    items = items if isinstance(items, list) else []
    return tuple(item for item in items if isinstance(item, str) and _ID.fullmatch(item))


def _names(exchange: Exchange) -> Iterator[str]:
    """Give all that a client may call a request by: its id, the header it sent, the id in an engine's answer."""
    headers = exchange.client.scope.get("headers") or ()
    for request_id in (exchange.ids.request_id, *(v.decode("latin-1") for k, v in headers if k == b"x-request-id")):
        yield request_id
        yield from (prefix + request_id for prefix in _ENGINE_PREFIXES)


def _was_left(exchange: Exchange) -> bool:
    if exchange.outcome == "client_gone":
        return not exchange.client.finished  # else the worker had done its work
    return exchange.outcome == "shutting_down"

"""Owns the admin API: workers register, drain and leave over HTTP, and anyone who may ask sees how they are.

The first four routes, and the shape of their answers, are those of FastDeploy's router, so that its engines register
unchanged. Nothing is admitted by where it comes from: behind a reverse proxy a client's address proves nothing.
"""

from __future__ import annotations

import hmac
import logging
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from asgi_router.addresses import AllowedHosts
from asgi_router.fleet.registration import RegistrationError, read_registration
from asgi_router.worker import Role

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from asgi_router.fleet.health import HealthMonitor
    from asgi_router.fleet.registry import Registry
    from asgi_router.scheduling.state import WorkerState
    from asgi_router.settings import RouterSettings
    from asgi_router.stats import RouterStats
    from asgi_router.worker import Worker

MAX_BODY_BYTES = 64 * 1024

logger = logging.getLogger("asgi_router")


class Administered(Protocol):
    """What the admin API needs of a router."""

    @property
    def settings(self) -> RouterSettings: ...
    @property
    def workers(self) -> Registry: ...
    @property
    def monitor(self) -> HealthMonitor: ...
    def stats(self) -> RouterStats:
        """Return the counters of this moment."""
        ...


def admin_app(router: Administered) -> Starlette:
    """Make the admin API of a router, to be mounted anywhere.

    It is closed (403) to requests without `ADMIN_TOKEN` as a bearer token, and to all of them where there is no
    token; `ADMIN_OPEN` opens it to everyone.
    """
    admin = _Admin(router)
    app = Starlette(
        routes=[
            Route("/register", admin.register, methods=["POST"]),
            Route("/registered", admin.registered),
            Route("/registered_number", admin.registered_number),
            Route("/health_generate", admin.health_generate),
            Route("/workers", admin.workers, methods=["GET", "DELETE"]),
            Route("/workers/drain", admin.drain, methods=["POST"]),
            Route("/workers/breaker", admin.breaker, methods=["POST"]),
        ],
        # Around the routes, so that a closed API doesn't even say which paths there are.
        middleware=[Middleware(_Gate, settings=router.settings)],
        exception_handlers={HTTPException: _refuse, ClientDisconnect: _refuse},
    )
    app.router.redirect_slashes = False
    return app


def _answer(status: int, message: str, **fields: object) -> JSONResponse:
    return JSONResponse({"code": status, "msg": message, **fields}, status)


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, HTTPException):
        answer = _answer(error.status_code, error.detail)
        answer.headers.update(error.headers or {})
        return answer
    return _answer(400, "the request ended before its body did")


class _Gate:
    """Lets requests pass that may see and change the fleet."""

    def __init__(self, app: ASGIApp, settings: RouterSettings) -> None:
        self._app = app
        self._open = settings.admin_open
        self._token = settings.admin_token.get_secret_value().encode() if settings.admin_token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not ((self._open and not _from_a_page(scope)) or self._has_token(scope)):
            await _answer(403, "closed: the admin token is needed")(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _has_token(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if self._token is None or len(given) != 1:
            return False

        scheme, _, token = given[0].partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._token)


def _from_a_page(scope: Scope) -> bool:
    """Tell whether a web page of another origin has made a browser ask: from inside a network that is trusted."""
    hosts = {value for name, value in scope["headers"] if name == b"host"}
    origins = {value.partition(b"://")[2] for name, value in scope["headers"] if name == b"origin"}
    return bool(origins) and origins != hosts


class _Admin:
    """The routes. Each changes the fleet in one step, so that requests in flight never see half a change."""

    def __init__(self, router: Administered) -> None:
        self._router = router
        self._allowed = AllowedHosts(router.settings.register_allow)

    async def register(self, request: Request) -> JSONResponse:
        """Let a worker join that answers a probe; one with the same URL is replaced."""
        body = await _read_body(request)
        try:
            worker = read_registration(body, mode=self._router.settings.mode)
        except RegistrationError as exc:
            logger.warning("registration refused: %s", exc)
            return _answer(400, str(exc))

        if urlsplit(worker.url).hostname not in self._allowed:
            logger.warning("%s: registration refused: not in REGISTER_ALLOW", worker.url)
            return _answer(403, "REGISTER_ALLOW doesn't allow this host_ip")
        if not await self._router.monitor.probe(worker.url):
            logger.warning("%s: registration refused: no answer to a health probe", worker.url)
            return _answer(503, f"{worker.url} service is not healthy")

        self._router.workers.add(self._with_what_was_known(worker))
        logger.info("%s: registered as %s", worker.url, worker.role)
        return _answer(200, "Register success")

    async def registered(self, request: Request) -> JSONResponse:
        """List the workers by role, in the seed's words."""
        return _answer(
            200,
            "success",
            **{role: [_described(worker) for worker in self._of(role)] for role in reversed(Role)},
        )

    async def registered_number(self, request: Request) -> JSONResponse:
        """Count the workers by role."""
        return JSONResponse({role: len(self._of(role)) for role in Role})

    async def health_generate(self, request: Request) -> JSONResponse:
        """Probe all workers now, and say which of them answer. Changes nothing: the monitor has its own probes."""
        healthy: dict[str, bool] = {}

        async def probe(url: str) -> None:
            healthy[url] = await self._router.monitor.probe(url)

        async with anyio.create_task_group() as tasks:
            for state in self._router.workers:
                healthy[state.worker.url] = False
                tasks.start_soon(probe, state.worker.url)
        return _answer(200 if all(healthy.values()) else 503, "Health check complete", workers=healthy)

    async def workers(self, request: Request) -> JSONResponse:
        """Return `Router.stats()`: every worker with its counters and its health. On `DELETE`, remove one."""
        if request.method == "DELETE":
            return self._remove(request)
        return JSONResponse(asdict(self._router.stats()))

    async def drain(self, request: Request) -> JSONResponse:
        """Give a worker no new requests, or take it back."""
        state = self._asked_for(request)
        draining = {"true": True, "false": False}.get(request.query_params.get("draining", "true").lower())
        if draining is None:
            raise HTTPException(400, "draining must be true or false")

        self._router.workers.drain(state.worker.url, draining=draining)
        logger.info("%s: %s", state.worker.url, "draining" if draining else "not draining any more")
        return _answer(
            200, "Drain success" if draining else "Undrain success", draining=draining, requests=state.requests
        )

    async def breaker(self, request: Request) -> JSONResponse:
        """Open a worker's circuit breaker for one cool-down, or close it."""
        state = self._asked_for(request)
        wanted = request.query_params.get("state", "").lower()
        if wanted not in ("open", "closed"):
            raise HTTPException(400, "state must be open or closed")

        self._router.workers.set_breaker(state.worker.url, open=wanted == "open")
        logger.info("%s: breaker %s by hand", state.worker.url, wanted)
        return _answer(200, "Breaker success", breaker=state.breaker.state)

    def _remove(self, request: Request) -> JSONResponse:
        state = self._asked_for(request)
        self._router.workers.remove(state.worker.url)
        logger.info("%s: removed", state.worker.url)
        return _answer(200, "Remove success", requests=state.requests)

    def _with_what_was_known(self, worker: Worker) -> Worker:
        # Engines don't tell these when they register again: what an operator gave stays.
        for state in self._router.workers:
            known = state.worker
            if known.url == worker.url:
                return replace(worker, models=worker.models or known.models, slots=worker.slots or known.slots)
        return worker

    def _of(self, role: Role) -> list[Worker]:
        return [state.worker for state in self._router.workers if state.worker.role is role]

    def _asked_for(self, request: Request) -> WorkerState:
        url = request.query_params.get("url")
        if not url:
            raise HTTPException(400, "url is required, in the query")
        try:
            return self._router.workers.get(url)
        except ValueError:
            raise HTTPException(400, "url is not the URL of a worker") from None
        except KeyError:
            raise HTTPException(404, "no worker has this url") from None


def _described(worker: Worker) -> dict[str, object]:
    """Describe a worker as FastDeploy's router does: ports as text, lists never null."""
    return {
        "url": worker.url,
        "worker_type": worker.role,
        "connector_port": str(worker.connector_port or ""),
        "engine_worker_queue_port": str(worker.engine_worker_queue_port or ""),
        "transfer_protocol": worker.transfer_protocol,
        "rdma_ports": worker.rdma_ports,
        "device_ids": worker.device_ids,
        "metrics_port": str(worker.metrics_port or ""),
        "tp_size": worker.tp_size or 1,
    }


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    async with aclosing(request.stream()) as chunks:
        async for chunk in chunks:
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
    return bytes(body)

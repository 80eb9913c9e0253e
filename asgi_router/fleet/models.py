"""Owns which models the workers say they serve, and the answers to `GET /v1/models` and `GET /v1/models/{id}`.

1. A worker whose description lists models is not asked: that list holds. Any other one is asked when it joins or the
   router opens, and again once an interval; its newest answer counts, for adapters come and go. A question that fails,
   or is answered with nonsense, changes nothing.
2. A worker of which nothing is known serves every model. One that answers with an empty list serves none.
3. What is listed is what isn't refused with 404: the models of all workers. Those that only an unhealthy or draining
   worker serves are among them, for the answer to a request is then 503: later.
4. A router that is another's worker answers the other's question for its own worker `local` alone: if both told the
   other what they have heard, a model that has gone would stay for ever. Without a `local` it answers 503 while it
   doesn't know all, for a list that is too short would keep requests away.
"""

from __future__ import annotations

import json
import logging
import math
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import anyio
from starlette.responses import Response

from asgi_router.errors import NoWorker, UnknownModel
from asgi_router.fleet.rounds import Rounds

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from starlette.types import ASGIApp, Receive, Scope, Send

    from asgi_router.scheduling.state import WorkerState
    from asgi_router.upstream.calls import WholeAnswer, WorkerCalls

PATH = "/v1/models"
ASKED_BY_A_ROUTER = "x-router-models"

ASK_TIMEOUT = 5.0
"""Seconds that a worker may take to answer."""
LOOK_EVERY = 1.0
"""Seconds after which it is looked for workers that have joined."""

MAX_MODELS = 4096
MAX_NAME = 512
MAX_OBJECT_BYTES = 16 * 1024
"""Of what a worker says of one model. What is longer is not passed on; the name counts all the same."""

logger = logging.getLogger("asgi_router")


class Models:
    """Asks the workers for their models, notes the answers on their states, and tells clients of them all.

    Args:
        workers: the fleet, iterated anew for each round.
        calls: how workers are asked.
        interval: seconds from one question to the next.
        clock: monotonic seconds.
        on_change: called after a worker has got other models than before.

    Attributes:
        local_app: what the worker `local` is; None: it is not asked.
    """

    def __init__(
        self,
        workers: Collection[WorkerState],
        calls: WorkerCalls,
        interval: float,
        clock: Callable[[], float],
        *,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._workers = workers
        self._calls = calls
        self._interval = interval
        self._clock = clock
        self._on_change = on_change
        self._rounds = Rounds(workers, self._ask, interval=interval)
        self._asked: WeakKeyDictionary[WorkerState, float] = WeakKeyDictionary()  # when
        self._under_way: dict[WorkerState, anyio.Event] = {}
        self.local_app: ASGIApp | None = None

    async def run(self) -> None:
        """Ask until cancelled, each worker at once and then once an interval. May run several times at once."""
        self._asked.clear()
        async with anyio.create_task_group() as tasks:
            while True:
                tasks.start_soon(self.ask)
                await anyio.sleep(min(LOOK_EVERY, self._interval))

    async def ask(self) -> None:
        """Ask those workers whose last answer is older than the interval, all at the same time."""
        now = self._clock()
        await self._rounds.once(
            [
                state
                for state in self._workers
                if now - self._asked.get(state, -math.inf) >= self._interval and not state.worker.models
            ]
        )

    def is_asked(self, scope: Scope, path: str) -> bool:
        """Tell whether the HTTP request `scope` for the route `path` is to be answered here, and not by the app."""
        if scope["method"] not in ("GET", "HEAD") or (path != PATH and not path[:-1].startswith(f"{PATH}/")):
            return False
        return not (_by_a_router(scope) and any(state.worker.is_local for state in self._workers))

    async def answer(self, scope: Scope, receive: Receive, send: Send, path: str) -> None:
        """Answer with all models, or with the one whose name follows `/v1/models/` in `path`.

        Where nobody asks the workers in the background, they are asked now, no more than once an interval.
        """
        await self.ask()
        with anyio.move_on_after(ASK_TIMEOUT):
            # Somebody else may have asked just now. Who has been heard of before is not waited for.
            for answered in [self._under_way[state] for state in self._unknown() if state in self._under_way]:
                await answered.wait()

        models = self._union()
        name, status = path.removeprefix(PATH).removeprefix("/"), 200
        if _by_a_router(scope) and self._unknown():
            status, body = NoWorker.status, NoWorker("Not all workers say which models they serve.").body()
        elif not name:
            body = b'{"object": "list", "data": [' + b", ".join(models.values()) + b"]}"
        elif name in models:
            body = models[name]
        else:
            status, body = UnknownModel.status, UnknownModel("No worker serves this model.").body()

        response = Response(body, status, media_type="application/json")
        if scope["method"] == "HEAD":
            response.body = b""
        await response(scope, receive, send)

    def _unknown(self) -> list[WorkerState]:
        return [state for state in self._workers if state.discovered is None and not state.worker.models]

    def _union(self) -> dict[str, bytes]:
        """Return what is said of each model: by the first worker that says anything, else by us."""
        models: dict[str, bytes] = {}
        for state in self._workers:
            for name, said in () if state.worker.models else (state.discovered or {}).items():
                models.setdefault(name, said)
        for state in self._workers:
            for name in state.worker.models:
                models.setdefault(name, described(name))
        return models

    async def _ask(self, state: WorkerState) -> None:
        first = state not in self._asked
        self._asked[state] = self._clock()
        self._under_way[state] = answered = anyio.Event()
        try:
            self._note(state, await self._call(state), first=first)
        finally:
            del self._under_way[state]
            answered.set()

    def _note(self, state: WorkerState, answer: WholeAnswer | None, *, first: bool) -> None:
        models = read_models(answer.body) if answer and answer.status == 200 else None
        if models is None:
            if first:
                what = f"status {answer.status}" if answer else "no answer"
                logger.warning("%s: doesn't say which models it serves (%s)", state.worker.url, what)
            return

        known, state.discovered = state.discovered, models
        if known is None or known.keys() != models.keys():
            logger.info("%s: serves %d models", state.worker.url, len(models))
            self._on_change()

    async def _call(self, state: WorkerState) -> WholeAnswer | None:
        calls, url = self._calls, state.worker.url
        if state.worker.is_local:
            if self.local_app is None:
                return None
            calls, url = calls.to_app(self.local_app), "http://local"
        # Nothing is left of the connection: where the router isn't open, nobody would close it.
        headers = {ASKED_BY_A_ROUTER: "1", "connection": "close"}
        return await calls.call("GET", url + PATH, timeout=ASK_TIMEOUT, headers=headers)


def _by_a_router(scope: Scope) -> bool:
    return any(name == ASKED_BY_A_ROUTER.encode() for name, _ in scope.get("headers") or ())


def read_models(body: bytes) -> dict[str, bytes] | None:
    """Read a worker's list of models: what it says of each (JSON), by name.

    What can't be the name of a model is passed over. None: it is no such list, holds nothing but that, or is too long.
    """
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return None
    entries = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(entries, list) or len(entries) > MAX_MODELS:
        return None

    models: dict[str, bytes] = {}
    for entry in entries:
        name = entry.get("id") if isinstance(entry, dict) else None
        if isinstance(name, str) and 0 < len(name) <= MAX_NAME and name not in models:
            models[name] = _as_json(entry) or described(name)
    return models if models or not entries else None


def described(name: str) -> bytes:
    """Return a model as OpenAI describes one, where nothing but its name is known (JSON)."""
    return json.dumps({"id": name, "object": "model", "created": 0, "owned_by": "asgi-router"}).encode()


def _as_json(entry: dict[str, object]) -> bytes | None:
    try:
        text = json.dumps(entry, allow_nan=False).encode()
    except (ValueError, RecursionError):  # Python reads NaN and endless numbers, which others can't
        return None
    return text if len(text) <= MAX_OBJECT_BYTES else None

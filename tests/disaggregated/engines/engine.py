"""Owns one fake engine as an ASGI app: it checks what it receives, waits for the other leg, and answers as asked."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

import anyio
import httpx

from tests.chaos.worker import Connection
from tests.disaggregated.engines.hand_over import HandOver, KvStore, Refused, fetch
from tests.disaggregated.engines.job import Job

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping

    from starlette.types import Receive, Scope, Send

    from tests.disaggregated.engines.dialects import Body, EngineDialect, Place
    from tests.disaggregated.engines.job import Stage

ROUTES = ("/v1/chat/completions", "/v1/completions")


@dataclass
class State:
    """What an engine does and has done, as its path `/state` tells it.

    Attributes:
        running: requests that it has received, and that have not ended.
        stuck: those of them that hang because they were asked to.
        waiting: those of them that wait for the other leg.
        served: answers that were given to their end.
        aborted: requests whose client left.
        alone: requests that a decode engine has served without a prefill leg.
        refused: what was wrong with requests.
        received: the bodies of all requests, as they came.
    """

    running: int = 0
    stuck: int = 0
    waiting: int = 0
    served: int = 0
    aborted: int = 0
    alone: int = 0
    refused: list[str] = field(default_factory=list)
    received: list[str] = field(default_factory=list)


@dataclass
class Request:
    """One completion, while it is served."""

    scope: Scope
    send: Send
    body: Body
    job: Job
    chat: bool

    @property
    def stream(self) -> bool:
        """Whether the answer is an event stream."""
        return self.body.get("stream") is True


class Engine:
    """The app of both ports.

    Args:
        dialect: what requests must look like.
        me: which engine this is.
    """

    def __init__(self, dialect: EngineDialect, me: Place) -> None:
        self._dialect = dialect
        self._me = me
        self._store = KvStore()
        self._state = State()
        self._changes = self._store.changes
        self._client: httpx.AsyncClient | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        raw, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            raw += message.get("body", b"")
            more = message.get("more_body", False)

        if scope["server"][1] == self._me.connector_port:
            await self._while_connected(receive, self._give_cache(raw, send))
        elif scope["path"] == "/state":
            await self._tell_state(scope, send)
        elif scope["path"] == "/forget":
            self._state = State()
            self._store.drop(list(self._store.kept))
            await _reply(send, 200, {})
        elif scope["path"] not in ROUTES:
            await _reply(send, 200, {})
        else:
            self._state.received.append(raw.decode())
            with self._counting("running"):
                if await self._while_connected(receive, self._complete(raw, scope, send)):
                    self._state.served += 1
                else:
                    self._state.aborted += 1

    async def _tell_state(self, scope: Scope, send: Send) -> None:
        # `?running=0&stuck=1`: the answer comes when it is so.
        wanted = [(name, int(value)) for name, value in parse_qsl(scope["query_string"].decode())]
        await self._changes.until(lambda: all(getattr(self._state, name) == value for name, value in wanted))
        await _reply(send, 200, {**vars(self._state), "kept": sorted(self._store.kept)})

    @contextmanager
    def _counting(self, name: str) -> Iterator[None]:
        setattr(self._state, name, getattr(self._state, name) + 1)
        self._changes.tell()
        try:
            yield
        finally:
            setattr(self._state, name, getattr(self._state, name) - 1)
            self._changes.tell()

    @staticmethod
    async def _while_connected(receive: Receive, work: Coroutine[None, None, None]) -> bool:
        """Do the work, unless the client leaves first: false."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(receive())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
                return True
            return False
        finally:
            task.cancel()
            gone.cancel()
            await asyncio.wait({task, gone})

    async def _give_cache(self, raw: bytes, send: Send) -> None:
        wanted = json.loads(raw)
        try:
            await self._store.give(wanted["keys"], wanted["seal"])
        except Refused as refused:
            self._state.refused.append(str(refused))
            await _reply(send, 409, str(refused))
        else:
            await _reply(send, 200, {})

    async def _complete(self, raw: bytes, scope: Scope, send: Send) -> None:
        try:
            body = json.loads(raw)
            chat = scope["path"] == ROUTES[0]
            request = Request(scope, send, body, Job.of(body), chat)
            hand_over = self._dialect.read(body, raw, chat=chat)
            await (self._prefill if self._me.role == "prefill" else self._decode)(request, hand_over)
        except Refused as refused:
            self._state.refused.append(str(refused))
            await _reply(send, 400, _error(str(refused)))

    async def _prefill(self, request: Request, hand_over: HandOver | None) -> None:
        assert hand_over is not None
        if await self._trouble(request, "begin"):
            return

        self._store.begin(hand_over)
        try:
            if request.stream:
                await self._start(request)
            if self._dialect.at_once:
                await self._wait_for(self._store.asked(hand_over.keys))
            self._store.computed(hand_over.keys)
            if self._dialect.at_once:
                await self._wait_for(self._store.fetched(hand_over.keys))
            await self._answer(request, 1, self._dialect.answer(hand_over))
        finally:
            # Where decode comes later, the cache stays until it is fetched; real engines free it in the end, too.
            if self._dialect.at_once or self._store.kept.isdisjoint(hand_over.keys):
                self._store.drop(hand_over.keys)

    async def _decode(self, request: Request, hand_over: HandOver | None) -> None:
        if await self._trouble(request, "begin"):
            return

        if request.stream:
            await self._start(request)
        if hand_over is None:
            self._state.alone += 1
        else:
            await self._wait_for(fetch(self._http, hand_over))
        await self._answer(request, request.job.pieces, {})

    @property
    def _http(self) -> httpx.AsyncClient:
        if self._client is None:
            limits = httpx.Limits(max_keepalive_connections=0)
            self._client = httpx.AsyncClient(timeout=None, trust_env=False, verify=False, limits=limits)
        return self._client

    async def _wait_for(self, other_leg: Coroutine[None, None, None]) -> None:
        with self._counting("waiting"):
            await other_leg

    async def _start(self, request: Request) -> None:
        kind = b"text/event-stream" if request.stream else b"application/json"
        head = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}
        await request.send(head)
        await self._trouble(request, "head")

    async def _answer(self, request: Request, pieces: int, more: Mapping[str, object]) -> None:
        """Send the body; of an event stream the head has gone before."""
        if not request.stream:
            await self._start(request)
        for index, piece in enumerate(_pieces(request, pieces, more)):
            await request.send({"type": "http.response.body", "body": piece, "more_body": True})
            if index == 0:
                await self._trouble(request, "middle")
        await request.send({"type": "http.response.body", "body": b""})

    async def _trouble(self, request: Request, stage: Stage) -> bool:
        """Let go wrong what shall at this stage; whether it was answered."""
        trouble = request.job.trouble(self._me.role, self._me.port)
        if trouble is None or trouble.at != stage:
            return False

        match trouble.what:
            case "error":
                await _reply(request.send, trouble.status, _error(f"{self._me.role} failed as it was asked to"))
                return True
            case "hang":
                with self._counting("stuck"):
                    await anyio.sleep_forever()
            case "slow":
                await anyio.sleep(trouble.seconds)
            case "reset":
                Connection.reset(tuple(request.scope["client"]))
                await anyio.sleep_forever()  # until uvicorn has noticed
            case "exit":
                os._exit(1)
        return False


def _attempt(body: Body) -> int:
    """The number of this attempt by the suffix of its request id, from 0."""
    _, _, number = str(body.get("request_id")).rpartition("-retry")
    return int(number) if number.isdigit() else 0


def _pieces(request: Request, count: int, more: Mapping[str, object]) -> list[bytes]:
    """The body of an answer of `count` words, and whatever `more` if it is no stream."""
    words = [f"{number} " for number in range(count)]
    if request.stream:
        events: list[object] = []
        for number, word in enumerate(words):
            content = {"delta": {"content": word}} if request.chat else {"text": word}
            ended = "stop" if number == count - 1 else None
            events.append({"id": "fake", "choices": [{"index": 0, **content, "finish_reason": ended}]})
        return [*(b"data: %s\n\n" % json.dumps(event).encode() for event in events), b"data: [DONE]\n\n"]

    text = "".join(words)
    choice: Body = {"message": {"role": "assistant", "content": text}} if request.chat else {"text": text}
    choice["finish_reason"] = "stop"
    if (attempt := _attempt(request.body)) < request.job.reschedules:
        choice |= {"finish_reason": "pd_reschedule", "completion_token_ids": [attempt]}
    answer = {"id": "fake", "choices": [{"index": 0, **choice}], **more}
    whole = json.dumps(answer).encode()
    return [whole[:20], whole[20:]]


def _error(message: str) -> Body:
    return {"error": {"message": message, "type": "fake", "param": None, "code": "fake"}}


async def _reply(send: Send, status: int, value: object) -> None:
    body = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

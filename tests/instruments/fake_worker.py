"""A fleet of scripted workers behind one `httpx.AsyncBaseTransport`: no sockets, every step is the test's.

Shows: which worker got which bytes; how its caller takes a late head, a failure at any point, a close that
is slow, raises or hangs; that every response is closed, not read after that, and not read twice. Cannot
show: connection pools, HTTP framing, keep-alive, or time-outs that a real transport would raise by itself
(script those as exceptions, and read what the caller asked for in `Call.timeout`). `raw_http.py` and real
uvicorn workers are for these.

    fleet = FakeFleet({"http://w1:8000": Script.sse("Hel", "lo"), "http://w2:8000": Script(head=[gate])})
    ...                                    # Router(settings, transport=fleet)
    await fleet["http://w2:8000"].received(1)
    fleet.assert_clean()
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import anyio.lowlevel
import httpx

from tests.instruments.steps import HANG, Changes, Pause, perform

if TYPE_CHECKING:
    from typing import Self

__all__ = ["HANG", "Call", "FakeFleet", "FakeStream", "FakeWorker", "Script"]

Step = bytes | Pause


@dataclass(frozen=True, kw_only=True)
class Script:
    """How a worker answers one request. `dataclasses.replace` changes a ready-made one.

    The steps of `connect` come before the worker knows of the request, those of `head` after it has read
    the request; `body` gives one chunk per `bytes`, with a checkpoint before each; `close` is played inside
    `aclose()`.
    """

    status: int = 200
    headers: Sequence[tuple[str, str]] = (("content-type", "text/event-stream"),)
    connect: Sequence[Pause] = ()
    head: Iterable[Pause] = ()
    body: Iterable[Step] = (b"data: one\n\n", b"data: two\n\n", b"data: [DONE]\n\n")
    close: Sequence[Pause] = ()

    @classmethod
    def sse(cls, *texts: str) -> Script:
        """A chat completion stream with one event per text, then `[DONE]`."""
        deltas = [{"choices": [{"index": 0, "delta": {"content": text}}]} for text in texts]
        events = [f"data: {json.dumps(delta)}\n\n".encode() for delta in deltas]
        return cls(body=[*events, b"data: [DONE]\n\n"])

    @classmethod
    def json(cls, value: object, *, status: int = 200) -> Script:
        """A JSON answer of declared length, in one chunk."""
        body = json.dumps(value).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body)))]
        return cls(status=status, headers=headers, body=[body])


# One script for every request, one per request with the last one repeated, or one made for each request.
Scripts = Script | Sequence[Script] | Callable[[httpx.Request], Script]


@dataclass
class Call:
    """One request as the worker saw it, and how far its answer came."""

    method: str
    url: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    timeout: dict[str, float | None]
    stage: Literal["head", "answered", "failed", "cancelled"] = "head"
    stream: FakeStream | None = None


class FakeStream(httpx.AsyncByteStream):
    """A response body that plays its script, and takes note of misuse.

    A plain iterator, not an async generator, so that nothing hangs on when a generator is finalised.
    """

    def __init__(self, script: Script, misuse: list[str], changes: Changes) -> None:
        self.chunks_given = 0
        self.ended = False  # the body was read to its end, or failed
        self.close_calls = 0
        self.closed = False  # a close came to its end, raising or not; false if it was cancelled
        self._steps: Iterator[Step] = iter(script.body)
        self._close_steps = script.close
        self._misuse = misuse
        self._changes = changes
        self._iterators = 0
        self._reading = False

    def __aiter__(self) -> Self:
        self._iterators += 1
        if self._iterators > 1:
            self._misuse.append("the body was iterated twice")
            raise httpx.StreamConsumed
        return self

    async def __anext__(self) -> bytes:
        if self.close_calls:
            self._misuse.append("the body was read after aclose()")
            raise httpx.StreamClosed
        if self._reading:
            self._misuse.append("the body was read by two tasks at once")
        self._reading = True
        try:
            return await self._next_chunk()
        finally:
            self._reading = False
            self._changes.tell()

    async def _next_chunk(self) -> bytes:
        await anyio.lowlevel.checkpoint()
        while not self.ended:
            step = next(self._steps, None)
            if isinstance(step, bytes):
                self.chunks_given += 1
                return step
            if step is None or isinstance(step, Exception):
                self.ended = True
            if step is not None:
                await perform(step)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Play `Script.close`. May be called again; only what was cancelled is played again."""
        if self._reading:
            self._misuse.append("the body was closed while it was being read")
        self.close_calls += 1
        self._changes.tell()
        if self.closed:
            return
        try:
            await anyio.lowlevel.checkpoint()
            for step in self._close_steps:
                await perform(step)
        except Exception:
            self.closed = True
            raise
        else:
            self.closed = True
        finally:
            self._changes.tell()


@dataclass
class FakeWorker:
    """One worker of the fleet. Set `scripts` to change how it answers from now on."""

    origin: str
    scripts: Scripts
    calls: list[Call] = field(default_factory=list)
    connects: int = 0  # requests that reached `Script.connect`, the failed ones included
    misuse: list[str] = field(default_factory=list)
    changes: Changes = field(default_factory=Changes, repr=False)

    @property
    def streams(self) -> list[FakeStream]:
        """The responses it gave, in order of their requests."""
        return [call.stream for call in self.calls if call.stream is not None]

    @property
    def never_closed(self) -> int:
        """How many responses nobody has begun to close: always a leak once the request is over."""
        return sum(not stream.close_calls for stream in self.streams)

    @property
    def open_responses(self) -> int:
        """How many responses are not closed yet; a close cancelled half-way leaves its response open."""
        return sum(not stream.closed for stream in self.streams)

    async def received(self, requests: int) -> None:
        """Return when that many requests have come in whole."""
        await self.changes.until(lambda: len(self.calls) >= requests)

    async def closing(self, responses: int) -> None:
        """Return when `aclose()` was called on that many responses."""
        await self.changes.until(lambda: len(self.streams) - self.never_closed >= responses)

    async def answer(self, request: httpx.Request) -> httpx.Response:
        """Play the script of this request."""
        body = await request.aread()  # here, so that the script may depend on it
        script = self._script_for(request)
        self.connects += 1
        self.changes.tell()
        await anyio.lowlevel.checkpoint()
        for step in script.connect:
            await perform(step)
        timeout: dict[str, float | None] = dict(request.extensions.get("timeout", {}))
        call = Call(request.method, str(request.url), list(request.headers.raw), body, timeout)
        self.calls.append(call)
        self.changes.tell()
        try:
            for step in script.head:
                await perform(step)
        except Exception:
            call.stage = "failed"
            raise
        except BaseException:
            call.stage = "cancelled"
            raise
        call.stage = "answered"
        call.stream = FakeStream(script, self.misuse, self.changes)
        self.changes.tell()
        extensions = {"http_version": b"HTTP/1.1"}
        return httpx.Response(script.status, headers=list(script.headers), stream=call.stream, extensions=extensions)

    def _script_for(self, request: httpx.Request) -> Script:
        if isinstance(self.scripts, Script):
            return self.scripts
        if callable(self.scripts):
            return self.scripts(request)
        return self.scripts[min(self.connects, len(self.scripts) - 1)]


class FakeFleet(httpx.AsyncBaseTransport):
    """The transport; `fleet["http://w1:8000"]` is the worker of that origin. Unknown origins fail the test."""

    def __init__(self, workers: Mapping[str, Scripts]) -> None:
        self.workers = {_origin(url): FakeWorker(_origin(url), scripts) for url, scripts in workers.items()}
        self.misuse: list[str] = []
        self.close_calls = 0

    def __getitem__(self, url: str) -> FakeWorker:
        return self.workers[_origin(url)]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        origin = _origin(request.url)
        if origin not in self.workers:
            self.misuse.append(f"a request to {origin}, which is no worker")
            raise AssertionError(self.misuse[-1])
        if self.close_calls:
            self.misuse.append("a request after the transport was closed")
            raise RuntimeError(self.misuse[-1])
        return await self.workers[origin].answer(request)

    async def aclose(self) -> None:
        self.close_calls += 1

    def assert_clean(self) -> None:
        """Raise `AssertionError` if a response is still open, or if anything was misused."""
        faults = list(self.misuse)
        for worker in self.workers.values():
            faults += [f"{worker.origin}: {misuse}" for misuse in worker.misuse]
            if worker.open_responses:
                never = f"{worker.never_closed} of them never closed"
                faults.append(f"{worker.origin}: {worker.open_responses} responses open, {never}")
        assert not faults, "; ".join(faults)


def _origin(url: str | httpx.URL) -> str:
    parsed = httpx.URL(url)
    port = parsed.port or {"http": 80, "https": 443}[parsed.scheme]
    return f"{parsed.scheme}://{parsed.host}:{port}"

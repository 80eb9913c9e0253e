"""The server half of the raw ASGI harness: `receive` and `send` for one request, and what reached the client.

`asgi_client.Exchange` adds the request and the running to this. Everything is decided by the messages
themselves or by the test; nothing here looks at a clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import anyio
import anyio.lowlevel

from tests.instruments.asgi_rules import ASGIViolation, ResponseRules
from tests.instruments.steps import DISCONNECT, HANG, Changes, Do, Pause, perform, wait_any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from starlette.types import Message

Upload = bytes | anyio.Event | Literal[Do.HANG, Do.DISCONNECT]
Moment = Literal["start", "end"] | int
Action = Pause | Literal[Do.DISCONNECT]
Server = Literal["uvicorn", "hypercorn"]

# More turns than any watcher needs to wake up, cancel, and have the cancellation delivered into our `send`.
_LINGER_TURNS = 6


class Wire:
    """What lies between the application and the client. See `Exchange` for the arguments."""

    def __init__(
        self,
        *,
        method: str,
        upload: Sequence[Upload],
        server: Server,
        at: Mapping[Moment, Action],
        late_send: Exception | None,
        send_suspends: bool,
    ) -> None:
        self.sent: list[Message] = []  # what the app tried to send, in order, whether or not it was taken
        self.status: int | None = None  # this and the next two: what the client got while it was there
        self.headers: list[tuple[bytes, bytes]] = []
        self.chunks: list[bytes] = []
        self.complete = False  # the client got the end message
        self.disconnected = False
        self.hanging = False  # a `send` is parked at a HANG
        self.violations: list[str] = []
        self.changes = Changes()

        self._upload = list(upload)
        self._upload_done = False
        self._server = server
        self._at = dict(at)
        self._late_send = late_send
        self._send_suspends = send_suspends
        self._rules = ResponseRules(method)
        self._gone = anyio.Event()  # disconnected, or the response is complete
        self._disconnect_delivered = False
        self._receiving = self._sending = False

    def disconnect(self) -> None:
        """The client goes away now: `receive` reports it, `send` reaches nobody."""
        self.disconnected = True
        self._gone.set()
        self.changes.tell()

    @property
    def starts(self) -> int:
        """How many start messages the app tried to send."""
        return self._rules.starts

    @property
    def ends(self) -> int:
        """How many end messages (`more_body` false) the app tried to send."""
        return self._rules.ends

    async def receive(self) -> Message:
        """The ASGI `receive`: body chunks, then the disconnect once the client is gone or has its answer."""
        if self._receiving:
            self._violate("the application called receive() twice at once")
        self._receiving = True
        try:
            await anyio.lowlevel.checkpoint()
            return await self._next_message()
        finally:
            self._receiving = False

    async def _next_message(self) -> Message:
        # uvicorn forgets unread body once the client is gone; hypercorn's queue still holds it.
        while not self._upload_done and not (self._gone.is_set() and self._server == "uvicorn"):
            step = self._upload[0] if self._upload else b""
            if isinstance(step, bytes):
                del self._upload[:1]
                # hypercorn always ends with an empty message of its own.
                self._upload_done = not self._upload and not (self._server == "hypercorn" and step)
                return {"type": "http.request", "body": step, "more_body": not self._upload_done}
            if step is DISCONNECT:
                self.disconnect()
            await wait_any(self._gone, step if isinstance(step, anyio.Event) else anyio.Event())
            if self._gone.is_set():
                break
            del self._upload[:1]
        await self._gone.wait()
        if self._server == "hypercorn" and self._disconnect_delivered:
            await anyio.sleep_forever()
        self._disconnect_delivered = True
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """The ASGI `send`: checks the rules, does what `at` says, and keeps what the client gets."""
        self.sent.append(dict(message))
        try:
            self._rules.check(message)
        except ASGIViolation as violation:
            self._violate(str(violation))
        if self._sending:
            self._violate("the application called send() twice at once")
        self._sending = True
        try:
            await self._send(message)
        finally:
            self._sending = False

    async def _send(self, message: Message) -> None:
        if self.disconnected:
            if self._late_send is not None:
                raise self._late_send.with_traceback(None)
            return
        actions = self._actions(message)
        for action in actions:
            if action is not DISCONNECT:
                await self._suffer(action)
        if self._gone.is_set():  # the client left while we waited
            return
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message.get("headers", ()))
        else:
            self.chunks.append(message.get("body", b""))
            self.complete = not message.get("more_body", False)
        if DISCONNECT in actions:
            self.disconnect()
        if self.complete:
            self._gone.set()
        self.changes.tell()
        if self._send_suspends:
            # A watcher must get to run inside the last send: there a normal end looks like a disconnect.
            for _ in range(_LINGER_TURNS if self._gone.is_set() else 1):
                await anyio.lowlevel.checkpoint()

    async def _suffer(self, action: Pause) -> None:
        self.hanging = action is HANG
        self.changes.tell()
        try:
            await perform(action)
        finally:
            self.hanging = False

    def _actions(self, message: Message) -> list[Action]:
        keys: list[Moment] = ["start"]
        if message["type"] == "http.response.body":
            keys = [len(self.chunks) + 1]
            keys += [] if message.get("more_body", False) else ["end"]
        return [self._at[key] for key in keys if key in self._at]

    def _violate(self, violation: str) -> None:
        self.violations.append(violation)
        raise ASGIViolation(violation)

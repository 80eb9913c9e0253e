"""What an ASGI application may send for one HTTP request, as a small state machine.

Shows: wrong order, wrong types, upper-case header names, a body that differs from its declared length. Does
not show what only a real server decides (keep-alive, framing, date and server headers): `servers.py` is for
that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Message


class ASGIViolation(AssertionError):
    """The application broke the ASGI protocol."""


class ResponseRules:
    """Checks the messages of one response in the order they are sent. `method` is the request's."""

    def __init__(self, method: str) -> None:
        self.starts = 0
        self.ends = 0
        self._bodiless = method == "HEAD"
        self._declared_length: int | None = None
        self._length = 0

    def check(self, message: Message) -> None:
        """Count the message, and raise `ASGIViolation` if it may not come now or is malformed."""
        if message["type"] == "http.response.start":
            self.starts += 1
            self._check_start(message)
        elif message["type"] == "http.response.body":
            is_end = not message.get("more_body", False)
            already_ended = self.ends > 0
            self.ends += is_end
            _require(self.starts > 0, "a body before the start")
            _require(not already_ended, "a body message after the end")
            self._check_body(message, is_end)
        else:
            raise ASGIViolation(f"a message of type {message['type']!r}")

    def _check_start(self, message: Message) -> None:
        _require(self.starts == 1, "a second start")
        status = message["status"]
        _require(type(status) is int and 200 <= status <= 599, f"status {status!r}")
        self._bodiless |= status in (204, 304)
        for name, value in message.get("headers", ()):
            _require(type(name) is bytes and type(value) is bytes, f"header {name!r}: {value!r} is not bytes")
            _require(bool(name) and name == name.lower(), f"header name {name!r} is not lower-case")
            _require(not set(b"\r\n\0") & set(name + value), f"header {name!r} with a control character")
            if name == b"content-length":
                _require(value.isdigit(), f"content-length {value!r}")
                _require(self._declared_length is None, "two content-length headers")
                self._declared_length = int(value)

    def _check_body(self, message: Message, is_end: bool) -> None:
        body = message.get("body", b"")
        _require(type(body) is bytes, f"a body of type {type(body).__name__}")
        _require(type(message.get("more_body", False)) is bool, f"more_body {message.get('more_body')!r}")
        _require(not (body and self._bodiless), "body bytes where none are allowed")
        self._length += len(body)
        if self._declared_length is not None and not self._bodiless:
            _require(self._length <= self._declared_length, "more body than content-length")
            _require(not is_end or self._length == self._declared_length, "less body than content-length")


def _require(condition: bool, violation: str) -> None:
    if not condition:
        raise ASGIViolation(f"the application sent {violation}")

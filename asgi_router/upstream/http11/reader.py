"""Owns the reading of responses, in the one way in which they can be read (RFC 9112).

llhttp, as httptools 0.9 builds it, refuses by itself: bare CR or LF, folded lines, control characters in values,
white space around names, two framings (Content-Length twice or beside Transfer-Encoding), and numbers that are none.
What it lets through, but what could be read in two ways or has no bound, is refused here:

1. any Transfer-Encoding but `chunked`, once, in HTTP/1.1 (it would read until the connection closes);
2. RTSP, ICE, HTTP/0.9 and 2.0, line ends before the first line, a status below 100, control characters in the reason;
3. a Content-Length of more than 18 digits; heads and trailers of more than 64 KiB or 128 fields (trailers and chunk
   extensions are counted from the first read that is theirs alone); more than 16 interim answers; 101.

What follows a response is no error of that response: its connection is not used again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import httptools

from asgi_router.upstream.http11.errors import InvalidAnswer

if TYPE_CHECKING:
    from asgi_router.upstream.http11.answer import Answer

MAX_HEAD = 65536  # bytes; h11, under stock httpx, allows 100 KiB
MAX_FIELDS = 128
MAX_INTERIM = 16
MAX_LENGTH_DIGITS = 18

_CONTROLS = bytes(byte for byte in (*range(32), 127) if byte != 9)
_PROTOCOL = b"HTTP/"


class ResponseReader:
    """Reads the responses on one connection, one after the other, each into its `Answer`.

    Attributes:
        began: a byte of the current response has come.
        has_head: its final head is there.
        complete: the whole of it is there.
        keeps_alive: once complete: its version, framing and fields let the connection go on.
        until_close: it ends where the connection does.
    """

    __slots__ = (
        "_answer",
        "_bodiless",
        "_chunked",
        "_fields",
        "_headers",
        "_interims",
        "_is_interim",
        "_last",
        "_parser",
        "_protocol",
        "_reason",
        "_since_body",
        "_tail",
        "began",
        "complete",
        "has_head",
        "keeps_alive",
        "until_close",
    )

    def __init__(self) -> None:
        self._parser: httptools.HttpResponseParser | None = None
        self._answer: Answer | None = None
        self._bodiless = False
        self.began = False
        self.has_head = False
        self.complete = True
        self.keeps_alive = False
        self.until_close = False

    def expect(self, answer: Answer, *, bodiless: bool) -> None:
        """Begin a response. `bodiless`: it answers a HEAD request."""
        if self._parser is None or self._bodiless:  # after HEAD it still waits for the body that was announced
            self._parser = httptools.HttpResponseParser(self)
        self._answer = answer
        self._bodiless = bodiless
        self._headers: list[tuple[bytes, bytes]] = []
        self._reason = b""
        self._protocol = b""
        self._fields = 0
        self._chunked = False
        self._is_interim = False
        self._interims = 0
        self._since_body = 0
        self._last = b""  # the body that came with the last bytes, if its length was known
        self._tail = b""  # the last bytes: five or more of them, if there were as many
        self.began = False
        self.has_head = False
        self.complete = False
        self.keeps_alive = False
        self.until_close = True

    def feed(self, data: bytes) -> None:
        """Read on.

        Raises:
            InvalidAnswer: this can't be read, and nothing that follows either.
        """
        self.began = True
        if len(self._protocol) < len(_PROTOCOL):
            self._protocol += data[: len(_PROTOCOL) - len(self._protocol)]
            if not _PROTOCOL.startswith(self._protocol):
                raise InvalidAnswer("The worker's answer is not valid in HTTP/1.1.")

        parser = self._parser
        assert parser is not None  # `expect` made it
        had_head = self.has_head
        self._since_body += len(data)
        try:
            parser.feed_data(data)
        except httptools.HttpParserError as exc:
            if not self.complete:
                raise InvalidAnswer("The worker's answer is not valid in HTTP/1.1.") from exc
            self.keeps_alive = False
        except httptools.HttpParserUpgrade:
            raise InvalidAnswer("The worker switched protocols without being asked.") from None

        self._tail = data if had_head and len(data) > 4 else self._tail[-5:] + data
        if self.complete:
            self.keeps_alive = self.keeps_alive and not self._line_ends_follow(data, had_head=had_head)
            self._answer = None
            self._tail = b""
        elif self._since_body > MAX_HEAD:
            raise InvalidAnswer("The worker's answer has an endless head, trailer or chunk extension.")
        self._last = b""

    def close(self) -> None:
        """Let the parser go: it and this object hold each other."""
        self._parser = self._answer = None

    def _line_ends_follow(self, data: bytes, *, had_head: bool) -> bool:
        """Tell whether line ends follow the response: llhttp passes over them without a word."""
        tail, last = self._tail, self._last
        if last:
            if had_head:
                return len(data) != len(last)
            if not tail.endswith(last):
                return True
            tail = tail[: -len(last)]
        return not tail.endswith(b"\r\n\r\n") or tail[-5] in b"\r\n"

    # Callbacks of httptools. What they raise, `feed_data` raises as an HttpParserError.

    def on_message_begin(self) -> None:
        if self.complete:
            raise ValueError("a second response")

    def on_status(self, reason: bytes) -> None:
        self._reason += reason
        if reason != b"OK" and len(reason.translate(None, _CONTROLS)) != len(reason):
            raise ValueError("a control character in the reason phrase")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        if self._fields > MAX_FIELDS:
            raise ValueError("too many fields")
        if self.has_head:
            return  # trailers are dropped: they may not become headers (RFC 9110, section 6.5.1)

        name = name.lower()
        self._headers.append((name, value.rstrip()))  # llhttp removes only the white space before it
        if name == b"content-length":
            self.until_close = False
            if len(value.rstrip()) > MAX_LENGTH_DIGITS:
                raise ValueError("an absurd length")
        elif name == b"transfer-encoding":
            self.until_close = False
            # With a tab behind it llhttp would read until the close.
            if self._chunked or value.rstrip(b" ").lower() != b"chunked":
                raise ValueError("an unknown transfer coding")
            self._chunked = True

    def on_headers_complete(self) -> None:
        parser = self._parser
        assert parser is not None  # it is calling
        status = parser.get_status_code()
        version = parser.get_http_version()
        if status < 100 or status == 101 or version not in ("1.1", "1.0") or (self._chunked and version == "1.0"):
            raise ValueError("a status, version or framing that may not be")
        if self._since_body > MAX_HEAD and sum(len(name) + len(value) + 4 for name, value in self._headers) > MAX_HEAD:
            raise ValueError("a large head")

        self._since_body = 0
        if status < 200:
            self._is_interim = True
            self._interims += 1
            if self._interims > MAX_INTERIM:
                raise ValueError("too many interim answers")
            return

        answer = self._answer
        assert answer is not None  # it is not complete
        answer.status = status
        answer.reason = self._reason
        answer.headers = self._headers
        answer.http_10 = version == "1.0"
        self.has_head = True
        if self._bodiless:
            self.on_message_complete()

    def on_body(self, data: bytes) -> None:
        if self.complete:
            raise ValueError("a body where there is none")
        self._since_body = 0
        if not self._chunked:
            self._last = data
        answer = self._answer
        assert answer is not None  # it is not complete
        answer.add(data)

    def on_message_complete(self) -> None:
        if self._is_interim:
            self._is_interim = False
            self._headers = []
            self._reason = b""
            self._chunked = False
            self.until_close = True
        elif not self.complete:
            assert self._parser is not None  # it is calling
            self.complete = True
            self.until_close = False
            self.keeps_alive = self._parser.should_keep_alive()

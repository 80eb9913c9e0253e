"""Owns the table of responses: what a worker may send, what becomes of it, and where stock httpx sees it otherwise."""

from __future__ import annotations

from dataclasses import dataclass

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
TWO = b"content-length: 2\r\n\r\nok"


@dataclass(frozen=True)
class Case:
    """One response.

    `wire` is all that the worker sends; then it closes if `ends`, else it waits. None as `body`: it is refused.
    `reused` tells whether the connection goes on. `stock` tells what stock httpx does otherwise: where it
    is there, the result or the connection's future differs, and else neither does.
    """

    wire: bytes
    body: bytes | None = b"ok"
    status: int = 200
    reused: bool = True
    ends: bool = False
    method: str = "POST"
    stock: str = ""


VALID = {
    "length": Case(OK + TWO),
    "empty": Case(OK + b"content-length: 0\r\n\r\n", b""),
    "length with white space": Case(OK + b"content-length: \t 2 \t\r\n\r\nok"),
    "length with zeros": Case(OK + b"content-length: 0002\r\n\r\nok"),
    "chunked": Case(CHUNKED + b"1\r\no\r\n1\r\nk\r\n0\r\n\r\n"),
    "chunked in capitals": Case(
        OK + b"Transfer-Encoding:\tCHUNKED\r\n\r\n2\r\nok\r\n0\r\n\r\n", stock="it writes it in lower case"
    ),
    "spaces behind chunked": Case(OK + b"transfer-encoding: chunked  \r\n\r\n2\r\nok\r\n0\r\n\r\n"),
    "chunked without a chunk": Case(CHUNKED + b"0\r\n\r\n", b""),
    "chunk sizes in hex": Case(CHUNKED + b"a\r\n0123456789\r\nA\r\n0123456789\r\n0\r\n\r\n", b"0123456789" * 2),
    "chunk sizes with zeros": Case(CHUNKED + b"0002\r\nok\r\n000\r\n\r\n"),
    "chunk extensions": Case(CHUNKED + b'2;a=b;c="d;e"\r\nok\r\n0;last\r\n\r\n'),
    "trailers": Case(CHUNKED + b"2\r\nok\r\n0\r\nx-sum: 1\r\nx-empty:\r\n\r\n"),
    "body of line ends": Case(OK + b"content-length: 6\r\n\r\n\r\n\r\n\r\n", b"\r\n\r\n\r\n"),
    "body like a head": Case(OK + b"content-length: 21\r\n\r\n" + OK + b"\r\n\r\n", (OK + b"\r\n\r\n")),
    "until the close": Case(OK + b"\r\nok", reused=False, ends=True),
    "until the close, empty": Case(OK + b"\r\n", b"", reused=False, ends=True),
    "HTTP/1.0": Case(b"HTTP/1.0 200 OK\r\n\r\nok", reused=False, ends=True),
    "HTTP/1.0 with a length": Case(b"HTTP/1.0 200 OK\r\n" + TWO, reused=False),
    "HTTP/1.0 that stays": Case(
        b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\n" + TWO, stock="it closes every HTTP/1.0 connection"
    ),
    "connection: close": Case(OK + b"connection: close\r\n" + TWO, reused=False),
    "connection: close in a list": Case(OK + b"connection: keep-alive, Close\r\n" + TWO, reused=False),
    "connection: close, chunked": Case(
        OK + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", reused=False
    ),
    "connection: close in a trailer": Case(
        CHUNKED + b"2\r\nok\r\n0\r\nconnection: close\r\n\r\n", reused=False, stock="it ignores trailers"
    ),
    "204": Case(b"HTTP/1.1 204 No Content\r\n\r\n", b"", 204),
    "304 with a length": Case(b"HTTP/1.1 304 Not Modified\r\ncontent-length: 9\r\n\r\n", b"", 304),
    "205": Case(b"HTTP/1.1 205 Reset Content\r\ncontent-length: 0\r\n\r\n", b"", 205),
    "HEAD with a length": Case(OK + b"content-length: 9\r\n\r\n", b"", method="HEAD"),
    "HEAD, chunked": Case(CHUNKED, b"", method="HEAD"),
    "HEAD without framing": Case(OK + b"\r\n", b"", method="HEAD", reused=False, stock="it goes on; llhttp can't tell"),
    "100": Case(b"HTTP/1.1 100 Continue\r\n\r\n" + OK + TWO),
    "100, 103": Case(
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </x>\r\nlink: </y>\r\n\r\n" + OK + TWO
    ),
    "16 interim answers": Case(b"HTTP/1.1 102 Processing\r\n\r\n" * 16 + OK + TWO),
    "an interim answer with a length": Case(
        b"HTTP/1.1 103 Early Hints\r\ncontent-length: 5\r\n\r\n" + OK + b"\r\nok", reused=False, ends=True
    ),
    "a chunked interim answer": Case(
        b"HTTP/1.1 103 Early Hints\r\ntransfer-encoding: chunked\r\n\r\n" + CHUNKED + b"2\r\nok\r\n0\r\n\r\n"
    ),
    "no reason": Case(b"HTTP/1.1 200 \r\n" + TWO),
    "no reason, no space": Case(b"HTTP/1.1 200\r\n" + TWO),
    "odd reason": Case(b"HTTP/1.1 200 caf\xe9 \t!\r\n" + TWO),
    "odd status": Case(b"HTTP/1.1 999 Odd\r\n" + TWO, status=999),
    "fields": Case(
        OK
        + b"Set-Cookie: a=1\r\nX-Empty:\r\nx-white: \t \r\nset-cookie: b=2\r\nX-Latin: caf\xe9\r\n"
        + b"X!#$%&'*+-.^_`|~1:x\r\n"
        + TWO
    ),
    "128 fields": Case(OK + b"".join(b"x-%d: 1\r\n" % number for number in range(127)) + TWO),
    "a large head": Case(OK + b"x: " + b"a" * 60_000 + b"\r\n" + TWO),
    "an upgrade that is offered": Case(OK + b"connection: upgrade\r\nupgrade: h2c\r\n" + TWO),
    # What follows is no part of the response, which is whole.
    "a byte too many": Case(OK + TWO + b"X", reused=False, stock="it uses the connection again"),
    "a line end too many": Case(OK + TWO + b"\r\n", reused=False, stock="it uses the connection again"),
    "a line end after chunks": Case(
        CHUNKED + b"2\r\nok\r\n0\r\n\r\n\r\n", reused=False, stock="it uses the connection again"
    ),
    "a line feed after chunks": Case(
        CHUNKED + b"2\r\nok\r\n0\r\n\r\n\n", reused=False, stock="it uses the connection again"
    ),
    "a second response": Case(
        OK + TWO + OK + b"content-length: 4\r\n\r\nevil", reused=False, stock="it uses the connection again"
    ),
    "204 with a body": Case(
        b"HTTP/1.1 204 No Content\r\ncontent-length: 4\r\n\r\nevil",
        b"",
        204,
        reused=False,
        stock="it uses the connection again",
    ),
    "304 with a body": Case(
        b"HTTP/1.1 304 Not Modified\r\ncontent-length: 4\r\n\r\nevil",
        b"",
        304,
        reused=False,
        stock="it uses the connection again",
    ),
    "HEAD with a body": Case(
        OK + b"content-length: 4\r\n\r\nevil", b"", method="HEAD", reused=False, stock="it uses the connection again"
    ),
    "bytes after a close": Case(OK + b"connection: close\r\n" + TWO + b"evil", reused=False),
}

REFUSED = {
    # Two ways to read where it ends.
    "length and chunked": Case(
        OK + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", None, stock="chunked wins"
    ),
    "chunked and length": Case(
        OK + b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n2\r\nok\r\n0\r\n\r\n", None, stock="chunked wins"
    ),
    "two lengths": Case(OK + b"content-length: 2\r\ncontent-length: 3\r\n\r\nok", None),
    "the same length twice": Case(OK + b"content-length: 2\r\n" + TWO, None, stock="it is one length"),
    "a list of lengths": Case(OK + b"content-length: 2, 2\r\n\r\nok", None, stock="it is one length"),
    "a signed length": Case(OK + b"content-length: +2\r\n\r\nok", None),
    "a negative length": Case(OK + b"content-length: -2\r\n\r\nok", None),
    "an empty length": Case(OK + b"content-length:\r\n\r\nok", None),
    "a hexadecimal length": Case(OK + b"content-length: 0x2\r\n\r\nok", None),
    "two numbers": Case(OK + b"content-length: 1 2\r\n\r\nok", None),
    "a length above 64 bits": Case(OK + b"content-length: 99999999999999999999\r\n\r\nok", None, ends=True),
    "a length of 64 bits": Case(OK + b"content-length: 18446744073709551615\r\n\r\nok", None),
    "an unknown coding": Case(OK + b"transfer-encoding: gzip\r\n\r\nok", None, ends=True),
    "identity": Case(OK + b"transfer-encoding: identity\r\n\r\nok", None, ends=True),
    "a coding like chunked": Case(OK + b"transfer-encoding: xchunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", None, ends=True),
    "no coding": Case(OK + b"transfer-encoding:\r\n\r\n2\r\nok\r\n0\r\n\r\n", None, ends=True),
    "a tab behind chunked": Case(
        OK + b"transfer-encoding: chunked\t\r\n\r\n2\r\nok\r\n0\r\n\r\n", None, stock="it is white space"
    ),
    "gzip, chunked": Case(OK + b"transfer-encoding: gzip, chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", None),
    "chunked, gzip": Case(OK + b"transfer-encoding: chunked, gzip\r\n\r\n2\r\nok\r\n0\r\n\r\n", None, ends=True),
    "chunked twice": Case(
        OK + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", None
    ),
    "chunked, then identity": Case(
        OK + b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n2\r\nok\r\n0\r\n\r\n", None, ends=True
    ),
    "chunked in HTTP/1.0": Case(
        b"HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        None,
        ends=True,
        stock="it is framing all the same",
    ),
    # Line ends and white space.
    "bare line feed": Case(OK + b"x: a\ncontent-length: 2\r\n\r\nok", None, stock="it is a line end"),
    "bare line feed in the first line": Case(b"HTTP/1.1 200 OK\n" + TWO, None, stock="it is a line end"),
    "bare line feed at the end": Case(OK + b"content-length: 2\r\n\nok", None, stock="it is a line end"),
    "bare line feeds": Case(b"HTTP/1.1 200 OK\ncontent-length: 2\n\nok", None, stock="it is a line end"),
    "bare carriage return": Case(OK + b"x: a\rcontent-length: 2\r\n\r\nok", None, ends=True),
    "bare carriage return in a name": Case(OK + b"x\ry: a\r\n" + TWO, None),
    "bare carriage return in the first line": Case(b"HTTP/1.1 200 O\rK\r\n" + TWO, None),
    "folded line": Case(OK + b"x: a\r\n b\r\n" + TWO, None, stock="it is unfolded"),
    "folded line, tab": Case(OK + b"x: a\r\n\tb\r\n" + TWO, None, stock="it is unfolded"),
    "folded length": Case(OK + b"content-length:\r\n 2\r\n\r\nok", None, stock="it is unfolded"),
    "white space before the first field": Case(OK + b" x: a\r\n" + TWO, None),
    "white space before a colon": Case(OK + b"content-length : 2\r\n\r\nok", None),
    "a line end before the first line": Case(b"\r\n" + OK + TWO, None),
    # Characters.
    "NUL in a value": Case(OK + b"x: a\0b\r\n" + TWO, None),
    "control character in a value": Case(OK + b"x: a\x01b\r\n" + TWO, None, stock="it is a character"),
    "vertical tab before chunked": Case(OK + b"transfer-encoding: \x0bchunked\r\n\r\n0\r\n\r\n", None),
    "DEL in a value": Case(OK + b"x: a\x7fb\r\n" + TWO, None, stock="it is a character"),
    "control character in the reason": Case(b"HTTP/1.1 200 O\x01K\r\n" + TWO, None, stock="it is a character"),
    "NUL in the reason": Case(b"HTTP/1.1 200 O\0K\r\n" + TWO, None),
    "no colon": Case(OK + b"content-length\r\n" + TWO, None),
    "no name": Case(OK + b": x\r\n" + TWO, None),
    "space in a name": Case(OK + b"a b: x\r\n" + TWO, None),
    "non-ASCII name": Case(OK + b"caf\xe9: x\r\n" + TWO, None),
    # First lines.
    "a request": Case(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", None),
    "HTTP/0.9": Case(b"HTTP/0.9 200 OK\r\n" + TWO, None, stock="it reads any version"),
    "HTTP/1.2": Case(b"HTTP/1.2 200 OK\r\n" + TWO, None, stock="it reads any version"),
    "HTTP/2.0": Case(b"HTTP/2.0 200 OK\r\n" + TWO, None, stock="it reads any version"),
    "HTTP/2": Case(b"HTTP/2 200 OK\r\n" + TWO, None),
    "RTSP": Case(b"RTSP/1.0 200 OK\r\n" + TWO, None),
    "ICE": Case(b"ICE/1.0 200 OK\r\n" + TWO, None),
    "frames of HTTP/2": Case(b"\0\0\x12\x04\0\0\0\0\0" + bytes(18), None),
    "SSH": Case(b"SSH-2.0-OpenSSH_9.6\r\n", None),
    "TLS": Case(b"\x15\x03\x01\x00\x02\x02\x46", None),
    "two digits": Case(b"HTTP/1.1 20 OK\r\n" + TWO, None),
    "four digits": Case(b"HTTP/1.1 2000 OK\r\n" + TWO, None),
    "status 0": Case(b"HTTP/1.1 000 OK\r\n" + TWO, None),
    "status 99": Case(b"HTTP/1.1 099 OK\r\n" + TWO, None),
    "101": Case(b"HTTP/1.1 101 Go\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nxyz", None),
    "101 without a word": Case(b"HTTP/1.1 101 Go\r\n\r\nxyz", None),
    # Bounds.
    "an endless value": Case(OK + b"x: " + b"a" * 200_000, None),
    "an endless name": Case(OK + b"x" * 200_000, None),
    "an endless reason": Case(b"HTTP/1.1 200 " + b"x" * 200_000, None),
    "a head of 70 KB": Case(OK + b"x: " + b"a" * 70_000 + b"\r\n" + TWO, None, stock="it allows 100 KiB"),
    "129 fields": Case(
        OK + b"".join(b"x-%d: 1\r\n" % number for number in range(128)) + TWO, None, stock="it counts bytes only"
    ),
    "17 interim answers": Case(b"HTTP/1.1 102 Processing\r\n\r\n" * 17 + OK + TWO, None, stock="it takes any number"),
    "interim answers for ever": Case(b"HTTP/1.1 102 Processing\r\n\r\n" * 5_000, None, ends=True),
    "an interim answer that closes": Case(
        b"HTTP/1.1 103 Early Hints\r\nconnection: close\r\n\r\n" + OK + TWO, None, stock="it ignores that"
    ),
    # The end comes too early.
    "nothing": Case(b"", None, ends=True),
    "part of a first line": Case(b"HTTP/1.", None, ends=True),
    "part of a head": Case(OK + b"content-le", None, ends=True),
    "an interim answer alone": Case(b"HTTP/1.1 100 Continue\r\n\r\n", None, ends=True),
    "a head alone": Case(OK + b"content-length: 2\r\n\r\n", None, ends=True),
    "part of a body": Case(OK + b"content-length: 2\r\n\r\no", None, ends=True),
    "chunks without an end": Case(CHUNKED + b"2\r\nok\r\n", None, ends=True),
    "part of the end": Case(CHUNKED + b"2\r\nok\r\n0\r\n", None, ends=True),
    "part of a chunk": Case(CHUNKED + b"3\r\nok", None, ends=True),
    "part of a chunk's size": Case(CHUNKED + b"1f", None, ends=True),
    # Chunks.
    "a chunk size that is none": Case(CHUNKED + b"zz\r\n", None),
    "a negative chunk size": Case(CHUNKED + b"-2\r\nok\r\n0\r\n\r\n", None),
    "no chunk size": Case(CHUNKED + b"\r\nok\r\n0\r\n\r\n", None),
    "a chunk size above 64 bits": Case(CHUNKED + b"fffffffffffffffff\r\nok\r\n0\r\n\r\n", None, ends=True),
    "a chunk that is longer": Case(CHUNKED + b"1\r\nok\r\n0\r\n\r\n", None),
    "a chunk without an end": Case(CHUNKED + b"2\r\nok0\r\n\r\n", None),
    "bare line feed after a chunk size": Case(CHUNKED + b"2\nok\r\n0\r\n\r\n", None),
    "bare line feed after a chunk": Case(CHUNKED + b"2\r\nok\n0\r\n\r\n", None),
    "bare line feed in an extension": Case(CHUNKED + b"2;a\nok\r\n0\r\n\r\n", None),
    "white space before a chunk size": Case(CHUNKED + b" 2\r\nok\r\n0\r\n\r\n", None),
    "white space after a chunk size": Case(CHUNKED + b"2 \r\nok\r\n0\r\n\r\n", None, stock="it is old practice"),
    "an endless extension": Case(CHUNKED + b"2;" + b"a" * 600_000, None),
    "an endless trailer": Case(CHUNKED + b"2\r\nok\r\n0\r\nx: " + b"a" * 600_000, None),
    "128 trailers": Case(
        CHUNKED + b"2\r\nok\r\n0\r\n" + b"x: 1\r\n" * 128 + b"\r\n", None, stock="it counts bytes only"
    ),
    "a length in a trailer": Case(
        CHUNKED + b"2\r\nok\r\n0\r\ncontent-length: 1\r\n\r\n", None, stock="it ignores trailers"
    ),
    "a trailer that is none": Case(CHUNKED + b"2\r\nok\r\n0\r\nxyz\r\n\r\n", None),
    "a folded trailer": Case(CHUNKED + b"2\r\nok\r\n0\r\nx: a\r\n b\r\n\r\n", None, stock="it is unfolded"),
}

CASES = VALID | REFUSED

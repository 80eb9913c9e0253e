"""Owns the request side of HTTP/1.1: where a request goes, and the bytes of its head.

A head is checked as a whole: whatever its caller has let through, it has as many lines as it has fields
(RFC 9112, section 2.2; RFC 9110, section 5.5).
"""

from __future__ import annotations

import ipaddress
from operator import itemgetter
from typing import TYPE_CHECKING

import httpx

from asgi_router.upstream.http11.errors import RequestRefused

if TYPE_CHECKING:
    from collections.abc import Sequence

_TOKEN = b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_CONTROLS = bytes(byte for byte in (*range(32), 127) if byte != 9)  # a tab is white space in a value
_NAME = itemgetter(0)  # of a field
_NOT_IN_TARGET = bytes((*range(33), *range(127, 256)))


class Origin:
    """Where requests go: made once for each worker, so that nothing is parsed for a request.

    Args:
        url: its scheme, host and port count.
        uds: the path of a Unix socket to connect to instead of host and port.

    Attributes:
        host: a name, or an address without brackets.
        port: the TCP port.
        tls: whether the scheme is https.
        is_address: `host` needs no look-up.
        authority: what stands in the `Host` field.
        key: equal for equal origins.

    Raises:
        ValueError: the scheme is neither http nor https, or there is no host.
    """

    __slots__ = ("authority", "host", "is_address", "key", "port", "tls", "uds")

    def __init__(self, url: str | httpx.URL, *, uds: str | None = None) -> None:
        url = httpx.URL(url)
        if url.scheme not in ("http", "https") or not url.raw_host:
            raise ValueError("an origin is http:// or https:// and a host")

        self.tls = url.scheme == "https"
        self.host = url.raw_host.decode("ascii")
        self.port = url.port or (443 if self.tls else 80)
        self.authority = url.netloc
        self.uds = uds
        self.is_address = _is_address(self.host)
        self.key = f"{url.scheme}://{self.host} {self.port} {uds or ''}"

    def __repr__(self) -> str:
        return f"<Origin {'https' if self.tls else 'http'}://{self.authority.decode('ascii')}>"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def request_head(method: bytes, target: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the head of a request, to the empty line.

    Args:
        method: a token, `POST` for instance.
        target: path and query as they shall be on the wire: ASCII, without spaces.
        headers: all of them; `Host` and the framing are the caller's. Values lose no white space.

    Raises:
        RequestRefused: it would not be one request with these fields.
    """
    lines = [b"%b %b HTTP/1.1" % (method, target)]
    lines += map(b": ".join, headers)
    lines += b"", b""
    head = b"\r\n".join(lines)
    names = [method]
    names += map(_NAME, headers)
    if (
        b"" in names
        or b"".join(names).translate(None, _TOKEN)
        or not target
        or len(target.translate(None, _NOT_IN_TARGET)) != len(target)
        or len(head.translate(None, _CONTROLS)) != len(head) - 2 * len(lines) + 2
    ):
        raise RequestRefused("The request's head is not valid in HTTP/1.1.")
    return head

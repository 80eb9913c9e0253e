"""Owns which headers may cross, in both directions (RFC 9110, section 7.6).

Everything crosses but what is listed here: names in lower case, values and repetition as they were.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from asgi_router.peers import HOP

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from starlette.types import Scope

    RawHeaders = list[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
# The body is whole when we forward it, so the transport counts it anew; a client's own count beside another
# framing is how requests are smuggled. Host is the worker's. The server has answered `Expect` for us.
_REQUEST_DROPS = _HOP_BY_HOP | {b"content-length", b"expect", b"host", HOP}

# The server in front of us adds `date` and `server`. Which origins may read an answer is the host app's say.
# `x-router-*` is what we tell, and no worker.
_RESPONSE_DROPS = _HOP_BY_HOP | {b"date", b"server"}
_RESPONSE_DROP_PREFIXES = (b"access-control-", b"x-router-")

# A `Connection` header must not be able to strip these from a message.
_NEVER_CONNECTION_LISTED = frozenset((b"authorization", b"content-encoding", b"content-length", b"content-type"))

VIA = (b"via", b"1.1 asgi-router")
"""What a gateway adds to each request that it forwards (RFC 9110, section 7.6.3). Routers count it, to find loops."""

# To be refused or replaced by a space (RFC 9110, section 5.5); some servers raise over them.
_CONTROLS = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


def request_headers(scope: Scope, replaced: Collection[bytes] = ()) -> RawHeaders:
    """Return what the worker gets of the client's headers, with the client's address in `x-forwarded-for`.

    Args:
        scope: the client's request.
        replaced: names, in lower case, that are left out.
    """
    headers: RawHeaders = []
    listed: frozenset[bytes] = frozenset()
    cookies: list[bytes] = []
    hops: list[bytes] = []
    raw: RawHeaders = scope.get("headers") or []
    for name, value in raw:
        name = name.lower()
        if name in _REQUEST_DROPS or name in replaced:
            if name == b"connection":
                listed |= _connection_listed(value)
        elif name == b"cookie":
            cookies.append(value)
        elif name == b"x-forwarded-for":
            hops.append(value)
        else:
            headers.append((name, value))

    if b"cookie" in listed:
        cookies.clear()
    if b"x-forwarded-for" in listed:
        hops.clear()
    if listed:
        headers = [header for header in headers if header[0] not in listed]
    if cookies:  # HTTP/2 clients may split the field, HTTP/1.1 knows only one (RFC 9113, section 8.2.3)
        headers.append((b"cookie", b"; ".join(cookies)))
    if (client := scope.get("client")) and client[0]:  # some servers have no address for a UNIX socket
        address = str(client[0]).encode("latin-1", "replace")
        # Behind a trusted proxy the server has already taken the client's address from this very header.
        if not hops or hops[-1].rpartition(b",")[2].strip() != address:
            hops.append(address)
    if hops:
        headers.append((b"x-forwarded-for", b", ".join(hops)))

    return headers


def response_headers(raw: RawHeaders) -> tuple[RawHeaders, bool]:
    """Return what the client gets of the worker's headers, whose names are in lower case, and whether it gets events.

    Event streams are marked as not to be buffered or cached, unless the worker says otherwise: nginx holds
    back what it proxies by default.
    """
    headers = [
        header
        for header in raw
        if header[0] not in _RESPONSE_DROPS and not header[0].startswith(_RESPONSE_DROP_PREFIXES)
    ]
    if len(headers) < len(raw):
        names = {name for name, _ in raw}
        listed: frozenset[bytes] = frozenset()
        if b"connection" in names:
            listed = listed.union(*(_connection_listed(value) for name, value in raw if name == b"connection"))
        if b"transfer-encoding" in names:
            listed |= {b"content-length"}  # it doesn't count beside the other (RFC 9112, section 6.3)
        if listed:
            headers = [header for header in headers if header[0] not in listed]
    events = is_event_stream(headers)
    if events:
        names = {name for name, _ in raw}
        if b"cache-control" not in names:
            headers.append((b"cache-control", b"no-cache"))
        if b"x-accel-buffering" not in names:
            headers.append((b"x-accel-buffering", b"no"))

    return headers, events


def without_controls(value: bytes) -> bytes:
    """Return a header's value as servers take it: what must not be in one is a space."""
    return _CONTROLS.sub(b" ", value)


def first_values(raw: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return the first value of each header, by names in lower case: for several looks at the same headers."""
    values: dict[bytes, bytes] = {}
    for name, value in raw:
        values.setdefault(name.lower(), value)
    return values


def routers_passed(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """Return how many routers like this one a request has come through already."""
    return sum(value.count(b"asgi-router") for name, value in headers if name == b"via")


def is_event_stream(headers: RawHeaders) -> bool:
    """Tell whether lower-case response headers announce server-sent events."""
    for name, value in headers:
        if name == b"content-type" and value.partition(b";")[0].strip().lower() == b"text/event-stream":
            return True
    return False


def header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str:
    """Return the first value of a header, or an empty string."""
    for key, value in headers:
        if key.lower() == name:
            return value.decode("latin-1")
    return ""


def retry_after(raw: Iterable[tuple[bytes, bytes]]) -> float:
    """Return how many seconds a response asks its client to wait (RFC 9110, section 10.2.3); 0 if it doesn't.

    A date is taken relative to the response's own `date`, if it has one: whose clock is wrong doesn't matter then.
    """
    raw = list(raw)
    value = header(raw, b"retry-after").strip()
    if re.fullmatch("[0-9]{1,300}", value):
        return float(value)
    then = _date(value)
    now = _date(header(raw, b"date")) or datetime.now(UTC)
    return max(0.0, (then - now).total_seconds()) if then else 0.0


def _date(text: str) -> datetime | None:
    try:
        date = parsedate_to_datetime(text)
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        return None


def _connection_listed(value: bytes) -> frozenset[bytes]:
    """Return the names of fields that a `Connection` field says are for the next hop only."""
    return frozenset(token.strip().lower() for token in value.split(b",")) - _NEVER_CONNECTION_LISTED

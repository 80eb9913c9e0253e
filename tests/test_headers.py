"""Owns the proof of which headers cross, in both directions, and that all others cross untouched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asgi_router.headers import header, is_event_stream, request_headers, response_headers, without_controls

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Scope

    from asgi_router.headers import RawHeaders

    Cross = Callable[..., RawHeaders]

HOP_BY_HOP = [
    b"connection",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
]
PROTECTED = [b"authorization", b"content-encoding", b"content-type"]

A = (b"x-a", b"1")
B = (b"x-b", b"2")


def up(*headers: tuple[bytes, bytes], client: object = None) -> RawHeaders:
    """What the worker gets of these request headers."""
    scope: Scope = {"type": "http", "headers": list(headers), "client": client}
    return request_headers(scope)


def down(*headers: tuple[bytes, bytes]) -> RawHeaders:
    """What the client gets of these response headers."""
    return response_headers([(name.lower(), without_controls(value)) for name, value in headers])[0]


@pytest.mark.parametrize("cross", [up, down])
@pytest.mark.parametrize("name", HOP_BY_HOP)
def test_f20_hop_by_hop_headers_stay(cross: Cross, name: bytes) -> None:
    """F-20: what belongs to one connection is not passed on, in whatever case and however often it is there."""
    assert cross(A, (name, b"x"), (name.title(), b"y"), (name.upper(), b""), B) == [A, B]


@pytest.mark.parametrize("cross", [up, down])
@pytest.mark.parametrize(
    "values",
    [
        [b"x-a"],
        [b"X-A"],
        [b" x-a\t"],
        [b"close, x-a"],
        [b"keep-alive,x-a,close"],
        [b",, ,x-a ,"],
        [b"close", b"x-a"],
        [b"X-C", b"", b"x-d,X-a"],
    ],
)
def test_what_connection_lists_stays(cross: Cross, values: list[bytes]) -> None:
    """Headers that any `Connection` header names belong to that connection as well."""
    listing = [(b"Connection", value) for value in values]
    assert cross(A, (b"X-A", b"again"), *listing, B) == [B]
    assert cross(*listing, A, B) == [B]


@pytest.mark.parametrize("cross", [up, down])
@pytest.mark.parametrize("value", [b"", b",", b"close", b"x", b"x-a-longer", b"x a", b'"x-a"', b"x-a; q=1"])
def test_connection_takes_nothing_it_does_not_name(cross: Cross, value: bytes) -> None:
    """A `Connection` header takes exactly the names it lists."""
    assert cross(A, (b"connection", value), B) == [A, B]


@pytest.mark.parametrize("cross", [up, down])
@pytest.mark.parametrize("name", PROTECTED)
def test_connection_cannot_take_what_a_message_needs(cross: Cross, name: bytes) -> None:
    """A client can't strip its credentials or the description of the body by listing them."""
    assert cross((b"connection", b"close, " + name.title()), (name, b"v")) == [(name, b"v")]


def test_connection_cannot_take_a_response_length() -> None:
    """The length of an answer stays with it."""
    assert down((b"connection", b"content-length"), (b"content-length", b"5")) == [(b"content-length", b"5")]


@pytest.mark.parametrize("name", [b"content-length", b"expect", b"host", b"Content-Length", b"Expect", b"HOST"])
def test_what_concerns_only_us(name: bytes) -> None:
    """The length is counted anew, the host is the worker's, and `Expect` has been answered."""
    assert up(A, (name, b"5"), (name, b"6"), B) == [A, B]


@pytest.mark.parametrize("coding", [b"chunked", b"Chunked", b"gzip, chunked", b"xchunked", b" chunked", b""])
def test_no_framing_of_the_client_reaches_the_worker(coding: bytes) -> None:
    """Neither a length nor a transfer coding crosses, whatever it says: together they smuggle requests."""
    framing = (b"content-length", b"2"), (b"Transfer-Encoding", coding)
    assert up(*framing, A) == up(*reversed(framing), A) == [A]


def test_a_length_beside_a_transfer_encoding_does_not_count() -> None:
    """A worker's `Content-Length` beside `Transfer-Encoding` says nothing of the body (RFC 9112, 6.3)."""
    length = (b"Content-Length", b"5")
    assert down(length, A) == [(b"content-length", b"5"), A]
    assert down(length, (b"Transfer-Encoding", b"chunked"), A) == [A]
    assert down((b"transfer-encoding", b"identity"), A, length) == [A]


@pytest.mark.parametrize(
    "name",
    [
        b"date",
        b"Server",
        b"x-router-worker",
        b"X-Router-Prefill-URL",
        b"x-router-decode-url",
        b"x-router-anything",
        b"Access-Control-Allow-Origin",
        b"access-control-allow-credentials",
        b"access-control-allow-headers",
        b"access-control-allow-methods",
        b"access-control-allow-private-network",
        b"access-control-expose-headers",
        b"access-control-max-age",
    ],
)
def test_f21_what_a_worker_has_no_say_in(name: bytes) -> None:
    """F-21: date and server are our server's, origins the host app's, and `x-router-*` ours alone."""
    assert down(A, (name, b"x"), B) == [A, B]


@pytest.mark.parametrize(
    "name",
    [
        b"authorization",
        b"accept-encoding",
        b"accept",
        b"user-agent",
        b"origin",
        b"x-request-id",
        b"traceparent",
        b"x-custom",
        b"content-type",
        b"content-encoding",
        b"date",
        b"server",
        b"access-control-request-method",
        b"hosts",
        b"x-host",
        b"content-length-x",
        b"",
    ],
)
def test_other_request_headers_cross(name: bytes) -> None:
    """All else is the worker's business, authorization and unknown names included (peer entries 55 and 56)."""
    assert up((name, b"v")) == [(name, b"v")]


@pytest.mark.parametrize(
    "name",
    [
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"retry-after",
        b"www-authenticate",
        b"vary",
        b"etag",
        b"location",
        b"x-request-id",
        b"x-ratelimit-remaining",
        b"x-router",
        b"access-control",
        b"host",
    ],
)
def test_other_response_headers_cross(name: bytes) -> None:
    """All else is the client's business."""
    assert down((name, b"v")) == [(name, b"v")]


@pytest.mark.parametrize("cross", [up, down])
def test_names_are_lowered_and_values_left(cross: Cross) -> None:
    """ASGI wants lower-case names; values are bytes, and stay what they are."""
    values = [b"", b" ", b'A, b;C="d"', b"caf\xe9", b"\xff\xfe", b"\xe4\xbd\xa0", b"\t", b"x" * 10_000]
    assert cross(*((b"X-Mixed-Case", value) for value in values)) == [(b"x-mixed-case", value) for value in values]


@pytest.mark.parametrize("cross", [up, down])
def test_repeated_headers_stay_apart_and_in_order(cross: Cross) -> None:
    """Nothing is folded: the same name may come twice, with other names between."""
    assert cross(A, B, (b"x-a", b"3"), A) == [A, B, (b"x-a", b"3"), A]


def test_set_cookie_stays_two_headers() -> None:
    """Cookies that are set contain commas, and can't be joined."""
    cookies = (b"set-cookie", b"a=1; Expires=Mon, 30 Nov 2026 00:00:00 GMT"), (b"set-cookie", b"b=2")
    assert down(*cookies) == list(cookies)


def test_cookies_are_joined() -> None:
    """A `Cookie` that HTTP/2 has split is one header again, as HTTP/1.1 wants it."""
    assert up((b"cookie", b"a=1"), A, (b"Cookie", b"b=2; c=3")) == [A, (b"cookie", b"a=1; b=2; c=3")]
    assert up((b"cookie", b"a=1")) == [(b"cookie", b"a=1")]


@pytest.mark.parametrize(
    ("client", "before", "after"),
    [
        (("10.0.0.1", 5), [], b"10.0.0.1"),
        (["10.0.0.1", 5], [b"1.2.3.4"], b"1.2.3.4, 10.0.0.1"),
        (("10.0.0.1", 5), [b"1.2.3.4, 5.6.7.8", b"9.9.9.9"], b"1.2.3.4, 5.6.7.8, 9.9.9.9, 10.0.0.1"),
        (("::1", 5), [], b"::1"),
        (("fe80::1%eth0", 5), [], b"fe80::1%eth0"),
        (("5.6.7.8", 0), [b"1.2.3.4, 5.6.7.8"], b"1.2.3.4, 5.6.7.8"),  # the server took it from there
        (("6.7.8.9", 0), [b"16.7.8.9"], b"16.7.8.9, 6.7.8.9"),
        (("tést☃", 5), [], b"t\xe9st?"),
        (None, [b"1.2.3.4"], b"1.2.3.4"),
        (("", 0), [b"1.2.3.4"], b"1.2.3.4"),
        (("", None), [], None),
        (None, [], None),
    ],
)
def test_client_address_is_appended(client: object, before: list[bytes], after: bytes | None) -> None:
    """The worker learns from whom we have the request; an unknown address is left out."""
    headers = up(*((b"X-Forwarded-For", hop) for hop in before), A, client=client)
    assert headers == ([A] if after is None else [A, (b"x-forwarded-for", after)])


def test_scope_without_a_client() -> None:
    """`client` is optional in ASGI."""
    assert request_headers({"type": "http", "headers": [A]}) == [A]


def test_the_scope_is_left_alone() -> None:
    """Whoever reads the request's headers after us finds them as they were."""
    headers = [(b"Host", b"a"), (b"cookie", b"a"), (b"cookie", b"b"), (b"connection", b"x-a"), A]
    scope: Scope = {"type": "http", "headers": list(headers), "client": ("1.1.1.1", 1)}
    request_headers(scope)
    assert scope["headers"] == headers


EVENT_STREAMS = [
    b"text/event-stream",
    b"text/event-stream; charset=utf-8",
    b"text/event-stream;charset=utf-8",
    b"Text/Event-Stream",
    b" text/event-stream ",
    b"text/event-stream ; x=y",
]


@pytest.mark.parametrize("value", EVENT_STREAMS)
def test_event_streams_are_not_buffered_or_cached(value: bytes) -> None:
    """Server-sent events are marked for proxies in front of us, however their type is written."""
    typed = (b"Content-Type", value)
    added = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
    assert down(typed, A) == [(b"content-type", value), A, *added]
    assert is_event_stream([(b"content-type", value)])


@pytest.mark.parametrize("name", [b"cache-control", b"x-accel-buffering"])
def test_what_the_worker_says_of_buffering_stands(name: bytes) -> None:
    """A worker's own words about buffering and caching are not doubled or changed."""
    headers = down((b"content-type", b"text/event-stream"), (name.title(), b"own"))
    assert [value for key, value in headers if key == name] == [b"own"]
    assert {b"cache-control", b"x-accel-buffering"} <= {key for key, _ in headers}


@pytest.mark.parametrize(
    "value",
    [b"application/json", b"", b"text/plain", b"text/event-streaming", b"text/event", b"x; text/event-stream"],
)
def test_other_types_are_left_alone(value: bytes) -> None:
    """Only event streams are marked."""
    assert down((b"content-type", value)) == [(b"content-type", value)]
    assert not is_event_stream([(b"content-type", value), (b"x-type", b"text/event-stream")])


def test_no_type_is_left_alone() -> None:
    """An answer without a type gets none."""
    assert down() == []
    assert not is_event_stream([])


def test_header() -> None:
    """The first value of a name, in any case, as text; empty if there is none."""
    headers = [(b"X-A", b"caf\xe9"), (b"x-a", b"2")]
    assert header(headers, b"x-a") == "café"
    assert header(headers, b"x-b") == ""
    assert header([], b"x-a") == ""


NAMES = st.sampled_from([*HOP_BY_HOP, *PROTECTED, b"x-a", b"X-B", b"cookie", b"Set-Cookie", b"host", b"date", b"a"])
LEGAL = st.sampled_from([byte for byte in range(256) if byte == 9 or (byte >= 32 and byte != 127)])
VALUES = st.lists(LEGAL, max_size=12).map(bytes) | st.lists(NAMES, max_size=3).map(b", ".join)
HEADERS = st.lists(st.tuples(NAMES, VALUES), max_size=8)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(HEADERS)
def test_nothing_is_invented(headers: RawHeaders) -> None:
    """Of any headers, what crosses is a part of what came, in order, with the names lowered; never hop-by-hop."""
    given_pairs = [(name.lower(), value) for name, value in headers]
    for crossed in (down(*headers), [pair for pair in up(*headers) if pair[0] != b"cookie"]):
        remaining = iter(given_pairs)
        assert all(pair in remaining for pair in crossed), "out of order, or not from there"
        assert not {name for name, _ in crossed} & set(HOP_BY_HOP)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(HEADERS)
def test_nothing_is_lost(headers: RawHeaders) -> None:
    """Of any headers without `Connection`, all cross but those that are listed as dropped."""
    headers = [(name, value) for name, value in headers if name not in (b"connection", b"cookie")]
    dropped = {*HOP_BY_HOP, b"host"}
    assert up(*headers) == [(name.lower(), value) for name, value in headers if name not in dropped]
    dropped = {*HOP_BY_HOP, b"date"}
    assert down(*headers) == [(name.lower(), value) for name, value in headers if name not in dropped]


def test_control_characters_in_a_workers_value_become_spaces() -> None:
    """Servers raise over them in the middle of an answer (RFC 9110, section 5.5); a tab is allowed."""
    assert down((b"x-a", b"one\x00two\x1bthree\tfour\r\nfive\x7f")) == [(b"x-a", b"one two three\tfour  five ")]

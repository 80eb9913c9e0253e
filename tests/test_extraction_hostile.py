"""Owns the proof that no body makes `extract` fail in another way than by `InvalidRequest`, or take long."""

from __future__ import annotations

import codecs
import json
from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asgi_router.body_types import MAX_MESSAGES
from asgi_router.errors import InvalidRequest
from asgi_router.extraction import CompletionRequest, extract
from asgi_router.prefix_key import MAX_KEY_BYTES

pytestmark = pytest.mark.timeout(90)

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
PATHS = (CHAT, TEXT, "/generate")

NOT_JSON = "The request body is not valid JSON."
NO_OBJECT = "The request body must be a JSON object."
TOO_DEEP = "The request body is nested too deeply."


def refusal(body: bytes, path: str = CHAT) -> str:
    """Why a body is refused."""
    with pytest.raises(InvalidRequest) as caught:
        extract(body, path)

    error = caught.value
    assert error.__cause__ is None
    assert error.__context__ is None or error.__suppress_context__, "the parser's own exception quotes the body"
    return str(error)


def survives(body: bytes, path: str) -> CompletionRequest | None:
    """Read a body; a refusal is fine if its words are ours alone, a result if its fields are what they promise."""
    request = None
    with suppress(InvalidRequest):
        request = extract(body, path)
    if request is None:
        assert refusal(body, path) in (NOT_JSON, NO_OBJECT, TOO_DEEP)
        return None

    assert isinstance(request.model, str)
    assert isinstance(request.session_id, str)
    assert isinstance(request.message, str)
    assert isinstance(request.stream, bool)
    assert type(request.prefix_key) is bytes
    assert type(request.prompt_tokens) is int
    assert request.prompt_tokens >= 1
    assert request.message == request.message.strip()
    hash(request)
    return request


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b"{}}",
        b"{} {}",
        b"{bad",
        b"{'model': 'm'}",
        b'{"model": }',
        b'{"model": "m",}',
        b'{"model": "secret',
        b'{"model": "\xff\xfe"}',
        b'{"model": "\xc3"}',
        b'{"model": "a\x00b"}',
        b'{"model": "a\nb"}',
        b'{"model": "\\x"}',
        b'{"model": "\\u12"}',
        b'{"seed": 01}',
        b'{"prompt": [' + b"-" + b"9" * 5000 + b"]}",
        b'{"model": undefined}',
        b"\x1f\x8b\x08\x00",
        b"\xff" * 100,
        b"\x00",
        b"model=secret&prompt=secret",
        codecs.BOM_UTF8 + codecs.BOM_UTF8 + b"{}",
    ],
)
def test_what_is_no_json(body: bytes) -> None:
    """A body that can't be parsed is refused in words that are ours, none of which are the body's."""
    assert refusal(body) == NOT_JSON
    assert refusal(body, TEXT) == NOT_JSON


@pytest.mark.parametrize("body", [b"null", b"true", b"1", b"-0.5e3", b"NaN", b"[]", b'[{"model": "m"}]', b'"secret"'])
def test_what_is_no_object(body: bytes) -> None:
    """JSON that is no object is refused (F-14)."""
    assert refusal(body) == NO_OBJECT
    assert refusal(body, TEXT) == NO_OBJECT


@pytest.mark.parametrize("body", ["{bad", "[]", "null", b'{"model": "\xff"}'])
def test_peer_entry_49_malformed_payload(body: str | bytes) -> None:
    """A malformed payload is the client's fault: 400 in OpenAI's shape."""
    with pytest.raises(InvalidRequest) as caught:
        extract(body.encode() if isinstance(body, str) else body, TEXT)
    assert caught.value.status == 400
    assert json.loads(caught.value.body())["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("depth", [1_000, 100_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
@pytest.mark.parametrize(
    "template",
    [
        "%s",
        '{"unknown": %s}',
        '{"model": %s}',
        '{"stream": %s}',
        '{"session_id": %s}',
        '{"extra_body": %s}',
        '{"extra_body": {"session_id": %s}}',
        '{"cache_salt": %s}',
        '{"prompt": %s}',
        '{"prompt": [1, %s]}',
        '{"prompt": ["a", %s]}',
        '{"tools": %s}',
        '{"chat_template_kwargs": %s}',
        '{"messages": %s}',
        '{"messages": [{"role": %s}]}',
        '{"messages": [{"name": %s}]}',
        '{"messages": [{"content": %s}]}',
        '{"messages": [{"content": [{"type": "text", "text": %s}]}]}',
        '{"messages": [{"content": [{"type": %s}]}]}',
        '{"messages": [{"content": [{"type": "image_url", "image_url": %s}]}]}',
        '{"messages": [{"content": [{"type": "image_url", "image_url": {"url": %s}}]}]}',
        '{"messages": [{"tool_calls": %s}]}',
        '{"messages": [{"reasoning_content": %s}]}',
    ],
)
def test_deep_nesting(template: str, opening: str, closing: str, depth: int) -> None:
    """A hundred thousand levels, closed or not and in whatever field, are refused at once; any depth is survived."""
    for value in (opening * depth + "1" + closing * depth, opening * depth):
        body = (template % value).encode()
        assert survives(body, CHAT) is None or depth < 100_000
        assert survives(body, TEXT) is None or depth < 100_000


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_every_depth_around_the_limit(path: str) -> None:
    """Where the parser just manages, what comes after it must manage too, or refuse."""
    for depth in range(100, 1100, 3):
        for opening, closing in (("[", "]"), ('{"a":', "}")):
            value = opening * depth + "1" + closing * depth
            survives(f'{{"tools": {value}, "prompt": {value}, "messages": [{{"content": {value}}}]}}'.encode(), path)
            survives(f'{{"prompt": [{value}], "messages": [{{"content": [{{"type": {value}}}]}}]}}'.encode(), path)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_unicode_encodings(encoding: str) -> None:
    """JSON in any Unicode encoding is read, with a byte order mark or without: Python engines read it as well."""
    body = '{"model": "m", "prompt": "你好"}'.encode(encoding)
    request = extract(body, TEXT)
    assert (request.model, request.message, request.prompt_tokens) == ("m", "你好", 2)


def test_numbers_that_are_none() -> None:
    """NaN, the infinities and floats that overflow are read where they don't matter, and harmless where they do."""
    body = b'{"prompt": "a", "temperature": NaN, "top_p": -Infinity, "seed": 1e999, "n": 9007199254740993}'
    assert extract(body, TEXT).message == "a"
    for number in (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1", b"4294967296", b"1.5", b"9" * 4300):
        assert survives(b'{"prompt": [' + number + b"]}", TEXT) is not None
        assert survives(b'{"messages": [{"content": ' + number + b"}]}", CHAT) is not None


def test_of_duplicate_keys_the_last_counts() -> None:
    """A key that stands twice has its last value, which is what Python and Rust engines take."""
    body = b'{"stream": true, "model": "a", "prompt": "x", "stream": false, "model": "b", "prompt": "y"}'
    request = extract(body, TEXT)
    assert (request.stream, request.model, request.message) == (False, "b", "y")


def test_lone_surrogates_and_nul() -> None:
    """Half a surrogate pair and NUL, which JSON can spell, are text like any other (they break strict UTF-8)."""
    request = extract(b'{"model": "\\ud800", "session_id": "\\udfff", "prompt": "a\\u0000\\ud83d"}', TEXT)
    assert (request.model, request.session_id, request.message) == ("\ud800", "\udfff", "a\0\ud83d")
    assert request.prefix_key == b"a\0\xed\xa0\xbd"
    chat = b'{"tools": ["\\ud800"], "messages": [{"role": "\\udc00", "content": [{"type": "\\udc00"}]}]}'
    assert survives(chat, CHAT) is not None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, b'{"messages": [' + b"{}," * 2_000_000 + b"{}]}"),
        (CHAT, b'{"messages": [' + b"1," * 3_000_000 + b"1]}"),
        (CHAT, b'{"messages": [{"content": [' + b"1," * 3_000_000 + b"1]}]}"),
        (CHAT, b'{"messages": [{"content": [' + b"{}," * 1_000_000 + b"{}]}]}"),
        (TEXT, b'{"prompt": [' + b'"a",' * 3_000_000 + b'"a"]}'),
    ],
)
def test_many_tiny_pieces(path: str, body: bytes) -> None:
    """Of millions of empty messages, parts or prompts so many are read, and the key ends."""
    request = extract(body, path)
    assert 3 * MAX_MESSAGES <= len(request.prefix_key) < MAX_KEY_BYTES + 100


def test_large_bodies_are_read() -> None:
    """One long text, and a million token ids, are read whole."""
    text = extract(b'{"prompt": "' + b"a" * 8_000_000 + b'"}', TEXT)
    assert (text.prompt_tokens, len(text.prefix_key)) == (2_000_000, 8_000_000)
    assert extract(b'{"prompt": [' + b"7," * 999_999 + b"7]}", TEXT).prompt_tokens == 1_000_000


TEXTS = st.text(st.characters(codec=None), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


def wrong(*values: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    """One of these, or anything at all."""
    return st.one_of(*values, JSON)


PART = wrong(
    st.fixed_dictionaries(
        {},
        optional={
            "type": wrong(st.sampled_from(["text", "image_url", "input_audio", "refusal", "thinking", "input_text"])),
            "text": wrong(TEXTS),
            "refusal": wrong(TEXTS),
            "image_url": wrong(TEXTS, st.fixed_dictionaries({"url": wrong(TEXTS)})),
            "input_audio": wrong(st.fixed_dictionaries({"data": wrong(TEXTS)}, optional={"format": JSON})),
            "uuid": JSON,
        },
    )
)
MESSAGE = wrong(
    st.fixed_dictionaries(
        {},
        optional={
            "role": wrong(st.sampled_from(["system", "user", "assistant", "tool"])),
            "name": wrong(TEXTS),
            "content": wrong(TEXTS, st.lists(PART, max_size=4)),
            "tool_calls": wrong(st.lists(JSON, max_size=2)),
            "tool_call_id": wrong(TEXTS),
            "reasoning_content": wrong(TEXTS),
        },
    )
)
IDS = st.lists(wrong(st.integers(-2, 2**33)), max_size=6)
REQUEST = st.fixed_dictionaries(
    {},
    optional={
        "model": wrong(TEXTS),
        "stream": wrong(st.booleans()),
        "session_id": wrong(TEXTS),
        "extra_body": wrong(st.fixed_dictionaries({"session_id": wrong(TEXTS)})),
        "cache_salt": wrong(TEXTS),
        "messages": wrong(st.lists(MESSAGE, max_size=4)),
        "prompt": wrong(TEXTS, st.lists(TEXTS, max_size=3), IDS, st.lists(IDS, max_size=3)),
        "tools": wrong(st.lists(JSON, max_size=2)),
        "chat_template_kwargs": JSON,
    },
)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.binary(max_size=64), st.sampled_from(PATHS))
def test_any_bytes(body: bytes, path: str) -> None:
    """Whatever bytes come, they are read or refused."""
    survives(body, path)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(JSON, st.sampled_from(PATHS))
def test_any_json(value: object, path: str) -> None:
    """Any JSON value is read if it is an object, else refused."""
    assert (survives(json.dumps(value).encode(), path) is not None) == isinstance(value, dict)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(REQUEST, st.sampled_from(PATHS))
def test_wrong_types_under_the_known_names(fields: dict[str, object], path: str) -> None:
    """An object is always read, whatever stands where a string, a list or an object is expected."""
    assert survives(json.dumps(fields).encode(), path) is not None
    assert survives(json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogatepass"), path) is not None


@settings(max_examples=400, deadline=None, derandomize=True)
@given(REQUEST, st.integers(0), st.integers(0, 255), st.sampled_from(PATHS))
@example({"messages": [{"content": "a"}]}, 0, 0, CHAT)
def test_one_wrong_byte(fields: dict[str, object], position: int, byte: int, path: str) -> None:
    """A body with one byte changed, missing or too many is read or refused."""
    body = json.dumps(fields).encode()
    at = position % len(body)
    survives(body[:at] + bytes([byte]) + body[at + 1 :], path)
    survives(body[:at] + body[at + 1 :], path)
    survives(body[:at] + bytes([byte]) + body[at:], path)
    survives(body[:at], path)

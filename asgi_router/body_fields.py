"""Owns the parsing of a request body: the fields that the router reads, at a cost that the body's size bounds.

What a parser builds costs more than what it reads: a megabyte of text takes it 0.2 ms, a megabyte of `{},{},{},`
17 ms and 40 megabytes of memory. So a large body is parsed by types which say what may be built: strings, messages,
so many of them; the parser steps over the rest without building anything. What doesn't fit these types is, in most
cases, what no engine takes either, and is looked at a second time: read as it is if there is little in it, left as
raw bytes if there is much.

Bytes that are no UTF-8 are noticed in what is read, and not in what is stepped over.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING

from msgspec import Raw, Struct, ValidationError, defstruct
from msgspec.json import Decoder
from msgspec.structs import astuple

from asgi_router.errors import InvalidRequest

NO_OBJECT = "The request body must be a JSON object."

MAX_MESSAGES = 4096
"""Messages of a chat, or prompts of a batch, that are read: those behind them are passed over.

About ten times the longest conversations of agents. Together with the next two it bounds how long a body of many tiny
messages stops the loop: to 6 ms.
"""

MAX_PARTS = 256
"""Content parts of one message that are read."""

MAX_PIECES = 4096
"""Messages and parts of a request after which no further message is read."""

FREE_BYTES = 100_000
"""Bodies up to this size are built whole, whatever is in them; and so much of what a larger body holds beside texts.

Half as many values fit into it at the most, which take 1 to 5 ms.
"""

_QUOTE = ord('"')
_BRACKET = ord("[")
_BYTES_PER_VALUE = 32  # a body with fewer values than one for so many bytes is built in 5 ms a megabyte
_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_MANY_DIGITS = b"0" * 400  # the interpreter takes 1 ns for each digit of such a number, and 14 ns if it has 4,000
# Behind a backslash it may be a text that only looks like it, and is left alone.
_HALF_PAIR = re.compile(
    rb"\\u[dD](?<!\\\\u[dD])"
    rb"(?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|[c-fC-F](?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F])[0-9a-fA-F]{2})"
)
_MAX_ID_BYTES = 8 * 1024 * 1024  # a million token ids and the commas between them


class Fields(Struct):
    """What the router reads of a request's JSON object: a field's value, or None if it is absent.

    A `Raw` is a value that would cost too much to build: the bytes as they stand in the body. Messages are dicts.
    """

    model: object = None
    stream: object = None
    session_id: object = None
    request_id: object = None
    extra_body: object = None
    cache_salt: object = None
    extra_key: object = None
    lora_path: object = None
    tools: object = None
    functions: object = None
    documents: object = None
    chat_template: object = None
    chat_template_kwargs: object = None
    reasoning_effort: object = None
    messages: object = None
    prompt: object = None


def read_fields(body: bytes) -> Fields:
    """Return what the router reads of `body`, a JSON object.

    Raises:
        InvalidRequest: it is JSON, but no object.
        ValueError: it is no JSON; or it is a large one full of values, and JSON for Python only (NaN).
        RecursionError: it is nested more deeply than the interpreter can read.
    """
    if len(body) <= FREE_BYTES:
        return _build(body)

    try:
        return _read_typed(body)
    except (ValidationError, _UnusualError):
        strict = True
    except ValueError:
        strict = False

    # From here on a large body is unusual, and parsed up to three times. What is built is bounded each time.
    if not strict:
        with suppress(ValueError, _UnusualError):
            return _read_typed(_repaired(body))
    if not _is_little(body):
        if not strict:
            raise ValueError("not JSON")
        return _read_raw(body)
    return _build(body) if strict else _build_leniently(body)


def _repaired(body: bytes) -> bytes:
    """Return a body without what is JSON for Python only: UTF-16, a byte order mark, or half a surrogate pair.

    The last is what becomes of an emoji where a client cuts a text in two. It is replaced, as engines do when they
    tokenize it.
    """
    encoding = json.detect_encoding(body)
    if encoding != "utf-8":
        body = body.decode(encoding, "surrogatepass").encode("utf-8", "replace")
    return _HALF_PAIR.sub(rb"\\ufffd", body, count=FREE_BYTES)


def _is_little(body: bytes) -> bool:
    """Return whether a body may be built whole, since it holds few values and no numbers of hundreds of digits."""
    rest = body.translate(_DIGITS, b",[{")
    values = len(body) - len(rest)
    return values <= max(FREE_BYTES // 2, len(body) // _BYTES_PER_VALUE) and _MANY_DIGITS not in rest


def _build(body: bytes) -> Fields:
    with suppress(ValueError):
        return _FIELDS.decode(body)
    # Parsed a second time only if it is no object, no JSON, or JSON for Python only.
    return _build_leniently(body)


def _build_leniently(body: bytes) -> Fields:
    """Read what `json.loads` takes: NaN, half a surrogate pair, a byte order mark, UTF-16 and UTF-32, too."""
    value = json.loads(body)
    if not isinstance(value, dict):
        raise InvalidRequest(NO_OBJECT)

    return Fields(**{name: value.get(name) for name in Fields.__struct_fields__})


class _UnusualError(Exception):
    """A value that fits the types, but of which they drop what matters."""


class _Lists:
    """How many lists of messages and parts may still be built.

    A body may name `content` a million times, each time with a list of its own, of which the last one counts.
    """

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = 2 * MAX_MESSAGES

    def take(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise _UnusualError


# The parser calls the hooks below without a word on which of its calls they belong to.
_LISTS: ContextVar[_Lists] = ContextVar("_LISTS")


def _count_parts(_: Struct) -> None:
    _LISTS.get().take(1)


def _count_messages(_: Struct) -> None:
    _LISTS.get().take(MAX_MESSAGES)


class _Media(Struct, gc=False):
    url: str | None = None
    data: str | None = None


class _Part(Struct, gc=False):
    type: str | None = None
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None
    image_url: _Media | str | None = None
    audio_url: _Media | str | None = None
    video_url: _Media | str | None = None
    input_audio: _Media | str | None = None


_PART_KINDS = frozenset(_Part.__struct_fields__) - {"type"}

# A list without an end is what a hostile body is made of. A struct that is read from an array has as many items as it
# has fields; the parser steps over those behind them.
if TYPE_CHECKING:

    class _Parts(Struct): ...

    class _Messages(Struct): ...

    class _Batch(Struct): ...

else:
    _Parts = defstruct(
        "_Parts",
        [(f"part_{number}", _Part, None) for number in range(MAX_PARTS)],
        namespace={"__post_init__": _count_parts},
        array_like=True,
        gc=False,
    )


class _Message(Struct, gc=False):
    role: str | None = None
    name: str | None = None
    content: str | _Parts | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_call_id: str | None = None
    tool_calls: Raw = Raw()
    function_call: Raw = Raw()


if not TYPE_CHECKING:
    _Messages = defstruct(
        "_Messages",
        [(f"message_{number}", _Message, None) for number in range(MAX_MESSAGES)],
        namespace={"__post_init__": _count_messages},
        array_like=True,
        gc=False,
    )
    _Batch = defstruct(
        "_Batch", [(f"ids_{number}", list[int], None) for number in range(MAX_MESSAGES)], array_like=True, gc=False
    )


_OTHER_TEXTS = ("name", "reasoning_content", "reasoning", "tool_call_id")
_CALLS = ("tool_calls", "function_call")


class _RawFields(Struct):
    """All fields as bytes; the parser builds nothing."""

    model: Raw = Raw()
    stream: Raw = Raw()
    session_id: Raw = Raw()
    request_id: Raw = Raw()
    extra_body: Raw = Raw()
    cache_salt: Raw = Raw()
    extra_key: Raw = Raw()
    lora_path: Raw = Raw()
    tools: Raw = Raw()
    functions: Raw = Raw()
    documents: Raw = Raw()
    chat_template: Raw = Raw()
    chat_template_kwargs: Raw = Raw()
    reasoning_effort: Raw = Raw()
    messages: Raw = Raw()
    prompt: Raw = Raw()


class _TypedFields(_RawFields):
    messages: _Messages | None = None  # type: ignore[assignment]
    prompt: str | None = None  # type: ignore[assignment]


class _TypedFieldsAndIds(_TypedFields):
    prompt: str | list[int] | None = None  # type: ignore[assignment]


class _ExtraBody(Struct):
    session_id: Raw = Raw()


_FIELDS = Decoder(Fields)
_RAW_FIELDS = Decoder(_RawFields)
_TYPED_FIELDS = Decoder(_TypedFields)
_TYPED_FIELDS_AND_IDS = Decoder(_TypedFieldsAndIds)
_EXTRA_BODY = Decoder(_ExtraBody)
_ANY = Decoder()
_IDS = Decoder(list[int])
_BATCH = Decoder(_Batch)


class _Allowance:
    """Builds what a body holds beside its texts, as long as that is little."""

    __slots__ = ("_bytes",)

    def __init__(self) -> None:
        self._bytes = FREE_BYTES

    def build(self, raw: Raw) -> object:
        """Return the value of `raw`, or `raw` itself if too much was built already. A string is always built."""
        if not raw:
            return None

        view = memoryview(raw)
        if view[0] != _QUOTE:
            self._bytes -= len(view)
            if self._bytes < 0:
                return raw
        return _ANY.decode(raw)


def _read_typed(body: bytes) -> Fields:
    decoder = _TYPED_FIELDS_AND_IDS if len(body) <= _MAX_ID_BYTES else _TYPED_FIELDS
    counting = _LISTS.set(_Lists())
    try:
        typed = decoder.decode(body)
    finally:
        _LISTS.reset(counting)
    allowance = _Allowance()
    fields = _small_fields(typed, allowance)
    fields.prompt = typed.prompt
    if typed.messages is not None:
        fields.messages = _message_dicts(typed.messages, allowance)
    return fields


def _read_raw(body: bytes) -> Fields:
    try:
        raw = _RAW_FIELDS.decode(body)
    except ValidationError:
        raise InvalidRequest(NO_OBJECT) from None

    allowance = _Allowance()
    fields = _small_fields(raw, allowance)
    fields.messages = allowance.build(raw.messages)
    fields.prompt = _prompt(raw.prompt, allowance)
    return fields


def _small_fields(raw: _RawFields, allowance: _Allowance) -> Fields:
    """Return all fields but the two that hold the prompt."""
    fields = Fields(**{name: allowance.build(getattr(raw, name)) for name in Fields.__struct_fields__[:-2]})
    if isinstance(fields.extra_body, Raw):
        # Stepped over once more only if it is large: one field of it is read.
        try:
            fields.extra_body = {"session_id": allowance.build(_EXTRA_BODY.decode(fields.extra_body).session_id)}
        except ValidationError:
            fields.extra_body = None  # no object
    return fields


def _message_dicts(messages: _Messages, allowance: _Allowance) -> list[dict[str, object]]:
    dicts: list[dict[str, object]] = []
    pieces = 0
    for message in astuple(messages):
        if message is None or pieces > MAX_PIECES:
            break

        content = message.content
        if isinstance(content, Struct):
            content = [_part_dict(part) for part in astuple(content) if part is not None]
            pieces += len(content)
        pieces += 1
        known: dict[str, object] = {"role": message.role, "content": content}
        for name in _OTHER_TEXTS:
            if value := getattr(message, name):
                known[name] = value
        for name in _CALLS:
            if raw := getattr(message, name):
                known[name] = allowance.build(raw)
        dicts.append(known)

    return dicts


def _part_dict(part: _Part) -> dict[str, object]:
    kind = part.type or "text"
    value = getattr(part, kind) if kind in _PART_KINDS else None
    if isinstance(value, _Media):
        value = {"url": value.url} if value.url else {"url": value.data}
        if not value["url"]:
            raise _UnusualError
    if value is None or (value == "" and kind.endswith(("url", "audio"))):
        raise _UnusualError
    return {"type": part.type, kind: value}


def _prompt(raw: Raw, allowance: _Allowance) -> object:
    """Return token ids as such if a worker can hold so many, a text, or whatever else it is if that is little."""
    if 0 < len(raw) <= _MAX_ID_BYTES and memoryview(raw)[0] == _BRACKET:
        for decoder in (_IDS, _BATCH):
            try:
                ids = decoder.decode(raw)
            except ValidationError:
                continue
            return ids if isinstance(ids, list) else [part for part in astuple(ids) if part is not None]

    return allowance.build(raw)

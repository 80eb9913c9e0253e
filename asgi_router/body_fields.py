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
from typing import cast

from msgspec import DecodeError, Raw, Struct, ValidationError
from msgspec.json import Decoder
from msgspec.structs import astuple

from asgi_router.body_types import (
    LISTS,
    MAX_MESSAGES,
    MAX_PIECES,
    PART_KINDS,
    Batch,
    ExtraBody,
    Lists,
    Media,
    Message,
    Messages,
    Part,
    RawFields,
    TypedFields,
    TypedFieldsAndIds,
    UnusualError,
)
from asgi_router.errors import InvalidRequest

NO_OBJECT = "The request body must be a JSON object."

FREE_BYTES = 100_000
"""Bodies up to this size are built whole, whatever is in them; and so much of what a larger body holds beside texts.

Half as many values fit into it at the most, which take 1 to 5 ms.
"""

_NOT_READ = (DecodeError, ValueError)  # the first has been one of the second since msgspec 0.20 only
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

    A `Raw` is a value that would cost too much to build: the bytes as they stand in the body. A list of messages holds
    a `Message` for each JSON object, and what stands beside such objects as it is.
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


class _UsualFields(Fields):
    messages: list[Message] | None = None


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
    except (ValidationError, UnusualError):
        strict = True
    except _NOT_READ:
        strict = False

    # From here on a large body is unusual, and parsed up to three times. What is built is bounded each time.
    if not strict:
        with suppress(*_NOT_READ, UnusualError):
            return _read_typed(_repaired(body))
    if not _is_little(body):
        if not strict:
            raise ValueError("not JSON")
        try:
            return _read_raw(body)
        except DecodeError:
            raise ValueError("not JSON") from None
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
    try:
        return _USUAL_FIELDS.decode(body)
    except ValidationError:  # its messages are no objects, or it is none itself
        with suppress(*_NOT_READ):
            fields = _FIELDS.decode(body)
            fields.messages = _as_messages(fields.messages)
            return fields
    except _NOT_READ:  # not by `suppress`, which takes half as long as a small body
        pass
    # Parsed once more only if it is no object, no JSON, or JSON for Python only.
    return _build_leniently(body)


def _build_leniently(body: bytes) -> Fields:
    """Read what `json.loads` takes: NaN, half a surrogate pair, a byte order mark, UTF-16 and UTF-32, too."""
    value = json.loads(body)
    if not isinstance(value, dict):
        raise InvalidRequest(NO_OBJECT)

    fields = Fields(*map(value.get, Fields.__struct_fields__))
    fields.messages = _as_messages(fields.messages)
    return fields


def _as_messages(value: object) -> object:
    if not isinstance(value, list):
        return value
    return [
        Message(*map(item.get, Message.__struct_fields__)) if isinstance(item, dict) else item
        for item in value[:MAX_MESSAGES]
    ]


_USUAL_FIELDS = Decoder(_UsualFields)
_FIELDS = Decoder(Fields)
_RAW_FIELDS = Decoder(RawFields)
_TYPED_FIELDS = Decoder(TypedFields)
_TYPED_FIELDS_AND_IDS = Decoder(TypedFieldsAndIds)
_EXTRA_BODY = Decoder(ExtraBody)
_ANY = Decoder()
_IDS = Decoder(list[int])
_BATCH = Decoder(Batch)


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
    counting = LISTS.set(Lists())
    try:
        typed = decoder.decode(body)
    finally:
        LISTS.reset(counting)
    allowance = _Allowance()
    fields = _small_fields(typed, allowance)
    fields.prompt = typed.prompt
    if typed.messages is not None:
        fields.messages = _built_messages(typed.messages, allowance)
    return fields


def _read_raw(body: bytes) -> Fields:
    try:
        raw = _RAW_FIELDS.decode(body)
    except ValidationError:
        raise InvalidRequest(NO_OBJECT) from None

    allowance = _Allowance()
    fields = _small_fields(raw, allowance)
    fields.messages = _as_messages(allowance.build(raw.messages))
    fields.prompt = _prompt(raw.prompt, allowance)
    return fields


def _small_fields(raw: RawFields, allowance: _Allowance) -> Fields:
    """Return all fields but the two that hold the prompt."""
    fields = Fields(**{name: allowance.build(getattr(raw, name)) for name in Fields.__struct_fields__[:-2]})
    if isinstance(fields.extra_body, Raw):
        # Stepped over once more only if it is large: one field of it is read.
        try:
            fields.extra_body = {"session_id": allowance.build(_EXTRA_BODY.decode(fields.extra_body).session_id)}
        except ValidationError:
            fields.extra_body = None  # no object
    return fields


def _built_messages(messages: Messages, allowance: _Allowance) -> list[Message]:
    built: list[Message] = []
    pieces = 0
    for message in cast("tuple[Message | None, ...]", astuple(messages)):
        if message is None or pieces > MAX_PIECES:
            break

        content = message.content
        if isinstance(content, Struct):
            message.content = parts = [_part_dict(part) for part in astuple(content) if part is not None]
            pieces += len(parts)
        pieces += 1
        if isinstance(calls := message.tool_calls, Raw) and calls:
            message.tool_calls = allowance.build(calls)
        if isinstance(call := message.function_call, Raw) and call:
            message.function_call = allowance.build(call)
        built.append(message)

    return built


def _part_dict(part: Part) -> dict[str, object]:
    kind = part.type or "text"
    value = getattr(part, kind) if kind in PART_KINDS else None
    if isinstance(value, Media):
        value = {"url": value.url} if value.url else {"url": value.data}
        if not value["url"]:
            raise UnusualError
    if value is None or (value == "" and kind.endswith(("url", "audio"))):
        raise UnusualError
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

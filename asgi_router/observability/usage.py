"""Owns reading what an answer says of itself: `usage`, from the end of the bytes that have been passed on anyway."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

_NAME = b'"usage"'
_OBJECT = re.compile(rb"\s*:\s*(?=\{)")
_BACKSLASH = 0x5C
_MAX_LOOKS = 8  # a chunk may hold hundreds of events with "usage":null in each, or whatever a worker makes up
_MAX_NESTED = 8  # objects within one: OpenAI's own has two


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Tokens as the worker counted them; None where it doesn't say."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None


_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class _Details(msgspec.Struct, gc=False):
    cached_tokens: _Count | None = None


class _Said(msgspec.Struct, gc=False):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None


_DECODER = msgspec.json.Decoder(_Said)
_NOT_READ = (msgspec.DecodeError, ValueError, RecursionError)  # the first is one of the second since msgspec 0.20 only
_LENIENT_DECODER = msgspec.json.Decoder(dict[str, object])


def read_usage(end: bytes) -> Usage:
    """Return the last `usage` in the end of an answer, JSON or an event stream of it. Never raises.

    Within a text of the model quotes are escaped, so it can't pretend to be one.
    """
    at = len(end)
    for _ in range(_MAX_LOOKS):
        at = end.rfind(_NAME, 0, at)
        if at < 0:
            break
        if at and end[at - 1] == _BACKSLASH:
            continue
        value = _OBJECT.match(end, at + len(_NAME))
        if value is not None and (said := _object_at(end, value.end())) is not None:
            details = said.prompt_tokens_details
            cached = None if details is None else details.cached_tokens
            return Usage(said.prompt_tokens, cached, said.completion_tokens)
    return Usage()


def _object_at(text: bytes, start: int) -> _Said | None:
    """Return the JSON object that begins at `start`, if it ends and is one."""
    close = start
    for depth in range(1, _MAX_NESTED + 1):
        close = text.find(b"}", close) + 1
        if not close:
            return None
        if text.count(b"{", start, close) == depth:  # in no text of it: numbers are all that there is
            break
    try:
        return _DECODER.decode(text[start:close])
    except msgspec.ValidationError:
        return _what_fits(text[start:close])
    except _NOT_READ:
        return None


def _what_fits(text: bytes) -> _Said | None:
    """Return the counts that are such, of an object in which something else stands where one is expected."""
    try:
        said = _LENIENT_DECODER.decode(text)
    except _NOT_READ:
        return None
    details = said.get("prompt_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
    return _Said(_count(said.get("prompt_tokens")), _count(said.get("completion_tokens")), _Details(cached))


def _count(value: object) -> int | None:
    try:
        return msgspec.convert(value, _Count)
    except msgspec.ValidationError:
        return None

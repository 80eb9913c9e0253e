"""Owns reading what an answer says of itself: `usage`, from the end of the bytes that have been passed on anyway."""

from __future__ import annotations

import re

import msgspec

_NAME = b'"usage"'
_OBJECT = re.compile(rb"\s*:\s*(?=\{)")
_BACKSLASH = 0x5C
_MAX_LOOKS = 8  # a chunk may hold hundreds of events with "usage":null in each, or whatever a worker makes up
_MAX_NESTED = 8  # objects within one: OpenAI's own has two
_MAX_COUNT = 2**53


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Tokens as the worker counted them; None where it doesn't say."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None


class _Said(msgspec.Struct, gc=False):
    prompt_tokens: object = None
    completion_tokens: object = None
    prompt_tokens_details: object = None


_DECODER = msgspec.json.Decoder(_Said)


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
            cached = details.get("cached_tokens") if isinstance(details, dict) else None
            return Usage(_count(said.prompt_tokens), _count(cached), _count(said.completion_tokens))
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
    except (ValueError, RecursionError):
        return None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_COUNT else None

"""Owns reading what an answer says of itself: `usage`, from the end of the bytes that have been passed on anyway."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

_NAME = b'"usage"'
_OBJECT = re.compile(rb"\s*:\s*(?=\{)")
_BACKSLASH = 0x5C
_MAX_LOOKS = 8  # a chunk may hold hundreds of events with "usage":null in each, or whatever a worker makes up
_DECODER = json.JSONDecoder()


class Usage(NamedTuple):
    """Tokens as the worker counted them; None where it doesn't say."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None


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
        if (value := _OBJECT.match(end, at + len(_NAME))) is None:
            continue
        try:
            usage, _ = _DECODER.raw_decode(end[value.end() :].decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            continue
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        return Usage(_count(usage.get("prompt_tokens")), _count(cached), _count(usage.get("completion_tokens")))
    return Usage()


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else None

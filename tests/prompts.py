"""Short ways to spell prompts, and to see the prefix key that the router makes of them."""

from __future__ import annotations

import json
from itertools import combinations
from typing import TYPE_CHECKING

from asgi_router.extraction import extract

if TYPE_CHECKING:
    from collections.abc import Sequence

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"

USER: dict[str, object] = {"role": "user", "content": "hello"}
TOOL: dict[str, object] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL: dict[str, object] = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def chat(*messages: object, **fields: object) -> bytes:
    """The key of a chat."""
    return extract(json.dumps({"messages": messages, **fields}).encode(), CHAT).prefix_key


def prompt(value: object, **fields: object) -> bytes:
    """The key of a completion."""
    return extract(json.dumps({"prompt": value, **fields}).encode(), TEXT).prefix_key


def user(content: object) -> dict[str, object]:
    """A user's message."""
    return {"role": "user", "content": content}


def text(value: str) -> dict[str, object]:
    """A text part."""
    return {"type": "text", "text": value}


def image(url: str) -> dict[str, object]:
    """An image part."""
    return {"type": "image_url", "image_url": {"url": url}}


def shared(first: bytes, second: bytes) -> int:
    """The length of the common prefix of two keys."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def assert_all_different(keys: Sequence[bytes]) -> None:
    """No two of these are equal."""
    assert all(a != b for a, b in combinations(keys, 2))

"""Owns the proof that no body takes much longer to read than another of its size, whatever it is made of; nor memory.

Processor time is compared, of this thread alone, and as a multiple of what a plain text takes: 3 to 40 times as much,
where a parser that builds everything takes 50 to 2,000 times.
"""

from __future__ import annotations

import json
import time
import tracemalloc
from contextlib import suppress

import pytest

from asgi_router.errors import InvalidRequest
from asgi_router.extraction import extract
from tests.prompts import CHAT, TEXT, text, user

SIZE = 2_000_000
LIMIT = 200


def cost(body: bytes, path: str) -> float:
    """Seconds of processor time for each byte: the shortest of three."""
    times = []
    for _ in range(3):
        start = time.thread_time()
        with suppress(InvalidRequest):
            extract(body, path)
        times.append(time.thread_time() - start)
    return min(times) / len(body)


def filled(template: str, item: str, separator: str = ",") -> bytes:
    """The template, with as many items as make a body of two megabytes."""
    return (template % separator.join([item] * (SIZE // (len(item) + 1)))).encode()


BODIES = {
    **{
        f"{field} of {item[:12]}": filled(f'{{"{field}": [%s]}}', item)
        for field in ("unknown", "messages", "prompt", "tools", "cache_salt", "model")
        for item in ("1", "[]", "{}", '"a"', "0.5", '{"a":1}', "[" * 400 + "]" * 400)
    },
    "an object of a million keys": ("{" + ",".join(f'"k{key}":1' for key in range(SIZE // 12)) + "}").encode(),
    "a message of many keys": filled('{"messages": [{%s}]}', '"role":"a"'),
    "tiny messages": filled('{"messages": [%s]}', '{"role":"user","content":"a"}'),
    "tiny parts": filled('{"messages": [%s]}', '{"content":[' + ",".join(['{"text":"a"}'] * 256) + "]}"),
    "media": filled(
        '{"messages": [%s]}', '{"content":[' + ",".join(['{"type":"image_url","image_url":"a"}'] * 256) + "]}"
    ),
    "tool calls": filled('{"messages": [%s]}', '{"tool_calls":[' + ",".join(["{}"] * 100) + "]}"),
    "the same messages again and again": filled("{%s}", '"messages":[{}]'),
    "the same content again and again": filled('{"messages": [{%s}]}', '"content":[{"text":"a"}]'),
    "escapes": filled('{"prompt": "%s"}', r"\u0041", ""),
    "halves of emojis": filled('{"prompt": "%s"}', r"\ud83d", ""),
    "halves of emojis beside values": filled(r'{"prompt": "\ud83d", "unknown": [%s]}', "1"),
    "NaN": filled('{"unknown": [%s]}', "NaN"),
    "NaN beside values": filled('{"top_p": NaN, "unknown": [%s]}', "1"),
    "long numbers": filled('{"messages": [%s]}', "9" * 4_000),
    "one long number": filled('{"prompt": [%s]}', "9", ""),
    "no end": filled('{"prompt": "%s', "a", ""),
}


@pytest.mark.parametrize("name", BODIES)
def test_no_body_costs_much(name: str) -> None:
    """Two megabytes of anything are read in so many times what two megabytes of text take."""
    body = BODIES[name]
    text = filled('{"prompt": "%s"}', "a ", "")
    assert cost(body, TEXT if b'"prompt"' in body[:20] else CHAT) < LIMIT * cost(text, TEXT)


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("length", [5_000, 100_000, 1_000_000])
def test_a_prompt_is_not_kept_twice(length: int, in_parts: bool) -> None:
    """Of a long chat its key is kept, beside the body; while it is read, not much more.

    Of a text with escapes the parser itself makes another copy for a moment.
    """
    said, times = "so it\ngoes" * (length // 10), 1_000_000 // length
    messages = [user([text(said)] * times)] if in_parts else [user(said)] * times
    body = json.dumps({"messages": messages}).encode()
    extract(body, CHAT)  # what is made once, by the first
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        request = extract(body, CHAT)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(request.prefix_key) >= 1_000_000
    assert kept - before < 1.1 * len(body)
    assert peak - before < (2.3 if times == 1 else 1.2) * len(body)

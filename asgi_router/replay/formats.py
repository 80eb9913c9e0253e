"""Owns the formats of traces: one line in, what it says of one request out. Nothing here opens a file.

Times and what they are counted from differ; an arrival is in seconds here, and the reader of the file takes the first
one off. A line that makes no sense raises `BadLine`, which says why in words that don't repeat the line.
"""

from __future__ import annotations

import datetime
import json
import math
from typing import TYPE_CHECKING, NamedTuple

from asgi_router.errors import InvalidRequest
from asgi_router.extraction import extract
from asgi_router.prefix_key import BYTES_PER_TOKEN
from asgi_router.scheduling.blocks import LONGER, block_hashes

if TYPE_CHECKING:
    from collections.abc import Mapping

MOONCAKE_BLOCK = 512
TEXT_BLOCK = 512 // BYTES_PER_TOKEN
MAX_TOKENS = 10_000_000
"""More than any context window: whoever says so is wrong, and simulating it would take for ever."""
DEFAULT_OUTPUT = 128
"""Tokens of an answer of which the trace doesn't know them."""
SECONDS_PER_TOKEN = 0.03
"""By which the router's request log, which knows how long an answer took, is turned into tokens."""


class BadLine(ValueError):
    """A line of a trace can't be used."""


class Line(NamedTuple):
    """What a line says of one request."""

    arrival: float | None
    """In seconds, from any beginning; None: it doesn't say."""
    tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = TEXT_BLOCK
    model: str = ""
    session_id: str = ""


def read_csv(row: Mapping[str, str | None]) -> Line:
    """Read a row of Azure's traces: arrival and lengths, nothing of what the prompts share."""
    arrival = _seconds(row.get("TIMESTAMP"))
    if arrival is None:
        raise BadLine("no TIMESTAMP")
    try:
        tokens, output = int(row.get("ContextTokens") or ""), int(row.get("GeneratedTokens") or "")
    except ValueError:
        raise BadLine("ContextTokens and GeneratedTokens must be whole numbers") from None
    return Line(arrival, _tokens(tokens, "ContextTokens"), _tokens(output, "GeneratedTokens"))


def read_json(line: bytes) -> Line:
    """Read a line of JSON, perhaps behind a log's prefix: Mooncake's, this router's, or an OpenAI-style request."""
    start = line.find(b"{")
    if start < 0:
        raise BadLine("no JSON object")
    try:
        fields = json.loads(line[start:])
    except (ValueError, RecursionError):
        raise BadLine("no valid JSON") from None
    if not isinstance(fields, dict):
        raise BadLine("no JSON object")

    if "hash_ids" in fields or "input_length" in fields:
        return _mooncake(fields)
    if "predicted_cached_tokens" in fields:
        return _router_log(fields, line[:start].decode("utf-8", "replace"))
    return _openai(fields, line[start:])


def _mooncake(fields: dict[str, object]) -> Line:
    milliseconds = _number(fields.get("timestamp"))
    if milliseconds is None:
        raise BadLine("timestamp must be a number")
    tokens = _tokens(fields.get("input_length"), "input_length")
    ids = fields.get("hash_ids", [])
    if not isinstance(ids, list) or not all(type(block) is int for block in ids):
        raise BadLine("hash_ids must be a list of whole numbers")
    # The last part of a block has an id, too; engines share whole blocks only. Of longer hashes 64 bits are enough.
    blocks = tuple(block % LONGER for block in ids[: tokens // MOONCAKE_BLOCK])
    output = _tokens(fields.get("output_length"), "output_length")
    return Line(milliseconds / 1e3, tokens, output, blocks, MOONCAKE_BLOCK)


def _router_log(fields: dict[str, object], prefix: str) -> Line:
    """Read a record of `asgi_router.requests`.

    There is no text in it, so what prompts share is guessed: those of one session begin alike, as a conversation's do,
    and others share nothing. The record is written at the request's end.
    """
    tokens = _tokens(fields.get("real_prompt_tokens") or fields.get("prompt_tokens"), "prompt_tokens")
    duration = _number(fields.get("duration_seconds"))
    if duration is None:
        raise BadLine("duration_seconds must be a number")
    first_byte = _number(fields.get("first_byte_seconds"))
    answering = 0.0 if first_byte is None else duration - first_byte
    output = fields.get("real_completion_tokens")
    output = output if type(output) is int else 1 + int(max(0.0, answering) / SECONDS_PER_TOKEN)
    arrival = _number(fields.get("arrived"))
    if arrival is None:
        end = _time_of(fields)
        end = _time_in(prefix) if end is None else end
        arrival = None if end is None else end - duration
    session, model = fields.get("session_id"), fields.get("model")
    session = session if isinstance(session, str) else ""
    model = model if isinstance(model, str) else ""
    blocks: tuple[int, ...] = ()
    if session:
        blocks = tuple(hash((model, session, number)) for number in range(tokens // TEXT_BLOCK))
    return Line(arrival, tokens, min(MAX_TOKENS, output), blocks, TEXT_BLOCK, model, session)


def _openai(fields: dict[str, object], line: bytes) -> Line:
    """Read a logged request: a body by itself, or as `body` or `request` beside its time, path and answer."""
    body: object = fields
    for name in ("body", "request"):
        if isinstance(fields.get(name), dict):
            body = fields[name]
            line = json.dumps(body).encode()
            break
    assert isinstance(body, dict)
    if "messages" not in body and "prompt" not in body:
        raise BadLine("neither hash_ids, nor a request with messages or a prompt, nor a record of asgi_router.requests")

    path = next((fields[name] for name in ("path", "url") if isinstance(fields.get(name), str)), "")
    assert isinstance(path, str)
    try:
        request = extract(line, path)
    except InvalidRequest:
        raise BadLine("no valid request body") from None
    return Line(
        _time_of(fields),
        _tokens(request.prompt_tokens, "the prompt's length"),
        _output_tokens(fields, body),
        block_hashes(request.key, TEXT_BLOCK * BYTES_PER_TOKEN, (request.model,), growing=False),
        TEXT_BLOCK,
        request.model,
        request.session_id,
    )


def _output_tokens(fields: dict[str, object], body: dict[str, object]) -> int:
    for owner in (fields, fields.get("response"), _nested(fields.get("response"), "body")):
        used = _nested(_nested(owner, "usage"), "completion_tokens")
        if type(used) is int:
            return _tokens(used, "completion_tokens")
    for name in ("max_completion_tokens", "max_tokens"):
        limit = body.get(name)
        if type(limit) is int and limit > 0:
            return min(limit, DEFAULT_OUTPUT)
    return DEFAULT_OUTPUT


def _nested(owner: object, name: str) -> object:
    return owner.get(name) if isinstance(owner, dict) else None


def _tokens(value: object, name: str) -> int:
    if type(value) is not int or not 0 <= value <= MAX_TOKENS:
        raise BadLine(f"{name} must be a whole number from 0 to {MAX_TOKENS:,}")
    return max(1, value)


def _number(value: object) -> float | None:
    """Return a finite number of a sane size; None for all else, booleans too."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15 else None


def _time_of(fields: dict[str, object]) -> float | None:
    for name in ("timestamp", "time", "ts", "created", "created_at", "asctime"):
        if name in fields:
            seconds = _seconds(fields[name])
            if seconds is None:
                raise BadLine(f"{name} is no time")
            return seconds
    return None


def _time_in(prefix: str) -> float | None:
    """Return the time that a log's format puts in front of its messages, as `%(asctime)s` does."""
    words = prefix.replace("[", " ").replace("]", " ").replace(",", ".").split()
    for at, word in enumerate(words):
        for text in (" ".join(words[at : at + 2]), word):
            if len(text) >= 8 and (seconds := _seconds(text)) is not None:
                return seconds
    return None


def _seconds(value: object) -> float | None:
    """Return a time as seconds: a number (of milliseconds where seconds would lie in the far future), or ISO 8601."""
    number = _number(value)
    if number is not None:
        return number / 1e3 if number > 1e11 else number
    if not isinstance(value, str):
        return None
    text = value.strip()
    try:
        number = float(text)
    except ValueError:
        head, point, fraction = text.partition(".")
        digits = len(fraction) - len(fraction.lstrip("0123456789"))
        if point:  # Azure has seven digits, of which Python before 3.11 would take none and later ones six
            text = f"{head}.{fraction[: min(digits, 6)]}{fraction[digits:]}"
        try:
            time = datetime.datetime.fromisoformat(text)
        except ValueError:
            return None
        return (time if time.tzinfo else time.replace(tzinfo=datetime.UTC)).timestamp()
    return _seconds(number) if math.isfinite(number) else None

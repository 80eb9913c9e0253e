"""Owns the prefix key: the bytes that stand for a prompt as the worker's chat template sees it.

Two prompts whose keys are equal up to some byte share what the worker can have in its KV cache up to about
there. So the key holds, in the order in which templates print them: what separates caches (model, salt),
tools and other template input, then every message with its role, name, content and tool calls. A text part
equals the same plain string. Images and other media are represented by a digest.

Fields are framed by 0xFE and 0xFF, bytes that UTF-8 never contains, so that no text can imitate a frame.
Token ids are packed in four bytes each: text takes about four bytes a token too, and so one figure, the
length in bytes divided by `BYTES_PER_TOKEN`, estimates the tokens of both.
"""

from __future__ import annotations

import array
import hashlib
import json
import sys
from typing import NamedTuple, cast

BYTES_PER_TOKEN = 4
"""Rule of thumb of the published BPE tokenizers for English; a Chinese character takes 3 bytes, about a token."""

MEDIA_TOKENS = 576
"""Tokens counted for one image: the 24 x 24 patches of LLaVA-1.5 (arXiv:2310.03744). Models differ widely."""

_FIELD = b"\xfe"
_RECORD = b"\xff"
_TOKEN_IDS = b"\xfei"
_BATCH_BREAK = 0xFFFFFFFF  # between the prompts of a batch of token-id prompts; no vocabulary is that large

# Request fields that templates print before the first message.
_TEMPLATE_INPUT = (
    "tools",
    "functions",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
)
_MESSAGE_INPUT = ("tool_calls", "function_call", "tool_call_id")


class PrefixKey(NamedTuple):
    """The bytes of a prompt, and the tokens of its media, which those bytes do not show."""

    key: bytes
    media_tokens: int


def chat_key(fields: dict[str, object]) -> PrefixKey:
    """Return the key of a chat completion request, given its JSON object."""
    out = [_RECORD + name.encode() + _FIELD + _json(fields[name]) for name in _TEMPLATE_INPUT if fields.get(name)]
    media_tokens = 0
    messages = fields.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict):
            out += (_RECORD, _json(message))
            continue

        out += (_RECORD, _scalar(message.get("role")), _FIELD, _scalar(message.get("name")), _FIELD)
        media_tokens += _add_content(out, message.get("content"))
        out += (_FIELD + name.encode() + _FIELD + _json(message[name]) for name in _MESSAGE_INPUT if message.get(name))

    return PrefixKey(b"".join(out), media_tokens)


def prompt_key(prompt: object) -> PrefixKey:
    """Return the key of a `prompt`: text, token ids, or a batch of either.

    A batch of one equals its only prompt. A batch of texts begins like its first prompt, whose prefix is what
    a worker would find in its cache. Token ids never equal any text.
    """
    if isinstance(prompt, str):
        return PrefixKey(_text(prompt), 0)
    if not isinstance(prompt, list) or not prompt:
        return PrefixKey(b"", 0)
    if all(isinstance(item, str) for item in prompt):
        return PrefixKey(_RECORD.join(map(_text, prompt)), 0)

    packed = _pack_token_ids(prompt)
    return PrefixKey(_TOKEN_IDS + _RECORD + _json(prompt) if packed is None else _TOKEN_IDS + packed, 0)


def _pack_token_ids(prompt: list[object]) -> bytes | None:
    """Return the ids of `[1, 2]` or `[[1, 2], [3]]` in four bytes each, or None if that is not what it is."""
    ids: list[object] = []
    for index, item in enumerate(prompt):
        if isinstance(item, list):
            if index:
                ids.append(_BATCH_BREAK)
            ids += item
        else:
            ids.append(item)

    try:
        # array() refuses what is no integer, and what does not fit. It takes booleans, which do no harm here.
        packed = array.array("I", cast("list[int]", ids))
    except (TypeError, OverflowError):
        return None

    if sys.byteorder == "big":  # a key is the same on every machine
        packed.byteswap()
    return packed.tobytes()


def _add_content(out: list[bytes], content: object) -> int:
    """Append a message's content to `out`; return the tokens of its media.

    Several text parts are joined by a line break, as vLLM and llama.cpp do for templates that expect a string.
    """
    if not isinstance(content, list):
        out.append(_scalar(content))
        return 0

    media_tokens = 0
    for index, part in enumerate(content):
        if index:
            out.append(b"\n")
        if isinstance(part, str):
            out.append(_text(part))
        elif isinstance(part, dict) and isinstance(text := part.get("text"), str):
            out.append(_text(text))
        else:
            out.append(_FIELD + _media_digest(part) + _FIELD)
            media_tokens += MEDIA_TOKENS

    return media_tokens


def _media_digest(part: object) -> bytes:
    """Return 16 bytes that stand for an image, a sound or whatever else a content part holds."""
    payload: object = part
    if isinstance(part, dict):
        payload = part.get(str(part.get("type")), part)
        if isinstance(payload, dict):  # {"url": ...} of images, {"data": ...} of sound
            payload = payload.get("url") or payload.get("data") or payload

    data = _text(payload) if isinstance(payload, str) else _json(payload)
    return hashlib.blake2b(data, digest_size=16).digest()


def _scalar(value: object) -> bytes:
    if isinstance(value, str):
        return _text(value)

    return b"" if value is None else _FIELD + _json(value)


def _text(text: str) -> bytes:
    # JSON can spell half a surrogate pair ("\ud800"), which strict UTF-8 refuses to encode.
    return text.encode("utf-8", "surrogatepass")


def _json(value: object) -> bytes:
    # ASCII with escapes. Keys stay in the client's order, the order in which templates print them.
    return json.dumps(value, separators=(",", ":")).encode("ascii")

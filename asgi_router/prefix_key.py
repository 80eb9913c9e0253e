"""Owns the prefix key: the bytes that stand for a prompt as the worker's chat template sees it.

Two prompts whose keys are equal up to some byte share what the worker can have in its KV cache up to about
there. So the key holds, in the order in which templates print them: what separates caches (a salt, say; models
are kept apart elsewhere), tools and other template input, then every message with its role, name, content,
reasoning and tool calls. A text part equals the same plain string. Images and other media are represented by a
digest.

Fields are framed by 0xFE and 0xFF, bytes that UTF-8 never contains, so that no text can imitate a frame.
Token ids are packed in four bytes each: text takes about four bytes a token too, and so one figure,
`BYTES_PER_TOKEN`, turns a length of matched bytes into tokens for both.
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

MAX_KEY_BYTES = 4 * 1024 * 1024
"""Messages and prompts of a batch that begin behind this many bytes, about a million tokens, are passed over.

No worker holds that much for one prompt, and it bounds how long a body of many tiny messages stops the loop.
"""

_FIELD = b"\xfe"
_RECORD = b"\xff"
_TOKEN_IDS = b"\xfei"
_UNKNOWN = b"\xfe?"
_BATCH_BREAK = 0xFFFFFFFF  # between the prompts of a batch of token-id prompts; no vocabulary is that large

# By these vLLM and SGLang keep apart what would otherwise share a cache.
_CACHE_SPACE = ("cache_salt", "extra_key", "lora_path")
# Request fields that templates print before the first message.
_TEMPLATE_INPUT = (
    "tools",
    "functions",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
)
_MESSAGE_INPUT = ("reasoning_content", "reasoning", "tool_calls", "function_call", "tool_call_id")
_TEXT_PARTS = ("text", "refusal", "thinking")

# Keys stay in the client's order, the order in which templates print them. What was parsed has no circles.
_ENCODER = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":"))


class PrefixKey(NamedTuple):
    """The bytes of a prompt, and its estimated tokens: those of its media don't show in the bytes."""

    key: bytes
    tokens: int
    text_only: bool


def text_tokens(size: int) -> int:
    """Return the estimated tokens, at least 1, of `size` bytes of text."""
    return max(1, -(-size // BYTES_PER_TOKEN))


def chat_key(fields: dict[str, object]) -> PrefixKey:
    """Return the key of a chat completion request, given its JSON object."""
    space = _named_fields(fields, _CACHE_SPACE)
    out = bytearray(space + _named_fields(fields, _TEMPLATE_INPUT))
    media = 0
    messages = fields.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if len(out) > MAX_KEY_BYTES:
            break

        media += _add_message(out, message)

    return PrefixKey(bytes(out), text_tokens(len(out) - len(space)) + media * MEDIA_TOKENS, not media)


def prompt_key(fields: dict[str, object]) -> PrefixKey:
    """Return the key of a completion request, given its JSON object: text, token ids, or a batch of either.

    A batch of one equals its only prompt. A batch of texts begins like its first prompt, whose prefix is what
    a worker would find in its cache. Token ids never equal any text, and are counted exactly.
    """
    space = _named_fields(fields, _CACHE_SPACE)
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        return PrefixKey(b"", 1, False)

    if all(isinstance(item, str) for item in prompt):
        texts = _join_texts(cast("list[str]", prompt))
        return PrefixKey(space + texts, text_tokens(len(texts)), True)
    if (packed := _pack_token_ids(prompt)) is not None:
        return PrefixKey(space + _TOKEN_IDS + packed.key, packed.tokens, False)

    unknown = _json(prompt)
    return PrefixKey(space + _UNKNOWN + unknown, text_tokens(len(unknown)), False)


def _named_fields(fields: dict[str, object], names: tuple[str, ...]) -> bytes:
    return b"".join(_RECORD + name.encode() + _FIELD + _json(fields[name]) for name in names if fields.get(name))


def _join_texts(texts: list[str]) -> bytes:
    out = bytearray()
    for index, text in enumerate(texts):
        if len(out) > MAX_KEY_BYTES:
            break

        if index:
            out += _RECORD
        out += _text(text)

    return bytes(out)


def _pack_token_ids(prompt: list[object]) -> PrefixKey | None:
    """Return the ids of `[1, 2]` or `[[1, 2], [3]]` in four bytes each, or None if that is not what it is."""
    batch = prompt if all(isinstance(item, list) for item in prompt) else [prompt]
    packed = array.array("I")
    try:
        for index, ids in enumerate(cast("list[list[int]]", batch)):
            if index:
                packed.append(_BATCH_BREAK)
            # array refuses what is no integer, and what does not fit. It takes booleans, which do no harm here.
            packed.extend(ids)
    except (TypeError, OverflowError):
        return None

    tokens = max(1, len(packed) - (len(batch) - 1))
    if sys.byteorder == "big":  # a key is the same on every machine
        packed.byteswap()
    return PrefixKey(packed.tobytes(), tokens, False)


def _add_message(out: bytearray, message: object) -> int:
    """Append a message to `out`; return how many media it holds."""
    out += _RECORD
    if not isinstance(message, dict):
        out += _json(message)
        return 0

    out += _scalar(message.get("role")) + _FIELD + _scalar(message.get("name")) + _FIELD
    media = _add_content(out, message.get("content"))
    for name in _MESSAGE_INPUT:
        if value := message.get(name):
            out += _FIELD + name.encode() + _FIELD + _scalar(value)

    return media


def _add_content(out: bytearray, content: object) -> int:
    """Append a message's content to `out`; return how many media it holds.

    Several text parts are joined by a line break, as vLLM and llama.cpp do for templates that expect a string.
    """
    if not isinstance(content, list):
        out += _scalar(content)
        return 0

    media = 0
    for index, part in enumerate(content):
        if len(out) > MAX_KEY_BYTES:
            break

        if index:
            out += b"\n"
        if not isinstance(part, dict):
            out += _scalar(part)
            continue

        # {"type": "text", "text": ...}, {"type": "image_url", "image_url": ...}; {"type": "input_text", "text": ...}
        kind = part.get("type")
        name = kind if isinstance(kind, str) and kind in part else "text"
        value = part.get(name)
        if isinstance(value, str) and name in _TEXT_PARTS:
            out += _text(value)
        else:
            out += _FIELD + _media_digest(part, name, value) + _FIELD
            media += 1

    return media


def _media_digest(part: dict[str, object], kind: str, value: object) -> bytes:
    """Return 16 bytes that stand for an image, a sound or whatever else a content part holds."""
    if isinstance(value, dict):  # {"url": ...} of images, {"data": ...} of sound
        value = value.get("url") or value.get("data")
    # Where that says nothing (vLLM takes a `uuid` in place of the image), the whole part has to.
    data = _text(value) if isinstance(value, str) and value else _FIELD + _json(part)
    digest = hashlib.blake2b(_text(kind) + _FIELD, digest_size=16)
    digest.update(data)
    return digest.digest()


def _scalar(value: object) -> bytes:
    if isinstance(value, str):
        return _text(value)

    return b"" if value is None else _FIELD + _json(value)


def _text(text: str) -> bytes:
    # JSON can spell half a surrogate pair ("\ud800"), which strict UTF-8 refuses to encode.
    return text.encode("utf-8", "surrogatepass")


def _json(value: object) -> bytes:
    return _text(_ENCODER.encode(value))

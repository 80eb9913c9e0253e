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
from itertools import islice
from typing import TYPE_CHECKING, cast

from msgspec import Raw, Struct
from msgspec.json import Encoder

from asgi_router.body_types import MAX_MESSAGES, MAX_PARTS, MAX_PIECES, Message
from asgi_router.rope import NOTHING, Rope

if TYPE_CHECKING:
    from asgi_router.body_fields import Fields

BYTES_PER_TOKEN = 4
"""Rule of thumb of the published BPE tokenizers for English; a Chinese character takes 3 bytes, about a token."""

MEDIA_TOKENS = 576
"""Tokens counted for one image: the 24 x 24 patches of LLaVA-1.5 (arXiv:2310.03744). Models differ widely."""

MAX_KEY_BYTES = 4 * 1024 * 1024
"""Messages and prompts of a batch that begin behind this many bytes, about a million tokens, are passed over.

No worker holds that much for one prompt. How many of them are read at all is said in `body_types.py`.
"""

_FIELD = b"\xfe"
_RECORD = b"\xff"
_TOKEN_IDS = b"\xfei"
_UNKNOWN = b"\xfe?"
_NO_NAME = _FIELD + _FIELD
_HEADS = {role: _RECORD + role.encode() + _NO_NAME for role in ("system", "developer", "user", "assistant", "tool")}
_LONG_TEXT = 1_000  # characters; for shorter ones it isn't worth the trouble
_JOINED = 100_000  # bytes that are joined at once; a text of more characters is not joined
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

# Keys stay in the client's order, the order in which templates print them. A `Raw` is written as it stands.
_ENCODER = Encoder()
# For what the other one refuses: half a surrogate pair. What was parsed has no circles.
_LENIENT_ENCODER = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":"))


class PrefixKey(Struct, frozen=True, gc=False):
    """The bytes of a prompt, and its estimated tokens: those of its media don't show in the bytes."""

    key: Rope
    tokens: int
    text_only: bool


def text_tokens(size: int) -> int:
    """Return the estimated tokens, at least 1, of `size` bytes of text."""
    return -(-size // BYTES_PER_TOKEN) or 1


def chat_key(fields: Fields) -> PrefixKey:
    """Return the key of a chat completion request.

    Long texts are taken out of the messages on the way, or the prompt would be there twice.
    """
    out = _Pieces()
    # Nearly all requests have none of these; each is looked at by name since a loop would take as long as all the rest.
    if (
        fields.tools
        or fields.chat_template_kwargs
        or fields.reasoning_effort
        or fields.cache_salt
        or fields.extra_key
        or fields.lora_path
        or fields.functions
        or fields.documents
        or fields.chat_template
    ):
        out.begin(_named_fields(fields, _CACHE_SPACE))
        out.add(_named_fields(fields, _TEMPLATE_INPUT))
    messages = fields.messages
    whole = True  # of a chat that was not read whole, the length is no length to learn from
    if isinstance(messages, list):
        for message in messages if len(messages) < MAX_MESSAGES else messages[:MAX_MESSAGES]:
            if out.size > MAX_KEY_BYTES or out.count > MAX_PIECES:
                break

            _add_message(out, message)
        whole = len(messages) < MAX_MESSAGES and out.count <= MAX_PIECES
    elif isinstance(messages, Raw):
        out.add(_RECORD + _UNKNOWN + _json(messages))
        whole = False

    tokens = text_tokens(out.size) + out.media * MEDIA_TOKENS
    return PrefixKey(out.rope(), tokens, whole and not out.media)


def prompt_key(fields: Fields) -> PrefixKey:
    """Return the key of a completion request: text, token ids, or a batch of either.

    A batch of one equals its only prompt. A batch of texts begins like its first prompt, whose prefix is what
    a worker would find in its cache. Token ids never equal any text, and are counted exactly.
    """
    out = _Pieces()
    out.begin(_named_fields(fields, _CACHE_SPACE))
    prompt = fields.prompt
    if isinstance(prompt, str):
        out.add_text(prompt)
        return PrefixKey(out.rope(), text_tokens(out.size), True)
    if isinstance(prompt, Raw):
        out.add(_UNKNOWN)
        out.add(_json(prompt))
        return PrefixKey(out.rope(), text_tokens(len(prompt)), False)
    if not isinstance(prompt, list) or not prompt:
        return PrefixKey(NOTHING, 1, False)

    if isinstance(prompt[0], str) and all(isinstance(item, str) for item in prompt):
        _add_texts(out, cast("list[str]", prompt))
        return PrefixKey(out.rope(), text_tokens(out.size), True)
    if (ids := _pack_token_ids(prompt)) is not None:
        packed, tokens = ids
        out.add(_TOKEN_IDS)
        out.add(packed)
        return PrefixKey(out.rope(), tokens, False)

    unknown = _json(prompt)
    out.add(_UNKNOWN)
    out.add(unknown)
    return PrefixKey(out.rope(), text_tokens(len(unknown)), False)


def _named_fields(fields: Fields, names: tuple[str, ...]) -> bytes:
    found = [(name, value) for name in names if (value := getattr(fields, name))]
    return b"".join([_RECORD + name.encode() + _FIELD + _json(value) for name, value in found]) if found else b""


def _add_texts(out: _Pieces, texts: list[str]) -> None:
    for index, text in enumerate(islice(texts, MAX_MESSAGES)):
        if out.size > MAX_KEY_BYTES:
            break

        if index:
            out.add(_RECORD)
        out.add_text(text)


def _pack_token_ids(prompt: list[object]) -> tuple[bytes, int] | None:
    """Return the ids of `[1, 2]` or `[[1, 2], [3]]` in four bytes each, and their number.

    None if that is not what it is.
    """
    batch = prompt if isinstance(prompt[0], list) and all(isinstance(item, list) for item in prompt) else [prompt]
    packed = array.array("I")
    try:
        for index, ids in enumerate(cast("list[list[int]]", batch)):
            if index:
                packed.append(_BATCH_BREAK)
            # array refuses what is no integer, and what does not fit. It takes booleans, which do no harm here.
            # One made of a whole list is made in half the time that `extend` takes.
            packed += array.array("I", ids)
    except (TypeError, OverflowError):
        return None

    tokens = max(1, len(packed) - (len(batch) - 1))
    if sys.byteorder == "big":  # a key is the same on every machine
        packed.byteswap()
    return packed.tobytes(), tokens


class _Pieces:
    """A key that grows: pieces that are joined now and then, and long texts that stay as they are."""

    __slots__ = ("_end", "_joined", "_space", "count", "media", "pieces", "size")

    def __init__(self) -> None:
        self._joined: list[bytes | str] = []
        self.pieces: list[bytes] = []  # not joined yet
        self.size = self.media = 0
        self._space = 0  # bytes in front that no template prints: they count neither as tokens nor towards any limit
        self._end = _JOINED  # the size above which they are
        self.count = 0  # messages and their parts

    def begin(self, space: bytes) -> None:
        """Put what separates caches in front."""
        self.pieces.append(space)
        self._space = len(space)

    def add(self, piece: bytes) -> None:
        self.pieces.append(piece)
        self.size += len(piece)

    def add_text(self, text: str) -> None:
        if len(text) <= _JOINED:
            self.add(_text(text))
            if self.size > self._end:
                self._join()
            return

        self._join()
        self._joined.append(piece := text if text.isascii() else _text(text))
        self.size += len(piece)
        self._end = self.size + _JOINED

    def _join(self) -> None:
        if self.pieces:
            self._joined.append(b"".join(self.pieces))
            self.pieces.clear()
        self._end = self.size + _JOINED

    def rope(self) -> Rope:
        size = self._space + self.size
        if not self._joined:
            return Rope((b"".join(self.pieces),), size) if size else NOTHING
        self._join()
        return Rope(tuple(self._joined), size)


def _add_message(out: _Pieces, message: object) -> None:
    out.count += 1
    if not isinstance(message, Message):
        out.add(_RECORD + _json(message))
        return

    role, name, content = message.role, message.name, message.content
    # Nearly all messages begin with one of a few heads, and are one text.
    head = _HEADS.get(role) if isinstance(role, str) and name is None else None
    if head is None:
        head = _RECORD + _scalar(role) + _FIELD + _scalar(name) + _FIELD
    if isinstance(content, str):
        if len(content) > _LONG_TEXT:
            message.content = None
            out.add(head)
            out.add_text(content)
        else:
            text = _text(content)
            out.pieces += head, text
            out.size += len(head) + len(text)
    else:
        out.add(head)
        if isinstance(content, list):
            _add_parts(out, content)
        else:
            out.add(_scalar(content))
    if (
        message.reasoning_content
        or message.reasoning
        or message.tool_calls
        or message.function_call
        or message.tool_call_id
    ):
        for field in _MESSAGE_INPUT:
            if value := getattr(message, field):
                out.add(_FIELD + field.encode() + _FIELD + _scalar(value))


def _add_parts(out: _Pieces, parts: list[object]) -> None:
    """Append a message's content parts.

    Several text parts are joined by a line break, as vLLM and llama.cpp do for templates that expect a string.
    """
    for index, part in enumerate(islice(parts, MAX_PARTS)):
        if out.size > MAX_KEY_BYTES:
            break

        out.count += 1
        if index:
            out.add(b"\n")
        if not isinstance(part, dict):
            out.add(_scalar(part))
            continue

        # {"type": "text", "text": ...}, {"type": "image_url", "image_url": ...}; {"type": "input_text", "text": ...}
        kind = part.get("type")
        name = kind if isinstance(kind, str) and kind in part else "text"
        value = part.get(name)
        if isinstance(value, str) and name in _TEXT_PARTS:
            if len(value) > _LONG_TEXT:
                part[name] = None
            out.add_text(value)
        else:
            out.add(_FIELD + _media_digest(part, name, value) + _FIELD)
            out.media += 1


def _media_digest(part: dict[str, object], kind: str, value: object) -> bytes:
    """Return 16 bytes that stand for an image, a sound or whatever else a content part holds."""
    if isinstance(value, dict):  # {"url": ...} of images, {"data": ...} of sound
        value = value.get("url") or value.get("data")
    # Where that says nothing (vLLM takes a `uuid` in place of the image), the whole part has to.
    digest = hashlib.blake2b(_text(kind) + _FIELD, digest_size=16)
    digest.update(_text(value) if isinstance(value, str) and value else _FIELD + _json(part))
    return digest.digest()


def _scalar(value: object) -> bytes:
    if isinstance(value, str):
        return _text(value)

    return b"" if value is None else _FIELD + _json(value)


def _text(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can spell ("\ud800")
        return text.encode("utf-8", "surrogatepass")


def _json(value: object) -> bytes:
    if isinstance(value, Raw):
        return bytes(memoryview(value)[:MAX_KEY_BYTES])

    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError:
        return _text(_LENIENT_ENCODER.encode(value))

"""Owns the reading of a request body: bytes in, one frozen `CompletionRequest` out.

The body is parsed once, only to read it. It is never written again: the worker gets the client's own bytes.
How it is parsed is in `body_fields.py`, how the prompt becomes a key for the prefix index in `prefix_key.py`.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from msgspec import Raw, Struct
from msgspec.structs import replace

from asgi_router.body_fields import read_fields
from asgi_router.body_types import MAX_MESSAGES, MAX_PARTS, Message
from asgi_router.errors import InvalidRequest
from asgi_router.prefix_key import chat_key, prompt_key, text_tokens
from asgi_router.rope import NOTHING

if TYPE_CHECKING:
    from asgi_router.body_fields import Fields
    from asgi_router.rope import Cut, Rope

LONG = 1024
"""Characters above which a model's, a session's or a request's name is no name."""


class CompletionRequest(Struct, frozen=True):
    """What the router knows of one completion request."""

    model: str
    """As the client named it; empty if it named none."""
    stream: bool
    """True only for the JSON value `true`."""
    session_id: str
    """Top-level `session_id`, else `extra_body.session_id`; empty if neither is a non-empty string."""
    prompt_tokens: int
    """Estimated, at least 1: a token-id prompt counts exactly, text as one token for four bytes of UTF-8."""
    key: Rope
    """The prefix key: equal up to a byte = the worker's chat template is fed equally up to there. Empty: nothing to
    match, or it is `cut`."""
    request_id: str = ""
    """The body's `request_id`, by which FastDeploy knows the request; empty if it has none that is a string."""
    text_only: bool = False
    """The prompt is text and nothing else, so that `prompt_tokens` is a guess from its length."""
    body: bytes = b""
    """What `texts` are read from: the request's body, or nothing once they are of no more use."""
    is_chat: bool = False
    """The prompt is the body's `messages`, and not its `prompt`."""
    cut: Cut | None = None
    """What is left of the key once it was cut into blocks for good."""

    def __repr__(self) -> str:
        return f"<CompletionRequest for {self.model!r}: {self.prompt_tokens} tokens>"

    @property
    def texts(self) -> tuple[str, ...]:
        """The prompt's texts as the client wrote them. Empty for token ids and images alone.

        The body is parsed anew whenever they are asked for: no policy of ours does, and a long prompt's texts, kept
        beside its key and its body, would take as much memory again.

        Raises:
            RecursionError: the body is nested so deeply that it could only just be read, and the stack is deeper now.
        """
        if not self.body:
            return ()

        fields = read_fields(self.body)
        return tuple(_chat_texts(fields.messages) if self.is_chat else _prompt_texts(fields.prompt))

    @property
    def prefix_key(self) -> bytes:
        """The bytes of `key`, joined anew whenever they are asked for."""
        return bytes(self.key)

    @property
    def message(self) -> str:
        """The prompt's text: its texts, trimmed, joined by one space. Made anew whenever it is asked for."""
        return " ".join(stripped for text in self.texts if (stripped := text.strip()))

    def condensed(self, cut: Cut) -> CompletionRequest:
        """Return the same with a `cut` in place of its key."""
        return replace(self, key=NOTHING, cut=cut)

    def without_text(self) -> CompletionRequest:
        """Return what is still of use when the answer has begun. Names that are too long to be shown go, too."""
        return replace(
            self,
            key=NOTHING,
            cut=None,
            body=b"",
            model=self.model if len(self.model) <= LONG else "",
            session_id=self.session_id if len(self.session_id) <= LONG else "",
            request_id="",
        )


def extract(body: bytes, path: str, content_encoding: str = "") -> CompletionRequest:
    """Read the JSON `body` of a POST to the route `path`.

    A chat path (`.../chat/completions`) is read by its `messages`, any other `.../completions` by its `prompt`,
    another path by whichever of the two the body has.

    A body with a `content_encoding` (gzip, say) is not unpacked: nothing in it is read, it is forwarded as it
    is, and its size stands in for its length in tokens. Unpacking would cost the event loop an amount of time
    that the client chooses.

    Raises:
        InvalidRequest: the body is not a JSON object, or is nested more deeply than the interpreter can read.
    """
    if content_encoding and content_encoding.strip().lower() not in ("", "identity"):
        return CompletionRequest("", False, "", text_tokens(len(body)), NOTHING)

    try:
        return _read(body, path)
    except RecursionError:
        raise InvalidRequest("The request body is nested too deeply.") from None
    except ValueError:
        # The parsers' errors, UnicodeDecodeError, and the interpreter's limit on the digits of an integer. Their
        # texts quote the body, so they are not passed on.
        raise InvalidRequest("The request body is not valid JSON.") from None


def _read(body: bytes, path: str) -> CompletionRequest:
    fields = read_fields(body)
    is_chat = path.endswith("/chat/completions") or (
        not path.endswith("/completions") and isinstance(fields.messages, list | Raw)
    )
    key = chat_key(fields) if is_chat else prompt_key(fields)
    model, request_id = fields.model, fields.request_id
    return CompletionRequest(
        model if isinstance(model, str) else "",
        fields.stream is True,
        _session_id(fields) if fields.session_id or fields.extra_body else "",
        key.tokens,
        key.key,
        request_id if isinstance(request_id, str) else "",
        key.text_only,
        body,
        is_chat,
    )


def _session_id(fields: Fields) -> str:
    extra = fields.extra_body
    nested = extra.get("session_id") if isinstance(extra, dict) else None
    for candidate in (fields.session_id, nested):
        if isinstance(candidate, str) and candidate:
            return candidate

    return ""


def _chat_texts(messages: object) -> list[str]:
    """Return the texts of a chat in order: string contents, and the `text` of parts whose type is text."""
    texts: list[str] = []
    for message in islice(messages, MAX_MESSAGES) if isinstance(messages, list) else ():
        content = message.content if isinstance(message, Message) else None
        if isinstance(content, str):
            texts.append(content)
        elif isinstance(content, list):
            texts.extend(
                part["text"]
                for part in islice(content, MAX_PARTS)
                if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            )

    return texts


def _prompt_texts(prompt: object) -> list[str]:
    if isinstance(prompt, str):
        return [prompt]

    # A batch of token ids may hold a million of them, and no text.
    items = islice(prompt, MAX_MESSAGES) if isinstance(prompt, list) else ()
    return [item for item in items if isinstance(item, str)]

"""Owns the types by which a large request body is parsed: they say what may be built of it, and how much.

Where a body doesn't fit them the parser raises, without having read on.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

from msgspec import Raw, Struct, defstruct

MAX_MESSAGES = 4096
"""Messages of a chat, or prompts of a batch, that are read: those behind them are passed over.

About ten times the longest conversations of agents. Together with the next two it bounds how long a body of many tiny
messages stops the loop: to 6 ms.
"""

MAX_PARTS = 256
"""Content parts of one message that are read."""

MAX_PIECES = 4096
"""Messages and parts of a request after which no further message is read."""


class UnusualError(Exception):
    """A value that fits the types, but of which they drop what matters."""


class Lists:
    """How many lists of messages and parts may still be built.

    A body may name `content` a million times, each time with a list of its own, of which the last one counts.
    """

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = 2 * MAX_MESSAGES

    def take(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise UnusualError


# The parser calls the hooks below without a word on which of its calls they belong to.
LISTS: ContextVar[Lists] = ContextVar("LISTS")


def _count_parts(_: Struct) -> None:
    LISTS.get().take(1)


def _count_messages(_: Struct) -> None:
    LISTS.get().take(MAX_MESSAGES)


class Media(Struct, gc=False):
    url: str | None = None
    data: str | None = None


class Part(Struct, gc=False):
    type: str | None = None
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None
    image_url: Media | str | None = None
    audio_url: Media | str | None = None
    video_url: Media | str | None = None
    input_audio: Media | str | None = None


PART_KINDS = frozenset(Part.__struct_fields__) - {"type"}

# A list without an end is what a hostile body is made of. A struct that is read from an array has as many items as it
# has fields; the parser steps over those behind them.
if TYPE_CHECKING:

    class Parts(Struct): ...

    class Messages(Struct): ...

    class Batch(Struct): ...

else:
    Parts = defstruct(
        "Parts",
        [(f"part_{number}", Part, None) for number in range(MAX_PARTS)],
        namespace={"__post_init__": _count_parts},
        array_like=True,
        gc=False,
    )


class Message(Struct, gc=False):
    """What the router reads of a message: a field's value, or None if it is absent."""

    role: object = None
    content: object = None
    name: object = None
    reasoning_content: object = None
    reasoning: object = None
    tool_calls: object = None
    function_call: object = None
    tool_call_id: object = None


class TypedMessage(Message, gc=False):
    role: str | None = None
    content: str | Parts | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Raw = Raw()
    function_call: Raw = Raw()
    tool_call_id: str | None = None


if not TYPE_CHECKING:
    Messages = defstruct(
        "Messages",
        [(f"message_{number}", TypedMessage, None) for number in range(MAX_MESSAGES)],
        namespace={"__post_init__": _count_messages},
        array_like=True,
        gc=False,
    )
    Batch = defstruct(
        "Batch", [(f"ids_{number}", list[int], None) for number in range(MAX_MESSAGES)], array_like=True, gc=False
    )


class RawFields(Struct):
    """All fields as bytes; the parser builds nothing."""

    model: Raw = Raw()
    stream: Raw = Raw()
    session_id: Raw = Raw()
    request_id: Raw = Raw()
    extra_body: Raw = Raw()
    cache_salt: Raw = Raw()
    extra_key: Raw = Raw()
    lora_path: Raw = Raw()
    tools: Raw = Raw()
    functions: Raw = Raw()
    documents: Raw = Raw()
    chat_template: Raw = Raw()
    chat_template_kwargs: Raw = Raw()
    reasoning_effort: Raw = Raw()
    messages: Raw = Raw()
    prompt: Raw = Raw()


class TypedFields(RawFields):
    messages: Messages | None = None  # type: ignore[assignment]
    prompt: str | None = None  # type: ignore[assignment]


class TypedFieldsAndIds(TypedFields):
    prompt: str | list[int] | None = None  # type: ignore[assignment]


class ExtraBody(Struct):
    session_id: Raw = Raw()

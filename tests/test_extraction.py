"""Owns the proof of what is read out of a request body: the seed's message rules, and the fields beside them.

Bodies that are broken on purpose are in `test_extraction_hostile.py`, the prefix key in `test_prefix_key.py`.
"""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from asgi_router.extraction import CompletionRequest, extract
from asgi_router.prefix_key import MEDIA_TOKENS
from asgi_router.rope import NOTHING

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def read(path: str = CHAT, /, **fields: object) -> CompletionRequest:
    """What is known of a request with these JSON fields."""
    return extract(json.dumps(fields).encode(), path)


def said(*contents: object) -> list[dict[str, object]]:
    """Messages with these contents."""
    return [{"role": "user", "content": content} for content in contents]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (said("hello", "hi", "how are you"), "hello hi how are you"),
        (said("", "hello", ""), "hello"),
        (None, ""),
        ([], ""),
        (said(None), ""),
        (said("  hello\n", "\t", "\u3000you "), "hello you"),
        (said("two  words\ninside"), "two  words\ninside"),
        (said([{"type": "text", "text": " a "}, {"type": "text", "text": ""}, {"type": "text", "text": "b"}]), "a b"),
        (said([{"type": "text", "text": "a"}], "b"), "a b"),
        (said([{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "what?"}]), "what?"),
        (said([{"type": "image_url", "text": "not this"}, {"text": "nor this"}, "nor that"]), ""),
        (said([{"type": "text", "text": 1}, {"type": "text"}, None, 1, ["a"]]), ""),
        (said(1, 1.5, True, {"text": "a"}), ""),
        ([{"role": "user"}, {"role": "user", "text": "a"}], ""),
        (["a", 1, None, ["b"], {"content": "c"}], "c"),
        ("hello", ""),
        ({"content": "hello"}, ""),
        (1, ""),
    ],
)
def test_chat_message(messages: object, message: str) -> None:
    """A chat's message is its texts in order, trimmed, without the empty ones, joined by one space."""
    assert read(messages=messages).message == message


def test_chat_message_is_text_alone() -> None:
    """Roles, names, tools, tool calls and reasoning are no part of the message."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "name": "n", "content": "a"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "b"},
    ]
    assert read(messages=messages, tools=[{"type": "function", "function": {"name": "f"}}]).message == "a b"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("hello", "hello"),
        (" hello\n", "hello"),
        ("", ""),
        (None, ""),
        (["a", " b ", "", "c"], "a b c"),
        ([], ""),
        ([1, 2, 3], ""),
        ([[1, 2], [3]], ""),
        ([["a"]], ""),
        (["a", 1, None], "a"),
        (1, ""),
        ({"text": "a"}, ""),
        (True, ""),
    ],
)
def test_prompt_message(prompt: object, message: str) -> None:
    """A completion's message is its prompt, or the texts of a list of prompts; token ids are none."""
    assert read(TEXT, prompt=prompt).message == message


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (CHAT, "from messages"),
        ("/openai/v1/chat/completions", "from messages"),
        (TEXT, "from prompt"),
        ("/v2/completions", "from prompt"),
        ("/generate", "from messages"),
    ],
)
def test_path_decides_what_is_the_prompt(path: str, message: str) -> None:
    """The path tells chats from completions (F-26); the body does, where the path says nothing."""
    assert read(path, messages=said("from messages"), prompt="from prompt").message == message


def test_other_path_with_a_prompt() -> None:
    """On a path that says nothing, a body without a list of messages is read by its prompt."""
    assert read("/generate", prompt="a").message == "a"
    assert read("/generate", prompt="a", messages="b").message == "a"


@pytest.mark.parametrize(("path", "other"), [(CHAT, {"prompt": "a"}), (TEXT, {"messages": said("a")})])
def test_the_other_field_is_ignored(path: str, other: dict[str, object]) -> None:
    """A chat has no prompt and a completion no messages, even where the body has nothing else."""
    request = read(path, **other)
    assert (request.message, request.prefix_key, request.prompt_tokens) == ("", b"", 1)


def test_an_empty_object_is_a_request() -> None:
    """Nothing is required: it is the worker's to refuse."""
    assert extract(b"{}", CHAT) == CompletionRequest(
        "", False, "", 1, NOTHING, text_only=True, body=b"{}", is_chat=True
    )
    assert extract(b" \r\n{}\t", TEXT) == CompletionRequest("", False, "", 1, NOTHING, body=b" \r\n{}\t")


@pytest.mark.parametrize(
    ("model", "expected"),
    [("m", "m"), ("org/m:lora", "org/m:lora"), ("", ""), (" m ", " m "), (None, ""), (1, ""), (["m"], ""), ({}, "")],
)
def test_model(model: object, expected: str) -> None:
    """The model is what the client wrote, if that is a string."""
    assert read(model=model).model == expected


@pytest.mark.parametrize(
    ("stream", "expected"),
    [(True, True), (False, False), (None, False), (1, False), (1.0, False), ("true", False), ([True], False)],
)
def test_stream(stream: object, expected: bool) -> None:
    """Only JSON's `true` asks for a stream (F-19)."""
    assert read(stream=stream).stream is expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ""),
        ({"session_id": "a"}, "a"),
        ({"session_id": "a", "extra_body": {"session_id": "b"}}, "a"),
        ({"session_id": "", "extra_body": {"session_id": "b"}}, "b"),
        ({"session_id": 1, "extra_body": {"session_id": "b"}}, "b"),
        ({"session_id": None, "extra_body": {"session_id": "b"}}, "b"),
        ({"extra_body": {"session_id": "b"}}, "b"),
        ({"extra_body": {"session_id": ""}}, ""),
        ({"extra_body": {"session_id": ["b"]}}, ""),
        ({"extra_body": "session_id"}, ""),
        ({"extra_body": ["session_id"]}, ""),
        ({"session_id": ["a"], "extra_body": None}, ""),
    ],
)
def test_session_id(fields: dict[str, object], expected: str) -> None:
    """The session is `session_id`, else `extra_body.session_id`; what is no string, or empty, falls through."""
    assert read(CHAT, **fields).session_id == expected


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ([7], 1),
        ([1, 2, 3], 3),
        ([[1, 2, 3]], 3),
        ([[1, 2], [3]], 3),
        ([[1], [2], [3], [4], [5]], 5),
        ([[], [1]], 1),
        (list(range(1000)), 1000),
        ([], 1),
        ([[]], 1),
        ([[], [], []], 1),
    ],
)
def test_token_ids_are_counted_exactly(prompt: object, tokens: int) -> None:
    """A prompt of token ids counts one token for each of them, and at least one."""
    assert read(TEXT, prompt=prompt).prompt_tokens == tokens


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [("", 1), ("abc", 1), ("abcd", 1), ("abcde", 2), ("a" * 400, 100), ("你好" * 200, 300), (["abcd", "efg"], 2)],
)
def test_f56_text_is_estimated_by_its_bytes(prompt: object, tokens: int) -> None:
    """F-56: two tokens a character suits no text; it is one for four bytes of UTF-8, about a Chinese character."""
    assert read(TEXT, prompt=prompt).prompt_tokens == tokens


def test_a_chat_is_estimated_by_its_bytes() -> None:
    """A chat counts its texts, and little for what stands around them."""
    assert 100 <= read(messages=said("a" * 400)).prompt_tokens <= 105
    assert 200 <= read(messages=said("a" * 400, [{"type": "text", "text": "b" * 400}])).prompt_tokens <= 210


def test_tools_are_counted() -> None:
    """Tool definitions are part of the prompt (F-28), Chinese ones at the same rate as Chinese messages."""
    tool = {"type": "function", "function": {"name": "f", "description": "你" * 400}}
    plain, with_tools = read(messages=said("a")), read(messages=said("a"), tools=[tool])
    assert 300 <= with_tools.prompt_tokens - plain.prompt_tokens <= 340


def test_media_count_by_number_and_not_by_size() -> None:
    """An image counts the same whether it is given by a short URL or in a megabyte of base64."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_000_000}}
    link = {"type": "image_url", "image_url": {"url": "http://a/b.png"}}
    one, two = read(messages=said([image])), read(messages=said([image, link]))
    assert MEDIA_TOKENS <= one.prompt_tokens <= MEDIA_TOKENS + 10
    assert MEDIA_TOKENS <= two.prompt_tokens - one.prompt_tokens <= MEDIA_TOKENS + 10
    assert read(messages=said([link])).prompt_tokens == one.prompt_tokens


def test_junk_does_not_count_as_media() -> None:
    """Parts that are no objects can't make a small body look like a hundred thousand tokens."""
    assert read(messages=said([1] * 200)).prompt_tokens < 400


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "GZIP", " gzip ", "gzip, identity", "x-new"])
def test_encoded_body_is_not_read(encoding: str) -> None:
    """An encoded body is known by its size alone, whatever is in it; a valid body is not refused for it."""
    assert extract(b"\x1f\x8b" + b"\0" * 398, CHAT, encoding) == CompletionRequest("", False, "", 100, NOTHING)
    assert extract(b'{"model": "m"}', CHAT, encoding).model == ""


@pytest.mark.parametrize("encoding", ["", "identity", "Identity", " identity\t", "  "])
def test_identity_is_no_encoding(encoding: str) -> None:
    """A body that is `identity`-encoded is read."""
    assert extract(b'{"model": "m"}', CHAT, encoding).model == "m"


def test_requests_are_frozen_values() -> None:
    """Two readings of one body are equal, and nobody can change one."""
    request = read(model="m", messages=said("a"))
    assert request == read(model="m", messages=said("a"))
    with pytest.raises(AttributeError):
        request.model = "n"  # type: ignore[misc]


def test_what_stays_when_the_answer_has_begun() -> None:
    """Nothing of the prompt is kept, and no name that is too long to be shown; the rest of a request stays."""
    fields = {"session_id": "s", "request_id": "r", "stream": True, "messages": said("a secret")}
    request = read(model="m", **fields)
    assert request.message == "a secret"
    left = request.without_text()
    assert left == replace(request, body=b"", key=NOTHING, request_id="")
    assert (left.texts, left.message) == ((), "")
    left = read(**{**fields, "model": "m" * 2_000, "session_id": "s" * 2_000}).without_text()
    assert (left.model, left.session_id) == ("", "")

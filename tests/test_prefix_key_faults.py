"""Owns the proof that faults which are known of other routers' prompt keys are not repeated here.

Each test is named after the list it comes from: F-28 and F-29 are FastDeploy's, "peer" entries those of others.
"""

from __future__ import annotations

import json

import pytest

from asgi_router.extraction import extract
from tests.prompts import CHAT, TEXT, TOOL, USER, assert_all_different, chat, image, prompt, shared, text, user


def test_f28_tokens_images_and_tools_have_a_key() -> None:
    """Prompts without text are not all alike, and not empty: token ids, images and tools count."""
    assert len({prompt([1] * 8), prompt([2] * 8), prompt([1] * 9)}) == 3
    assert len({chat(user([image("a")])), chat(user([image("b")]))}) == 2
    assert len({chat(tools=[TOOL]), chat(tools=[TOOL, TOOL]), b""}) == 3


def test_f29_roles_and_boundaries_are_not_lost() -> None:
    """Chats whose texts are equal when joined are different chats."""
    assert_all_different(
        [
            chat(user("a b")),
            chat(user("a"), user("b")),
            chat(user(" a"), user("b")),
            chat({"role": "system", "content": "a"}, user("b")),
            chat(user("a"), {"role": "assistant", "content": "b"}),
            prompt("a b"),
            prompt(["a", "b"]),
        ]
    )


def test_peer_38_the_whole_conversation_is_in_the_key() -> None:
    """Chats that share a system prompt differ by what follows it, and share it."""
    system = {"role": "system", "content": "s" * 4000}
    first, second = chat(system, user("a")), chat(system, user("b"))
    assert first != second
    assert 4000 < shared(first, second) < 4100


@pytest.mark.parametrize("value", [[1, 2, 3], [[1, 2], [3]], [[1]], [0]])
def test_peer_40_token_ids_are_accepted(value: object) -> None:
    """Prompts of token ids, single and in batches, are read."""
    assert prompt(value)


def test_peer_41_token_ids_are_typed() -> None:
    """`[1,2,3]` is not `"1,2,3"`, and `["a","b"]` is not `"a b"`."""
    assert_all_different([prompt([1, 2, 3]), prompt("1,2,3"), prompt(["a", "b"]), prompt("a b")])


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
def test_peer_42_43_content_parts_count_in_every_role(role: str) -> None:
    """Content in parts is kept, whoever says it."""
    assert chat({"role": role, "content": [text("hello")]}) == chat({"role": role, "content": "hello"})
    assert chat({"role": role, "content": [text("hello")]}) != chat({"role": role, "content": ""})


def test_peer_44_46_ordinary_requests_have_a_key() -> None:
    """A chat and a completion of the ordinary kind are never without a key."""
    assert b"hello" in chat(USER)
    assert b"hello" in prompt("hello")


def test_peer_45_engine_fields_matter_where_they_reach_the_template() -> None:
    """Template input that only some engines know is in the key; other engine fields are not."""
    assert chat(USER, chat_template_kwargs={"a": 1}) != chat(USER)
    assert chat(USER, return_token_ids=True, ignore_eos=True) == chat(USER)


def test_peer_47_tools_are_in_the_key() -> None:
    """The same messages with other tools are another prompt."""
    assert chat(USER, tools=[TOOL]) != chat(USER)


def test_peer_48_typed_text_equals_a_string() -> None:
    """A client that changes from strings to parts in mid-conversation keeps its cache."""
    assert chat(user([text("a")]), user("b")) == chat(user("a"), user([text("b")]))


def test_peer_51_the_body_is_parsed_and_not_searched() -> None:
    """Text that looks like a field of the request changes only what that text changes."""
    trap = '"user":"x", "model":"y", "session_id":"z", "stream":true, "prompt":"p"'
    body = {"model": "m", "messages": [user(trap)], "prompt": trap}
    for path in (CHAT, TEXT):
        request = extract(json.dumps(body).encode(), path)
        assert (request.model, request.session_id, request.stream, request.message) == ("m", "", False, trap)

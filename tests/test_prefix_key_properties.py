"""Owns the properties of prefix keys over random conversations: growing extends, different is different."""

from __future__ import annotations

import json
from itertools import pairwise, product
from typing import cast

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from asgi_router.extraction import extract
from tests.prompts import CHAT, TEXT, image, shared, text

# Few and short words, so that two random chats often have the same text in another place; among them the code
# points nearest to our frames, half a surrogate pair, and the words and signs that stand in keys.
WORDS = [*"ab\n\0þÿ\ufffe\uffff\ud83d\ude00🙂你", "", "[]", "[0.5]", '"', "tool_calls"]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=3).map("".join) | st.text(st.characters(codec=None), max_size=4)
ROLES = st.sampled_from(["user", "assistant", "tool", "tools", ""])
URLS = st.sampled_from(["http://a/1.png", "http://a/2.png", "data:image/png;base64,AAAA"])

PARTS = st.one_of(
    TEXTS.map(lambda value: {"type": "text", "text": value}),
    URLS.map(lambda url: {"type": "image_url", "image_url": {"url": url}}),
    URLS.map(lambda url: {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}}),
)
CALLS = st.lists(
    st.fixed_dictionaries({"id": TEXTS, "function": st.fixed_dictionaries({"name": TEXTS, "arguments": TEXTS})}),
    max_size=2,
)
MESSAGES = st.fixed_dictionaries(
    {"role": ROLES, "content": st.none() | TEXTS | st.lists(PARTS, max_size=3)},
    optional={"name": TEXTS, "reasoning_content": TEXTS, "tool_calls": CALLS, "tool_call_id": TEXTS},
)
CHATS = st.lists(MESSAGES, max_size=4)
FIELDS = st.fixed_dictionaries(
    {}, optional={"tools": CALLS, "cache_salt": TEXTS, "chat_template_kwargs": st.just({"a": 1})}
)

IDS = st.lists(st.integers(0, 3) | st.sampled_from([255, 65_279, 2**32 - 2]), max_size=4)
PROMPTS = st.one_of(TEXTS, st.lists(TEXTS, max_size=3), IDS, st.lists(IDS, max_size=3))

Chat = list[dict[str, object]]


MARKS = pytest.mark.parametrize("mark", [" ", "\n", "\0", '"', ",", "þ", "ÿ", "\ufffe", "\uffff", "\ud83d"])


def words_of(mark: str) -> list[str]:
    """Words that say the same when they stand beside each other in different places."""
    return ["", "a", mark, "a" + mark, mark + "a", mark + mark]


def said(**message: object) -> dict[str, object]:
    """A message."""
    return message


def assert_one_to_one(pairs: list[tuple[bytes, str]]) -> None:
    """Equal keys mean that what counts is equal, and the other way round."""
    assert len({key for key, _ in pairs}) == len(set(pairs)) == len({counts for _, counts in pairs})


def chat_key(messages: object, fields: dict[str, object]) -> bytes:
    """The key of a chat."""
    return extract(json.dumps({**fields, "messages": messages}).encode(), CHAT).prefix_key


def prompt_key(prompt: object) -> bytes:
    """The key of a completion."""
    return extract(json.dumps({"prompt": prompt}).encode(), TEXT).prefix_key


def what_counts(value: object) -> str:
    """A spelling that is equal for two parsed JSON values if and only if they are."""
    return json.dumps(value, sort_keys=False)


def seen_by_the_template(message: dict[str, object]) -> str:
    """What of a message a chat template is fed with, written out plainly: another way than the key's."""
    content: list[object] = [""]
    parts = message["content"]
    for index, part in enumerate(parts if isinstance(parts, list) else [{"text": parts or ""}]):
        content[-1] = str(content[-1]) + ("\n" if index else "")
        if "text" in part:
            content[-1] = str(content[-1]) + part["text"]
        else:
            content += [[part], ""]

    extras = {name: message.get(name) or None for name in ("reasoning_content", "tool_calls", "tool_call_id")}
    return what_counts([message["role"], message.get("name") or "", content, extras])


def parsed(value: object) -> object:
    """What arrives: JSON joins the halves of a surrogate pair."""
    return json.loads(json.dumps(value))


def seen(chat: Chat) -> list[str]:
    """What of a chat arrives at the template."""
    return [seen_by_the_template(message) for message in cast("Chat", parsed(chat))]


def seen_prompt(prompt: object) -> str:
    """What a worker is asked to complete: texts, lists of ids, or neither, in which case all of it counts."""
    value = parsed(prompt)
    items = value if isinstance(value, list) else [value]
    if all(isinstance(item, str) for item in items):
        return what_counts(["text", "\0".join(what_counts(item) for item in items or [""])])

    batch = items if all(isinstance(item, list) for item in items) else [items]
    if all(type(number) is int and 0 <= number < 2**32 for ids in cast("list[list[object]]", batch) for number in ids):
        return what_counts(["ids", batch])
    return what_counts(["unknown", items])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(CHATS, FIELDS)
def test_a_growing_conversation_extends_its_key(chat: Chat, fields: dict[str, object]) -> None:
    """The key of every turn begins with the whole key of the turn before."""
    keys = [chat_key(chat[:length], fields) for length in range(len(chat) + 1)]
    for before, after in pairwise(keys):
        assert after.startswith(before)
        assert len(after) > len(before)


@MARKS
def test_two_chats_share_a_key_only_if_templates_see_the_same(mark: str) -> None:
    """Of thousands of chats of the same two characters, keys are equal if and only if all that counts is."""
    words = words_of(mark)
    media: list[object] = [image(word) for word in words if word]
    media += [{"type": "input_audio", "input_audio": {"data": word, "format": "wav"}} for word in words if word]
    parts = [*map(text, words), *media]
    chats: list[Chat] = [[said(role="a", content=content)] for content in (None, *words)]
    for count in range(4):
        chats += ([said(role="a", content=list(content))] for content in product(parts, repeat=count))
    for one, two, three in product(words, repeat=3):
        chats.append([said(role=one, content=two, tool_call_id=three)])
    for one, two, three, four in product(words, repeat=4):
        chats.append([said(role=one, name=two, content=three, reasoning_content=four)])
        chats.append([said(role=one, content=two), said(role=three, content=four)])

    assert_one_to_one([(chat_key(chat, {}), what_counts(seen(chat))) for chat in chats])


@MARKS
def test_two_prompts_share_a_key_only_if_they_are_the_same(mark: str) -> None:
    """Of all short texts, batches and lists of ids, keys are equal if and only if the worker completes the same."""
    words = [*words_of(mark), "[0.5]", '["a",1]']
    wide = int.from_bytes((mark * 4).encode("utf-16-le", "surrogatepass")[:4], "little")
    ids = [
        0,
        1,
        ord("a"),
        ord(mark),
        min(wide, 2**32 - 2),
    ]  # 2**32 - 1 is no id, it stands between the lists of a batch
    id_lists = [list(numbers) for count in range(4) for numbers in product(ids, repeat=count)]
    strange: list[object] = [0.5, -1, 2**32, None, {}, ["a"], "a", 1, [1], []]
    prompts: list[object] = [
        *map("".join, product(["a", mark], repeat=4)),
        *words,
        *(list(texts) for count in range(4) for texts in product(words, repeat=count)),
        *id_lists,
        *(list(batch) for count in (1, 2) for batch in product(id_lists[:20], repeat=count)),
        *(list(items) for count in range(3) for items in product(strange, repeat=count)),
    ]
    assert_one_to_one([(prompt_key(prompt), seen_prompt(prompt)) for prompt in prompts])


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(CHATS, st.data())
def test_text_moved_to_another_place_changes_the_key(chat: Chat, data: st.DataObject) -> None:
    """A chat whose characters were only moved, across fields or messages, is another chat, unless none was moved."""
    assume(chat)
    texts = [(message, name) for message in chat for name in ("role", "content", "name") if message.get(name)]
    texts = [(message, name) for message, name in texts if isinstance(message[name], str)]
    assume(texts)
    source, source_name = data.draw(st.sampled_from(texts))
    absent = [(message, name) for message in chat for name in ("name", "reasoning_content", "tool_call_id")]
    target, target_name = data.draw(st.sampled_from([*texts, *absent]))
    before, key = seen(chat), chat_key(chat, {})

    moved = cast("str", source[source_name])
    cut = data.draw(st.integers(0, len(moved)))
    source[source_name] = moved[:cut]
    target[target_name] = moved[cut:] + cast("str", target.get(target_name) or "")
    assert (chat_key(chat, {}) == key) == (seen(chat) == before)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(CHATS, MESSAGES, MESSAGES, CHATS, CHATS, FIELDS)
def test_what_two_chats_share_ends_where_they_part(
    common: Chat,
    one: dict[str, object],
    other: dict[str, object],
    rest: Chat,
    other_rest: Chat,
    fields: dict[str, object],
) -> None:
    """Two chats share their common messages' key, and not more than the shorter of the first two that differ."""
    assume(seen([one]) != seen([other]))
    length = shared(chat_key([*common, one, *rest], fields), chat_key([*common, other, *other_rest], fields))
    assert len(chat_key(common, fields)) <= length
    assert length <= min(len(chat_key([*common, message], fields)) for message in (one, other))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(CHATS, FIELDS, FIELDS)
def test_chats_share_a_key_only_with_the_same_fields(
    chat: Chat, one: dict[str, object], other: dict[str, object]
) -> None:
    """Other tools, another salt or other template arguments make another key."""
    filled = [{name: value for name, value in fields.items() if value} for fields in (one, other)]
    same = what_counts(sorted(filled[0].items())) == what_counts(sorted(filled[1].items()))
    assert (chat_key(chat, one) == chat_key(chat, other)) == same


@settings(max_examples=300, deadline=None, derandomize=True)
@given(CHATS, PROMPTS.filter(bool))
def test_no_chat_has_the_key_of_a_completion(chat: Chat, prompt: object) -> None:
    """A chat and a completion never meet, because a template stands around the one and not around the other."""
    assume(chat)
    assert chat_key(chat, {}) != prompt_key(prompt)

"""Owns the proof that a body's size changes what reading it costs, and not what is read; and where reading ends."""

from __future__ import annotations

import codecs
import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from asgi_router.body_fields import FREE_BYTES
from asgi_router.body_types import MAX_MESSAGES, MAX_PARTS, MAX_PIECES
from asgi_router.errors import InvalidRequest
from asgi_router.extraction import CompletionRequest, extract
from asgi_router.prefix_key import MAX_KEY_BYTES, MEDIA_TOKENS
from tests.prompts import CHAT, TEXT, image, text, user
from tests.test_extraction_hostile import NO_OBJECT, NOT_JSON, PATHS, REQUEST
from tests.test_prefix_key_properties import CHATS, FIELDS

PAD = '"pad": "' + "x" * FREE_BYTES + '"'
DENSE = '"pad": [' + "0," * FREE_BYTES + "0]"


def large(body: bytes, pad: str = PAD) -> bytes:
    """The same object with another field, which no one reads, in front."""
    rest = body.lstrip()[1:]
    return b"{" + pad.encode() + (b"" if rest.lstrip() == b"}" else b",") + rest


def read(fields: dict[str, object], path: str = CHAT, pad: str = PAD) -> CompletionRequest:
    """What is known of a large request with these fields."""
    return extract(large(json.dumps(fields).encode(), pad), path)


def known(request: CompletionRequest) -> tuple[CompletionRequest, tuple[str, ...]]:
    """All that is known of a request, without its body."""
    return replace(request, body=b""), request.texts


@settings(max_examples=500, deadline=None, derandomize=True)
@given(REQUEST, st.sampled_from(PATHS))
def test_size_makes_no_difference(fields: dict[str, object], path: str) -> None:
    """A large body is read as a small one, whatever stands where a string or a list is expected."""
    # Halves of emojis are replaced in large bodies only.
    body = json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace")
    assert known(extract(large(body), path)) == known(extract(body, path))


@settings(max_examples=500, deadline=None, derandomize=True)
@given(CHATS, FIELDS)
def test_size_makes_no_difference_to_chats(chat: list[dict[str, object]], fields: dict[str, object]) -> None:
    """Chats as engines take them, with tools, calls and media, are read the same in a large body full of values."""
    # Halves of emojis are replaced in large bodies only.
    body = json.dumps({**fields, "model": "m", "messages": chat}, ensure_ascii=False).encode("utf-8", "replace")
    small = known(extract(body, CHAT))
    assert known(extract(large(body), CHAT)) == known(extract(large(body, DENSE), CHAT)) == small


SHORT = {'"': r"\"", "\\": r"\\", "/": r"\/", "\b": r"\b", "\f": r"\f", "\n": r"\n", "\r": r"\r", "\t": r"\t"}


def spellings(character: str) -> list[str]:
    """The ways in which JSON may spell a character."""
    units = character.encode("utf-16-be")
    escaped = "".join(rf"\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
    plain = [] if character in '"\\' or character < " " else [character]
    return [escaped, escaped[:2] + escaped[2:6].upper() + escaped[6:], *plain, *filter(None, [SHORT.get(character)])]


SPELLED = st.lists(
    st.sampled_from([*SHORT, "a", "u", " ", "\0", "\x1b", "\x7f", "é", "你", "\ufffe", "🙂"]), max_size=12
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(SPELLED, st.data())
def test_spelling_makes_no_difference(characters: list[str], data: st.DataObject) -> None:
    """A text has one key and one length, however a client's serializer escapes it, in bodies of any size."""
    spelled = "".join(data.draw(st.sampled_from(spellings(character))) for character in characters)
    chat = f'{{"messages":[{{"role":"user","content":"{spelled}"}},{{"content":[{{"text":"{spelled}"}}]}}]}}'.encode()
    said = "".join(characters)
    for body, path, fields in (
        (chat, CHAT, {"messages": [user(said), {"content": [{"text": said}]}]}),
        (f'{{"prompt":"{spelled}"}}'.encode(), TEXT, {"prompt": said}),
    ):
        expected = known(extract(json.dumps(fields).encode(), path))
        assert known(extract(body, path)) == known(extract(large(body), path)) == expected


PART_KINDS = [
    text("a"),
    {"text": "a"},
    {"type": None, "text": "a"},
    {"type": "", "text": "a"},
    {"type": "text", "text": ""},
    {"type": "text"},
    {"type": "text", "text": None, "refusal": "a"},
    {"type": "refusal", "refusal": "a"},
    {"type": "refusal", "text": "a"},
    {"type": "thinking", "thinking": "a"},
    {"type": "input_text", "text": "a"},
    image("a"),
    {"type": "image_url", "image_url": "a"},
    {"type": "image_url", "image_url": "a", "text": "a"},
    {"type": "image_url", "image_url": ""},
    {"type": "image_url", "image_url": {"url": ""}, "uuid": "1"},
    {"type": "image_url", "image_url": {"url": "a", "detail": "high"}},
    {"type": "image_url", "image_url": None, "uuid": "1"},
    {"type": "audio_url", "audio_url": {"url": "a"}},
    {"type": "video_url", "video_url": {"url": "a"}},
    {"type": "input_audio", "input_audio": {"data": "a", "format": "wav"}},
    {"type": "input_audio", "input_audio": {"url": "", "data": "a"}},
    {"type": "file", "file": {"file_data": "a"}},
    {"type": "type", "text": "a"},
    {},
    "a",
    1,
    None,
    [],
]


@pytest.mark.parametrize("part", PART_KINDS)
def test_size_makes_no_difference_to_parts(part: object) -> None:
    """Each kind of content part has the same key in a large body."""
    fields: dict[str, object] = {"messages": [user([text("b"), part])]}
    assert known(read(fields)) == known(extract(json.dumps(fields).encode(), CHAT))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("pad", [PAD, DENSE])
def test_large_bodies_in_any_unicode_encoding(encoding: str, pad: str) -> None:
    """A large body in another encoding of Unicode, or with a byte order mark, is read."""
    body = f'{{{pad}, "model": "m", "prompt": "你好"}}'.encode(encoding)
    assert (extract(body, TEXT).model, extract(body, TEXT).message) == ("m", "你好")


@pytest.mark.parametrize("pad", [PAD, DENSE])
@pytest.mark.parametrize(
    ("spelled", "read_as"),
    [
        (r"a\ud83d", "a\ufffd"),
        (r"a\uD83D!", "a\ufffd!"),
        (r"\ude42a", "\ufffda"),
        (r"\ud83d\ud83d\ude42", "\ufffd🙂"),
        (r"\ud83d\ude42\ude42", "🙂\ufffd"),
        (r"\ud83d \\ud83d", "\ufffd \\ud83d"),
        (r"\ud83d\ude42", "🙂"),
        (r"\\ud83d", r"\ud83d"),
    ],
)
def test_half_of_an_emoji_in_a_large_body(spelled: str, read_as: str, pad: str) -> None:
    """Where a client has cut an emoji in two, its half is replaced; whole ones and texts about escapes are not."""
    assert extract(f'{{{pad}, "prompt": "{spelled}"}}'.encode(), TEXT).message == read_as


def test_nan_in_a_large_body() -> None:
    """NaN is read past in a large body of few values; in one of many it is what the RFC says, no JSON."""
    assert extract(large(b'{"top_p": NaN, "prompt": "a"}'), TEXT).message == "a"
    with pytest.raises(InvalidRequest, match=NOT_JSON):
        extract(large(b'{"top_p": NaN, "prompt": "a"}', DENSE), TEXT)


@pytest.mark.parametrize("pad", [PAD, DENSE])
@pytest.mark.parametrize("rest", [b'"a"', b'"a', b'"a"]', b'"a"}}', b'"\xff"}', b"}", b'"a",}', b'"\\x"}'])
def test_large_bodies_that_are_no_json(rest: bytes, pad: str) -> None:
    """A large body that can't be parsed is refused, in words that don't quote it."""
    with pytest.raises(InvalidRequest, match=NOT_JSON) as caught:
        extract(b"{" + pad.encode() + b', "prompt": ' + rest, TEXT)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize("body", [f'["{"x" * FREE_BYTES}"]', "[" + "0," * FREE_BYTES + "0]", f'"{"x" * FREE_BYTES}"'])
def test_large_bodies_that_are_no_object(body: str) -> None:
    """A large body that is JSON, but no object, is refused for that."""
    with pytest.raises(InvalidRequest, match=NO_OBJECT) as caught:
        extract(body.encode(), TEXT)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize("pad", ["", PAD, DENSE])
@pytest.mark.parametrize("value", [b"1" * 5000, b"1e999", b'"\xff"'])
def test_what_is_not_read_is_not_judged(value: bytes, pad: str) -> None:
    """Numbers of any length and broken text, in fields that the router does not read, are for the worker to refuse."""
    body = b'{"seed": ' + value + b', "prompt": "a"}'
    assert extract(large(body, pad) if pad else body, TEXT).message == "a"


@pytest.mark.parametrize("messages", [b"0", b"{}", b'["a"]', b'[{"role": "user"}, 1]'])
def test_what_is_not_read_is_not_judged_beside_odd_messages(messages: bytes) -> None:
    """Nor does it matter then what `messages` are, which a prompt is not read from."""
    body = b'{"messages": ' + messages + b', "seed": ' + b"1" * 5000 + b', "user": "\xff", "prompt": "a"}'
    assert extract(body, TEXT).message == "a"


@pytest.mark.parametrize("pad", [PAD, DENSE])
def test_names_of_a_large_body(pad: str) -> None:
    """The fields beside the prompt are read in a large body, too, whatever else is in it."""
    fields = {"model": "m", "stream": True, "request_id": "r", "extra_body": {"session_id": "s"}, "messages": [1] * 9}
    request = read(fields, pad=pad)
    assert (request.model, request.stream, request.request_id, request.session_id) == ("m", True, "r", "s")


@pytest.mark.parametrize(
    ("extra", "session"), [({"a": [0] * FREE_BYTES, "session_id": "s"}, "s"), ([0] * FREE_BYTES, "")]
)
def test_the_session_in_a_large_extra_body(extra: object, session: str) -> None:
    """`extra_body.session_id` is found in an `extra_body` that is too large to be built."""
    assert read({"extra_body": extra}).session_id == session


@pytest.mark.parametrize("pad", ["", PAD])
def test_messages_behind_the_limits_are_passed_over(pad: str) -> None:
    """Messages from the 4,097th on, parts from the 257th on, and messages behind 4,096 pieces don't count."""
    pads: dict[str, object] = {"pad": "x" * FREE_BYTES} if pad else {}

    def key(messages: list[object]) -> bytes:
        body = json.dumps({**pads, "messages": messages}, separators=(",", ":")).encode()
        assert pad or len(body) <= FREE_BYTES
        return extract(body, CHAT).prefix_key

    many: list[object] = [{"role": "a"}] * MAX_MESSAGES
    assert key([*many, user("x")]) == key(many) != key(many[1:])
    parts: list[object] = [{"text": ""}] * MAX_PARTS
    assert key([user([*parts, text("x")])]) == key([user(parts)]) != key([user(parts[1:])])
    full: list[object] = [{"content": parts}] * (MAX_PIECES // MAX_PARTS)
    assert key([*full, user("x")]) == key([*full]) != key(full[1:])


def test_prompts_behind_the_limit_are_passed_over() -> None:
    """Of a batch of texts 4,096 are read."""
    assert len(extract(json.dumps({"prompt": ["a"] * 10_000}).encode(), TEXT).texts) == MAX_MESSAGES


@pytest.mark.parametrize("size", [4_000, 40_000, 1_500_000])
def test_many_token_ids(size: int) -> None:
    """Token ids count exactly and are packed by fours, in a list and in a batch, whatever the size of the body."""
    ids = b"[" + b"54321," * (size - 1) + b"12345]"
    packed = (54321).to_bytes(4, "little") * (size - 1) + (12345).to_bytes(4, "little")
    if len(ids) > 8 * 1024 * 1024:
        request = extract(b'{"prompt": ' + ids + b"}", TEXT)
        assert request.prompt_tokens == pytest.approx(1.5 * size, rel=0.01), (
            "more than any worker can hold: an estimate"
        )
        return

    for prompt in (ids, b"[" + ids + b"]"):
        request = extract(b'{"prompt": ' + prompt + b"}", TEXT)
        assert request.prompt_tokens == size
        assert request.prefix_key.endswith(packed)
    batch = extract(b'{"prompt": [' + ids + b"," + ids + b"]}", TEXT)
    assert batch.prompt_tokens == 2 * size
    assert batch.prefix_key.count(packed) == 2


def test_a_large_prompt_of_neither_texts_nor_ids() -> None:
    """What can't be a prompt, and is large, has a key nevertheless: its own bytes, up to a limit."""
    request = read({"prompt": [{"a": 0}] * 1_000_000}, TEXT)
    assert MAX_KEY_BYTES < len(request.prefix_key) < MAX_KEY_BYTES + 10
    assert request.prefix_key[:2000] == read({"prompt": [{"a": 0}] * 999_999}, TEXT).prefix_key[:2000]
    assert request.message == ""


def test_large_messages_of_a_strange_kind() -> None:
    """Messages that no engine takes, and that are many, have a key that a longer conversation shares."""
    first = read({"messages": [["a", 0]] * 100_000})
    longer = read({"messages": [["a", 0]] * 100_001})
    assert len(first.prefix_key) > 900_000
    assert longer.prefix_key.startswith(first.prefix_key[:-1])
    assert first.prefix_key != read({"messages": [["b", 0]] * 100_000}).prefix_key


def test_large_tools_and_calls() -> None:
    """Tools and calls too large to be built are in the key as they stand in the body; conversations share them."""
    tools = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(4_000)]
    calls = {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": "{}"}}] * 2_000}
    chat = [user("a"), calls, {"role": "tool", "content": "b"}]
    before, after = (read({"tools": tools, "messages": chat[:length]}) for length in (2, 3))
    assert len(before.prefix_key) > 200_000
    assert after.prefix_key.startswith(before.prefix_key)
    assert b'"name": "f3999"' in before.prefix_key
    assert before.prefix_key != read({"tools": tools[1:], "messages": chat[:2]}).prefix_key


def test_a_long_conversation_extends_its_key_from_a_small_body_to_a_large_one() -> None:
    """A conversation that grows over the size from which bodies are read in another way keeps its cache."""
    turn = [user("a" * 500), {"role": "assistant", "content": "b" * 500, "reasoning_content": "c" * 100}]
    keys = [
        extract(json.dumps({"messages": turn * count, "tools": [{"name": "f"}]}).encode(), CHAT).prefix_key
        for count in range(50, 120)
    ]
    assert len(keys[0]) < FREE_BYTES < len(keys[-1])
    assert all(longer.startswith(shorter) for shorter, longer in pairwise(keys))


@pytest.mark.parametrize("member", ['"messages": [{"content": "a"}]', '"messages": [{"content": [{"text": "a"}]}]'])
def test_a_key_that_stands_a_thousand_times(member: str) -> None:
    """However often a body names its messages, each time with a list of its own, the last one counts, read or raw."""
    body = "{" + f"{member}, " * 10_000 + '"messages": [{"role": "user", "content": "the last"}]}'
    request = extract(body.encode(), CHAT)
    assert b"the last" in request.prefix_key
    inner = ", ".join(['"content": [{"text": "a"}]'] * 10_000)
    request = extract(f'{{"messages": [{{{inner}, "content": "the last"}}]}}'.encode(), CHAT)
    assert b"the last" in request.prefix_key


def test_a_large_image_among_others() -> None:
    """Media count by number in a large body, too."""
    link, data = image("http://a/b.png"), image("data:image/png;base64," + "A" * 1_000_000)
    request = read({"messages": [user([link, data]), user([data])]})
    assert 3 * MEDIA_TOKENS <= request.prompt_tokens < 3 * MEDIA_TOKENS + 30


def test_a_byte_order_mark_that_stands_twice() -> None:
    """One byte order mark is read past, not two."""
    with pytest.raises(InvalidRequest, match=NOT_JSON):
        extract(codecs.BOM_UTF8 * 2 + large(b"{}"), TEXT)

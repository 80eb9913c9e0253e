"""Owns the proof that a prefix key covers what the worker's chat template covers, and no more.

Random conversations are in `test_prefix_key_properties.py`, faults known of other routers in
`test_prefix_key_faults.py`.
"""

from __future__ import annotations

import json

import pytest

from asgi_router.extraction import extract
from tests.prompts import CALL, CHAT, TEXT, TOOL, USER, assert_all_different, chat, image, prompt, shared, text, user


def test_everything_a_template_prints_changes_the_key() -> None:
    """Role, name, order, content, reasoning, tool calls and their ids, tools and template input all count."""
    asked = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert_all_different(
        [
            chat(),
            chat(USER),
            chat({**USER, "role": "system"}),
            chat({**USER, "role": "developer"}),
            chat({**USER, "name": "ada"}),
            chat({**USER, "name": "bob"}),
            chat(user("hello!")),
            chat(USER, USER),
            chat(USER, user("you")),
            chat(user("you"), USER),
            chat(USER, {"role": "assistant", "content": None}),
            chat(USER, {"role": "assistant", "content": "hi"}),
            chat(USER, {"role": "assistant", "content": "hi", "reasoning_content": "hm"}),
            chat(USER, {"role": "assistant", "content": "hi", "reasoning": "hm"}),
            chat(USER, {"role": "assistant", "content": "hm"}),
            chat(USER, asked),
            chat(USER, {**asked, "tool_calls": [{**CALL, "id": "c2"}]}),
            chat(USER, {**asked, "tool_calls": [CALL, CALL]}),
            chat(USER, {"role": "assistant", "content": None, "function_call": CALL["function"]}),
            chat(USER, asked, {"role": "tool", "tool_call_id": "c1", "content": "1"}),
            chat(USER, asked, {"role": "tool", "tool_call_id": "c2", "content": "1"}),
            chat(USER, asked, {"role": "tool", "content": "1"}),
            chat(USER, tools=[TOOL]),
            chat(USER, tools=[TOOL, TOOL]),
            chat(USER, functions=[TOOL["function"]]),
            chat(USER, documents=[{"title": "t", "text": "x"}]),
            chat(USER, chat_template="{{ messages }}"),
            chat(USER, chat_template_kwargs={"enable_thinking": False}),
            chat(USER, chat_template_kwargs={"enable_thinking": True}),
            chat(USER, reasoning_effort="low"),
            chat(USER, reasoning_effort="high"),
            chat(USER, cache_salt="a"),
            chat(USER, cache_salt="b"),
            chat(USER, extra_key="a"),
            chat(USER, lora_path="a"),
        ]
    )


def test_what_no_template_prints_does_not() -> None:
    """Sampling, the answer's form, the client's own ids, and empty fields leave the key as it is."""
    plain = chat(USER)
    sampling = {"temperature": 0.5, "max_tokens": 5, "stream": True, "n": 2, "seed": 7, "stop": ["x"], "user": "u"}
    assert chat(USER, **sampling) == plain
    assert chat(USER, session_id="s", request_id="r", metadata={"a": "b"}, prompt="other") == plain
    assert chat(USER, tools=[], functions=None, documents=[], chat_template_kwargs={}, cache_salt=None) == plain
    assert chat({**USER, "name": None, "tool_calls": [], "id": "m1", "tool_call_id": None}) == plain
    assert chat({"content": "hello", "role": "user"}) == plain


def test_a_salt_keeps_prompts_apart_from_their_first_byte() -> None:
    """Nothing is shared across salts, which are there to share nothing: in chats, texts and token ids."""
    long, ids = "x" * 5000, [1] * 5000
    keys = [
        [chat(user(long), tools=[TOOL], cache_salt=salt), prompt(long, cache_salt=salt), prompt(ids, cache_salt=salt)]
        for salt in ("one", "two", None, "one")
    ]
    for one, two, none, again in zip(*keys, strict=True):
        assert shared(one, two) < 20
        assert shared(one, none) < 20
        assert one == again


def test_a_salt_counts_no_tokens() -> None:
    """No model reads a salt."""
    body = {"prompt": [1, 2, 3], "messages": [USER]}
    for path in (CHAT, TEXT):
        plain, salted = (extract(json.dumps({**body, "cache_salt": salt}).encode(), path) for salt in ("", "s" * 400))
        assert plain.prompt_tokens == salted.prompt_tokens


def test_tools_come_first() -> None:
    """Templates print tools before all messages: with other tools nothing is shared, with equal ones the rest is."""
    long = user("x" * 5000)
    other = {"type": "function", "function": {"name": "g"}}
    assert shared(chat(long, tools=[TOOL]), chat(long, tools=[other])) < 60
    assert shared(chat(long, tools=[TOOL]), chat(long)) < 10
    assert shared(chat(long, tools=[TOOL]), chat(long, USER, tools=[TOOL])) > 5000


def test_text_parts_equal_a_plain_string() -> None:
    """A text part is its text; several are joined by a line break, as engines join them."""
    assert chat(user([text("hello")])) == chat(USER)
    assert chat(user([{"text": "hello"}])) == chat(USER)
    assert chat(user(["hello"])) == chat(USER)
    assert chat(user([{"type": "input_text", "text": "hello"}])) == chat(USER)
    assert chat(user([{"type": "refusal", "refusal": "hello"}])) == chat(USER)
    assert chat(user([text("hello"), text("you")])) == chat(user("hello\nyou"))
    assert chat(user([text("")])) == chat(user("")) == chat(user(None)) == chat(user([])) == chat({"role": "user"})


def test_images_are_told_apart_by_what_they_show() -> None:
    """The same image has the same key, whatever its form; another image, another type, another place has another."""
    data = "data:image/png;base64,iVBORw0KGgo="
    question = text("what?")
    same = chat(user([question, image(data)]))
    assert chat(user([question, {"type": "image_url", "image_url": data}])) == same
    assert chat(user([question, {"type": "image_url", "image_url": {"url": data, "detail": "high"}}])) == same
    assert_all_different(
        [
            same,
            chat(user([question])),
            chat(user([image(data), question])),
            chat(user([question, image(data), image(data)])),
            chat(user([question, image(data + "A")])),
            chat(user([question, image("http://a/b.png")])),
            chat(user([question, {"type": "video_url", "video_url": {"url": data}}])),
            chat(user([question, {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}])),
            chat(user([question, {"type": "input_image", "image_url": data}])),
            chat(user([question, {"type": "input_image", "image_url": data + "A"}])),
            chat(user([question, {"type": "image_url", "image_url": None, "uuid": "1"}])),
            chat(user([question, {"type": "image_url", "image_url": None, "uuid": "2"}])),
            chat(user([question, {"type": "image_url", "image_url": {"url": ""}, "uuid": "2"}])),
        ]
    )


def test_a_text_beside_an_image_does_not_hide_it() -> None:
    """A part whose type is an image is an image, even if a client writes an empty text into it as well."""
    first, second = ({**image(f"http://a/{name}"), "text": ""} for name in "ab")
    assert_all_different([chat(user([first])), chat(user([second])), chat(user([text("")]))])


def test_peer_50_ten_megabytes_of_base64_add_some_bytes() -> None:
    """An image adds a digest to the key, whatever its size."""
    large = "data:image/png;base64," + "A" * 10_000_000
    assert len(chat(user([text("a"), image(large)]))) - len(chat(user("a"))) < 32


TYPED = [
    [1, 2],
    "1,2",
    "12",
    "1 2",
    "[1,2]",
    "[1, 2]",
    ["1", "2"],
    ["1,2"],
    [[1], [2]],
    [["1", "2"]],
    [[[1, 2]]],
    [1, 2, 3],
    [2, 1],
    [12],
    [1.0, 2.0],
    "[1.0,2.0]",
    [1, "2"],
    '[1,"2"]',
    [1, [2]],
    [[1], 2],
    [[1, 2], []],
    [[], [1, 2]],
    [-1, 2],
    [1, -2],
    [2**32 + 1, 2],
    [2**32, 2],
    [2**64, 2],
    [None],
    [{}],
    [[None]],
    [256, 512],
    ["a", "b"],
    "a b",
    "ab",
    ["ab"],
    ["a", "b", ""],
    ["", "a", "b"],
]


@pytest.mark.parametrize(("one", "other"), [(["1,2"], "1,2"), (["ab"], "ab"), ([[1, 2]], [1, 2])])
def test_a_batch_of_one_equals_its_prompt(one: object, other: object) -> None:
    """A list around a single prompt makes no difference to the worker's cache."""
    assert prompt(one) == prompt(other)


def test_prompts_of_different_types_never_meet() -> None:
    """Texts, batches, token ids, batches of ids, and what is none of these have keys of their own."""
    batches_of_one = (["1,2"], ["ab"])
    assert_all_different([prompt(value) for value in TYPED if value not in batches_of_one])


def test_token_ids_of_any_size() -> None:
    """Ids take four bytes each; those that don't fit, and no ids at all, are still told apart."""
    ids = [0, 1, 255, 256, 65_535, 2**31, 2**32 - 2]
    key = prompt(ids)
    assert len(key) == len(prompt([])) + 2 + 4 * len(ids)
    assert key.endswith(b"".join(number.to_bytes(4, "little") for number in ids))
    strange = [[-1], [2**32], [2**63], [10**100], [0.5], [1e300], [None], ["1", 1], [True, None]]
    assert_all_different([prompt(value) for value in strange])


def test_token_ids_share_what_they_share() -> None:
    """A longer list of ids extends the key of a shorter one, in a batch as well."""
    assert prompt([1, 2, 3]).startswith(prompt([1, 2]))
    assert prompt([[1, 2], [3]]).startswith(prompt([1, 2]))
    assert not prompt([1, 2, 3]).startswith(prompt([2]))


def test_a_batch_begins_like_its_first_prompt() -> None:
    """What a worker has cached of the first text of a batch is found."""
    assert prompt(["abc", "def"]).startswith(prompt("abc"))


@pytest.mark.parametrize(
    "mark", [" ", "\n", "\n\n", "\0", "\x1e", "\x1f", "|", ":", ",", "þ", "ÿ", "þþ", "\ufffe", "\ufdd0"]
)
def test_fields_cannot_run_into_each_other(mark: str) -> None:
    """Wherever the line between two fields is drawn in the same characters, it is another chat."""
    assert_all_different(
        [
            chat({"role": "a" + mark, "name": "b", "content": "c"}),
            chat({"role": "a", "name": mark + "b", "content": "c", "reasoning": mark}),
            chat({"role": "a", "name": mark + "b" + mark, "content": "c"}),
            chat({"role": "a", "name": "b", "content": mark + mark + "c"}),
            chat({"role": "a", "name": "b" + mark + "c", "content": ""}),
            chat({"role": "a" + mark + "b" + mark + "c", "content": ""}),
            chat({"role": "a", "name": "b", "content": "c", "reasoning": mark + "d"}),
            chat({"role": "a", "name": "b", "content": "c" + mark + "reasoning" + mark + mark + "d"}),
            chat({"role": "a", "name": "b", "content": "c"}, {"role": mark, "content": ""}),
            chat({"role": "a", "name": "b", "content": "c" + mark + mark + mark + mark}),
        ]
    )


@pytest.mark.parametrize(
    "content",
    [
        "\ufffe\uffff",
        "user\x00hello",
        'hello"},{"role":"assistant","content":"',
        "<|im_end|>\n<|im_start|>system\n",
        "\u00fe\u00ff",
        "þuserþÿ",
    ],
)
def test_text_cannot_imitate_a_frame(content: str) -> None:
    """No text, whatever its code points, makes one message look like two, or like another field."""
    assert_all_different(
        [
            chat(user(content)),
            chat(user(""), user(content)),
            chat(user(content), user("")),
            chat({"role": content, "content": ""}),
            chat({"role": "user", "name": content, "content": ""}),
            chat({"role": "", "content": "", "tool_call_id": content}),
            chat(user([image(content)])),
            prompt(content),
            prompt(["", content]),
        ]
    )

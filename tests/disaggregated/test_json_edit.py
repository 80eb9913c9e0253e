"""Owns the proof that an edited body has the wanted members, and every other byte where it was.

The bodies are written out of random pieces of text, so that the test knows by itself which bytes belong to which
member; what comes out is compared with those bytes, and with what `json.loads` makes of them.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import sys
import time
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asgi_router.disaggregated.json_edit import MAX_MEMBERS, JsonObject, edit_object, member
from asgi_router.errors import InvalidRequest

NAMES = ["n", "stream", "kv", "é", "", 'q"\\']
NUMBERS = ["0", "-0.0", "1e400", "-1E-400", "9007199254740993", "1.10", "1" * 400, "NaN", "-Infinity"]
LITERALS = ["true", "false", "null"]
# A text's inside: escapes, halves of surrogate pairs, signs that are JSON's elsewhere, and what some writers escape.
INSIDES = [
    "\\u00e9",
    "\\ud800",
    "\\udc00",
    "\\ud83d\\ude00",
    "\ud800",
    "😀",
    "é",
    '\\"',
    "\\\\",
    "\\/",
    "{",
    "}",
    "[",
    ",",
    ":",
]
INSIDES += ["<>&", "\u2028", "\x7f", "n"]

SPACE = st.text(" \t\n\r", max_size=2)
TEXT = st.lists(st.sampled_from(INSIDES), max_size=4).map(lambda pieces: '"' + "".join(pieces) + '"')


@st.composite
def spelled_names(draw: st.DrawFn) -> tuple[str, str]:
    """A name, and one of the ways to write it."""
    name = draw(st.sampled_from(NAMES))
    spelled = json.dumps(name, ensure_ascii=draw(st.booleans()))
    if draw(st.booleans()):
        spelled = '"' + "".join(f"\\u{ord(letter):04x}" for letter in name) + '"'
    return name, spelled


def containers(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Arrays and objects of these, with white space wherever it may stand."""
    items = st.lists(st.tuples(SPACE, values, SPACE).map("".join), max_size=3).map(",".join)
    pair = st.tuples(SPACE, spelled_names().map(lambda name: name[1]), SPACE, st.just(":"), SPACE, values, SPACE)
    pairs = st.lists(pair.map("".join), max_size=3).map(",".join)
    return items.map("[{}]".format) | pairs.map("{{{}}}".format)


VALUES = st.recursive(st.sampled_from(NUMBERS + LITERALS) | TEXT, containers, max_leaves=6)


@dataclass(frozen=True)
class Piece:
    """One member as it is written, white space and all."""

    name: str
    value: bytes
    raw: bytes


@st.composite
def pieces(draw: st.DrawFn) -> Piece:
    """A member."""
    name, spelled = draw(spelled_names())
    value = draw(VALUES)
    before, after_name, before_value, after = (draw(SPACE) for _ in range(4))
    return Piece(name, encoded(value), encoded(f"{before}{spelled}{after_name}:{before_value}{value}{after}"))


def encoded(text: str) -> bytes:
    """The text as `json.loads` takes it: halves of surrogate pairs may stand in UTF-8, too."""
    return text.encode("utf-8", "surrogatepass")


def pairs_of(body: bytes) -> list[tuple[str, str]]:
    """The members of an object in order, duplicates too. As `repr`: NaN equals nothing, and 0.0 equals -0.0."""
    pairs = json.loads(body, object_pairs_hook=lambda pairs: pairs)
    return [(name, repr(value)) for name, value in pairs]


OBJECTS = st.lists(pieces(), max_size=6)
HEADS = st.tuples(st.sampled_from([b"", codecs.BOM_UTF8]), SPACE).map(lambda parts: parts[0] + parts[1].encode() + b"{")
TAILS = SPACE.map(lambda space: b"}" + space.encode())
ASCII_NAMES = st.sampled_from(["n", "stream", "kv", "new"])
ADDED = st.dictionaries(ASCII_NAMES, VALUES.map(encoded), max_size=3)


@settings(max_examples=400, deadline=None)
@given(OBJECTS, HEADS, TAILS, st.sets(ASCII_NAMES), ADDED)
def test_edited(members: list[Piece], head: bytes, tail: bytes, drop: set[str], add: dict[str, bytes]) -> None:
    """What is dropped or replaced is gone, however often and however spelled; the rest is there byte for byte."""
    body = head + b",".join(piece.raw for piece in members) + tail

    result = edit_object(body, drop=drop, add=add)

    kept = [piece for piece in members if piece.name not in drop | set(add)]
    new = [f'"{name}":'.encode() + value for name, value in add.items()]
    assert result == head + b",".join([*(piece.raw for piece in kept), *new]) + tail
    wanted = b"{" + b",".join([*(piece.raw for piece in kept), *new]) + b"}"
    assert pairs_of(result) == pairs_of(wanted)
    assert {name for name, _ in pairs_of(result)} == {piece.name for piece in kept} | set(add)


@settings(max_examples=200, deadline=None)
@given(OBJECTS, HEADS, TAILS, ASCII_NAMES)
def test_member(members: list[Piece], head: bytes, tail: bytes, name: str) -> None:
    """A member's value is given as it is written, without the white space around it; the last one of its name."""
    body = head + b",".join(piece.raw for piece in members) + tail
    values = [piece.value for piece in members if piece.name == name]

    assert member(body, name) == (values[-1] if values else None)
    assert JsonObject(body).has(name) == (bool(values) and values[-1] != b"null")


@settings(max_examples=200, deadline=None)
@given(OBJECTS, HEADS, TAILS)
def test_nothing_to_do(members: list[Piece], head: bytes, tail: bytes) -> None:
    """Without anything to drop or to add the body is what it was, and what is added can be taken out again."""
    body = head + b",".join(piece.raw for piece in members) + tail

    assert edit_object(body, add={}) == body
    assert edit_object(edit_object(body, add={"new": b"[1]"}), drop=["new"], add={}) == body


def test_f15_numbers_and_signs_are_unchanged() -> None:
    """F-15: integers above 2^53, floats and the signs that HTML knows go on as the client has written them."""
    body = b'{"seed": 9007199254740993, "t": 1.10, "p": "<a>&amp; \\u003c", "max": 1E2}'

    assert edit_object(body, add={"x": b"1"}) == body[:-1] + b',"x":1}'


@pytest.mark.parametrize(
    ("body", "edited"),
    [
        (b"{}", b'{"x":1}'),
        (b" { \n} ", b' { \n"x":1} '),
        (b'{"x": 0}', b'{"x":1}'),
        (b'{ "x" : 0 , "a" : 2 }', b'{ "a" : 2 ,"x":1}'),
        (b'{"a": 2, "\\u0078": 0, "x": {"x": 3}}', b'{"a": 2,"x":1}'),
        (b'{"a": {"x": 3}}', b'{"a": {"x": 3},"x":1}'),
        (b'{"xx": 1, "X": 2}', b'{"xx": 1, "X": 2,"x":1}'),
    ],
)
def test_by_example(body: bytes, edited: bytes) -> None:
    """What an edit looks like: only top-level members of exactly this name are replaced."""
    assert edit_object(body, add={"x": b"1"}) == edited


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (b'["a", "b"]', 2),
        (b'["a"]', 1),
        (b"[[1, 2], [3], []]", 3),
        (b"[null]", 1),
        (b"[1, 2]", None),
        (b"[-1.5]", None),
        (b"[ ]", None),
        (b'"a"', None),
        (b'{"a": 1}', None),
        (b"null", None),
    ],
)
def test_batch_size(value: bytes, size: int | None) -> None:
    """A batch is a list of texts or of lists; token ids are one prompt, and an empty list is none."""
    assert JsonObject(b'{"prompt": ' + value + b"}").batch_size("prompt") == size
    assert JsonObject(b"{}").batch_size("prompt") is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"a"',
        b"{",
        b'{"a"',
        b'{"a":',
        b'{"a":1',
        b'{"a":1,',
        b'{"a":1,}',
        b"{,}",
        b'{"a" 1}',
        b'{"a":1 "b":2}',
        b"{1:2}",
        b"{null:2}",
        b"{a:1}",
        b'{"a":1}}',
        b'{"a":1} x',
        b'{"a":"\n"}',
        b'{"a":01}',
        b'\xef\xbb\xbf\xef\xbb\xbf{"a":1}',
        b'\xc2\xa0{"a":1}',
    ],
)
def test_f14_not_an_object(body: bytes) -> None:
    """F-14: `null` and whatever else is no JSON object is the client's fault, as it is for `json.loads`."""
    with pytest.raises(InvalidRequest, match=r"JSON object in UTF-8"):
        edit_object(body, add={"x": b"1"})
    with contextlib.suppress(ValueError):
        assert not isinstance(json.loads(body), dict)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_other_encodings(encoding: str) -> None:
    """JSON in 16 or 32 bits, which mixed mode forwards as it is, can't be edited and is refused."""
    body = '{"a": "bc"}'.encode(encoding)
    assert json.loads(body) == {"a": "bc"}

    with pytest.raises(InvalidRequest, match="UTF-8"):
        edit_object(body, add={"x": b"1"})


def test_too_deep() -> None:
    """A body that is nested more deeply than the interpreter can read is the client's fault."""
    depth = 100 * sys.getrecursionlimit()

    with pytest.raises(InvalidRequest, match="nested"):
        edit_object(b'{"a": ' + b"[" * depth + b"]" * depth + b"}", add={"x": b"1"})


def test_too_many_members() -> None:
    """The number of members is bounded: each costs the walk more than it costs `json.loads`."""
    full = b"{" + b",".join(b'"%d":0' % index for index in range(MAX_MEMBERS)) + b"}"
    assert edit_object(full, add={"x": b"1"}) == full[:-1] + b',"x":1}'

    with pytest.raises(InvalidRequest):
        edit_object(full[:-1] + b',"x":0}', add={"x": b"1"})


def test_errors_say_nothing_of_the_body() -> None:
    """Neither the message nor what it was raised from quotes what the client has sent."""
    with pytest.raises(InvalidRequest) as caught:
        edit_object(b'{"secret": hunter2}', add={})

    assert "hunter2" not in str(caught.value)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("size", [1_000_000, 10_000_000])
def test_cost(size: int) -> None:
    """An edit takes about as long as one more `json.loads`: three times that at most, whatever the body is made of."""
    sentence = 'The quick brown fox jumps over the lazy dog, "said" he.\n'
    chat = [{"role": "user", "content": sentence * 20}] * (size // len(sentence) // 20)
    ids = list(range(size // 8))

    for fields in ({"messages": chat}, {"prompt": ids}):
        body = json.dumps(fields).encode()
        loads, edit = float("inf"), float("inf")
        for _ in range(5):
            begin = time.perf_counter()
            json.loads(body)
            middle = time.perf_counter()
            edit_object(body, drop=["stream"], add={"x": b"1"})
            edit = min(edit, time.perf_counter() - middle)
            loads = min(loads, middle - begin)
        assert edit < 3 * loads

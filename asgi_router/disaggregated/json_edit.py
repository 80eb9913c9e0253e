"""Owns the editing of a JSON object's bytes: members go or are added, and every other byte stays what and where it is.

A body that is parsed and written again is another body: integers above 2^53 and floats may change, duplicate keys
melt into one, escapes are spelled differently. So nothing is written again here. One walk finds where the members
begin and end; what is kept is copied.

The walk reads the body as Latin-1, in which a byte is a character. That is enough to find the ends of values, since
the characters that JSON is made of are ASCII and UTF-8 has no ASCII byte inside another character; it makes offsets
in the text offsets in the bytes; and the interpreter's own scanner does the work, so that what `json.loads` takes
is what is taken here.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import TYPE_CHECKING, NamedTuple

from asgi_router.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

MAX_MEMBERS = 1000
"""Top-level members that an object may have: engines know about a hundred, and each takes the walk a microsecond."""

_WHITE_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


class _Member(NamedTuple):
    name: str
    start: int  # behind the brace or the comma before it: its white space belongs to it
    value_start: int
    value_end: int
    end: int  # the comma or the brace behind it
    batch_size: int | None


class JsonObject:
    """A JSON object as bytes in UTF-8, walked once.

    Names are asked for in ASCII, and found however the body spells them (`"n"`, `"\\u006e"`). Of several members with
    one name the last one counts, as it does for the engines.

    Raises:
        InvalidRequest: it is no JSON object, not in UTF-8 (16 and 32 bits, which `json.loads` takes, too), or has
            more than `MAX_MEMBERS` members.
    """

    __slots__ = ("_body", "_close", "_last", "_members", "_open")

    def __init__(self, body: bytes) -> None:
        self._body = body
        try:
            self._open, self._members, self._close = _walk(body)
        except RecursionError:
            raise InvalidRequest("The request body is nested too deeply.") from None
        except ValueError:
            # The interpreter's texts quote the body, so they are not passed on.
            raise InvalidRequest("The request body must be a JSON object in UTF-8.") from None
        self._last = {member.name: member for member in self._members}

    def get(self, name: str) -> bytes | None:
        """Return a member's value as it stands in the body; None if there is no such member."""
        member = self._last.get(name)
        return None if member is None else self._body[member.value_start : member.value_end]

    def has(self, name: str) -> bool:
        """Return whether there is such a member and its value is not null."""
        member = self._last.get(name)
        return member is not None and not self._body.startswith(b"null", member.value_start)

    def batch_size(self, name: str) -> int | None:
        """Return how many items an array has. None for any other value, an empty array, and one of numbers.

        So a batch of prompts is told from a text, and from the token ids of a single prompt.
        """
        member = self._last.get(name)
        return None if member is None else member.batch_size

    def edited(self, *, drop: Collection[str] = (), add: Mapping[str, bytes]) -> bytes:
        """Return the object without the members named in `drop` and `add`, and with those of `add` at its end.

        The values of `add` are JSON in UTF-8 and are not looked at. A member goes with the white space around it;
        the rest is left as it is, a byte order mark and what stands behind the object, too.
        """
        view = memoryview(self._body)
        members: list[bytes | memoryview] = [
            view[member.start : member.end]
            for member in self._members
            if member.name not in drop and member.name not in add
        ]
        members += [json.dumps(name).encode() + b":" + value for name, value in add.items()]

        parts = [view[: self._open], *(part for member in members for part in (b",", member))]
        del parts[1:2]  # the comma before the first member
        return b"".join([*parts, view[self._close :]])


def edit_object(body: bytes, *, drop: Collection[str] = (), add: Mapping[str, bytes]) -> bytes:
    """Return `body` without the members named in `drop` and `add`, and with those of `add` at its end.

    Raises:
        InvalidRequest: as `JsonObject`.
    """
    return JsonObject(body).edited(drop=drop, add=add)


def member(body: bytes, name: str) -> bytes | None:
    """Return the value of a top-level member as it stands in `body`, the last one of that name; None if there is none.

    Raises:
        InvalidRequest: as `JsonObject`.
    """
    return JsonObject(body).get(name)


def _walk(body: bytes) -> tuple[int, list[_Member], int]:
    """Return where the first member begins, all members, and where the closing brace is."""
    text = body.decode("latin-1")
    at = _expect(text, len(codecs.BOM_UTF8) if body.startswith(codecs.BOM_UTF8) else 0, "{")
    first = at
    members: list[_Member] = []
    brace = _behind_space(text, at)
    if text[brace : brace + 1] == "}":
        first = brace
    else:
        while True:
            if len(members) == MAX_MEMBERS:
                raise ValueError("too many members")
            member, mark = _read_member(text, at)
            members.append(member)
            if mark == "}":
                brace = member.end
                break
            at = member.end + 1

    if _behind_space(text, brace + 1) != len(text):
        raise ValueError("something behind the object")
    return first, members, brace


def _read_member(text: str, start: int) -> tuple[_Member, str]:
    """Return the member that begins at `start`, and the comma or brace that ends it."""
    at = _behind_space(text, start)
    name, at = _DECODER.raw_decode(text, at)
    if not isinstance(name, str):
        raise ValueError("a name that is no string")

    value_start = _behind_space(text, _expect(text, at, ":"))
    value, value_end = _DECODER.raw_decode(text, value_start)
    end = _behind_space(text, value_end)
    mark = text[end : end + 1]
    if mark not in (",", "}"):
        raise ValueError("neither another member nor the end")
    is_batch = isinstance(value, list) and value and not isinstance(value[0], int | float)
    return _Member(name, start, value_start, value_end, end, len(value) if is_batch else None), mark


def _expect(text: str, at: int, sign: str) -> int:
    """Return the offset behind `sign`, which must come next but for white space."""
    at = _behind_space(text, at)
    if text[at : at + 1] != sign:
        raise ValueError("another sign expected")
    return at + 1


def _behind_space(text: str, at: int) -> int:
    found = _WHITE_SPACE.match(text, at)
    return found.end() if found else at

"""Owns the proof of SGLang's dialect, field by field."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from asgi_router.disaggregated import DIALECTS
from asgi_router.disaggregated.sglang import MAX_PROMPTS, SGLang
from asgi_router.errors import InvalidRequest
from asgi_router.worker import Worker
from tests.disaggregated.bodies import DECODE, ODD, ODD_MEMBERS, PREFILL, body, read


def edited(data: bytes, prefill: Worker = PREFILL) -> dict[str, object]:
    """The fields that both workers get for a client's body."""
    return read(SGLang().prefill_body(data, prefill, DECODE, "ours"))


def rooms_of(fields: dict[str, object]) -> list[int]:
    """The rooms of a body, whether it has one or a list."""
    rooms = fields["bootstrap_room"]
    found = [room for room in (rooms if isinstance(rooms, list) else [rooms]) if type(room) is int]
    assert found
    assert all(0 <= room < 2**63 for room in found)
    return found


def test_both_legs_get_the_same_bytes() -> None:
    """Both legs go out at once with one body, so that they meet in one room; no decode worker serves alone."""
    dialect = DIALECTS["sglang"]()

    first = dialect.prefill_body(ODD, PREFILL, DECODE, "ours")
    second = dialect.decode_body(ODD, PREFILL, DECODE, "ours", b"")

    assert first is second
    assert not dialect.prefill_first
    assert not dialect.decodes_alone


def test_f15_every_other_byte_is_kept() -> None:
    """F-15: numbers above 2^53, `<>&`, duplicate keys and white space are the client's, the new fields stand behind."""
    result = SGLang().prefill_body(ODD, PREFILL, DECODE, "ours")

    room = json.loads(result)["bootstrap_room"]
    new = f',"bootstrap_host":"10.0.0.1","bootstrap_port":8998,"bootstrap_room":{room}}}\n'
    assert result == b"{" + ODD_MEMBERS + new.encode()


def test_one_prompt() -> None:
    """A chat has the prefill worker's host and port, and a room of 63 bits that is another one each time."""
    data = body(messages=[{"role": "user", "content": "hi"}], stream=True)
    fields = edited(data, replace(PREFILL, connector_port=9001))

    assert fields == {
        **json.loads(data),
        "bootstrap_host": "10.0.0.1",
        "bootstrap_port": 9001,
        "bootstrap_room": rooms_of(fields)[0],
    }
    assert len({rooms_of(edited(data))[0] for _ in range(100)}) == 100


def test_port_that_is_not_known() -> None:
    """Without a `connector_port` it is SGLang's default."""
    assert edited(b"{}")["bootstrap_port"] == 8998


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://[2001:db8::1]:8000", "[2001:db8::1]"),
        ("http://10.0.0.1", "10.0.0.1"),
        ("https://Node-1.example:30000/base", "node-1.example"),
    ],
)
def test_host(url: str, host: str) -> None:
    """The host is the URL's; an IPv6 address keeps its brackets, as SGLang puts the port behind it."""
    assert edited(b"{}", Worker(url=url))["bootstrap_host"] == host


@pytest.mark.parametrize("prompt", [["a"], ["a", "b", ""], [[1, 2], [3]], [[1, 2]]])
def test_entry37_a_batch_has_a_room_for_each_prompt(prompt: list[object]) -> None:
    """Peer entry 37, sglang#8303, #8317 and #40297: lists, one entry for each prompt, all rooms different."""
    fields = edited(body(prompt=prompt))

    assert fields["prompt"] == prompt
    assert fields["bootstrap_host"] == ["10.0.0.1"] * len(prompt)
    assert fields["bootstrap_port"] == [8998] * len(prompt)
    assert isinstance(fields["bootstrap_room"], list)
    assert len(set(rooms_of(fields))) == len(fields["bootstrap_room"]) == len(prompt)


@pytest.mark.parametrize("prompt", ["a", [1, 2, 3], [], None])
def test_entry37_one_prompt_has_one_room(prompt: object) -> None:
    """Peer entry 37: token ids are one prompt, not a batch of as many."""
    fields = edited(body(prompt=prompt))

    assert isinstance(fields["bootstrap_room"], int)
    assert isinstance(fields["bootstrap_host"], str)


@pytest.mark.parametrize("n", [b"2", b"1.5", b'"2"', b"128", b"[1]"])
def test_entry37_several_answers_are_refused(n: bytes) -> None:
    """Peer entry 37, sglang#8201 and #10016: `n` above 1 hangs in SGLang, so it is refused with a clear message."""
    for start in (b'{"messages": []', b'{"prompt": ["a", "b"]', b'{"n": 1'):
        with pytest.raises(InvalidRequest, match="n must be 1"):
            edited(start + b', "n": ' + n + b"}")


@pytest.mark.parametrize("n", [b"1", b"1.0", b"null"])
def test_one_answer_is_served(n: bytes) -> None:
    """An `n` that says nothing new goes through as it is."""
    data = b'{"n": ' + n + b"}"

    assert SGLang().prefill_body(data, PREFILL, DECODE, "ours").startswith(data[:-1])


def test_too_many_prompts() -> None:
    """A batch is bounded, as each prompt of two bytes is told a host, a port and a room."""
    assert len(rooms_of(edited(body(prompt=[""] * MAX_PROMPTS)))) == MAX_PROMPTS

    with pytest.raises(InvalidRequest, match="2048 prompts"):
        edited(body(prompt=[""] * (MAX_PROMPTS + 1)))


def test_own_bootstrap_fields_are_replaced() -> None:
    """A client doesn't say where the legs meet, nor in which room."""
    fields = edited(body(bootstrap_host="6.6.6.6", bootstrap_port=1, bootstrap_room=5, prompt="a"))

    assert (fields["bootstrap_host"], fields["bootstrap_port"]) == ("10.0.0.1", 8998)
    assert fields["bootstrap_room"] != 5


def test_the_wrapped_app_cannot_prefill() -> None:
    """A prefill worker needs an address that the decode worker can be told; a decode worker needs none."""
    assert SGLang().fits(PREFILL, DECODE)
    assert SGLang().fits(PREFILL, Worker(url="local"))
    assert not SGLang().fits(Worker(url="local"), DECODE)


def test_f14_body_that_is_no_object() -> None:
    """F-14: `null` is the client's fault, for either leg."""
    with pytest.raises(InvalidRequest):
        edited(b"null")
    with pytest.raises(InvalidRequest):
        SGLang().decode_body(b"null", PREFILL, DECODE, "ours")


def test_dialects_share_nothing() -> None:
    """Each attempt has an object of its own; the names are those of PD_DIALECT."""
    assert set(DIALECTS) == {"fastdeploy", "vllm", "sglang"}
    assert all(make() is not make() for make in DIALECTS.values())

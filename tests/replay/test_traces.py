"""Shows what is read from traces, and that a broken line costs that line and nothing more."""

from __future__ import annotations

import json
import tracemalloc
from typing import TYPE_CHECKING

import pytest

from asgi_router.extraction import extract
from asgi_router.observability.events import RequestFinished
from asgi_router.replay.formats import DEFAULT_OUTPUT, MAX_TOKENS
from asgi_router.replay.traces import MAX_SPREAD, Trace, read_trace
from asgi_router.scheduling.blocks import block_hashes, weigh
from tests.replay.builders import asked, trace_of

if TYPE_CHECKING:
    from pathlib import Path


def read(tmp_path: Path, *lines: str | bytes | dict[str, object], rate: float = 1.0, seed: int = 0) -> Trace:
    """Return what is read from a file of these lines."""
    file = tmp_path / "trace"
    raw = (json.dumps(line) if isinstance(line, dict) else line for line in lines)
    file.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in raw) + b"\n")
    return read_trace(file, rate=rate, seed=seed)


def mooncake(timestamp: object = 0, tokens: object = 1_300, output: object = 5, ids: object = (7, 8, 9)) -> str:
    """Return a line as Mooncake's traces have it."""
    fields = {"timestamp": timestamp, "input_length": tokens, "output_length": output, "hash_ids": ids}
    return json.dumps(fields)


def test_mooncake(tmp_path: Path) -> None:
    """Milliseconds, lengths, and an id for each block, of which the last is whole or left out."""
    trace = read(tmp_path, mooncake(1_000), mooncake(2_500, 1_024, 1, [7, 8]))
    first, second = trace.requests
    assert (first.arrival, first.prompt_tokens, first.output_tokens, first.blocks) == (0.0, 1_300, 5, (7, 8))
    assert (second.arrival, second.prompt_tokens, second.blocks) == (1.5, 1_024, (7, 8))
    assert trace.block_tokens == 512
    assert trace.broken == []


def test_ids_of_any_length_are_blocks_of_one_size(tmp_path: Path) -> None:
    """Other hashes may have more than 64 bits; the blocks are as long as all others, and told apart."""
    ids = [2**255 + 9, 2**64 + 7, 2**64 + 8]
    (request,) = read(tmp_path, mooncake(0, 3 * 512, 5, ids)).requests
    assert weigh(request.blocks) == len(set(request.blocks)) == 3


def test_azure(tmp_path: Path) -> None:
    """Lengths and times of seven digits; prompts share nothing."""
    trace = read(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:17:03.9799600,4808,10",
        "2023-11-16 18:17:04.9799601,110,27",
    )
    assert [request.prompt_tokens for request in trace.requests] == [4808, 110]
    assert [request.output_tokens for request in trace.requests] == [10, 27]
    assert trace.requests[1].arrival == pytest.approx(1.0, abs=1e-5)
    assert trace.requests[0].blocks == ()


CHAT: dict[str, object] = {"model": "m", "messages": [{"role": "user", "content": "Hello, you there! " * 200}]}


@pytest.mark.parametrize(
    "line",
    [
        {"timestamp": 5.0, "body": CHAT},
        {"time": "2026-01-01T00:00:05Z", "path": "/v1/chat/completions", "request": CHAT},
        {"ts": 1_767_225_605_000, **CHAT},
        {"custom_id": "7", "method": "POST", "url": "/v1/chat/completions", "body": CHAT},
    ],
    ids=["body", "request", "bare", "batch API"],
)
def test_logged_requests_are_read_by_the_extractor(tmp_path: Path, line: dict[str, object]) -> None:
    """Text goes through the router's own extraction, and is cut into the same blocks as in the router."""
    (request,) = read(tmp_path, line).requests
    expected = extract(json.dumps(CHAT).encode(), "/v1/chat/completions")
    assert request.prompt_tokens == expected.prompt_tokens
    assert request.blocks == block_hashes(expected.key, 512, ("m",))
    assert len(request.blocks) == 3600 // 512
    assert request.output_tokens == DEFAULT_OUTPUT
    assert (request.message, request.prefix_key) == ("", b"")  # the text itself isn't kept


def test_long_texts_are_cut_into_blocks_of_one_size(tmp_path: Path) -> None:
    """As an engine's are, which the workers of a replay stand for."""
    messages = [{"role": "user", "content": "Hello, you there! " * 6_000}]
    (request,) = read(tmp_path, {"timestamp": 5.0, "body": {"messages": messages}}).requests
    assert weigh(request.blocks) == len(request.blocks) == 108_000 // 512


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (5, 6.0),
        (1_767_225_605, 1_767_225_606),
        (1_767_225_605_000, 1_767_225_606_000),
        ("2026-01-01T00:00:05Z", "2026-01-01T01:00:06+01:00"),
        ("2026-01-01 00:00:05.1234567", "2026-01-01 00:00:06.1234567"),
        ("5.0", "6"),
    ],
)
def test_the_forms_of_a_time(tmp_path: Path, first: object, second: object) -> None:
    """Seconds, milliseconds since 1970, and ISO 8601 are told apart."""
    trace = read(tmp_path, {"timestamp": first, "body": CHAT}, {"timestamp": second, "body": CHAT})
    assert trace.seconds == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("more", "tokens"),
    [
        ({"usage": {"completion_tokens": 9}}, 9),
        ({"response": {"usage": {"completion_tokens": 9}}}, 9),
        ({"response": {"status_code": 200, "body": {"usage": {"completion_tokens": 9}}}}, 9),
        ({"body": {**CHAT, "max_tokens": 3}}, 3),
        ({"body": {**CHAT, "max_tokens": 100_000}}, DEFAULT_OUTPUT),
    ],
)
def test_the_length_of_an_answer(tmp_path: Path, more: dict[str, object], tokens: int) -> None:
    """It is what the usage says, else a usual one, within the request's limit."""
    (request,) = read(tmp_path, {"timestamp": 0, "body": CHAT, **more}).requests
    assert request.output_tokens == tokens


def record(**fields: object) -> dict[str, object]:
    """Return a record of the router's request log."""
    names = dict.fromkeys(RequestFinished.__struct_fields__)
    assert fields.keys() <= names.keys()
    base = dict.fromkeys(names, "") | {"prompt_tokens": 400, "predicted_cached_tokens": 0, "real_prompt_tokens": None}
    return base | {"duration_seconds": 2.0, "first_byte_seconds": 0.5} | fields


def test_the_routers_own_log(tmp_path: Path) -> None:
    """A request came its duration before its record; the turns of a session begin alike."""
    lines = [
        f"2026-11-30 10:00:{second},500 INFO asgi_router.requests {json.dumps(fields)}"
        for second, fields in (
            ("10", record(session_id="a")),
            ("20", record(session_id="a", real_prompt_tokens=700, duration_seconds=13.0)),
            ("30", record()),
        )
    ]
    trace = read(tmp_path, *lines)
    # The second record is of what came first, at 7.5, a second before the other.
    assert [request.arrival for request in trace.requests] == pytest.approx([0.0, 1.0, 21.0])
    two, one, other = trace.requests
    assert (one.prompt_tokens, two.prompt_tokens) == (400, 700)
    assert one.blocks == two.blocks[: len(one.blocks)]
    assert len(one.blocks) == 3
    assert other.blocks == ()
    assert one.output_tokens == 51  # 1.5 seconds at 0.03


def test_a_record_knows_its_time_and_its_tokens(tmp_path: Path) -> None:
    """When a request came and how long its answer was is in the record: nothing is reckoned, whatever is around it."""
    lines = [json.dumps(record(arrived=1_796_000_000.5 + at, real_completion_tokens=7)) for at in (0.0, 3.25)]
    trace = read(tmp_path, *lines)
    assert [request.arrival for request in trace.requests] == pytest.approx([0.0, 3.25])
    assert [request.output_tokens for request in trace.requests] == [7, 7]


def test_times_that_nobody_noted_are_made_up(tmp_path: Path) -> None:
    """Without times requests come at the rate that is asked for, the same ones for the same seed."""
    lines = [record() for _ in range(400)]
    trace = read(tmp_path, *lines, rate=20.0)
    assert trace.seconds == pytest.approx(20, rel=0.2)
    assert trace == read(tmp_path, *lines, rate=20.0)
    assert trace != read(tmp_path, *lines, rate=20.0, seed=1)


def test_requests_with_one_time_stamp_are_spread(tmp_path: Path) -> None:
    """Time stamps that come in steps are spread up to the next one, and not for ever."""
    trace = read(tmp_path, *[mooncake(0)] * 50, *[mooncake(3_000)] * 50, mooncake(3_600_000))
    first, second = trace.requests[:50], trace.requests[50:100]
    assert first[0].arrival == 0.0
    assert len({request.arrival for request in first}) == 50
    shift = trace.requests[-1].arrival - 3_600  # the first one was spread, too, and is now at 0
    assert 2.0 < max(request.arrival for request in first) < 3.0 + shift <= min(request.arrival for request in second)
    assert max(request.arrival for request in second) <= 3.0 + MAX_SPREAD + shift
    arrivals = [request.arrival for request in trace.requests]
    assert arrivals == sorted(arrivals)


BROKEN: list[str | bytes] = [
    "{",
    "no json at all",
    "[1, 2]",
    "{}",
    b'{"timestamp": 1, "input_length": \xff}',
    "[" * 100_000,
    '{"a":' * 100_000,
    mooncake(timestamp="soon"),
    mooncake(timestamp=None),
    '{"timestamp": 0, "input_length": 1600, "output_length": 1, "hash_ids": [7, 8, 7]}',
    '{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": []}',
    '{"timestamp": Infinity, "input_length": 1, "output_length": 1, "hash_ids": []}',
    '{"timestamp": 1e999, "input_length": 1, "output_length": 1, "hash_ids": []}',
    mooncake(timestamp=10**400),
    mooncake(timestamp=True),
    mooncake(tokens=-1),
    mooncake(tokens=1.5),
    mooncake(tokens=MAX_TOKENS + 1),
    mooncake(tokens=None),
    mooncake(output=-3),
    mooncake(output=[]),
    mooncake(ids="7"),
    mooncake(ids=[1.5]),
    mooncake(ids=[None]),
    mooncake(ids=[7, 7]),
    mooncake(ids=[8, 7]),
    mooncake(ids=[7, 9, 8], tokens=2_000),
    json.dumps({"timestamp": "yesterday", "body": CHAT}),
    json.dumps({"timestamp": 1, "body": {"model": "m"}}),
    json.dumps(record(duration_seconds=None)),
    json.dumps(record(prompt_tokens="many")),
    "9" * 10_000,
]


@pytest.mark.parametrize("line", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_line_is_passed_over(tmp_path: Path, line: str | bytes) -> None:
    """It is noted with its number, in words that don't repeat it, and its neighbours are read."""
    trace = read(tmp_path, mooncake(tokens=2_000), "", line, mooncake(9_000))
    assert len(trace.requests) == 2
    assert [broken.number for broken in trace.broken] == [3]
    assert len(trace.broken[0].reason) < 120


@pytest.mark.parametrize(
    "row",
    ["x,1,2", ",1,2", "2023-11-16 18:17:03,a,2", "2023-11-16 18:17:03,1", "2023-11-16 18:17:03,-1,2", b"\xff,1,2"],
)
def test_a_broken_row_is_passed_over(tmp_path: Path, row: str | bytes) -> None:
    """The same for CSV."""
    good = "2023-11-16 18:17:03.97996,4808,10"
    trace = read(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens", row, good)
    assert len(trace.requests) == 1
    assert [broken.number for broken in trace.broken] == [2]


def test_a_line_of_another_kind_is_passed_over(tmp_path: Path) -> None:
    """Blocks of two sizes can't be compared."""
    trace = read(tmp_path, mooncake(), {"timestamp": 1, "body": CHAT})
    assert len(trace.requests) == 1
    assert [broken.number for broken in trace.broken] == [2]


def test_the_best_rate_is_that_of_a_cache_without_end() -> None:
    """All blocks that came before count, but for one that ends a prompt: its last token is computed anew."""
    trace = trace_of(asked(250, blocks=(1, 2)), asked(350, blocks=(1, 2, 3)), asked(200, blocks=(1, 2)))
    assert trace.best_hit_rate() == pytest.approx((200 + 100) / 800)


def test_a_hundred_thousand_requests_fit_into_a_gigabyte(tmp_path: Path) -> None:
    """Reading takes less than 7,500 bytes for a request of a hundred blocks, most of which are its own."""
    lines = [mooncake(at, 51_200, 5, [*range(20), *range(at * 100, at * 100 + 80)]) for at in range(1_000, 2_000)]
    (tmp_path / "warm").write_text(lines[0])
    read_trace(tmp_path / "warm")
    (tmp_path / "trace").write_text("\n".join(lines))
    tracemalloc.start()
    try:
        trace = read_trace(tmp_path / "trace")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(trace.requests) == 1_000
    assert peak < 7_500 * 1_000

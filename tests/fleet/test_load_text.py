"""Shows what is read out of workers' metrics: recorded texts of four engines, and everything that is no load."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asgi_router.fleet.load_text import read_load
from asgi_router.scheduling.remote_load import Load

RECORDED = {path.stem: path.read_bytes() for path in (Path(__file__).parent / "recorded").glob("*.txt")}

NAMES = [
    ("fastdeploy:num_requests_running", "fastdeploy:num_requests_waiting"),
    ("vllm:num_requests_running", "vllm:num_requests_waiting"),
    ("sglang:num_running_reqs", "sglang:num_queue_reqs"),
    ("llamacpp:requests_processing", "llamacpp:requests_deferred"),
]


def vllm(running: str, waiting: str = " 1") -> bytes:
    """A text in which the names of vLLM's two metrics are followed by these words, in one line or in several."""
    lines = [
        f"vllm:num_requests_{name}{series}"
        for name, word in (("running", running), ("waiting", waiting))
        for series in word.split("|")
    ]
    return "\n".join([*lines, ""]).encode()


@pytest.mark.parametrize(
    ("engine", "load"),
    [
        ("vllm", Load(21, 4)),  # two engines: 12 + 9, 0 + 4
        ("sglang", Load(13, 3)),  # two dp ranks of two tp ranks each, sums and priorities: 7 + 6, 3 + 0
        ("fastdeploy", Load(15, 2)),  # two processes: 0 + 15, 0 + 2
        ("llamacpp", Load(4, 11)),
    ],
)
def test_f47_recorded_metrics_of_each_engine(engine: str, load: Load) -> None:
    """F-47: labels and ranks were misread; the load is that of all ranks, each request counted once."""
    assert read_load(RECORDED[engine]) == load


@pytest.mark.parametrize("names", NAMES, ids=[running for running, _ in NAMES])
def test_the_names_of_each_engine(names: tuple[str, str]) -> None:
    """Each engine's two names are known, without labels, types or help around them, and in either order."""
    running, waiting = (f"{name} {value}\n".encode() for name, value in zip(names, (7, 3), strict=True))
    assert read_load(running + waiting) == read_load(waiting + running) == Load(7, 3)


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("running", "load"),
    [
        (" 3", 3),
        (" 3.0", 3),
        (" 1e+06", 1_000_000),
        (" 1.2E3", 1200),
        ("\t3  ", 3),
        (" 3 1764011203321", 3),  # with a time stamp
        ("{} 3", 3),
        ('{ engine = "0" , } 3', 3),
        ('{model_name="a } b, \\"c\\" \\\\ d\\n"} 3', 3),
        ('{model_name="总账"} 3', 3),
        ('{engine="0"} 3|{engine="1"} 1e1|{engine="2"} 0', 13),
        ('{model_name="a"} 3|{model_name="b"} 4', 7),
    ],
)
def test_f47_how_numbers_and_labels_are_written(running: str, load: int, ending: str) -> None:
    """F-47: exponents, time stamps, and labels with anything in them are read as the format has it."""
    assert read_load(vllm(running).replace(b"\n", ending.encode())) == Load(load, 1)


@pytest.mark.parametrize(
    ("series", "total"),
    [
        ('{tp_rank="0"} 5|{tp_rank="1"} 5', 5),
        ('{tp_rank="0",pp_rank="0"} 5|{tp_rank="1",pp_rank="0"} 4|{tp_rank="0",pp_rank="1"} 5', 5),
        ('{dp_rank="0",tp_rank="0"} 5|{dp_rank="0",tp_rank="1"} 5|{dp_rank="1",tp_rank="2"} 2', 7),
        ('{dp_rank="0",moe_ep_rank="0"} 5|{dp_rank="0",moe_ep_rank="1"} 5', 5),
        ('{priority=""} 5|{priority="0"} 3|{priority="9"} 2', 5),
        ('{priority="0"} 3|{priority="9"} 2', 5),
        ('{tp_rank="0"} 5|{tp_rank="0",priority="0"} 5|{tp_rank="1"} 5|{tp_rank="1",priority="0"} 5', 5),
        ('{dp_rank="0",priority=""} 5|{dp_rank="0",priority="1"} 5|{dp_rank="1",priority="1"} 2', 7),
    ],
)
def test_f47_series_that_count_the_same_requests(series: str, total: int) -> None:
    """F-47: ranks of one model replica repeat its number, and priorities repeat their sum; replicas are added up."""
    assert read_load(vllm(" 0", series)) == Load(0, total)


NO_LOAD = {
    "nothing": b"",
    "an empty line": b"\n",
    "HTML": b"<html><body>404 Not Found</body></html>\n",
    "JSON": b'{"detail":"Not Found"}\n',
    "another engine": b"tgi_batch_current_size 4\ntgi_queue_size 7\n",
    "no running": b"vllm:num_requests_waiting 3\n",
    "no waiting": b"vllm:num_requests_running 3\n",
    "one of each": b"vllm:num_requests_running 3\nsglang:num_queue_reqs 1\n",
    "other names": b"vllm:num_requests_running_total 3\nvllm:num_requests_waiting_by_reason 1\n",
    "comments": b"# vllm:num_requests_running 3\n# HELP vllm:num_requests_waiting 1\n",
    "NaN": vllm(" NaN"),
    "infinite": vllm(" +Inf"),
    "negative": vllm(" -1"),
    "beyond all measure": vllm(" 1e300"),
    "NaN in one rank": vllm('{engine="0"} 3|{engine="1"} NaN'),
    "no number": vllm(" many"),
    "no value": vllm(""),
    "an open label": vllm('{engine="0} 3'),
    "not UTF-8": vllm(" 3").replace(b" 3", b'{model_name="\xff"} 3'),
    "UTF-16": vllm(" 3").decode().encode("utf-16"),
    "compressed": b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\n",
    "cut off": vllm(" 1", " 20")[:-2],
    "cut off at a digit": vllm(" 1", " 20")[:-1],
    "too many series": vllm("|".join(f'{{engine="{number}"}} 1' for number in range(10_000))),
}


@pytest.mark.parametrize("text", NO_LOAD.values(), ids=NO_LOAD)
def test_what_is_no_load(text: bytes) -> None:
    """What can't be read, is cut off, or makes no sense as a number of requests, is no load rather than a wrong one."""
    assert read_load(text) is None


@pytest.mark.parametrize("engine", sorted(RECORDED))
def test_a_text_that_is_cut_off_anywhere(engine: str) -> None:
    """A recorded text cut at any byte within a line is no load: 2 may have been 20."""
    text = RECORDED[engine]
    cuts = [at for at in range(1, len(text)) if text[at - 1 : at] != b"\n"]
    assert len(cuts) > 1000
    assert all(read_load(text[:at]) is None for at in cuts)


def test_the_other_engine_where_one_is_incomplete() -> None:
    """An engine whose metrics come without one of the two doesn't hide another whose metrics are whole."""
    assert read_load(b"vllm:num_requests_running 3\n" + RECORDED["sglang"]) == Load(13, 3)


OUR_WORDS = [name.encode() for names in NAMES for name in names]
WORDS = [
    b"{",
    b"}",
    b'"',
    b"=",
    b",",
    b"\\",
    b" ",
    b"\n",
    b"1",
    b"e",
    b"-",
    b"NaN",
    b"#",
    b"tp_rank",
    b"priority",
    b"\xff",
]


@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(OUR_WORDS) | st.sampled_from(WORDS) | st.binary(max_size=8), max_size=40).map(b"".join)
    | st.binary(max_size=300)
)
@example(b"vllm:num_requests_running{{\n")
@example(b'vllm:num_requests_running{a="1",a="2"} 1\nvllm:num_requests_waiting 1\n')
def test_any_bytes_are_a_load_or_none(text: bytes) -> None:
    """Whatever a worker sends, nothing is raised, and what is read are two numbers that there can be."""
    for sent in (text, text + b"\n"):
        load = read_load(sent)
        assert load is None or all(type(number) is int and 0 <= number < 10**12 for number in load)

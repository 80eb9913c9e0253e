"""Shows the command as its user meets it: a table, JSON, a picture, and errors in a line."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from asgi_router.replay.arguments import add_options, setup_of
from asgi_router.replay.cli import main
from asgi_router.replay.report import COLUMNS
from asgi_router.replay.simulate import Restart

if TYPE_CHECKING:
    from pathlib import Path

MADE = ["replay", "conversations", "--requests", "200", "--workers", "3"]
LINE = '{"timestamp": %d, "input_length": 1500, "output_length": 20, "hash_ids": [1, 2, 3]}\n'


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A small trace in Mooncake's form, with two broken lines."""
    path = tmp_path / "trace.jsonl"
    path.write_text(LINE % 0 + "{broken\n" + LINE % 700 + LINE % 900 + '{"timestamp": 1}\n')
    return path


def test_a_table(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each policy, the oracle too, and each broken line by its number on stderr."""
    assert main(["replay", str(trace), "--policy", "prefill_cost,fastdeploy,prefill_cost"]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert "3 requests" in lines[0]
    assert "8 workers with 250,000 tokens of cache" in lines[0]
    assert re.split(r"\s{2,}", lines[2]) == list(COLUMNS)
    assert [line.split()[0] for line in lines[3:6]] == ["prefill_cost", "fastdeploy", "oracle"]
    assert lines[3].split()[1] == "45.5"  # two of three requests find 1,024 of their 1,500 tokens
    assert "would hit 45.5 %" in shown.out
    assert [line.split(": ")[0].rsplit(", ")[-1] for line in shown.err.splitlines()] == ["line 2", "line 5"]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    """The same figures, and more of them, for programs."""
    assert main([*MADE, "--json", "--policy", "round_robin"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["requests"], shown["broken_lines"]) == (200, 0)
    assert [line["policy"] for line in shown["policies"]] == ["round_robin", "oracle"]
    assert 0 < shown["policies"][0]["hit_rate"] <= shown["best_hit_rate"] < 1
    assert shown["policies"][0]["ttft_p50"] <= shown["policies"][0]["ttft_p99"]


def test_all_policies(capsys: pytest.CaptureFixture[str]) -> None:
    """`all` are ours, the rivals and the oracle."""
    assert main([*MADE, "--json", "--policy", "all"]) == 0
    names = [line["policy"] for line in json.loads(capsys.readouterr().out)["policies"]]
    assert len(names) == len(set(names)) == 18
    assert {"prefill_cost", "sglang", "dynamo", "llmd_sticky", "oracle"} <= set(names)


def test_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--plot` writes a picture beside the table."""
    path = tmp_path / "out.png"
    assert main([*MADE, "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "prefill_cost" in capsys.readouterr().out


def test_a_table_in_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A person gets a progress bar and a drawn table, and a plain one where the extra is missing."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main(MADE) == 0
    shown_drawn = capsys.readouterr()
    assert "┃" in shown_drawn.out
    assert "100%" in shown_drawn.err
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(MADE) == 0
    shown = capsys.readouterr().out
    assert "┃" not in shown
    assert "prefill_cost" in shown


def test_a_picture_without_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the extra, and comes before anything has been simulated."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*MADE, "--plot", str(tmp_path / "out.png")]) == 2
    shown = capsys.readouterr()
    assert "asgi-router[replay]" in shown.err
    assert shown.out == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["replay", "/nowhere/at/all"], "No such file"),
        ([*MADE, "--plot", "/nowhere/at/all.png"], "--plot"),
        ([*MADE, "--plot", "out.xyz"], "xyz"),
        ([*MADE, "--restart-worker", "3"], "--restart-worker: there are only 3 workers"),
        ([*MADE, "--worker-speeds", "1,1,1,1"], "--worker-speeds: there are only 3 workers"),
    ],
)
def test_what_goes_wrong_is_said_in_a_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2, and one line that says what is wrong."""
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "best"], "no policy is called 'best'"),
        (["--policy", ","], "no policy"),
        (["--speed", "0"], "above 0"),
        (["--speed", "nan"], "no number"),
        (["--workers", "0"], "from 1 to"),
        (["--batch-penalty", "-1"], "below 0"),
        (["--restart-worker", "x"], "no whole number"),
        (["--worker-speeds", "1,,1"], "no number"),
    ],
)
def test_options_that_make_no_sense(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They are refused before anything is read."""
    with pytest.raises(SystemExit) as caught:
        main([*MADE, *arguments])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_a_trace_without_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says so; of many broken lines the first ten are named."""
    path = tmp_path / "empty"
    path.write_text("nothing\n" * 50)
    assert main(["replay", str(path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 12
    assert "50 lines passed over" in lines[-2]
    assert "no requests" in lines[-1]


def test_options_reach_the_simulation(capsys: pytest.CaptureFixture[str]) -> None:
    """Slower prefill and a dearer batch make everything slower; a restart leaves its traces."""
    means = []
    for more in ([], ["--prefill-rate", "2000"], ["--batch-penalty", "500"], ["--worker-speeds", "0.2,0.2,0.2"]):
        assert main([*MADE, "--json", "--policy", "request_num", *more]) == 0
        line = json.loads(capsys.readouterr().out)["policies"][0]
        means.append(line["ttft_mean"] + 100 * line["per_token_mean"])
    assert all(mean > 1.05 * means[0] for mean in means[1:])
    assert main([*MADE, "--json", "--restart-worker", "1", "--policy", "request_num"]) == 0
    line = json.loads(capsys.readouterr().out)["policies"][0]
    assert line["retried"] > 0


WITHOUT_EXTRA = """
import runpy, sys
sys.modules.update(rich=None, matplotlib=None)
runpy.run_module("asgi_router.replay", run_name="__main__")
"""


def test_the_module_is_the_command(trace: Path) -> None:
    """`python -m asgi_router.replay` is the command, too, and needs neither rich nor matplotlib for its table."""
    command = [sys.executable, "-c", WITHOUT_EXTRA, str(trace)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "prefill_cost" in done.stdout


def test_a_restart_is_in_the_middle() -> None:
    """If nobody says when: half-way through the requests as they come now, not as they were recorded."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    half = setup_of(parser.parse_args(["x", "--restart-worker", "2", "--speed", "4"]), 80.0).restart
    said = setup_of(parser.parse_args(["x", "--restart-worker", "2@3.5", "--speed", "4"]), 80.0).restart
    assert (half, said) == (Restart(worker=2, at=10.0), Restart(worker=2, at=3.5))


def test_prefill_and_decode_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """`--prefill-workers` is said in the title; nobody left to decode, or a restart, is an error."""
    assert main([*MADE, "--prefill-workers", "2"]) == 0
    assert "3 workers, 2 for prefill," in capsys.readouterr().out
    assert main([*MADE, "--prefill-workers", "3"]) == 2
    assert main([*MADE, "--prefill-workers", "2", "--restart-worker", "0"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2

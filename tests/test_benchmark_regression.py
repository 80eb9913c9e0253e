"""Owns the proof that the check for regressions notices what has become slower, and nothing else."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks import regression
from benchmarks.operations import Operation
from benchmarks.regression import LIMIT, REFERENCE, machine, operations, ratios_of, slower, times_of

if TYPE_CHECKING:
    from collections.abc import Callable


class Stopwatch:
    """A clock that operations turn forward, by what they cost and by what the machine does beside them."""

    def __init__(self) -> None:
        self.now = 0

    def operation(self, name: str, cost: int, disturbed: Callable[[int], int] = lambda call: 0) -> Operation:
        """An operation of this cost; `disturbed` says what is added to its n-th call."""
        calls = 0

        def run() -> None:
            nonlocal calls
            self.now += cost + disturbed(calls)
            calls += 1

        return Operation(name, run, 10)

    def read(self) -> int:
        """The time."""
        return self.now


def test_other_processes_change_no_time() -> None:
    """What is taken from most turns, and given to one, does not show in an operation's time."""
    watch = Stopwatch()
    calm = watch.operation("calm", 100)
    busy = watch.operation("busy", 100, lambda call: 5_000 if call // 10 % 5 else 0)
    lucky = watch.operation("lucky", 100, lambda call: -40 if call < 10 else 0)
    assert times_of([calm, busy, lucky], 50, watch.read) == {"calm": 100, "busy": 100, "lucky": 100}


def test_a_slower_operation_is_named() -> None:
    """What takes a fifth longer than recorded is named; what takes a tenth longer, or is new, is not."""
    recorded = {"a": 1.0, "b": 0.5, "c": 2.0}
    assert LIMIT < 1.2
    assert slower({"a": 1.2, "b": 0.55, "c": 1.0, "new": 9.0}, recorded) == ["a"]
    assert slower(recorded, recorded) == []


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """A reference in which two operations have the ratio 1."""
    file = tmp_path_factory.mktemp("recorded") / "reference.json"
    ratios = {"one": 1.0, "two": 1.0}
    file.write_text(json.dumps({machine(): ratios}), encoding="utf-8")
    monkeypatch.setattr(regression, "REFERENCE", file)
    monkeypatch.setattr(regression, "operations", lambda: [Operation(name, lambda: None, 1) for name in ratios])
    monkeypatch.setattr("gc.disable", lambda: None)
    return ratios


def run(monkeypatch: pytest.MonkeyPatch, attempts: list[dict[str, float]], *arguments: str) -> int:
    """Run the check; each attempt finds these ratios."""
    monkeypatch.setattr("sys.argv", ["regression", *arguments])
    monkeypatch.setattr(regression, "ratios_of", lambda operations: attempts.pop(0))
    monkeypatch.setattr(regression, "ratios_elsewhere", lambda names: attempts.pop(0))
    return regression.main()


def test_the_check_fails_only_if_it_fails_every_time(
    monkeypatch: pytest.MonkeyPatch, recorded: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    """An operation that is slower in three attempts fails the check; one that is so in two does not."""
    assert run(monkeypatch, [{"one": 1.0, "two": 1.1}]) == 0
    assert run(monkeypatch, [{"one": 1.3, "two": 1.1}, {"one": 1.3}, {"one": 1.1}]) == 0
    capsys.readouterr()
    assert run(monkeypatch, [{"one": 1.3, "two": 1.3}, {"one": 1.3, "two": 1.0}, {"one": 1.2}]) == 1
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if "SLOWER" in line] == ["one"]


def test_recording(monkeypatch: pytest.MonkeyPatch, recorded: dict[str, float]) -> None:
    """`--record` writes the middle of three measurements, and from then on that is what counts."""
    attempts = [{"one": ratio, "two": 1.0} for ratio in (9.0, 1.0, 3.0)]
    assert run(monkeypatch, attempts, "--record") == 0
    assert json.loads(regression.REFERENCE.read_text(encoding="utf-8")) == {machine(): {"one": 3.0, "two": 1.0}}
    assert run(monkeypatch, [{"one": 3.0, "two": 1.0}]) == 0


def test_an_unknown_machine_is_not_checked(
    monkeypatch: pytest.MonkeyPatch, recorded: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    """Where nothing was recorded for the processor and the version of Python, the check passes, and says so."""
    monkeypatch.setattr(regression, "machine", lambda: "another")
    assert run(monkeypatch, []) == 0
    assert "not checked" in capsys.readouterr().out


def test_another_process_measures_what_it_is_told() -> None:
    """A second look is one by a process that knows nothing of the first, and at what seemed slower alone."""
    name = "lease, first byte, release"
    ratios = regression.ratios_elsewhere([name])
    assert list(ratios) == [name]
    assert ratios[name] > 0


def test_everything_that_is_measured_is_recorded() -> None:
    """No operation is left out of the references, and each can be measured."""
    names = [operation.name for operation in operations()]
    assert set(ratios_of(operations(), 1)) == set(names)
    for ratios in json.loads(REFERENCE.read_text(encoding="utf-8")).values():
        assert set(ratios) == set(names)

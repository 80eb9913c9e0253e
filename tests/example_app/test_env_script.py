"""The scripts' shared part, `scripts/_env.sh`: which Python it takes, and when it installs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent.parent / "scripts" / "_env.sh"
# Stands in for the environment's Python: it notes what pip is asked, and fails when there is a file named `fail`.
FAKE_PYTHON = """#!/bin/sh
[ "$1" != -m ] && exit 0
echo "$*" >>"$0.calls"
echo "pip is busy"
[ ! -e "$(dirname "$0")/../../fail" ]
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose environment is there, but has nothing installed."""
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    (tmp_path / "pyproject.toml").write_text("version 1")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "requirements.txt").write_text("pytest")
    return tmp_path


def shell(root: Path, command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", "-euc", f"root=$1; . {SCRIPT}; {command}", "sh", str(root)],
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


def installs(root: Path) -> int:
    calls = root / ".venv" / "bin" / "python.calls"
    return len(calls.read_text().splitlines()) if calls.exists() else 0


def test_it_installs_once(checkout: Path) -> None:
    """The second call with the same arguments runs no pip and says nothing."""
    first = shell(checkout, "ensure_env demo -e '.[demo]'")
    second = shell(checkout, "ensure_env demo -e '.[demo]'")

    assert (first.returncode, second.returncode) == (0, 0)
    assert "pip is busy" not in first.stdout + first.stderr
    assert second.stdout + second.stderr == ""
    assert installs(checkout) == 1


def test_it_installs_again_when_something_changed(checkout: Path) -> None:
    """Other arguments, another name, a changed pyproject.toml or requirements are installed anew."""
    shell(checkout, "ensure_env demo -e .")
    shell(checkout, "ensure_env demo -e . more")
    shell(checkout, "ensure_env test -e . more")
    (checkout / "pyproject.toml").write_text("version 2")
    shell(checkout, "ensure_env test -e . more")
    (checkout / "tests" / "requirements.txt").write_text("pytest httpx")
    shell(checkout, "ensure_env test -e . more")

    assert installs(checkout) == 5


def test_a_failed_installation_is_told_and_tried_again(checkout: Path) -> None:
    """When pip fails, its output is shown, the exit code says so, and the next call tries once more."""
    (checkout / "fail").touch()
    failed = shell(checkout, "ensure_env demo -e .")
    handled = shell(checkout, "if ensure_env demo -e .; then echo yes; else echo no; fi")
    (checkout / "fail").unlink()
    mended = shell(checkout, "ensure_env demo -e .")

    assert failed.returncode == 1
    assert "pip is busy" in failed.stderr
    assert handled.stdout == "no\n"
    assert mended.returncode == 0
    assert installs(checkout) == 3


def test_no_python_is_one_clear_line(tmp_path: Path) -> None:
    """Where no Python is new enough, one line says what is needed and how to name one."""
    answer = shell(tmp_path, "find_python", PATH=str(tmp_path))

    assert answer.returncode == 1
    assert len(answer.stderr.splitlines()) == 1
    assert "Python 3.11 or newer" in answer.stderr


def test_an_old_python_is_passed_over(tmp_path: Path) -> None:
    """A `python3` that is too old doesn't end the search; $PYTHON goes ahead of it."""
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    (tmp_path / "python3.12").symlink_to(sys.executable)

    assert shell(tmp_path, "find_python", PATH=str(tmp_path)).stdout == "python3.12\n"
    chosen = shell(tmp_path, "find_python", PATH=str(tmp_path), PYTHON=sys.executable)
    assert chosen.stdout == f"{sys.executable}\n"

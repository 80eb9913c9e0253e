"""Runs the suite against each mutant in `mutants.py`: `scripts/mutants [NAME ...]`.

Each mutant is one change of a copy of the package. It is killed when a test fails; a mutant that survives is a
behaviour nobody tests, and so is one whose text is no longer found. The unchanged copy must pass.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutants.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 300  # seconds for one run; a mutant that hangs is killed by it, and counts as killed


def main(names: list[str]) -> int:
    """Run the named mutants, or all; return the number of those that were not killed."""
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    if unknown := set(names) - {mutant.name for mutant in MUTANTS}:
        raise SystemExit(f"no such mutant: {', '.join(sorted(unknown))}")

    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("asgi_router", "tests"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)

        tests = sorted({test for mutant in chosen for test in mutant.tests})
        failed, output = run_tests(copy, tests)
        if failed:
            print(output)
            raise SystemExit("the tests fail without any mutant")

        for mutant in chosen:
            verdict = judge(copy, mutant)
            survivors += verdict != "killed"
            print(f"{verdict:9} {mutant.name:34} {mutant.fault}", flush=True)

    print(f"{len(chosen) - survivors} of {len(chosen)} mutants killed")
    return survivors


def judge(copy: Path, mutant: Mutant) -> str:
    """Return what became of a mutant: killed, survived, or misplaced (its text is not there exactly once)."""
    path = copy / "asgi_router" / mutant.file
    original = path.read_text()
    if original.count(mutant.old) != 1:
        return "misplaced"

    path.write_text(original.replace(mutant.old, mutant.new))
    try:
        failed, _ = run_tests(copy, mutant.tests)
    finally:
        path.write_text(original)

    return "killed" if failed else "survived"


def run_tests(copy: Path, tests: list[str]) -> tuple[bool, str]:
    """Run these tests in the copy; return whether one failed, and pytest's output."""
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        result = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return True, "timed out"

    if result.returncode not in (0, 1):  # neither passed nor failed: nothing was tested
        raise SystemExit(f"pytest could not run in {copy}:\n{result.stdout}{result.stderr}")
    return result.returncode == 1, result.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

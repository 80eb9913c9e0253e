"""Runs the suite against each mutant of this package: `scripts/mutants [NAME ...]`.

Each mutant is one change of a copy of the package. It is killed when a test fails; a mutant that survives is a
behaviour nobody tests, and so is one whose text is no longer found. The unchanged copy must pass.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tests.mutants import apart, fleet, learning, operations, requests

if TYPE_CHECKING:
    from tests.mutants.mutant import Mutant

MUTANTS = [*requests.MUTANTS, *operations.MUTANTS, *fleet.MUTANTS, *apart.MUTANTS, *learning.MUTANTS]

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 120  # seconds for one run; a mutant that hangs is ended by it, and counts as killed


def main(names: list[str]) -> int:
    """Run the named mutants, or all; return the number of those that were not killed."""
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    if unknown := set(names) - {mutant.name for mutant in MUTANTS}:
        raise SystemExit(f"no such mutant: {', '.join(sorted(unknown))}")

    killed = 0
    # Tests wait more than they compute, so two runs at once take little more time than one. Not more of them:
    # a test that fails because the machine is busy would count as a kill.
    with ThreadPoolExecutor(max_workers=2) as pool:
        control = pool.submit(judge, None, sorted({test for mutant in chosen for test in mutant.tests}))
        verdicts = [pool.submit(judge, mutant, mutant.tests) for mutant in chosen]
        if control.result() != "survived":
            pool.shutdown(cancel_futures=True)
            raise SystemExit("the tests fail without any mutant")

        for mutant, verdict in zip(chosen, verdicts, strict=True):
            killed += verdict.result() == "killed"
            print(f"{verdict.result():9} {mutant.name:26} {mutant.fault}", flush=True)

    print(f"{killed} of {len(chosen)} mutants killed")
    return len(chosen) - killed


def judge(mutant: Mutant | None, tests: list[str]) -> str:
    """Return what became of a mutant: killed, survived, or misplaced (its text is not there exactly once)."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("asgi_router", "tests"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)

        if mutant is not None:
            path = copy / "asgi_router" / mutant.file
            original = path.read_text()
            if original.count(mutant.old) != 1:
                return "misplaced"
            path.write_text(original.replace(mutant.old, mutant.new))

        return "killed" if a_test_fails(copy, tests) else "survived"


def a_test_fails(copy: Path, tests: list[str]) -> bool:
    """Run these tests in the copy; tell whether one failed, or hung."""
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        result = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return True

    if result.returncode not in (0, 1):  # neither passed nor failed: nothing was tested
        raise SystemExit(f"pytest could not run in {copy}:\n{result.stdout}{result.stderr}")
    return result.returncode == 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

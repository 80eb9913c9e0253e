"""Owns what a mutant is: a fault that a router of this kind has had in public, or could have."""

from __future__ import annotations

from dataclasses import dataclass, field

EXITS = ["tests/test_exit_paths.py", "tests/test_exit_by_client.py", "tests/test_native_cancel.py"]


@dataclass(frozen=True)
class Mutant:
    """One change of one file, and the tests that must notice it."""

    name: str
    fault: str
    file: str
    old: str
    new: str
    tests: list[str] = field(default_factory=lambda: EXITS)

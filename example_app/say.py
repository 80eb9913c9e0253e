"""Owns how the demonstration speaks: several processes share one terminal or pipe."""

from __future__ import annotations


def say(text: str) -> None:
    """Print a line, at once and in one piece: where Python doesn't buffer, `print` writes a line's end by itself."""
    print(f"{text}\n", end="", flush=True)

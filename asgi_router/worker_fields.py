"""Owns how the fields of a worker are read from JSON, wherever they come from: settings or a registration.

Each reader returns the value as `Worker` keeps it, or raises `ValueError` with what the field must be. The message
never repeats the value.
"""

from __future__ import annotations

import re

from asgi_router.worker import MAX_SLOTS, Role


def read_role(value: object) -> Role:
    """Read a role by its name in any case, or by its number in FastDeploy."""
    if isinstance(value, str) and value.strip().lower() in tuple(Role):
        return Role(value.strip().lower())
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(Role):
        return tuple(Role)[value]
    raise ValueError("must be mixed, prefill or decode, or their numbers 0, 1 or 2")


def read_number(value: object) -> int | None:
    """Read a port or a size. FastDeploy engines register a port they don't have as 0, "0" or ""."""
    if value is None:
        return None
    if isinstance(value, str) and re.fullmatch("[0-9]{0,5}", value.strip()):
        value = int(value.strip() or "0")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 65535:
        raise ValueError("must be a whole number from 1 to 65535, or 0 where there is none")
    return value or None


def read_slots(value: object) -> int | None:
    """Read how many slots a worker's cache has; null, 0 or "" where it is paged."""
    wrong = ValueError(f"must be a whole number from 1 to {MAX_SLOTS}, or 0 where there are none")
    try:
        slots = read_number(value)
    except ValueError:
        raise wrong from None
    if slots is not None and slots > MAX_SLOTS:
        raise wrong
    return slots


def read_names(value: object) -> tuple[str, ...]:
    """Read a list of names or whole numbers, as text. FastDeploy writes a list that it doesn't have as null."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise ValueError("must be a list")
    if not all(isinstance(item, str | int) and not isinstance(item, bool) and item != "" for item in value):
        raise ValueError("must be a list of names or whole numbers")
    return tuple(str(item) for item in value)

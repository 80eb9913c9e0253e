"""Owns `REGISTER_FILE`: workers that are described in a file, in the words in which they would register."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from asgi_router.fleet.registration import RegistrationError, read_worker

if TYPE_CHECKING:
    from asgi_router.worker import Worker


def read_register_file(name: str, *, mode: str) -> tuple[Worker, ...]:
    """Return the workers of a file like FastDeploy's `register.yaml`: `instances`, a list of what engines register.

    Args:
        name: of the file. JSON if it ends in `.json`; else YAML, which needs the extra `[yaml]`.
        mode: the router's, which decides on roles.

    Raises:
        RegistrationError: the file can't be read, or an instance is wrong. The message doesn't quote the file.
    """
    try:
        text = Path(name).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as exc:
        raise RegistrationError(f"can't be read: {getattr(exc, 'strerror', None) or 'not UTF-8 text'}") from None

    document = _parse_json(text) if name.lower().endswith(".json") else _parse_yaml(text)
    instances = document.get("instances") if isinstance(document, dict) else None
    if not isinstance(instances, list):
        raise RegistrationError("must have a list of `instances`")

    workers: list[Worker] = []
    for number, instance in enumerate(instances, start=1):
        try:
            worker = read_worker(instance, mode=mode)
            if any(worker.url == other.url for other in workers):
                raise RegistrationError(f"{worker.url!r} is there twice")
            workers.append(worker)
        except RegistrationError as exc:
            raise RegistrationError(f"instance {number}: {exc}") from None
    return tuple(workers)


def _parse_json(text: str) -> object:
    try:
        document: object = json.loads(text)
    except (ValueError, RecursionError):
        raise RegistrationError("is not valid JSON") from None
    return document


def _parse_yaml(text: str) -> object:
    try:
        import yaml
    except ImportError:
        raise RegistrationError(
            "is YAML, which needs the extra: pip install 'asgi-router[yaml]'; or use JSON"
        ) from None

    try:
        document: object = yaml.safe_load(text)
    except Exception:  # of some nonsense PyYAML makes a KeyError, IndexError or AttributeError
        raise RegistrationError("is not valid YAML") from None
    return document

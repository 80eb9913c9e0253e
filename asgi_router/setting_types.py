"""Owns how single settings are read and checked: the types of the fields of `RouterSettings`."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr
from pydantic_settings import NoDecode

from asgi_router.addresses import read_rule
from asgi_router.worker import Worker, normalise_url
from asgi_router.worker_fields import read_names, read_number, read_role, read_slots

POLICIES = (
    "cache_aware",
    "fd_metrics_score",
    "fd_remote_metrics_score",
    "power_of_two",
    "prefill_cost",
    "process_tokens",
    "random",
    "remote_cache_aware",
    "request_num",
    "round_robin",
)
MODES = ("mixed", "disaggregated", "splitwise")
DIALECTS = ("fastdeploy", "vllm", "sglang")


def shown(value: object) -> str:
    """Return the value for a message. Nothing where it is long, not a scalar, or may hold a password."""
    if isinstance(value, int) and value.bit_length() > 64:
        return ""
    if value is not None and not isinstance(value, str | int | float):
        return ""

    text = repr(value)
    return "" if len(text) > 40 or "@" in text or "://" in text else f" {text}"


def nearest(name: str, known: Iterable[str], spelt: Callable[[str], str] = str) -> str:
    matches = difflib.get_close_matches(name.strip().lower(), known, n=1, cutoff=0.5)
    return f"; did you mean {spelt(matches[0])}?" if matches else ""


def _one_of(kind: str, known: tuple[str, ...]) -> Callable[[str], str]:
    """Make a check that a name is known."""

    def check(value: str) -> str:
        value = value.strip()
        if value not in known:
            hint = nearest(value, known)
            raise ValueError(f"unknown {kind}{shown(value)}; known: {', '.join(known)}{hint}")
        return value

    return check


def _mode(value: str) -> str:
    value = _one_of("mode", MODES)(value)
    return "disaggregated" if value == "splitwise" else value  # FastDeploy's word for it


def _items(value: object) -> object:
    """Split a comma list or decode a JSON list. Empty items are left out, as an empty variable is."""
    if isinstance(value, str):
        text = value.strip()
        # In JSON no colon comes ahead of a quote, so "[::1]:8000" is a worker and not a JSON list.
        if not text.startswith(("[", "{")) or re.match(r'\[[^"\]]*:', text):
            return [item.strip() for item in text.split(",") if item.strip()]
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise ValueError(f"not valid JSON: {exc}") from exc

    if not isinstance(value, list | tuple):
        raise ValueError("must be a list (in the environment: a comma list or a JSON list)")
    return value


def _path(value: str) -> str:
    if not re.fullmatch(r"/[^\s\x00-\x1f\x7f?#]*(?<!/)", value):
        raise ValueError(f"a path begins with / and has no query, fragment, space or / at its end, not{shown(value)}")
    return value


def _optional_path(value: str | None) -> str | None:
    return value if value is None else _path(value)


def _worker_url(value: str | None) -> str | None:
    return value if value is None else normalise_url(_url(value))


def _prefix(value: str | None) -> str | None:
    return value if value in (None, "/") else _path(value)


def _header_name(value: str | None) -> str | None:
    if value is not None and not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", value.strip()):
        raise ValueError("must be the name of a header")
    return value and value.strip().lower()


def _session_header(value: str | None) -> str | None:
    name = _header_name(value)
    if name in ("authorization", "cookie", "proxy-authorization"):
        raise ValueError("must be no header with a secret in it: sessions are shown in logs")
    return name


def _token(value: object) -> object:
    text = _none(value.get_secret_value() if isinstance(value, SecretStr) else value)
    if text is None:
        return None
    if not isinstance(text, str) or not re.fullmatch("[!-~]+", text.strip()):
        raise ValueError("must be text of printable ASCII characters without spaces")
    return text.strip()


def _rule(value: str) -> str:
    read_rule(value)
    return value.strip()


def _url(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a string")
    # Ahead of parsing: a stray "/" or "?" in a password would make the rest of it a path or query, and shown.
    if re.search("[@?#]", value):
        raise ValueError("must not contain a user name, password, query or fragment")
    return value


_WORKER_KEYS: dict[str, Callable[[object], object]] = {
    "url": _url,
    "role": read_role,
    "models": read_names,
    "connector_port": read_number,
    "engine_worker_queue_port": read_number,
    "metrics_port": read_number,
    "transfer_protocol": read_names,
    "rdma_ports": read_names,
    "device_ids": read_names,
    "tp_size": read_number,
    "slots": read_slots,
}


def _worker(item: object) -> Worker:
    if isinstance(item, Worker):
        return item
    if isinstance(item, str):
        item = {"url": item}
    if not isinstance(item, Mapping) or "url" not in item:
        raise ValueError("a worker is a URL or an object with a url")

    fields: dict[str, Any] = {}
    problems = []
    for key, value in item.items():
        if key not in _WORKER_KEYS:
            problems.append(f"unknown key{shown(key)}{nearest(str(key), _WORKER_KEYS)}")
            continue
        try:
            fields[key] = _WORKER_KEYS[key](value)
        except ValueError as exc:
            problems.append(f"{key} {exc}")

    if problems:
        raise ValueError("\n".join(problems))
    return Worker(**fields)


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError(f"must be a number, not {value}")
    return value


def _none(value: object) -> object:
    return None if isinstance(value, str) and value.strip().lower() in ("none", "null") else value


_Finite = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(_no_bool)]
_Int = Annotated[int, BeforeValidator(_no_bool)]
Positive = Annotated[_Finite, Field(gt=0)]
NotNegative = Annotated[_Finite, Field(ge=0)]
Share = Annotated[_Finite, Field(ge=0, le=1)]
OptionalSeconds = Annotated[Positive | None, BeforeValidator(_none)]
PositiveInt = Annotated[_Int, Field(gt=0)]
OptionalCount = Annotated[PositiveInt | None, BeforeValidator(_none)]
Count = Annotated[_Int, Field(ge=0)]
BlockBytes = Annotated[_Int, Field(ge=64, le=65536)]

PolicyName = Annotated[str, AfterValidator(_one_of("policy", POLICIES))]
ModeName = Annotated[str, AfterValidator(_mode)]
DialectName = Annotated[str, AfterValidator(_one_of("dialect", DIALECTS))]
AdminPrefix = Annotated[str | None, AfterValidator(_prefix), BeforeValidator(_none)]
FileName = Annotated[Annotated[str, Field(min_length=1)] | None, BeforeValidator(_none)]
SessionHeader = Annotated[str | None, AfterValidator(_session_header), BeforeValidator(_none)]
HeaderName = Annotated[str | None, AfterValidator(_header_name), BeforeValidator(_none)]
OptionalPath = Annotated[str | None, AfterValidator(_optional_path), BeforeValidator(_none)]
WorkerUrl = Annotated[str | None, AfterValidator(_worker_url), BeforeValidator(_none)]
Secret = Annotated[SecretStr | None, BeforeValidator(_token)]
WorkerItem = Annotated[Worker, BeforeValidator(_worker)]
UrlPath = Annotated[str, AfterValidator(_path)]
_Rule = Annotated[str, AfterValidator(_rule)]
Workers = Annotated[tuple[WorkerItem, ...], NoDecode, BeforeValidator(_items)]
Paths = Annotated[tuple[UrlPath, ...], NoDecode, BeforeValidator(_items), Field(min_length=1)]

Rules = Annotated[tuple[_Rule, ...], NoDecode, BeforeValidator(_items)]

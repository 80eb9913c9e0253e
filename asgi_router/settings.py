"""Owns the settings: each environment variable, its default and its checks. Only this file knows pydantic."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, cast

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from asgi_router.addresses import read_rule
from asgi_router.worker import Role, Worker
from asgi_router.worker_fields import read_names, read_number, read_role

if TYPE_CHECKING:
    from pydantic import ValidationInfo

PREFIX = "ASGI_ROUTER_"
POLICIES = (
    "cache_aware",
    "fd_metrics_score",
    "power_of_two",
    "prefill_cost",
    "process_tokens",
    "random",
    "request_num",
    "round_robin",
)
_POLICIES_LATER = ("remote_cache_aware", "fd_remote_metrics_score")
MODES = ("mixed",)
_MODES_LATER = ("disaggregated", "splitwise")


class SettingsError(ValueError):
    """The settings can't be used. One line per problem, each beginning with an environment variable."""


def _shown(value: object) -> str:
    """Return the value for a message. Nothing where it is long, not a scalar, or may hold a password."""
    if isinstance(value, int) and value.bit_length() > 64:
        return ""
    if value is not None and not isinstance(value, str | int | float):
        return ""

    text = repr(value)
    return "" if len(text) > 40 or "@" in text or "://" in text else f" {text}"


def _nearest(name: str, known: Iterable[str], spelt: Callable[[str], str] = str) -> str:
    matches = difflib.get_close_matches(name.strip().lower(), known, n=1, cutoff=0.5)
    return f"; did you mean {spelt(matches[0])}?" if matches else ""


def _variable(name: str) -> str:
    return f"{PREFIX}{ascii(name.upper())[1:-1]}"


def _one_of(kind: str, known: tuple[str, ...], later: tuple[str, ...], missing: str) -> Callable[[str], str]:
    """Make a check that a name is known. Names in `later` are refused with the news of what is missing."""

    def check(value: str) -> str:
        value = value.strip()
        if value in later:
            raise ValueError(f"{value}: {missing} is not in this version; known: {', '.join(known)}")
        if value not in known:
            hint = _nearest(value, known)
            raise ValueError(f"unknown {kind}{_shown(value)}; known: {', '.join(known)}{hint}")
        return value

    return check


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
        raise ValueError(f"a path begins with / and has no query, fragment, space or / at its end, not{_shown(value)}")
    return value


def _prefix(value: str | None) -> str | None:
    return value if value in (None, "/") else _path(value)


def _header_name(value: str | None) -> str | None:
    if value is not None and not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", value.strip()):
        raise ValueError("must be the name of a header")
    return value and value.strip().lower()


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
            problems.append(f"unknown key{_shown(key)}{_nearest(str(key), _WORKER_KEYS)}")
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

PolicyName = Annotated[str, AfterValidator(_one_of("policy", POLICIES, _POLICIES_LATER, "this policy"))]
ModeName = Annotated[str, AfterValidator(_one_of("mode", MODES, _MODES_LATER, "disaggregated mode"))]
AdminPrefix = Annotated[str | None, AfterValidator(_prefix), BeforeValidator(_none)]
FileName = Annotated[Annotated[str, Field(min_length=1)] | None, BeforeValidator(_none)]
HeaderName = Annotated[str | None, AfterValidator(_header_name), BeforeValidator(_none)]
AdminToken = Annotated[SecretStr | None, BeforeValidator(_token)]
_Worker = Annotated[Worker, BeforeValidator(_worker)]
_Path = Annotated[str, AfterValidator(_path)]
_Rule = Annotated[str, AfterValidator(_rule)]
Workers = Annotated[tuple[_Worker, ...], NoDecode, BeforeValidator(_items)]
Paths = Annotated[tuple[_Path, ...], NoDecode, BeforeValidator(_items), Field(min_length=1)]

Rules = Annotated[tuple[_Rule, ...], NoDecode, BeforeValidator(_items)]


def _unknown(values: Iterable[str], known: Iterable[str]) -> Iterator[str]:
    """Report keyword arguments and non-empty environment variables that no field has."""
    for name in values:
        if name not in known:
            yield f"{_variable(name)}: unknown keyword argument{_nearest(name, known)}"

    for variable, text in os.environ.items():
        name = variable.lower().removeprefix(PREFIX.lower())
        if text and name != variable.lower() and name not in known:
            yield f"{ascii(variable)[1:-1]}: unknown variable{_nearest(name, known, _variable)}"


def _problems(error: ValidationError) -> Iterator[str]:
    for detail in error.errors(include_url=False):
        field, *position = detail["loc"]
        where = "".join(f"item {index + 1}: " for index in position if isinstance(index, int))
        if detail["type"] == "value_error":
            text = str(detail["ctx"]["error"])
        else:
            text = detail["msg"].removeprefix("Input ").replace("should", "must", 1).partition(",")[0]
            text += f", not{shown}" if (shown := _shown(detail["input"])) else ""
        for line in text.splitlines():
            yield f"{_variable(str(field))}: {where}{line}"


class RouterSettings(BaseSettings):
    """All settings of a router, read and checked once, when this object is made.

    A keyword argument wins over its environment variable (`ASGI_ROUTER_` and the field's name in capitals),
    and that over the default. An empty variable counts as unset.

    Raises:
        SettingsError: a value, a keyword argument or an `ASGI_ROUTER_*` variable is wrong or unknown.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, hide_input_in_errors=True
    )

    # Ahead of `workers`, whose check looks at it.
    mode: ModeName = Field("mixed", description="How workers share the work: mixed.")
    workers: Workers = Field((), description="Comma list of URLs, or JSON list of URLs and objects.")
    policy: PolicyName = Field("prefill_cost", description="How a worker is chosen, by name.")
    paths: Paths = Field(
        ("/v1/chat/completions", "/v1/completions"), description="Comma or JSON list of the paths to route."
    )
    connect_timeout: Positive = Field(5.0, description="Seconds to connect to a worker.")
    first_byte_timeout: OptionalSeconds = Field(None, description="Seconds to the first byte, or none.")
    idle_timeout: OptionalSeconds = Field(300.0, description="Seconds between two chunks, or none.")
    send_timeout: OptionalSeconds = Field(None, description="Seconds for a client to take a chunk, or none.")
    # Under the workers' own (5 s in uvicorn and vLLM), or we would write to connections they are closing.
    keepalive_expiry: NotNegative = Field(3.0, description="Seconds to keep an unused connection.")
    max_body_bytes: PositiveInt = Field(64 * 1024 * 1024, description="Bytes of the largest request body.")
    decision_headers: bool = Field(False, description="Whether answers name the worker that was chosen.")
    drain_timeout: NotNegative = Field(30.0, description="Seconds to wait for running requests at shutdown.")
    retry_attempts: Count = Field(2, description="Further workers tried when one can't take a request.")
    retry_safe_header: HeaderName = Field(
        "idempotency-key", description="Request header that marks a request as safe to repeat, or none."
    )
    max_concurrent_per_worker: OptionalCount = Field(None, description="Requests in flight per worker, or none.")
    queue_size: Count = Field(100, description="Requests that may wait for a place.")
    queue_timeout: Positive = Field(30.0, description="Seconds that a request may wait for a place.")
    health_path: _Path = Field("/health", description="What a health probe asks a worker for.")
    health_interval: NotNegative = Field(5.0, description="Seconds between two rounds of probes; 0: none.")
    health_timeout: Positive = Field(5.0, description="Seconds that a probe may take.")
    health_failures: PositiveInt = Field(3, description="Failed probes in a row that make a worker unhealthy.")
    health_successes: PositiveInt = Field(2, description="Good probes in a row that make it healthy again.")
    breaker_failures: Count = Field(5, description="Failed requests in a row that open the breaker; 0: never.")
    breaker_cooldown: Positive = Field(10.0, description="Seconds after which an open breaker lets one request in.")
    admin_prefix: AdminPrefix = Field(None, description="Path under which the admin API is served, / for the root.")
    admin_token: AdminToken = Field(None, description="Bearer token that opens the admin API.")
    # Ahead of `admin_open`, whose check looks at it.
    register_allow: Rules = Field((), description="Networks and host patterns of workers that may register.")
    register_file: FileName = Field(None, description="YAML or JSON file of further workers, as they would register.")
    admin_open: bool = Field(False, description="Whether the admin API needs no token.")
    prefix_block_bytes: BlockBytes = Field(512, description="Bytes of prompt per block of the prefix index.")
    prefix_capacity_tokens: Count = Field(250_000, description="Tokens remembered per worker; 0: nothing.")
    prefix_ttl: Positive = Field(1800.0, description="Seconds that an unused prefix is remembered.")
    prefill_cost_miss_weight: Positive = Field(2.0, description="Weight of uncached tokens (prefill_cost).")
    prefill_cost_batch_offset: Positive = Field(4.0, description="Added to running requests (prefill_cost).")
    cache_aware_hit_weight: NotNegative = Field(1.0, description="Weight of hits, 0: none (cache_aware).")
    cache_aware_load_weight: NotNegative = Field(1.0, description="Weight of load, 0: none (cache_aware).")
    # FastDeploy's own limits, 1 and 0.2, switch affinity off at a gap of two requests.
    cache_aware_balance_abs: Count = Field(16, description="Gap in requests that keeps affinity (cache_aware).")
    cache_aware_balance_rel: Share = Field(
        0.5, description="Gap that keeps affinity, as a share of the highest load (cache_aware)."
    )
    waiting_weight: NotNegative = Field(1.0, description="Weight of requests without a first byte (fd_metrics_score).")

    def __init__(self, /, **values: object) -> None:
        fields = type(self).model_fields
        problems = [*_unknown(values, fields)]
        try:
            super().__init__(**cast("dict[str, Any]", {k: v for k, v in values.items() if k in fields}))
        except ValidationError as exc:
            problems += _problems(exc)

        # Outside the handler: pydantic's error holds every value, and mustn't hang on ours as its context.
        if problems:
            raise SettingsError("\n".join(problems))

    @field_validator("workers")
    @classmethod
    def _check_fleet(cls, workers: tuple[Worker, ...], info: ValidationInfo) -> tuple[Worker, ...]:
        seen: set[str] = set()
        problems = []
        for number, worker in enumerate(workers, start=1):
            if worker.url in seen:
                problems.append(f"item {number}: {worker.url!r} is there twice")
            if info.data.get("mode") == "mixed" and worker.role is not Role.MIXED:
                problems.append(f"item {number}: {worker.url!r} is for {worker.role}, but the mode is mixed")
            seen.add(worker.url)

        if problems:
            raise ValueError("\n".join(problems))
        return workers

    @field_validator("admin_open")
    @classmethod
    def _check_open(cls, admin_open: bool, info: ValidationInfo) -> bool:
        # Or anyone could aim the router at an inner service.
        if admin_open and info.data.get("register_allow") == ():
            raise ValueError(f"true needs {_variable('register_allow')}, which says what may be registered")
        return admin_open

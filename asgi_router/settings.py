"""Owns the settings: each environment variable and its default. Only this file and `setting_types.py` know pydantic."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from asgi_router.setting_types import (
    AdminPrefix,
    BlockBytes,
    Count,
    DialectName,
    FileName,
    HeaderName,
    ModeName,
    NotNegative,
    OptionalCount,
    OptionalPath,
    OptionalSeconds,
    Paths,
    PolicyName,
    Positive,
    PositiveInt,
    Rules,
    Secret,
    SessionHeader,
    Share,
    UrlPath,
    Workers,
    WorkerUrl,
    nearest,
    shown,
)
from asgi_router.worker import Role, Worker

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pydantic import ValidationInfo

PREFIX = "ASGI_ROUTER_"


class SettingsError(ValueError):
    """The settings can't be used. One line per problem, each beginning with an environment variable."""


def _variable(name: str) -> str:
    return f"{PREFIX}{ascii(name.upper())[1:-1]}"


def _unknown(values: Iterable[str], known: Iterable[str]) -> Iterator[str]:
    """Report keyword arguments and non-empty environment variables that no field has."""
    for name in values:
        if name not in known:
            yield f"{_variable(name)}: unknown keyword argument{nearest(name, known)}"

    for variable, text in os.environ.items():
        name = variable.lower().removeprefix(PREFIX.lower())
        if text and name != variable.lower() and name not in known:
            yield f"{ascii(variable)[1:-1]}: unknown variable{nearest(name, known, _variable)}"


def _problems(error: ValidationError) -> Iterator[str]:
    for detail in error.errors(include_url=False):
        field, *position = detail["loc"]
        where = "".join(f"item {index + 1}: " for index in position if isinstance(index, int))
        if detail["type"] == "value_error":
            text = str(detail["ctx"]["error"])
        else:
            text = detail["msg"].removeprefix("Input ").replace("should", "must", 1).partition(",")[0]
            text += f", not{value}" if (value := shown(detail["input"])) else ""
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
    mode: ModeName = Field("mixed", description="How workers share the work: mixed or disaggregated.")
    workers: Workers = Field((), description="Comma list of URLs, or JSON list of URLs and objects.")
    policy: PolicyName = Field("prefill_cost", description="How a worker is chosen, by name.")
    prefill_policy: PolicyName = Field("prefill_cost", description="How a prefill worker is chosen (disaggregated).")
    decode_policy: PolicyName = Field("request_num", description="How a decode worker is chosen (disaggregated).")
    pd_dialect: DialectName = Field("fastdeploy", description="How prefill and decode workers are told of each other.")
    pd_skip_prefill_below: Count = Field(0, description="Uncached tokens below which decode prefills; 0: never.")
    pd_preempt_retries: Count = Field(0, description="New pairs for an answer that its workers gave up; 0: none.")
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
    decision_headers: bool = Field(False, description="Whether answers name the worker that was chosen, and why.")
    drain_timeout: NotNegative = Field(30.0, description="Seconds to wait for running requests at shutdown.")
    retry_attempts: Count = Field(2, description="Further workers tried when one can't take a request.")
    retry_safe_header: HeaderName = Field(
        "idempotency-key", description="Request header that marks a request as safe to repeat, or none."
    )
    max_concurrent_per_worker: OptionalCount = Field(None, description="Requests in flight per worker, or none.")
    queue_size: Count = Field(100, description="Requests that may wait for a place.")
    queue_timeout: Positive = Field(30.0, description="Seconds that a request may wait for a place.")
    discover_models: bool = Field(False, description="Whether workers are asked which models they serve.")
    serve_models: bool = Field(False, description="Whether GET /v1/models is answered with all workers' models.")
    models_interval: Positive = Field(30.0, description="Seconds between two such questions.")
    session_header: SessionHeader = Field(None, description="Request header that names a session, beside session_id.")
    session_ttl: NotNegative = Field(1800.0, description="Seconds that a session stays with its worker; 0: not at all.")
    abort_path: OptionalPath = Field("/v1/abort_requests", description="Path at which requests are aborted, or none.")
    abort_on_disconnect: bool = Field(False, description="Whether a worker is told when a client has left.")
    metrics_path: OptionalPath = Field(None, description="Path at which metrics are served, or none.")
    fastdeploy_metrics: bool = Field(False, description="Whether metrics have the names of FastDeploy's router, too.")
    load_path: UrlPath = Field("/metrics", description="What a worker is asked for its load (remote policies).")
    load_interval: Positive = Field(1.0, description="Seconds between two such questions.")
    load_max_age: Positive = Field(5.0, description="Seconds after which an answer is not used any more.")
    worker_api_key: Secret = Field(None, description="Bearer token of the router's own calls to workers.")
    local_url: WorkerUrl = Field(None, description="URL by which peers know this process, if it is a worker itself.")
    peer_token: Secret = Field(None, description="Secret that the routers of one fleet share.")
    health_path: UrlPath = Field("/health", description="What a health probe asks a worker for.")
    health_interval: NotNegative = Field(5.0, description="Seconds between two rounds of probes; 0: none.")
    health_timeout: Positive = Field(5.0, description="Seconds that a probe may take.")
    health_failures: PositiveInt = Field(3, description="Failed probes in a row that make a worker unhealthy.")
    health_successes: PositiveInt = Field(2, description="Good probes in a row that make it healthy again.")
    breaker_failures: Count = Field(5, description="Failed requests in a row that open the breaker; 0: never.")
    breaker_cooldown: Positive = Field(10.0, description="Seconds after which an open breaker lets one request in.")
    admin_prefix: AdminPrefix = Field(None, description="Path under which the admin API is served, / for the root.")
    admin_token: Secret = Field(None, description="Bearer token that opens the admin API.")
    # Ahead of `admin_open`, whose check looks at it.
    register_allow: Rules = Field((), description="Networks and host patterns of workers that may register.")
    register_file: FileName = Field(None, description="YAML or JSON file of further workers, as they would register.")
    admin_open: bool = Field(False, description="Whether the admin API needs no token.")
    prefix_block_bytes: BlockBytes = Field(
        512, description="Bytes of the first prefix blocks of a prompt; later ones are longer."
    )
    prefix_capacity_tokens: Count = Field(1_000_000, description="Tokens remembered per worker; 0: nothing.")
    prefix_adapt: bool = Field(True, description="Whether answers' `usage` corrects what is believed of the caches.")
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
        else:
            problems += self._contradictions()

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
            if info.data.get("mode") == "disaggregated" and worker.role is Role.MIXED:
                problems.append(f"item {number}: {worker.url!r} needs the role prefill or decode in this mode")
            if info.data.get("mode") == "disaggregated" and worker.is_local:
                problems.append(f"item {number}: 'local' can't be a worker in this mode")
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

    def _contradictions(self) -> Iterator[str]:
        """Report what is right by itself, but would silently disable something else."""
        prefix = self.admin_prefix
        for name, path in (("abort_path", self.abort_path), ("metrics_path", self.metrics_path)):
            if path in self.paths:
                yield f"{_variable(name)}: {path} is in {_variable('paths')}, too"
        if prefix and prefix != "/" and any(f"{path}/".startswith(f"{prefix}/") for path in self.paths):
            yield f"{_variable('admin_prefix')}: {_variable('paths')} are below it"
        if self.local_url is not None and any(worker.url == self.local_url for worker in self.workers):
            yield f"{_variable('local_url')}: is also the URL of another worker"

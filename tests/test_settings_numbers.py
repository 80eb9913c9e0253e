"""Owns the proof that each number among the settings has its range, and says what is wrong with any other value."""

from __future__ import annotations

import pytest

from asgi_router.settings import RouterSettings
from tests.test_settings import DEFAULTS, refusal

TEXTS = (
    "retry_safe_header",
    "session_header",
    "abort_path",
    "metrics_path",
    "worker_api_key",
    "local_url",
    "peer_token",
    "admin_prefix",
    "admin_token",
    "register_allow",
    "register_file",
)
POSITIVE = (
    "connect_timeout",
    "queue_timeout",
    "models_interval",
    "load_interval",
    "load_max_age",
    "health_timeout",
    "breaker_cooldown",
    "prefix_ttl",
    "prefill_cost_miss_weight",
    "prefill_cost_batch_offset",
)
OPTIONAL = ("first_byte_timeout", "idle_timeout", "send_timeout")
OPTIONAL_COUNTS = ("max_concurrent_per_worker",)
NOT_NEGATIVE = (
    "keepalive_expiry",
    "drain_timeout",
    "session_ttl",
    "health_interval",
    "cache_aware_hit_weight",
    "cache_aware_load_weight",
    "waiting_weight",
)
FLOATS = (*POSITIVE, *OPTIONAL, *NOT_NEGATIVE, "cache_aware_balance_rel")
COUNTS = (
    "pd_skip_prefill_below",
    "pd_preempt_retries",
    "retry_attempts",
    "queue_size",
    "breaker_failures",
    "prefix_capacity_tokens",
    "cache_aware_balance_abs",
)
INTEGERS = (*COUNTS, "max_body_bytes", "health_failures", "health_successes", "prefix_block_bytes")


@pytest.mark.parametrize("field", [*FLOATS, *INTEGERS])
@pytest.mark.parametrize(
    "value", [-1, "-0.001", "nan", "inf", "-inf", float("nan"), float("inf"), True, False, "five", "1s", " ", [1]]
)
def test_what_is_no_number_is_refused(field: str, value: object) -> None:
    """Negative, endless and undefined numbers, booleans and other text are refused by every numeric field."""
    message = refusal(field, value)
    assert isinstance(value, list) or str(value).strip() in message


@pytest.mark.parametrize("field", [*POSITIVE, *OPTIONAL, "max_body_bytes"])
@pytest.mark.parametrize("zero", [0, "0", 0.0])
def test_zero_is_refused_where_it_makes_no_sense(field: str, zero: object) -> None:
    """Zero isn't a way to write "none"."""
    assert "greater than 0" in refusal(field, zero)


@pytest.mark.parametrize("field", [*NOT_NEGATIVE, *COUNTS])
def test_zero_is_accepted_where_it_disables(field: str) -> None:
    """Zero switches a weight, a wait or a memory off (F-53)."""
    assert getattr(RouterSettings(**{field: 0}), field) == 0


@pytest.mark.parametrize("field", [*OPTIONAL, *OPTIONAL_COUNTS])
@pytest.mark.parametrize("value", [None, "none", "NULL"])
def test_optional_numbers_can_be_none(field: str, value: object) -> None:
    """A limit that may be missing takes None, and its name as text."""
    assert getattr(RouterSettings(**{field: value}), field) is None


@pytest.mark.parametrize(
    "field",
    sorted(
        set(DEFAULTS)
        - {*OPTIONAL, *OPTIONAL_COUNTS, *TEXTS}
        - {"workers", "paths", "mode", "policy", "prefill_policy", "decode_policy", "pd_dialect"}
    ),
)
@pytest.mark.parametrize("value", [None, "none"])
def test_other_numbers_cannot_be_none(field: str, value: object) -> None:
    """No other number or switch can be missing; connecting in particular always has a limit."""
    assert f"not {value!r}" in refusal(field, value) or "Unable to parse" in refusal(field, value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prefix_block_bytes", 63),
        ("prefix_block_bytes", 65537),
        ("cache_aware_balance_rel", 1.01),
        ("retry_attempts", 1.5),
        ("decision_headers", "maybe"),
        ("decision_headers", 2),
    ],
)
def test_value_outside_its_range_is_refused_and_shown(field: str, value: object) -> None:
    """A simple value that is out of range is repeated in the message."""
    assert f"not {value!r}" in refusal(field, value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("connect_timeout", 10**400), ("retry_attempts", -(10**5000)), ("retry_attempts", "1" * 5000)],
    ids=["float", "int", "text"],
)
def test_numbers_beyond_measure_are_refused(field: str, value: object) -> None:
    """A number too big to convert or to print is refused like any other, and isn't repeated."""
    assert len(refusal(field, value)) < 120

"""Owns the proof that each setting is read as documented and refuses what is outside its range."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from pydantic import SecretStr, ValidationError

from asgi_router import settings as settings_module
from asgi_router.setting_types import POLICIES
from asgi_router.settings import RouterSettings, SettingsError
from asgi_router.worker import Worker

DEFAULTS: dict[str, object] = {
    "mode": "mixed",
    "workers": (),
    "policy": "prefill_cost",
    "prefill_policy": "prefill_cost",
    "decode_policy": "request_num",
    "pd_dialect": "fastdeploy",
    "pd_skip_prefill_below": 0,
    "pd_preempt_retries": 0,
    "paths": ("/v1/chat/completions", "/v1/completions"),
    "connect_timeout": 5.0,
    "first_byte_timeout": None,
    "idle_timeout": 300.0,
    "send_timeout": None,
    "keepalive_expiry": 3.0,
    "max_body_bytes": 64 * 1024 * 1024,
    "decision_headers": False,
    "drain_timeout": 30.0,
    "retry_attempts": 2,
    "retry_safe_header": "idempotency-key",
    "max_concurrent_per_worker": None,
    "queue_size": 100,
    "queue_timeout": 30.0,
    "discover_models": False,
    "serve_models": False,
    "models_interval": 30.0,
    "session_header": None,
    "session_ttl": 1800.0,
    "abort_path": "/v1/abort_requests",
    "abort_on_disconnect": False,
    "metrics_path": None,
    "fastdeploy_metrics": False,
    "load_path": "/metrics",
    "load_interval": 1.0,
    "load_max_age": 5.0,
    "worker_api_key": None,
    "local_url": None,
    "peer_token": None,
    "health_path": "/health",
    "health_interval": 5.0,
    "health_timeout": 5.0,
    "health_failures": 3,
    "health_successes": 2,
    "breaker_failures": 5,
    "breaker_cooldown": 10.0,
    "admin_prefix": None,
    "admin_token": None,
    "register_allow": (),
    "register_file": None,
    "admin_open": False,
    "prefix_block_bytes": 512,
    "prefix_capacity_tokens": 1_000_000,
    "prefix_adapt": True,
    "prefix_ttl": 1800.0,
    "prefill_cost_miss_weight": 2.0,
    "prefill_cost_batch_offset": 4.0,
    "cache_aware_hit_weight": 1.0,
    "cache_aware_load_weight": 1.0,
    "cache_aware_balance_abs": 16,
    "cache_aware_balance_rel": 0.5,
    "waiting_weight": 1.0,
}


def variable(field: str) -> str:
    return f"ASGI_ROUTER_{field.upper()}"


def from_environment(**texts: str) -> RouterSettings:
    with mock.patch.dict(os.environ, {variable(field): text for field, text in texts.items()}):
        return RouterSettings()


def refusal(field: str, value: object) -> str:
    """Return the message of the refusal, after checking that all of it is about this one field."""
    with pytest.raises(SettingsError) as caught:
        RouterSettings(**{field: value})

    message = str(caught.value)
    assert message.startswith(f"{variable(field)}: ")
    assert all(line.startswith(f"{variable(field)}: ") for line in message.split("\n"))
    return message


# --- Where values come from


def test_every_field_has_its_documented_default() -> None:
    """With nothing set, each field has the default that the documentation gives."""
    assert RouterSettings().model_dump() == DEFAULTS


def test_every_field_is_described() -> None:
    """Each field says in one line what it is for."""
    for name, field in RouterSettings.model_fields.items():
        assert field.description, name
        assert "\n" not in field.description, name


@pytest.mark.parametrize(
    ("field", "text", "expected"),
    [
        ("mode", "mixed", "mixed"),
        ("mode", " mixed ", "mixed"),
        ("workers", "http://a:1", (Worker(url="http://a:1"),)),
        ("policy", "round_robin\n", "round_robin"),
        ("paths", "/a, /b/c", ("/a", "/b/c")),
        ("paths", '["/a", "/b,c"]', ("/a", "/b,c")),
        ("connect_timeout", "0.25", 0.25),
        ("connect_timeout", " 7 ", 7.0),
        ("first_byte_timeout", "60", 60.0),
        ("idle_timeout", "none", None),
        ("idle_timeout", " NULL ", None),
        ("send_timeout", "None", None),
        ("send_timeout", "1e3", 1000.0),
        ("keepalive_expiry", "0", 0.0),
        ("max_body_bytes", "1", 1),
        ("decision_headers", "true", True),
        ("decision_headers", "0", False),
        ("drain_timeout", "0", 0.0),
        ("retry_attempts", "0", 0),
        ("admin_prefix", "/router", "/router"),
        ("admin_prefix", "/", "/"),
        ("admin_prefix", "none", None),
        ("admin_token", " s3cret~!\n", SecretStr("s3cret~!")),
        ("admin_token", "None", None),
        ("register_allow", "10.0.0.0/8, *.Gpu", ("10.0.0.0/8", "*.Gpu")),
        ("register_allow", '["fd00::/8"]', ("fd00::/8",)),
        ("register_allow", "", ()),
        ("prefix_block_bytes", "64", 64),
        ("prefix_block_bytes", "65536", 65536),
        ("prefix_capacity_tokens", "0", 0),
        ("prefix_ttl", "0.5", 0.5),
        ("prefill_cost_miss_weight", "3", 3.0),
        ("prefill_cost_batch_offset", "0.1", 0.1),
        ("cache_aware_hit_weight", "0", 0.0),
        ("cache_aware_load_weight", "0", 0.0),
        ("cache_aware_balance_abs", "0", 0),
        ("cache_aware_balance_rel", "0", 0.0),
        ("cache_aware_balance_rel", "1", 1.0),
        ("waiting_weight", "0", 0.0),
    ],
)
def test_environment_sets_a_field(field: str, text: str, expected: object) -> None:
    """A variable's text becomes the field's value, a zero included: it is a value and not "unset"."""
    assert getattr(from_environment(**{field: text}), field) == expected


@pytest.mark.parametrize("field", DEFAULTS)
def test_empty_variable_counts_as_unset(field: str) -> None:
    """An empty variable leaves the default in place."""
    assert getattr(from_environment(**{field: ""}), field) == DEFAULTS[field]


def test_names_of_variables_have_no_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable is found in whatever case it is written."""
    monkeypatch.setenv("asgi_router_Policy", "random")
    assert RouterSettings().policy == "random"


def test_keyword_wins_over_environment() -> None:
    """A keyword argument is used in place of its variable, even of one that would be refused."""
    with mock.patch.dict(os.environ, {"ASGI_ROUTER_POLICY": "nonsense", "ASGI_ROUTER_RETRY_ATTEMPTS": "7"}):
        settings = RouterSettings(policy="random")

    assert (settings.policy, settings.retry_attempts) == ("random", 7)


def test_dotenv_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `.env` file in the working directory has no effect."""
    (tmp_path / ".env").write_text("ASGI_ROUTER_POLICY=random\n")
    monkeypatch.chdir(tmp_path)
    assert RouterSettings().policy == "prefill_cost"


def test_import_reads_nothing() -> None:
    """Importing the module succeeds in an environment in which settings can't be made."""
    code = """if True:
        import asgi_router.settings as settings
        try:
            settings.RouterSettings()
        except settings.SettingsError:
            print("refused")
    """
    environment = {**os.environ, "ASGI_ROUTER_POLICY": "nonsense"}
    root = Path(settings_module.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout.strip()) == (0, "refused"), done.stderr


def test_values_cannot_be_changed() -> None:
    """Assigning to a field fails and leaves the value as it was."""
    settings = RouterSettings()
    with pytest.raises(ValidationError, match="frozen"):
        settings.policy = "random"

    assert settings.policy == "prefill_cost"


def test_copies_are_equal_and_do_not_read_the_environment() -> None:
    """Pickled and copied settings equal the first ones, though the environment has become unusable."""
    settings = RouterSettings(workers=["http://a:1"], idle_timeout=None)
    with mock.patch.dict(os.environ, {"ASGI_ROUTER_POLICY": "nonsense"}):
        copies = [pickle.loads(pickle.dumps(settings)), copy.copy(settings), copy.deepcopy(settings)]

    assert copies == [settings] * 3
    assert "http://a:1" in repr(copies[0])


# --- Names


@pytest.mark.parametrize("policy", POLICIES)
def test_known_policies_are_accepted(policy: str) -> None:
    """Every policy of this version can be chosen by its name."""
    assert RouterSettings(policy=policy).policy == policy


def test_unknown_policy_is_refused_with_a_suggestion() -> None:
    """An unknown policy is answered with the known ones and the nearest of them."""
    message = refusal("policy", "Round-Robin")
    assert "'Round-Robin'" in message
    assert all(policy in message for policy in POLICIES)
    assert message.endswith("did you mean round_robin?")


@pytest.mark.parametrize("mode", ["disaggregated", " splitwise "])
def test_disaggregated_mode_has_two_names(mode: str) -> None:
    """FastDeploy's own word for the mode means the same."""
    assert RouterSettings(mode=mode).mode == "disaggregated"


def test_roles_fit_the_mode() -> None:
    """Apart from each other no worker is mixed, and the wrapped app is none."""
    workers = ["http://a", {"url": "b", "role": "prefill"}, {"url": "local", "role": "decode"}]
    with pytest.raises(SettingsError) as caught:
        RouterSettings(mode="disaggregated", workers=workers)
    assert str(caught.value).splitlines() == [
        "ASGI_ROUTER_WORKERS: item 1: 'http://a' needs the role prefill or decode in this mode",
        "ASGI_ROUTER_WORKERS: item 3: 'local' can't be a worker in this mode",
    ]


@pytest.mark.parametrize("mode", ["mix", "Mixed", " ", None, 0])
def test_unknown_mode_is_refused(mode: object) -> None:
    """Any other mode is refused."""
    message = refusal("mode", mode)
    assert "known: mixed" in message or "valid string" in message


@pytest.mark.parametrize("path", ["", "a", "/", "/a/", "/a?b", "/a#b", "/a b", "/a\n", "/a\x00", "http://a/b"])
def test_bad_path_is_refused(path: str) -> None:
    """A path that no request could have, or that has more than a path in it, is refused."""
    message = refusal("paths", ["/fine", path])
    assert "item 2: " in message
    assert "item 1: " not in message


@pytest.mark.parametrize("paths", [[], (), "", " ", ",", "[]"])
def test_no_paths_at_all_are_refused(paths: object) -> None:
    """A router without paths would do nothing."""
    assert "at least 1" in refusal("paths", paths)


def test_path_that_is_no_text_is_refused() -> None:
    """A JSON list of paths holds text only."""
    assert "item 1: must be a valid string, not 5" in refusal("paths", "[5]")


# --- The admin API


@pytest.mark.parametrize("prefix", ["", "router", "/router/", "//", "/a b", "/a?b", 5])
def test_bad_admin_prefix_is_refused(prefix: object) -> None:
    """The admin API's prefix is the root, or a path without a slash at its end."""
    refusal("admin_prefix", prefix)


@pytest.mark.parametrize("token", ["", " ", "two words", "t\u00f6ken", "t\x00ken", 12345678, ["token"], b"token"])
def test_bad_admin_token_is_refused_and_not_repeated(token: object) -> None:
    """A token that no header can carry is a mistake, and is a secret all the same."""
    assert refusal("admin_token", token) == (
        "ASGI_ROUTER_ADMIN_TOKEN: must be text of printable ASCII characters without spaces"
    )


def test_admin_token_is_not_shown() -> None:
    """Neither the settings' text nor their JSON shows the token; a ready-made secret is taken as it is."""
    settings = RouterSettings(admin_token=SecretStr("s3cret"))
    assert settings.admin_token is not None
    assert settings.admin_token.get_secret_value() == "s3cret"
    assert "s3cret" not in f"{settings!r} {settings} {settings.model_dump()} {settings.model_dump_json()}"


@pytest.mark.parametrize("rule", ["10.0.0.1/8", "10.0.*", "http://a", "a b"])
def test_bad_rule_is_refused(rule: str) -> None:
    """Each item of REGISTER_ALLOW is a network or a host pattern."""
    assert "item 2: must be a network" in refusal("register_allow", ["10.0.0.0/8", rule])


@pytest.mark.parametrize("rules", [(), "", ",", "[]"])
def test_open_admin_api_needs_rules(rules: object) -> None:
    """Or anyone could aim the router at an inner service (F-91)."""
    with pytest.raises(SettingsError) as caught:
        RouterSettings(admin_open=True, register_allow=rules)
    assert str(caught.value) == (
        "ASGI_ROUTER_ADMIN_OPEN: true needs ASGI_ROUTER_REGISTER_ALLOW, which says what may be registered"
    )
    assert RouterSettings(admin_open=True, register_allow="*").admin_open


def test_bad_rules_are_not_reported_twice() -> None:
    """Where the rules themselves are refused, ADMIN_OPEN isn't blamed for their absence."""
    with pytest.raises(SettingsError) as caught:
        RouterSettings(admin_open=True, register_allow=["a b"])
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize("name", ["Authorization", "cookie", "proxy-authorization"])
def test_a_session_is_not_named_by_a_secret(name: str) -> None:
    """What names a session is shown in logs."""
    assert "no header with a secret" in refusal("session_header", name)

"""Owns the proof that whatever is wrong is said in one kind of error, that names variables and keeps secrets."""

from __future__ import annotations

import json
import os
import pickle
from unittest import mock

import hypothesis
import pytest
from hypothesis import strategies as st

from asgi_router.settings import RouterSettings, SettingsError
from tests.test_settings import DEFAULTS, from_environment, refusal, variable


def test_every_problem_has_a_line() -> None:
    """All problems are reported at once, each after its variable, wherever the value came from."""
    environment = {"ASGI_ROUTER_CONNECT_TIMEOUT": "five", "ASGI_ROUTER_POLCY": "random"}
    with mock.patch.dict(os.environ, environment), pytest.raises(SettingsError) as caught:
        RouterSettings(retry_attempts=-1, path="/a")

    assert str(caught.value).split("\n") == [
        "ASGI_ROUTER_PATH: unknown keyword argument; did you mean paths?",
        "ASGI_ROUTER_POLCY: unknown variable; did you mean ASGI_ROUTER_POLICY?",
        "ASGI_ROUTER_CONNECT_TIMEOUT: must be a valid number, not 'five'",
        "ASGI_ROUTER_RETRY_ATTEMPTS: must be greater than or equal to 0, not -1",
    ]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("ASGI_ROUTER_POLCY", "did you mean ASGI_ROUTER_POLICY?"),
        ("ASGI_ROUTER_WORKER", "did you mean ASGI_ROUTER_WORKERS?"),
        ("asgi_router_conect_timeout", "did you mean ASGI_ROUTER_CONNECT_TIMEOUT?"),
        ("ASGI_ROUTER_WORKERS__0__URL", "did you mean ASGI_ROUTER_WORKERS?"),
        ("ASGI_ROUTER_ZZZZ", "unknown variable"),
        ("ASGI_ROUTER_", "unknown variable"),
    ],
)
def test_unknown_variable_is_refused(name: str, hint: str) -> None:
    """A misspelt variable is an error that names it and the nearest known one, and never shows its value."""
    with mock.patch.dict(os.environ, {name: "its-value"}), pytest.raises(SettingsError) as caught:
        RouterSettings(policy="random")

    message = str(caught.value)
    assert message.startswith(f"{name}: unknown variable")
    assert message.endswith(hint)
    assert "its-value" not in message


def test_unprintable_variable_is_named_on_one_line() -> None:
    """A variable's name can hold anything, and still takes one printable line."""
    with mock.patch.dict(os.environ, {"ASGI_ROUTER_A\nB\udc80": "x"}), pytest.raises(SettingsError) as caught:
        RouterSettings()

    assert str(caught.value) == "ASGI_ROUTER_A\\nB\\udc80: unknown variable"


@pytest.mark.parametrize("name", ["ASGI_ROUTERS_POLICY", "ASGI_ROUTER", "MY_ASGI_ROUTER_POLICY"])
def test_variables_of_others_are_left_alone(name: str) -> None:
    """A variable without our prefix is none of our business."""
    with mock.patch.dict(os.environ, {name: "x"}):
        assert RouterSettings().model_dump() == DEFAULTS


def test_unknown_variable_without_text_counts_as_unset() -> None:
    """An empty variable is no variable, whatever its name."""
    assert from_environment(polcy="").model_dump() == DEFAULTS


@pytest.mark.parametrize("name", ["polcy", "POLICY", "_env_file", "_env_prefix", "_secrets_dir", "self", "a\nb"])
def test_unknown_keyword_is_refused(name: str) -> None:
    """An unknown keyword argument is an error, in another case and when pydantic-settings would know it too."""
    with pytest.raises(SettingsError) as caught:
        RouterSettings(**{name: "its-value"})

    message = str(caught.value)
    assert message.startswith("ASGI_ROUTER_")
    assert "unknown keyword argument" in message
    assert "its-value" not in message
    assert "\n" not in message
    assert ("did you mean policy?" in message) is (name in ("polcy", "POLICY"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("workers", "http://bob:hunter2@a:1"),
        ("workers", "bob:hunter2@a:1,http://b:2"),
        ("workers", '[{"url": "http://bob:hunter2@a"}]'),
        ("workers", '["http://bob:hunter2@a"'),
        ("workers", ["http://bob:8/hunter2@a"]),
        ("workers", ["http://bob:8?hunter2@a"]),
        ("workers", ["http://bob:8#hunter2@a"]),
        ("workers", ["http:///bob:hunter2@a"]),
        ("workers", ["http://a:1/?key=hunter2"]),
        ("workers", [{"http://bob:hunter2@a": "mixed", "url": "a"}]),
        ("workers", {"url": "http://bob:hunter2@a"}),
        ("paths", ["http://bob:hunter2@a"]),
        ("policy", "http://bob:hunter2@a"),
        ("policy", "http://a/?key=hunter2"),
        ("mode", "bob:hunter2@a"),
        ("connect_timeout", "http://bob:hunter2@a"),
        ("decision_headers", {"key": "hunter2"}),
        ("retry_attempts", "hunter2" * 10),
    ],
)
def test_secrets_stay_out_of_errors(field: str, value: object) -> None:
    """What may hold a password isn't repeated: not in the message, not in an exception chained to it."""
    assert "hunter2" not in refusal(field, value)
    with pytest.raises(SettingsError) as caught:
        RouterSettings(**{field: value})

    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_error_survives_pickling() -> None:
    """The error can cross a process boundary, as it does when a server's worker process fails to start."""
    error = pickle.loads(pickle.dumps(SettingsError("ASGI_ROUTER_MODE: wrong")))
    assert isinstance(error, ValueError)
    assert str(error) == "ASGI_ROUTER_MODE: wrong"


def made_or_refused(**values: object) -> tuple[RouterSettings | None, list[str]]:
    try:
        return RouterSettings(**values), []
    except SettingsError as error:
        return None, str(error).split("\n")


NEARLY_RIGHT = ("http://a:1", "[::1]:80", '{"url":"a"', "role", "prefill", "/a", ",", "[", "]", '"', "1", ".", "-")
VARIABLE_TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    st.binary().map(lambda raw: raw.replace(b"\0", b"").decode("utf-8", "surrogateescape")),
    st.lists(st.sampled_from(NEARLY_RIGHT)).map("".join),
    st.integers().map(str),
    st.floats().map(str),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from([*NEARLY_RIGHT, "a", "b"]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["url", "role", "models"]), inner),
        max_leaves=6,
    ).map(json.dumps),
)


@pytest.mark.parametrize("field", DEFAULTS)
@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(text=VARIABLE_TEXT)
def test_any_text_gives_settings_or_an_error_with_the_name(field: str, text: str) -> None:
    """Whatever a variable holds, the outcome is usable settings or a `SettingsError` about that variable."""
    with mock.patch.dict(os.environ, {variable(field): text}):
        settings, problems = made_or_refused()

    assert all(line.startswith(f"{variable(field)}: ") and line.isprintable() for line in problems)
    if settings is not None:
        assert made_or_refused(**{field: getattr(settings, field)}) == (settings, [])
    if text:
        assert made_or_refused(**{field: text}) == (settings, problems)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=6,
)


@pytest.mark.parametrize("field", DEFAULTS)
@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(value=ANYTHING)
def test_any_object_gives_settings_or_an_error_with_the_name(field: str, value: object) -> None:
    """Whatever a keyword argument is, the outcome is settings or a `SettingsError` about its variable."""
    settings, problems = made_or_refused(**{field: value})
    assert all(line.startswith(f"{variable(field)}: ") and line.isprintable() for line in problems)
    assert (settings is None) is bool(problems)

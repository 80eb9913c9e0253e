"""Owns the README's promises: its examples run, its table of options is the settings, its version is the package's."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from starlette.applications import Starlette

from asgi_router.setting_types import POLICIES
from asgi_router.settings import RouterSettings

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run_example(source: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Execute an example as a module, with the environment that it speaks of."""
    monkeypatch.setenv("ASGI_ROUTER_WORKERS", "http://10.0.0.1:8000,http://10.0.0.2:8000")
    namespace: dict[str, object] = {"__name__": "example"}
    exec(compile(source, "README.md", "exec", dont_inherit=True), namespace)
    return namespace


@pytest.mark.parametrize("source", EXAMPLES, ids=lambda source: source.splitlines()[0])
def test_examples_run(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each example runs as it stands, and the tests in it pass."""
    namespace = run_example(source, monkeypatch)
    if isinstance(app := namespace.get("app"), Starlette):  # FastAPI's is one; middleware is made at the start only
        app.build_middleware_stack()
    monkeypatch.delenv("ASGI_ROUTER_WORKERS")
    tests: list[Callable[[], None]] = [value for name, value in namespace.items() if name.startswith("test_")]  # type: ignore[misc]
    assert len(tests) == source.count("def test_")
    for test in tests:
        test()


def test_there_are_examples() -> None:
    """The quickstart is ten lines at the most, and TestClient is shown."""
    assert len(EXAMPLES[0].splitlines()) <= 10
    assert sum(source.count("def test_") for source in EXAMPLES) >= 2


def test_options_table_is_the_settings() -> None:
    """Every setting is in the table with its default, and nothing else is."""
    rows = dict(re.findall(r"^\| `ASGI_ROUTER_([A-Z_]+)` \| (.*?) \|", README, re.MULTILINE))
    fields = RouterSettings.model_fields
    assert sorted(rows) == sorted(name.upper() for name in fields)
    for name, field in fields.items():
        shown = rows[name.upper()].strip("`")
        default = field.default
        if default is None or default == ():
            assert shown == "none"
        elif isinstance(default, bool):
            assert shown == str(default).lower()
        elif isinstance(default, int | float):
            assert float(shown) == default
        else:
            assert shown == (default if isinstance(default, str) else ",".join(default))


def test_policies_table_is_the_policies() -> None:
    """Every policy is explained."""
    table = README[README.index("### Policies") : README.index("Equal workers")]
    assert set(re.findall(r"`([a-z_]+)`", table)) == set(POLICIES)


def test_changelog_knows_the_version() -> None:
    """The newest release in the changelog is the package's version."""
    releases = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert releases[0] == version("asgi-router")

"""Owns REGISTER_FILE: which workers it brings, what is wrong with one, and that those not up yet are tried on."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import httpx
import pytest

from asgi_router import Router, RouterMiddleware, RouterSettings
from asgi_router.settings import SettingsError
from tests.instruments.asgi_client import Exchange
from tests.instruments.fake_worker import FakeFleet, Script
from tests.instruments.lifespan import Lifespan
from tests.routed import OTHER, WORKER, answer, completion_body

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.types import Receive, Scope, Send

YAML = """
instances:
  - role: "mixed"
    host_ip: "w1"
    port: 8000
  - role: mixed
    host_ip: 2001:db8::1
    port: "8001"
    metrics_port: 9000
    device_ids: [0, 1]
    models: [m]
"""
UP = Script(body=[b"ok"])
DOWN = replace(UP, connect=[httpx.ConnectError("refused")])


def written(folder: Path, text: str, name: str = "register.yaml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def instances(*hosts: str) -> str:
    return json.dumps({"instances": [{"role": "mixed", "host_ip": host, "port": 8000} for host in hosts]})


def test_yaml_of_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed's register.yaml is read, from the environment, beside WORKERS."""
    monkeypatch.setenv("ASGI_ROUTER_REGISTER_FILE", written(tmp_path, YAML))
    router = Router(RouterSettings(workers=["http://w0:8000"]))
    first, second, third = (state.worker for state in router.workers)
    assert [first.url, second.url, third.url] == ["http://w0:8000", "http://w1:8000", "http://[2001:db8::1]:8001"]
    assert (second.metrics_port, third.metrics_port) == (8000, 9000)
    assert (third.device_ids, third.models) == (("0", "1"), ("m",))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("instances: [", "is not valid YAML"),
        ("a: &a [*a", "is not valid YAML"),
        ("!!python/object/apply:os.getcwd []", "is not valid YAML"),
        ("instances: !!bool x", "is not valid YAML"),
        ('instances: !!int ""', "is not valid YAML"),
        ("instances: !!timestamp x", "is not valid YAML"),
        ("", "must have a list of `instances`"),
        ("instances: 7", "must have a list of `instances`"),
        ("- role: mixed", "must have a list of `instances`"),
        ("instances: [7]", "instance 1: Invalid InstanceInfo JSON format: not an object"),
        (
            "instances:\n - {role: mixed, host_ip: a, port: 1}\n - {role: mixd, host_ip: b, port: 1}",
            "instance 2: invalid InstanceInfo format: role must be",
        ),
        (instances("a", "b", "A"), "instance 3: 'http://a:8000' is there twice"),
        ("instances: [{role: prefill, host_ip: a, port: 1}]", "instance 1: only MIXED instances are allowed"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, reason: str) -> None:
    """A file that can't be used stops the router from being made, with the variable and the instance."""
    settings = RouterSettings(register_file=written(tmp_path, text))
    with pytest.raises(SettingsError) as caught:
        Router(settings)
    assert str(caught.value).startswith(f"ASGI_ROUTER_REGISTER_FILE: {reason}")


def test_a_worker_is_described_once(tmp_path: Path) -> None:
    """One that is in WORKERS, too, would have two descriptions, and one of them would be lost."""
    name = written(tmp_path, instances("w1"), "workers.json")
    with pytest.raises(SettingsError, match="'http://w1:8000' is in ASGI_ROUTER_WORKERS, too"):
        Router(RouterSettings(workers=["w1:8000"], register_file=name))


def test_unreadable_files(tmp_path: Path) -> None:
    """So does one that isn't there, is a folder, isn't text or isn't JSON."""
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    for name, reason in [
        (str(tmp_path / "none"), "can't be read: No such file"),
        (str(tmp_path), "can't be read: Is a directory"),
        (str(tmp_path / "binary"), "can't be read: not UTF-8 text"),
        ("a\0b", "can't be read"),
        (written(tmp_path, YAML, "register.JSON"), "is not valid JSON"),
        (written(tmp_path, "[" * 100_000, "deep.json"), "is not valid JSON"),
    ]:
        with pytest.raises(SettingsError, match=f"^ASGI_ROUTER_REGISTER_FILE: {reason}"):
            Router(RouterSettings(register_file=name))


def test_yaml_needs_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without PyYAML the error names the extra, while JSON needs nothing."""
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(SettingsError, match=r"asgi-router\[yaml\]"):
        Router(RouterSettings(register_file=written(tmp_path, YAML)))
    assert len(Router(RouterSettings(register_file=written(tmp_path, instances("w1"), "workers.json"))).workers) == 1


@pytest.mark.anyio
async def test_workers_that_are_not_up_are_tried_until_they_are(tmp_path: Path) -> None:
    """F-81: the one that is up serves at once; the other one is out after one failed probe, and in when it is up."""

    async def host(scope: Scope, receive: Receive, send: Send) -> None:
        for step in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{step}.complete"})

    fleet = FakeFleet({WORKER: UP, OTHER: DOWN})
    settings = RouterSettings(
        register_file=written(tmp_path, instances("w1", "w2"), "workers.json"),
        health_interval=0.01,
        health_failures=1_000_000,
        policy="round_robin",
    )
    router = Router(settings, transport=fleet)
    app = RouterMiddleware(host, router=router)
    async with Lifespan().running(app):
        await fleet[OTHER].changes.until(lambda: fleet[OTHER].connects >= 2)
        assert [worker.healthy for worker in router.stats().workers] == [True, False]
        fleet[WORKER].scripts = answer("json")
        for _ in range(4):
            assert (await Exchange(body=completion_body()).run(app)).status == 200

        fleet[OTHER].scripts = answer("json")
        with anyio.fail_after(20):
            while not router.stats().workers[1].healthy:
                await fleet[OTHER].received(len(fleet[OTHER].calls) + 1)
                await anyio.lowlevel.checkpoint()
        for _ in range(2):
            assert (await Exchange(body=completion_body()).run(app)).status == 200
        assert any(call.url.endswith("/completions") for call in fleet[OTHER].calls)

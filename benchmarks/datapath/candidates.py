"""Owns who is compared: how each candidate is started, what it is, and whether it is here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.datapath.processes import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from benchmarks.datapath.rivals import Environments

MISSING = "missing"

DIRECT = "direct"
"""Nothing between client and worker: what the mock itself costs, and how long a first byte takes without any router."""


@dataclass(frozen=True)
class Launch:
    """What is needed to start a candidate."""

    command: Sequence[str]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Candidate:
    """One row of the tables."""

    name: str
    about: str
    version: str
    launch: Callable[[int, Sequence[int], Path], Launch] | None
    """Takes its port, the workers' ports and a folder for files of its own. None: there is nothing to start."""
    missing: str = ""
    """Why it can't be started here; empty: it can."""
    streams: bool = True
    """Whether it relays event streams."""
    slow: bool = False
    """Whether it is left out of a quick run."""


VERSIONS = """
import importlib.metadata, json, platform
found = {each.metadata["name"].lower(): each.version for each in importlib.metadata.distributions()}
print(json.dumps({"python": platform.python_version(), **found}))
"""


def candidates(environments: Environments, python: str = sys.executable) -> list[Candidate]:
    """Return all of them, those that are missing included, in the order of the tables.

    `python` is the interpreter of our own: with the project's dependencies and `uvicorn[standard]`.
    """
    versions = _versions(python)
    server = f"uvicorn {versions['uvicorn']}, uvloop {versions['uvloop']}, httptools {versions['httptools']}"
    unserved = "needs uvicorn[standard]" if MISSING in server else ""
    product = f"Starlette {versions['starlette']}, CPython {versions['python']}, {server}"

    def app(module: str, *arguments: str) -> Callable[[int, Sequence[int], Path], Launch]:
        return _served_by(python, module, *arguments)

    return [
        Candidate(DIRECT, "no router: the mock worker itself", "", None),
        Candidate(
            "empty-asgi", "a pure ASGI app that answers by itself", server, app("empty", "asgi"), unserved, False
        ),
        Candidate(
            "empty-starlette", "a Starlette route that answers by itself", f"Starlette {versions['starlette']}",
            app("empty", "starlette"), unserved, False,
        ),
        Candidate("asgi-router", "the product, whole, policy prefill_cost", product, app("product", "own"), unserved),
        Candidate(
            "asgi-router-httpx", "the same on stock httpx's transport", f"httpx {versions['httpx']}",
            app("product", "stock"), unserved,
        ),
        Candidate(
            "httpx-stock", "an ASGI app with httpx.AsyncClient().stream, as pip installs it, round robin",
            f"httpx {versions['httpx']}", app("httpx_proxy", "stock"), unserved,
        ),
        Candidate(
            "httpx-tuned", "the same with sniffio, and more connections", f"httpx {versions['httpx']}",
            app("httpx_proxy", "tuned"), unserved,
        ),
        _rival(environments, "aiohttp", "aiohttp-proxy", "the same with aiohttp's client", _aiohttp, "python"),
        _rival(environments, "sglang-router", "sglang-router", "cache_aware", _rust("sglang-router", "launch")),
        _rival(environments, "vllm-router", "vllm-router", "cache_aware", _rust("vllm-router")),
        _rival(environments, "smg", "smg", "cache_aware", _rust("smg", "launch")),
        _rival(environments, "litellm", "litellm", "its proxy, as it is configured by default", _litellm, slow=True),
    ]  # fmt: skip


def _versions(python: str) -> Mapping[str, str]:
    done = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True)
    return defaultdict(lambda: MISSING, json.loads(done.stdout))


def _urls(ports: Sequence[int]) -> list[str]:
    return [f"http://127.0.0.1:{port}" for port in ports]


def _served_by(python: str, module: str, *arguments: str) -> Callable[[int, Sequence[int], Path], Launch]:
    def launch(port: int, workers: Sequence[int], folder: Path) -> Launch:
        urls = () if module == "empty" else _urls(workers)
        return Launch([python, "-m", f"benchmarks.datapath.apps.{module}", *arguments, str(port), *urls], {})

    return launch


def _rival(
    environments: Environments,
    rival: str,
    name: str,
    about: str,
    launch: Callable[[str], Callable[[int, Sequence[int], Path], Launch]],
    program: str | None = None,
    *,
    slow: bool = False,
) -> Candidate:
    program = program or rival
    missing = "" if environments.has(rival, program) else "not installed (--rivals)"
    installed = "" if missing else f"{rival} {environments.version(rival)}"
    path = str(environments.program(rival, program))
    return Candidate(name, about, installed, launch(path), missing, slow=slow)


def _aiohttp(python: str) -> Callable[[int, Sequence[int], Path], Launch]:
    return _served_by(python, "aiohttp_proxy")


def _rust(name: str, *subcommand: str) -> Callable[[str], Callable[[int, Sequence[int], Path], Launch]]:
    """Return what starts the three that descend from SGLang's router, and take the same options."""

    def launcher(program: str) -> Callable[[int, Sequence[int], Path], Launch]:
        def launch(port: int, workers: Sequence[int], folder: Path) -> Launch:
            level = "warning" if name == "vllm-router" else "warn"
            options = {
                "--host": "127.0.0.1",
                "--port": str(port),
                "--policy": "cache_aware",
                "--log-level": level,
                "--prometheus-host": "127.0.0.1",
                "--prometheus-port": str(free_port()),
            }
            words = [word for option in options.items() for word in option]
            return Launch([program, *subcommand, *words, "--worker-urls", *_urls(workers)], {})

        return launch

    return launcher


def _litellm(program: str) -> Callable[[int, Sequence[int], Path], Launch]:
    def launch(port: int, workers: Sequence[int], folder: Path) -> Launch:
        lines = ["model_list:"]
        for url in _urls(workers):
            parameters = f'{{model: openai/mock, api_base: "{url}/v1", api_key: sk-test}}'
            lines += ["  - model_name: mock", f"    litellm_params: {parameters}"]
        lines += ["litellm_settings: {num_retries: 0, telemetry: false}"]
        config = folder / "litellm.yaml"
        config.write_text("\n".join(lines) + "\n")
        environment = {
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # nothing is fetched from the Internet
            "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # loopback, and gone in minutes
        }
        return Launch([program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port)], environment)

    return launch

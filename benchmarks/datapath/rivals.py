"""Owns the rivals: other people's routers, each in an environment of its own, never a dependency of the project."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).parents[1] / ".rivals-venv"

REQUIREMENTS = {
    "aiohttp": ("aiohttp==3.14.5",),
    "sglang-router": ("sglang-router==0.3.2",),
    "vllm-router": ("vllm-router==0.1.17",),
    "smg": ("smg==1.13.0",),
    "litellm": ("litellm[proxy]==1.106.12",),
}
"""Pinned, so that two runs compare the same programs. Apart, since two of them bring a command of the same name."""

SERVER = ("uvicorn", "uvloop", "httptools")
"""What aiohttp's app is served with: the very versions that serve ours."""

INSTALL_WITHIN = 900.0
STAMP = "requirements.json"


@dataclass(frozen=True)
class Environments:
    """The folder that holds them."""

    folder: Path

    def program(self, rival: str, name: str) -> Path:
        """Return where a program of `rival` is, or would be."""
        return self.folder / rival / "bin" / name

    def has(self, rival: str, name: str) -> bool:
        """Say whether `rival` is installed."""
        return self.program(rival, name).exists()

    def version(self, rival: str) -> str:
        """Return the version of `rival` that is installed."""
        code = f"import importlib.metadata as m; print(m.version({rival!r}))"
        command = [str(self.program(rival, "python")), "-c", code]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "?"

    def is_made(self, rival: str) -> bool:
        """Say whether `make` has nothing left to do."""
        stamp = self.folder / rival / STAMP
        return stamp.exists() and stamp.read_text() == _wanted(rival)

    def make(self, rival: str) -> str | None:
        """Install `rival` from wheels; why that failed, or None."""
        home = self.folder / rival
        install = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--only-binary", ":all:"]
        for command in ([sys.executable, "-m", "venv", "--clear", str(home)], [*install, *_requirements(rival)]):
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_WITHIN)
            except subprocess.TimeoutExpired:
                failure = f"not installed after {INSTALL_WITHIN:.0f} s"
            else:
                failure = "" if not done.returncode else _reason(done.stderr or done.stdout)
            if failure:
                shutil.rmtree(home, ignore_errors=True)
                return failure
        (home / STAMP).write_text(_wanted(rival))
        return None


def _wanted(rival: str) -> str:
    return json.dumps([sys.version, *_requirements(rival)])


def _requirements(rival: str) -> list[str]:
    server = [f"{name}=={version(name)}" for name in SERVER] if rival == "aiohttp" else []
    return [*REQUIREMENTS[rival], *server]


def _reason(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "pip failed")[:200]

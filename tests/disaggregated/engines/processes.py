"""Owns the fake engines as tests see them: processes that are started, asked what they do, replaced when they die."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self, cast

import anyio
import anyio.to_thread

from tests.disaggregated.engines.dialects import HOST, Place
from tests.instruments.raw_http import connect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.disaggregated.engines.dialects import Body
    from tests.disaggregated.engines.job import Role

ROOT = Path(__file__).resolve().parents[3]
SOON = 30.0
"""Seconds within which everything that is awaited has to happen; most of it takes milliseconds."""


class EngineProcess:
    """One engine.

    Attributes:
        place: which one it is; a new one after `revive`.
    """

    def __init__(self, dialect: str, role: Role) -> None:
        self.place = Place(role, 0, 0)
        self._command = [sys.executable, "-m", "tests.disaggregated.engines", dialect, role]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{HOST}:{self.place.port}"

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it, without waiting for it."""
        self._process = subprocess.Popen(self._command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def wait_until_ready(self) -> None:
        """Return when it listens, which is for its process to say: it does, or it ends."""
        assert self._process is not None
        assert self._process.stdout is not None
        port, connector_port = map(int, self._process.stdout.readline().split())
        self.place = Place(self.place.role, port, connector_port)

    def kill(self) -> None:
        """End it; may be called again."""
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(BrokenPipeError), self._process:  # closes the pipes, and waits
                pass
            self._process = None

    def close_input(self) -> None:
        """Do what the end of this process would do to it."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def dead(self) -> None:
        """Return when its process has ended."""
        assert self._process is not None
        with anyio.fail_after(SOON):
            while self._process.poll() is None:  # noqa: ASYNC110 - there is no event to wait for
                await anyio.sleep(0.005)

    async def state(self, **wanted: int) -> Body:
        """Return what it tells of itself (`engine.State`, and `kept`), once it is as wanted."""
        query = "&".join(f"{name}={value}" for name, value in wanted.items())
        return await self._get(f"/state?{query}")

    async def forget(self) -> None:
        """Let it forget what it has done, and free what it keeps."""
        await self._get("/forget")

    async def _get(self, path: str) -> Body:
        with anyio.fail_after(SOON):
            async with connect(HOST, self.place.port) as client:
                await client.send(f"GET {path} HTTP/1.1\r\nhost: e\r\nconnection: close\r\n\r\n".encode())
                while await client.fill():
                    pass
        return cast("Body", json.loads(client.buffer.partition(b"\r\n\r\n")[2]))


class Engines:
    """A prefill engine and some decode engines of one dialect; they live as long as the `with` block.

    Attributes:
        dialect: its name.
        prefill: the one.
        decodes: the others.
    """

    def __init__(self, dialect: str, decodes: int = 2) -> None:
        self.dialect = dialect
        self.prefill = EngineProcess(dialect, "prefill")
        self.decodes = [EngineProcess(dialect, "decode") for _ in range(decodes)]

    @property
    def all(self) -> Sequence[EngineProcess]:
        """Every engine."""
        return [self.prefill, *self.decodes]

    @property
    def registrations(self) -> list[dict[str, object]]:
        """All of them, as the setting `WORKERS` wants them."""
        return [engine.place.registration() for engine in self.all]

    def __enter__(self) -> Self:
        try:
            self.revive()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        for engine in self.all:
            engine.kill()

    def revive(self) -> None:
        """Replace those that are dead by new ones, at other ports."""
        dead = [engine for engine in self.all if not engine.alive]
        for engine in dead:
            engine.kill()
            engine.start()
        for engine in dead:
            engine.wait_until_ready()

    async def fresh(self) -> None:
        """Replace those that are dead, let the others end what they do and forget it."""
        await anyio.to_thread.run_sync(self.revive)
        await self.idle()
        for engine in self.all:
            await engine.forget()

    async def idle(self) -> list[Body]:
        """Return what they tell of themselves when nothing runs on any of them."""
        states = []
        for engine in self.all:
            if engine.alive:
                try:
                    states.append(await engine.state(running=0))
                except (OSError, ValueError):  # no connection, or half an answer: it is about to die
                    await engine.dead()
        return states

"""Owns what is done to the workers: their processes, the seeded sequence of faults, and who was healthy when."""

from __future__ import annotations

import enum
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Self

import anyio
import anyio.to_thread

from asgi_router.scheduling.breaker import BreakerState
from tests.chaos.worker import Fault
from tests.instruments.raw_http import Truncated, connect

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from asgi_router import Router

ROOT = Path(__file__).resolve().parents[2]
READY_LIMIT = 30.0
"""Seconds until a worker's process has to be ready. It takes half a second where nothing else runs."""

STOPS = (5.0, 0.5, 1.5)
"""Seconds of SIGSTOP, by turns: longer than any time-out times its margin, shorter than any, longer than some."""

PULSE = 0.02
STALL = 0.15
"""Seconds that the event loop may come late: half a connect time-out. Else nobody was healthy for a moment: us."""


class Blow(enum.StrEnum):
    """What can be done to a worker."""

    KILL = "kill -9"
    REFUSE = "refuse"
    SLOW_START = "slow start"
    STOP = "SIGSTOP"
    RESET = "reset"
    STORM = "500 storm"
    SICK = "sick"


class WorkerProcess:
    """One worker: a port for good, and one process after the other behind it.

    Attributes:
        url: its address.
        broken: something is being done to it.
        steady_since: it has been healthy, and the router has known it, since then; None: it isn't, or not yet.
        mended: when it was last healed.
        pids: of all its processes.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.broken = False
        self.steady_since: float | None = None
        self.mended = 0.0
        self.pids: list[int] = []
        self._was_steady: list[tuple[float, float]] = []
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, slow_start: float = 0.0) -> None:
        """Start a process."""
        command = [sys.executable, "-m", "tests.chaos.worker", str(self.port), str(slow_start)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE)
        self.pids.append(self._process.pid)

    def kill(self) -> None:
        """End its process, stopped or not, and wait for that; may be called again."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.kill()
            self._process.wait(READY_LIMIT)
            self._process.stdin.close()
            self._process = None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    async def ask(self, request: bytes) -> int:
        """Send a request, return the status of the answer."""
        async with connect("127.0.0.1", self.port) as client:
            await client.send(request)
            return (await client.read_head()).status

    async def ready(self) -> None:
        """Return when it listens and says that it is healthy."""
        with anyio.fail_after(READY_LIMIT):
            while True:
                try:
                    if await self.ask(b"GET /health HTTP/1.1\r\nhost: w\r\n\r\n") == 200:
                        return
                except (OSError, Truncated):
                    pass
                await anyio.sleep(PULSE)

    async def tell(self, fault: Fault) -> None:
        """Break it from within, or mend it."""
        head = f"POST /control HTTP/1.1\r\nhost: w\r\ncontent-length: {len(fault)}\r\n\r\n"
        assert await self.ask(head.encode() + fault.encode()) == 200

    def not_steady(self, now: float) -> None:
        """End a steady time."""
        if self.steady_since is not None:
            self._was_steady.append((self.steady_since, now))
            self.steady_since = None

    def steady_in(self, start: float, end: float) -> bool:
        """Whether it was steady all along from `start` to `end`."""
        if self.steady_since is not None and self.steady_since <= start:
            return True
        return any(since <= start and end <= until for since, until in self._was_steady)


class Fleet:
    """Some workers; none of their processes outlives the `async with` block."""

    def __init__(self, count: int) -> None:
        self.workers = [WorkerProcess(port) for port in _free_ports(count)]

    async def __aenter__(self) -> Self:
        try:
            for worker in self.workers:
                worker.start()
            for worker in self.workers:
                await worker.ready()
        except BaseException:
            self.kill()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End all processes."""
        for worker in self.workers:
            worker.kill()

    def steady_in(self, start: float, end: float) -> bool:
        """Whether one of the workers was healthy, and known to be, all along from `start` to `end`."""
        return any(worker.steady_in(start, end) for worker in self.workers)


class Conductor:
    """Breaks workers at random, several at a time, but leaves one alone that is steady.

    Args:
        fleet: the workers.
        router: has to see them as healthy again before they count as steady.
        seed: decides what is done in which order, to whom first, and for how long.

    Attributes:
        blows: how often what was done.
        noticed: how often the router took a worker out of service, and why.
        longest_recovery: seconds from a worker's healing until the router knew of it.
    """

    def __init__(self, fleet: Fleet, router: Router, seed: int) -> None:
        self.blows: Counter[Blow] = Counter()
        self.noticed: Counter[str] = Counter()
        self.longest_recovery = 0.0
        self._fleet = fleet
        self._router = router
        self._random = random.Random(seed)

    async def run(self, seconds: float) -> None:
        """Break workers for so long, and until each blow has been dealt once; return when all are mended."""
        end = anyio.current_time() + seconds
        async with anyio.create_task_group() as tasks:
            while anyio.current_time() < end or len(self.blows) < len(Blow):
                for blow in self._random.sample(list(Blow), len(Blow)):
                    victim = await self._victim(self._random.sample(self._fleet.workers, len(self._fleet.workers)))
                    victim.broken = True
                    victim.not_steady(anyio.current_time())
                    seconds_broken = self._random.uniform(0.2, 1.6)
                    if blow is Blow.STOP:
                        seconds_broken = STOPS[self.blows[blow] % len(STOPS)]
                    self.blows[blow] += 1
                    tasks.start_soon(self._deal, blow, victim, seconds_broken)
                    await anyio.sleep(self._random.uniform(0.05, 0.4))
                    if anyio.current_time() > end and len(self.blows) == len(Blow):
                        break

    async def watch(self) -> None:
        """Note who becomes steady, until cancelled."""
        before = anyio.current_time()
        ill: set[tuple[str, str]] = set()
        while True:
            await anyio.sleep(PULSE)
            now = anyio.current_time()
            was_ill, ill = ill, set(_ill(self._router))
            self.noticed.update(what for _, what in ill - was_ill)
            for worker in self._fleet.workers:
                if now - before > PULSE + STALL:
                    worker.not_steady(before)
                if worker.steady_since is None and not worker.broken:
                    state = self._router.workers.get(worker.url)
                    if state.healthy and not state.probes_against:
                        worker.steady_since = now
                        self.longest_recovery = max(self.longest_recovery, now - (worker.mended or now))
                        worker.mended = 0.0
            before = now

    async def _victim(self, order: Sequence[WorkerProcess]) -> WorkerProcess:
        while True:
            for worker in order:
                others_steady = any(other is not worker and other.steady_since is not None for other in order)
                if not worker.broken and others_steady:
                    return worker
            await anyio.sleep(PULSE)

    async def _deal(self, blow: Blow, victim: WorkerProcess, seconds: float) -> None:
        match blow:
            case Blow.KILL | Blow.REFUSE | Blow.SLOW_START:
                await anyio.to_thread.run_sync(victim.kill)
                if blow is Blow.REFUSE:
                    await anyio.sleep(seconds)
                victim.start(slow_start=seconds if blow is Blow.SLOW_START else 0.0)
            case Blow.STOP:
                victim.signal(signal.SIGSTOP)
                await anyio.sleep(seconds)
                victim.signal(signal.SIGCONT)
            case Blow.RESET | Blow.STORM | Blow.SICK:
                await victim.tell(Fault[blow.name])
                await anyio.sleep(seconds)
                await victim.tell(Fault.NONE)

        await victim.ready()
        victim.broken = False
        victim.mended = anyio.current_time()


def _ill(router: Router) -> Iterator[tuple[str, str]]:
    for state in router.workers:
        if not state.healthy:
            yield state.worker.url, "unhealthy"
        if state.breaker.state is not BreakerState.CLOSED:  # open or half-open
            yield state.worker.url, "breaker open"


def _free_ports(count: int) -> list[int]:
    # Below the ports that the kernel gives to outgoing connections: while a worker is down, none may take its port.
    ports: list[int] = []
    for port in random.sample(range(20000, 30000), 1000):
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
        ports.append(port)
        if len(ports) == count:
            return ports
    raise RuntimeError("no free ports")

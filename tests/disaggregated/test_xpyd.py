"""The router over a simulator of prefill and decode workers that nobody here wrote: `xpyd-sim`.

It takes any field that it doesn't know, so each dialect can be spoken to it, and answers `kv_transfer_params` of null:
a prefill worker of vLLM's that has nothing to hand over. Its decode worker doesn't wait for a prefill. An answer that
is no stream it computes to its end, whether somebody waits for it or not.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import httpx
import pytest

from asgi_router import Router, RouterMiddleware, RouterSettings
from asgi_router.disaggregated import DIALECTS
from example_app.worker_processes import free_ports, running, wait_until_healthy
from tests.instruments import BACKENDS
from tests.instruments.asgi_client import Exchange
from tests.routed import KINDS, counters, unreachable_app

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.routed import Kind

PREFILL_SECONDS = 0.25
SECONDS_PER_TOKEN = 0.02
TOKENS = 8
SOON = 60.0

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", BACKENDS[:1])]
every_dialect = pytest.mark.parametrize("dialect", sorted(DIALECTS))
every_kind = pytest.mark.parametrize("kind", KINDS)


@dataclass
class Simulator:
    """One worker: where it listens, and where it notes what it has served."""

    role: str
    url: str
    log: Path
    noted: int = 0

    def command(self) -> list[str]:
        """How it is started."""
        options = {
            "mode": self.role,
            "host": "127.0.0.1",
            "port": self.url.rpartition(":")[2],
            "prefill-delay-ms": PREFILL_SECONDS * 1000,
            "kv-transfer-delay-ms": 0,
            "decode-delay-per-token-ms": SECONDS_PER_TOKEN * 1000,
            "log-requests": self.log,
        }
        arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
        return [sys.executable, "-m", "tests.disaggregated.xpyd_process", "serve", *arguments]

    def new_notes(self) -> list[dict[str, object]]:
        """What it has noted since the last call, of each answer."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        new, self.noted = lines[self.noted :], len(lines)
        return [json.loads(line) for line in new]

    def active(self) -> int:
        """How many requests it works on."""
        text = httpx.get(f"{self.url}/metrics", trust_env=False, timeout=SOON).text
        found = re.search(r"^xpyd_sim_active_requests (\d+)", text, re.MULTILINE)
        assert found is not None
        return int(found[1])


@pytest.fixture(scope="module")
def simulators(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Simulator]]:
    """A worker that prefills, and two that decode."""
    folder = tmp_path_factory.mktemp("xpyd")
    roles = ["prefill", "decode", "decode"]
    workers = [
        Simulator(role, f"http://127.0.0.1:{port}", folder / str(port))
        for role, port in zip(roles, free_ports(len(roles)), strict=True)
    ]
    with running([worker.command() for worker in workers]) as processes:
        for process, worker in zip(processes, workers, strict=True):
            wait_until_healthy(process, worker.url, timeout=SOON)
        yield workers


def router_over(simulators: list[Simulator], dialect: str) -> Router:
    workers = [{"url": worker.url, "role": worker.role, "connector_port": 1} for worker in simulators]
    return Router(RouterSettings(workers=workers, mode="disaggregated", pd_dialect=dialect, decision_headers=True))


def request_for(kind: Kind, **fields: object) -> Exchange:
    messages = [{"role": "user", "content": "one two three"}]
    limits = {"max_tokens": TOKENS, "ignore_eos": True}
    options = {"stream": True, "stream_options": {"include_usage": True}} if kind == "stream" else {}
    return Exchange(body=json.dumps({"model": "m", "messages": messages, **limits, **options, **fields}).encode())


def usage_of(exchange: Exchange, kind: Kind) -> dict[str, object]:
    """What a whole answer says of itself."""
    assert exchange.status == 200
    assert exchange.finished_cleanly
    if kind == "json":
        usage = json.loads(exchange.body)["usage"]
    else:
        *_, last, done, nothing = exchange.body.decode().split("\n\n")
        assert (done, nothing) == ("data: [DONE]", "")
        usage = json.loads(last.removeprefix("data: "))["usage"]
    assert isinstance(usage, dict)
    return usage


async def nothing_is_left(router: Router, simulators: list[Simulator]) -> None:
    """All counters are at zero at once, and no worker works on anything in the end."""
    stats = router.stats()
    assert [counters(worker) for worker in stats.workers] == [(0, 0, 0, 0)] * len(simulators)
    assert (stats.exchanges, stats.leases) == (0, 0)
    with anyio.fail_after(SOON):
        for worker in simulators:
            while await anyio.to_thread.run_sync(worker.active):
                pass


@every_dialect
@every_kind
async def test_an_answer(simulators: list[Simulator], dialect: str, kind: Kind) -> None:
    """One worker prefills, another one decodes the answer that the client gets, and neither is hurried."""
    for worker in simulators:
        worker.new_notes()
    async with router_over(simulators, dialect) as router:
        exchange = request_for(kind)
        began = anyio.current_time()
        async with exchange.running(RouterMiddleware(unreachable_app, router=router), timeout=SOON):
            await exchange.started()
            assert anyio.current_time() - began >= PREFILL_SECONDS * 0.99
        taken = anyio.current_time() - began

        assert usage_of(exchange, kind) == {"prompt_tokens": 4, "completion_tokens": TOKENS, "total_tokens": 4 + TOKENS}
        if dialect == "vllm":  # one after the other
            assert taken >= (PREFILL_SECONDS + TOKENS * SECONDS_PER_TOKEN) * 0.99
        decode = exchange.header("x-router-decode-url")[0].decode()
        assert decode in [worker.url for worker in simulators[1:]]
        assert exchange.header("x-router-prefill-url") == [simulators[0].url.encode()]
        await nothing_is_left(router, simulators)

    notes = {worker.url: [note["output_tokens"] for note in worker.new_notes()] for worker in simulators}
    assert notes[decode] == [TOKENS]
    assert notes[simulators[0].url] == [1 if dialect == "vllm" else TOKENS]
    assert sum(map(len, notes.values())) == 2


@every_dialect
async def test_many_answers_at_once(simulators: list[Simulator], dialect: str) -> None:
    """Side by side, requests are prefilled on the one and spread over the two others, and take no turns."""
    exchanges = [request_for(KINDS[number % 2]) for number in range(24)]
    async with router_over(simulators, dialect) as router:
        app = RouterMiddleware(unreachable_app, router=router)
        began = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for exchange in exchanges:
                tasks.start_soon(functools.partial(exchange.run, app, timeout=SOON))
        assert anyio.current_time() - began < len(exchanges) * PREFILL_SECONDS
        await nothing_is_left(router, simulators)

    for number, exchange in enumerate(exchanges):
        assert usage_of(exchange, KINDS[number % 2])["completion_tokens"] == TOKENS
    shares = Counter(exchange.header("x-router-decode-url")[0].decode() for exchange in exchanges)
    assert shares == {worker.url: len(exchanges) // 2 for worker in simulators[1:]}


@every_dialect
@every_kind
async def test_a_refusal(simulators: list[Simulator], dialect: str, kind: Kind) -> None:
    """What the workers refuse, the client is told as they said it."""
    async with router_over(simulators, dialect) as router:
        exchange = await request_for(kind, temperature=99).run(RouterMiddleware(unreachable_app, router=router))
        assert exchange.status == 400
        assert "temperature" in exchange.body.decode()
        await nothing_is_left(router, simulators)


@every_dialect
@every_kind
@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_a_client_that_leaves(simulators: list[Simulator], dialect: str, kind: Kind, stage: str) -> None:
    """A client that leaves while its prompt is read, or while its answer is written, leaves nothing behind."""
    async with router_over(simulators, dialect) as router:
        exchange = request_for(kind, max_tokens=100)
        async with exchange.running(RouterMiddleware(unreachable_app, router=router), timeout=SOON):
            with anyio.fail_after(SOON):
                if stage == "decode" and kind == "stream":
                    await exchange.body_at_least(1)
                else:
                    workers = simulators[1:] if stage == "decode" else simulators[:1]
                    while not any([await anyio.to_thread.run_sync(worker.active) for worker in workers]):
                        pass
            exchange.disconnect()
        assert not exchange.complete
        await nothing_is_left(router, simulators)

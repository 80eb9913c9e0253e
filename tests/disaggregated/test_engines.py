"""The fake engines alone, asked by a client of two legs that was written by hand: they are what they claim to be."""

from __future__ import annotations

import itertools
import uuid
from typing import TYPE_CHECKING, cast

import anyio
import anyio.lowlevel
import httpx
import pytest

from tests.disaggregated.engines.dialects import DIALECTS, HOST
from tests.disaggregated.engines.engine import ROUTES
from tests.disaggregated.engines.job import STAGES, Job, Trouble
from tests.disaggregated.engines.processes import SOON, EngineProcess, Engines
from tests.instruments import BACKENDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from tests.disaggregated.engines.dialects import Body
    from tests.disaggregated.engines.job import Role, Stage

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", BACKENDS[:1])]

CHAT, COMPLETIONS = ROUTES
ROOMS = itertools.count()
ASK_VLLM: Body = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@pytest.fixture(scope="module", params=sorted(DIALECTS))
def processes(request: pytest.FixtureRequest) -> Iterator[Engines]:
    """Engines for all tests of a dialect."""
    with Engines(request.param, decodes=1) as engines:
        yield engines


@pytest.fixture
async def engines(processes: Engines) -> Engines:
    """The same, all alive and idle, and as if they were new."""
    await processes.fresh()
    return processes


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=SOON, trust_env=False, verify=False) as client:
        yield client


class Client:
    """Sends one request to both engines, as their dialect wants it."""

    def __init__(self, http: httpx.AsyncClient, engines: Engines, path: str = CHAT, **fields: object) -> None:
        self._http = http
        self._path = path
        self.engines = engines
        prompt: Body = {"messages": [{"role": "user", "content": "Hello"}]} if path == CHAT else {"prompt": "Hello"}
        body: Body = {"model": "m", "max_tokens": 9, **prompt, **fields}
        prefill, decode = engines.prefill.place, engines.decodes[0].place
        match engines.dialect:
            case "fastdeploy":
                body["request_id"] = str(uuid.uuid4())
                body["disaggregate_info"] = {
                    "prefill_ip": HOST,
                    "decode_ip": HOST,
                    "prefill_connector_port": prefill.connector_port,
                    "decode_connector_port": decode.connector_port,
                    "decode_device_ids": decode.devices,
                    "decode_rdma_ports": decode.rdma_ports,
                    "decode_tp_size": 1,
                    "transfer_protocol": "ipc",
                }
            case "sglang":
                body |= {
                    "bootstrap_host": HOST,
                    "bootstrap_port": prefill.connector_port,
                    "bootstrap_room": next(ROOMS),
                }
        self.decode_body = body
        self.prefill_body = dict(body)
        if engines.dialect == "vllm":
            limits = ["max_tokens", "max_completion_tokens"] if path == CHAT else ["max_tokens"]
            self.prefill_body |= {**dict.fromkeys(limits, 1), "stream": False, "kv_transfer_params": ASK_VLLM}

    async def ask_prefill(self) -> httpx.Response:
        answer = await self._http.post(self.engines.prefill.url + self._path, json=self.prefill_body)
        if self.engines.dialect == "vllm" and answer.is_success:
            self.decode_body["kv_transfer_params"] = answer.json()["kv_transfer_params"]
        return answer

    async def ask_decode(self) -> httpx.Response:
        return await self._http.post(self.engines.decodes[0].url + self._path, json=self.decode_body)

    async def ask(self) -> httpx.Response:
        """Return the decode engine's answer."""
        if self.engines.dialect == "vllm":
            assert (await self.ask_prefill()).is_success
            return await self.ask_decode()

        answers: list[httpx.Response] = []

        async def prefill() -> None:
            assert (await self.ask_prefill()).is_success

        with anyio.fail_after(SOON):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(prefill)
                answers.append(await self.ask_decode())
        return answers[0]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
async def test_both_legs_together(engines: Engines, http: httpx.AsyncClient, path: str, stream: bool) -> None:
    """Where both legs are as they should be, the decode engine answers, and nothing is left."""
    answer = await Client(http, engines, path, stream=stream).ask()

    assert answer.status_code == 200
    if stream:
        assert answer.text.count("data: ") == 4
        assert answer.text.endswith("data: [DONE]\n\n")
    else:
        choice = answer.json()["choices"][0]
        assert (choice["message"]["content"] if path == CHAT else choice["text"]) == "0 1 2 "
    for state in await engines.idle():
        assert (state["refused"], state["kept"], state["waiting"]) == ([], [], 0)


async def test_decode_hangs_without_prefill(engines: Engines, http: httpx.AsyncClient) -> None:
    """A decode engine whose prefill leg never came waits for it, and stops when its client leaves."""
    client = Client(http, engines, stream=True)
    if engines.dialect == "vllm":
        await client.ask_prefill()
        client.decode_body["kv_transfer_params"] = {
            **cast("Body", client.decode_body["kv_transfer_params"]),
            "remote_request_id": "of nobody",
        }
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(client.ask_decode)
        assert (await engines.decodes[0].state(waiting=1))["running"] == 1
        tasks.cancel_scope.cancel()

    assert (await engines.decodes[0].state(running=0))["waiting"] == 0


async def test_prefill_without_decode(engines: Engines, http: httpx.AsyncClient) -> None:
    """A prefill whose cache nobody fetches waits for that and frees it when it is left; vLLM's keeps it for later."""
    client = Client(http, engines)
    if engines.dialect == "vllm":
        await client.ask_prefill()
        assert len(cast("list[str]", (await engines.prefill.state(running=0))["kept"])) == 1
        assert (await client.ask_decode()).is_success
    else:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.ask_prefill)
            await engines.prefill.state(waiting=1)
            tasks.cancel_scope.cancel()

    assert (await engines.prefill.state(running=0))["kept"] == []


async def test_decode_hangs_when_prefill_dies(engines: Engines, http: httpx.AsyncClient) -> None:
    """The worst of the ways that real engines fail in: nobody tells a decode engine that its prefill engine is dead."""
    client = Client(http, engines, job=Job(prefill=Trouble(what="hang", at="middle")).field())
    if engines.dialect == "vllm":
        client = Client(http, engines)
        await client.ask_prefill()
        engines.prefill.kill()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(client.ask_decode)
        await engines.decodes[0].state(waiting=1)
        engines.prefill.kill()
        assert (await engines.decodes[0].state(waiting=1))["running"] == 1
        tasks.cancel_scope.cancel()

    await engines.decodes[0].state(running=0, waiting=0)


async def test_vllm_decodes_alone(engines: Engines, http: httpx.AsyncClient) -> None:
    """vLLM's decode engine serves a request that names no cache; those of the other dialects refuse it."""
    client = Client(http, engines)
    for name in ("disaggregate_info", "bootstrap_room"):
        client.decode_body.pop(name, None)
    answer = await client.ask_decode()

    assert answer.status_code == (200 if engines.dialect == "vllm" else 400)
    assert (await engines.decodes[0].state(running=0))["alone"] == (engines.dialect == "vllm")


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("at", STAGES)
@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
async def test_resets(engines: Engines, http: httpx.AsyncClient, role: Role, at: Stage, stream: bool) -> None:
    """An engine can be made to reset the connection at each stage, and works on."""
    trouble = Trouble(what="reset", at=at)
    job = Job(prefill=trouble) if role == "prefill" else Job(decode=trouble)
    client = Client(http, engines, stream=stream, job=job.field())

    with pytest.raises(httpx.TransportError):
        await _both(client, role)
    for state in await engines.idle():
        assert state["refused"] == []
    assert (await Client(http, engines).ask()).is_success


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("at", STAGES)
async def test_hangs(engines: Engines, http: httpx.AsyncClient, role: Role, at: Stage) -> None:
    """An engine can be made to hang at each stage, and stops when its client leaves."""
    trouble = Trouble(what="hang", at=at)
    job = Job(prefill=trouble) if role == "prefill" else Job(decode=trouble)
    client = Client(http, engines, job=job.field())
    engine = engines.prefill if role == "prefill" else engines.decodes[0]

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_both, client, role)
        assert (await engine.state(stuck=1))["running"] == 1
        tasks.cancel_scope.cancel()

    for state in await engines.idle():
        assert (state["stuck"], state["waiting"]) == (0, 0)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_errors_and_deaths(engines: Engines, http: httpx.AsyncClient, role: Role) -> None:
    """An engine can be made to answer with an error, and to die; another one takes the place of a dead one."""
    engine = engines.prefill if role == "prefill" else engines.decodes[0]
    for trouble in (Trouble(what="error", status=418), Trouble(what="exit"), Trouble(what="exit", port=1)):
        client = Client(http, engines, job=Job(prefill=trouble, decode=trouble).field())
        ask = client.ask_prefill if role == "prefill" else client.ask_decode
        match trouble:
            case Trouble(what="error"):
                assert (await ask()).status_code == 418
            case Trouble(port=1):  # it is another's trouble
                engines.revive()
                assert (await Client(http, engines, job=Job(prefill=trouble).field()).ask()).is_success
            case _:
                with pytest.raises(httpx.TransportError):
                    await ask()
                await engine.dead()


async def test_what_is_wrong_is_refused_and_noted(engines: Engines, http: httpx.AsyncClient) -> None:
    """A request that isn't as its leg must be is a 400 with the reason, which the engine's state tells, too."""
    client = Client(http, engines)
    client.prefill_body.update({"disaggregate_info": 1, "bootstrap_host": "h", "kv_transfer_params": None})
    answer = await client.ask_prefill()

    assert answer.status_code == 400
    reason = answer.json()["error"]["message"]
    assert "must be" in reason
    assert (await engines.prefill.state(running=0))["refused"] == [reason]


async def test_legs_of_two_requests_are_refused(engines: Engines, http: httpx.AsyncClient) -> None:
    """What must be the same on both legs is compared: FastDeploy's bodies, vLLM's parameters to the last bit."""
    client = Client(http, engines)
    if engines.dialect == "fastdeploy":
        client.decode_body["more"] = 1
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.ask_prefill)
            answer = await client.ask_decode()
            tasks.cancel_scope.cancel()
    else:
        await (client.ask_prefill if engines.dialect == "vllm" else _nothing)()
        params = cast("Body", client.decode_body.setdefault("kv_transfer_params", {}))
        params["remote_block_ids"] = [9007199254740992, 2**63 + 1]
        client.decode_body["bootstrap_room"] = 0.5
        answer = await client.ask_decode()

    assert answer.status_code == 400


async def _nothing() -> None:
    await anyio.lowlevel.checkpoint()


async def test_engines_end_with_their_parent() -> None:
    """The end of its standard input ends an engine."""
    engine = EngineProcess("vllm", "decode")
    try:
        engine.start()
        engine.wait_until_ready()
        engine.close_input()
        await engine.dead()
    finally:
        engine.kill()


async def _both(client: Client, role: Role) -> None:
    """Send both legs; raise what comes of the one of `role`."""
    if client.engines.dialect == "vllm":
        await client.ask()
        return

    failures: list[httpx.TransportError] = []

    async def leg(ask: Callable[[], Awaitable[httpx.Response]], mine: bool) -> None:
        try:
            await ask()
        except httpx.TransportError as error:
            if mine:
                failures.append(error)
                tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(leg, client.ask_prefill, role == "prefill")
        tasks.start_soon(leg, client.ask_decode, role == "decode")
    if failures:
        raise failures[0]

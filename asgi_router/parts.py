"""Owns how the parts of a router are made from its settings."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from asgi_router.disaggregated import DIALECTS
from asgi_router.disaggregated.mode import Disaggregated
from asgi_router.disaggregated.pairing import Pairing
from asgi_router.fleet.health import HealthMonitor
from asgi_router.fleet.load import LoadMonitor
from asgi_router.fleet.register_file import read_register_file
from asgi_router.fleet.registration import RegistrationError
from asgi_router.mixed import Mixed
from asgi_router.peers import Peers
from asgi_router.prefix_key import BYTES_PER_TOKEN
from asgi_router.scheduling.breaker import Breaker
from asgi_router.scheduling.policies import POLICIES, REMOTE_POLICIES, PolicyOptions
from asgi_router.scheduling.prefix_index import PrefixIndex
from asgi_router.scheduling.scheduler import Scheduler
from asgi_router.scheduling.sessions import Sessions
from asgi_router.scheduling.slot_picture import SlotClock, SlotPicture
from asgi_router.scheduling.state import WorkerState
from asgi_router.settings import SettingsError
from asgi_router.upstream.upstream import Upstream

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    import httpx

    from asgi_router.fleet.registry import Registry
    from asgi_router.scheduling.picture import Picture
    from asgi_router.scheduling.policies import Policy
    from asgi_router.scheduling.token_scales import TokenScales
    from asgi_router.settings import RouterSettings
    from asgi_router.upstream.calls import WorkerCalls
    from asgi_router.worker import Worker


PREFIX_GROWTH = 4
"""Times its capacity to which a worker's prefix index may grow, where the worker turns out to hold more."""


def prefix_capacity(settings: RouterSettings) -> int:
    """Return how many blocks of the base size a worker's prefix index may hold at first."""
    return settings.prefix_capacity_tokens * BYTES_PER_TOKEN // settings.prefix_block_bytes


def most_blocks(settings: RouterSettings) -> int:
    """Return how many blocks of the base size a worker's prefix index may ever hold."""
    return prefix_capacity(settings) * (PREFIX_GROWTH if settings.prefix_adapt else 1)


def new_state(settings: RouterSettings, clock: Callable[[], float]) -> Callable[[Worker], WorkerState]:
    """Return what makes the state of a worker that joins."""

    most = most_blocks(settings) if settings.prefix_adapt else None
    slot_clock = SlotClock()

    def picture(worker: Worker) -> Picture:
        if worker.slots is not None:
            return SlotPicture(worker.slots, most_blocks(settings), slot_clock)
        return PrefixIndex(prefix_capacity(settings), settings.prefix_ttl, clock, most)

    def make(worker: Worker) -> WorkerState:
        return WorkerState(
            worker,
            picture(worker),
            Breaker(settings.breaker_failures, settings.breaker_cooldown, clock),
            known_as=settings.local_url or "" if worker.is_local else "",
        )

    return make


def configured_workers(settings: RouterSettings) -> Iterator[tuple[Worker, bool]]:
    """Yield the workers of the settings and of `REGISTER_FILE`, and whether nobody knows that they are up.

    Raises:
        SettingsError: the file can't be read, or something in it is wrong.
    """
    for worker in settings.workers:
        yield worker, False
    if settings.register_file is None:
        return

    try:
        listed = read_register_file(settings.register_file, mode=settings.mode)
    except RegistrationError as exc:
        raise SettingsError(f"ASGI_ROUTER_REGISTER_FILE: {exc}") from None
    for worker in listed:
        if any(worker.url == known.url for known in settings.workers):
            raise SettingsError(f"ASGI_ROUTER_REGISTER_FILE: {worker.url!r} is in ASGI_ROUTER_WORKERS, too")
        yield worker, True


def scheduler_maker(
    settings: RouterSettings,
    clock: Callable[[], float],
    rng: random.Random,
    scales: TokenScales | None,
    on_release: Callable[[], None],
) -> Callable[[str, Policy | None], Scheduler]:
    """Return what makes a scheduler that chooses by the policy of a name, or by a chooser of the user's."""
    options = PolicyOptions(**{field.name: getattr(settings, field.name) for field in fields(PolicyOptions)})

    def make(policy: str, chooser: Policy | None) -> Scheduler:
        return Scheduler(
            chooser or POLICIES[policy](options, rng),
            policy_name=type(chooser).__name__ if chooser else policy,
            block_bytes=settings.prefix_block_bytes,
            max_blocks=most_blocks(settings),
            max_concurrent=settings.max_concurrent_per_worker,
            sessions=Sessions(settings.session_ttl, clock) if settings.session_ttl else None,
            scales=scales,
            on_release=on_release,
        )

    return make


def new_mode(
    settings: RouterSettings,
    workers: Registry,
    transport: httpx.AsyncBaseTransport,
    new_scheduler: Callable[[str, Policy | None], Scheduler],
    policy: Policy | None = None,
) -> Mixed | Disaggregated:
    """Return how the workers share the work; `policy` goes before the one that chooses who prefills."""
    upstream = Upstream(transport, connect_timeout=settings.connect_timeout, write_timeout=settings.idle_timeout)
    if settings.mode == "disaggregated":
        prefill = new_scheduler(settings.prefill_policy, policy)
        decode = new_scheduler(settings.decode_policy, None)
        dialect = DIALECTS[settings.pd_dialect]
        pairing = Pairing(workers, prefill, decode, dialect, settings.pd_skip_prefill_below)
        return Disaggregated(settings, pairing, upstream)

    peers = Peers(settings.peer_token.get_secret_value() if settings.peer_token else None)
    return Mixed(settings, workers, new_scheduler(settings.policy, policy), upstream, peers)


def new_monitor(
    settings: RouterSettings, workers: Registry, transport: httpx.AsyncBaseTransport, on_change: Callable[[], None]
) -> HealthMonitor:
    """Return what probes the workers' health."""
    return HealthMonitor(
        workers,
        transport,
        path=settings.health_path,
        interval=settings.health_interval,
        timeout=settings.health_timeout,
        failures=settings.health_failures,
        successes=settings.health_successes,
        on_change=on_change,
    )


def new_load_monitor(
    settings: RouterSettings, workers: Registry, calls: WorkerCalls, clock: Callable[[], float]
) -> LoadMonitor | None:
    """Return what asks the workers how busy they are, if a policy wants to know.

    Raises:
        SettingsError: the extra that reads the answers is missing.
    """
    apart = settings.mode == "disaggregated"
    policies = (settings.prefill_policy, settings.decode_policy) if apart else (settings.policy,)
    if REMOTE_POLICIES.isdisjoint(policies):
        return None

    age, interval = settings.load_max_age, settings.load_interval
    try:
        return LoadMonitor(workers, calls, path=settings.load_path, interval=interval, max_age=age, clock=clock)
    except ImportError:
        extra = "pip install 'asgi-router[prometheus]'"
        name = "PREFILL_POLICY or DECODE_POLICY" if apart else "POLICY"
        raise SettingsError(f"ASGI_ROUTER_{name}: {', '.join(policies)} needs the extra: {extra}") from None

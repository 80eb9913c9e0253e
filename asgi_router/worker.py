"""Owns the description of a worker: where it listens and what it serves. Plain data, no counters, no I/O."""

from __future__ import annotations

import enum
import ipaddress
import re
from dataclasses import dataclass


class Role(enum.StrEnum):
    """What part of a completion a worker does."""

    MIXED = "mixed"
    PREFILL = "prefill"
    DECODE = "decode"


MAX_SLOTS = 256
"""What a worker may have: as many sequences as llama.cpp allows (`LLAMA_MAX_SEQ`)."""

LOCAL = "local"
"""What stands for the wrapped app where other workers have a URL. (A host of that name is `http://local`.)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One inference worker, as its operator describes it.

    A description can be shared between routers: live state (counters, prefix blocks, health) belongs to the
    router that uses it. The fields from `connector_port` on are those that a FastDeploy engine registers with;
    disaggregated mode needs them.

    Raises:
        ValueError: the URL is not a plain http(s) origin, with or without a base path; `models` or `slots` is wrong.
    """

    url: str
    """Base URL without a trailing slash. `http://` is assumed where the scheme is missing. `local` is the app that the
    middleware wraps: a worker in this process."""
    role: Role = Role.MIXED
    models: tuple[str, ...] = ()
    """Models served here, by the name that requests use. Empty: every model."""
    connector_port: int | None = None
    engine_worker_queue_port: int | None = None
    metrics_port: int | None = None
    transfer_protocol: tuple[str, ...] = ()
    rdma_ports: tuple[str, ...] = ()
    device_ids: tuple[str, ...] = ()
    tp_size: int | None = None
    slots: int | None = None
    """How many prompts its cache holds, where each is held for itself: llama.cpp's `-np`, if it keeps no others in host
    memory (`--cache-ram 0`). None: prompts that begin alike share what they have in common."""

    @property
    def is_local(self) -> bool:
        """Whether it is the wrapped app itself."""
        return self.url == LOCAL

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", normalise_url(self.url))
        object.__setattr__(self, "role", Role(self.role))
        models: object = self.models
        if isinstance(models, str):  # a text would be searched for a model's name
            raise ValueError("models must be a tuple of names, not one name")
        if self.slots is not None and not 1 <= self.slots <= MAX_SLOTS:
            raise ValueError(f"slots must be from 1 to {MAX_SLOTS}, or None")


_URL = re.compile(
    r"(?P<scheme>https?)://"
    r"(?P<host>[a-z0-9._-]+|\[(?P<ipv6>[0-9a-f:.]+)\])"
    r"(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<path>/[!$&-;=A-Z_a-z~%]*)?",  # printable ASCII without what would end it or is never in a path
    re.ASCII | re.IGNORECASE,  # without ASCII, [a-z] has four more letters in it
)
_DEFAULT_PORTS = {"http": 80, "https": 443}


def normalise_url(url: str) -> str:
    """Return `url` with a scheme and a lower-case host, without a default port and without a trailing slash.

    `local` stands for itself.

    Raises:
        ValueError: it is no http(s) URL, or has a part that a base URL can't have (user info, query, fragment).
            The message doesn't repeat it: there may be a password in the wrong place.
    """
    url = url.strip()
    if url.lower() == LOCAL:
        return LOCAL
    parts = _URL.fullmatch(url if "://" in url else f"http://{url}")
    if parts is None:
        raise ValueError("a worker URL must be like http://host:8000 or https://host/base, in ASCII, and no more")

    scheme, host, path = parts["scheme"].lower(), parts["host"].lower(), parts["path"] or ""
    port = int(parts["port"]) if parts["port"] else _DEFAULT_PORTS[scheme]
    if not 1 <= port <= 65535:
        raise ValueError("the port of a worker URL must be from 1 to 65535")
    try:
        if parts["ipv6"]:
            host = f"[{ipaddress.IPv6Address(parts['ipv6'])}]"
        elif re.fullmatch(r"[0-9.]+", host):
            host = str(ipaddress.IPv4Address(host))
    except ValueError:
        raise ValueError("the address in a worker URL is no IP address") from None

    path = path.rstrip("/")
    if path.endswith("/v1"):
        raise ValueError("a worker URL ends before /v1: the path of a request is appended to it")

    origin = f"{scheme}://{host}" if port == _DEFAULT_PORTS[scheme] else f"{scheme}://{host}:{port}"
    return origin + path

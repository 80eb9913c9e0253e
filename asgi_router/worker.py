"""Owns the description of a worker: where it listens and what it serves. Plain data, no counters, no I/O."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from urllib.parse import urlsplit


class Role(enum.StrEnum):
    """What part of a completion a worker does."""

    MIXED = "mixed"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One inference worker, as its operator describes it.

    A description can be shared between routers: live state (counters, prefix blocks, health) belongs to the
    router that uses it. The fields from `connector_port` on are those that a FastDeploy engine registers with;
    disaggregated mode needs them.

    Raises:
        ValueError: the URL is not a plain http(s) origin, with or without a base path.
    """

    url: str
    """Base URL without a trailing slash. `http://` is assumed where the scheme is missing."""
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", normalise_url(self.url))
        object.__setattr__(self, "role", Role(self.role))


def normalise_url(url: str) -> str:
    """Return `url` with a scheme and a lower-case host, and without a trailing slash.

    Raises:
        ValueError: it has no host, a bad port, another scheme than http(s), or a part that a base URL can't
            have (user info, query, fragment, white space). The message never repeats a password.
    """
    url = url.strip()
    if "://" not in url:
        url = f"http://{url}"
    if re.search(r"[\s\x00-\x1f\x7f\\]", url):
        raise ValueError("a worker URL must not contain white space, control characters or backslashes")

    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as exc:
        raise ValueError("a worker URL has a malformed host or port") from exc

    if parts.username is not None or parts.password is not None:
        raise ValueError("a worker URL must not contain a user name or password")
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"a worker URL must be http or https, not {parts.scheme!r}")
    if not parts.hostname or port == 0:
        raise ValueError(f"worker URL {url!r} has no host or no usable port")
    if parts.query or parts.fragment or url.endswith(("?", "#")):
        raise ValueError(f"worker URL {url!r} must not have a query or a fragment")

    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    origin = f"{parts.scheme}://{host}" if port is None else f"{parts.scheme}://{host}:{port}"
    return origin + parts.path.rstrip("/")

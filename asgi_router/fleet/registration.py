"""Owns what a worker says of itself when it registers: FastDeploy's payload, and what is wrong with one.

Where this differs from FastDeploy's own router:

1. IPv6 addresses are put into brackets, and host names are accepted (F-85).
2. A port of 0 or "" is one that the worker doesn't have: engines mean it so (F-86).
3. A list that is missing or null is empty (F-88).
4. A role that is null is refused; it isn't mixed (F-89).
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from asgi_router.worker import Role, Worker
from asgi_router.worker_fields import read_names, read_number, read_role, read_slots

if TYPE_CHECKING:
    from collections.abc import Callable

_HOST = re.compile(
    r"(?:(?P<scheme>https?)://)?(?:\[(?P<ipv6>[0-9a-f:.]+)\]|(?P<host>[0-9a-z:._-]{1,253}))", re.ASCII | re.IGNORECASE
)
# What the C library takes for an IPv4 address though it looks like a name: 0x7f000001, 0x7f.1
_HEX_ADDRESS = re.compile(r"(?=.*x)(0x[0-9a-f]*|[0-9]+)(\.(0x[0-9a-f]*|[0-9]+))*\.?", re.IGNORECASE)


class RegistrationError(ValueError):
    """The worker can't be registered. The message says why, and never repeats the payload."""


def read_registration(body: bytes, *, mode: str) -> Worker:
    """Read the JSON that a FastDeploy engine registers with. See `read_worker`."""
    try:
        payload = json.loads(body)
    except (ValueError, RecursionError):
        raise RegistrationError("Invalid InstanceInfo JSON format: not valid JSON") from None

    return read_worker(payload, mode=mode)


def read_worker(payload: object, *, mode: str) -> Worker:
    """Read what a FastDeploy engine registers with, and what an operator may add: `models` and `slots`.

    Args:
        payload: an object; fields that are not known are ignored.
        mode: the router's. The ports that prefill and decode workers use among themselves matter only if it is
            not `mixed`: in mixed mode one that is out of range counts as unset, as FastDeploy accepts it there.

    Raises:
        RegistrationError: it is no such object, a field is wrong, or the role doesn't fit the mode.
    """
    if not isinstance(payload, dict):
        raise RegistrationError("Invalid InstanceInfo JSON format: not an object")

    mixed = mode == "mixed"
    readers: dict[str, Callable[[object], object]] = {
        "role": read_role,
        "port": _required_port,
        "metrics_port": read_number,
        "connector_port": _unused_port if mixed else read_number,
        "engine_worker_queue_port": _unused_port if mixed else read_number,
        "rdma_ports": read_names if mixed else _ports,
        "transfer_protocol": _protocols,
        "device_ids": _device_ids,
        "tp_size": read_number,
        "models": read_names,
        "slots": read_slots,
    }
    fields: dict[str, Any] = {}
    for name, read in readers.items():
        try:
            fields[name] = read(payload.get(name))
        except ValueError as exc:
            reason = str(exc) if name in payload else "is required"
            raise RegistrationError(f"invalid InstanceInfo format: {name} {reason}") from None

    if mixed != (fields["role"] is Role.MIXED):
        raise RegistrationError(
            "only MIXED instances are allowed" if mixed else "splitwise mode only supports PREFILL/DECODE instances"
        )
    port = fields.pop("port")
    fields["metrics_port"] = fields["metrics_port"] or port
    return Worker(url=_base_url(payload.get("host_ip"), port), **fields)


def _base_url(host: object, port: int) -> str:
    parts = _HOST.fullmatch(host.strip()) if isinstance(host, str) else None
    if parts is not None and not _HEX_ADDRESS.fullmatch(parts["host"] or ""):
        name = parts["ipv6"] or parts["host"]
        brackets = parts["ipv6"] or ":" in name
        try:
            return Worker(url=f"{parts['scheme'] or 'http'}://{f'[{name}]' if brackets else name}:{port}").url
        except ValueError:
            pass
    raise RegistrationError(
        "invalid InstanceInfo format: host_ip must be an IP address or host name, with or without http(s)://"
    )


def _required_port(value: object) -> int:
    port = read_number(value)
    if port is None:
        raise ValueError("must be a whole number from 1 to 65535")
    return port


def _unused_port(value: object) -> int | None:
    try:
        return read_number(value)
    except ValueError:
        if isinstance(value, str | int) and not isinstance(value, bool):
            return None
        raise


def _ports(value: object) -> tuple[str, ...]:
    ports = read_names(value)
    for port in ports:
        _required_port(port)
    return ports


def _protocols(value: object) -> tuple[str, ...]:
    names = tuple(name.strip().lower() for name in read_names(value))
    if not set(names) <= {"ipc", "rdma"}:
        raise ValueError("must be a list of ipc and rdma")
    return names


def _device_ids(value: object) -> tuple[str, ...]:
    if isinstance(value, list):
        value = [int(item) if isinstance(item, float) and item.is_integer() else item for item in value]
    return read_names(value)

"""Owns which hosts a worker may register under: networks for addresses, patterns for names.

A name is only compared, never resolved: what it resolves to may change between a check and a request.
"""

from __future__ import annotations

import ipaddress
import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def read_rule(text: str) -> Network | str:
    """Read a network (an address alone is one of one address) or a pattern of host names, in lower case.

    Raises:
        ValueError: it is neither, or a pattern that looks like an address: those are matched by networks only.
    """
    text = text.strip().lower()
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        looks_like_address = re.search("[0-9]", text) and not re.search("[a-z]", text)
        if looks_like_address or not re.fullmatch("[a-z0-9._*?-]+", text):
            raise ValueError(
                "must be a network like 10.0.0.0/8, without host bits, or a pattern of host names like *.gpu.internal"
            ) from None
    return text


class AllowedHosts:
    """The hosts that some rules allow.

    Args:
        rules: what `read_rule` reads. None at all: every host is allowed.
    """

    def __init__(self, rules: Iterable[str]) -> None:
        self._rules = tuple(map(read_rule, rules))

    def __contains__(self, host: object) -> bool:
        """Tell whether a host is allowed: an IP address without brackets, or a name."""
        text = str(host).lower()
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return not self._rules or any(isinstance(rule, str) and fnmatchcase(text, rule) for rule in self._rules)

        # Linux connects ::ffff:10.0.0.1 to 10.0.0.1, so that is what has to be allowed.
        address = getattr(address, "ipv4_mapped", None) or address
        return not self._rules or any(not isinstance(rule, str) and address in rule for rule in self._rules)

"""Owns the proof that hosts are allowed by network and by name, and that no spelling slips through."""

from __future__ import annotations

import pytest

from asgi_router.addresses import AllowedHosts, read_rule


@pytest.mark.parametrize(
    ("rules", "host", "allowed"),
    [
        ([], "10.0.0.1", True),
        ([], "anything", True),
        (["10.0.0.0/8"], "10.255.0.1", True),
        (["10.0.0.0/8"], "11.0.0.1", False),
        (["10.0.0.7"], "10.0.0.7", True),
        (["10.0.0.7"], "10.0.0.8", False),
        (["10.0.0.0/8"], "fd00::1", False),
        (["fd00::/8"], "fd00::1", True),
        (["fd00::/8"], "FD00::1", True),
        (["fd00::/8"], "fe80::1", False),
        (["::/0"], "10.0.0.1", False),
        (["10.0.0.0/8"], "::ffff:10.0.0.1", True),
        (["10.0.0.0/8"], "::ffff:a9fe:a9fe", False),
        (["::/0"], "::ffff:169.254.169.254", False),
        (["*.gpu.internal"], "a.gpu.internal", True),
        (["*.GPU.internal"], "A.gpu.INTERNAL", True),
        (["*.gpu.internal"], "gpu.internal", False),
        (["*.gpu.internal"], "a.gpu.internal.evil.org", False),
        (["worker-?"], "worker-1", True),
        (["worker-?"], "worker-10", False),
        (["*"], "anything", True),
        (["*"], "10.0.0.1", False),
        (["*"], "::1", False),
        (["0.0.0.0/0"], "anything", False),
        (["10.0.0.0/8", "w*"], "w1", True),
        (["10.0.0.0/8", "w*"], "10.1.1.1", True),
    ],
)
def test_allowed_hosts(rules: list[str], host: str, allowed: bool) -> None:
    """Addresses are allowed by networks only, names by patterns only; with no rule everything is."""
    assert (host in AllowedHosts(rules)) is allowed


@pytest.mark.parametrize("text", ["10.0.0.0/8", " fd00::/8 ", "10.0.0.1", "::1", "*", "*.Internal", "w?", "a_b-1.x"])
def test_rules(text: str) -> None:
    """Networks, addresses and patterns are rules, whatever is around them."""
    assert str(read_rule(text)).removesuffix("/32").removesuffix("/128") == text.strip().lower()


@pytest.mark.parametrize(
    "text",
    ["", " ", "10.0.0.1/8", "10.0.0.0/33", "10.0.*", "10.*.*.1", "http://a", "a b", "a:80", "[::1]", "ä"],
)
def test_what_is_no_rule(text: str) -> None:
    """A network with host bits, a pattern of addresses, a URL or a port is a mistake, not a rule without effect."""
    with pytest.raises(ValueError, match=r"must be a network like 10\.0\.0\.0/8"):
        read_rule(text)

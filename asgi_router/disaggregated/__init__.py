"""Prefill and decode apart: what the two workers of a pair are told, in the words of each engine."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from asgi_router.disaggregated.dialect import Dialect
from asgi_router.disaggregated.fastdeploy import FastDeploy
from asgi_router.disaggregated.sglang import SGLang
from asgi_router.disaggregated.vllm import Vllm

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["DIALECTS", "Dialect"]

DIALECTS: Mapping[str, Callable[[], Dialect]] = MappingProxyType(
    {"fastdeploy": FastDeploy, "vllm": Vllm, "sglang": SGLang}
)
"""The dialects by their names in `PD_DIALECT`. Each attempt takes a new object."""

"""Owns what a request may ask of the fake engines: the member `job` of its body, which both legs carry."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, cast

if TYPE_CHECKING:
    from collections.abc import Mapping

Role = Literal["prefill", "decode"]
Stage = Literal["begin", "head", "middle"]
STAGES: tuple[Stage, ...] = ("begin", "head", "middle")
"""Before anything is done or said; when the client has the head, but no byte of the body; after the first piece.

In an event stream the head comes before the engine waits for the other leg, as from real ones. In JSON it can't.
"""


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """What goes wrong on one leg.

    Attributes:
        what: `error`: an answer with `status` (its stage is the beginning, whatever `at` says). `hang`: for ever.
            `reset`: a TCP reset. `exit`: the process dies. `slow`: it goes on after `seconds`.
        port: only the engine that listens there has it; 0: each of that role.
    """

    what: Literal["error", "hang", "reset", "exit", "slow"]
    at: Stage = "begin"
    status: int = 500
    seconds: float = 0.0
    port: int = 0


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a request asks for.

    Attributes:
        pieces: of the decode engine's answer.
        prefill, decode: what goes wrong there.
        reschedules: how often a decode engine preempts it: an answer without a stream that ends with `pd_reschedule`
            instead. The attempts are told apart by FastDeploy's suffix of the request id.
    """

    pieces: int = 3
    prefill: Trouble | None = None
    decode: Trouble | None = None
    reschedules: int = 0

    @classmethod
    def of(cls, body: Mapping[str, object]) -> Job:
        """Read it from a request's body; where there is none, nothing goes wrong."""
        fields = dict(cast("Mapping[str, object]", body.get("job") or {}))
        for role in ("prefill", "decode"):
            if fields.get(role):
                fields[role] = Trouble(**cast("dict[str, object]", fields[role]))  # type: ignore[arg-type]
        return cls(**fields)  # type: ignore[arg-type]

    def field(self) -> dict[str, object]:
        """Return it as the value of `job`."""
        return asdict(self)

    def trouble(self, role: Role, port: int) -> Trouble | None:
        """Return what goes wrong at this engine."""
        trouble = self.prefill if role == "prefill" else self.decode
        return trouble if trouble and trouble.port in (0, port) else None

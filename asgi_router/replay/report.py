"""Owns what is told of a replay: the figures of each policy, as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from asgi_router.replay.simulate import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One policy's line. Seconds are simulated ones; shares are from 0 to 1."""

    policy: str
    requests: int
    """That got a first token."""
    hit_rate: float
    """Share of the prompt tokens that the simulated workers had cached."""
    predicted_hit_rate: float
    """The same as the router believed."""
    ttft_mean: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    per_token_mean: float
    """Seconds for each token after the first."""
    per_token_p99: float
    busy: float
    """Share of the time that workers computed, on the average."""
    load_spread: float
    """Requests of the worker that got most, divided by the mean: 1 is even."""
    hot_spots: float
    """Share of the requests that were sent to a worker with a queue while another had none."""
    fell_back: float
    """Share of the requests for which the policy ignored the caches because of its limits."""
    failed: int
    retried: int
    refused: int


def figures(outcome: Outcome) -> Figures:
    """Add up what became of the requests."""
    ttft, per_token = sorted(outcome.ttft), sorted(outcome.per_token)
    chosen = sum(outcome.chosen)
    return Figures(
        policy=outcome.policy,
        requests=len(ttft),
        hit_rate=outcome.cached_tokens / max(1, outcome.prompt_tokens),
        predicted_hit_rate=outcome.predicted_tokens / max(1, outcome.prompt_tokens),
        ttft_mean=_mean(ttft),
        ttft_p50=quantile(ttft, 0.5),
        ttft_p90=quantile(ttft, 0.9),
        ttft_p99=quantile(ttft, 0.99),
        per_token_mean=_mean(per_token),
        per_token_p99=quantile(per_token, 0.99),
        busy=_mean(outcome.busy) / outcome.seconds if outcome.seconds else 0.0,
        load_spread=max(outcome.chosen) * len(outcome.chosen) / max(1, chosen),
        hot_spots=outcome.hot_spots / max(1, chosen),
        fell_back=outcome.reasons["out_of_balance"] / max(1, chosen),
        failed=outcome.failed,
        retried=outcome.retried,
        refused=outcome.refused,
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the ascending values are; 0 where there are none."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


COLUMNS = (
    "policy",
    "hit %",
    "predicted",
    "TTFT mean",
    "p50",
    "p90",
    "p99",
    "ms/token",
    "p99",
    "busy %",
    "spread",
    "hot spots %",
    "fell back %",
)


def cells(line: Figures) -> tuple[str, ...]:
    """Return a line of the table: percent, seconds to the first token, milliseconds a token."""
    return (
        line.policy,
        _percent(line.hit_rate),
        _percent(line.predicted_hit_rate),
        _seconds(line.ttft_mean),
        _seconds(line.ttft_p50),
        _seconds(line.ttft_p90),
        _seconds(line.ttft_p99),
        f"{line.per_token_mean * 1e3:.1f}",
        f"{line.per_token_p99 * 1e3:.1f}",
        f"{line.busy * 100:.0f}",
        f"{line.load_spread:.2f}",
        _percent(line.hot_spots),
        _percent(line.fell_back),
    )


def _percent(share: float) -> str:
    return f"{share * 100:.1f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds < 10 else f"{seconds:.1f}"


def plain_table(lines: Iterable[Figures]) -> str:
    """Return the table as text with aligned columns."""
    rows = [COLUMNS, *map(cells, lines)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def as_json(lines: Iterable[Figures]) -> list[dict[str, object]]:
    """Return the figures as JSON has them."""
    return [asdict(line) for line in lines]

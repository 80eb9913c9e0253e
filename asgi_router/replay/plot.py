"""Owns the picture of a replay: how late the first token comes, and how much was cached. Needs the extra `[replay]`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asgi_router.replay.choosers import ORACLE
from asgi_router.replay.report import figures, quantile

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from asgi_router.replay.simulate import Outcome


def plot(outcomes: Sequence[Outcome], path: Path, title: str, best_hit_rate: float) -> None:
    """Write a picture to `path`, in the format that its suffix names.

    Raises:
        ImportError: matplotlib is missing.
        OSError, ValueError: the file can't be written, or matplotlib doesn't know the format.
    """
    from matplotlib.figure import Figure  # what needs an extra is loaded where it is used; no window, no global state

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    times, hits = figure.subplots(1, 2, width_ratios=(3, 2))
    shares = [at / 200 for at in range(1, 200)]
    for outcome in outcomes:
        ordered = sorted(outcome.ttft)
        values = [max(1e-3, quantile(ordered, share)) for share in shares]
        style = "k--" if outcome.policy == ORACLE else "-"
        times.plot(values, shares, style, label=outcome.policy, linewidth=1.5)
    times.set_xscale("log")
    times.set_xlabel("seconds to the first token")
    times.set_ylabel("share of requests below")
    times.grid(alpha=0.3)
    times.legend(fontsize="small")

    lines = [figures(outcome) for outcome in outcomes]
    names = [line.policy for line in lines]
    hits.barh(names, [line.hit_rate * 100 for line in lines], height=0.5, label="cached")
    hits.plot([line.predicted_hit_rate * 100 for line in lines], names, "k|", markersize=12, label="predicted")
    hits.axvline(best_hit_rate * 100, linestyle=":", color="gray", label="one infinite cache")
    hits.invert_yaxis()
    hits.set_xlabel("% of prompt tokens")
    hits.legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)

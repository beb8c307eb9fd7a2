"""Choosing τ from labelled (text token, image token) pairs: precision, recall and F1, measured and by two Gaussians.

The cosines of all pairs follow f = p · f_true + (1 − p) · f_false, two normal densities with one common σ: AttAnchor's
model. All pairs count, not only the best of each token, whose maxima are not normal.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Sequence
from statistics import NormalDist

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Quality:
    """Precision, recall and F1 of calling a pair related when its cosine reaches ``threshold``."""

    threshold: float
    precision: float  # 1 where nothing reaches the threshold
    recall: float
    f1: float


@dataclasses.dataclass(frozen=True)
class ThresholdFit:
    """The fitted mixture, and the threshold of the highest F1 by it and by the data themselves."""

    p: float  # share of related pairs
    mean_true: float
    mean_false: float
    sigma: float
    n_pairs: int
    by_fit: Quality  # τ* of the fit, with the fit's own precision, recall and F1
    empirical: Quality  # τ* of the data
    fitted_curve: tuple[Quality, ...]
    measured_curve: tuple[Quality, ...]

    @property
    def separation(self) -> float:
        """(mean_true − mean_false) / σ: how well the embeddings tell related pairs from unrelated ones."""
        return (self.mean_true - self.mean_false) / self.sigma

    @property
    def threshold(self) -> float:
        """τ* of the data, inside the working range."""
        return min(max(self.empirical.threshold, 0.0), 1 - 1e-6)


@dataclasses.dataclass(frozen=True)
class Corollary:
    """AttAnchor, Corollary 1 on two measurements: embeddings that separate better want a higher τ*."""

    separation_before: float
    separation_after: float
    threshold_before: float
    threshold_after: float

    @property
    def holds(self) -> bool:
        """True where τ* moved the same way as the separation."""
        return (self.separation_after > self.separation_before) == (self.threshold_after > self.threshold_before)


def fit_threshold(cosines: Tensor, related: Tensor, points: int = 201) -> ThresholdFit:
    """Fit the mixture by maximum likelihood with known labels and find τ* both ways.

    cosines (K,) float, related (K,) bool: one entry per (text token, image token) pair. Raises ValueError unless both
    kinds of pairs are there, or where a cosine is not finite.
    """
    values, labels = cosines.double().flatten(), related.bool().flatten()
    true, total = int(labels.sum()), len(labels)
    if len(values) != total or not 0 < true < total:
        raise ValueError(f"a fit needs related and unrelated pairs; got {true} related of {total} pairs")
    if not bool(torch.isfinite(values).all()):
        raise ValueError("a fit needs finite cosines; some are NaN or infinite: check the image tokens")
    p = true / total
    mean_true, mean_false = float(values[labels].mean()), float(values[~labels].mean())
    squares = (values - torch.where(labels, mean_true, mean_false)).square()
    sigma = max(float(squares.mean().sqrt()), 1e-12)
    low, high = float(values.min()), float(values.max())
    grid = torch.linspace(low, high, points, dtype=torch.float64).tolist()

    def fitted(threshold: float) -> Quality:
        hit = p * (1 - NormalDist(mean_true, sigma).cdf(threshold))
        false = (1 - p) * (1 - NormalDist(mean_false, sigma).cdf(threshold))
        return _quality(threshold, hit, hit + false, p)

    reach = mean_true + 6 * sigma
    best = max(
        (mean_false - 6 * sigma + i * (reach - mean_false + 6 * sigma) / 4000 for i in range(4001)),
        key=lambda t: fitted(t).f1,
    )
    return ThresholdFit(
        p=p, mean_true=mean_true, mean_false=mean_false, sigma=sigma, n_pairs=total,
        by_fit=fitted(best), empirical=_empirical_best(values, labels),
        fitted_curve=tuple(fitted(t) for t in grid), measured_curve=tuple(measured_quality(values, labels, t) for t in
        grid),
    )  # fmt: skip


def measured_quality(cosines: Tensor, related: Tensor, threshold: float) -> Quality:
    """Precision, recall and F1 of the pairs themselves at one threshold."""
    called = cosines >= threshold
    return _quality(threshold, int((called & related).sum()), int(called.sum()), int(related.sum()))


def corollary(before: ThresholdFit, after: ThresholdFit) -> Corollary:
    """Compare τ* (by the fit) of two states of one model, such as before and after an alignment loss."""
    return Corollary(before.separation, after.separation, before.by_fit.threshold, after.by_fit.threshold)


def draw_threshold_fit(fit: ThresholdFit, cosines: Tensor, related: Tensor) -> bytes:
    """PNG: histograms of both kinds of pairs under the fitted densities, and F1 over τ by the fit and measured."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), dpi=120, layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    xs = [q.threshold for q in fit.fitted_curve]
    for name, chosen, weight, mean, colour in (
        ("unrelated pairs", ~related, 1 - fit.p, fit.mean_false, "#777777"),
        ("related pairs", related, fit.p, fit.mean_true, "#1a9850"),
    ):
        values = cosines[chosen].double().tolist()
        # Each kind has its own unit area: related pairs are few and would vanish in a common histogram.
        top.hist(
            values,
            bins=60,
            range=(xs[0], xs[-1]),
            density=True,
            alpha=0.4,
            color=colour,
            label=f"{name} ({weight:.1%})",
        )
        top.plot(xs, [NormalDist(mean, fit.sigma).pdf(x) for x in xs], color=colour)
    top.set_ylabel("density of each kind")
    top.legend(frameon=False)
    top.set_title(f"two Gaussians, common σ = {fit.sigma:.3f}, separation {fit.separation:.2f} σ", loc="left")
    for name, curve, style, best in (
        ("measured", fit.measured_curve, "-", fit.empirical),
        ("by the fit", fit.fitted_curve, "--", fit.by_fit),
    ):
        bottom.plot(xs, [q.f1 for q in curve], style, color="#b2182b", label=f"F1 {name}: τ* = {best.threshold:.3f}")
        bottom.axvline(best.threshold, linestyle=style, color="#b2182b", linewidth=0.8)
    bottom.plot(xs, [q.precision for q in fit.measured_curve], color="#2166ac", label="precision, measured")
    bottom.plot(xs, [q.recall for q in fit.measured_curve], color="#e08214", label="recall, measured")
    bottom.set_xlim(xs[0], xs[-1])
    bottom.set_ylim(0, 1.02)
    bottom.set_xlabel("threshold τ (cosine)")
    bottom.legend(frameon=False, loc="center left")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _quality(threshold: float, hits: float, called: float, true: float) -> Quality:
    precision = hits / called if called > 0 else 1.0
    f1 = 2 * hits / (called + true) if called + true > 0 else 0.0
    return Quality(float(threshold), float(precision), float(hits / true), float(f1))


def _empirical_best(values: Tensor, labels: Tensor) -> Quality:
    """The cut of highest F1 between two neighbouring cosines; among equals the highest threshold."""
    order = values.argsort(descending=True)
    sorted_values, hits = values[order], labels[order].cumsum(0)
    called = torch.arange(1, len(values) + 1)
    f1 = 2 * hits / (called + labels.sum())
    last = torch.cat([sorted_values[1:] < sorted_values[:-1], torch.tensor([True])])  # equal cosines stay together
    best = int(torch.where(last, f1, -1.0).argmax())
    upper = float(sorted_values[best])
    lower = float(sorted_values[best + 1]) if best + 1 < len(values) else upper - 1e-3
    threshold = (upper + lower) / 2
    return measured_quality(values, labels, upper if math.isclose(threshold, lower) else threshold)


def joined(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Concatenate (cosines, related) of several samples."""
    if not parts:
        raise ValueError("no labelled pairs; give (cosines, related) of at least one sample")
    return torch.cat([c for c, _ in parts]), torch.cat([r for _, r in parts])

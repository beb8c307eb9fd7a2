"""One model under several anchor thresholds, without loading it again."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from crossfuse.fusion import Fusion


def parse_thresholds(text: str) -> list[float]:
    """ "1,0.16,0.12" -> [1.0, 0.16, 0.12], each once. `ValueError` for what is no threshold."""
    found: dict[float, None] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            value = float(part)
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            raise ValueError(f"--threshold takes numbers from 0 on (1 or more: off), with commas; got {part!r}")
        found[value] = None
    if not found:
        raise ValueError(f"--threshold names no number; got {text!r}")
    return list(found)


def threshold_of(fusion: Fusion | None) -> float | None:
    """The threshold of a fusion with anchors, be they its own or those inside cross-attention; else None."""
    for holder in (fusion, getattr(fusion, "anchors", None)):
        value = getattr(holder, "threshold", None)
        if value is not None:
            return float(value)
    return None


def with_threshold(fusion: Fusion, threshold: float) -> Fusion:
    """The fusion with another threshold; the share that the old one was calibrated to goes with it.

    Raises `ValueError` for a fusion without anchors.
    """
    if hasattr(fusion, "threshold"):
        fields: dict[str, Any] = {"threshold": threshold}
        if getattr(fusion, "share", None) is not None:
            fields["share"] = None
        return dataclasses.replace(fusion, **fields)
    anchors = getattr(fusion, "anchors", None)
    if anchors is None:
        raise ValueError(
            f"{fusion.name} has no anchors, so no threshold; take --fusion text-anchors or image-anchors, or "
            "cross-attention with --anchors"
        )
    return dataclasses.replace(fusion, anchors=with_threshold(anchors, threshold))  # type: ignore[call-arg]


def change_fusion(model: Any, fusion: Fusion) -> None:
    """Fuse a model that may be fused already; weights whose names and shapes both fusions have (`cross`) are kept."""
    import crossfuse as xf
    from crossfuse.devices import undispatched

    with undispatched(model):
        before = dict(model.state_dict())
        if xf.fusion_of(model) is not None:
            xf.unfuse(model)
        xf.fuse(model, fusion)
        now = model.state_dict()
        # Only what the new fusion has drawn anew: the model's own weights never left it.
        drawn = {n: t for n, t in now.items() if n in before and t.data_ptr() != before[n].data_ptr()}
        kept = {n: before[n] for n, t in drawn.items() if t.shape == before[n].shape}
        if kept:
            model.load_state_dict(kept, strict=False)

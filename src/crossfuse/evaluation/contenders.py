"""The rows of a comparison of fusions: the papers' variants by their names, and every other registered fusion."""

from __future__ import annotations

import dataclasses
from typing import Any

from crossfuse.fusion import FUSIONS, Fusion, fusion_class, make_fusion, nearest
from crossfuse.fusions.cross_attention.fusion import PRESETS

ANCHOR_SHARE = 0.10
_CROSS = "cross-attention"

# AttAnchor's three and CASA's design axes: what `--fusions paper` runs. `share` is calibrated on training prompts.
PAPER: dict[str, dict[str, Any]] = {
    "insertion": {"name": "insertion"},
    "text-anchors": {"name": "text-anchors", "share": ANCHOR_SHARE},
    "image-anchors": {"name": "image-anchors", "share": ANCHOR_SHARE},
    "CA": {"name": _CROSS, **PRESETS["CA"]},
    "CA_t+v": {"name": _CROSS, **PRESETS["CA_t+v"]},
    "CA-link": {"name": _CROSS, **PRESETS["CA-link"]},
    "CA-feather-2": {"name": _CROSS, **PRESETS["CA-feather"], "every": 2},
    "CA-feather-4": {"name": _CROSS, **PRESETS["CA-feather"], "every": 4},
    "CA_t+v-feather-2": {"name": _CROSS, **PRESETS["CA_t+v-feather"], "every": 2},
    "CA+FFN": {"name": _CROSS, **PRESETS["CA+FFN"]},
}
# What neither paper ran side by side: fewer image tokens, pruning with anchors, both papers at once.
FURTHER: dict[str, dict[str, Any]] = {
    "insertion+pool4": {"name": "insertion", "compress": {"name": "mean-pool", "k": 4}},
    "insertion+q-former": {"name": "insertion", "compress": {"name": "q-former", "queries": 16, "layers": 2}},
    "text-anchors-pruned": {"name": "text-anchors", "share": ANCHOR_SHARE, "keep_image_tokens": 0.5},
    "CA_t+v+pool4": {"name": _CROSS, "joint_text": True, "compress": {"name": "mean-pool", "k": 4}},
    "gumbel-reorder": {"name": "gumbel-reorder", "anneal_steps": 400},
    "CA_t+v+anchors": {"name": _CROSS, "joint_text": True, "anchors": {"name": "text-anchors", "share": ANCHOR_SHARE}},
}


def contenders() -> dict[str, dict[str, Any]]:
    """Every row by name: the fields that `make_fusion` takes. A registered fusion that no row uses gets a row.

    Rows whose fields this release does not know are left out.
    """
    rows = {name: fields for name, fields in {**PAPER, **FURTHER}.items() if _known(fields)}
    used = {fields["name"] for fields in rows.values()}
    return rows | {name: {"name": name} for name in FUSIONS if name not in used}


def chosen_contenders(names: str) -> dict[str, dict[str, Any]]:
    """Rows of a list with commas; "paper" and "all" stand for theirs. ValueError with the nearest name."""
    known = contenders()
    chosen: dict[str, dict[str, Any]] = {}
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name == "all":
            chosen |= known
        elif name == "paper":
            chosen |= {n: known[n] for n in PAPER}
        elif name in known:
            chosen[name] = known[name]
        else:
            raise ValueError(f"unknown fusion {name!r}{nearest(name, known)}; known: all, paper, {', '.join(known)}")
    if not chosen:
        raise ValueError("--fusions names no fusion; give all, paper or names with commas between them")
    return chosen


def build_fusion(fields: dict[str, Any], model: Any, prompts: list[dict[str, Any]]) -> Fusion:
    """The fusion of a row; anchors get the threshold that copies their share on `prompts` (processor outputs).

    model: the unfused start; it is fused for the calibration and unfused again.
    """
    fields = dict(fields)
    if isinstance(fields.get("anchors"), dict):
        fields["anchors"] = build_fusion(fields["anchors"], model, prompts)
    fusion = make_fusion(**fields)
    if getattr(fusion, "share", None) is None:
        return fusion
    import crossfuse as xf

    # The direction is the fusion's; an unfused model is matched as text-anchors.
    with xf.fused(model, make_fusion(fusion.name, threshold=0.5)) as matched:
        threshold = xf.calibrate_threshold(matched, prompts, share=fields["share"]).threshold
    return dataclasses.replace(fusion, threshold=threshold)  # type: ignore[call-arg]


def _known(fields: dict[str, Any]) -> bool:
    from crossfuse.compress import COMPRESSIONS

    own = {f.name for f in dataclasses.fields(fusion_class(fields["name"]))} if fields["name"] in FUSIONS else set()
    compress = fields.get("compress")
    return set(fields) - {"name"} <= own and (compress is None or compress["name"] in COMPRESSIONS)

"""The one test matrix: every registered fusion with the configurations that all shared tests run over.

A new fusion gets every test of ``tests/fusions/test_every_*.py`` by adding its row here.
"""

from __future__ import annotations

import dataclasses

import pytest

import crossfuse as xf

MATRIX: dict[str, list[xf.Fusion]] = {
    "insertion": [
        xf.Insertion(),
        xf.Insertion(compress=xf.MeanPool(4)),
        xf.Insertion(compress=xf.QFormer(queries=6)),
    ],
    "text-anchors": [
        xf.TextAnchors(threshold=0.1),
        xf.TextAnchors(threshold=0.1, positions="inherit", copy_order="prompt"),
        xf.TextAnchors(threshold=0.1, compress=xf.MeanPool(4)),
        xf.TextAnchors(threshold=1.0),
    ],
    "image-anchors": [
        xf.ImageAnchors(threshold=0.3),
        xf.ImageAnchors(threshold=0.3, positions="inherit", copy_order="prompt"),
        xf.ImageAnchors(threshold=0.3, pause_tokens=2, pause_token_id=5),
        xf.ImageAnchors(threshold=1.0),
    ],
    "cross-attention": [
        xf.CrossAttention(),
        xf.CrossAttention(joint_text=True),
        xf.CrossAttention(share_projections=True),
        xf.CrossAttention(share_projections=True, joint_text=True, history=None),
        xf.CrossAttention(every=2, gate="tanh"),
        xf.CrossAttention(every=2, replace=True),
        xf.CrossAttention(every=2, replace=True, joint_text=True),
        xf.CrossAttention(history=2, joint_text=True, compress=xf.MeanPool(4)),
        xf.CrossAttention(update_images=True),
        xf.CrossAttention(joint_text=True, compress=xf.QFormer(queries=5, layers=1)),
        xf.CrossAttention(joint_text=True, anchors=xf.TextAnchors(threshold=0.1, positions="inherit")),
        xf.CrossAttention(update_images=True, gist_tokens=1, anchors=xf.TextAnchors(threshold=0.1)),
        xf.CrossAttention(gist_tokens=2, joint_text=True),
    ],
    "modality-rope": [
        xf.ModalityRoPE(),
        xf.ModalityRoPE(layers=None),
        xf.ModalityRoPE(layers=(1, 2), compress=xf.MeanPool(4)),
        xf.ModalityRoPE(layers=()),
    ],
    # Circles need m-RoPE, which these models do not have: the rest of its tests are in fusions/positions.
    "circle-rope": [xf.CircleRoPE(layers=(), compress=xf.MeanPool(4)), xf.CircleRoPE(layers=())],
    "gumbel-reorder": [
        # Without noise and annealing, so that two training forwards can be compared.
        xf.GumbelReorder(width=16, depth=1, noise=0.0, final_temperature=1.0),
        xf.GumbelReorder(width=16, depth=1, noise=0.0, final_temperature=1.0, compress=xf.MeanPool(4)),
        xf.GumbelReorder(score="identity"),
    ],
}


def name_of(fusion: xf.Fusion) -> str:
    """The fusion and the fields that differ from their defaults: a readable test id."""
    parts = [fusion.name]
    for field in dataclasses.fields(fusion):
        value = getattr(fusion, field.name)
        if value != field.default:
            parts.append(f"{field.name}={getattr(value, 'name', value)}")
    return ",".join(parts)


def adds_tokens(fusion: xf.Fusion) -> bool:
    """Learned or pause tokens of its own, also where there is no image."""
    return bool(getattr(fusion, "pause_tokens", 0))


def keeps_length(fusion: xf.Fusion) -> bool:
    """It moves tokens or positions and adds none."""
    return fusion.name in ("modality-rope", "circle-rope", "gumbel-reorder") and fusion.compress is None


def gists(fusion: xf.Fusion) -> int:
    return getattr(fusion, "gist_tokens", 0)


CONFIGURATIONS = [fusion for row in MATRIX.values() for fusion in row]
# What does not depend on the details of a fusion runs over one configuration of each that changes something, and over
# the last one of its row.
EACH = [
    fusion for row in MATRIX.values() for fusion in dict.fromkeys([next(f for f in row if not f.is_identity), row[-1]])
]
every_fusion = pytest.mark.parametrize("fusion", CONFIGURATIONS, ids=name_of)
each_fusion = pytest.mark.parametrize("fusion", EACH, ids=name_of)
identities = pytest.mark.parametrize("fusion", [f for f in CONFIGURATIONS if f.is_identity], ids=name_of)
CROSS_ATTENTION = [f for f in MATRIX["cross-attention"] if f.anchors is None]
ANCHORED = [f for f in MATRIX["cross-attention"] if f.anchors is not None]
cross_attention = pytest.mark.parametrize("fusion", CROSS_ATTENTION, ids=name_of)
anchored_windows = pytest.mark.parametrize("fusion", ANCHORED, ids=name_of)
bare_cross_attention = pytest.mark.parametrize(  # nothing stands between an image and the next text
    "fusion", [f for f in CROSS_ATTENTION if not gists(f)], ids=name_of
)
text_anchors = pytest.mark.parametrize("fusion", MATRIX["text-anchors"][:3], ids=name_of)

"""The one test matrix: every registered fusion with the configurations that all shared tests run over.

A new fusion gets every test of ``tests/fusions/test_every_*.py`` by adding its row here.
"""

from __future__ import annotations

import dataclasses

import pytest

import crossfuse as xf

MATRIX: dict[str, list[xf.Fusion]] = {
    "insertion": [xf.Insertion(), xf.Insertion(compress=xf.MeanPool(4))],
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
        xf.CrossAttention(gist_tokens=2, joint_text=True),
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
cross_attention = pytest.mark.parametrize("fusion", MATRIX["cross-attention"], ids=name_of)
bare_cross_attention = pytest.mark.parametrize(  # nothing stands between an image and the next text
    "fusion", [f for f in MATRIX["cross-attention"] if not gists(f)], ids=name_of
)
text_anchors = pytest.mark.parametrize("fusion", MATRIX["text-anchors"][:3], ids=name_of)

"""Token compression: fewer image tokens per image, before any fusion sees them (``compress=`` of every fusion)."""

from __future__ import annotations

import dataclasses
from typing import Any

from crossfuse.compress.base import Compression
from crossfuse.compress.mean_pool import MeanPool
from crossfuse.compress.q_former import QFormer

__all__ = ["COMPRESSIONS", "Compression", "MeanPool", "QFormer", "make_compression", "parse_compression"]

COMPRESSIONS: dict[str, type[Compression]] = {cls.name: cls for cls in (MeanPool, QFormer)}


def make_compression(name: str, **fields: Any) -> Compression:
    """Build a compression by its name, as stored in ``fusion.json``. Unknown names and fields raise ValueError."""
    from crossfuse.fusion import nearest

    if name not in COMPRESSIONS:
        raise ValueError(f"unknown compression {name!r}{nearest(name, COMPRESSIONS)}; known: {', '.join(COMPRESSIONS)}")
    cls = COMPRESSIONS[name]
    known = [field.name for field in dataclasses.fields(cls)]
    for key in fields:
        if key not in known:
            raise ValueError(f"{name} has no field {key!r}{nearest(key, known)}; its fields: {', '.join(known)}")
    return cls(**fields)


def parse_compression(text: str) -> dict[str, Any]:
    """``"mean-pool:4"``, ``"q-former"`` or ``"q-former:32:2"`` -> name and fields, in the order of the class.

    ValueError where the name is unknown or a field is no whole number.
    """
    name, *values = text.split(":")
    make_compression(name)
    known = [field.name for field in dataclasses.fields(COMPRESSIONS[name])]
    return {"name": name, **{key: int(value) for key, value in zip(known, values, strict=False)}}

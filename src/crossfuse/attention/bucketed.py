"""Windowed attention as a few batched SDPA calls over windows of similar shape ("buckets").

Neighbouring windows of equal shape are one call on views of the flat arrays, without a mask. The other windows are
called one by one, or gathered and padded into a common bucket where that is cheaper: small windows share a call,
because a call's fixed cost outweighs their padding; large ones never do. The plan is worked out once a layout and
kept in `Windows.plans`.

Shape legend: T queries, N image tokens, K text keys, Hq and Hkv heads, D head width; B windows of n queries a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .reads import Read, Reads, keep_in_graph
from .windows import WindowRange, Windows

# Seconds on one core of a 2 GHz server CPU with AVX-512, forward and backward; only their ratios matter.
CALL_SECONDS = 120e-6
GATHER_SECONDS = 100e-6  # what a gathered bucket costs beyond its copies
PAIR_SECONDS = 0.2e-9  # one query-key pair, one channel of one query head
COPY_SECONDS = 3e-9  # one channel of one gathered key and its value
# A GPU is idle between launches and its pairs are almost free, so that padding wins earlier.
GPU_SPEED = 100.0


@dataclass(frozen=True)
class Bucket:
    """Windows that share an SDPA call: which reads of the image and text arrays are its keys, and what masks them."""

    image: int | None
    text: int | None
    causal: bool
    mask: Tensor | None


@dataclass(frozen=True)
class BucketedPlan:
    """Reads of every array by bucket, and how the outputs are put back into the order of the queries."""

    buckets: tuple[Bucket, ...]
    queries: Reads
    images: Reads
    texts: Reads
    blanks: tuple[tuple[int, int], ...]
    order: Reads | None

    def run(
        self,
        q: Tensor,
        k_image: Tensor,
        v_image: Tensor,
        k_text: Tensor | None,
        v_text: Tensor | None,
        scale: float | None,
    ) -> Tensor:
        """Returns (T, Hq, D); see `windowed_attention`."""
        queries = self.queries.of(q)
        image_keys, image_values = self.images.of(k_image), self.images.of(v_image)
        text_keys = self.texts.of(k_text) if k_text is not None else ()
        text_values = self.texts.of(v_text) if v_text is not None else ()
        outputs = []
        for bucket, query in zip(self.buckets, queries, strict=True):
            keys, values = _parts(bucket, image_keys, text_keys), _parts(bucket, image_values, text_values)
            if len(keys) == 2 and query.shape[:2] == (1, 1):
                outputs.append(_attend_one(query, keys, values, scale))
            else:
                outputs.append(_attend(query, _joined(keys), _joined(values), bucket, scale))
        for position, length in self.blanks:
            outputs.insert(position, q.new_zeros(length, *q.shape[1:]))
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs) if outputs else q.new_zeros(q.shape)
        if self.order is not None:
            out = self.order.of(out)[0].squeeze(0)
        return out


def bucketed_attention(
    q: Tensor,
    k_image: Tensor,
    v_image: Tensor,
    windows: Windows,
    k_text: Tensor | None = None,
    v_text: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Same arguments and result as `windowed_attention`, on any device and in any floating dtype."""
    key = ("bucketed", q.device, q.dtype, q.shape[1], k_image.shape[1], q.shape[2])
    plan = windows.plans.get(key)
    if plan is None:
        plan = windows.plans[key] = make_plan(windows, q.shape[1], k_image.shape[1], q.shape[2], q.device, q.dtype)
    out = plan.run(q, k_image, v_image, k_text, v_text, scale)
    if torch.is_grad_enabled():
        unused = [] if plan.queries.reads else [q]
        unused += [] if plan.images.reads else [k_image, v_image]
        unused += [] if plan.texts.reads or k_text is None or v_text is None else [k_text, v_text]
        out = keep_in_graph(out, unused)
    return out


def make_plan(
    windows: Windows, heads: int, key_heads: int, width: int, device: torch.device, dtype: torch.dtype
) -> BucketedPlan:
    """Groups windows into buckets; see the module docstring for the rule."""
    live = [w for w in windows.ranges if w.query_length and w.image_length + w.text_length]
    if not windows.joint_text:
        live = _merge_shared_images(live)
    speed = 1.0 if device.type == "cpu" else GPU_SPEED

    def seconds(count: int, queries: int, keys: int, gathered: bool) -> float:
        work = count * keys * (queries * heads * PAIR_SECONDS + gathered * key_heads * COPY_SECONDS) * width
        return CALL_SECONDS + gathered * GATHER_SECONDS + work / speed

    runs = _merge_by_cost(_runs(live), seconds)
    padded = any(len(group) > 1 for group in runs)
    groups = sorted(sorted(window for run in group for window in run) for group in runs)
    buckets: list[Bucket] = []
    queries: list[Read] = []
    images: list[Read] = []
    texts: list[Read] = []
    for members in groups:
        image = text = None
        queries.append(_read([(w.query_start, w.query_length) for w in members], device))
        if members[0].image_length:
            image = len(images)
            images.append(_read([(w.image_start, w.image_length) for w in members], device))
        if members[0].text_length:
            text = len(texts)
            texts.append(_read([(w.text_start, w.text_length) for w in members], device))
        buckets.append(Bucket(image, text, *_mask(members, device, dtype)))
    blanks, order = _order(windows, groups, padded, device)
    return BucketedPlan(
        tuple(buckets),
        Reads.over(queries, [(w.query_start, w.query_length) for w in live]),
        Reads.over(images, [(w.image_start, w.image_length) for w in live]),
        Reads.over(texts, [(w.text_start, w.text_length) for w in live]),
        blanks,
        order,
    )


def _parts(bucket: Bucket, images: Sequence[Tensor], texts: Sequence[Tensor]) -> list[Tensor]:
    """The bucket's keys or values: (B, N, Hkv, D) of images and (B, K, Hkv, D) of text, or the one that there is."""
    parts = [] if bucket.image is None else [images[bucket.image]]
    return parts if bucket.text is None else [*parts, texts[bucket.text]]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _attend_one(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float | None) -> Tensor:
    """One query over image and text keys, (1, Hq, D): one softmax, but no copy that joins the keys.

    A decoding step reads every key once; joining image and text keys would read and write them once more.
    """
    heads, width = query.shape[2:]
    key_heads = keys[0].shape[2]
    folded = query.view(key_heads, heads // key_heads, width) * (width**-0.5 if scale is None else scale)
    image_scores = torch.bmm(folded, keys[0][0].permute(1, 2, 0))
    text_scores = torch.bmm(folded, keys[1][0].permute(1, 2, 0))
    weights = torch.cat((image_scores, text_scores), dim=-1).softmax(dim=-1)
    image_weights, text_weights = weights.split((keys[0].shape[1], keys[1].shape[1]), dim=-1)
    out = torch.bmm(image_weights, values[0][0].transpose(0, 1))
    out = torch.baddbmm(out, text_weights, values[1][0].transpose(0, 1))
    return out.reshape(1, heads, width)


def _attend(query: Tensor, keys: Tensor, values: Tensor, bucket: Bucket, scale: float | None) -> Tensor:
    count, length, heads, width = query.shape
    key_heads = keys.shape[2]
    if length == 1:
        # One query: the heads that share keys become the rows of one query block, so that K and V are read once.
        folded = query.view(count, key_heads, heads // key_heads, width)
        out = scaled_dot_product_attention(
            folded, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=bucket.mask, scale=scale
        )
        return out.reshape(count, heads, width)
    out = scaled_dot_product_attention(
        query.transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=bucket.mask,
        is_causal=bucket.causal,
        scale=scale,
        enable_gqa=heads != key_heads,
    )
    return out.transpose(1, 2).reshape(count * length, heads, width)


def _merge_shared_images(windows: Sequence[WindowRange]) -> list[WindowRange]:
    """Neighbours that see the very same image range are one window of more queries."""
    merged: list[WindowRange] = []
    for window in windows:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.query_start + last.query_length == window.query_start
            and (last.image_start, last.image_length) == (window.image_start, window.image_length)
        ):
            merged[-1] = last._replace(query_length=last.query_length + window.query_length)
        else:
            merged.append(window)
    return merged


def _runs(windows: Sequence[WindowRange]) -> list[list[WindowRange]]:
    """Splits windows into runs of equal shape whose rows lie one after the other in every array."""
    runs: list[list[WindowRange]] = []
    for window in windows:
        if runs and _follows(runs[-1][-1], window):
            runs[-1].append(window)
        else:
            runs.append([window])
    return runs


def _follows(a: WindowRange, b: WindowRange) -> bool:
    pairs = (
        (a.query_start, a.query_length, b.query_start, b.query_length),
        (a.image_start, a.image_length, b.image_start, b.image_length),
        (a.text_start, a.text_length, b.text_start, b.text_length),
    )
    return all(size == other and (size == 0 or start + size == after) for start, size, after, other in pairs)


def _merge_by_cost(
    runs: list[list[WindowRange]], seconds: Callable[[int, int, int, bool], float]
) -> list[list[list[WindowRange]]]:
    """Groups runs into padded buckets where that is cheaper than calling them one by one."""
    if len(runs) == 1:
        return [runs]
    runs = sorted(runs, key=lambda run: (run[0].image_length + run[0].text_length, run[0].query_length))
    groups: list[list[list[WindowRange]]] = []
    shape = (0, 0, 0, 0)
    spent = 0.0
    for run in runs:
        size = (len(run), run[0].query_length, run[0].image_length, run[0].text_length)
        alone = seconds(size[0], size[1], size[2] + size[3], False)
        joined = (shape[0] + size[0], max(shape[1], size[1]), max(shape[2], size[2]), max(shape[3], size[3]))
        together = seconds(joined[0], joined[1], joined[2] + joined[3], True)
        # A window without an image is never padded with another window's image.
        alike = (size[2] > 0) == (shape[2] > 0)
        if groups and alike and together < spent + alone:
            groups[-1].append(run)
            shape, spent = joined, together
        else:
            groups.append([run])
            shape, spent = size, alone
    return groups


def _read(ranges: list[tuple[int, int]], device: torch.device) -> Read:
    """A view where the ranges are equally long and lie one after the other, else a gather."""
    start, length = ranges[0]
    if all(item == (start + place * length, length) for place, item in enumerate(ranges)):
        return Read(len(ranges), length, start=start)
    return Read.padded(ranges, device)


def _mask(members: Sequence[WindowRange], device: torch.device, dtype: torch.dtype) -> tuple[bool, Tensor | None]:
    """The bucket's (is_causal, additive mask), without a mask where every query sees every key.

    The mask is (1 or B, 1, 1 or n, N + K). Rows of padding see what the window's last query sees: no row is empty.
    """
    shapes = sorted({(w.query_length, w.image_length, w.text_length) for w in members})
    query_length = max(shape[0] for shape in shapes)
    image_length = max(shape[1] for shape in shapes)
    text_length = max(shape[2] for shape in shapes)
    if text_length == 0 and len({shape[1] for shape in shapes}) == 1:
        return False, None
    if len(shapes) == 1:
        if query_length == 1:
            return False, None
        if image_length == 0 and text_length == query_length:
            return True, None
        members = members[:1]
    sizes = torch.tensor([(w.query_length, w.image_length, w.text_length) for w in members])
    queries, images, texts = (column[:, None, None] for column in sizes.unbind(1))
    visible = torch.arange(image_length) < images
    if text_length:
        row = torch.arange(query_length)[:, None]
        last = texts - queries + row
        visible = torch.cat((visible.expand(-1, query_length, -1), torch.arange(text_length) <= last), dim=-1)
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
    return False, mask[:, None].to(device)


def _order(
    windows: Windows, groups: Sequence[Sequence[WindowRange]], padded: bool, device: torch.device
) -> tuple[tuple[tuple[int, int], ...], Reads | None]:
    """Where zero rows (queries without a key) go among the outputs, and the read that restores the queries' order."""
    blank = [w for w in windows.ranges if w.query_length and not w.image_length + w.text_length]
    if not padded:
        starts = sorted([group[0].query_start for group in groups] + [w.query_start for w in blank])
        return tuple((starts.index(w.query_start), w.query_length) for w in blank), None
    rows = torch.empty(windows.query_count, dtype=torch.int64)
    used = 0
    for members in groups:
        length = max(w.query_length for w in members)
        for place, w in enumerate(members):
            begin = used + place * length
            rows[w.query_start : w.query_start + w.query_length] = torch.arange(begin, begin + w.query_length)
        used += length * len(members)
    total = used
    for w in blank:
        rows[w.query_start : w.query_start + w.query_length] = torch.arange(total, total + w.query_length)
        total += w.query_length
    blanks = ((len(groups), total - used),) if total > used else ()
    slots = torch.arange(len(rows), device=device)
    return blanks, Reads((Read(1, len(rows), index=rows.to(device), slots=slots),), disjoint=True)

"""Literal, slow implementations of the papers' definitions, one sample at a time, one token after the other.

They use a model's weights (so that gradients can be compared too) and nothing of crossfuse.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from tiny import BOS, GRID, IMAGE, PAD


def image_tokens(model: Any, pixel_values: Tensor | None, pool: int = 1) -> list[Tensor]:
    """Projected tokens of every image, by transformers; mean over squares of ``pool`` neighbouring patches."""
    if pixel_values is None:
        return []
    found = []
    for tokens in model.model.get_image_features(pixel_values, return_dict=True).pooler_output:
        side = math.isqrt(pool)
        squares = []
        for row in range(0, GRID, side):
            for column in range(0, GRID, side):
                cells = [tokens[(row + i) * GRID + column + j] for i in range(side) for j in range(side)]
                squares.append(torch.stack(cells).mean(0))
        found.append(torch.stack(squares))
    return found


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotary embedding of one token, x (H, D), at an integer position (negative ones too)."""
    half = x.shape[-1] // 2
    cos, sin = _turn(position, theta, half)
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos + turned * sin


@functools.cache
def _turn(position: int, theta: float, half: int) -> tuple[Tensor, Tensor]:
    angle = torch.tensor([position * theta ** (-i / half) for i in range(half)], dtype=torch.float64)
    return angle.cos().float().repeat(2), angle.sin().float().repeat(2)


def heads(weights: Any, kind: str, x: Tensor, head_dim: int) -> Tensor:
    """(d,) -> (heads, D), with the block's q/k norm where it has one."""
    out = getattr(weights, f"{kind}_proj")(x).view(-1, head_dim)
    norm = getattr(weights, f"{kind}_norm", None)
    return out if norm is None else norm(out)


def attend(query: Tensor, keys: list[Tensor], values: list[Tensor], scale: float) -> Tensor:
    """One query (H, D) over keys [(G, D)]: one softmax; query head h uses key head h // (H / G)."""
    group = len(query) // len(keys[0])
    k, v = (torch.stack(rows).repeat_interleave(group, 1) for rows in (keys, values))
    weights = ((query * k).sum(-1) * scale).softmax(0)
    return (weights[..., None] * v).sum(0).flatten()


def cross_attention_logits(
    model: Any, fusion: Any, ids: list[int], images: list[Tensor], prompt: int | None = None
) -> Tensor:
    """CASA, eq. 1-4, for one unpadded sample. ids with placeholders -> logits (len(ids), V).

    ``images`` are the tokens of each image, after compression, before any norm. With ``fusion.anchors`` the text before
    column ``prompt`` (None: all of it) may be copied.
    """
    decoder, theta = model.model.language_model, model.config.text_config.rope_parameters["rope_theta"]
    # Windows: stream token n (text, or a gist: None) -> window, image tokens of the window that stood before it;
    # window -> image tokens and their stream positions.
    text, window_of, before, pictures, runs, host = [], [], [], {0: []}, {0: []}, []
    asked: list[tuple[int, int]] = []  # (window, token) of the text that may be copied
    gists = fusion.gist_tokens
    window, after_image, per_image, remaining = 0, False, list(images), 0
    for column, token in enumerate(ids):
        if token == IMAGE:
            if not after_image:
                window += 1
                pictures[window], runs[window] = [], []
            if remaining == 0:
                pictures[window] += list(per_image.pop(0))
                remaining = GRID * GRID
            remaining -= 1
            after_image = True
            if remaining == 0 and gists:
                first = runs[window][-1][1] if runs[window] else 0
                runs[window].append((first, len(pictures[window]), len(text)))
                for _ in range(gists):
                    text.append(None)
                    window_of.append(window)
                    before.append(len(pictures[window]))
        else:
            text.append(token)
            window_of.append(window)
            before.append(len(pictures[window]))
            after_image = False
            if token not in (PAD, BOS) and (prompt is None or column < prompt):
                asked.append((window, token))
        host.append(len(text) - 1)
    for w in pictures:
        if w and not gists:
            following = next((n for n, k in enumerate(window_of) if k >= w), len(text))
            runs[w] = [(0, len(pictures[w]), following)]
    pictures = {w: with_copies(decoder, fusion.anchors, w, own, asked) for w, own in pictures.items()}
    inherit = fusion.anchors is not None and fusion.anchors.positions == "inherit"
    place = {w: [p for run in own for p in places(run, pictures[w], inherit)] for w, own in runs.items()}

    chosen = [i for i in range(len(decoder.layers)) if i % fusion.every == fusion.every - 1]
    gist = decoder.layers[chosen[0]].self_attn.cross.gist
    number_of_gist = [sum(t is None for t in text[:n]) % max(gists, 1) for n in range(len(text))]
    hidden = [
        gist[number_of_gist[n]] if token is None else decoder.embed_tokens(torch.tensor(token))
        for n, token in enumerate(text)
    ]
    for number, layer in enumerate(decoder.layers):
        attention = layer.self_attn
        width, scale = attention.head_dim, attention.head_dim**-0.5
        x = [layer.input_layernorm(h) for h in hidden]
        added = [torch.zeros_like(h) for h in hidden]
        if number not in chosen or not fusion.replace:  # eq. 3
            q = [rotate(heads(attention, "q", t, width), n, theta) for n, t in enumerate(x)]
            k = [rotate(heads(attention, "k", t, width), n, theta) for n, t in enumerate(x)]
            v = [heads(attention, "v", t, width) for t in x]
            for n in range(len(x)):
                added[n] = added[n] + attention.o_proj(attend(q[n], k[: n + 1], v[: n + 1], scale))
        if number in chosen:  # eq. 2 and 4
            weights = attention if fusion.share_projections else attention.cross
            norm = layer.input_layernorm if fusion.share_projections else attention.cross.norm
            for n in range(len(x)):
                own = window_of[n]
                oldest = 1 if fusion.history is None else max(1, own - fusion.history + 1)
                seen = [
                    (y, p)
                    for w in range(oldest, own + 1)
                    for (m, y), p in zip(pictures[w], place[w], strict=True)
                    if w < own or m < before[n]  # a gist: not the next image of its window
                ]
                if not seen and not (fusion.replace and fusion.joint_text and text[n] is not None):
                    continue
                query = heads(weights, "q", x[n], width)
                keys = [heads(weights, "k", norm(y), width) for y, _ in seen]
                values = [heads(weights, "v", norm(y), width) for y, _ in seen]
                if fusion.joint_text:
                    query = rotate(query, n, theta)
                    keys = [rotate(key, p, theta) for key, (_, p) in zip(keys, seen, strict=True)]
                    for m in range(n + 1):
                        if window_of[m] == own and text[m] is not None and text[n] is not None:
                            keys.append(rotate(heads(weights, "k", x[m], width), m, theta))
                            values.append(heads(weights, "v", x[m], width))
                out = weights.o_proj(attend(query, keys, values, scale))
                added[n] = added[n] + (out if fusion.gate == "none" else torch.tanh(attention.cross.gate) * out)
        hidden = [h + a for h, a in zip(hidden, added, strict=True)]
        hidden = [h + layer.mlp(layer.post_attention_layernorm(h)) for h in hidden]
        if fusion.update_images:
            update = layer.mlp, layer.post_attention_layernorm
            pictures = {w: [(m, y + update[0](update[1](y))) for m, y in own] for w, own in pictures.items()}
    rows = [model.lm_head(decoder.norm(h)) for h in hidden]
    nothing = torch.zeros(model.lm_head.out_features)
    return torch.stack([nothing if n < 0 else rows[n] for n in host])


def with_copies(
    decoder: Any, anchors: Any, window: int, images: list[Tensor], asked: list[tuple[int, int]]
) -> list[tuple[int, Tensor]]:
    """The image tokens of a window and copies of text up to its end -> [(image token that it stands at, vector)]."""
    if anchors is None:
        return list(enumerate(images))
    texts = {len(images) + k: decoder.embed_tokens(torch.tensor(t)) for k, (w, t) in enumerate(asked) if w <= window}
    cosine = {
        (n, m): torch.nn.functional.cosine_similarity(text, image, dim=0).item()
        for n, text in texts.items()
        for m, image in enumerate(images)
    }
    order = anchored_order(list(range(len(images))), list(texts), cosine, anchors.threshold, anchors.copy_order)
    return [(m, images[m] if source == m else texts[source]) for m, source in order]


def places(run: tuple[int, int, int], tokens: list[tuple[int, Tensor]], inherit: bool) -> list[int]:
    """Stream positions of one image run (first token, end, what follows), backwards from what follows it."""
    first, end, following = run
    own = [m for m, _ in tokens if first <= m < end]
    if inherit:
        return [following - end + m for m in own]
    return [following - len(own) + i for i in range(len(own))]


def anchored_order(
    images: list[int], texts: list[int], cosine: dict[tuple[int, int], float], threshold: float, copy_order: str
) -> list[tuple[int, int]]:
    """AttAnchor's Algorithm 1 as written: a list, and insertions into it.

    images, texts: columns in reading order; cosine[text, image]. -> [(host column, column that is copied or itself)] of
    images and their copies, for the whole row to be merged with the text by the caller.
    """
    sequence: list[tuple[int, int]] = [(m, m) for m in images]
    for n in texts if copy_order == "algorithm" else reversed(texts):
        best, partner = -math.inf, None
        for m in images:  # the first maximum on ties
            value = cosine[n, m] if math.isfinite(cosine[n, m]) else -1.0
            if value > best:
                best, partner = value, m
        if partner is not None and best >= threshold and threshold < 1:
            sequence.insert(sequence.index((partner, partner)) + 1, (partner, n))
    return sequence


def text_anchor_logits(
    model: Any, fusion: Any, ids: list[int], images: list[Tensor], candidates: list[int], reach: int
) -> Tensor:
    """AttAnchor for one unpadded sample: the expanded sequence by hand, through the plain decoder.

    candidates: columns of text that may be copied; images before column ``reach`` may receive copies.
    """
    decoder = model.model.language_model
    embeds = decoder.embed_tokens(torch.tensor(ids))
    columns, left = [], [(len(tokens), tokens) for tokens in images]
    features: dict[int, Tensor] = {}
    column = 0
    while column < len(ids):
        if ids[column] == IMAGE:
            count, tokens = left.pop(0)
            void = GRID * GRID - count  # after compression the first placeholders of an image are void
            for offset in range(count):
                features[column + void + offset] = tokens[offset]
                columns.append(column + void + offset)
            column += GRID * GRID
        else:
            columns.append(column)
            column += 1
    vectors = {c: features.get(c, embeds[c]) for c in columns}
    seen = [c for c in columns if c in features and c < reach]
    cosine = {
        (n, m): torch.nn.functional.cosine_similarity(vectors[n], vectors[m], dim=0).item()
        for n in candidates
        for m in seen
    }
    anchored = anchored_order(seen, candidates, cosine, fusion.threshold, fusion.copy_order)
    order: list[tuple[int, int]] = []
    for c in columns:
        order += [pair for pair in anchored if pair[0] == c] if c in seen else [(c, c)]
    positions = list(range(len(order)))
    if fusion.positions == "inherit":
        positions = [columns.index(h) for h, _ in order]
    expanded = torch.stack([vectors[source] for _, source in order])[None]
    count = expanded.shape[1]
    causal = torch.ones(count, count, dtype=torch.bool).tril()[None, None]
    states = decoder(
        inputs_embeds=expanded, attention_mask=causal, position_ids=torch.tensor([positions]), use_cache=False
    ).last_hidden_state[0]
    rows = []
    for j in range(len(ids)):
        before = [place for place, (h, _) in enumerate(order) if h <= j]
        rows.append(model.lm_head(states[before[-1]]) if before else torch.zeros(model.lm_head.out_features))
    return torch.stack(rows)

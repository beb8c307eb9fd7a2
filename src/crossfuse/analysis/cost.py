"""Parameters and floating-point operations of a model under each fusion, without running it.

Operations are counted by PyTorch's own counter on tensors without storage (device "meta"), so that a model of
any size is counted from its configuration alone; what cross-attention adds is worked out from its matrix
products, what other positions and a learned order add is counted in `crossfuse.analysis.order_cost`. One
multiply-add is two operations; softmax, norms and activations are left out; attention counts the full square.

Letters: N image tokens after compression, T text tokens, d model width, a = query heads x head size, b = key
heads x head size.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from crossfuse.analysis.flops import count_operations
from crossfuse.analysis.order_cost import order_cost
from crossfuse.backbones import backbone_for
from crossfuse.compress import Compression, QFormer
from crossfuse.fusion import Fusion
from crossfuse.fusions.anchors import ImageAnchors, TextAnchors
from crossfuse.fusions.cross_attention import CrossAttention

ASSUMED_SHARE = 0.10


@dataclasses.dataclass(frozen=True)
class PromptCost:
    """Operations of one prompt (one image, then text) and of the first token generated after it."""

    image_tokens: int
    text_tokens: int
    vision: int | None  # tower and projector; None where the number of image tokens was given
    prefill: int  # a Q-Former's operations are part of it
    decode: int
    training_only: int = 0  # what a training forward does beyond a prefill: the soft order of GumbelReorder


def parameters_by_part(model: Any) -> dict[str, int]:
    """Number of parameters of each part of the model and of its head; a head tied to the embeddings adds 0.

    Works on models whose parameters have no storage.
    """
    body = backbone_for(model).body(model)
    parts = {name.replace("_", " "): module for name, module in body.named_children()}
    seen: set[int] = set()
    counts = {}
    for name, module in (parts | {"head": model.get_output_embeddings()}).items():
        fresh = {id(p): p.numel() for p in module.parameters() if id(p) not in seen}
        seen |= set(fresh)
        counts[name] = sum(fresh.values())
    return counts


def prompt_cost(model: Any, fusion: Fusion, *, text_tokens: int = 50, image_tokens: int | None = None) -> PromptCost:
    """Operations for one image followed by `text_tokens` tokens of text, batch 1.

    Args:
        model: not fused, on the device "meta" (`ValueError` otherwise).
        fusion: any registered one. Anchors are counted with their `share` of tokens copied, 0.1 where they have none;
            inside the windows of cross-attention too. A learned order is counted over all tokens of the prompt.
        text_tokens: T, at least 1.
        image_tokens: N before compression; by default that of an image of the vision tower's own size, whose
            operations are then counted too. Families without such a size need it (`ValueError` otherwise).
    """
    if next(model.parameters()).device.type != "meta":
        raise ValueError("operations are counted on a model without storage; build it under torch.device('meta')")
    backbone = backbone_for(model)
    body = backbone.body(model)
    decoder = backbone.decoder(body)
    width = body.get_input_embeddings().weight.shape[1]
    vision = None
    if image_tokens is None:
        vision, image_tokens = _one_image(body)
    compressing = 0
    if fusion.active_compression is not None:
        compressing = _compressing(fusion.active_compression, image_tokens, width)
        image_tokens = compressed_tokens(fusion, image_tokens)
    training_only = 0
    head = 2 * width * model.get_output_embeddings().weight.shape[0]
    if isinstance(fusion, CrossAttention):
        copies, matching = _copies(fusion.active_anchors, image_tokens, text_tokens, width)
        text_tokens += fusion.gist_tokens
        extra_prefill, extra_decode = _cross_attention(decoder, fusion, image_tokens + copies, text_tokens)
        prefill = _decoder(decoder, text_tokens, width) + extra_prefill + matching
        decode = _decoder(decoder, 1, width, cached=text_tokens) + extra_decode
    else:
        added, matching = _copies(fusion, image_tokens, text_tokens, width)
        length = image_tokens + text_tokens + added
        order = order_cost(decoder, fusion, image_tokens, text_tokens)
        prefill = _decoder(decoder, length, width) + matching + order.prefill
        decode = _decoder(decoder, 1, width, cached=length) + order.decode
        training_only = order.training
    return PromptCost(image_tokens, text_tokens, vision, prefill + compressing + head, decode + head, training_only)


def compressed_tokens(fusion: Fusion, image_tokens: int) -> int:
    """Tokens that are left of an image (on a square grid, where the compression needs one)."""
    compress = fusion.active_compression
    if compress is None:
        return image_tokens
    return compress.tokens(image_tokens, _square(image_tokens) if compress.keeps_grid else None)


def compression_module(compress: Compression | None, width: int) -> torch.nn.Module | None:
    """The new weights of a compression, without storage; None where it has none."""
    if not isinstance(compress, QFormer):
        return None
    from crossfuse.compress.q_former import QueryTransformer

    with torch.device("meta"):
        return QueryTransformer(compress, width).requires_grad_(False)  # the counter trips over gradients


def _compressing(compress: Compression, image_tokens: int, width: int) -> int:
    module = compression_module(compress, width)
    if module is None:
        return 0
    image = torch.empty(1, image_tokens, width, device="meta")
    return count_operations(lambda: module(image))


def _copies(fusion: Fusion | None, images: int, texts: int, width: int) -> tuple[int, int]:
    """(positions that anchors add, operations of the cosines)."""
    if fusion is None or fusion.is_identity or not isinstance(fusion, TextAnchors | ImageAnchors):
        return 0, 0
    candidates = texts if isinstance(fusion, TextAnchors) else images
    copies = 0 if fusion.threshold >= 1 else round((fusion.share or ASSUMED_SHARE) * candidates)
    pauses = fusion.pause_tokens if isinstance(fusion, ImageAnchors) else 0
    products, pruned = int(fusion.threshold < 1), 0
    if isinstance(fusion, TextAnchors) and fusion.keep_image_tokens is not None:
        # Matched in both directions. Anchored tokens stay besides the kept share; they are taken to lie inside it.
        products, pruned = 2, images - math.ceil(fusion.keep_image_tokens * images)
    return copies + pauses - pruned, products * 2 * images * texts * width


def _one_image(body: Any) -> tuple[int, int]:
    """(operations of tower and projector, image tokens) for one image of the tower's own size."""
    config = body.config.vision_config
    size = getattr(config, "image_size", None)
    if size is None:
        raise ValueError("images of this family vary in size; give image_tokens")
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    dtype = next(body.vision_tower.parameters()).dtype
    pixels = torch.empty(1, config.num_channels, height, width, dtype=dtype, device="meta")
    outputs = []
    operations = count_operations(lambda: outputs.append(body.get_image_features(pixel_values=pixels)))
    (features,) = outputs[0].pooler_output
    return operations, len(features)


def _decoder(decoder: Any, tokens: int, width: int, *, cached: int = 0) -> int:
    from transformers import DynamicCache

    config = decoder.config
    cache = DynamicCache(config=config)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dtype = next(decoder.parameters()).dtype
    if cached:
        past = torch.empty(1, heads, cached, size, dtype=dtype, device="meta")
        for index in range(len(decoder.layers)):
            cache.update(past, past, index)
    # A mask of four dimensions is taken as it is; a smaller one would be looked into, and there is nothing to
    # see.
    mask = torch.empty(1, 1, tokens, cached + tokens, dtype=torch.bool, device="meta")
    embeds = torch.empty(1, tokens, width, dtype=dtype, device="meta")
    positions = torch.empty(1, tokens, dtype=torch.long, device="meta")
    return count_operations(
        lambda: decoder(inputs_embeds=embeds, attention_mask=mask, position_ids=positions, cache=cache)
    )


def _cross_attention(decoder: Any, fusion: CrossAttention, images: int, texts: int) -> tuple[int, int]:
    """Operations added to (prefill, decode), less those of a self-attention that is replaced."""
    prefill = decode = 0
    for index in fusion.layer_indices(len(decoder.layers)):
        attention = decoder.layers[index].self_attn
        keys = 2 * 2 * attention.k_proj.in_features * attention.k_proj.out_features
        prefill += images * keys + texts * _per_token(attention, fusion, images, texts)
        decode += _per_token(attention, fusion, images, texts + 1)
    if fusion.update_images:
        # Each block but the last passes the image tokens through its feed-forward network for the next one.
        weights = [p.numel() for layer in list(decoder.layers)[:-1] for p in layer.mlp.parameters() if p.ndim == 2]
        prefill += 2 * images * sum(weights)
    return prefill, decode


def _per_token(attention: Any, fusion: CrossAttention, images: int, texts: int) -> int:
    """Operations of one text token in one block; it sees `images` image tokens, and `texts` if joint."""
    width, a, b = attention.q_proj.in_features, attention.q_proj.out_features, attention.k_proj.out_features
    query, keys, output = 2 * width * a, 4 * width * b, 2 * a * width
    added = output + 4 * a * (images + texts if fusion.joint_text else images)
    if fusion.replace:
        return added + query + (keys if fusion.joint_text else 0) - (query + keys + output + 4 * a * texts)
    if not fusion.share_projections:
        # Shared queries and text keys are those that self-attention has computed already.
        added += query + (keys if fusion.joint_text else 0)
    return added


def _square(tokens: int) -> tuple[int, int]:
    side = round(tokens**0.5)
    if side * side != tokens:
        raise ValueError(f"compression is counted on a square grid of patches; got {tokens} image tokens")
    return side, side

"""The cost table of CASA's design axes: parameters, operations and cache bytes, predicted and measured side by side."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from crossfuse.analysis.cost import compressed_tokens, compression_module, prompt_cost
from crossfuse.analysis.flops import count_operations
from crossfuse.analysis.order_cost import order_cost, reorder_module
from crossfuse.backbones import backbone_for
from crossfuse.fusion import Fusion
from crossfuse.fusions.cross_attention import CrossAttention
from crossfuse.fusions.insertion import Insertion
from crossfuse.fusions.positions import CircleRoPE, ModalityRoPE
from crossfuse.fusions.reorder import GumbelReorder

ROWS: dict[str, Fusion] = {
    "insertion": Insertion(),
    "CA": CrossAttention.preset("CA"),
    "CA-link": CrossAttention.preset("CA-link"),
    "CA_t+v": CrossAttention.preset("CA_t+v"),
    "CA-feather (n=2)": CrossAttention.preset("CA-feather", every=2),
    "CA-feather (n=4)": CrossAttention.preset("CA-feather", every=4),
    "CA+FFN": CrossAttention.preset("CA+FFN"),
}
OTHERS: dict[str, Fusion] = {
    "ModalityRoPE (l=0)": ModalityRoPE(),
    "ModalityRoPE": ModalityRoPE(layers=None),
    "CircleRoPE": CircleRoPE(),  # fits m-RoPE models alone
    "GumbelReorder": GumbelReorder(),
}


@dataclasses.dataclass(frozen=True)
class AxisCost:
    """One row of the table. Operations are of one prompt: an image, then ``text_tokens`` of text."""

    name: str
    added_parameters: int
    prefill: int  # operations, predicted
    decode: int  # operations of the first generated token, predicted
    training: int  # operations of forward and backward, predicted as three (training) forwards
    cache_bytes: dict[int, int]  # images seen -> bytes, predicted
    measured_prefill: int | None = None
    measured_decode: int | None = None
    measured_training: int | None = None
    measured_cache_bytes: dict[int, int] | None = None
    saved_bytes: int | None = None  # tensors kept for the backward of one training step


def predict(model: Any, name: str, fusion: Fusion, text_tokens: int, image_tokens: int, images: list[int]) -> AxisCost:
    """A row from a model on the device "meta": no weights, no data."""
    cost = prompt_cost(model, fusion, text_tokens=text_tokens, image_tokens=image_tokens)
    return AxisCost(
        name=name,
        added_parameters=added_parameters(model, fusion),
        prefill=cost.prefill,
        decode=cost.decode,
        training=3 * (cost.prefill + cost.training_only),
        cache_bytes={k: cache_bytes(model, fusion, text_tokens, image_tokens, k) for k in images},
    )


def added_parameters(model: Any, fusion: Fusion) -> int:
    """New weights of a fusion: what `crossfuse.fusion_parameters` would count after fusing."""
    decoder = _decoder(model)
    width = decoder.get_input_embeddings().weight.shape[1]
    modules = (compression_module(fusion.active_compression, width), reorder_module(fusion, width))
    count = sum(p.numel() for module in modules if module is not None for p in module.parameters())
    if not isinstance(fusion, CrossAttention):
        return count
    count += fusion.gist_tokens * width
    for index in fusion.layer_indices(len(decoder.layers)):
        layer = decoder.layers[index]
        count += fusion.gate == "tanh"
        if not fusion.share_projections:
            names = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
            parts = [getattr(layer.self_attn, n) for n in names if hasattr(layer.self_attn, n)]
            count += sum(p.numel() for part in [*parts, layer.input_layernorm] for p in part.parameters())
    return count


def cache_bytes(model: Any, fusion: Fusion, text_tokens: int, image_tokens: int, images: int) -> int:
    """Bytes of the cache after ``images`` turns of one image and ``text_tokens`` of text each."""
    decoder = _decoder(model)
    image_tokens = compressed_tokens(fusion, image_tokens)
    layers, entry = len(decoder.layers), _entry_bytes(decoder)
    if not isinstance(fusion, CrossAttention):
        added = order_cost(decoder, fusion, image_tokens, text_tokens).cache_bytes
        return images * (image_tokens + text_tokens) * (layers * entry + added)
    crossed = len(fusion.layer_indices(layers))
    kept = layers - crossed if fusion.replace else layers
    seen = images if fusion.history is None else min(fusion.history, images)
    text = images * (text_tokens + fusion.gist_tokens) * kept * entry
    window = text_tokens * crossed * entry if fusion.joint_text and images else 0
    return text + seen * image_tokens * crossed * entry + window


def _entry_bytes(decoder: Any) -> int:
    """Bytes of one token's keys and values in one block."""
    config = decoder.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * heads * size * int(next(decoder.parameters()).element_size())


def _decoder(model: Any) -> Any:
    backbone = backbone_for(model)
    return backbone.decoder(backbone.body(model))


def measure(model: Any, row: AxisCost, fusion: Fusion, text_tokens: int, images: list[int]) -> AxisCost:
    """Fill in what a real model of the family LLaVA needs: counted operations, cache bytes, memory of a step.

    ``model`` is not fused and stays so; images are blank, tokens arbitrary.
    """
    from crossfuse.api import fused, new_cache

    with fused(model, fusion):
        inputs, features = _prompt(model, text_tokens)
        # The CPU's fused attention kernel is not counted by PyTorch's counter, the plain one is.
        with sdpa_kernel(SDPBackend.MATH):
            body = model.model
            vision = count_operations(lambda: features.update(_encode(body, inputs["pixel_values"])))
            cache = new_cache(model) if not fusion.is_identity else None
            outputs: list[Any] = []

            def prefill() -> None:
                outputs.append(model(**inputs, cache=cache, use_cache=True, logits_to_keep=1))

            prefill_operations = count_operations(prefill) - vision
            following = torch.tensor([[7]])
            length = inputs["input_ids"].shape[1]
            mask = torch.ones(1, length + 1, dtype=torch.long)
            decode = count_operations(
                lambda: model(input_ids=following, attention_mask=mask, cache=outputs[0].cache, use_cache=True)
            )
            training, saved = _training_step(model, inputs, features)
        sizes = {k: _cache_after(model, fusion, inputs, k) for k in images}
    return dataclasses.replace(
        row,
        measured_prefill=prefill_operations,
        measured_decode=decode,
        measured_training=training,
        measured_cache_bytes=sizes,
        saved_bytes=saved,
    )


def _prompt(model: Any, text_tokens: int) -> tuple[dict[str, Any], dict[str, Any]]:
    config = model.config
    vision = config.vision_config
    pixels = torch.zeros(1, vision.num_channels, vision.image_size, vision.image_size)
    with torch.no_grad():
        count = len(_encode(model.model, pixels)["image"].pooler_output[0])
    ids = torch.tensor([[config.image_token_id] * count + [5 + i % 20 for i in range(text_tokens)]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}, {}


def _encode(body: Any, pixels: Any) -> dict[str, Any]:
    return {"image": body.get_image_features(pixel_values=pixels, return_dict=True)}


def _cache_after(model: Any, fusion: Fusion, inputs: dict[str, Any], images: int) -> int:
    """Bytes of all cached tensors after so many turns of the same prompt."""
    from transformers import DynamicCache

    from crossfuse.api import new_cache

    cache: Any = DynamicCache(config=model.config.get_text_config()) if fusion.is_identity else new_cache(model)
    seen = 0
    with torch.no_grad():
        for _ in range(images):
            seen += inputs["input_ids"].shape[1]
            mask = torch.ones(1, seen, dtype=torch.long)
            model(**{**inputs, "attention_mask": mask}, cache=cache, use_cache=True, logits_to_keep=1)
    if not fusion.is_identity:
        return sum(cache.memory().values())
    return sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))


def _training_step(model: Any, inputs: dict[str, Any], features: dict[str, Any]) -> tuple[int, int]:
    """(operations, bytes saved for the backward) of one forward and backward over the prompt's last tokens.

    The image comes encoded: tower and projector are no part of it, as they are none of what is predicted.
    """
    from torch.utils.flop_counter import FlopCounterMode

    labels = inputs["input_ids"].clone()
    labels[:, : labels.shape[1] - 8] = -100
    given = {name: value for name, value in inputs.items() if name != "pixel_values"}
    was_training = model.training
    model.train()
    saved = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal saved
        saved += tensor.numel() * tensor.element_size()
        return tensor

    counter = FlopCounterMode(display=False)
    try:
        with counter, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(
                **given, mm_encoder_outputs=features, labels=labels, use_cache=False, return_logits=False
            ).loss.backward()
    finally:
        model.zero_grad(set_to_none=True)
        model.train(was_training)
    return int(counter.get_total_flops()), saved

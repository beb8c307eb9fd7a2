"""Taking a causal LM and a vision encoder apart into what a composed model is built from."""

from __future__ import annotations

import dataclasses
import inspect
import os
from typing import Any

import torch
from torch import Tensor, nn

from crossfuse.backbones.composed_processor import IMAGE_TOKEN
from crossfuse.backbones.gguf import load_text_gguf

Source = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True)
class VisionShape:
    """What one blank image showed about an encoder. ``grid``: (rows, columns) of its tokens."""

    width: int
    grid: tuple[int, int] | None
    class_token: bool


def load_llm(llm: Any, tokenizer: Any, dtype: Any) -> tuple[Any, Any]:
    """(causal LM, tokenizer or None) of an instance, a directory, a hub id or a text GGUF."""
    if isinstance(llm, nn.Module):
        return llm, tokenizer
    if str(llm).endswith(".gguf"):
        model, own = load_text_gguf(llm, dtype)
        return model, own if tokenizer is None else tokenizer
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(llm, dtype="auto" if dtype is None else dtype)
    return model, AutoTokenizer.from_pretrained(llm) if tokenizer is None else tokenizer


def load_vision(vision: Any, image_processor: Any, dtype: Any) -> tuple[Any, Any]:
    """(encoder, image processor or None). Of a dual or vision-language model, the vision part."""
    if not isinstance(vision, nn.Module):
        from transformers import AutoImageProcessor, AutoModel

        source = vision
        vision = AutoModel.from_pretrained(source, dtype="auto" if dtype is None else dtype)
        if image_processor is None:
            image_processor = AutoImageProcessor.from_pretrained(source)
    for name in ("vision_model", "visual", "vision_tower"):
        inner = getattr(vision, name, None)
        if isinstance(inner, nn.Module) and hasattr(vision, "get_input_embeddings") and _is_joint(vision):
            return inner, image_processor
    return vision, image_processor


def _is_joint(vision: Any) -> bool:
    config = getattr(vision, "config", None)
    return getattr(config, "vision_config", None) is not None and getattr(config, "text_config", None) is not None


def take_llm_apart(llm: Any) -> tuple[nn.Module, nn.Module]:
    """(body, head) of a causal LM. ValueError where the model is not built like Llama."""
    from transformers import MODEL_MAPPING

    name, body, head = type(llm).__name__, getattr(llm, "base_model", None), None
    if hasattr(llm, "get_output_embeddings"):
        head = llm.get_output_embeddings()
    needed = ("layers", "rotary_emb", "embed_tokens")
    if body is None or not isinstance(head, nn.Linear) or not all(hasattr(body, part) for part in needed):
        raise ValueError(
            f"{name} cannot be composed: its decoder needs {', '.join(needed)} and a linear head (Llama, Mistral, "
            "Qwen2, Qwen3, Helium, SmolLM, ...)"
        )
    if head.bias is not None:
        raise ValueError(f"{name} has a bias in its output head, which composed models have not; take another LLM")
    if MODEL_MAPPING.get(type(llm.config), None) is not type(body):
        raise ValueError(f"{name} cannot be composed: AutoModel does not build {type(body).__name__} from its config")
    if getattr(llm.config, "quantization_config", None) is not None and "gguf" in str(llm.config.quantization_config):
        del llm.config.quantization_config  # the weights are ordinary ones by now
    return body, head


def add_placeholder(llm: Any, tokenizer: Any, image_token: str = IMAGE_TOKEN) -> int:
    """The id of the image placeholder, with a row in the embeddings. New rows are zero and the LLM's own stay."""
    rows = llm.get_input_embeddings().weight.shape[0]
    if tokenizer is None:
        token_id = rows
    else:
        if image_token not in tokenizer.get_vocab():
            tokenizer.add_special_tokens(
                {"additional_special_tokens": [image_token]}, replace_extra_special_tokens=False
            )
        token_id = int(tokenizer.convert_tokens_to_ids(image_token))
    if token_id >= rows:
        trains = [p.requires_grad for p in (llm.get_input_embeddings().weight, llm.get_output_embeddings().weight)]
        llm.resize_token_embeddings(token_id + 1, pad_to_multiple_of=1, mean_resizing=False)
        with torch.no_grad():
            for embeddings, train in zip(
                (llm.get_input_embeddings(), llm.get_output_embeddings()), trains, strict=True
            ):
                embeddings.weight[rows:] = 0
                embeddings.weight.requires_grad_(train)
    return token_id


def input_size(vision: Any, image_processor: Any, image_size: int | None) -> int:
    """Side of the square input in pixels: as asked, as the encoder's config or its image processor has it, or 224."""
    if image_size is not None:
        return image_size
    size = getattr(getattr(vision, "config", None), "image_size", None)
    if isinstance(size, (list, tuple)):
        size = size[0]
    given = getattr(image_processor, "crop_size", None) or getattr(image_processor, "size", None)
    if size is None and given is not None:
        given = dict(given) if isinstance(given, dict) else vars(given)
        size = given.get("height") or given.get("shortest_edge")
    return int(size) if size else 224


def takes_grid(vision: nn.Module) -> bool:
    """True for encoders of images of any size, which take flat patches and ``grid_thw`` (Qwen2.5-VL's)."""
    return "grid_thw" in inspect.signature(vision.forward).parameters


def blank_image(vision: Any, side: int | None) -> dict[str, Tensor]:
    """The smallest input of the encoder: zeros as ``pixel_values`` (and ``image_grid_thw``)."""
    weight = next(vision.parameters())
    if takes_grid(vision):
        config, merge = vision.config, vision.spatial_merge_size
        channels = getattr(config, "in_channels", getattr(config, "in_chans", 3))
        patch = channels * config.temporal_patch_size * config.patch_size**2
        grid = torch.tensor([[1, merge, merge]], device=weight.device)
        return {"pixel_values": weight.new_zeros(merge**2, patch), "image_grid_thw": grid}
    channels = getattr(getattr(vision, "config", None), "num_channels", 3)
    return {"pixel_values": weight.new_zeros(1, channels, side, side)}


def image_tokens(
    vision: Any, pixels: Tensor, grids: Tensor | None, layer: int | None, drop_class_token: bool
) -> tuple[list[Tensor], list[tuple[int, int] | None]]:
    """One (n, C) tensor an image, and the (rows, columns) of each where known.

    pixels: (B, 3, H, W), or flat patches with ``grids`` (B, 3) long. Feature maps (B, C, H, W) are read row by row.
    """
    if grids is not None:
        output = vision(pixels, grid_thw=grids)
        merge = vision.spatial_merge_size
        lengths = (grids.prod(-1) // merge**2).tolist()
        shapes = [(t * h // merge, w // merge) for t, h, w in grids.tolist()]
        return list(output.pooler_output.split(lengths)), list(shapes)
    output = vision(pixels) if layer is None else vision(pixels, output_hidden_states=True)
    states = getattr(output, "last_hidden_state", output) if layer is None else output.hidden_states[layer]
    if isinstance(states, (list, tuple)):
        states = states[-1]
    if states.ndim == 4:
        shape = (states.shape[2], states.shape[3])
        return list(states.flatten(2).transpose(1, 2)), [shape] * len(states)
    if states.ndim != 3:
        raise ValueError(
            f"the vision encoder gave an output of shape {tuple(states.shape)}; it must be (B, C, H, W) feature maps "
            "or (B, N, C) tokens: pass the encoder without its pooling and classifier"
        )
    states = states[:, 1:] if drop_class_token else states
    side = round(states.shape[1] ** 0.5)
    grid = (side, side) if side * side == states.shape[1] else None
    return list(states), [grid] * len(states)


@torch.no_grad()
def probe(vision: Any, side: int | None, layer: int | None) -> VisionShape:
    """Width and grid of the encoder's tokens, from its output for a blank image."""
    was_training = vision.training
    vision.eval()
    blank = blank_image(vision, side)
    tokens, grids = image_tokens(vision, blank["pixel_values"], blank.get("image_grid_thw"), layer, False)
    vision.train(was_training)
    patch = getattr(getattr(vision, "config", None), "patch_size", None)
    count = len(tokens[0])
    if "image_grid_thw" not in blank and isinstance(patch, int) and side and count == (side // patch) ** 2 + 1:
        return VisionShape(tokens[0].shape[-1], (side // patch, side // patch), True)
    return VisionShape(tokens[0].shape[-1], grids[0], False)


def build_projector(config: Any) -> nn.Module:
    """ "mlp": two layers, as LLaVA-1.5's; "linear": one."""
    width, hidden = config.encoder_width, config.text_config.hidden_size
    if config.projector_type == "linear":
        return nn.Linear(width, hidden)
    return MLPProjector(width, hidden, config.projector_hidden_act)


class MLPProjector(nn.Module):
    """(..., C) image tokens -> (..., d), the LLM's width (LLaVA-1.5, Liu et al. 2024, section 3.2)."""

    def __init__(self, width: int, hidden: int, activation: str):
        from transformers.activations import ACT2FN

        super().__init__()
        self.linear_1 = nn.Linear(width, hidden)
        self.act = ACT2FN[activation]
        self.linear_2 = nn.Linear(hidden, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.linear_2(self.act(self.linear_1(tokens)))  # type: ignore[no-any-return]

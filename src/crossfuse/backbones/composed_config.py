"""Configuration of a composed model: a text-only LLM's, a vision encoder's, and what lies between them."""

from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec


@strict
class ComposedConfig(PreTrainedConfig):
    """Written by `VisionLanguageModel.compose`.

    text_config, vision_config: the parts' own; ``vision_config`` is None for a plain PyTorch module.
    image_token_id: the token that stands for one image token in ``input_ids``.
    vision_hidden_size: channels of one image token before the projector, probed from an output.
    vision_feature_layer: index into the encoder's hidden states (a ViT's layers, a CNN's stages); None: its output.
    drop_class_token: True where the encoder's first token is a class token.
    image_size, image_stride: side of the square input and of one image token, in pixels; None for encoders that
        take ``image_grid_thw`` (any size).
    projector_type: "mlp" (two layers, as LLaVA's), "linear" or "custom" (a module to give to `from_pretrained`).
    vision_class, projector_class: names of plain modules, for messages.
    """

    model_type = "crossfuse_composed"
    sub_configs_defaults: ClassVar[dict[str, SubConfigSpec]] = {
        "vision_config": SubConfigSpec(config_class=AutoConfig, model_type="clip_vision_model", optional=True),
        "text_config": SubConfigSpec(config_class=AutoConfig, model_type="llama"),
    }

    vision_config: dict[str, Any] | PreTrainedConfig | None = None
    text_config: dict[str, Any] | PreTrainedConfig | None = None
    image_token_id: int = 0
    vision_hidden_size: int = 768
    vision_feature_layer: int | None = None
    drop_class_token: bool = False
    image_size: int | None = None
    image_stride: int | None = None
    projector_type: Literal["mlp", "linear", "custom"] = "mlp"
    projector_hidden_act: str = "gelu"
    vision_class: str | None = None
    projector_class: str | None = None
    tie_word_embeddings: bool = False

    @property
    def placeholder_id(self) -> int:
        """The token that stands for one encoder token."""
        return self.image_token_id

    @property
    def encoder_width(self) -> int:
        """Channels of one encoder token before the projector."""
        return self.vision_hidden_size

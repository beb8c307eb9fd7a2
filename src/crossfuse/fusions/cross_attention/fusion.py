"""CrossAttention: the configuration (CASA's design axes D1-D5) and how it is attached to a decoder."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from crossfuse.fusion import Fusion, nearest
from crossfuse.swap import refuse_untouchable, restore, swap

if TYPE_CHECKING:
    from torch import Tensor, nn

    from crossfuse.backbones.base import Backbone
    from crossfuse.fusions.anchors import TextAnchors
    from crossfuse.fusions.cross_attention.context import CrossContext
    from crossfuse.sequence import FusedInputs, Layout, MultimodalSequence
    from crossfuse.streaming.cache import FusionCache

GATES = ("none", "tanh")
VIDEO_WINDOWS = ("frame", "all")
PRESETS: dict[str, dict[str, Any]] = {
    "CA": {},
    "CA-link": {"share_projections": True},
    "CA_t+v": {"joint_text": True},
    "CA-feather": {"every": 2, "replace": True},
    "CA_t+v-feather": {"every": 2, "replace": True, "joint_text": True},
    "CA+FFN": {"update_images": True},
}


@dataclasses.dataclass(frozen=True)
class CrossAttention(Fusion):
    """Cross-attention to the latest image, added to self-attention over text (CASA, eq. 2-4).

    share_projections: D1, CA^link: q, k, v, o are the block's own self-attention modules; no new parameters.
    joint_text: D2, CA_t+v: one softmax over the window's image and its text (eq. 4) instead of the image alone (eq. 2).
    every: D3, cross-attention in the last block of each group of this many.
    replace: D3, CA^feather: cross-attention takes the place of self-attention in its blocks (needs ``every`` >= 2).
    update_images: D4, CA+FFN: image tokens pass through every block's feed-forward network, with the block's own norm.
    history: D5, how many windows of images are visible; None shows all.
    video_windows: D5, ``"frame"`` gives every frame of a video its own window, ``"all"`` puts all frames into the
        window of the text that follows.
    gist_tokens: D5, this many learned tokens after every image (every frame): one stream position and one
        self-attention entry each; in cross-attention they see images alone, under joint_text too, and no text sees
        them there.
    gate: ``"tanh"`` is a zero-initialised gate (Flamingo's), for comparison.
    anchors: `TextAnchors` whose copies stand among the keys and values of each window, next to the image token that
        they resemble (see `crossfuse.fusions.cross_attention.anchored`); nothing of them enters the self-attention
        cache. With joint_text a copy has a position of its own behind its image token, or shares it
        (``positions="inherit"``, and always under m-RoPE).
    """

    name: ClassVar[str] = "cross-attention"

    share_projections: bool = False
    joint_text: bool = False
    every: int = 1
    replace: bool = False
    update_images: bool = False
    history: int | None = 1
    video_windows: str = "frame"
    gist_tokens: int = 0
    gate: str = "none"
    anchors: TextAnchors | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"every must be at least 1 (cross-attention in every n-th block); got {self.every}")
        if self.replace and self.every == 1:
            raise ValueError(
                "replace=True with every=1 is refused: without any self-attention, windows could never exchange "
                "anything; use every=2 or more"
            )
        if self.history is not None and self.history < 1:
            raise ValueError(f"history must be at least 1 (or None for every earlier image); got {self.history}")
        if self.gate not in GATES:
            raise ValueError(f"gate must be one of {', '.join(GATES)}; got {self.gate!r}")
        if self.video_windows not in VIDEO_WINDOWS:
            raise ValueError(f"video_windows must be one of {', '.join(VIDEO_WINDOWS)}; got {self.video_windows!r}")
        if isinstance(self.gist_tokens, bool) or not isinstance(self.gist_tokens, int) or self.gist_tokens < 0:
            raise ValueError(f"gist_tokens must be at least 0; got {self.gist_tokens!r}")
        if self.anchors is not None:
            _check_anchors(self.anchors)

    @classmethod
    def preset(cls, name: str, **fields: Any) -> CrossAttention:
        """A configuration by the paper's name; ``fields`` change it further. ValueError with the nearest name."""
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}{nearest(name, PRESETS)}; known: {', '.join(PRESETS)}")
        return cls(**{**PRESETS[name], **fields})

    @property
    def active_anchors(self) -> TextAnchors | None:
        """`anchors`, unless their threshold switches them off."""
        return None if self.anchors is None or self.anchors.threshold >= 1 else self.anchors

    @property
    def needs_prompt(self) -> bool:
        return self.active_anchors is not None

    @property
    def streams(self) -> bool:
        return True

    @property
    def drops_images(self) -> bool:
        return True

    @property
    def needs_delimiter(self) -> bool:
        return self.gist_tokens == 0

    def needs_whole_images(self, backbone: Backbone) -> bool:
        return super().needs_whole_images(backbone) or self.gist_tokens > 0 or (backbone.mrope and self.joint_text)

    def layer_indices(self, layers: int) -> list[int]:
        """Blocks with cross-attention: the last of each group of ``every``."""
        return [i for i in range(layers) if i % self.every == self.every - 1]

    def check_model(self, backbone: Backbone, model: nn.Module) -> None:
        decoder = backbone.decoder(backbone.body(model))
        if not self.layer_indices(len(decoder.layers)):
            raise ValueError(f"every must be at most the number of blocks, {len(decoder.layers)}; got {self.every}")
        for layer in decoder.layers:
            self._check_block(layer)
            refuse_untouchable(layer.self_attn)
            self._check_attention(layer.self_attn)

    def _check_block(self, layer: Any) -> None:
        missing = [
            n for n in ("self_attn", "input_layernorm", "post_attention_layernorm", "mlp") if not hasattr(layer, n)
        ]
        if missing:
            raise ValueError(
                f"{type(layer).__name__} has no {', '.join(missing)}; cross-attention needs blocks like Llama's"
            )

    def _check_attention(self, attention: Any) -> None:
        name = type(attention).__name__
        missing = [
            p for p in ("q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "scaling") if not hasattr(attention, p)
        ]
        if missing:
            raise ValueError(f"{name} has no {', '.join(missing)}; cross-attention needs a decoder built like Llama")
        for attribute in ("attn_logit_softcapping", "sinks"):
            if getattr(attention, attribute, None) is not None:
                raise ValueError(f"{name} uses {attribute}, which cross-attention would have to ignore; not supported")
        for part, module in attention.named_modules():
            if any(cls.__name__ == "BaseTunerLayer" for cls in type(module).__mro__):
                raise ValueError(
                    f"{name}.{part} is adapted by PEFT already; the order is fuse, then PEFT (or merge the adapter)"
                )
        # Qwen2 says per layer whether it slides; Mistral's layers all follow the config.
        window = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
        if self.joint_text and window:
            raise ValueError(
                f"{name} has a sliding window of {window} tokens, which joint_text=True would have to "
                "ignore; use joint_text=False or a model without sliding windows"
            )

    def attach(self, backbone: Backbone, model: nn.Module) -> None:
        from crossfuse.fusions.cross_attention.attention import CrossLayer, FusedAttention

        layers = backbone.decoder(backbone.body(model)).layers
        chosen = set(self.layer_indices(len(layers)))
        for index, layer in enumerate(layers):
            attention = layer.self_attn
            if index in chosen:
                gists = self.gist_tokens if index == min(chosen) else 0
                attention.cross = CrossLayer(self, attention, layer.input_layernorm, gists)
            # Seen by the attention module, not registered in it: state-dict keys stay where they are.
            attention.__dict__.update(
                _cross_block=layer, _cross_replaces=self.replace, _cross_shares=self.share_projections
            )
            swap(attention, FusedAttention)
            if self.replace and index in chosen:
                _freeze_replaced(attention, self)

    def detach(self, backbone: Backbone, model: nn.Module) -> None:
        for layer in backbone.decoder(backbone.body(model)).layers:
            attention = layer.self_attn
            restore(attention)
            attention._modules.pop("cross", None)
            for parameter in attention.__dict__.pop("_cross_frozen", ()):
                parameter.requires_grad_(True)
            for name in ("_cross_block", "_cross_replaces", "_cross_shares"):
                attention.__dict__.pop(name, None)

    def arrange(self, sequence: MultimodalSequence, cache: FusionCache | None) -> Layout | None:
        from crossfuse.fusions.cross_attention.layout import text_layout

        if self.active_anchors is not None and cache is not None:
            from crossfuse.fusions.cross_attention.anchored import remember_prompt

            remember_prompt(self.active_anchors, sequence, cache)
        seen = cache is not None and cache.window is not None
        if sequence.image_features is None and not seen and not self.replace:
            return None
        return text_layout(self, sequence)

    def extra_embeddings(self, backbone: Backbone, body: Any, layout: Layout) -> Tensor | None:
        if not self.gist_tokens:
            return None
        layers = backbone.decoder(body).layers
        gists: Tensor = layers[self.layer_indices(len(layers))[0]].self_attn.cross.gist
        return gists

    def prepare(
        self, backbone: Backbone, body: nn.Module, fused: FusedInputs, cache: FusionCache | None
    ) -> CrossContext | None:
        from crossfuse.fusions.cross_attention.context import cross_context

        return cross_context(self, backbone, body, fused, cache)


def _check_anchors(anchors: Any) -> None:
    """ValueError unless these are text anchors that only copy."""
    from crossfuse.fusions.anchors import TextAnchors

    if not isinstance(anchors, TextAnchors):
        raise ValueError(f"anchors must be TextAnchors; got {anchors!r}")
    if anchors.compress is not None:
        raise ValueError(f"compress belongs to CrossAttention, not to its anchors; got {anchors.compress}")
    if anchors.keep_image_tokens not in (None, 1):
        raise ValueError(
            f"keep_image_tokens shortens a sequence, which windows have not; got {anchors.keep_image_tokens}: "
            "shorten the windows with compress"
        )


def _freeze_replaced(attention: nn.Module, fusion: CrossAttention) -> None:
    """Self-attention weights that are no longer used stop training; `detach` thaws them."""
    if fusion.share_projections:
        return  # they are the cross-attention's own weights
    frozen = [p for n, p in attention.named_parameters() if not n.startswith("cross.") and p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    attention.__dict__["_cross_frozen"] = tuple(frozen)

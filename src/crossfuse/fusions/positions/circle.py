"""CircleRoPE: image tokens on a circle around the text's line of positions (Circle-RoPE, arXiv 2505.16416)."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from crossfuse.devices import LayerState
from crossfuse.fusions.positions.base import PositionFusion, layout_in_place
from crossfuse.fusions.positions.circle_geometry import circle_positions
from crossfuse.sequence import gather_by
from crossfuse.swap import Swapped

if TYPE_CHECKING:
    from torch import nn

    from crossfuse.backbones.base import Backbone
    from crossfuse.sequence import FusedInputs, Layout, MultimodalSequence
    from crossfuse.streaming.cache import FusionCache


@dataclasses.dataclass(eq=False)
class CircleContext(LayerState):
    """State of one call: rotary tables (B, F, D) of the circle positions."""

    rope: tuple[Tensor, Tensor]
    window: None = None  # no cross-attention window


class CircleAttention(Swapped):
    """The stock attention with other rotary tables; the stock one where the call holds no image."""

    def forward(self, hidden_states: Tensor, *args: Any, vision: CircleContext | None = None, **kwargs: Any) -> Any:
        if vision is not None:
            kwargs["position_embeddings"] = vision.at(hidden_states.device).rope
        return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]


@dataclasses.dataclass(frozen=True)
class CircleRoPE(PositionFusion):
    """Every text token is equally far from all tokens of an image. For models with m-RoPE (Qwen2.5-VL).

    The (height, width) indices of an image are centred and turned into angles, and the tokens stand at these angles on
    a circle in the plane orthogonal to (1, 1, 1), the direction of text positions. Text positions do not change. Each
    frame of a video has a circle of its own, further along the line.

    alpha: weight of the spatial angle (direction from the image's centre); 1 - alpha is that of the grid index.
    radius: of the circle, in positions (the published code's 10); None takes half the longer side of each image.
    layers: the blocks that use it; None for all, ``()`` for none, which is the unfused model bit for bit.
    alternate: only every second of these blocks, the others keep the original positions (alternating geometry).
    """

    name: ClassVar[str] = "circle-rope"
    attention_mixin = CircleAttention

    alpha: float = 0.5
    radius: float | None = 10.0
    layers: tuple[int, ...] | None = None
    alternate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, (int, float)) or not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must lie between 0 (grid-index angle) and 1 (spatial angle); got {self.alpha!r}")
        valid = isinstance(self.radius, (int, float)) and not isinstance(self.radius, bool)
        if self.radius is not None and not (valid and math.isfinite(self.radius) and self.radius > 0):
            raise ValueError(f"radius must be above 0, or None for half the image's longer side; got {self.radius!r}")

    def layer_indices(self, count: int) -> list[int]:
        return super().layer_indices(count)[:: 2 if self.alternate else 1]

    def check_model(self, backbone: Backbone, model: nn.Module) -> None:
        if not backbone.mrope and self.layers != ():
            raise ValueError(
                f"circle-rope needs positions of three rows (m-RoPE), such as Qwen2.5-VL's; {backbone.family} counts "
                "in one row: use modality-rope there"
            )
        super().check_model(backbone, model)

    def arrange(self, sequence: MultimodalSequence, cache: FusionCache | None) -> Layout | None:
        if sequence.image_features is None and sequence.segments is None and (cache is None or not cache.fused_length):
            return None
        return layout_in_place(sequence)

    def prepare(
        self, backbone: Backbone, body: nn.Module, fused: FusedInputs, cache: FusionCache | None
    ) -> CircleContext | None:
        sequence = fused.sequence
        decoder = backbone.decoder(body)
        if sequence.image_features is None or not self.layer_indices(len(decoder.layers)):
            return None
        positions = sequence.user_positions().double()
        lengths = torch.tensor(sequence.image_lengths, device=positions.device)
        item = torch.arange(len(lengths), device=positions.device).repeat_interleave(lengths)
        row, column = sequence.is_image.nonzero(as_tuple=True)
        positions[:, row, column] = circle_positions(positions[:, row, column], item, self.alpha, self.radius)
        placed = gather_by(positions, fused.layout.host)
        return CircleContext(decoder.rotary_emb(fused.inputs_embeds, placed))

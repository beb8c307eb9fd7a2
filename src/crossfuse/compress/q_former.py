"""`QFormer`: a few learned queries attend to an image's tokens, and they alone go on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from crossfuse.compress.base import Compression, Grid

if TYPE_CHECKING:
    from crossfuse.backbones.base import Backbone

_NAME = "compressor"


@dataclasses.dataclass(frozen=True)
class QFormer(Compression):
    """``queries`` learned queries an image, through ``layers`` blocks of self-attention, attention to the image's
    tokens and a feed-forward network (BLIP-2's Querying Transformer, by transformers; the baseline of CASA's table 5).

    width: of the blocks; None: the LLM's. Every block attends to the image; there is no dropout. The weights start at
    random (the same ones every time) and must be trained: they are parameters of the fusion, at
    ``model.cross.compressor``. Queries lie on no grid: they take positions one after the other, as text does, under
    m-RoPE too. An image needs at least ``queries`` tokens; ValueError otherwise.
    """

    name: ClassVar[str] = "q-former"
    keeps_grid: ClassVar[bool] = False
    queries: int = 32
    layers: int = 2
    width: int | None = None

    def __post_init__(self) -> None:
        for field in ("queries", "layers", "width"):
            value = getattr(self, field)
            if value is None and field == "width":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"QFormer {field} must be at least 1; got {value!r}")

    def attach(self, backbone: Backbone, model: nn.Module) -> None:
        from crossfuse.body_weights import FixedDraws, add_weights

        body = backbone.body(model)
        table = body.get_input_embeddings().weight
        with FixedDraws(), torch.device("meta" if table.is_meta else "cpu"):
            made = QueryTransformer(self, table.shape[-1])
        add_weights(body, _NAME, made)

    def detach(self, backbone: Backbone, model: nn.Module) -> None:
        from crossfuse.body_weights import remove_weights

        remove_weights(backbone.body(model), _NAME)

    def weights(self, body: Any) -> Any:
        return getattr(body.cross, _NAME)

    def grid(self, grid: Grid | None) -> Grid | None:
        return None

    def tokens(self, count: int, grid: Grid | None) -> int:
        if count < self.queries:
            raise ValueError(
                f"QFormer(queries={self.queries}) needs images of at least {self.queries} tokens; got {count}: "
                "use fewer queries"
            )
        return self.queries

    def pool(self, images: Sequence[Tensor], grids: Sequence[Grid | None], weights: Any) -> list[Tensor]:
        pooled: dict[int, Tensor] = {}
        for length in {len(tokens) for tokens in images}:  # images of one size are one batch
            self.tokens(length, None)
            places = [i for i, tokens in enumerate(images) if len(tokens) == length]
            answers = weights(torch.stack([images[i] for i in places]))
            pooled.update(zip(places, answers, strict=True))
        return [pooled[i] for i in range(len(images))]


class QueryTransformer(nn.Module):
    """Queries, transformers' Q-Former, and a projection to the LLM's width (as in BLIP-2)."""

    def __init__(self, compression: QFormer, width: int):
        from transformers import Blip2QFormerConfig, Blip2QFormerModel

        super().__init__()
        hidden = compression.width or width
        config = Blip2QFormerConfig(
            hidden_size=hidden,
            num_hidden_layers=compression.layers,
            num_attention_heads=_heads(hidden),
            intermediate_size=4 * hidden,
            encoder_hidden_size=width,
            cross_attention_frequency=1,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.query_tokens = nn.Parameter(torch.randn(compression.queries, hidden) * config.initializer_range)
        self.qformer = Blip2QFormerModel(config)
        self.projection = nn.Linear(hidden, width)

    def forward(self, images: Tensor) -> Tensor:
        """(images, N, d) -> (images, queries, d)."""
        queries = self.query_tokens.expand(len(images), -1, -1)
        states = self.qformer(query_embeds=queries, encoder_hidden_states=images).last_hidden_state
        projected: Tensor = self.projection(states)
        return projected


def _heads(width: int) -> int:
    """As many heads of 64 or more as divide the width."""
    return next(heads for heads in range(max(1, width // 64), 0, -1) if width % heads == 0)

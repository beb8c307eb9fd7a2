"""What a fusion is: a frozen dataclass that holds its whole configuration, and the registry of all of them."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from typing import TYPE_CHECKING, Any, ClassVar

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from crossfuse.backbones.base import Backbone
    from crossfuse.compress import Compression
    from crossfuse.sequence import FusedInputs, Layout, MultimodalSequence
    from crossfuse.streaming.cache import FusionCache

FUSIONS: dict[str, str] = {
    "insertion": "crossfuse.fusions.insertion:Insertion",
    "text-anchors": "crossfuse.fusions.anchors:TextAnchors",
    "image-anchors": "crossfuse.fusions.anchors:ImageAnchors",
    "cross-attention": "crossfuse.fusions.cross_attention:CrossAttention",
    "modality-rope": "crossfuse.fusions.positions:ModalityRoPE",
    "circle-rope": "crossfuse.fusions.positions:CircleRoPE",
    "gumbel-reorder": "crossfuse.fusions.reorder:GumbelReorder",
}


@dataclasses.dataclass(frozen=True)
class Fusion:
    """How image tokens reach the text tokens. Immutable; ``dataclasses.replace`` makes a variant.

    A subclass implements `arrange` (which tokens the language model sees, in which order) and, where it has weights
    or changes attention, `attach` / `detach` / `prepare`. It knows no model family.
    """

    name: ClassVar[str]
    compress: Compression | None = dataclasses.field(default=None, kw_only=True)

    @property
    def is_identity(self) -> bool:
        """True where this configuration can never change anything: the stock model is then called untouched."""
        return False

    @property
    def active_compression(self) -> Compression | None:
        """`compress`, unless it changes nothing."""
        return None if self.compress is None or self.compress.is_identity else self.compress

    @property
    def needs_prompt(self) -> bool:
        """True where it must know where the prompt ends, so that no answer can leak."""
        return False

    @property
    def streams(self) -> bool:
        """True where text and images may come piece by piece, without an end in sight."""
        return not self.needs_prompt

    @property
    def drops_images(self) -> bool:
        """True where image tokens leave the sequence (cross-attention)."""
        return False

    def check_model(self, backbone: Backbone, model: nn.Module) -> None:
        """Raise ValueError where this configuration does not fit the model."""

    def attach(self, backbone: Backbone, model: nn.Module) -> None:
        """Change what lies inside the decoder (attention modules, new weights)."""

    def detach(self, backbone: Backbone, model: nn.Module) -> None:
        """Undo `attach`, exactly."""

    def arrange(self, sequence: MultimodalSequence, cache: FusionCache | None) -> Layout | None:
        """The fused order, or None where this call inserts and removes nothing."""
        raise NotImplementedError

    @property
    def needs_delimiter(self) -> bool:
        """True where a token that follows an image directly could not be predicted from it."""
        return False

    def needs_whole_images(self, backbone: Backbone) -> bool:
        """True where a prefill may not be cut inside an image."""
        return self.active_compression is not None

    def extra_embeddings(self, backbone: Backbone, body: Any, layout: Layout) -> Tensor | None:
        """(E, d) embeddings of the layout's extra tokens, or None."""
        if not layout.extra_token_ids:
            return None
        table = body.get_input_embeddings()
        embedded: Tensor = table(torch.tensor(layout.extra_token_ids, device=table.weight.device))
        return embedded

    def prepare(self, backbone: Backbone, body: nn.Module, fused: FusedInputs, cache: FusionCache | None) -> Any:
        """State that travels with this one call as ``vision=`` through the decoder; None for sequence fusions."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields, with the name of the fusion."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if self.compress is not None:
            fields["compress"] = self.compress.to_dict()
        fields = {name: value.to_dict() if isinstance(value, Fusion) else value for name, value in fields.items()}
        return {"name": self.name, **fields}


def fusion_class(name: str) -> type[Fusion]:
    """The class registered as ``name``; ValueError with the nearest name otherwise."""
    if name not in FUSIONS:
        raise ValueError(f"unknown fusion {name!r}{nearest(name, FUSIONS)}; known: {', '.join(FUSIONS)}")
    module, _, attribute = FUSIONS[name].partition(":")
    cls: type[Fusion] = getattr(importlib.import_module(module), attribute)
    return cls


def make_fusion(name: str, **fields: Any) -> Fusion:
    """Build a fusion by its registered name. Unknown fields raise ValueError with the nearest name."""
    cls = fusion_class(name)
    known = [f.name for f in dataclasses.fields(cls)]
    for key in fields:
        if key not in known:
            raise ValueError(f"{name} has no field {key!r}{nearest(key, known)}; its fields: {', '.join(known)}")
    if isinstance(fields.get("compress"), dict):
        from crossfuse.compress import make_compression

        fields["compress"] = make_compression(**fields["compress"])
    if isinstance(fields.get("anchors"), dict):
        fields["anchors"] = make_fusion(**fields["anchors"])
    if isinstance(fields.get("exclude_token_ids"), list):
        fields["exclude_token_ids"] = tuple(fields["exclude_token_ids"])
    return cls(**fields)


def nearest(name: str, known: Any) -> str:
    """A parenthesis with the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""

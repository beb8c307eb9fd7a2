"""What is trained and for how long: a validated description of one fine-tuning run."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from crossfuse.fusion import nearest


class Recipe(BaseModel):
    """One fine-tuning run. Unknown fields are refused, the nearest name suggested.

    Two runs have an equal budget where `steps` and `batch_size` are equal: the same samples in the same order
    (`seed`), whatever is trained; wall time differs and is reported.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    train: Literal["lora", "fusion"] = "lora"
    """"lora": low-rank adapters on the decoder's layers (Hu et al. 2022). "fusion": its own weights."""
    steps: int = Field(default=100, ge=1)
    batch_size: int = Field(default=32, ge=1)
    learning_rate: float = Field(default=1e-3, gt=0)
    warmup_steps: int = Field(default=10, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    lora_rank: int = Field(default=16, ge=1)
    lora_alpha: int = Field(default=32, ge=1)
    seed: int = 0
    alignment_weight: float = Field(default=0.0, ge=0)
    """Weight of the loss that pulls image tokens towards the words that name them; records need boxes."""
    train_projector: bool = False
    """Train the projector in full beside what `train` names (the alignment loss moves nothing without it)."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for key in values:
                if key not in cls.model_fields:
                    known = ", ".join(cls.model_fields)
                    raise ValueError(
                        f"a recipe has no field {key!r}{nearest(str(key), cls.model_fields)}; known: {known}"
                    )
        return values

    @model_validator(mode="after")
    def _alignment_needs_the_projector(self) -> Recipe:
        if self.alignment_weight > 0 and not self.train_projector:
            raise ValueError(
                f"alignment_weight={self.alignment_weight:g} moves nothing while the projector is frozen; set "
                f"train_projector=True"
            )
        return self

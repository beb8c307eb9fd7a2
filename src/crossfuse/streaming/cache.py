"""The cache of a fused model: self-attention keys of text, and the keys of the images that are still visible.

It speaks two lengths. ``generate`` asks for the *user's* length (tokens as the user wrote them); masks and attention
work in *fused* length (with copies, without placeholders). Everything that belongs to one stream lives here, batch
first, so that beam search, batch selection and cropping move all of it together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

NO_WINDOW = -(2**31)  # ordinal of an empty image slot


@dataclasses.dataclass(eq=False)
class WindowState:
    """Which cached image and text keys belong to the open window of each row. One for all layers.

    Image slots are left-aligned, text slots right-aligned (new text is appended at the end).
    """

    image_ordinals: Tensor  # (B, S) long: 0 for the latest window, -1 for the one before ..., NO_WINDOW if empty
    image_counts: Tensor  # (B,) long: filled image slots
    text_counts: Tensor  # (B,) long: cached text keys of the window (joint text only, else 0)
    since_image: Tensor  # (B,) long: text tokens since the latest image


class FusedLayer(DynamicLayer):
    """Self-attention keys and values (B, H, F, D), beside image and window-text keys (B, S, H, D) of one layer."""

    _rows = ("keys", "values", "image_keys", "image_values", "text_keys", "text_values")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.image_keys: Tensor | None = None
        self.image_values: Tensor | None = None
        self.text_keys: Tensor | None = None
        self.text_values: Tensor | None = None

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        for name in self._rows:
            tensor = getattr(self, name)
            if tensor is not None and tensor.ndim == 4:
                setattr(self, name, change(tensor))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda t: t[indices.to(t.device)])

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if tokens_to_remove < 0 and self.text_keys is not None and self.text_values is not None:
            self.text_keys = self.text_keys[:, :tokens_to_remove]
            self.text_values = self.text_values[:, :tokens_to_remove]

    def reset(self) -> None:
        super().reset()
        self.image_keys = self.image_values = self.text_keys = self.text_values = None


class FusionCache(DynamicCache):
    """Cache of one batch of streams on one fused model; made by ``generate``, by the first forward or `new_cache`."""

    user_length: int
    fused_length: int
    croppable: int  # trailing tokens that are the same in both lengths
    mask: Tensor | None  # (B, fused_length) bool
    next_position: Tensor | None  # (B,) long
    window: WindowState | None
    prompt_ids: Tensor | None  # (B, c) long: by user column, prompt text that later images may get copies of; else -1

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = [FusedLayer() for _ in range(layers)]
        self.layer_class_to_replicate = None
        self.reset()

    # ------------------------------------------------------------------ lengths
    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Without an index (as ``generate`` asks) the user's length, with one the fused length."""
        return self.user_length if layer_idx is None else self.fused_length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.fused_length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.fused_length + query_length, 0

    # ------------------------------------------------------------------ growth
    def extended_mask(self, mask: Tensor) -> Tensor:
        """(B, F) real tokens of this call -> (B, past + F) of the whole stream."""
        return mask if self.mask is None else torch.cat([self.mask.to(mask.device), mask], 1)

    def record(self, mask: Tensor, next_position: Tensor, user_tokens: int, plain_tail: int) -> None:
        """Note what a forward has appended. ``mask`` (B, F) bool is of this call alone."""
        fused = mask.shape[1]
        self.mask = self.extended_mask(mask)
        self.next_position = next_position
        whole = plain_tail == user_tokens == fused
        self.croppable = self.croppable + fused if whole else plain_tail
        self.user_length += user_tokens
        self.fused_length += fused

    def note_prompt(self, ids: Tensor) -> None:
        """Remember (B, L) ids of this call, which `record` has not counted yet."""
        known = ids[:, :0] if self.prompt_ids is None else self.prompt_ids
        missing = self.user_length - known.shape[1]
        self.prompt_ids = torch.cat([torch.nn.functional.pad(known, (0, missing), value=-1), ids], 1)

    # ------------------------------------------------------------------ rows
    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.prompt_ids is not None:
            self.prompt_ids = change(self.prompt_ids)
        if self.mask is not None and self.next_position is not None:
            self.mask, self.next_position = change(self.mask), change(self.next_position)
        if self.window is not None:
            fields = {f.name: change(getattr(self.window, f.name)) for f in dataclasses.fields(self.window)}
            self.window = WindowState(**fields)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._map(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._map(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._map(lambda t: t[indices.to(t.device)])

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` tokens. Raises ValueError before plain text of the current window."""
        if tokens_to_remove == 0 or self.mask is None or self.next_position is None:
            return
        removed = -tokens_to_remove
        if removed < 0:
            raise ValueError(f"crop takes a negative number of tokens to remove; got {tokens_to_remove}")
        limit = min(self.croppable, self._window_text())
        if removed > limit:
            raise ValueError(
                f"cannot crop {removed} tokens: only the last {limit} stand after the current image and its copies; "
                "prefill again from the start"
            )
        super().crop(tokens_to_remove)
        real = self.mask[:, tokens_to_remove:].sum(1)
        self.mask = self.mask[:, :tokens_to_remove]
        self.next_position = self.next_position - real
        if self.window is not None:
            self.window = dataclasses.replace(
                self.window,
                text_counts=(self.window.text_counts - real).clamp(min=0),
                since_image=self.window.since_image - real,
            )
        self.user_length -= removed
        if self.prompt_ids is not None:
            self.prompt_ids = self.prompt_ids[:, : self.user_length]
        self.fused_length -= removed
        self.croppable -= removed

    def _window_text(self) -> int:
        """Text tokens after the latest image, the fewest over rows that have one."""
        if self.window is None:
            return self.fused_length
        has_image = self.window.image_counts > 0
        return int(torch.where(has_image, self.window.since_image, self.fused_length).min())

    def reset(self) -> None:
        super().reset()
        self.user_length = 0
        self.fused_length = 0
        self.croppable = 0
        self.mask = self.next_position = self.prompt_ids = None
        self.window = None

    def memory(self) -> dict[str, int]:
        """Bytes by part: ``self_attention`` (text), ``images`` and ``window_text`` (cross-attention)."""
        parts = {"self_attention": ("keys", "values"), "images": ("image_keys", "image_values")}
        parts["window_text"] = ("text_keys", "text_values")
        return {
            part: sum(
                t.numel() * t.element_size()
                for layer in self.layers
                for t in (getattr(layer, name) for name in names)
                if t is not None
            )
            for part, names in parts.items()
        }

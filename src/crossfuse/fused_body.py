"""The body of a fused model: takes the user's tokens, fuses inside, runs the decoder, answers in the user's order.

The top model keeps the head, the loss and ``generate`` of transformers in the *user's* token space: only the body
works on the fused sequence, and gathers its hidden states back by `readout`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crossfuse.backbones.base import Backbone, EncodedImages
from crossfuse.compress.images import compress_images
from crossfuse.devices import moved
from crossfuse.fusion import Fusion
from crossfuse.prompt import check_counts, own_columns, refuse_reentrant
from crossfuse.sequence import (
    FusedInputs,
    MultimodalSequence,
    block_causal_mask,
    fuse_inputs,
    gather_by,
    packed_segments,
    restarted,
    triples,
)
from crossfuse.streaming.cache import FusionCache
from crossfuse.swap import Swapped


class FusedBody(Swapped):
    """Takes the user's tokens, fuses inside, runs the decoder, returns hidden states in the user's order."""

    _fusion: Fusion  # resolved at run time: transformers evaluates the annotations of model classes
    _backbone: Backbone

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        mm_encoder_outputs: Any = None,
        anchor_mask: Tensor | None = None,
        prompt_mask: Tensor | None = None,
        answer_starts: Tensor | None = None,
        segment_ids: Tensor | None = None,
        fused_report: dict[str, Any] | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        fusion, backbone = self._fusion, self._backbone
        stock = super().forward  # type: ignore[misc]
        past = 0
        if not isinstance(cache, FusionCache):
            if segment_ids is None:
                segment_ids = _restarting(self, attention_mask, position_ids, cache, use_cache)
            if cache is not None and not fusion.is_identity:
                raise TypeError(
                    f"{type(cache).__name__} cannot hold the state of {fusion.name}; pass cache=None or "
                    "crossfuse.new_cache(model)"
                )
        else:
            past = cache.user_length
        if use_cache is None:
            text_config = self.config.get_text_config()  # type: ignore[attr-defined]
            use_cache = cache is not None or (not self.training and bool(getattr(text_config, "use_cache", True)))  # type: ignore[attr-defined]
        common = {"use_cache": use_cache, "return_dict": return_dict}

        if fusion.is_identity and segment_ids is None and not self._needs_dummy(kwargs, mm_encoder_outputs):
            outputs = stock(
                input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, cache=cache,
                inputs_embeds=inputs_embeds, mm_encoder_outputs=mm_encoder_outputs, **common, **kwargs,
            )  # fmt: skip
            appended = inputs_embeds if input_ids is None else input_ids
            if isinstance(cache, FusionCache) and appended is not None:
                _record_plain(cache, appended, attention_mask)
            return outputs
        if input_ids is None:
            raise ValueError(f"a model fused with {fusion.name} needs input_ids; inputs_embeds alone hide the images")
        if segment_ids is not None and use_cache:
            raise ValueError("packed rows (segment_ids) cannot fill a cache; pass use_cache=False")

        embeds = self.get_input_embeddings()(input_ids)  # type: ignore[attr-defined]
        # Layers may stand on several devices: from here on, indices stand where the embeddings do.
        device = embeds.device
        input_ids, attention_mask, position_ids, segment_ids, anchor_mask, prompt_mask, answer_starts = moved(
            (input_ids, attention_mask, position_ids, segment_ids, anchor_mask, prompt_mask, answer_starts), device
        )
        kwargs = {k: v if k in backbone.raw_arguments else moved(v, device) for k, v in kwargs.items()}
        images = backbone.encode(self, mm_encoder_outputs, kwargs)  # type: ignore[arg-type]
        if images is not None:
            images = backbone.in_reading_order(self, input_ids, images)
        masks = {"anchor_mask": anchor_mask, "prompt_mask": prompt_mask, "answer_starts": answer_starts}
        sequence = self._sequence(
            input_ids, embeds, attention_mask, position_ids, cache, images, masks, segment_ids, past, kwargs
        )  # fmt: skip
        if use_cache and cache is None:
            cache = FusionCache(len(backbone.decoder(self).layers))  # type: ignore[arg-type]
        layout = fusion.arrange(sequence, cache)
        if layout is None and past == 0 and segment_ids is None and sequence.dummy_features is None:
            # Nothing is inserted or removed: the stock body, so that padded rows too equal the unfused model's bits.
            given = {} if images is None else {"mm_encoder_outputs": images.as_encoder_outputs()}
            rest = {k: v for k, v in kwargs.items() if k not in backbone.raw_arguments}
            used = sequence.position_ids if backbone.mrope and position_ids is None else position_ids
            outputs = stock(
                input_ids=input_ids, attention_mask=attention_mask, position_ids=used, cache=cache,
                **given, **common, **rest,
            )  # fmt: skip
            if cache is not None:
                tokens = input_ids.shape[1]
                if used is None:  # transformers then counts columns, padding included
                    sequence.position_ids = torch.arange(tokens, device=input_ids.device).expand_as(input_ids)
                cache.record(sequence.valid, sequence.following_position(), tokens, tokens)
            return outputs

        layout = layout or sequence.plain_layout()
        fused = fuse_inputs(sequence, layout, fusion.extra_embeddings(backbone, self, layout))  # type: ignore[arg-type]
        if sequence.dummy_features is not None and not fusion.drops_images:
            fused.inputs_embeds = fused.inputs_embeds + 0.0 * sequence.dummy_features.sum().to(device)
        outputs = self._decode(fused, cache if use_cache else None, use_cache, kwargs)
        hidden = fused.gather(outputs.last_hidden_state)
        if fused_report is not None:
            fused_report["readout"] = fused.readout
        result = backbone.model_output(self, outputs, hidden, images)  # type: ignore[arg-type]
        return result if return_dict is not False else result.to_tuple()

    def _decode(self, fused: FusedInputs, cache: FusionCache | None, use_cache: bool, kwargs: dict[str, Any]) -> Any:
        fusion, backbone = self._fusion, self._backbone
        vision = fusion.prepare(backbone, self, fused, cache)  # type: ignore[arg-type]
        extra = {} if vision is None else {"vision": vision}
        rest = {k: v for k, v in kwargs.items() if k not in backbone.image_arguments}
        decoder = backbone.decoder(self)  # type: ignore[arg-type]
        if vision is not None and self.training and torch.is_grad_enabled():  # type: ignore[attr-defined]
            refuse_reentrant(decoder, fusion)
        outputs = decoder(
            inputs_embeds=fused.inputs_embeds,
            attention_mask=self._attention_mask(fused, cache),
            position_ids=fused.position_ids,
            cache=cache,
            use_cache=use_cache,
            **extra,
            **rest,
        )
        if cache is not None:
            tokens = fused.sequence.input_ids.shape[1]
            cache.record(fused.attention_mask, fused.next_position, tokens, fused.plain_tail)
            if vision is not None and vision.window is not None:
                cache.window = vision.window
        return outputs

    def _attention_mask(self, fused: FusedInputs, cache: FusionCache | None) -> Tensor:
        """Always explicit: transformers would guess packing from positions that repeat or restart."""
        segments = fused.sequence.segments
        if segments is None:
            mask = fused.attention_mask if cache is None else cache.extended_mask(fused.attention_mask)
            return mask.long()
        config = self.config.get_text_config()  # type: ignore[attr-defined]
        window = getattr(config, "sliding_window", None)
        if window and fused.attention_mask.shape[1] > window:
            raise ValueError(
                f"a packed row of {fused.attention_mask.shape[1]} tokens exceeds the sliding window of {window}; "
                "pack shorter rows"
            )
        implementation = config._attn_implementation
        if implementation not in ("sdpa", "eager"):
            raise ValueError(f"packed rows need attn_implementation 'sdpa' or 'eager'; got {implementation!r}")
        dtype = fused.inputs_embeds.dtype if implementation == "eager" else None
        return block_causal_mask(gather_by(segments, fused.layout.host), dtype)

    def _sequence(
        self,
        input_ids: Tensor,
        embeds: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: FusionCache | None,
        images: EncodedImages | None,
        masks: dict[str, Tensor | None],
        segment_ids: Tensor | None,
        past: int,
        arguments: dict[str, Any],
    ) -> MultimodalSequence:
        """Scatter the image tokens into their places, and cut every mask to this call's columns."""
        fusion, backbone = self._fusion, self._backbone
        rows, length = input_ids.shape
        if attention_mask is not None and attention_mask.ndim != 2:
            raise ValueError(
                f"attention_mask must have 2 dimensions in a fused model; got {attention_mask.ndim} "
                "(packed rows are told by segment_ids)"
            )
        valid = torch.ones_like(input_ids, dtype=torch.bool)
        if attention_mask is not None:
            valid = attention_mask[:, -length:].bool()
        if segment_ids is not None:
            valid = valid & (segment_ids >= 0)
        if fusion.needs_prompt and self.training and masks["anchor_mask"] is None and masks["prompt_mask"] is None:  # type: ignore[attr-defined]
            raise ValueError(
                f"{fusion.name} cannot tell the prompt from the answer in a training forward without labels, "
                "prompt_mask or anchor_mask (label smoothing removes the labels); pass one of them"
            )
        masks = {name: own_columns(mask, past, length, name) for name, mask in masks.items()}
        is_image = torch.zeros_like(valid)
        features, lengths, grids, frames = None, [], [], None
        if images is not None and images.features:
            is_image = backbone.is_placeholder(self, input_ids) & valid
            check_counts(is_image, [len(tokens) for tokens in images.features])
            if position_ids is None and backbone.mrope:
                position_ids = backbone.positions(self, input_ids, valid, arguments)
                if position_ids is not None and segment_ids is not None:
                    position_ids = restarted(position_ids, segment_ids)
            given = [tokens.to(embeds.device) for tokens in images.features]
            grids, lengths = images.grids, [len(tokens) for tokens in given]
            features = torch.cat(given)
            compress = fusion.active_compression
            if compress is not None:
                left = compress_images(
                    compress, compress.weights(self), given, grids, is_image,
                    triples(position_ids, rows), segment_ids,
                )  # fmt: skip
                void = torch.zeros_like(is_image).masked_scatter(is_image, ~left.kept)
                valid, is_image = valid & ~void, is_image & ~void
                features, lengths = torch.cat(left.features).to(embeds.device), [len(t) for t in left.features]
                grids, frames, position_ids = left.grids, left.frames, left.position_ids
            if not fusion.drops_images:
                embeds = embeds.masked_scatter(is_image[..., None], features.to(embeds.dtype))
        start = torch.zeros(rows, dtype=torch.long, device=input_ids.device)
        if cache is not None and cache.next_position is not None:
            start = cache.next_position.to(input_ids.device)
        position_ids = self._user_positions(position_ids, valid, start, past, rows)
        videos = [kind != backbone.placeholder_id(self) for kind in images.kinds] if images is not None else []
        videos += [False] * (len(lengths) - len(videos))
        dummy = None
        if self._needs_dummy({}, None if images is None else {"image": images}):
            dummy = self._dummy_features()
        return MultimodalSequence(
            input_ids=input_ids, embeds=embeds, valid=valid, is_image=is_image, image_features=features,
            image_lengths=lengths, is_video=videos, image_grids=grids, image_frames=frames, position_ids=position_ids,
            start=start, segments=segment_ids, **masks, special_ids=backbone.special_ids(self), dummy_features=dummy,
        )  # fmt: skip

    def _user_positions(
        self, position_ids: Tensor | None, valid: Tensor, start: Tensor, past: int, rows: int
    ) -> Tensor | None:
        """(B, L) or (3, B, L) positions of this call, or None where they are counted.

        After a cache they go on from its own next position: what was inserted or removed before is known to it alone.
        """
        position_ids = triples(position_ids, rows)
        if position_ids is None:
            return None
        if position_ids.ndim == 2 and self._fusion.active_compression is not None:
            return None
        if position_ids.ndim == 2:
            return None if past else position_ids
        if not past:
            return position_ids
        first = valid.long().argmax(1)
        return position_ids - position_ids.gather(-1, first.expand(3, -1)[..., None]) + start[:, None]

    def _dummy_features(self) -> Tensor:
        """(n, d): a blank image through all that is trained on the way to the fusion."""
        dummy = self._backbone.dummy_features(self)  # type: ignore[arg-type]
        compress = self._fusion.active_compression
        weights = None if compress is None else compress.weights(self)
        return dummy if weights is None else weights(dummy[None])[0]

    def _needs_dummy(self, arguments: dict[str, Any], encoded: Any) -> bool:
        """A training step without images still runs tower, projector and cross-attention, so ranks stay in step."""
        if not self.training or not torch.is_grad_enabled():  # type: ignore[attr-defined]
            return False
        given = [arguments.get(name) for name in self._backbone.raw_arguments if name != "pixel_values_videos"]
        if any(value is not None for value in [*given, *((encoded or {}).get(m) for m in ("image", "audio"))]):
            return False
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return True
        return not self._fusion.is_identity and any(p.requires_grad for p in self.parameters())  # type: ignore[attr-defined]


def _record_plain(cache: FusionCache, tokens: Tensor, attention_mask: Tensor | None) -> None:
    """Note in a `FusionCache` what the stock body has appended to it."""
    rows, length = tokens.shape[:2]
    valid = torch.ones(rows, length, dtype=torch.bool, device=tokens.device)
    if attention_mask is not None and attention_mask.ndim == 2:
        valid = attention_mask[:, -length:].bool()
    start = torch.zeros(rows, dtype=torch.long, device=tokens.device)
    if cache.next_position is not None:
        start = cache.next_position.to(tokens.device)
    cache.record(valid, start + valid.sum(1), length, length)


def _restarting(
    body: Any, attention_mask: Tensor | None, position_ids: Tensor | None, cache: Any, use_cache: bool | None
) -> Tensor | None:
    """Samples of a packed row given the way transformers takes them: restarting positions, no mask, no cache."""
    if position_ids is None or attention_mask is not None or cache is not None or position_ids.ndim != 2:
        return None
    if body._fusion.is_identity or use_cache:
        return None
    return packed_segments(position_ids)

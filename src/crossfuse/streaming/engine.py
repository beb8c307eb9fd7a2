"""Forwards what waits in one stream, or in several at once, through one model.

The model is called as anybody would call it, with a cache; nothing is kept on it. Shape legend: n streams, L columns of
a call, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.modeling_outputs import BaseModelOutputWithPooling

from crossfuse.backbones import backbone_for
from crossfuse.devices import input_device, on_device_of
from crossfuse.fusion import Fusion
from crossfuse.prompt import check_pixels
from crossfuse.sequence import count_positions
from crossfuse.streaming.cache import FusionCache
from crossfuse.streaming.eviction import TextBudget, make_room
from crossfuse.streaming.stacking import stack, unstack
from crossfuse.streaming.stream import EncodedFrame, Piece, Run, Segment, Stream, pieces


class Engine:
    """A model and a text budget; holds no stream."""

    def __init__(self, model: Any, budget: TextBudget):
        from crossfuse.api import fusion_of
        from crossfuse.fusions.insertion import Insertion

        model = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's layers lie inside it
        if model.training:
            raise ValueError("the model is in training mode; call model.eval() before streaming")
        self.model, self.budget = model, budget
        self.fusion: Fusion = fusion_of(model) or Insertion()
        if not self.fusion.streams:
            raise ValueError(
                f"{self.fusion.name} decides over a whole prompt and cannot stream; use insertion or cross-attention"
            )
        body = model.model
        self.backbone = getattr(body, "_backbone", None) or backbone_for(model)
        self.body = body
        self.layers = len(self.backbone.decoder(body).layers)
        text_config = model.config.get_text_config()
        self.limit = int(getattr(text_config, "max_position_embeddings", 2**31))
        self.placeholder = self.backbone.placeholder_id(body)
        self.padding = int(self.placeholder == 0)
        budget.check_model(model, self.limit)
        self.compress = self.fusion.active_compression

    def new_stream(self) -> Stream:
        return Stream(self.layers)

    # ------------------------------------------------------------------ images
    @torch.inference_mode()
    def encode(self, processor: Any, images: Sequence[Any]) -> list[EncodedFrame]:
        """Tower and projector, once for all ``images``: PIL images or (H, W, 3) uint8 arrays."""
        inputs = dict(processor.image_processor(images=[_rgb(image) for image in images], return_tensors="pt"))
        check_pixels(inputs.get("pixel_values"))
        inputs = on_device_of(self.model, inputs)
        encoded = self.backbone.encode(self.body, None, inputs)
        if encoded is None or len(encoded.features) != len(images):
            raise ValueError(f"{len(images)} images gave {0 if encoded is None else len(encoded.features)} encodings")
        per_image = {
            name: value
            for name, value in inputs.items()
            if not name.startswith("pixel_values") and isinstance(value, Tensor) and len(value) == len(images)
        }
        return [
            EncodedFrame(features, grid, {name: value[i : i + 1] for name, value in per_image.items()})
            for i, (features, grid) in enumerate(zip(encoded.features, encoded.grids, strict=True))
        ]

    def cost(self, frame: EncodedFrame) -> int:
        """Self-attention entries of one frame: with cross-attention only its gist tokens, if it has any."""
        if self.fusion.drops_images:
            return int(getattr(self.fusion, "gist_tokens", 0))
        if self.compress is None:
            return len(frame.features)
        return self.compress.tokens(len(frame.features), frame.grid)

    def _run(self, segment: Segment) -> Run:
        if isinstance(segment, list):
            return Run(len(segment), len(segment), False)
        tokens = self.cost(segment)
        if self.fusion.drops_images:  # gists are evicted like text
            return Run(tokens, tokens, False)
        grid = segment.grid if self.compress is None else self.compress.grid(segment.grid)
        spatial = tokens and self.backbone.mrope and grid is not None
        return Run(tokens, max(grid) if spatial else tokens, True)  # type: ignore[arg-type]

    # ------------------------------------------------------------------ forward
    def flush(self, streams: Sequence[Stream], joined: FusionCache | None = None) -> None:
        """Forward all that waits; afterwards every stream's ``logits`` predict its next token.

        ``joined`` is a cache that `stack` made of these streams; it then takes the tokens in their place.
        """
        queues = [list(self._pieces(stream)) for stream in streams]
        while any(queues):
            busy = [i for i, queue in enumerate(queues) if queue]
            if joined is not None and len(busy) < len(streams):
                raise ValueError("streams that share a cache must all have something to forward")
            groups = [busy] if joined is not None else _alike(busy, [len(_ids(q[0], 0)) if q else 0 for q in queues])
            for group in groups:
                self._forward([streams[i] for i in group], [queues[i].pop(0) for i in group], joined)
                for i in group:  # an error later on finds these forwarded
                    streams[i].pending = [segment for piece in queues[i] for segment in piece]

    def check(self, stream: Stream) -> None:
        """ValueError where what waits in this stream cannot be forwarded."""
        waiting = sum(self._run(segment).positions for segment in stream.pending)
        for _ in self._pieces(stream):
            pass
        if self.budget.max_text_tokens is None:
            self._check_positions(stream, waiting)

    def _pieces(self, stream: Stream) -> Iterator[Piece]:
        self._check_ending(stream)
        capacity = 2**31 if self.budget.capacity is None else self.budget.capacity
        return pieces(stream.pending, capacity, self.cost)

    def _check_ending(self, stream: Stream) -> None:
        if self.fusion.needs_delimiter and stream.ends_with_image:
            raise ValueError(
                "the stream ends with an image, so the next token would be predicted from the text before it; give a "
                "delimiter or add_text after the frame, or use gist_tokens=1"
            )

    def room_for(self, stream: Stream, tokens: int) -> bool:
        """True where ``tokens`` more fit into the stream's cache without evicting."""
        return self.budget.max_text_tokens is None or stream.cached_tokens + tokens <= self.budget.max_text_tokens

    @torch.inference_mode()
    def _forward(self, streams: list[Stream], calls: list[Piece], joined: FusionCache | None) -> None:
        added = [[self._run(segment) for segment in call] for call in calls]
        for stream, runs in zip(streams, added, strict=True):
            tokens = sum(run.tokens for run in runs)
            if joined is None:
                make_room(stream, tokens, self.budget, self.backbone, self.body)
            elif not self.room_for(stream, tokens):
                raise ValueError("a shared cache cannot evict; take it apart first")
            self._check_positions(stream, sum(run.positions for run in runs))
        cache = joined
        if cache is None:
            cache = streams[0].cache if len(streams) == 1 else stack([stream.cache for stream in streams])
        logits = self._call(calls, cache, [stream.answered for stream in streams])
        for row, (stream, runs) in enumerate(zip(streams, added, strict=True)):
            stream.logits = logits[row]
            for run in runs:
                stream.appended(run)
            if joined is None and len(streams) > 1:
                unstack(cache, row, stream.cache)

    def _check_positions(self, stream: Stream, incoming: int) -> None:
        # A shared cache holds the positions; the stream's own runs count the same.
        position = sum(run.positions for run in stream.runs) + incoming
        if position > self.limit:
            raise ValueError(
                f"the stream would reach position {position} and the model's limit is {self.limit}; give "
                "max_text_tokens, so that the oldest text leaves"
            )

    def _call(self, calls: list[Piece], cache: FusionCache, answered: list[bool]) -> Tensor:
        """One forward of the model -> (n, V) logits after the last token of each row. ``answered``: rows past their
        prompt."""
        device = input_device(self.model)
        rows = [_ids(call, self.placeholder) for call in calls]
        longest = max(len(row) for row in rows)
        ids = torch.tensor([[self.padding] * (longest - len(row)) + row for row in rows], device=device)
        frames = [s for call in calls for s in call if isinstance(s, EncodedFrame)]
        ragged = any(len(row) < longest for row in rows)
        valid = torch.ones_like(ids, dtype=torch.bool)
        if ragged:
            lengths = torch.tensor([len(row) for row in rows], device=device)
            valid = torch.arange(longest, device=device) >= longest - lengths[:, None]
        options: dict[str, Any] = {}
        if frames:
            options["mm_encoder_outputs"] = {
                "image": BaseModelOutputWithPooling(pooler_output=[frame.features for frame in frames])  # type: ignore[arg-type]
            }
            for name in frames[0].arguments:
                options[name] = torch.cat([frame.arguments[name] for frame in frames])
        stock = self.fusion.is_identity  # the unfused model counts columns; here the cache counts
        if stock:
            positions = self._positions(ids, valid, cache, options)
            options["position_ids"] = positions
            mask = cache.extended_mask(valid)
            options["attention_mask"] = None if bool(mask.all()) else mask.long()
        elif ragged:
            options["attention_mask"] = valid.long()
        if not stock and not self.backbone.mrope and cache.user_length == 0 and not frames:
            options["position_ids"] = count_positions(valid)
        if self.fusion.needs_prompt:
            most = self.budget.max_text_tokens  # a prompt without an end must not be remembered without one
            full = most is not None and cache.prompt_ids is not None and cache.prompt_ids.shape[1] >= most
            prompt = valid & ~torch.tensor(answered, device=device)[:, None] & (not full)
            options["prompt_mask"] = pad(prompt, (cache.user_length, 0), value=False)
        before = cache.fused_length
        outputs = self.model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1, **options)
        if stock:
            last = positions.amax(-1)
            following = (last if last.ndim == 1 else last.amax(0)) + 1
            if cache.fused_length == before:  # an unfused model knows nothing of this cache
                cache.record(valid, following, longest, longest)
            cache.next_position = following
        logits: Tensor = outputs.logits[:, -1]
        return logits

    def _positions(self, ids: Tensor, valid: Tensor, cache: FusionCache, options: dict[str, Any]) -> Tensor:
        """(n, L), or (3, n, L): the positions of a call to the unfused model, going on from the cache."""
        start = torch.zeros(len(ids), dtype=torch.long, device=ids.device)
        if cache.next_position is not None:
            start = cache.next_position.to(ids.device)
        counted = count_positions(valid)
        if self.backbone.mrope and "mm_encoder_outputs" in options:
            counted = self.backbone.positions(self.body, ids, valid, options)  # type: ignore[assignment]
        elif self.backbone.mrope:
            counted = counted.expand(3, -1, -1)
        return counted + start[:, None]


def _alike(indices: list[int], lengths: list[int]) -> list[list[int]]:
    """Groups whose calls are of similar length: a long prompt of one stream is no padding in all the others."""
    groups: list[list[int]] = []
    for index in sorted(indices, key=lambda i: lengths[i]):
        if groups and lengths[index] <= max(32, 2 * lengths[groups[-1][0]]):
            groups[-1].append(index)
        else:
            groups.append([index])
    return [sorted(group) for group in groups]


def _ids(call: Piece, placeholder: int) -> list[int]:
    ids: list[int] = []
    for segment in call:
        ids += [placeholder] * len(segment.features) if isinstance(segment, EncodedFrame) else segment
    return ids


def _rgb(image: Any) -> Any:
    """A PIL image in RGB; (H, W, 3) uint8 arrays are taken as they are."""
    from PIL import Image

    if isinstance(image, Image.Image):
        return image.convert("RGB")
    if getattr(image, "ndim", 0) != 3 or image.shape[-1] != 3:
        raise ValueError(
            f"a frame is a PIL image or an (H, W, 3) array; got {getattr(image, 'shape', type(image).__name__)}"
        )
    return Image.fromarray(image)

"""Qwen2.5-VL: images of any grid, videos, and positions of three rows (m-RoPE)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from crossfuse.backbones.base import Backbone, EncodedImages, feature_dtype


class QwenVLBackbone(Backbone):
    """`Qwen2_5_VLForConditionalGeneration`. Videos are items of t × h × w tokens, drawn as a grid of t · h rows."""

    family = "qwen2.5-vl"
    architectures = ("Qwen2_5_VLForConditionalGeneration",)
    image_arguments = (
        "pixel_values",
        "pixel_values_videos",
        "image_grid_thw",
        "video_grid_thw",
        "second_per_grid_ts",
        "mm_token_type_ids",
    )
    mrope = True

    def placeholder_ids(self, body: Any) -> tuple[int, ...]:
        return int(body.config.image_token_id), int(body.config.video_token_id)

    def special_ids(self, body: Any) -> tuple[int, ...]:
        """Also what stands around every image and video: copied or moved, it would delimit nothing."""
        around = (getattr(body.config, f"vision_{end}_token_id", None) for end in ("start", "end"))
        return tuple(sorted({*super().special_ids(body), *(i for i in around if i is not None)}))

    def encode(self, body: Any, mm_encoder_outputs: Any, arguments: dict[str, Any]) -> EncodedImages | None:
        encoded = mm_encoder_outputs or {}
        features: list[Tensor] = []
        grids: list[tuple[int, int] | None] = []
        kinds: list[int] = []
        outputs = []
        for modality, pixels, kind in zip(
            ("image", "video"), ("pixel_values", "pixel_values_videos"), self.placeholder_ids(body), strict=True
        ):
            grid = arguments.get(f"{modality}_grid_thw")
            result = encoded.get(modality)
            if result is None and arguments.get(pixels) is not None:
                result = self._encode_pixels(body, arguments[pixels], grid)
            outputs.append(result)
            if result is None:
                continue
            items = [tokens.to(feature_dtype(body)) for tokens in result.pooler_output]
            features += items
            grids += self._grids(body, items, grid)
            kinds += [kind] * len(items)
        if not features:
            return None
        return EncodedImages(features, grids, outputs[0], outputs[1], tuple(kinds))

    def in_reading_order(self, body: Any, input_ids: Tensor, images: EncodedImages) -> EncodedImages:
        image_kind, video_kind = self.placeholder_ids(body)
        if image_kind not in images.kinds or video_kind not in images.kinds:
            return images
        placeholders = input_ids[self.is_placeholder(body, input_ids)].tolist()
        queues = {kind: [i for i, k in enumerate(images.kinds) if k == kind] for kind in (image_kind, video_kind)}
        order, place = [], 0
        while place < len(placeholders) and queues[placeholders[place]]:
            item = queues[placeholders[place]].pop(0)
            order.append(item)
            place += len(images.features[item])
        order += queues[image_kind] + queues[video_kind]  # too many: the count check says so
        return EncodedImages(
            [images.features[i] for i in order],
            [images.grids[i] for i in order],
            images.outputs,
            images.videos,
            tuple(images.kinds[i] for i in order),
        )

    def positions(self, body: Any, input_ids: Tensor, valid: Tensor, arguments: dict[str, Any]) -> Tensor | None:
        image, video = self.placeholder_ids(body)
        grids = {name: arguments.get(name) for name in ("image_grid_thw", "video_grid_thw")}
        if all(grid is None for grid in grids.values()):
            raise ValueError(
                "images without image_grid_thw or video_grid_thw have no positions; pass the processor's whole output"
            )
        kinds = (input_ids == image).int() + 2 * (input_ids == video).int()
        position_ids, _ = body.get_rope_index(
            input_ids, kinds, **grids, second_per_grid_ts=arguments.get("second_per_grid_ts"), attention_mask=valid
        )
        return self.mended_positions(body, input_ids, position_ids, valid)

    def mended_positions(self, body: Any, input_ids: Tensor, positions: Tensor, valid: Tensor) -> Tensor:
        return _text_above_videos(positions, input_ids == body.config.video_token_id, valid)

    def dummy_features(self, body: Any) -> Tensor:
        config, visual = body.config.vision_config, body.visual
        side = config.spatial_merge_size
        width = config.in_channels * config.temporal_patch_size * config.patch_size**2
        pixels = next(visual.parameters()).new_zeros(side * side, width)
        grid = torch.tensor([[1, side, side]], device=pixels.device)
        return visual(pixels, grid_thw=grid).pooler_output.to(feature_dtype(body))  # type: ignore[no-any-return]

    def model_output(self, body: nn.Module, decoder_output: Any, hidden: Tensor, images: Any) -> Any:
        from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as modeling

        return modeling.MultimodalBaseModelOutputWithPast(
            last_hidden_state=hidden,  # type: ignore[arg-type]
            cache=decoder_output.cache,
            hidden_states=decoder_output.hidden_states,
            attentions=decoder_output.attentions,
            image_outputs=None if images is None else images.outputs,
            video_outputs=None if images is None else images.videos,
        )

    def _encode_pixels(self, body: Any, pixels: Tensor, grid: Tensor | None) -> Any:
        """Tower and merger; frozen ones record no gradients (re-checked at each call)."""
        if grid is None:
            raise ValueError("pixel values without image_grid_thw or video_grid_thw; pass the processor's whole output")
        visual = body.visual
        trains = torch.is_grad_enabled() and (pixels.requires_grad or any(p.requires_grad for p in visual.parameters()))
        with torch.set_grad_enabled(trains):
            outputs = visual(pixels.to(visual.dtype), grid_thw=grid)
        lengths = (grid.prod(-1) // visual.spatial_merge_size**2).tolist()
        outputs.pooler_output = outputs.pooler_output.split(lengths)
        return outputs

    def _grids(self, body: Any, items: list[Tensor], grid: Tensor | None) -> list[tuple[int, int] | None]:
        """(rows, columns) of merged tokens; unknown where ``generate`` has dropped the grids."""
        if grid is None or len(grid) != len(items):
            return [None] * len(items)
        merge = body.visual.spatial_merge_size
        return [(t * (h // merge), w // merge) for t, h, w in grid.tolist()]


def _text_above_videos(positions: Tensor, is_video: Tensor, valid: Tensor) -> Tensor:
    """(3, B, L): what follows a video starts above its largest position, as the checkpoints were trained.

    transformers 5 counts on by max(height, width) alone, so that the text after a video of many frames would get
    positions that the frames have too.
    """
    lifted = positions.clone()
    for row in is_video.any(1).nonzero()[:, 0].tolist():
        columns = valid[row].nonzero()[:, 0]
        video = is_video[row, columns]
        ends = (video[:-1] & ~video[1:]).nonzero()[:, 0].tolist()
        for end in ends:
            following = columns[end + 1 :]
            missing = lifted[:, row, columns[: end + 1]].max() + 1 - lifted[:, row, following[0]].min()
            lifted[:, row, following] += missing.clamp(min=0)
    return lifted

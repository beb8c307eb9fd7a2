"""The fused order of cross-attention: text, and gist tokens in place of the images that they follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from crossfuse.sequence import Layout, MultimodalSequence, interleave, left_padded

if TYPE_CHECKING:
    from crossfuse.fusions.cross_attention.fusion import CrossAttention


def text_layout(fusion: CrossAttention, sequence: MultimodalSequence) -> Layout:
    """Text in its order; behind every image (every frame of a video) its gists, hosted by its last placeholder."""
    if sequence.image_features is None:
        return sequence.plain_layout()
    text = sequence.valid & ~sequence.is_image
    columns = torch.arange(text.shape[1], device=text.device).expand_as(text)
    gists = fusion.gist_tokens
    if gists:
        ends = torch.where(image_ends(sequence, image_lengths(fusion, sequence)), columns, -1)
        hosts = ends.topk(int((ends >= 0).sum(1).max()), dim=1).values.repeat_interleave(gists, dim=1)
        number = torch.arange(hosts.shape[1], device=text.device).remainder(gists).expand_as(hosts)
        return interleave(text, text.shape[1] + number, hosts, number + 1, hosts >= 0)
    source = left_padded(columns, text)
    if not source.shape[1]:  # images alone (a chunk of a prefill): the decoder needs a column, which nobody attends to
        source = torch.full((len(source), 1), -1, device=source.device)
    return Layout(source=source, host=source)


def image_lengths(fusion: CrossAttention, sequence: MultimodalSequence) -> list[int]:
    """Tokens of every image, with videos cut into frames where each frame has its own window."""
    if fusion.video_windows == "all" or not any(sequence.is_video):
        return sequence.image_lengths
    if sequence.image_frames is not None:
        pairs = zip(sequence.image_lengths, sequence.image_frames, strict=True)
        return [length // frames for length, frames in pairs for _ in range(frames)]
    positions = sequence.position_ids
    if positions is None or positions.ndim != 3:
        raise ValueError("video_windows='frame' needs the positions of a video's grid; use video_windows='all'")
    place = positions[1:, sequence.is_image]  # height and width of every image token
    lengths: list[int] = []
    start = 0
    for length, video in zip(sequence.image_lengths, sequence.is_video, strict=True):
        own = place[:, start : start + length]
        frames = int((own == own[:, :1]).all(0).sum()) if video else 1  # the corner of the grid occurs once a frame
        lengths += [length // frames] * frames
        start += length
    return lengths


def image_ends(sequence: MultimodalSequence, lengths: list[int]) -> Tensor:
    """(B, L) bool: the last placeholder of every image."""
    last = torch.zeros(sum(lengths), dtype=torch.bool, device=sequence.is_image.device)
    last[torch.tensor(lengths, device=last.device).cumsum(0) - 1] = True
    return torch.zeros_like(sequence.is_image).masked_scatter(sequence.is_image, last)

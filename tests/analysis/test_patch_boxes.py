"""Patches back to pixels of the original image: what a box covers is exactly what its image token sees."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPImageProcessor, LlavaImageProcessor, Qwen2VLImageProcessor, SiglipImageProcessor

from crossfuse.analysis.patch_boxes import PatchBoxes, patch_boxes

PLAIN = {"do_normalize": False, "do_rescale": False, "resample": Image.Resampling.NEAREST}
PATCH = 8


def marked(size: tuple[int, int], box: tuple[float, ...]) -> Image.Image:
    """A black picture with the pixels of ``box`` red."""
    pixels = np.zeros((size[1], size[0], 3), dtype=np.uint8)
    left, top, right, bottom = (round(edge) for edge in box)
    pixels[top:bottom, left:right, 0] = 255
    return Image.fromarray(pixels)


def red_patches(processor, image: Image.Image, patch: int = PATCH) -> torch.Tensor:
    """(rows, columns): the mean redness, 0 to 1, of every patch of what the processor makes."""
    pixels = processor(images=image, return_tensors="pt")["pixel_values"][0, 0].float() / 255
    rows, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
    return pixels[: rows * patch, : columns * patch].view(rows, patch, columns, patch).mean((1, 3))


CLIP = {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}}
CASES = {
    "crop-wide": (CLIPImageProcessor(**CLIP, **PLAIN), (256, 128)),
    "crop-tall": (CLIPImageProcessor(**CLIP, **PLAIN), (64, 192)),
    "crop-smaller-than-resized": (
        CLIPImageProcessor(size={"shortest_edge": 96}, crop_size={"height": 64, "width": 64}, **PLAIN), (192, 288)
    ),
    "crop-larger-than-resized": (
        CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 64, "width": 64}, **PLAIN), (32, 32)
    ),
    "resize-both": (CLIPImageProcessor(size={"height": 64, "width": 64}, do_center_crop=False, **PLAIN), (128, 320)),
    "siglip": (SiglipImageProcessor(size={"height": 64, "width": 64}, **PLAIN), (192, 64)),
    "pad-wide": (LlavaImageProcessor(do_pad=True, image_mean=[0, 0, 0], **CLIP, **PLAIN), (256, 128)),
    "pad-tall": (LlavaImageProcessor(do_pad=True, image_mean=[0, 0, 0], **CLIP, **PLAIN), (96, 192)),
    "no-resize": (CLIPImageProcessor(do_resize=False, do_center_crop=False, **PLAIN), (64, 48)),
    "remainder": (SiglipImageProcessor(size={"height": 68, "width": 70}, **PLAIN), (140, 136)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_painting_a_box_fills_its_patch_and_no_other(case):
    processor, size = CASES[case]
    processor.patch_size = PATCH
    grid = tuple(red_patches(processor, Image.new("RGB", size)).shape)
    boxes = patch_boxes(processor, size, grid)
    tested = 0
    for row, column in np.ndindex(*grid):
        box = boxes.box(row, column)
        if (box[2] - box[0]) * (box[3] - box[1]) == 0:  # the processor's own padding
            continue
        expected = torch.zeros(grid)
        expected[row, column] = 1
        found = red_patches(processor, marked(size, box))
        assert torch.equal(found, expected), (row, column, box)
        tested += 1
    assert tested >= grid[0] * grid[1] // 4


@pytest.mark.parametrize("size", [(280, 196), (100, 333), (640, 480)])
@pytest.mark.parametrize("filtered", [False, True])
def test_qwens_grids_of_any_size_cover_the_whole_image(size, filtered):
    """Merged tokens are 2 x 2 patches, in the order in which the processor writes them."""
    options = {"do_normalize": False, "do_rescale": False}
    if not filtered:
        options["resample"] = Image.Resampling.NEAREST
    processor = Qwen2VLImageProcessor(**options)
    _, height, width = processor(images=Image.new("RGB", size), return_tensors="pt")["image_grid_thw"][0].tolist()
    grid = (height // 2, width // 2)
    boxes = patch_boxes(processor, size, grid)
    for row, column in ((0, 0), (grid[0] // 2, grid[1] // 3), (grid[0] - 1, grid[1] - 1)):
        pixels = processor(images=marked(size, boxes.box(row, column)), return_tensors="pt")["pixel_values"]
        red = pixels.view(grid[0] * grid[1], 4, 3, -1)[:, :, 0].float().mean((1, 2)) / 255
        assert divmod(int(red.argmax()), grid[1]) == (row, column)
        assert red.max() > 0.9
        others = red.clone()
        others[row * grid[1] + column] = 0
        assert others.max() < 0.1


@pytest.mark.parametrize("size", [(333, 517), (1001, 400), (64, 64)])
def test_a_filtered_resize_at_odd_ratios_puts_the_marker_into_its_patch(size):
    processor = CLIPImageProcessor(do_normalize=False, do_rescale=False, **CLIP)
    boxes = patch_boxes(processor, size, (8, 8))
    for row, column in ((0, 0), (3, 6), (7, 7)):
        found = red_patches(processor, marked(size, boxes.box(row, column)))
        assert divmod(int(found.argmax()), 8) == (row, column)
        assert found.max() > 0.85


def test_a_patch_outside_the_grid_is_refused():
    boxes = PatchBoxes((10, 10), (2, 2), (0, 0, 10, 10))
    assert boxes.box(1, 0) == (0, 5, 5, 10)
    with pytest.raises(ValueError, match=r"patch \(2, 0\) lies outside the grid of 2 x 2"):
        boxes.box(2, 0)


def test_processors_that_cut_an_image_up_are_refused():
    from transformers import LlavaNextImageProcessor

    with pytest.raises(ValueError, match="cuts an image into several pictures"):
        patch_boxes(LlavaNextImageProcessor(), (100, 100), (8, 8))

"""From a patch of an image's grid back to pixels of the original image, by the settings of its image processor.

What processors do to a picture before it is cut into patches is affine on each axis: pad to a square, resize, crop the
centre. Here the same steps are read backwards.
"""

from __future__ import annotations

import dataclasses
from typing import Any

PixelBox = tuple[float, float, float, float]


@dataclasses.dataclass(frozen=True)
class PatchBoxes:
    """Where the grid of patches lies on the original image: left, top, right, bottom of the whole grid in its pixels.

    The grid reaches over the image where the processor pads, and leaves margins where it crops.
    """

    image_size: tuple[int, int]  # (width, height) in pixels
    grid: tuple[int, int]  # (rows, columns)
    area: PixelBox

    def box(self, row: int, column: int) -> PixelBox:
        """(left, top, right, bottom) of one patch in pixels of the original image, clipped to it."""
        rows, columns = self.grid
        if not (0 <= row < rows and 0 <= column < columns):
            raise ValueError(f"patch ({row}, {column}) lies outside the grid of {rows} x {columns}")
        left, top, right, bottom = self.area
        width, height = (right - left) / columns, (bottom - top) / rows
        x0, y0 = left + column * width, top + row * height
        limit = self.image_size
        return (
            min(max(x0, 0.0), limit[0]),
            min(max(y0, 0.0), limit[1]),
            min(max(x0 + width, 0.0), limit[0]),
            min(max(y0 + height, 0.0), limit[1]),
        )


def patch_boxes(processor: Any, image_size: tuple[int, int], grid: tuple[int, int]) -> PatchBoxes:
    """The boxes of a grid of image tokens on an image of ``image_size`` (width, height) pixels.

    processor: the model's processor (or its image processor): CLIP's and SigLIP's with resize and centre crop, LLaVA's
    with padding to a square, Qwen2.5-VL's with grids of any size. ``grid``: (rows, columns) of image tokens after
    whatever merging or pooling.

    Raises:
        ValueError: the processor cuts an image into several pictures or pads it in a way that is not known here.
    """
    images = getattr(processor, "image_processor", processor)
    width, height = image_size
    whole = (0.0, 0.0, float(width), float(height))
    if getattr(images, "merge_size", None) is not None:
        # Resized to a multiple of the merged patch, nothing cut off: the grid covers the whole image.
        return PatchBoxes((width, height), grid, whole)
    name = type(images).__name__
    if any(getattr(images, field, None) for field in ("image_grid_pinpoints", "do_image_splitting", "crop_to_patches")):
        raise ValueError(f"{name} cuts an image into several pictures; boxes are known for one picture an image")
    padded, shift = (width, height), (0, 0)
    if getattr(images, "do_pad", False):
        if not hasattr(images, "pad_to_square"):
            raise ValueError(f"how {name} pads is not known; boxes need do_pad=False or padding to a square")
        side = max(width, height)
        padded, shift = (side, side), ((side - width) // 2, (side - height) // 2)
    resized = _resized(images, padded) if getattr(images, "do_resize", True) else padded
    seen, cut = resized, (0, 0)
    if getattr(images, "do_center_crop", False):
        crop = images.crop_size
        seen = (_field(crop, "width"), _field(crop, "height"))
        cut = tuple(_crop_start(have, want) for have, want in zip(resized, seen, strict=True))  # type: ignore[assignment]
    patch = getattr(processor, "patch_size", None) or getattr(images, "patch_size", None)
    if isinstance(patch, int):
        # A convolution without padding leaves out what does not fill a patch.
        seen = (seen[0] // patch * patch, seen[1] // patch * patch)
    edges = []
    for axis in (0, 1):
        scale = padded[axis] / resized[axis]
        edges.append((cut[axis] * scale - shift[axis], (cut[axis] + seen[axis]) * scale - shift[axis]))
    (left, right), (top, bottom) = edges
    return PatchBoxes((width, height), grid, (left, top, right, bottom))


def _resized(images: Any, size: tuple[int, int]) -> tuple[int, int]:
    """(width, height) after resizing, as transformers' image processors compute it."""
    from transformers.image_transforms import get_size_with_aspect_ratio

    wanted, (width, height) = images.size, size
    shortest, longest = (_field(wanted, name) for name in ("shortest_edge", "longest_edge"))
    if shortest and longest:
        new_height, new_width = get_size_with_aspect_ratio((height, width), shortest, longest)
        return new_width, new_height
    if shortest:
        short, long = min(size), max(size)
        scaled = int(shortest * long / short)
        return (shortest, scaled) if width <= height else (scaled, shortest)
    if _field(wanted, "height") and _field(wanted, "width"):
        return _field(wanted, "width"), _field(wanted, "height")
    raise ValueError(f"the size {wanted} of {type(images).__name__} is not known here; boxes need a fixed size")


def _crop_start(have: int, want: int) -> int:
    """First pixel of a centre crop; negative where the image is smaller and gets padded."""
    return -((want - have) // 2) if want > have else int((have - want) / 2.0)


def _field(size: Any, name: str) -> Any:
    return size.get(name) if isinstance(size, dict) else getattr(size, name, None)

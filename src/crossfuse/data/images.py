"""Opening picture files: upright, RGB, transparency on white, and one-line errors."""

from __future__ import annotations

import io
import os
import urllib.request
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

Source = str | os.PathLike[str] | bytes | Image.Image
# What Qwen's processors need: one token's square of pixels on each side, and no more than this between the sides.
MIN_SIDE, MAX_RATIO = 28, 200.0


def open_image(source: Source, allow_urls: bool = False) -> Image.Image:
    """The picture of a file, of encoded bytes or of a PIL image, as RGB.

    Turned upright by its EXIF orientation; transparent pixels (palettes too) composited on white; of an animation
    the first frame. The content decides the format, not the file's name. URLs are fetched only with ``allow_urls``.

    Raises ``FileNotFoundError`` for a missing file, ``ValueError`` for one that is empty, truncated or no picture;
    both in one line that names the file.
    """
    if isinstance(source, Image.Image):
        return _upright_rgb(source)
    if isinstance(source, bytes):
        name, data = "image bytes", source
    else:
        name = str(source)
        if name.startswith(("http://", "https://")):
            return open_image(_fetch(name, allow_urls))
        path = Path(source)
        if not path.exists():
            raise FileNotFoundError(f"image file not found: {name}; check the path")
        if not path.is_file():
            raise ValueError(f"{name} is not a file; give the path of an image file")
        data = path.read_bytes()
    if not data:
        raise ValueError(f"{name} is empty (0 bytes); replace it by an image")
    try:
        with Image.open(io.BytesIO(data)) as image:
            return _upright_rgb(image)
    except UnidentifiedImageError as error:
        raise ValueError(f"{name} is not an image that Pillow can read; convert it to PNG or JPEG") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{name} cannot be decoded ({_one_line(error)}); the file may be truncated") from error


def open_header(source: str | os.PathLike[str] | io.BytesIO) -> Image.Image:
    """The picture of a file with its header read, for size and format; close it after use.

    Raises ``FileNotFoundError`` for a missing file, ``ValueError`` for what is no picture.
    """
    name = "image bytes" if isinstance(source, io.BytesIO) else os.fspath(source)
    try:
        return Image.open(source)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"image file not found: {name}; check the path") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{name} is not an image that Pillow can read; convert it to PNG or JPEG") from error


def refuse_extreme(width: int, height: int, min_side: int = MIN_SIDE, max_ratio: float = MAX_RATIO) -> None:
    """``ValueError`` for a picture with a side below ``min_side`` pixels or too long for its width."""
    if min(width, height) < min_side:
        raise ValueError(f"the image is {width} x {height} pixels; each side must be at least {min_side}")
    if max(width, height) / min(width, height) > max_ratio:
        raise ValueError(
            f"the image is {width} x {height} pixels; the longer side may be {max_ratio:g} times the other"
        )


def _fetch(url: str, allowed: bool) -> bytes:
    if not allowed:
        raise ValueError(f"{url} is a URL; download the image and give its path, or allow URLs with allow_urls=True")
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            data: bytes = response.read()
            return data
    except OSError as error:
        raise ValueError(f"{url} cannot be fetched ({_one_line(error)})") from error


def _upright_rgb(image: Image.Image) -> Image.Image:
    image.seek(0)
    image.load()
    image = ImageOps.exif_transpose(image)
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = _eight_bit(image)
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        ground = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(ground, rgba).convert("RGB")
    return image.convert("RGB")


def _eight_bit(image: Image.Image) -> Image.Image:
    """16-bit greys to 8 bits, floats clipped at 0 and 255; Pillow's own conversion clips 16 bits at 255."""
    scale = 1.0 if image.mode == "F" else 1 / 257
    return image.convert("F").point(lambda value: value * scale + 0.0).convert("L")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__

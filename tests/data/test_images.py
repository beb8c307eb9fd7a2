"""Opening pictures: every odd file gives an upright RGB picture or one line that names it."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from crossfuse.data.images import open_image


@pytest.fixture
def photo() -> Image.Image:
    """A picture that differs in every pixel, wider than high."""
    x, y = np.meshgrid(np.arange(40), np.arange(24))
    return Image.fromarray(np.stack([x * 6, y * 10, x * 3 + y], 2).astype(np.uint8))


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def test_a_path_bytes_and_an_image_give_the_same(tmp_path, photo):
    path = tmp_path / "photo.png"
    photo.save(path)
    for source in (path, str(path), path.read_bytes(), photo):
        assert open_image(source).tobytes() == photo.tobytes()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_turns_the_picture_upright(photo, orientation):
    undo = {
        2: 0,
        3: 3,
        4: 1,
        5: 5,
        6: 2,
        7: 6,
        8: 4,
    }  # Image.Transpose that stores the picture in that orientation
    stored = photo.transpose(undo[orientation]) if orientation > 1 else photo
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert open_image(encoded(stored, "PNG", exif=exif)).tobytes() == photo.tobytes()


def test_transparency_lies_on_white():
    rgba = Image.new("RGBA", (2, 1))
    rgba.putpixel((0, 0), (200, 0, 0, 255))
    rgba.putpixel((1, 0), (0, 0, 0, 0))
    palette = Image.new("P", (2, 1))
    palette.putpalette([200, 0, 0, 0, 0, 0])
    palette.putpixel((1, 0), 1)
    for data in (
        encoded(rgba, "PNG"),
        encoded(palette, "PNG", transparency=1),
        encoded(rgba.convert("LA"), "PNG"),
    ):
        image = open_image(data)
        assert image.mode == "RGB"
        assert image.getpixel((1, 0)) == (255, 255, 255)
    assert open_image(encoded(palette, "PNG", transparency=1)).getpixel((0, 0)) == (200, 0, 0)


def test_a_gif_named_jpg_is_read_by_its_content(tmp_path):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    path = tmp_path / "odd.jpg"
    path.write_bytes(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert open_image(path).getpixel((4, 4)) == (255, 0, 0)


@pytest.mark.parametrize("size", [(1, 1), (332, 27)])
def test_tiny_and_narrow_pictures_are_accepted(size):
    assert open_image(encoded(Image.new("RGB", size, "teal"), "PNG")).size == size


def test_sixteen_bit_greys_keep_their_range():
    grey = Image.fromarray(np.array([[0, 128 * 257, 65535]], np.uint16))
    assert [p[0] for p in np.asarray(open_image(encoded(grey, "PNG")))[0]] == [0, 128, 255]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"image file not found: .*gone\.png; check the path") as caught:
        open_image(tmp_path / "gone.png")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF"])
def test_a_truncated_file_is_named(tmp_path, kind):
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3)).astype(np.uint8)
    path = tmp_path / f"cut.{kind.lower()}"
    data = encoded(Image.fromarray(noise), kind)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"cut\.\w+ cannot be decoded \(.+\); the file may be truncated") as caught:
        open_image(path)
    assert "\n" not in str(caught.value)


def test_what_is_no_picture_is_named(tmp_path):
    text, empty = tmp_path / "text.jpg", tmp_path / "empty.jpg"
    text.write_text("hello")
    empty.touch()
    with pytest.raises(ValueError, match=r"text\.jpg is not an image that Pillow can read"):
        open_image(text)
    with pytest.raises(ValueError, match=r"empty\.jpg is empty \(0 bytes\)"):
        open_image(empty)
    with pytest.raises(ValueError, match="is not a file"):
        open_image(tmp_path)


def test_urls_are_not_fetched_unasked(tmp_path):
    with pytest.raises(ValueError, match=r"http://localhost/a\.png is a URL; .* allow_urls=True"):
        open_image("http://localhost/a.png")

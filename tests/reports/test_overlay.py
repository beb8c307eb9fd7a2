"""Anchors drawn on images: size, place, and text that stays readable."""

import numpy as np
import pytest
from PIL import Image

from crossfuse.reports.overlay import GREEN, anchor_labels, draw_anchors


def green_pixels(image: Image.Image) -> np.ndarray:
    """(height, width) bool: pixels close to the anchors' green."""
    return (np.abs(np.asarray(image).astype(int) - np.array(GREEN)) < 40).all(axis=-1)


@pytest.mark.parametrize(
    ("size", "grid", "expected"),
    [
        ((64, 64), (8, 8), (768, 768)),
        ((128, 64), (4, 8), (1536, 768)),
        ((1, 1), (1, 1), (768, 768)),
        ((3840, 2160), (27, 48), (3840, 2160)),
    ],
)
def test_small_images_are_enlarged_and_large_ones_kept(size, grid, expected):
    drawn = draw_anchors(Image.new("RGB", size, "white"), [("cat", 0, 0, 0.5)], grid)
    assert drawn.size == expected
    assert drawn.mode == "RGB"


def test_frame_encloses_the_patch_of_the_anchor():
    drawn = draw_anchors(Image.new("RGB", (64, 64), "white"), [("cat", 5, 2, 0.5)], (8, 8))
    rows, columns = np.nonzero(green_pixels(drawn))
    patch = 768 // 8
    assert rows.min() == pytest.approx(5 * patch, abs=3)
    assert rows.max() == pytest.approx(6 * patch, abs=3)
    assert columns.min() == pytest.approx(2 * patch, abs=25), "the label may be a little wider than its patch"
    assert columns.max() == pytest.approx(3 * patch, abs=25)


@pytest.mark.parametrize(("size", "grid"), [((64, 64), (8, 8)), ((3840, 2160), (27, 48)), ((336, 336), (24, 24))])
def test_lettering_is_at_least_a_fortieth_of_the_shorter_side(size, grid):
    word = draw_anchors(Image.new("RGB", size, "white"), [("HHHH", 3, 3, 0.5)], grid)
    blank = draw_anchors(Image.new("RGB", size, "white"), [(".", 3, 3, 0.5)], grid)
    changed = (np.asarray(word) != np.asarray(blank)).any(axis=-1)
    rows = np.nonzero(changed.any(axis=1))[0]
    # A capital letter is about 0.7 of the font's size high.
    assert rows.max() - rows.min() >= 0.6 * min(word.size) / 40


def test_labels_of_neighbours_do_not_cover_each_other():
    words = [("first", 12, 12, 0.9), ("second", 12, 13, 0.8), ("third", 13, 12, 0.7), ("fourth", 13, 13, 0.6)]
    blank = Image.new("RGB", (336, 336), "white")
    together = green_pixels(draw_anchors(blank, words, (24, 24))).sum()
    alone = [green_pixels(draw_anchors(blank, [word], (24, 24))).sum() for word in words]
    # Frames share edges and leader lines differ in length; a covered label would cost far more.
    assert together == pytest.approx(sum(alone), rel=0.12)


def test_words_on_one_patch_are_listed_below_each_other():
    one = draw_anchors(Image.new("RGB", (64, 64), "white"), [("red", 2, 2, 0.4)], (8, 8))
    two = draw_anchors(Image.new("RGB", (64, 64), "white"), [("red", 2, 2, 0.4), ("disc", 2, 2, 0.3)], (8, 8))
    assert green_pixels(two).sum() > 1.2 * green_pixels(one).sum()


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "CMYK"])
def test_every_image_mode(mode):
    image = Image.new("RGBA", (64, 64), (10, 20, 30, 0)).convert(mode)
    assert draw_anchors(image, [("x", 0, 0, 0.1)], (2, 2)).mode == "RGB"


def test_transparency_is_shown_on_white():
    drawn = draw_anchors(Image.new("RGBA", (64, 64), (0, 0, 0, 0)), [], (1, 1))
    assert drawn.getpixel((5, 5)) == (255, 255, 255)


@pytest.mark.parametrize("word", ["\n", " ", "", "Ж", "überlangeswortohneleerzeichen" * 4])
def test_odd_words_are_drawn(word):
    drawn = draw_anchors(Image.new("RGB", (64, 64), "white"), [(word, 7, 7, 0.1)], (8, 8))
    assert green_pixels(drawn).any()


def test_patch_outside_the_grid_is_refused():
    with pytest.raises(ValueError, match=r"anchor 'cat' lies at patch \(8, 0\), outside the grid 8 x 8"):
        draw_anchors(Image.new("RGB", (64, 64)), [("cat", 8, 0, 0.5)], (8, 8))
    with pytest.raises(ValueError, match="at least 1 row and 1 column; got 0 x 8"):
        draw_anchors(Image.new("RGB", (64, 64)), [], (0, 8))


def test_anchor_objects_are_joined_with_their_words():
    class Anchor:
        row, column, cosine = 1, 2, 0.25

    assert anchor_labels([Anchor()], ["cat"]) == [("cat", 1, 2, 0.25)]
    with pytest.raises(ValueError, match="got 2 words for 1 anchors"):
        anchor_labels([Anchor()], ["cat", "dog"])

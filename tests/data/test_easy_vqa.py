"""The adapter over the public easy-VQA package."""

from __future__ import annotations

import builtins

import pytest

from crossfuse.data.easy_vqa import EasyVQA


@pytest.mark.parametrize(("split", "questions", "pictures"), [("train", 38575, 4000), ("test", 9673, 1000)])
def test_the_whole_set_is_there(split, questions, pictures):
    data = EasyVQA(split)
    assert len(data) == questions
    assert len(set(data.image_ids)) == pictures
    for item in (data[0], data[-1], *data[100:103]):
        assert item.image.size == (64, 64)
        assert item.image.mode == "RGB"
        assert item.question.endswith("?")
    kinds = {data.answers[i]: data[i].kind for i in range(60)}
    assert all((a in ("yes", "no")) == (k == "yes/no") for a, k in kinds.items())


def test_answers_fit_the_pictures():
    """The colour that is asked for is the colour of the most frequent pixels beside the ground."""
    palette = {"red": (255, 0, 0), "blue": (0, 0, 255), "teal": (0, 128, 128), "yellow": (255, 255, 0)}
    checked = 0
    for item in EasyVQA("test")[:400]:
        if item.kind == "colour" and item.answer in palette:
            colours = [rgb for _, rgb in item.image.getcolors(4096)]
            assert palette[item.answer] in colours
            checked += 1
    assert checked > 20


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="split must be 'train' or 'test'; got 'validation'"):
        EasyVQA("validation")  # type: ignore[arg-type]


def test_without_the_package_the_message_says_how_to_get_it(monkeypatch):
    real = builtins.__import__

    def no_easy_vqa(name, *args, **kwargs):
        if name == "easy_vqa":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_easy_vqa)
    with pytest.raises(ImportError, match="pip install easy-vqa"):
        EasyVQA("test")

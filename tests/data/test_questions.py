"""Questions about scenes: answers checked against the scene by an independent reading of the words."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfuse.data.questions import (
    POPULAR,
    QUESTION_KINDS,
    RELATION_MARGIN,
    Question,
    SceneQuestions,
    ask,
    scene_questions,
)
from crossfuse.data.scenes import COLOURS, KINDS, Scene, SceneObject, make_scene, render

_NAME = re.compile(rf"(?:({'|'.join(COLOURS)}) )?({'|'.join(KINDS)}|shape)(?:e?s)?\b")


def named(scene: Scene, words: str) -> list[SceneObject]:
    """The objects that a name such as "red circle", "circle" or "red shapes" fits."""
    match = _NAME.fullmatch(words)
    assert match, words
    colour, kind = match.groups()
    return [o for o in scene.objects if colour in (None, o.colour) and kind in ("shape", o.kind)]


def oracle(scene: Scene, question: Question) -> str:
    """The answer by the words of the question alone."""
    names = [m.group(0) for m in _NAME.finditer(question.text)]
    if question.kind == "existence":
        return "yes" if named(scene, names[0]) else "no"
    if question.kind == "count":
        return str(len(named(scene, names[0])))
    if question.kind in ("colour", "shape"):
        (item,) = named(scene, next(n for n in names if n != "shape"))
        return item.colour if question.kind == "colour" else item.kind
    if question.kind == "relation":
        (first,), (second,) = named(scene, names[0]), named(scene, names[1])
        axis = 0 if "left" in question.text or "right" in question.text else 1
        distance = first.centre[axis] - second.centre[axis]
        assert abs(distance) >= RELATION_MARGIN * scene.size
        return "yes" if (distance < 0) == ("left" in question.text or "above" in question.text) else "no"
    ordered = sorted(scene.objects, key=lambda o: (o.centre, o.name))
    found = [m.group(0) for m in _NAME.finditer(question.answer)]
    assert found == [o.name for o in ordered]
    return question.answer


@pytest.mark.parametrize("kind", QUESTION_KINDS)
@given(seed=st.integers(0, 10**9))
@settings(max_examples=60, deadline=None)
def test_the_answer_is_right(kind, seed):
    scene = make_scene(seed, "train")
    question = ask(scene, kind, random.Random(seed))
    if question is not None:
        assert question.kind == kind
        assert oracle(scene, question) == question.answer


@pytest.mark.parametrize("kind", QUESTION_KINDS)
def test_spans_name_the_objects_in_their_boxes(kind):
    for _, question, scene in scene_questions("train", 40, kinds=[kind]):
        boxes = {o.box: o for o in scene.objects}
        for text, spans in ((question.text, question.spans), (question.answer, question.answer_spans)):
            for span in spans:
                assert boxes[span.box] in named(scene, text[span.start : span.end])
        if kind in ("colour", "shape"):
            assert len(question.spans) == 1
        elif kind == "relation":
            assert len(question.spans) == 2
        elif kind == "caption":
            assert len(question.answer_spans) == len(scene.objects)
        elif kind == "count":
            assert len(question.spans) == int(question.answer)
        else:
            assert bool(question.spans) == (question.answer == "yes")


def _questions(n: int, *kinds: str) -> list[tuple[Question, Scene]]:
    data = SceneQuestions("train", n, kinds=kinds)
    return [data.question(i) for i in range(n)]


@pytest.mark.parametrize("kind", ["existence", "relation"])
def test_yes_and_no_are_balanced(kind):
    answers = Counter(question.answer for question, _ in _questions(800, kind))
    assert set(answers) == {"yes", "no"}
    # Four standard deviations of a fair coin.
    assert abs(answers["yes"] - 400) < 4 * (800 * 0.25) ** 0.5


def test_absent_objects_are_chosen_as_pope_does():
    chosen: Counter[str | None] = Counter()
    for question, scene in _questions(600, "existence"):
        chosen[question.choice] += 1
        name = next(_NAME.finditer(question.text)).group(0)
        colour, _, kind = name.rpartition(" ")
        if question.choice == "popular":
            assert any(colour in ("", c) and kind in ("shape", k) for c, k in POPULAR)
        if question.choice == "adversarial" and colour and kind != "shape" and len(scene.objects) > 1:
            colours, kinds = {o.colour for o in scene.objects}, {o.kind for o in scene.objects}
            crossed = {(c, k) for c in colours for k in kinds} - {(o.colour, o.kind) for o in scene.objects}
            assert not crossed or (colour, kind) in crossed
        assert (question.choice == "present") == (question.answer == "yes")
    absent = [chosen[choice] for choice in ("random", "popular", "adversarial")]
    assert min(absent) > 0.2 * sum(absent)


def test_words_alone_say_little():
    """The best answer by a question's words, learned on half of the questions, does poorly on the other half."""
    questions = [q for q, _ in _questions(2000, "existence", "colour", "shape", "count", "relation")]
    seen: dict[str, Counter[str]] = {}
    for q in questions[:1000]:
        seen.setdefault(q.text, Counter())[q.answer] += 1
    fallback = {k: Counter(q.answer for q in questions[:1000] if q.kind == k) for k in QUESTION_KINDS}
    right = 0
    for q in questions[1000:]:
        guess = seen.get(q.text) or fallback[q.kind]
        right += guess.most_common(1)[0][0] == q.answer
    assert right / 1000 < 0.5


def test_items_are_deterministic_and_addressed_at_random():
    data = SceneQuestions("validation", 12, seed=5)
    image, question, scene = data[7]
    again = list(scene_questions("validation", 12, seed=5))[7]
    assert (question, scene) == again[1:]
    assert image.tobytes() == again[0].tobytes() == render(scene).tobytes()
    assert len(data) == 12
    assert data[-1][1] == data[11][1]
    assert [item[1].kind for item in data[:6]] == list(QUESTION_KINDS)
    assert SceneQuestions("validation", 12, seed=6)[7][1:] != (question, scene)
    with pytest.raises(IndexError, match="index must be 0 to 11; got 12"):
        data[12]


def test_unknown_kinds_are_refused():
    with pytest.raises(ValueError, match=r"kinds must be some of existence, .*; got size"):
        SceneQuestions("train", 3, kinds=["size"])
    with pytest.raises(ValueError, match="got none"):
        SceneQuestions("train", 3, kinds=[])
    with pytest.raises(ValueError, match=r"question kind must be one of .*; got 'size'"):
        ask(make_scene(0), "size", random.Random(0))

"""Questions about rendered scenes, each with the words that name an object and that object's box.

Kinds: existence (the absent object is chosen as in POPE, Li et al. 2023: random, popular or adversarial), colour,
shape, count, relation and caption. Only questions with one right answer are asked: "what color is the circle?"
needs exactly one circle, and a relation needs a clear distance. Answers are balanced where guessing would pay:
half of the existence and relation questions are answered by yes, and the numbers of the count questions are
drawn evenly from those that the scene offers.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from PIL import Image

from crossfuse.data.scenes import (
    COLOUR_WEIGHTS,
    COLOURS,
    KIND_WEIGHTS,
    KINDS,
    Box,
    Scene,
    SceneObject,
    Split,
    make_scene,
    render,
)

_T = TypeVar("_T")

QUESTION_KINDS: tuple[str, ...] = ("existence", "colour", "shape", "count", "relation", "caption")
RELATIONS: dict[str, tuple[int, int]] = {
    "left of": (0, -1),
    "right of": (0, 1),
    "above": (1, -1),
    "below": (1, 1),
}
# Two centres must lie at least this share of the picture's side apart for a relation between them to be asked.
RELATION_MARGIN = 0.15

_PAIRS = [(colour, kind) for colour in COLOURS for kind in KINDS]
POPULAR: tuple[tuple[str, str], ...] = tuple(
    sorted(_PAIRS, key=lambda pair: -COLOUR_WEIGHTS[pair[0]] * KIND_WEIGHTS[pair[1]])[:12]
)


@dataclass(frozen=True)
class Span:
    """Characters ``start`` to ``end`` (excluded) of a text name the object in ``box`` (pixels of the scene)."""

    start: int
    end: int
    box: Box


@dataclass(frozen=True)
class Question:
    """A question with its one right answer.

    ``spans`` point into ``text``, ``answer_spans`` into ``answer``. A name that several objects bear has one span
    for each of them; the name of an absent object has none. ``choice`` says how the object of an existence
    question was chosen: ``"present"``, or POPE's ``"random"``, ``"popular"``, ``"adversarial"``.
    """

    text: str
    answer: str
    kind: str
    spans: tuple[Span, ...] = ()
    answer_spans: tuple[Span, ...] = ()
    choice: str | None = None


@dataclass
class _Text:
    """A text under construction that notes where it names objects."""

    value: str = ""
    spans: list[Span] = field(default_factory=list)

    def add(self, text: str, objects: Iterable[SceneObject] = ()) -> _Text:
        start = len(self.value)
        self.value += text
        self.spans += [Span(start, len(self.value), item.box) for item in objects]
        return self


def article(word: str) -> str:
    """``a`` or ``an``, by the first letter."""
    return "an" if word[0] in "aeiou" else "a"


def ask(scene: Scene, kind: str, rng: random.Random) -> Question | None:
    """A question of one kind about a scene, or ``None`` where the scene allows no unambiguous one."""
    if kind not in _ASK:
        raise ValueError(f"question kind must be one of {', '.join(QUESTION_KINDS)}; got {kind!r}")
    return _ASK[kind](scene, rng)


def _existence(scene: Scene, rng: random.Random) -> Question | None:
    form = rng.choice(("pair", "pair", "pair", "kind", "colour"))
    if rng.random() < 0.5:
        item = rng.choice(scene.objects)
        colour, kind, choice = item.colour, item.kind, "present"
    else:
        choice = rng.choice(("random", "popular", "adversarial"))
        absent = _absent(scene, form, choice, rng)
        if absent is None:
            return None
        colour, kind = absent
    if form == "colour":
        named, matches = f"{colour} shape", [o for o in scene.objects if o.colour == colour]
    elif form == "kind":
        named, matches = kind, [o for o in scene.objects if o.kind == kind]
    else:
        named = f"{colour} {kind}"
        matches = [o for o in scene.objects if (o.colour, o.kind) == (colour, kind)]
    before, after = rng.choice(
        (
            ("is there ", "?"),
            ("is there ", " in the image?"),
            ("does the image contain ", "?"),
            ("is ", " present?"),
        )
    )
    text = _Text().add(f"{before}{article(named)} ").add(named, matches).add(after)
    return Question(text.value, "yes" if matches else "no", "existence", tuple(text.spans), choice=choice)


def _absent(scene: Scene, form: str, choice: str, rng: random.Random) -> tuple[str, str] | None:
    """A pair of colour and kind that the scene lacks (in the form asked for), chosen as POPE does.

    random: any; popular: of the dozen pairs drawn most often; adversarial: nearest to what is there, that is the
    colour of one object with the kind of another where there is such a pair, else one that shares colour or kind.
    """
    colours, kinds = {o.colour for o in scene.objects}, {o.kind for o in scene.objects}
    pairs = {(o.colour, o.kind) for o in scene.objects}
    pool: Sequence[tuple[str, str]] = POPULAR if choice == "popular" else _PAIRS
    if form == "colour":
        candidates = [pair for pair in pool if pair[0] not in colours]
    elif form == "kind":
        candidates = [pair for pair in pool if pair[1] not in kinds]
    else:
        candidates = [pair for pair in pool if pair not in pairs]
    if choice == "adversarial" and candidates:
        shared = {pair: (pair[0] in colours) + (pair[1] in kinds) for pair in candidates}
        most = max(shared.values())
        candidates = [pair for pair in candidates if shared[pair] == most]
    return rng.choice(candidates) if candidates else None


def _colour(scene: Scene, rng: random.Random) -> Question | None:
    item = _unique(scene, lambda o: o.kind, rng)
    if item is None:
        return None
    before = rng.choice(("what color is the ", "what is the color of the "))
    text = _Text().add(before).add(item.kind, [item]).add("?")
    return Question(text.value, item.colour, "colour", tuple(text.spans))


def _shape(scene: Scene, rng: random.Random) -> Question | None:
    item = _unique(scene, lambda o: o.colour, rng)
    if item is None:
        return None
    before, after = rng.choice((("what is the ", "?"), ("what kind of shape is the ", "?")))
    text = _Text().add(before).add(f"{item.colour} shape", [item]).add(after)
    return Question(text.value, item.kind, "shape", tuple(text.spans))


def _count(scene: Scene, rng: random.Random) -> Question | None:
    groups: dict[str, list[SceneObject]] = {"shapes": list(scene.objects)}
    for kind in KINDS:
        groups[plural(kind)] = [o for o in scene.objects if o.kind == kind]
    for colour in COLOURS:
        groups[f"{colour} shapes"] = [o for o in scene.objects if o.colour == colour]
    number = rng.choice(sorted({len(group) for group in groups.values()}))
    name = rng.choice([name for name, group in groups.items() if len(group) == number])
    after = rng.choice((" are there?", " are in the image?"))
    text = _Text().add("how many ").add(name, groups[name]).add(after)
    return Question(text.value, str(number), "count", tuple(text.spans))


def _relation(scene: Scene, rng: random.Random) -> Question | None:
    names = Counter(o.name for o in scene.objects)
    named = [o for o in scene.objects if names[o.name] == 1]
    rng.shuffle(named)
    words = list(RELATIONS)
    rng.shuffle(words)
    for first in named:
        for second in named:
            for word in words:
                axis, sign = RELATIONS[word]
                distance = sign * (first.centre[axis] - second.centre[axis]) / scene.size
                if first is second or abs(distance) < RELATION_MARGIN:
                    continue
                # Either order of the two objects is as likely, so half of the answers are yes.
                answer = "yes" if distance > 0 else "no"
                text = _Text().add("is the ").add(first.name, [first])
                text.add(f" {word} the ").add(second.name, [second]).add("?")
                return Question(text.value, answer, "relation", tuple(text.spans))
    return None


def _caption(scene: Scene, rng: random.Random) -> Question | None:
    text = rng.choice(("describe the image.", "what is in the image?"))
    answer = _Text()
    # From left to right, so that there is one right caption.
    ordered = sorted(scene.objects, key=lambda o: (o.centre, o.name))
    for i, item in enumerate(ordered):
        answer.add("" if i == 0 else " and " if i == len(ordered) - 1 else ", ")
        answer.add(f"{article(item.name)} ").add(item.name, [item])
    answer.add(".")
    return Question(text, answer.value, "caption", answer_spans=tuple(answer.spans))


_ASK: dict[str, Callable[[Scene, random.Random], Question | None]] = {
    "existence": _existence,
    "colour": _colour,
    "shape": _shape,
    "count": _count,
    "relation": _relation,
    "caption": _caption,
}


def plural(kind: str) -> str:
    """The plural of a kind of shape."""
    return f"{kind}es" if kind.endswith("s") else f"{kind}s"


def _unique(scene: Scene, attribute: Callable[[SceneObject], str], rng: random.Random) -> SceneObject | None:
    counts = Counter(attribute(o) for o in scene.objects)
    single = [o for o in scene.objects if counts[attribute(o)] == 1]
    return rng.choice(single) if single else None


class SceneQuestions(Sequence[tuple[Image.Image, Question, Scene]]):
    """Map-style dataset of ``n`` questions, one a scene: ``(image, question, scene)``, by index and deterministic.

    Question kinds take turns, so each has an equal share. ``ValueError`` on an unknown split or kind.
    """

    def __init__(self, split: Split, n: int, seed: int = 0, kinds: Sequence[str] = QUESTION_KINDS) -> None:
        unknown = [kind for kind in kinds if kind not in QUESTION_KINDS]
        if unknown or not kinds:
            raise ValueError(f"kinds must be some of {', '.join(QUESTION_KINDS)}; got {', '.join(unknown) or 'none'}")
        self.split, self.n, self.seed, self.kinds = split, n, seed, tuple(kinds)
        make_scene(0, split)

    def __len__(self) -> int:
        return self.n

    def question(self, index: int) -> tuple[Question, Scene]:
        """Question and scene of an index without drawing the picture."""
        if not 0 <= index < self.n:
            raise IndexError(f"index must be 0 to {self.n - 1}; got {index}")
        kind = self.kinds[index % len(self.kinds)]
        rng = random.Random(f"question/{self.split}/{self.seed}/{index}")
        while True:
            scene = make_scene(rng.getrandbits(48), self.split)
            question = ask(scene, kind, rng)
            if question is not None:
                return question, scene

    def __getitem__(self, index):  # type: ignore[no-untyped-def, override]
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.n))]
        question, scene = self.question(index + self.n if index < 0 else index)
        return render(scene), question, scene


def scene_questions(
    split: Split, n: int, seed: int = 0, kinds: Sequence[str] = QUESTION_KINDS
) -> Iterator[tuple[Image.Image, Question, Scene]]:
    """The ``n`` items of :class:`SceneQuestions`, one after the other."""
    yield from SceneQuestions(split, n, seed, kinds)

"""Training data of the embedded model: cached pictures with per-patch attributes, and packed question batches."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from embedded_model import GRID, IMAGE_SIZE, PATCH_SIZE
from PIL import Image, ImageDraw

from crossfuse.data.easy_vqa import EasyVQA
from crossfuse.data.questions import RELATION_MARGIN, RELATIONS, Question, ask
from crossfuse.data.scenes import COLOURS, KINDS, Scene, SceneObject, draw_shape, make_scene, render

if TYPE_CHECKING:
    import torch
    from transformers import LlavaProcessor, PreTrainedTokenizerFast

IGNORE = -100
QUESTION_MIX = (
    *("existence",) * 4,
    *("colour",) * 3,
    *("shape",) * 2,
    *("count",) * 3,
    *("relation",) * 5,
    "caption",
)
# Mostly questions whose answer hangs on which colour goes with which kind.
BINDING_MIX = (
    *("existence",) * 5,
    *("colour",) * 6,
    "shape",
    *("count",) * 2,
    "relation",
    *("caption",) * 2,
)
# Mostly questions of place and number, with two easier kinds that are asked in training only.
PLACE_MIX = (
    *("existence",) * 2,
    *("colour",) * 2,
    *("count",) * 4,
    *("where",) * 4,
    *("plain relation",) * 6,
    *("relation",) * 3,
    "caption",
)
# Mostly what is learned last.
HARD_MIX = (
    *("existence",) * 2,
    "colour",
    *("count",) * 6,
    *("where",) * 3,
    *("plain relation",) * 3,
    *("relation",) * 5,
    "caption",
)
_COLOUR_INDEX = {colour: i for i, colour in enumerate(COLOURS)}


@dataclass
class Pictures:
    """Pictures at the model's input size with what each of the 8 x 8 patches shows.

    pixels (N, 96, 96, 3) uint8; colour, kind (N, 64) int64, background last, -100 where a patch is unclear;
    centre (N, 64, 2) float32: centre of the patch's object, as a share of the side; peak (N, 64) float32: 1 where
    the patch holds an object's centre.
    """

    pixels: np.ndarray
    colour: np.ndarray
    kind: np.ndarray
    centre: np.ndarray
    peak: np.ndarray

    def save(self, path: Path) -> None:
        np.savez(path, **vars(self))

    @classmethod
    def load(cls, path: Path) -> Pictures:
        with np.load(path) as arrays:
            return cls(**{name: arrays[name] for name in arrays.files})


def resize(image: Image.Image, processor: LlavaProcessor) -> np.ndarray:
    """The picture as the processor resizes it, before normalisation: (96, 96, 3) uint8."""
    batch = processor.image_processor(images=image, do_rescale=False, do_normalize=False, return_tensors="pt")
    return batch["pixel_values"][0].byte().permute(1, 2, 0).numpy()


def describe_patches(
    mask: np.ndarray, colours: list[int], kinds: list[int], centres: list[tuple[float, float]]
) -> tuple[np.ndarray, ...]:
    """Attributes of the 64 patches from a (96, 96) mask of object numbers (0 is the ground)."""
    blocks = mask.reshape(GRID, PATCH_SIZE, GRID, PATCH_SIZE).transpose(0, 2, 1, 3).reshape(GRID * GRID, -1)
    cover = np.stack([(blocks == i + 1).sum(1) for i in range(len(colours))], 1)
    most, winner = cover.max(1), cover.argmax(1)
    colour, kind = np.array(colours)[winner], np.array(kinds)[winner]
    ground, unclear = most < 4, (most >= 4) & (most < 12)
    colour = np.where(ground, len(COLOURS), np.where(unclear, IGNORE, colour))
    kind = np.where(ground, len(KINDS), np.where(unclear, IGNORE, kind))
    centre = np.array(centres, np.float32)[winner] / IMAGE_SIZE
    peak = np.zeros(GRID * GRID, np.float32)
    for x, y in centres:
        peak[int(min(y, 95.9) // PATCH_SIZE) * GRID + int(min(x, 95.9) // PATCH_SIZE)] = 1
    return colour, kind, centre, peak


def scene_patches(scene: Scene) -> tuple[np.ndarray, ...]:
    """Patch attributes of a rendered scene."""
    scale = IMAGE_SIZE / scene.size
    canvas = Image.new("L", (IMAGE_SIZE, IMAGE_SIZE), 0)
    draw = ImageDraw.Draw(canvas)
    for i, item in enumerate(scene.objects):
        x0, y0, x1, y1 = (value * scale for value in item.box)
        draw_shape(draw, item.kind, (x0, y0, x1, y1), i + 1)
    objects = scene.objects
    return describe_patches(
        np.asarray(canvas),
        [_COLOUR_INDEX[o.colour] for o in objects],
        [KINDS.index(o.kind) for o in objects],
        [(o.centre[0] * scale, o.centre[1] * scale) for o in objects],
    )


def scene_pictures(first: int, count: int, processor: LlavaProcessor) -> Pictures:
    """Training scenes number ``first`` to ``first + count``."""
    rows = []
    for seed in range(first, first + count):
        scene = make_scene(seed, "train")
        rows.append((resize(render(scene), processor), *scene_patches(scene)))
    return Pictures(*(np.stack(column) for column in zip(*rows, strict=True)))


def easy_vqa_pictures(processor: LlavaProcessor) -> tuple[Pictures, list[list[tuple[str, str]]]]:
    """The 4,000 training pictures of easy-VQA with patch attributes, and each one's questions and answers.

    Colour and place come from the pixels, the kind of shape from the training answers; where these do not name it
    the kind is left open.
    """
    data = EasyVQA("train")
    paths = data.paths
    questions: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for text, answer, image_id in zip(data.questions, data.answers, data.image_ids, strict=True):
        questions[image_id].append((text, answer))
    palette = {rgb: i for i, rgb in enumerate(COLOURS.values())}
    rows, asked = [], []
    for image_id in sorted(paths):
        image = Image.open(paths[image_id]).convert("RGB")
        pixels = np.asarray(image)
        mask = np.zeros(pixels.shape[:2], np.uint8)
        colour = 0
        for rgb, i in palette.items():
            same = (pixels == rgb).all(2)
            if same.any():
                mask, colour = same.astype(np.uint8), i
        ys, xs = np.nonzero(mask)
        scale = IMAGE_SIZE / pixels.shape[0]
        centre = (scale * (xs.min() + xs.max() + 1) / 2, scale * (ys.min() + ys.max() + 1) / 2)
        named = {answer for _, answer in questions[image_id] if answer in KINDS}
        kind = KINDS.index(named.pop()) if named else IGNORE
        large = np.asarray(Image.fromarray(mask).resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.NEAREST))
        rows.append((resize(image, processor), *describe_patches(large, [colour], [kind], [centre])))
        asked.append(questions[image_id])
    return Pictures(*(np.stack(column) for column in zip(*rows, strict=True))), asked


def scene_turns(
    seed: int, rng: random.Random, count: int, mix: tuple[str, ...] = QUESTION_MIX
) -> list[tuple[str, str]]:
    """Up to ``count`` fresh questions and answers about one training scene."""
    scene = make_scene(seed, "train")
    easier = {"where": _where, "plain relation": _plain_relation}
    kinds = rng.choices(mix, k=count)
    asked = (easier[kind](scene, rng) if kind in easier else ask(scene, kind, rng) for kind in kinds)
    return [(question.text, question.answer) for question in asked if question is not None]


def _unique_kinds(scene: Scene) -> list[SceneObject]:
    counts = Counter(item.kind for item in scene.objects)
    return [item for item in scene.objects if counts[item.kind] == 1]


def _where(scene: Scene, rng: random.Random) -> Question | None:
    """The half of the picture that an object lies in, where it lies clearly in one."""
    axis = rng.randrange(2)
    clear = [o for o in _unique_kinds(scene) if abs(o.centre[axis] / scene.size - 0.5) > 0.1]
    if not clear:
        return None
    item = rng.choice(clear)
    first, second = (("left", "right"), ("top", "bottom"))[axis]
    answer = first if item.centre[axis] < scene.size / 2 else second
    name = rng.choice((item.kind, item.name))
    return Question(f"where is the {name}, {first} or {second}?", answer, "where")


def _plain_relation(scene: Scene, rng: random.Random) -> Question | None:
    """A relation between objects that are named by their kinds alone."""
    pool = _unique_kinds(scene)
    if len(pool) < 2:
        return None
    first, second = rng.sample(pool, 2)
    word = rng.choice(list(RELATIONS))
    axis, sign = RELATIONS[word]
    distance = sign * (first.centre[axis] - second.centre[axis]) / scene.size
    if abs(distance) < RELATION_MARGIN:
        return None
    text = f"is the {first.kind} {word} the {second.kind}?"
    return Question(text, "yes" if distance > 0 else "no", "plain relation")


def pack(
    turns: list[list[tuple[str, str]]], tokenizer: PreTrainedTokenizerFast
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of one picture and several questions that do not see each other.

    Each question sees the picture and itself, at the positions that it would have alone: the result equals one row
    a question, at a fraction of the cost. Returns ids (B, L), mask (B, 1, L, L) bool (True: may attend), positions
    (B, L) and labels (B, L), which are already shifted: the label at j is the token to predict from j.
    """
    import torch

    image, newline = tokenizer.convert_tokens_to_ids(["<image>", "\n"])
    user, assistant = tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>"])
    prefix = [tokenizer.bos_token_id, user, *[image] * (GRID * GRID), newline]
    texts = tokenizer([text for row in turns for turn in row for text in turn]).input_ids
    rows, cursor = [], 0
    for row in turns:
        ids, segments = list(prefix), [0] * len(prefix)
        positions, labels = list(range(len(prefix))), [IGNORE] * len(prefix)
        for n in range(len(row)):
            question, answer = texts[cursor], texts[cursor + 1]
            cursor += 2
            turn = [*question, assistant, *answer]
            ids += turn
            segments += [n + 1] * len(turn)
            positions += range(len(prefix), len(prefix) + len(turn))
            labels += [IGNORE] * len(question) + answer + [tokenizer.eos_token_id]
        rows.append((ids, segments, positions, labels))
    longest = max(len(ids) for ids, *_ in rows)
    fills = (tokenizer.pad_token_id, -1, 0, IGNORE)
    ids_BL, segments_BL, positions_BL, labels_BL = (
        torch.tensor([row[i] + [fills[i]] * (longest - len(row[i])) for row in rows]) for i in range(4)
    )
    query, key = segments_BL[:, :, None], segments_BL[:, None, :]
    causal = torch.ones(longest, longest, dtype=torch.bool).tril()
    mask = (((key == query) | (key == 0)) & causal) | torch.eye(longest, dtype=torch.bool)
    return ids_BL, mask[:, None], positions_BL, labels_BL

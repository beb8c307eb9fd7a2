"""Make the embedded model: ``python scripts/train_embedded.py --out src/crossfuse/assets``.

Each stage is resumed from ``--work`` if it is interrupted (docs/embedded-model.md has the recipe and its log):

1. tower: the vision tower alone, on what each patch of a picture shows (colour, kind, place); its head is dropped.
2. text: the language model alone, on questions and answers without pictures.
3. projector: from patches to the text's embeddings of the words for what they show; again attributes alone.
   The three together are the *start* (``OUT/start``).
4. binding: from the start, as an ordinary insertion model, on answers only, with the tower frozen.
5. place: the projector alone, which has thrown the place of objects away by then.
6. joint, 7. long: as 4, with the tower trained too at the end of each. The result is ``OUT/model``.
8. score: exact match by greedy ``generate`` on unseen data, with pictures shuffled between questions beside it.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from embedded_attributes import restore_place, train_projector, train_tower
from embedded_data import BINDING_MIX, HARD_MIX, IGNORE, PLACE_MIX, QUESTION_MIX, pack, resize, scene_turns
from embedded_model import start_by_likeness
from embedded_run import HELD_OUT, Run, optimise
from score_embedded import score
from torch.nn.functional import cross_entropy

from crossfuse.data.questions import SceneQuestions

Turns = list[tuple[str, str]]
Lessons = tuple[tuple[int, int, int, tuple[str, ...]], ...]
# Until which step; least and most objects in a scene; mix of questions. Without its third lesson the first stage names
# the colour of any object of the scene instead of the one that is asked for.
BINDING_LESSONS: Lessons = (
    (360, 1, 2, QUESTION_MIX),
    (1375, 1, 6, QUESTION_MIX),
    (1700, 2, 3, BINDING_MIX),
    (10**9, 1, 6, QUESTION_MIX),
)
JOINT_LESSONS: Lessons = ((600, 2, 3, PLACE_MIX), (10**9, 1, 6, QUESTION_MIX))
LONG_LESSONS: Lessons = ((1400, 1, 6, HARD_MIX), (10**9, 1, 6, QUESTION_MIX))


def train_text(run: Run) -> None:
    """Stage 2: the language of questions and answers, without pictures; the loss is on every token."""
    llm, tokenizer = run.model.model.language_model, run.tokenizer
    user, assistant = tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>"])
    start_by_likeness(llm)
    flat = [turn for turns in run.easy_turns[:-HELD_OUT] for turn in turns]

    def loss_of(step: int) -> torch.Tensor:
        rng = random.Random(f"text/{run.options.seed}/{step}")
        turns = [rng.choice(flat) for _ in range(32)]
        for _ in range(16):
            turns += scene_turns(rng.randrange(run.options.scenes), rng, 6)
        texts = tokenizer([text for turn in turns for text in turn]).input_ids
        rows = [
            [
                tokenizer.bos_token_id,
                user,
                *texts[2 * i],
                assistant,
                *texts[2 * i + 1],
                tokenizer.eos_token_id,
            ]
            for i in range(len(turns))
        ]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows])
        labels = torch.tensor([row[1:] + [IGNORE] * (longest - len(row) + 1) for row in rows])
        hidden = llm(input_ids=ids, use_cache=False).last_hidden_state
        return cross_entropy(run.model.lm_head(hidden).flatten(0, 1), labels.flatten())

    groups = [{"params": list(llm.parameters()), "lr": 1e-3}]
    optimise(run, "text", groups, run.options.text_steps, loss_of, llm, lambda step: {}, every=100)


def answer_logits(run: Run, pixels: np.ndarray, turns: list[Turns], train_tower: bool) -> tuple[torch.Tensor, ...]:
    """Logits (S, V) at the S supervised positions of packed rows, their labels (S,) and (row, turn) numbers (S,)."""
    ids_BL, mask, positions, labels_BL = pack(turns, run.tokenizer)
    with torch.set_grad_enabled(train_tower and torch.is_grad_enabled()):
        features = run.features(pixels)
    image_BND = run.model.model.multi_modal_projector(features)
    embeds_BLD = run.model.get_input_embeddings()(ids_BL)
    # Every row starts with bos, the user's mark and the picture.
    embeds_BLD = torch.cat([embeds_BLD[:, :2], image_BND, embeds_BLD[:, 2 + image_BND.shape[1] :]], 1)
    hidden_BLD = run.model.model.language_model(
        inputs_embeds=embeds_BLD, attention_mask=mask, position_ids=positions, use_cache=False
    ).last_hidden_state
    kept = labels_BL != IGNORE
    # A turn ends with eos, so the eos labels before a position number the turns.
    ends = (labels_BL == run.tokenizer.eos_token_id).long()
    turn_BL = ends.cumsum(1) - ends + torch.arange(len(turns))[:, None] * 1000
    return run.model.lm_head(hidden_BLD[kept]), labels_BL[kept], turn_BL[kept]


def train_joint(run: Run, stage: str, steps: int, lessons: Lessons, decay: float) -> None:
    """Stages 4, 6 and 7: an ordinary insertion model on answers only.

    ``lessons``: until which step, objects in a scene (least, most) and mix of questions. The rate stays at its peak
    and falls over the last share ``decay`` of the steps, in which the tower is trained too.
    """
    model, options = run.model, run.options
    n_easy = len(run.easy.pixels) - HELD_OUT
    tower_from = round(steps * (1 - decay))
    objects = run.scenes.peak.sum(1)

    def loss_of(step: int) -> torch.Tensor:
        rng = random.Random(f"{'joint' if stage == 'binding' else stage}/{options.seed}/{step}")
        least, most, mix = next(lesson for until, *lesson in lessons if step < until)
        pool = np.flatnonzero((objects >= least) & (objects <= most))
        seeds = [int(rng.choice(pool)) for _ in range(options.batch * 11 // 16)]
        easy = [rng.randrange(n_easy) for _ in range(options.batch - len(seeds))]
        turns = [scene_turns(seed, rng, 9, mix) for seed in seeds]
        turns += [rng.sample(run.easy_turns[i], min(6, len(run.easy_turns[i]))) for i in easy]
        pixels = np.concatenate([run.scenes.pixels[seeds], run.easy.pixels[easy]])
        logits, labels, _ = answer_logits(run, pixels, turns, train_tower=step >= tower_from)
        return cross_entropy(logits, labels)

    watched = list(watch_set(run))

    @torch.no_grad()
    def watch(step: int) -> dict[str, float]:
        right: dict[str, list[bool]] = {}
        for pixels, turns, names in watched:
            logits, labels, turn = answer_logits(run, pixels, turns, train_tower=False)
            correct = logits.argmax(-1) == labels
            for i, row in enumerate(turns):
                for j in range(len(row)):
                    right.setdefault(names[i], []).append(bool(correct[turn == i * 1000 + j].all()))
        if options.export_every and (step + 1) % options.export_every == 0:
            run.export("model")
        return {name: float(np.mean(values)) for name, values in sorted(right.items())}

    groups = [
        {
            "params": list(model.model.multi_modal_projector.parameters()),
            "lr": options.lr * (1 if stage == "binding" else 0.1),
        },
        {"params": list(model.model.language_model.parameters()), "lr": options.lr},
        {"params": list(run.tower.parameters()), "lr": options.lr * 0.15},
    ]
    optimise(run, stage, groups, steps, loss_of, model, watch, every=125, decay=decay)


def watch_set(run: Run) -> Iterator[tuple[np.ndarray, list[Turns], list[str]]]:
    """Validation scenes by kind of question, and held-out easy-VQA pictures: (pixels, turns, names) a batch."""
    data = SceneQuestions("validation", 240, seed=1)
    for first in range(0, len(data), 60):
        items = data[first : first + 60]
        pixels = np.stack([resize(image, run.processor) for image, _, _ in items])
        yield pixels, [[(q.text, q.answer)] for _, q, _ in items], [q.kind for _, q, _ in items]
    yield run.easy.pixels[-60:], run.easy_turns[-60:], ["easy"] * 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder that gets model/ and start/")
    parser.add_argument("--work", type=Path, default=Path("build/embedded"), help="checkpoints, cache and log")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--scenes", type=int, default=20000, help="training scenes")
    parser.add_argument("--tower-steps", type=int, default=1000)
    parser.add_argument("--text-steps", type=int, default=200)
    parser.add_argument("--projector-steps", type=int, default=200)
    parser.add_argument("--binding-steps", type=int, default=1750)
    parser.add_argument("--place-steps", type=int, default=150)
    parser.add_argument("--joint-steps", type=int, default=1500)
    parser.add_argument("--long-steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=16, help="pictures a step of stages 4, 6 and 7")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--export-every", type=int, default=0, help="also write OUT/model every so many joint steps")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    run = Run(options)
    train_tower(run)
    train_text(run)
    train_projector(run)
    run.export("start")
    train_joint(run, "binding", options.binding_steps, BINDING_LESSONS, decay=0.0)
    restore_place(run)
    train_joint(run, "joint", options.joint_steps, JOINT_LESSONS, decay=0.5)
    train_joint(run, "long", options.long_steps, LONG_LESSONS, decay=0.3)
    run.export("model")
    score(options.out / "model", run.log)


if __name__ == "__main__":
    main()

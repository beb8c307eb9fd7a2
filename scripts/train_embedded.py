"""Make the embedded model: ``python scripts/train_embedded.py --out src/crossfuse/assets``.

Five stages, each resumed from ``--work`` if it is interrupted (docs/embedded-model.md has the recipe and its log):

1. tower: the vision tower alone, on what each patch of a picture shows (colour, kind, place); its head is dropped.
2. text: the language model alone, on questions and answers without pictures.
3. projector: from patches to the text's embeddings of the words for what they show; again attributes alone.
   The three together are the *start* (``OUT/start``).
4. joint: from the start, as an ordinary insertion model, on answers only; the tower is frozen for the first 70 %.
   The result is ``OUT/model``.
5. score: exact match by greedy ``generate`` on unseen data, with pictures shuffled between questions beside it.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from embedded_data import (
    BINDING_MIX,
    IGNORE,
    PLACE_MIX,
    QUESTION_MIX,
    Pictures,
    easy_vqa_pictures,
    pack,
    scene_pictures,
    scene_turns,
)
from embedded_model import build_model, build_processor, build_tokenizer, start_as_convolution, start_by_likeness
from safetensors.torch import load_file, save_file
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, layer_norm

from crossfuse.data.easy_vqa import EasyVQA
from crossfuse.data.questions import SceneQuestions
from crossfuse.data.scenes import COLOURS, KINDS

Turns = list[tuple[str, str]]
Lessons = tuple[tuple[int, int, int, tuple[str, ...]], ...]
# Until which step; least and most objects in a scene; mix of questions. Without its third lesson the first stage names
# the colour of any object of the scene instead of the one that is asked for.
BINDING_LESSONS: Lessons = (
    (360, 1, 2, QUESTION_MIX),
    (1375, 1, 6, QUESTION_MIX),
    (1700, 2, 3, BINDING_MIX),
    (1750, 1, 6, QUESTION_MIX),
)
JOINT_LESSONS: Lessons = ((600, 2, 3, PLACE_MIX), (10**9, 1, 6, QUESTION_MIX))
HELD_OUT = 200  # training pictures of easy-VQA kept for watching the training


class Run:
    """One training: its parts, its data and its working folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.work: Path = options.work
        self.work.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(options.seed)
        words = [text for i in range(1500) for turn in scene_turns(i, random.Random(i), 12) for text in turn]
        public = EasyVQA("train")
        self.tokenizer = build_tokenizer([*words, *public.questions, *public.answers])
        self.processor = build_processor(self.tokenizer)
        self.model = build_model(self.tokenizer)
        self.tower = self.model.model.vision_tower
        self.easy, self.easy_turns = easy_vqa_pictures(self.processor)
        self.scenes = self._scenes()

    def _scenes(self) -> Pictures:
        """Pictures of the training scenes, drawn in blocks that are kept in the working folder."""
        blocks, size = [], 5000
        for first in range(0, self.options.scenes, size):
            path = self.work / f"scenes-{first}.npz"
            if not path.exists():
                scene_pictures(first, min(size, self.options.scenes - first), self.processor).save(path)
            blocks.append(Pictures.load(path))
        return Pictures(**{n: np.concatenate([getattr(b, n) for b in blocks]) for n in vars(blocks[0])})

    def log(self, stage: str, **values: Any) -> None:
        """Append a line to ``WORK/log.jsonl`` and print it."""
        line = {"stage": stage, **{k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}}
        print(json.dumps(line), flush=True)
        with (self.work / "log.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def save(self, name: str, module: torch.nn.Module) -> None:
        """Write a module's weights (tied ones once) under a temporary name and rename it."""
        target = self.work / f"{name}.safetensors"
        unique = {p.data_ptr(): n for n, p in module.state_dict().items()}
        tensors = {n: p.detach().clone().contiguous() for n, p in module.state_dict().items() if n in unique.values()}
        save_file(tensors, target.with_suffix(".tmp"))
        target.with_suffix(".tmp").replace(target)

    def restore(self, name: str, module: torch.nn.Module) -> bool:
        """Load what :meth:`save` wrote; False where there is nothing yet."""
        path = self.work / f"{name}.safetensors"
        if path.exists():
            module.load_state_dict(load_file(path), strict=False)
        return path.exists()

    def export(self, variant: str) -> None:
        """Write model and processor in Hugging Face layout, weights in bfloat16, replacing the folder at once."""
        target: Path = self.options.out / variant
        fresh = target.with_name(f".{variant}.new")
        shutil.rmtree(fresh, ignore_errors=True)
        other = build_model(self.tokenizer)
        other.load_state_dict(self.model.state_dict())
        other.to(torch.bfloat16).save_pretrained(fresh)
        self.processor.save_pretrained(fresh)
        for file in fresh.iterdir():
            file.chmod(0o644)
        old = target.with_name(f".{variant}.old")
        if target.exists():
            target.rename(old)
        fresh.rename(target)
        shutil.rmtree(old, ignore_errors=True)

    def features(self, pixels: np.ndarray) -> torch.Tensor:
        """Last hidden states of the tower without the class token: (B, 64, 128) float32."""
        pixels_BCHW = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
        return self.tower(pixel_values=pixels_BCHW, output_hidden_states=True).hidden_states[-1][:, 1:]


def optimise(
    run: Run,
    stage: str,
    groups: list[dict[str, Any]],
    steps: int,
    loss_of: Callable[[int], torch.Tensor],
    module: torch.nn.Module,
    watch: Callable[[int], dict[str, float]],
    every: int,
    decay: float = 1.0,
) -> None:
    """AdamW with warm-up and a cosine over the last share ``decay`` of the steps; resumed from ``WORK``."""
    optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.02)
    peaks = [group["lr"] for group in optimiser.param_groups]
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    state_path, first = run.work / f"{stage}-optimiser.safetensors", 0
    if state_path.exists() and run.restore(stage, module):
        state = load_file(state_path)
        first = int(state.pop("step"))
        for i, p in enumerate(parameters):
            if f"{i}.step" in state:
                optimiser.state[p] = {k: state[f"{i}.{k}"] for k in ("step", "exp_avg", "exp_avg_sq")}
    began, losses = time.time(), []
    for step in range(first, steps):
        left = min(1.0, (steps - step) / (decay * steps)) if decay else 1.0
        factor = min(1.0, (step + 1) / 100) * (0.5 - 0.5 * math.cos(math.pi * left))
        for group, peak in zip(optimiser.param_groups, peaks, strict=True):
            group["lr"] = peak * factor
        loss = loss_of(step)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        losses.append(loss.item())
        if (step + 1) % every == 0 or step + 1 == steps:
            seconds = time.time() - began
            run.log(stage, step=step + 1, seconds=round(seconds), loss=float(np.mean(losses)), **watch(step))
            losses = []
            state = {"step": torch.tensor(step + 1)}
            for i, p in enumerate(parameters):
                state |= {f"{i}.{k}": v.clone() for k, v in optimiser.state[p].items()} if optimiser.state[p] else {}
            save_file(state, state_path.with_suffix(".tmp"))
            run.save(stage, module)
            state_path.with_suffix(".tmp").replace(state_path)


def train_tower(run: Run) -> None:
    """Stage 1: what each patch shows (colour, kind of shape, place of the object, objects' centres)."""
    colours, kinds = len(COLOURS) + 1, len(KINDS) + 1
    head = torch.nn.Linear(128, colours + kinds + 3)
    start_as_convolution(run.tower)
    both = torch.nn.ModuleDict({"tower": run.tower, "head": head})
    weights = [torch.ones(n) for n in (colours, kinds)]
    for weight in weights:
        weight[-1] = 0.3
    n_scenes, n_easy = len(run.scenes.pixels) - HELD_OUT, len(run.easy.pixels) - HELD_OUT

    def outputs(pixels: np.ndarray) -> tuple[torch.Tensor, ...]:
        out = head(layer_norm(run.features(pixels), (128,)))
        return out.split([colours, kinds, 2, 1], dim=-1)  # type: ignore[no-any-return]

    def loss_of(step: int) -> torch.Tensor:
        rng = np.random.default_rng([run.options.seed, 1, step])
        chosen = [(run.scenes, rng.integers(0, n_scenes, 44)), (run.easy, rng.integers(0, n_easy, 20))]
        pixels, colour, kind, centre, peak = (
            np.concatenate([getattr(pictures, name)[i] for pictures, i in chosen])
            for name in ("pixels", "colour", "kind", "centre", "peak")
        )
        colour_out, kind_out, centre_out, peak_out = outputs(pixels)
        covered = torch.from_numpy((colour >= 0) & (colour < colours - 1))
        loss = 5 * (centre_out - torch.from_numpy(centre))[covered].square().mean()
        loss = loss + 2 * binary_cross_entropy_with_logits(peak_out[..., 0], torch.from_numpy(peak))
        for out, target, weight in ((colour_out, colour, weights[0]), (kind_out, kind, weights[1])):
            loss = loss + cross_entropy(out.flatten(0, 1), torch.from_numpy(target).flatten(), weight=weight)
        return loss

    @torch.no_grad()
    def watch(step: int) -> dict[str, float]:
        result = {}
        for name, pictures in (("scenes", run.scenes), ("easy", run.easy)):
            held = slice(-HELD_OUT, None)
            colour_out, kind_out, _, peak_out = outputs(pictures.pixels[held])
            for what, out, target in (
                ("colour", colour_out, pictures.colour),
                ("kind", kind_out, pictures.kind),
            ):
                goal = torch.from_numpy(target[held])
                shown = (goal >= 0) & (goal < out.shape[-1] - 1)
                result[f"{name}_{what}"] = (out.argmax(-1) == goal)[shown].float().mean().item()
            peak = torch.from_numpy(pictures.peak[held]) > 0
            result[f"{name}_peak"] = (peak_out[..., 0] > 0)[peak].float().mean().item()
        return result

    # Held-out patches are watched, never trained on; the head is thrown away with `both`.
    groups = [{"params": list(both.parameters()), "lr": 1e-3}]
    optimise(run, "tower", groups, run.options.tower_steps, loss_of, both, watch, every=100)


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


def train_projector(run: Run) -> None:
    """Stage 3: teach the projector to say what a patch shows in the embeddings of the text, attributes alone.

    The target of an object's patch is the embedding of its colour's word plus that of its kind's word, plus its
    centre along two fixed directions and a third direction at the centre itself; of the ground, zero. Tower and
    embeddings are frozen; no question is involved, so no fusion is favoured.
    """
    projector = run.model.model.multi_modal_projector
    table = run.model.get_input_embeddings().weight.detach()
    ids = run.tokenizer.convert_tokens_to_ids
    names = [table[[*ids(list(words)), run.tokenizer.pad_token_id]].clone() for words in (COLOURS, KINDS)]
    for name in names:
        name[-1] = 0
    generator = torch.Generator().manual_seed(run.options.seed)
    directions = torch.linalg.qr(torch.randn(table.shape[1], 3, generator=generator)).Q.T
    n_scenes, n_easy = len(run.scenes.pixels) - HELD_OUT, len(run.easy.pixels) - HELD_OUT

    def error(chosen: list[tuple[Pictures, np.ndarray]]) -> torch.Tensor:
        pixels, colour, kind, centre, peak = (
            np.concatenate([getattr(pictures, name)[i] for pictures, i in chosen])
            for name in ("pixels", "colour", "kind", "centre", "peak")
        )
        clear = torch.from_numpy((colour != IGNORE) & (kind != IGNORE)).float()
        shown = torch.from_numpy((colour >= 0) & (colour < len(COLOURS))).float()
        target = names[0][torch.from_numpy(colour).clamp(min=0)] + names[1][torch.from_numpy(kind).clamp(min=0)]
        place = torch.cat([2 * torch.from_numpy(centre) - 1, torch.from_numpy(peak)[..., None] * 0.5], -1)
        target = target + shown[..., None] * (place @ directions)
        with torch.no_grad():
            features = run.features(pixels)
        weight = clear * (0.1 + 0.9 * shown)
        return ((projector(features) - target).square().sum(-1) * weight).sum() / weight.sum()

    def loss_of(step: int) -> torch.Tensor:
        rng = np.random.default_rng([run.options.seed, 3, step])
        return error([(run.scenes, rng.integers(0, n_scenes, 32)), (run.easy, rng.integers(0, n_easy, 8))])

    @torch.no_grad()
    def watch(step: int) -> dict[str, float]:
        held = np.arange(-HELD_OUT, 0)
        return {"scenes_error": error([(run.scenes, held)]).item(), "easy_error": error([(run.easy, held)]).item()}

    groups = [{"params": list(projector.parameters()), "lr": 3e-3}]
    optimise(run, "projector", groups, run.options.projector_steps, loss_of, projector, watch, every=100)


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


def restore_place(run: Run) -> None:
    """Stage 5: put the place of objects back into the image tokens, attributes alone.

    While it learns to tell objects apart the projector throws their place away (a linear read-out then explains a
    fifth of its variance, against 97 % before the projector), and questions about places stay at chance. The target
    is what the projector says already, plus the object's centre and the mark of its middle along the three
    directions that the projector uses least.
    """
    projector = run.model.model.multi_modal_projector
    n_scenes, n_easy = len(run.scenes.pixels) - HELD_OUT, len(run.easy.pixels) - HELD_OUT
    before = copy.deepcopy(projector).requires_grad_(False)
    with torch.no_grad():
        said = before(run.features(run.scenes.pixels[:500])).flatten(0, 1)
        directions = torch.linalg.eigh(said.T @ said).eigenvectors[:, :3].T.contiguous()
        length = 0.3 * said.norm(dim=-1).mean()

    def error(chosen: list[tuple[Pictures, np.ndarray]]) -> torch.Tensor:
        pixels, colour, centre, peak = (
            np.concatenate([getattr(pictures, name)[i] for pictures, i in chosen])
            for name in ("pixels", "colour", "centre", "peak")
        )
        shown = torch.from_numpy((colour >= 0) & (colour < len(COLOURS))).float()[..., None]
        place = torch.cat([2 * torch.from_numpy(centre) - 1, torch.from_numpy(peak)[..., None]], -1)
        with torch.no_grad():
            features = run.features(pixels)
            target = before(features) + length * shown * (place @ directions)
        return (projector(features) - target).square().sum(-1).mean() / length**2

    def loss_of(step: int) -> torch.Tensor:
        rng = np.random.default_rng([run.options.seed, 5, step])
        return error([(run.scenes, rng.integers(0, n_scenes, 32)), (run.easy, rng.integers(0, n_easy, 8))])

    @torch.no_grad()
    def watch(step: int) -> dict[str, float]:
        return {"scenes_error": error([(run.scenes, np.arange(-HELD_OUT, 0))]).item()}

    groups = [{"params": list(projector.parameters()), "lr": 3e-3}]
    optimise(run, "place", groups, run.options.place_steps, loss_of, projector, watch, every=100)


def train_joint(run: Run, stage: str, steps: int, lessons: Lessons, final: bool) -> None:
    """Stages 4 and 6: an ordinary insertion model on answers only.

    ``lessons``: until which step, objects in a scene (least, most) and mix of questions. The rate stays at its peak,
    but in the final stage falls over the second half, in which the tower is trained too.
    """
    model, options = run.model, run.options
    n_easy = len(run.easy.pixels) - HELD_OUT
    tower_from = steps // 2 if final else steps
    objects = run.scenes.peak.sum(1)

    def loss_of(step: int) -> torch.Tensor:
        rng = random.Random(f"joint/{options.seed}/{step}")
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
        {"params": list(model.model.multi_modal_projector.parameters()), "lr": options.lr * (0.1 if final else 1)},
        {"params": list(model.model.language_model.parameters()), "lr": options.lr},
        {"params": list(run.tower.parameters()), "lr": options.lr * 0.15},
    ]
    optimise(run, stage, groups, steps, loss_of, model, watch, every=125, decay=0.5 if final else 0.0)


def watch_set(run: Run) -> Iterator[tuple[np.ndarray, list[Turns], list[str]]]:
    """Validation scenes by kind of question, and held-out easy-VQA pictures: (pixels, turns, names) a batch."""
    from embedded_data import resize

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
    parser.add_argument("--joint-steps", type=int, default=1500)
    parser.add_argument("--place-steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=16, help="pictures a step of the joint stage")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--export-every", type=int, default=0, help="also write OUT/model every so many joint steps")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    run = Run(options)
    train_tower(run)
    train_text(run)
    train_projector(run)
    run.export("start")
    train_joint(run, "binding", BINDING_LESSONS[-1][0], BINDING_LESSONS, final=False)
    restore_place(run)
    train_joint(run, "joint", options.joint_steps, JOINT_LESSONS, final=True)
    run.export("model")
    from score_embedded import score

    score(options.out / "model", run.log)


if __name__ == "__main__":
    main()

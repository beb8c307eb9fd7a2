"""The stages that learn what patches show, without any question: vision tower, projector, and the place of objects."""

from __future__ import annotations

import copy

import numpy as np
import torch
from embedded_data import IGNORE, Pictures
from embedded_model import start_as_convolution
from embedded_run import HELD_OUT, Run, optimise
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, layer_norm

from crossfuse.data.scenes import COLOURS, KINDS


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

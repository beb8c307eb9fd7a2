"""One training of the embedded model: its parts, its data and its working folder, and the loop of a stage."""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from embedded_data import Pictures, easy_vqa_pictures, scene_pictures, scene_turns
from embedded_model import build_model, build_processor, build_tokenizer
from safetensors.torch import load_file, save_file

from crossfuse.data.easy_vqa import EasyVQA

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

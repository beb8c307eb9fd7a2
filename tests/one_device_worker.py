"""The tools around a model on an accelerator beside the same on the CPU: ``python tests/one_device_worker.py OUT``.

Batches come from a collator, on the CPU; the model stands on a simulated device, where mixing the two fails. Writes
{tool: largest relative difference of its numbers, or the error} to OUT.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).parent))

import torch
from torch import Tensor

import crossfuse as xf
from crossfuse.analysis.anchor_precision import anchor_precision
from crossfuse.analysis.attention_gain import attention_gain
from crossfuse.analysis.diagnose import diagnose
from crossfuse.analysis.mutual_information import information_change
from crossfuse.analysis.rope_bias import rope_distance_bias
from crossfuse.analysis.threshold_fit import fit_threshold
from crossfuse.analysis.word_patches import labelled_cosines, scene_records
from crossfuse.cli.explain import explain_model
from crossfuse.cli.main import main as command_line
from crossfuse.cli.sweep import measure
from crossfuse.data.collate import Collator
from crossfuse.evaluation.cache_growth import cache_growth
from crossfuse.evaluation.generation import answer
from crossfuse.training.trainer import mean_loss
from simulated_devices import register, simulated_devices

torch.set_num_threads(1)
RECORDS = list(scene_records("test", 6))
ANCHORS = xf.TextAnchors(threshold=0.12)


def tools() -> dict[str, tuple[xf.Fusion | None, Callable[[Any, Any], Any]]]:
    def prompts(processor: Any, records: Any = RECORDS) -> dict[str, Any]:
        return Collator(processor, prompt_only=True)(records)

    return {
        "explain_anchors": (ANCHORS, lambda m, p: xf.explain_anchors(m, prompts(p))),
        "explain_anchors of images": (
            xf.ImageAnchors(threshold=0.12), lambda m, p: xf.explain_anchors(m, prompts(p)),
        ),
        "explain_anchors in windows": (
            xf.CrossAttention(anchors=ANCHORS), lambda m, p: xf.explain_anchors(m, prompts(p)),
        ),
        "calibrate_threshold": (None, lambda m, p: xf.calibrate_threshold(m, [prompts(p)])),
        "anchor_precision": (None, lambda m, p: anchor_precision(m, p, RECORDS, prompts(p))),
        "diagnose": (ANCHORS, lambda m, p: diagnose(m, p, RECORDS, 0.12, attention_samples=2)),
        "fit_threshold": (None, lambda m, p: fit_threshold(*labelled_cosines(m, p, RECORDS, prompts(p)))),
        "attention_gain": (ANCHORS, lambda m, p: attention_gain(m, prompts(p, RECORDS[:1]))),
        "information_change": (ANCHORS, lambda m, p: information_change(m, prompts(p, RECORDS[:1]))),
        "rope_distance_bias": (None, lambda m, p: rope_distance_bias(m, [0, 1, 64])),
        "explain_model": (None, lambda m, p: explain_model(m, p, RECORDS, None, 0.1, 2)[0]),
        "measure": (
            ANCHORS, lambda m, p: measure(m, p, RECORDS, ["accuracy", "loss", "anchors", "precision"]),
        ),
        "mean_loss": (xf.CrossAttention(), lambda m, p: mean_loss(m, [Collator(p)(RECORDS)])),
        "answer": (xf.ImageAnchors(threshold=0.12), lambda m, p: answer(m, p, RECORDS, max_new_tokens=4)),
        "cache_growth": (xf.CrossAttention(joint_text=True), lambda m, p: cache_growth(m, p, "what?", [1, 3])),
    }  # fmt: skip


def commands(folder: Path) -> dict[str, list[str]]:
    """Command lines; what they print is compared, apart from times."""
    pictures = folder / "frames"
    pictures.mkdir()
    for number, record in enumerate(RECORDS[:3]):
        record.images[0].save(pictures / f"{number}.png")
    picture, out = str(pictures / "0.png"), str(folder / "out")
    question = "what colour is the circle?"
    anchored = ["--fusion", "text-anchors", "--threshold", "0.12"]
    return {
        "generate": ["generate", picture, question, *anchored],
        "anchors": ["anchors", picture, question, "--out", out],
        "explain": ["explain", "embedded", "scenes", "--samples", "4", "--attention-samples", "1", "--out", out],
        "caption": ["caption", str(pictures), "--fusion", "cross-attention", "--max-new-tokens", "4"],
        "evaluate": ["evaluate", "embedded", "--limit", "6", "--threshold", "1,0.12", "--out", out],
        "sweep": ["sweep", "1,0.12", "--samples", "4", "--out", out],
    }


def printed(arguments: list[str], folder: Path, device: str) -> str:
    shutil.rmtree(folder / "out", ignore_errors=True)
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        command_line([*arguments, "--device", device, "--debug"])
    return text.getvalue()


def numbers(value: Any) -> Iterator[float]:
    """Everything in a result that is a number; of a text its letters."""
    if isinstance(value, Tensor):
        yield from value.flatten().double().tolist()
    elif isinstance(value, (bool, int, float)):
        yield float(value)
    elif isinstance(value, str):
        yield from map(float, value.encode())
    elif dataclasses.is_dataclass(value):
        yield from numbers([getattr(value, field.name) for field in dataclasses.fields(value)])
    elif isinstance(value, dict):
        yield from numbers(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from numbers(part)


def used(fusion: xf.Fusion | None, tool: Callable[[Any, Any], Any], device: str) -> list[float]:
    model, processor = xf.load_embedded()
    if fusion is not None:
        xf.fuse(model, fusion)
    return list(numbers(tool(model.to(device), processor)))


def compare_commands(folder: Path) -> Iterator[tuple[str, Any]]:
    for name, arguments in commands(folder).items():
        expected = printed(arguments, folder, "cpu")
        errors = io.StringIO()
        with simulated_devices(), contextlib.redirect_stderr(errors):
            try:
                got = printed(arguments, folder, "sim:0")
            except Exception as error:
                got = f"{error} {errors.getvalue()[-600:]}"
        yield f"crossfuse {name}", 0.0 if got == expected != "" else f"{got!r} instead of {expected!r}"


def main() -> None:
    register()
    found: dict[str, Any] = {}
    for name, (fusion, tool) in tools().items():
        run = partial(used, fusion, tool)
        expected = run("cpu")
        try:
            with simulated_devices():
                got = run("sim:0")
            assert len(got) == len(expected) > 0, f"{len(got)} numbers instead of {len(expected)}"
            pairs = zip(got, expected, strict=True)
            found[name] = max(abs(a - b) / (1 + abs(b)) for a, b in pairs if not a != a == b != b)
        except Exception as error:
            where = [f for f in traceback.extract_tb(error.__traceback__) if "crossfuse" in f.filename][-2:]
            lines = [f"{Path(f.filename).name}:{f.lineno}" for f in where]
            found[name] = f"{type(error).__name__}: {str(error)[:200]} {lines}"
    with tempfile.TemporaryDirectory() as folder:
        found |= dict(compare_commands(Path(folder)))
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

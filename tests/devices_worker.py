"""Models on several devices beside the same on one: ``python tests/devices_worker.py MAP FIRST SECOND OUT``.

MAP: ``split`` (the decoder's first layer on the first, the others on the second), ``apart`` (embeddings on the second
too), ``beside`` (as ``split``, gradients) or ``offload`` (SECOND is the CPU: accelerate keeps its layers there and runs
them on the first). ``sim:0`` and ``sim:1`` are simulated. Writes
{case: {"difference": largest of logits, "same": generated ids}} or
{case: {"error": ...}} to OUT.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # a thread of its own would know nothing of simulated devices
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "fusions" / "anchors"))
sys.path.insert(0, str(Path(__file__).parent / "streaming"))

import tiny_qwen
import torch
from accelerate import dispatch_model
from torch import Tensor

import crossfuse as xf
import tiny
from conftest import TinyProcessor
from crossfuse.streaming.pool import StreamPool
from crossfuse.streaming.sampling import Decoding
from crossfuse.streaming.session import StreamSession
from matrix import CONFIGURATIONS, EACH, name_of
from simulated_devices import register, simulated_devices
from tiny import I

torch.set_num_threads(1)
QWEN = [
    xf.Insertion(),
    xf.TextAnchors(threshold=0.1),
    xf.ImageAnchors(threshold=0.1),
    xf.CrossAttention(joint_text=True),
    xf.CrossAttention(update_images=True, gist_tokens=1),
    xf.CircleRoPE(),
    xf.ModalityRoPE(layers=None),
    xf.Insertion(compress=xf.MeanPool(4)),
]
STREAMS = [
    xf.Insertion(),
    xf.CrossAttention(joint_text=True),
    xf.CrossAttention(history=2, share_projections=True),
    xf.CrossAttention(gist_tokens=1, joint_text=True),
]
SAVED = [xf.CrossAttention(every=2, gate="tanh"), xf.GumbelReorder(width=16, depth=1), xf.TextAnchors(threshold=0.1)]
SECOND_PARTS = ("vision_tower", "visual", "multi_modal_projector", "norm")


def device_map(model: Any, kind: str, first: str, second: str) -> dict[str, str]:
    """Parts to devices. The decoder's first layer stands on the first, the others on the second."""
    places = {"lm_head": second}
    for name, _ in model.model.named_children():
        places[f"model.{name}"] = second if name in SECOND_PARTS else first
    del places["model.language_model"]
    for name, part in model.model.language_model.named_children():
        for index, _ in enumerate(part if name == "layers" else ()):
            places[f"model.language_model.layers.{index}"] = second if index else first
        if name != "layers":
            places[f"model.language_model.{name}"] = second if name in SECOND_PARTS else first
    if kind == "apart":
        places["model.language_model.embed_tokens"] = second
        places["model.language_model.rotary_emb"] = second
    return places


def answers(model: Any, inputs: dict[str, Tensor], fusion: xf.Fusion) -> dict[str, Tensor]:
    """Logits of a forward, the loss over the last two tokens, and greedily generated ids, on the CPU."""
    labelled = tiny.labelled(inputs)
    asked = {**inputs, "prompt_mask": tiny.prompt_mask(inputs, 2)} if fusion.needs_prompt else inputs
    found = {
        "logits": model(**asked).logits,
        "loss": model(**labelled, return_logits=False).loss,
        "ids": model.generate(**inputs, max_new_tokens=3, do_sample=False),
    }
    return {name: value.cpu() for name, value in found.items()}


def gradients(model: Any, inputs: dict[str, Tensor], fusion: xf.Fusion) -> dict[str, Tensor]:
    """Of every parameter, after the backwards of one training step with images and one of text alone."""
    model.train()
    text = {name: value.to(inputs["input_ids"].device) for name, value in tiny.batch([6], [4]).items()}
    with torch.enable_grad():
        for given in (inputs, text):
            model(**tiny.labelled(given), return_logits=False).loss.backward()
    found = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    return {**found, "ids": torch.tensor(len(found))}


def stream(model: Any, inputs: dict[str, Tensor], fusion: xf.Fusion) -> dict[str, Tensor]:
    """Four frames, with a bound on the text, so that the oldest leaves and cached keys are rotated."""
    processor = TinyProcessor()
    session = StreamSession(model, processor, max_text_tokens=30, block_tokens=7)
    other = StreamPool(model, processor)
    other.open("a", max_text_tokens=30, decoding=Decoding(max_new_tokens=2)).add_text([2, 7])
    other.open("b", max_text_tokens=30, decoding=Decoding(max_new_tokens=2)).add_text([2, 9, 7])
    logits, said = [], []
    for number in range(4):
        noise = torch.Generator().manual_seed(number)
        frame = torch.randint(0, 256, (16, 16, 3), dtype=torch.uint8, generator=noise).numpy()
        session.add_frame(frame)
        session.add_text([3 + number] * 9)
        logits.append(session.forward().cpu())
        texts, errors = other.step(dict.fromkeys("ab" if number % 2 else "a", frame))
        assert not errors, errors
        said += list(texts.values())
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        session.save(file.name)
        again = StreamSession.load(file.name, model, processor)
        again.add_text([7, 9])
        logits.append(again.forward().cpu())
    written = [ord(letter) for text in said for letter in text]
    return {"logits": torch.stack(logits), "ids": torch.tensor(written)}


def reloaded(fusion: xf.Fusion, inputs: dict[str, Tensor], places: tuple[str, str, str]) -> dict[str, Any]:
    """A saved fused model, loaded with a ``device_map``."""
    model = tiny.fused(fusion)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        expected = answers(model, inputs, fusion)
        model.save_pretrained(folder)
        unfused = xf.unfuse(tiny.fused(fusion))
        simulated = simulated_devices() if "sim" in "".join(places) else contextlib.nullcontext()
        with simulated:
            again = xf.from_pretrained(folder, device_map=device_map(unfused, *places))
            again.generation_config = model.generation_config
            found = answers(again, {name: value.to(places[1]) for name, value in inputs.items()}, fusion)
            assert len({p.device for p in again.parameters()}) > 1
    return differences(found, expected)


def compared(
    make: Callable[[], Any], inputs: dict[str, Tensor], fusion: xf.Fusion, places: tuple[str, str, str], ask: Any
) -> dict[str, Any]:
    """The model on several devices against the same on one."""
    first = places[1]
    with torch.no_grad():
        expected = ask(make(), inputs, fusion)
    simulated = simulated_devices() if "sim" in first + places[2] else contextlib.nullcontext()
    with torch.no_grad(), simulated:
        model = make()
        dispatch_model(model, device_map=device_map(model, *places), main_device=first)
        found = ask(model, {name: value.to(first) for name, value in inputs.items()}, fusion)
    return differences(found, expected)


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, Any]:
    numbers = [name for name in expected if name != "ids"]
    return {
        "difference": max(float((found[n] - expected[n]).abs().max()) for n in numbers),
        "same": torch.equal(found["ids"], expected["ids"]),
    }


def cases(places: tuple[str, str, str]) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Names, and what compares a case."""
    kind = places[0]
    rows = tiny.batch([3, I, 4], [6], [2, I, I, 1, I, 3])
    llava = {"split": CONFIGURATIONS, "beside": []}.get(kind, EACH)
    for fusion in llava:
        yield f"llava {name_of(fusion)}", partial(compared, partial(tiny.fused, fusion), rows, fusion, places, answers)
    grids = tiny_qwen.batch([3, (4, 8), 4], [6], [2, (4, 4), 1, (2, 4, 4), 3])
    for fusion in QWEN if kind == "split" else []:
        yield f"qwen {name_of(fusion)}", partial(compared, partial(qwen, fusion), grids, fusion, places, answers)
    for fusion in EACH if kind == "beside" else []:  # PyTorch's engine wants real devices, of which the CPU is one
        asked = partial(compared, partial(tiny.fused, fusion), rows, fusion, places, gradients)
        yield f"gradients {name_of(fusion)}", asked
    for fusion in STREAMS if kind in ("split", "apart") else []:
        yield f"stream {name_of(fusion)}", partial(compared, partial(tiny.fused, fusion), rows, fusion, places, stream)
    for fusion in SAVED if kind in ("split", "offload") else []:
        yield f"saved {name_of(fusion)}", partial(reloaded, fusion, rows, places)


def qwen(fusion: xf.Fusion) -> Any:
    return xf.fuse(tiny_qwen.qwen(), fusion)


def main() -> None:
    *given, out = sys.argv[1:]
    if "sim" in "".join(given):
        register()
    found: dict[str, Any] = {}
    for name, case in cases(tuple(given)):
        try:
            found[name] = case()
        except Exception as error:
            where = [f for f in traceback.extract_tb(error.__traceback__) if "crossfuse" in f.filename][-1:]
            lines = [f"{Path(f.filename).name}:{f.lineno}" for f in where]
            found[name] = {"error": f"{type(error).__name__}: {str(error)[:200]} {lines}"}
    Path(out).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

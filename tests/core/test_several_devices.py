"""M4: layers on several devices give what one device gives: forward, loss, generate, streams, gradients.

Each layout runs in a process of its own: simulated devices are registered for a whole process.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import crossfuse as xf
from crossfuse.devices import LayerState
from tiny import llava

LAYOUTS = [
    ("split", "sim:0", "sim:1"),
    ("apart", "sim:0", "sim:1"),
    ("offload", "sim:0", "cpu"),
    ("beside", "cpu", "sim:0"),
    pytest.param(
        ("offload", "cuda:0", "cpu"),
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ),
]


def worker(script: str, *arguments: str) -> dict[str, Any]:
    """Run it in a process of its own; what it wrote to the last argument."""
    command = [sys.executable, str(Path(__file__).parents[1] / script), *arguments]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(Path(arguments[-1]).read_text())
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
def test_m4_layers_on_several_devices(layout, tmp_path):
    found = worker("devices_worker.py", *layout, str(tmp_path / "found.json"))
    assert len(found) >= 14
    wrong = {n: f for n, f in found.items() if "error" in f or not f["same"] or f["difference"] > 1e-4}
    assert not wrong


def test_the_state_of_a_call_ends_with_it():
    """Features and rotary tables of a call must not wait for the garbage collector."""

    @dataclasses.dataclass(eq=False)
    class Held(LayerState):
        table: torch.Tensor
        window: None = None

    gc.disable()
    try:
        state = Held(torch.zeros(2))
        assert state.at(torch.device("cpu")) is state
        there = state.at(torch.device("meta"))
        assert there.table.is_meta
        assert state.at(torch.device("meta")) is there
        gone = weakref.ref(state)
        del state
        assert gone() is None
    finally:
        gc.enable()


def test_a_device_map_without_several_devices_leaves_no_hooks(tmp_path):
    fusion = xf.CrossAttention(joint_text=True)
    model = xf.fuse(llava(), fusion)
    model.save_pretrained(tmp_path)
    again = xf.from_pretrained(tmp_path, device_map="cpu")
    assert xf.fusion_of(again) == fusion
    assert not hasattr(again, "_hf_hook")


def test_layers_on_disk_are_refused_with_the_remedy(tmp_path):
    model = xf.fuse(llava(), xf.TextAnchors())
    model.save_pretrained(tmp_path / "model")
    places = {"model": "cpu", "lm_head": "disk"}
    with pytest.raises(ValueError, match="layers on 'disk', which cannot take a fusion; give 'cpu'"):
        xf.from_pretrained(tmp_path / "model", device_map=places, offload_folder=str(tmp_path / "offload"))


def test_tools_and_commands_work_on_an_accelerator(tmp_path):
    """Batches come from a collator on the CPU, the model stands elsewhere; what comes out is the same."""
    found = worker("one_device_worker.py", str(tmp_path / "found.json"))
    assert {"explain_model", "answer", "crossfuse caption", "crossfuse sweep"} <= set(found)
    assert not {name: value for name, value in found.items() if not isinstance(value, float) or value > 1e-5}

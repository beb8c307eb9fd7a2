"""M4: layers on several devices give what one device gives: forward, loss, generate, streams, gradients.

Each layout runs in a process of its own (`devices_worker.py`): simulated devices are registered for a whole process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import crossfuse as xf
from tiny import llava

WORKER = Path(__file__).parents[1] / "devices_worker.py"
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


@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
def test_m4_layers_on_several_devices(layout, tmp_path):
    out = tmp_path / "found.json"
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, str(WORKER), *layout, str(out)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(out.read_text())
    assert len(found) >= 14
    wrong = {n: f for n, f in found.items() if "error" in f or not f["same"] or f["difference"] > 1e-4}
    assert not wrong


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

"""Two CPU processes (gloo), launched with the shipped configurations: the losses and weights of one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import crossfuse as xf
from crossfuse.training.distributed import layer_classes
from distributed_worker import run_case
from tiny import llava
from training_runs import EVERYTHING, model_for, recipe

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "recipes" / "accelerate"
# Sums over two processes are taken in another order than over one.
RTOL = 1e-5


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Results of one process, and the folder with its checkpoints."""
    folder = tmp_path_factory.mktemp("alone")
    return {case: run_case(case, folder, world=1) for case in ("full", "lora", "insertion")}, folder


def launch(config: str, cases: str, folder: Path) -> dict:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / config),
        "--main_process_port", str(port), str(ROOT / "tests" / "distributed_worker.py"), cases, str(folder),
    ]  # fmt: skip
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=variables, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "results.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ddp-cpu.yaml", "fsdp2-cpu.yaml"])
def test_m2_two_processes_train_as_one_and_their_checkpoint_loads_on_one(config, alone, tmp_path):
    """Every second sample has no image, so that in most steps one process has images and the other has none."""
    expected, folder = alone
    started = time.monotonic()
    found = launch(config, "full,lora@2,insertion", tmp_path)
    assert time.monotonic() - started < 200
    assert found["processes"] == 2
    for case in ("full", "insertion"):
        assert [step for step, _ in found[case]["losses"]] == [1, 2, 3, 4]
        for kind in ("losses", "validation"):
            numbers = [loss for _, loss in found[case][kind]]
            assert numbers == pytest.approx([loss for _, loss in expected[case][kind]], rel=RTOL)
        assert found[case]["tokens"] == expected[case]["tokens"]
        states = [load_file(where / case / "last" / "trained.safetensors") for where in (folder, tmp_path)]
        assert set(states[0]) == set(states[1])
        for name, tensor in states[0].items():
            # Adam turns gradients of rounding noise into whole steps; all but a few weights agree.
            assert torch.isclose(states[1][name], tensor, rtol=1e-3, atol=1e-4).float().mean() > 0.99, name
    # The main process alone was told to stop; both did, after the same step, and one process goes on.
    assert found["lora@2"]["stopped"] == "signal"
    rest = run_case("lora", tmp_path, world=1, resume=True)
    losses = [loss for _, loss in found["lora@2"]["losses"] + rest["losses"]]
    assert losses == pytest.approx([loss for _, loss in expected["lora"]["losses"]], rel=RTOL)
    assert len(losses) == 4


def test_m3_validation_on_two_processes_sees_every_sample_once(alone):
    """The main process of two evaluates its share; here both shares together are the set (see also the batch tests)."""
    evaluated = alone[0]["full"]["evaluated"]
    assert sorted(evaluated) == sorted(2 * [f"validation-{i}" for i in range(5)])  # validated after steps 2 and 4


def test_the_units_of_fsdp_are_the_blocks_of_decoder_and_tower():
    assert layer_classes(xf.fuse(llava(), xf.CrossAttention())) == ["CLIPEncoderLayer", "LlamaDecoderLayer"]
    adapted = model_for(xf.CrossAttention(), recipe(trainable=EVERYTHING))
    assert set(layer_classes(adapted)) == {"CLIPEncoderLayer", "LlamaDecoderLayer"}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.stem)
def test_the_shipped_configurations_are_what_accelerate_reads(path):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert config.num_processes >= 2
    text = yaml.safe_load(path.read_text())
    if "fsdp_config" in text:
        assert text["fsdp_config"]["fsdp_version"] == 2
        assert "fsdp_transformer_layer_cls_to_wrap" not in text["fsdp_config"]

"""What more than one process needs: the layers to shard, and equal calls of tower and fusion on every process.

A training step without images runs tower, projector and cross-attention on a blank image that nobody attends to (the
fused body does so whenever a process group exists). Validation, which takes no gradients, is brought in step here.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from crossfuse.training.groups import part_of, plain_model

_BLOCK_LISTS = ("layers", "blocks", "layer")


def layer_classes(model: Any) -> list[str]:
    """Class names of the blocks of decoder and vision encoder: the units of FSDP.

    Never the whole tower: its output is read by several modules, and a unit is gathered by its own forward alone.
    """
    names: dict[str, None] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and part_of(name) in ("llm", "vision") and name.endswith(_BLOCK_LISTS):
            for block in module:
                # A block that is trained in full beside LoRA stands inside PEFT's wrapper.
                names[type(getattr(block, "original_module", block)).__name__] = None
    return list(names)


def shard_on_cpus(accelerator: Any) -> bool:
    """Make accelerate shard over CPU processes where its configuration asks for FSDP2; True where it now does.

    It honours FSDP for accelerators alone and falls back to plain data parallelism on CPUs, without a word.
    """
    from accelerate.utils import DistributedType

    state, plugin = accelerator.state, fsdp_plugin()
    if plugin is None or state.distributed_type != DistributedType.MULTI_CPU:
        return False
    state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
    return True


def gather_in_one_order(model: Any) -> None:
    """Make every process of a sharded model gather and reduce in the same order, whatever its batch holds.

    accelerate makes the word embeddings a unit of their own, gathered where they are called: before the tower, after it
    or twice, depending on whether a process has images and whether its anchors insert anything; and FSDP2 fetches
    ahead in the backward pass in the order of the forward. Here the embeddings are gathered at the start of every
    forward and kept until its end, and each block fetches the block before it. Processes that differ mix up their
    messages.
    """
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(model, FSDPModule):
        return
    before: dict[int, Any] = {}
    modules = list(nn.Module.modules(model))  # type: ignore[arg-type]
    for module in modules:
        if isinstance(module, nn.ModuleList):
            blocks = [getattr(block, "modules_to_save", {"default": block})["default"] for block in module]
            before |= {id(later): earlier for earlier, later in itertools.pairwise(blocks)}
    for module in modules:
        if isinstance(module, FSDPModule):
            earlier = before.get(id(module))
            # A unit that is its own predecessor fetches nothing ahead.
            module.set_modules_to_backward_prefetch([earlier if isinstance(earlier, FSDPModule) else module])
    table = plain_model(model).get_input_embeddings()
    if isinstance(table, FSDPModule):
        table.set_reshard_after_forward(False)
        model.register_forward_pre_hook(lambda module, args: _gather(table))  # type: ignore[attr-defined]


def _gather(table: Any) -> None:
    table.unshard()


def shard_again(model: Any) -> None:
    """Units that keep whole weights after a forward go back to shards, which the optimiser and checkpoints hold."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def fsdp_plugin() -> Any:
    """accelerate's FSDP2 settings from the environment that `accelerate launch` has made, or None."""
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return None
    from accelerate import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin()
    if plugin.fsdp_version != 2:
        raise ValueError(f"FSDP version {plugin.fsdp_version} is not supported; set fsdp_version: 2 (FSDP2)")
    return plugin


@contextlib.contextmanager
def steps_like_an_image_batch(model: Any, inputs: dict[str, Any], sharded: bool) -> Iterator[None]:
    """Inside the block a text-only batch of a sharded model runs the tower too, as in training.

    Other processes may have images in this round, and the shards of the tower's layers are gathered by all together.
    The body alone is told that it trains (that is what adds the blank image); its layers stay in evaluation mode.
    """
    if not sharded or any(name.startswith("pixel_values") for name in inputs):
        yield
        return
    body = plain_model(model).model
    body.training = True
    try:
        with torch.enable_grad():
            yield
    finally:
        body.training = False

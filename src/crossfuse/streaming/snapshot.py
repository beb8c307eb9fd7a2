"""A session in one safetensors file: tensors, and JSON for the rest in the header. Written whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from crossfuse.devices import device_of, input_device
from crossfuse.storage import replace_file
from crossfuse.streaming.cache import FusedLayer, WindowState
from crossfuse.streaming.sampling import Decoding
from crossfuse.streaming.stream import EncodedFrame, Run, Stream

if TYPE_CHECKING:
    from crossfuse.streaming.session import StreamSession

Session = TypeVar("Session", bound="StreamSession")

FORMAT = 1
_HEADER = "crossfuse.session"


def write_session(session: StreamSession, path: str | os.PathLike[str]) -> None:
    """Write everything that decides the rest of the stream."""
    from safetensors.torch import save

    stream, tensors = session.stream, {}
    for index, layer in enumerate(stream.cache.layers):
        for name in FusedLayer._rows:
            tensor = getattr(layer, name)
            if isinstance(tensor, Tensor) and tensor.ndim == 4:
                tensors[f"layers.{index}.{name}"] = tensor
    for name in ("mask", "next_position", "prompt_ids"):
        if (tensor := getattr(stream.cache, name)) is not None:
            tensors[name] = tensor
    if stream.cache.window is not None:
        for field in dataclasses.fields(WindowState):
            tensors[f"window.{field.name}"] = getattr(stream.cache.window, field.name)
    if stream.logits is not None:
        tensors["logits"] = stream.logits
    pending: list[Any] = []
    for segment in stream.pending:
        if isinstance(segment, list):
            pending.append(segment)
            continue
        number = len(pending)
        tensors[f"pending.{number}.features"] = segment.features
        tensors |= {f"pending.{number}.arguments.{k}": v for k, v in segment.arguments.items()}
        pending.append({"grid": segment.grid, "arguments": sorted(segment.arguments)})
    tensors["generator"] = session.sampler.generator.get_state()
    header = {
        "format": FORMAT,
        "fusion": session.engine.fusion.to_dict(),
        "layers": session.engine.layers,
        "budget": dataclasses.asdict(session.engine.budget),
        "delimiter": session.delimiter,
        "decoding": dataclasses.asdict(session.decoding),
        "recent": list(session.sampler.recent),
        "runs": [dataclasses.astuple(run) for run in stream.runs],
        "pending": pending,
        "frames": stream.frames,
        "answered": stream.answered,
        "lengths": [stream.cache.user_length, stream.cache.fused_length, stream.cache.croppable],
    }
    stored = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    replace_file(Path(path), save(stored, metadata={_HEADER: json.dumps(header)}))


def read_session(cls: type[Session], path: str | os.PathLike[str], model: Any, processor: Any) -> Session:
    """Make the session again. ValueError where the file is no session or the model is not the one that made it."""
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"no such file: {path}")
    try:
        with safe_open(str(path), framework="pt") as file:
            header = json.loads((file.metadata() or {}).get(_HEADER, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise ValueError(f"{path} is no saved session ({error})") from error
    if header is None or header.get("format") != FORMAT:
        raise ValueError(f"{path} is no session of this version of crossfuse; save it again")
    decoding = Decoding(**{**header["decoding"], "stop_tokens": tuple(header["decoding"]["stop_tokens"])})
    session = cls(model, processor, **header["budget"], delimiter=header["delimiter"], decoding=decoding)
    _check_model(session, header, tensors, path)
    device = device_of(model.get_input_embeddings(), input_device(model))
    generator = tensors.pop("generator")
    session.sampler.generator.set_state(generator)
    session.sampler.recent.extend(header["recent"])
    engine = session.engine
    places = [device_of(block, device) for block in engine.backbone.decoder(engine.body).layers]
    _restore(session.stream, header, {name: tensor.to(device) for name, tensor in tensors.items()}, places)
    return session


def _check_model(session: StreamSession, header: dict[str, Any], tensors: dict[str, Tensor], path: Any) -> None:
    own, saved = session.engine.fusion.to_dict(), header["fusion"]
    # JSON has no tuples; what is compared is what would be written.
    if json.loads(json.dumps(own)) != saved:
        changed = [name for name in {**own, **saved} if own.get(name) != saved.get(name)]
        raise ValueError(f"{path} was made with another fusion (differs in {', '.join(sorted(changed))}); fuse it so")
    if header["layers"] != session.engine.layers:
        raise ValueError(f"{path} has {header['layers']} layers, the model has {session.engine.layers}")
    config = session.engine.model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name, tensor in tensors.items():
        if name.endswith(".keys") and (tensor.shape[1], tensor.shape[3]) != (heads, width):
            raise ValueError(
                f"{path} has key heads of {tensor.shape[1]} x {tensor.shape[3]}, the model has {heads} x {width}"
            )


def _restore(
    stream: Stream, header: dict[str, Any], tensors: dict[str, Tensor], places: Sequence[torch.device]
) -> None:
    """``places``: the device of each layer."""
    cache = stream.cache
    layers: Any = cache.layers
    for index, layer in enumerate(layers):
        for name in FusedLayer._rows:
            tensor = tensors.get(f"layers.{index}.{name}")
            if tensor is None:
                continue
            tensor = tensor.to(places[index])
            if name == "keys":
                layer.lazy_initialization(tensor, tensor)
            setattr(layer, name, tensor)
    cache.mask, cache.next_position = tensors.get("mask"), tensors.get("next_position")
    cache.prompt_ids = tensors.get("prompt_ids")
    cache.user_length, cache.fused_length, cache.croppable = header["lengths"]
    if "window.since_image" in tensors:
        cache.window = WindowState(**{f.name: tensors[f"window.{f.name}"] for f in dataclasses.fields(WindowState)})
    stream.logits = tensors.get("logits")
    stream.runs = [Run(*run) for run in header["runs"]]
    stream.frames = header["frames"]
    stream.answered = header.get("answered", False)
    for number, segment in enumerate(header["pending"]):
        if isinstance(segment, list):
            stream.pending.append(segment)
            continue
        arguments = {k: tensors[f"pending.{number}.arguments.{k}"] for k in segment["arguments"]}
        grid = None if segment["grid"] is None else tuple(segment["grid"])
        stream.pending.append(EncodedFrame(tensors[f"pending.{number}.features"], grid, arguments))  # type: ignore[arg-type]

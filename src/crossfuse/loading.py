"""Models by directory, by hub id, or the one that comes with the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SPREAD = "spread"
EMBEDDED = {"embedded": "model", "embedded:start": "start"}  # names of what lies in the package, and its variants


def load_model(name: str | None, device: str = "cpu", *, whole: bool = False) -> tuple[Any, Any]:
    """(model in evaluation mode, processor). ``device``: as `find_device` takes it.

    name: a directory or hub id; None and "embedded" give the embedded model, "embedded:start" what it started from.
    whole: the command fuses and unfuses the model, which one that is spread does not allow.

    Raises:
        ValueError: the directory holds no model, the hub cannot be reached, the family is not supported, or there is no
            such device.
    """
    import crossfuse as xf

    place = find_device(device)
    if whole and place is None:
        raise ValueError("this command cannot spread a model over several devices; use --device auto, cpu or cuda:0")
    quiet_libraries()
    name = name or "embedded"
    if name in EMBEDDED:
        model, processor = xf.load_embedded(EMBEDDED[name])
        return model.to(place or "cpu"), processor
    read_config(name)
    from transformers import AutoProcessor

    model = xf.from_pretrained(name, **({} if place else {"device_map": "auto"}))
    if place:
        model.to(place)
    return model.eval(), AutoProcessor.from_pretrained(name)


def find_device(name: str) -> Any:
    """The `torch.device` that is meant, or None for "spread". ValueError where there is none of that name."""
    import torch

    if name == SPREAD:
        return None
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        kind = torch.get_device_module(device)
    except RuntimeError:
        raise ValueError(f"device must be auto, spread, cpu, cuda or cuda:NUMBER; got {name!r}") from None
    count = kind.device_count() if kind.is_available() else 0
    if device.type != "cpu" and (device.index or 0) >= count:
        raise ValueError(f"there is no device {name} here ({count} of that kind); use --device auto or cpu")
    return device


def read_config(name: str) -> Any:
    """The configuration of a model of a supported family; nothing else of it is read.

    Raises:
        ValueError: as `load_model`.
    """
    check_source(name)
    from transformers import AutoConfig

    from crossfuse.backbones import supported_architectures
    from crossfuse.backbones.layouts import refuse_foreign_layout

    refuse_foreign_layout(name)
    supported = supported_architectures()
    try:
        config = AutoConfig.from_pretrained(name)
    except OSError as error:
        raise ValueError(
            f"cannot load {name}: it is no directory here, and the hub gave nothing under that id; "
            "check the name and the connection"
        ) from error
    found = list(config.architectures or ())
    if not set(found) & set(supported):
        what = ", ".join(found) or f"a model of type {config.model_type!r}"
        raise ValueError(f"{name} holds {what}, which is not supported; crossfuse fuses {', '.join(supported)}")
    return config


def quiet_libraries() -> None:
    """Keep transformers' own progress bars and advice out of a command's output."""
    import warnings

    from transformers.utils import logging

    # Asked by transformers' Trainer of transformers' own models; nothing that a user could act on.
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def check_source(name: str) -> None:
    """Raise `ValueError` in words of the user's where `name` is a path without a model."""
    path = Path(name).expanduser()
    looks_like_path = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"{name} is a directory without config.json; give one that save_pretrained wrote")
        try:
            json.loads((path / "config.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path / 'config.json'} is no JSON ({error}); save the model again") from error
    elif path.is_file():
        raise ValueError(f"{name} is a file; give the directory that holds config.json")
    elif looks_like_path:
        raise ValueError(f"no such directory: {name}; give a directory with config.json or a hub id as owner/name")


def embedded_directory() -> Path:
    """Where the model that comes with the package lies."""
    from importlib.resources import files

    return Path(str(files("crossfuse").joinpath("assets", "model")))

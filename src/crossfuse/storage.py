"""``fusion.safetensors`` (new weights only) and ``fusion.json``: written atomically, loaded strictly. No pickle."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WEIGHTS, CONFIG = "fusion.safetensors", "fusion.json"


def fusion_keys(model: nn.Module) -> list[str]:
    """State-dict names of the weights that fusing has added."""
    return [name for name in model.state_dict() if ".cross." in name]


def write_fusion(model: Any, directory: str | os.PathLike[str], state: dict[str, Tensor]) -> None:
    """Write both files; each appears whole or not at all."""
    from importlib.metadata import version

    import transformers
    from safetensors.torch import save

    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in state.items()}
    description = {
        "fusion": model.model._fusion.to_dict(),
        "base_model": getattr(model.config, "_name_or_path", "") or None,
        "base_revision": getattr(model.config, "_commit_hash", None),
        "keys": sorted(tensors),
        "versions": {
            "crossfuse": version("crossfuse"),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    replace_file(folder / WEIGHTS, save(tensors))
    replace_file(folder / CONFIG, (json.dumps(description, indent=2) + "\n").encode())


def read_description(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """``fusion.json``; FileNotFoundError naming the folder where there is none."""
    path = Path(directory) / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{directory} holds no {CONFIG}; save a fused model there with crossfuse.save_fusion")
    description: dict[str, Any] = json.loads(path.read_text())
    return description


def load_weights(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Copy the stored weights into a fused model. ValueError naming missing, unexpected or mis-shaped keys."""
    from safetensors.torch import load_file

    path = Path(directory) / WEIGHTS
    if not path.is_file():
        raise FileNotFoundError(f"{directory} holds no {WEIGHTS}; {CONFIG} alone is not a saved fusion")
    stored = load_file(path)
    own = model.state_dict()
    expected = set(fusion_keys(model))
    problems = _listed("missing", expected - set(stored)) + _listed("unexpected", set(stored) - expected)
    shapes = [k for k in expected & set(stored) if own[k].shape != stored[k].shape]
    problems += [
        f"{k} has shape {tuple(stored[k].shape)}, the model needs {tuple(own[k].shape)}" for k in sorted(shapes)[:3]
    ]
    if problems:
        raise ValueError(f"{path} does not fit this model: {'; '.join(problems)}")
    with torch.no_grad():
        for name, tensor in stored.items():
            own[name].copy_(tensor)


def _listed(kind: str, keys: Iterable[str]) -> list[str]:
    names = sorted(keys)
    if not names:
        return []
    return [f"{len(names)} {kind} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"]


def replace_file(path: Path, content: bytes) -> None:
    """Write to a temporary name in the same folder, then rename."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as temporary:
        try:
            temporary.write(content)
            temporary.flush()
            os.fsync(temporary.fileno())
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(temporary.name, 0o666 & ~umask)
            os.replace(temporary.name, path)
        except BaseException:
            Path(temporary.name).unlink(missing_ok=True)
            raise

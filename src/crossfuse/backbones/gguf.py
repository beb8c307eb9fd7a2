"""The header of a GGUF file, read before anything is loaded: which language models can be taken from one.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (little endian, versions 2 and 3).
"""

from __future__ import annotations

import dataclasses
import os
import struct
import warnings
from pathlib import Path
from typing import Any, BinaryIO

TEXT_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""``general.architecture`` of the text models that can be composed (SmolLM is a "llama")."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclasses.dataclass(frozen=True)
class GGUFHeader:
    """architecture: ``general.architecture``; parameters: weights in all tensors; file_bytes: size on disk."""

    architecture: str
    parameters: int
    file_bytes: int


def read_header(path: str | os.PathLike[str]) -> GGUFHeader:
    """The header of a GGUF file, without its weights. ValueError where the file is none or is cut off."""
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file (its first bytes are not 'GGUF')")
        try:
            (version,) = _read(file, "I")
            if version not in (2, 3):
                raise ValueError(f"{path} is GGUF version {version}; versions 2 and 3 can be read: convert it again")
            tensors, fields = _read(file, "QQ")
            architecture = None
            for _ in range(fields):
                key = _string(file).decode()
                value = _value(file, *_read(file, "I"))
                if key == "general.architecture":
                    architecture = value.decode()
            parameters = 0
            for _ in range(tensors):
                _string(file)
                (rank,) = _read(file, "I")
                size = 1
                for side in _read(file, f"{rank}Q"):
                    size *= side
                parameters += size
                _read(file, "IQ")
        except struct.error:
            raise ValueError(f"{path} is cut off inside its header; download it again") from None
    if architecture is None:
        raise ValueError(f"{path} names no general.architecture; it is not a language model")
    return GGUFHeader(architecture, parameters, os.path.getsize(path))


def check_text_gguf(path: str | os.PathLike[str]) -> GGUFHeader:
    """The header of a GGUF that holds a text LLM; ValueError for any other, before anything is loaded."""
    header = read_header(path)
    if header.architecture not in TEXT_ARCHITECTURES:
        raise ValueError(
            f"{Path(path).name} holds architecture {header.architecture!r}, which cannot be composed; take the GGUF of "
            f"a text LLM ({', '.join(TEXT_ARCHITECTURES)}) and pair it with a Hugging Face vision encoder: "
            "VisionLanguageModel.compose(llm='text.gguf', vision='google/siglip-base-patch16-224')"
        )
    return header


def load_text_gguf(path: str | os.PathLike[str], dtype: Any = None) -> tuple[Any, Any]:
    """(causal LM, tokenizer) out of a text GGUF. The weights are dequantised: a UserWarning says what that costs."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    file = Path(path)
    header = check_text_gguf(file)
    dtype = torch.float32 if dtype is None else dtype
    needed = header.parameters * dtype.itemsize
    warnings.warn(
        f"{file.name}: its weights are dequantised to {str(dtype).removeprefix('torch.')} and take "
        f"{needed / 2**20:,.0f} MiB in memory ({header.file_bytes / 2**20:,.0f} MiB on disk)",
        stacklevel=2,
    )
    # With a matching kernels package transformers would leave the weights in blocks, which nothing can train or copy.
    dense = GgufConfig(gguf_file=file.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=dense, dtype=dtype, attn_implementation="sdpa"
    )
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    return model, tokenizer


def _read(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    layout = "<" + layout
    return struct.unpack(layout, file.read(struct.calcsize(layout)))


def _string(file: BinaryIO) -> bytes:
    (length,) = _read(file, "Q")
    content = file.read(length)
    if len(content) != length:
        raise struct.error
    return content


def _value(file: BinaryIO, kind: int) -> Any:
    """One value; arrays are skipped."""
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY:
        return _read(file, _SCALARS[kind])[0]
    inner, count = _read(file, "IQ")
    if inner in _SCALARS:
        file.seek(count * struct.calcsize("<" + _SCALARS[inner]), os.SEEK_CUR)
    else:
        for _ in range(count):
            _value(file, inner)
    return None

"""Answers on disk: one JSON line a sample, written at once, so that a killed run goes on where it stopped."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """What may change an answer besides the question. Two files with equal settings can be compared.

    In half precision the answers of different batch sizes may differ, so batch size, dtype and attention
    implementation are part of every line.
    """

    model: str
    fusion: dict[str, Any]
    decoding: dict[str, Any]
    dtype: str
    attn_implementation: str
    batch_size: int


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One answer. `prompt_hash` tells whether the question was the same."""

    sample_id: str
    prompt_hash: str
    answer: str


def prompt_hash(prompt: str) -> str:
    """First 16 hexadecimal digits of the prompt's SHA-256."""
    return hashlib.sha256(prompt.encode("utf-8")).hexdigest()[:16]


class PredictionFile:
    """Append-only JSONL of predictions made under one set of settings.

    Opening a file that a killed run left drops an unfinished last line and keeps the rest.

    Raises:
        ValueError: the file holds answers made under other settings (another batch size is allowed), or a
            line that is no prediction; the message names the field or the line.
    """

    def __init__(self, path: str | os.PathLike[str], settings: RunSettings) -> None:
        self.path = Path(path)
        self.settings = settings
        self._predictions: dict[str, Prediction] = {}
        self._file: IO[str] | None = None
        if self.path.exists():
            _drop_unfinished_line(self.path)
            for number, line in enumerate(self.path.read_text(encoding="utf-8").splitlines(), start=1):
                self._keep(number, line)

    def __enter__(self) -> PredictionFile:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *exc: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __len__(self) -> int:
        return len(self._predictions)

    def __iter__(self) -> Iterator[Prediction]:
        return iter(self._predictions.values())

    def answered(self, sample_id: str, prompt: str) -> str | None:
        """The answer to this very prompt, or None where it must still be asked."""
        known = self._predictions.get(sample_id)
        return known.answer if known is not None and known.prompt_hash == prompt_hash(prompt) else None

    def append(self, answers: Iterable[tuple[str, str, str]]) -> None:
        """Write (sample id, prompt, answer) lines and hand them to the operating system before returning."""
        if self._file is None:
            raise RuntimeError("open the prediction file with `with` before appending to it")
        settings = dataclasses.asdict(self.settings)
        for sample_id, prompt, answer in answers:
            prediction = Prediction(sample_id, prompt_hash(prompt), answer)
            self._file.write(json.dumps(dataclasses.asdict(prediction) | settings, ensure_ascii=False) + "\n")
            self._predictions[sample_id] = prediction
        self._file.flush()

    def _keep(self, number: int, line: str) -> None:
        try:
            fields = json.loads(line)
            prediction = Prediction(**{f.name: fields.pop(f.name) for f in dataclasses.fields(Prediction)})
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.path} line {number} is no prediction ({error}); move the file away") from error
        for name, value in json.loads(json.dumps(dataclasses.asdict(self.settings))).items():
            if name != "batch_size" and fields.get(name) != value:
                raise ValueError(
                    f"{self.path} line {number} was answered with {name} = {fields.get(name)!r}, "
                    f"this run has {value!r}; give this run another file"
                )
        self._predictions[prediction.sample_id] = prediction


def _drop_unfinished_line(path: Path) -> None:
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        with path.open("r+b") as file:
            file.truncate(end)

"""Answers on disk: one JSON line a sample, written at once, so that a killed run goes on where it stopped."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
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


def of_shard(sample_id: str, shard: int, shards: int) -> bool:
    """Whether a sample belongs to the shard-th of `shards` parts. The id alone decides, so the parts never share one.

    The hash of the id decides, so the parts are of nearly equal size and do not depend on the order of the samples.
    """
    if not 0 <= shard < shards:
        raise ValueError(f"shard must be 0 to {shards - 1}; got {shard}")
    return int.from_bytes(hashlib.sha256(sample_id.encode("utf-8")).digest()[:8], "big") % shards == shard


class PredictionFile:
    """Append-only JSONL of predictions made under one set of settings.

    Opening a file that a killed run left drops an unfinished last line and keeps the rest. While it is open for
    appending, the file is locked: a second process that would ask the same samples is refused.

    Args:
        others: files of the same run whose answers count as known; this file never changes them.

    Raises:
        ValueError: a file holds answers made under other settings (another batch size is allowed), or a
            line that is no prediction; the message names the field or the line.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        settings: RunSettings,
        others: Sequence[str | os.PathLike[str]] = (),
    ) -> None:
        self.path = Path(path)
        self.settings = settings
        self._predictions: dict[str, Prediction] = {}
        self._file: IO[str] | None = None
        for other in map(Path, others):
            if other != self.path:
                self._read(other)
        if self.path.exists():
            self._read(self.path)

    def __enter__(self) -> PredictionFile:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("a", encoding="utf-8")
        try:
            _lock(file, self.path)
            # Only now: until the lock was held, another process may have been at work on the last line.
            _drop_unfinished_line(self.path)
            self._read(self.path)
        except BaseException:
            file.close()
            raise
        self._file = file
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

    def _read(self, path: Path) -> None:
        own = json.loads(json.dumps(dataclasses.asdict(self.settings)))
        for number, prediction, settings in read_lines(path):
            for name, value in own.items():
                if name != "batch_size" and settings.get(name) != value:
                    raise ValueError(
                        f"{path} line {number} was answered with {name} = {settings.get(name)!r}, "
                        f"this run has {value!r}; give this run another file"
                    )
            self._predictions[prediction.sample_id] = prediction


def read_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, Prediction, dict[str, Any]]]:
    """(line number, prediction, settings) of every finished line of a file; an unfinished last line is left out.

    Raises `ValueError` naming the file and a line that is no prediction.
    """
    # Lines end with a line feed and nothing else: an answer may hold U+2028 or U+0085, at which `splitlines` splits.
    *lines, _ = Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            fields = json.loads(line)
            prediction = Prediction(**{f.name: fields.pop(f.name) for f in dataclasses.fields(Prediction)})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} line {number} is no prediction ({error}); move the file away") from error
        yield number, prediction, fields


def read_predictions(paths: Iterable[str | os.PathLike[str]]) -> tuple[dict[str, Prediction], list[dict[str, Any]]]:
    """Predictions of several files by sample id, and the different settings that they were made under.

    A sample that is there twice counts once: the last line stands (a changed prompt was asked again).
    """
    found: dict[str, Prediction] = {}
    settings: list[dict[str, Any]] = []
    for path in paths:
        for _, prediction, made_with in read_lines(path):
            found[prediction.sample_id] = prediction
            if made_with not in settings:
                settings.append(made_with)
    return found, settings


def _lock(file: IO[str], path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows: two processes on one file stay the user's care.
        return
    try:
        # The system drops the lock with the process, so a killed run leaves none behind.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ValueError(f"{path} is being written by another process; wait for it or choose another folder") from error


def _drop_unfinished_line(path: Path) -> None:
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        with path.open("r+b") as file:
            file.truncate(end)

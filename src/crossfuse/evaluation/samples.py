"""Samples of a run on disk, without their pictures: what scoring needs, so that it asks for no data set again."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from crossfuse.data.records import Record
from crossfuse.evaluation.benchmarks.base import BenchmarkSample
from crossfuse.evaluation.generation import prompt_text
from crossfuse.evaluation.scoring import other_images
from crossfuse.storage import replace_file


def picture_key(record: Record) -> str:
    """What tells a record's pictures and videos from another's: paths, or a hash of the pixels; "" without any."""
    sources = [*record.images, *getattr(record, "videos", ())]
    return "|".join(map(_key, sources))


def _key(source: Any) -> str:
    if isinstance(source, str):
        return source
    if isinstance(source, Image.Image):
        buffer = io.BytesIO(source.tobytes())
        return hashlib.sha256(buffer.getvalue() + repr((source.size, source.mode)).encode()).hexdigest()[:16]
    if isinstance(source, bytes):
        return hashlib.sha256(source).hexdigest()[:16]
    return str(source)


def write_samples(path: str | os.PathLike[str], samples: Sequence[BenchmarkSample]) -> None:
    """One JSON line a sample: id, prompt, reference, meta and the key of its pictures; replaced as a whole."""
    records = [(sample.record, sample.reference) for sample in samples]
    write_asked(path, ((r.id, prompt_text(r), reference, r.meta, picture_key(r)) for r, reference in records))


def write_asked(path: str | os.PathLike[str], asked: Iterable[tuple[str, str, Any, Any, str]]) -> None:
    """The lines of `write_samples` from (id, prompt, reference, meta, key of the pictures)."""
    names = ("id", "prompt", "reference", "meta", "pictures")
    lines = [json.dumps(dict(zip(names, each, strict=True)), ensure_ascii=False) for each in asked]
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_file(target, ("\n".join(lines) + "\n").encode("utf-8"))


class StoredSamples(Sequence[BenchmarkSample]):
    """Samples read back: their records have prompt and meta and no pictures; `pictures` holds the keys in order.

    Raises `ValueError` naming the file and the line that is no sample.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._samples: list[BenchmarkSample] = []
        self.pictures: list[str] = []
        self.prompts: list[str] = []
        for number, line in enumerate(Path(path).read_bytes().split(b"\n"), start=1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
                record = Record.of_question(fields["id"], fields["prompt"])
                record = record.model_copy(update={"meta": fields["meta"]})
                self._samples.append(BenchmarkSample(record, fields["reference"]))
                self.pictures.append(fields["pictures"])
                self.prompts.append(fields["prompt"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} line {number} is no sample ({error!r}); evaluate again") from error

    def only(self, ids: set[str]) -> StoredSamples:
        """Those with the given ids, in their order."""
        kept = [i for i, sample in enumerate(self._samples) if sample.record.id in ids]
        part = StoredSamples.__new__(StoredSamples)
        part._samples = [self._samples[i] for i in kept]
        part.pictures = [self.pictures[i] for i in kept]
        part.prompts = [self.prompts[i] for i in kept]
        return part

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index):  # type: ignore[no-untyped-def, override]
        return self._samples[index]


def with_other_pictures(samples: Sequence[BenchmarkSample], *, seed: int = 0) -> list[BenchmarkSample]:
    """The same samples, each with another's pictures: the shuffled-image control. Ids and references stay.

    Pictures are exchanged between samples with equally many; samples without any stay as they are.

    Raises:
        ValueError: no sample has a picture, or one picture has more than half of the samples.
    """
    by_count: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        if sample.record.images:
            by_count.setdefault(len(sample.record.images), []).append(index)
    if not by_count:
        raise ValueError("none of these samples has an image to exchange")
    exchanged = list(samples)
    for indices in by_count.values():
        chosen = other_images([picture_key(samples[i].record) for i in indices], seed=seed)
        for index, other in zip(indices, chosen, strict=True):
            record = samples[index].record.model_copy(update={"images": samples[indices[other]].record.images})
            exchanged[index] = BenchmarkSample(record, samples[index].reference)
    return exchanged


def answers_to(samples: StoredSamples, predictions: Mapping[str, Any]) -> dict[str, str]:
    """Answers by sample id, of those predictions that were made to the very prompt of the sample."""
    from crossfuse.evaluation.predictions import prompt_hash

    found = {}
    for sample, prompt in zip(samples, samples.prompts, strict=True):
        prediction = predictions.get(sample.record.id)
        if prediction is not None and prediction.prompt_hash == prompt_hash(prompt):
            found[sample.record.id] = str(prediction.answer)
    return found

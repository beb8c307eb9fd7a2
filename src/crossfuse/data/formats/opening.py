"""Where rows come from: JSON files by their own reader, all else by `datasets`, pictures left encoded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from crossfuse.data.formats import easy_vqa, scenes
from crossfuse.data.formats.json_rows import JsonRows, iter_json

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILE = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)/(.+)")
_JSON = (".json", ".jsonl", ".ndjson")
# LLaVA-Video-178K names its splits so, and its files by these parts.
_VIDEO_SPLITS = {"caption": "cap", "open_ended": "oe", "multi_choice": "mc"}


def open_rows(
    source: str, split: str | None, name: str | None, streaming: bool, limit: int | None, seed: int
) -> tuple[Any, Path]:
    """Rows, and the folder that relative paths are taken from; a sequence, or with ``streaming`` an iterable of rows.

    A stream gives ``{"row", "number"}``: rows of JSON need not be objects, and a part of a stream keeps its numbers.
    """
    if source == "scenes":
        return scenes.SceneRows(split or "train", limit or scenes.SCENES_DEFAULT, seed), Path()
    if source == "easy-vqa":
        return easy_vqa.EasyVQARows(split or "train"), Path()
    if match := _HUB_FILE.fullmatch(source):
        source = _fetched(match[1], match[2])
    path = Path(source).expanduser()
    if path.is_dir():
        return _open_folder(path, split, name, streaming), path
    if path.is_file():
        if path.suffix.lower() in _JSON:
            if split not in (None, "train"):
                raise ValueError(f"{path} is one file without splits; leave split={split!r} out, or use a slice")
            return _json([path], streaming), path.parent
        if path.suffix.lower() in (".parquet", ".arrow"):
            return _by_datasets(path.suffix[1:].lower(), "train", None, streaming, [str(path)]), path.parent
        raise ValueError(f"{path} is no .json, .jsonl or .parquet file; convert it to one of these")
    if path.suffix or path.is_absolute() or not _HUB_ID.fullmatch(source):
        known = "scenes, easy-vqa, or a hub id as owner/name"
        raise FileNotFoundError(f"no such file or folder: {source}; data sets without a file are {known}")
    return _by_datasets(source, split, name, streaming), Path()


def _open_folder(folder: Path, split: str | None, name: str | None, streaming: bool) -> Any:
    if (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file():
        return _saved(folder, split)
    if name is not None and (folder / name).is_dir():
        folder = folder / name
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in _JSON)
    if files:
        token = _VIDEO_SPLITS.get(split or "", split)
        files = [file for file in files if token is None or token in file.stem]
        if not files:
            raise ValueError(f"{folder} has no JSON file for split={split!r}")
        return _json(files, streaming)
    if not any(folder.rglob("*.parquet")):
        raise ValueError(f"{folder} holds no .json, .jsonl or .parquet file")
    return _by_datasets(str(folder), split, None, streaming)


def _json(files: Sequence[Path], streaming: bool) -> Any:
    if streaming:
        from datasets import IterableDataset

        return IterableDataset.from_generator(iter_json, gen_kwargs={"paths": [str(file) for file in files]})
    parts = [JsonRows(file) for file in files]
    return parts[0] if len(parts) == 1 else JoinedRows(parts)


class JoinedRows(Sequence[Any]):
    """Rows of several files as one sequence."""

    def __init__(self, parts: Sequence[Sequence[Any]]) -> None:
        self.parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        part = int(np.searchsorted(self._ends, index, side="right"))
        return self.parts[part][index - (int(self._ends[part - 1]) if part else 0)]


def _by_datasets(
    path: str, split: str | None, name: str | None, streaming: bool, data_files: list[str] | None = None
) -> Any:
    """Rows as `datasets` reads them, pictures left encoded."""
    import datasets

    try:
        rows = datasets.load_dataset(path, name, split=split or "train", streaming=streaming, data_files=data_files)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"cannot open {path} (split {split or 'train'}): {reason[:300]}") from error
    rows = _encoded(rows)
    return rows.map(_numbered, with_indices=True, remove_columns=rows.column_names) if streaming else rows


def _numbered(row: dict[str, Any], number: int) -> dict[str, Any]:
    return {"row": row, "number": number}


def _saved(folder: Path, split: str | None) -> Any:
    import datasets

    rows = datasets.load_from_disk(str(folder))
    if isinstance(rows, datasets.DatasetDict):
        if (split or "train") not in rows:
            raise ValueError(f"{folder} has no split {split or 'train'!r}; it has {', '.join(rows)}")
        rows = rows[split or "train"]
    return _encoded(rows)


def _encoded(rows: Any) -> Any:
    """The rows with every picture as its file's bytes: decoding waits for the collator."""
    if rows.features is None:
        return rows
    plain = _without_decoding(rows.features)
    return rows if plain == rows.features else rows.cast(plain)


def _without_decoding(feature: Any) -> Any:
    import datasets

    if isinstance(feature, datasets.Image):
        return datasets.Image(decode=False)
    if isinstance(feature, datasets.Features):
        return datasets.Features({key: _without_decoding(value) for key, value in feature.items()})
    if isinstance(feature, dict):
        return {key: _without_decoding(value) for key, value in feature.items()}
    if isinstance(feature, datasets.List):
        return datasets.List(_without_decoding(feature.feature), feature.length)
    return feature


def _fetched(repository: str, file: str) -> str:
    from huggingface_hub import hf_hub_download

    try:
        return str(hf_hub_download(repository, file, repo_type="dataset"))
    except OSError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"cannot fetch {file} of the data set {repository}: {reason[:300]}") from error

"""Caption files that are whole at any moment: SRT, WebVTT and JSON lines, one write a caption.

A cue goes to the file in a single write and is flushed, so a process that is killed leaves a valid file up to then. A
cue that was cut off (a full disk) is removed when the file is opened again to go on.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple, TextIO


class Caption(NamedTuple):
    """What was said about the frame at ``start``, shown until ``end``; seconds."""

    start: float
    end: float
    text: str


class CaptionWriter:
    """One caption file. Use it as a context manager; ``write`` as captions come."""

    suffix: ClassVar[str]
    header: ClassVar[str] = ""

    def __init__(self, path: str | os.PathLike[str], resume: bool = False):
        """Make the file, or with ``resume`` go on behind the last whole cue of one that exists.

        Raises FileExistsError where it exists and ``resume`` is off, ValueError where it is not of this format.
        """
        self.path = Path(path)
        self.count = 0
        self.resumed_at = 0.0  # where the last cue of the existing file ends
        if self.path.is_file() and not resume:
            raise FileExistsError(f"{path} exists already; use --resume to go on, or another name")
        keep = self._read_existing() if self.path.is_file() else ""
        if not self.path.parent.is_dir():
            raise FileNotFoundError(f"no such folder: {self.path.parent}")
        self._file: IO[bytes] = open(self.path, "r+b" if keep else "wb", buffering=0)  # noqa: SIM115
        if keep:
            self._file.truncate(len(keep.encode()))
            self._file.seek(0, os.SEEK_END)
        elif self.header:
            self._put(self.header)

    def write(self, caption: Caption) -> None:
        """Append one caption; nothing for a blank text. OSError where the disk does not take it."""
        if caption.text.strip():
            self.count += 1
            self._put(self._cue(caption))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> CaptionWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _put(self, text: str) -> None:
        data = text.encode()
        if self._file.write(data) != len(data):
            raise OSError(f"{self.path}: the disk took only part of a caption; free some space and use --resume")

    def _read_existing(self) -> str:
        """The part of the file that holds whole cues; sets ``count`` and ``resumed_at``."""
        text = self.path.read_bytes().decode("utf-8", errors="ignore").replace("\r\n", "\n")
        if self.header.startswith(text):
            return ""
        if not text.startswith(self.header):
            raise ValueError(f"{self.path} does not start like a {self.suffix} file; give another --out")
        end = len(self.header)
        for cue in self._cues(text):
            self.count += 1
            self.resumed_at = max(self.resumed_at, self._end_of(cue))
            end = cue.end()
        if end == len(self.header) and text[end:].strip() and not self._is_cut(text[end:]):
            raise ValueError(f"{self.path} holds no caption of the {self.suffix} format; give another --out")
        return text[:end]

    def _cues(self, text: str) -> Any:
        raise NotImplementedError

    def _end_of(self, cue: re.Match[str]) -> float:
        raise NotImplementedError

    def _cue(self, caption: Caption) -> str:
        raise NotImplementedError

    def _is_cut(self, text: str) -> bool:
        """True where this can be the beginning of the first cue."""
        return "\n\n" not in text


class SrtWriter(CaptionWriter):
    """SubRip: a number, a time line with a comma before the milliseconds, text, a blank line."""

    suffix = ".srt"
    _pattern = re.compile(r"\d+\n[\d:,]+ --> (?P<end>[\d:,]+)\n(?:.+\n)+\n")

    def _cues(self, text: str) -> Any:
        return self._pattern.finditer(text)

    def _end_of(self, cue: re.Match[str]) -> float:
        return parse_time(cue["end"])

    def _cue(self, caption: Caption) -> str:
        times = f"{clock(caption.start, ',')} --> {clock(caption.end, ',')}"
        return f"{self.count}\n{times}\n{_lines(caption.text).replace('-->', '->')}\n\n"


class VttWriter(CaptionWriter):
    """WebVTT: a header, time lines with a point, text with ``& < >`` written as entities."""

    suffix = ".vtt"
    header = "WEBVTT\n\n"
    _pattern = re.compile(r"[\d:.]+ --> (?P<end>[\d:.]+)\n(?:.+\n)+\n")

    def _cues(self, text: str) -> Any:
        return self._pattern.finditer(text, len(self.header))

    def _end_of(self, cue: re.Match[str]) -> float:
        return parse_time(cue["end"])

    def _cue(self, caption: Caption) -> str:
        text = _lines(caption.text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        return f"{clock(caption.start, '.')} --> {clock(caption.end, '.')}\n{text}\n\n"


class JsonlWriter(CaptionWriter):
    """One JSON object a line: ``start`` and ``end`` in seconds, ``text`` as it was generated."""

    suffix = ".jsonl"
    _pattern = re.compile(r"\{.*\}\n")

    def _cues(self, text: str) -> Any:
        return self._pattern.finditer(text)

    def _end_of(self, cue: re.Match[str]) -> float:
        try:
            return float(json.loads(cue[0])["end"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path} holds a line that is no caption: {cue[0][:60].strip()}") from error

    def _cue(self, caption: Caption) -> str:
        entry = {"start": round(caption.start, 3), "end": round(caption.end, 3), "text": caption.text}
        return json.dumps(entry, ensure_ascii=False) + "\n"

    def _is_cut(self, text: str) -> bool:
        return "\n" not in text


class ScreenWriter:
    """Captions as lines of text, ``0:00:01.500  text``, on standard output."""

    resumed_at = 0.0

    def __init__(self, stream: TextIO | None = None):
        self.stream = stream or sys.stdout
        self.count = 0

    def write(self, caption: Caption) -> None:
        if caption.text.strip():
            self.count += 1
            print(f"{clock(caption.start, '.')}  {' '.join(caption.text.split())}", file=self.stream, flush=True)

    def close(self) -> None:
        """Standard output stays open."""

    def __enter__(self) -> ScreenWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


WRITERS: dict[str, type[CaptionWriter]] = {w.suffix: w for w in (SrtWriter, VttWriter, JsonlWriter)}


def caption_writer(target: str, resume: bool = False) -> CaptionWriter | ScreenWriter:
    """The writer for a file name's ending, or for ``-``. ValueError naming the endings otherwise."""
    if target == "-":
        if resume:
            raise ValueError("--resume needs a caption file; standard output cannot be read again")
        return ScreenWriter()
    suffix = Path(target).suffix.lower()
    if suffix not in WRITERS:
        raise ValueError(f"captions are written to {', '.join(WRITERS)} or '-'; got {target!r}")
    return WRITERS[suffix](target, resume)


def clock(seconds: float, point: str) -> str:
    """Seconds as hours:minutes:seconds with milliseconds, as SRT (``,``) and WebVTT (``.``) write them."""
    milliseconds = max(0, round(seconds * 1000))
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{rest // 1000:02d}{point}{rest % 1000:03d}"


def parse_time(text: str) -> float:
    """The inverse of `clock`."""
    hours, minutes, seconds = text.replace(",", ".").split(":")
    return int(hours) * 3600 + int(minutes) * 60 + float(seconds)


def _lines(text: str) -> str:
    """Lines without blank ones: a blank line would end the cue."""
    return "\n".join(line.strip() for line in text.replace("\r", "\n").split("\n") if line.strip())

"""`crossfuse data check` and `crossfuse data show`: look at a data set before training on it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from crossfuse.data.check import DataReport
    from crossfuse.data.formats import RecordDataset
    from crossfuse.data.records import Record

data = typer.Typer(help="Look at a data set before training on it.", no_args_is_help=True)
_SHOWN = 5
_BAR = 40

DataPath = Annotated[
    str, typer.Argument(help="File, folder, hub id, scenes or easy-vqa.", metavar="PATH", show_default=False)
]
FormatName = Annotated[
    str | None, typer.Option("--format", help="Name of the format.", show_default="told from the rows")
]
Split = Annotated[str | None, typer.Option(help="Such as train, or train[:1000].", show_default="train")]
Name = Annotated[str | None, typer.Option(help="Configuration of a hub data set that has several.")]
Root = Annotated[
    Path | None, typer.Option(help="Folder that paths of images and videos start from.", show_default="PATH's own")
]


@data.command()
def check(
    path: DataPath,
    format: FormatName = None,
    split: Split = None,
    name: Name = None,
    root: Root = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Check this many rows.", show_default="all")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Directory or hub id of the model that lengths are for.", show_default="the embedded model"),
    ] = None,
    lengths: Annotated[bool, typer.Option("--lengths/--no-lengths", help="Count tokens.")] = True,
    decode: Annotated[
        bool, typer.Option("--decode/--no-decode", help="Decode images whole, or read their headers only.")
    ] = True,
    min_side: Annotated[int, typer.Option(min=1, help="Shortest side of an image, in pixels.")] = 28,
    max_ratio: Annotated[float, typer.Option(min=1, help="Longest shape of an image, side to side.")] = 200,
    as_json: Annotated[bool, typer.Option("--json", help="Write everything as JSON.")] = False,
) -> None:
    """Read every row of PATH, open every image, count tokens, and list what is wrong.

    Exit code 1 where anything is: rows that are no records, roles, tags, empty answers, reserved strings, missing or
    broken files, tiny or extreme images, duplicates.
    """
    from crossfuse.data.check import check_data

    records = _load(path, format, split, name, root, limit)
    processor = _processor(model) if lengths else None
    report = check_data(
        records,
        processor,
        min_side=min_side,
        max_ratio=max_ratio,
        decode=decode,
        progress=_Progress(len(records)) if sys.stderr.isatty() else None,
    )
    if as_json:
        print(json.dumps(report.to_dict(), indent=2, ensure_ascii=False))
    else:
        _print(report, model or "the embedded model")
    if report.faults:
        raise typer.Exit(1)


@data.command()
def show(
    path: DataPath,
    count: Annotated[int, typer.Option("-n", min=1, help="How many records.")] = 3,
    first: Annotated[int, typer.Option(min=0, help="Number of the first one.")] = 0,
    format: FormatName = None,
    split: Split = None,
    name: Name = None,
    root: Root = None,
    out: Annotated[Path, typer.Option(help="Where the contact sheet goes.")] = Path("contact-sheet.png"),
) -> None:
    """Print records of PATH and write a contact sheet of their images."""
    from crossfuse.data.contact_sheet import contact_sheet

    if out.suffix.lower() != ".png":
        raise ValueError(f"--out must end in .png; got {out}")
    dataset = _load(path, format, split, name, root, None)
    if first >= len(dataset):
        raise ValueError(f"--first must be below {len(dataset)}, the number of records; got {first}")
    chosen = dataset[first : first + count]
    for number, record in enumerate(chosen, first):
        print(_told(record, dataset.row_number(number)))
    fresh = out.with_name(f".{out.name}.tmp")
    contact_sheet(chosen).save(fresh, format="PNG")
    fresh.replace(out)
    print(f"crossfuse: contact sheet in {out}", file=sys.stderr)


def _load(
    path: str, format: str | None, split: str | None, name: str | None, root: Path | None, limit: int | None
) -> RecordDataset:
    from crossfuse.data.formats import load_records

    return load_records(path, format, split, name=name, root=root, limit=limit)


def _processor(model: str | None) -> Any:
    from crossfuse.loading import check_source, embedded_directory, quiet_libraries

    quiet_libraries()
    from transformers import AutoProcessor

    if model is None:
        return AutoProcessor.from_pretrained(embedded_directory())
    check_source(model)
    return AutoProcessor.from_pretrained(model)


def _told(record: Record, number: int) -> str:
    lines = [f"{record.id} (row {number})"]
    for image in record.images:
        lines.append(f"  image  {image if isinstance(image, str) else _embedded(image)}")
    for video in record.videos:
        span = f"  {video.start or 0:g} to {video.end:g} s" if video.end is not None else ""
        lines.append(f"  video  {video.path}{span}")
    for message in record.messages:
        slots = "".join(f"[{part.type}]" for part in message.content if part.type != "text")
        text = " ".join(message.text.split())
        text = text if len(text) <= 400 else f"{text[:400]} … ({len(text)} characters)"
        lines.append(f"  {message.role:<9} {' '.join(filter(None, (slots, text)))}")
    return "\n".join(lines) + "\n"


def _embedded(image: Any) -> str:
    return f"{len(image):,} bytes" if isinstance(image, bytes) else f"{image.width} x {image.height} pixels"


def _print(report: DataReport, model: str) -> None:
    from crossfuse.data.check import FAULTS, histogram

    print(f"{report.source}: {report.format}")
    print(
        f"{report.rows:,} rows, {report.records:,} records ({report.without_images:,} of text alone), "
        f"{report.images:,} images, {report.videos:,} videos, {report.answers:,} answers"
    )
    for name, values in report.token_lengths().items():
        title = f"{name} tokens" if name != "total" else "all tokens"
        middle, high = sorted(values)[len(values) // 2], max(values)
        print(f"\n{title} a record for {model}: median {middle:,}, most {high:,}, {values.sum():,} in all")
        bins = histogram(values)
        most = max(count for _, _, count in bins)
        for low, top, count in (bin for bin in bins if bin[2]):
            label = f"{low:,}" if low == top else f"{low:,} - {top:,}"
            print(f"  {label:>17}  {'█' * -(-_BAR * count // most):<{_BAR}}  {count:,}")
    if report.notes:
        print("\nworth knowing")
        for note, count in report.notes.most_common():
            print(f"  {count:>7,}  {note}")
    print("\nfaults" if report.faults else "\nno faults")
    for kind in FAULTS:
        found = [fault for fault in report.faults if fault.kind == kind]
        if not found:
            continue
        print(f"  {len(found):>7,}  {kind}")
        for fault in found[:_SHOWN]:
            named = "" if not fault.id else f"row {fault.row} ({fault.id}): "
            print(f"           {named}{fault.reason}")
        if len(found) > _SHOWN:
            print(f"           and {len(found) - _SHOWN:,} more (--json lists all)")


class _Progress:
    """Rows seen so far, on one line of standard error."""

    def __init__(self, total: int) -> None:
        self.total, self.step = total, max(1, total // 200)

    def __call__(self, seen: int) -> None:
        if seen % self.step == 0 or seen == self.total:
            print(f"\r{seen:,} of {self.total:,} rows", end="\n" if seen == self.total else "", file=sys.stderr)

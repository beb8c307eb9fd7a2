"""One training or evaluation sample: images, videos and a conversation whose text parts and slots are apart.

An image slot is a part of its own (``{"type": "image"}``, ``{"type": "video"}``), so no string in a text can be taken
for one. The image slots of a record take its images in order, the video slots its videos.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from PIL import Image
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    ValidationInfo,
    field_validator,
    model_validator,
)

from crossfuse.data.images import open_image
from crossfuse.fusion import nearest

Role = Literal["system", "user", "assistant"]


def _decode_image(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"base64"}:
        return base64.b64decode(value["base64"], validate=True)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, str | bytes | Image.Image):
        return value
    raise ValueError(f"an image must be a path, bytes or a PIL image; got {type(value).__name__}")


def _encode_image(value: str | bytes | Image.Image) -> Any:
    if isinstance(value, Image.Image):
        buffer = io.BytesIO()
        value.save(buffer, format="PNG")
        value = buffer.getvalue()
    return value if isinstance(value, str) else {"base64": base64.b64encode(value).decode()}


ImageSource = Annotated[
    str | bytes | Image.Image,
    BeforeValidator(_decode_image),
    PlainSerializer(_encode_image, when_used="json"),
]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        fields = cls.__pydantic_fields__
        if isinstance(data, dict) and not data.keys() <= fields.keys():
            key = next(key for key in data if key not in fields)
            known = ", ".join(fields)
            raise ValueError(f"unknown key {key!r}{nearest(str(key), fields)}; known keys: {known}")
        return data


class TextPart(_Strict):
    """Words of a message."""

    type: Literal["text"] = "text"
    text: str


class ImagePart(_Strict):
    """A slot that takes the record's next image."""

    type: Literal["image"] = "image"


class VideoPart(_Strict):
    """A slot that takes the record's next video."""

    type: Literal["video"] = "video"


Part = Annotated[TextPart | ImagePart | VideoPart, Field(discriminator="type")]


class Video(_Strict):
    """A video file (or folder of frames) and the span of it that is meant.

    start, end: seconds from the first frame of the file; ``None`` is the file's own start or end. A bare path stands
    for the whole file.
    """

    path: str = Field(min_length=1)
    start: float | None = Field(default=None, ge=0)
    end: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _path_is_whole(cls, value: Any) -> Any:
        return {"path": os.fspath(value)} if isinstance(value, str | os.PathLike) else value

    @model_validator(mode="after")
    def _span_is_positive(self) -> Video:
        if self.end is not None and self.end <= (self.start or 0.0):
            raise ValueError(
                f"the span of {self.path} ends at {self.end:g} s, not after its start at {self.start or 0:g} s"
            )
        return self


class Message(_Strict):
    """What one side says: a role and content parts; a plain string stands for one text part."""

    role: Role
    content: tuple[Part, ...]

    @field_validator("content", mode="before")
    @classmethod
    def _string_is_text(cls, value: Any) -> Any:
        return [{"type": "text", "text": value}] if isinstance(value, str) else value

    @property
    def text(self) -> str:
        """The text parts joined, without image slots."""
        return "".join(part.text for part in self.content if isinstance(part, TextPart))


class Record(_Strict):
    """A sample: an id, its images and videos in the order of the slots, the conversation, and free JSON values.

    Raises ``pydantic.ValidationError`` (a ``ValueError``) for unknown keys, for more or fewer images or videos than
    slots, for an assistant's message with a slot, and for URLs, unless the context says ``{"allow_urls": True}``.
    """

    id: str = Field(min_length=1)
    images: tuple[ImageSource, ...] = ()
    videos: tuple[Video, ...] = ()
    messages: tuple[Message, ...] = Field(min_length=1)
    meta: dict[str, JsonValue] = {}

    @field_validator("images")
    @classmethod
    def _no_urls(cls, images: tuple[Any, ...], info: ValidationInfo) -> tuple[Any, ...]:
        if not (info.context or {}).get("allow_urls", False):
            for image in images:
                if isinstance(image, str) and "://" in image:
                    raise ValueError(f"image {image!r} is a URL; download it first, or allow URLs with allow_urls=True")
        return images

    @field_validator("videos")
    @classmethod
    def _no_video_urls(cls, videos: tuple[Video, ...], info: ValidationInfo) -> tuple[Video, ...]:
        if not (info.context or {}).get("allow_urls", False):
            for video in videos:
                if "://" in video.path:
                    raise ValueError(
                        f"video {video.path!r} is a URL; download it first, or allow URLs with allow_urls=True"
                    )
        return videos

    @model_validator(mode="after")
    def _slots_match(self) -> Record:
        parts = [part for message in self.messages for part in message.content]
        for name, kind, held in (("image", ImagePart, self.images), ("video", VideoPart, self.videos)):
            slots = sum(isinstance(part, kind) for part in parts)
            if slots != len(held):
                raise ValueError(f"record {self.id!r} has {slots} {name} slot(s) but {len(held)} {name}(s)")
        for message in self.messages:
            if message.role == "assistant" and not all(isinstance(part, TextPart) for part in message.content):
                raise ValueError(f"record {self.id!r}: an assistant's message cannot hold an image")
        return self

    @classmethod
    def of_question(
        cls,
        id: str,
        question: str,
        answer: str | None = None,
        images: Iterable[str | os.PathLike[str] | bytes | Image.Image] = (),
        **meta: JsonValue,
    ) -> Record:
        """One user turn (images first, then the question) and, where given, the answer; ``meta`` is kept beside it."""
        sources = tuple(images)
        content = [ImagePart() for _ in sources] + [TextPart(text=question)]
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
            meta = {"answer": answer, **meta}
        return cls(id=id, images=sources, messages=messages, meta=meta)  # type: ignore[arg-type]

    @property
    def answer(self) -> str | None:
        """The last message's text, where the assistant speaks last."""
        last = self.messages[-1]
        return last.text if last.role == "assistant" else None


def write_records(path: str | os.PathLike[str], records: Iterable[Record]) -> int:
    """Write records as JSON lines (under a temporary name, then renamed); returns their number.

    Paths stay paths; bytes and PIL images are embedded (PNG for PIL images).
    """
    target = Path(path)
    fresh = target.with_name(f".{target.name}.tmp")
    count = 0
    with fresh.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(record.model_dump_json() + "\n")
            count += 1
    fresh.replace(target)
    return count


def read_records(
    path: str | os.PathLike[str], root: str | os.PathLike[str] | None = None, allow_urls: bool = False
) -> Iterator[Record]:
    """Records of a JSON-lines file, one after the other; relative image paths are taken from ``root``.

    Raises ``ValueError`` naming file and line.
    """
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = Record.model_validate_json(line, context={"allow_urls": allow_urls})
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {first_reason(error)}") from error
            yield record if root is None else rooted(record, Path(root))


def rooted(record: Record, root: Path) -> Record:
    """The record with its relative paths taken from ``root``; URLs and embedded images stay."""
    images = tuple(
        str(root / image) if isinstance(image, str) and "://" not in image else image for image in record.images
    )
    videos = tuple(
        video if "://" in video.path else video.model_copy(update={"path": str(root / video.path)})
        for video in record.videos
    )
    return record.model_copy(update={"images": images, "videos": videos})


def first_reason(error: Exception) -> str:
    """The first fault that ``error`` tells, in one line; of pydantic's lists of faults the first entry."""
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"]))
    message = first["msg"].removeprefix("Value error, ")
    return f"{place}: {message}" if place else message


def check_images(records: Iterable[Record]) -> list[tuple[str, str]]:
    """``(record id, one-line reason)`` for every image that cannot be opened: meant to run before a training."""
    problems = []
    for record in records:
        for image in record.images:
            try:
                open_image(image)
            except (OSError, ValueError) as error:
                problems.append((record.id, str(error)))
    return problems

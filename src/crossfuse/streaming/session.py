"""`StreamSession`: text and frames go in as they come, captions come out, memory stays where it is.

    session = StreamSession(model, processor, max_text_tokens=1024)
    session.add_text("Describe what happens.\n")
    for time, image in frames:
        session.add_frame(image)
        print(time, "".join(session.generate()))

Each frame is encoded once; its keys and values are projected once per block, in the forward of the delimiter after it.
The last generated token waits and is forwarded together with the next frame, so a frame with n new tokens costs n
forwards.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from crossfuse.streaming.engine import Engine
from crossfuse.streaming.eviction import TextBudget
from crossfuse.streaming.sampling import Decoding, Sampler

if TYPE_CHECKING:
    from crossfuse.streaming.stream import EncodedFrame


class StreamSession:
    """One endless stream on a model fused with `Insertion` or `CrossAttention` (an unfused model is insertion).

    Args:
        model: a model that `crossfuse.fuse` takes, in eval mode. Sessions share it and leave nothing on it.
        processor: its processor.
        max_text_tokens: bound of the self-attention cache. The oldest tokens beyond ``sink_tokens`` are evicted in
            blocks of ``block_tokens`` and the kept keys rotated back, so memory and positions stay bounded for ever.
            With insertion, image tokens count too and images leave whole. None keeps everything, up to the model's
            largest position (ValueError there).
        delimiter: text after each frame; None is a newline. Cross-attention needs a text token between an image and
            what is generated, and between frames, or they would share a window; it costs one entry of the cache. ``""``
            leaves that to the caller's ``add_text``.
        decoding: how tokens are chosen; see `Decoding`.

    Raises ValueError where the fusion cannot stream, the bounds do not fit the model, or the delimiter has no token.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        *,
        max_text_tokens: int | None = None,
        sink_tokens: int = 4,
        block_tokens: int | None = None,
        delimiter: str | None = None,
        decoding: Decoding | None = None,
    ):
        self.engine = Engine(model, TextBudget(max_text_tokens, sink_tokens, block_tokens))
        self.processor, self.tokenizer = processor, processor.tokenizer
        self.decoding = decoding or Decoding()
        self.delimiter = "\n" if delimiter is None else delimiter
        self.delimiter_ids = self._tokens(self.delimiter) if self.delimiter else []
        if self.delimiter and not self.delimiter_ids:
            raise ValueError(f"the tokenizer has no token for the delimiter {self.delimiter!r}; give another delimiter")
        opening = self.tokenizer("").input_ids
        self._opening: list[int] = opening if opening == [self.tokenizer.bos_token_id] else []
        self.sampler = Sampler(self.decoding, self._never(), end_tokens(self.engine.model))
        self.stream = self.engine.new_stream()

    # ------------------------------------------------------------------ input
    def add_text(self, text: str | Sequence[int]) -> None:
        """Append text, or token ids. Special tokens written in it are recognised; a BOS that the tokenizer itself sets
        is put before the first text of the stream. ValueError where it holds the image placeholder."""
        ids = self._tokens(text) if isinstance(text, str) else [int(token) for token in text]
        if self.engine.placeholder in ids:
            raise ValueError("the text holds the placeholder of an image; give images with add_frame")
        if self.stream.is_new and isinstance(text, str) and ids[: len(self._opening)] != self._opening:
            ids = self._opening + ids
        self.stream.add_text(ids)

    def add_frame(self, image: Any) -> None:
        """Append an image, a PIL image or an (H, W, 3) uint8 array, and the delimiter. The vision tower runs once."""
        (frame,) = self.engine.encode(self.processor, [image])
        self.add_encoded(frame)

    def add_encoded(self, frame: EncodedFrame) -> None:
        """Append an image that `Engine.encode` has encoded, and the delimiter."""
        if self.stream.pending_frames and not self.stream.ends_with_image:
            self.forward()  # at most one frame waits, however many come without a question
        self.stream.add_frame(frame)
        self.stream.add_text(self.delimiter_ids)

    # ------------------------------------------------------------------ output
    def forward(self) -> Tensor:
        """Forward what waits -> (V,) logits of the next token. ValueError on an empty stream, or on an image at the end
        (cross-attention)."""
        if self.stream.pending:
            self.engine.flush([self.stream])
        if self.stream.logits is None:
            raise ValueError("the stream is empty; call add_text or add_frame first")
        return self.stream.logits

    def generate(self, max_new_tokens: int | None = None) -> Iterator[str]:
        """Pieces of the text that follows, as soon as each is complete; nothing where the model stays silent.

        Ends after ``max_new_tokens`` (default: the decoding's), an end token or silence. Stopping early is fine: what
        was generated so far belongs to the stream.
        """
        limit = self.decoding.max_new_tokens if max_new_tokens is None else max_new_tokens
        reader = PieceReader(self.tokenizer)
        for _ in range(limit):
            token = self.sampler(self.forward())
            going_on, piece = self.accept(token, reader)
            if piece:
                yield piece
            if not going_on:
                break

    def accept(self, token: int, reader: PieceReader) -> tuple[bool, str]:
        """Take a chosen token into the stream -> (whether the caption goes on, the text that it completes)."""
        self.stream.answered = True
        if self.sampler.is_silence(token):
            if self.decoding.keep_silence:
                self.stream.add_text([token])
            return False, ""
        self.stream.add_text([token])
        if self.sampler.is_stop(token):
            return False, ""
        return True, reader(token)

    # ------------------------------------------------------------------ state
    @property
    def text_tokens(self) -> int:
        """Text (and gist) tokens in the self-attention cache; those that wait are not in it yet."""
        return self.stream.cached_text_tokens

    @property
    def waiting_tokens(self) -> int:
        """Text tokens that the next forward takes along."""
        return self.stream.pending_text_tokens

    @property
    def next_position(self) -> int:
        """Position of the next token: with ``max_text_tokens`` never beyond it."""
        return self.stream.next_position

    @property
    def frames(self) -> int:
        """Frames given so far."""
        return self.stream.frames

    def memory(self) -> dict[str, int]:
        """Bytes by part: ``self_attention``, ``images`` and ``window_text`` (cross-attention), ``pending``."""
        return self.stream.memory()

    def reset(self) -> None:
        """Forget the stream; the next one starts as if the session were new."""
        self.stream = self.engine.new_stream()
        self.sampler.reset()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the whole state to one safetensors file, atomically."""
        from crossfuse.streaming.snapshot import write_session

        write_session(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Any, processor: Any) -> StreamSession:
        """The session as it was saved, on the same model. ValueError where fusion or shapes differ."""
        from crossfuse.streaming.snapshot import read_session

        return read_session(cls, path, model, processor)

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def _never(self) -> tuple[int, ...]:
        # A generated placeholder would be read as an image that is not there.
        pad = self.tokenizer.pad_token_id
        ends = end_tokens(self.engine.model)
        return tuple(self.engine.backbone.placeholder_ids(self.engine.body)) + (
            () if pad is None or pad in ends else (pad,)
        )


class PieceReader:
    """Token ids one by one -> text, held back while a character is incomplete. Special tokens are left out."""

    def __init__(self, tokenizer: Any):
        from tokenizers.decoders import DecodeStream

        self.tokenizer = tokenizer.backend_tokenizer
        self.stream = DecodeStream(skip_special_tokens=True)

    def __call__(self, token: int) -> str:
        return self.stream.step(self.tokenizer, token) or ""


def end_tokens(model: Any) -> tuple[int, ...]:
    """The model's own end-of-sequence ids."""
    end = getattr(model.generation_config, "eos_token_id", None)
    if end is None:
        end = getattr(model.config.get_text_config(), "eos_token_id", None)
    if end is None:
        return ()
    return tuple(end) if isinstance(end, (list, tuple)) else (int(end),)

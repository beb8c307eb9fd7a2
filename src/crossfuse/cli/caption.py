"""`crossfuse caption`: live captions of a video, written as they are made."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crossfuse.cli.fusion_options import chosen_fusion
from crossfuse.cli.model_options import DeviceOption, fuse_as_asked

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from crossfuse.streaming.captioner import FramePrompt
    from crossfuse.streaming.session import StreamSession
    from crossfuse.streaming.video import VideoFrame

PROMPT = "describe the image."
LAYOUTS = ("single", "turns", "stream")


def caption(
    context: typer.Context,
    video: Annotated[
        str, typer.Argument(help="Video file, folder of pictures, URL, or - for a pipe.", metavar="VIDEO")
    ],
    model: Annotated[
        str | None,
        typer.Option(help="Directory or hub id of a vision-language model.", show_default="the embedded model"),
    ] = None,
    fusion: Annotated[
        str | None, typer.Option(help="insertion or cross-attention.", show_default="as the model was saved")
    ] = None,
    fps: Annotated[float, typer.Option(help="Frames to caption a second of video.")] = 2.0,
    max_frames: Annotated[
        int | None, typer.Option(min=1, help="Most frames: spread over a file, the first ones of a pipe.")
    ] = None,
    max_pixels: Annotated[int, typer.Option(min=1, help="Shrink larger frames to this many pixels.")] = 504 * 504,
    out: Annotated[str, typer.Option(help="Caption file: x.srt, x.vtt, x.jsonl, or - for the screen.")] = "-",
    resume: Annotated[bool, typer.Option("--resume", help="Go on behind the last caption of --out.")] = False,
    burn: Annotated[Path | None, typer.Option(help="Also write the captioned frames as an MP4.")] = None,
    prompt: Annotated[str, typer.Option(help="What to say about the frames.")] = PROMPT,
    layout: Annotated[
        str,
        typer.Option(help="single: each frame on its own; turns: one conversation, a turn a frame; stream: ask once."),
    ] = "single",
    max_text_tokens: Annotated[int, typer.Option(min=0, help="Bound of the text cache; 0 keeps everything.")] = 1024,
    sink_tokens: Annotated[int, typer.Option(min=0, help="First tokens that are never evicted.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest caption of a frame, in tokens.")] = 32,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: said lately is said less.")] = 1.0,
    no_repeat_ngram: Annotated[int, typer.Option(min=0, help="No n-gram of this length twice; 0 is off.")] = 0,
    silence: Annotated[str | None, typer.Option(help="Token that the model was trained to say for nothing.")] = None,
    skip_repeats: Annotated[bool, typer.Option("--skip-repeats", help="Leave out a caption like the last.")] = False,
    device: DeviceOption = "auto",
) -> None:
    """Caption VIDEO frame by frame, in bounded memory, as it comes.

    What was captioned is on disk at once: a killed run leaves a valid file, and --resume goes on behind it.
    """
    chosen = chosen_fusion(context, fusion)
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}; got {layout!r}")
    from crossfuse.streaming.captions import caption_writer
    from crossfuse.streaming.video import read_video

    # The video is opened before the model is loaded: a typing error should not cost a minute.
    frames = _peeked(read_video(video, fps=fps, max_frames=max_frames, max_pixels=max_pixels))
    with contextlib.ExitStack() as files:
        files.callback(frames.close)
        writer: Any = files.enter_context(caption_writer(out, resume))
        burned: Any = None
        if burn is not None:
            from crossfuse.streaming.burn import BurnedVideo

            burned = files.enter_context(BurnedVideo(burn))
        session, words = _session(
            model,
            chosen,
            prompt,
            layout,
            {"max_text_tokens": max_text_tokens or None, "sink_tokens": sink_tokens},
            {
                "max_new_tokens": max_new_tokens,
                "repetition_penalty": repetition_penalty,
                "no_repeat_ngram": no_repeat_ngram,
            },
            silence,
            device,
        )
        if writer.resumed_at:
            print(f"crossfuse: going on at {writer.resumed_at:.2f} s", file=sys.stderr)
        later = (frame for frame in frames if frame.time >= writer.resumed_at - 1e-3)
        progress = _Progress(session, quiet=out == "-" and sys.stdout.isatty())
        try:
            _caption_all(session, later, words, 1 / fps, writer, burned, skip_repeats, progress)
        finally:
            progress.end(writer.count)
        if not progress.frames:
            print("crossfuse: no frame was left to caption", file=sys.stderr)


def _caption_all(
    session: StreamSession,
    frames: Iterable[VideoFrame],
    words: FramePrompt,
    interval: float,
    writer: Any,
    burned: Any,
    skip_repeats: bool,
    progress: _Progress,
) -> None:
    from crossfuse.streaming.captioner import captions_of

    last = None
    for said in captions_of(session, frames, words, interval):
        if not (skip_repeats and said.caption.text == last):
            writer.write(said.caption)
        last = said.caption.text
        if burned is not None:
            burned.write(said.caption, said.frame.image)
        progress.frame(said.caption.end, said.latency)


def _peeked(frames: Iterator[VideoFrame]) -> Any:
    """The same frames, the first one decoded now: what is no video is refused here."""
    first = next(frames)

    def again() -> Iterator[VideoFrame]:
        try:
            yield first
            yield from frames
        finally:
            frames.close()  # type: ignore[attr-defined]

    return again()


def _session(
    name: str | None,
    fusion: Any,
    prompt: str,
    layout: str,
    bounds: dict[str, Any],
    decoding: dict[str, Any],
    silence: str | None,
    device: str,
) -> tuple[StreamSession, FramePrompt]:
    from crossfuse.loading import load_model
    from crossfuse.streaming.captioner import stream_prompt, turn_prompt
    from crossfuse.streaming.sampling import Decoding
    from crossfuse.streaming.session import StreamSession

    network, processor = load_model(name, device)
    fuse_as_asked(network, fusion)
    if silence is not None:
        decoding["silence_token"] = _one_token(processor.tokenizer, silence)
    words = stream_prompt(prompt) if layout == "stream" else turn_prompt(processor, prompt, layout == "single")
    # In a turn the template's own words follow the image; a second delimiter would be out of place.
    delimiter = "" if words.after else None
    return StreamSession(network, processor, **bounds, delimiter=delimiter, decoding=Decoding(**decoding)), words


def _one_token(tokenizer: Any, text: str) -> int:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if len(ids) != 1:
        raise ValueError(f"--silence must be one token of this model; {text!r} is {len(ids)}")
    return int(ids[0])


@dataclasses.dataclass
class _Progress:
    """One line on standard error, rewritten; a summary with the real-time factor at the end."""

    session: StreamSession
    quiet: bool

    def __post_init__(self) -> None:
        self.start = time.perf_counter()
        self.shown = 0.0
        self.frames = 0
        self.busy = 0.0
        self.covered = 0.0

    def frame(self, video_time: float, latency: float) -> None:
        self.frames += 1
        self.busy += latency
        self.covered = video_time
        now = time.perf_counter()
        if self.quiet or not sys.stderr.isatty() or now - self.shown < 0.2:
            return
        self.shown = now
        line = (
            f"frame {self.frames}  {self.frames / (now - self.start):.1f} frames/s  {latency * 1000:.0f} ms  "
            f"{_megabytes(self.session)} of cache"
        )
        print(f"\r{line:<78}", end="", file=sys.stderr, flush=True)

    def end(self, captions: int) -> None:
        wall = time.perf_counter() - self.start
        if self.shown:
            print(file=sys.stderr)
        if not self.frames:
            return
        print(
            f"crossfuse: {self.frames} frames, {captions} captions in {wall:.1f} s: "
            f"{self.busy / self.frames * 1000:.0f} ms a frame, {_megabytes(self.session)} of cache, "
            f"real-time factor {wall / max(self.covered, 1e-9):.2f} (below 1 keeps up)",
            file=sys.stderr,
        )


def _megabytes(session: StreamSession) -> str:
    return f"{sum(session.memory().values()) / 2**20:.1f} MB"

"""Rendered frames without end through one bounded session: memory, positions and latency must stay where they are."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from crossfuse.streaming.benchmark import BOUND, Verdict
from crossfuse.streaming.sampling import Decoding
from crossfuse.streaming.session import StreamSession

SETTLED = 500  # frames after which nothing may grow


def rendered_frames() -> Iterator[Image.Image]:
    """Frames of unseen rendered clips, one clip after the other, for ever."""
    from crossfuse.data.clips import make_clip

    for number in itertools.count():
        for _, image in make_clip(number, "test").frames():
            yield image


def endless(
    frames: int, new_tokens: int = 2, progress: Callable[[int, int, float], None] | None = None
) -> list[Verdict]:
    """The embedded model with cross-attention over ``frames`` rendered frames, `BOUND` text tokens, beside the same
    stream without images (whatever else the machine does meets both).

    ``progress`` is called with (frame, resident bytes, step relative to the text-only one). Fewer than 2,000 frames
    settle after a quarter.
    """
    if frames < 40:
        raise ValueError(f"an endless stream needs at least 40 frames to compare its ends; got {frames}")
    import psutil

    from crossfuse.api import fuse, load_embedded
    from crossfuse.fusions.cross_attention import CrossAttention

    model, processor = load_embedded()
    fuse(model, CrossAttention())
    decoding = Decoding(max_new_tokens=new_tokens)
    seeing, text = (StreamSession(model, processor, max_text_tokens=BOUND, decoding=decoding) for _ in range(2))
    process, largest = psutil.Process(), 0
    relative: list[float] = []
    resident: list[int] = []
    source = rendered_frames()
    for number in range(frames):
        image = next(source)
        start = time.perf_counter()
        seeing.add_frame(image)
        _say(seeing)
        middle = time.perf_counter()
        text.stream.add_text(text.delimiter_ids)
        _say(text)
        relative.append((middle - start) / (time.perf_counter() - middle))
        resident.append(process.memory_info().rss)
        largest = max(largest, seeing.next_position)
        if progress is not None:
            progress(number + 1, resident[-1], relative[-1])
    settled = min(SETTLED, frames // 4)
    growth = max(resident[-settled:]) / resident[settled] - 1
    late = statistics.median(relative[-settled:]) / statistics.median(relative[settled : 2 * settled])
    difference = dependence(seeing, model, processor)
    return [
        Verdict(f"growth of resident memory after frame {settled}", round(growth, 4), "<= 0.02", growth <= 0.02),
        Verdict(f"step, last {settled} / frames {settled}-{2 * settled}", round(late, 3), "<= 1.1", late <= 1.1),
        Verdict("largest position", largest, f"< {BOUND + 1}", largest <= BOUND),
        Verdict("logits moved by the last frame's pixels", round(difference, 4), "> 0.001", difference > 0.001),
    ]


def _say(session: StreamSession) -> None:
    for _ in session.generate():
        pass
    session.forward()


def dependence(session: StreamSession, model: Any, processor: Any) -> float:
    """How far two different last frames move the logits of the next word."""
    frames = rendered_frames()
    logits = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stream.safetensors"
        session.save(path)
        for image in (next(frames), next(itertools.islice(frames, 30, None))):
            copy = StreamSession.load(path, model, processor)
            copy.add_frame(image)
            logits.append(copy.forward())
    return float((logits[0] - logits[1]).abs().max())

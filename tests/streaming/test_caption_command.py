"""`crossfuse caption`: captions on disk as they are made, whatever happens to the source or the process."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from crossfuse.cli.caption import caption
from crossfuse.cli.fusion_options import FusionCommand
from crossfuse.data.scenes import make_scene, render
from crossfuse.streaming.captions import caption_writer
from crossfuse.streaming.video import read_video

av = pytest.importorskip("av")
srt = pytest.importorskip("srt")

app = typer.Typer()
app.command(cls=FusionCommand)(caption)
SHORT = ("--max-new-tokens", "6")


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """Six seconds of rendered scenes, another one each second."""
    path = tmp_path_factory.mktemp("clips") / "scenes.mp4"
    with av.open(str(path), "w", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 96, 96, "yuv420p"
        for number in range(60):
            frame = av.VideoFrame.from_image(render(make_scene(number // 10, "test")).resize((96, 96)))
            frame.pts, frame.time_base = number, Fraction(1, 10)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def run(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def cues(path):
    return list(srt.parse(path.read_text(encoding="utf-8"), ignore_errors=False))


def remuxed(clip, path, offset=0, options=None):
    """The same packets in another container, ``offset`` seconds later."""
    with av.open(str(clip)) as source, av.open(str(path), "w", options=options or {}) as container:
        stream = container.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None:
                shift = round(offset / packet.time_base)
                packet.pts, packet.dts, packet.stream = packet.pts + shift, packet.dts + shift, stream
                container.mux(packet)


def test_captions_of_a_clip(clip, tmp_path):
    out = tmp_path / "a.srt"
    result = run(clip, "--fps", 2, "--out", out, "--max-frames", 5, *SHORT)
    assert [c.start.total_seconds() for c in cues(out)] == [0.0, 1.5, 3.0, 4.0, 5.5]
    assert [c.end.total_seconds() for c in cues(out)] == [0.5, 2.0, 3.5, 4.5, 6.0]
    assert all(c.content for c in cues(out))
    assert "5 frames, 5 captions" in result.stderr
    assert "real-time factor" in result.stderr


def test_screen_and_a_chosen_fusion(clip):
    result = run(clip, "--fusion", "cross-attention", "--every", 2, "--max-frames", 2, *SHORT)
    assert "weights that this model was never trained with" in result.stderr
    assert all(line.startswith("00:00:0") for line in result.stdout.splitlines())


@pytest.mark.parametrize("layout", ["turns", "single", "stream"])
def test_resume_goes_on_behind_the_last_caption(layout, clip, tmp_path):
    out = tmp_path / "a.srt"
    common = (clip, "--fps", 1, "--out", out, "--layout", layout, *SHORT)
    run(*common, "--max-frames", 3)
    before = out.read_bytes()
    with pytest.raises(FileExistsError, match="--resume"):
        run(*common)
    assert out.read_bytes() == before
    out.write_bytes(before + b"4\n00:00:03,0")  # cut by a crash
    run(*common, "--resume")
    assert out.read_bytes().startswith(before)
    assert [c.index for c in cues(out)] == list(range(1, len(cues(out)) + 1))
    starts = [c.start.total_seconds() for c in cues(out)]
    assert starts == sorted(set(starts))
    assert set(starts) <= {0.0, 1.0, 2.0, 3.0, 4.0, 5.0}
    if layout != "stream":  # the package's model is not trained on streams and may stay silent there
        assert starts[-1] == 5.0


def test_truncated_clip_keeps_what_was_captioned(clip, tmp_path):
    cut = tmp_path / "cut.mp4"
    cut.write_bytes(clip.read_bytes()[: clip.stat().st_size * 2 // 3])
    out = tmp_path / "a.srt"
    with pytest.raises(ValueError, match=r"cut\.mp4 ends inside a frame or is damaged"):
        run(cut, "--fps", 1, "--out", out, *SHORT)
    assert 2 <= len(cues(out)) < 6


def test_pipe_that_closes_inside_a_frame_keeps_what_was_captioned(clip, tmp_path, monkeypatch):
    piped = tmp_path / "piped.mp4"
    remuxed(clip, piped, options={"movflags": "frag_keyframe+empty_moov"})
    data = piped.read_bytes()
    stdin = SimpleNamespace(buffer=io.BytesIO(data[: len(data) * 2 // 3]))  # the runner has a standard input of its own
    monkeypatch.setattr("crossfuse.streaming.video.sys", SimpleNamespace(stdin=stdin))
    out = tmp_path / "a.srt"
    with pytest.raises(ValueError, match=r"standard input (ends inside a frame|breaks off)") as caught:
        run("-", "--fps", 1, "--out", out, *SHORT)
    assert "\n" not in str(caught.value)
    assert 2 <= len(cues(out)) < 6


def test_v2_first_caption_of_a_clip_with_a_late_clock_is_at_zero(clip, tmp_path):
    late = tmp_path / "late.mkv"
    remuxed(clip, late, offset=5)
    out = tmp_path / "a.srt"
    run(late, "--fps", 1, "--max-frames", 2, "--out", out, *SHORT)
    assert [round(cue.start.total_seconds(), 2) for cue in cues(out)] == [0.0, 5.0]


def test_most_frames_are_spread_over_the_clip(clip, tmp_path):
    out = tmp_path / "a.jsonl"
    run(clip, "--fps", 2, "--max-frames", 3, "--out", out, *SHORT)
    assert [json.loads(line)["start"] for line in out.read_text().splitlines()] == [0.0, 3.0, 5.5]


def test_mistakes_are_found_before_the_model_is_loaded(clip, tmp_path, monkeypatch):
    monkeypatch.setattr("crossfuse.load_embedded", lambda: pytest.fail("the model was loaded"), raising=False)
    (tmp_path / "text.mp4").write_bytes(b"not a video")
    (tmp_path / "folder.srt").mkdir()
    for arguments, message in [
        ((tmp_path / "none.mp4",), "no such file or folder"),
        ((tmp_path / "text.mp4",), "is not a video that can be read"),
        ((tmp_path,), "holds no picture|is not a video"),
        ((clip, "--out", tmp_path / "none" / "a.srt"), "no such folder"),
        ((clip, "--out", tmp_path / "a.txt"), "got '.*a.txt'"),
        ((clip, "--burn", tmp_path / "none" / "a.mp4"), "no such folder"),
        ((clip, "--out", tmp_path / "folder.srt"), "folder.srt"),
        ((clip, "--layout", "turn"), "single, turns, stream; got 'turn'"),
        ((clip, "--fps", -1), "fps must be above 0; got -1"),
    ]:
        with pytest.raises((ValueError, OSError), match=message):
            run(*arguments)


def test_other_mistakes(clip):
    for arguments, message in [
        (("--max-text-tokens", 5), "max_text_tokens must be at least 6"),
        (("--silence", "a red circle"), "must be one token"),
        (("--prompt", " "), "the prompt is empty"),
        (("--fusion", "text-anchors"), "text-anchors decides over a whole prompt"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(clip, *arguments)


def test_burned_video_shows_the_captions(clip, tmp_path):
    burned = tmp_path / "b.mp4"
    run(clip, "--fps", 1, "--out", tmp_path / "a.vtt", "--burn", burned, *SHORT)
    frames = list(read_video(burned))
    assert [round(f.time, 2) for f in frames] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]  # the last one is shown to its end
    originals = list(read_video(clip, fps=1))
    for frame, original in zip(frames, originals, strict=False):
        size = frame.image.size
        shown, plain = (np.asarray(i.resize(size)).astype(int) for i in (frame.image, original.image))
        top, bottom = np.abs(shown - plain)[: size[1] // 3], np.abs(shown - plain)[-size[1] // 10 :]
        assert bottom.mean() > 4 * top.mean()


@pytest.mark.slow
def test_killed_run_leaves_a_valid_file(clip, tmp_path):
    out = tmp_path / "a.srt"
    code = (
        "import sys, typer\n"
        "from crossfuse.cli.caption import caption\n"
        "from crossfuse.cli.fusion_options import FusionCommand\n"
        "app = typer.Typer()\n"
        "app.command(cls=FusionCommand)(caption)\n"
        "app()\n"
    )
    arguments = [str(clip), "--fps", "10", "--out", str(out), *SHORT]
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stderr=subprocess.DEVNULL)
    end = time.monotonic() + 120
    while time.monotonic() < end and (not out.exists() or out.read_bytes().count(b"-->") < 3):
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = out.read_bytes()
    assert len(cues(out)) >= 3
    with caption_writer(str(out), resume=True):
        pass
    assert out.read_bytes() == before


def test_folder_of_equal_pictures_and_repeats(tmp_path):
    for number in range(3):
        render(make_scene(1, "test")).save(tmp_path / f"{number}.png")
    every, once = tmp_path / "every.jsonl", tmp_path / "once.jsonl"
    run(tmp_path, "--fps", 1, "--out", every, *SHORT)
    run(tmp_path, "--fps", 1, "--out", once, "--skip-repeats", *SHORT)
    assert len(every.read_text().splitlines()) == 3
    assert every.read_text().startswith(once.read_text())
    assert len(once.read_text().splitlines()) == 1

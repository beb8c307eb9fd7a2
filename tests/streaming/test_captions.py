"""Caption files: valid by parsers that are not ours, whole after a kill, resumable."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from crossfuse.streaming.captions import Caption, JsonlWriter, SrtWriter, VttWriter, caption_writer, clock, parse_time

SAID = [
    Caption(0.0, 0.5, "a red circle"),
    Caption(0.5, 1.0, "two lines\n\nand <b>an & entity</b> --> here"),
    Caption(3599.9996, 3661.25, "größer als 你好"),
]


def write(path, captions, **options):
    with caption_writer(str(path), **options) as writer:
        for caption in captions:
            writer.write(caption)
    return path


def test_srt_by_another_parser(tmp_path):
    srt = pytest.importorskip("srt")
    path = write(tmp_path / "a.srt", SAID)
    cues = list(srt.parse(path.read_text(encoding="utf-8"), ignore_errors=False))
    assert [cue.index for cue in cues] == [1, 2, 3]
    assert [cue.start.total_seconds() for cue in cues] == [0.0, 0.5, 3600.0]
    assert [cue.end.total_seconds() for cue in cues] == [0.5, 1.0, 3661.25]
    assert [cue.content for cue in cues] == [
        "a red circle",
        "two lines\nand <b>an & entity</b> -> here",
        "größer als 你好",
    ]


def test_vtt_by_another_parser(tmp_path):
    webvtt = pytest.importorskip("webvtt")
    path = write(tmp_path / "a.vtt", SAID)
    cues = list(webvtt.read(path))
    assert [cue.start for cue in cues] == ["00:00:00.000", "00:00:00.500", "01:00:00.000"]
    assert [cue.end for cue in cues][-1] == "01:01:01.250"
    assert cues[1].raw_text == "two lines\nand &lt;b&gt;an &amp; entity&lt;/b&gt; --&gt; here"


def test_jsonl_keeps_the_text_as_it_was(tmp_path):
    path = write(tmp_path / "a.jsonl", SAID)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["text"] for line in lines] == [caption.text for caption in SAID]
    assert lines[2] == {"start": 3600.0, "end": 3661.25, "text": "größer als 你好"}


@pytest.mark.parametrize("suffix", [".srt", ".vtt", ".jsonl"])
def test_resuming_removes_a_cut_cue_and_goes_on(suffix, tmp_path):
    whole = write(tmp_path / f"whole{suffix}", SAID).read_bytes()
    two = len(write(tmp_path / f"two{suffix}", SAID[:2]).read_bytes())
    for cut in range(two, len(whole)):
        path = tmp_path / f"cut{suffix}"
        path.write_bytes(whole[:cut])
        with caption_writer(str(path), resume=True) as writer:
            assert writer.count == 2
            assert writer.resumed_at == 1.0
            writer.write(SAID[2])
        assert path.read_bytes() == whole
    (tmp_path / f"cut{suffix}").write_bytes(whole[:5])  # not even the first cue
    with caption_writer(str(tmp_path / f"cut{suffix}"), resume=True) as writer:
        assert writer.count == 0


@pytest.mark.parametrize("suffix", [".srt", ".vtt", ".jsonl"])
def test_killed_process_leaves_whole_cues(suffix, tmp_path):
    path = tmp_path / f"live{suffix}"
    code = (
        "import sys, time\n"
        "from crossfuse.streaming.captions import Caption, caption_writer\n"
        "writer = caption_writer(sys.argv[1])\n"
        "for n in range(10**6):\n"
        "    writer.write(Caption(n, n + 1, f'caption {n}'))\n"
        "    time.sleep(0.001)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)])
    end = time.monotonic() + 60
    while time.monotonic() < end and not (path.exists() and path.stat().st_size > 1000):
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = path.read_bytes()
    with caption_writer(str(path), resume=True) as writer:
        assert writer.count > 10
        assert writer.resumed_at == writer.count
    assert path.read_bytes() == before  # nothing had to be cut


def test_blank_captions_are_not_written(tmp_path):
    path = write(tmp_path / "a.srt", [Caption(0, 1, " \n "), Caption(1, 2, "now")])
    assert path.read_text().startswith("1\n00:00:01,000")


def test_errors(tmp_path):
    with pytest.raises(ValueError, match=r"\.srt, \.vtt, \.jsonl or '-'; got 'x.txt'"):
        caption_writer("x.txt")
    with pytest.raises(ValueError, match="standard output cannot be read again"):
        caption_writer("-", resume=True)
    write(tmp_path / "a.srt", SAID)
    with pytest.raises(FileExistsError, match="--resume"):
        caption_writer(str(tmp_path / "a.srt"))
    with pytest.raises(FileNotFoundError, match="no such folder"):
        caption_writer(str(tmp_path / "none" / "a.srt"))
    for kind, suffix in ((SrtWriter, ".srt"), (VttWriter, ".vtt"), (JsonlWriter, ".jsonl")):
        path = tmp_path / f"other{suffix}"
        path.write_text("Dear diary,\n\nnothing here is a caption.\n\n")
        with pytest.raises(ValueError, match=r"give another --out|no caption"):
            kind(path, resume=True)
        assert path.read_text().startswith("Dear diary")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_is_an_error_of_one_line(tmp_path):
    (tmp_path / "full.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"), JsonlWriter(tmp_path / "full.jsonl", resume=True) as writer:
        writer.write(SAID[0])


@pytest.mark.parametrize("seconds", [0.0, 0.0004, 59.9996, 3599.9996, 360000.123])
def test_clock_rounds_to_milliseconds(seconds):
    text = clock(seconds, ",")
    assert parse_time(text) == pytest.approx(seconds, abs=5.1e-4)
    assert int(text.split(":")[1]) < 60
    assert float(text.split(":")[2].replace(",", ".")) < 60

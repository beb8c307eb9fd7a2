"""LiveCC: whole videos and cut clips give the same frames and words."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from format_files import LIVECC_WORDS, level_at, livecc_row, write_livecc, write_video

from crossfuse.data.formats import load_records
from crossfuse.data.formats.livecc import TimedWord, read_livecc, timed_words
from crossfuse.data.videos import VideoSampling, read_clip

START, END = 5.5, 9.5


def shown(record, fps=2.0):
    """(time, grey level) of the frames, and the words, of a record."""
    frames = read_clip(record.videos[0], VideoSampling(fps=fps))
    return [(time, round(float(np.asarray(image).mean()))) for time, image in frames], timed_words(record)


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    """Folders of the same annotation with the whole video, and with the cut clip in two places."""
    made = {}
    for name in ("whole", "cut", "cut-elsewhere"):
        folder = tmp_path_factory.mktemp(name)
        if name == "whole":
            write_video(folder / "video/youtube/ID_x-1.mp4", 12)
        else:
            place = "video/youtube" if name == "cut" else "videos/part_3"
            write_video(folder / place / f"ID_x-1_{START:.2f}-{END:.2f}_2.0fps.mp4", END - START, first=START)
        made[name] = write_livecc(folder, [livecc_row("video/youtube/ID_x-1.mp4", START, END, LIVECC_WORDS[:4])])
    return made


def test_s4_both_layouts_give_the_same_frames_and_words(layouts):
    frames, words = {}, {}
    for name, path in layouts.items():
        (record,) = read_livecc(path)
        frames[name], words[name] = shown(record)
        assert record == load_records(path)[0]
        assert (record.meta["video_start"], record.meta["video_end"]) == (START, END)
    expected = [(k / 2, level_at(START + k / 2)) for k in range(8)]
    for name in layouts:
        assert [time for time, _ in frames[name]][:8] == [time for time, _ in expected]
        for (_, level), (_, wanted) in zip(frames[name], expected, strict=False):
            assert abs(level - wanted) <= 3  # lossy video
    assert words["whole"] == words["cut"] == words["cut-elsewhere"]


def test_s4_words_count_from_the_start_of_the_span_and_keep_their_order(layouts):
    (record,) = read_livecc(layouts["cut"])
    assert timed_words(record) == [
        TimedWord(0.5, 0.9, "Hello"),
        TimedWord(0.9, 0.9, "and"),
        TimedWord(0.9, 0.9, "welcome"),
        TimedWord(1.7, 2.1, "back"),
    ]
    assert record.answer == "Hello and welcome back"
    assert record.messages[0].text == "Please describe."
    assert record.meta["title"] == "A match"
    assert record.meta["previous"] == "before that"


def test_s4_an_end_beyond_the_file_is_clipped_with_a_warning(tmp_path):
    write_video(tmp_path / "v.mp4", 8)
    path = write_livecc(tmp_path, [livecc_row("v.mp4", 5.0, 30.0, LIVECC_WORDS)], seeks=False)
    with pytest.warns(UserWarning, match=r"v\.mp4 is 8\.00 s long but its span ends at 30\.00 s; clipped to the file"):
        (record,) = read_livecc(path)
    assert record.videos[0].end == pytest.approx(8.0, abs=0.05)
    assert timed_words(record)[-1] == TimedWord(3.0, 3.0, "late")
    data = load_records(path)
    with pytest.warns(UserWarning, match="clipped"):
        data[0]
    assert data.notes == {
        "span ends after the video, clipped": 1,
        "words after the end of the span, moved to it": 1,
    }


def test_s4_a_clip_longer_than_its_span_is_shown_up_to_its_end(tmp_path):
    write_video(tmp_path / "v_5.00-7.00_2.0fps.mp4", 6, first=5.0)
    path = write_livecc(tmp_path, [livecc_row("video/v.mp4", 5.0, 7.0, LIVECC_WORDS[:2])])
    (record,) = read_livecc(path)
    assert [time for time, _ in shown(record)[0]] == [0.0, 0.5, 1.0, 1.5, 2.0]


def test_s4_missing_files_are_named_and_listed(tmp_path):
    from crossfuse.data.check import check_data

    write_video(tmp_path / "here.mp4", 3)
    rows = [livecc_row(f"{name}.mp4", 0.5, 2.5, [[1.0, 1.2, name]]) for name in ("gone", "here", "away")]
    path = write_livecc(tmp_path, rows)
    with pytest.raises(FileNotFoundError, match=r"neither .*gone\.mp4 nor gone_0\.50-2\.50_\*fps\.mp4 below"):
        next(read_livecc(path))
    assert [record.answer for record in read_livecc(path, missing="skip")] == ["here"]
    assert [record.answer for record in load_records(path, on_error="skip")] == ["here"]
    report = check_data(load_records(path))
    assert [(fault.kind, fault.row) for fault in report.faults] == [("missing file", 0), ("missing file", 2)]


@pytest.mark.parametrize("codec", ["mpeg4", "mpeg2video"])
def test_v2_a_container_that_starts_late_is_counted_from_its_first_frame(tmp_path, codec):
    write_video(tmp_path / "late.ts", 4, fps=25, codec=codec, clock=5.0)
    row = livecc_row("late.ts", 1.0, 3.0, [[1.5, 1.6, "x"]])
    (record,) = read_livecc(write_livecc(tmp_path, [row]))
    frames, _ = shown(record)
    assert [time for time, _ in frames] == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert abs(frames[1][1] - level_at(1.5)) <= 3


def test_the_other_files_of_the_collection(tmp_path):
    row = [
        {"role": "user", "content": [{"type": "image", "image": "a.jpg"}, {"type": "text", "text": "what?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "that"}]},
    ]
    (record,) = read_livecc(write_livecc(tmp_path, [row]))
    assert record.images == (str(tmp_path / "a.jpg"),)
    assert (record.messages[0].text, record.answer, timed_words(record)) == ("what?", "that", [])


def test_a_folder_that_grew_is_looked_at_again_by_a_new_root(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_livecc(tmp_path / name, [livecc_row("v.mp4", 0.0, 1.0, [[0.1, 0.2, "x"]])])
    write_video(tmp_path / "a/v_0.00-1.00_2.0fps.mp4", 1)
    shutil.copy(tmp_path / "a/v_0.00-1.00_2.0fps.mp4", tmp_path / "b")
    for name in ("a", "b"):
        (record,) = read_livecc(tmp_path / name / "live_whisperx_with_seeks.jsonl")
        assert record.videos[0].path.startswith(str(tmp_path / name))

"""Frames from files, pipes, folders and iterables; nothing knows how long a stream is."""

from __future__ import annotations

import contextlib
import gc
import io
import subprocess
import sys
from fractions import Fraction

import numpy as np
import psutil
import pytest
from PIL import Image

from crossfuse.streaming.video import VideoError, fitted, padded, read_video

av = pytest.importorskip("av")


def clip(path, times, size=(64, 48), codec="mpeg4", format=None, rotation=0, offset=0.0, options=None):
    """A clip whose frames show their own number as grey (10 each), with a red corner at the top left."""
    base = Fraction(1, 1000)
    with av.open(str(path), "w", format=format, options=options or {}) as container:
        stream = container.add_stream(codec, rate=1000)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.time_base = base
        if rotation:
            stream.set_display_rotation(rotation)
        for number, time in enumerate(times):
            pixels = np.full((size[1], size[0], 3), number * 10 % 250, np.uint8)
            pixels[:12, :12] = (255, 0, 0)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = round((time + offset) * 1000), base
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def every(step, count):
    return [step * number for number in range(count)]


def grey(frame):
    return round(float(np.asarray(frame.image)[-8:, -8:].mean()) / 10)


def test_one_frame_for_each_interval(tmp_path):
    path = clip(tmp_path / "a.mp4", every(0.1, 20))
    frames = list(read_video(path, fps=2))
    assert [round(f.time, 3) for f in frames] == [0.0, 0.5, 1.0, 1.5]
    assert [grey(f) for f in frames] == [0, 5, 10, 15]
    assert len(list(read_video(path))) == 20


@pytest.mark.parametrize("name", ["a.mkv", "a.ts", "a.mp4"])
def test_v2_times_count_from_the_first_frame(name, tmp_path):
    """A clip cut out of a longer one keeps its clock: it starts at 5 s."""
    path = clip(tmp_path / name, every(0.1, 20), offset=5.0)
    frames = list(read_video(path, fps=2))
    assert [round(f.time, 2) for f in frames] == [0.0, 0.5, 1.0, 1.5]
    assert [grey(f) for f in frames] == [0, 5, 10, 15]


def test_variable_frame_rate(tmp_path):
    times = [0.0, 0.04, 0.08, 1.3, 1.31, 1.9, 2.0, 5.2]
    frames = list(read_video(clip(tmp_path / "vfr.mkv", times), fps=2))
    assert [round(f.time, 2) for f in frames] == [0.0, 1.3, 1.9, 2.0, 5.2]
    assert [grey(f) for f in frames] == [0, 3, 5, 6, 7]


@pytest.mark.parametrize(("count", "step", "fps"), [(4, 0.1, 1), (1, 0.1, 2), (1, 0.1, 0.01)])
def test_v5_short_clips_give_at_least_one_frame(count, step, fps, tmp_path):
    frames = list(read_video(clip(tmp_path / "short.mp4", every(step, count)), fps=fps, max_frames=16))
    assert [f.time for f in frames] == [0.0]


def test_v5_fewer_frames_than_asked_for_and_odd_counts(tmp_path):
    assert len(list(read_video(clip(tmp_path / "a.mp4", every(0.1, 9)), max_frames=16))) == 9
    for count in (1, 7, 8):
        frames = list(read_video(clip(tmp_path / f"{count}.mp4", every(0.1, count))))
        pairs = padded(frames, 2)
        assert len(pairs) // 2 == -(-count // 2)
        assert pairs[:count] == frames
        assert all(frame is frames[-1] for frame in pairs[count:])
    with pytest.raises(ValueError, match="at least 1 frame"):
        padded([], 2)


def test_most_frames_of_a_finite_source_are_spread_over_it(tmp_path):
    """A file, a folder and a list are thinned, first and last frame kept; a live source ends after so many."""
    path = clip(tmp_path / "a.mp4", every(0.1, 21))
    assert [grey(f) for f in read_video(path, max_frames=5)] == [0, 5, 10, 15, 20]
    assert [round(f.time, 3) for f in read_video(path, max_frames=5)] == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert [round(f.time, 3) for f in read_video(path, fps=5, max_frames=3)] == [0.0, 1.0, 2.0]
    assert [grey(f) for f in read_video(path, max_frames=1)] == [0]
    assert [grey(f) for f in read_video(path, max_frames=99)] == list(range(21))
    images = [(n / 2, Image.new("RGB", (8, 8), (n, 0, 0))) for n in range(9)]
    assert [f.image.getpixel((0, 0))[0] for f in read_video(images, max_frames=3)] == [0, 4, 8]
    assert [f.image.getpixel((0, 0))[0] for f in read_video(iter(images), max_frames=3)] == [0, 1, 2]
    with open(path, "rb") as file:
        assert [grey(f) for f in read_video(file, max_frames=3)] == [0, 1, 2]


def test_thinned_frames_of_a_broken_file_end_with_its_error(tmp_path):
    path = clip(tmp_path / "a.mp4", every(0.1, 20), options={"movflags": "faststart"})
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 3 // 4])
    got = []
    with pytest.raises(VideoError, match="ends inside a frame or is damaged"):
        got.extend(read_video(path, max_frames=4))
    assert len(got) == 4


def test_a_span_counts_from_its_first_frame(tmp_path):
    path = clip(tmp_path / "a.mp4", every(0.1, 21))
    frames = list(read_video(path, fps=2, start=0.5, end=1.5))
    assert [grey(f) for f in frames] == [5, 10]
    assert [round(f.time, 3) for f in frames] == [0.0, 0.5]
    with pytest.raises(ValueError, match=r"ends after its start; got 2.0 to 1.0"):
        read_video(path, start=2.0, end=1.0)
    with pytest.raises(VideoError, match="holds no frame"):
        list(read_video(path, start=60.0))


@pytest.mark.parametrize(("rotation", "corner"), [(90, (-4, 4)), (-90, (4, -4)), (180, (-4, -4))])
def test_rotation_of_the_metadata_is_applied(rotation, corner, tmp_path):
    (frame, *_) = read_video(clip(tmp_path / "r.mp4", every(0.1, 3), rotation=rotation))
    assert frame.image.size == ((64, 48) if rotation == 180 else (48, 64))
    red, green, _ = np.asarray(frame.image)[corner].astype(int)
    assert red > 200
    assert green < 60


def test_large_frames_are_shrunk_with_their_aspect(tmp_path):
    (frame,) = read_video(clip(tmp_path / "big.mp4", [0.0], size=(640, 320)), max_pixels=5000)
    assert frame.image.size == (100, 50)
    assert fitted(64, 48, 504 * 504) == (64, 48)
    assert fitted(1000, 1, 10) == (100, 1)
    assert fitted(1920, 1080, None) == (1920, 1080)
    assert next(read_video([Image.new("RGB", (640, 320))], max_pixels=5000)).image.size == (100, 50)


def test_folder_of_pictures_in_the_order_of_their_numbers(tmp_path):
    for number in (10, 9, 100, 1):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"frame{number}.png")
    (tmp_path / "notes.txt").write_text("no picture")
    frames = list(read_video(tmp_path, fps=2))
    assert [f.image.getpixel((0, 0))[0] for f in frames] == [1, 9, 10, 100]
    assert [f.time for f in frames] == [0.0, 0.5, 1.0, 1.5]
    assert [f.time for f in read_video(tmp_path, frame_rate=4, fps=2)] == [0.0, 0.5]


def test_iterable_of_pairs_or_images_is_read_one_by_one():
    taken = []

    def source():
        for number in range(10**9):
            taken.append(number)
            yield 7.0 + number / 10, Image.new("RGB", (8, 8))

    frames = read_video(source(), fps=2)
    assert [round(next(frames).time, 3) for _ in range(3)] == [0.0, 0.5, 1.0]
    assert taken[-1] == 10
    arrays = [np.zeros((8, 8, 3), np.uint8)] * 3
    assert [f.time for f in read_video(arrays, frame_rate=10)] == [0.0, 0.1, 0.2]


def test_clock_that_jumps_back_never_goes_backwards():
    times = [f.time for f in read_video([(t, Image.new("RGB", (8, 8))) for t in (3.0, 4.0, 3.5, 5.0)])]
    assert times == [0.0, 1.0, 1.0, 2.0]


def test_source_is_closed_when_the_reader_stops_early():
    state = []

    def source():
        try:
            while True:
                yield 0.0, Image.new("RGB", (8, 8))
        finally:
            state.append("closed")

    frames = read_video(source())
    next(frames)
    frames.close()
    assert state == ["closed"]


def read_pipe(data, *arguments):
    """Read standard input in another process: (frames, error)."""
    code = (
        "import sys\n"
        "from crossfuse.streaming.video import read_video\n"
        "count = 0\n"
        "try:\n"
        "    for frame in read_video('-'):\n"
        "        count += 1\n"
        "        print(count, flush=True)\n"
        "except ValueError as error:\n"
        "    print(error, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True)
    lines = done.stdout.decode().split()
    return int(lines[-1]) if lines else 0, done.stderr.decode().strip()


def test_pipe(tmp_path):
    path = clip(tmp_path / "a.ts", every(0.1, 20), format="mpegts")
    assert read_pipe(path.read_bytes()) == (20, "")
    fragmented = clip(tmp_path / "f.mp4", every(0.1, 40), options={"movflags": "frag_keyframe+empty_moov"})
    whole = fragmented.read_bytes()
    assert read_pipe(whole) == (40, "")
    count, error = read_pipe(whole[: len(whole) * 5 // 8])
    assert 0 < count < 40
    assert "\n" not in error
    assert "standard input breaks off after" in error or "ends inside a frame" in error
    count, error = read_pipe(b"")
    assert count == 0
    assert "MPEG-TS, Matroska or fragmented MP4" in error


def test_v3_file_object_without_a_length(tmp_path):
    """Nothing but ``read``: captions could be made before the source ends."""
    data = clip(tmp_path / "a.ts", every(0.1, 200), format="mpegts").read_bytes()
    consumed = [0]

    class Live:
        def read(self, size):
            part = data[consumed[0] : consumed[0] + min(size, 2000)]
            consumed[0] += len(part)
            return part

    frames = read_video(Live())
    next(frames)
    assert consumed[0] < len(data) / 2
    assert sum(1 for _ in frames) == 199


def broken_sources(folder):
    whole = clip(folder / "a.mp4", every(0.1, 20)).read_bytes()
    (folder / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    (folder / "text.mp4").write_bytes(b"no video at all " * 100)
    (folder / "empty.mp4").write_bytes(b"")
    (folder / "folder").mkdir()
    with av.open(str(folder / "zero.avi"), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        container.start_encoding()
    with av.open(str(folder / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return {
        "cut.mp4": "is not a video that can be read",
        "text.mp4": "is not a video that can be read",
        "empty.mp4": "is not a video that can be read",
        "zero.avi": "holds no frame that could be decoded",
        "sound.mp4": "holds no video stream",
        "folder": "holds no picture",
    }


def test_sources_that_are_no_video_say_so_in_one_line(tmp_path):
    for name, message in broken_sources(tmp_path).items():
        with pytest.raises(VideoError, match=message) as caught:
            list(read_video(tmp_path / name))
        assert "\n" not in str(caught.value)
        assert name in str(caught.value)
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        read_video("nowhere.mp4")
    with pytest.raises(VideoError, match="holds no frame"):
        list(read_video([]))
    with pytest.raises(VideoError, match="PIL image"):
        list(read_video(["text"]))
    with pytest.raises(ValueError, match="fps must be above 0; got 0"):
        read_video(tmp_path, fps=0)


def test_cut_in_the_middle_gives_the_frames_before_it(tmp_path):
    path = clip(tmp_path / "a.mp4", every(0.1, 20), options={"movflags": "faststart"})
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 3 // 4])
    frames = read_video(path)
    got = []
    with pytest.raises(VideoError, match=r"ends inside a frame or is damaged: 1 packet .* [01]\.\d\d s could"):
        got.extend(frames)
    assert 5 < len(got) < 20


def test_broken_picture_in_a_folder(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "1.png")
    (tmp_path / "2.png").write_bytes(b"PNG?")
    frames = read_video(tmp_path)
    next(frames)
    with pytest.raises(VideoError, match=r"2\.png cannot be read as a picture"):
        next(frames)


def test_v4_memory_stays_where_it_is(tmp_path):
    """Files opened, read to the end, left in the middle, or failing: none stays open, none is kept in memory."""
    path = clip(tmp_path / "a.mp4", every(0.1, 4))
    long = clip(tmp_path / "long.mp4", every(0.04, 5000))
    process = psutil.Process()

    def rounds(count):
        for _ in range(count):
            list(read_video(path))
            frames = read_video(path)
            next(frames)
            frames.close()
            with contextlib.suppress(ZeroDivisionError):
                for _ in read_video(path):
                    raise ZeroDivisionError
        gc.collect()

    rounds(20)
    before, open_before = process.memory_info().rss, len(process.open_files())
    rounds(170)  # 510 times opened
    assert sum(1 for _ in read_video(long)) == 5000
    assert process.memory_info().rss - before < 50 * 2**20
    assert len(process.open_files()) == open_before


def test_bytes_in_memory_are_a_source_too(tmp_path):
    data = clip(tmp_path / "a.mp4", every(0.1, 5)).read_bytes()
    assert len(list(read_video(io.BytesIO(data)))) == 5

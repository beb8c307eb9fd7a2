"""Many streams on one model: what arrives together is encoded and decoded in one batch; a broken source stops alone."""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from crossfuse.streaming.cache import FusionCache
from crossfuse.streaming.captioner import FramePrompt
from crossfuse.streaming.session import PieceReader, StreamSession
from crossfuse.streaming.stacking import stack, unstack


class PoolEvent(NamedTuple):
    """What a stream has to say: a caption of the frame at ``time``, its end, or the error that ended it."""

    stream: str
    time: float
    text: str
    error: Exception | None = None
    ended: bool = False


class StreamPool:
    """Named sessions with the same options on one model.

    Every stream gives what it would give alone: caches lie apart, are joined for one step, with padding that no stream
    keeps, and are taken apart again. ``options`` are those of `StreamSession`.
    """

    def __init__(self, model: Any, processor: Any, **options: Any):
        self.model, self.processor, self.options = model, processor, options
        self.sessions: dict[str, StreamSession] = {}

    def open(self, name: str, **options: Any) -> StreamSession:
        """A new stream; ``options`` go before the pool's. ValueError where the name is taken."""
        if name in self.sessions:
            raise ValueError(f"the stream {name!r} is open already; close it or choose another name")
        session = StreamSession(self.model, self.processor, **{**self.options, **options})
        self.sessions[name] = session
        return session

    def close(self, name: str) -> None:
        """Forget a stream."""
        self._session(name)
        del self.sessions[name]

    def step(
        self, frames: Mapping[str, Any], before: str = "", after: str = ""
    ) -> tuple[dict[str, str], dict[str, Exception]]:
        """One frame for each of the named streams -> (texts by stream, errors by stream).

        Streams that are not named do nothing. ``before`` and ``after`` are words around each frame. A stream whose
        frame cannot be used is named in the errors and takes no part; the others go on.
        """
        names = [name for name in frames if self._session(name)]
        errors: dict[str, Exception] = {}
        encoded = self._encode(frames, names, errors)
        for name in list(encoded):
            session = self.sessions[name]
            try:
                if before:
                    session.add_text(before)
                session.add_encoded(encoded[name])
                if after:
                    session.add_text(after)
                session.engine.check(session.stream)
            except ValueError as error:
                errors[name] = error
        ready = [name for name in names if name not in errors]
        texts = self._generate([self.sessions[name] for name in ready]) if ready else []
        return dict(zip(ready, texts, strict=True)), errors

    def run(self, sources: Mapping[str, Iterable[Any]], prompt: FramePrompt | None = None) -> Iterator[PoolEvent]:
        """Caption all sources at once: iterables of (time, image), each read in a thread of its own.

        Whatever frames have arrived make one step; a source that waits holds nobody up. One that fails ends with an
        event that carries its error. Streams are opened here and closed at their ends.
        """
        prompt = prompt or FramePrompt()
        with contextlib.ExitStack() as cleanup:
            arrivals = _Arrivals(sources)
            cleanup.callback(arrivals.stop)
            for name in sources:
                session = self.open(name)
                cleanup.callback(self.sessions.pop, name, None)
                if prompt.opening:
                    session.add_text(prompt.opening)
            arrivals.start()
            alive = set(sources)
            while alive:
                frames: dict[str, Any] = {}
                times: dict[str, float] = {}
                for name, item in arrivals.next_of_each(alive):
                    if isinstance(item, tuple):
                        times[name], frames[name] = item
                        continue
                    yield PoolEvent(name, 0.0, "", item, ended=True)
                    alive.discard(name)
                if not frames:
                    continue
                texts, errors = self.step(frames, prompt.before, prompt.after)
                for name in frames:
                    if name in texts:
                        yield PoolEvent(name, times[name], texts[name])
                    else:
                        yield PoolEvent(name, times[name], "", errors[name], ended=True)
                        alive.discard(name)
                        arrivals.stop(name)

    def memory(self) -> dict[str, int]:
        """Bytes by part over all streams."""
        total: collections.Counter[str] = collections.Counter()
        for session in self.sessions.values():
            total.update(session.memory())
        return dict(total)

    def _session(self, name: str) -> StreamSession:
        if name not in self.sessions:
            raise ValueError(f"no stream {name!r} is open; open: {', '.join(self.sessions) or 'none'}")
        return self.sessions[name]

    def _encode(self, frames: Mapping[str, Any], names: list[str], errors: dict[str, Exception]) -> dict[str, Any]:
        """One run of the tower for all; one by one where that fails, to find the frame at fault."""
        if not names:
            return {}
        engine = self.sessions[names[0]].engine
        try:
            together = engine.encode(self.processor, [frames[name] for name in names])
            return dict(zip(names, together, strict=True))
        except (ValueError, OSError, TypeError, RuntimeError):
            encoded = {}
            for name in names:
                try:
                    (encoded[name],) = engine.encode(self.processor, [frames[name]])
                except (ValueError, OSError, TypeError, RuntimeError) as error:
                    errors[name] = error
            return encoded

    def _generate(self, sessions: Sequence[StreamSession]) -> list[str]:
        """Captions of all sessions, decoded together."""
        engine = sessions[0].engine
        engine.flush([session.stream for session in sessions])
        readers = [PieceReader(session.tokenizer) for session in sessions]
        texts = [""] * len(sessions)
        active = list(range(len(sessions)))
        shared = _SharedCache(engine)
        for spoken in range(1, max(s.decoding.max_new_tokens for s in sessions) + 1):
            going = []
            for i in active:
                logits = sessions[i].stream.logits
                assert logits is not None
                more, piece = sessions[i].accept(sessions[i].sampler(logits), readers[i])
                texts[i] += piece
                if more and spoken < sessions[i].decoding.max_new_tokens:
                    going.append(i)
            active = going
            shared.forward([sessions[i].stream for i in active])
            if not active:
                break
        return texts


class _SharedCache:
    """The streams of one decoding loop in one cache, for as long as the same ones go on and none must evict."""

    def __init__(self, engine: Any):
        self.engine = engine
        self.streams: list[Any] = []
        self.cache: FusionCache | None = None

    def forward(self, streams: list[Any]) -> None:
        """Forward what waits in ``streams``; those that are no longer among them are put back."""
        fits = all(self.engine.room_for(stream, stream.pending_text_tokens) for stream in streams)
        if self.cache is not None and (len(streams) < 2 or not fits):
            self._take_apart(self.streams)
            self.cache = None
        elif self.cache is not None and streams != self.streams:
            self._take_apart([stream for stream in self.streams if stream not in streams])
            rows = torch.tensor([self.streams.index(stream) for stream in streams])
            self.cache.batch_select_indices(rows)
        elif self.cache is None and len(streams) > 1 and fits:
            self.cache = stack([stream.cache for stream in streams])
        self.streams = streams
        if streams:
            self.engine.flush(streams, self.cache)

    def _take_apart(self, streams: list[Any]) -> None:
        assert self.cache is not None
        for stream in streams:
            unstack(self.cache, self.streams.index(stream), stream.cache)


class _Arrivals:
    """Threads that read the sources, two frames ahead at most, and who has something."""

    def __init__(self, sources: Mapping[str, Iterable[Any]]):
        self.queues: dict[str, queue.Queue[Any]] = {name: queue.Queue(maxsize=2) for name in sources}
        self.stopped = {name: threading.Event() for name in sources}
        self.changed = threading.Condition()
        self.threads = [
            threading.Thread(target=self._read, args=(name, source), name=f"crossfuse source {name}", daemon=True)
            for name, source in sources.items()
        ]

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def stop(self, name: str | None = None) -> None:
        for one in self.stopped if name is None else [name]:
            self.stopped[one].set()

    def next_of_each(self, names: set[str]) -> list[tuple[str, Any]]:
        """At least one (name, item), at most one a name: (time, image), None at the end, or an exception."""
        with self.changed:
            self.changed.wait_for(lambda: any(not self.queues[name].empty() for name in names))
        found = []
        for name, items in self.queues.items():
            if name in names:
                with contextlib.suppress(queue.Empty):
                    found.append((name, items.get_nowait()))
        return found

    def _read(self, name: str, source: Iterable[Any]) -> None:
        iterator = iter(source)
        try:
            for time, image in iterator:
                if not self._put(name, (float(time), image)):
                    break
            else:
                self._put(name, None)
        except Exception as error:  # whatever a source raises is told to the reader of its stream
            self._put(name, error)
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()

    def _put(self, name: str, item: Any) -> bool:
        """False where nobody wants it any more."""
        while not self.stopped[name].is_set():
            try:
                self.queues[name].put(item, timeout=0.1)
            except queue.Full:
                continue
            with self.changed:
                self.changed.notify_all()
            return True
        return False

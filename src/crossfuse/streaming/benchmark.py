"""Latency and memory of a frame against the number of frames: insertion, token compression, cross-attention.

Every frame has one delimiter and `NEW_TOKENS` generated tokens; its image tokens are given (the vision tower is the
same for all methods and not counted). Methods take turns frame by frame in one run, so that other work on the machine
meets all of them; a ratio is the median of ratios of the same frame. The text-only language model is the same stream
without images. Before anything is measured, two frames of every method are compared with one forward of the same
sequence.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from crossfuse.compress import MeanPool, QFormer
from crossfuse.fusion import Fusion
from crossfuse.fusions.cross_attention import CrossAttention
from crossfuse.fusions.insertion import Insertion
from crossfuse.streaming.sampling import Decoding
from crossfuse.streaming.session import StreamSession
from crossfuse.streaming.stream import EncodedFrame

NEW_TOKENS = 8
LAST = 3  # frames at the end that a ratio is taken over
BOUND = 256
JUDGED_FRAMES = 60  # the ratios are stated for SmolLM2's shape at this frame; a tiny model is all overhead

# Grid: image tokens a side. The other fields are those of the decoder's configuration.
SMOLLM2: dict[str, Any] = {
    "grid": 16, "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "rope_theta": 100000.0,
}  # fmt: skip
SHAPES = ("embedded", "smollm2-135m")
METHODS: dict[str, tuple[Fusion | None, int | None]] = {
    "text only": (None, None),
    "insertion": (Insertion(), None),
    "insertion, 4 : 1 pooled": (Insertion(compress=MeanPool(4)), None),
    "insertion, 16 : 1 pooled": (Insertion(compress=MeanPool(16)), None),
    "insertion, Q-Former": (Insertion(compress=QFormer(queries=16)), None),
    "cross-attention": (CrossAttention(), None),
    "cross-attention, every third": (CrossAttention(every=3), None),
    f"cross-attention, {BOUND} text tokens": (CrossAttention(), BOUND),
}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One target and what was measured; ``met`` is None where it was not judged."""

    what: str
    measured: float
    target: str
    met: bool | None


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is measured: a model, its processor, and image tokens (N, d) of a few frames with their grid."""

    name: str
    model: Any
    processor: Any
    frames: Sequence[Tensor]
    grid: tuple[int, int]


class Method:
    """One stream, measured frame by frame."""

    def __init__(self, name: str, subject: Subject):
        fusion, bound = METHODS[name]
        self.name, self.sees, self.grid = name, fusion is not None, subject.grid
        self.model = shared_copy(subject.model)
        if fusion is not None:
            from crossfuse.api import fuse

            fuse(self.model, fusion)
        decoding = Decoding(max_new_tokens=NEW_TOKENS)
        self.session = StreamSession(self.model, subject.processor, max_text_tokens=bound, decoding=decoding)
        self.frames: list[int] = []  # those that were measured
        self.seconds: list[float] = []
        self.megabytes: list[float] = []
        self.exact = True  # the self-attention cache held what it should, to the byte, at every measured frame

    def fill(self, features: Tensor) -> None:
        """A frame and words that are given, in one forward: the cache grows as if they had been generated."""
        self.add(features)
        self.session.stream.add_text([self.session.delimiter_ids[0]] * NEW_TOKENS)
        self.session.forward()

    def add(self, features: Tensor) -> None:
        if self.sees:
            self.session.add_encoded(EncodedFrame(features, self.grid))
        else:
            self.session.stream.add_text(self.session.delimiter_ids)

    def frame(self, features: Tensor, number: int) -> None:
        """Frame ``number``, decoded and measured."""
        start = time.perf_counter()
        self.add(features)
        for _ in self.session.generate():
            pass
        self.session.forward()  # the last token too, so that every frame is charged for its own
        self.seconds.append(time.perf_counter() - start)
        self.frames.append(number)
        memory = self.session.memory()
        self.megabytes.append(sum(memory.values()) / 2**20)
        self.exact &= memory["self_attention"] == self.expected_bytes()

    def expected_bytes(self) -> int:
        """tokens × layers × 2 × key heads × head width × element size; with cross-attention the tokens are text."""
        config = self.model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        stream = self.session.stream
        tokens = stream.cached_text_tokens if self.session.engine.fusion.drops_images else stream.cached_tokens
        return int(tokens * config.num_hidden_layers * 2 * heads * width * self.model.dtype.itemsize)


def subject_of(shape: str) -> Subject:
    """The embedded model with rendered frames, or random weights of SmolLM2-135M's shape with random image tokens.

    The model's largest position is lifted and its end token taken away: both would end the curve early.
    """
    if shape == "smollm2-135m":
        model, processor = build(SMOLLM2), words_processor(SMOLLM2["vocab_size"])
        side = SMOLLM2["grid"]
        draw = torch.Generator().manual_seed(1)
        frames = [torch.randn(side**2, SMOLLM2["hidden_size"], generator=draw) * 0.02 for _ in range(4)]
        return Subject(shape, model, processor, frames, (side, side))
    if shape != "embedded":
        raise ValueError(f"shape must be one of {', '.join(SHAPES)}; got {shape!r}")
    from crossfuse.api import load_embedded
    from crossfuse.data.clips import make_clip
    from crossfuse.streaming.engine import Engine
    from crossfuse.streaming.eviction import TextBudget

    model, processor = load_embedded()
    _endless(model)
    pictures = [image for _, image in make_clip(0, "test", duration=4.0, fps=1.0).frames()]
    encoded = Engine(model, TextBudget()).encode(processor, pictures)
    grid = encoded[0].grid
    assert grid is not None
    return Subject(shape, model, processor, [frame.features for frame in encoded], grid)


def build(shape: dict[str, Any]) -> Any:
    """A LLaVA of this shape with random weights, and the smallest tower that has its grid."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    fields = {name: value for name, value in shape.items() if name != "grid"}
    tower = CLIPVisionConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        image_size=shape["grid"],
        patch_size=1,
    )
    text = LlamaConfig(**fields, tie_word_embeddings=True)
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            text_config=text,
            vision_config=tower,
            image_token_index=fields["vocab_size"] - 1,
            tie_word_embeddings=True,
        )
    ).eval()
    _endless(model)
    return model


def _endless(model: Any) -> None:
    model.config.text_config.max_position_embeddings = 2**20
    model.config.text_config.eos_token_id = None
    model.generation_config.eos_token_id = None


def words_processor(vocabulary: int) -> Any:
    """A processor with one word a token and no images."""
    from types import SimpleNamespace

    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = {"\n": 0, **{f"w{number}": number for number in range(1, vocabulary)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="w1"))
    backend.decoder = decoders.Fuse()
    return SimpleNamespace(tokenizer=PreTrainedTokenizerFast(tokenizer_object=backend))


def shared_copy(model: Any) -> Any:
    """Modules of its own over the same weights."""
    memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo)


@torch.inference_mode()
def check(subject: Subject) -> None:
    """Two frames of every method against one forward of the same sequence; AssertionError where they differ."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    frames = list(subject.frames[:2])
    for name in METHODS:
        method = Method(name, subject)
        session, ids = method.session, []
        delimiter = session.delimiter_ids
        for features in frames:
            method.add(features)
            session.stream.add_text([7])
            ids += [session.engine.placeholder] * (len(features) if method.sees else 0) + [*delimiter, 7]
            logits = session.forward()
        given = {"mm_encoder_outputs": {"image": BaseModelOutputWithPooling(pooler_output=frames)}}  # type: ignore[arg-type]
        expected = method.model(
            input_ids=torch.tensor([ids]), use_cache=False, logits_to_keep=1, **(given if method.sees else {})
        ).logits[0, -1]
        difference = float((logits - expected).abs().max())
        if not torch.allclose(logits, expected, atol=1e-4, rtol=1e-4):
            raise AssertionError(f"{name}: the stream's logits are {difference:g} away from those of one forward")


def measure(
    subject: Subject, frames: int, every: int = 1, progress: Callable[[int], None] | None = None
) -> list[Method]:
    """``frames`` frames through every method, interleaved. Only each ``every``-th and the last ones are decoded and
    measured; the others enter the cache, words included, in one forward each. KeyboardInterrupt ends the run early."""
    if frames < LAST or every < 1:
        raise ValueError(f"frames must be at least {LAST} and every at least 1; got {frames} and {every}")
    check(subject)
    methods = [Method(name, subject) for name in METHODS]
    try:
        for number in range(1, frames + 1):
            measured = number == 1 or number % every == 0 or number > frames - LAST
            for method in methods:
                features = subject.frames[number % len(subject.frames)]
                if measured:
                    method.frame(features, number)
                else:
                    method.fill(features)
            if progress is not None:
                progress(number)
    except KeyboardInterrupt:
        complete = min(len(method.frames) for method in methods)
        if complete < LAST:
            raise
        for method in methods:
            del method.frames[complete:], method.seconds[complete:], method.megabytes[complete:]
    return methods


def ratio(a: Method, b: Method) -> float:
    """Median of a frame's time with ``a`` over that with ``b``, last frames."""
    return statistics.median(x / y for x, y in zip(a.seconds[-LAST:], b.seconds[-LAST:], strict=True))


def verdicts(subject: Subject, methods: Sequence[Method]) -> list[Verdict]:
    """What must hold at the last frames, with what was measured. Ratios are judged at SmolLM2's shape from frame 60."""
    by_name = {method.name: method for method in methods}
    text, casa = by_name["text only"], by_name["cross-attention"]
    judged = subject.name == "smollm2-135m" and methods[0].frames[-1] >= JUDGED_FRAMES
    rows = [
        ("step: insertion / cross-attention", ratio(by_name["insertion"], casa), ">=", 6.0),
        ("step: cross-attention / text only", ratio(casa, text), "<=", 1.35),
        ("step: every third block / text only", ratio(by_name["cross-attention, every third"], text), "<=", 1.2),
    ]  # fmt: skip
    found = [
        Verdict(
            what,
            round(value, 3),
            f"{sign} {limit:g}",
            (value >= limit if sign == ">=" else value <= limit) if judged else None,
        )
        for what, value, sign, limit in rows
    ]
    wrong = sum(not method.exact for method in methods)
    return [*found, Verdict("methods whose cache is not exact", wrong, "== 0", wrong == 0)]

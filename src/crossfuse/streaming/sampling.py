"""How the next token of a live caption is chosen: greedy or drawn, silence, and controls against repetition."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Choices that hold for a whole stream.

    max_new_tokens: most tokens a frame.
    temperature, top_k, top_p: 0 is greedy; otherwise as in `transformers`.
    repetition_penalty, repetition_decay: a token generated ``n`` tokens ago is penalised by
        ``1 + (penalty - 1) * decay ** n`` (the form of CTRL, section 4.1); decay 1 never forgets.
    no_repeat_ngram, ngram_window: no n-gram of this length comes twice within the last ``ngram_window`` generated
        tokens; 0 switches it off.
    silence_token: id of the token that means "nothing to say". It ends a caption and, by default, leaves no trace in
        the cache; with ``keep_silence`` it stays, as one token, for models that were trained to see it.
    stop_tokens: ids that end a caption and stay in the stream, beside the model's own end tokens.
    seed: of the stream's random generator.
    """

    max_new_tokens: int = 32
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    repetition_decay: float = 0.95
    no_repeat_ngram: int = 0
    ngram_window: int = 128
    silence_token: int | None = None
    keep_silence: bool = False
    stop_tokens: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("temperature", 0), ("no_repeat_ngram", 0), ("ngram_window", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}; got {getattr(self, name)}")
        if self.repetition_penalty < 1:
            raise ValueError(f"repetition_penalty must be at least 1 (1 is off); got {self.repetition_penalty}")
        for name in ("top_p", "repetition_decay"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1; got {getattr(self, name)}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1 (None is off); got {self.top_k}")
        if 0 < self.no_repeat_ngram >= self.ngram_window:
            raise ValueError(
                f"no_repeat_ngram must be shorter than ngram_window={self.ngram_window}; got {self.no_repeat_ngram}"
            )


class Sampler:
    """Chooses tokens for one stream; remembers what it chose lately."""

    def __init__(self, decoding: Decoding, never: tuple[int, ...], stops: tuple[int, ...]):
        from transformers import (
            NoRepeatNGramLogitsProcessor,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        self.decoding, self.never = decoding, list(never)
        self.stops = frozenset(stops) | frozenset(decoding.stop_tokens)
        silence = () if decoding.silence_token is None else (decoding.silence_token,)
        self.free = sorted({*self.stops, *silence})  # never penalised or blocked: a caption must be able to end
        self.ngram = NoRepeatNGramLogitsProcessor(decoding.no_repeat_ngram) if decoding.no_repeat_ngram else None
        self.warpers: list[Any] = []
        if decoding.temperature > 0:
            self.warpers.append(TemperatureLogitsWarper(float(decoding.temperature)))
            if decoding.top_k is not None:
                self.warpers.append(TopKLogitsWarper(decoding.top_k))
            if decoding.top_p < 1:
                self.warpers.append(TopPLogitsWarper(decoding.top_p))
        self.recent: deque[int] = deque(maxlen=max(decoding.ngram_window, 128))
        self.generator = torch.Generator().manual_seed(decoding.seed)

    def is_silence(self, token: int) -> bool:
        return token == self.decoding.silence_token

    def is_stop(self, token: int) -> bool:
        return token in self.stops

    def __call__(self, logits: Tensor) -> int:
        """(V,) logits -> one token id."""
        scores = logits.detach().float().cpu().clone()
        scores[self.never] = -torch.inf
        free = scores[self.free]
        if self.decoding.repetition_penalty > 1 and self.recent:
            self._penalise(scores)
        if self.ngram is not None and len(self.recent) >= self.decoding.no_repeat_ngram:
            window = torch.tensor([list(self.recent)[-self.decoding.ngram_window :]])
            scores = self.ngram(window, scores[None])[0]
        scores[self.free] = free
        if self.decoding.temperature > 0:
            for warper in self.warpers:
                scores = warper(None, scores[None])[0]
            token = int(torch.multinomial(scores.softmax(-1), 1, generator=self.generator))
        else:
            token = int(scores.argmax())
        if token not in self.free:
            self.recent.append(token)
        return token

    def _penalise(self, scores: Tensor) -> None:
        ages: dict[int, int] = {}
        for age, token in enumerate(reversed(self.recent)):
            ages.setdefault(token, age)  # the latest occurrence counts
        ids = torch.tensor(list(ages))
        strength = self.decoding.repetition_penalty - 1
        penalty = 1 + strength * self.decoding.repetition_decay ** torch.tensor(list(ages.values()))
        chosen = scores[ids]
        scores[ids] = torch.where(chosen > 0, chosen / penalty, chosen * penalty)

    def reset(self) -> None:
        self.recent.clear()
        self.generator.manual_seed(self.decoding.seed)

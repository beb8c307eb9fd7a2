"""A processor for the tiny models, pictures, and sessions that remember every token they were given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import crossfuse as xf
import tiny
from crossfuse.streaming.sampling import Decoding
from crossfuse.streaming.session import StreamSession

SPECIAL = ["<pad>", "<image>", "<bos>"]
LETTERS = ["\n", *"abcdefghijklmnopqrstuvwxyz .,?0123456789", *[f"ä{i}" for i in range(21)]]


class TinyProcessor:
    """Pixels as the tiny towers take them, and one token a character."""

    def __init__(self) -> None:
        vocabulary = {word: number for number, word in enumerate([*SPECIAL, *LETTERS][: tiny.VOCABULARY])}
        backend = Tokenizer(models.WordLevel(vocabulary, unk_token="."))
        backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        backend.decoder = decoders.Fuse()
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", additional_special_tokens=["<image>"]
        )
        self.image_token = "<image>"

    def image_processor(self, images: list[Image.Image], return_tensors: str) -> dict[str, torch.Tensor]:
        assert return_tensors == "pt"
        pixels = [torch.frombuffer(bytearray(i.resize((16, 16)).tobytes()), dtype=torch.uint8) for i in images]
        return {"pixel_values": torch.stack(pixels).view(-1, 16, 16, 3).permute(0, 3, 1, 2).float() / 64 - 2}


@pytest.fixture(scope="session")
def processor() -> TinyProcessor:
    return TinyProcessor()


@pytest.fixture(scope="session")
def picture():
    """Function of a number: its own random 16 x 16 picture."""

    def make(number: int) -> Image.Image:
        noise = torch.randint(0, 256, (16, 16, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))
        return Image.fromarray(noise.numpy())

    return make


@pytest.fixture
def fused():
    """Function of a fusion: a tiny model fused with it, new weights drawn so that they matter."""

    def make(fusion: xf.Fusion | None, **options: Any) -> Any:
        model = tiny.llava(**options)
        if fusion is None:
            return model
        xf.fuse(model, fusion)
        draw = torch.Generator().manual_seed(3)
        for parameter in xf.fusion_parameters(model).values():
            parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=draw))
        return model

    return make


class Recorder:
    """A session beside the row of tokens and pictures that a batch forward of the same stream would take."""

    def __init__(self, model: Any, processor: TinyProcessor, **options: Any):
        options.setdefault("decoding", Decoding(max_new_tokens=3))
        self.model, self.processor = model, processor
        self.session = StreamSession(model, processor, **options)
        self.ids: list[int] = []
        self.images: list[Image.Image] = []

    def text(self, ids: list[int]) -> None:
        self.session.add_text(ids)
        self.ids += ids

    def frame(self, image: Image.Image) -> None:
        self.session.add_frame(image)
        self.images.append(image)
        self.ids += [tiny.IMAGE] * tiny.PATCHES + self.session.delimiter_ids

    def speak(self, tokens: int) -> str:
        """Generate, and note which tokens the session chose."""
        chosen: list[int] = []
        accept = self.session.accept

        def note(token: int, reader: Any) -> Any:
            chosen.append(token)
            return accept(token, reader)

        self.session.accept = note  # type: ignore[method-assign]
        text = "".join(self.session.generate(tokens))
        self.session.accept = accept  # type: ignore[method-assign]
        self.ids += chosen
        return text

    @torch.no_grad()
    def batch_logits(self) -> torch.Tensor:
        """(L, V) of one forward over everything, without a cache."""
        inputs: dict[str, Any] = {"input_ids": torch.tensor([self.ids])}
        if self.images:
            inputs |= self.processor.image_processor(self.images, "pt")
        return self.model(**inputs, use_cache=False).logits[0]


@pytest.fixture
def recorder(processor):
    """Function of (model, session options): a `Recorder`."""

    def make(model: Any, **options: Any) -> Recorder:
        return Recorder(model, processor, **options)

    return make

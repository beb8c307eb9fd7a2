"""The parts of recipes/smol-casa.yaml: the composed model out of small real weights, and the easy-VQA questions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

if TYPE_CHECKING:
    from crossfuse import VisionLanguageModel

# Image, a line break (cross-attention needs text between an image and an answer), question, line break, answer.
CHAT_TEMPLATE = """{%- for message in messages -%}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- else -%}{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{- '<image>\\n' -}}{%- else -%}{{- part['text'] -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- else -%}{{- '\\n' -}}{%- endif -%}
{%- endfor -%}"""
YES_NO = ("yes", "no")
NEAR = 16  # batches whose samples are sorted by length, so that few need padding


class InsertionTwin(BaseModel):
    model_config = ConfigDict(extra="forbid")
    learning_rate: float = Field(gt=0)
    lora_rank: int = Field(ge=1)
    lora_alpha: int = Field(ge=1)


class SmolRecipe(BaseModel):
    """recipes/smol-casa.yaml; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid")
    llm: Path
    vision: str
    vision_weights: Path
    vision_feature_layer: int
    image_size: int = Field(ge=32)
    projector: str
    fusion: dict[str, Any]
    dtype: str
    batch_size: int = Field(ge=1)
    learning_rate: float = Field(gt=0)
    warmup_steps: int = Field(ge=0)
    weight_decay: float = Field(ge=0)
    max_grad_norm: float = Field(gt=0)
    minutes: float = Field(gt=0)
    seed: int
    insertion: InsertionTwin


def read_recipe(path: Path) -> SmolRecipe:
    import yaml

    return SmolRecipe(**yaml.safe_load(path.read_text()))


def load_tower(architecture: str, weights: Path) -> Any:
    """timm's network with weights that another implementation stored under other names, in the same order."""
    import timm
    from transformers import AutoModel, TimmWrapperConfig

    tower = AutoModel.from_config(TimmWrapperConfig(architecture=architecture, do_pooling=False))
    whole = timm.create_model(architecture, pretrained=False).state_dict()
    stored = list(torch.load(weights, map_location="cpu", weights_only=True).items())
    if len(stored) != len(whole):
        raise ValueError(f"{weights} holds {len(stored)} tensors; {architecture} has {len(whole)}")
    renamed = {}
    for (name, own), (foreign, tensor) in zip(whole.items(), stored, strict=True):
        if own.shape != tensor.shape:
            raise ValueError(f"{foreign} has shape {tuple(tensor.shape)}; {name} needs {tuple(own.shape)}")
        renamed[name] = tensor
    tower.timm_model.load_state_dict({name: renamed[name] for name in tower.timm_model.state_dict()})
    return tower.eval()


def build(recipe: SmolRecipe) -> VisionLanguageModel:
    """The composed model, everything frozen; its processor writes prompts in the short form of `CHAT_TEMPLATE`."""
    from transformers import CLIPImageProcessor

    import crossfuse as xf

    side = {"height": recipe.image_size, "width": recipe.image_size}
    images = CLIPImageProcessor(
        size=side, crop_size=side, do_center_crop=False, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    torch.manual_seed(recipe.seed)
    model = xf.VisionLanguageModel.compose(
        llm=recipe.llm,
        vision=load_tower(recipe.vision, recipe.vision_weights),
        projector=recipe.projector,
        image_processor=images,
        image_size=recipe.image_size,
        vision_feature_layer=recipe.vision_feature_layer,
        dtype=getattr(torch, recipe.dtype),
    )
    assert model.processor is not None
    model.processor.chat_template = CHAT_TEMPLATE
    model.processor.tokenizer.padding_side = "left"
    model.model.multi_modal_projector.float()
    return model.requires_grad_(False)


class Item(NamedTuple):
    image: int
    question: str
    answer: str


class EasyVQA:
    """One split of easy-VQA: pictures by number, and questions about them. Training leaves some pictures out."""

    def __init__(self, split: str, held_out: int = 0, seed: int = 0) -> None:
        import easy_vqa

        questions, answers, images = getattr(easy_vqa, f"get_{split}_questions")()
        self.paths: dict[int, str] = getattr(easy_vqa, f"get_{split}_image_paths")()
        everything = [Item(*item) for item in zip(images, questions, answers, strict=True)]
        numbers = sorted({item.image for item in everything})
        left_out = set(random.Random(seed).sample(numbers, held_out))
        self.items = [item for item in everything if item.image not in left_out]
        self.held_out = [item for item in everything if item.image in left_out]

    def picture(self, number: int) -> Image.Image:
        with Image.open(self.paths[number]) as picture:
            return picture.convert("RGB")


def prompt(question: str) -> str:
    """The user's turn of `CHAT_TEMPLATE`."""
    return f"<image>\n{question}\n"


@torch.no_grad()
def encode_pictures(model: VisionLanguageModel, data: EasyVQA, numbers: list[int]) -> Tensor:
    """(pictures, tokens, channels) float16 outputs of the frozen encoder."""
    from crossfuse.backbones.composed_parts import image_tokens

    assert model.processor is not None
    config, made = model.config, []
    for start in range(0, len(numbers), 64):
        pictures = [data.picture(number) for number in numbers[start : start + 64]]
        pixels = model.processor.image_processor(pictures, return_tensors="pt")["pixel_values"]
        tower = model.model.vision_tower
        tokens, _ = image_tokens(
            tower,
            pixels.to(next(tower.parameters()).dtype),
            None,
            config.vision_feature_layer,
            config.drop_class_token,
        )
        made.append(torch.stack(tokens).half())
    return torch.cat(made)


class Batches:
    """Batches of questions of similar length, in an order that depends on the seed and the epoch alone."""

    def __init__(self, model: VisionLanguageModel, data: EasyVQA, features: Tensor, batch_size: int, seed: int) -> None:
        assert model.processor is not None
        tokenizer = model.processor.tokenizer
        self.features, self.batch_size, self.seed = features, batch_size, seed
        self.image_token, self.pad, self.tokens = (
            model.config.image_token_id,
            tokenizer.pad_token_id,
            features.shape[1],
        )
        rows = {number: row for row, number in enumerate(sorted({item.image for item in data.items}))}
        known: dict[str, list[int]] = {}
        self.samples = []
        for item in data.items:
            if item.question not in known:
                known[item.question] = tokenizer(prompt(item.question)).input_ids
            if item.answer not in known:
                known[item.answer] = [*tokenizer(item.answer).input_ids, tokenizer.eos_token_id]
            self.samples.append((rows[item.image], known[item.question], known[item.answer]))

    def __len__(self) -> int:
        """Full batches of an epoch."""
        whole, rest = divmod(len(self.samples), self.batch_size * NEAR)
        return whole * NEAR + rest // self.batch_size

    def epoch(self, number: int) -> Iterator[dict[str, Any]]:
        draw = random.Random(f"{self.seed}-{number}")
        order = list(range(len(self.samples)))
        draw.shuffle(order)
        near = self.batch_size * NEAR
        batches = []
        for start in range(0, len(order), near):
            some = sorted(order[start : start + near], key=lambda i: sum(map(len, self.samples[i][1:])))
            batches += [some[i : i + self.batch_size] for i in range(0, len(some), self.batch_size)]
        draw.shuffle(batches)
        for batch in batches:
            if len(batch) == self.batch_size:
                yield self.collate([self.samples[i] for i in batch])

    def collate(self, samples: list[tuple[int, list[int], list[int]]]) -> dict[str, Any]:
        """input_ids, attention_mask, labels (B, L), left padded; ``tokens`` (B, N, C), one picture a row."""
        lengths = [self.tokens - 1 + len(question) + len(answer) for _, question, answer in samples]
        shape = (len(samples), max(lengths))
        ids, mask = torch.full(shape, self.pad), torch.zeros(shape, dtype=torch.long)
        labels = torch.full(shape, -100)
        for row, (_, question, answer) in enumerate(samples):
            place = question.index(self.image_token)
            written = question[:place] + [self.image_token] * self.tokens + question[place + 1 :] + answer
            ids[row, -len(written) :] = torch.tensor(written)
            mask[row, -len(written) :] = 1
            labels[row, -len(answer) :] = torch.tensor(answer)
        pictures = self.features[[picture for picture, _, _ in samples]]
        return {"input_ids": ids, "attention_mask": mask, "labels": labels, "tokens": pictures}


@torch.inference_mode()
def answer(model: Any, processor: Any, data: EasyVQA, items: list[Item], pictures: list[int]) -> list[str]:
    """Greedy answers through the processor and ``generate``, 50 questions a batch; pictures by number."""
    answers = []
    for start in range(0, len(items), 50):
        some = slice(start, start + 50)
        inputs = processor(
            images=[[data.picture(number)] for number in pictures[some]],
            text=[prompt(item.question) for item in items[some]],
            padding=True,
            return_tensors="pt",
        )
        made = model.generate(**inputs, max_new_tokens=4, do_sample=False)
        new = made[:, inputs["input_ids"].shape[1] :]
        answers += [text.strip() for text in processor.batch_decode(new, skip_special_tokens=True)]
    return answers


def score(items: list[Item], answers: list[str]) -> dict[str, float]:
    """Exact match over everything, over yes / no questions and over the others."""
    right = [item.answer == given for item, given in zip(items, answers, strict=True)]
    closed = [item.answer in YES_NO for item in items]
    parts = {"all": right, "yes_no": [r for r, c in zip(right, closed, strict=True) if c]}
    parts["other"] = [r for r, c in zip(right, closed, strict=True) if not c]
    return {name: sum(values) / max(len(values), 1) for name, values in parts.items()}

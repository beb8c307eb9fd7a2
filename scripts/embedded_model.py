"""The parts of the embedded model: vocabulary and tokenizer, processor, and a randomly initialised LLaVA.

The vocabulary is closed over the rendered scenes and easy-VQA: their words are single tokens, and the single
ASCII characters (alone and as continuations) spell anything else.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import LlavaForConditionalGeneration, LlavaProcessor, PreTrainedTokenizerFast

IMAGE_SIZE, PATCH_SIZE = 96, 12
GRID = IMAGE_SIZE // PATCH_SIZE
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>", "<image>", "<|user|>", "<|assistant|>", "<|system|>")

# Words of everyday prompts beyond those of the training texts, so that most stay short.
_EXTRA_WORDS = """user assistant one two three four five six seven eight nine ten none which where who when why how can
you see tell me about picture image photo scene video frame object objects thing things anything please answer say
left right top bottom middle corner between next to near behind front inside over under big small large little same
different it its this that these those there here at on with without from by for or if then not no yes i we they he
she do does did have has was were be been will would should could color colour colours colors grey many much more
less than moves moved moving appears appeared vanishes vanished changes changed shows show contain contains
describe caption question square"""

# One ordinary token (the line break) stands between an image and the words that follow it.
CHAT_TEMPLATE = """{{- bos_token -}}
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}
{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}
{%- for part in message['content'] if part['type'] == 'text' -%}{{- part['text'] -}}{%- endfor -%}{%- endif -%}
{{- eos_token -}}
{%- endgeneration -%}
{%- elif message['content'] is string -%}{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{- '<image>\\n' -}}
{%- elif part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A lower-casing word-level tokenizer (WordPiece) over the words of ``texts``; unknown words are spelled."""
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import WordPiece
    from transformers import PreTrainedTokenizerFast

    pattern = r"\n|[a-z]+|[0-9]|[^\sa-z0-9]"
    words = {word for text in texts for word in re.findall(pattern, text.lower())} | set(_EXTRA_WORDS.split())
    characters = [*string.ascii_lowercase, *string.digits, *string.punctuation]
    tokens = [*SPECIAL_TOKENS, "\n", *characters, *(f"##{c}" for c in string.ascii_lowercase)]
    tokens += sorted(words - set(tokens))
    model = Tokenizer(WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    model.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()])
    model.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="removed", invert=True)
    model.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        extra_special_tokens={
            "image_token": "<image>",
            "user_token": "<|user|>",
            "assistant_token": "<|assistant|>",
            "system_token": "<|system|>",
        },
        padding_side="left",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def build_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """Resize anything to the square input (no crop, so border objects stay) and expand one placeholder an image."""
    from transformers import CLIPImageProcessor, LlavaProcessor

    images = CLIPImageProcessor(
        size={"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        do_center_crop=False,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlavaForConditionalGeneration:
    """A randomly initialised LLaVA: CLIP tower (64 patches), 2-layer projector, Llama decoder; about 1.8 M weights."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        hidden_act="gelu_pytorch_tanh",
        projection_dim=128,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=GRID * GRID,
        tie_word_embeddings=True,
    )
    model = LlavaForConditionalGeneration(config)
    generation = model.generation_config
    generation.pad_token_id = tokenizer.pad_token_id
    generation.bos_token_id = tokenizer.bos_token_id
    generation.eos_token_id = tokenizer.eos_token_id
    return model


# Where each head of a tower's layer looks at first, as (rows, columns) from its own patch.
_OFFSETS = (
    ((0, 0), (0, 1), (1, 0), (1, 1)),
    ((0, -1), (-1, 0), (-1, -1), (0, 1)),
    ((1, -1), (-1, 1), (1, 0), (0, -1)),
    ((0, 0), (-1, 0), (0, 1), (1, 0)),
)


def start_as_convolution(tower: Any, gain: float = 1.5) -> None:
    """Initialise a CLIP tower in place so that each head attends to one neighbouring patch, as a convolution does.

    Sine and cosine features of row and column (32 channels, as many as a head is wide) go into the position
    embeddings; the keys copy them and the queries hold them turned by the head's offset, so that their product
    peaks there (Cordonnier et al. 2020, "On the relationship between self-attention and convolutional layers").
    A plain random start learns the kinds of shapes several times more slowly.
    """
    import torch

    frequencies = torch.tensor([0.5, 1, 1.5, 2, 3, 4, 6, 8]) * torch.pi / GRID
    angles = torch.arange(GRID)[:, None] * frequencies
    waves = torch.cat([angles.sin(), angles.cos()], 1) * 2**0.5
    row, column = waves[:, None].expand(-1, GRID, -1), waves[None].expand(GRID, -1, -1)
    positions = torch.cat([row, column], 2).reshape(GRID * GRID, -1)
    width = positions.shape[1]
    body = getattr(tower, "vision_model", tower)
    with torch.no_grad():
        patch = body.embeddings.patch_embedding.weight
        patch.normal_(0, (3 * PATCH_SIZE * PATCH_SIZE) ** -0.5)
        patch[:width] = 0
        table = body.embeddings.position_embedding.weight
        table.zero_()
        table[1:, :width] = positions
        for layer, offsets in zip(body.encoder.layers, _OFFSETS, strict=True):
            query, key = layer.self_attn.q_proj, layer.self_attn.k_proj
            for linear in (query, key):
                linear.weight.normal_(0, 0.02)
                linear.bias.zero_()
            for head, offset in enumerate(offsets):
                rows = slice(head * width, (head + 1) * width)
                key.weight[rows, :width] += torch.eye(width) * gain**0.5
                query.weight[rows, :width] += _turn(frequencies, offset) * gain**0.5


def start_by_likeness(decoder: Any, gain: float = 0.8, copied: float = 0.3) -> None:
    """Initialise a Llama decoder in place: words of length one, and attention by likeness.

    Random embeddings of length one are nearly orthogonal, and stay so; from the usual small ones, words that stand in
    the same places (names of kinds, of colours) end up with cosines of 0.75 to 0.85 and cannot be told apart by
    likeness. Tokens attend to tokens like themselves and take over their content.

    Queries and keys start as the same orthogonal map, values and outputs as a small multiple of the identity (after
    Trockman and Kolter 2023, "Mimetic initialization of self-attention layers"). "circle" then finds the circles
    from the first step; from a plain random start the model answers from the words alone for long.
    """
    import torch

    with torch.no_grad():
        table = decoder.embed_tokens.weight
        table.normal_(0, table.shape[1] ** -0.5)
        for layer in decoder.layers:
            attention = layer.self_attn
            width = attention.q_proj.weight.shape[1]
            same, content = (torch.linalg.qr(torch.randn(width, width)).Q for _ in range(2))
            attention.q_proj.weight.copy_(gain * same + 0.02 * torch.randn(width, width))
            attention.k_proj.weight.copy_(gain * same + 0.02 * torch.randn(width, width))
            attention.v_proj.weight.copy_(content + 0.02 * torch.randn(width, width))
            attention.o_proj.weight.copy_(copied * content.T + 0.02 * torch.randn(width, width))


def _turn(frequencies: torch.Tensor, offset: tuple[int, int]) -> torch.Tensor:
    """The (32, 32) matrix that takes the position features of a patch to those of the patch at an offset."""
    import torch

    n = len(frequencies)
    turn = torch.zeros(4 * n, 4 * n)
    for axis, step in enumerate(offset):
        sine = torch.arange(n) + axis * 2 * n
        cosine = sine + n
        turn[sine, sine] = turn[cosine, cosine] = (frequencies * step).cos()
        turn[sine, cosine] = (frequencies * step).sin()
        turn[cosine, sine] = -(frequencies * step).sin()
    return turn

"""Cache bytes against the shapes that they must have."""

import pytest
from transformers import DynamicCache

import crossfuse as xf
from crossfuse.evaluation.cache_growth import cache_growth

PROMPT = "is there a circle?"
COUNTS = (1, 2, 3)


def bytes_of_tokens(model, tokens: int) -> int:
    """Keys and values of `tokens` positions in every layer, float32."""
    text = model.config.text_config
    return tokens * text.num_hidden_layers * 2 * text.num_key_value_heads * text.head_dim * 4


@pytest.mark.parametrize("fusion", [None, xf.Insertion(), xf.TextAnchors(threshold=1.0)], ids=str)
def test_insertion_grows_by_every_image_token(fusion):
    model, processor = xf.load_embedded()
    if fusion is not None:
        xf.fuse(model, fusion)
    sizes = [sum(parts.values()) for _, parts in cache_growth(model, processor, PROMPT, COUNTS)]
    # An image brings 64 tokens and the line break that the template writes after it.
    assert sizes[1] - sizes[0] == sizes[2] - sizes[1] == bytes_of_tokens(model, 65)


@pytest.mark.parametrize("joint", [False, True])
def test_cross_attention_grows_by_text_alone(joint):
    model, processor = xf.load_embedded()
    xf.fuse(model, xf.CrossAttention(joint_text=joint))
    measured = [parts for _, parts in cache_growth(model, processor, PROMPT, COUNTS)]
    text = [parts["self_attention"] for parts in measured]
    assert text[1] - text[0] == text[2] - text[1] == bytes_of_tokens(model, 1)
    # Of the images only the latest is kept.
    assert [parts["images"] for parts in measured] == [bytes_of_tokens(model, 64)] * 3
    assert all((parts["window_text"] > 0) == joint for parts in measured)


def test_a_plain_cache_is_counted_too():
    from crossfuse.evaluation.cache_growth import cache_bytes_by_part

    assert cache_bytes_by_part(DynamicCache()) == {"self_attention": 0}

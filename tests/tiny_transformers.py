"""Tiny models of architectures that ``transformers`` ships, from their configuration alone."""

from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

#: What makes a model small, under the names that architectures have for it.
_SIZES = {
    64: "hidden_size d_model n_embd dim embed_dim embedding_size moe_intermediate_size projection_dim "
    "max_source_positions max_target_positions",
    128: "intermediate_size n_inner ffn_dim d_ff hidden_dim encoder_ffn_dim decoder_ffn_dim "
    "max_position_embeddings n_positions",
    16: "head_dim d_kv feature_size num_mel_bins rotary_dim",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "num_experts num_local_experts n_routed_experts",
    2: "n_layer n_layers num_hidden_layers num_layers encoder_layers decoder_layers "
    "num_decoder_layers num_key_value_heads num_experts_per_tok type_vocab_size eos_token_id",
    256: "vocab_size",
    32: "image_size",
    8: "patch_size",
    1: "bos_token_id",
    0: "pad_token_id",
}
_TINY = {name: size for size, names in _SIZES.items() for name in names.split()}


def tiny_config(kind: type):
    """A configuration of class ``kind`` with every size in it made small."""
    default = kind()
    sizes = {}
    for name, value in vars(default).items():
        if isinstance(value, transformers.PretrainedConfig):
            sizes[name] = tiny_config(type(value)).to_dict()
        elif name == "depths":
            sizes[name] = [1] * len(value)
        elif name == "hidden_sizes":
            sizes[name] = [16 * (i + 1) for i in range(len(value))]
    for name, size in _TINY.items():
        if type(getattr(default, name, None)) in (int, float):
            sizes[name] = size
    return kind(**sizes)


def tiny_model(name: str, mapping: str = "MODEL_MAPPING") -> torch.nn.Module:
    """The model that ``mapping`` has for the architecture ``name``, in eval mode."""
    config = tiny_config(transformers.CONFIG_MAPPING[name])
    kind = getattr(transformers.models.auto.modeling_auto, mapping)[type(config)]
    kind = kind[0] if isinstance(kind, (list, tuple)) else kind
    return kind(config).eval()


def prune_matrices(model: torch.nn.Module, sparsity: float = 0.9) -> torch.nn.Module:
    """Zero ``sparsity`` of every matrix and of every stack of matrices of ``model``, in place."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() in (2, 3):
                if not parameter.any():
                    parameter.normal_(0, 0.02)
                parameter.mul_(torch.rand_like(parameter) > sparsity)
    return model

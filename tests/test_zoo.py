"""Architectures of transformers, a few of each kind: every multiply is sparse, every output equal."""

import pytest
import torch
from tiny_transformers import prune_matrices, tiny_model

import fxsparse

ENCODERS = ["bert", "distilbert", "deberta-v2", "fnet", "modernbert"]
DECODERS = ["gpt2", "gptj", "llama", "phi3", "mamba", "rwkv"]
EXPERTS = ["olmoe", "qwen3_moe", "granitemoe"]
TEXT_TO_TEXT = ["t5", "switch_transformers", "bart"]
IMAGES = ["vit", "beit", "siglip_vision_model", "segformer", "mobilevit"]
SOUNDS = ["wav2vec2", "wavlm", "sew-d", "whisper"]


def _inputs(name, model, batch):
    if name in IMAGES:
        return {"pixel_values": torch.randn(batch, 3, 32, 32)}
    if name == "whisper":
        length = 2 * model.config.max_source_positions
        features = torch.randn(batch, model.config.num_mel_bins, length)
        return {"input_features": features, "decoder_input_ids": torch.ones(batch, 3).long()}
    if name in SOUNDS:
        return {"input_values": torch.randn(batch, 2000)}
    ids = torch.randint(3, 100, (batch, 9))
    return {"input_ids": ids} | ({"decoder_input_ids": ids[:, :4]} if name in TEXT_TO_TEXT else {})


@pytest.mark.parametrize("name", [*ENCODERS, *DECODERS, *EXPERTS, *TEXT_TO_TEXT, *IMAGES, *SOUNDS])
@torch.no_grad()
def test_a_tiny_model(name):
    model = prune_matrices(tiny_model(name))
    model(**_inputs(name, model, 1))  # RWKV rescales its weights at the first call
    sparse = fxsparse.compile(model, min_elements=0)
    assert type(sparse) is type(model)
    for batch in (2, 1):
        inputs = _inputs(name, model, batch)
        torch.manual_seed(1)
        expected = model(**inputs)
        torch.manual_seed(1)
        got = sparse(**inputs)
        assert type(got) is type(expected) and list(got) == list(expected)
        bound = 2e-4 * expected[0].abs().max().item()
        torch.testing.assert_close(got[0], expected[0], rtol=0, atol=bound)
    rows = {path: row for row in sparse.report.rows for path in (row.path, *row.aliases)}
    for path, module in model.named_modules():
        is_linear = isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
        if is_linear and module.weight.numel() >= 1024:
            assert rows[f"{path}.weight"].status == "sparse", rows[f"{path}.weight"].reason
    for path, parameter in model.named_parameters():
        if ".experts." in path and parameter.dim() == 3:
            assert rows[path].status == "sparse", rows[path].reason
    assert (name in EXPERTS) <= any(
        row.shape[0] == 4 and len(row.shape) == 3 for row in rows.values()
    )

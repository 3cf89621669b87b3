"""generate() of language models: the same tokens, with and without a cache, and no dense weight."""

import pytest
import torch
from tiny_transformers import prune_matrices, tiny_model

import fxsparse

DECODERS = ["llama", "gpt2", "mixtral", "mamba"]
ENCODER_DECODERS = ["t5", "bart"]
_MAPPINGS = dict.fromkeys(DECODERS, "MODEL_FOR_CAUSAL_LM_MAPPING") | dict.fromkeys(
    ENCODER_DECODERS, "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING"
)


def _model(name):
    model = prune_matrices(tiny_model(name, _MAPPINGS[name]), 0.85)
    with torch.no_grad():  # tokens then follow from the layers, not from the last token alone
        for module in model.modules():
            if module is not model.get_output_embeddings() and _is_linear(module):
                module.weight.mul_(6)
    return model


def _is_linear(module):
    return isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"


def _generate(model, batch, **options):
    ids = torch.arange(3, 3 + 7 * batch).view(batch, 7)
    options |= {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    if model.config.is_encoder_decoder:
        options |= {"decoder_start_token_id": 1, "forced_eos_token_id": None}
    return model.generate(ids, **options)


@pytest.fixture(params=_MAPPINGS)
def name(request):
    return request.param


def test_greedy_tokens_are_those_of_the_dense_model(name, monkeypatch):
    model = _model(name)
    sparse = fxsparse.compile(model, min_elements=0)
    monkeypatch.setattr("fxsparse.stand_in.weight_view.unpack", None)  # no dense weight is rebuilt
    for batch, use_cache in ((2, True), (2, False), (3, True)):
        expected = _generate(model, batch, use_cache=use_cache)
        assert len(expected.unique()) > 2  # the model says more than one thing
        assert torch.equal(_generate(sparse, batch, use_cache=use_cache), expected)


def test_every_multiplied_matrix_is_packed(name):
    model = _model(name)
    report = fxsparse.inspect(model, min_elements=0)
    rows = {row.path: row for row in report.rows}
    for path, module in model.named_modules():
        if _is_linear(module):
            found = [row for row in report.rows if f"{path}.weight" in (row.path, *row.aliases)]
            assert [row.status for row in found] == ["sparse"], path
    stacks = [path for path, tensor in model.named_parameters() if tensor.dim() == 3]
    if name == "mixtral":
        assert len(stacks) == 4
        assert {rows[path].status for path in stacks} == {"sparse"}


def test_what_generate_needs_of_the_model_is_there(name):
    model = _model(name)
    sparse = fxsparse.compile(model, min_elements=0)
    assert type(sparse) is type(model)
    assert sparse.config.to_dict() == model.config.to_dict()
    assert sparse.generation_config.to_dict() == model.generation_config.to_dict()
    assert (sparse.device, sparse.dtype) == (model.device, model.dtype)
    assert sparse.main_input_name == model.main_input_name


def test_in_place(name):
    model = _model(name)
    expected = _generate(model, 2)
    sparse = fxsparse.compile(model, min_elements=0, inplace=True)
    assert sparse is model
    assert torch.equal(_generate(model, 2), expected)
    assert sparse.report.stored_bytes < sparse.report.dense_bytes / 2


def test_beams_and_sampling():
    model = _model("llama")
    sparse = fxsparse.compile(model, min_elements=0)
    ids = torch.arange(3, 17).view(2, 7)
    for options in ({"num_beams": 3, "do_sample": False}, {"do_sample": True, "top_k": 5}):
        options |= {"max_new_tokens": 5, "pad_token_id": 0, "eos_token_id": None}
        torch.manual_seed(1)
        expected = model.generate(ids, **options)
        torch.manual_seed(1)
        assert torch.equal(sparse.generate(ids, **options), expected)

"""Public reports of models that a trace fails on, or gets wrong: each is compiled and stays right.

A test is named for the behaviour and cites the report. The oracle is the same pruned model in eager
mode, and the report of the result shows that its weights were rewritten.
"""

import pytest
import torch
import torch.nn.functional as F
from awkward_models import (
    Base,
    FunctionalBatchNorm,
    FunctionalDropout,
    Plain,
    ReadsWeight,
    ReturnsDataclass,
    ReturnsDict,
    ReturnsNamedTuple,
    TensorMethod,
)
from pruned import operators_run, prune, sparse_weight
from torch import fx, nn

import fxsparse


def _status(compiled):
    return {row.path: row.status for row in compiled.report.rows}


def _check(model, *calls, **options):
    """Compile ``model``, hold each call of it against eager, and return what compile gave."""
    compiled = fxsparse.compile(model, min_elements=0, **options)
    for args, kwargs in calls:
        torch.testing.assert_close(compiled(*args, **kwargs), model(*args, **kwargs))
    return compiled


class Flag(Base):
    def forward(self, x, flag=None):
        if flag:
            return self.a(x)
        return self.b(x)


class Shape(Base):
    def forward(self, x):
        if x.shape[0] > 2:
            return self.a(x)
        return self.b(x)


def test_a_branch_on_an_argument_or_a_shape():
    """https://github.com/pytorch/pytorch/issues/54602"""
    x = torch.randn(3, 64)
    for model, calls in (
        (Flag(), [((x,), {}), ((x, True), {}), ((x,), {"flag": False})]),
        (Shape(), [((x,), {}), ((x[:1],), {})]),
    ):
        compiled = _check(prune(model), *calls)
        assert _status(compiled) == {"a.weight": "sparse", "b.weight": "sparse"}
        assert "branches on" in compiled.report.note or "optional" in compiled.report.note


class Decoder(nn.Module):
    """The branches of a language model: on values of the mask, on what is cached."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(100, 64)
        self.q, self.kv = nn.Linear(64, 64), nn.Linear(64, 128)
        self.head = nn.Linear(64, 100, bias=False)

    def forward(self, ids, mask=None, past=None, use_cache=False):
        x = self.emb(ids)
        q, (k, v) = self.q(x), self.kv(x).chunk(2, -1)
        if past is not None:
            k, v = (torch.cat([old, new], 1) for old, new in zip(past, (k, v)))
        scores = q @ k.transpose(1, 2)
        if mask is not None and not bool(mask.all()):
            scores = scores.masked_fill(mask[:, None] == 0, -1e9)
        logits = self.head(scores.softmax(-1) @ v)
        return (logits, (k, v)) if use_cache else (logits,)


def test_a_decoder_with_branches_on_values_falls_back():
    """https://github.com/vllm-project/llm-compressor/issues/1603"""
    model = prune(Decoder())
    ids, ones = torch.randint(0, 100, (2, 7)), torch.ones(2, 7)
    padded = ones.clone()
    padded[0, :3] = 0
    past = model(ids, use_cache=True)[1]
    compiled = _check(
        model,
        ((ids,), {}),
        ((ids, ones), {}),
        ((ids, padded), {}),
        ((ids[:, :1],), {"past": past, "use_cache": True}),
    )
    assert type(compiled) is Decoder
    assert set(_status(compiled).values()) == {"sparse"} and compiled.report.rewritten == 3


def test_transformers_models_need_no_tracer_of_their_own():
    """https://github.com/huggingface/transformers/pull/41683"""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 96, "vocab_size": 50}
    ids = torch.randint(3, 50, (2, 7))
    for model in (
        transformers.BertModel(transformers.BertConfig(**sizes)),
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)),
    ):
        prune(model)
        compiled = fxsparse.compile(model, min_elements=0)
        assert type(compiled) is type(model)
        linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
        assert compiled.report.rewritten >= len(linears)
        got, expected = compiled(input_ids=ids), model(input_ids=ids)
        assert type(got) is type(expected)
        torch.testing.assert_close(got[0], expected[0])


class TwoWaysIn(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(100, 64)
        self.fc = nn.Linear(64, 64)

    def forward(self, input_ids=None, inputs_embeds=None, scale=1.0):
        if inputs_embeds is None:
            inputs_embeds = self.emb(input_ids)
        return self.fc(inputs_embeds) * scale


@pytest.mark.parametrize("examples", [None, "input_ids", "inputs_embeds"])
def test_inputs_by_keyword_other_than_the_first(examples):
    """https://github.com/huggingface/transformers/issues/31200"""
    model = prune(TwoWaysIn())
    inputs = {
        "input_ids": torch.randint(0, 100, (2, 5)),
        "inputs_embeds": torch.randn(2, 5, 64),
    }
    example = {examples: inputs[examples]} if examples else None
    calls = [((), {name: value}) for name, value in inputs.items()]
    compiled = _check(model, *calls, ((), {**calls[1][1], "scale": 2.0}), example_inputs=example)
    assert _status(compiled) == {"fc.weight": "sparse"}


class VisionTransformer(nn.Module):
    """Position embeddings are interpolated where the image has another size than in training."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 64, 8, 8)
        self.position = nn.Parameter(torch.randn(1, 16, 64) * 0.1)
        self.qkv, self.proj = nn.Linear(64, 192), nn.Linear(64, 64)
        self.mlp = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def _positions(self, height, width):
        if height * width == self.position.shape[1]:
            return self.position
        grid = self.position.view(1, 4, 4, 64).permute(0, 3, 1, 2)
        grid = F.interpolate(grid, size=(height, width), mode="bicubic")
        return grid.flatten(2).transpose(1, 2)

    def forward(self, image):
        x = self.patch(image)
        batch, _, height, width = x.shape
        x = x.flatten(2).transpose(1, 2) + self._positions(height, width)
        q, k, v = self.qkv(x).reshape(batch, -1, 3, 4, 16).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.mlp(x)


def test_a_vision_transformer_that_interpolates():
    """https://github.com/pytorch/pytorch/issues/70485"""
    model = prune(VisionTransformer())
    sizes = [(1, 3, 32, 32), (3, 3, 32, 32), (2, 3, 48, 24)]
    compiled = _check(model, *(((torch.randn(size),), {}) for size in sizes))
    status = _status(compiled)
    assert [status[f"{name}.weight"] for name in ("qkv", "proj", "mlp.0", "mlp.2")] == [
        "sparse"
    ] * 4
    assert compiled.report.note


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_norms_made_of_hooks_are_not_dropped(norm):
    """https://github.com/pytorch/pytorch/issues/105445"""
    model = prune(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)))
    with torch.no_grad():
        model[2].weight.mul_(100)  # without its norm the difference would be large
    norm(model[2])
    compiled = _check(model.eval(), ((torch.randn(3, 64),), {}))
    rows = {row.path: row for row in compiled.report.rows}
    assert rows["0.weight"].status == "sparse"
    others = [row for path, row in rows.items() if path.startswith("2.")]
    assert others and all(row.status == "sparse" or row.reason for row in others)


@pytest.mark.parametrize("where", ["root", "child"])
def test_hooks_of_users_go_on_running(where):
    """https://github.com/pytorch/pytorch/issues/105445"""
    calls = []

    def double(module, args, out):
        calls.append(type(module))
        return out * 2

    model = prune(Plain())
    (model if where == "root" else model.a).register_forward_hook(double)
    compiled = _check(model, ((torch.randn(3, 64),), {}))
    assert _status(compiled) == {"a.weight": "sparse", "b.weight": "sparse"}
    assert len(calls) == 2  # once in each of the two models
    assert "hooks" in compiled.report.note


def _evaluated_after_training(cls):
    model = prune(cls()).train()
    compiled = fxsparse.compile(model, min_elements=0)
    assert compiled.training and "in training" in compiled.report.note
    assert compiled.report.rewritten == 2
    x = torch.randn(8, 64)
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    torch.testing.assert_close(compiled(x), expected)
    model.eval(), compiled.eval()
    torch.testing.assert_close(compiled(x), model(x))
    assert torch.equal(compiled(x), compiled(x))


def test_dropout_of_a_model_compiled_in_training_is_not_frozen():
    """https://github.com/pytorch/pytorch/issues/68190"""
    _evaluated_after_training(FunctionalDropout)


def test_batch_norm_of_a_model_compiled_in_training_is_not_frozen():
    """https://github.com/hpcaitech/ColossalAI/pull/1225"""
    _evaluated_after_training(FunctionalBatchNorm)


def test_methods_called_through_the_class():
    """https://github.com/pytorch/pytorch/issues/98422"""
    compiled = _check(prune(TensorMethod()), ((torch.randn(3, 64),), {}))
    assert _status(compiled) == {"a.weight": "sparse", "b.weight": "sparse"}


@pytest.mark.parametrize("capture", ["trace", "modules"])
def test_batch_size_and_length_stay_free(capture):
    """https://github.com/pytorch/pytorch/issues/38472"""

    class Heads(Base):
        def forward(self, x):
            batch, length, _ = x.shape
            y = self.a(x).view(batch, length, 4, 16).transpose(1, 2)
            return self.b(y.transpose(1, 2).reshape(batch, length, 64))

    model = prune(Heads())
    shapes = [(1, 5, 64), (7, 5, 64), (7, 11, 64), (2, 1, 64)]
    compiled = _check(
        model,
        *(((torch.randn(shape),), {}) for shape in shapes),
        example_inputs=(torch.randn(1, 5, 64),),
        capture=capture,
    )
    assert isinstance(compiled, fx.GraphModule) is (capture == "trace")
    assert compiled.report.rewritten == 2


def _functional(*forwards):
    """A model of a nested module that multiplies by ``w`` (64x64) as each forward says, in turn."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(sparse_weight(64, 64))
            self.bias = nn.Parameter(torch.randn(64))
            self.kernel = nn.Parameter(torch.randn(64, 64, 3) * 0.1)

        def forward(self, x):
            for forward in forwards:
                x = forward(x, self.w, self.bias, self.kernel)
            return x

    return nn.Sequential(Inner()).eval()


@pytest.mark.parametrize(
    "forward",
    [
        lambda x, w, b, k: F.linear(input=x, weight=w, bias=b),
        lambda x, w, b, k: F.linear(bias=b, input=x, weight=w),
        lambda x, w, b, k: F.linear(weight=w, input=x, bias=None),
        lambda x, w, b, k: F.linear(x, bias=b, weight=w),
    ],
)
def test_linear_by_keywords(forward):
    """https://github.com/pytorch/pytorch/issues/73463"""
    compiled = _check(_functional(forward), ((torch.randn(5, 64),), {}))
    assert _status(compiled)["0.w"] == "sparse" and isinstance(compiled, fx.GraphModule)
    assert torch.ops.fxsparse.linear.default in [node.target for node in compiled.graph.nodes]


def test_functions_by_keywords_inside_a_nested_module():
    """https://github.com/pytorch/pytorch/issues/87686"""
    spellings = [
        lambda x, w, b, k: torch._C._nn.linear(x, weight=w, bias=b),
        lambda x, w, b, k: torch.addmm(b, mat1=x, mat2=w.t()),
        lambda x, w, b, k: x @ w.t(),
        lambda x, w, b, k: torch.matmul(x, w.T),
        lambda x, w, b, k: torch.matmul(input=x, other=w.T),
    ]
    compiled = _check(_functional(*spellings), ((torch.randn(5, 64),), {}))
    assert _status(compiled)["0.w"] == "sparse"
    nodes = [node.target for node in compiled.graph.nodes]
    assert nodes.count(torch.ops.fxsparse.linear.default) == 5


def test_convolution_by_keywords_inside_a_nested_module():
    """https://github.com/pytorch/pytorch/issues/87686"""
    model = _functional(
        lambda x, w, b, k: F.conv1d(input=x, weight=k, padding=1, bias=b),
        lambda x, w, b, k: F.linear(input=x.transpose(1, 2), weight=w),
    )
    compiled = _check(model, ((torch.randn(2, 64, 9),), {}))
    rows = {row.path: row for row in compiled.report.rows}
    assert rows["0.w"].status == "sparse"
    assert rows["0.kernel"].status == "dense" and rows["0.kernel"].reason


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_layers_of_a_transformer_encoder_are_rewritten(norm_first):
    """https://github.com/pytorch/pytorch/issues/32764"""
    layer = nn.TransformerEncoderLayer(64, 4, 96, batch_first=True, norm_first=norm_first)
    model = prune(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    x = torch.randn(2, 5, 64)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    calls = [((x,), {}), ((x,), {"mask": causal}), ((x,), {"src_key_padding_mask": padding})]
    with torch.inference_mode():  # where torch would take its fused path
        compiled = _check(model, *calls)
        ran = operators_run(lambda: compiled(x))
    assert set(_status(compiled).values()) == {"sparse"} and compiled.report.rewritten == 8
    assert ran["fxsparse.linear.default"] >= 8
    assert not [name for name in ran if "transformer_encoder" in name or "native_multi" in name]


def test_what_is_rewritten_in_attention_is_what_runs(monkeypatch):
    """https://github.com/pytorch/pytorch/issues/78109"""

    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    model = prune(Attends())
    x = torch.randn(2, 5, 64)
    compiled = _check(model, ((x,), {}))
    assert _status(compiled) == {
        "attention.in_proj_weight": "sparse",
        "attention.out_proj.weight": "sparse",
    }
    monkeypatch.setattr("fxsparse.stand_in.weight_view.unpack", None)  # no dense weight is rebuilt
    with torch.no_grad():
        assert operators_run(lambda: compiled(x))["fxsparse.linear.default"] >= 2


def test_a_square_conv1d_of_transformers_is_not_transposed():
    """https://github.com/AutoGPTQ/AutoGPTQ/pull/139"""
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    model = nn.Sequential(pytorch_utils.Conv1D(64, 64), nn.ReLU(), pytorch_utils.Conv1D(96, 64))
    for capture in ("auto", "modules"):
        compiled = _check(prune(model), ((torch.randn(2, 5, 64),), {}), capture=capture)
        assert _status(compiled) == {"0.weight": "sparse", "2.weight": "sparse"}


@pytest.mark.parametrize("capture", ["auto", "modules"])
def test_forward_may_ask_for_dtype_and_shape_of_a_weight(capture):
    """https://github.com/huggingface/transformers/issues/24439"""
    compiled = _check(prune(ReadsWeight()), ((torch.randn(3, 64),), {}), capture=capture)
    assert _status(compiled) == {"a.weight": "sparse", "b.weight": "sparse"}


def test_one_block_with_a_branch_leaves_the_others_rewritten():
    """https://github.com/pytorch/torchdynamo/issues/115"""
    model = prune(nn.Sequential(Plain(), Shape(), Plain()))
    compiled = _check(model, ((torch.randn(5, 64),), {}), ((torch.randn(1, 64),), {}))
    assert set(_status(compiled).values()) == {"sparse"} and compiled.report.rewritten == 6
    assert "Shape" in compiled.report.note  # the report tells which block it was


def test_a_view_of_an_unpacked_shape():
    """https://github.com/pytorch/pytorch/issues/44665"""

    class TransposesForScores(Base):
        def forward(self, x):
            new_shape = (*x.size()[:-1], 4, 16)
            y = self.a(x).view(*new_shape).permute(0, 2, 1, 3)
            return self.b(y.permute(0, 2, 1, 3).flatten(-2))

    shapes = [(2, 5, 64), (1, 3, 64)]
    compiled = _check(
        prune(TransposesForScores()), *(((torch.randn(shape),), {}) for shape in shapes)
    )
    assert _status(compiled) == {"a.weight": "sparse", "b.weight": "sparse"}


@pytest.mark.parametrize("cls", [ReturnsDict, ReturnsNamedTuple, ReturnsDataclass])
def test_outputs_keep_their_container(cls):
    """https://github.com/huggingface/transformers/issues/19209"""
    model = prune(cls())
    compiled = fxsparse.compile(model, min_elements=0)
    x = torch.randn(3, 64)
    got, expected = compiled(x), model(x)
    assert type(got) is type(expected)
    if isinstance(got, dict):
        assert list(got) == list(expected) and type(got["rest"]) is list and got["rest"][1] is None
        got, expected = ([v["first"], v["rest"][0]] for v in (got, expected))
    else:
        names = getattr(got, "_fields", None) or list(vars(got))
        got, expected = ([getattr(v, name) for name in names] for v in (got, expected))
    torch.testing.assert_close(got, expected)
    assert compiled.report.rewritten == 2

"""``capture="export"``: a graph that takes what it was exported for, and nothing silently different."""

import copy
import math
import random

import awkward_models as awkward
import pytest
import torch
import torch.nn.functional as F
from awkward_models import Base
from pruned import multiplies, prune
from torch import fx, nn

import fxsparse

X = torch.randn(2, 64)
ARGUMENTS = {
    "RequiredButNone": (X, None),
    "NoneInHelper": (X, None),
    "LooksAtAlias": (X, None),
    "LooksAtPacked": (X, (None, 1)),
    "Identity": (X, torch.randn(2, 64)),
}
#: Models that export gets right for inputs like the examples: of any batch size, or of this one.
RIGHT = [
    "Plain",
    "BatchNorm",
    "ByStructure",
    "Constant",
    "FillsATensor",
    "FunctionalBatchNorm",
    "FunctionalDropout",
    "Generates",
    "Identity",
    "InPlaceAlias",
    "InPlaceOnSize",
    "InPlaceOnTranspose",
    "IsInstance",
    "IsTensor",
    "KeepsTheNorm",
    "Kwargs",
    "LayerDrop",
    "LooksAtAlias",
    "LooksAtPacked",
    "NoGrad",
    "Noise",
    "NoneInHelper",
    "Optional",
    "Ordered",
    "ReadsWeight",
    "RequiredButNone",
    "ReturnsDict",
    "ReturnsNamedTuple",
    "TensorMethod",
    "UnpacksShape",
    "BufferInPlace",
]
FIXED_BATCH = ["Catches", "Iterates"]
REFUSED = {
    "Branch": "data-dependent",
    "Counter": "changes 'calls'",
    "History": "changes 'seen'",
    "GradMode": "is_grad_enabled",
    "ReversesGradient": "backward of _Reverse",
    "Seeds": "random numbers",
    "Closure": "'calls'",
    "ReturnsDataclass": "register a pytree",
    "WritesData": "fake tensor",
}


def _model(name):
    cls = getattr(awkward, name)
    return prune((cls() if name == "Closure" else cls)())


def _export(model, inputs=(X,), **options):
    return fxsparse.compile(model, inputs, capture="export", min_elements=0, **options)


def _same(exported, model, *args, **kwargs):
    torch.manual_seed(1), random.seed(1)
    got = exported(*args, **kwargs)
    torch.manual_seed(1), random.seed(1)
    expected = model(*args, **kwargs)
    assert type(got) is type(expected)
    coarse = isinstance(model, (awkward.Autocast, awkward.Fp32Island))
    assert list(fxsparse.verify.differences(got, expected, "output", coarse)) == []


@pytest.mark.parametrize("name", RIGHT + FIXED_BATCH + ["BatchNorm train"])
def test_gives_what_the_model_gives(name):
    name, _, training = name.partition(" ")
    model = _model(name).train(bool(training))
    inputs = ARGUMENTS.get(name, (X,))
    exported = _export(model, inputs)
    assert isinstance(exported, fx.GraphModule)
    assert exported.report.capture == "export"
    expected = {k: v.shape for k, v in model.state_dict().items()}
    assert {k: v.shape for k, v in fxsparse.to_dense(exported).state_dict().items()} == expected
    model, rest = copy.deepcopy(model), inputs[1:]
    _same(exported, model, torch.randn(2, 64), *rest)
    if name in FIXED_BATCH:
        with pytest.raises(ValueError, match=r"x.shape\[0\] == 2, got the sizes"):
            exported(torch.randn(5, 64))
    elif name != "Identity":
        _same(exported, model, torch.randn(5, 64), *rest)


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_it_would_freeze(name):
    with pytest.raises(fxsparse.CaptureError, match=f"{REFUSED[name]}.*capture='auto'"):
        _export(_model(name))


def test_what_fake_tensors_mislead_is_caught_by_verification():
    with pytest.raises(fxsparse.VerificationError):
        _export(_model("ExactType"))


def test_needs_example_inputs():
    with pytest.raises(ValueError, match="capture='export'.*example_inputs"):
        fxsparse.compile(prune(awkward.Plain()), capture="export")


def test_every_spelling_is_rewritten():
    class Spellings(nn.Module):
        def __init__(self):
            super().__init__()
            for name in "abcdefgh":
                self.register_parameter(name, nn.Parameter(torch.randn(64, 64)))
            self.bias = nn.Parameter(torch.randn(64))

        def forward(self, x):
            y = F.linear(x, self.a, self.bias) + x @ self.b.T + x.matmul(self.c.transpose(0, 1))
            y = y + torch.addmm(self.bias, x, self.d) + torch.mm(x, self.e.t())
            y = y + F.linear(x, self.f.detach().float()) + x @ self.g.permute(1, 0)
            return y + torch.mm(x, self.h.mT.contiguous())

    model = prune(Spellings())
    exported = _export(model)
    assert exported.report.rewritten == 8
    assert multiplies(exported.graph) == 8
    _same(exported, model, torch.randn(5, 64))


def test_stacks_ties_and_parts_go_through_the_stand_in(tmp_path):
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(40, 64)
            self.head = nn.Linear(64, 40, bias=False)
            self.head.weight = self.embed.weight
            self.stack = nn.Parameter(torch.randn(3, 64, 64))

        def forward(self, ids):
            x = self.embed(ids)
            y = torch.bmm(x.expand(3, -1, -1), self.stack).sum(0)
            return self.head(y @ self.stack[1])

    model, ids = prune(Experts()), torch.randint(0, 40, (5,))
    exported = _export(model, (ids,))
    assert exported.report.rewritten == 2
    torch.save(exported, tmp_path / "m.pt")
    other = torch.randint(0, 40, (7,))
    for module in (exported, torch.load(tmp_path / "m.pt", weights_only=False)):
        _same(module, model, other)
    _same(fxsparse.to_dense(exported), model, other)


def test_a_batch_of_one_is_no_special_case_in_either_direction():
    class OneByOne(Base):
        def forward(self, x):
            return self.a(x) if x.shape[0] == 1 else self.b(x)

    model = prune(OneByOne())
    _same(_export(prune(awkward.Plain()), (X[:1],)), prune(awkward.Plain()).eval(), X[:0])
    exported = _export(model)
    _same(exported, model, torch.randn(3, 64))
    with pytest.raises(ValueError, match=r"expected x.shape\[0\] != 1"):
        exported(X[:1])


def test_inputs_that_broadcast_keep_their_size_of_one():
    class Scaled(Base):
        def forward(self, x, scale):
            return self.b(self.a(x)) * scale

    model = prune(Scaled())
    exported = _export(model, (X, torch.randn(1, 64)))
    _same(exported, model, torch.randn(5, 64), torch.randn(1, 64))
    with pytest.raises(ValueError, match=r"scale.shape\[0\] == 1"):
        exported(torch.randn(5, 64), torch.randn(5, 64))


def test_takes_the_structure_it_was_exported_for():
    class Many(Base):
        def forward(self, batch, *rest, mask=None, scale=1.0):
            y = self.b(self.a(batch["x"])) * scale + rest[0]
            return y if mask is None else y * mask

    class Caller(nn.Module):
        def __init__(self, many):
            super().__init__()
            self.many = many

        def forward(self, x, y, mask=None, scale=1.0):
            return self.many({"x": x, "y": None}, y, mask=mask, scale=scale)

    many = prune(Many())
    x, y = torch.randn(3, 64), torch.randn(3, 64)
    exported = _export(many, ({"x": X, "y": None}, X.clone()))
    _same(exported, many, {"x": x, "y": None}, y)
    with pytest.raises(ValueError, match="in another order"):
        exported({"y": None, "x": x}, y)
    with pytest.raises(ValueError, match=r"batch\['y'\]: expected None.*exported for batch"):
        exported({"x": x, "y": y}, y)
    with pytest.raises(ValueError, match="other inputs came"):
        exported({"x": x}, y)
    with pytest.raises(TypeError, match="mask"):
        exported({"x": x, "y": None}, y, mask=x)

    model = Caller(many)
    exported = _export(model, {"y": X, "x": X.clone(), "mask": None, "scale": 2.0})
    _same(exported, model, x=x, y=y, mask=None, scale=2.0)
    _same(exported, model, x=x, mask=None, scale=2.0, y=y)
    for wrong, message in (
        ({"mask": x}, "mask: expected None, got a tensor"),
        ({"scale": 3.0}, "scale: expected 2.0, got 3.0"),
        ({"x": x.double()}, "x: expected 2-D torch.float32, got 2-D torch.float64"),
        ({"x": x[0]}, "x: expected 2-D"),
        ({"x": [x]}, "x: expected a tensor, got a list"),
        ({"y": x}, "same tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            exported(**{"x": x, "y": y, "mask": None, "scale": 2.0, **wrong})


def test_inputs_that_were_one_tensor_stay_one():
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

        def forward(self, q, k, v):
            return self.attention(q, k, v)[0]

    model = prune(Attends())
    x, y = torch.randn(2, 3, 64), torch.randn(2, 3, 64)
    exported = _export(model, (x, x, x))
    _same(exported, model, y, y, y)
    with pytest.raises(ValueError, match="same tensor"):
        exported(x, y, y)


def test_registered_dataclasses_come_back_as_they_are():
    @awkward.dataclass
    class Result:
        hidden: torch.Tensor
        scores: object

    torch.export.register_dataclass(Result)

    class Returns(Base):
        def forward(self, x):
            return Result(self.b(self.a(x)), None)

    model = prune(Returns())
    exported = _export(model)
    assert exported(X).scores is None
    _same(exported, model, torch.randn(5, 64))


def test_training_flags_stay_as_exported():
    class Drops(Base):
        def forward(self, x):
            return F.dropout(self.b(self.a(x)), 0.5, self.training)

    model = prune(Drops())
    exported = _export(model)
    assert exported.eval() is exported and not exported.training
    with pytest.raises(RuntimeError, match=r"call train\(\) on the model before compile"):
        exported.train()
    trained = _export(model.train())
    _same(trained, model, torch.randn(5, 64))
    assert (trained(X) == 0).any()


def test_buffers_and_inputs_are_updated_as_in_the_model():
    class Updates(Base):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(64)

        def forward(self, x):
            x.add_(1)
            return self.b(self.norm(self.a(x)))

    model = prune(Updates()).train()
    exported = _export(model)
    assert model.norm.num_batches_tracked == 0
    x = torch.randn(5, 64)
    given = [x.clone(), x.clone()]
    exported(given[0]), model(given[1])
    assert torch.equal(given[0], x + 1) and torch.equal(given[0], given[1])
    for name, value in model.norm.named_buffers():
        torch.testing.assert_close(getattr(exported.norm, name), value)


def test_a_region_without_gradients_stays_one():
    class Frozen(Base):
        def forward(self, x):
            with torch.no_grad():
                y = self.a(x)
            return self.b(y) + x

    model = prune(Frozen())
    exported = _export(model)
    assert exported.report.rewritten == 2
    grads = []
    for module in (model, exported):
        x = torch.ones(2, 64, requires_grad=True)
        model.a.bias.grad = model.b.bias.grad = None
        module(x).sum().backward()
        grads.append((x.grad, model.b.bias.grad))
        assert model.a.bias.grad is None
    torch.testing.assert_close(grads[0], grads[1])

    class AllOfIt(Base):
        @torch.no_grad()
        def forward(self, x):
            return self.b(self.a(x))

    exported = _export(prune(AllOfIt()))
    assert exported.report.rewritten == 2 and not exported(X).requires_grad


@pytest.mark.parametrize("name", ["Autocast", "Fp32Island"])
def test_a_region_under_autocast_is_rewritten_too(name):
    model = _model(name)
    exported = _export(model)
    assert exported.report.rewritten == 2
    _same(exported, model, torch.randn(5, 64))


@pytest.mark.parametrize("name", ["Noise", "Autocast", "NoGrad", "BatchNorm", "ReturnsNamedTuple"])
def test_is_an_ordinary_module(name, tmp_path, recwarn):
    model = _model(name)
    exported = _export(model)
    torch.save(exported, tmp_path / "m.pt")
    loaded = torch.load(tmp_path / "m.pt", weights_only=False)
    dense = fxsparse.to_dense(exported)
    for again in (copy.deepcopy(exported), loaded, dense):
        _same(again, model, torch.randn(5, 64))
        with pytest.raises(ValueError, match="x: expected 2-D"):
            again(X[0])
        with pytest.raises(RuntimeError, match="training flags"):
            again.train()
    assert loaded.report == exported.report and not hasattr(dense, "report")
    exported.load_state_dict(loaded.state_dict())
    assert set(dense.state_dict()) == set(model.state_dict())
    assert not recwarn.list


def test_ties_unused_members_and_constants():
    class Parts(Base):
        def __init__(self):
            super().__init__()
            self.tied = nn.Linear(64, 64, bias=False)
            self.tied.weight = self.a.weight
            self.unused = nn.Linear(64, 64)
            self.register_buffer("scratch", torch.ones(64), persistent=False)
            self.plain = torch.full((64,), 2.0)

        def forward(self, x):
            return self.tied(self.a(x)) * self.scratch + self.plain * torch.tensor([3.0])

    model = prune(Parts())
    exported = _export(model)
    row = exported.report.rows[0]
    assert (row.path, row.aliases, row.status) == ("a.weight", ("tied.weight",), "sparse")
    assert exported.a.weight_packed is exported.tied.weight_packed
    assert set(fxsparse.to_dense(exported).state_dict()) == set(model.state_dict())
    _same(exported, model, torch.randn(5, 64))
    _same(copy.deepcopy(exported), model, torch.randn(5, 64))


def test_inplace_frees_the_models_weights_too():
    model = prune(awkward.Plain())
    expected = model(X)
    exported = _export(model, inplace=True)
    assert isinstance(model.a, fxsparse.SparseLinear)
    assert model.a.weight_packed is exported.a.weight_packed
    torch.testing.assert_close(model(X), expected)
    torch.testing.assert_close(exported(X), expected)
    refused = prune(awkward.Counter())
    with pytest.raises(fxsparse.CaptureError):
        _export(refused, inplace=True)
    assert type(refused.a) is nn.Linear and refused.calls == 0


def test_hooks_and_awkward_names_are_refused():
    model = prune(awkward.Plain())
    model.a.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(fxsparse.CaptureError, match="a has hooks"):
        _export(model)
    named = nn.Sequential()
    named.add_module("graph", nn.Linear(64, 64))
    with pytest.raises(fxsparse.CaptureError, match="attribute 'graph'"):
        _export(prune(named))


def test_forward_that_asks_for_autocast_is_refused_under_it_only():
    class Asks(Base):
        def forward(self, x):
            y = self.a(x)
            return self.b(y if torch.is_autocast_enabled("cpu") else y * 1)

    model = prune(Asks())
    exported = _export(model)
    _same(exported, model, torch.randn(5, 64))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast"):
        exported(X)


def test_compiles_and_exports_again():
    model = prune(awkward.ReturnsDict())
    exported = _export(model)
    compiled = torch.compile(exported, backend="eager", fullgraph=True, dynamic=True)
    _same(compiled, model, torch.randn(5, 64))
    again = torch.export.export(exported, (X,)).module()
    _same(again, model, X)


def test_transformers():
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    bert = transformers.BertModel(transformers.BertConfig(**common, intermediate_size=128))
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**common, num_key_value_heads=2, intermediate_size=128)
    )
    ids = torch.randint(0, 50, (1, 7))
    for model, options in ((bert, {}), (llama, {"use_cache": False})):
        prune(model)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **options}
        exported = _export(model, inputs)
        linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
        dense = [n for n in exported.graph.nodes if "aten.linear" in str(n.target)]
        assert len(dense) == 0 and exported.report.rewritten >= len(linears) - 1
        other = torch.randint(0, 50, (3, 5))
        _same(exported, model, input_ids=other, attention_mask=torch.ones_like(other), **options)


def test_sizes_that_are_rounded_are_checked():
    class Rounds(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 64)

        def forward(self, x):
            length = math.ceil(x.shape[1] / 4) * 4
            if length != x.shape[1]:
                x = torch.nn.functional.pad(x, (0, 0, 0, length - x.shape[1]))
            return self.fc(x)

    model = prune(Rounds())
    sparse = fxsparse.compile(model, (torch.randn(2, 8, 64),), min_elements=0, capture="export")
    x = torch.randn(3, 12, 64)
    torch.testing.assert_close(sparse(x), model(x))
    with pytest.raises(ValueError, match=r"x\.shape\[1\]"):
        sparse(torch.randn(3, 11, 64))

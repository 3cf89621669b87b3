"""All passes after the rewrite, together and with each left out: whatever is done with a compiled
model works with fused calls."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from fusing import calls, fused
from fxsparse.passes.calls import can_move
from fxsparse.passes.chain import Chain
from fxsparse.passes.epilogue import Epilogue
from fxsparse.passes.normalise import Normalise
from fxsparse.passes.record import META, Call, Multiply
from fxsparse.passes.schedule import FUSIONS
from fxsparse.passes.siblings import Siblings
from pruned import multiplies, operators_run, prune
from torch import fx, nn

import fxsparse
from fxsparse import dynamo, ops
from fxsparse.fused import linear_with


class Block(nn.Module):
    """Attention, a gated feed-forward layer and one of another kind."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)
        self.first, self.act, self.last = nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(3))
        self.head = nn.Linear(64, 32)

    def forward(self, x):
        h = self.norms[0](x)
        x = x + self.o(F.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h)))
        h = self.norms[1](x)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return torch.tanh(self.head(x + self.last(self.act(self.first(self.norms[2](x))))))


ALL = [
    "norms.0", "linears", "getitem", "getitem", "getitem", "scaled_dot_product_attention",
    "linear_with add", "norms.1", "mlp_with silu", "norms.2", "mlp_with gelu", "linear_fused tanh",
]  # fmt: skip


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return prune(Block())


@pytest.fixture(scope="module")
def sparse(model):
    return fxsparse.compile(model, min_elements=0, capture="trace")


def same(sparse, model, x):
    torch.testing.assert_close(sparse(x), model(x))


def test_the_graph(model, sparse):
    x = torch.randn(2, 5, 64)
    assert calls(sparse) == ALL and multiplies(sparse.graph) == 10
    same(sparse, model, x)
    with torch.no_grad():
        same(sparse, model, x)
        ran = operators_run(lambda: sparse(x))
    found = {name: count for name, count in ran.items() if name.startswith("fxsparse")}
    expected = {"linears": 1, "linear_fused": 2, "mlp": 2}
    assert found == {f"fxsparse.{name}.default": count for name, count in expected.items()}


@pytest.mark.parametrize("left_out", [*FUSIONS, None])
@pytest.mark.parametrize("capture", ["trace", "export"])
def test_each_pass_can_be_left_out(left_out, capture):
    model, x = Block(), torch.randn(2, 5, 64)
    passes = [fusion for fusion in FUSIONS if fusion is not left_out]
    sparse = fused(model, *passes, example_inputs=(x,), capture=capture)
    assert multiplies(sparse.graph) == 10
    kinds = {call.split()[0] for call in calls(sparse)}
    made = {Chain: {"mlp", "mlp_with"}, Epilogue: {"linear_fused", "linear_with"}}
    made[Siblings] = {"linears"}
    assert {fusion for fusion in FUSIONS if not made[fusion] & kinds} == {left_out} - {None}
    same(sparse, model, torch.randn(3, 7, 64))


def test_keys_and_values_of_one_memory_over_all_layers():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(64, 64) for _ in range(4))
            self.up, self.down, self.act = nn.Linear(64, 96), nn.Linear(96, 64), nn.ReLU(True)

        def forward(self, x, memory):
            q, k, v = self.q(x), self.k(memory), self.v(memory)
            x = x + self.o(F.scaled_dot_product_attention(q, k, v))
            return x + self.down(self.act(self.up(x)))

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x, memory):
            for layer in self.layers:
                x = layer(x, memory)
            return x

    model = prune(Decoder())
    sparse = fxsparse.compile(model, min_elements=0, capture="trace")
    (joined,) = sparse.graph.find_nodes(op="call_function", target=ops.linears)
    assert len(joined.args[1]) == 6
    x, memory = torch.randn(2, 5, 64), torch.randn(2, 7, 64)
    torch.testing.assert_close(sparse(x, memory), model(x, memory))


def test_report_and_state_dict_are_those_of_single_weights(model, sparse):
    names = [name for name, _ in model.named_parameters()]
    assert [row.path for row in sparse.report.rows] == [
        n for n in names if model.get_parameter(n).dim() == 2
    ]
    assert all(row.status == "sparse" for row in sparse.report.rows)
    keys = {f"{n}_packed" if model.get_parameter(n).dim() == 2 else n for n in names}
    assert set(sparse.state_dict()) == keys
    dense = fxsparse.to_dense(sparse)
    assert set(dense.state_dict()) == set(names)
    x = torch.randn(2, 5, 64)
    assert torch.equal(dense(x), model(x)) and "fxsparse" not in dense.code


def test_dense_weights_can_be_loaded(model):
    other = prune(Block())
    sparse = fxsparse.compile(model, min_elements=0, capture="trace")
    sparse.load_state_dict(other.state_dict())
    same(sparse, other, torch.randn(2, 5, 64))


@pytest.mark.parametrize("capture", ["trace", "export"])
def test_copies(model, capture):
    x = torch.randn(2, 5, 64)
    sparse = fxsparse.compile(model, (x,), min_elements=0, capture=capture)
    file = io.BytesIO()
    torch.save(sparse, file)
    file.seek(0)
    for one in (
        copy.deepcopy(sparse),
        pickle.loads(pickle.dumps(sparse)),
        torch.load(file, weights_only=False),
    ):
        assert calls(one) == calls(sparse) and one.code == sparse.code
        same(one, model, x)


def test_torch_compile_and_export(model, sparse):
    compiled = torch.compile(sparse, fullgraph=True, backend="aot_eager", dynamic=True)
    auto = torch.export.Dim.AUTO
    with torch.no_grad():
        exported = torch.export.export(
            sparse, (torch.randn(2, 5, 64),), dynamic_shapes=({0: auto, 1: auto},)
        )
        for batch in (2, 3):
            x = torch.randn(batch, 5 + batch, 64)
            same(compiled, model, x)
            same(exported.module(), model, x)
    assert multiplies(exported.graph) == 10
    assert not exported.graph.find_nodes(op="call_function", target=ops.linear)


def test_the_backend_of_dynamo(model, monkeypatch):
    graphs = []
    original = dynamo._Compiled
    monkeypatch.setattr(
        dynamo, "_Compiled", lambda *args: graphs.append(args[1]) or original(*args)
    )
    compiled = torch.compile(model, backend="fxsparse", options={"min_elements": 0})
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        same(compiled, model, x)
    fused = [call for call in calls(graphs[0]) if call.split()[0] in ("linears", "mlp_with")]
    assert fused == ["linears", "mlp_with silu", "mlp_with gelu"]


def test_a_traced_graph_can_be_traced_again(model, sparse):
    same(fx.symbolic_trace(sparse), model, torch.randn(2, 5, 64))
    assert calls(fx.symbolic_trace(sparse)) == calls(sparse)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_a_fusion_runs_after_the_rewrite(fusion):
    traced = fx.symbolic_trace(nn.Sequential(nn.Linear(64, 64)))
    Normalise()(traced)
    fusion()(traced)  # nothing is to be rewritten
    (node,) = traced.graph.find_nodes(op="call_module", target="0")
    node.meta[META] = Multiply("0.weight", "nn.Linear", call=Call(64, 64, torch.float32, 0))
    with pytest.raises(ValueError, match=r"_0: expected a graph that the pass Rewrite"):
        fusion()(traced)


aten = torch.ops.aten
WRITES = {
    "a method": (lambda graph, x: graph.call_method("add_", (x, 1)), True),
    "a method that computes": (lambda graph, x: graph.call_method("add", (x, 1)), False),
    "somebody's method": (lambda graph, x: graph.call_method("bump", (x, x)), True),
    "a special method": (lambda graph, x: graph.call_method("__add__", (x, 1)), False),
    "a special method that updates": (lambda graph, x: graph.call_method("__iadd__", (x, 1)), True),
    "a function": (lambda graph, x: graph.call_function(torch.relu_, (x,)), True),
    "a function that computes": (lambda graph, x: graph.call_function(torch.relu, (x,)), False),
    "out": (lambda graph, x: graph.call_function(torch.exp, (x,), {"out": x}), True),
    "inplace": (lambda graph, x: graph.call_function(F.relu, (x, True)), True),
    "inplace by name": (
        lambda graph, x: graph.call_function(F.relu, (x,), {"inplace": True}),
        True,
    ),
    "not inplace": (lambda graph, x: graph.call_function(F.relu, (x, False)), False),
    "an operator": (lambda graph, x: graph.call_function(aten.add_.Tensor, (x, x)), True),
    "an operator that computes": (
        lambda graph, x: graph.call_function(aten.add.Tensor, (x, x)),
        False,
    ),
    "the gradient's mode": (
        lambda graph, x: graph.call_function(torch._C._set_grad_enabled, (False,)),
        True,
    ),
    "a fused call": (lambda graph, x: graph.call_function(linear_with, (x,)), False),
    "somebody's function": (lambda graph, x: graph.call_function(same, (x, x, x)), True),
    "a module": (lambda graph, x: graph.call_module("plain", (x,)), False),
    "a module in place": (lambda graph, x: graph.call_module("inplace", (x,)), True),
    "a module with a hook": (lambda graph, x: graph.call_module("hooked", (x,)), True),
    "somebody's module": (lambda graph, x: graph.call_module("own", (x,)), True),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_may_write(name):
    between, writes = WRITES[name]
    hooked = nn.ReLU()
    hooked.register_forward_hook(lambda *_: None)
    modules = {"plain": nn.ReLU(), "inplace": nn.ReLU(True), "hooked": hooked, "own": Block()}
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_method("exp", (x,))
    middle = between(graph, x)
    last = graph.call_method("exp", (x,))
    module = fx.GraphModule(modules, graph)
    graph.output(last)
    assert can_move(module, first, last) == (not writes)
    assert can_move(module, first, last, own=[middle])

"""Recurrent layers and cells with packed weights: what torch's own give, in every way they are called."""

import copy
import gc
import io
import re
import weakref

import pytest
import torch
from pruned import prune, sparse_weight
from torch import nn
from torch.nn.utils.prune import l1_unstructured
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence
from torch.utils._pytree import tree_leaves, tree_map

import fxsparse
from fxsparse.modules.recurrent import SparseLSTM, SparseRecurrent
from fxsparse.stand_in.weight_view import WeightView

LAYERS = {
    "lstm": lambda: nn.LSTM(12, 20),
    "lstm, everything": lambda: nn.LSTM(
        12, 20, 2, batch_first=True, dropout=0.3, bidirectional=True, proj_size=6
    ),
    "lstm, projection without biases": lambda: nn.LSTM(12, 20, 2, bias=False, proj_size=6),
    "lstm, 3 layers": lambda: nn.LSTM(12, 20, 3, dropout=0.3),
    "gru": lambda: nn.GRU(12, 20),
    "gru, everything": lambda: nn.GRU(
        12, 20, 2, bias=False, batch_first=True, dropout=0.3, bidirectional=True
    ),
    "rnn": lambda: nn.RNN(12, 20, bidirectional=True),
    "rnn, relu": lambda: nn.RNN(12, 20, 2, nonlinearity="relu", batch_first=True, dropout=1.0),
}
CELLS = {
    "lstm cell": lambda: nn.LSTMCell(12, 20),
    "lstm cell, no bias": lambda: nn.LSTMCell(12, 20, bias=False),
    "gru cell": lambda: nn.GRUCell(12, 20),
    "gru cell, no bias": lambda: nn.GRUCell(12, 20, bias=False),
    "rnn cell": lambda: nn.RNNCell(12, 20),
    "rnn cell, relu": lambda: nn.RNNCell(12, 20, bias=False, nonlinearity="relu"),
}
layers = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
cells = pytest.mark.parametrize("make", CELLS.values(), ids=CELLS)
every = pytest.mark.parametrize("make", [*LAYERS.values(), *CELLS.values()], ids=[*LAYERS, *CELLS])
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported")


def sparsify(module, **options):
    """The module with all its matrices packed."""
    options = {"min_elements": 0, "threshold": 0, "capture": "modules", **options}
    sparse = fxsparse.compile(module, **options)
    assert all(row.status == "sparse" for row in sparse.report.rows)
    return sparse


def pair(make, dtype=torch.float64, sparsity=0.85):
    dense = prune(make().to(dtype), sparsity)
    return dense, sparsify(dense)


def states_of(module, batch, dtype=torch.float64):
    """Random initial states; ``batch`` None is that of an unbatched input."""
    sizes = [module.hidden_size]
    if isinstance(module, nn.LSTM):
        sizes.insert(0, module.proj_size or module.hidden_size)
    if isinstance(module, nn.LSTMCell):
        sizes *= 2
    lead = [] if batch is None else [batch]
    if isinstance(module, nn.RNNBase):
        lead.insert(0, module.num_layers * (2 if module.bidirectional else 1))
    states = tuple(torch.randn(*lead, size, dtype=dtype) for size in sizes)
    return states if len(states) > 1 else states[0]


def same(got, expected, bound=1e-12):
    """Equal structure, shapes and dtypes, and values up to ``bound`` of the largest."""
    got, expected = tree_leaves(got), tree_leaves(expected)
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        if not isinstance(b, torch.Tensor):
            assert a == b
            continue
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        finite = b[b.isfinite()].abs()
        largest = finite.max().item() if finite.numel() else 0
        torch.testing.assert_close(a, b, rtol=0, atol=bound * largest, equal_nan=True)


@layers
@pytest.mark.parametrize("shape", [(5, 3, 12), (1, 1, 12), (4, 0, 12), (5, 12), (1, 12)])
def test_layers_equal_torch_for_any_input(make, shape):
    dense, sparse = pair(make)
    x = torch.randn(shape, dtype=torch.float64)
    if len(shape) == 3 and dense.batch_first:
        x = x.transpose(0, 1)
    same(sparse(x), dense(x))
    hx = states_of(dense, shape[1] if len(shape) == 3 else None)
    same(sparse(x, hx), dense(x, hx))
    same(sparse(input=x, hx=hx), dense(x, hx))


@cells
@pytest.mark.parametrize("shape", [(3, 12), (1, 12), (0, 12), (12,)])
def test_cells_equal_torch_for_any_input(make, shape):
    dense, sparse = pair(make)
    x = torch.randn(shape, dtype=torch.float64)
    same(sparse(x), dense(x))
    hx = states_of(dense, shape[0] if len(shape) == 2 else None)
    same(sparse(x, hx), dense(x, hx))


@every
@pytest.mark.parametrize(
    "dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 1e-2)]
)
def test_other_dtypes_equal_torch_in_float64(make, dtype, bound):
    dense = prune(make().to(dtype), 0.85)
    sparse = fxsparse.compile(dense, min_elements=0)
    x = torch.randn((3, 12) if isinstance(dense, nn.RNNCellBase) else (5, 3, 12)).to(dtype)
    exact = copy.deepcopy(dense).double()(x.double())
    results = sparse(x)
    assert {result.dtype for result in tree_leaves(results)} == {dtype}
    for result, right in zip(tree_leaves(results), tree_leaves(exact)):
        atol = bound * right.abs().max().item()
        torch.testing.assert_close(result.double(), right, rtol=0, atol=atol)


@layers
@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_packed_sequences(make, enforce_sorted):
    dense, sparse = pair(make)
    lengths = torch.tensor([6, 4, 4, 1] if enforce_sorted else [4, 1, 6, 4])
    x = torch.randn(4, 6, 12, dtype=torch.float64)
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=enforce_sorted)
    got, expected = sparse(packed), dense(packed)
    assert type(got[0]) is PackedSequence
    same(got, expected)
    hx = states_of(dense, 4)
    same(sparse(packed, hx), dense(packed, hx))
    one = pack_sequence([torch.randn(3, 12, dtype=torch.float64)])
    same(sparse(one), dense(one))


@layers
@pytest.mark.parametrize("is_packed", [False, True])
def test_dropout_drops_what_torch_drops(make, is_packed):
    dense, sparse = (module.train() for module in pair(make))
    x = torch.randn(5, 4, 12, dtype=torch.float64)
    if is_packed:
        x = pack_padded_sequence(x, torch.tensor([5, 4, 4, 2]))
    torch.manual_seed(3)
    expected = dense(x)
    torch.manual_seed(3)
    same(sparse(x), expected)


@every
def test_gradients_reach_inputs_states_and_biases(make):
    dense, sparse = pair(make)
    sparse = copy.deepcopy(sparse)  # biases of its own
    is_cell = isinstance(dense, nn.RNNCellBase)
    x = torch.randn((3, 12) if is_cell else (3, 3, 12), dtype=torch.float64)
    hx = states_of(dense, 3)
    gradients = []
    for module in (dense, sparse):
        inputs = tree_map(lambda t: t.clone().requires_grad_(), (x, hx))
        sum(t.square().sum() for t in tree_leaves(module(*inputs))).backward()
        biases = [p.grad for name, p in module.named_parameters() if "bias" in name]
        gradients.append([t.grad for t in tree_leaves(inputs)] + biases)
    assert all(gradient is not None for gradient in gradients[1])
    same(gradients[1], gradients[0], 1e-11)


@every
def test_each_weight_is_judged_by_itself(make):
    for chosen in ("weight_ih", "weight_hh"):
        dense = prune(make().double(), 0)
        with torch.no_grad():
            for name, weight in dense.named_parameters():
                if chosen in name:
                    weight.copy_(sparse_weight(*weight.shape, dtype=weight.dtype))
        sparse = fxsparse.compile(dense, min_elements=0)
        rows = {row.path: row for row in sparse.report.rows}
        assert {path for path in rows if rows[path].status == "sparse"} == {
            path for path in rows if chosen in path
        }
        for path, weight in dense.named_parameters():
            packed = path in rows and rows[path].status == "sparse"
            assert (f"{path}_packed" in dict(sparse.named_buffers())) == packed
            assert (dict(sparse.named_parameters()).get(path) is weight) == (not packed)
        is_cell = isinstance(dense, nn.RNNCellBase)
        x = torch.randn((3, 12) if is_cell else (5, 3, 12), dtype=torch.float64)
        same(sparse(x), dense(x))


@every
def test_rows_of_the_report(make):
    dense, sparse = pair(make, torch.float32)
    matrices = {name: p for name, p in dense.named_parameters() if p.dim() == 2}
    assert {row.path for row in sparse.report.rows} == set(matrices)
    for row in sparse.report.rows:
        assert row.op == f"nn.{type(dense).__name__}"
        assert row.shape == tuple(matrices[row.path].shape)
        assert row.macs == row.nnz == int(torch.count_nonzero(matrices[row.path]))


@every
def test_to_dense_is_torch_again_bit_for_bit(make):
    dense, sparse = pair(make)
    back = fxsparse.to_dense(sparse)
    assert type(back) is type(dense)
    assert isinstance(sparse, type(dense))
    assert set(vars(back)) - {"_compiled_call_impl"} == set(vars(dense))
    for (name, p), (expected_name, expected) in zip(
        back.named_parameters(), dense.named_parameters(), strict=True
    ):
        assert name == expected_name and torch.equal(p, expected) and p.requires_grad
    assert list(back.state_dict()) == list(dense.state_dict())
    is_cell = isinstance(dense, nn.RNNCellBase)
    x = torch.randn((3, 12) if is_cell else (5, 3, 12), dtype=torch.float64)
    same(back(x), dense(x), 0)
    same(sparse(x), dense(x))  # is as it was
    same(back.float()(x.float()), dense.float()(x.float()), 0)


WRONG_LAYER_CALLS = {
    "4 dimensions": lambda m: m(torch.randn(2, 2, 2, 12)),
    "1 dimension": lambda m: m(torch.randn(12)),
    "features": lambda m: m(torch.randn(5, 3, 11)),
    "dtype": lambda m: m(torch.randn(5, 3, 12).double()),
    "no steps": lambda m: m(torch.randn((3, 0, 12) if m.batch_first else (0, 3, 12))),
    "batch of the states": lambda m: m(torch.randn(5, 3, 12), states_of(m, 2, torch.float32)),
    "batched states": lambda m: m(torch.randn(5, 12), states_of(m, 2, torch.float32)),
    "unbatched states": lambda m: m(torch.randn(5, 3, 12), states_of(m, None, torch.float32)),
    "dtype of the states": lambda m: m(torch.randn(5, 3, 12), states_of(m, 3)),
}
WRONG_PACKED_CALLS = {
    "features": lambda m: m(pack_sequence([torch.randn(5, 11)])),
    "dtype": lambda m: m(pack_sequence([torch.randn(5, 12).double()])),
    "states": lambda m: m(pack_sequence([torch.randn(5, 12)]), states_of(m, 2, torch.float32)),
}
WRONG_CELL_CALLS = {
    "3 dimensions": lambda m: m(torch.randn(2, 2, 12)),
    "features": lambda m: m(torch.randn(3, 11)),
    "dtype": lambda m: m(torch.randn(3, 12).double()),
    "batch of the state": lambda m: m(torch.randn(3, 12), states_of(m, 2, torch.float32)),
    "no broadcasting": lambda m: m(torch.randn(3, 12), states_of(m, 1, torch.float32)),
    "dtype of the state": lambda m: m(torch.randn(3, 12), states_of(m, 3)),
}


@pytest.mark.parametrize(
    "make, call",
    [(make, call) for make in ("lstm", "gru", "rnn, relu") for call in WRONG_LAYER_CALLS]
    + [(make, call) for make in ("lstm cell", "gru cell", "rnn cell") for call in WRONG_CELL_CALLS],
)
def test_errors_are_those_of_torch(make, call):
    dense, sparse = pair({**LAYERS, **CELLS}[make], torch.float32)
    call = (WRONG_CELL_CALLS if "cell" in make else WRONG_LAYER_CALLS)[call]
    with pytest.raises((ValueError, RuntimeError)) as expected:
        call(dense)
    with pytest.raises(type(expected.value)) as got:
        call(sparse)
    assert str(got.value) == str(expected.value)


@pytest.mark.parametrize("make", ["lstm", "gru"])
@pytest.mark.parametrize(
    "call, text",
    [
        ("features", "input.size(-1) must be equal to input_size. Expected 12, got 11"),
        ("dtype", "RNN input dtype (torch.float64) does not match weight dtype (torch.float32)"),
        ("states", "Expected hidden"),
    ],
)
def test_packed_sequences_are_checked(make, call, text):
    """``nn.LSTM`` does not, and reads past the end of them; ``nn.GRU`` does."""
    _, sparse = pair(LAYERS[make], torch.float32)
    with pytest.raises((ValueError, RuntimeError), match=re.escape(text)):
        WRONG_PACKED_CALLS[call](sparse)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(12, 20, bidirectional=True, batch_first=True)
        self.cell = nn.GRUCell(40, 20)
        self.head = nn.Linear(20, 5)

    def forward(self, x):
        y, (h, c) = self.lstm(x)
        return self.head(self.cell(y[:, -1])) + h.sum() - c.sum()


@pytest.mark.parametrize("capture", ["trace", "modules"])
@pytest.mark.parametrize("inplace", [False, True])
def test_inside_a_model(capture, inplace):
    model = prune(Tagger().double())
    x = torch.randn(3, 7, 12, dtype=torch.float64)
    expected, keys = model(x), list(model.state_dict())
    lstm, original = model.lstm, copy.deepcopy(model)
    sparse = sparsify(model, capture=capture, inplace=inplace)
    assert isinstance(sparse, torch.fx.GraphModule) == (capture == "trace")
    assert {row.op for row in sparse.report.rows} == {"nn.LSTM", "nn.GRUCell", "nn.Linear"}
    assert (type(lstm) is SparseLSTM) == inplace  # whoever holds it, holds the new one
    same(sparse(x), expected)
    same(copy.deepcopy(sparse)(x), sparse(x), 0)
    back = fxsparse.to_dense(sparse)
    assert list(back.state_dict()) == keys
    same(back(x), original(x), 0)


@every
def test_dense_weights_are_freed_in_place(make):
    module = prune(make())
    weights = [weakref.ref(p) for p in module.parameters() if p.dim() == 2]
    sparse = sparsify(module, inplace=True)
    gc.collect()
    assert sparse is module and isinstance(module, SparseRecurrent)
    assert all(weight() is None for weight in weights)


@every
def test_copies_and_pickles(make):
    dense, sparse = pair(make)
    file = io.BytesIO()
    torch.save(sparse, file)
    file.seek(0)
    is_cell = isinstance(dense, nn.RNNCellBase)
    x = torch.randn((3, 12) if is_cell else (5, 3, 12), dtype=torch.float64)
    for other in (copy.deepcopy(sparse), torch.load(file, weights_only=False)):
        assert type(other) is type(sparse)
        same(other(x), sparse(x), 0)
        other.load_state_dict({k: v.clone() for k, v in pair(make)[1].state_dict().items()})
        assert not torch.equal(tree_leaves(other(x))[0], tree_leaves(sparse(x))[0])


@every
@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts(make, assign):
    _, sparse = pair(make)
    dense, other = pair(make, sparsity=0.6)
    is_cell = isinstance(dense, nn.RNNCellBase)
    x = torch.randn((3, 12) if is_cell else (5, 3, 12), dtype=torch.float64)
    sparse.load_state_dict(other.state_dict(), assign=assign)
    same(sparse(x), other(x), 0)
    dense = prune(make().double(), 0.8)
    sparse.load_state_dict(dense.state_dict(), assign=assign)
    same(sparse(x), dense(x))


def test_a_damaged_packed_weight_is_refused():
    dense, sparse = pair(LAYERS["lstm"])
    state = sparse.state_dict()
    state["weight_hh_l0_packed"] = state["weight_hh_l0_packed"][:-1]
    with pytest.raises(RuntimeError, match="weight_hh_l0_packed is not a valid packed weight"):
        sparse.load_state_dict(state)
    x = torch.randn(5, 3, 12, dtype=torch.float64)
    same(sparse(x), dense(x))


def test_weights_by_name_are_stand_ins():
    dense, sparse = pair(LAYERS["lstm, everything"])
    for name in dense._flat_weights_names:
        weight, expected = getattr(sparse, name), getattr(dense, name)
        assert isinstance(weight, WeightView) == (expected.dim() == 2)
        assert (weight.shape, weight.dtype) == (expected.shape, expected.dtype)
        assert torch.equal(weight + 0, expected)
    flat = [weight for group in sparse.all_weights for weight in group]
    assert [w.shape for w in flat] == [w.shape for w in dense._flat_weights]
    sparse.flatten_parameters()
    assert "weight_hh_l0" not in dict(sparse.named_parameters())
    assert "packed: weight_ih_l0" in repr(sparse)
    with pytest.raises(RuntimeError, match="read-only"):
        nn.init.orthogonal_(sparse.weight_hh_l0)
    with pytest.raises(RuntimeError, match="read-only"):
        sparse.reset_parameters()
    with pytest.raises(KeyError, match="exists"):
        sparse.weight_hh_l0 = dense.weight_hh_l0
    with pytest.raises(AttributeError, match="weight_hh_l7"):
        _ = sparse.weight_hh_l7


def test_a_stand_in_serves_a_direct_call_of_the_function():
    dense, sparse = pair(CELLS["gru cell"])
    x, h = torch.randn(3, 12, dtype=torch.float64), torch.randn(3, 20, dtype=torch.float64)
    weights = (sparse.weight_ih, sparse.weight_hh, sparse.bias_ih)
    expected = torch.gru_cell(x, h, dense.weight_ih, dense.weight_hh, dense.bias_ih, dense.bias_hh)
    same(torch.gru_cell(x, h, *weights, sparse.bias_hh), expected)
    same(torch.gru_cell(x, h, *weights, b_hh=sparse.bias_hh), expected)
    view = sparse.weight_hh.t().clone().t()
    same(torch.gru_cell(x, h, sparse.weight_ih, view, sparse.bias_ih, sparse.bias_hh), expected)


@every
def test_conversions(make):
    dense, sparse = pair(make, torch.float32)
    x = torch.randn((3, 12) if isinstance(dense, nn.RNNCellBase) else (5, 3, 12))
    expected = sparse(x)
    same(sparse.to("cpu").float()(x), expected, 0)
    same(sparse.share_memory()(x), expected, 0)
    moved = copy.deepcopy(sparse).to("meta")
    assert all(result.is_meta for result in tree_leaves(moved(x.to("meta"))))
    with pytest.raises((ValueError, RuntimeError), match="dtype"):
        sparse.double()(x.double())


def test_a_layer_with_some_packed_weights_keeps_its_dtype():
    sparse = fxsparse.compile(prune(nn.LSTM(12, 20)), min_elements=0, include=["weight_hh_l0"])
    with pytest.raises((ValueError, RuntimeError), match="dtype"):
        sparse.double()(torch.randn(5, 3, 12).double())


@pytest.mark.parametrize("name", ["lstm", "lstm, everything", "gru", "rnn", *CELLS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_autocast_gives_the_dtypes_of_torch(name, dtype):
    weights = torch.float64 if dtype == torch.float64 else torch.float32
    dense, sparse = pair({**LAYERS, **CELLS}[name], weights)
    x = torch.randn((3, 12) if "cell" in name else (5, 3, 12)).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        close_as_in_autocast(sparse(x), dense(x))


def close_as_in_autocast(got, expected):
    for a, b in zip(tree_leaves(got), tree_leaves(expected), strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=0, atol=3e-2)


@pytest.mark.parametrize("lengths", [[5, 5, 5], [5, 4, 2]])
@pytest.mark.parametrize("name", ["lstm", "gru", "lstm, projection without biases"])
def test_autocast_of_packed_sequences_gives_the_dtypes_of_torch(name, lengths):
    dense, sparse = pair(LAYERS[name], torch.float32)
    x = pack_padded_sequence(torch.randn(5, 3, 12), torch.tensor(lengths))
    with torch.autocast("cpu", torch.bfloat16):
        close_as_in_autocast(sparse(x), dense(x))


@every
def test_hooks_stay(make):
    dense = prune(make().double())
    seen = []
    dense.register_forward_pre_hook(lambda module, args: seen.append("before"))
    dense.register_forward_hook(lambda module, args, out: tree_map(torch.neg, out))
    sparse = sparsify(dense)
    is_cell = isinstance(dense, nn.RNNCellBase)
    x = torch.randn((3, 12) if is_cell else (5, 3, 12), dtype=torch.float64)
    same(sparse(x), dense(x))
    assert seen == ["before", "before"]


class Own(nn.LSTM):
    def forward(self, input, hx=None):
        return super().forward(2 * input, hx)


def test_what_is_more_than_torchs_module_stays_dense():
    replaced = nn.GRUCell(12, 20)
    replaced.forward = lambda x, hx=None: x
    for module in (Own(12, 20), replaced):
        with pytest.warns(fxsparse.NothingRewrittenWarning):
            report = fxsparse.compile(prune(module), min_elements=0, capture="modules").report
        base = "GRUCell" if module is replaced else "LSTM"
        for row in report.rows:
            assert row.op == f"nn.{base}"
            assert row.reason.endswith(f"is more than an nn.{base}") or row.sparsity < 0.5
        assert any("more than" in row.reason for row in report.rows)


@pytest.mark.parametrize("capture", ["trace", "modules"])
def test_pruning_masks_are_folded(capture):
    model = nn.Sequential(nn.LSTM(12, 20).double()).eval()
    plain = list(model.state_dict())
    for name in ("weight_hh_l0", "weight_ih_l0"):
        l1_unstructured(model[0], name, 0.8)
    x = torch.randn(5, 3, 12, dtype=torch.float64)
    sparse = sparsify(model, capture=capture)
    same(sparse(x), model(x))
    back = fxsparse.to_dense(sparse)
    assert list(back.state_dict()) == plain
    assert torch.equal(back.get_parameter("0.weight_hh_l0"), model[0].weight_hh_l0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["lstm", "gru", "rnn, relu", "lstm cell"])
def test_non_finite_weights_and_inputs_are_as_in_torch(name, value):
    dense = prune({**LAYERS, **CELLS}[name]().double())
    with torch.no_grad():
        next(p for n, p in dense.named_parameters() if "weight_hh" in n)[3, 4] = value
    sparse = sparsify(dense)
    x = torch.randn((3, 12) if "cell" in name else (5, 3, 12), dtype=torch.float64)
    same(sparse(x), dense(x))
    x[-1, ..., 2] = value
    same(sparse(x), dense(x))


class Pair(nn.Module):
    """Two cells that share a weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.LSTMCell(20, 20).double(), nn.LSTMCell(20, 20).double()
        self.b.weight_hh = self.a.weight_hh

    def forward(self, x):
        return self.a(x)[0] + self.b(x)[1]


@pytest.mark.parametrize("capture", ["trace", "modules"])
def test_a_shared_weight_is_packed_once(capture):
    model = prune(Pair())
    sparse = sparsify(model, capture=capture)
    shared = sparse.a.weight_hh_packed
    assert sparse.b.weight_hh_packed is shared
    rows = {row.path: row.aliases for row in sparse.report.rows}
    assert rows["a.weight_hh"] == ("b.weight_hh",)
    x = torch.randn(3, 20, dtype=torch.float64)
    same(sparse(x), model(x))
    back = fxsparse.to_dense(sparse)
    assert back.a.weight_hh is back.b.weight_hh


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.LSTMCell])
def test_any_number_of_threads_gives_the_same_bits(kind):
    sparse = sparsify(prune(kind(96, 256)))
    x = torch.randn((40, 96) if kind is nn.LSTMCell else (6, 40, 96), requires_grad=True)
    before, results = fxsparse.get_num_threads(), []
    try:
        for threads in (1, 2):
            fxsparse.set_num_threads(threads)
            y = sparse(x)
            (gradient,) = torch.autograd.grad(tree_leaves(y)[0].sum(), x)
            results.append((y, gradient))
    finally:
        fxsparse.set_num_threads(before)
    same(results[1], results[0], 0)


class Holder(nn.Module):
    """A model around one module, with fixed arguments."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


@pytest.mark.parametrize("name", ["lstm cell", "gru cell", "rnn cell, relu"])
def test_cells_compile_to_one_graph_with_the_operator(name):
    dense, sparse = pair(CELLS[name])
    graphs = []

    def backend(graph_module, inputs):
        graphs.append(graph_module.code)
        return graph_module

    compiled = torch.compile(Holder(sparse), fullgraph=True, backend=backend)
    x = torch.randn(3, 12, dtype=torch.float64)
    same(compiled(x), dense(x))
    assert len(graphs) == 1 and graphs[0].count("torch.ops.fxsparse.linear") == 2
    assert "unpack" not in graphs[0]


def test_layers_run_beside_compiled_graphs_as_those_of_torch():
    """Steps that were unrolled would be compiled anew for each sequence length."""
    dense, sparse = pair(LAYERS["lstm"])
    graphs = []

    def backend(graph_module, inputs):
        graphs.append(graph_module.code)
        return graph_module

    compiled = torch.compile(Holder(sparse), backend=backend)
    for steps in (5, 7):
        x = torch.randn(steps, 3, 12, dtype=torch.float64)
        same(compiled(x), dense(x))
    assert "sigmoid" not in str(graphs) and "fxsparse" not in str(graphs)


@pytest.mark.parametrize("name", ["lstm", "gru, everything", "rnn", "lstm cell"])
def test_export_sees_the_operator(name):
    dense, sparse = pair({**LAYERS, **CELLS}[name])
    x = torch.randn((3, 12) if "cell" in name else (2, 3, 12), dtype=torch.float64)
    exported = torch.export.export(Holder(sparse), (x,))
    same(exported.module()(x), dense(x))
    assert "fxsparse.linear" in str(exported.graph)
    assert "unpack" not in str(exported.graph)


def test_prefer_latency_reckons_with_the_steps():
    small, large = prune(nn.LSTM(256, 256)), prune(nn.LSTM(1024, 1024))
    with pytest.warns(fxsparse.NothingRewrittenWarning):
        report = fxsparse.compile(small, prefer="latency", batch_hint=1).report
    assert all("the speed of dense is expected" in row.reason for row in report.rows)
    report = fxsparse.compile(large, prefer="latency", batch_hint=1).report
    assert [row.status for row in report.rows] == ["sparse", "sparse"]

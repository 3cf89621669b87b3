"""``SparseLinear``, the weight's stand-in, and what a module that holds packed weights may be put through."""

import copy
import io
import subprocess
import sys

import pytest
import torch
from pruned import prune, sparse_weight
from torch import nn

import fxsparse
from fxsparse.packing import header
from fxsparse.stand_in.weight_view import WeightView


@pytest.fixture
def linear():
    return prune(nn.Linear(96, 48))


@pytest.fixture
def sparse(linear):
    return fxsparse.SparseLinear.from_linear(linear)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(96,), (1, 96), (0, 96), (5, 96), (2, 3, 4, 96), (2, 0, 96)])
def test_equals_linear_for_any_leading_shape(linear, dtype, shape):
    linear = linear.to(dtype)
    sparse = fxsparse.SparseLinear.from_linear(linear)
    x = torch.randn(shape, dtype=dtype)
    y = sparse(x)
    assert y.dtype == dtype
    exact = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    bound = {2: 1e-2, 4: 1e-5, 8: 1e-12}[dtype.itemsize]
    torch.testing.assert_close(y.double(), exact, rtol=bound, atol=bound)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(6, 192)[:, ::2],
        lambda: torch.randn(6, 192)[:, 48:144],
        lambda: torch.randn(96, 6).t(),
        lambda: torch.randn(2, 96, 5).permute(2, 0, 1),
        lambda: torch.randn(96).expand(4, 96),
        lambda: torch.randn(12, 96)[::3],
        lambda: torch.randn(2, 96, 3, 3).to(memory_format=torch.channels_last).permute(0, 2, 3, 1),
    ],
)
def test_strided_inputs(linear, sparse, make):
    x = make()
    torch.testing.assert_close(sparse(x), linear(x))


def test_infinite_activations_meet_dropped_zeros_as_in_dense(linear, sparse):
    x = torch.randn(4, 96)
    x[1, 3], x[2, 7] = float("inf"), float("nan")
    torch.testing.assert_close(sparse(x), linear(x), equal_nan=True)


def test_the_weight_is_there_without_storage(linear, sparse):
    weight = sparse.weight
    assert isinstance(weight, WeightView)
    assert (weight.shape, weight.dtype, weight.device) == (
        linear.weight.shape,
        torch.float32,
        torch.device("cpu"),
    )
    assert torch.equal(weight.t() @ torch.eye(48), linear.weight.t())
    assert torch.equal(weight.detach()[3], linear.weight[3])
    assert "weight" not in dict(sparse.named_parameters())
    with pytest.raises(RuntimeError, match="no gradient.*to_dense"):
        weight.requires_grad_()
    assert torch.equal(copy.deepcopy(weight).dense(), linear.weight)


def test_hooks_and_attributes_come_along():
    model = prune(nn.Sequential(nn.Linear(64, 64)))
    model[0].tag = "first"
    model[0].register_forward_hook(lambda module, args, out: out + 1)
    compiled = fxsparse.compile(model, min_elements=0, capture="modules")
    assert compiled[0].tag == "first"
    x = torch.randn(2, 64)
    torch.testing.assert_close(compiled(x), model(x))
    torch.testing.assert_close(fxsparse.to_dense(compiled)(x), model(x))


def test_state_dict_round_trip_with_another_number_of_nonzeros(linear, sparse):
    other = fxsparse.SparseLinear.from_linear(prune(nn.Linear(96, 48), 0.5))
    buffer = sparse.weight_packed
    sparse.load_state_dict(other.state_dict())
    assert sparse.weight_packed is buffer and buffer.numel() == other.weight_packed.numel()
    x = torch.randn(3, 96)
    assert torch.equal(sparse(x), other(x))


def test_a_dense_checkpoint_is_repacked(sparse):
    other = prune(nn.Linear(96, 48), 0.7)
    sparse.load_state_dict(other.state_dict())
    x = torch.randn(3, 96)
    torch.testing.assert_close(sparse(x), other(x))
    assert header(sparse.weight_packed).nnz == round(0.3 * 96 * 48)


def test_a_checkpoint_with_pruning_masks_is_folded_and_repacked(sparse):
    other = nn.Linear(96, 48)
    nn.utils.prune.l1_unstructured(other, "weight", 0.8)
    sparse.load_state_dict(other.state_dict())
    x = torch.randn(3, 96)
    torch.testing.assert_close(sparse(x), other(x))


def test_a_dense_checkpoint_that_would_grow_is_refused_by_name(linear, sparse):
    with pytest.raises(RuntimeError, match=r"weight: this dense weight would not shrink"):
        sparse.load_state_dict(nn.Linear(96, 48).state_dict())
    x = torch.randn(3, 96)
    torch.testing.assert_close(sparse(x), linear(x))


def test_a_damaged_packed_weight_is_refused(linear, sparse):
    state = copy.deepcopy(sparse.state_dict())
    for damage in (
        lambda p: p[:-1],
        lambda p: p[:10],
        lambda p: p.to(torch.int32),
        lambda p: p * 0,
    ):
        with pytest.raises(RuntimeError, match="weight_packed is not a valid packed weight"):
            sparse.load_state_dict({**state, "weight_packed": damage(state["weight_packed"])})
    columns = state["weight_packed"].clone()
    columns[-header(columns).nnz * 4 - 64 : -header(columns).nnz * 4] = 255
    with pytest.raises(RuntimeError, match="weight_packed"):
        sparse.load_state_dict({**state, "weight_packed": columns})
    x = torch.randn(3, 96)
    torch.testing.assert_close(sparse(x), linear(x))


def test_a_packed_weight_of_another_shape_or_dtype_is_refused(sparse):
    for other in (nn.Linear(48, 96), nn.Linear(96, 48).double()):
        packed = fxsparse.SparseLinear.from_linear(prune(other)).weight_packed
        with pytest.raises(
            RuntimeError, match=r"weight_packed: expected a packed weight of \(48, 96\)"
        ):
            sparse.load_state_dict({**sparse.state_dict(), "weight_packed": packed})


def test_saved_in_one_process_loaded_in_a_fresh_one(tmp_path):
    model = fxsparse.compile(prune(nn.Sequential(nn.Linear(64, 64), nn.ReLU())), min_elements=0)
    x = torch.ones(1, 64)
    torch.save((model, x, model(x)), tmp_path / "model.pt")
    code = (
        f"import torch; m, x, y = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False); "
        "assert torch.equal(m(x), y); assert m.report.rewritten == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_deepcopy_shares_nothing(sparse):
    other = copy.deepcopy(sparse)
    other.weight_packed.zero_()
    assert header(sparse.weight_packed).shape == (48, 96)
    assert len(other._load_state_dict_pre_hooks) == 1


def test_after_to_another_dtype_it_raises(sparse):
    with pytest.raises(RuntimeError, match="expected .* of dtype float32"):
        sparse.double()(torch.randn(2, 96, dtype=torch.float64))


def test_autocast_gives_what_linear_gives(linear, sparse):
    x = torch.randn(3, 96)
    with torch.autocast("cpu", torch.bfloat16):
        for given in (x, x.bfloat16()):
            got, expected = sparse(given), linear(given)
            assert got.dtype == expected.dtype == torch.bfloat16
            torch.testing.assert_close(got, expected, rtol=3e-2, atol=3e-2)


def test_gradients_are_those_of_linear(linear, sparse):
    x = torch.randn(2, 3, 96)
    results = []
    for module in (linear, sparse):
        leaf = x.clone().requires_grad_()
        module.bias.grad = None
        module(leaf).pow(3).sum().backward()
        results.append((leaf.grad, module.bias.grad))
    torch.testing.assert_close(results[0], results[1])


def test_gradcheck_in_double():
    sparse = fxsparse.SparseLinear.from_linear(prune(nn.Linear(7, 5).double(), 0.6))
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(sparse, (x,))
    assert torch.autograd.gradgradcheck(sparse, (x,))


def test_a_transposed_input_has_its_gradient(linear, sparse):
    grads = []
    for module in (linear, sparse):
        leaf = torch.ones(96, 4, requires_grad=True)
        module(leaf.t()).sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[0], grads[1])


def test_torch_compile_in_one_graph(linear, sparse):
    compiled = torch.compile(sparse, fullgraph=True)
    for batch in (1, 4, 9):
        x = torch.randn(batch, 96, requires_grad=True)
        torch.testing.assert_close(compiled(x), linear(x))
        compiled(x).sum().backward()


@pytest.mark.parametrize("strict", [False, True])
def test_export_save_and_load(linear, sparse, strict):
    dim = torch.export.Dim("batch")
    exported = torch.export.export(
        sparse, (torch.randn(4, 96),), dynamic_shapes=({0: dim},), strict=strict
    )
    targets = [node.target for node in exported.graph.nodes]
    assert targets.count(torch.ops.fxsparse.linear.default) == 1
    buffer = io.BytesIO()
    torch.export.save(exported, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer)
    x = torch.randn(7, 96)
    torch.testing.assert_close(loaded.module()(x), linear(x))


def test_plain_containers_hold_it(sparse, tmp_path):
    from safetensors.torch import load_file, save_file

    save_file(sparse.state_dict(), tmp_path / "w.safetensors")
    sparse.load_state_dict(load_file(tmp_path / "w.safetensors"))


def test_many_nonzero_patterns_survive_packing():
    for rows, cols in [(1, 1), (1, 300), (300, 1), (17, 257), (16, 70_000)]:
        for sparsity in (0.0, 0.5, 1.0):
            linear = nn.Linear(cols, rows, bias=False)
            linear.weight = nn.Parameter(sparse_weight(rows, cols, sparsity))
            packed = fxsparse.SparseLinear.from_linear(linear)
            assert torch.equal(packed.weight.dense(), linear.weight)
            x = torch.randn(3, cols)
            torch.testing.assert_close(packed(x), linear(x), rtol=1e-4, atol=1e-4)


def test_it_is_a_linear_for_code_that_asks(linear, sparse):
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 64)

        def forward(self, x, mask=None):
            x = self.fc(x)
            return x.relu() if isinstance(self.fc, nn.Linear) else x

    assert isinstance(sparse, nn.Linear)
    model = prune(Asks())
    x = torch.randn(3, 64)
    torch.testing.assert_close(fxsparse.compile(model, min_elements=0)(x), model(x))


def test_writing_to_a_packed_weight_raises(linear, sparse):
    for write in (
        lambda w: w.zero_(),
        lambda w: w.copy_(linear.weight),
        lambda w: w.data.mul_(2),
        lambda w: nn.init.zeros_(w),
        lambda w: w.__setitem__(0, 5.0),
        lambda w: setattr(w, "data", linear.weight),
    ):
        with pytest.raises(RuntimeError, match="read-only.*to_dense"):
            write(sparse.weight)
    assert torch.equal(sparse.weight.dense(), linear.weight)


def test_whoever_holds_a_linear_holds_the_packed_one():
    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(64, 64)
            self.aside = [self.a]
            self.call = self.a.forward

        def forward(self, x, mask=None):
            return self.aside[0](x) + self.call(x)

    model = prune(Holds())
    x = torch.randn(3, 64)
    expected = model(x)
    for inplace in (False, True):
        compiled = fxsparse.compile(model, min_elements=0, inplace=inplace)
        assert compiled.aside[0] is compiled.a
        torch.testing.assert_close(compiled(x), expected)


def test_a_compiled_root_linear_in_place():
    model = prune(nn.Linear(64, 64))
    x = torch.randn(3, 64)
    expected = model(x)
    sparse = fxsparse.compile(model, min_elements=0, inplace=True)
    assert type(model) is fxsparse.SparseLinear
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(sparse(x), expected)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("capture", ["trace", "modules"])
def test_tied_weights_take_another_number_of_nonzeros(assign, capture):
    def make(sparsity):
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        model[2].weight = model[0].weight
        return prune(model, sparsity)

    one = fxsparse.compile(make(0.9), min_elements=0, capture=capture)
    other = make(0.7)
    for state in (fxsparse.compile(other, min_elements=0).state_dict(), other.state_dict()):
        one.load_state_dict(state, assign=assign)
        x = torch.randn(3, 64)
        torch.testing.assert_close(one(x), other(x))


def test_an_in_place_model_sees_what_it_loads():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(64, 64))

        def forward(self, x):
            return x @ self.w

    model, other = prune(Bare()), prune(Bare(), 0.8)
    x = torch.randn(3, 64)
    expected = other(x)
    fxsparse.compile(model, min_elements=0, inplace=True)
    for assign in (False, True):
        model.load_state_dict(fxsparse.compile(other, min_elements=0).state_dict(), assign=assign)
        torch.testing.assert_close(model(x), expected)


def test_a_skeleton_without_values_is_loaded(sparse):
    x = torch.randn(3, 96)
    for skeleton in (
        copy.deepcopy(sparse).to("meta"),
        copy.deepcopy(sparse).to("meta").to_empty(device="cpu"),
    ):
        skeleton.load_state_dict(sparse.state_dict(), assign=True)
        assert torch.equal(skeleton(x), sparse(x))
    with pytest.raises(ValueError, match="meta device"):
        fxsparse.to_dense(copy.deepcopy(sparse).to("meta"))


def test_reading_the_weight_does_not_break_torch_compile_or_export():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 64)

        def forward(self, x, mask=None):
            return self.fc(x.to(self.fc.weight.dtype)) * self.fc.weight.shape[0]

    model = prune(Reads())
    sparse = fxsparse.compile(model, min_elements=0)
    x = torch.randn(3, 64)
    torch.testing.assert_close(sparse(x), model(x))
    torch.testing.assert_close(torch.compile(sparse, fullgraph=True)(x), model(x))
    torch.testing.assert_close(torch.export.export(sparse, (x,)).module()(x), model(x))


def test_from_linear_takes_what_it_can_stand_for():
    class Doubles(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    with pytest.raises(TypeError, match="expected an nn.Linear, got Doubles"):
        fxsparse.SparseLinear.from_linear(Doubles(8, 8))
    hooked = nn.Linear(8, 8)
    hooked.register_forward_hook(lambda module, args, out: out)
    with pytest.raises(ValueError, match="without hooks"):
        fxsparse.SparseLinear.from_linear(hooked)
    with pytest.raises(ValueError, match="it is on meta"):
        fxsparse.SparseLinear.from_linear(nn.Linear(8, 8, device="meta"))


def test_a_state_dict_over_memory_that_held_another_packed_weight():
    first, second = (
        fxsparse.compile(prune(nn.Sequential(nn.Linear(64, 64))), min_elements=0) for _ in range(2)
    )
    empty = copy.deepcopy(first).to("meta").to_empty(device="cpu")
    memory, old = empty.get_buffer("0.weight_packed"), second.get_buffer("0.weight_packed")
    memory.fill_(0)
    memory[:64] = old[:64]
    memory[16] ^= 1  # rows that do not fit the size
    empty.load_state_dict(first.state_dict())
    x = torch.randn(3, 64)
    assert torch.equal(empty(x), first(x))

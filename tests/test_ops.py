"""The operators under torch's own checks, and their agreement with dense in whole graphs."""

import pytest
import torch
from pruned import multiplies, prune, sparse_weight
from torch import nn
from torch.library import opcheck

import fxsparse
from fxsparse.cost import FORMATS
from fxsparse.packing import describe, header, pack, packed_bytes, unpack, validate

N, K = 48, 96


@pytest.fixture
def packed():
    return pack(sparse_weight(N, K), format="csr")


@pytest.mark.parametrize(
    "x_grad, bias_grad", [(False, None), (True, None), (True, True), (False, False)]
)
@pytest.mark.parametrize("shape", [(5, K), (2, 3, K), (K,)])
def test_linear_passes_opcheck(packed, shape, x_grad, bias_grad):
    x = torch.randn(shape, requires_grad=x_grad)
    bias = None if bias_grad is None else torch.randn(N, requires_grad=bias_grad)
    opcheck(torch.ops.fxsparse.linear.default, (x, packed, bias, N, K, torch.float32, 0))


def test_linear_backward_and_unpack_pass_opcheck(packed):
    grad = torch.randn(5, N, requires_grad=True)
    opcheck(torch.ops.fxsparse.linear_backward.default, (grad, packed, N, K, torch.float32, 0))
    opcheck(torch.ops.fxsparse.unpack.default, (packed, N, K, torch.float32))


def test_sizes_are_checked_on_every_call(packed):
    x = torch.randn(2, K)
    for bad in (packed[:-1], packed[:8], packed[:0], packed.to(torch.int32), packed.view(1, -1)):
        with pytest.raises(RuntimeError, match="packed"):
            torch.ops.fxsparse.linear(x, bad, None, N, K, torch.float32, 0)
    with pytest.raises(RuntimeError, match="expected"):
        torch.ops.fxsparse.linear(x, packed, None, N + 1, K, torch.float32, 0)
    with pytest.raises(RuntimeError, match="bias"):
        torch.ops.fxsparse.linear(x, packed, torch.zeros(N + 1), N, K, torch.float32, 0)
    with pytest.raises(RuntimeError, match="threads"):
        torch.ops.fxsparse.linear(x, packed, None, N, K, torch.float32, -1)


def test_fake_tensors_check_what_real_ones_would(packed):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(packed)
        y = torch.ops.fxsparse.linear(torch.empty(3, K), fake, None, N, K, torch.float32, 0)
        assert y.shape == (3, N)
        with pytest.raises(ValueError, match=r"expected x of shape \(\.\.\., 96\)"):
            torch.ops.fxsparse.linear(torch.empty(3, 7), fake, None, N, K, torch.float32, 0)
        with pytest.raises(ValueError, match="expected x of dtype torch.float32"):
            x = torch.empty(3, K, dtype=torch.float64)
            torch.ops.fxsparse.linear(x, fake, None, N, K, torch.float32, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_packing_is_bit_for_bit(dtype, transposed, format):
    weight = sparse_weight(33, 70, 0.6, dtype)
    weight[0, :3] = torch.tensor([1e-7, float("nan"), -0.0], dtype=dtype)
    weight = nn.Parameter(weight, requires_grad=False)
    blob = pack(weight, format=format, transposed=transposed)
    head = validate(blob)
    assert head == header(blob)
    assert head.shape == ((70, 33) if transposed else (33, 70))
    assert head.nnz == int((weight != 0).sum())
    assert head.format == format
    assert blob.numel() == packed_bytes(describe(weight, format, transposed=transposed))
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    expected = torch.where(weight == 0, 0.0, weight).to(dtype)  # -0.0 comes back as 0.0
    assert torch.equal(unpack(blob).view(ints), expected.view(ints))


def test_a_compiled_graph_is_one_graph_for_torch_compile_and_export():
    model = prune(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)))
    sparse = fxsparse.compile(model, min_elements=0)
    compiled = torch.compile(sparse, fullgraph=True)
    for batch in (2, 5):
        x = torch.randn(batch, 64)
        torch.testing.assert_close(compiled(x), model(x))
    exported = torch.export.export(sparse, (torch.randn(2, 64),))
    assert multiplies(exported.graph) == 2
    assert {"0.weight_packed", "2.weight_packed"} <= set(exported.state_dict)


def test_inference_mode_and_no_grad():
    model = prune(nn.Sequential(nn.Linear(64, 64)))
    sparse = fxsparse.compile(model, min_elements=0)
    x = torch.randn(3, 64)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            torch.testing.assert_close(sparse(x), model(x))


def test_results_do_not_depend_on_threads():
    model = prune(nn.Sequential(nn.Linear(512, 700)), 0.8)
    x = torch.randn(33, 512, requires_grad=True)
    results = []
    for threads in (1, 2, 3, 8):
        sparse = fxsparse.compile(model, threads=threads)
        y = sparse(x)
        results.append((y, *torch.autograd.grad(y.sum(), x)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


def test_any_strides_of_a_bias(packed):
    x = torch.randn(3, K)
    for bias in (torch.randn(2 * N)[::2], torch.randn(1).expand(N)):
        y = torch.ops.fxsparse.linear(x, packed, bias, N, K, torch.float32, 0)
        torch.testing.assert_close(y, x @ unpack(packed).t() + bias)


def test_tensors_whose_memory_was_freed_are_refused(packed):
    def freed(tensor):
        tensor.untyped_storage().resize_(4)
        return tensor

    x, bias = torch.randn(3, K), torch.randn(N)
    for changed, name in ((0, "x"), (1, "packed"), (2, "bias")):
        args = [x.clone(), packed.clone(), bias.clone()]
        freed(args[changed])
        with pytest.raises(RuntimeError, match=f"expected {name} with its memory"):
            torch.ops.fxsparse.linear(*args, N, K, torch.float32, 0)
    for read in (header, validate):
        with pytest.raises(ValueError, match="its memory was freed"):
            read(freed(packed.clone()))


def test_a_bias_elsewhere_is_refused(packed):
    x = torch.randn(3, K)
    with pytest.raises((RuntimeError, ValueError), match="bias"):
        bias = torch.empty(N, device="meta")
        torch.ops.fxsparse.linear(x, packed, bias, N, K, torch.float32, 0)


def test_backward_notices_that_the_weight_was_replaced():
    sparse = fxsparse.SparseLinear.from_linear(prune(nn.Linear(64, 64)))
    y = sparse(torch.randn(3, 64, requires_grad=True))
    sparse.load_state_dict(prune(nn.Linear(64, 64)).state_dict(), strict=False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_forward_mode_raises():
    sparse = fxsparse.SparseLinear.from_linear(prune(nn.Linear(64, 64)))
    x = torch.randn(3, 64)
    with torch.autograd.forward_ad.dual_level(), pytest.raises((RuntimeError, NotImplementedError)):
        sparse(torch.autograd.forward_ad.make_dual(x, x))

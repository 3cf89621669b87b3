"""1x1 convolutions are multiplies of every pixel, by the same operator."""

import copy

import pytest
import torch
import torch.nn.functional as F
from pruned import prune, sparse_weight
from torch import nn
from torch.library import opcheck

import fxsparse
from fxsparse.cost import FORMATS
from fxsparse.packing import header, pack

N, C = 40, 24
CLS = torch.channels_last

#: Images as models have them: name -> x of C channels.
LAYOUTS = {
    "one image": lambda: torch.randn(1, C, 9, 13),
    "a batch": lambda: torch.randn(3, C, 7, 7),
    "a large batch": lambda: torch.randn(40, C, 3, 3),
    "channels last": lambda: torch.randn(3, C, 7, 5).to(memory_format=CLS),
    "some channels": lambda: torch.randn(2, 2 * C, 7, 5)[:, ::2],
    "a half of the channels": lambda: torch.randn(2, 2 * C, 7, 5).chunk(2, 1)[1],
    "some columns": lambda: torch.randn(2, C, 7, 10)[..., ::2],
    "some rows": lambda: torch.randn(2, C, 14, 5)[:, :, ::2],
    "a cut": lambda: torch.randn(2, C, 9, 9)[:, :, 1:-1, 1:-1],
    "a cut of channels last": lambda: torch.randn(2, C, 9, 9).to(memory_format=CLS)[:, :, 1:, 1:],
    "turned": lambda: torch.randn(2, 5, 7, C).permute(0, 3, 2, 1),
    "batch last": lambda: torch.randn(C, 5, 7, 3).permute(3, 0, 1, 2),
    "single pixels": lambda: torch.randn(5, C, 1, 1),
    "single pixels, channels last": lambda: torch.randn(5, C, 1, 1).to(memory_format=CLS),
    "one row": lambda: torch.randn(2, C, 1, 50),
    "one column": lambda: torch.randn(2, C, 50, 1),
    "expanded": lambda: torch.randn(1, C, 5, 5).expand(3, C, 5, 5),
    "no image": lambda: torch.randn(0, C, 5, 5),
    "unbatched": lambda: torch.randn(C, 9, 13),
    "unbatched, channels last": lambda: torch.randn(9, 13, C).permute(2, 0, 1),
}
#: The same for sequences.
SEQUENCES = {
    "one": lambda: torch.randn(1, C, 50),
    "a batch": lambda: torch.randn(3, C, 19),
    "channels last": lambda: torch.randn(3, 19, C).transpose(1, 2),
    "some": lambda: torch.randn(3, C, 38)[..., ::2],
    "single": lambda: torch.randn(3, C, 1),
    "unbatched": lambda: torch.randn(C, 19),
}
KINDS = {
    1: (nn.Conv1d, fxsparse.SparseConv1d, SEQUENCES),
    2: (nn.Conv2d, fxsparse.SparseConv2d, LAYOUTS),
}
CASES = [(spatial, name) for spatial, (*_, inputs) in KINDS.items() for name in inputs]


def conv2d(rows=N, cols=C, **options):
    return prune(nn.Sequential(nn.Conv2d(cols, rows, 1, **options)))


def call(x, packed, bias=None, spatial=2, shape=(N, C)):
    return torch.ops.fxsparse.conv1x1(x, packed, bias, *shape, x.dtype, 0, spatial)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_and_layout(format, dtype):
    weight, bias = sparse_weight(N, C, 0.7, dtype), torch.randn(N).to(dtype)
    packed = pack(weight, format=format)
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 64 * torch.finfo(dtype).eps}
    for spatial, name in CASES if dtype == torch.float32 else CASES[::3]:
        x = KINDS[spatial][2][name]().to(dtype)
        convolve = F.conv1d if spatial == 1 else F.conv2d
        kernel = weight.view(N, C, *[1] * spatial)
        y = call(x, packed, bias, spatial)
        exact = convolve(x.double(), kernel.double(), bias.double())
        torch.testing.assert_close(y.double(), exact, **tolerance, msg=f"{spatial}d, {name}")
        if dtype == torch.float32:
            assert y.stride() == convolve(x, kernel, bias).stride(), name


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_nonfinite_pixels_are_as_in_dense(format, value):
    weight = sparse_weight(N, C, 0.7)
    packed = pack(weight, format=format)
    for shape in ((2, C, 6, 7), (2, C, 3, 1), (1, C, 20, 20)):
        x = torch.randn(shape)
        x[-1, 3, 0, 0] = x[0, 5, -1, -1] = value
        y = call(x, packed)
        expected = (x.movedim(1, -1).unsqueeze(-2) * weight).sum(-1).movedim(-1, 1)
        torch.testing.assert_close(y, expected, equal_nan=True)


@pytest.mark.parametrize("format", FORMATS)
def test_any_number_of_threads_gives_the_same_bits(format):
    weight = sparse_weight(200, 100)
    packed = pack(weight, format=format)
    x = torch.randn(3, 100, 23, 17)
    results = [
        torch.ops.fxsparse.conv1x1(x, packed, None, 200, 100, x.dtype, threads, 2)
        for threads in (1, 2, 5)
    ]
    assert all(torch.equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0], F.conv2d(x, weight.view(200, 100, 1, 1)))


@pytest.mark.parametrize(
    "spatial, name, x_grad, bias_grad",
    [
        (2, "a batch", False, None),
        (2, "a batch", True, None),
        (2, "a batch", False, True),
        (2, "channels last", True, True),
        (2, "unbatched", True, True),
        (1, "channels last", True, False),
    ],
)
def test_the_operator_passes_opcheck(spatial, name, x_grad, bias_grad):
    x = KINDS[spatial][2][name]().detach().requires_grad_(x_grad)
    bias = None if bias_grad is None else torch.randn(N, requires_grad=bias_grad)
    packed = pack(sparse_weight(N, C), format="csr")
    args = (x, packed, bias, N, C, torch.float32, 0, spatial)
    opcheck(torch.ops.fxsparse.conv1x1.default, args)


@pytest.mark.parametrize("spatial, name", CASES)
@pytest.mark.parametrize("inplace", [False, True])
def test_a_module_is_replaced(spatial, name, inplace):
    kind, sparse_kind, inputs = KINDS[spatial]
    model = prune(nn.Sequential(kind(C, N, 1), nn.ReLU()))
    x = inputs[name]().requires_grad_()
    expected = model(x)
    (grad,) = torch.autograd.grad(expected.sum(), x)
    bias_grad = torch.autograd.grad(model(x).sum(), model[0].bias)
    state, dense = copy.deepcopy(model.state_dict()), model[0]
    sparse = fxsparse.compile(model, min_elements=0, inplace=inplace, capture="modules")
    (row,) = sparse.report.rows
    assert row.op == f"nn.{kind.__name__}" and row.status == "sparse" and row.macs == row.nnz
    assert row.shape == (N, C, *[1] * spatial)
    assert type(sparse[0]) is sparse_kind and isinstance(sparse[0], kind)
    assert (sparse[0] is dense) is inplace
    y = sparse(x)
    torch.testing.assert_close(y, expected)
    assert y.stride() == expected.stride()
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], grad)
    torch.testing.assert_close(torch.autograd.grad(sparse(x).sum(), sparse[0].bias), bias_grad)
    back = fxsparse.to_dense(sparse)
    assert type(back[0]) is kind and back.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in back.state_dict().items())


PLAIN = {
    "no bias": {"bias": False},
    "padding valid": {"padding": "valid"},
    "padding same": {"padding": "same"},
    "dilation": {"dilation": 3},
    "padding mode": {"padding_mode": "circular"},
}


@pytest.mark.parametrize("options", PLAIN.values(), ids=PLAIN.keys())
@pytest.mark.parametrize("capture", ["trace", "modules"])
def test_options_that_change_nothing(options, capture):
    model = conv2d(**options)
    sparse = fxsparse.compile(model, min_elements=0, capture=capture)
    assert sparse.report.rewritten == 1 and sparse.report.rows[0].op == "nn.Conv2d"
    for x in (torch.randn(2, C, 5, 6), torch.randn(1, C, 3, 3).to(memory_format=CLS)):
        torch.testing.assert_close(sparse(x), model(x))
        if "padding_mode" not in options:  # there torch copies channels last to a plain layout
            assert sparse(x).stride() == model(x).stride()
    back = fxsparse.to_dense(sparse)
    x = torch.randn(2, C, 5, 6)
    assert torch.equal(back(x), model(x))
    assert {key: value.shape for key, value in back.state_dict().items()} == {
        key: value.shape for key, value in model.state_dict().items()
    }


class Own(nn.Conv2d):
    def forward(self, x):
        return 2 * super().forward(x)


OTHERS = {
    "3x3": nn.Conv2d(C, N, 3),
    "1x3": nn.Conv2d(C, N, (1, 3)),
    "stride": nn.Conv2d(C, N, 1, stride=2),
    "padding": nn.Conv2d(C, N, 1, padding=1),
    "groups": nn.Conv2d(C, N, 1, groups=4),
    "transposed": nn.ConvTranspose2d(C, N, 1),
}


@pytest.mark.parametrize("layer", OTHERS.values(), ids=OTHERS.keys())
@pytest.mark.parametrize("capture", ["auto", "modules"])
def test_other_convolutions_stay(layer, capture):
    model = nn.Sequential(prune(copy.deepcopy(layer)), prune(nn.Conv2d(N, 8, 1))).eval()
    sparse = fxsparse.compile(model, min_elements=0, capture=capture)
    assert [row.status for row in sparse.report.rows] == ["dense", "sparse"]
    assert "only 1x1 convolutions" in sparse.report.rows[0].reason
    x = torch.randn(2, C, 8, 8)
    torch.testing.assert_close(sparse(x), model(x))


@pytest.mark.parametrize("capture", ["auto", "modules"])
def test_a_subclass_is_traced(capture):
    model = nn.Sequential(prune(Own(C, N, 1)), nn.ReLU()).eval()
    sparse = fxsparse.compile(model, min_elements=0, capture=capture)
    assert sparse.report.rewritten == 1
    x = torch.randn(2, C, 8, 8)
    torch.testing.assert_close(sparse(x), model(x))


class Functional(nn.Module):
    """``spelling(x, weight, bias)``."""

    def __init__(self, spelling, spatial=2):
        super().__init__()
        self.weight = nn.Parameter(sparse_weight(N, C).view(N, C, *[1] * spatial))
        self.bias = nn.Parameter(torch.randn(N))
        self.spelling = spelling

    def forward(self, x):
        return self.spelling(x, self.weight, self.bias).relu()


SPELLINGS = {
    "positional": lambda x, w, b: F.conv2d(x, w, b),
    "torch": lambda x, w, b: torch.conv2d(x, w, b, 1, 0, 1, 1),
    "no bias": lambda x, w, b: F.conv2d(x, w),
    "keywords": lambda x, w, b: F.conv2d(weight=w, bias=b, input=x, stride=(1, 1), padding="same"),
    "computed bias": lambda x, w, b: F.conv2d(x, w, b * 2, padding=(0, 0), dilation=2),
    "detached": lambda x, w, b: F.conv2d(x, w.detach(), b),
}


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_functions_in_a_graph(spelling):
    """https://github.com/pytorch/pytorch/issues/87686"""
    model = Functional(spelling).eval()
    sparse = fxsparse.compile(model, min_elements=0, capture="trace")
    targets = [node.target for node in sparse.graph.nodes]
    assert torch.ops.fxsparse.conv1x1.default in targets and F.conv2d not in targets
    assert set(sparse.state_dict()) == {"weight_packed", "bias"}
    back = fxsparse.to_dense(sparse)
    for x in (torch.randn(2, C, 5, 6), torch.randn(C, 5, 6)):
        torch.testing.assert_close(sparse(x), model(x))
        torch.testing.assert_close(back(x), model(x))
    assert torch.equal(back.weight, model.weight) and back.weight.shape == (N, C, 1, 1)


def test_one_dimension_in_a_graph():
    model = Functional(lambda x, w, b: F.conv1d(x, w, b), spatial=1).eval()
    sparse = fxsparse.compile(model, min_elements=0, capture="trace")
    back = fxsparse.to_dense(sparse)
    x = torch.randn(2, C, 9)
    torch.testing.assert_close(sparse(x), model(x))
    assert torch.equal(back.weight, model.weight)


@pytest.mark.parametrize(
    "spelling",
    [
        lambda x, w, b: F.conv2d(x, w, b, stride=2),
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
        lambda x, w, b: F.conv2d(x, w.transpose(0, 1)),
    ],
    ids=["stride", "padding", "transposed"],
)
def test_other_functions_stay(spelling):
    model = Functional(spelling).eval()
    if "transpose" in spelling.__code__.co_names:
        model.weight = nn.Parameter(sparse_weight(C, N).view(C, N, 1, 1))
    x = torch.randn(2, C, 5, 6)
    with pytest.warns(fxsparse.NothingRewrittenWarning):
        sparse = fxsparse.compile(model, min_elements=0)
    torch.testing.assert_close(sparse(x), model(x))


def test_a_residual_block_is_traced():
    """Bottlenecks as in ResNet: 1x1, 3x3, 1x1."""

    class Bottleneck(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.Conv2d(64, 16, 1, bias=False)
            self.norm = nn.BatchNorm2d(16)
            self.middle = nn.Conv2d(16, 16, 3, padding=1)
            self.up = nn.Conv2d(16, 64, 1)

        def forward(self, x):
            y = F.relu(self.norm(self.down(x)))
            return F.relu(x + self.up(F.relu(self.middle(y))))

    model = prune(Bottleneck())
    sparse = fxsparse.compile(model, min_elements=0, threshold=0.85)
    assert isinstance(sparse, torch.fx.GraphModule)
    assert [row.status for row in sparse.report.rows] == ["sparse", "dense", "sparse"]
    for x in (torch.randn(2, 64, 8, 8), torch.randn(1, 64, 5, 9).to(memory_format=CLS)):
        torch.testing.assert_close(sparse(x), model(x))


@pytest.mark.parametrize("capture", ["trace", "modules"])
def test_state_dicts(capture):
    model, other = conv2d(), conv2d()
    sparse = fxsparse.compile(model, min_elements=0, capture=capture)
    x = torch.randn(2, C, 5, 5)
    sparse.load_state_dict(fxsparse.compile(other, min_elements=0, capture=capture).state_dict())
    torch.testing.assert_close(sparse(x), other(x))
    sparse.load_state_dict(model.state_dict())
    torch.testing.assert_close(sparse(x), model(x))
    with pytest.raises(RuntimeError, match=r"expected a dense weight of \(40, 24, 1, 1\)"):
        sparse.load_state_dict({"0.weight": torch.zeros(N, C), "0.bias": torch.zeros(N)})
    linear = pack(sparse_weight(N, C), format="csr")
    with pytest.raises(RuntimeError, match="expected a packed weight of"):
        sparse.load_state_dict({"0.weight_packed": linear, "0.bias": torch.zeros(N)})
    torch.testing.assert_close(copy.deepcopy(sparse)(x), model(x))


def test_the_stand_in_has_four_dimensions():
    model = conv2d()
    layer = fxsparse.compile(model, min_elements=0, capture="modules")[0]
    assert layer.weight.shape == (N, C, 1, 1) and layer.weight.dtype == torch.float32
    assert torch.equal(layer.weight + 0, model[0].weight)
    assert header(layer.weight_packed).dense_shape == (N, C, 1, 1)
    assert "kernel_size=(1, 1)" in repr(layer) and "nnz=" in repr(layer)


def test_errors_are_those_of_torch():
    sparse = fxsparse.compile(conv2d(), min_elements=0)
    with pytest.raises(RuntimeError, match="to have 24 channels, but got 23 channels instead"):
        sparse(torch.randn(2, 23, 5, 5))
    with pytest.raises(RuntimeError, match=r"3D \(unbatched\) or 4D \(batched\) input to conv2d"):
        sparse(torch.randn(2, C))
    with pytest.raises(RuntimeError, match="expected x of dtype float32"):
        sparse(torch.randn(2, C, 5, 5, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast(dtype):
    model = conv2d().to(dtype)
    sparse = fxsparse.compile(model, min_elements=0)
    x = torch.randn(2, C, 5, 5, dtype=dtype)
    with torch.autocast("cpu"):
        y, expected = sparse(x), model(x)
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)


def test_torch_compile():
    model = conv2d()
    sparse = fxsparse.compile(model, min_elements=0)
    compiled = torch.compile(sparse, fullgraph=True, backend="aot_eager")
    for x in (torch.randn(2, C, 5, 5), torch.randn(3, C, 4, 6).to(memory_format=CLS)):
        torch.testing.assert_close(compiled(x), model(x))
        assert compiled(x).stride() == model(x).stride()


def test_hooks_and_masks():
    model = nn.Sequential(nn.Conv2d(C, N, 1)).eval()
    nn.utils.prune.l1_unstructured(model[0], "weight", 0.9)
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    sparse = fxsparse.compile(model, min_elements=0)
    assert sparse.report.rewritten == 1
    x = torch.randn(2, C, 5, 5)
    torch.testing.assert_close(sparse(x), model(x))

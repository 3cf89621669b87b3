"""A stand-in for a packed weight does what the dense weight does, without becoming one."""

import copy
import io
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from pruned import sparse_weight
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxsparse
from fxsparse.packing import pack
from fxsparse.stand_in.weight_view import WeightView

pytestmark = pytest.mark.usefixtures("one_thread_of_torch")

E, N, K, B = 3, 24, 16, 5
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
BOUND = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 5e-2, torch.float16: 8e-3}

#: How a weight was packed: its dense shape, and the arguments of ``pack``.
FORMS = {
    "matrix": ((N, K), {}),
    "transposed": ((N, K), {"transposed": True}),
    "cut": ((N, K), {"blocks": 3}),
    "experts": ((E, N, K), {"blocks": E}),
    "transposed experts": ((E, N, K), {"blocks": E, "transposed": True}),
}
MATRICES, EXPERTS = ("matrix", "transposed", "cut"), ("experts", "transposed experts")


def dense_and_view(form, dtype=torch.float32, format="csr"):
    shape, how = FORMS[form]
    weight = sparse_weight(shape[0], math.prod(shape[1:]), 0.8, dtype)
    weight = weight.view(shape)
    return weight, WeightView.of(pack(weight, format=format, **how))


def _ids(*values):
    return torch.tensor(values)


OF_MATRICES = {
    "F.linear": (lambda w, x: F.linear(x, w), (B, K)),
    "F.linear, bias": (lambda w, x, b: F.linear(x, w, b), (B, K), (N,)),
    "F.linear, bias by name": (lambda w, x, b: F.linear(x, weight=w, bias=b), (2, B, K), (N,)),
    "F.linear, all by name": (lambda w, x, b: F.linear(input=x, weight=w, bias=b), (B, K), (N,)),
    "F.linear, 1-D x": (lambda w, x: F.linear(x, w), (K,)),
    "F.linear, 4-D x": (lambda w, x: F.linear(x, w), (2, 3, 1, K)),
    "F.linear, transposed w": (lambda w, x: F.linear(x, w.t()), (B, N)),
    "F.linear, transposed w, bias": (lambda w, x, b: F.linear(x, w.t(), b), (B, N), (K,)),
    "F.linear, strided x": (lambda w, x: F.linear(x[:, ::2], w), (B, 2 * K)),
    "F.linear, x.t()": (lambda w, x: F.linear(x.t(), w), (K, B)),
    "F.linear, expanded x": (lambda w, x: F.linear(x.expand(B, K), w), (1, K)),
    "x @ w": (lambda w, x: x @ w, (B, N)),
    "x @ w.t()": (lambda w, x: x @ w.t(), (B, K)),
    "x @ w.T": (lambda w, x: x @ w.T, (2, B, K)),
    "x @ w.mT": (lambda w, x: x @ w.mT, (2, B, K)),
    "x @ w.transpose": (lambda w, x: x @ w.transpose(-1, -2), (B, K)),
    "x @ w.permute": (lambda w, x: x @ w.permute(1, 0), (B, K)),
    "x @ w.swapaxes": (lambda w, x: x @ w.swapaxes(0, 1), (B, K)),
    "x @ w, 1-D x": (lambda w, x: x @ w, (N,)),
    "w @ x": (lambda w, x: w @ x, (K, B)),
    "w @ x, 1-D x": (lambda w, x: w @ x, (K,)),
    "w @ x, 3-D x": (lambda w, x: w @ x, (2, K, B)),
    "w @ x, 4-D x": (lambda w, x: w @ x, (2, 3, K, B)),
    "w.t() @ x": (lambda w, x: w.t() @ x, (N, B)),
    "matmul": (lambda w, x: torch.matmul(x, w.t()), (2, 3, B, K)),
    "matmul by name": (lambda w, x: torch.matmul(input=x, other=w), (B, N)),
    "matmul method": (lambda w, x: x.matmul(w.t()), (B, K)),
    "w.matmul": (lambda w, x: w.matmul(x), (K, B)),
    "mm": (lambda w, x: torch.mm(x, w.t()), (B, K)),
    "mm, w first": (lambda w, x: torch.mm(w, x), (K, B)),
    "mm method": (lambda w, x: x.mm(w), (B, N)),
    "mv": (lambda w, x: torch.mv(w, x), (K,)),
    "mv method": (lambda w, x: w.t().mv(x), (N,)),
    "inner": (lambda w, x: torch.inner(x, w), (2, B, K)),
    "inner, w first": (lambda w, x: torch.inner(w, x), (B, K)),
    "chain of multiplies": (lambda w, x: F.linear(F.linear(x, w), w.t()), (B, K)),
    "addmm": (lambda w, x, b: torch.addmm(b, x, w.t()), (B, K), (N,)),
    "addmm, matrix": (lambda w, x, b: torch.addmm(b, x, w.t()), (B, K), (B, N)),
    "addmm, beta, alpha": (
        lambda w, x, b: torch.addmm(b, x, w, beta=0.5, alpha=2.0),
        (B, N),
        (K,),
    ),
    "addmm, beta=0": (lambda w, x, b: torch.addmm(b * torch.nan, x, w, beta=0), (B, N), (K,)),
    "addmm, w first": (lambda w, x, b: torch.addmm(b, w, x, alpha=3), (K, B), (N, B)),
    "addmm method": (lambda w, x, b: b.addmm(x, w), (B, N), (1, K)),
    "addmv": (lambda w, x, b: torch.addmv(b, w, x), (K,), (N,)),
    "baddbmm, expanded": (
        lambda w, x, b: torch.baddbmm(b, x, w.t().expand(2, K, N), beta=0.5, alpha=2),
        (2, B, K),
        (N,),
    ),
    "bmm, expanded": (lambda w, x: torch.bmm(x, w.expand(2, N, K)), (2, B, N)),
    "bmm, unsqueeze": (lambda w, x: torch.bmm(x, w.t().unsqueeze(0)), (1, B, K)),
    "bmm, w first": (lambda w, x: torch.bmm(w.expand(2, N, K), x), (2, K, B)),
    "matmul, unsqueeze": (lambda w, x: x @ w.unsqueeze(0), (2, B, N)),
    "einsum": (lambda w, x: torch.einsum("bk,nk->bn", x, w), (B, K)),
    "einsum, spaces, 4-D": (
        lambda w, x: torch.einsum("a b c k, n k -> a b c n", x, w),
        (2, 2, 2, K),
    ),
    "einsum, w first": (lambda w, x: torch.einsum("nk,bk->nb", w, x), (B, K)),
    "einsum, x @ w": (lambda w, x: torch.einsum("bn,nk->bk", x, w), (B, N)),
    "einsum, permuted result": (lambda w, x: torch.einsum("abk,nk->bna", x, w), (2, B, K)),
    "einsum, list": (lambda w, x: torch.einsum("bk,nk->bn", [x, w]), (B, K)),
    "einsum, ellipsis": (lambda w, x: torch.einsum("...k,nk->...n", x, w), (2, B, K)),
    "einsum, no arrow": (lambda w, x: torch.einsum("bk,kn", x, w.t()), (B, K)),
    "einsum, 1-D x": (lambda w, x: torch.einsum("k,nk->n", x, w), (K,)),
    "tensordot, 1": (lambda w, x: torch.tensordot(x, w.t(), 1), (2, B, K)),
    "tensordot, dims": (lambda w, x: torch.tensordot(x, w, dims=([1], [1])), (2, K, B)),
    "tensordot, negative": (lambda w, x: torch.tensordot(x, w, dims=([-1], [-1])), (2, B, K)),
    "tensordot, w first": (lambda w, x: torch.tensordot(w, x, dims=([1], [0])), (K, B)),
    "some rows": (lambda w, x: F.linear(x, w[8:16]), (B, K)),
    "some rows, bias": (lambda w, x, b: F.linear(x, w[:8], b), (B, K), (8,)),
    "split": (lambda w, x: torch.cat([F.linear(x, p) for p in w.split(8)], -1), (B, K)),
    "chunk": (lambda w, x: torch.cat([F.linear(x, p) for p in w.chunk(3)], -1), (B, K)),
    "tensor_split": (lambda w, x: torch.cat([x @ p.t() for p in w.tensor_split(3)], -1), (B, K)),
    "narrow": (lambda w, x: F.linear(x, w.narrow(0, 8, 16)), (B, K)),
    "unflatten": (lambda w, x: torch.bmm(x, w.unflatten(0, (3, 8)).mT), (3, B, K)),
    "unbind of view": (lambda w, x: F.linear(x, w.view(3, 8, K).unbind()[1]), (B, K)),
    "view and back": (lambda w, x: F.linear(x, w.view(3, 8, K).view(N, K)), (B, K)),
    "reshape and back": (lambda w, x: F.linear(x, w.reshape(3, 8, K).reshape(-1, K)), (B, K)),
    "flatten of view": (lambda w, x: F.linear(x, w.view(3, 8, K).flatten(0, 1)), (B, K)),
    "chain of views": (
        lambda w, x: x @ w[None].squeeze(0).detach().contiguous().clone().unsqueeze(-1)[..., 0].t(),
        (B, K),
    ),
    "columns": (lambda w, x: F.linear(x, w[:, :8]), (B, 8)),
    "every second row": (lambda w, x: F.linear(x, w[::2]), (B, K)),
    "one row": (lambda w, x: F.linear(x, w[3:4]), (B, K)),
    "a row": (lambda w, x: x @ w[3], (B, K)),
    "mul": (lambda w, x: w * x, (N, K)),
    "x + w": (lambda w, x: x + w, (N, K)),
    "norm": (lambda w, x: x * w.norm(dim=1), (N,)),
    "cat": (lambda w, x: torch.cat([w, x]), (B, K)),
    "stack": (lambda w, x: torch.stack([w, w * 2]) + x, (N, K)),
    "softmax": (lambda w, x: F.softmax(w, -1) @ x, (K, B)),
    "cdist": (lambda w, x: torch.cdist(x, w), (B, K)),
    "where": (lambda w, x: torch.where(w == 0, x, w), (N, K)),
    "bilinear": (lambda w, x: F.bilinear(x, x, w.view(N, 4, 4)), (B, 4)),
    "conv1d": (lambda w, x: F.conv1d(x, w.view(N, K, 1)), (B, K, 4)),
    "kron": (lambda w, x: torch.kron(w, x), (2, 2)),
    "cosine_similarity": (lambda w, x: F.cosine_similarity(x, w), (N, K)),
    "multi_dot": (lambda w, x: torch.linalg.multi_dot([x, w.t(), w]), (B, K)),
    "chain_matmul of w and x": (lambda w, x: torch.linalg.multi_dot([w, x]), (K, B)),
    "vecdot": (lambda w, x: torch.linalg.vecdot(w, x), (N, K)),
    "rows by index": (lambda w, x: w[_ids(0, 5, -1)] + x, (3, K)),
    "rows by index, colon": (lambda w, x: w[_ids(0, 5, -1), :] + x, (3, K)),
    "rows by 2-D index": (lambda w, x: w[torch.tensor([[0, 1], [3, 3]])] + x, (K,)),
    "rows by index_select": (lambda w, x: w.index_select(0, _ids(4, 4)) + x, (2, K)),
    "x.to(w)": (lambda w, x: F.linear(x.to(w), w), (B, K)),
    "x.type_as(w)": (lambda w, x: F.linear(x.type_as(w), w), (B, K)),
    "embedding of rows": (lambda w, x: F.embedding(_ids(0, 5, 5), w) + x, (3, K)),
    "new_zeros": (lambda w, x: x + w.new_zeros(K), (B, K)),
    "zeros_like": (lambda w, x: x + torch.zeros_like(w), (N, K)),
    "float of x": (lambda w, x: x.to(w.dtype) @ w, (B, N)),
    "empty x": (lambda w, x: F.linear(x, w), (0, K)),
    "empty batch": (lambda w, x: x @ w.t(), (2, 0, K)),
    "empty mm": (lambda w, x: torch.mm(w, x), (K, 0)),
}

OF_EXPERTS = {
    "one expert": (lambda w, x: F.linear(x, w[1]), (B, K)),
    "last expert": (lambda w, x, b: F.linear(x, w[-1], b), (B, K), (N,)),
    "select": (lambda w, x: x @ w.select(0, 2), (B, N)),
    "loop": (lambda w, x: sum(F.linear(x, m) for m in w), (B, K)),
    "unbind": (lambda w, x: sum(x @ m for m in w.unbind(0)), (B, N)),
    "index by tensor": (lambda w, x: F.linear(x, w[torch.tensor(1)]), (B, K)),
    "index by (1, ...)": (lambda w, x: F.linear(x, w[1, ...]), (B, K)),
    "index by (1, :, :)": (lambda w, x: F.linear(x, w[1, :, :]), (B, K)),
    "bmm": (lambda w, x: torch.bmm(x, w.transpose(1, 2)), (E, B, K)),
    "bmm, x @ w": (lambda w, x: torch.bmm(x, w), (E, B, N)),
    "bmm, w first": (lambda w, x: torch.bmm(w, x), (E, K, B)),
    "matmul": (lambda w, x: x @ w.mT, (E, B, K)),
    "matmul, one x": (lambda w, x: x @ w, (B, N)),
    "matmul, one batch": (lambda w, x: x[None] @ w, (B, N)),
    "matmul, 4-D": (lambda w, x: x @ w, (2, E, B, N)),
    "matmul, w first": (lambda w, x: w @ x, (E, K, B)),
    "matmul, w first, one x": (lambda w, x: w @ x, (K, B)),
    "baddbmm": (
        lambda w, x, b: torch.baddbmm(b, x, w.mT, beta=0.5, alpha=2),
        (E, B, K),
        (E, 1, N),
    ),
    "baddbmm method": (lambda w, x, b: b.baddbmm(x, w), (E, B, N), (E, B, K)),
    "gathered": (lambda w, x: torch.bmm(x, w[_ids(0, 2, 2, 1)].mT), (4, 1, K)),
    "gathered, matmul": (lambda w, x: x @ w[_ids(0, 2, -2, 1)], (4, B, N)),
    "gathered, index_select": (lambda w, x: x @ w.index_select(0, _ids(2, 0)), (2, B, N)),
    "gathered by a list": (lambda w, x: x @ w[[2, 0]], (2, B, N)),
    "gathered by a mask": (lambda w, x: x @ w[torch.tensor([True, False, True])], (2, B, N)),
    "gathered, w first": (
        lambda w, x: torch.bmm(w[_ids(1, 1)], x.unsqueeze(-1)).squeeze(-1),
        (2, K),
    ),
    "some experts": (lambda w, x: torch.bmm(x, w[1:]), (2, B, N)),
    "every second": (lambda w, x: torch.bmm(x, w[::2]), (2, B, N)),
    "flipped": (lambda w, x: torch.bmm(x, w.flip(0)), (E, B, N)),
    "einsum": (lambda w, x: torch.einsum("ebk,enk->ebn", x, w), (E, B, K)),
    "einsum, x @ w": (lambda w, x: torch.einsum("ebn,enk->ebk", x, w), (E, B, N)),
    "einsum, permuted": (lambda w, x: torch.einsum("bek,enk->nbe", x, w), (B, E, K)),
    "einsum, ellipsis": (lambda w, x: torch.einsum("...ek,enk->...en", x, w), (2, B, E, K)),
    "einsum, shared x": (lambda w, x: torch.einsum("bk,enk->ebn", x, w), (B, K)),
    "einsum, summed experts": (lambda w, x: torch.einsum("ebk,enk->bn", x, w), (E, B, K)),
    "einsum, e...k": (lambda w, x: torch.einsum("e...k,enk->e...n", x, w), (E, 2, B, K)),
    "grouped_mm": (
        lambda w, x: F.grouped_mm(x, w.mT, offs=torch.tensor([2, 2, 6], dtype=torch.int32)),
        (6, K),
    ),
    "grouped_mm, x @ w": (
        lambda w, x: F.grouped_mm(x, w, offs=torch.tensor([0, 4, 6], dtype=torch.int32)),
        (6, N),
    ),
    "sum": (lambda w, x: F.linear(x, w.sum(0)), (B, K)),
    "two dims": (lambda w, x: F.linear(x, w.view(E * N, K)), (B, K)),
    "part of each": (lambda w, x: torch.bmm(x, w[:, :8].mT), (E, B, K)),
    "empty bmm": (lambda w, x: torch.bmm(x, w), (E, 0, N)),
    "no expert": (lambda w, x: torch.bmm(x, w[:0]), (0, B, N)),
    "gathered none": (lambda w, x: torch.bmm(x, w[torch.empty(0, dtype=torch.long)]), (0, B, N)),
}

#: Spellings that need values of the weight, or only a part of what was packed as one.
REBUILDS = {
    *("columns", "every second row", "one row", "a row", "mul", "x + w", "norm", "cat", "stack"),
    *("softmax", "cdist", "where", "bilinear", "conv1d", "kron", "cosine_similarity", "vecdot"),
    *("gathered by a mask", "flipped", "sum", "part of each", "no expert"),
    *("einsum, summed experts", "new_zeros", "zeros_like", "gathered none"),
}
#: Of matrices that were packed as one: parts of them. Of others: rows to look up.
REBUILDS_WHOLE = {
    *("some rows", "some rows, bias", "split", "chunk", "tensor_split", "narrow", "unflatten"),
    "unbind of view",
}
REBUILDS_OTHERS = {
    *("embedding of rows", "rows by index", "rows by index, colon", "rows by 2-D index"),
    "rows by index_select",
}


def rebuilds(name, form):
    if name in REBUILDS_WHOLE:
        return form in ("matrix", "transposed")
    return name in REBUILDS or (name in REBUILDS_OTHERS and form != "matrix")


CASES = [
    pytest.param(call, shapes, form, rebuilds(name, form), id=f"{form}: {name}")
    for table, forms in ((OF_MATRICES, MATRICES), (OF_EXPERTS, EXPERTS))
    for name, (call, *shapes) in table.items()
    for form in forms
]
#: Those that are multiplies, without grouped_mm, which has few dtypes.
PRODUCTS = [
    pytest.param(*case.values[:3], id=case.id)
    for case in CASES
    if case.values[2] in ("transposed", "experts") and not case.values[3]
    if "grouped_mm" not in case.id and "row" not in case.id
]
#: Those that torch takes apart: who watches sees mm or bmm with a stand-in.
TAKEN_APART = ("multi_dot", "chain_matmul", "einsum, no arrow", "einsum, shared x", "e...k")


@pytest.fixture
def rebuilt(monkeypatch):
    """The shapes of the stand-ins that were made dense."""
    calls, dense = [], WeightView.dense

    def counted(self):
        calls.append(tuple(self.shape))
        return dense(self)

    monkeypatch.setattr(WeightView, "dense", counted)
    return calls


class Watcher(TorchDispatchMode):
    """Keeps the names of torch's operators that multiply matrices."""

    def __init__(self):
        super().__init__()
        self.multiplies = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "aten" and func._schema.name.endswith(("mm", "mv", "linear")):
            self.multiplies.append(str(func))
        return func(*args, **(kwargs or {}))


def inputs(shapes, dtype, grad=False):
    torch.manual_seed(1)
    return [
        torch.randn(s, dtype=dtype, requires_grad=grad and i == 0) for i, s in enumerate(shapes)
    ]


def close(got, expected, dtype):
    assert got.dtype == expected.dtype
    bound = BOUND[dtype]
    torch.testing.assert_close(got, expected, rtol=bound, atol=bound, equal_nan=True)


@pytest.mark.parametrize("call, shapes, form, rebuilds", CASES)
def test_every_spelling_is_that_of_dense(call, shapes, form, rebuilds, rebuilt):
    dtype = torch.float32 if "grouped_mm" in call.__code__.co_names else torch.float64
    results = []
    for w in dense_and_view(form, dtype):
        tensors = inputs(shapes, dtype, grad=True)
        y = call(w, *tensors)
        (grad,) = torch.autograd.grad(y.pow(2).sum(), tensors[0])
        with torch.no_grad():
            again = call(w, *tensors)
        with torch.inference_mode():
            third = call(w, *(t.detach() for t in tensors))
        results.append((y, grad, again, third))
    for expected, got in zip(*results):
        close(got, expected, dtype)
    assert bool(rebuilt) == rebuilds


@pytest.mark.parametrize("call, shapes, form", PRODUCTS)
def test_products_in_every_dtype(call, shapes, form, rebuilt):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight, view = dense_and_view(form, dtype)
        tensors = inputs(shapes, dtype)
        with torch.no_grad():
            exact = call(weight.double(), *(t.double() for t in tensors))
            got = call(view, *tensors)
        assert got.dtype == dtype
        bound = BOUND[dtype] * (1 + exact.abs().amax() if exact.numel() else 1)
        torch.testing.assert_close(got.double(), exact, rtol=BOUND[dtype], atol=float(bound))
    assert not rebuilt


@pytest.mark.parametrize("call, shapes, form", PRODUCTS)
def test_products_under_autocast(call, shapes, form, rebuilt):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        weight, view = dense_and_view(form, dtype)
        tensors = inputs(shapes, dtype)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            try:
                expected = call(weight, *tensors)
            except RuntimeError:  # torch's own: operators that autocast knows meet others
                continue
            got = call(view, *tensors)
        assert got.dtype == expected.dtype
        bound = 5e-2 * (1 + expected.abs().amax() if expected.numel() else 1)
        torch.testing.assert_close(got, expected, rtol=5e-2, atol=float(bound))
    assert not rebuilt


@pytest.mark.parametrize(
    "call, shapes, form",
    [case for case in PRODUCTS if not any(name in case.id for name in TAKEN_APART)],
)
def test_whoever_watches_sees_no_dense_multiply(call, shapes, form):
    view = dense_and_view(form)[1]
    with torch.no_grad(), Watcher() as watcher:
        call(view, *inputs(shapes, torch.float32))
    assert not watcher.multiplies


def test_grouped_mm_under_autocast_and_in_16_bits():
    offs = torch.tensor([2, 2, 6], dtype=torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        weight, view = dense_and_view("experts", dtype)
        x = torch.randn(6, K, dtype=dtype)
        for enabled in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                expected = F.grouped_mm(x, weight.mT, offs=offs)
                close(F.grouped_mm(x, view.mT, offs=offs), expected, torch.bfloat16)
    with pytest.raises(RuntimeError):
        F.grouped_mm(x, view.mT, offs=offs[:2])


UNKNOWN = {
    "add": lambda w: w + 1,
    "radd": lambda w: 1 - w,
    "abs, sum": lambda w: w.abs().sum(),
    "comparison": lambda w: (w != 0).sum(),
    "topk": lambda w: w.topk(2).values,
    "any": lambda w: torch.any(w),
    "masked_select": lambda w: w[w != 0],
    "item": lambda w: w[1, 2].item(),
    "tolist": lambda w: w.tolist(),
    "numpy": lambda w: torch.from_numpy(w.numpy().copy()),
    "bool": lambda w: bool(w.any()),
    "iteration": lambda w: torch.stack([row * 2 for row in w]),
    "unfold": lambda w: w.unfold(0, 4, 2) * 2,
    "diagonal": lambda w: w.diagonal() * 2,
    "flip": lambda w: w.flip(1),
    "roll": lambda w: w.roll(1, 0),
    "repeat": lambda w: w.repeat(2, 1),
    "fft": lambda w: torch.fft.rfft(w).abs(),
    "svd": lambda w: torch.linalg.svdvals(w),
    "int": lambda w: (w * 100).int() + w.to(torch.int32),
    "long": lambda w: w.long(),
    "bool dtype": lambda w: w.bool(),
    "complex": lambda w: w.to(torch.complex64),
    "double": lambda w: w.double(),
    "half": lambda w: w.half() * 1,
    "bits": lambda w: w.view(torch.int32) + 0,
    "bytes": lambda w: w.view(torch.uint8) + 0,
    "real": lambda w: w.real + 0,
    "negated": lambda w: -w,
    "transposed copy": lambda w: w.t().contiguous().view(-1) * 1,
    "as_strided": lambda w: w.as_strided((3, 5), (2, 1), 7) * 1,
    "strides of a copy": lambda w: w.t().reshape(-1).view(4, -1) + 1,
    "squared error": lambda w: F.mse_loss(w, torch.zeros_like(w)),
    "pad": lambda w: F.pad(w, (1, 1)),
    "normalize": lambda w: F.normalize(w),
    "dropout": lambda w: F.dropout(w, 0.0) + 0,
    "interpolate": lambda w: F.interpolate(w[None, None], scale_factor=2),
    "in a list": lambda w: torch.cat([w, w.t().reshape(w.shape)]),
    "w @ w.t()": lambda w: w @ w.t(),
    "linear of two": lambda w: F.linear(w, w),
    "einsum of two": lambda w: torch.einsum("nk,mk->nm", w, w),
    "out of what is added": lambda w: torch.addmm(w, w.new_ones(N, 2), w.new_ones(2, K)),
    "w as input of linear": lambda w: F.linear(w, torch.ones(2, K)),
    "w as a bias": lambda w: F.linear(torch.ones(N, 2), torch.ones(K, 2), w.select(0, 1)),
    "to sparse": lambda w: w.to_sparse().to_dense(),
    "to device": lambda w: w.to("cpu") + 0,
    "to device and dtype": lambda w: w.to("cpu", torch.bfloat16) + 0,
    "cpu": lambda w: w.cpu() + 0,
    "copy to": lambda w: torch.empty(N, K).copy_(w),
    "added in place": lambda w: torch.ones(N, K).add_(w),
    "assigned from": lambda w: torch.zeros(2, N, K).index_fill_(0, _ids(0), 1).mul_(w),
    "out=": lambda w: torch.mul(w, 2, out=torch.empty(N, K)),
    "matmul out=": lambda w: torch.matmul(torch.ones(2, N), w, out=torch.empty(2, K)),
    "vmap": lambda w: torch.vmap(lambda row: row.sum())(w.clone() + 0),
    "as_tensor": lambda w: torch.as_tensor(w) + 0,
}


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_any_other_operation_is_done_densely(name, mode):
    for form in MATRICES:
        with mode():
            expected, got = (UNKNOWN[name](w) for w in dense_and_view(form))
            if isinstance(expected, torch.Tensor):
                assert type(got) is torch.Tensor
            torch.testing.assert_close(got, expected)


WRITES = {
    "add_": lambda w: w.add_(1),
    "zero_": lambda w: w.zero_(),
    "fill_ of a view": lambda w: w.t().fill_(0),
    "iadd": lambda w: w.__iadd__(1),
    "setitem": lambda w: w.__setitem__(0, 1.0),
    "setitem of a view": lambda w: w[1:].__setitem__(0, 1.0),
    "copy_": lambda w: w.copy_(torch.zeros(N, K)),
    "data": lambda w: setattr(w, "data", torch.zeros(N, K)),
    "data copy_": lambda w: w.data.copy_(torch.zeros(N, K)),
    "out=": lambda w: torch.add(torch.ones(N, K), 1, out=w),
    "init": lambda w: torch.nn.init.normal_(w),
    "clamp_": lambda w: torch.clamp_(w, 0, 1),
    "index_put_": lambda w: w.index_put_((_ids(0),), torch.zeros(K)),
    "masked_fill_": lambda w: w.masked_fill_(torch.ones(N, K) > 0, 0),
    "copy of a clone": lambda w: w.clone().zero_(),
    "t_": lambda w: w.t_(),
    "resize_": lambda w: w.resize_(3, 3),
    "set_": lambda w: w.set_(torch.zeros(2)),
    "requires_grad_": lambda w: w.requires_grad_(),
    "requires_grad": lambda w: setattr(w, "requires_grad", True),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_write_raises(name, mode):
    weight, view = dense_and_view("matrix")
    with mode(), pytest.raises(RuntimeError, match="to_dense"):
        WRITES[name](view)
    assert torch.equal(view.dense(), weight)


WRONG = {
    "linear": (lambda w: F.linear(torch.ones(2, K + 1), w), RuntimeError),
    "linear, 0-D": (lambda w: F.linear(torch.ones(()), w), RuntimeError),
    "bias": (lambda w: F.linear(torch.ones(2, K), w, torch.ones(N + 1)), RuntimeError),
    "bias dtype": (
        lambda w: F.linear(torch.ones(2, K), w, torch.ones(N, dtype=torch.float64)),
        RuntimeError,
    ),
    "dtype": (lambda w: F.linear(torch.ones(2, K, dtype=torch.float64), w), RuntimeError),
    "dtype, x @ w": (lambda w: torch.ones(2, N, dtype=torch.float64) @ w, RuntimeError),
    "integers": (lambda w: torch.ones(2, N, dtype=torch.long) @ w, RuntimeError),
    "matmul": (lambda w: torch.ones(2, K) @ w, RuntimeError),
    "matmul, w first": (lambda w: w @ torch.ones(N, 2), RuntimeError),
    "mm, 3-D": (lambda w: torch.mm(torch.ones(2, 2, N), w), RuntimeError),
    "mm, 1-D": (lambda w: torch.mm(torch.ones(N), w), RuntimeError),
    "mv": (lambda w: torch.mv(w, torch.ones(N)), RuntimeError),
    "mv, 2-D": (lambda w: torch.mv(w, torch.ones(K, 2)), RuntimeError),
    "bmm": (lambda w: torch.bmm(torch.ones(2, 2, N), w), RuntimeError),
    "bmm, batch": (lambda w: torch.bmm(torch.ones(2, 2, N), w[None]), RuntimeError),
    "addmm": (lambda w: torch.addmm(torch.ones(K + 1), torch.ones(2, N), w), RuntimeError),
    "addmm of dims": (
        lambda w: torch.addmm(torch.ones(2, 2, K), torch.ones(2, N), w),
        RuntimeError,
    ),
    "einsum": (lambda w: torch.einsum("bk,nk->bn", torch.ones(2, N), w), RuntimeError),
    "tensordot": (lambda w: torch.tensordot(torch.ones(2, K), w, 1), RuntimeError),
    "view": (lambda w: w.view(7, -1), RuntimeError),
    "transpose": (lambda w: w.transpose(0, 2), IndexError),
    "index": (lambda w: w[N], IndexError),
    "indices": (lambda w: w[_ids(0, N)], IndexError),
    "index_select": (lambda w: w.index_select(0, _ids(N)), IndexError),
    "embedding": (lambda w: F.embedding(_ids(0, N), w), IndexError),
    "negative embedding": (lambda w: F.embedding(_ids(-1), w), IndexError),
    "float indices": (lambda w: F.embedding(torch.ones(2), w), RuntimeError),
    "split": (lambda w: w.split([1, 2]), RuntimeError),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_dense_refuses_is_refused(name):
    call, error = WRONG[name]
    for form in MATRICES:
        for w in dense_and_view(form):
            with pytest.raises(error):
                call(w)


@pytest.mark.parametrize("form", MATRICES)
def test_non_finite_values_meet_dropped_zeros_as_in_dense(form):
    weight, view = dense_and_view(form)
    for call, width in ((lambda w, x: F.linear(x, w), K), (lambda w, x: x @ w, N)):
        x = torch.randn(4, width)
        x[1, 3], x[2, 7] = float("inf"), float("nan")
        torch.testing.assert_close(call(view, x), call(weight, x), equal_nan=True)


def test_casts_are_those_of_dense(rebuilt):
    x = torch.randn(B, K)
    for form in MATRICES:
        weight, view = dense_and_view(form)
        narrow = view.to(torch.bfloat16)
        assert isinstance(narrow, WeightView) and narrow.dtype == torch.bfloat16
        assert view.to(torch.float32) is view and view.type(torch.float32).dtype == torch.float32
        close(F.linear(x.bfloat16(), narrow), F.linear(x, weight).bfloat16(), torch.bfloat16)
        close(
            F.linear(x.bfloat16(), view.bfloat16()), F.linear(x, weight).bfloat16(), torch.bfloat16
        )
    assert not rebuilt
    weight, view = dense_and_view("matrix", torch.bfloat16)
    torch.testing.assert_close(F.linear(x, view.float()), F.linear(x, weight.float()))
    assert type(view.float()) is torch.Tensor  # the operator would be less exact


@pytest.mark.parametrize("form", FORMS)
def test_copies_and_pickles(form):
    weight, view = dense_and_view(form)
    part = view[..., :8, :].mT
    file = io.BytesIO()
    torch.save(part, file)
    file.seek(0)
    copies = [
        copy.copy(part),
        copy.deepcopy(part),
        pickle.loads(pickle.dumps(part)),
        torch.load(file, weights_only=False),
    ]
    for other in copies:
        assert type(other) is WeightView and other.stride() == part.stride()
        assert torch.equal(other.dense(), weight[..., :8, :].mT)
    twice = copy.deepcopy([view, view])
    assert twice[0] is twice[1]


def test_facts_cost_nothing(rebuilt):
    weight, view = dense_and_view("experts", torch.float16)
    for name in (
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "requires_grad",
        "is_leaf",
        "itemsize",
    ):
        assert getattr(view, name) == getattr(weight, name)
    for name in ("size", "stride", "dim", "numel", "is_floating_point", "is_contiguous", "type"):
        assert getattr(view, name)() == getattr(weight, name)()
    assert len(view) == E and torch.is_tensor(view) and isinstance(view, torch.Tensor)
    text = f"WeightView(shape=(3, 24, 16), dtype=torch.float16, packed={view.packed.numel()} bytes)"
    assert repr(view) == text
    assert not rebuilt


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bags(mode, rebuilt):
    weight, view = dense_and_view("matrix")
    ids, offsets = torch.tensor([3, 1, 3, 7]), torch.tensor([0, 2, 2])
    given = [
        (ids, offsets, {}),
        (ids.int(), offsets.int(), {}),
        (ids.view(2, 2), None, {}),
        (ids[:0], offsets[:0], {}),
        (ids, torch.tensor([0, 2, 2, 4]), {"include_last_offset": True}),
    ]
    if mode == "sum":
        given.append((ids, offsets, {"per_sample_weights": torch.randn(4)}))
    for ids, offsets, more in given:
        expected, got = (
            F.embedding_bag(ids, w, offsets, mode=mode, **more) for w in (weight, view)
        )
        torch.testing.assert_close(got, expected)
    assert not rebuilt
    for wrong in (N, -1):
        with pytest.raises((IndexError, RuntimeError)):
            F.embedding_bag(torch.tensor([[wrong]]), view, mode=mode)
    padded = (
        F.embedding_bag(torch.tensor([[3, 1]]), w, mode=mode, padding_idx=1) for w in (weight, view)
    )
    torch.testing.assert_close(*padded)


def test_a_vector_and_a_matrix_that_were_expanded():
    class Pools(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = nn.Parameter(torch.randn(256) * (torch.rand(256) > 0.9))

        def forward(self, x, scale=None):
            attention_interface = _attention
            query = self.query.float().view(-1, 256).expand(*x.shape[:-2], -1, -1)
            return attention_interface(self, query, x)

    def _attention(module, query, x):
        return torch.matmul(query, x.transpose(-1, -2))

    model = Pools()
    sparse = fxsparse.compile(model, min_elements=0)
    (row,) = sparse.report.rows
    assert (row.status, row.shape) == ("sparse", (256,))
    x = torch.randn(2, 3, 5, 256)
    torch.testing.assert_close(sparse(x), model(x), rtol=1e-4, atol=1e-4)
    dense = fxsparse.to_dense(sparse)
    assert torch.equal(dense.query, model.query) and isinstance(dense.query, nn.Parameter)
    again = fxsparse.compile(model, min_elements=0)
    again.load_state_dict(sparse.state_dict())
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(x), model(x), rtol=1e-4, atol=1e-4)

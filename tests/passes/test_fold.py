"""Weights that hooks and parametrizations compute at every call become plain weights."""

import pytest
import torch
from fxsparse.passes.fold import fold, needs_folding
from torch import nn
from torch.nn.utils import parametrize, prune

import fxsparse
from fxsparse.clone import share_clone

METHODS = {
    "l1": lambda layer: prune.l1_unstructured(layer, "weight", 0.8),
    "random": lambda layer: prune.random_unstructured(layer, "weight", 0.8),
    "structured": lambda layer: prune.ln_structured(layer, "weight", 0.8, n=2, dim=0),
    "custom": lambda layer: prune.custom_from_mask(layer, "weight", torch.rand(64, 64) > 0.8),
    "iterative": lambda layer: [prune.l1_unstructured(layer, "weight", 0.6) for _ in range(2)],
    "weight and bias": lambda layer: [
        prune.l1_unstructured(layer, "weight", 0.8),
        prune.l1_unstructured(layer, "bias", 0.5),
    ],
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("capture", ["trace", "modules"])
def test_masks_are_folded(method, inplace, capture):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()
    METHODS[method](model[0])
    x = torch.randn(3, 64)
    expected = model(x)
    sparse = fxsparse.compile(model, min_elements=0, inplace=inplace, capture=capture)
    assert [row.path for row in sparse.report.rows] == ["0.weight", "2.weight"]
    assert sparse.report.rows[0].status == "sparse"
    assert sparse.report.rows[0].dense_bytes == 64 * 64 * 4
    assert not needs_folding(sparse) and needs_folding(model) is not inplace
    torch.testing.assert_close(sparse(x), expected)
    torch.testing.assert_close(model(x), expected)
    names = {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert set(fxsparse.to_dense(sparse).state_dict()) == names


def test_global_pruning_is_judged_layer_by_layer():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval()
    with torch.no_grad():
        model[0].weight.mul_(10)
    layers = [(layer, "weight") for layer in model]
    prune.global_unstructured(layers, pruning_method=prune.L1Unstructured, amount=0.6)
    report = fxsparse.compile(model, min_elements=0).report
    assert [row.status for row in report.rows] == ["dense", "sparse"]
    assert report.rows[0].sparsity < 0.5 < report.rows[1].sparsity


def test_a_stale_weight_attribute_is_not_used():
    layer = nn.Linear(64, 64).eval()
    prune.l1_unstructured(layer, "weight", 0.8)
    with torch.no_grad():
        layer.weight_orig.mul_(2)  # layer.weight still holds the old product
    sparse = fxsparse.compile(nn.Sequential(layer), min_elements=0)
    x = torch.randn(3, 64)
    torch.testing.assert_close(sparse(x), layer(x))


def test_folding_keeps_order_and_flags():
    layer = nn.Linear(4, 4)
    layer.weight.requires_grad_(False)
    prune.l1_unstructured(layer, "weight", 0.5)
    fold(layer)
    assert list(layer._parameters) == ["weight", "bias"]
    assert not layer.weight.requires_grad and not layer._forward_pre_hooks


def test_an_untouched_pre_hook_stays():
    layer = nn.Linear(64, 64).eval()
    prune.l1_unstructured(layer, "weight", 0.8)
    layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model = nn.Sequential(layer)
    sparse = fxsparse.compile(model, min_elements=0)
    assert sparse.report.rewritten == 1
    x = torch.randn(3, 64)
    torch.testing.assert_close(sparse(x), model(x))


class Mask(nn.Module):
    def __init__(self, shape=(64, 64)):
        super().__init__()
        self.register_buffer("mask", torch.rand(shape) > 0.8)

    def forward(self, weight):
        return weight * self.mask


class Repeat(nn.Module):
    """64 rows, made of 4."""

    def forward(self, rows):
        return rows.repeat(16, 1)

    def right_inverse(self, weight):
        return (weight[:4].clone(),)


class Dropped(nn.Module):
    def forward(self, weight):
        return nn.functional.dropout(weight, 0.5, self.training)


class Noisy(nn.Module):
    def forward(self, weight):
        return weight + torch.rand_like(weight)


class NoisyInSecret(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, weight):
        return weight + torch.rand(weight.shape, generator=self.generator)


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, weight):
        self.calls += 1
        return weight


class Failing(nn.Module):
    calls = 0

    def forward(self, weight):
        self.calls += 1
        if self.calls > 1:
            raise KeyError("no more")
        return weight


def parametrized(parametrization, linear=None):
    linear = linear or nn.Linear(64, 64)
    parametrize.register_parametrization(linear, "weight", parametrization)
    return linear


FORMS = {
    "mask": lambda: parametrized(Mask()),
    "two on a weight": lambda: parametrized(Mask(), parametrized(Mask())),
    "dropout in evaluation": lambda: parametrized(Dropped()),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(64, 64)),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64)),
    "weight_norm hook": lambda: nn.utils.weight_norm(nn.Linear(64, 64)),
    "spectral_norm hook": lambda: nn.utils.spectral_norm(nn.Linear(64, 64)),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("inplace", [False, True])
def test_computed_weights_become_plain(form, inplace):
    layer = FORMS[form]()
    model = nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(64, 64)).eval()
    prune.remove(prune.l1_unstructured(model[3], "weight", 0.9), "weight")
    kind, before = type(layer), {name: id(p) for name, p in model.named_parameters()}
    x = torch.randn(3, 64)
    expected = model(x)
    sparse = fxsparse.compile(model, threshold=0, min_elements=0, inplace=inplace)
    assert [row.path for row in sparse.report.rows] == ["0.weight", "3.weight"]
    assert sparse.report.rows[0].dense_bytes == 64 * 64 * 4
    torch.testing.assert_close(sparse(x), expected)
    torch.testing.assert_close(model(x), expected)
    names = {f"{i}.{name}" for i in (0, 2, 3) for name in ("weight", "bias")}
    assert set(fxsparse.to_dense(sparse).state_dict()) == names
    if not inplace:
        assert type(layer) is kind and needs_folding(model)
        assert {name: id(p) for name, p in model.named_parameters()} == before
        model(x).sum().backward()
        assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("parametrization", "training", "reason"),
    [
        (Noisy, False, "draws random numbers at every call"),
        (NoisyInSecret, False, "does not compute the same at every call"),
        (Counted, False, "changes"),
        (Dropped, True, "call model.eval() before compile"),
        (Repeat, False, "holds fewer bytes than the weight: 1024 against 16384"),
        (Failing, False, "fails with KeyError: 'no more'"),
    ],
)
@pytest.mark.parametrize("inplace", [False, True])
def test_a_parametrization_that_is_not_constant_stays(parametrization, training, reason, inplace):
    model = nn.Sequential(parametrized(parametrization()), nn.Linear(64, 64)).train(training)
    prune.l1_unstructured(model[1], "weight", 0.9)
    sparse = fxsparse.compile(model, min_elements=0, inplace=inplace)
    row = sparse.report.rows[0]
    assert row.path.startswith("0.parametrizations.weight.original") and row.status == "dense"
    assert row.reason.startswith("its parametrization ") and reason in row.reason
    assert sparse.report.rows[1].status == "sparse"
    if parametrization in (Noisy, Dropped):
        x = torch.randn(3, 64)
        torch.manual_seed(1)
        expected = model(x)
        torch.manual_seed(1)
        torch.testing.assert_close(sparse(x), expected)


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_spectral_norm_in_training_stays_and_goes_on(norm):
    model = nn.Sequential(norm(nn.Linear(64, 64)), nn.Linear(64, 64))
    prune.l1_unstructured(model[1], "weight", 0.9)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    sparse = fxsparse.compile(model, min_elements=0)
    assert "call model.eval() before compile" in sparse.report.rows[0].reason
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    x = torch.randn(3, 64)
    for _ in range(2):
        torch.testing.assert_close(sparse(x), model(x))


def test_one_parametrization_that_stays_keeps_its_neighbour():
    layer = parametrized(Mask())
    parametrize.register_parametrization(layer, "bias", Noisy())
    fold(layer)
    assert parametrize.is_parametrized(layer, "weight") and parametrize.is_parametrized(
        layer, "bias"
    )


def test_several_tensors_of_one_module():
    layer = parametrized(Mask())
    parametrize.register_parametrization(layer, "bias", Mask((64,)))
    weight, bias = layer.weight.detach(), layer.bias.detach()
    fold(layer)
    assert type(layer) is nn.Linear and list(layer._parameters) == ["weight", "bias"]
    assert torch.equal(layer.weight, weight) and torch.equal(layer.bias, bias)
    assert layer.weight.requires_grad


def test_a_mask_of_what_a_norm_reads():
    layer = nn.utils.spectral_norm(nn.Linear(64, 64)).eval()
    prune.l1_unstructured(layer, "weight_orig", 0.9)
    x = torch.randn(3, 64)
    expected = layer(x)
    fold(layer)
    assert list(layer._parameters) == ["weight", "bias"] and not layer._buffers
    assert not layer._forward_pre_hooks and not layer._state_dict_hooks
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("kind", ["prune", "parametrize"])
@pytest.mark.parametrize("same", [True, False])
def test_tied_weights_stay_tied_under_equal_masks(kind, same):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval()
    model[1].weight = model[0].weight
    masks = [Mask()] * 2 if same else [Mask(), Mask()]
    for layer, mask in zip(model, masks):
        if kind == "prune":
            prune.custom_from_mask(layer, "weight", mask.mask)
        else:
            parametrized(mask, layer)
    x = torch.randn(3, 64)
    expected = model(x)
    sparse = fxsparse.compile(model, min_elements=0)
    assert len(sparse.report.rows) == (1 if same else 2)
    torch.testing.assert_close(sparse(x), expected)


RECURRENT = {
    "prune": lambda rnn: [
        prune.l1_unstructured(rnn, name, 0.9) for name in ("weight_hh_l0", "bias_ih_l0")
    ],
    "parametrize": lambda rnn: parametrize.register_parametrization(
        rnn, "weight_hh_l0", Mask((64, 16))
    ),
}


@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.parametrize("run_before", [False, True])
def test_recurrent_layers(kind, run_before):
    rnn = nn.LSTM(8, 16)
    RECURRENT[kind](rnn)
    x = torch.randn(5, 2, 8)
    expected = rnn(x)[0]
    copy = share_clone(rnn) if run_before else share_clone(nn.Sequential(rnn))[0]
    fold(copy)
    assert type(copy) is nn.LSTM and not needs_folding(copy) and needs_folding(rnn)
    assert {name for name, _ in copy.named_parameters()} == {
        name for name, _ in nn.LSTM(8, 16).named_parameters()
    }
    assert all(
        held is copy._parameters[name]
        for held, name in zip(copy._flat_weights, copy._flat_weights_names)
    )
    torch.testing.assert_close(copy(x)[0], expected)


OTHERS = {
    "conv": (lambda: nn.Conv2d(4, 8, 3), "weight", (2, 4, 5, 5)),
    "embedding": (lambda: nn.Embedding(10, 8), "weight", None),
    "layer norm": (lambda: nn.LayerNorm(8), "bias", (2, 8)),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("way", ["prune", "parametrize"])
def test_any_tensor_of_any_module(kind, way):
    make, name, shape = OTHERS[kind]
    module = make()
    if way == "prune":
        prune.random_unstructured(module, name, 0.5)
    else:
        tensor = getattr(module, name)
        parametrize.register_parametrization(module, name, Mask(tensor.shape))
    x = torch.arange(10) if shape is None else torch.randn(shape)
    expected = module(x)
    fold(module)
    assert type(module) is type(make())
    assert set(module.state_dict()) == set(make().state_dict())
    torch.testing.assert_close(module(x), expected)


def test_hooks_of_users_stay():
    calls = []
    layer = parametrized(Mask())
    prune.l1_unstructured(layer, "bias", 0.5)
    layer.register_forward_pre_hook(lambda module, args: calls.append("before"))
    layer.register_forward_hook(lambda module, args, output: calls.append("after"))
    fold(layer)
    layer(torch.randn(3, 64))
    assert calls == ["before", "after"] and list(layer._parameters) == ["weight", "bias"]

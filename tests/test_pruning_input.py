"""Models as pruning tools and other libraries leave them: sparsifiers, sparse layouts, wrappers."""

import copy

import pytest
import torch
from pruned import prune, sparse_weight
from torch import nn
from torch.ao import pruning
from torch.ao.pruning._experimental.pruner import SaliencyPruner
from torch.nn.utils import prune as torch_prune

import fxsparse
from fxsparse.memory import tensor_bytes

LAYOUTS = {
    "csr": lambda weight: weight.to_sparse_csr(),
    "coo": lambda weight: weight.to_sparse(),
    "csc": lambda weight: weight.to_sparse_csc(),
    "bsr": lambda weight: weight.to_sparse_bsr((4, 4)),
    "bsc": lambda weight: weight.to_sparse_bsc((4, 4)),
    "uncoalesced": lambda weight: torch.sparse_coo_tensor(
        weight.to_sparse().indices().repeat(1, 2),
        weight.to_sparse().values().repeat(2) / 2,
        weight.shape,
    ),
}


def mlp():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()


def test_masks_on_some_layers_only():
    """https://github.com/NVIDIA/retinanet-examples/issues/257"""
    model = mlp()
    torch_prune.l1_unstructured(model[0], "weight", 0.9)
    sparse = fxsparse.compile(model, min_elements=0)
    assert [row.status for row in sparse.report.rows] == ["sparse", "dense"]
    x = torch.randn(3, 64)
    torch.testing.assert_close(sparse(x), model(x))


def prepared(model):
    sparsifier = pruning.WeightNormSparsifier(
        sparsity_level=0.9, sparse_block_shape=(1, 1), zeros_per_block=1
    )
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}, {"tensor_fqn": "2.weight"}])
    return sparsifier


def test_a_sparsifier_before_its_first_step():
    model = mlp()
    prepared(model)
    with pytest.warns(fxsparse.NothingRewrittenWarning, match="0 %"):
        assert fxsparse.compile(model, min_elements=0) is model
    assert model.report.dense_bytes == sum(t.nbytes for t in mlp().parameters())


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    "form",
    [
        lambda rnn, name: torch_prune.l1_unstructured(rnn, name, 0.9),
        nn.utils.weight_norm,
        lambda rnn, name: nn.utils.parametrize.register_parametrization(rnn, name, nn.Identity()),
    ],
    ids=["mask", "weight_norm", "parametrization"],
)
def test_a_recurrent_layer_with_computed_weights(form, inplace):
    rnn = prune(nn.LSTM(64, 64))
    form(rnn, "weight_hh_l0")
    x = torch.randn(5, 2, 64)
    expected = rnn(x)[0]
    sparse = fxsparse.compile(nn.ModuleList([rnn]), min_elements=0, inplace=inplace)[0]
    assert type(sparse) is fxsparse.modules.recurrent.SPARSE_CLASSES[nn.LSTM]
    torch.testing.assert_close(sparse(x)[0], expected)


@pytest.mark.parametrize("stage", ["stepped", "squashed"])
@pytest.mark.parametrize("inplace", [False, True])
def test_a_sparsifier_of_torch(stage, inplace):
    model = mlp()
    sparsifier = prepared(model)
    sparsifier.step()
    if stage == "squashed":
        sparsifier.squash_mask()
    x = torch.randn(3, 64)
    expected = model(x)
    sparse = fxsparse.compile(model, min_elements=0, inplace=inplace)
    assert sparse.report.rewritten == 2
    assert min(row.sparsity for row in sparse.report.rows) > 0.85
    assert sparse.report.dense_bytes == sum(t.nbytes for t in mlp().parameters())
    assert set(fxsparse.to_dense(sparse).state_dict()) == set(mlp().state_dict())
    torch.testing.assert_close(sparse(x), expected)
    if not inplace and stage == "stepped":  # the sparsifier goes on with the model
        sparsifier.step()
        sparsifier.squash_mask()
        torch.testing.assert_close(model(x), expected)


def test_a_structured_pruner_of_torch():
    model = prune(mlp())
    pruner = SaliencyPruner({})
    pruner.prepare(model, [{"tensor_fqn": "0.weight", "sparsity_level": 0.5}])
    pruner.enable_mask_update = True
    pruner.step()
    x = torch.randn(3, 64)
    expected = model(x)
    sparse = fxsparse.compile(model, min_elements=0)
    torch.testing.assert_close(sparse(x), expected)
    assert [row.path for row in sparse.report.rows] == ["0.weight", "2.weight"]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse (CSC|BSR|BSC) tensor support:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_weight_of_a_sparse_layout_is_packed(layout, inplace, dtype):
    weight = sparse_weight(128, 64, dtype=dtype)
    linear = nn.Linear(64, 128, dtype=dtype).eval()
    bias = linear.bias.detach().clone()
    linear.weight = nn.Parameter(LAYOUTS[layout](weight), requires_grad=False)
    held = tensor_bytes(linear.weight)
    sparse = fxsparse.compile(nn.Sequential(linear), min_elements=0, inplace=inplace)
    (row,) = sparse.report.rows
    assert row.status == "sparse" and row.dense_bytes == held > row.stored_bytes
    assert row.nnz == torch.count_nonzero(weight)
    x = torch.randn(3, 64, dtype=dtype)
    torch.testing.assert_close(sparse(x), nn.functional.linear(x, weight, bias))
    back = fxsparse.to_dense(sparse).get_parameter("0.weight")
    assert torch.equal(back, weight) and not back.requires_grad
    assert inplace or linear.weight.layout != torch.strided


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_a_sparse_layout_that_is_smaller_stays():
    model = prune(mlp())
    weight = torch.zeros(64, 64)
    weight[0, 0] = 1
    model[0].weight = nn.Parameter(weight.to_sparse(), requires_grad=False)
    model[2].weight = nn.Parameter(sparse_weight(64, 64, 0.2).to_sparse_csr(), requires_grad=False)
    extra = nn.Sequential(model, prune(mlp()))
    sparse = fxsparse.compile(extra, min_elements=0, threshold=0.5)
    rows = {row.path: row for row in sparse.report.rows}
    held = tensor_bytes(model[0].weight)
    assert "packed it would not be smaller" in rows["0.0.weight"].reason
    assert rows["0.0.weight"].stored_bytes == held
    assert "below the threshold" in rows["0.2.weight"].reason
    again = fxsparse.to_dense(sparse)
    assert again.get_parameter("0.0.weight").layout == torch.sparse_coo
    assert again.get_parameter("0.2.weight") is not model[2].weight


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_sparse_tensors_with_one_pattern_stay():
    model = prune(mlp())
    weight = sparse_weight(64, 64).to_sparse_csr()
    other = torch.sparse_csr_tensor(
        weight.crow_indices(), weight.col_indices(), weight.values() * 2, (64, 64)
    )
    model[0].weight, model[2].weight = nn.Parameter(weight), nn.Parameter(other)
    report = fxsparse.inspect(model, min_elements=0)
    assert all("shares the indices" in row.reason for row in report.rows)
    model[2].weight = model[0].weight
    sparse = fxsparse.compile(model, min_elements=0)
    assert sparse.report.rows[0].aliases == ("2.weight",) and sparse.report.rewritten == 1


class Foreign(torch.Tensor):
    """As the semi-structured tensors of torch.sparse are: a class of its own, without plain memory."""


def test_a_tensor_of_another_class_stays():
    model = prune(mlp())
    model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(Foreign))
    row = fxsparse.compile(model, min_elements=0).report.rows[0]
    assert row.status == "dense" and "is not a plain tensor" in row.reason


WRAPPED = {
    "data parallel": nn.DataParallel,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "both": lambda model: torch.compile(nn.DataParallel(model), backend="eager"),
}


@pytest.mark.parametrize("wrapper", WRAPPED)
@pytest.mark.parametrize("inplace", [False, True])
def test_wrappers_are_taken_off(wrapper, inplace):
    """https://github.com/microsoft/nni/issues/5277"""
    model = mlp()
    torch_prune.l1_unstructured(model[0], "weight", 0.9)
    x = torch.randn(3, 64)
    expected = model(x)
    sparse = fxsparse.compile(WRAPPED[wrapper](model), min_elements=0, inplace=inplace)
    assert [row.path for row in sparse.report.rows] == ["0.weight", "2.weight"]
    assert sparse.report.rewritten == 1
    torch.testing.assert_close(sparse(x), expected)


@pytest.mark.parametrize("wrapper", WRAPPED)
@pytest.mark.parametrize("inplace", [False, True])
def test_wrappers_inside_are_taken_off(wrapper, inplace):
    inner = prune(mlp())
    x = torch.randn(3, 64)
    expected = inner(inner(x))
    model = nn.Sequential(WRAPPED[wrapper](inner), copy.deepcopy(inner))
    sparse = fxsparse.compile(model, min_elements=0, inplace=inplace)
    assert [row.path for row in sparse.report.rows] == [
        f"{i}.{j}.weight" for i in (0, 1) for j in (0, 2)
    ]
    assert sparse.report.rewritten == 4
    torch.testing.assert_close(sparse(x), expected)
    assert (type(model[0]) is nn.Sequential) is inplace


def test_distributed_data_parallel_is_taken_off(tmp_path):
    model = prune(mlp())
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        assert fxsparse.compile(wrapped, min_elements=0).report.rewritten == 2
        both = nn.Sequential(torch.compile(wrapped, backend="eager"))
        assert fxsparse.compile(both, min_elements=0).report.rewritten == 2
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_a_wrapper_with_hooks_is_refused(wrapper):
    wrapped = WRAPPED[wrapper](prune(mlp()))
    wrapped.register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(ValueError, match="the model is wrapped in .* hooks of its own"):
        fxsparse.compile(wrapped, min_elements=0)
    with pytest.raises(ValueError, match="0 is wrapped in .* hooks of its own"):
        fxsparse.compile(nn.Sequential(wrapped), min_elements=0)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("inplace", [False, True])
def test_a_scripted_module_inside_stays(inplace):
    model = nn.Sequential(torch.jit.script(prune(mlp())), prune(mlp()))
    x = torch.randn(3, 64)
    expected = model(x)
    sparse = fxsparse.compile(model, min_elements=0, inplace=inplace)
    assert [row.status for row in sparse.report.rows] == ["dense", "dense", "sparse", "sparse"]
    assert "torch.jit has compiled" in sparse.report.rows[0].reason
    torch.testing.assert_close(sparse(x), expected)


def test_an_unevenly_pruned_model_is_judged_layer_by_layer():
    """https://github.com/DeGirum/pruned-models/issues/2"""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).eval()
    prune(model[2])
    report = fxsparse.compile(model, min_elements=0).report
    assert [row.sparsity > 0.5 for row in report.rows] == [False, False, True]
    assert [row.status for row in report.rows] == ["dense", "dense", "sparse"]


def test_a_model_without_multiplies_comes_back():
    """https://github.com/VainF/Torch-Pruning/issues/136"""
    model = nn.Sequential(nn.ReLU(), nn.BatchNorm1d(4)).eval()
    with pytest.warns(fxsparse.NothingRewrittenWarning, match="has no weights"):
        assert fxsparse.compile(model) is model

"""Wrong input: one clear error that says what was expected, what came, where, and what to do."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pruned import prune
from torch import nn

import fxsparse


@pytest.fixture
def model():
    return prune(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)))


@pytest.mark.parametrize(
    "options, error, text",
    [
        ({"threshold": -0.1}, ValueError, r"threshold: expected a sparsity in \[0, 1\], got -0.1"),
        ({"threshold": 1.01}, ValueError, "threshold"),
        ({"threshold": float("nan")}, ValueError, "threshold"),
        ({"threshold": "0.5"}, TypeError, "threshold: expected a number"),
        ({"min_elements": -1}, ValueError, "min_elements"),
        ({"min_elements": 1.5}, TypeError, "min_elements"),
        ({"capture": "dynamo"}, ValueError, "capture: expected one of 'auto'.*got 'dynamo'"),
        ({"capture": "export"}, ValueError, "capture='export'.*example_inputs"),
        ({"values": torch.int8}, NotImplementedError, "values=torch.int8"),
        ({"values": "int8"}, TypeError, "values"),
        ({"prefer": "size"}, ValueError, "prefer: expected one of"),
        ({"batch_hint": 0}, ValueError, "batch_hint"),
        ({"batch_hint": 2.0}, TypeError, "batch_hint"),
        ({"threads": 0}, ValueError, "threads: expected 1 or more, got 0"),
        ({"threads": -1}, ValueError, "threads"),
        ({"threads": "all"}, TypeError, "threads: expected an int"),
        ({"threads": True}, TypeError, "threads"),
        ({"threads": {"0.weight": 0}}, ValueError, r"threads\['0.weight'\]"),
        (
            {"threads": {"1.weight": 1}},
            ValueError,
            "threads: the pattern '1.weight' matches no weight",
        ),
        (
            {"include": ["encoder.*"]},
            ValueError,
            "include: the pattern 'encoder.*'.*there are 0.weight",
        ),
        ({"exclude": ["2.bias"]}, ValueError, "exclude: the pattern '2.bias'.*closest: 2.weight"),
        ({"include": "0.weight"}, TypeError, "include: expected a sequence"),
        ({"include": 5}, TypeError, "include: expected a sequence"),
        ({"exclude": None}, TypeError, "exclude: expected a sequence"),
        ({"exclude": {"1.*": 0}.keys()}, ValueError, "exclude: the pattern"),
        ({"threads": 2**40}, ValueError, "threads"),
        ({"verify": "yes"}, TypeError, "verify: expected True, False or None"),
        ({"example_inputs": torch.zeros(1, 64)}, TypeError, r"example_inputs.*write \(x,\)"),
        ({"example_inputs": (torch.zeros(1, 3),)}, ValueError, "Sequential itself fails on them"),
        ({"verify": True}, ValueError, "verify=True: expected example_inputs"),
    ],
)
def test_options(model, options, error, text):
    for inplace in (False, True):
        with pytest.raises(error, match=text):
            fxsparse.compile(model, inplace=inplace, **{"min_elements": 0, **options})
        assert type(model[0]) is nn.Linear


def test_an_option_of_inspect_that_is_none(model):
    with pytest.raises(
        TypeError, match="inspect: expected options of fxsparse.compile, got treshold"
    ):
        fxsparse.inspect(model, treshold=0.5)


def test_warnings_point_at_the_caller(model):
    with pytest.warns(
        fxsparse.NothingRewrittenWarning, match="such as '0.weight'.*min_elements"
    ) as caught:
        fxsparse.compile(model, min_elements=10**9)
    assert caught[0].filename == __file__


def test_not_a_module():
    with pytest.raises(TypeError, match="expected an nn.Module, got function"):
        fxsparse.compile(lambda x: x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted(model):
    for scripted in (torch.jit.script(model), torch.jit.trace(model, torch.zeros(1, 64))):
        with pytest.raises(TypeError, match="before it is scripted"):
            fxsparse.compile(scripted)


def test_already_compiled(model):
    sparse = fxsparse.compile(model, min_elements=0)
    with pytest.raises(ValueError, match=r"0.weight_packed is packed already.*to_dense"):
        fxsparse.compile(sparse)


def test_a_model_with_values_elsewhere(model):
    with pytest.raises(ValueError, match="0.weight is on the meta device"):
        fxsparse.compile(model.to("meta"))


def test_a_model_on_another_device(model, monkeypatch):
    class Elsewhere(nn.Parameter):
        device = torch.device("cuda", 0)

    model[2].weight = Elsewhere(model[2].weight.detach())
    with pytest.raises(ValueError, match=r"2.weight is on cuda:0: expected a model on the CPU"):
        fxsparse.compile(model)


def test_a_lazy_model():
    with pytest.raises(ValueError, match="0.weight has no shape yet"):
        fxsparse.compile(nn.Sequential(nn.LazyLinear(8)))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32, torch.float8_e4m3fn])
def test_a_weight_of_another_dtype_stays(model, dtype):
    model[0].weight = nn.Parameter(model[0].weight.detach().to(dtype), requires_grad=False)
    report = fxsparse.compile(model, min_elements=0).report
    assert report.rows[0].status == "dense"
    assert f"dtype {dtype} is not supported" in report.rows[0].reason
    assert report.rows[1].status == "sparse"


@pytest.mark.filterwarnings("ignore::UserWarning:torch.ao.nn.quantized")
def test_a_quantized_module_stays(model):
    quantized = torch.ao.nn.quantized.dynamic.Linear(64, 64)
    both = nn.Sequential(model, quantized).eval()
    sparse = fxsparse.compile(both, min_elements=0)
    assert sparse.report.rewritten == 2
    x = torch.randn(3, 64)
    torch.testing.assert_close(sparse(x), both(x))


def test_wrong_inputs_at_call_time(model):
    sparse = fxsparse.compile(model, min_elements=0)
    with pytest.raises(
        RuntimeError, match=r"expected x with 64 values in its last dimension.*\[2, 63\]"
    ):
        sparse(torch.zeros(2, 63))
    with pytest.raises(RuntimeError, match="expected x of dtype float32.*got float64"):
        sparse(torch.zeros(2, 64, dtype=torch.float64))
    with pytest.raises((RuntimeError, ValueError), match="meta"):
        sparse(torch.zeros(2, 64, device="meta"))
    assert sparse(torch.zeros(0, 64)).shape == (0, 64)


def test_a_failed_compile_in_place_changes_nothing(model):
    nn.utils.prune.l1_unstructured(model[0], "weight", 0.5)
    before = {key: id(value) for key, value in model.named_parameters()}
    with pytest.raises(ValueError, match="matches no weight"):
        fxsparse.compile(model, inplace=True, exclude=["nothing"])
    assert {key: id(value) for key, value in model.named_parameters()} == before
    assert nn.utils.prune.is_pruned(model)


def test_running_out_of_memory_in_place_leaves_a_right_model(model, monkeypatch):
    from fxsparse.passes import install

    x = torch.randn(3, 64)
    expected = model(x)
    real, calls = install.pack, []

    def pack(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError("no memory")
        return real(*args, **kwargs)

    monkeypatch.setattr(install, "pack", pack)
    with pytest.raises(MemoryError):
        fxsparse.compile(model, min_elements=0, inplace=True)
    assert [type(model[i]) for i in (0, 2)] == [fxsparse.SparseLinear, nn.Linear]
    torch.testing.assert_close(model(x), expected)


def test_verification_names_the_output_and_the_difference(model, monkeypatch):
    from fxsparse.passes import install

    real = install.pack
    monkeypatch.setattr(install, "pack", lambda weight, **kw: real(weight.detach() * 2, **kw))
    with pytest.raises(fxsparse.VerificationError, match=r"at output: values differ by"):
        fxsparse.compile(model, (torch.randn(3, 64),), min_elements=0)


def test_to_dense_wants_a_module():
    with pytest.raises(TypeError, match="expected an nn.Module, got Tensor"):
        fxsparse.to_dense(torch.zeros(3))


def test_from_linear_wants_a_linear():
    with pytest.raises(TypeError, match="expected an nn.Linear, got Conv2d"):
        fxsparse.SparseLinear.from_linear(nn.Conv2d(1, 1, 1))


def test_inplace_is_true_or_false(model):
    with pytest.raises(TypeError, match="inplace: expected True or False, got 'yes'"):
        fxsparse.compile(model, inplace="yes")


def test_a_model_with_a_report_of_its_own():
    class Reports(nn.Module):
        def report(self):
            return 1

    for inplace in (False, True):
        with pytest.raises(ValueError, match="Reports has an attribute 'report' of its own"):
            fxsparse.compile(Reports(), inplace=inplace)


def test_weights_whose_memory_cannot_be_read_stay(model):
    x = torch.randn(3, 64)
    model[0].weight = nn.Parameter(
        torch.complex(torch.zeros(64, 64), model[0].weight.detach()).conj().imag
    )
    expected = model(x)
    sparse = fxsparse.compile(model, min_elements=0)
    assert "lazily negated" in sparse.report.rows[0].reason
    torch.testing.assert_close(sparse(x), expected)
    freed = nn.Linear(64, 64)
    freed.weight.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="its memory was freed"):
        fxsparse.SparseLinear.from_linear(freed)


def test_a_default_device_is_not_used_for_packing(model):
    x = torch.randn(3, 64)
    with torch.device("meta"):
        sparse = fxsparse.compile(model, min_elements=0)
    torch.testing.assert_close(sparse(x), model(x))


def test_outputs_that_are_floats_are_compared_as_such():
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 64)

        def forward(self, x):
            return self.fc(x).mean().item()

    fxsparse.compile(prune(Mean()), (torch.randn(3, 64),), min_elements=0)


def test_a_source_folder_without_its_core_says_what_to_do(tmp_path):
    source = Path(fxsparse.__file__).parent
    (tmp_path / "fxsparse").mkdir()
    for file in source.glob("*.py"):
        (tmp_path / "fxsparse" / file.name).write_text(file.read_text())
    run = subprocess.run(
        [sys.executable, "-c", "import fxsparse"], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode != 0
    assert "has no compiled core" in run.stderr and "pip install --no-build-isolation" in run.stderr

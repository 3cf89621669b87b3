"""Which kernel runs, and the FXSPARSE_ variables."""

import pytest
import torch
from kernel_support import KERNELS, pack, run_ok, run_script

from fxsparse import _C

MULTIPLY = """
packed = pack(torch.eye(8))
x = torch.randn(2, 8)
assert torch.equal(torch.ops.fxsparse.linear(x, packed, None, 8, 8, torch.float32, 0), x)
"""


def test_isas_are_those_of_the_table_best_first():
    order = ["avx512", "avx2", "neon", "generic"]
    assert _C.isas() == [isa for isa in order if any(k["isa"] == isa for k in KERNELS)]


def test_usable_follows_the_cpu_features():
    features = _C.cpu_features()
    needs = {
        "avx2": ["avx2", "fma", "f16c"],
        "avx512": ["avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"],
        "neon": ["neon"],
        "generic": [],
    }
    for kernel in _C.kernels():
        usable = all(features.get(name, False) for name in needs[kernel["isa"]])
        assert kernel["usable"] == usable


@pytest.mark.skipif(not hasattr(torch.backends.cpu, "get_cpu_capability"), reason="old torch")
def test_features_agree_with_torch():
    capability = torch.backends.cpu.get_cpu_capability()
    if capability in ("AVX2", "AVX512"):
        assert _C.cpu_features()["avx2"]
    if capability == "AVX512":
        assert _C.cpu_features()["avx512f"]


def test_the_best_is_the_default():
    assert (
        run_ok("import os; os.environ.pop('FXSPARSE_ISA', None); print(_C.isa())") == _C.isas()[0]
    )


@pytest.mark.parametrize("isa", _C.isas())
def test_fxsparse_isa_forces_one(isa):
    assert run_ok(MULTIPLY + "print(_C.isa())", FXSPARSE_ISA=isa) == isa


# Runs its body in a fresh state for each value of a variable; a child of os.fork inherits none.
FOR_EACH = """
import os, sys
def for_each(name, values, body):
    for value in values:
        child = os.fork()
        if child == 0:
            os.environ[name] = value
            body()
            sys.stdout.flush()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
def show(call):
    try:
        print(call())
    except ValueError as error:
        print(error)
"""


def test_a_bad_fxsparse_isa_is_an_error_at_first_use_and_each_time():
    values = ["sse9", "", "AVX2", *({"neon", "avx512"} - set(_C.isas()))]
    script = f"{FOR_EACH}\nfor_each('FXSPARSE_ISA', {values}, lambda: (show(_C.isa), show(_C.isa)))"
    lines = run_ok(script).splitlines()
    start = f"FXSPARSE_ISA: expected one of {', '.join(_C.isas())} (usable on this CPU), got "
    assert lines == [start + (value or "an empty string") for value in values for _ in range(2)]


def test_operators_report_a_bad_fxsparse_isa():
    result = run_script("print('imported')\n" + MULTIPLY, FXSPARSE_ISA="sse9")
    assert result.stdout.strip() == "imported" and result.returncode == 1
    assert "FXSPARSE_ISA: expected one of" in result.stderr


def test_fxsparse_num_threads():
    values = ["1", "3", "512"]
    script = (
        f"{FOR_EACH}\nfor_each('FXSPARSE_NUM_THREADS', {values}, lambda: show(_C.get_num_threads))"
    )
    assert run_ok(script).split() == values


def test_a_bad_fxsparse_num_threads_is_an_error_at_first_use():
    values = ["0", "-1", "two", "", "2.5", "3 ", "513", "99999999999999999999"]
    script = (
        f"{FOR_EACH}\nfor_each('FXSPARSE_NUM_THREADS', {values}, lambda: show(_C.get_num_threads))"
    )
    start = "FXSPARSE_NUM_THREADS: expected a number from 1 to 512, got "
    lines = run_ok(script + "\nprint('.')").splitlines()[:-1]
    assert lines == [start + (value or "an empty string") for value in values]


def test_set_num_threads_overrides_the_variable():
    script = "_C.set_num_threads(3); print(_C.get_num_threads())"
    assert run_ok(script, FXSPARSE_NUM_THREADS="nonsense") == "3"


@pytest.mark.parametrize("threads", [0, -2, 513])
def test_set_num_threads_refuses(threads):
    with pytest.raises(ValueError, match=f"expected 1 to 512, got {threads}"):
        _C.set_num_threads(threads)


def test_forcing_an_isa_that_is_not_here_is_an_error():
    packed = pack(torch.eye(4))
    x, y = torch.randn(1, 4), torch.empty(1, 4)
    arguments = (packed.data_ptr(), packed.numel(), x.data_ptr(), 4, 1, 0, y.data_ptr(), 4, 1)
    for isa in {"avx512", "neon"} - set(_C.isas()):
        with pytest.raises(ValueError, match=f"expected one that this CPU has, got {isa}"):
            _C.run_kernel(isa, *arguments)
    with pytest.raises(ValueError, match="isa: expected one of .* got sse9"):
        _C.run_kernel("sse9", *arguments)

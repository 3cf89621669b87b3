"""No dense copy is kept anywhere, and memory goes back as weights are packed."""

import gc
import subprocess
import sys
import weakref

import pytest
import torch
from pruned import prune
from torch import nn

import fxsparse


@pytest.mark.parametrize("capture", ["trace", "modules"])
def test_inplace_lets_go_of_the_dense_weights(capture):
    model = prune(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    dense = [weakref.ref(layer.weight) for layer in model]
    sparse = fxsparse.compile(model, min_elements=0, inplace=True, capture=capture)
    gc.collect()
    assert sparse.report.rewritten == 2 and [ref() for ref in dense] == [None, None]


def test_the_result_holds_no_reference_to_the_model():
    model = prune(nn.Sequential(nn.Linear(64, 64), nn.ReLU()))
    dense = weakref.ref(model[0].weight)
    sparse = fxsparse.compile(model, (torch.randn(1, 64),), min_elements=0)
    del model
    gc.collect()
    assert dense() is None and sparse(torch.randn(2, 64)).shape == (2, 64)


def test_parameters_that_stay_are_shared_and_buffers_copied():
    model = prune(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)))
    sparse = fxsparse.compile(model, min_elements=0, exclude=["2.*"])
    assert sparse.get_submodule("2").weight is model[2].weight
    assert sparse.get_submodule("0").bias is model[0].bias
    mean = sparse.get_submodule("1").running_mean
    assert torch.equal(mean, model[1].running_mean)
    assert mean.data_ptr() != model[1].running_mean.data_ptr()


_PEAK = """
import torch, fxsparse, gc
from torch import nn
def status(key):
    return int(next(l for l in open('/proc/self/status') if l.startswith(key)).split()[1]) / 1024
torch.set_grad_enabled(False)
warm = nn.Sequential(nn.Linear(64, 64, bias=False)).eval(); warm[0].weight.zero_()
fxsparse.compile(warm, min_elements=0)(torch.ones(1, 64)); del warm
layers = []
for _ in range(12):
    layer = nn.utils.skip_init(nn.Linear, 1024, 1024); layer.bias.zero_()
    layer.weight.zero_(); layer.weight.view(-1)[::10] = 1.0
    layers.append(layer)
model = nn.Sequential(*layers).eval(); del layers, layer; gc.collect()
dense = status('VmRSS')
open('/proc/self/clear_refs', 'w').write('5')
sparse = fxsparse.compile(model, inplace=True)
print(dense, status('VmHWM'), status('VmRSS'), sparse.report.saved_bytes / 2**20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_peaks_one_layer_above_dense_and_ends_below():
    run = subprocess.run([sys.executable, "-c", _PEAK], capture_output=True, text=True)
    if "clear_refs" in run.stderr:
        pytest.skip("the peak of resident memory cannot be reset here")
    assert run.returncode == 0, run.stderr
    dense, peak, after, saved = map(float, run.stdout.split())
    assert peak <= dense + 4 + 8  # one layer of 4 MB, and 8 MB for what else a process does
    assert after <= dense - saved + 8

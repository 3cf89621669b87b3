"""Image models of timm: most families are traced as a whole, and all give what eager gives."""

import sys
from unittest import mock

import pytest
import torch
from pruned import operators_run
from torch import fx

import fxsparse

#: What timm imports of torchvision and pillow for data sets, which its models do not need. They stay
#: away: torchvision as it comes from the package index does not load beside a CPU build of torch.
_STUBS = """
    PIL torchvision torchvision.datasets torchvision.models torchvision.models.feature_extraction
    torchvision.ops torchvision.ops.misc torchvision.transforms torchvision.transforms.functional
"""


def _import_timm():
    absent = {
        name: mock.MagicMock(__version__="11.0")
        for name in _STUBS.split()
        if name not in sys.modules
    }
    sys.modules.update(absent)
    try:
        return pytest.importorskip("timm")
    finally:
        for name in absent:
            del sys.modules[name]


timm = _import_timm()

#: Families that are traced as a whole, and the size of an image.
TRACED = {
    "mixer_s16_224": 224,
    "resmlp_12_224": 224,
    "gmlp_ti16_224": 224,
    "pit_ti_224": 224,
    "swin_tiny_patch4_window7_224": 224,
    "convnext_atto": 64,
    "convmixer_768_32": 64,
    "poolformer_s12": 64,
    "inception_next_atto": 64,
    "resnet18": 64,
    "efficientnet_b0": 64,
    "regnetx_002": 64,
}
#: Families that keep their class: the size of an image, and what the report says.
KEPT = {
    "vit_tiny_patch16_224": (224, "optional or keyword arguments"),
    "levit_128s": (224, "overrides train"),
    "mobilevit_xxs": (64, "branches on 'new_h != H or new_w != W'"),
}


def _model(name):
    model = timm.create_model(name, pretrained=False, num_classes=10).eval()
    for module in model.modules():  # two blocks of each stage are enough
        blocks = getattr(module, "blocks", None)
        if blocks is not None and type(blocks[0]) is not torch.nn.Sequential:
            module.blocks = blocks[:2]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                if not parameter.any():
                    parameter.normal_(0, 0.02)
                parameter.mul_(3 * (torch.rand_like(parameter) > 0.9))
    return model


def _check(model, sparse, size):
    with torch.no_grad():
        for batch in (1, 3):
            image = torch.randn(batch, 3, size, size)
            expected = model(image)
            bound = 1e-4 * expected.abs().max().item()
            torch.testing.assert_close(sparse(image), expected, rtol=0, atol=bound)
        ran = operators_run(lambda: sparse(image))
    linears = [
        m for m in model.modules() if isinstance(m, torch.nn.Linear) and m.weight.numel() > 999
    ]
    rows = {row.path: row for row in sparse.report.rows}
    paths = [f"{path}.weight" for path, m in model.named_modules() if m in linears]
    assert [path for path in paths if rows[path].status != "sparse"] == []
    most = {"linear": 1, "linear_fused": 1, "linears": len(paths), "mlp": 3}
    assert sum(ran[f"fxsparse.{call}.default"] * n for call, n in most.items()) >= len(paths)
    assert not ran["aten.addmm.default"] and not ran["aten.mm.default"]


@pytest.mark.parametrize("name", TRACED)
def test_a_family_is_traced_as_a_whole(name):
    model = _model(name)
    sparse = fxsparse.compile(model, min_elements=0)
    assert isinstance(sparse, fx.GraphModule), sparse.report.note
    _check(model, sparse, TRACED[name])


@pytest.mark.parametrize("name", KEPT)
def test_a_family_whose_forward_depends_on_more_keeps_its_class(name):
    size, note = KEPT[name]
    model = _model(name)
    sparse = fxsparse.compile(model, min_elements=0)
    assert type(sparse) is type(model)
    assert note in sparse.report.note
    _check(model, sparse, size)

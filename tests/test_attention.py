"""``nn.MultiheadAttention`` and transformers of torch with packed weights equal the dense ones in every mode."""

import copy
import itertools

import pytest
import torch
from pruned import prune
from torch import nn

import fxsparse
from fxsparse.modules.attention import SparseTransformerEncoder

D, HEADS, B, S, T = 32, 4, 3, 5, 7


pytestmark = pytest.mark.usefixtures("one_thread_of_torch")


def compiled(model, **options):
    return fxsparse.compile(model, min_elements=0, capture="modules", **options)


def modes():
    return (torch.enable_grad, torch.no_grad, torch.inference_mode)


def same(model, sparse, call, grad=None):
    """The same outputs in grad mode and out of it, in eval and in train; the same gradient of ``grad``."""
    for training in (False, True):
        model.train(training)
        sparse.train(training)
        for mode in modes():
            with mode():
                expected, got = call(model), call(sparse)
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
        if grad is not None:
            gradients = []
            for module in (model, sparse):
                (found,) = torch.autograd.grad(_sum(call(module)), grad)
                gradients.append(found)
            torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
    model.eval()
    sparse.eval()


def _sum(result):
    result = result[0] if isinstance(result, tuple) else result
    return result.pow(2).sum()


MAKES = {
    "plain": {},
    "batch_first": {"batch_first": True},
    "bias=False": {"bias": False, "batch_first": True},
    "kdim": {"kdim": 24, "vdim": 16},
    "kdim, batch_first": {"kdim": 24, "vdim": 16, "batch_first": True},
    "add_bias_kv": {"add_bias_kv": True},
    "add_zero_attn": {"add_zero_attn": True, "batch_first": True},
    "odd heads": {"num_heads": 1, "batch_first": True},
}


def attention(**how):
    model = prune(nn.MultiheadAttention(D, how.pop("num_heads", HEADS), **how))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name:
                parameter.normal_()
    return model


@pytest.mark.parametrize("name", MAKES)
def test_multihead_attention(name):
    how = MAKES[name]
    model = attention(**how)
    sparse = compiled(model)
    statuses = {row.path: row.status for row in sparse.report.rows}
    projections = {"q_proj_weight", "k_proj_weight", "v_proj_weight"}
    expected = projections if "kdim" in how else {"in_proj_weight"}
    assert {path for path, status in statuses.items() if status == "sparse"} == {
        *expected,
        "out_proj.weight",
    }
    assert type(sparse) is nn.MultiheadAttention
    first = how.get("batch_first", False)
    query = torch.randn((B, S, D) if first else (S, B, D), requires_grad=True)
    key = torch.randn((B, T, how.get("kdim", D)) if first else (T, B, how.get("kdim", D)))
    value = torch.randn(*key.shape[:2], how.get("vdim", D))
    padding = torch.zeros(B, T, dtype=torch.bool)
    padding[0, -2:] = padding[1, -1:] = True
    mask = torch.randn(S, T)
    for more in (
        {},
        {"need_weights": False},
        {"average_attn_weights": False},
        {"attn_mask": mask > 0.5},
        {"attn_mask": mask, "need_weights": False},
        {"attn_mask": mask.expand(B * how.get("num_heads", HEADS), S, T)},
        {"key_padding_mask": padding},
        {"key_padding_mask": padding, "attn_mask": mask > 1.5, "need_weights": False},
    ):
        same(model, sparse, lambda m, more=more: m(query, key, value, **more), query)
    unbatched = query[0] if first else query[:, 0]
    other = (key[0], value[0]) if first else (key[:, 0], value[:, 0])
    same(model, sparse, lambda m: m(unbatched, *other))
    dense = fxsparse.to_dense(sparse)
    assert dense.state_dict().keys() == model.state_dict().keys()
    for key, tensor in dense.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[key])


@pytest.mark.parametrize("name", [name for name in MAKES if "kdim" not in name])
def test_self_attention(name):
    how = MAKES[name]
    model = attention(**how)
    sparse = compiled(model)
    x = torch.randn((B, S, D) if how.get("batch_first") else (S, B, D), requires_grad=True)
    padding = torch.zeros(B, S, dtype=torch.bool)
    padding[0, -2:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(S)
    for more in (
        {},
        {"need_weights": False},
        {"key_padding_mask": padding},
        {"key_padding_mask": padding, "need_weights": False},
        {"attn_mask": causal, "is_causal": True, "need_weights": False},
        {"attn_mask": causal < 0, "average_attn_weights": False},
    ):
        same(model, sparse, lambda m, more=more: m(x, x, x, **more), x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_attention_of_other_dtypes_and_under_autocast(dtype):
    model = attention(batch_first=True).to(dtype)
    sparse = compiled(model)
    x = torch.randn(B, S, D, dtype=dtype)
    bound = {torch.float64: 1e-6, torch.bfloat16: 5e-2}[dtype]
    with torch.no_grad():
        torch.testing.assert_close(sparse(x, x, x), model(x, x, x), rtol=bound, atol=bound)
    with torch.autocast("cpu", torch.bfloat16):
        model, x = model.float(), x.float()
        got, expected = compiled(model)(x, x, x), model(x, x, x)
        assert [t.dtype for t in got] == [t.dtype for t in expected]
        torch.testing.assert_close(got, expected, rtol=5e-2, atol=5e-2)


def layer(cls, **how):
    model = cls(D, HEADS, 48, dropout=0.0, **how)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return prune(model)


LAYERS = [
    {"norm_first": norm_first, "batch_first": batch_first, "activation": activation}
    for norm_first, batch_first, activation in itertools.product(
        (False, True), (False, True), ("relu", "gelu")
    )
] + [{"bias": False, "batch_first": True}]


def _masks(batch_first):
    src = torch.randn((B, S, D) if batch_first else (S, B, D), requires_grad=True)
    padding = torch.zeros(B, S, dtype=torch.bool)
    padding[0, -2:] = padding[2, -1:] = True
    return src, padding, nn.Transformer.generate_square_subsequent_mask(S)


@pytest.mark.parametrize("how", LAYERS, ids=str)
def test_encoder_layer(how):
    model = layer(nn.TransformerEncoderLayer, **how)
    sparse = compiled(model)
    assert sparse.report.rewritten == 4
    src, padding, causal = _masks(how["batch_first"])
    for more in (
        {},
        {"src_key_padding_mask": padding},
        {"src_mask": causal},
        {"src_mask": causal, "is_causal": True},
        {"src_mask": causal, "src_key_padding_mask": padding.float() * -1e9},
    ):
        same(model, sparse, lambda m, more=more: m(src, **more), src)


@pytest.mark.parametrize("how", LAYERS, ids=str)
def test_decoder_layer_and_decoder(how):
    for model in (
        layer(nn.TransformerDecoderLayer, **how),
        nn.TransformerDecoder(layer(nn.TransformerDecoderLayer, **how), 2, nn.LayerNorm(D)).eval(),
    ):
        sparse = compiled(model)
        assert sparse.report.rewritten in (6, 12)
        tgt, padding, causal = _masks(how["batch_first"])
        memory = torch.randn_like(tgt)
        for more in (
            {},
            {"tgt_mask": causal, "tgt_is_causal": True},
            {"tgt_key_padding_mask": padding, "memory_key_padding_mask": padding},
        ):
            same(
                model,
                sparse,
                lambda m, tgt=tgt, memory=memory, more=more: m(tgt, memory, **more),
                tgt,
            )


def encoder(norm=True, **how):
    nested = how.pop("enable_nested_tensor", True)
    mask_check = how.pop("mask_check", True)
    one = layer(nn.TransformerEncoderLayer, **how)
    model = nn.TransformerEncoder(
        one,
        2,
        nn.LayerNorm(D) if norm else None,
        enable_nested_tensor=nested,
        mask_check=mask_check,
    )
    if norm:
        model.norm.bias.data.normal_()
    return prune(model)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True, but")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "how, exclude, grads",
    [
        ({"batch_first": True}, (), True),
        ({"batch_first": True}, (), False),
        ({"batch_first": True}, ("layers.0.*",), False),
        ({"batch_first": True}, ("layers.1.*",), True),
        ({"batch_first": True}, ("*.linear?.weight",), False),
        ({"batch_first": True, "norm": False}, (), True),
        ({"batch_first": True, "norm": False}, ("layers.0.*",), False),
        ({"batch_first": True, "enable_nested_tensor": False}, (), False),
        ({"batch_first": True, "mask_check": False}, (), False),
        ({"batch_first": True, "norm_first": True}, (), False),
        ({"batch_first": False}, ("layers.0.*",), False),
    ],
    ids=str,
)
def test_encoder_pads_as_dense_does(how, exclude, grads):
    model = encoder(**how).requires_grad_(grads)
    sparse = compiled(model, exclude=exclude)
    assert type(sparse) is SparseTransformerEncoder and isinstance(sparse, nn.TransformerEncoder)
    src, padding, causal = _masks(how["batch_first"])
    src = src.detach()
    scattered = padding.flip(1)
    for more in (
        {},
        {"src_key_padding_mask": padding},
        {"src_key_padding_mask": torch.zeros(B, S).masked_fill(padding, float("-inf"))},
        {"mask": causal},
        {"mask": causal, "src_key_padding_mask": padding},
        {"mask": causal, "is_causal": True},
        *([{"src_key_padding_mask": scattered}] if how.get("mask_check", True) else []),
    ):
        same(model, sparse, lambda m, more=more: m(src, **more))
    if how.get("enable_nested_tensor", True) and how == {"batch_first": True, "norm": False}:
        with torch.no_grad():
            assert (sparse(src, src_key_padding_mask=padding)[padding] == 0).all()
    dense = fxsparse.to_dense(sparse)
    assert type(dense) is nn.TransformerEncoder and "leaves_out_padding" not in dense.__dict__
    assert dense.use_nested_tensor == model.use_nested_tensor
    same(model, dense, lambda m: m(src, src_key_padding_mask=padding))
    same(model, copy.deepcopy(sparse), lambda m: m(src, src_key_padding_mask=padding))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_sequence_that_is_all_padding():
    model = encoder(batch_first=True)
    sparse = compiled(model)
    src, padding, _ = _masks(True)
    padding[1] = True
    same(model, sparse, lambda m: m(src.detach(), src_key_padding_mask=padding))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("inplace", [False, True])
def test_an_encoder_in_a_traced_model(inplace):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = encoder(batch_first=True)
            self.head = nn.Linear(D, 8)

        def forward(self, x, padding):
            return self.head(self.encoder(x, None, padding))

    model = prune(Model())
    x, padding, _ = _masks(True)
    x = x.detach()
    with torch.no_grad():
        expected = model(x, padding)
        sparse = fxsparse.compile(model, min_elements=0, inplace=inplace)
        assert isinstance(sparse, torch.fx.GraphModule)
        torch.testing.assert_close(sparse(x, padding), expected)
        if inplace:
            torch.testing.assert_close(model(x, padding), expected)


def test_a_subclass_of_the_encoder_stays_dense_where_it_may_nest():
    class Own(nn.TransformerEncoder):
        def forward(self, src, padding=None):
            return super().forward(src, src_key_padding_mask=padding)

    for nested in (True, False):
        model = prune(Own(layer(nn.TransformerEncoderLayer, batch_first=True), 1, None, nested))
        if nested:
            with pytest.warns(
                fxsparse.NothingRewrittenWarning, match="Own may pass nested tensors"
            ):
                compiled(model)
            continue
        sparse = compiled(model)
        assert sparse.report.rewritten == 4
        src, padding, _ = _masks(True)
        src = src.detach()
        torch.testing.assert_close(sparse(src, padding), model(src, padding), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True, but")
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer(batch_first, norm_first):
    how = {"batch_first": batch_first, "norm_first": norm_first}
    model = prune(nn.Transformer(D, HEADS, 1, 1, 48, dropout=0.0, **how))
    sparse = compiled(model)
    assert all(row.status == "sparse" for row in sparse.report.rows)
    src, padding, causal = _masks(batch_first)
    src = src.detach()
    same(model, sparse, lambda m: m(src, src.flip(0)))
    more = {"tgt_mask": causal, "src_key_padding_mask": padding, "memory_key_padding_mask": padding}
    same(model, sparse, lambda m: m(src, src.flip(0), **more))


def test_a_subclass_of_attention_with_its_own_forward_stays_dense():
    class Own(nn.MultiheadAttention):
        def forward(self, x):
            return super().forward(x, x, x)[0] + self.in_proj_weight.sum()

    model = prune(Own(D, HEADS))
    sparse = compiled(model)
    rows = {row.path: row for row in sparse.report.rows}
    assert "more than an nn.MultiheadAttention" in rows["in_proj_weight"].reason
    x = torch.randn(S, B, D)
    same(model, sparse, lambda m: m(x))

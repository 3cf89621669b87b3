"""Weights of mixtures of experts: packed in every form that models hold them in, and equal."""

import pytest
import torch
import torch.nn.functional as F
from pruned import prune, sparse_weight
from torch import nn

import fxsparse

pytestmark = pytest.mark.usefixtures("one_thread_of_torch")

E, N, K, T = 4, 48, 32, 6


def experts(rows=N, cols=K, sparsity=0.9, count=E):
    return nn.Parameter(torch.stack([sparse_weight(rows, cols, sparsity) for _ in range(count)]))


class Mixture(nn.Module):
    """``up`` is (experts, out, in); ``down`` (experts, out, in) as well, multiplied as ``x @ W``."""

    def __init__(self):
        super().__init__()
        self.up = experts()
        self.down = experts()
        self.up_bias = nn.Parameter(torch.randn(E, N))
        self.router = nn.Parameter(sparse_weight(E, K, 0.6))

    def route(self, x):
        return torch.softmax(F.linear(x, self.router), -1).topk(2)


class Looped(Mixture):
    def forward(self, x, scale=None):
        scores, chosen = self.route(x)
        y = torch.zeros_like(x)
        for e in range(E):
            rows, which = torch.where(chosen == e)
            if rows.numel() == 0:
                continue
            h = F.relu(F.linear(x[rows], self.up[e], self.up_bias[e]))
            y.index_add_(0, rows, h @ self.down[e] * scores[rows, which, None])
        return y


class Enumerated(Mixture):
    def forward(self, x, scale=None):
        scores, chosen = self.route(x)
        full = torch.zeros(len(x), E).scatter(1, chosen, scores)
        y = torch.zeros_like(x)
        for e, (up, down) in enumerate(zip(self.up, self.down)):
            h = F.relu(F.linear(x, up) + self.up_bias[e])
            y = y + h @ down * full[:, e : e + 1]
        return y


class Batched(Mixture):
    def forward(self, x, scale=None):
        scores, chosen = self.route(x)
        full = torch.zeros(len(x), E).scatter(1, chosen, scores)
        h = torch.bmm(x.expand(E, -1, -1), self.up.transpose(1, 2)) + self.up_bias[:, None]
        return (torch.bmm(F.relu(h), self.down) * full.t()[..., None]).sum(0)


class Gathered(Mixture):
    def forward(self, x, scale=None):
        scores, chosen = self.route(x)
        flat = chosen.flatten()
        h = torch.bmm(self.up[flat], x.repeat_interleave(2, 0).unsqueeze(-1)).squeeze(-1)
        h = F.relu(h + self.up_bias[flat])
        y = torch.bmm(h.unsqueeze(1), self.down[flat]).squeeze(1)
        return (y.view(len(x), 2, K) * scores[..., None]).sum(1)


class Grouped(Mixture):
    def forward(self, x, scale=None):
        scores, chosen = self.route(x)
        order = chosen.flatten().argsort(stable=True)
        offs = torch.bincount(chosen.flatten(), minlength=E).cumsum(0).to(torch.int32)
        bias = self.up_bias[chosen.flatten()[order]]
        h = F.grouped_mm(x[order // 2], self.up.transpose(-2, -1), offs=offs) + bias
        y = F.grouped_mm(F.relu(h), self.down, offs=offs) * scores.flatten()[order, None]
        return torch.zeros_like(x).index_add_(0, order // 2, y)


class Einsum(Mixture):
    def forward(self, x, scale=None):
        scores, chosen = self.route(x)
        full = torch.zeros(len(x), E).scatter(1, chosen, scores)
        h = torch.einsum("etk,enk->etn", x.expand(E, -1, -1), self.up) + self.up_bias[:, None]
        y = torch.einsum("etn,enk->etk", F.relu(h), self.down)
        return torch.einsum("etk,te->tk", y, full)


class Flat(nn.Module):
    """All experts below each other in one matrix."""

    count = E

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(sparse_weight(E * N, K))

    def forward(self, x, scale=None):
        return torch.matmul(x, self.up.view(self.count, N, K).transpose(1, 2)).sum(0)


class Listed(nn.Module):
    """A ParameterList of matrices, and a ModuleList of linears."""

    def __init__(self):
        super().__init__()
        self.up = nn.ParameterList([sparse_weight(N, K) for _ in range(E)])
        self.down = nn.ModuleList([nn.Linear(N, K) for _ in range(E)])
        for linear in self.down:
            linear.weight.data = sparse_weight(K, N)

    def forward(self, x, scale=None):
        first = F.linear(x, self.up[0])
        return sum(d(F.relu(F.linear(x, w) + first)) for w, d in zip(self.up, self.down))


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "kind", [Looped, Enumerated, Batched, Gathered, Grouped, Einsum, Flat, Listed]
)
@pytest.mark.parametrize("inplace", [False, True])
def test_experts_are_packed_and_equal(kind, inplace, monkeypatch):
    model = kind().eval()
    x = torch.randn(T, K, requires_grad=True)
    expected = model(x)
    (gradient,) = torch.autograd.grad(expected.sum(), x)
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    sparse = fxsparse.compile(model, min_elements=0, inplace=inplace)
    rows = {row.path: row for row in sparse.report.rows}
    names = [path for path in rows if path.startswith(("up", "down")) and "bias" not in path]
    assert len(names) == {Flat: 1, Listed: 2 * E}.get(kind, 2)
    assert all(rows[name].status == "sparse" for name in names)
    rebuilt = []
    with monkeypatch.context() as patch:
        view = fxsparse.stand_in.weight_view.WeightView
        dense = view.dense
        patch.setattr(view, "dense", lambda self: rebuilt.append(self) or dense(self))
        close(sparse(x), expected)
        close(torch.autograd.grad(sparse(x).sum(), x)[0], gradient)
        with torch.inference_mode():
            close(sparse(x.detach()[:1]), kind.forward(model, x.detach()[:1]))
    assert not rebuilt
    back = fxsparse.to_dense(sparse)
    assert type(back) is kind and back.state_dict().keys() == state.keys()
    assert all(torch.equal(back.state_dict()[key], state[key]) for key in state)


def test_empty_and_dense_experts_among_sparse_ones():
    model = Looped().eval()
    with torch.no_grad():
        model.up[1] = torch.randn(N, K)
        model.up[2] = 0
    sparse = fxsparse.compile(model, min_elements=0)
    row = {row.path: row for row in sparse.report.rows}["up"]
    assert row.status == "sparse" and row.nnz == int((model.up != 0).sum())
    x = torch.randn(T, K)
    close(sparse(x), model(x))


def test_experts_that_are_added_stay_dense():
    class Adds(Mixture):
        def forward(self, x, scale=None):
            return F.linear(x, self.up[0]) @ (self.down[0] + self.down[1])

    model = Adds().eval()
    sparse = fxsparse.compile(model, min_elements=0)
    rows = {row.path: row for row in sparse.report.rows}
    assert rows["up"].status == "sparse"
    assert rows["down"].status == "dense" and "self.down[0] + self.down[1]" in rows["down"].reason
    x = torch.randn(T, K)
    close(sparse(x), model(x))


def _mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM, MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
    )


def _gpt_oss():
    from transformers import GptOssConfig, GptOssForCausalLM

    return GptOssForCausalLM, GptOssConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
    )


@pytest.mark.parametrize("how", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("make", [_mixtral, _gpt_oss])
def test_transformers_experts(make, how):
    pytest.importorskip("transformers")
    cls, config = make()
    config._experts_implementation = how
    model = prune(cls._from_config(config, experts_implementation=how))
    assert model.config._experts_implementation == how
    sparse = fxsparse.compile(model, min_elements=0)
    rows = {row.path: row for row in sparse.report.rows}
    experts = [row for path, row in rows.items() if path.endswith(("gate_up_proj", "down_proj"))]
    assert len(experts) == 2 and all(row.status == "sparse" for row in experts), experts
    ids = torch.randint(0, 64, (2, 7))
    with torch.no_grad():
        for given in (ids, ids[:1, :1]):
            close(sparse(given).logits, model(given).logits)
        assert torch.equal(
            sparse.generate(ids, max_new_tokens=3, do_sample=False),
            model.generate(ids, max_new_tokens=3, do_sample=False),
        )

"""The report: every weight once, with a reason; bytes that are true."""

import copy
import json

import pytest
import torch
from pruned import prune
from torch import nn

import fxsparse
from fxsparse import _C


class Zoo(nn.Module):
    """A layer of every kind, called in a way that cannot be traced."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(64, 64, 3, padding=1)
        self.lstm = nn.LSTM(64, 64, batch_first=True, bidirectional=True)
        self.cell = nn.GRUCell(128, 64)
        self.bilinear = nn.Bilinear(64, 64, 64)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(64, 4, 128, batch_first=True)
        self.norm = nn.LayerNorm(64)
        self.fc = nn.Linear(64, 64)
        self.own = nn.Parameter(torch.randn(64, 64))

    def forward(self, x, mask=None):
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        x = self.cell(self.lstm(x)[0].flatten(0, 1)).view(x.shape)
        x = self.attention(self.bilinear(x, x), x, x)[0]
        x = self.encoder(x, src_key_padding_mask=mask)
        return self.fc(self.norm(self.decoder(x, x))) @ self.own


@pytest.fixture(scope="module")
def zoo():
    torch.manual_seed(0)
    model = prune(Zoo())
    return model, fxsparse.compile(model, min_elements=0)


def test_every_kind_of_weight_has_a_row(zoo):
    model, sparse = zoo
    paths = {row.path for row in sparse.report.rows}
    matrices = {path for path, p in model.named_parameters() if p.dim() >= 2}
    assert paths == matrices
    for row in sparse.report.rows:
        assert (row.status == "sparse") == (row.reason == "")


def test_outputs_of_every_kind_are_equal(zoo):
    model, sparse = zoo
    x = torch.randn(2, 7, 64)
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[0, 5:] = True
    for given in (None, mask):
        torch.testing.assert_close(sparse(x, given), model(x, given), rtol=1e-4, atol=1e-5)


def test_what_is_rewritten_and_why_the_rest_is_not(zoo):
    rows = {row.path: row for row in zoo[1].report.rows}
    assert rows["fc.weight"].status == rows["decoder.linear1.weight"].status == "sparse"
    assert rows["encoder.linear1.weight"].status == "sparse"
    assert rows["attention.out_proj.weight"].status == "sparse"
    assert rows["own"].status == "sparse"
    assert "convolutions" in rows["conv.weight"].reason


def test_totals(zoo):
    model, sparse = zoo
    report = sparse.report
    before = sum(p.numel() * 4 for p in model.parameters())
    after = sum(t.numel() * t.element_size() for t in [*sparse.parameters(), *sparse.buffers()])
    assert (report.dense_bytes, report.stored_bytes) == (before, after)
    assert report.saved_bytes == sum(row.saved_bytes for row in report.rows) == before - after
    assert report.candidates == len(report.rows)
    assert (
        report.weight_share
        == sum(r.dense_bytes for r in report.rows if r.status == "sparse") / before
    )
    for row in report.rows:
        assert row.saved_bytes == row.dense_bytes - row.stored_bytes >= 0


def test_bytes_fall_with_sparsity():
    stored = []
    for sparsity in (0.5, 0.7, 0.9, 0.98):
        torch.manual_seed(0)
        stored.append(
            fxsparse.compile(
                prune(nn.Sequential(nn.Linear(256, 256)), sparsity)
            ).report.stored_bytes
        )
    assert stored == sorted(stored, reverse=True) and len(set(stored)) == 4


def test_threshold_is_inclusive():
    model = nn.Sequential(nn.Linear(64, 64)).eval()
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].weight.view(-1)[: 64 * 64 * 3 // 4] = 0
    assert fxsparse.compile(model, threshold=0.75, min_elements=0).report.rewritten == 1
    with pytest.warns(fxsparse.NothingRewrittenWarning, match="has 75.0 %"):
        assert fxsparse.compile(model, threshold=0.7501, min_elements=0).report.candidates == 0


def test_a_weight_that_would_not_shrink_stays_dense_at_any_threshold():
    model = prune(nn.Sequential(nn.Linear(64, 64)), 0.01)
    with pytest.warns(fxsparse.NothingRewrittenWarning, match="would not be smaller"):
        report = fxsparse.compile(model, threshold=0.0, min_elements=0).report
    assert report.saved_bytes == 0


def test_reasons_tell_what_would_change_them():
    model = prune(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 32)))
    rows = fxsparse.compile(model, exclude=["1.*"]).report.rows
    assert rows[1].reason == "excluded by the pattern '1.*'"
    assert rows[2].reason == "2048 elements are fewer than min_elements=4096"
    rows = fxsparse.compile(prune(model, 0.6), include=["0.*"], min_elements=0).report.rows
    assert rows[1].reason == "no include pattern matches it"
    with pytest.warns(fxsparse.NothingRewrittenWarning):
        rows = fxsparse.compile(prune(model, 0.2), min_elements=0).report.rows
    assert "20 % is below the threshold of 50 % (packed it is smaller from" in rows[0].reason


@pytest.fixture
def slow_below_90_percent():
    """A table in which the packed forms are faster than dense from 90 % zeros on."""
    isa, before = _C.isa(), _C.costs()
    lines = [(isa, "dense", 65536, 1, [100.0] * 7)]
    for format in _C.formats():
        lines.append((isa, format, 65536, 1, [1000 * d for d in _C.cost_densities]))
    _C.set_costs(lines)
    yield
    _C.set_costs(before)


def test_latency_keeps_dense_what_would_be_slower(slow_below_90_percent):
    model = prune(nn.Sequential(nn.Linear(256, 256)), 0.55)
    assert fxsparse.compile(model, prefer="memory").report.rewritten == 1
    with pytest.warns(
        fxsparse.NothingRewrittenWarning, match="for 16 rows 0.22 times.*9[01] % zeros"
    ):
        fxsparse.compile(model, prefer="latency", batch_hint=16)
    assert fxsparse.compile(prune(model, 0.95), prefer="latency").report.rewritten == 1


def test_forms(zoo):
    report = zoo[1].report
    assert json.loads(report.to_json())["rewritten"] == report.rewritten
    assert report.to_dict()["rows"][0]["path"] == report.rows[0].path
    assert "| fc.weight" in report.to_markdown()
    assert "<td>fc.weight" in report.to_html() and report._repr_html_() == report.to_html()
    assert "fc.weight" in str(report) and report.summary() in str(report)
    with pytest.raises(AttributeError):
        report.rows[0].path = "other"


def test_the_report_lives_on(zoo):
    assert copy.deepcopy(zoo[1]).report == zoo[1].report


def test_a_model_without_weights():
    with pytest.warns(fxsparse.NothingRewrittenWarning, match="no weights of linear"):
        result = fxsparse.compile(nn.Sequential(nn.ReLU()))
    assert result.report.rows == [] and result.report.weight_share == 0.0
    assert "0 of 0 weights sparse" in str(result.report)

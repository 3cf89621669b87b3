"""The choice of a format follows sizes and the measured table."""

import pytest
import torch

from fxsparse import _C, cost


@pytest.fixture
def costs():
    """Replaces times: {format: picoseconds an element at density 1 and batch 1}, linear in both."""
    before = _C.costs()
    isa = _C.isa()

    def use(dense: float, **times: float) -> None:
        lines = [(isa, "dense", 1 << 20, 1, [dense] * 7)]
        for format in _C.formats():
            per = times.get(format, 1000.0)
            lines.append((isa, format, 1 << 20, 1, [per * d for d in _C.cost_densities]))
        _C.set_costs(lines)

    yield use
    _C.set_costs(before)


def choose(sparsity: float, shape=(1024, 1024), batch_hint=None, prefer="memory"):
    nnz = round(shape[0] * shape[1] * (1 - sparsity))
    return cost.choose(shape, nnz, torch.float32, batch_hint=batch_hint, prefer=prefer)


@pytest.mark.parametrize("sparsity", [0.5, 0.7, 0.9, 0.98])
def test_memory_takes_the_smallest(sparsity):
    nnz = round(1024 * 1024 * (1 - sparsity))
    sizes = {f: cost.expected_bytes((1024, 1024), nnz, torch.float32, f) for f in cost.FORMATS}
    choice = choose(sparsity)
    assert choice.bytes == sizes[choice.format] <= min(sizes.values()) * cost.SAME_BYTES


@pytest.mark.parametrize("options", [{"batch_hint": 16}, {"prefer": "latency"}])
def test_speed_may_cost_some_bytes(costs, options):
    for fast in cost.FORMATS:
        costs(100.0, **{fast: 10.0})
        choice, smallest = choose(0.9, **options), choose(0.9)
        assert choice.bytes <= smallest.bytes * cost.EXTRA_BYTES
        if cost.expected_bytes((1024, 1024), 104858, torch.float32, fast) <= smallest.bytes * 1.2:
            assert choice.format == fast


def test_expected_times_follow_the_table(costs):
    costs(100.0, csr=50.0)
    isa, elements = _C.isa(), 1 << 20
    at = lambda batch, nnz: _C.expected_ns(isa, "csr", 1024, 1024, nnz, batch)  # noqa: E731
    assert at(1, elements // 2) == pytest.approx(elements * 0.025)
    assert at(8, elements // 4) == pytest.approx(elements * 0.0125 * 8)
    assert at(0, elements) == 0 and _C.expected_ns(isa, "csr", 0, 5, 0, 1) == 0
    assert cost.speedup((1024, 1024), elements // 2, "csr", 1) == pytest.approx(4)


def test_the_table_is_complete_and_plausible():
    """Every instruction set and format has lines, and much larger batches take longer."""
    have = {(isa, format) for isa, format, *_ in _C.costs()}
    for isa in ("avx512", "avx2", "generic"):
        for format in ("dense", *_C.formats()):
            assert (isa, format) in have
            for size in (64, 768, 3000):
                for density in (0.5, 0.1, 0.01):
                    nnz = round(size * size * density)
                    times = [
                        _C.expected_ns(isa, format, size, size, nnz, batch)
                        for batch in (1, 20, 400, 8000)
                    ]
                    assert times == sorted(times) and times[0] > 0


def test_a_table_from_a_file(tmp_path, costs):
    isa = _C.isa()
    path = tmp_path / "costs.inc"
    times = ", ".join("7" for _ in _C.cost_densities)
    path.write_text(f"// a comment\nFXSPARSE_COST({isa}, csr, 1000, 1, {times})\n")
    costs(100.0)
    cost.read_costs(path)
    assert _C.expected_ns(isa, "csr", 10, 100, 100, 1) == pytest.approx(7.0)
    assert (isa, "dense") in {line[:2] for line in _C.costs()}


@pytest.mark.parametrize(
    "text, message",
    [
        ("nothing", "found none"),
        ("FXSPARSE_COST(avx2, csr, 10, 1, 1, 2)", "expected 7 times in each line, got 2"),
        ("FXSPARSE_COST(avx2, coo, 10, 1, 1, 1, 1, 1, 1, 1, 1)", "format: expected one of"),
        ("FXSPARSE_COST(avx2, csr, 10, 1, 1, 1, 1, 1, 1, 1, -1)", "expected positive times"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path, text, message):
    path = tmp_path / "costs.inc"
    path.write_text(text)
    before = _C.costs()
    with pytest.raises(ValueError, match=message):
        cost.read_costs(path)
    assert _C.costs() == before


def test_break_even():
    even = cost.break_even_sparsity((1024, 1024), 1)
    assert 0 <= even <= 1
    assert cost.smallest_sparsity((1024, 1024), torch.float32) < 0.5

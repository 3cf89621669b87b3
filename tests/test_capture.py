"""When a trace is trusted, and that nothing is silently different where it is not."""

import random
import threading

import pytest
import torch
from awkward_models import (
    ArgumentsByStructure,
    Autocast,
    Base,
    BatchNorm,
    Branch,
    BufferInPlace,
    ByStructure,
    Cache,
    Catches,
    ChildLeavesALoss,
    Closure,
    Constant,
    Counter,
    DropsInTraining,
    ExactType,
    FillsATensor,
    FlagsOfTwo,
    Fp32Island,
    FunctionalBatchNorm,
    FunctionalDropout,
    Generates,
    GradMode,
    HandsItselfOn,
    HandsOver,
    History,
    Identity,
    InPlaceAlias,
    InPlaceOnSize,
    InPlaceOnTranspose,
    IsInstance,
    IsTensor,
    Iterates,
    KeepsTheNorm,
    Kwargs,
    LayerDrop,
    LeavesALoss,
    ListInPlace,
    LooksAtAlias,
    LooksAtPacked,
    NoGrad,
    Noise,
    NoneInHelper,
    Optional,
    Ordered,
    Output,
    OwnBatchNorm,
    OwnNorm,
    PassesOn,
    Plain,
    ReadsFlagInVain,
    ReadsWeight,
    RequiredButNone,
    ReturnsDataclass,
    ReturnsDict,
    ReturnsNamedTuple,
    ReversesGradient,
    ScalesSizes,
    Seeds,
    TensorMethod,
    UnpacksShape,
    WritesData,
)
from pruned import prune
from torch import fx, nn

import fxsparse


def _outputs(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in _outputs(v)]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _outputs(v)]
    return [value.hidden, value.scores] if isinstance(value, Output) else []


def _same(compiled, model, *args, **kwargs):
    torch.manual_seed(1), random.seed(1)
    got = compiled(*args, **kwargs)
    torch.manual_seed(1), random.seed(1)
    expected = model(*args, **kwargs)
    assert type(got) is type(expected)
    bf16 = isinstance(model, Autocast)  # the multiply keeps fp32 where autocast rounds to bf16
    tolerance = {"rtol": 3e-2, "atol": 3e-2} if bf16 else {}
    torch.testing.assert_close(_outputs(got), _outputs(expected), **tolerance)


ARGUMENTS = {
    Optional: [(), (torch.full((64,), 2.0),)],
    RequiredButNone: [(None,), (torch.full((64,), 2.0),)],
    NoneInHelper: [(None,), (torch.ones(64),)],
    LooksAtAlias: [(None,), (torch.ones(64),)],
    LooksAtPacked: [((None, 1),), ((1, 2),)],
    Identity: [(torch.randn(1, 64),)],
    PassesOn: [(None,), (torch.full((64,), 2.0),)],
}
TRACED = [
    Plain,
    ReturnsDict,
    ReturnsNamedTuple,
    BatchNorm,
    ByStructure,
    ReadsWeight,
    InPlaceAlias,
    InPlaceOnTranspose,
    ScalesSizes,
    ArgumentsByStructure,
    ReadsFlagInVain,
]
BY_MODULES = [
    Optional,
    RequiredButNone,
    NoneInHelper,
    IsInstance,
    FunctionalDropout,
    Autocast,
    NoGrad,
    Kwargs,
    Counter,
    History,
    Noise,
    Branch,
    Iterates,
    Ordered,
    FunctionalBatchNorm,
    Generates,
    InPlaceOnSize,
    WritesData,
    FillsATensor,
    Constant,
    LooksAtAlias,
    LooksAtPacked,
    IsTensor,
    ExactType,
    Identity,
    Catches,
    Fp32Island,
    GradMode,
    ReversesGradient,
    Seeds,
    LayerDrop,
    ReturnsDataclass,
    KeepsTheNorm,
    Cache,
    Closure(),
    BufferInPlace,
    ListInPlace,
    HandsOver,
    PassesOn,
    DropsInTraining,
    LeavesALoss,
    HandsItselfOn,
    ChildLeavesALoss,
    FlagsOfTwo,
]
EITHER = [UnpacksShape, TensorMethod]


@pytest.mark.parametrize("cls", TRACED + BY_MODULES + EITHER, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_auto_gives_what_the_model_gives(cls, training):
    model = prune(cls()).train(training)
    compiled = fxsparse.compile(model, min_elements=0)
    assert compiled.report.rewritten == 2
    assert compiled.training is model.training
    for rest in ARGUMENTS.get(cls, [()]):
        for batch in (1, 5):
            if not (training and batch == 1):
                _same(compiled, model, torch.randn(batch, 64), *rest)
    model.train(not training), compiled.train(not training)
    _same(compiled, model, torch.randn(3, 64), *ARGUMENTS.get(cls, [()])[0])


@pytest.mark.parametrize("cls", TRACED, ids=lambda cls: cls.__name__)
def test_trusted_traces_are_graphs(cls):
    assert isinstance(fxsparse.compile(prune(cls()), min_elements=0), fx.GraphModule)


@pytest.mark.parametrize("cls", BY_MODULES, ids=lambda cls: cls.__name__)
def test_untrusted_models_keep_their_class(cls):
    compiled = fxsparse.compile(prune(cls()), min_elements=0)
    assert type(compiled) is cls
    assert compiled.report.note


@pytest.mark.parametrize("cls", BY_MODULES, ids=lambda cls: cls.__name__)
def test_asking_for_an_untrusted_trace_is_an_error(cls):
    if cls is Generates:  # a graph is asked for: that it has no generate() is no surprise
        assert isinstance(
            fxsparse.compile(prune(cls()), min_elements=0, capture="trace"), fx.GraphModule
        )
        return
    with pytest.raises(fxsparse.CaptureError, match="capture='trace'.*modules"):
        fxsparse.compile(prune(cls()), min_elements=0, capture="trace")


def test_compile_runs_nothing_of_the_models():
    for cls in (Counter, History, BufferInPlace):
        model = prune(cls())
        fxsparse.compile(model, min_elements=0)
        fxsparse.compile(model, (torch.randn(2, 64),), min_elements=0)
        assert getattr(model, "calls", 0) == 0 and not getattr(model, "seen", [])
        assert getattr(model, "steps", torch.zeros(1)).item() == 0


def test_example_inputs_earn_trust_for_unused_options():
    class Scaled(Base):
        def forward(self, x, scale=2.0):
            return self.b(self.a(x)) * scale

    model = prune(Scaled())
    assert type(fxsparse.compile(model, min_elements=0)) is Scaled
    traced = fxsparse.compile(model, (torch.randn(2, 64),), min_elements=0)
    assert isinstance(traced, fx.GraphModule)
    _same(traced, model, torch.randn(5, 64), scale=3.0)
    _same(traced, model, torch.randn(5, 64))


def test_example_inputs_may_be_keywords():
    model = prune(Optional())
    compiled = fxsparse.compile(
        model, {"x": torch.randn(2, 64), "mask": torch.ones(64)}, min_elements=0, verify=True
    )
    _same(compiled, model, x=torch.randn(3, 64))


def test_hooks_live_on():
    calls = []
    model = prune(Plain())
    model.a.register_forward_hook(lambda module, args, out: out * 2)
    model.register_forward_hook(lambda module, args, out: calls.append(1))
    compiled = fxsparse.compile(model, min_elements=0)
    assert compiled.report.rewritten == 2
    _same(compiled, model, torch.randn(3, 64))
    assert len(calls) == 2


def test_a_forward_replaced_on_the_object_is_kept():
    model = prune(Plain())
    model.forward = lambda x: model.a(x) * 3
    compiled = fxsparse.compile(model, min_elements=0)
    _same(compiled, model, torch.randn(3, 64))


def test_a_branching_block_leaves_the_others_converted():
    model = nn.Sequential(prune(Branch()), prune(Plain()))
    compiled = fxsparse.compile(model, min_elements=0)
    assert compiled.report.rewritten == 4
    for _ in range(4):
        _same(compiled, model, torch.randn(3, 64))


def test_matrices_of_a_forward_that_was_not_traced():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(64, 64))
            self.added = nn.Parameter(torch.randn(64, 64))

        def forward(self, x):
            return x @ self.w + self.added[0]

    class Root(Base):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x, flag=None):
            return self.a(self.block(x)) if flag is None else x

    model = prune(Root())
    compiled = fxsparse.compile(model, min_elements=0)
    _same(compiled, model, torch.randn(3, 64))
    rows = {row.path: row for row in compiled.report.rows}
    assert rows["block.w"].status == "sparse"
    assert rows["block.added"].status == "dense" and "also read by" in rows["block.added"].reason


def test_what_forward_does_not_use_is_kept():
    class Unused(Base):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(64, 64)
            self.register_buffer("scratch", torch.zeros(3), persistent=False)

        def forward(self, x):
            return self.b(self.a(x))

    model = prune(Unused())
    compiled = fxsparse.compile(model, min_elements=0)
    assert set(fxsparse.to_dense(compiled).state_dict()) == set(model.state_dict())
    head = next(row for row in compiled.report.rows if row.path == "head.weight")
    assert head.reason == "forward does not use it"


def test_gradients_of_untraceable_functions_are_the_models():
    model = prune(ReversesGradient())
    compiled = fxsparse.compile(model, min_elements=0)
    grads = []
    for module in (model, compiled):
        x = torch.ones(2, 64, requires_grad=True)
        module(x).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[0], grads[1])


def test_global_hooks_go_on_working():
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: None)
    try:
        compiled = fxsparse.compile(prune(Plain()), min_elements=0)
    finally:
        handle.remove()
    assert type(compiled) is Plain


def test_a_tracer_leaves_nothing_behind_in_the_model():
    model = prune(Cache())
    fxsparse.compile(model, min_elements=0)
    assert Cache.cache == {} or isinstance(Cache.cache["scale"], torch.Tensor)


@pytest.mark.parametrize("name", ["graph", "meta", "code", "in"])
def test_awkward_names_are_treated_by_modules(name):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module(name, nn.Linear(64, 64))

        def forward(self, x):
            return self._modules[name](x)

    model = prune(Named())
    compiled = fxsparse.compile(model, min_elements=0)
    assert compiled.report.rewritten == 1
    _same(compiled, model, torch.randn(3, 64))


def test_under_a_profiler_and_in_inference_mode():
    import cProfile

    model = prune(Plain())
    profile = cProfile.Profile()
    compiled = profile.runcall(fxsparse.compile, model, min_elements=0)
    _same(compiled, model, torch.randn(3, 64))
    norm = prune(BatchNorm()).train()
    with torch.inference_mode():
        compiled = fxsparse.compile(norm, min_elements=0)
    compiled(torch.randn(3, 64)).sum().backward()


def test_a_model_that_cannot_be_copied():
    import threading

    model = prune(Plain())
    model.lock = threading.Lock()
    with pytest.raises(fxsparse.CaptureError, match="cannot be copied.*inplace=True"):
        fxsparse.compile(model, min_elements=0)
    x = torch.randn(3, 64)
    expected = model(x)
    torch.testing.assert_close(fxsparse.compile(model, min_elements=0, inplace=True)(x), expected)


def test_training_flags_are_those_of_the_model():
    model = prune(nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.Dropout()), nn.Linear(64, 64)))
    model[0][1].train()
    compiled = fxsparse.compile(model, min_elements=0)
    assert isinstance(compiled, fx.GraphModule)
    flags = {name: m.training for name, m in compiled.named_modules()}
    assert flags == {name: m.training for name, m in model.named_modules()}


@pytest.mark.parametrize("training", [False, True])
def test_a_norm_of_somebodys_own_goes_on_as_a_module(training):
    model = prune(OwnNorm()).train(training)
    compiled = fxsparse.compile(model, min_elements=0)
    assert isinstance(compiled, fx.GraphModule) and compiled.report.rewritten == 2
    assert type(compiled.norm) is OwnBatchNorm and compiled.norm is not model.norm
    for mode in (training, not training, training):
        model.train(mode), compiled.train(mode)
        for _ in range(2):
            _same(compiled, model, torch.randn(5, 64))
    assert torch.equal(compiled.norm.running_mean, model.norm.running_mean)
    assert int(compiled.norm.num_batches_tracked) > 0


def test_inputs_with_caches_are_copied_for_verification():
    class Store:
        def __init__(self):
            self.seen = 0

    class Uses(Base):
        def forward(self, x, cache=None):
            cache.seen += 1
            return self.b(self.a(x)) * cache.seen

    store = Store()
    fxsparse.compile(prune(Uses()), {"x": torch.randn(2, 64), "cache": store}, min_elements=0)
    assert store.seen == 0


def test_a_loaded_graph_still_checks_what_it_loads(tmp_path):
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(64, 64))

        def forward(self, x):
            return x @ self.w

    sparse = fxsparse.compile(prune(Bare()), min_elements=0)
    torch.save(sparse, tmp_path / "m.pt")
    loaded = torch.load(tmp_path / "m.pt", weights_only=False)
    damaged = loaded.w_packed.clone()
    damaged[100:400] = 255
    with pytest.raises(RuntimeError, match="w_packed is not a valid packed weight"):
        loaded.load_state_dict({"w_packed": damaged})


def _appended(self, x, mask):
    parts = []
    parts.append(mask)
    return self.a(x) if parts[0] is None else self.a(x) * 2


def _stored(self, x, mask):
    kept = {"mask": None}
    kept["mask"] = mask
    return self.a(x) if kept["mask"] is None else self.a(x) * 2


def _sliced(self, x, mask):
    kept = [1]
    kept[:] = [mask]
    return self.a(x) if kept[0] is None else self.a(x) * 2


def _alias(self, x, mask):
    kept = [1]
    other = kept
    kept[0] = mask
    return self.a(x) if other[0] is None else self.a(x) * 2


def _helper(self, y):
    return y if self is None else y * 2


def _called_self(self, x, mask):
    return _helper(mask, self.a(x))


@pytest.mark.parametrize("forward", [_appended, _stored, _sliced, _alias, _called_self])
def test_an_argument_is_followed_through_what_holds_it(forward):
    kind = type("Holds", (Base,), {"forward": forward})
    model = prune(kind())
    x = torch.randn(3, 64)
    for inputs in (None, (x, x)):
        compiled = fxsparse.compile(model, inputs, min_elements=0)
        for mask in (None, x):
            _same(compiled, model, x, mask)


class _Counts(Base):
    def __init__(self):
        super().__init__()
        self.numbers = iter(range(1, 99))

    def forward(self, x):
        for number in self.numbers:
            return self.a(x) * number


class _Doubles(Base):
    def __init__(self):
        super().__init__()
        self.nested = ([1.0],)

    def forward(self, x):
        inner = self.nested[0]
        inner += inner
        return self.a(x) * len(inner)


@pytest.mark.parametrize("kind", [_Counts, _Doubles])
def test_state_in_iterators_and_nested_containers(kind):
    model, again = prune(kind()), prune(kind())
    again.load_state_dict(model.state_dict())
    compiled = fxsparse.compile(model, min_elements=0)
    x = torch.randn(3, 64)
    if kind is _Counts:  # an iterator cannot be copied: the two share it
        assert compiled.report.capture == "modules"
        return
    for _ in range(3):
        _same(compiled, again, x)


def test_other_threads_run_while_a_model_is_traced():
    model, errors, stop = prune(nn.Sequential(Base(), nn.LayerNorm(64))), [], threading.Event()
    model[0].forward = model[0].a.forward
    x = torch.randn(3, 64)

    def serve():
        while not stop.is_set():
            try:
                model(x)
            except Exception as error:
                errors.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    traced = prune(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)))
    for _ in range(10):
        fxsparse.compile(traced, min_elements=0)
    stop.set()
    thread.join()
    assert not errors


def test_hooks_of_every_module_are_seen():
    from torch.nn.modules import module as modules

    handle = modules.register_module_full_backward_pre_hook(lambda *_: None)
    try:
        report = fxsparse.compile(prune(nn.Sequential(nn.Linear(64, 64))), min_elements=0).report
    finally:
        handle.remove()
    assert "global module hooks" in report.note

"""What the source of a class says of how it uses a weight: a multiply, a look-up, or something else."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import functional

from fxsparse.capture.reads import Reads, how_read


def read(function, name="w", **members):
    """How a class with this forward uses ``self.w``: ``x @ W.T`` is "T", ``x @ W`` is "N"."""
    return told(how_read(type("Holder", (nn.Module,), {"forward": function, **members}), name))


def told(found):
    if isinstance(found, str):
        return "unknown"
    text = "".join("N" if swapped else "T" for swapped in found.swapped)
    return text + "L" * found.looked_up or "unused"


class Multiplies:
    """Forwards with what is expected of them in their names' last part."""

    def linear__T(self, x):
        return F.linear(x, self.w)

    def linear_and_bias__T(self, x):
        return F.linear(x, self.w, self.b)

    def linear_by_name__T(self, x):
        return F.linear(input=x, weight=self.w)

    def torch_nn_functional__T(self, x):
        return torch.nn.functional.linear(x, self.w) + functional.linear(x, self.w)

    def matmul_operator__N(self, x):
        return x @ self.w

    def transposed__T(self, x):
        return x @ self.w.t()

    def big_t__T(self, x):
        return x @ self.w.T

    def left__T(self, x):
        return self.w @ x

    def left_method__T(self, x):
        return self.w.matmul(x)

    def method__N(self, x):
        return x.matmul(self.w)

    def torch_matmul__N(self, x):
        return torch.matmul(x, self.w)

    def torch_matmul_left__T(self, x):
        return torch.matmul(self.w, x)

    def addmm__N(self, x):
        return torch.addmm(self.b, x, self.w)

    def addmm_method__N(self, x):
        return self.b.addmm(x, self.w)

    def bmm__N(self, x):
        return torch.bmm(x, self.w)

    def baddbmm__N(self, x):
        return torch.baddbmm(self.b, x, self.w)

    def grouped__T(self, x, offs):
        return torch._grouped_mm(x, self.w.transpose(-2, -1), offs=offs)

    def einsum__T(self, x):
        return torch.einsum("bk,nk->bn", x, self.w)

    def einsum_swapped__N(self, x):
        return torch.einsum("bn,nk->bk", x, self.w)

    def conditional__T(self, x, flag=False):
        return F.linear(x, self.w) if flag else x

    def branch__TN(self, x, flag=False):
        if flag:
            return F.linear(x, self.w)
        return x @ self.w

    def chosen__T(self, x, w=None):
        return F.linear(x, self.w if w is None else w)

    def local__T(self, x):
        weight = self.w
        return F.linear(x, weight)

    def local_cast__T(self, x):
        weight = self.w.to(x.dtype)
        return F.linear(x, weight)

    def local_twice__TN(self, x):
        weight = self.w
        y = F.linear(x, weight)
        return y @ weight

    def local_chain__N(self, x):
        a = self.w
        b = a.t()
        return F.linear(x, b)

    def annotated_local__T(self, x):
        weight: torch.Tensor = self.w
        return F.linear(x, weight)

    def tuple_of_locals__T(self, x):
        weight, bias = self.w, self.b
        return F.linear(x, weight, bias)

    def walrus__T(self, x):
        if (weight := self.w) is not None:
            return F.linear(x, weight)
        return x

    def reassigned__T(self, x):
        y = self.w
        y = F.linear(x, y)
        y = y + 1
        return y

    def reassigned_before__T(self, x):
        y = x * 2
        y = y.sum()
        y = self.w
        return F.linear(x, y)

    def reassigned_cast__T(self, x):
        weight = self.w
        weight = weight.to(x.dtype)
        return F.linear(x, weight)

    def expert__T(self, x):
        return F.linear(x, self.w[0])

    def loop_of_indices__T(self, x):
        for i in range(3):
            x = F.linear(x, self.w[i])
        return x

    def loop__T(self, x):
        for weight in self.w:
            x = F.linear(x, weight)
        return x

    def enumerated__T(self, x):
        for i, weight in enumerate(self.w):
            x = F.linear(x, weight) + i
        return x

    def zipped__T(self, x):
        for weight, bias in zip(self.w, self.b):
            x = F.linear(x, weight, bias)
        return x

    def nested_targets__T(self, x):
        for i, (weight, bias) in enumerate(zip(reversed(self.w), self.b)):
            x = F.linear(x, weight, bias) + i
        return x

    def comprehension__T(self, x):
        return torch.stack([F.linear(x, weight) for weight in self.w])

    def generator__N(self, x):
        return sum(x @ weight for weight in self.w.unbind(0))

    def gathered__N(self, x, ids):
        chosen = self.w[ids]
        return torch.bmm(x, chosen)

    def gathered_by_select__N(self, x, ids):
        return torch.bmm(x, self.w.index_select(0, ids))

    def expanded__N(self, x):
        return torch.bmm(x, self.w.unsqueeze(0).expand(3, -1, -1))

    def facts__T(self, x):
        x = x.to(self.w.dtype).to(self.w.device).view(-1, self.w.shape[1])
        if x.shape[1] != self.w.size(1):
            return x
        return F.linear(x, self.w)

    def length__T(self, x):
        return F.linear(x, self.w) * len(self.w)

    def none__T(self, x):
        return x if self.w is None else F.linear(x, self.w)

    def lambda_inside__T(self, x):
        return (lambda v: F.linear(v, self.w))(x)

    def function_inside__T(self, x):
        def inner(v):
            return F.linear(v, self.w)

        return inner(x)

    def closed_over__T(self, x):
        weight = self.w

        def inner(v):
            return F.linear(v, weight)

        return inner(x)

    def getattr_of_another__T(self, x):
        return F.linear(x, self.w) * getattr(self, "scale", 1)

    def getattr__T(self, x):
        return F.linear(x, getattr(self, "w"))  # noqa: B009

    def in_text__T(self, x):
        if x.shape[-1] != self.w.shape[-1]:
            raise ValueError(f"expected {self.w.shape[-1]}, got {x.shape} for {self.w.dtype}")
        return F.linear(x, self.w)

    def embedding__L(self, ids):
        return F.embedding(ids, self.w)

    def tied__TL(self, ids):
        return F.linear(F.embedding(ids, self.w), self.w)

    def autocast_inside__T(self, x):
        with torch.no_grad():
            return F.linear(x, self.w)

    def tried__T(self, x):
        try:
            return F.linear(x, self.w)
        finally:
            x.add_(0)

    def shared_name__T(self, x):
        w = x + 1
        return F.linear(w, self.w) + self.other.w.sum()

    def same_name__T(self, x):
        weight = self.w
        for weight in weight:  # noqa: B020
            x = F.linear(x, weight)
        weight = self.w
        return sum(F.linear(x, weight) for weight in weight)

    def turned_in_a_loop__TN(self, x):
        weight = self.w
        for _ in range(2):
            x = F.linear(x, weight)
            weight = weight.t()
            x = x @ weight.t()
            y = weight
            weight = y
        return F.linear(x, weight)

    def detached__T(self, x):
        return F.linear(x, self.w.detach().contiguous().data)


class Others:
    """Uses that a stand-in would have to be rebuilt for at every call."""

    def added(self, x):
        return x + self.w

    def scaled(self, x):
        return F.linear(x, self.w * self.scale)

    def norm(self, x):
        return F.linear(x, self.w / self.w.norm(dim=1, keepdim=True))

    def masked(self, x):
        weight = self.w
        weight = weight * self.mask
        return F.linear(x, weight)

    def written(self, x):
        self.w.data.clamp_(0, 1)
        return F.linear(x, self.w)

    def assigned(self, x):
        self.w = nn.Parameter(self.w + 1)
        return F.linear(x, self.w)

    def augmented(self, x):
        self.w += 1
        return F.linear(x, self.w)

    def deleted(self, x):
        y = F.linear(x, self.w)
        del self.w
        return y

    def item_assigned(self, x):
        self.w[0] = 1
        return F.linear(x, self.w)

    def item_augmented(self, x):
        self.w[0] += 1
        return F.linear(x, self.w)

    def local_augmented(self, x):
        weight = self.w
        weight *= 2
        return F.linear(x, weight)

    def input_of_linear(self, x):
        return F.linear(self.w, x)

    def conv(self, x):
        return F.conv2d(x, self.w)

    def somewhere(self, x):
        return self.attend(x, self.w)

    def given_back(self, x):
        return F.linear(x, self.w), self.w

    def kept(self, x):
        self.cache = self.w
        return F.linear(x, self.w)

    def in_a_list(self, x):
        return torch.cat([x, self.w])

    def starred(self, x):
        return F.linear(x, *self.w)

    def in_text(self, x):
        print(f"{self.w}")
        return F.linear(x, self.w)

    def compared(self, x):
        return F.linear(x, self.w) if (self.w > 0).any() else x

    def summed(self, x):
        return x @ self.w.sum(0)

    def any_attribute(self, x, name):
        return F.linear(x, getattr(self, name))

    def set_attribute(self, x):
        setattr(self, "w", x)  # noqa: B010
        return F.linear(x, self.w)

    def all_attributes(self, x):
        return sum(vars(self)["_parameters"].values())

    def mixed(self, x):
        return F.linear(x, self.w) + self.w.mean()

    def loop_that_adds(self, x):
        for weight in self.w:
            x = x + weight
        return x

    def nested_loop_that_adds(self, x):
        def inner():
            return self.w.sum()

        return F.linear(x, self.w) + inner()

    def truth(self, x):
        return F.linear(x, self.w) if self.w else x


def _functions(holder):
    return {name: value for name, value in vars(holder).items() if not name.startswith("__")}


@pytest.mark.parametrize("name", _functions(Multiplies))
def test_multiplies_and_look_ups(name):
    expected = name.rpartition("__")[2]
    got = read(_functions(Multiplies)[name])
    assert "".join(sorted(set(got))) == "".join(sorted(set(expected)))


@pytest.mark.parametrize("name", _functions(Others))
def test_other_uses_are_named(name):
    found = how_read(type("Holder", (nn.Module,), {"forward": _functions(Others)[name]}), "w")
    assert isinstance(found, str) and "Holder" in found


def test_an_unused_name():
    assert read(Multiplies.linear__T, "other") == "unused"


class Base(nn.Module):
    def project(self, x):
        return F.linear(x, self.w)

    def unrelated(self, x):
        return self.v + 1


class Child(Base):
    def forward(self, x):
        return self.project(x)


class Overrides(Base):
    def forward(self, x):
        return self.project(x)

    def project(self, x):
        return self.w + x


class Decorated(nn.Module):
    @torch.no_grad()
    def forward(self, x):
        return F.linear(x, self.w)


def _logged(function):
    @functools.wraps(function)
    def wrapper(self, *args, **kwargs):
        return function(self, *args, **kwargs)

    return wrapper


class Wrapped(nn.Module):
    @_logged
    def forward(self, x):
        return F.linear(x, self.w)


class WithProperty(nn.Module):
    @property
    def matrix(self):
        return self.w.t()

    def forward(self, x):
        return x @ self.matrix


class WithHelpers(nn.Module):
    def forward(self, x):
        return self.helper(x)

    def helper(self, x):
        return F.linear(x, self.w)

    @staticmethod
    def static(x):
        return x.w

    @classmethod
    def make(cls, n):
        return cls(n)

    def extra_repr(self):
        return f"{self.w.sum()}"

    def reset_parameters(self):
        nn.init.normal_(self.w)


class Initialises(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, 3))

    def forward(self, x):
        return F.linear(x, self.w)


class Slices(nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(64, *[64] * (dims - 1)))

    def forward(self, x, n=1):
        return F.linear(x, self.w[:32])


class Renames(nn.Module):
    def forward(this, x):
        return F.linear(x, this.w)


@pytest.mark.parametrize(
    "cls, expected",
    [
        (Child, "T"),
        (Decorated, "T"),
        (Wrapped, "T"),
        (WithHelpers, "T"),
        (Initialises, "T"),
        (Renames, "T"),
        (Overrides, "unknown"),
        (WithProperty, "unknown"),
    ],
)
def test_classes(cls, expected):
    assert told(how_read(cls, "w")) == expected


def test_what_an_unused_method_does_with_another_weight_does_not_matter():
    assert told(how_read(Child, "w")) == "T"
    assert told(how_read(Child, "v")) == "unknown"


def test_a_class_without_source():
    names = {"nn": nn, "F": F}
    exec(
        "class Made(nn.Module):\n    def forward(self, x):\n        return F.linear(x, self.w)\n",
        names,
    )
    found = how_read(names["Made"], "w")
    assert found == "the source of Made cannot be read"


def test_a_forward_that_is_not_a_function():
    class Partial(nn.Module):
        forward = functools.partial(F.linear)

    assert isinstance(how_read(Partial, "w"), (str, Reads))


def test_reads_cuts_and_slices():
    def views(self, x):
        return torch.bmm(x, self.w.view(self.heads, -1, 8).view(4, -1, 8))

    def whole(self, x):
        return F.linear(x, self.w[:, :])

    holder = type("Holder", (nn.Module,), {"forward": views, "heads": 2})
    found = how_read(holder, "w")
    assert found.cuts == ["heads", 4] and found.blocks(holder()) == 2
    assert how_read(Slices, "w").sliced
    assert not how_read(type("Holder", (nn.Module,), {"forward": whole}), "w").sliced


def test_a_matrix_of_which_parts_are_multiplied_stays_dense():
    from fxsparse.passes.kinds import module_weights

    (own,) = module_weights(Slices(2))
    assert own.reason == "Slices.forward takes parts of it"
    assert module_weights(Slices(3))[0].reason is None

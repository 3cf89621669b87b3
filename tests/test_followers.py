"""Which children are surely called one after the other with the same tensor, read in the source."""

import pytest

from fxsparse.capture.followers import followers


class InTurn:
    def forward(self, x):
        q = self.q(x)
        k = self.k(x)
        return q, k, self.v(x)


class InOneExpression:
    def forward(self, x, scale):
        return self.o(self.act(self.q(x)) * self.k(x)) * scale


class AttributesAndShapes:
    def forward(self, x, mask=None):
        shape = (*x.shape[:-1], x.size(1))
        q = self.norm(self.q(x).view(shape)).transpose(1, 2)
        q = q * 2
        k = self.k(x).to(x.dtype)
        return q, k


class Helper:
    def forward(self, x):
        return self.project(x)

    def project(self, x):
        return self.q(x), self.k(x)


class InALoop:
    def forward(self, xs):
        for x in xs:
            q = self.q(x)
            k = self.k(x)
            x = q + k
        return x


class UnknownOrder:
    def forward(self, x, first):
        if first:
            return self.q(x), self.k(x), self.v(x)
        return self.q(x), self.v(x), self.k(x)


class OneOfTwoPlaces:
    def forward(self, x, other):
        if other is None:
            return self.q(x), self.k(x), self.v(x)
        return self.q(x), self.k(other), self.v(other)


class OtherTensor:
    def forward(self, x, y):
        return self.q(x), self.k(y)


class OtherArguments:
    def forward(self, x, y):
        return self.q(x), self.k(x, y), self.v(input=x), self.o(x + 1)


class Rebound:
    def forward(self, x):
        q = self.q(x)
        x = x + 1
        return q, self.k(x)


class InPlace:
    def forward(self, x):
        q = self.q(x)
        q.add_(1)
        return q, self.k(x)


class Assigned:
    def forward(self, x):
        q = self.q(x)
        x[0] = 1
        return q, self.k(x)


class Added:
    def forward(self, x):
        q = self.q(x)
        x += q
        return q, self.k(x)


class WithOut:
    def forward(self, x, torch):
        return torch.add(self.q(x), 1, out=x), self.k(x)


class GivenAway:
    def forward(self, x):
        q = self.q(x)
        self.other(x)
        return q, self.k(x)


class AliasGivenAway:
    def forward(self, x):
        residual = x.view(-1)
        q = self.q(x)
        self.other(residual)
        return q, self.k(x)


class KeptByAnObject:
    def forward(self, x):
        kept = list()
        kept.append(x)
        q = self.q(x)
        self.other(kept)
        return q, self.k(x)


class ArgumentGivenAway:
    def forward(self, x, same):
        q = self.q(x)
        self.other(same)
        return q, self.k(x)


class KeptInADict:
    def forward(self, x):
        kept = {}
        kept["x"] = x
        q = self.q(x)
        self.other(kept)
        return q, self.k(x)


class KeptByTheModule:
    def forward(self, x):
        self.kept = x
        q = self.q(x)
        self.other()
        return q, self.k(x)


class KeptByAGlobal:
    def forward(self, x):
        KEPT[0] = x
        q = self.q(x)
        run(self.other, q)
        return q, self.k(x)


class InnerFunction:
    def forward(self, x):
        def write():
            x.mul_(2)

        q = self.q(x)
        write()
        return q, self.k(x)


class InnerFunctionThatKeeps:
    def forward(self, x):
        kept = list()

        def keep(y):
            kept.append(y)

        keep(x)
        q = self.q(x)
        self.other(kept)
        return q, self.k(x)


class InnerFunctionOfAnother:
    def forward(self, x):
        size = x.shape[0]

        def view(y):
            return y.view(size, -1, self.heads)

        self.kept = size
        q = view(self.q(x))
        return q, view(self.k(x))


class MayLeave:
    def forward(self, x, early):
        q = self.q(x)
        if early:
            return q
        return self.k(x)


class Conditional:
    def forward(self, x, on):
        q = self.q(x)
        k = self.k(x) if on else None
        v = on and self.v(x)
        return q, k, v, lambda: self.o(x)


class AnotherBlock:
    def forward(self, x, torch):
        q = self.q(x)
        with torch.no_grad():
            return q, self.k(x)


class Yields:
    def forward(self, x):
        yield self.q(x)
        yield self.k(x)


class HandsAChildOn:
    def forward(self, x):
        run(self.q, x)
        return self.q(x), self.k(x)


class CallsItsForward:
    def forward(self, x):
        self.q.forward(x + 1)
        return self.q(x), self.k(x)


KEPT = [None]


def run(module, x):
    return module(x)


ALL = {"q": ("k", "v"), "k": ("v",)}
PAIR = {"q": ("k",)}


@pytest.mark.parametrize(
    "cls, expected",
    [
        (InTurn, ALL),
        (InOneExpression, PAIR),
        (AttributesAndShapes, PAIR),
        (Helper, PAIR),
        (InALoop, PAIR),
        (InnerFunctionOfAnother, PAIR),
        (UnknownOrder, {"q": ("k", "v")}),
        (OneOfTwoPlaces, {"k": ("v",)}),
        *[
            (cls, {})
            for cls in (OtherTensor, OtherArguments, Rebound, InPlace, Assigned, Added, WithOut)
        ],
        *[(cls, {}) for cls in (GivenAway, AliasGivenAway, KeptByAnObject, ArgumentGivenAway)],
        *[(cls, {}) for cls in (KeptInADict, KeptByTheModule, KeptByAGlobal, InnerFunction)],
        (InnerFunctionThatKeeps, {}),
        *[(cls, {}) for cls in (MayLeave, Conditional, AnotherBlock, Yields)],
        *[(cls, {}) for cls in (HandsAChildOn, CallsItsForward)],
    ],
)
def test_what_follows(cls, expected):
    assert followers(cls, frozenset("qkvo")) == expected


def test_a_child_that_is_not_among_them_may_write_to_the_tensor():
    assert followers(InTurn, frozenset("qv")) == {}


def test_a_source_that_cannot_be_read():
    names: dict = {}
    exec("def forward(self, x):\n    return self.q(x), self.k(x)\n", names)
    assert followers(type("Made", (), names), frozenset("qk")) == {}

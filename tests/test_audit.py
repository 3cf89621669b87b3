"""What the audit of a forward objects to, and what it lets pass."""

import operator
import os
import time

import pytest
import torch

from fxsparse.capture.audit import objection


class Passes:
    def structure(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x) if i else layer(x).relu()
        return x

    def optional_part(self, x):
        if self.down is not None and len(self.layers) > 1:
            x = self.down(x)
        return x

    def local_list(self, x):
        parts = [layer(x) for layer in self.layers if layer is not self.last]
        parts.append(x)
        named = {"x": x}
        named["y"] = parts[0]
        return torch.cat(parts), named

    def shapes(self, x):
        batch, length, _ = x.shape
        return x.view(batch, length, self.heads, -1).transpose(1, 2)

    def helper(self, x):
        double = lambda t: t * 2  # noqa: E731
        return double(self.a(x)) + (x > 0)

    def own_training_flag(self, x):
        return torch.dropout(x, 0.5, self.training)

    def in_place(self, x):
        y = self.a(x)
        y += x
        return y

    def message_of_an_assertion(self, x):
        torch._assert(x.shape[0] == 4, f"expected 4 rows, got {x.shape[0]}")
        return x

    def scripting(self, x):
        if self.checkpoints and not torch.jit.is_scripting():
            x = self.a(x)
        return x

    def optional_attribute(self, x):
        down = getattr(self, "down", None)
        return x if down is None else down(x)

    def table_by_a_buffer(self, x):
        return x + self.table[self.index.view(-1)]

    def bound_in_one_branch(self, x):
        bias = self.bias
        if self.fused:
            bias = self.a(x)
        elif bias is not None:
            x = x + bias
        return x

    def optional_gate(self, x):
        gate = self.a(x).sigmoid() if self.a is not None else None
        return x if gate is None else x * gate


class Fails:
    def none(self, x, mask):
        return x if mask is None else x * mask

    def perhaps_a_gate(self, x):
        gate = self.a(x) if self.a is not None else None
        return x if gate is None else x * gate

    def assertion_with_an_effect(self, x):
        torch._assert(self.seen.append(x), "never")
        return x

    def alias(self, x, mask):
        m = mask
        return self.a(x) if m is not None else x

    def item(self, inputs):
        return inputs[0] if inputs[1] is None else inputs[1]

    def filtered(self, x, y):
        return sum([t for t in (x, y) if t is not None])

    def either(self, x, y):
        return self.a(x or y)

    def membership(self, x, names):
        return x * ("scale" in names)

    def childs_training(self, x):
        return self.a(x) if self.drop.training == self.training else x

    def context(self, x):
        with torch.no_grad():
            return self.a(x)

    def catching(self, x):
        try:
            return self.a(x)
        except ValueError:
            return x

    def counting(self, x):
        self.calls += 1
        return x

    def storing(self, x):
        self.last = x
        return x

    def storing_deep(self, x):
        self.stats["calls"]["n"] = 1
        return x

    def appending(self, x):
        self.seen.append(x)
        return x

    def appending_to_argument(self, x, cache):
        cache.append(x)
        return x

    def extending(self, x):
        seen = self.seen
        seen += [x]
        return x

    def power_in_place(self, x):
        x **= 2
        return x

    def item_assignment(self, x):
        y = self.a(x)
        y[0] = 1
        return y

    def flag(self, x):
        return self.a(x) if torch.is_grad_enabled() else x

    def type_test(self, x):
        return self.a(x) if isinstance(x, torch.Tensor) else x

    def type_value(self, x):
        return self.a[type(x)](x)

    def attribute_test(self, x):
        return self.a(getattr(x, "values", x))

    def own_gradient(self, x):
        return Reverse.apply(x)  # noqa: F821

    def printing(self, x):
        print(x)
        return x

    def loop(self, x):
        while x.sum() > 0:
            x = x - 1
        return x

    def asserting(self, x, n):
        assert n
        return x

    def negation(self, x, flag):
        return x * (not flag)

    def named_flag(self, x):
        return torch.dropout(x, 0.5, getattr(self, "training"))  # noqa: B009

    def choice(self, x, m):
        return [self.a, self.b][operator.is_(m, None)](x)

    def choice_by_size(self, x):
        return [self.a, self.b][x.size(0) > 1](x)

    def choice_by_a_view(self, x):
        return self.tables[x.view(-1)]

    def bound_in_branches(self, x):
        y = None
        if self.fused:
            y = self.a(x)
        return x if y is None else y

    def lookup(self, x, m):
        return {None: self.a}.get(m, self.b)(x)

    def tensor_test(self, x, m):
        return x * torch.is_tensor(m)

    def text(self, x):
        return x * len(f"{x}")

    def counter(self, x):
        return x * next(self.numbers)

    def number(self, x):
        return x * float(SCALE)  # noqa: F821

    def taken_out(self, x):
        return x * x.sum().item()

    def clock(self, x):
        return x * time.time()

    def environment(self, x):
        return x * len(os.environ)

    def elsewhere(self, x):
        return POOL.submit(self.a, x).result()  # noqa: F821

    def late_taint(self, x):
        y = self.none
        for layer in self.layers:
            if y is not None:
                x = x * y
            y = layer(x)
        return x

    @torch.no_grad()
    def decorated(self, x):
        return x


@pytest.mark.parametrize("name", [n for n in vars(Passes) if not n.startswith("_")])
def test_lets_pass(name):
    assert objection(vars(Passes)[name].__code__) is None


@pytest.mark.parametrize("name", [n for n in vars(Fails) if not n.startswith("_")])
def test_objects(name):
    function = vars(Fails)[name]
    found = objection(getattr(function, "__wrapped__", function).__code__)
    assert found is not None and name in found


def undecorated(function):
    return function


class Known:
    """What is objected to unless some name is known to stand for the same at every call."""

    def flag(self, x, flag=False):
        return self.a(x) if flag else x

    def none(self, x, mask):
        return x if mask is None else x * mask

    def enumeration(self, x):
        return x if self.form == Form.PLAIN else -x  # noqa: F821

    @undecorated
    def decorated(self, x):
        return x


@pytest.mark.parametrize(
    "name, known", [("flag", "flag"), ("none", "mask"), ("enumeration", "Form"), ("decorated",) * 2]
)
def test_lets_pass_what_is_known(name, known):
    code = vars(Known)[name].__code__
    assert objection(code) is not None
    assert objection(code, frozenset(["self", known])) is None


def test_code_without_source_is_objected_to():
    assert "source" in objection(compile("lambda x: x", "nowhere", "eval"))


def test_a_source_that_is_not_what_runs_is_objected_to(tmp_path):
    file = tmp_path / "edited.py"
    file.write_text("def f(self, x):\n    return self.a(x)\n")
    names = {}
    text = "def f(self, x):\n    return self.b(x) if x is None else self.a(x)\n"
    exec(compile(text, str(file), "exec"), names)
    assert "not what runs" in objection(names["f"].__code__)

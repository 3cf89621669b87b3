"""``symbolic_trace``, watched: notes every way in which the graph may differ from the module.

A trace records one run of ``forward`` on stand-ins. What Python itself decides on the way is frozen
in silence: a branch on an argument that may be ``None``, an ``isinstance`` test, the training flag,
the autocast mode, a random number, a counter. The tracer here watches for each of them.
"""

from __future__ import annotations

import dis
import functools
import operator
import os
import sys
import types
from typing import Any

import torch
from torch import fx

from .modules import SparseLinear

_TORCH = os.path.dirname(torch.__file__) + os.sep
_FUNCTIONAL = os.path.join(_TORCH, "nn", "functional.py")


class WatchedProxy(fx.Proxy):
    """A proxy that reports ``isinstance`` tests on itself and keeps in-place operators in place."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        caller = sys._getframe(1)
        tracer = object.__getattribute__(self, "tracer")
        if not caller.f_code.co_filename.startswith(_TORCH) and isinstance(tracer, WatchedTracer):
            tracer.distrust(f"{_where(caller)} tests the type of a value, which a trace freezes")
        return type(self)


def _inplace(name: str) -> Any:
    target = getattr(operator, name)

    def method(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    return method


# Without these, Python turns `x += y` on a proxy into `x = x + y`: aliases of x lose the update.
for _name in (
    "iadd",
    "isub",
    "imul",
    "itruediv",
    "ifloordiv",
    "imod",
    "ipow",
    "iand",
    "ior",
    "ixor",
):
    setattr(WatchedProxy, f"__{_name}__", _inplace(_name))


class TensorProxy(WatchedProxy):
    """A parameter or buffer of the model: its shape, dtype and device are constants."""

    tensor: torch.Tensor

    shape = property(lambda self: self.tensor.shape)
    ndim = property(lambda self: self.tensor.ndim)
    dtype = property(lambda self: self.tensor.dtype)
    device = property(lambda self: self.tensor.device)
    layout = property(lambda self: self.tensor.layout)

    def size(self, dim: int | None = None) -> Any:
        return self.tensor.size() if dim is None else self.tensor.size(dim)

    def dim(self) -> int:
        return self.tensor.dim()

    def numel(self) -> int:
        return self.tensor.numel()

    def is_floating_point(self) -> bool:
        return self.tensor.is_floating_point()


class WatchedTracer(fx.Tracer):
    """A tracer whose ``doubts`` say what may make the graph differ from the module.

    Buffers are read through the graph as parameters are: an in-place update of one stays an update.
    """

    def __init__(self) -> None:
        super().__init__()
        self.doubts: list[str] = []
        self._paths: dict[int, str] = {}
        self._mode = _mode()

    def distrust(self, reason: str) -> None:
        if reason not in self.doubts:
            self.doubts.append(reason)

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        self._mode = _mode()
        named = [*root.named_buffers(), *root.named_parameters()]
        self._paths = {id(tensor): path for path, tensor in reversed(named)}
        outer = sys.getprofile()
        sys.setprofile(functools.partial(_watch_calls, self))
        try:
            return super().trace(root, concrete_args)
        finally:
            sys.setprofile(outer)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return WatchedProxy(node, self)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if not isinstance(attr_val, torch.Tensor):
            return attr_val
        path = self._paths.get(id(attr_val))
        if path is None:
            return attr_val
        if path not in parameter_proxy_cache:
            proxy = TensorProxy(self.create_node("get_attr", path, (), {}), self)
            proxy.tensor = attr_val
            parameter_proxy_cache[path] = proxy
        return parameter_proxy_cache[path]

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, SparseLinear) or super().is_leaf_module(m, module_qualified_name)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _mode() != self._mode:
            self.distrust("forward switches autocast, grad or inference mode, which a trace loses")
        return super().create_node(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        if _loses_its_type(type(a)):
            self.distrust(f"a {type(a).__name__} would become a plain container")
        return super().create_arg(a)


def _loses_its_type(container: type) -> bool:
    """Whether fx writes a container of this type as a plain dict, list or tuple."""
    if container.__module__.startswith("torch.") or container in (dict, list, tuple):
        return False
    is_namedtuple = issubclass(container, tuple) and hasattr(container, "_fields")
    return issubclass(container, (dict, list, tuple)) and not is_namedtuple


def _mode() -> tuple[Any, ...]:
    autocast = torch.is_autocast_enabled("cpu")
    return (
        autocast and torch.get_autocast_dtype("cpu"),
        autocast,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
    )


def _where(frame: types.FrameType) -> str:
    code = frame.f_code
    return f"{code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"


def _watch_calls(tracer: WatchedTracer, frame: types.FrameType, event: str, arg: Any) -> None:
    """A profile function: finds functions that compare an input of the graph with ``None``."""
    if event != "call":
        return
    file = frame.f_code.co_filename
    if file.startswith(_TORCH) and file != _FUNCTIONAL:
        return
    for name in _compared_with_none(frame.f_code):
        value = frame.f_locals.get(name)
        if type(value) is WatchedProxy and value.node.op == "placeholder":
            tracer.distrust(
                f"{frame.f_code.co_qualname if hasattr(frame.f_code, 'co_qualname') else frame.f_code.co_name}"
                f" asks whether its argument {name!r} is None, which a trace freezes"
            )


@functools.lru_cache(maxsize=4096)
def _compared_with_none(code: types.CodeType) -> tuple[str, ...]:
    """Arguments of a function that it compares with ``None`` by ``is`` or ``is not``."""
    arguments = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    found: list[str] = []
    loads: list[str] = []
    for op in dis.get_instructions(code):
        tests_none = "NONE" in op.opname and op.opname.startswith(("POP_JUMP", "JUMP"))
        if tests_none or (op.opname == "IS_OP" and "None" in loads[-2:]):
            found += [name for name in loads[-2:] if name in arguments]
        if op.opname.startswith("LOAD_"):
            loads += op.argval if isinstance(op.argval, tuple) else [str(op.argval)]
        elif not op.opname.startswith(("COPY", "CACHE")):
            loads = loads if tests_none else []
    return tuple(dict.fromkeys(found))

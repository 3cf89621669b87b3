"""A tracer that notes which functions a trace runs through."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import fx

from ..epilogues import find_module
from ..modules import SparseModule
from ..modules.attention import SparseTransformerEncoder
from .leaves import stays_whole
from .watch import Watch


def iadd(a: Any, b: Any) -> Any:
    """``a += b`` as a node: the code that fx writes for ``operator.iadd`` binds the name of ``a`` anew."""
    a += b
    return a


def isub(a: Any, b: Any) -> Any:
    """``a -= b`` as a node."""
    a -= b
    return a


def imul(a: Any, b: Any) -> Any:
    """``a *= b`` as a node."""
    a *= b
    return a


def itruediv(a: Any, b: Any) -> Any:
    """``a /= b`` as a node."""
    a /= b
    return a


class _InPlace(fx.Proxy):
    """A proxy whose updates in place stay in place: fx makes new values of them."""

    def __iadd__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", iadd, (self, other), {})

    def __isub__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", isub, (self, other), {})

    def __imul__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", imul, (self, other), {})

    def __itruediv__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", itruediv, (self, other), {})

    def __getattr__(self, name: str) -> _InPlaceAttribute:
        return _InPlaceAttribute(self, name)


class _InPlaceAttribute(_InPlace, fx.proxy.Attribute):
    """An attribute of a tensor that may be a view of it, such as ``x.T``."""


class TensorProxy(_InPlace):
    """A parameter or buffer of the model: its shape, dtype and device are constants."""

    is_constant = True
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


#: While it traces, fx has replaced ``nn.Module.__call__`` and ``__getattr__``, for other threads too.
_TRACING = threading.RLock()


class WatchedTracer(fx.Tracer):
    """``fx.Tracer`` that watches the code it runs through (``watch``) and collects what it cannot
    keep (``doubts``). Buffers are read through the graph as parameters are. What is traced is
    ``method`` of the root."""

    def __init__(self, method: str = "forward") -> None:
        super().__init__()
        self.traced_func_name = method
        self.watch = Watch()
        self.doubts: list[str] = []
        self._paths: dict[int, str] = {}

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        with _TRACING:
            self._thread = threading.get_ident()
            return self._trace(root, concrete_args)

    def _trace(self, root: Any, concrete_args: dict[str, Any] | None) -> fx.Graph:
        named = [*root.named_buffers(), *root.named_parameters()]
        self._paths = {id(tensor): path for path, tensor in reversed(named)}
        with self.watch:
            graph = super().trace(root, concrete_args)
        self.doubts += [f"forward hands a tensor to {name}()" for name in sorted(self.watch.handed)]
        if self.watch.blind:
            self.doubts.append("a profiler runs, so the trace cannot be watched")
        return graph

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _InPlace(node, self)

    def call_module(
        self, m: torch.nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        elsewhere = threading.get_ident() != self._thread
        if elsewhere or not isinstance(attr_val, torch.Tensor):
            return attr_val
        path = self._paths.get(id(attr_val))
        if path is None:
            self.doubts.append(f"{attr!r} is a tensor that is neither a parameter nor a buffer")
            return attr_val
        if path not in parameter_proxy_cache:
            proxy = TensorProxy(self.create_node("get_attr", path, (), {}), self)
            proxy.tensor = attr_val
            parameter_proxy_cache[path] = proxy
        return parameter_proxy_cache[path]

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        is_own = isinstance(m, (SparseModule, SparseTransformerEncoder))
        is_leaf = is_own or super().is_leaf_module(m, module_qualified_name)
        return is_leaf or stays_whole(m) or find_module(m, torch.float32) is not None

    def create_arg(self, a: Any) -> Any:
        if _loses_its_type(type(a)):
            self.doubts.append(f"a {type(a).__name__} would not come out as it is")
        if isinstance(a, torch.Tensor) and id(a) not in self._paths:
            self.doubts.append("forward makes a tensor, which a trace would keep")
        return super().create_arg(a)


def _loses_its_type(container: type) -> bool:
    """Whether fx writes a value of this type as a plain container, or makes it anew."""
    if container.__module__.startswith("torch.") or container in (dict, list, tuple):
        return False
    is_namedtuple = issubclass(container, tuple) and hasattr(container, "_fields")
    is_dataclass = hasattr(container, "__dataclass_fields__")
    return is_dataclass or (issubclass(container, (dict, list, tuple)) and not is_namedtuple)

"""Weights that are computed at every call become plain weights.

``torch.nn.utils.prune`` keeps ``weight_orig`` (a parameter), ``weight_mask`` (a buffer) and
``weight`` (computed by a forward pre-hook): three times the weight. The hooks of ``weight_norm`` and
``spectral_norm`` do alike, and so do parametrizations, by a property. Here what they compute becomes
the parameter ``weight`` again, as torch's own functions for their removal would leave it, without
running forward and without writing to a tensor that the module may share with another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import (
    SpectralNorm,
    SpectralNormLoadStateDictPreHook,
    SpectralNormStateDictHook,
)
from torch.nn.utils.weight_norm import WeightNorm

from fxsparse.memory import module_bytes, tensor_bytes

from .constant import constant_value

#: Why the computed weights of a module could not be folded.
unfolded: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()

_HOOKS = (BasePruningMethod, WeightNorm, SpectralNorm)
_STATE_HOOKS = (SpectralNormStateDictHook, SpectralNormLoadStateDictPreHook)


def needs_folding(model: nn.Module) -> bool:
    """Whether any weight below ``model`` is computed by a hook or a parametrization that is known."""
    return any(is_parametrized(m) or _weight_hooks(m) for m in model.modules())


def fold(model: nn.Module) -> None:
    """Fold every computed weight below ``model``, in place, one by one.

    What is not the same at every call stays; :data:`unfolded` says why. An error leaves each weight
    either as it was or folded.
    """
    ties = _Ties.of(model)
    for module in list(model.modules()):
        folded = [_fold_hook(module, key, hook, ties) for key, hook in _weight_hooks(module)]
        _put_first(module, [name for name in folded if name is not None])
    for module in list(model.modules()):
        if is_parametrized(module):
            _fold_parametrizations(module, ties)


@dataclass
class _Ties:
    """Keeps weights tied that were: several modules may compute theirs from one parameter."""

    shared: set[int]
    made: dict[frozenset[int], list[tuple[Sequence[nn.Parameter], nn.Parameter]]] = field(
        default_factory=dict
    )

    @classmethod
    def of(cls, model: nn.Module) -> _Ties:
        owned = (p for m in model.modules() for p in m._parameters.values() if p is not None)
        return cls({key for key, count in Counter(map(id, owned)).items() if count > 1})

    def parameter(self, value: torch.Tensor, sources: Sequence[nn.Parameter]) -> nn.Parameter:
        """``value``, computed from ``sources``, as a parameter: an equal one of the same sources."""
        key = frozenset(map(id, sources))
        if not key or not key <= self.shared:
            return _parameter(value, sources)
        made = self.made.setdefault(key, [])
        for _, earlier in made:
            if torch.equal(earlier, value):
                return earlier
        parameter = _parameter(value, sources)
        made.append((sources, parameter))  # the sources too, so that no other gets their id
        return parameter


def _parameter(value: torch.Tensor, sources: Sequence[nn.Parameter]) -> nn.Parameter:
    value = value.detach()
    own_bytes = value.numel() * value.element_size()
    if value.layout == torch.strided and tensor_bytes(value) != own_bytes:  # a view
        value = value.clone(memory_format=torch.contiguous_format)
    differentiable = value.is_floating_point() or value.is_complex()
    trains = differentiable and any(source.requires_grad for source in sources)
    return nn.Parameter(value, requires_grad=trains)


def _weight_hooks(module: nn.Module) -> list[tuple[int, Callable]]:
    """Pre-hooks that compute a weight, by their key; masks first, since a norm may read their result."""
    found = [item for item in module._forward_pre_hooks.items() if isinstance(item[1], _HOOKS)]
    return sorted(found, key=lambda item: not isinstance(item[1], BasePruningMethod))


def _fold_hook(module: nn.Module, key: int, hook: Callable, ties: _Ties) -> str | None:
    """Fold the weight that one hook computes; returns its name, or None where it stays."""
    suffixes: tuple[str, ...]
    with torch.no_grad():
        if isinstance(hook, BasePruningMethod):
            name, suffixes = hook._tensor_name, ("_orig", "_mask")
            value = hook.apply_mask(module)
        elif isinstance(hook, WeightNorm):
            name, suffixes = hook.name, ("_g", "_v")
            value = hook.compute_weight(module)
        else:
            assert isinstance(hook, SpectralNorm)
            if module.training:
                unfolded[module] = (
                    "spectral_norm changes it at every call in training: call model.eval() "
                    "before compile"
                )
                return None
            name, suffixes = hook.name, ("_orig", "_u", "_v")
            value = hook.compute_weight(module, do_power_iteration=False)
            _remove_state_hooks(module, lambda hook: isinstance(hook, _STATE_HOOKS))
    parts = [name + suffix for suffix in suffixes]
    sources = [p for part in parts if (p := module._parameters.get(part)) is not None]
    parameter = ties.parameter(value, sources)
    del module._forward_pre_hooks[key]
    module._forward_pre_hooks_with_kwargs.pop(key, None)
    for part in parts:
        module._parameters.pop(part, None)
        module._buffers.pop(part, None)
        module._non_persistent_buffers_set.discard(part)
    module.__dict__.pop(name, None)
    setattr(module, name, parameter)  # not register_parameter: recurrent layers keep a list
    return name


def _fold_parametrizations(module: nn.Module, ties: _Ties) -> None:
    """Fold all parametrizations of one module, or none: they share a class made for it."""
    lists: dict[str, ParametrizationList] = {**module.parametrizations._modules}  # type: ignore
    values = {}
    try:
        for name, parametrization in lists.items():
            values[name] = constant_value(parametrization)
            got, held = tensor_bytes(values[name]), module_bytes(parametrization)
            if got > held:
                raise ValueError(f"holds fewer bytes than the weight: {held} against {got}")
    except ValueError as reason:
        unfolded.update({each: f"its parametrization {reason}" for each in lists.values()})
        return
    placed = {
        name: ties.parameter(value, sources) if (sources := [*lists[name].parameters()]) else value
        for name, value in values.items()
    }
    del module._modules["parametrizations"]
    module.__class__ = type(module).__bases__[0]  # the class made for it may be a copy's too
    _remove_state_hooks(module, _is_compatibility_hook)
    for name, tensor in placed.items():
        if isinstance(tensor, nn.Parameter):
            setattr(module, name, tensor)
        else:
            module.register_buffer(name, tensor)
    _put_first(module, list(placed))


def _is_compatibility_hook(hook: object) -> bool:
    """Whether a hook lets parametrizations.weight_norm load what the older weight_norm saved."""
    return getattr(hook, "__name__", "") == "_weight_norm_compat_hook"


def _remove_state_hooks(module: nn.Module, matches: Callable[[object], bool]) -> None:
    for hooks in (module._state_dict_hooks, module._load_state_dict_pre_hooks):
        for key, hook in list(hooks.items()):
            if matches(getattr(hook, "hook", hook)):
                del hooks[key]


def _put_first(module: nn.Module, names: list[str]) -> None:
    """Give folded weights the place that they have in a new module: before the bias."""
    if not names:
        return
    parameters = module._parameters
    first = {name: parameters.pop(name) for name in names if name in parameters}
    rest = dict(parameters)
    parameters.clear()
    parameters.update({**first, **rest})

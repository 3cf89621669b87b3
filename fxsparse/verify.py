"""Runs a model on example inputs and compares results, touching neither the model nor the inputs."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from .clone import share_clone
from .errors import VerificationError
from .modules.state import packed_names

Inputs = tuple[Any, ...] | dict[str, Any]

_TOLERANCE = 1e-3
_TOLERANCE_16_BIT = 3e-2


def check_inputs(example_inputs: object) -> Inputs | None:
    """``example_inputs`` as given, or a ``TypeError``."""
    if example_inputs is None or isinstance(example_inputs, (tuple, dict)):
        return example_inputs
    raise TypeError(
        "example_inputs: expected a tuple of positional or a dict of keyword inputs, "
        f"got {type(example_inputs).__name__}"
        + (": write (x,)" if isinstance(example_inputs, torch.Tensor) else "")
    )


def run(model: torch.nn.Module, inputs: Inputs) -> Any:
    """The output of a copy of ``model`` on copies of ``inputs``, with a fixed random seed."""
    packed = [module._buffers[name] for module in model.modules() for name in packed_names(module)]
    clone = share_clone(model, also=[buffer for buffer in packed if buffer is not None])
    inputs = copies(inputs)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return clone(**inputs) if isinstance(inputs, dict) else clone(*inputs)


def copies(inputs: Inputs) -> Inputs:
    """The inputs anew, caches and other objects in them too where they can be copied.

    What is one tensor stays one tensor.
    """
    made: dict[int, torch.Tensor] = {}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = tensor.detach().clone()
        return made[id(tensor)]

    inputs = tree_map_only(torch.Tensor, copied, inputs)
    try:
        return copy.deepcopy(inputs)
    except Exception:
        return inputs


class _Watches16Bits(TorchDispatchMode):
    """Whether values of 16 bits are made on the way: what is behind them has no more digits."""

    seen = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
                self.seen = True
        return result


class Reference:
    """The model's own output on the example inputs, made once before anything is changed."""

    def __init__(self, model: torch.nn.Module, inputs: Inputs) -> None:
        self.inputs = inputs
        try:
            with _Watches16Bits() as watch:
                self.output = run(model, inputs)
        except Exception as error:
            raise ValueError(
                f"example_inputs: {type(model).__name__} itself fails on them: {type(error).__name__}: {error}"
            ) from error

        self.coarse = watch.seen

    def equals(self, candidate: torch.nn.Module) -> bool:
        """Whether ``candidate`` gives the same output."""
        try:
            self.check(candidate)
        except Exception:
            return False
        return True

    def check(self, candidate: torch.nn.Module) -> None:
        """Raise :class:`VerificationError` where ``candidate`` gives another output."""
        got = run(candidate, self.inputs)
        for where, problem in differences(got, self.output, "output", self.coarse):
            raise VerificationError(
                f"the compiled module differs from the dense model on example_inputs at {where}: {problem}"
            )


def differences(
    got: Any, expected: Any, where: str, coarse: bool = False
) -> Iterator[tuple[str, str]]:
    """Where and how two outputs differ: structure, shapes, dtypes, then values; ``coarse``: those come
    from values of 16 bits."""
    if type(got) is not type(expected):
        yield where, f"expected a {type(expected).__name__}, got a {type(got).__name__}"
    elif isinstance(expected, torch.Tensor):
        problem = _tensor_difference(got, expected, coarse)
        if problem:
            yield where, problem
    elif isinstance(expected, Mapping):
        if list(got) != list(expected):
            yield where, f"expected the keys {list(expected)}, got {list(got)}"
        else:
            for key in expected:
                yield from differences(got[key], expected[key], f"{where}[{key!r}]", coarse)
    elif isinstance(expected, (list, tuple)):
        if len(got) != len(expected):
            yield where, f"expected {len(expected)} items, got {len(got)}"
        else:
            for i, (a, b) in enumerate(zip(got, expected)):
                yield from differences(a, b, f"{where}[{i}]", coarse)
    elif dataclasses.is_dataclass(expected) and not isinstance(expected, type):
        for field in dataclasses.fields(expected):
            a, b = getattr(got, field.name), getattr(expected, field.name)
            yield from differences(a, b, f"{where}.{field.name}", coarse)
    elif isinstance(expected, float):
        yield from differences(torch.tensor(got), torch.tensor(expected), where, coarse)
    elif isinstance(expected, (int, str, bool)) and got != expected:
        yield where, f"expected {expected!r}, got {got!r}"


def _tensor_difference(got: torch.Tensor, expected: torch.Tensor, coarse: bool) -> str | None:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return (
            f"expected {tuple(expected.shape)} {expected.dtype}, got {tuple(got.shape)} {got.dtype}"
        )
    if got.numel() == 0 or got.layout != torch.strided:
        return None
    if not expected.is_floating_point() and not expected.is_complex():
        return None if torch.equal(got, expected) else "integer values differ"
    if not torch.equal(got.isfinite(), expected.isfinite()):
        return "finite, infinite and NaN values stand in other places"
    finite = expected.isfinite()
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = got[finite].to(wide), expected[finite].to(wide)
    if a.numel() == 0:
        return None
    tolerance = _TOLERANCE_16_BIT if coarse or expected.dtype.itemsize == 2 else _TOLERANCE
    difference, largest = (a - b).abs().max().item(), b.abs().max().item()
    if difference <= tolerance * largest:
        return None
    return f"values differ by {difference:.3g}, the largest is {largest:.3g} (tolerance {tolerance:g} of it)"

"""What running a module changes beside its result."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def watched(root: torch.nn.Module) -> Iterator[list[str]]:
    """Gives a list that says, after the block, what the block changed: attributes of the modules of
    ``root``, and whether it drew random numbers. The generators are put back as they were."""
    before = attributes(root)
    with draws() as effects:
        yield effects
    effects += changes(before, attributes(root))


@contextmanager
def draws() -> Iterator[list[str]]:
    """The part of :func:`watched` that is about random numbers."""
    effects: list[str] = []
    numbers = _random_numbers()
    try:
        with torch.random.fork_rng(devices=[]):
            yield effects
            if _random_numbers() != numbers:
                effects.append("draws random numbers")
    finally:
        _restore_random_numbers(numbers)


def changes(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """What differs between two :func:`attributes`: the first three."""
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return [f"changes {name!r}" for name in changed[:3]]


def _random_numbers() -> tuple[Any, ...]:
    """The states of the generators that forward may draw from while it is traced."""
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else ()
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        tuple(part.tolist() if hasattr(part, "tolist") else part for part in state),
    )


def _restore_random_numbers(states: tuple[Any, ...]) -> None:
    random.setstate(states[1])
    if states[2]:
        sys.modules["numpy"].random.set_state(states[2])


def attributes(root: torch.nn.Module) -> dict[str, int]:
    """A hash of the identity of every attribute of every module, a few levels into containers."""

    def identities(value: Any, levels: int = 4) -> Any:
        if isinstance(value, torch.Tensor):
            return id(value), None if value.is_inference() else value._version
        if isinstance(value, (dict, list, tuple, set)) and levels:
            members: Any = value.values() if isinstance(value, dict) else value
            keys = (
                [k if isinstance(k, str) else id(k) for k in value] if members is not value else ()
            )
            return id(value), *keys, *(identities(member, levels - 1) for member in members)
        return value if isinstance(value, (int, float, str, bool)) else id(value)

    return {
        f"{name}.{key}".lstrip("."): hash(identities(value))
        for name, module in root.named_modules()
        for key, value in module.__dict__.items()
        if not _is_empty(value)
    }


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, (dict, list, set)) and not value)

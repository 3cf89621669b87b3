"""Whether what a parametrization computes is the same at every call."""

from __future__ import annotations

import torch
from torch.nn.utils.parametrize import ParametrizationList

from fxsparse.capture.effects import watched
from fxsparse.clone import share_clone


def constant_value(parametrization: ParametrizationList) -> torch.Tensor:
    """The weight that a parametrization computes; a ``ValueError`` that says why it is not constant.

    It is computed twice, by a copy: in training also as it would be in evaluation.
    """
    try:
        scratch = share_clone(parametrization)
        with torch.no_grad(), watched(scratch) as effects:
            value = scratch()
        with torch.no_grad(), watched(scratch):
            again = scratch.eval()()
        same = torch.allclose(value, again, equal_nan=True)
    except Exception as error:
        raise ValueError(f"fails with {type(error).__name__}: {error}") from error
    if same and not effects:
        return value
    problem = (
        f"{effects[0]} at every call" if effects else "does not compute the same at every call"
    )
    hint = ": call model.eval() before compile" if parametrization.training else ""
    raise ValueError(problem + hint)

"""Puts packed weights in the places of dense ones, weight by weight."""

from __future__ import annotations

import torch

from fxsparse.modules.recurrent import SparseRecurrent
from fxsparse.modules.state import guard_packed
from fxsparse.packing import SUFFIX, pack
from fxsparse.stand_in.weight_view import WeightView

from .kinds import is_recurrent, replacement
from .record import Decision, Weight


def install(weight: Weight, decision: Decision, runs_itself: set[int]) -> None:
    """Pack one weight, put it in the dense one's place and let go of that.

    Modules of torch that have a replacement change in place. Any other owner gets the packed buffer;
    where its own forward reads the weight (or its id is in ``runs_itself``) also a
    :class:`WeightView` under the weight's name. An error leaves every owner as it was.
    """
    assert weight.tensor is not None
    packed = pack(
        weight.tensor,
        transposed=weight.transposed,
        is_buffer=not isinstance(weight.tensor, torch.nn.Parameter),
        blocks=weight.blocks,
        format=decision.format,
        headers=decision.headers,
    )
    assert packed.numel() == decision.stored_bytes
    read_by_forward = any(site.node is None for site in weight.sites)
    for owner, name in weight.owners:
        if name == "weight" and (sparse := replacement(owner)) is not None:
            sparse.convert(owner, packed, decision.threads)
            continue
        if is_recurrent(owner):
            SparseRecurrent.convert(owner, name, packed, decision.threads)
            continue
        owner._parameters.pop(name, None)
        owner._buffers.pop(name, None)
        persistent = name not in owner._non_persistent_buffers_set
        owner._non_persistent_buffers_set.discard(name)
        owner.register_buffer(name + SUFFIX, packed, persistent=persistent)
        guard_packed(owner)
        if read_by_forward or id(owner) in runs_itself:
            owner.__dict__[name] = WeightView.of(packed, decision.threads or 0)
    weight.tensor = None
    weight.owners.clear()

"""``SparseTransformerEncoder``, the ``nn.TransformerEncoder`` that has packed weights below it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..stand_in.weight_view import WeightView
from .state import packed_names


class SparseTransformerEncoder(nn.TransformerEncoder):
    """An ``nn.TransformerEncoder`` whose layers cannot take nested tensors.

    Where ``nn.TransformerEncoder`` would leave padded positions out, by a nested tensor, it gives
    zeros there (before ``norm``); elsewhere it gives what its layers compute for them. This one does
    the same: it runs the layers on padded tensors always, and then writes the zeros where the dense
    encoder had them.
    """

    leaves_out_padding: bool

    @staticmethod
    def convert(encoder: nn.TransformerEncoder) -> None:
        """Make an ``nn.TransformerEncoder`` one in place."""
        nests = getattr(encoder, "use_nested_tensor", False)
        encoder.__class__ = SparseTransformerEncoder
        encoder.use_nested_tensor = False
        encoder.leaves_out_padding = nests  # type: ignore[assignment]

    def restore(self) -> None:
        """Make this an ``nn.TransformerEncoder`` again, in place."""
        self.use_nested_tensor = self.leaves_out_padding
        del self.leaves_out_padding
        self.__class__ = nn.TransformerEncoder  # type: ignore[assignment]

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        if src_key_padding_mask is None or mask is not None or not self._may_nest(src):
            return super().forward(src, mask, src_key_padding_mask, is_causal)
        padding = F._canonical_mask(
            src_key_padding_mask, "src_key_padding_mask", None, "mask", src.dtype
        )
        assert padding is not None
        kept = padding.logical_not()
        if getattr(self, "mask_check", True) and not torch._nested_tensor_from_mask_left_aligned(
            src, kept
        ):
            return super().forward(src, mask, src_key_padding_mask, is_causal)
        output = src
        for layer in self.layers:
            output = layer(output, src_key_padding_mask=padding)
        output = output.masked_fill(kept.logical_not().unsqueeze(-1), 0.0)
        return output if self.norm is None else self.norm(output)

    def _may_nest(self, src: Tensor) -> bool:
        """The conditions of ``nn.TransformerEncoder.forward`` but for those of the masks."""
        first = self.layers[0]
        if (
            not self.leaves_out_padding
            or not torch.backends.mha.get_fastpath_enabled()
            or first.training
            or src.dim() != 3
            or src.is_nested
            or (getattr(self, "mask_check", True) and torch.compiler.is_compiling())
            or torch.is_autocast_enabled()
            or torch.overrides.has_torch_function((src,))
        ):
            return False
        if not torch.is_grad_enabled():
            return True
        attention = (first.self_attn, first.self_attn.out_proj)
        others = (first.norm1, first.norm2, first.linear1, first.linear2)
        tensors = _weights_and_biases((*attention, *others))
        return not (src.requires_grad or any(map(_required_grad, tensors)))


def convert_encoders(root: nn.Module) -> None:
    """Convert every ``nn.TransformerEncoder`` of a tree that has packed weights below it."""
    for module in root.modules():
        if type(module) is nn.TransformerEncoder and any(map(packed_names, module.modules())):
            SparseTransformerEncoder.convert(module)


def _weights_and_biases(modules: Iterable[nn.Module]) -> list[Tensor]:
    names = ("in_proj_weight", "in_proj_bias", "weight", "bias")
    found = [getattr(module, name, None) for module in modules for name in names]
    return [tensor for tensor in found if tensor is not None]


def _required_grad(tensor: Tensor) -> bool:
    """Whether a tensor requires a gradient, a packed one in the dense model."""
    return tensor.head.requires_grad if isinstance(tensor, WeightView) else tensor.requires_grad

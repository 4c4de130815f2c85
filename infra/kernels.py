"""Functions with a backward of our own, where autograd's would take more time or memory."""

from typing import Any

import torch
from torch import Tensor, nn


class RMSNorm(torch.autograd.Function):
    """x / sqrt(mean of x^2 + eps) * weight over the last dimension (arXiv 1910.07467). On a GPU each way is one
    kernel; on a CPU torch has none for the backward, which is the formula then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, inverse_rms = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, eps)
        ctx.save_for_backward(x, weight, inverse_rms)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, inverse_rms = ctx.saved_tensors
        needed = ctx.needs_input_grad[:2]
        try:
            grad_x, grad_weight = torch.ops.aten._fused_rms_norm_backward(
                grad, x, weight.shape, inverse_rms, weight, needed
            )
            return grad_x, grad_weight, None
        except NotImplementedError:
            pass
        normal = x * inverse_rms
        scaled = grad * weight
        mean = (scaled * normal).mean(-1, keepdim=True)
        grad_x = inverse_rms * (scaled - normal * mean)
        grad_weight = None
        if needed[1]:
            grad_weight = (grad * normal).flatten(0, -2).sum(0).to(weight.dtype)
        return grad_x.to(x.dtype), grad_weight, None


class Rotation(torch.autograd.Function):
    """Rotary positions: of a head's D numbers, i and i + D / 2 are turned as one point of a plane.
    The backward of autograd would also negate, join and copy halves of heads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos_RQD: Tensor, sin_RQD: Tensor) -> Tensor:
        """x: (R, heads, Q, D)"""
        ctx.save_for_backward(cos_RQD, sin_RQD)
        return rotate(x, cos_RQD, sin_RQD)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos_RQD, sin_RQD = ctx.saved_tensors
        return rotate(grad, cos_RQD, -sin_RQD), None, None


def rotate(x: Tensor, cos_RQD: Tensor, sin_RQD: Tensor) -> Tensor:
    """x (R, heads, Q, D), turned by the angles with these cosines and sines. Computed in the wider of
    the two dtypes, then rounded to the dtype of x."""
    y = x * cos_RQD[:, None]
    x_1, x_2 = x.chunk(2, -1)
    y_1, y_2 = y.chunk(2, -1)
    sin_1, sin_2 = sin_RQD[:, None].chunk(2, -1)
    y_1 -= x_2 * sin_1
    y_2 += x_1 * sin_2
    return y.to(x.dtype)


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up. The backward computes silu(gate) again. Autograd would save one more tensor per layer, as wide
    as the MLP."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return nn.functional.silu(gate).mul_(up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return grad_gate, nn.functional.silu(gate).mul_(grad)

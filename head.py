"""The LM head: log-probs of target tokens, a chunk of targets at a time, so that (T, V) logits never exist together.

Shape letters: T targets (of a call, of a chunk, or of a block within it), C width of the hidden states, V vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from infra.devices import multiplies_bfloat16

# All but the fourth are numbers of logits.
# A chunk: 64 MiB in float32, however many targets there are.
HEAD_LOGITS = 2**24
# The forward keeps the gradient of the first chunks for the backward. The other chunks compute it again.
CPU_SAVED = 2**26
# One softmax: on a CPU allocations above 32 MiB are slow. Smaller chunks would do as well, but the matrix's gradient
# is rounded once per chunk.
CPU_SOFTMAX = 2**22
# Targets, not logits, that a GPU's chunk has at least: fewer do not reach its full speed. Its softmax takes a chunk in
# one piece.
GPU_ROWS = 1024
# A GPU has room for more saved gradients: 1 GiB in bfloat16.
GPU_SAVED = 2**29


def autocast(x: Tensor) -> Tensor:
    """x in the type of autocast's products, if autocast is on. This is for products that autocast does not cast, such
    as those of Head."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        return x.to(torch.get_autocast_dtype(device))
    return x


def logp_of(logits_TV: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets, (T,) or (T, n), and (T, V) of all tokens. At least float32."""
    if logits_TV.dtype != torch.float64:
        # in bfloat16 the small differences between policy and reference would be lost
        logits_TV = logits_TV.float()
    # Also where only the targets' log-probs are needed: logsumexp rounds differently, and the log-ratio r of policy
    # and reference would not begin at exactly 0.
    logp_TV = logits_TV.log_softmax(-1)
    return logp_TV.gather(1, target_T.view(len(target_T), -1)).view_as(target_T), logp_TV


class Chunks(NamedTuple):
    """How the head cuts its work."""

    size: int  # targets of a chunk
    # how many chunks, the first ones, have their gradient saved by the forward; None: gradients are off
    n_saved: int | None
    softmax: int  # targets of one softmax
    sums_in_float32: bool  # the matrix's gradient: on a GPU; it would make a CPU slower
    entropy: bool = False  # whether to compute the entropy, too

    @classmethod
    def of(cls, device: str, V: int, entropy: bool = False) -> "Chunks":
        """The chunks for a type of device ("cuda", "cpu") and a vocabulary. torch knows whether gradients are on."""
        is_gpu = device == "cuda"
        if is_gpu:
            size = max(GPU_ROWS, HEAD_LOGITS // V)
            softmax = size
            saved_logits = GPU_SAVED
        else:
            size = max(1, HEAD_LOGITS // V)
            softmax = max(1, CPU_SOFTMAX // V)
            saved_logits = CPU_SAVED
        n_saved = None
        if torch.is_grad_enabled():
            # a CPU's chunk has a little less than HEAD_LOGITS: they are the same number for each V
            n_saved = saved_logits // max(HEAD_LOGITS, size * V)
        return cls(size, n_saved, softmax, is_gpu, entropy)


def entropy_of(logits_TV: Tensor, p_TV: Tensor, target_T: Tensor, logp_T: Tensor) -> Tensor:
    """Entropy (T,) in nats of the distributions p_TV, the softmax of these logits. The logsumexp of the logits is a
    target's logit minus its log-prob logp_T. May change the logits in place."""
    logits_TV = logits_TV.to(p_TV.dtype)
    logsumexp_T = logits_TV.gather(1, target_T[:, None])[:, 0] - logp_T
    # A token with the logit minus infinity has probability 0, and 0 times infinity would be nan.
    logits_TV.clamp_(min=torch.finfo(logits_TV.dtype).min)
    with torch.autocast(p_TV.device.type, enabled=False):  # it would round both factors to bfloat16
        return logsumexp_T - torch.linalg.vecdot(p_TV, logits_TV)


class Head(torch.autograd.Function):
    """Log-probs (T,) of the targets from hidden states (T, C) and the head's matrix (V, C), chunk by chunk; and the
    entropy (T,) of the distributions, without a gradient, or None.

    The forward saves the gradient by the logits for the first chunks; for the other chunks the backward computes
    logits and gradient again. All chunks add their part of the matrix's gradient to one tensor.

    If the matrix is frozen, the forward multiplies every chunk's gradient by the logits with the matrix immediately.
    This leaves C numbers a target, which the backward only multiplies with the gradient of the target's log-prob.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h_TC: Tensor,
        w_VC: Tensor,
        target_T: Tensor,
        cap: float | None,
        chunks: Chunks,
    ) -> tuple[Tensor, Tensor | None]:
        """cap: softcap of the logits, or None."""
        frozen = not ctx.needs_input_grad[1]
        ctx.sum_dtype = h_TC.dtype
        if chunks.sums_in_float32:
            ctx.sum_dtype = torch.promote_types(w_VC.dtype, torch.float32)
        w_VC = w_VC.to(h_TC.dtype)
        ctx.save_for_backward(h_TC, w_VC, target_T)
        ctx.cap = cap
        ctx.chunks = chunks
        # of the saved chunks the gradient of -logp: by the logits (T, V), or, if the matrix is frozen, by the hidden
        # states (T, C)
        ctx.by_logits = []
        ctx.by_hidden = []
        parts = list(zip(h_TC.split(chunks.size), target_T.split(chunks.size)))
        n_saved = 0
        if chunks.n_saved is not None:
            n_saved = len(parts) if frozen else chunks.n_saved
        logps = []
        entropies = []
        for i, (h, target) in enumerate(parts):
            save = i < n_saved
            logp, entropy, nll_grad_TV = Head.chunk(h, w_VC, target, cap, chunks, save)
            logps.append(logp)
            entropies.append(entropy)
            if save and frozen:
                ctx.by_hidden.append(nll_grad_TV @ w_VC)
            elif save:
                ctx.by_logits.append(nll_grad_TV)
        if not chunks.entropy:
            return torch.cat(logps), None
        entropy_T = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy_T)
        return torch.cat(logps), entropy_T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_T: Tensor, _: None) -> tuple:
        """g_T: gradient of the loss by the log-probs. The entropy has none."""
        h_TC, w_VC, target_T = ctx.saved_tensors
        nll_g_T1 = -g_T[:, None]  # the gradient of the loss by -logp
        if not ctx.needs_input_grad[1]:
            dh_TC = (nll_g_T1 * torch.cat(ctx.by_hidden)).to(h_TC.dtype)
            return dh_TC, None, None, None, None
        saved = iter(ctx.by_logits)
        ctx.by_logits = None  # the graph may outlive this call; these large tensors should not
        dh_TC = torch.empty_like(h_TC)
        dw_VC = torch.zeros_like(w_VC, dtype=ctx.sum_dtype)
        # g multiplies the (T, C) side of each product, which is smaller than (T, V)
        gh_TC = (nll_g_T1 * h_TC).to(h_TC.dtype)
        size = ctx.chunks.size
        parts = zip(h_TC.split(size), gh_TC.split(size), target_T.split(size), dh_TC.split(size))
        for h, gh, target, dh in parts:
            nll_grad_TV = next(saved, None)
            if nll_grad_TV is None:
                chunks = ctx.chunks._replace(entropy=False)
                *_, nll_grad_TV = Head.chunk(h, w_VC, target, ctx.cap, chunks, True)
            torch.mm(nll_grad_TV, w_VC, out=dh)
            add_product(dw_VC, nll_grad_TV.T, gh)
        return (nll_g_T1 * dh_TC).to(h_TC.dtype), dw_VC, None, None, None

    @staticmethod
    def chunk(
        h_TC: Tensor,
        w_VC: Tensor,
        target_T: Tensor,
        cap: float | None,
        chunks: Chunks,
        need_grad: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probs (T,) of the targets, the entropy (T,) or None, and the gradient (T, V) of -logp by the logits:
        softmax - one-hot, times the softcap's derivative. The gradient is None unless need_grad."""
        logits_TV = h_TC @ w_VC.T
        logps = []
        entropies = []
        for logits, target in zip(logits_TV.split(chunks.softmax), target_T.split(chunks.softmax)):
            capped = logits
            if cap is not None:
                tanh = (logits / cap).tanh_()
                capped = cap * tanh
            logp, logp_TV = logp_of(capped, target)
            logps.append(logp)
            if need_grad or chunks.entropy:
                p_TV = logp_TV.exp_()  # in place: log-probs become probabilities
            if chunks.entropy:  # now: the next lines change the probabilities in place
                entropies.append(entropy_of(capped, p_TV, target, logp))
            if need_grad:
                row = torch.arange(len(target), device=target.device)
                p_TV[row, target] -= 1  # probabilities become the gradient
                if cap is not None:
                    p_TV *= 1 - tanh.square()
                logits.copy_(p_TV)  # in place: the logits are not needed any more
        entropy = torch.cat(entropies) if chunks.entropy else None
        nll_grad_TV = logits_TV if need_grad else None
        return torch.cat(logps), entropy, nll_grad_TV


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b, added up in the dtype of `out`."""
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    elif out.is_cuda and multiplies_bfloat16(out.device):
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:  # on a CPU, and on an older GPU, addmm has no out_dtype
        out += a.to(out.dtype) @ b.to(out.dtype)

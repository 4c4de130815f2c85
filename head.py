"""The LM head: log-probs of target tokens, a chunk at a time, so that T x V logits never exist.

Shape letters: T targets, C width, V vocabulary.
"""

from typing import NamedTuple

import torch

# The head makes so many logits at a time (64 MiB in float32), whatever N is. It saves the gradients
# of the first ones for its backward and recomputes the rest. Its softmax takes fewer: a CPU gets
# blocks over 32 MiB page by page, and a smaller head would round the matrix's gradient more often.
HEAD_LOGITS, HEAD_SAVED, HEAD_SOFTMAX = 2**24, 2**26, 2**22
# A GPU reaches its rate from so many rows on, has room for more, and takes a softmax in one piece.
GPU_ROWS, GPU_SAVED = 1024, 2**29


def logp_of(logits_TV, target_T, all_tokens: bool = True):
    """-> log-probs of the targets, and of all tokens (None where nobody asks for them)."""
    if logits_TV.dtype != torch.float64:
        logits_TV = logits_TV.float()  # bfloat16 would lose the differences of a log-ratio
    if not all_tokens:
        return logits_TV.gather(1, target_T[:, None])[:, 0] - logits_TV.logsumexp(-1), None
    logp_TV = logits_TV.log_softmax(-1)
    return logp_TV.gather(1, target_T[:, None])[:, 0], logp_TV


class Chunks(NamedTuple):
    """How the head cuts its work."""

    size: int  # targets of a chunk
    saved: int | None  # so many chunks save their gradient; None: none is wanted
    softmax: int  # targets of a softmax
    gpu: bool  # sum in float32, and skip what nobody asks for: a CPU would be slower

    @classmethod
    def of(cls, device: str, V: int) -> "Chunks":
        gpu = device == "cuda"
        size = max(GPU_ROWS if gpu else 1, HEAD_LOGITS // V)
        saved = (GPU_SAVED if gpu else HEAD_SAVED) // max(HEAD_LOGITS, size * V)
        softmax = size if gpu else max(1, HEAD_SOFTMAX // V)
        return cls(size, saved if torch.is_grad_enabled() else None, softmax, gpu)


class Head(torch.autograd.Function):
    """Log-probs of the targets (T,), a chunk of them at a time: T x V logits never exist.

    The first chunks save their gradient by the logits, the rest recompute it. The matrix's gradient
    is added up in one place. A frozen matrix needs neither: a token's gradient by h is then a
    number times a vector that the forward knows.
    """

    @staticmethod
    def forward(ctx, h_TC, w_VC, target_T, cap, chunks: Chunks):
        frozen, wide = not ctx.needs_input_grad[1], w_VC.dtype
        w_VC = w_VC.to(h_TC.dtype)
        ctx.save_for_backward(h_TC, w_VC, target_T)
        ctx.cap, ctx.chunks, ctx.grads, logp = cap, chunks, [], []
        ctx.sum_dtype = torch.promote_types(wide, torch.float32) if chunks.gpu else w_VC.dtype
        for i, (h, target) in enumerate(zip(h_TC.split(chunks.size), target_T.split(chunks.size))):
            save = chunks.saved is not None and (frozen or i < chunks.saved)
            logp_T, grad_TV = Head.chunk(h, w_VC, target, cap, chunks, save)
            logp.append(logp_T)
            if save:
                ctx.grads.append(grad_TV @ w_VC if frozen else grad_TV)
        return torch.cat(logp)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g_T):
        h_TC, w_VC, target_T = ctx.saved_tensors
        g_T1 = -g_T[:, None]
        if not ctx.needs_input_grad[1]:
            return (g_T1 * torch.cat(ctx.grads)).to(h_TC.dtype), *[None] * 4
        saved, ctx.grads = iter(ctx.grads), None
        dh_TC, dw_VC = torch.empty_like(h_TC), torch.zeros_like(w_VC, dtype=ctx.sum_dtype)
        gh_TC = (g_T1 * h_TC).to(h_TC.dtype)  # g goes to the narrow side of each product
        parts = (x.split(ctx.chunks.size) for x in (h_TC, gh_TC, target_T, dh_TC))
        for h, gh, target, dh in zip(*parts):
            grad_TV = next(saved, None)
            if grad_TV is None:
                grad_TV = Head.chunk(h, w_VC, target, ctx.cap, ctx.chunks, True)[1]
            torch.mm(grad_TV, w_VC, out=dh)
            add_product(dw_VC, grad_TV.T, gh)
        return (g_T1 * dh_TC).to(h_TC.dtype), dw_VC, *[None] * 3

    @staticmethod
    def chunk(h_TC, w_VC, target_T, cap, chunks: Chunks, need_grad: bool):
        """-> log-probs of the targets; minus their gradient by the logits: softmax - one-hot."""
        logits_TV, logp, every = h_TC @ w_VC.T, [], need_grad or not chunks.gpu
        for logits, target in zip(logits_TV.split(chunks.softmax), target_T.split(chunks.softmax)):
            tanh = None if cap is None else (logits / cap).tanh_()
            logp_T, grad = logp_of(logits if cap is None else cap * tanh, target, every)
            logp.append(logp_T)
            if need_grad:
                grad.exp_()[torch.arange(len(target), device=target.device), target] -= 1
                if cap is not None:
                    grad *= 1 - tanh.square()
                logits.copy_(grad)
        return torch.cat(logp), logits_TV if need_grad else None


def add_product(out, a, b) -> None:
    """out += a @ b, added up in out's own precision."""
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    elif out.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:  # a CPU's product has no wider result
        out += a.to(out.dtype) @ b.to(out.dtype)

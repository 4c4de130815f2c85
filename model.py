"""A GPT: its log-probs on packed Rows, its LoRA switch, its weights in and out.

Blocks, LoRA layers and weight conversion are litgpt's. Ours are: attention over packed prompts that share their
completions (Packed) or over a key/value cache (Cache), a head that runs on target positions only, and GPT-2.

Shape letters: B examples, K completions, N packed tokens, T targets, C width, H heads, D head size, V vocabulary.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import math
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import litgpt.lora
import litgpt.model
import torch
import torch.nn.functional as F
import yaml
from litgpt.scripts import convert_hf_checkpoint as from_hf
from litgpt.scripts import convert_lit_checkpoint as to_hf
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from data import BadInput, Rows, local

HEAD_LOGITS = 2**24  # the head makes this many logits at a time (64 MiB in float32), whatever N and V are,
HEAD_KEPT = 2**26  # and keeps this many's gradients for its backward; the rest it makes again
HEAD_SOFT = 2**22  # its softmax takes so many: a CPU gets blocks of 32 MiB and more from the system, page by page
# (fewer logits at a time instead would add the matrix's gradient up in more bfloat16 roundings)
TOGETHER = 128  # tokens of examples that share a call of attention on a CPU


@dataclass
class Lora:
    """Low-rank adapters (arXiv 2106.09685). With rank > 0 the reference is the model with its adapters off."""

    rank: int = 0
    """Rank of the adapters; 0 trains every weight."""
    alpha: int = 16
    """The adapters' output is scaled by alpha / rank."""
    dropout: float = 0.0
    """Dropout before the adapters. Above 0, policy and reference differ by design, even at step 0."""
    targets: list[str] = field(default_factory=lambda: ["query", "key", "value", "projection", "mlp"])
    """Which linear layers get adapters: any of query, key, value, projection, mlp, head."""


# ---- attention: over a packed sequence, or over a cache ------------------------------------------------------------


class Prompts:
    """What a forward leaves of its prompts for a later one, without gradient, over the same prompts with other
    completions: keys and values by layer, and last hidden states. Computed once, they serve both."""

    def __init__(self):
        self.rows, self.kept = None, {}


class Packed:
    """Who sees whom in a packed sequence. Lives for one forward pass; what it prepares, by window, serves all layers.

    With `prompts` of an earlier forward only completions are computed: M queries, on the keys and values of all N.
    """

    def __init__(self, rows: Rows, prompts: Prompts | None = None):
        self.rows, self.prompts, self.made = rows, prompts, {}
        self.query_M = None  # None: all N tokens ask
        if prompts is not None and prompts.rows is None:
            prompts.rows = rows
        elif prompts is not None:
            same = [parts[0] for parts in rows.parts] == [parts[0] for parts in prompts.rows.parts]
            assert same, "other prompts than those computed before"
            self.query_M = rows.branch_N.nonzero()[:, 0]
            self.from_P, self.to_P = ((r.branch_N == 0).nonzero()[:, 0] for r in (prompts.rows, rows))

    def asking(self, x_N):
        return x_N if self.query_M is None else x_N[self.query_M]

    def whole(self, name, x, dim: int):
        """x of the tokens that ask, with its prompts' part put back, which an earlier forward left."""
        if self.prompts is None:
            return x
        before = self.prompts.kept.setdefault(name, x.detach())
        if self.query_M is None:
            return x
        whole = x.new_empty([*x.shape[:dim], len(self.rows.token_N), *x.shape[dim + 1 :]])
        prompt = before.index_select(dim, self.from_P)
        return whole.index_copy_(dim, self.query_M, x).index_copy_(dim, self.to_P, prompt)

    def see(self, i, j, window: int | None):
        """Whether token i sees token j: in its example, not after it, in the prompt or its own completion."""
        position, branch, example = self.rows.position_N, self.rows.branch_N, self.rows.example_N
        mine = (example[i] == example[j]) & (j <= i) & ((branch[j] == 0) | (branch[j] == branch[i]))
        return mine if window is None else mine & (position[i] - position[j] < window)

    def tiles(self, window: int | None):
        """How the CPU goes through the sequence: short examples together under one mask, a long one part by part, so
        that little is computed to be masked. -> tokens of each group of examples, [(group, queries, keys, mask)]:
        a call's keys begin where its group does; no mask stands for plain causal."""
        rows, sizes, tiles, groups, at, m = self.rows, [], [], [], 0, 0
        for parts in rows.parts:
            if groups and sum(map(sum, groups[-1])) + sum(parts) <= TOGETHER:
                groups[-1].append(parts)
            else:
                groups.append([parts])
        every = torch.arange(len(rows.token_N), device=rows.token_N.device)
        query_M = self.asking(every)
        for group in groups:
            sizes.append(sum(map(sum, group)))
            alone = len(group) == 1 and (rows.length_BK.shape[1] > 1 or self.query_M is not None)
            for k, end in enumerate(itertools.accumulate(group[0]) if alone else [sizes[-1]]):
                n = int(torch.searchsorted(query_M, at + end))
                if n > m:
                    causal = len(group) == 1 and k == 0 and self.query_M is None and window is None
                    mask = None if causal else self.see(query_M[m:n, None], every[None, at : at + end], window)
                    tiles.append((len(sizes) - 1, n - m, end, mask))
                m = n
            at += sizes[-1]
        return sizes, tiles

    def block_mask(self, window: int | None, size: int = 128):
        """The same rule for FlexAttention. Which blocks it visits is worked out here, from each example's start:
        create_block_mask would try the rule on all M x N pairs first."""
        from torch.nn.attention.flex_attention import BlockMask

        n, sizes, query_M = len(self.rows.token_N), torch.tensor(self.rows.sizes), self.query_M

        def see(_b, _h, i, j):
            return self.see(i if query_M is None else query_M[i], j, window)

        start_M = self.asking((sizes.cumsum(0) - sizes).repeat_interleave(sizes).to(self.rows.token_N.device))
        token_M = self.asking(torch.arange(n, device=start_M.device))
        m = len(token_M)
        ends = torch.arange(size - 1, m + size - 1, size, device=start_M.device).clamp(max=m - 1)
        first, last = start_M[::size] // size, token_M[ends] // size  # a block of queries looks back to there
        every = torch.arange(-(-n // size), device=start_M.device)
        index = (first[:, None] + every).clamp(max=len(every) - 1)
        count, index = (x.to(torch.int32)[None, None] for x in (last - first + 1, index))
        return BlockMask.from_kv_blocks(count, index, None, None, size, see, (m, n))

    def kept(self, make, window: int | None):
        if window not in self.made:
            self.made[window] = make(window)
        return self.made[window]

    def attend(self, attn, q, k, v):
        """q, k, v (1, H, M, D) -> (1, H, M, D). The one place that chooses between the CPU and the GPU path."""
        k, v = self.whole((attn, "k"), k, 2), self.whole((attn, "v"), v, 2)
        if q.device.type == "cuda" and q.dtype != torch.float64:  # FlexAttention has no float64
            return self.flex(attn, q, k, v, compiled=True)
        return self.tiled(attn, q, k, v)

    def tiled(self, attn, q, k, v):
        sizes, tiles = self.kept(self.tiles, attn.window)
        groups = list(zip(k.split(sizes, dim=2), v.split(sizes, dim=2)))  # split, not slices: its backward is one cat
        out = []
        for mine, (group, _, keys, mask) in zip(q.split([queries for _, queries, _, _ in tiles], dim=2), tiles):
            kv = groups[group] if keys == sizes[group] else [x[:, :, :keys] for x in groups[group]]
            out.append(sdpa(attn, mine, *kv, mask))
        return torch.cat(out, dim=2)

    def flex(self, attn, q, k, v, compiled):
        softcap = attn.config.attention_logit_softcapping
        score = None if softcap is None else lambda s, b, h, i, j: softcap * torch.tanh(s / softcap)
        mask = self.kept(self.block_mask, attn.window)
        return flex_attention(compiled)(q, k, v, score, mask, scale=scale(attn), enable_gqa=k.shape[1] < q.shape[1])


@functools.cache
def flex_attention(compiled: bool):
    from torch.nn.attention.flex_attention import flex_attention as flex

    return torch.compile(flex, dynamic=True) if compiled else flex


def scale(attn) -> float:
    return attn.mscale**2 / math.sqrt(attn.config.attention_scores_scalar or attn.config.head_size)


def sdpa(attn, q, k, v, mask):
    """Attention under a boolean mask (True: look), or causal where mask is None and q and k are as long."""
    if k.shape[1] < q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    softcap = attn.config.attention_logit_softcapping
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale(attn))
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    score = softcap * torch.tanh(q @ k.mT * scale(attn) / softcap)
    return score.masked_fill(~mask, -torch.inf).float().softmax(-1).to(v.dtype) @ v


class Cache:
    """Keys and values of B sequences for generation. Slot p holds position p, so ragged prompts need no padding: what
    stands behind a row's own position is not seen, and is overwritten when the row gets there.

    The first forward takes the prompts packed, as Rows; each later one a token per row (see at). `last_B` says which of
    a forward's tokens predict the rows' next ones.
    """

    def __init__(self, rows: Rows, slots: int):
        self.slots, self.store, self.packed, self.seen = slots, {}, Packed(rows), {}
        self.token_BT, self.position_BT, self.last_B = rows.token_N[None], rows.position_N[None], rows.source_T
        self.row_B = torch.arange(len(rows.sizes), device=rows.token_N.device)

    def at(self, token_B, position_B):
        """The next forward's tokens. No row looks behind the last one's slot."""
        self.token_BT, self.position_BT, self.upto = token_B[:, None], position_B[:, None], int(position_B.max()) + 1
        self.last_B, self.packed, self.seen = self.row_B, None, {}
        return self

    def keep(self, row_B) -> torch.Tensor:
        """Drop all but these rows. -> the kept ones in their new order: only those behind move, into the gaps."""
        n = len(row_B)
        self.row_B, order_B = self.row_B[:n], self.row_B[:n].clone()
        gaps, movers = order_B[~torch.isin(order_B, row_B)], row_B[row_B >= n]
        for kv in self.store.values():
            for x in kv:
                x[gaps] = x[movers]
        self.store = {layer: tuple(x[:n] for x in kv) for layer, kv in self.store.items()}
        order_B[gaps] = movers
        return order_B

    def see(self, window: int | None):
        """(B, 1, 1, slots): whether a row looks at a slot. The same for all layers with this window."""
        if window not in self.seen:
            j = torch.arange(self.upto, device=self.position_BT.device)
            see = j <= self.position_BT
            if window is not None:
                see &= self.position_BT - j < window
            self.seen[window] = see[:, None, None]
        return self.seen[window]

    def attend(self, attn, q, k, v):
        if self.packed:
            sizes = self.packed.rows.sizes
            self.store[attn] = tuple(x.new_zeros(len(sizes), x.shape[1], self.slots, x.shape[3]) for x in (k, v))
            for kept, new in zip(self.store[attn], (k, v)):
                for row, x in zip(kept, new[0].split(sizes, dim=1)):
                    row[:, : x.shape[1]] = x
            return self.packed.attend(attn, q, k, v)
        for kept, new in zip(self.store[attn], (k, v)):
            kept[self.row_B, :, self.position_BT[:, 0]] = new[:, :, 0]
        k, v = (x[:, :, : self.upto] for x in self.store[attn])
        return sdpa(attn, q.reshape(*k.shape[:2], -1, k.shape[3]), k, v, self.see(attn.window)).reshape(q.shape)


# ---- the head -------------------------------------------------------------------------------------------------------


def _logp(logits_TV, target_T):
    """-> log-probs of the targets, and of all tokens."""
    if logits_TV.dtype != torch.float64:
        logits_TV = logits_TV.float()  # log-softmax in bfloat16 would lose the differences that r is made of
    logp_TV = logits_TV.log_softmax(-1)
    return logp_TV.gather(1, target_T[:, None])[:, 0], logp_TV


class Head(torch.autograd.Function):
    """Log-probs of the targets (T,), `size` tokens at a time: nobody holds T x V logits.

    The first `keep` chunks keep their gradient by the logits (None: no gradient is wanted), the rest make it again. The
    matrix's gradient is added up in one place. A frozen matrix needs nothing again: a token's gradient by h is then a
    number times a vector that is known in the forward.
    """

    @staticmethod
    def forward(ctx, h_TC, w_VC, target_T, cap, size, keep):
        ctx.save_for_backward(h_TC, w_VC, target_T)
        ctx.cap, ctx.size, ctx.kept, frozen = cap, size, [], not ctx.needs_input_grad[1]
        logp = []
        for i, (h, target) in enumerate(zip(h_TC.split(size), target_T.split(size))):
            wanted = keep is not None and (frozen or i < keep)
            logp_T, slope_TV = Head.chunk(h, w_VC, target, cap, wanted)
            logp.append(logp_T)
            if wanted:
                ctx.kept.append(slope_TV @ w_VC if frozen else slope_TV)
        return torch.cat(logp)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g_T):
        h_TC, w_VC, target_T = ctx.saved_tensors
        g_T1 = -g_T[:, None]
        if not ctx.needs_input_grad[1]:
            return (g_T1 * torch.cat(ctx.kept)).to(h_TC.dtype), *[None] * 5
        kept, ctx.kept = iter(ctx.kept), None
        dh_TC, dw_VC = torch.empty_like(h_TC), torch.zeros_like(w_VC)
        gh_TC = (g_T1 * h_TC).to(h_TC.dtype)  # g goes to the narrow side of each product
        for h, gh, target, dh in zip(*(x.split(ctx.size) for x in (h_TC, gh_TC, target_T, dh_TC))):
            slope_TV = next(kept, None)
            if slope_TV is None:
                slope_TV = Head.chunk(h, w_VC, target, ctx.cap, True)[1]
            torch.mm(slope_TV, w_VC, out=dh)
            dw_VC.addmm_(slope_TV.T, gh)
        return (g_T1 * dh_TC).to(h_TC.dtype), dw_VC, *[None] * 4

    @staticmethod
    def chunk(h_TC, w_VC, target_T, cap, wanted: bool):
        """-> log-probs of the targets; minus their gradient by the logits, softmax less one at the target."""
        logits_TV, logp = h_TC @ w_VC.T, []
        size = max(1, HEAD_SOFT // len(w_VC))
        for logits, target in zip(logits_TV.split(size), target_T.split(size)):
            soft = logits if cap is None else (logits / cap).tanh_()
            logp_T, slope = _logp(soft if cap is None else cap * soft, target)
            logp.append(logp_T)
            if wanted:
                slope.exp_()[torch.arange(len(target), device=target.device), target] -= 1
                if cap is not None:
                    slope *= 1 - soft.square()
                logits.copy_(slope)
        return torch.cat(logp), logits_TV if wanted else None


# ---- the model ------------------------------------------------------------------------------------------------------


class _Packing:
    """Turns litgpt's GPT (plain or LoRA) into ours: forward takes Rows or a Cache."""

    recompute = False  # blocks run again in the backward pass instead of keeping what it needs

    def __init__(self, config):
        super().__init__(config)
        if config.latent_attention:
            raise BadInput(f"model: {config.name}: latent attention is not supported")
        if config.rope_n_elem == 0:  # GPT-2: learned positions instead of rotary ones
            self.transformer["wpe"] = nn.Embedding(config.block_size, config.n_embd)
        for block in self.transformer.h:
            attn = block.attn
            attn.window = config.sliding_window_size if attn.apply_sliding_window_attention else None
            attn.forward = functools.partial(_attend, attn)

    def forward(self, x: Rows | Cache, prompts: Prompts | None = None) -> torch.Tensor:
        """Rows -> (B, K) summed log-probs of the completions; Cache -> (B, V) next-token logits.

        `prompts` is filled by a first forward over Rows; later ones over the same prompts read it.
        """
        if isinstance(x, Rows):
            return self.logps(x, prompts)
        return self.head(self.hidden(x.token_BT, x.position_BT, x).flatten(0, 1)[x.last_B]).float()

    @property
    def tied(self) -> bool:
        return getattr(self.lm_head, "linear", self.lm_head).weight is self.transformer.wte.weight

    def named(self) -> dict[str, nn.Parameter]:
        """Parameters by name; a tied head only as the embedding that it is."""
        if hasattr(self, "reshard"):  # after a forward without backward FSDP2 leaves copies in its root's place
            self.reshard()
        named = dict(self.named_parameters(remove_duplicate=False))
        return {n: p for n, p in named.items() if not (self.tied and n in ("lm_head.weight", "lm_head.linear.weight"))}

    def hidden(self, token_BT, position_BT, mask):
        x = self.transformer.wte(token_BT)
        if self.config.scale_embeddings:
            x = x * torch.tensor(self.config.n_embd**0.5, dtype=x.dtype)
        if "wpe" in self.transformer:
            x = x + self.transformer.wpe(position_BT)
        cos, sin = self.cos[position_BT], self.sin[position_BT]
        for i, block in enumerate(self.transformer.h):
            rope = (cos, sin)
            if self.config.rope_indices is not None:  # Gemma 3: another base in its local layers
                rope = tuple(r[..., self.config.rope_indices[i]] for r in rope)
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, *rope, mask, use_reentrant=False)
            else:
                x = block(x, *rope, mask)
        return self.transformer.ln_f(x)

    def head(self, h_TC):
        logits_TV = self.lm_head(h_TC)
        cap = self.config.final_logit_softcapping
        return logits_TV if cap is None else cap * torch.tanh(logits_TV / cap)

    def logp(self, h_TC, target_T):
        """Log-probs of the targets (T,)."""
        linear, device = getattr(self.lm_head, "linear", self.lm_head), h_TC.device.type
        size = max(1, HEAD_LOGITS // self.config.padded_vocab_size)
        if linear.bias is None and not getattr(self.lm_head, "r", 0):
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else h_TC.dtype
            keep = HEAD_KEPT // HEAD_LOGITS if torch.is_grad_enabled() else None
            cap = self.config.final_logit_softcapping
            return Head.apply(h_TC.to(dtype), linear.weight.to(dtype), target_T, cap, size, keep)

        def chunk(h_TC, target_T):  # a bias or adapters: by autograd, all made again
            return _logp(self.head(h_TC), target_T)[0]

        chunks = zip(h_TC.split(size), target_T.split(size))
        return torch.cat([checkpoint(chunk, *c, use_reentrant=False) for c in chunks])

    def logps(self, rows: Rows, prompts: Prompts | None = None):
        packed = Packed(rows, prompts)
        h_NC = self.hidden(packed.asking(rows.token_N)[None], packed.asking(rows.position_N)[None], packed)[0]
        h_TC = packed.whole("h", h_NC, 0)[rows.source_T]  # the head never sees a position that predicts nothing
        logp_T = self.logp(h_TC, rows.target_T)
        B, K = rows.length_BK.shape
        # per example K completions and, last, the prompt itself (empty unless data.score_prompt)
        logp_BS = logp_T.new_zeros(B * (K + 1)).index_add(0, rows.segment_T, logp_T).view(B, K + 1)
        return logp_BS[:, :K] + logp_BS[:, K:]


def _attend(attn, x, cos, sin, seen: Packed | Cache, *_):
    """litgpt's attention, without its copies: grouped keys stay as few as they are, and what is not rotated is left."""
    c, D, n = attn.config, attn.config.head_size, attn.config.rope_n_elem
    q, k, v = attn.qkv(x).split([D * heads for heads in (c.n_head, c.n_query_groups, c.n_query_groups)], dim=-1)
    if c.norm_qk and c.norm_qk_type == "olmo2":
        q, k = attn.norm_q(q), attn.norm_k(k)
    q, k, v = (y.unflatten(-1, (-1, D)).transpose(1, 2) for y in (q, k, v))  # (1, H, M, D) or (B, H, 1, D)
    if c.norm_qk and c.norm_qk_type == "default":
        q, k = attn.norm_q(q), attn.norm_k(k)
    if n:
        rotate = litgpt.model.apply_rope_interleave if c.rope_interleave else litgpt.model.apply_rope
        q, k = (
            rotate(y, cos, sin) if n == D else torch.cat([rotate(y[..., :n], cos, sin), y[..., n:]], -1) for y in (q, k)
        )
    return attn.proj(seen.attend(attn, q, k, v).transpose(1, 2).flatten(2))


class GPT(_Packing, litgpt.model.GPT):
    pass


class LoraGPT(_Packing, litgpt.lora.GPT):
    pass


@contextlib.contextmanager
def lora_off(model: nn.Module):
    """The model without its adapters, to the bit. litgpt's layers skip the branch when told that it is merged."""
    layers = [m for m in model.modules() if isinstance(m, litgpt.lora.LoRALayer)]
    assert layers, "no LoRA layers here: the reference would be the policy itself"
    for layer in layers:
        layer.merged = True
    try:
        yield
    finally:
        for layer in layers:
            layer.merged = False


@torch.no_grad()
def restart_lora(model: nn.Module, seed: int, place) -> None:
    """Adapters as at their beginning: A random, alike on all ranks, B zero. `place` lays a tensor out as another."""
    generator = torch.Generator().manual_seed(seed)
    for m in model.modules():
        if isinstance(m, litgpt.lora.LoRALinear) and hasattr(m, "lora_A"):
            bound = 1 / math.sqrt(m.lora_A.shape[1])  # litgpt's: kaiming_uniform with a = sqrt(5)
            a = torch.rand(m.lora_A.shape, generator=generator, dtype=torch.float32) * 2 * bound - bound
            m.lora_A.copy_(place(a.to(m.lora_A.dtype), m.lora_A))
            m.lora_B.zero_()


@torch.no_grad()
def hold_in_bfloat16(model: nn.Module) -> None:
    """Hold matrices in the bfloat16 that autocast makes of them at each use: the same log-probs in half the memory."""
    for m in model.modules():
        if isinstance(m, nn.Linear) and m.weight is not model.transformer.wte.weight:
            m.to(torch.bfloat16)


def fold_lora(state: dict, model: nn.Module) -> dict:
    """Full weights by their plain names: each adapter added to its base matrix. `state` may be gathered from shards."""
    state = dict(state)
    for name, m in model.named_modules():
        if isinstance(m, litgpt.lora.LoRALinear):
            a, b = state.pop(f"{name}.lora_A", None), state.pop(f"{name}.lora_B", None)
            if a is not None:
                w = state[f"{name}.linear.weight"]
                state[f"{name}.linear.weight"] = (w + _delta(m, a, b)).to(w.dtype)
    return {name.replace(".linear.", "."): x for name, x in state.items()}


def _delta(m, a, b):
    if not isinstance(m, litgpt.lora.LoRAQKVLinear):
        return b @ a * m.scaling
    sizes = [m.head_size * m.n_head, m.head_size * m.n_query_groups, m.head_size * m.n_query_groups]
    on = [size for size, enabled in zip(sizes, m.enable_lora) if enabled]
    parts = iter([y @ x for x, y in zip(a.chunk(len(on)), b.split(on))])  # q, k, v have an A each
    zeros = [a.new_zeros(size, a.shape[1]) for size in sizes]
    return torch.cat([next(parts) if enabled else z for enabled, z in zip(m.enable_lora, zeros)]) * m.scaling


def fingerprint(state: dict) -> str:
    """A hash of a model's weights, names and shapes included: how a run knows its reference again."""
    h = hashlib.sha256()
    for name, x in sorted(state.items()):
        h.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        h.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return h.hexdigest()


# ---- weights in and out ---------------------------------------------------------------------------------------------


def fetch(source: str, what: str = "model") -> Path:
    """The folder behind a local path, a run of ours (its `final`), or a Hugging Face id (downloaded)."""
    folder = local(source)
    if (folder / "settings.yaml").exists() and not (folder / "config.json").exists():
        if not (folder / "final").is_dir():
            raise BadInput(f"{what}: {source}: a run without a `final` folder: resume it, or let it end")
        folder = folder / "final"
    if folder.is_dir():
        return folder
    if folder.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+|[\w-]+", source):
        raise BadInput(f"{what}: {source}: no such folder")
    from huggingface_hub import snapshot_download

    try:
        files = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
        return Path(snapshot_download(source, allow_patterns=files, ignore_patterns=["consolidated*", "*/*"]))
    except Exception as e:  # the hub client has a dozen ways to say that it could not
        raise BadInput(
            f"{what}: {source}: no such folder here, and not fetched from huggingface.co ({type(e).__name__}); without "
            f"a network, download it elsewhere and give the folder that holds config.json and model.safetensors"
        ) from e


GPT2_NAMES = {
    "wte": "transformer.wte",
    "wpe": "transformer.wpe",
    "lm_head": "lm_head",
    "ln_f": "transformer.ln_f",
    "ln_1": "norm_1",
    "ln_2": "norm_2",
    "attn.c_attn": "attn.qkv",
    "attn.c_proj": "attn.proj",
    "mlp.c_fc": "mlp.fc",
    "mlp.c_proj": "mlp.proj",
}


def gpt2_from_hf(config, state, weights):
    for name, x in weights.items():
        name = name.removeprefix("transformer.")
        if re.search(r"\.attn\.(masked_)?bias$", name):
            continue  # old files carry causal masks
        layer, part, kind = re.fullmatch(r"(h\.\d+\.)?(.+)\.(weight|bias)", name).groups()
        prefix = f"transformer.{layer}" if layer else ""
        state[f"{prefix}{GPT2_NAMES[part]}.{kind}"] = x.T.contiguous() if ".c_" in part and kind == "weight" else x
    state.setdefault("lm_head.weight", state["transformer.wte.weight"])


def gpt2_to_hf(config, state, weights):
    back = {ours: theirs for theirs, ours in GPT2_NAMES.items()}
    for name, x in weights.items():
        layer, part, kind = re.fullmatch(r"(?:transformer\.(h\.\d+\.))?(.+)\.(weight|bias)", name).groups()
        theirs = back[part]
        x = x.T.contiguous() if ".c_" in theirs and kind == "weight" else x
        state[name if theirs == "lm_head" else f"transformer.{layer or ''}{theirs}.{kind}"] = x


def _gpt2(c):
    scaled = c.get("scale_attn_weights", True) and not c.get("scale_attn_by_inverse_layer_idx")
    if c.get("activation_function", "gelu_new") != "gelu_new" or not scaled:
        raise BadInput("config.json: activation_function or scale_attn_...: not GPT-2's")
    return dict(
        block_size=c["n_positions"], n_layer=c["n_layer"], n_embd=c["n_embd"], n_head=c["n_head"], bias=True,
        norm_eps=c["layer_norm_epsilon"], intermediate_size=c.get("n_inner"), rotary_percentage=0.0,
        parallel_residual=False, gelu_approximate="tanh",
    )  # fmt: skip


def _llama(c):
    rope = c.get("rope_parameters") or {}  # transformers 5 moved rope_theta and rope_scaling in here
    scaling = c.get("rope_scaling") or rope
    kind, adjustments = scaling.get("rope_type", scaling.get("type", "default")), None
    if kind == "llama3":
        adjustments = {k: scaling[k] for k in ("factor", "low_freq_factor", "high_freq_factor")}
        adjustments["original_max_seq_len"] = scaling["original_max_position_embeddings"]
    elif kind == "linear":
        adjustments = {"factor": scaling["factor"]}
    elif kind != "default":
        raise BadInput(f"config.json: rope_scaling: {kind} is not supported")
    if c.get("hidden_act", "silu") != "silu":
        raise BadInput(f"config.json: hidden_act: {c['hidden_act']} is not supported, only silu")
    kind = c["model_type"]
    if kind in ("qwen2", "qwen3") and c.get("use_sliding_window"):
        raise BadInput(f"config.json: use_sliding_window: not supported for {kind}")
    window = c.get("sliding_window") if kind == "mistral" else None
    return dict(
        block_size=c["max_position_embeddings"], n_layer=c["num_hidden_layers"], n_embd=c["hidden_size"],
        n_head=c["num_attention_heads"], n_query_groups=c.get("num_key_value_heads"), head_size=c.get("head_dim"),
        rotary_percentage=1.0, parallel_residual=False, bias=bool(c.get("mlp_bias")),
        attn_bias=c.get("attention_bias", kind == "qwen2"), norm_qk=kind == "qwen3", norm_class_name="RMSNorm",
        norm_eps=c["rms_norm_eps"], mlp_class_name="LLaMAMLP", intermediate_size=c["intermediate_size"],
        rope_base=rope.get("rope_theta") or c.get("rope_theta", 10000), rope_adjustments=adjustments,
        sliding_window_size=window,
    )  # fmt: skip


# model_type in config.json -> (litgpt Config arguments, weights in, weights out); other families by litgpt's own names
FAMILIES = {
    "gpt2": (_gpt2, gpt2_from_hf, gpt2_to_hf),
    "llama": (_llama, lambda c, s, w: from_hf.copy_weights_hf_llama(c, {}, s, w), to_hf.copy_weights_llama),
    "mistral": (_llama, lambda c, s, w: from_hf.copy_weights_hf_llama(c, {}, s, w), to_hf.copy_weights_llama),
    "qwen2": (_llama, lambda c, s, w: from_hf.copy_weights_qwen_2_5(c, {}, s, w), to_hf.copy_weights_qwen_2_5),
    "qwen3": (_llama, lambda c, s, w: from_hf.copy_weights_qwen_3(c, {}, s, w), to_hf.copy_weights_qwen_3),
}
LITGPT = {  # how litgpt's own converters choose, by the start of the model's name
    "gemma-2": (lambda c, s, w: from_hf.copy_weights_gemma_2({}, s, w), to_hf.copy_weights_gemma_2),
    "gemma-3": (lambda c, s, w: from_hf.copy_weights_gemma_3({}, s, w, config=c), to_hf.copy_weights_gemma_3),
    "phi": (lambda c, s, w: from_hf.copy_weights_phi(c, {}, s, w), to_hf.copy_weights_phi),
    "olmo-2": (lambda c, s, w: from_hf.copy_weights_olmo2(c, {}, s, w), to_hf.copy_weights_olmo2),
    "falcon": (from_hf.copy_weights_falcon, to_hf.copy_weights_falcon),
    "pythia": (from_hf.copy_weights_gpt_neox, to_hf.copy_weights_gpt_neox),
    "gemma": (FAMILIES["llama"][1], to_hf.copy_weights_llama),
}


def read_config(folder: Path) -> tuple[dict, dict, tuple]:
    """(litgpt Config arguments, config.json, (weights in, weights out)) of a Hugging Face folder."""
    try:
        c = json.loads((folder / "config.json").read_text())
        if c.get("model_type") in FAMILIES:
            arguments, *convert = FAMILIES[c["model_type"]]
            made = dict(vocab_size=c["vocab_size"], padded_vocab_size=c["vocab_size"], **arguments(c))
            # not the folder's name: litgpt computes norms otherwise where it reads Gemma or OLMo in it
            return made | {"name": c["model_type"]}, c, tuple(convert)
    except FileNotFoundError:
        raise BadInput(f"{folder}/config.json: no such file, so this is no model folder") from None
    except (KeyError, json.JSONDecodeError) as e:
        raise BadInput(f"{folder}/config.json: {e} is missing or broken") from None
    except BadInput as e:
        raise BadInput(f"{folder}/{e}") from None
    # a download lies in models--org--name/snapshots/hash
    at_home = folder.parent.parent.name.split("--")[-1] if folder.parent.name == "snapshots" else folder.name
    name = Path(c.get("_name_or_path") or at_home).name
    try:
        known = litgpt.Config.from_name(name)
    except ValueError:
        raise BadInput(
            f"{folder}/config.json: model_type {c.get('model_type')!r} and name {name!r} are unknown"
        ) from None
    convert = next((v for k, v in LITGPT.items() if name.lower().startswith(k)), None)
    if convert is None:
        raise BadInput(f"{folder}/config.json: model_type {c.get('model_type')!r} is not supported")
    return {k: v for k, v in vars(known).items() if k in litgpt.Config.__dataclass_fields__}, c, convert


def load(folder: Path, lora: Lora | None = None, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model with its weights in `dtype`, from a Hugging Face folder or a litgpt checkpoint folder.

    Adapters start at A random (torch's global seed), B zero: the model is its base to the bit. A head that is tied in
    config.json stays one matrix with the embedding. Raises BadInput with the file and what is wrong with it.
    """
    state: dict[str, torch.Tensor] = {}
    if (folder / "lit_model.pth").exists() and (folder / "model_config.yaml").exists():
        arguments = yaml.safe_load((folder / "model_config.yaml").read_text())
        source = json.loads((folder / "config.json").read_text()) if (folder / "config.json").exists() else {}
        try:
            state = torch.load(folder / "lit_model.pth", weights_only=True, mmap=True)
        except Exception as e:  # a damaged file fails in a dozen ways
            raise BadInput(f"{folder}/lit_model.pth: {str(e).splitlines()[0]}") from None
        state = state.get("model", state)
    else:
        arguments, source, (weights_in, _) = read_config(folder)
        weights = {}
        # Mistral's folders hold the same weights again, under other names
        files = [f for f in sorted(folder.glob("*.safetensors")) if not f.name.startswith("consolidated")]
        if not files:
            raise BadInput(f"{folder}: no *.safetensors here, nor lit_model.pth with model_config.yaml")
        for file in files:
            try:
                weights |= load_file(file)
            except (SafetensorError, OSError) as e:
                raise BadInput(f"{file}: {e}") from None
    try:
        if not state:
            weights_in(litgpt.Config(**arguments), state, weights)
        adapters = {}
        if lora and lora.rank:
            adapters = {f"lora_{target}": True for target in lora.targets}
            adapters |= dict(lora_r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout)
        with torch.device("meta"):
            model = (
                LoraGPT(litgpt.lora.Config(**arguments, **adapters)) if adapters else GPT(litgpt.Config(**arguments))
            )
        for name, x in state.items():  # a copy: one tensor of the file's own would keep the whole file in memory
            state[name] = x.to(dtype, copy=True)
        missing, unknown = model.load_state_dict(state, strict=False, assign=True)
        missing = [name for name in missing if "lora_" not in name]
        if missing or unknown:
            raise KeyError(f"missing {missing[:3]}, unknown {unknown[:3]}")
    except (KeyError, RuntimeError, TypeError, AttributeError, AssertionError) as e:
        why = " ".join(str(e).split())[:300] or type(e).__name__  # an assert of litgpt's may say nothing
        raise BadInput(f"{folder}: the weights do not fit config.json: {why}") from None
    model.cos, model.sin = (x.to(dtype) for x in model.rope_cache())
    for m in model.modules():
        if isinstance(m, litgpt.lora.LoRALinear) and hasattr(m, "lora_A"):
            wide = torch.promote_types(dtype, torch.float32)  # in bfloat16 AdamW's small steps would round to nothing
            m.lora_A, m.lora_B = (
                nn.Parameter(torch.empty_like(x, device="cpu", dtype=wide)) for x in (m.lora_A, m.lora_B)
            )
            m.reset_parameters()
    gemma = "gemma" in arguments["name"].lower()
    if source.get("tie_word_embeddings", gemma or source.get("model_type") == "gpt2"):
        # litgpt unties on load: two matrices would be trained and one lost on export
        if lora and lora.rank and "head" in lora.targets:
            raise BadInput("lora.targets: head: this model's head is tied to its embedding")
        getattr(model.lm_head, "linear", model.lm_head).weight = model.transformer.wte.weight
    if adapters:
        litgpt.lora.mark_only_lora_as_trainable(model)
    else:
        model.requires_grad_(True)
    return model


def export(state: dict, source: Path, out: Path) -> None:
    """Write plain weights (see fold_lora) as a Hugging Face folder, with config and tokenizer files of `source`."""
    arguments, config, (_, weights_out) = read_config(source)
    config["tie_word_embeddings"] = tied = "lm_head.weight" not in state
    dtype = next(iter(state.values())).dtype
    config["dtype"] = config["torch_dtype"] = str(dtype).removeprefix("torch.")
    if config.get("model_type") not in FAMILIES:
        config["_name_or_path"] = arguments["name"]  # by which it was found, and is found again
    if tied:
        state = state | {"lm_head.weight": state["transformer.wte.weight"]}
    weights: dict[str, torch.Tensor] = {}
    weights_out(litgpt.Config(**arguments), weights, state)
    if tied:
        weights.pop("lm_head.weight", None)
    out.mkdir(parents=True, exist_ok=True)
    save_file({k: x.contiguous() for k, x in weights.items()}, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors creates it for its owner only
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    keep = re.compile(r"(tokenizer|special_tokens|added_tokens|vocab|merges|chat_template|generation_config)")
    for file in source.iterdir():
        if keep.match(file.name) and source != out:
            shutil.copyfile(file, out / file.name)

"""A GPT on packed batches: attention that shares prompts, the chunked head, LoRA's switch.

Blocks, LoRA layers and the conversion of weights are litgpt's.

Shape letters: B examples, K completions, N packed tokens, M queries (all N, or the completions'),
P prompt tokens, T targets, C width, H heads, D head size, V vocabulary.
"""

import functools
import itertools
import math
from pathlib import Path

import litgpt.lora
import litgpt.model
import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

from data import PackedBatch
from support.errors import BadInput
from support.lora import adapter_arguments, create_adapters
from support.settings import Lora
from support.weights import fill, must_fit, read_weights

# The head makes so many logits at a time (64 MiB in float32), whatever N is. It saves the gradients
# of the first ones for its backward and recomputes the rest. Its softmax takes fewer: a CPU gets
# blocks over 32 MiB page by page, and a smaller head would round the matrix's gradient more often.
HEAD_LOGITS, HEAD_SAVED, HEAD_SOFTMAX = 2**24, 2**26, 2**22
TILE_TOKENS = 128  # tokens of examples that share a call of attention on a CPU

compiled_flex = functools.cache(lambda: torch.compile(flex_attention, dynamic=True))


# ---- attention: over a packed batch, or over a cache ---------------------------------------------


class PromptCache:
    """Keys, values and last hidden states of a batch's prompts: a forward fills it, others of the
    same prompts, without gradient, read it."""

    def __init__(self):
        self.batch, self.tensors = None, {}


class PackedAttention:
    """Who attends to whom in a packed batch, for one forward; layers share its masks.

    With a filled prompt cache the M queries are the completions' tokens only.
    """

    def __init__(self, batch: PackedBatch, prompt_cache: PromptCache | None = None):
        self.batch, self.cache, self.masks = batch, prompt_cache, {}
        self.token_N = torch.arange(len(batch.token_N), device=batch.token_N.device)
        self.query_M = None  # None: every token is a query
        if prompt_cache is not None and prompt_cache.batch is None:
            prompt_cache.batch = batch
        elif prompt_cache is not None:
            both = prompt_cache.batch, batch
            cached, new = ([parts[0] for parts in b.parts] for b in both)
            assert cached == new, "other prompts than those computed before"
            self.cached_P, self.prompt_P = ((b.branch_N == 0).nonzero()[:, 0] for b in both)
            self.query_M = batch.branch_N.nonzero()[:, 0]
            if not len(self.query_M):  # no completion has a second token: layers want one all the
                self.query_M = self.token_N[:1]  # same, and what it gives is the cache's

    def queries(self, x_N):
        return x_N if self.query_M is None else x_N[self.query_M]

    def all_tokens(self, name, x, dim: int):
        """x of the queries -> of all tokens: the prompts' part comes from the cache."""
        if self.cache is None:
            return x
        cached = self.cache.tensors.setdefault(name, x.detach())
        if self.query_M is None:
            return x
        out = x.new_empty([*x.shape[:dim], len(self.token_N), *x.shape[dim + 1 :]])
        prompt = cached.index_select(dim, self.cached_P)
        return out.index_copy_(dim, self.query_M, x).index_copy_(dim, self.prompt_P, prompt)

    def mask(self, i, j, window: int | None):
        """Whether i attends to j: of its example, not after it, in the prompt or its completion."""
        position, example, branch = self.batch[1:4]
        mask = (example[i] == example[j]) & (j <= i)
        mask = mask & ((branch[j] == 0) | (branch[j] == branch[i]))
        return mask if window is None else mask & (position[i] - position[j] < window)

    def tiles(self, window: int | None):
        """For a CPU: short examples together under one mask, a long one part by part, so that
        little is computed to be masked. -> tokens of each group of examples, [(group, queries,
        keys, mask)]. A tile's keys are the group's first; no mask stands for plain causal."""
        groups, K = [], self.batch.length_BK.shape[1]
        for parts in self.batch.parts:
            if groups and sum(map(sum, groups[-1])) + sum(parts) <= TILE_TOKENS:
                groups[-1].append(parts)
            else:
                groups.append([parts])
        sizes, query_M = [sum(map(sum, group)) for group in groups], self.queries(self.token_N)
        tiles, start, m = [], 0, 0
        for g, (parts, *others) in enumerate(groups):
            whole = others or (K == 1 and self.query_M is None)
            for end in [sizes[g]] if whole else itertools.accumulate(parts):
                n = int(torch.searchsorted(query_M, start + end))
                if n > m:
                    causal = not others and (whole or end == parts[0])
                    mask = None
                    if not causal or window is not None:
                        key = self.token_N[None, start : start + end]
                        mask = self.mask(query_M[m:n, None], key, window)
                    tiles.append((g, n - m, end, mask))
                m = n
            start += sizes[g]
        return sizes, tiles

    def block_mask(self, window: int | None, size: int = 128):
        """For FlexAttention. Which blocks it visits follows from each example's start:
        create_block_mask would try all M x N pairs first."""
        query_M, example_N = self.query_M, self.batch.example_N

        def mask(_b, _h, i, j):
            return self.mask(i if query_M is None else query_M[i], j, window)

        start_N = torch.searchsorted(example_N, example_N)  # its example's first token
        start_M, token_M = self.queries(start_N), self.queries(self.token_N)
        m, n = len(token_M), len(start_N)
        end = torch.arange(size - 1, m + size - 1, size, device=token_M.device).clamp(max=m - 1)
        first, last = start_M[::size] // size, token_M[end] // size  # keys of a block of queries
        block = self.token_N[: -(-n // size)]
        index = (first[:, None] + block).clamp(max=len(block) - 1)
        count, index = (x.to(torch.int32)[None, None] for x in (last - first + 1, index))
        return BlockMask.from_kv_blocks(count, index, None, None, size, mask, (m, n))

    def cached(self, make, window: int | None):
        if window not in self.masks:
            self.masks[window] = make(window)
        return self.masks[window]

    def attend(self, attn, q, k, v):
        """q, k, v (1, H, M, D) -> (1, H, M, D). The one choice between the CPU and the GPU path."""
        k, v = self.all_tokens((attn, "k"), k, 2), self.all_tokens((attn, "v"), v, 2)
        if q.device.type == "cuda" and q.dtype != torch.float64:  # FlexAttention has no float64
            return self.flex(attn, q, k, v, compiled_flex())
        return self.tiled(attn, q, k, v)

    def tiled(self, attn, q, k, v):
        sizes, tiles = self.cached(self.tiles, attn.window)
        # split, not slices: its backward is one cat
        groups = list(zip(k.split(sizes, 2), v.split(sizes, 2)))
        queries, out = q.split([n for _, n, _, _ in tiles], 2), []
        for q_tile, (group, _, keys, mask) in zip(queries, tiles):
            kv = (x if keys == sizes[group] else x[:, :, :keys] for x in groups[group])
            out.append(sdpa(attn, q_tile, *kv, mask))
        return torch.cat(out, dim=2)

    def flex(self, attn, q, k, v, run):
        mask, cap = self.cached(self.block_mask, attn.window), attn.cap
        score = None if cap is None else lambda s, b, h, i, j: cap * torch.tanh(s / cap)
        gqa = k.shape[1] < q.shape[1]
        return run(q, k, v, score, mask, scale=attn.scale, enable_gqa=gqa)


def sdpa(attn, q, k, v, mask):
    """Attention under a boolean mask (True: attend), or causal where mask is None."""
    if k.shape[1] < q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if attn.cap is None:
        run, causal = nn.functional.scaled_dot_product_attention, mask is None
        return run(q, k, v, attn_mask=mask, is_causal=causal, scale=attn.scale)
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    score = attn.cap * torch.tanh(q @ k.mT * attn.scale / attn.cap)
    return score.masked_fill(~mask, -torch.inf).float().softmax(-1).to(v.dtype) @ v


class KVCache:
    """Keys and values of B sequences for generation. Slot p holds position p, so ragged prompts
    need no padding: slots after a sequence's position are masked, and overwritten later.

    The first forward takes the prompts, packed; each later one a token per sequence (see at).
    """

    def __init__(self, batch: PackedBatch, slots: int):
        self.slots, self.packed = slots, PackedAttention(batch)
        self.tensors, self.masks = {}, {}
        self.token_BT, self.position_BT = batch.token_N[None], batch.position_N[None]
        self.row_N = batch.example_N  # each token's sequence
        self.last_B = batch.source_T  # which tokens predict the sequences' next ones
        self.row_B = torch.arange(len(batch.sizes), device=batch.token_N.device)

    def at(self, token_B, position_B):
        """The next forward's tokens. No sequence attends beyond the last one's slot."""
        self.token_BT, self.position_BT = token_B[:, None], position_B[:, None]
        self.row_N = self.last_B = self.row_B
        self.packed, self.masks, self.length = None, {}, int(position_B.max()) + 1

    def keep(self, row_B) -> torch.Tensor:
        """Drop all other sequences. -> these in their new order: the last ones fill the gaps."""
        n = len(row_B)
        self.row_B, order_B = self.row_B[:n], self.row_B[:n].clone()
        gaps = order_B[~torch.isin(order_B, row_B)]
        movers = row_B[row_B >= n]
        for x in itertools.chain(*self.tensors.values()):
            x[gaps] = x[movers]
        self.tensors = {layer: tuple(x[:n] for x in kv) for layer, kv in self.tensors.items()}
        order_B[gaps] = movers
        return order_B

    def attend(self, attn, q, k, v):
        if attn not in self.tensors:
            shape = len(self.row_B), k.shape[1], self.slots, k.shape[3]
            self.tensors[attn] = k.new_zeros(shape), v.new_zeros(shape)
        for cached, x in zip(self.tensors[attn], (k, v)):
            cached[self.row_N, :, self.position_BT.flatten()] = x.transpose(1, 2).flatten(0, 1)
        if self.packed:
            return self.packed.attend(attn, q, k, v)
        # (B, 1, 1, slots): the same in all layers of a window
        if attn.window not in self.masks:
            slot = torch.arange(self.length, device=q.device)
            back = (self.position_BT - slot)[:, None, None]
            self.masks[attn.window] = (back >= 0) & (back < (attn.window or self.length))
        k, v = (x[:, :, : self.length] for x in self.tensors[attn])
        grouped = q.reshape(*k.shape[:2], -1, k.shape[3])  # the heads of a key as its queries
        return sdpa(attn, grouped, k, v, self.masks[attn.window]).reshape(q.shape)


# ---- the head ------------------------------------------------------------------------------------


def _logp(logits_TV, target_T):
    """-> log-probs of the targets, and of all tokens."""
    if logits_TV.dtype != torch.float64:
        logits_TV = logits_TV.float()  # bfloat16 would lose the differences of a log-ratio
    logp_TV = logits_TV.log_softmax(-1)
    return logp_TV.gather(1, target_T[:, None])[:, 0], logp_TV


class Head(torch.autograd.Function):
    """Log-probs of the targets (T,), `size` tokens at a time: T x V logits never exist.

    The first `saved` chunks save their gradient by the logits (None: none is wanted), the rest
    recompute it. The matrix's gradient is added up in one place. A frozen matrix needs neither: a
    token's gradient by h is then a number times a vector that the forward knows.
    """

    @staticmethod
    def forward(ctx, h_TC, w_VC, target_T, cap, size, saved):
        ctx.save_for_backward(h_TC, w_VC, target_T)
        ctx.cap, ctx.size, ctx.grads, logp = cap, size, [], []
        frozen = not ctx.needs_input_grad[1]
        for i, (h, target) in enumerate(zip(h_TC.split(size), target_T.split(size))):
            save = saved is not None and (frozen or i < saved)
            logp_T, grad_TV = Head.chunk(h, w_VC, target, cap, save)
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
            return (g_T1 * torch.cat(ctx.grads)).to(h_TC.dtype), *[None] * 5
        saved, ctx.grads = iter(ctx.grads), None
        dh_TC, dw_VC = torch.empty_like(h_TC), torch.zeros_like(w_VC)
        gh_TC = (g_T1 * h_TC).to(h_TC.dtype)  # g goes to the narrow side of each product
        for h, gh, target, dh in zip(*(x.split(ctx.size) for x in (h_TC, gh_TC, target_T, dh_TC))):
            grad_TV = next(saved, None)
            if grad_TV is None:
                grad_TV = Head.chunk(h, w_VC, target, ctx.cap, True)[1]
            torch.mm(grad_TV, w_VC, out=dh)
            dw_VC.addmm_(grad_TV.T, gh)
        return (g_T1 * dh_TC).to(h_TC.dtype), dw_VC, *[None] * 4

    @staticmethod
    def chunk(h_TC, w_VC, target_T, cap, need_grad: bool):
        """-> log-probs of the targets; minus their gradient by the logits: softmax - one-hot."""
        logits_TV, logp = h_TC @ w_VC.T, []
        size = max(1, HEAD_SOFTMAX // len(w_VC))
        for logits, target in zip(logits_TV.split(size), target_T.split(size)):
            tanh = None if cap is None else (logits / cap).tanh_()
            logp_T, grad = _logp(logits if cap is None else cap * tanh, target)
            logp.append(logp_T)
            if need_grad:
                grad.exp_()[torch.arange(len(target), device=target.device), target] -= 1
                if cap is not None:
                    grad *= 1 - tanh.square()
                logits.copy_(grad)
        return torch.cat(logp), logits_TV if need_grad else None


# ---- the model -----------------------------------------------------------------------------------


class _PackedGPT:
    """Makes litgpt's GPT (plain or LoRA) take a PackedBatch or a KVCache."""

    activation_checkpointing = False  # blocks run again in the backward instead of saving

    def __init__(self, config):
        super().__init__(config)
        if config.latent_attention:
            raise BadInput(f"model: {config.name}: latent attention is not supported")
        if config.rope_n_elem == 0:  # GPT-2: learned positions instead of rotary ones
            self.transformer["wpe"] = nn.Embedding(config.block_size, config.n_embd)
        width = config.attention_scores_scalar or config.head_size
        for attn in (block.attn for block in self.transformer.h):
            windowed = attn.apply_sliding_window_attention
            attn.window = config.sliding_window_size if windowed else None
            attn.scale = attn.mscale**2 / math.sqrt(width)
            attn.cap = config.attention_logit_softcapping
            attn.forward = functools.partial(_attend, attn)

    def forward(self, x: PackedBatch | KVCache, prompt_cache: PromptCache | None = None):
        """PackedBatch -> (B, K) summed log-probs of the completions; KVCache -> (B, V) logits of
        the next tokens. A first forward fills the prompt cache, later ones read it."""
        if isinstance(x, KVCache):
            h_BTC = self.hidden(x.token_BT, x.position_BT, x)
            return self.head(h_BTC.flatten(0, 1)[x.last_B]).float()
        attention = PackedAttention(x, prompt_cache)
        token_M = attention.queries(x.token_N)
        position_M = attention.queries(x.position_N)
        h_MC = self.hidden(token_M[None], position_M[None], attention)[0]
        # the head never runs on a position that predicts nothing
        logp_T = self.logp(attention.all_tokens("h", h_MC, 0)[x.source_T], x.target_T)
        B, K = x.length_BK.shape
        # per example K completions and, last, the prompt itself (empty unless data.score_prompt)
        logp_S = logp_T.new_zeros(B * (K + 1)).index_add(0, x.segment_T, logp_T)
        logp_BS = logp_S.view(B, K + 1)
        return logp_BS[:, :K] + logp_BS[:, K:]

    @property
    def tied(self) -> bool:
        return getattr(self.lm_head, "linear", self.lm_head).weight is self.transformer.wte.weight

    def unique_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by name; a tied head only as the embedding that it is."""
        # after a forward without backward FSDP2 leaves copies in its root's place
        if hasattr(self, "reshard"):
            self.reshard()
        named = dict(self.named_parameters(remove_duplicate=False))
        copies = ("lm_head.weight", "lm_head.linear.weight") if self.tied else ()
        return {name: p for name, p in named.items() if name not in copies}

    def hidden(self, token_BT, position_BT, attention):
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
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, *rope, attention, use_reentrant=False)
            else:
                x = block(x, *rope, attention)
        return self.transformer.ln_f(x)

    def head(self, h_TC):
        logits_TV, cap = self.lm_head(h_TC), self.config.final_logit_softcapping
        return logits_TV if cap is None else cap * torch.tanh(logits_TV / cap)

    def logp(self, h_TC, target_T):
        """Log-probs of the targets (T,)."""
        linear, device = getattr(self.lm_head, "linear", self.lm_head), h_TC.device.type
        size = max(1, HEAD_LOGITS // self.config.padded_vocab_size)
        if linear.bias is None and not getattr(self.lm_head, "r", 0):
            autocast = torch.is_autocast_enabled(device)
            dtype = torch.get_autocast_dtype(device) if autocast else h_TC.dtype
            saved = HEAD_SAVED // HEAD_LOGITS if torch.is_grad_enabled() else None
            cap = self.config.final_logit_softcapping
            return Head.apply(h_TC.to(dtype), linear.weight.to(dtype), target_T, cap, size, saved)

        def chunk(h_TC, target_T):  # a bias or adapters: by autograd, all recomputed
            return _logp(self.head(h_TC), target_T)[0]

        chunks = zip(h_TC.split(size), target_T.split(size))
        return torch.cat([checkpoint(chunk, *c, use_reentrant=False) for c in chunks])


def _attend(attn, x, cos, sin, attention: PackedAttention | KVCache, *_):
    """litgpt's attention, without its copies of grouped keys and of what is not rotated."""
    c, D, n = attn.config, attn.config.head_size, attn.config.rope_n_elem
    heads = c.n_head, c.n_query_groups, c.n_query_groups
    q, k, v = attn.qkv(x).split([D * h for h in heads], dim=-1)
    if c.norm_qk and c.norm_qk_type == "olmo2":
        q, k = attn.norm_q(q), attn.norm_k(k)
    # (1, H, M, D), or from a cache (B, H, 1, D)
    q, k, v = (y.unflatten(-1, (-1, D)).transpose(1, 2) for y in (q, k, v))
    if c.norm_qk and c.norm_qk_type == "default":
        q, k = attn.norm_q(q), attn.norm_k(k)
    if n:
        name = "apply_rope_interleave" if c.rope_interleave else "apply_rope"
        rotated = [getattr(litgpt.model, name)(y[..., :n], cos, sin) for y in (q, k)]
        q, k = (torch.cat([r, y[..., n:]], -1) if n < D else r for r, y in zip(rotated, (q, k)))
    return attn.proj(attention.attend(attn, q, k, v).transpose(1, 2).flatten(2))


class GPT(_PackedGPT, litgpt.model.GPT): ...


class LoraGPT(_PackedGPT, litgpt.lora.GPT): ...


@torch.no_grad()
def cast_linears_to_bfloat16(model: nn.Module) -> None:
    """As autocast casts them at each use: the same log-probs in half the memory."""
    for m in model.modules():
        if isinstance(m, nn.Linear) and m.weight is not model.transformer.wte.weight:
            m.to(torch.bfloat16)


def make(arguments: dict, lora: Lora | None) -> nn.Module:
    """A model, not yet filled."""
    adapters = adapter_arguments(lora)
    if adapters:
        return LoraGPT(litgpt.lora.Config(**arguments, **adapters))
    return GPT(litgpt.Config(**arguments))


def load(folder: Path, lora: Lora | None = None, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model with its weights in `dtype`, from a Hugging Face or a litgpt checkpoint folder. With
    new adapters it is its base to the bit. Raises BadInput."""
    arguments, config, state = read_weights(folder)
    with must_fit(folder):
        with torch.device("meta"):
            model = make(arguments, lora)
        fill(model, config, state, dtype)
    model.cos, model.sin = (x.to(dtype) for x in model.rope_cache())
    model.requires_grad_(True)
    if isinstance(model, LoraGPT):
        create_adapters(model, dtype)
    return model

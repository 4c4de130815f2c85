"""A GPT on packed batches: attention that shares prompts, a cache for sampling, loading.

Blocks, LoRA layers and the conversion of weights are litgpt's.

Shape letters: B examples, K completions, N packed tokens, M queries (all N, or the completions'),
P prompt tokens, T targets, C width, H heads, D head size, V vocabulary.
Reading order: PackedAttention, _PackedGPT; the head is in head.py.
"""

import functools
import inspect
import itertools
import math
from pathlib import Path

import litgpt.lora
import litgpt.model
import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

from data import PackedBatch, to_device
from head import Chunks, Head, logp_of
from hub.families import rope_tables
from hub.lora import adapter_arguments, create_adapters
from hub.weights import fill_model, read_source, read_weights, weights_must_fit
from runs.errors import BadInput
from runs.settings import Lora
from runs.tensors import LazyTensors, set_weights

TILE_TOKENS = 128  # tokens of examples that share a tile of attention

VARLEN = inspect.signature(varlen_attn).parameters


# ---- attention: over a packed batch, or over a cache ---------------------------------------------


class PromptCache:
    """Keys, values and last hidden states of a batch's prompts: a forward fills it, others of the
    same prompts, without gradient, read it."""

    def __init__(self):
        self.batch, self.tensors = None, {}


class PackedAttention:
    """Who attends to whom in a packed batch, for one forward; layers share its tiles' masks.

    With a filled prompt cache the M queries are the completions' own tokens only.
    """

    def __init__(self, batch: PackedBatch, prompt_cache: PromptCache | None = None):
        self.batch, self.cache, self.tiles_of = batch, prompt_cache, {}
        self.cached = prompt_cache is not None and prompt_cache.batch is not None
        if self.cached:
            prompts = ([parts[0] for parts in b.parts] for b in (prompt_cache.batch, batch))
            assert len(set(map(tuple, prompts))) == 1, "other prompts than those computed before"
        elif prompt_cache is not None:
            prompt_cache.batch = batch

    def queries(self, x_N):
        return x_N[self.batch.own_M] if self.cached else x_N

    def all_tokens(self, name, x, dim: int):
        """x of the queries -> of all tokens: the prompts' part comes from the cache."""
        if self.cache is None:
            return x
        known = self.cache.tensors.setdefault(name, x.detach())
        if not self.cached:
            return x
        out = x.new_empty([*x.shape[:dim], len(self.batch.token_N), *x.shape[dim + 1 :]])
        prompt = known.index_select(dim, self.cache.batch.prompt_P)
        out.index_copy_(dim, self.batch.own_M, x)
        return out.index_copy_(dim, self.batch.prompt_P, prompt)

    def attend(self, attn, q, k, v):
        """q, k, v (1, H, M, D) -> (1, H, M, D)."""
        k, v = self.all_tokens((attn, "k"), k, 2), self.all_tokens((attn, "v"), v, 2)
        if flash_fits(attn, q):
            return self.segments(attn, q, k, v)
        return self.tiled(attn, q, k, v)

    def segments(self, attn, q, k, v):
        """In one call of flash attention: a query sees its segment's keys, causal from the lower
        right."""
        b, (most, most_own, most_keys) = self.batch, self.batch.longest
        if len(b.key_L):
            k, v = k[:, :, b.key_L], v[:, :, b.key_L]
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        starts, most = (b.start_own_S, most_own) if self.cached else (b.start_S, most)
        options = dict(scale=attn.scale, window_size=((attn.window or 0) - 1, 0))
        if "enable_gqa" in VARLEN:
            options["enable_gqa"] = k.shape[1] < q.shape[1]
        # a longest segment of 1 with empty ones beside it fails (flash-attention issue 1537)
        most = max(2, most), max(2, most_keys)
        out = varlen_attn(q, k, v, starts, b.start_key_S, *most, **options)
        return out.transpose(0, 1)[None]

    def tiles(self, window: int | None):
        """Everywhere else: short examples together under one mask, a long one part by part, so that
        little is computed to be masked. -> tokens of each group of examples, [(group, queries,
        keys, mask)]. A tile's keys are the group's first; no mask stands for plain causal."""
        N, K, groups, tiles = len(self.batch.token_N), self.batch.length_BK.shape[1], [], []
        token_N = torch.arange(N, device=self.batch.token_N.device)
        for parts, queries in zip(self.batch.parts, self.query_counts()):
            if groups and groups[-1][0] + sum(parts) <= TILE_TOKENS:
                groups[-1][0] += sum(parts)
            else:
                groups.append([sum(parts), []])
            groups[-1][1].append((parts, queries))
        start, m, token_M = 0, 0, self.queries(token_N)
        for g, (size, examples) in enumerate(groups):
            parts, queries = examples[0]
            alone = len(examples) == 1
            whole = not alone or (K == 1 and not self.cached)
            ends = [size] if whole else list(itertools.accumulate(parts))
            counts = [sum(sum(q) for _, q in examples)] if whole else queries
            for end, n in zip(ends, counts):
                if not n:
                    continue
                mask = None
                if window is not None or not alone or not (whole or end == parts[0]):
                    own = token_M[m : m + n, None]
                    mask = self.mask(own, token_N[None, start : start + end], window)
                tiles.append((g, n, end, mask))
                m += n
            start += size
        return [size for size, _ in groups], tiles

    def query_counts(self):
        """Queries of each example's parts."""
        if not self.cached:
            return self.batch.parts
        own = [(0, *rest) for _, *rest in self.batch.parts]
        if not any(map(sum, own)):  # the one that stands in
            own[0] = (1, *own[0][1:])
        return own

    def mask(self, i, j, window: int | None):
        """Whether i attends to j: of its example, not after it, in the prompt or its completion."""
        position, example, branch = self.batch[1:4]
        mask = (example[i] == example[j]) & (j <= i)
        mask = mask & ((branch[j] == 0) | (branch[j] == branch[i]))
        return mask if window is None else mask & (position[i] - position[j] < window)

    def tiled(self, attn, q, k, v):
        if attn.window not in self.tiles_of:
            self.tiles_of[attn.window] = self.tiles(attn.window)
        sizes, tiles = self.tiles_of[attn.window]
        # split, not slices: its backward is one cat
        groups = list(zip(k.split(sizes, 2), v.split(sizes, 2)))
        queries, out = q.split([n for _, n, _, _ in tiles], 2), []
        for q_tile, (group, _, keys, mask) in zip(queries, tiles):
            kv = (x if keys == sizes[group] else x[:, :, :keys] for x in groups[group])
            out.append(sdpa(attn, q_tile, *kv, mask))
        return torch.cat(out, dim=2)


def flash_fits(attn, q) -> bool:
    """Whether torch's flash attention takes these queries: an Ampere GPU or later, two bytes a
    number, no softcap, scale and window as arguments (torch 2.11)."""
    if q.device.type != "cuda" or attn.cap is not None or "scale" not in VARLEN:
        return False
    narrow = q.dtype in (torch.bfloat16, torch.float16) and q.shape[3] <= 256
    return narrow and q.shape[3] % 8 == 0 and torch.cuda.get_device_capability(q.device)[0] >= 8


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

    def at(self, token_B, position_B, longest: int):
        """The next forward's tokens. No sequence attends beyond the slot `longest`."""
        self.token_BT, self.position_BT = token_B[:, None], position_B[:, None]
        self.row_N = self.last_B = self.row_B
        self.packed, self.masks, self.length = None, {}, longest + 1

    def keep(self, rows: list[int]) -> list[int]:
        """Drop all other sequences. -> these in their new order: the last ones fill the gaps."""
        n, order = len(rows), list(range(len(rows)))
        gaps, movers = sorted(set(order).difference(rows)), [i for i in rows if i >= n]
        self.row_B = self.row_B[:n]
        to, source = (to_device(torch.tensor(i), self.row_B.device) for i in (gaps, movers))
        for layer, kv in self.tensors.items():
            for x in kv if gaps else ():
                x[to] = x[source]
            self.tensors[layer] = tuple(x[:n] for x in kv)
        for gap, mover in zip(gaps, movers):
            order[gap] = mover
        return order

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
        self.lm_head.logp = functools.partial(_logp, self)  # of the head: shards gather before it
        self._scale(**config.hf_config.get("scales", {}))

    def _scale(self, embedding_multiplier=1, residual_multiplier=1, logits_scaling=1):
        """Granite's factors, for which litgpt's block has no place."""
        parts = {self.transformer.wte: embedding_multiplier}
        parts[self.transformer.ln_f] = 1 / logits_scaling
        for block in self.transformer.h:
            norms = block.post_attention_norm, block.post_mlp_norm
            parts |= dict.fromkeys(norms, residual_multiplier)
        for part, factor in parts.items():
            if factor != 1:
                part.register_forward_hook(lambda m, args, y, factor=factor: y * factor)

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
        logp_T = self.lm_head.logp(attention.all_tokens("h", h_MC, 0)[x.source_T], x.target_T)
        B, K = x.length_BK.shape
        # per example K completions and, last, the prompt itself (empty unless data.score_prompt)
        logp_S = logp_T.new_zeros(B * (K + 1)).index_add(0, x.segment_T, logp_T)
        logp_BS = logp_S.view(B, K + 1)
        return logp_BS[:, :K] + logp_BS[:, K:]

    @property
    def tied(self) -> bool:
        return getattr(self.lm_head, "linear", self.lm_head).weight is self.transformer.wte.weight

    def cache_bytes(self, slots: int) -> int:
        """Of a sequence's keys and values, at most."""
        c, size = self.config, self.transformer.wte.weight.element_size()
        return 2 * c.n_layer * c.n_query_groups * c.head_size * slots * size

    def tie(self) -> None:
        getattr(self.lm_head, "linear", self.lm_head).weight = self.transformer.wte.weight

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

    @property
    def plain_head(self) -> bool:
        """One matrix: no bias, no adapters."""
        linear = getattr(self.lm_head, "linear", self.lm_head)
        return linear.bias is None and not getattr(self.lm_head, "r", 0)


def _logp(model: _PackedGPT, h_TC, target_T):
    """Log-probs of the targets (T,)."""
    head, device, cap = model.lm_head, h_TC.device.type, model.config.final_logit_softcapping
    chunks = Chunks.of(device, model.config.padded_vocab_size)
    if model.plain_head:
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else h_TC.dtype
        weight = getattr(head, "linear", head).weight
        return Head.apply(h_TC.to(dtype), weight, target_T, cap, chunks)

    def chunk(h_TC, target_T):  # by autograd, all recomputed
        return logp_of(model.head(h_TC), target_T)[0]

    parts = zip(h_TC.split(chunks.size), target_T.split(chunks.size))
    return torch.cat([checkpoint(chunk, *p, use_reentrant=False) for p in parts])


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


def make_model(arguments: dict, lora: Lora | None, names: dict | None) -> nn.Module:
    """A model without its weights, from arguments of litgpt's Config. `names` of the weights: see
    hub/families.py."""
    adapters = adapter_arguments(lora, names)
    Model, Config = (LoraGPT, litgpt.lora.Config) if adapters else (GPT, litgpt.Config)
    return Model(Config(**arguments, **adapters))


def read_folder_weights(folder: Path, dtype: torch.dtype) -> LazyTensors:
    """A folder's weights by our names, adapters merged, each read when it is asked for. Raises
    BadInput."""
    source = arguments, _, names = read_source(folder)
    with weights_must_fit(folder), torch.device("meta"):
        model = make_model(arguments, None, names)
    with weights_must_fit(folder):
        return read_weights(model, folder, source, dtype)


def load_model(
    folder: Path, lora: Lora | None = None, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """A model with its weights in `dtype`, from a Hugging Face or a litgpt checkpoint folder. With
    new adapters it is its base to the bit. Raises BadInput."""
    source = arguments, _, names = read_source(folder)
    with weights_must_fit(folder):
        with torch.device("meta"):
            model = make_model(arguments, lora, names)
        fill_model(model, folder, source, dtype)
    model.cos, model.sin = (x.to(dtype) for x in rope_tables(model))
    model.requires_grad_(True)
    if isinstance(model, LoraGPT):
        create_adapters(model, dtype)
    return model


# ---- sharding: rank 0 alone reads the weights ----------------------------------------------------


def shard_over_ranks(fabric, whole: nn.Module | None, precision: str, learns: bool) -> nn.Module:
    """A model that rank 0 holds (elsewhere None), sharded over all ranks: no other rank ever has the
    whole of it. A collective."""
    first = fabric.global_rank == 0
    shell = _empty_like(*fabric.broadcast(_description(whole) if first else None))
    if not learns:
        shell.requires_grad_(False).eval()
        if precision == "bf16-mixed":
            cast_linears_to_bfloat16(shell)
    module = fabric.setup_module(shell)
    set_weights(module, whole.unique_parameters() if first else None)
    return module


def _description(whole: nn.Module) -> tuple:
    """What _empty_like needs, sent to the ranks that do not hold the model."""
    params = whole.named_parameters(remove_duplicate=False)
    return whole.config, whole.tied, {n: (p.dtype, p.requires_grad) for n, p in params}


def _empty_like(config, tied: bool, params: dict) -> nn.Module:
    """A model of this description on the meta device, without its weights."""
    with torch.device("meta"):
        gpt = (LoraGPT if isinstance(config, litgpt.lora.Config) else GPT)(config)
    for name, p in list(gpt.named_parameters()):
        owner, _, attribute = name.rpartition(".")
        dtype, learns = params[name]
        setattr(gpt.get_submodule(owner), attribute, nn.Parameter(p.to(dtype), learns))
    if tied:
        gpt.tie()
    dtype = gpt.transformer.wte.weight.dtype
    gpt.cos, gpt.sin = (x.to(dtype) for x in rope_tables(gpt))
    return gpt

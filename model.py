"""A GPT on packed batches: attention that shares prompts, a key/value cache for sampling, loading.

The blocks, the LoRA layers and the conversion of weights are litgpt's; in TransformersGPT the blocks are transformers'.
Reading order: PackedAttention, _Packed, _PackedGPT; the LM head is in head.py.

Shape letters; B, K, U, N, P, M, T, L, I and S are those of data.py:

    B  examples of a micro-batch; in sampling, answers
    K  completions of an example
    U  prompts of a micro-batch: examples with one prompt share it
    N  packed input tokens of a batch
    P  those of the N that belong to prompts
    M  those of the N that belong to completions
    Q  queries, the tokens that a forward computes: all N, or the M where the prompts come from a PromptCache;
       in sampling, one a sequence after the first forward
    R  rows of Q queries: B in sampling after the first forward, else 1
    T  targets: tokens that are predicted and scored
    L  tokens of the longest completion
    I  gathered keys, S  starts of attention's sequences: see data.PackedBatch
    C  width of the hidden states
    H  query heads (keys and values may have fewer: grouped-query attention)
    D  size of a head
    V  vocabulary
"""

import copy
import functools
import inspect
import itertools
import math
from pathlib import Path
from typing import NamedTuple

import litgpt.lora
import litgpt.model
import numpy as np
import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

from data import PackedBatch, pack, to_device
from head import Chunks, Head, entropy_of, logp_of
from hub.families import rope_tables
from hub.lora import config_with_adapters, create_adapters, plain_names
from hub.transformers_models import TransformersBlocks, constants, make_causal_lm, their_errors
from hub.weights import fill_model, read_source, read_weights, weights_must_fit
from runs.errors import BadInput, Failed, printable
from runs.settings import Lora
from runs.tensors import LazyTensors, set_weights

# Prompts (with their completions) of up to so many tokens together share one tile of attention. A larger tile means
# fewer calls, but more scores that are computed only to be masked.
TILE_TOKENS = 128

# Torch 2.10 lacks some of these arguments (see flash_fits).
VARLEN = inspect.signature(varlen_attn).parameters


# ---- attention: over a packed batch, or over a cache ---------------------------------------------


class PromptCache:
    """Keys, values and last hidden states of a batch's prompts.

    The first forward that gets the cache fills it. Later forwards, without gradient and over the same prompts with
    other completions, read it.
    """

    def __init__(self):
        self.batch: PackedBatch | None = None  # the one that filled the cache
        self.tensors = {}  # name -> values for all N tokens of that batch


class Tile(NamedTuple):
    """One call of scaled_dot_product_attention: the next queries, over the first keys of their bin (see bins)."""

    bin: int
    n_queries: int
    n_keys: int
    mask: torch.Tensor | None  # (n_queries, n_keys), True: attend; None: plain causal attention


class PackedAttention:
    """Which token attends to which in a packed batch, for one forward. All layers share it, with its tiles' masks."""

    def __init__(self, batch: PackedBatch, prompt_cache: PromptCache | None = None):
        self.batch = batch
        self.cache = prompt_cache
        self.cached = False  # whether the prompts come from the cache
        self.tiles_of_window = {}
        if prompt_cache is None:
            return
        if prompt_cache.batch is None:
            prompt_cache.batch = batch  # this forward fills it
            return
        self.cached = True
        # only their lengths are compared
        cached_prompts = [sizes[0] for sizes in prompt_cache.batch.segment_sizes]
        prompts = [sizes[0] for sizes in batch.segment_sizes]
        assert prompts == cached_prompts, "the cache is of other prompts: log-probs would be wrong"

    def queries(self, x_N):
        """The part of x_N that belongs to the Q queries."""
        return x_N[self.batch.completion_M] if self.cached else x_N

    def all_tokens(self, name, x, dim: int):
        """Values of the Q queries -> values of all N tokens, along dimension `dim`.

        The prompts' values come from the prompt cache, under `name`; a forward that fills the cache leaves them there.
        """
        if self.cache is None:
            return x
        # setdefault: a block that activation checkpointing runs again must not replace what was saved
        cached = self.cache.tensors.setdefault(name, x.detach())
        if not self.cached:
            return x
        prompt = cached.index_select(dim, self.cache.batch.prompt_P)
        shape = list(x.shape)
        shape[dim] = len(self.batch.token_N)
        out = x.new_empty(shape)
        # completions first: if token 0 stands in for them, its prompt's values must win
        out.index_copy_(dim, self.batch.completion_M, x)
        return out.index_copy_(dim, self.batch.prompt_P, prompt)

    def attend(self, attn, q, k, v):
        """q (1, H, Q, D), k and v (1, key heads, Q, D) of layer `attn` -> (1, H, Q, D)."""
        k = self.all_tokens((attn, "k"), k, 2)
        v = self.all_tokens((attn, "v"), v, 2)
        if flash_fits(attn, q):
            return self.flash(attn, q, k, v)
        return self.tiled(attn, q, k, v)

    def flash(self, attn, q, k, v):
        """One call of flash attention for all sequences (data.PackedBatch says what these are)."""
        batch = self.batch
        if len(batch.key_I):
            k, v = k[:, :, batch.key_I], v[:, :, batch.key_I]
        if self.cached:
            query_start_S = batch.completion_query_start_S
            max_queries = batch.max_completion_queries
        else:
            query_start_S = batch.query_start_S
            max_queries = batch.max_queries
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # (tokens, heads, D)
        # a token sees itself and the window - 1 tokens before it; -1: all tokens before it
        options = dict(scale=attn.scale, window_size=((attn.window or 0) - 1, 0))
        if "enable_gqa" in VARLEN:
            options["enable_gqa"] = k.shape[1] < q.shape[1]
        # The kernel fails for a maximum of 1 if some sequences are empty (flash-attention issue 1537).
        max_queries, max_keys = max(2, max_queries), max(2, batch.max_keys)
        key_start_S = batch.key_start_S
        out = varlen_attn(q, k, v, query_start_S, key_start_S, max_queries, max_keys, **options)
        return out.transpose(0, 1)[None]

    def tiled(self, attn, q, k, v):
        """Attention where flash attention does not fit: tile by tile."""
        if attn.window not in self.tiles_of_window:
            self.tiles_of_window[attn.window] = self.tiles(attn.window)
        bin_sizes, tiles = self.tiles_of_window[attn.window]
        # split instead of slices: its backward is a single cat
        k_bins, v_bins = k.split(bin_sizes, 2), v.split(bin_sizes, 2)
        out = []
        for q_tile, tile in zip(q.split([tile.n_queries for tile in tiles], 2), tiles):
            k_tile, v_tile = k_bins[tile.bin], v_bins[tile.bin]
            if tile.n_keys < bin_sizes[tile.bin]:
                k_tile, v_tile = k_tile[:, :, : tile.n_keys], v_tile[:, :, : tile.n_keys]
            out.append(sdpa(attn, q_tile, k_tile, v_tile, tile.mask))
        return torch.cat(out, dim=2)

    def tiles(self, window: int | None) -> tuple[list[int], list[Tile]]:
        """The number of tokens of each bin, and the tiles in the order of their queries.

        Short prompts form a bin with one tile under one mask. A long one is a bin of its own with a tile for each
        segment, so that few scores are computed only to be masked.

        The tile of a long prompt's completion is the same whether the prompt is computed or comes from a cache, so the
        numbers are, too: before the first update a log-ratio is exactly 0, although policy and reference may do this
        differently. Short prompts share a tile, and may differ by rounding.
        """
        batch = self.batch
        sizes = batch.sizes
        token_N = torch.arange(len(batch.token_N), device=batch.token_N.device)
        token_Q = self.queries(token_N)
        queries = self.query_counts()
        bin_sizes, tiles = [], []
        first_token = first_query = 0
        for number, prompts in enumerate(self.bins()):
            bin_size = sum(sizes[u] for u in prompts)
            bin_sizes.append(bin_size)
            # the bin's tiles: numbers of queries and keys, and whether attention is plain causal within the tile
            if len(prompts) > 1:
                n_queries = sum(sum(queries[u]) for u in prompts)
                cuts = [(n_queries, bin_size, False)]
            else:
                u = prompts[0]
                ends = list(itertools.accumulate(batch.segment_sizes[u]))
                # only the prompt is plain causal: a completion must not see the other completions
                causal = [end == ends[0] for end in ends]
                cuts = list(zip(queries[u], ends, causal))
            for n_queries, n_keys, causal in cuts:
                if n_queries == 0:
                    continue
                mask = None
                if window is not None or not causal:
                    i = token_Q[first_query : first_query + n_queries, None]
                    j = token_N[None, first_token : first_token + n_keys]
                    mask = self.mask(i, j, window)
                tiles.append(Tile(number, n_queries, n_keys, mask))
                first_query += n_queries
            first_token += bin_size
        return bin_sizes, tiles

    def bins(self) -> list[list[int]]:
        """Consecutive prompts that share a tile: up to TILE_TOKENS tokens together, or a longer one alone."""
        bins, bin_size = [], 0
        for u, size in enumerate(self.batch.sizes):
            if bins and bin_size + size <= TILE_TOKENS:
                bins[-1].append(u)
                bin_size += size
            else:
                bins.append([u])
                bin_size = size
        return bins

    def query_counts(self) -> list[list[int]]:
        """(U,) for each prompt: the queries of its segments."""
        counts = [list(sizes) for sizes in self.batch.segment_sizes]
        if self.cached:
            for segments in counts:
                segments[0] = 0
            if not any(map(sum, counts)):
                counts[0][0] = 1  # token 0 stands in: see PackedBatch.completion_M
        return counts

    def mask(self, i, j, window: int | None):
        """Whether token i attends to token j: j has the same prompt and is not after i, belongs to the prompt itself or
        to i's own completion, and is within the window."""
        batch = self.batch
        mask = (batch.prompt_N[i] == batch.prompt_N[j]) & (j <= i)
        mask = mask & ((batch.branch_N[j] == 0) | (batch.branch_N[j] == batch.branch_N[i]))
        if window is not None:
            mask = mask & (batch.position_N[i] - batch.position_N[j] < window)
        return mask


def flash_fits(attn, q) -> bool:
    """Whether torch's flash attention can compute this layer: on an Ampere GPU or later, in bfloat16 or float16, with
    a head size of up to 256 that is a multiple of 8, without softcap, and with a torch whose varlen_attn takes scale
    and window_size (2.11)."""
    if q.device.type != "cuda" or attn.cap is not None or "scale" not in VARLEN:
        return False
    if q.dtype not in (torch.bfloat16, torch.float16):
        return False
    D = q.shape[3]
    return D <= 256 and D % 8 == 0 and torch.cuda.get_device_capability(q.device)[0] >= 8


def sdpa(attn, q, k, v, mask):
    """Attention of q (R, heads, queries, D) to k and v (R, key heads, keys, D) -> (R, heads, queries, D).

    mask: boolean, True: attend; None: plain causal.
    """
    if k.shape[1] < q.shape[1]:
        per_key_head = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(per_key_head, dim=1)
        v = v.repeat_interleave(per_key_head, dim=1)
    if attn.cap is None:
        return nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=attn.scale
        )
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    score = attn.cap * torch.tanh(q @ k.mT * attn.scale / attn.cap)
    return score.masked_fill(~mask, -torch.inf).float().softmax(-1).to(v.dtype) @ v


class KVCache:
    """Keys and values of B sequences (prompts and their answers so far), for sampling.

    Slot p of a sequence holds its position p, so prompts of different lengths need no padding: slots beyond a
    sequence's position are masked, and overwritten later. The first forward takes the packed prompts, each of which it
    computes once, however many sequences have it; each later one takes one token of each sequence (see `at`).
    """

    def __init__(self, batch: PackedBatch, slots: int):
        self.slots = slots
        # after the first forward: the slots that are in use, those of the longest sequence
        self.length = 0
        self.tensors = {}  # layer -> keys, values; each (B, key heads, slots, D)
        self.masks = {}  # window -> mask of the current forward
        # the tokens of the next forward
        self.packed = PackedAttention(batch)  # None after the first forward
        self.token_RQ = batch.token_N[None]
        self.position_RQ = batch.position_N[None]
        # which of the tokens predict the sequences' next ones
        self.last_B = batch.source_T[batch.first_target_BK[:, 0]]
        self.row_B = torch.arange(len(self.last_B), device=batch.token_N.device)
        # where the tokens' keys and values go: to these rows, and to the slots of their positions
        self.row_of_token, self.copied_token = batch.prompt_N, None
        if len(batch.key_I):  # prompts are shared: each of their tokens goes to several rows
            self.copied_token = batch.key_I
            sequence_I = torch.repeat_interleave(
                batch.key_start_S.diff(), output_size=len(batch.key_I)
            )
            self.row_of_token = batch.sequence_BK[:, 0].argsort()[sequence_I]

    def at(self, token_B, position_B, longest: int) -> None:
        """Set the tokens of the next forward. `longest` is the largest of their positions."""
        self.token_RQ = token_B[:, None]
        self.position_RQ = position_B[:, None]
        self.row_of_token, self.copied_token = self.row_B, None
        self.last_B = self.row_B
        self.packed = None
        self.masks = {}
        self.length = longest + 1

    def keep(self, rows: list[int]) -> list[int]:
        """Keep the sequences in these rows (ascending) and drop the others. The last ones move into the gaps.

        Returns the row that each sequence had before, in the new order.
        """
        n = len(rows)
        gaps = sorted(set(range(n)).difference(rows))
        movers = [row for row in rows if row >= n]
        self.row_B = self.row_B[:n]
        if gaps:
            to = to_device(torch.tensor(gaps), self.row_B.device)
            source = to_device(torch.tensor(movers), self.row_B.device)
        for layer, (k, v) in self.tensors.items():
            if gaps:
                k[to] = k[source]
                v[to] = v[source]
            self.tensors[layer] = k[:n], v[:n]
        order = list(range(n))
        for gap, mover in zip(gaps, movers):
            order[gap] = mover
        return order

    def attend(self, attn, q, k, v):
        """q (R, H, Q, D), k and v (R, key heads, Q, D) of layer `attn` -> (R, H, Q, D). Fills the slots of k and v."""
        if attn not in self.tensors:
            shape = len(self.row_B), k.shape[1], self.slots
            self.tensors[attn] = k.new_zeros(*shape, k.shape[3]), v.new_zeros(*shape, v.shape[3])
        new_k, new_v = k.transpose(1, 2).flatten(0, 1), v.transpose(1, 2).flatten(0, 1)
        slot = self.position_RQ.flatten()
        if self.copied_token is not None:
            new_k, new_v = new_k[self.copied_token], new_v[self.copied_token]
            slot = slot[self.copied_token]
        cached_k, cached_v = self.tensors[attn]
        cached_k[self.row_of_token, :, slot] = new_k
        cached_v[self.row_of_token, :, slot] = new_v
        if self.packed:
            return self.packed.attend(attn, q, k, v)
        k, v = cached_k[:, :, : self.length], cached_v[:, :, : self.length]
        # The query heads that share a key head become queries of this head: keys need not be repeated.
        grouped = q.reshape(*k.shape[:2], -1, k.shape[3])
        out = sdpa(attn, grouped, k, v, self.mask(attn.window))
        return out.reshape(*q.shape[:3], v.shape[3])

    def mask(self, window: int | None):
        """(B, 1, 1, length): which slots the current tokens see."""
        if window not in self.masks:
            slot = torch.arange(self.length, device=self.position_RQ.device)
            distance = (self.position_RQ - slot)[:, None, None]
            self.masks[window] = (distance >= 0) & (distance < (window or self.length))
        return self.masks[window]


# ---- the model -----------------------------------------------------------------------------------


class _Packed:
    """What every model does with a PackedBatch or a KVCache. A model has, besides: config, blocks, embedding, lm_head,
    hidden and set_tables."""

    # True: the backward runs blocks again instead of saving their activations
    activation_checkpointing = False
    # True: a forward with gradient leaves in entropy_BK, for each completion, the sum over its tokens of the entropy of
    # the distribution from which the token is drawn, in nats
    measures_entropy = False
    entropy_BK: torch.Tensor | None = None

    def __init__(self, config):
        super().__init__(config)
        # of the objective's own (train.Objective.make_module): trained and saved with the model, never exported
        self.objective_module: nn.Module | None = None
        # attached to lm_head, so that FSDP2 gathers the head's weight before the call
        self.lm_head.logp = functools.partial(_logp, self)

    def forward(self, x: PackedBatch | KVCache, prompt_cache: PromptCache | None = None):
        """PackedBatch -> (B, K) summed log-probs of the completions, in nats: float64 for a float64 model, else
        float32. With data.score_prompt each sum has the prompt's log-probs, too. If the batch says by_token: (B, K, L)
        log-probs of the completions' tokens, 0 beyond a completion's end.

        If the objective has a module and the batch is for_loss: a pair of these log-probs and of the module's outputs,
        (B, K, L, ...).

        KVCache -> (B, V) logits of the next tokens, in float32.

        prompt_cache: the first forward that gets it fills it; later ones read it and compute completions only.
        """
        if isinstance(x, KVCache):
            h_RQC = self.hidden(x.token_RQ, x.position_RQ, x)
            return self.head(h_RQC.flatten(0, 1)[x.last_B]).float()
        attention = PackedAttention(x, prompt_cache)
        token_Q = attention.queries(x.token_N)
        position_Q = attention.queries(x.position_N)
        h_QC = self.hidden(token_Q[None], position_Q[None], attention)[0]
        # the head runs only on hidden states that predict a target
        h_TC = attention.all_tokens("h", h_QC, 0)[x.source_T]
        logps = self._completion_logps(x, h_TC)
        if self.objective_module is None or not x.for_loss:
            return logps
        return logps, x.tokens_of_completions(self._module_outputs(h_TC))

    def _completion_logps(self, x: PackedBatch, h_TC):
        entropy = self.measures_entropy and torch.is_grad_enabled()
        logp_T, entropy_T = self.lm_head.logp(h_TC, x.target_T, entropy)
        if torch.is_grad_enabled():
            self.entropy_BK = x.sums(entropy_T) if entropy else None
        return x.tokens_of_completions(logp_T) if x.by_token else x.sums(logp_T)

    def _module_outputs(self, h_TC):
        """What the objective's module makes of the hidden states: (T, ...), at least in float32. Raises Failed."""
        with torch.autocast(h_TC.device.type, enabled=False):
            out_T = self.objective_module(h_TC.to(torch.promote_types(h_TC.dtype, torch.float32)))
        if out_T.shape[:1] != h_TC.shape[:1]:
            T, shape = len(h_TC), tuple(out_T.shape)
            raise Failed(f"make_module: one output a token, shape ({T}, ...), not {shape}")
        return out_T

    def head(self, h):
        """Hidden states (..., C) -> logits (..., V), softcapped where the model does that."""
        logits = self.lm_head(h)
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _head_linear(self) -> nn.Module:
        """The head's linear layer; a LoRA layer holds it as .linear."""
        return getattr(self.lm_head, "linear", self.lm_head)

    @property
    def plain_head(self) -> bool:
        """Whether the head is one matrix: no bias, no adapters."""
        return self._head_linear().bias is None and not getattr(self.lm_head, "r", 0)

    @property
    def tied(self) -> bool:
        """Whether the head's matrix is the embedding."""
        return self._head_linear().weight is self.embedding.weight

    def tie(self) -> None:
        """Make the embedding the head's matrix."""
        self._head_linear().weight = self.embedding.weight

    def cache_bytes(self, slots: int) -> int:
        """Bytes of a KVCache for one sequence, in the dtype of the embedding."""
        c = self.config
        numbers = 2 * c.n_layer * c.n_query_groups * c.head_size * slots
        return numbers * self.embedding.weight.element_size()

    def unique_parameters(self, with_objective: bool = True) -> dict[str, nn.Parameter]:
        """Parameters by name. A tied head appears only as the embedding. with_objective: those of the objective's
        module, too, as objective_module.*"""
        # after a forward without backward FSDP2 leaves gathered copies in place of the root's parameters
        if hasattr(self, "reshard"):
            self.reshard()
        parameters = dict(self.named_parameters(remove_duplicate=False))
        if self.tied:
            parameters.pop("lm_head.weight", None)
            parameters.pop("lm_head.linear.weight", None)
        if with_objective:
            return parameters
        return {n: p for n, p in parameters.items() if not n.startswith("objective_module.")}


def _logp(model: _Packed, h_TC, target_T, entropy: bool = False):
    """Log-probs of the targets (T,), chunk by chunk: the (T, V) logits never exist together. And the entropy (T,), or
    None."""
    device, cap = h_TC.device.type, model.config.final_logit_softcapping
    chunks = Chunks.of(device, model.config.padded_vocab_size, entropy)
    if model.plain_head:
        dtype = h_TC.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        return Head.apply(h_TC.to(dtype), model._head_linear().weight, target_T, cap, chunks)

    def chunk_logp(h_TC, target_T):
        logits_TV = model.head(h_TC)
        logp_T, logp_TV = logp_of(logits_TV, target_T)
        if not entropy:
            return logp_T, None
        with torch.no_grad():
            return logp_T, entropy_of(logits_TV, logp_TV.exp(), target_T, logp_T)

    # a head with a bias or adapters: autograd, with the logits of each chunk computed again in the backward
    parts = zip(h_TC.split(chunks.size), target_T.split(chunks.size))
    logps, entropies = zip(*[checkpoint(chunk_logp, h, t, use_reentrant=False) for h, t in parts])
    return torch.cat(logps), torch.cat(entropies) if entropy else None


class _PackedGPT(_Packed):
    """litgpt's GPT (plain or LoRA)."""

    def __init__(self, config):
        super().__init__(config)
        if config.latent_attention:
            raise BadInput(f"model: {config.name}: latent attention is not supported")
        if config.rope_n_elem == 0:  # GPT-2: learned positions instead of rotary ones
            self.transformer["wpe"] = nn.Embedding(config.block_size, config.n_embd)
        width = config.attention_scores_scalar or config.head_size
        for block in self.blocks:
            attn = block.attn
            attn.window = None
            if attn.apply_sliding_window_attention:
                attn.window = config.sliding_window_size
            attn.scale = attn.mscale**2 / math.sqrt(width)
            attn.cap = config.attention_logit_softcapping
            attn.forward = functools.partial(_attention_forward, attn)
        self._scale(**config.hf_config.get("scales", {}))

    def _scale(self, embedding_multiplier=1, residual_multiplier=1, logits_scaling=1) -> None:
        """Granite's factors, for which litgpt's block has no place: they multiply the modules' outputs."""
        factors = {
            self.transformer.wte: embedding_multiplier,
            self.transformer.ln_f: 1 / logits_scaling,
        }
        for block in self.blocks:
            factors[block.post_attention_norm] = residual_multiplier
            factors[block.post_mlp_norm] = residual_multiplier
        for module, factor in factors.items():
            if factor != 1:
                module.register_forward_hook(lambda m, args, y, factor=factor: y * factor)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.transformer.h

    @property
    def embedding(self) -> nn.Embedding:
        return self.transformer.wte

    def set_tables(self, dtype: torch.dtype) -> None:
        """Make the tables of rotary positions."""
        self.cos, self.sin = (x.to(dtype) for x in rope_tables(self))

    def hidden(self, token_RQ, position_RQ, attention: PackedAttention | KVCache):
        """-> last hidden states (R, Q, C)."""
        config = self.config
        x_RQC = self.transformer.wte(token_RQ)
        if config.scale_embeddings:
            x_RQC = x_RQC * torch.tensor(config.n_embd**0.5, dtype=x_RQC.dtype)
        if "wpe" in self.transformer:
            x_RQC = x_RQC + self.transformer.wpe(position_RQ)
        cos, sin = self.cos[position_RQ], self.sin[position_RQ]
        for i, block in enumerate(self.blocks):
            block_cos, block_sin = cos, sin
            if config.rope_indices is not None:  # Gemma 3: local layers have another base
                block_cos = cos[..., config.rope_indices[i]]
                block_sin = sin[..., config.rope_indices[i]]
            # litgpt's block hands its fourth argument, there a mask, to its attention
            inputs = x_RQC, block_cos, block_sin, attention
            if self.activation_checkpointing and torch.is_grad_enabled():
                x_RQC = checkpoint(block, *inputs, use_reentrant=False)
            else:
                x_RQC = block(*inputs)
        return self.transformer.ln_f(x_RQC)


def _attention_forward(attn, x, cos, sin, attention: PackedAttention | KVCache, *_unused):
    """The forward of litgpt's attention layer `attn`: (R, Q, C) -> (R, Q, C).

    Unlike litgpt's own it copies neither grouped keys nor the elements that are not rotated.
    """
    config = attn.config
    D, n_rotary = config.head_size, config.rope_n_elem
    key_width = config.n_query_groups * D
    q, k, v = attn.qkv(x).split([config.n_head * D, key_width, key_width], dim=-1)
    if config.norm_qk and config.norm_qk_type == "olmo2":
        q, k = attn.norm_q(q), attn.norm_k(k)
    q, k, v = (y.unflatten(-1, (-1, D)).transpose(1, 2) for y in (q, k, v))  # (R, heads, Q, D)
    if config.norm_qk and config.norm_qk_type == "default":
        q, k = attn.norm_q(q), attn.norm_k(k)
    rotate = litgpt.model.apply_rope
    if config.rope_interleave:
        rotate = litgpt.model.apply_rope_interleave
    if n_rotary == D:
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    elif n_rotary:
        q = torch.cat([rotate(q[..., :n_rotary], cos, sin), q[..., n_rotary:]], -1)
        k = torch.cat([rotate(k[..., :n_rotary], cos, sin), k[..., n_rotary:]], -1)
    return attn.proj(attention.attend(attn, q, k, v).transpose(1, 2).flatten(2))


class GPT(_PackedGPT, litgpt.model.GPT): ...


class LoraGPT(_PackedGPT, litgpt.lora.GPT): ...


class TransformersGPT(_Packed, TransformersBlocks): ...


def _model_of(config: litgpt.Config) -> nn.Module:
    """A model of this config; adapters are a part of it. Raises BadInput."""
    if "transformers" in config.hf_config:
        return TransformersGPT(config)
    return (LoraGPT if isinstance(config, litgpt.lora.Config) else GPT)(config)


@torch.no_grad()
def cast_linears_to_bfloat16(model: nn.Module) -> None:
    """Hold the linear layers in bfloat16, except a matrix that is the embedding, too. Under bfloat16 autocast, which
    would cast them at each use, log-probs stay the same bits in half the memory."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight is not model.embedding.weight:
            module.to(torch.bfloat16)


# ---- loading -------------------------------------------------------------------------------------


def freeze(model: nn.Module, precision: str) -> nn.Module:
    """Make a model a reference: without gradients, and held in the precision in which it computes."""
    model.requires_grad_(False).eval()
    if precision == "bf16-mixed":
        cast_linears_to_bfloat16(model)
    return model


def make_model(arguments: dict, lora: Lora | None, names: dict | None) -> nn.Module:
    """A model whose weights are still to be loaded, from arguments of litgpt's Config; with adapters if `lora` has a
    rank.

    names: as in hub.families.ModelConfig; lora.targets may use them. Raises BadInput.
    """
    return _model_of(config_with_adapters(arguments, lora, names))


def read_folder_weights(folder: Path, dtype: torch.dtype) -> LazyTensors:
    """A folder's weights by our names, with adapters merged. Each is read when it is asked for. Raises BadInput."""
    source = read_source(folder)
    arguments, _, names = source
    with weights_must_fit(folder), torch.device("meta"):
        model = make_model(arguments, None, names)
    with weights_must_fit(folder):
        return read_weights(model, folder, source, dtype)


def load_model(
    folder: Path, lora: Lora | None = None, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """A model on the CPU with its weights in `dtype`, from a Hugging Face or a litgpt checkpoint folder.

    New adapters start at zero: the model computes what its base computes, to the bit. Raises BadInput.
    """
    source = read_source(folder)
    arguments, _, names = source
    with weights_must_fit(folder):
        with torch.device("meta"):
            model = make_model(arguments, lora, names)
        fill_model(model, folder, source, dtype)
    model.set_tables(dtype)
    model.requires_grad_(True)
    if isinstance(model.config, litgpt.lora.Config):
        create_adapters(model, dtype)
    if isinstance(model, TransformersGPT):
        compare_with_transformers(model)
    return model


# Largest difference of a log-prob, in nats, by the dtype of the weights.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.5}


@torch.no_grad()
def compare_with_transformers(model: TransformersGPT) -> None:
    """Raise BadInput unless the model computes, on a few packed sequences, the log-probs that transformers' own forward
    computes on each sequence alone: where completions share a prompt, where the prompts come from a PromptCache, and
    token by token with a KVCache."""
    config = model.config
    plain = make_causal_lm(config.hf_config["transformers"], "eager").eval()
    weights = plain_names(dict(model.named_parameters(remove_duplicate=False)))
    # detached: load_state_dict would make our own parameters require a gradient
    weights = {name: x.detach() for name, x in weights.items()} | constants(model)
    r = np.random.default_rng(0)
    prompts = [r.integers(config.vocab_size, size=n) for n in (9, 1, 5)]
    sizes = (4, 7), (2, 1), (6, 3)
    completions = [tuple(r.integers(config.vocab_size, size=n) for n in pair) for pair in sizes]
    batch = pack(prompts, completions)._replace(by_token=True)
    prompt_cache, longest = PromptCache(), max(map(len, prompts))
    kv_cache = KVCache(pack(prompts, [(first[:1],) for first, _ in completions]), longest + 1)
    token_B = torch.tensor([first[0] for first, _ in completions])
    position_B = torch.tensor(list(map(len, prompts)))
    where = f"model: {config.name}"
    with their_errors(where):
        plain.load_state_dict(weights, assign=True)
        theirs_BKL, theirs = torch.zeros_like(model(batch, prompt_cache)), []
        for b, prompt in enumerate(prompts):
            for k, completion in enumerate(completions[b]):
                ids = torch.tensor(np.concatenate([prompt, completion]))
                logp_NV = plain(input_ids=ids[None]).logits[0].double().log_softmax(-1)
                target_T = ids[len(prompt) :]
                logp_TV = logp_NV[len(prompt) - 1 : -1]
                theirs_BKL[b, k, : len(target_T)] = logp_TV.gather(1, target_T[:, None])[:, 0]
                if k == 0:
                    theirs.append(logp_NV[len(prompt) - 1 : len(prompt) + 1])
        ours = [model(kv_cache)]
        kv_cache.at(token_B, position_B, longest)
        ours.append(model(kv_cache))
        differences = {
            "with shared prompts": model(batch) - theirs_BKL,
            "with cached prompts": model(batch, prompt_cache) - theirs_BKL,
            "token by token": torch.stack(ours, 1).double().log_softmax(-1) - torch.stack(theirs),
        }
    if (n := len(model.slot.called)) != config.n_layer:
        parts = {type(part).__name__ for block in model.blocks for part in block.children()}
        raise BadInput(
            f"{where}: {n} of {config.n_layer} layers have an attention that can be replaced; "
            f"they are made of {printable(', '.join(sorted(parts)), 200)}"
        )
    most = TOLERANCE[model.embedding.weight.dtype]
    for name, difference in differences.items():
        if not (largest := difference.abs().max().item()) <= most:
            raise BadInput(
                f"{where}: log-probs {name} are up to {largest:.2g} nats from transformers' own, "
                f"expected at most {most:g}"
            )


# ---- sharding: rank 0 alone reads the weights ----------------------------------------------------


def shard_over_ranks(
    fabric,
    whole: nn.Module | None,
    precision: str,
    learns: bool,
    objective_module: nn.Module | None = None,
) -> nn.Module:
    """A model that rank 0 holds (elsewhere None), sharded over all ranks: no other rank ever has the
    whole of it. The objective's module, if there is one, is sharded with it. A collective."""
    first = fabric.global_rank == 0
    shell = _empty_like(*fabric.broadcast(_description(whole) if first else None))
    shell.objective_module = objective_module
    if first:  # its values count, not those that the other ranks have drawn
        whole.objective_module = copy.deepcopy(objective_module)
    if not learns:
        freeze(shell, precision)
    module = fabric.setup_module(shell)
    set_weights(module, whole.unique_parameters() if first else None)
    return module


def _description(whole: nn.Module) -> tuple:
    """What _empty_like needs, sent to the ranks that do not hold the model."""
    params = whole.named_parameters(remove_duplicate=False)
    params = {n: (p.dtype, p.requires_grad) for n, p in params}
    return whole.config, whole.tied, params, constants(whole)


def _empty_like(config, tied: bool, params: dict, constants: dict) -> nn.Module:
    """A model of this description on the meta device, without its weights."""
    with torch.device("meta"):
        gpt = _model_of(config)
    for name, p in list(gpt.named_parameters()):
        owner, _, attribute = name.rpartition(".")
        dtype, learns = params[name]
        setattr(gpt.get_submodule(owner), attribute, nn.Parameter(p.to("meta", dtype), learns))
    if tied:
        gpt.tie()
    gpt.set_tables(gpt.embedding.weight.dtype)
    gpt.load_state_dict(constants, strict=False)
    return gpt

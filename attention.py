"""Who attends to whom: over a packed batch, whose completions share their prompts, or over a cache of keys and values.

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
    I  gathered keys, S  starts of attention's sequences: see packing.PackedBatch
    H  query heads (keys and values may have fewer: grouped-query attention)
    D  size of a head
"""

import inspect
import math

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn

from packing import PackedBatch, to_device

# Prompts (with their completions) of up to so many tokens together share one tile of attention. A larger tile means
# fewer calls, but more scores that are computed only to be masked.
TILE_TOKENS = 128

# Torch 2.10 lacks some of these arguments (see flash_fits).
VARLEN = inspect.signature(varlen_attn).parameters


class PromptCache:
    """Keys, values and last hidden states of a batch's prompts.

    The first forward that gets the cache fills it. Later forwards, without gradient and over the same prompts with
    other completions, read it.
    """

    def __init__(self):
        self.batch: PackedBatch | None = None  # the one that filled the cache
        self.tensors = {}  # name -> values for all N tokens of that batch


class PackedAttention:
    """Which token attends to which in a packed batch, for one forward. All layers share it, with its tiles' masks."""

    def __init__(self, batch: PackedBatch, prompt_cache: PromptCache | None = None):
        self.batch, self.cache = batch, prompt_cache
        self.bins_of_window = {}
        # whether the prompts come from the cache; else this forward fills it
        self.cached = prompt_cache is not None and prompt_cache.batch is not None
        if prompt_cache and not self.cached:
            prompt_cache.batch = batch

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
        shape = list(x.shape)
        shape[dim] = len(self.batch.token_N)
        # completions first: if token 0 stands in for them, its prompt's values must win
        out = x.new_empty(shape).index_copy_(dim, self.batch.completion_M, x)
        prompt = cached.index_select(dim, self.cache.batch.prompt_P)
        return out.index_copy_(dim, self.batch.prompt_P, prompt)

    def attend(self, attn, q, k, v):
        """q (1, H, Q, D), k and v (1, key heads, Q, D) of layer `attn` -> (1, H, Q, D)."""
        k = self.all_tokens((attn, "k"), k, 2)
        v = self.all_tokens((attn, "v"), v, 2)
        if flash_fits(attn, q):
            return self.flash(attn, q, k, v)
        return self.tiled(attn, q, k, v)

    def flash(self, attn, q, k, v):
        """One call of flash attention for all sequences (packing.PackedBatch says what these are)."""
        batch = self.batch
        if len(batch.key_I):
            k, v = k[:, :, batch.key_I], v[:, :, batch.key_I]
        query_start_S = batch.completion_query_start_S if self.cached else batch.query_start_S
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # (tokens, heads, D)
        # a token sees itself and the window - 1 tokens before it; -1: all tokens before it
        options = dict(scale=attn.scale, window_size=((attn.window or 0) - 1, 0))
        if "enable_gqa" in VARLEN:
            options["enable_gqa"] = k.shape[1] < q.shape[1]
        # The kernel fails for a maximum of 1 if some sequences are empty (flash-attention issue 1537).
        most = [max(2, batch.max_keys)] * 2  # bounds for queries and keys
        out = varlen_attn(q, k, v, query_start_S, batch.key_start_S, *most, **options)
        return out.transpose(0, 1)[None]

    def tiled(self, attn, q, k, v):
        """Attention where flash attention does not fit: tile by tile."""
        if attn.window not in self.bins_of_window:
            self.bins_of_window[attn.window] = self.bins(attn.window)
        bins = self.bins_of_window[attn.window]
        n_queries = [n for _, tiles in bins for n, *_ in tiles]
        # split instead of slices: its backward is a single cat
        k_bins, v_bins = (x.split([size for size, _ in bins], 2) for x in (k, v))
        q_tiles, out = iter(q.split(n_queries, 2)), []
        for (_, tiles), k_bin, v_bin in zip(bins, k_bins, v_bins):
            for _, n, mask in tiles:
                out.append(sdpa(attn, next(q_tiles), k_bin[:, :, :n], v_bin[:, :, :n], mask))
        return torch.cat(out, dim=2)

    def bins(self, window: int | None) -> list[tuple[int, list[tuple]]]:
        """Consecutive tokens that attend to each other alone: their number, and the tiles of their queries.

        A tile is one call of scaled_dot_product_attention: the number of the next queries, that of the first keys of
        the bin, and a mask (n_queries, n_keys), True: attend; None: plain causal attention.

        Short prompts form a bin with one tile under one mask. A long one is a bin of its own with a tile for each
        segment, so that few scores are computed only to be masked.

        The tile of a long prompt's completion is the same whether the prompt is computed or comes from a cache, so the
        numbers are, too: before the first update a log-ratio is exactly 0, although policy and reference may do this
        differently. Short prompts share a tile, and may differ by rounding.
        """
        batch, bins, first_token, first_query = self.batch, [], 0, 0
        token_N = torch.arange(len(batch.token_N), device=batch.token_N.device)
        token_Q = self.queries(token_N)
        for segments in self.segments_of_bins():
            tiles, n_keys = [], 0
            for number, (n_queries, n_tokens) in enumerate(segments):
                n_keys += n_tokens
                if n_queries == 0:
                    continue
                mask = None
                # only a prompt is plain causal: a completion must not see the other completions
                if window is not None or number > 0 or len(segments) == 1:
                    i = token_Q[first_query : first_query + n_queries, None]
                    j = token_N[None, first_token : first_token + n_keys]
                    # the same prompt, and not after i; of the prompt itself, or of i's own completion
                    mask = (batch.prompt_N[i] == batch.prompt_N[j]) & (j <= i)
                    mask &= (batch.branch_N[j] == 0) | (batch.branch_N[j] == batch.branch_N[i])
                    if window is not None:
                        mask &= batch.position_N[i] - batch.position_N[j] < window
                tiles.append((n_queries, n_keys, mask))
                first_query += n_queries
            bins.append((n_keys, tiles))
            first_token += n_keys
        return bins

    def segments_of_bins(self) -> list[list[tuple[int, int]]]:
        """Bins of consecutive prompts: up to TILE_TOKENS tokens together, or a longer one alone. A bin of one prompt
        has (queries, tokens) of itself and of each completion; a bin of several has one such pair, their sum."""
        batch, bins, bin_size = self.batch, [], math.inf
        # 1 where token 0 stands in (see PackedBatch.completion_M), else 0
        n_queries = len(batch.prompt_P) + len(batch.completion_M) - len(batch.token_N)
        for row in batch.segment_sizes:
            segments = list(zip([n_queries, *row[1:]] if self.cached else row, row))
            n_queries = 0
            bin_size += sum(row)
            if bin_size > TILE_TOKENS:
                bin_size = sum(row)
                bins.append(segments)
            else:
                bins[-1] = [tuple(map(sum, zip(*bins[-1], *segments)))]
        return bins


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

    mask: boolean, True: attend; or numbers to add to the scores; None: plain causal.
    """
    n = q.shape[1] // k.shape[1]
    if n > 1:
        k, v = (x.repeat_interleave(n, dim=1) for x in (k, v))
    if attn.cap is None:
        return nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=attn.scale
        )
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    score = attn.cap * torch.tanh(q @ k.mT * attn.scale / attn.cap)
    score = score.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else score + mask
    return score.float().softmax(-1).to(v.dtype) @ v


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
        self.masks = {}  # (window, dtype) -> mask of the current forward
        # the tokens of the next forward
        self.packed = PackedAttention(batch)  # None after the first forward
        self.token_RQ = batch.token_N[None]
        self.position_RQ = batch.position_N[None]
        # which of the tokens predict the sequences' next ones
        self.last_B = batch.source_T[batch.first_target_BK[:, 0]]
        self.row_B = torch.arange(len(self.last_B), device=batch.token_N.device)
        # where the tokens' keys and values go: to these rows, and to the slots of their positions
        # prompts are shared if there is key_I: then each of their tokens goes to several rows
        self.copied_token = batch.key_I if len(batch.key_I) else slice(None)
        sequence_I = torch.repeat_interleave(
            batch.key_start_S.diff(), output_size=len(batch.key_I) or len(batch.token_N)
        )
        self.row_of_token = batch.sequence_BK[:, 0].argsort()[sequence_I]

    def at(self, token_B, position_B, longest: int) -> None:
        """Set the tokens of the next forward. `longest` is the largest of their positions."""
        self.token_RQ = token_B[:, None]
        self.position_RQ = position_B[:, None]
        self.row_of_token, self.copied_token = self.row_B, slice(None)
        self.last_B = self.row_B
        self.packed = None
        self.masks = {}
        self.length = longest + 1

    def keep(self, rows: list[int]) -> list[int]:
        """Keep the sequences in these rows (ascending) and drop the others. The last ones move into the gaps.

        Returns the row that each sequence had before, in the new order.
        """
        n = len(rows)
        gaps = sorted({*range(n)} - {*rows})
        movers = [row for row in rows if row >= n]
        self.row_B = self.row_B[:n]
        to, source = (
            to_device(torch.tensor(x, dtype=torch.long), self.row_B.device) for x in (gaps, movers)
        )
        for layer, (k, v) in self.tensors.items():
            k[to], v[to] = k[source], v[source]
            self.tensors[layer] = k[:n], v[:n]
        row_before = dict(zip(gaps, movers))
        return [row_before.get(row, row) for row in range(n)]

    def attend(self, attn, q, k, v):
        """q (R, H, Q, D), k and v (R, key heads, Q, D) of layer `attn` -> (R, H, Q, D). Fills the slots of k and v."""
        shape = len(self.row_B), k.shape[1], self.slots
        if attn not in self.tensors:
            self.tensors[attn] = [x.new_zeros(*shape, x.shape[3]) for x in (k, v)]
        slot = self.position_RQ.flatten()[self.copied_token]
        for cached, new in zip(self.tensors[attn], (k, v)):
            new = new.transpose(1, 2).flatten(0, 1)[self.copied_token]
            cached[self.row_of_token, :, slot] = new
        if self.packed:
            return self.packed.attend(attn, q, k, v)
        k, v = (cached[:, :, : self.length] for cached in self.tensors[attn])
        # The query heads that share a key head become queries of this head: keys need not be repeated.
        grouped = q.reshape(*k.shape[:2], -1, k.shape[3])
        out = sdpa(attn, grouped, k, v, self.mask(attn.window, q.dtype))
        return out.reshape(*q.shape[:3], v.shape[3])

    def mask(self, window: int | None, dtype: torch.dtype):
        """(B, 1, 1, length), added to the scores: 0 for the slots that the current tokens see, else -inf.

        Made once a forward: of booleans each layer would make these numbers again. Its rows begin at multiples of 16
        numbers, else a GPU's kernels would copy it in each layer.
        """
        if (window, dtype) not in self.masks:
            slot = torch.arange(-(-self.length // 16) * 16, device=self.position_RQ.device)
            distance = (self.position_RQ - slot)[:, None, None]
            is_seen = (distance >= 0) & (distance < (window or self.length))
            mask = torch.zeros(is_seen.shape, dtype=dtype, device=slot.device)
            self.masks[window, dtype] = mask.masked_fill_(~is_seen, -torch.inf)[..., : self.length]
        return self.masks[window, dtype]

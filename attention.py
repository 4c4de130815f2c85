"""Which token attends to which in a packed batch, where completions share prompts. (sampler.py has the key/value
cache.)

Shape letters; B, K, U, N, P, M, T, L, I and S are those of packing.py:

    B  examples of a micro-batch; in sampling, answers
    K  completions of an example
    U  prompts of a micro-batch: examples with one prompt share it
    N  packed input tokens of a batch
    P  those of the N that belong to prompts
    M  those of the N that belong to completions
    Q  queries, the tokens that a forward computes: all N, or the M if an earlier forward computed the prompts
       (see PromptCache); in sampling, one a sequence after the first forward
    R  rows of Q queries: B in sampling after the first forward, else 1
    T  targets: tokens that are predicted and scored
    L  tokens of the longest completion
    I  gathered keys, S  starts of attention's sequences: see packing.PackedBatch
    H  query heads (keys and values may have fewer: grouped-query attention)
    D  size of a head
"""

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from packing import PackedBatch

# Prompts (with their completions) of up to so many tokens together share one tile of attention. A larger tile means
# fewer calls, but more scores that are computed only to be masked.
TILE_TOKENS = 128

# Torch 2.10 lacks some of these arguments (see flash_fits).
VARLEN = inspect.signature(varlen_attn).parameters


class Layer(NamedTuple):
    """The properties of an attention layer that PackedAttention and KVCache need."""

    module: nn.Module  # tells the layers of a model apart
    window: int | None  # tokens that a token sees, itself included; None: all before it
    scale: float | None  # factor of the scores; None: 1 / sqrt(D)
    cap: float | None  # softcap of the scores


class PromptCache:
    """A batch's prompts after a forward, detached: keys and values of each layer, and the last hidden states. Later
    forwards read them: without gradient, over the same prompts with other completions.

    Each tensor holds all N tokens of the batch that was computed.
    """

    def __init__(self, batch: PackedBatch):
        self.batch = batch
        self.keys: dict[Layer, Tensor] = {}
        self.values: dict[Layer, Tensor] = {}
        self.hidden: Tensor | None = None


class PackedAttention:
    """Attention in a packed batch, for one forward. All layers share it, with its tiles' masks.

    prompts: an earlier forward's, so that only completions are queries here.
    keeps_prompts: save this forward's prompts in `kept`.
    """

    def __init__(
        self, batch: PackedBatch, prompts: PromptCache | None = None, keeps_prompts: bool = False
    ):
        self.batch = batch
        # Completions of one token have no input token. The layers need a query, so the prompts are computed again.
        self.prompts = prompts if len(batch.completion_M) else None
        self.kept = PromptCache(batch) if keeps_prompts else None
        self.bins_of_window: dict[int | None, list[Bin]] = {}

    def queries(self, x_N: Tensor) -> Tensor:
        """The part of x_N that belongs to the Q queries."""
        return x_N if self.prompts is None else x_N[self.batch.completion_M]

    def attend(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (1, H, Q, D), k and v (1, key heads, Q, D) -> (1, H, Q, D)."""
        if self.kept is not None:
            # setdefault: a block that activation checkpointing runs again must not replace what was kept
            self.kept.keys.setdefault(layer, k.detach())
            self.kept.values.setdefault(layer, v.detach())
        if self.prompts is not None:
            k = self.after_prompts(self.prompts.keys[layer], k, 2)
            v = self.after_prompts(self.prompts.values[layer], v, 2)
        if flash_fits(layer, q, v):
            return self.flash(layer, q, k, v)
        return self.tiled(layer, q, k, v)

    def last_hidden(self, h_QC: Tensor) -> Tensor:
        """The last hidden states of the Q queries -> those of all N tokens."""
        if self.kept is not None:
            self.kept.hidden = h_QC.detach()
        if self.prompts is not None:
            return self.after_prompts(self.prompts.hidden, h_QC, 0)
        return h_QC

    def after_prompts(self, x_prompts: Tensor, x: Tensor, dim: int) -> Tensor:
        """x_prompts of all tokens of the earlier forward's batch, and x of this forward's queries -> x of all N
        tokens, along dimension `dim`."""
        shape = list(x.shape)
        shape[dim] = len(self.batch.token_N)
        out = x.new_empty(shape).index_copy_(dim, self.batch.completion_M, x)
        prompt = x_prompts.index_select(dim, self.prompts.batch.prompt_P)
        return out.index_copy_(dim, self.batch.prompt_P, prompt)

    def flash(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One call of flash attention for all sequences (see packing.PackedBatch)."""
        batch = self.batch
        # (tokens, heads, D)
        q = q[0].transpose(0, 1)
        k = k[0].transpose(0, 1)
        v = v[0].transpose(0, 1)
        if batch.shares_prompts:
            k = GatherKeys.apply(k, batch)
            v = GatherKeys.apply(v, batch)
        query_start_S = batch.query_start_S
        if self.prompts is not None:
            query_start_S = batch.completion_query_start_S
        # a token sees itself and the window - 1 tokens before it; -1: all tokens before it
        options = dict(scale=layer.scale, window_size=((layer.window or 0) - 1, 0))
        if "enable_gqa" in VARLEN:
            options["enable_gqa"] = k.shape[1] < q.shape[1]
        # The kernel fails for a maximum of 1 if some sequences are empty (flash-attention issue 1537).
        most = [max(2, batch.max_keys)] * 2  # bounds for queries and keys
        out = varlen_attn(q, k, v, query_start_S, batch.key_start_S, *most, **options)
        return out.transpose(0, 1)[None]

    def tiled(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention where flash attention does not fit: tile by tile."""
        if layer.window not in self.bins_of_window:
            self.bins_of_window[layer.window] = self.bins(layer.window)
        bins = self.bins_of_window[layer.window]
        n_tokens = []
        n_queries = []
        for token_bin in bins:
            n_tokens.append(token_bin.n_tokens)
            n_queries += [tile.n_queries for tile in token_bin.tiles]
        # split instead of slices: its backward is a single cat
        k_bins = k.split(n_tokens, 2)
        v_bins = v.split(n_tokens, 2)
        q_tiles = iter(q.split(n_queries, 2))
        out = []
        for token_bin, k_bin, v_bin in zip(bins, k_bins, v_bins):
            for tile in token_bin.tiles:
                k_tile = k_bin[:, :, : tile.n_keys]
                v_tile = v_bin[:, :, : tile.n_keys]
                out.append(sdpa(layer, next(q_tiles), k_tile, v_tile, tile.mask))
        return torch.cat(out, dim=2)

    def bins(self, window: int | None) -> list["Bin"]:
        """The whole row as bins, in three steps: the segments of each prompt; short prompts joined; a tile for each
        segment with queries.

        The tile of a long prompt's completion is the same whether the prompt is computed or was computed before, so
        the numbers are, too: before the first update a log-ratio is exactly 0, although policy and reference may do
        this differently. Short prompts share a tile, and may differ by rounding.
        """
        bins = []
        token_N = torch.arange(len(self.batch.token_N), device=self.batch.token_N.device)
        token_Q = self.queries(token_N)
        first_token = 0
        first_query = 0
        for segments in join_short_prompts(self.segments_of_prompts()):
            tiles = []
            n_keys = 0
            for segment in segments:
                n_keys += segment.n_tokens
                if segment.n_queries == 0:
                    continue
                mask = None
                # only a prompt alone is plain causal: a completion must not see the other completions
                is_plain_causal = window is None and segment.is_prompt
                if not is_plain_causal:
                    queries = token_Q[first_query : first_query + segment.n_queries]
                    mask = self.mask(queries, token_N[first_token : first_token + n_keys], window)
                tiles.append(Tile(segment.n_queries, n_keys, mask))
                first_query += segment.n_queries
            bins.append(Bin(n_keys, tiles))
            first_token += n_keys
        return bins

    def mask(self, queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
        """(queries, keys), True: attend. Both are given as numbers of tokens in the row."""
        batch = self.batch
        i = queries[:, None]
        j = keys[None]
        # the same prompt, and not after i; of the prompt itself, or of i's own completion
        mask = (batch.prompt_N[i] == batch.prompt_N[j]) & (j <= i)
        mask &= (batch.branch_N[j] == 0) | (batch.branch_N[j] == batch.branch_N[i])
        if window is not None:
            mask &= batch.position_N[i] - batch.position_N[j] < window
        return mask

    def segments_of_prompts(self) -> list[list["Segment"]]:
        """The segments of each prompt: one of its tokens, then one for each completion. A prompt that an earlier
        forward computed has no queries."""
        prompts = []
        for n_prompt, *n_completions in self.batch.segment_sizes:
            n_queries = n_prompt if self.prompts is None else 0
            segments = [Segment(n_queries, n_prompt, is_prompt=True)]
            segments += [Segment(n, n) for n in n_completions]
            prompts.append(segments)
        return prompts


class Segment(NamedTuple):
    """Tokens that lie side by side: those of a prompt, of a completion, or of several short prompts with theirs."""

    n_queries: int
    n_tokens: int
    is_prompt: bool = False


class Tile(NamedTuple):
    """One call of scaled_dot_product_attention: the next queries, and the first keys of their bin."""

    n_queries: int
    n_keys: int
    mask: Tensor | None  # (n_queries, n_keys), True: attend; None: plain causal attention


class Bin(NamedTuple):
    """Tokens that lie side by side and attend to each other alone, with the tiles of their queries."""

    n_tokens: int
    tiles: list[Tile]


def join_short_prompts(prompts: list[list[Segment]]) -> list[list[Segment]]:
    """Bins of prompts that lie side by side. Several prompts with up to TILE_TOKENS tokens together, completions
    included, become one segment, under one mask. A prompt alone in its bin keeps its segments, so that few scores are
    computed only to be masked."""
    bins: list[list[Segment]] = []
    bin_tokens = 0
    for segments in prompts:
        n_tokens = sum(segment.n_tokens for segment in segments)
        bin_tokens += n_tokens
        if not bins or bin_tokens > TILE_TOKENS:
            bins.append(segments)
            bin_tokens = n_tokens
        else:
            joined = [*bins[-1], *segments]
            n_queries = sum(segment.n_queries for segment in joined)
            n_tokens = sum(segment.n_tokens for segment in joined)
            bins[-1] = [Segment(n_queries, n_tokens)]
    return bins


class GatherKeys(torch.autograd.Function):
    """The keys, or the values, of all sequences: (N, heads, D) -> (I, heads, D). A prompt's tokens are in several
    sequences, and the backward adds up their gradients. It uses the order key_order_I from packing: the backward of
    plain indexing would sort key_I again in each layer."""

    @staticmethod
    def forward(ctx: Any, x_N: Tensor, batch: PackedBatch) -> Tensor:
        ctx.batch = batch
        return x_N.index_select(0, batch.key_I)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_I: Tensor) -> tuple[Tensor, None]:
        batch = ctx.batch
        dtype = grad_I.dtype
        grad_I = grad_I.index_select(0, batch.key_order_I)
        if max(map(len, batch.segment_sizes)) > 3:
            # a sum of two numbers is rounded once; a sum of more would be rounded at each addition
            grad_I = grad_I.to(torch.promote_types(dtype, torch.float32))
        offsets = batch.key_order_start_N
        grad_N = torch.segment_reduce(grad_I, "sum", offsets=offsets, unsafe=True)  # ty: ignore
        return grad_N.to(dtype), None


def flash_fits(layer: Layer, q: Tensor, v: Tensor) -> bool:
    """Whether torch's flash attention can compute this layer: on an Ampere GPU or later, in bfloat16 or float16, with
    a head size of up to 256 that is a multiple of 8 (one size for queries, keys and values), without softcap, and
    with a torch whose varlen_attn takes scale and window_size (2.11)."""
    if q.device.type != "cuda" or layer.cap is not None or "scale" not in VARLEN:
        return False
    if q.dtype not in (torch.bfloat16, torch.float16):
        return False
    D = q.shape[3]
    if v.shape[3] != D:  # DeepSeek's values are narrower
        return False
    return D <= 256 and D % 8 == 0 and torch.cuda.get_device_capability(q.device)[0] >= 8


def sdpa(layer: Layer, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of q (R, heads, queries, D) to k and v (R, key heads, keys, D) -> (R, heads, queries, D).

    mask: boolean, True: attend; or numbers to add to the scores; None: plain causal.
    """
    n = q.shape[1] // k.shape[1]
    if n > 1:
        k = k.repeat_interleave(n, dim=1)
        v = v.repeat_interleave(n, dim=1)
    if layer.cap is None:
        return nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=layer.scale
        )
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    score = layer.cap * torch.tanh(q @ k.mT * layer.scale / layer.cap)
    score = score.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else score + mask
    return score.float().softmax(-1).to(v.dtype) @ v

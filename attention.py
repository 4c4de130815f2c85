"""Who attends to whom: over a packed batch, whose completions share their prompts, or over a key/value cache,
which is kept here.

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
from types import SimpleNamespace
from typing import NamedTuple

import torch
import transformers
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.nn.attention.varlen import varlen_attn

from head import autocast
from infra.devices import to_device
from packing import PackedBatch

# Prompts (with their completions) of up to so many tokens together share one tile of attention. A larger tile means
# fewer calls, but more scores that are computed only to be masked.
TILE_TOKENS = 128

# Torch 2.10 lacks some of these arguments (see flash_fits).
VARLEN = inspect.signature(varlen_attn).parameters


class Layer(NamedTuple):
    """What PackedAttention and KVCache need to know of an attention layer."""

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
        self.keys: dict[Layer, torch.Tensor] = {}
        self.values: dict[Layer, torch.Tensor] = {}
        self.hidden: torch.Tensor | None = None


class PackedAttention:
    """Which token attends to which in a packed batch, for one forward. All layers share it, with its tiles' masks.

    prompts: an earlier forward's, so that only completions are queries here.
    keeps_prompts: save this forward's prompts in `kept`.
    """

    def __init__(
        self, batch: PackedBatch, prompts: PromptCache | None = None, keeps_prompts: bool = False
    ):
        self.batch = batch
        self.prompts = prompts
        self.kept = PromptCache(batch) if keeps_prompts else None
        self.bins_of_window: dict[int | None, list[Bin]] = {}

    def queries(self, x_N: torch.Tensor) -> torch.Tensor:
        """The part of x_N that belongs to the Q queries."""
        return x_N if self.prompts is None else x_N[self.batch.completion_M]

    def attend(
        self, layer: Layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
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

    def last_hidden(self, h_QC: torch.Tensor) -> torch.Tensor:
        """The last hidden states of the Q queries -> those of all N tokens."""
        if self.kept is not None:
            self.kept.hidden = h_QC.detach()
        if self.prompts is not None:
            return self.after_prompts(self.prompts.hidden, h_QC, 0)
        return h_QC

    def after_prompts(self, x_prompts: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
        """x_prompts of all tokens of the earlier forward's batch, and x of this forward's queries -> x of all N
        tokens, along dimension `dim`."""
        shape = list(x.shape)
        shape[dim] = len(self.batch.token_N)
        # completions first: if token 0 stands in for them, its prompt's values must win
        out = x.new_empty(shape).index_copy_(dim, self.batch.completion_M, x)
        prompt = x_prompts.index_select(dim, self.prompts.batch.prompt_P)
        return out.index_copy_(dim, self.batch.prompt_P, prompt)

    def flash(
        self, layer: Layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
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

    def tiled(
        self, layer: Layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
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

    def mask(self, queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
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
        """For each prompt the segment of its own tokens, then one for each completion. A prompt that an earlier
        forward computed has no queries."""
        prompts = []
        for n_prompt, *n_completions in self.batch.segment_sizes:
            n_queries = n_prompt if self.prompts is None else 0
            segments = [Segment(n_queries, n_prompt, is_prompt=True)]
            segments += [Segment(n, n) for n in n_completions]
            prompts.append(segments)
        if self.prompts is not None and self.batch.token_0_stands_in:
            prompts[0][0] = prompts[0][0]._replace(n_queries=1)
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
    mask: torch.Tensor | None  # (n_queries, n_keys), True: attend; None: plain causal attention


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
    plain indexing would sort key_I anew in each layer."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_N: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        ctx.batch = batch
        return x_N.index_select(0, batch.key_I)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: FunctionCtx, grad_I: torch.Tensor) -> tuple[torch.Tensor, None]:
        batch = ctx.batch
        dtype = grad_I.dtype
        grad_I = grad_I.index_select(0, batch.key_order_I)
        if max(map(len, batch.segment_sizes)) > 3:
            # a sum of two numbers is rounded once; a sum of more would be rounded at each addition
            grad_I = grad_I.to(torch.promote_types(dtype, torch.float32))
        offsets = batch.key_order_start_N
        grad_N = torch.segment_reduce(grad_I, "sum", offsets=offsets, unsafe=True)
        return grad_N.to(dtype), None


def flash_fits(layer: Layer, q: torch.Tensor, v: torch.Tensor) -> bool:
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


def sdpa(
    layer: Layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
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


class KVCache:
    """Keys and values of B sequences (prompts and their answers so far), for sampling.

    Slot p of a sequence holds its position p, so prompts of different lengths need no padding: slots beyond a
    sequence's position are masked, and overwritten later. The first forward takes the packed prompts, and computes a
    prompt once even if several sequences have it. Each later forward takes one token of each sequence (see `at`).
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
        # which of these tokens predict the next token of each sequence
        self.last_B = batch.source_T[batch.first_target_BK[:, 0]]
        self.row_B = torch.arange(len(self.last_B), device=batch.token_N.device)
        # The keys and values of token copied_token[i] go to the row row_of_token[i], and to the slot of the token's
        # position. A token of a shared prompt goes to several rows.
        self.copied_token = batch.key_I
        sequence_I = torch.repeat_interleave(batch.key_start_S.diff(), output_size=len(batch.key_I))
        self.row_of_token = batch.sequence_BK[:, 0].argsort()[sequence_I]

    def at(self, token_B: torch.Tensor, position_B: torch.Tensor, longest: int) -> None:
        """Set the tokens of the next forward. `longest` is the largest of their positions."""
        self.token_RQ = token_B[:, None]
        self.position_RQ = position_B[:, None]
        self.row_of_token = self.row_B
        self.copied_token = slice(None)  # each token once
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
        device = self.row_B.device
        to = to_device(torch.tensor(gaps, dtype=torch.long), device)
        source = to_device(torch.tensor(movers, dtype=torch.long), device)
        for layer, (k, v) in self.tensors.items():
            k[to] = k[source]
            v[to] = v[source]
            self.tensors[layer] = k[:n], v[:n]
        row_before = dict(zip(gaps, movers))
        return [row_before.get(row, row) for row in range(n)]

    def attend(
        self, layer: Layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """q (R, H, Q, D), k and v (R, key heads, Q, D) -> (R, H, Q, D). Fills the slots of k and v."""
        shape = len(self.row_B), k.shape[1], self.slots
        if layer not in self.tensors:
            self.tensors[layer] = [x.new_zeros(*shape, x.shape[3]) for x in (k, v)]
        slot = self.position_RQ.flatten()[self.copied_token]
        for cached, new in zip(self.tensors[layer], (k, v)):
            new = new.transpose(1, 2).flatten(0, 1)[self.copied_token]
            cached[self.row_of_token, :, slot] = new
        if self.packed:
            return self.packed.attend(layer, q, k, v)
        k, v = (cached[:, :, : self.length] for cached in self.tensors[layer])
        # The query heads that share a key head become queries of this head: keys need not be repeated.
        grouped = q.reshape(*k.shape[:2], -1, k.shape[3])
        out = sdpa(layer, grouped, k, v, self.mask(layer.window, q.dtype))
        return out.reshape(*q.shape[:3], v.shape[3])

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """(B, 1, 1, length), added to the scores: 0 for the slots that the current tokens see, else -inf.

        The mask is made once a forward: from a boolean mask each layer would make these numbers again. Its rows begin
        at multiples of 16 numbers, else a GPU's kernels would copy the mask in each layer.
        """
        if (window, dtype) not in self.masks:
            slot = torch.arange(-(-self.length // 16) * 16, device=self.position_RQ.device)
            distance = (self.position_RQ - slot)[:, None, None]
            is_seen = (distance >= 0) & (distance < (window or self.length))
            mask = torch.zeros(is_seen.shape, dtype=dtype, device=slot.device)
            self.masks[window, dtype] = mask.masked_fill_(~is_seen, -torch.inf)[..., : self.length]
        return self.masks[window, dtype]


# ---- our attention in transformers' own classes ---------------------------------------------------

ATTENTION = "packed"  # the name under which transformers finds our attention
# The current forward's attention, and the layers that have called it. A global, because not every class
# of transformers hands arguments on to its layers.
FORWARD = SimpleNamespace(attention=None, called=set())


def _window_as_mask(
    local_size: int | None = None, use_vmap: bool = False, **_unused: object
) -> int | None:
    """What transformers hands to layers in place of a mask: their window (see Layer)."""
    if use_vmap:
        raise ValueError("attention: a mask of its own is not supported")
    return local_size


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: int | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    **_unused: object,
) -> tuple[torch.Tensor, None]:
    """Our attention in place of transformers': query (R, H, Q, D), key and value (R, key heads, Q,
    D) -> (R, Q, H, D). If something in _unused changes numbers, the comparison of models/load.py sees it."""
    window = attention_mask  # see _window_as_mask
    layer = Layer(module, window, scaling, softcap)
    FORWARD.called.add(module)
    # Under autocast transformers rotates queries and keys in float32. Attention would cast them anyway, but
    # flash attention is chosen by their dtype, and a cache stores that dtype.
    out = FORWARD.attention.attend(layer, autocast(query), autocast(key), autocast(value))
    return out.transpose(1, 2).contiguous(), None


def replace_attention(hf: transformers.PreTrainedModel) -> None:
    """Let all layers of transformers' model call our attention, that of FORWARD."""
    transformers.AttentionInterface.register(ATTENTION, _attend)
    transformers.AttentionMaskInterface.register(ATTENTION, _window_as_mask)
    hf.set_attn_implementation(ATTENTION)

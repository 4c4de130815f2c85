"""Sample from a policy, batched, with a key/value cache.

Reading order: choose_token (one token); generate, which divides the prompts over ranks and batches; sample_batch, the
loop over tokens; when an answer has ended, and its text.

Shape letters (K, S and X are not those of packing.py):

    A  answers of a call, one for each prompt
    B  answers of the A that are sampled at once
    Y  new tokens of an answer, at most
    V  vocabulary
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from attention import Layer, PackedAttention, sdpa
from infra.console import advance
from infra.devices import reduce_number, to_device
from infra.random_numbers import mixed
from infra.settings import Sampling
from models.lora import merge_for_sampling
from packing import PackedBatch, pack
from records.tokenizer import Tokenizer

CPU_MEMORY = 64e9  # bytes; keys and values may have an eighth of them

# ---- one token ----------------------------------------------------------------------------------


def choose_token(logits_BV: Tensor, u_B: Tensor, args: Sampling) -> Tensor:
    """The next token (B,) of each row: the likeliest at temperature 0, else the first whose cumulative probability is
    above u times the total. u is the row's uniform number, below 1, so such a token exists."""
    if args.temperature == 0:
        return logits_BV.argmax(-1)
    p_BV = (logits_BV.double() / args.temperature).softmax(-1)
    if args.top_p < 1:
        sorted_BV, token_BV = p_BV.topk(p_BV.shape[1])
        outside_BV = cumsum(sorted_BV) - sorted_BV >= args.top_p * sorted_BV.sum(-1, keepdim=True)
        p_BV = torch.zeros_like(p_BV).scatter(1, token_BV, sorted_BV.masked_fill(outside_BV, 0))
    cdf_BV = cumsum(p_BV)
    return (cdf_BV <= u_B[:, None] * cdf_BV[:, -1:]).sum(-1)


def cumsum(p_BV: Tensor) -> Tensor:
    """Cumulative sums of probabilities along the vocabulary.

    On a GPU sums of floats differ from call to call in their last bits. In a --deterministic run the probabilities
    are added as whole numbers, in units of 2^-53.
    """
    if torch.are_deterministic_algorithms_enabled():
        return (p_BV * 2**53).long().cumsum(-1).double() / 2**53
    return p_BV.cumsum(-1)


# ---- the policy while it samples ----------------------------------------------------------------


@contextlib.contextmanager
def ready_to_sample(fabric: Fabric, policy: torch.nn.Module, room: float) -> Iterator[None]:
    """Within this context the policy has adapters merged and autocast on. The blocks of a sharded policy stay gathered
    from one forward to the next if the whole policy takes at most `room` bytes. Otherwise each token gathers them
    again."""
    module = getattr(policy, "module", policy)
    matrix = torch.ones(1, 1, device=fabric.device)
    with fabric.autocast():
        dtype = (matrix @ matrix).dtype  # of linear layers
    # autocast remembers the casts of weights until its outermost context ends: enter it once, not at every token
    with merge_for_sampling(module, dtype), fabric.autocast():
        blocks = [m for m in module.modules() if isinstance(m, FSDPModule) and m is not module]
        if sum(p.nbytes for p in module.parameters()) > room:
            blocks = []
        for block in blocks:
            block.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for block in blocks:
                block.set_reshard_after_forward(True, recurse=False)
                block.reshard()


# ---- answers ------------------------------------------------------------------------------------


@torch.no_grad()
def generate(
    fabric: Fabric,
    policy: torch.nn.Module,
    prompts: Sequence[np.ndarray],
    tokenizer: Tokenizer,
    args: Sampling,
    max_new: int,
    seed: int,
    before_token: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """Answers to `prompts` (arrays of token ids), at most max_new tokens each, with the EOS if it came to one. Every
    rank returns the same list.

    before_token is called before every decode step, equally often on every rank, so it may be a collective. If it
    raises, it must do so on all ranks, and the sampling ends.

    Each answer has a separate random generator. Therefore it depends on (seed, its place in `prompts`) and on no other
    prompt, up to rounding. Ranks take prompts in turn and run equally many forwards: a sharded policy would hang
    otherwise.
    """
    if not prompts:
        return []
    n = len(prompts)
    device = fabric.device
    slots = min(policy.max_seq_length, max(map(len, prompts)) + max_new)
    generators = [torch.Generator().manual_seed(mixed(seed, i)) for i in range(n)]
    u_AY = torch.stack([torch.rand(max_new, generator=generator) for generator in generators])
    memory = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else CPU_MEMORY
    room = fabric.broadcast(memory / 8)  # rank 0's, since all ranks take equally many prompts
    with fabric.autocast():
        rows = max(1, min(args.batch_size, int(room / policy.cache_bytes(slots))))

    wave = rows * fabric.world_size  # the prompts that all ranks sample together
    all_answers = {}
    with ready_to_sample(fabric, policy, room):
        for start in range(0, n, wave):
            end = min(start + wave, n)
            numbers = list(range(start + fabric.global_rank, end, fabric.world_size))
            # a rank without a prompt answers the first one once more, so that collectives match; rank 0's answer counts
            numbers = numbers or [0]
            batch = [prompts[i] for i in numbers]
            answers = sample_batch(
                fabric, policy, batch, u_AY[numbers], tokenizer, args, slots, before_token
            )
            all_answers |= dict(zip(numbers, answers))
    for rank in range(fabric.world_size):
        all_answers |= fabric.broadcast(all_answers, rank)
    return [all_answers[i] for i in range(n)]


def sample_batch(
    fabric: Fabric,
    policy: torch.nn.Module,
    prompts: Sequence[np.ndarray],
    u_BY: Tensor,
    tokenizer: Tokenizer,
    args: Sampling,
    slots: int,
    before_token: Callable[[], None],
) -> list[list[int]]:
    """The answers to B prompts, sampled together. u_BY: a uniform random number for each token, on the CPU. slots: the
    most tokens of a prompt with its answer.

    It returns when all answers have ended on all ranks. A rank without open answers repeats its last forward
    until then, so that collectives match. A single process waits for the device once a token.
    """
    device = fabric.device
    max_new = u_BY.shape[1]
    answers = [[] for _ in prompts]
    limits = [min(max_new, slots - len(prompt)) for prompt in prompts]  # tokens of each answer
    # pack leaves a completion's last token out of the inputs: with completions of one token, only prompts remain
    packed = pack(prompts, [(np.zeros(1, int),)] * len(prompts)).to(device)
    cache = KVCache(packed, slots)
    number_of_row = list(range(len(prompts)))  # the answer of each row of the cache
    going_on = number_of_row  # the rows with open answers
    for y in range(max_new):
        before_token()
        logits_BV = policy(cache)
        if going_on:
            new_B = choose_token(logits_BV, to_device(u_BY[number_of_row, y], device), args)
            for i, token in zip(number_of_row, new_B.tolist()):
                answers[i].append(token)
            going_on = [
                row
                for row, i in enumerate(number_of_row)
                if not has_ended(answers[i], limits[i], tokenizer, args.stop)
            ]
            advance(fabric.world_size * (len(number_of_row) - len(going_on)))
        if not reduce_number(len(going_on), "sum", device):
            break
        if going_on:
            if len(going_on) < len(number_of_row):
                number_of_row = [number_of_row[row] for row in cache.keep(going_on)]
            token_B = torch.tensor([answers[i][-1] for i in number_of_row])
            positions = [len(prompts[i]) + y for i in number_of_row]
            position_B = to_device(torch.tensor(positions), device)
            cache.at(to_device(token_B, device), position_B, max(positions))
    return answers


def has_ended(ids: list[int], limit: int, tokenizer: Tokenizer, stop: Sequence[str]) -> bool:
    """Whether an answer has ended after its last token: by EOS, at its limit of tokens, or by a stop text."""
    if ids[-1] in tokenizer.stops or len(ids) >= limit:
        return True
    if not stop:
        return False
    # Each token has at least a byte. One token more, because a tokenizer may strip the first blank.
    n_bytes = max(len(stop_text.encode()) for stop_text in stop)
    text = tokenizer.decode(ids[-n_bytes - 1 :], special_tokens=True)
    return any(stop_text in text for stop_text in stop)


def read_answer(tokenizer: Tokenizer, ids: list[int], stop: Sequence[str] = ()) -> tuple[str, bool]:
    """The text of an answer, without special tokens and up to its first stop text; and whether the answer was cut,
    that is, ended at the length limit."""
    has_end = ids[-1] in tokenizer.stops
    ids = ids[:-1] if has_end else ids
    text = tokenizer.decode(ids, special_tokens=True, is_answer=True)
    starts = [text.find(stop_text) for stop_text in stop if stop_text in text]
    if not starts:
        return tokenizer.decode(ids, is_answer=True), not has_end
    text = text[: min(starts)]
    for token in set(ids):
        if not tokenizer.decode([token]):  # a special token
            text = text.replace(tokenizer.decode([token], special_tokens=True), "")
    return text, False


# ---- the key/value cache ------------------------------------------------------------------------


class KVCache:
    """Keys and values of B sequences (prompts and their answers so far), for sampling. Shape letters: attention.py.

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

    def at(self, token_B: Tensor, position_B: Tensor, longest: int) -> None:
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

    def attend(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
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

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
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

"""One step's batch with its mismatched (KL) pairs, its micro-batches, and packing.

This file knows no model and no loss. Reading order: which examples a step has (step_batches), a step's batch and its
mismatched pairs (Batch), how the batch is cut into micro-batches (Cut), how a micro-batch becomes one row of tokens
(pack). How the records of a file become examples: records/examples.py.

Shape letters; model.py uses the same ones:

    G  examples of a step, on all ranks together
    B  examples of a micro-batch
    K  completions of an example
    U  prompts of a micro-batch: examples with one prompt share it, so U <= B
    N  packed input tokens of a micro-batch
    P  those of the N that belong to prompts
    M  those of the N that belong to completions; at least 1 (see PackedBatch.completion_M)
    T  targets: tokens that are predicted and scored
    L  tokens of the longest completion
    I  gathered keys of attention
    J  the B * K sequences, each a prompt with one completion, in the order of packing
    S  = B * K + 1, where attention's B * K sequences begin, and where the last one ends
"""

import functools
import hashlib
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from records.examples import Example, Examples
from runs.errors import BadInput
from runs.optimizer import Plan
from runs.settings import DEFAULT_TOKENS

# ---- which examples a step has ------------------------------------------------------------------


def step_batches(run, examples, plan: Plan) -> Iterator["Batch"]:
    """The batches of the steps to come, until plan.end. While a step runs, a thread makes and packs the batch of the
    next one, unless the objective chooses the partners itself."""
    steps = range(run.state.step + 1, plan.end + 1)

    def make(step):
        batch = batch_of_step(run, examples, plan, step)
        batch.pack_ahead()
        return batch

    if run.objective.overrides("partners"):  # they may depend on what the step before has changed
        yield from map(make, steps)
        return
    with ThreadPoolExecutor(1) as thread:
        next_batch = thread.submit(make, steps[0]) if steps else None
        for step in steps:
            batch = next_batch.result()
            if step < plan.end:
                next_batch = thread.submit(make, step + 1)
            yield batch


def batch_of_step(run, examples, plan: Plan, step: int) -> "Batch":
    """The batch of a step: a slice of its epoch's order. It depends on seed, epoch and step only, so it is the same on
    every rank, and a resume needs no sampler state."""
    G = run.cfg.batch_size
    epoch, i = divmod(step - 1 - plan.begin, plan.per_epoch)
    # unique over the whole run: an iteration has at least as many steps as epochs, so its numbers stay below the next
    # iteration's plan.begin
    number = plan.begin + epoch
    args = number, run.cfg.seed, run.cfg.data.shuffle
    if run.cfg.data.group_by_prompt:
        order = epoch_order_by_prompt(Examples.of(examples), *args)
    else:
        order = epoch_order(len(examples), *args)
    chosen = [examples[j] for j in order[i * G : (i + 1) * G]]
    return make_batch(run, chosen, run.objective)


def make_batch(run, examples, objective) -> "Batch":
    """These examples as the batch of a step of this objective, with mismatched pairs if it asks for them."""
    partners = objective.partners(examples) if objective.kl_pairs else None
    return Batch(examples, partners, run.cfg.data.score_prompt, objective.by_token, run.cut)


@functools.lru_cache(maxsize=2)
def epoch_order(n: int, epoch: int, seed: int, shuffle: bool) -> list[int]:
    """The order of an epoch's n examples. It depends on the arguments alone.

    The list is cached: do not change it.
    """
    if not shuffle:
        return list(range(n))
    generator = torch.Generator().manual_seed(seed * 1000003 + epoch)
    return torch.randperm(n, generator=generator).tolist()


@functools.lru_cache(maxsize=2)
def epoch_order_by_prompt(examples: Examples, epoch: int, seed: int, shuffle: bool) -> list[int]:
    """epoch_order, but the examples of a prompt come together, where its first one would come."""
    order = np.array(epoch_order(len(examples), epoch, seed, shuffle))
    prompt = examples.number_ids(0)[order]
    _, first, which = np.unique(prompt, return_index=True, return_inverse=True)
    return order[np.argsort(first[which], kind="stable")].tolist()


def next_items(items: list, i: int, n: int, seed: int) -> list:
    """The n items of iteration i, which counts from 1.

    Iterations take consecutive slices of an endless list: all items in a seeded order, then all in another one, ...
    """
    picked = []
    for j in range((i - 1) * n, i * n):
        epoch, k = divmod(j, len(items))
        order = epoch_order(len(items), epoch, seed, True)
        picked.append(items[order[k]])
    return picked


# ---- the batch of a step ------------------------------------------------------------------------


class Cut(NamedTuple):
    """How a step is cut into micro-batches. It changes memory and speed only."""

    rank: int = 0
    ranks: int = 1
    max_examples: int | None = None  # of a micro-batch
    max_tokens: int | None = DEFAULT_TOKENS  # of a micro-batch


@dataclass(frozen=True)
class Batch:
    """The G examples of a step (or of a whole validation split). Every rank has the whole list; micro_batches gives it
    its part."""

    examples: list[Example]
    # partners[i] is the example whose completion example i borrows for its KL pair, -1: it has no partner; or that
    # completion itself
    partners: list[int | np.ndarray] | None = None
    score_prompt: bool = False
    by_token: bool = False
    cut: Cut = Cut()
    # results of pack that were made ahead, by its arguments
    packed: dict[tuple[tuple[int, ...], bool], "PackedBatch"] = field(default_factory=dict)

    @functools.cached_property
    def micro_batches(self) -> list["MicroBatch"]:
        """This rank's micro-batches, of the gradient pass and of the no-gradient pass. All ranks have equally many."""
        cut, groups = self.cut, self.fitting_groups()
        sizes = [self.group_size(group) for group in groups]
        parts = split_over_ranks(sizes, cut.ranks, by_tokens=cut.max_tokens is not None)
        counts = list(map(len, groups))
        of_ranks = cut_micro_batches(sizes, counts, parts, cut.max_examples, cut.max_tokens)
        micros = []
        for micro in of_ranks[cut.rank]:
            index = sorted(i for g in micro.index for i in groups[g])
            micros.append(MicroBatch(index, micro.filler))
        return micros

    @functools.cached_property
    def groups(self) -> list[list[int]]:
        """The numbers of the examples with one prompt, for each of the step's prompts in order of appearance."""
        groups = {}
        for i, example in enumerate(self.examples):
            groups.setdefault(example.prompt.tobytes(), []).append(i)
        return list(groups.values())

    def fitting_groups(self) -> list[list[int]]:
        """The groups, of which those that are larger than a micro-batch are cut: each part computes the prompt."""
        cut, parts = self.cut, []
        for group in self.groups:
            part, size = [], 0
            for i in group:
                new = self.most_completion_tokens[i]
                too_long = cut.max_tokens is not None and size + new > cut.max_tokens
                too_many = cut.max_tokens is None and len(part) == cut.max_examples
                if part and (too_long or too_many):
                    parts.append(part)
                    part = []
                if not part:
                    size = len(self.examples[i].prompt)
                part.append(i)
                size += new
            parts.append(part)
        return parts

    def completion_tokens(self, i: int) -> int:
        return sum(map(len, self.examples[i].completions))

    @functools.cached_property
    def most_completion_tokens(self) -> list[int]:
        """(G,) tokens of an example's own completions, or of the one that it borrows if that has more: a micro-batch
        must hold either."""
        tokens = []
        for i in range(len(self.examples)):
            borrowed = len(self.borrowed_completion(i)) if self.partners is not None else 0
            tokens.append(max(self.completion_tokens(i), borrowed))
        return tokens

    def group_size(self, group: list[int]) -> int:
        """The most tokens that a group has in a pass: its prompt once, and completions of all its examples."""
        completions = sum(self.most_completion_tokens[i] for i in group)
        return len(self.examples[group[0]].prompt) + completions

    def pack_ahead(self) -> None:
        """Pack what the passes of the step will ask for."""
        for micro in self.micro_batches:
            for borrowed in (False, True) if self.partners is not None else (False,):
                self.packed[tuple(micro.index), borrowed] = self.pack(micro.index, borrowed)

    def pack(self, index: list[int], borrowed: bool = False) -> "PackedBatch":
        """These examples' prompts with their own completions or, as mismatched pairs, with the borrowed ones. The
        result is on the CPU."""
        key = (tuple(index), borrowed)
        if key in self.packed:
            return self.packed[key]
        examples = [self.examples[i] for i in index]
        completions = [example.completions for example in examples]
        if borrowed:
            completions = [(self.borrowed_completion(i),) for i in index]
        prompts = [example.prompt for example in examples]
        packed = pack(prompts, completions, self.score_prompt, index)
        if self.by_token:  # all micro-batches of a step have one L
            packed = packed._replace(by_token=True, longest=self.longest_completion)
        return packed

    def borrowed_completion(self, i: int) -> np.ndarray:
        """The token ids of the completion that example i borrows. An example without a partner borrows that of
        example 0, to keep the shape; its pair is left out of the KL mean."""
        partner = self.partners[i]
        if np.ndim(partner):
            return partner
        return self.examples[max(partner, 0)].completions[0]

    @property
    def scored_tokens(self) -> list[int]:
        """(G,) tokens that are predicted, of each example."""
        tokens = []
        for i, e in enumerate(self.examples):
            of_prompt = (len(e.prompt) - 1) * len(e.completions) if self.score_prompt else 0
            tokens.append(self.completion_tokens(i) + of_prompt)
        return tokens

    @functools.cached_property
    def longest_completion(self) -> int:
        """Tokens of the longest completion of all examples, or that they borrow."""
        borrowed = [y for y in self.partners or () if np.ndim(y)]
        return max(map(len, chain(borrowed, *(e.completions for e in self.examples))))

    def step_view(self, device) -> "StepView":
        """What a baseline and a loss see of the whole step."""
        group_G = [0] * len(self.examples)
        for number, group in enumerate(self.groups):
            for i in group:
                group_G[i] = number
        kl_index = [i for i, x in enumerate(self.partners or ()) if np.ndim(x) or x >= 0]
        return StepView(
            self.examples,
            size=len(self.examples),
            desirable=sum(e.label for e in self.examples),
            label=to_device(torch.tensor([e.label for e in self.examples]), device),
            weight=to_device(torch.tensor([e.weight for e in self.examples]), device),
            reward=to_device(torch.tensor([reward_of(e) for e in self.examples]), device),
            group=to_device(torch.tensor(group_G), device),
            kl_index=to_device(torch.tensor(kl_index, dtype=torch.long), device),
        )

    def loss_view(self, packed: "PackedBatch", step: "StepView") -> "LossView":
        """What a loss sees of a packed micro-batch."""
        examples = [self.examples[i] for i in packed.index]
        at = packed.index_B
        return LossView(
            examples,
            label=step.label[at],
            reward=step.reward[at],
            group=step.group[at],
            length=packed.length_BK,
            index=at,
            step=step,
        )


def to_device(x, device):
    """x on a device. A copy to a GPU does not wait for the work that is queued there."""
    if device.type == "cuda":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def reward_of(example: Example) -> float:
    """An example's graded reward; where it has none, 1 for a desirable and 0 for an undesirable one."""
    reward = example.rewards[0]
    return float(example.label) if reward is None else reward


def field_of_examples(examples: list[Example], name: str, device):
    """A field of the records that data.extra names: a tensor of numbers, or a list of texts.

    Raises BadInput if the field was not read.
    """
    if not all(name in e.extra for e in examples):
        raise BadInput(f"data.extra: {name}: the loss asks for it: --data.extra {name}")
    values = [e.extra[name] for e in examples]
    if any(isinstance(v, str) for v in values):
        return values
    return to_device(torch.tensor(values), device)


class StepView(NamedTuple):
    """All G examples of a step, the same on every rank. Its tensors are on the device of the log-probs."""

    examples: list[Example]
    size: int  # G
    desirable: int  # number of desirable examples
    label: torch.Tensor  # (G,) bool, True: desirable
    # (G,) the records' own weights, 1 where a record has none; the loop multiplies the loss by them
    weight: torch.Tensor
    reward: torch.Tensor  # (G,) graded rewards (see reward_of)
    group: torch.Tensor  # (G,) examples with one prompt have one number, from 0 on
    kl_index: torch.Tensor  # (n,) which of the G have a mismatched pair

    def extra(self, name: str):
        """A field that data.extra names: a (G,) tensor of numbers, or a list of G texts. Raises BadInput."""
        return field_of_examples(self.examples, name, self.label.device)


class LossView(NamedTuple):
    """B examples of a step, as a loss sees them. Its tensors are on the device of the log-probs."""

    examples: list[Example]
    label: torch.Tensor  # (B,) bool, True: desirable
    reward: torch.Tensor  # (B,) graded rewards (see reward_of)
    # (B,) examples with one prompt have one number, the same as in step.group. A step may hold a part of a prompt's
    # answers only
    group: torch.Tensor
    length: torch.Tensor  # (B, K) scored tokens
    index: torch.Tensor  # (B,) the examples' numbers in the step
    step: StepView
    # (B, K, L, ...) if the objective has a module: what it gives at each token, 0 beyond a completion's end
    outputs: torch.Tensor | None = None

    def extra(self, name: str):
        """A field that data.extra names: a (B,) tensor of numbers, or a list of B texts. Raises BadInput."""
        return field_of_examples(self.examples, name, self.label.device)


def mismatched(examples: list[Example]) -> list[int]:
    """For each example the number of its partner, or -1 if it has none.

    The partner is the next example, in circular order, with another prompt and another completion. Shifting by one is
    not enough: two ratings of one prompt often stand side by side, and the mismatched completion could then equal the
    example's own one.
    """
    keys = [e.keys for e in examples]
    n = len(keys)
    n_prompts = len({prompt for prompt, _ in keys})
    n_completions = len({completion for _, completion in keys})
    if n_prompts == 1 or n_completions == 1:
        return [-1] * n  # a shortcut: the search below would compare each example with all others
    partners = []
    for i, (prompt, completion) in enumerate(keys):
        partner = -1
        for distance in range(1, n):
            j = (i + distance) % n
            if keys[j][0] != prompt and keys[j][1] != completion:
                partner = j
                break
        partners.append(partner)
    return partners


# ---- micro-batches ------------------------------------------------------------------------------


class MicroBatch(NamedTuple):
    """Which examples of a step form a micro-batch."""

    index: list[int]
    # A filler runs only because a sharded forward is a collective; its weight in the loss is 0.
    filler: bool = False


def split_over_ranks(sizes: list[int], ranks: int, by_tokens: bool) -> list[list[int]]:
    """Each rank's part of a step, as numbers of groups.

    by_tokens: the longest group goes first, each to the rank with the fewest tokens so far. Otherwise ranks take
    groups in turn.
    """
    if not by_tokens:
        return [list(range(rank, len(sizes), ranks)) for rank in range(ranks)]
    parts = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        lightest = tokens.index(min(tokens))
        parts[lightest].append(i)
        tokens[lightest] += sizes[i]
    return parts


def cut_micro_batches(
    sizes: list[int],
    counts: list[int],
    parts: list[list[int]],
    max_examples: int | None,
    max_tokens: int | None,
) -> list[list[MicroBatch]]:
    """Cut each rank's part into micro-batches of at most max_tokens tokens or, where that is None, of max_examples
    examples. sizes, counts: tokens and examples of each group; parts, and the result: numbers of groups.

    All ranks get equally many, because collectives inside a sharded forward must match: a rank with fewer repeats
    group 0 as a filler.
    """
    micros = []
    for part in parts:
        if max_tokens:
            indices = _first_fit(part, sizes, max_tokens)
        else:
            indices = _consecutive(part, counts, max_examples)
        micros.append([MicroBatch(sorted(index)) for index in indices])
    most = max(map(len, micros))
    for rank_micros in micros:
        rank_micros += [MicroBatch([0], filler=True)] * (most - len(rank_micros))
    return micros


def _consecutive(part: list[int], counts: list[int], most: int) -> list[list[int]]:
    """Consecutive groups of up to `most` examples together."""
    cut, room = [], 0
    for i in part:
        if counts[i] > room:
            cut.append([])
            room = most
        cut[-1].append(i)
        room -= counts[i]
    return cut


def _first_fit(part: list[int], sizes: list[int], tokens: int) -> list[list[int]]:
    """First-fit decreasing: the longest group first, each into the first micro-batch with room for it. A group over
    the budget is a micro-batch of its own."""
    cut, room = [], []
    for i in sorted(part, key=lambda i: -sizes[i]):
        first = next((j for j, free in enumerate(room) if free >= sizes[i]), None)
        if first is None:
            first = len(cut)
            cut.append([])
            room.append(tokens)
        cut[first].append(i)
        room[first] -= sizes[i]
    return cut


# ---- packing ------------------------------------------------------------------------------------

# The tensors of a PackedBatch, in the order in which they lie in its buffer. Torch indexes with int64; flash attention
# takes int32.
INT64_FIELDS = (
    "token_N",
    "position_N",
    "prompt_N",
    "branch_N",
    "source_T",
    "target_T",
    "sequence_T",
    "length_BK",
    "sequence_BK",
    "first_target_BK",
    "prompt_B",
    "index_B",
    "prompt_P",
    "completion_M",
    "key_I",
)
INT32_FIELDS = ("query_start_S", "completion_query_start_S", "key_start_S")


class PackedBatch(NamedTuple):
    """U prompts, each followed by the completions of all its examples, in one row of N input tokens without padding.

    A completion's positions continue those of its prompt, and its tokens see the prompt and themselves, never another
    completion. Its last token is no input, because nothing follows it.

    A prompt and one of its completions are a sequence; there are B * K, in the order in which the completions lie. For
    flash attention a sequence's keys are the prompt and the completion. Its queries are the completion and, in the
    first of a prompt's sequences, the prompt. The last query sees all keys, the one before it all keys but the last,
    and so on ("bottom-right causal"). If the prompts' keys and values come from a cache (model.PromptCache), the
    queries are the completions alone.
    """

    token_N: torch.Tensor
    position_N: torch.Tensor
    prompt_N: torch.Tensor  # which of the U prompts the token belongs to, or its completion
    # 0: the token belongs to the prompt itself; k: to its completion number k, from 1 on
    branch_N: torch.Tensor
    source_T: torch.Tensor  # the input token whose hidden state predicts the target
    target_T: torch.Tensor  # the token id to predict
    # the sequence whose completion has the target; B * K + u in scored prompt number u
    sequence_T: torch.Tensor
    length_BK: torch.Tensor  # scored tokens of a completion, plus those of a scored prompt
    sequence_BK: torch.Tensor  # the number of the sequence
    first_target_BK: torch.Tensor  # which of the T targets is the completion's first token
    prompt_B: torch.Tensor  # which of the U prompts the example has
    index_B: torch.Tensor  # the example's number in its step
    prompt_P: torch.Tensor  # which of the N tokens belong to prompts
    # Which of the N tokens belong to completions. If none does (all completions have one token), this is token 0:
    # the model's layers need at least one query.
    completion_M: torch.Tensor
    # Which of the N tokens are the keys, one sequence after the other. Empty if no prompt is shared: all N tokens, as
    # they lie.
    key_I: torch.Tensor
    # Where each sequence's queries begin, and where the last one's end: the cu_seq_q of torch's varlen_attn.
    query_start_S: torch.Tensor
    completion_query_start_S: torch.Tensor  # the same if only the M completion tokens are queries
    key_start_S: torch.Tensor  # the same for the keys: cu_seq_k
    # (U,) for each prompt: its input tokens, and those of each of its completions
    segment_sizes: tuple[tuple[int, ...], ...]
    index: tuple[int, ...]  # index_B, on the CPU
    max_queries: int  # the most queries of a sequence
    max_completion_queries: int  # the same if only the M completion tokens are queries
    max_keys: int  # the most keys of a sequence
    longest: int  # L: tokens of the longest completion, here or in the step
    buffer: torch.Tensor  # all tensors above, one after the other, as int32 on the CPU
    # what the model gives for this batch: log-probs (B, K), or of each token (B, K, L)
    by_token: bool = False
    # True: a loss is made of what the model gives, which then has the outputs of the objective's module, too
    for_loss: bool = False

    def to(self, device) -> "PackedBatch":
        """This batch on a device. One copy moves all tensors, without waiting for the work queued on the device."""
        if torch.device(device).type == "cpu":
            return self
        buffer = self.buffer.to(device, non_blocking=True)
        return self._replace(**_buffer_views(buffer, self._shapes()))

    def _shapes(self) -> dict[str, torch.Size]:
        return {name: getattr(self, name).shape for name in (*INT64_FIELDS, *INT32_FIELDS)}

    @property
    def sizes(self) -> tuple[int, ...]:
        """(U,) input tokens of each prompt with its completions."""
        return tuple(map(sum, self.segment_sizes))

    def sums(self, x_T):
        """Sums (B, K) of the targets' numbers over each completion and its prompt, if that is scored."""
        B, K = self.length_BK.shape
        sums = x_T.new_zeros(B * K + len(self.segment_sizes))
        if x_T.is_cuda:
            # On a GPU index_add adds in any order, so two passes over the same numbers would differ in their last
            # bits. index_put sorts them first. On a CPU index_add has an order, and index_put has none.
            sums = sums.index_put((self.sequence_T,), x_T, accumulate=True)
        else:
            sums = sums.index_add(0, self.sequence_T, x_T)
        # the prompt's sum is 0 unless data.score_prompt makes its tokens targets
        return sums[self.sequence_BK] + sums[B * K + self.prompt_B][:, None]

    def tokens_of_completions(self, x_T):
        """The targets' numbers (T, ...) as (B, K, L, ...), with 0 beyond a completion's end."""
        offset_L = torch.arange(self.longest, device=x_T.device)
        is_token = offset_L < self.length_BK[..., None]
        target_BKL = torch.where(is_token, self.first_target_BK[..., None] + offset_L, 0)
        return torch.where(
            is_token.view(*is_token.shape, *[1] * (x_T.dim() - 1)), x_T[target_BKL], 0
        )

    def digests(self) -> list[list[bytes]]:
        """(B, K) hashes of 16 bytes, each of the token ids of a prompt and one of its completions."""
        host = _buffer_views(self.buffer, self._shapes())  # the batch itself may be on a GPU
        token, target = host["token_N"].numpy(), host["target_T"].numpy()
        prompts, completion_sizes = [], []
        start = 0
        for prompt_size, *sizes in self.segment_sizes:
            prompt = token[start : start + prompt_size].tobytes()
            prompts.append(len(prompt).to_bytes(8, "big") + prompt)
            completion_sizes += [size + 1 for size in sizes]  # the last token is a target only
            start += prompt_size + sum(sizes)
        rows = zip(
            host["prompt_B"].tolist(),
            host["sequence_BK"].tolist(),
            host["first_target_BK"].tolist(),
        )
        digests = []
        for u, sequences, firsts in rows:
            row = []
            for sequence, first in zip(sequences, firsts):
                completion = target[first : first + completion_sizes[sequence]].tobytes()
                row.append(hashlib.blake2b(prompts[u] + completion, digest_size=16).digest())
            digests.append(row)
        return digests


def _buffer_views(buffer: torch.Tensor, shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    """The tensors of a PackedBatch, by name, from its buffer. They share its device."""
    int64_sizes = [math.prod(shapes[name]) for name in INT64_FIELDS]
    int32_sizes = [math.prod(shapes[name]) for name in INT32_FIELDS]
    n_int64 = sum(int64_sizes)
    tensors = [*buffer[:n_int64].long().split(int64_sizes), *buffer[n_int64:].split(int32_sizes)]
    names = (*INT64_FIELDS, *INT32_FIELDS)
    return {name: x.view(shapes[name]) for name, x in zip(names, tensors)}


def _spans(lengths):
    """For runs of these lengths, one after the other: the number of each element's run, and its offset in the run.

    [2, 0, 3] -> [0, 0, 2, 2, 2], [0, 1, 0, 1, 2]
    """
    run = np.repeat(np.arange(len(lengths)), lengths)
    start = np.cumsum(lengths) - lengths
    return run, np.arange(len(run)) - start[run]


def pack(prompts, completions, score_prompt: bool = False, index=None) -> PackedBatch:
    """Pack B prompts and their completions; examples with equal prompts share one. The result is on the CPU.

    prompts: B arrays of token ids. completions: B tuples of K arrays. No array is empty. score_prompt: the prompts'
    tokens from the second on are targets, too. index: the examples' numbers in their step (default: 0 to B - 1).
    """
    B, K = len(prompts), len(completions[0])
    index = range(B) if index is None else index

    # The distinct prompts, and the sequences in the order in which their completions lie.
    examples_of = {}
    for b, prompt in enumerate(prompts):
        examples_of.setdefault(prompt.tobytes(), []).append(b)
    groups = list(examples_of.values())
    U = len(groups)
    order = [b for group in groups for b in group]
    prompt_B = np.empty(B, int)
    prompt_B[order] = np.repeat(np.arange(U), list(map(len, groups)))
    sequence_BK = np.empty((B, K), int)
    sequence_BK[order] = np.arange(B * K).reshape(B, K)
    prompts = [prompts[group[0]] for group in groups]
    completions = [y for b in order for y in completions[b]]
    prompt_U = np.array(list(map(len, prompts)))
    completion_J = np.array(list(map(len, completions)))
    count_U = np.array(list(map(len, groups))) * K  # completions of each prompt
    u_J = np.repeat(np.arange(U), count_U)
    # 0 in a prompt's first completion
    number_J = np.arange(B * K) - (np.cumsum(count_U) - count_U)[u_J]

    # Segments: each prompt, followed by its completions without their last tokens.
    place_U = np.cumsum(count_U + 1) - (count_U + 1)  # a prompt's place among the U + J segments
    place_J = place_U[u_J] + 1 + number_J
    size = np.empty(U + B * K, int)
    size[place_U], size[place_J] = prompt_U, completion_J - 1
    start = np.cumsum(size) - size
    inputs = [None] * len(size)
    prompt_of_segment, branch_of_segment = np.empty_like(size), np.zeros_like(size)
    prompt_of_segment[place_U], prompt_of_segment[place_J] = np.arange(U), u_J
    branch_of_segment[place_J] = number_J + 1
    for place, prompt in zip(place_U, prompts):
        inputs[place] = prompt
    for place, y in zip(place_J, completions):
        inputs[place] = y[:-1]
    segment_N, offset_N = _spans(size)
    prompt_N, branch_N = prompt_of_segment[segment_N], branch_of_segment[segment_N]
    position_N = offset_N + np.where(branch_N > 0, prompt_U[prompt_N], 0)

    # Targets: the completions in their order and, last, the prompts from the second token on if these are scored.
    targets = list(completions)
    scored_U = prompt_U - 1 if score_prompt else np.zeros_like(prompt_U)
    if score_prompt:
        targets += [prompt[1:] for prompt in prompts]
    sequence_T, offset_T = _spans(np.concatenate([completion_J, scored_U]))
    # The source of a target is the token before it. Before a completion's first token this is the prompt's last one.
    segment_start = np.concatenate([start[place_J] - 1, start[place_U]])
    prompt_end = (start[place_U] + prompt_U - 1)[np.concatenate([u_J, np.arange(U)])]
    is_first_T = (offset_T == 0) & (sequence_T < B * K)
    source_T = np.where(is_first_T, prompt_end[sequence_T], segment_start[sequence_T] + offset_T)
    first_target_J = np.cumsum(completion_J) - completion_J

    # Attention's sequences: their queries and keys (see PackedBatch).
    completion_M = np.flatnonzero(branch_N)
    completion_queries_J = completion_J - 1
    if not len(completion_M):
        completion_M = np.zeros(1, int)
        completion_queries_J[0] = 1
    queries_J = completion_J - 1 + np.where(number_J == 0, prompt_U[u_J], 0)
    keys_J = completion_J - 1 + prompt_U[u_J]
    key_I = np.zeros(0, int)
    if U < B * K:
        sequence_I, offset_I = _spans(keys_J)
        in_prompt_I = start[place_U[u_J]][sequence_I] + offset_I
        in_completion_I = (start[place_J] - prompt_U[u_J])[sequence_I] + offset_I
        key_I = np.where(offset_I < prompt_U[u_J][sequence_I], in_prompt_I, in_completion_I)

    arrays = {
        "token_N": np.concatenate(inputs),
        "position_N": position_N,
        "prompt_N": prompt_N,
        "branch_N": branch_N,
        "source_T": source_T,
        "target_T": np.concatenate(targets),
        "sequence_T": sequence_T,
        "length_BK": completion_J[sequence_BK] + scored_U[prompt_B][:, None],
        "sequence_BK": sequence_BK,
        "first_target_BK": first_target_J[sequence_BK],
        "prompt_B": prompt_B,
        "index_B": np.array(index),
        "prompt_P": np.flatnonzero(branch_N == 0),
        "completion_M": completion_M,
        "key_I": key_I,
        "query_start_S": np.append(0, np.cumsum(queries_J)),
        "completion_query_start_S": np.append(0, np.cumsum(completion_queries_J)),
        "key_start_S": np.append(0, np.cumsum(keys_J)),
    }
    # Numpy does all the work here. This function runs in a thread of its own, where a torch operation would start a
    # second set of OpenMP threads; between operations they wait in a loop, on the cores that the training step needs.
    flat = [arrays[name].ravel() for name in (*INT64_FIELDS, *INT32_FIELDS)]
    pinned = torch.cuda.is_initialized()
    buffer = torch.empty(sum(map(len, flat)), dtype=torch.int32, pin_memory=pinned)
    np.concatenate(flat, out=buffer.numpy(), casting="same_kind")
    for name in INT64_FIELDS:
        arrays[name] = arrays[name].astype(np.int64, copy=False)
    for name in INT32_FIELDS:
        arrays[name] = arrays[name].astype(np.int32)
    return PackedBatch(
        **{name: torch.from_numpy(array) for name, array in arrays.items()},
        segment_sizes=tuple(tuple(part.tolist()) for part in np.split(size, place_U[1:])),
        index=tuple(index),
        max_queries=int(queries_J.max()),
        max_completion_queries=int(completion_queries_J.max()),
        max_keys=int(keys_J.max()),
        longest=int(completion_J.max()),
        buffer=buffer,
    )


if __name__ == "__main__":  # python data.py FILE [--model M] shows a file as a run would see it
    from records.preview import main
    from runs.errors import run_cli

    run_cli(main)

"""One step's batch with its mismatched (KL) pairs, and its micro-batches.

This file knows no model and no loss. Reading order: which examples a step has (step_batches), a
step's batch and its mismatched pairs (Batch), what a loss sees of it (StepView, LossView), how the
batch is cut into micro-batches (Cut). How a micro-batch becomes one row of tokens: packing.py. How
the records of a file become examples: records/examples.py.

Shape letters; packing.py, attention.py and model.py use the same ones:

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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from packing import PackedBatch, pack, prompt_groups, to_device
from records.examples import Example
from runs.optimizer import Plan
from runs.settings import RunSettings, refuse_unless

# ---- how much fits -------------------------------------------------------------------------------

DEFAULT_TOKENS = 16384  # per forward, given neither micro_batch_size nor micro_batch_tokens
CPU_ACTIVATIONS = 4e9  # bytes


def most_tokens(cfg: RunSettings, n_layer: int, n_embd: int) -> int | None:
    """Tokens of a micro-batch, at most; None where micro_batch_size counts its examples. On a CPU the
    default is smaller where the activations of so many tokens would take more than 4 GB, at 20 numbers
    of 4 bytes for a token, a layer and a unit of its width."""
    if cfg.micro_batch_tokens or cfg.micro_batch_size:
        return cfg.micro_batch_tokens
    if cfg.accelerator != "cpu":
        return DEFAULT_TOKENS
    tokens = int(CPU_ACTIVATIONS / (80 * n_layer * n_embd)) // 256 * 256
    return min(DEFAULT_TOKENS, max(256, tokens))


# ---- which examples a step has ------------------------------------------------------------------


def step_batches(run, examples, plan: Plan) -> Iterator["Batch"]:
    """The batches of the steps to come, until plan.end. A step's examples are a slice of its epoch's
    order, which depends on seed and epoch only: every rank draws the same, and a resume needs no
    sampler state."""
    G, data, order = run.cfg.batch_size, run.cfg.data, None
    for step in range(run.state.step + 1, plan.end + 1):
        epoch, i = divmod(step - 1 - plan.begin, plan.per_epoch)
        if order is None or i == 0:
            # unique over the whole run: an iteration has at least as many steps as epochs, so its
            # numbers stay below the next iteration's plan.begin
            number = plan.begin + epoch
            order = epoch_order(len(examples), number, run.cfg.seed, data.shuffle)
            if data.group_by_prompt:
                groups = prompt_groups([e.prompt for e in examples], order)
                order = list(chain(*groups))
        yield make_batch(run, [examples[j] for j in order[i * G : (i + 1) * G]])


def made_ahead(batches: Iterator["Batch"]) -> Iterator["Batch"]:
    """The same batches. While a step runs, a thread makes and packs the batch of the next one."""

    def make():
        batch = next(batches, None)
        if batch:
            batch.pack_ahead()
        return batch

    with ThreadPoolExecutor(1) as thread:
        next_batch = thread.submit(make)
        while batch := next_batch.result():
            next_batch = thread.submit(make)
            yield batch


def make_batch(run, examples) -> "Batch":
    """These examples as the batch of a step, with mismatched pairs if the objective asks for them."""
    objective = run.objective
    pairs = objective.mismatched_pairs(examples) if objective.needs_mismatched_pairs else None
    return Batch(examples, pairs, run.cfg.data.score_prompt, objective.by_token, run.cut)


@functools.lru_cache(maxsize=2)
def epoch_order(n: int, epoch: int, seed: int, shuffle: bool) -> list[int]:
    """The order of an epoch's n examples. It depends on the arguments alone.

    The list is cached: do not change it.
    """
    if not shuffle:
        return list(range(n))
    generator = torch.Generator().manual_seed(seed * 1000003 + epoch)
    return torch.randperm(n, generator=generator).tolist()


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
    """The G examples of a step (or of a whole validation split). Every rank has the whole list;
    micro_batches gives it its share."""

    examples: list[Example]
    # for each example whose completion its mismatched pair has: the number of an example, -1: it has
    # no pair; or the completion itself
    mismatched_pairs: list[int | np.ndarray] | None = None
    score_prompt: bool = False
    by_token: bool = False
    cut: Cut = Cut()
    # results of pack that were made ahead, by its arguments
    packed: dict[tuple[tuple[int, ...], bool], PackedBatch] = field(default_factory=dict)

    @functools.cached_property
    def groups(self) -> list[list[int]]:
        """The numbers of the examples with one prompt, for each of the step's prompts in order of
        appearance."""
        return prompt_groups([e.prompt for e in self.examples])

    @functools.cached_property
    def micro_batches(self) -> list["MicroBatch"]:
        """This rank's micro-batches, of the gradient pass and of the no-gradient pass. All ranks have
        equally many."""
        by_tokens, groups = self.cut.max_tokens is not None, []
        for group in self.groups:
            # a group that is larger than a micro-batch is cut: each part computes the prompt
            if by_tokens:
                room = self.cut.max_tokens - len(self.examples[group[0]].prompt)
                groups += fill(group, self.most_completion_tokens, room)
            else:
                groups += fill(group, [1] * len(self.examples), self.cut.max_examples)
        sizes = [self.group_size(group) if by_tokens else len(group) for group in groups]
        micros = []
        for micro in cut_micro_batches(sizes, self.cut)[self.cut.rank]:
            index = sorted(chain(*(groups[g] for g in micro.index)))
            micros.append(MicroBatch(index, micro.filler))
        return micros

    @functools.cached_property
    def most_completion_tokens(self) -> list[int]:
        """(G,) tokens of an example's own completions, or of its mismatched one if that has more: a
        micro-batch must hold either."""
        own = [sum(map(len, e.completions)) for e in self.examples]
        if self.mismatched_pairs is None:
            return own
        return [max(n, len(self.mismatched_completion(i))) for i, n in enumerate(own)]

    def group_size(self, group: list[int]) -> int:
        """The most tokens that a group has in a pass: its prompt once, and completions of all its
        examples."""
        completions = sum(self.most_completion_tokens[i] for i in group)
        return len(self.examples[group[0]].prompt) + completions

    def pack_ahead(self) -> None:
        """Pack what the passes of the step will ask for."""
        for micro in self.micro_batches:
            for mismatched in (False, True) if self.mismatched_pairs is not None else (False,):
                self.packed[tuple(micro.index), mismatched] = self.pack(micro.index, mismatched)

    def pack(self, index: list[int], mismatched: bool = False) -> PackedBatch:
        """These examples' prompts with their own completions or, as mismatched pairs, with those of
        others. The result is on the CPU."""
        if ahead := self.packed.get((tuple(index), mismatched)):
            return ahead
        completions = [self.examples[i].completions for i in index]
        if mismatched:
            completions = [(self.mismatched_completion(i),) for i in index]
        prompts = [self.examples[i].prompt for i in index]
        packed = pack(prompts, completions, self.score_prompt, index)
        if self.by_token:  # all micro-batches of a step have one L
            packed = packed._replace(by_token=True, longest=self.longest_completion)
        return packed

    def mismatched_completion(self, i: int) -> np.ndarray:
        """The token ids of the completion in example i's mismatched pair. An example without a pair
        takes that of example 0, to keep the shape; it is left out of the KL mean."""
        pair = self.mismatched_pairs[i]
        return pair if np.ndim(pair) else self.examples[max(pair, 0)].completions[0]

    @functools.cached_property
    def longest_completion(self) -> int:
        """Tokens of the longest completion of all examples and mismatched pairs."""
        others = [y for y in self.mismatched_pairs or () if np.ndim(y)]
        return max(map(len, chain(others, *(e.completions for e in self.examples))))


def mismatched_pairs(examples: list[Example]) -> list[int]:
    """For each example the number of the one whose completion its mismatched pair has; -1: no pair.

    It is the next example, in circular order, with another prompt and another completion. Shifting
    by one is not enough: two ratings of one prompt often stand side by side, and the mismatched
    completion could then equal the example's own one.
    """
    keys = [e.keys[:2] for e in examples]  # a pair: its chosen completion
    n = len(keys)
    if any(len(set(same)) == 1 for same in zip(*keys)):  # one prompt, or one completion, for all
        return [-1] * n  # a shortcut: the search below would compare each example with all others
    found = []
    for i, (prompt, completion) in enumerate(keys):
        others = ((i + distance) % n for distance in range(1, n))
        fit = (j for j in others if keys[j][0] != prompt and keys[j][1] != completion)
        found.append(next(fit, -1))
    return found


# ---- what a loss and a baseline see --------------------------------------------------------------


class View:
    """Some examples of a step, as an algorithm sees them. Its tensors are on the device of the
    log-probs."""

    examples: list[Example]
    label: torch.Tensor  # bool, True: desirable
    # graded rewards; for an example without one 1 if it is desirable, else 0
    reward: torch.Tensor
    # examples with one prompt have one number, from 0 on, the same in a step and its micro-batches.
    # A step may hold a part of a prompt's answers only
    group: torch.Tensor

    def extra(self, name: str):
        """A field that data.extra names: a tensor of numbers, or a list of texts, one for each
        example. Raises BadInput."""
        refuse_unless(
            all(name in e.extra for e in self.examples),
            f"data.extra: {name}: the loss asks for it: --data.extra {name}",
        )
        values = [e.extra[name] for e in self.examples]
        if any(isinstance(v, str) for v in values):
            return values
        return to_device(torch.tensor(values), self.label.device)


class StepView(View):
    """All G examples of a step, the same on every rank. Its tensors are (G,)."""

    def __init__(self, batch: Batch, device):
        def tensor(values):
            return to_device(torch.tensor(values), device)

        self.examples = examples = batch.examples
        self.size = len(examples)  # G
        self.desirable = sum(e.label for e in examples)  # number of desirable examples
        self.label = tensor([e.label for e in examples])
        rewards = [e.label if e.rewards[0] is None else e.rewards[0] for e in examples]
        self.reward = tensor(list(map(float, rewards)))
        # the records' own weights, 1 where a record has none; the loop multiplies the loss by them
        self.weight = tensor([e.weight for e in examples])
        number = {i: u for u, group in enumerate(batch.groups) for i in group}
        self.group = tensor([number[i] for i in range(self.size)])
        # (n,) which of the G have a mismatched pair
        pairs = [i for i, x in enumerate(batch.mismatched_pairs or ()) if np.ndim(x) or x >= 0]
        self.mismatched_index = tensor(pairs).long()


class LossView(View):
    """B examples of a step, as a loss sees them. Its tensors are (B,)."""

    def __init__(self, step: StepView, packed: PackedBatch, outputs=None):
        self.examples = [step.examples[i] for i in packed.index]
        self.step = step
        self.index = at = packed.index_B  # the examples' numbers in the step
        self.label, self.reward, self.group = step.label[at], step.reward[at], step.group[at]
        self.length = packed.length_BK  # (B, K) scored tokens
        # (B, K, L, ...) if the objective has a module: what it gives at each token, 0 beyond a
        # completion's end
        self.outputs = outputs


# ---- micro-batches ------------------------------------------------------------------------------


class MicroBatch(NamedTuple):
    """Which examples of a step form a micro-batch."""

    index: list[int]
    # A filler runs only because a sharded forward is a collective; its weight in the loss is 0.
    filler: bool = False


def cut_micro_batches(sizes: list[int], cut: Cut) -> list[list[MicroBatch]]:
    """The micro-batches of each rank, as numbers of groups. sizes: of each group, in tokens or, where
    cut.max_tokens is None, in examples.

    All ranks get equally many, because collectives inside a sharded forward must match: a rank with
    fewer repeats group 0 as a filler.
    """
    by_tokens = cut.max_tokens is not None
    room = cut.max_tokens if by_tokens else cut.max_examples
    micros = []
    for share in split_over_ranks(sizes, cut.ranks, by_tokens):
        indices = fill(share, sizes, room, first_fit=by_tokens)
        micros.append([MicroBatch(sorted(index)) for index in indices])
    most = max(map(len, micros))
    for rank_micros in micros:
        rank_micros += [MicroBatch([0], filler=True)] * (most - len(rank_micros))
    return micros


def split_over_ranks(sizes: list[int], ranks: int, by_tokens: bool) -> list[list[int]]:
    """Each rank's share of a step, as numbers of groups.

    by_tokens: the longest group goes first, each to the rank with the fewest tokens so far. Otherwise
    ranks take groups in turn.
    """
    if not by_tokens:
        return [list(range(rank, len(sizes), ranks)) for rank in range(ranks)]
    shares, tokens = [[] for _ in range(ranks)], [0] * ranks
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        lightest = tokens.index(min(tokens))
        shares[lightest].append(i)
        tokens[lightest] += sizes[i]
    return shares


def fill(items: list[int], sizes: list[int], room: int, first_fit=False) -> list[list[int]]:
    """Put each item into the last bin or, with first_fit, into the first one that has room for its
    size; else into a new bin. An item that is larger than a bin has one of its own."""
    bins, left = [], []
    for i in items:
        open_bins = range(len(bins)) if first_fit else range(len(bins))[-1:]
        found = next((j for j in open_bins if left[j] >= sizes[i]), None)
        if found is None:
            found = len(bins)
            bins.append([])
            left.append(room)
        bins[found].append(i)
        left[found] -= sizes[i]
    return bins


if __name__ == "__main__":  # python data.py FILE [--model M] shows a file as a run would see it
    from records.examples import page
    from runs.console import run_cli

    run_cli(page)

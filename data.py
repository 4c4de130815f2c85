"""One step's batch with its mismatched pairs, and its micro-batches.

This file knows no model and no loss. Reading order: which examples a step has (step_batches), a
step's batch and its mismatched pairs (Batch), what a loss sees of it (StepView, LossView), its
micro-batches. How a micro-batch becomes one row of tokens: packing.py. How the records of a file
become examples, and `python data.py FILE`: records/examples.py.

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
from itertools import chain, count, islice
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


def most_tokens(cfg: RunSettings, n_layer: int, n_embd: int) -> int:
    """Tokens of a micro-batch, at most. On a CPU the default is smaller where the activations of so many
    tokens would take more than 4 GB, at 20 numbers of 4 bytes for a token, a layer and a unit of its
    width."""
    if cfg.micro_batch_tokens:
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
            order = range(len(examples))
            if data.shuffle:
                order = epoch_order(len(examples), number, run.cfg.seed)
            if data.group_by_prompt:
                groups = prompt_groups([examples[j].prompt for j in order])
                order = [order[k] for k in chain(*groups)]
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
    objective, pairs = run.objective, None
    if objective.needs_mismatched_pairs:
        pairs = objective.mismatched_pairs(examples)
        if objective.overrides("mismatched_pairs"):  # ranks may draw other random numbers
            pairs = run.fabric.broadcast(pairs)
    return Batch(examples, pairs, run.cfg.data.score_prompt, objective.by_token, run.budget)


def epoch_order(n: int, epoch: int, seed: int) -> list[int]:
    """The shuffled order of an epoch's n examples. It depends on the arguments alone."""
    generator = torch.Generator().manual_seed(seed * 1000003 + epoch)
    return torch.randperm(n, generator=generator).tolist()


def next_items(items: list, i: int, n: int, seed: int) -> list:
    """The n items of iteration i, which counts from 1.

    Iterations take consecutive slices of an endless list: all items in a seeded order, then all in another one, ...
    """
    endless = chain.from_iterable(epoch_order(len(items), epoch, seed) for epoch in count())
    return [items[j] for j in islice(endless, (i - 1) * n, i * n)]


# ---- the batch of a step ------------------------------------------------------------------------


class Budget(NamedTuple):
    """How a step is split into micro-batches. It changes memory and speed only."""

    rank: int = 0
    ranks: int = 1
    room: int = DEFAULT_TOKENS  # of a micro-batch, in tokens or in examples
    by_tokens: bool = True


@dataclass(frozen=True)
class Batch:
    """The G examples of a step (or of a whole validation split). Every rank has the whole list;
    micro_batches gives it its share."""

    examples: list[Example]
    # an entry for each example: the number of the example whose completion it is paired with, -1 for
    # no pair; or the completion itself
    mismatched_pairs: list[int | np.ndarray] | None = None
    score_prompt: bool = False
    by_token: bool = False
    budget: Budget = Budget()
    # {(numbers of examples, mismatched): PackedBatch}, those that were packed ahead
    packed: dict = field(default_factory=dict)

    @functools.cached_property
    def micro_batches(self) -> list["MicroBatch"]:
        """This rank's micro-batches, of the gradient pass and of the no-gradient pass. All ranks have
        equally many."""
        budget, examples = self.budget, self.examples
        # (G,) what an example adds to its prompt: tokens of its own completions or of its mismatched one,
        # whichever are more: the same micro-batch must fit both passes
        added = [1] * len(examples)
        if budget.by_tokens:
            added = [sum(map(len, e.completions)) for e in examples]
            if self.mismatched_pairs is not None:
                others = [len(self.mismatched_completion(i)) for i in range(len(examples))]
                added = list(map(max, added, others))
        groups, sizes = [], []
        for group in prompt_groups([e.prompt for e in examples]):
            prompt = len(examples[group[0]].prompt) if budget.by_tokens else 0
            # a group that is larger than a micro-batch is split: each part computes the prompt
            for part in fill(group, added, budget.room - prompt, budget.by_tokens):
                groups.append(part)
                sizes.append(prompt + sum(added[i] for i in part))
        return split_into_micro_batches(groups, sizes, budget)[budget.rank]

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
            others = [y for y in self.mismatched_pairs or () if np.ndim(y)]
            longest = max(map(len, chain(others, *(e.completions for e in self.examples))))
            packed = packed._replace(by_token=True, longest=longest)
        return packed

    def mismatched_completion(self, i: int) -> np.ndarray:
        """The token ids of the completion in example i's mismatched pair. An example without a pair
        takes that of example 0, to keep the shape; it is left out of the KL mean."""
        pair = self.mismatched_pairs[i]
        return pair if np.ndim(pair) else self.examples[max(pair, 0)].completions[0]


def mismatched_pairs(examples: list[Example]) -> list[int]:
    """For each example the number of the example whose completion it is paired with; -1: no pair.

    It is the next example, in circular order, with another prompt and another completion. Shifting
    by one is not enough: two ratings of one prompt often stand side by side, and the mismatched
    completion could then equal the example's own one.
    """
    keys = [e.keys[:2] for e in examples]  # a pair: its chosen completion
    n, found = len(keys), []
    if any(len(set(same)) == 1 for same in zip(*keys)):  # one prompt, or one completion, for all
        return [-1] * n  # a shortcut: the search below would compare each example with all others
    for i, (prompt, completion) in enumerate(keys):
        others = ((i + distance) % n for distance in range(1, n))
        fit = (j for j in others if keys[j][0] != prompt and keys[j][1] != completion)
        found.append(next(fit, -1))
    return found


# ---- what a loss and a baseline see --------------------------------------------------------------


class View:
    """Some examples of a step, as an algorithm sees them: StepView and LossView have `examples`, and on the
    device of the log-probs the tensors

        label   bool, True: desirable
        reward  graded rewards; for an example without one 1 if it is desirable, else 0
        group   examples with one prompt have one number, from 0 on, the same in a step and its
                micro-batches. A step may hold a part of a prompt's answers only
    """

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
        numbers = {}
        self.group = tensor([numbers.setdefault(e.keys[0], len(numbers)) for e in examples])
        # (n,) which of the G have a mismatched pair
        pairs = [i for i, x in enumerate(batch.mismatched_pairs or ()) if np.ndim(x) or x >= 0]
        self.mismatched_index = tensor(pairs).long()


class LossView(View):
    """B examples of a step, as a loss sees them. Its tensors are (B,)."""

    def __init__(self, step: StepView, packed: PackedBatch, outputs=None):
        self.examples = [step.examples[i] for i in packed.index]
        self.step = step
        at = packed.index_B  # the examples' numbers in the step
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


def split_into_micro_batches(
    groups: list[list[int]], sizes: list[int], budget: Budget
) -> list[list[MicroBatch]]:
    """The micro-batches of each rank. groups: examples that stay together; sizes: of each group, in the
    unit of budget.room.

    By tokens the longest group goes first, each to the rank with the fewest tokens so far. Otherwise ranks
    take groups in turn. All ranks get equally many micro-batches, because collectives inside a sharded
    forward must match: a rank with fewer repeats group 0 as a filler.
    """
    shares = [range(rank, len(groups), budget.ranks) for rank in range(budget.ranks)]
    if budget.by_tokens:
        shares, tokens = [[] for _ in shares], [0] * budget.ranks
        for g in sorted(range(len(groups)), key=lambda g: -sizes[g]):
            lightest = tokens.index(min(tokens))
            shares[lightest].append(g)
            tokens[lightest] += sizes[g]
    micros = []
    for share in shares:
        bins = fill(share, sizes, budget.room, budget.by_tokens)
        micros.append([MicroBatch(sorted(chain(*(groups[g] for g in one)))) for one in bins])
    most = max(map(len, micros))
    for rank_micros in micros:
        rank_micros += [MicroBatch(groups[0], filler=True)] * (most - len(rank_micros))
    return micros


def fill(items, sizes: list[int], room: int, first_fit: bool) -> list[list[int]]:
    """Put each item into the last bin or, with first_fit, into the first one that has room for its
    size; else into a new bin. An item that is larger than a bin has one of its own."""
    bins, left = [], []
    for i in items:
        start = 0 if first_fit else max(0, len(bins) - 1)
        found = next((j for j in range(start, len(bins)) if left[j] >= sizes[i]), len(bins))
        if found == len(bins):
            bins.append([])
            left.append(room)
        bins[found].append(i)
        left[found] -= sizes[i]
    return bins


if __name__ == "__main__":  # python data.py FILE [--model M] shows a file as a run would see it
    from records.examples import page
    from runs.console import run_cli

    run_cli(page)

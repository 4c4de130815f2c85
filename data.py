"""One step's batch with its mismatched (KL) pairs, and its micro-batches.

This file knows no model and no loss. Reading order: which examples a step has (step_batches), a step's batch and its
mismatched pairs (Batch), how the batch is cut into micro-batches (Cut). How a micro-batch becomes one row of tokens:
packing.py. How the records of a file become examples: records/examples.py.

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

from packing import PackedBatch, pack, to_device
from records.examples import Example
from runs.console import BadInput
from runs.optimizer import Plan
from runs.settings import RunSettings

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
        order = epoch_order_by_prompt(examples, *args)
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


_grouped = {}  # of epoch_order_by_prompt


def epoch_order_by_prompt(examples: list, epoch: int, seed: int, shuffle: bool) -> list[int]:
    """epoch_order, but the examples of a prompt come together, where its first one would come. The last result is
    kept: every step of an epoch asks for it."""
    asked = id(examples), epoch, seed, shuffle
    if _grouped.get("asked") != asked:
        groups = {}
        for i in epoch_order(len(examples), epoch, seed, shuffle):
            groups.setdefault(examples[i].prompt.tobytes(), []).append(i)
        order = [i for group in groups.values() for i in group]
        _grouped.update(asked=asked, examples=examples, order=order)
    return _grouped["order"]


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
    packed: dict[tuple[tuple[int, ...], bool], PackedBatch] = field(default_factory=dict)

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

    def pack(self, index: list[int], borrowed: bool = False) -> PackedBatch:
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

    def loss_view(self, packed: PackedBatch, step: "StepView") -> "LossView":
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
    keys = [e.keys[:2] for e in examples]  # a pair: its chosen completion
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


if __name__ == "__main__":  # python data.py FILE [--model M] shows a file as a run would see it
    from records.examples import page
    from runs.console import run_cli

    run_cli(page)

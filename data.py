"""A step: its examples, its mismatched pairs, its micro-batches.

This file knows no loss, and of a model its size alone. Reading order: which examples a step has (step_examples); Step;
MicroBatch, which is what a loss sees; how a step is split (split_step). How a micro-batch becomes one row
of tokens: packing.py. How the records of a file become examples: records/examples.py. `python data.py FILE`:
records/page.py.

Shape letters: G examples of a step, on all ranks together; B of a micro-batch; K completions of an example;
L tokens of the longest completion; n mismatched pairs of a step. packing.py has further ones, of a packed row.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from lightning.fabric import Fabric
from transformers import PretrainedConfig

from infra.console import BadInput
from infra.devices import to_device
from infra.optimizer import Plan
from infra.seeds import mixed
from infra.settings import RunSettings
from packing import PackedBatch, pack, prompt_groups
from records.examples import Example

# ---- which examples a step has ------------------------------------------------------------------


def step_examples(
    examples: Sequence[Example], cfg: RunSettings, plan: Plan, done: int
) -> Iterator[list[Example]]:
    """The G examples of each step to come: of those after the first `done` steps, until plan.end. A step's
    examples are a slice of its epoch's order, which depends on seed, epoch and examples only: every rank draws
    the same, and a resume needs no sampler state. An epoch's last examples, too few for a step, are left out."""
    order = None
    for number in range(done + 1, plan.end + 1):
        done_in_plan = number - 1 - plan.begin
        epoch, step_in_epoch = divmod(done_in_plan, plan.per_epoch)
        if order is None or step_in_epoch == 0:
            # A number that no other epoch of the run has: the epochs of earlier iterations are at most plan.begin,
            # since each has at least one step.
            epoch_number = plan.begin + epoch
            order = order_of_examples(examples, cfg, epoch_number)
        start = step_in_epoch * cfg.batch_size
        yield [examples[j] for j in order[start : start + cfg.batch_size]]


def order_of_examples(
    examples: Sequence[Example], cfg: RunSettings, epoch_number: int
) -> Sequence[int]:
    """The indices of the examples in the order of an epoch."""
    order = range(len(examples))
    if cfg.data.shuffle:
        order = shuffled(len(examples), epoch_number, cfg.seed)
    if cfg.data.group_by_prompt:
        # examples with one prompt side by side, so that a micro-batch computes it once
        positions = chain(*prompt_groups([examples[j].prompt for j in order]))
        order = [order[k] for k in positions]
    return order


def shuffled(n: int, epoch: int, seed: int) -> list[int]:
    """The shuffled order of an epoch's n examples. It depends on the arguments alone."""
    generator = torch.Generator().manual_seed(mixed(seed, epoch))
    return torch.randperm(n, generator=generator).tolist()


def made_ahead(items: Iterator) -> Iterator:
    """The same items. While the caller works with one, a thread makes the next one."""
    with ThreadPoolExecutor(1) as thread:
        upcoming = thread.submit(next, items, None)  # None at the end
        while (item := upcoming.result()) is not None:
            upcoming = thread.submit(next, items, None)
            yield item


# ---- mismatched pairs ---------------------------------------------------------------------------


def next_mismatched_completions(examples: list[Example]) -> list[np.ndarray | None]:
    """For each example the completion that its prompt is paired with for z; None: no pair."""
    partners = next_mismatched(examples)
    return [None if j is None else examples[j].completions[0] for j in partners]


def next_mismatched(examples: list[Example]) -> list[int | None]:
    """For each example the index of the next one, in circular order, with another prompt and another
    completion; None: there is none. An example with a chosen and a rejected completion counts by its chosen one.

    Shifting by one is not enough: two ratings of one prompt often stand side by side, and the mismatched
    completion could then equal the example's own one.
    """
    prompts = [e.prompt_key for e in examples]
    completions = [e.completions[0].tobytes() for e in examples]
    G = len(examples)
    if len(set(prompts)) == 1 or len(set(completions)) == 1:
        return [None] * G  # a shortcut: the search below would compare each example with all others
    partners = []
    for i in range(G):
        partner = None
        for distance in range(1, G):
            j = (i + distance) % G
            if prompts[j] != prompts[i] and completions[j] != completions[i]:
                partner = j
                break
        partners.append(partner)
    return partners


# ---- a step and its micro-batches ---------------------------------------------------------------

# of a micro-batch, where neither micro_batch_size nor micro_batch_tokens is set
DEFAULT_TOKENS = 16384
CPU_ACTIVATIONS = 4e9  # bytes of a micro-batch, at most
# activations that the backward needs, about: for each token, layer and unit of the width
NUMBERS_KEPT = 20


class Budget(NamedTuple):
    """How a step is split into micro-batches. It changes memory and speed, and numbers by rounding only."""

    rank: int = 0
    ranks: int = 1
    room: int = DEFAULT_TOKENS
    """Tokens or examples of a micro-batch, at most; but a larger example has one of its own."""
    by_tokens: bool = True
    """Whether room counts tokens."""


def most_tokens(cfg: RunSettings, n_layer: int, n_embd: int) -> int:
    """Tokens of a micro-batch, at most. On a CPU the default is smaller where the activations of so many
    tokens would take more than 4 GB."""
    if cfg.micro_batch_tokens:
        return cfg.micro_batch_tokens
    if cfg.accelerator != "cpu":
        return DEFAULT_TOKENS
    bytes_per_token = 4 * NUMBERS_KEPT * n_layer * n_embd
    tokens = int(CPU_ACTIVATIONS / bytes_per_token) // 256 * 256  # a round number
    return min(DEFAULT_TOKENS, max(256, tokens))


def make_budget(cfg: RunSettings, fabric: Fabric, config: PretrainedConfig) -> Budget:
    """How a step of this run is split over ranks and micro-batches. config: transformers' text config."""
    most = most_tokens(cfg, config.num_hidden_layers, config.hidden_size)
    return Budget(
        fabric.global_rank,
        fabric.world_size,
        room=cfg.micro_batch_size or most,
        by_tokens=not cfg.micro_batch_size,
    )


class Part(NamedTuple):
    """Which examples of a step form a micro-batch, by their indices in the step."""

    index: list[int]
    filler: bool = False
    """True: it repeats examples and counts nowhere. It gives each rank as many micro-batches as the others have: a
    sharded forward is a collective."""


class Step:
    """The G examples of an optimizer step, or of a whole validation split. Every rank has all of them.

    examples         the G examples
    size             G
    n_desirable      how many of them are desirable
    label            (G,) bool, True: desirable
    reward           (G,) graded rewards; an example without one has 1 if it is desirable, else 0
    weight           (G,) the records' own weights, 1 where a record has none; the loop multiplies the loss by them
    group            (G,) the number of each example's prompt, from 0 on: equal prompts, equal numbers. Not all
                     answers to a prompt need be in one step
    mismatched_index (n,) which of the G have a mismatched pair. Indices, not a mask: a mask would make the
                     host wait for a GPU
    mismatched_completions a list of G arrays of token ids: where an example has no pair, a stand-in that z never
                     sees. Or None: the step has no mismatched pairs
    longest          L of every micro-batch: tokens of the step's longest completion, own or mismatched. One
                     number for all, so that a sum over L rounds alike however the step is split
    parts            the examples of each of this rank's micro-batches. All ranks have equally many

    The tensors are on the CPU until `move_to` moves them.
    """

    def __init__(
        self,
        examples: list[Example],
        mismatched_completions: Sequence[np.ndarray | list[int] | None] | None = None,
        budget: Budget | None = None,
    ):
        """mismatched_completions: of each example one, or None if it has no pair. None in place of the list: the
        step has no mismatched pairs. budget: default one rank, DEFAULT_TOKENS."""
        self.examples = examples
        self.size = len(examples)
        self.n_desirable = sum(e.label for e in examples)
        self.label = torch.tensor([e.label for e in examples])
        self.reward = torch.tensor([graded_reward(e) for e in examples])
        self.weight = torch.tensor([e.weight for e in examples])
        self.group = torch.empty(self.size, dtype=torch.long)
        for number, same_prompt in enumerate(prompt_groups([e.prompt for e in examples])):
            self.group[same_prompt] = number
        self.mismatched_completions = None
        with_pair: list[int] = []
        if mismatched_completions is not None:
            with_pair = [i for i, ids in enumerate(mismatched_completions) if ids is not None]
            # An example without a pair takes the completion of example 0, so that the mismatched batch has
            # the prompts of the own one. Objective.make_z never sees its log-ratio.
            stand_in = examples[0].completions[0]
            self.mismatched_completions = [
                stand_in if ids is None else np.asarray(ids, np.int32)
                for ids in mismatched_completions
            ]
        self.mismatched_index = torch.tensor(with_pair, dtype=torch.long)
        completions = list(chain(*(e.completions for e in examples)))
        completions += self.mismatched_completions or []
        self.longest = max(map(len, completions), default=0)
        self.parts = split_step(self, budget or Budget())  # last: it reads what is above

    def move_to(self, device: torch.device) -> None:
        """Move the tensors to a device, in place. The copies do not wait for the work that is queued there."""
        for name in ("label", "reward", "weight", "group", "mismatched_index"):
            setattr(self, name, to_device(getattr(self, name), device))

    def extra(self, name: str) -> torch.Tensor | list[str]:
        """A field that the setting data.extra names: (G,) numbers, or a list of texts. Raises BadInput."""
        return extra_field(self.examples, name, self.label.device)

    def micro_batches(self) -> Iterator["MicroBatch"]:
        """This rank's micro-batches, each packed when it is asked for."""
        return map(self.micro_batch, self.parts)

    def micro_batch(self, part: Part) -> "MicroBatch":
        """Pack the examples of a part. The result is on the CPU."""
        prompts = [self.examples[i].prompt for i in part.index]
        completions = [self.examples[i].completions for i in part.index]
        packed = pack(prompts, completions, self.longest)
        mismatched = None
        if self.mismatched_completions is not None:
            completions = [(self.mismatched_completions[i],) for i in part.index]
            mismatched = pack(prompts, completions, self.longest)
        return MicroBatch(self, part, torch.tensor(part.index), packed, mismatched)


@dataclass(frozen=True)
class MicroBatch:
    """B examples of a step that go through the models together: what a loss sees. There its tensors are on
    the device of the log-probs, but for `mismatched`."""

    step: Step
    """The whole step: sums over examples come from here."""
    part: Part
    index_B: torch.Tensor
    """The examples' indices in the step."""
    packed: PackedBatch
    """Their prompts with their own completions, as the models read them."""
    mismatched: PackedBatch | None
    """The same prompts with their mismatched completions, on the CPU; None if the objective asks for none."""
    outputs: torch.Tensor | None = None
    """(B, K, L, ...) if the objective has a module: what it gives at each token, 0 beyond a completion's end."""

    @property
    def examples(self) -> list[Example]:
        return [self.step.examples[i] for i in self.part.index]

    @property
    def label(self) -> torch.Tensor:
        """(B,) bool, True: desirable."""
        return self.step.label[self.index_B]

    @property
    def reward(self) -> torch.Tensor:
        """(B,) graded rewards, see Step."""
        return self.step.reward[self.index_B]

    @property
    def group(self) -> torch.Tensor:
        """(B,) numbers of the prompts, the same as in the step."""
        return self.step.group[self.index_B]

    @property
    def length(self) -> torch.Tensor:
        """(B, K) tokens of each completion."""
        return self.packed.length_BK

    def extra(self, name: str) -> torch.Tensor | list[str]:
        """A field that the setting data.extra names: (B,) numbers, or a list of texts. Raises BadInput."""
        return extra_field(self.examples, name, self.index_B.device)

    def with_outputs(self, outputs: torch.Tensor | None) -> "MicroBatch":
        return replace(self, outputs=outputs)

    def to(self, device: torch.device) -> "MicroBatch":
        """This micro-batch on a device, but for its mismatched pairs, which move when they are scored. The copies
        do not wait for the work that is queued there."""
        index_B = to_device(self.index_B, device)
        return replace(self, index_B=index_B, packed=self.packed.to(device))


def graded_reward(example: Example) -> float:
    """The record's own reward; without one 1 for a desirable example, else 0."""
    reward = example.rewards[0]  # of the only completion, or of the chosen one
    return float(example.label if reward is None else reward)


def extra_field(
    examples: list[Example], name: str, device: torch.device
) -> torch.Tensor | list[str]:
    """A field of these examples that the setting data.extra names: a tensor of numbers, or a list of texts."""
    if not all(name in e.extra for e in examples):
        raise BadInput(f"data.extra: {name}: the loss asks for it: --data.extra {name}")
    values = [e.extra[name] for e in examples]
    if any(isinstance(value, str) for value in values):
        return values
    return to_device(torch.tensor(values, dtype=torch.get_default_dtype()), device)


# ---- how a step is split ------------------------------------------------------------------------


def split_step(step: Step, budget: Budget) -> list[Part]:
    """The parts of this rank, for both passes over a step: with gradient and without."""
    examples = step.examples
    # what each example takes beside its prompt
    added = [1] * len(examples)
    if budget.by_tokens:
        added = [sum(map(len, e.completions)) for e in examples]
        if step.mismatched_completions is not None:
            # own and mismatched batch have the same examples: the larger one must fit
            added = [max(n, len(ids)) for n, ids in zip(added, step.mismatched_completions)]
    pieces = []  # examples with one prompt, in one micro-batch
    sizes = []
    for group in prompt_groups([e.prompt for e in examples]):
        prompt_tokens = len(examples[group[0]].prompt) if budget.by_tokens else 0
        # A group that is larger than a micro-batch becomes several pieces, and each computes the prompt. Where the
        # prompt alone fills a micro-batch the room is 0 or less, and each example is a piece.
        for piece in fill(group, added, budget.room - prompt_tokens, first_fit=budget.by_tokens):
            pieces.append(piece)
            sizes.append(prompt_tokens + sum(added[i] for i in piece))
    return split_into_parts(pieces, sizes, budget)[budget.rank]


def split_into_parts(pieces: list[list[int]], sizes: list[int], budget: Budget) -> list[list[Part]]:
    """The parts of each rank. pieces: examples that stay together; sizes: of each piece, in the unit of
    budget.room.

    By tokens each rank gets about as many (share_by_size); otherwise ranks take pieces in turn. All ranks get equally
    many parts, because collectives inside a sharded forward must match: a rank with fewer repeats piece 0
    as a filler.
    """
    if budget.by_tokens:
        shares = share_by_size(sizes, budget.ranks)
    else:
        shares = [range(rank, len(pieces), budget.ranks) for rank in range(budget.ranks)]
    parts_of_rank = []
    for share in shares:
        parts = []
        for pieces_of_part in fill(share, sizes, budget.room, first_fit=budget.by_tokens):
            index = chain(*(pieces[p] for p in pieces_of_part))
            parts.append(Part(sorted(index)))  # in the order of the step
        parts_of_rank.append(parts)
    most = max(map(len, parts_of_rank))
    for parts in parts_of_rank:
        parts += [Part(pieces[0], filler=True)] * (most - len(parts))
    return parts_of_rank


def share_by_size(sizes: list[int], ranks: int) -> list[list[int]]:
    """Which pieces each rank takes: the largest first, each to the rank that has least so far. The short ones, which
    come last, even out what is left."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for g in sorted(range(len(sizes)), key=lambda g: -sizes[g]):
        lightest = totals.index(min(totals))
        shares[lightest].append(g)
        totals[lightest] += sizes[g]
    return shares


def fill(items: Sequence[int], sizes: list[int], room: int, first_fit: bool) -> list[list[int]]:
    """Put each item i, of size sizes[i], into the last bin if it has room for it; with first_fit, into the first
    bin that has room. If there is none, into a new bin. An item larger than a bin gets one of its own."""
    bins: list[list[int]] = []
    space: list[int] = []  # what each bin still takes
    for i in items:
        first = 0 if first_fit else max(0, len(bins) - 1)
        with_room = (j for j in range(first, len(bins)) if space[j] >= sizes[i])
        j = next(with_room, None)
        if j is None:
            j = len(bins)
            bins.append([])
            space.append(room)
        bins[j].append(i)
        space[j] -= sizes[i]
    return bins


if __name__ == "__main__":  # python data.py FILE [--model M] shows a file as a run would see it
    from infra.console import run_cli
    from records.page import page

    run_cli(page)

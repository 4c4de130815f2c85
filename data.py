"""A step: its examples, its mismatched pairs, its micro-batches. Nothing here depends on the loss.

records/examples.py makes examples from records. packing.py decides which examples go into a micro-batch, and packs
their tokens.

Shape letters: G examples of a step, over all ranks; B of a micro-batch; K completions of an example; n mismatched
pairs of a step.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from infra.console import BadInput
from infra.devices import to_device
from infra.optimizer import Plan
from infra.random_numbers import mixed
from infra.settings import RunSettings
from packing import ONE_RANK, Budget, PackedBatch, Part, pack, prompt_groups, split_step
from records.examples import Example

# ---- which examples a step has ------------------------------------------------------------------


def step_examples(
    examples: Sequence[Example], cfg: RunSettings, plan: Plan, done: int
) -> Iterator[list[Example]]:
    """Yield the G examples of each step, from step done + 1 to plan.end: the next slice of the epoch's order. The
    examples at the end of an epoch that do not fill a step are dropped.

    The order depends only on the seed, the epoch and the examples. Therefore every rank draws the same one, and a
    resume needs no sampler state."""
    order = None
    for done_in_plan in range(done - plan.begin, plan.end - plan.begin):
        epoch, step_in_epoch = divmod(done_in_plan, plan.per_epoch)
        if order is None or step_in_epoch == 0:
            # The seed plan.begin + epoch never repeats in a run: an epoch has at least one step, so the next
            # iteration's plan.begin is larger.
            order = order_of_examples(examples, cfg, plan.begin + epoch)
        start = step_in_epoch * cfg.batch_size
        yield [examples[j] for j in order[start : start + cfg.batch_size]]


def order_of_examples(examples: Sequence[Example], cfg: RunSettings, epoch: int) -> Sequence[int]:
    """The indices of the examples in the order of an epoch."""
    order: Sequence[int] = range(len(examples))
    if cfg.data.shuffle:
        order = shuffled(len(examples), epoch, cfg.seed)
    if cfg.data.group_by_prompt:
        # equal prompts side by side, so mostly in one step, which computes each prompt once
        groups = prompt_groups([examples[j].prompt for j in order])
        order = [order[k] for group in groups for k in group]
    return order


def shuffled(n: int, epoch: int, seed: int) -> list[int]:
    """The numbers 0 ... n - 1 in the shuffled order of an epoch."""
    generator = torch.Generator().manual_seed(mixed(seed, epoch))
    return torch.randperm(n, generator=generator).tolist()


def made_ahead(items: Iterator) -> Iterator:
    """The same items. A thread makes the next one while the caller works with the current one."""
    with ThreadPoolExecutor(1) as thread:
        upcoming = thread.submit(next, items, None)  # None at the end
        while (item := upcoming.result()) is not None:
            upcoming = thread.submit(next, items, None)
            yield item


# ---- mismatched pairs ---------------------------------------------------------------------------


def next_mismatched_completions(examples: list[Example]) -> list[np.ndarray | None]:
    """For each example the (first) completion of the next example, in circular order, that has another prompt and
    another completion; None if there is no such example. (The very next example may have the same prompt.)"""
    prompts = [e.prompt_key for e in examples]
    completions = [e.completions[0].tobytes() for e in examples]
    G = len(examples)
    mismatched: list[np.ndarray | None] = [None] * G
    if len(set(prompts)) == 1 or len(set(completions)) == 1:
        # the search would find nothing, after comparing every example with all others
        return mismatched
    for i in range(G):
        for distance in range(1, G):
            j = (i + distance) % G
            if prompts[j] != prompts[i] and completions[j] != completions[i]:
                mismatched[i] = examples[j].completions[0]
                break
    return mismatched


# ---- a step and its micro-batches ---------------------------------------------------------------


class Step:
    """The G examples of an optimizer step, or of a whole validation split. Every rank has all of them.

    Iterating over a step packs this rank's micro-batches, one by one. Tensors are on the CPU until `move_to`."""

    def __init__(
        self,
        examples: list[Example],
        mismatched_completions: Sequence[np.ndarray | list[int] | None] | None = None,
        budget: Budget = ONE_RANK,
    ):
        """mismatched_completions: for each example a list of token ids, or None if the example has no pair. Without
        this argument the step has no mismatched pairs."""
        self.examples = examples
        self.size = len(examples)  # G
        self.n_desirable = sum(e.label for e in examples)
        # (G,) True: desirable
        self.label = torch.tensor([e.label for e in examples])
        # (G,) rewards (see graded_reward)
        self.reward = torch.tensor([graded_reward(e) for e in examples])
        # (G,) the weights of the records, by which the loop multiplies their losses
        self.weight = torch.tensor([e.weight for e in examples])
        # (n,) the indices of the examples that have a mismatched pair
        with_pair = [i for i, ids in enumerate(mismatched_completions or []) if ids is not None]
        self.mismatched_index = torch.tensor(with_pair, dtype=torch.long)
        # None: the step has no mismatched pairs
        self.mismatched_completions: list[np.ndarray] | None = None
        if mismatched_completions is not None:
            # Own and mismatched completions are two batches of the same prompts. So an example without a pair gets any
            # completion, and Trainer.z_of_step leaves out its log-ratio.
            any_completion = examples[0].completions[0]
            self.mismatched_completions = [
                any_completion if ids is None else np.asarray(ids, np.int32)
                for ids in mismatched_completions
            ]
        # L, the tokens of the step's longest completion. All micro-batches take it, because a sum over a row of another
        # padded length may round differently.
        completions = [e.completions for e in examples]
        lengths = map(len, chain(*completions, self.mismatched_completions or []))
        self.longest = max(lengths, default=0)
        # the parts of the step that are this rank's micro-batches; every rank has equally many
        prompts = [e.prompt for e in examples]
        self.parts = split_step(prompts, completions, self.mismatched_completions, budget)

    def move_to(self, device: torch.device) -> None:
        """Move the tensors to a device, in place, by asynchronous copies."""
        for name in ("label", "reward", "weight", "mismatched_index"):
            setattr(self, name, to_device(getattr(self, name), device))

    def zeros(self) -> Tensor:
        """(G,) zeros, into which micro-batches write the numbers of their examples (MicroBatch.put)."""
        return torch.zeros(self.size, dtype=torch.float64, device=self.label.device)

    def extra(self, name: str) -> Tensor | list[str]:
        """A field of the records that data.extra names: (G,) numbers, or a list of texts. Raises BadInput."""
        if not all(name in e.extra for e in self.examples):
            raise BadInput(f"data.extra: {name}: the loss asks for this field: --data.extra {name}")
        values = [e.extra[name] for e in self.examples]
        if any(isinstance(value, str) for value in values):
            return values
        return to_device(torch.tensor(values), self.label.device)

    def __iter__(self) -> Iterator["MicroBatch"]:
        return map(self.micro_batch, self.parts)

    def micro_batch(self, part: Part) -> "MicroBatch":
        """Pack the examples of a part. The result is on the CPU."""
        prompts = [self.examples[i].prompt for i in part.indices]
        completions = [self.examples[i].completions for i in part.indices]
        packed = pack(prompts, completions, self.longest)
        mismatched = None
        if self.mismatched_completions is not None:
            completions = [(self.mismatched_completions[i],) for i in part.indices]
            mismatched = pack(prompts, completions, self.longest)
        return MicroBatch(self, part, torch.tensor(part.indices), packed, mismatched)


@dataclass(frozen=True)
class MicroBatch:
    """B examples of a step that go through the models together, as a loss gets them. All tensors are on the device of
    the log-probs, except those of `mismatched`, which stay on the CPU until they are scored."""

    step: Step
    """The whole step: a loss takes sums over examples from here."""
    part: Part
    index_B: Tensor
    """part.indices as a tensor."""
    packed: PackedBatch
    """The prompts with the examples' own completions, as the models read them."""
    mismatched: PackedBatch | None
    """The same prompts with mismatched completions. None if the step has no mismatched pairs."""
    outputs: Tensor | None = None
    """(B, K, L, ...) outputs of the objective's module, with 0 beyond the end of a completion. None without a
    module."""

    @property
    def examples(self) -> list[Example]:
        return [self.step.examples[i] for i in self.part.indices]

    @property
    def label(self) -> Tensor:
        """(B,) bool, True: desirable."""
        return self.step.label[self.index_B]

    @property
    def token_label(self) -> Tensor:
        """(B, L) 1 at tokens that the record's `spans` mark as good, -1 at those marked as bad, otherwise 0."""
        unmarked = [0] * self.step.longest  # each row is filled up to L
        rows = [[*e.token_label, *unmarked][: len(unmarked)] for e in self.examples]
        return to_device(torch.tensor(rows), self.index_B.device)

    @property
    def reward(self) -> Tensor:
        """(B,) rewards (see graded_reward)."""
        return self.step.reward[self.index_B]

    @property
    def length(self) -> Tensor:
        """(B, K) tokens of each completion."""
        return self.packed.length_BK

    def extra(self, name: str) -> Tensor | list[str]:
        """A field of the records that data.extra names: (B,) numbers, or a list of texts. Raises BadInput."""
        values = self.step.extra(name)
        if isinstance(values, list):
            return [values[i] for i in self.part.indices]
        return values[self.index_B]

    def put(self, x_B: Tensor, x_G: Tensor) -> None:
        """Write the numbers of these examples into those of the whole step. A filler writes nothing."""
        if not self.part.filler:
            x_G[self.index_B] = x_B.to(x_G.dtype)

    def to(self, device: torch.device) -> "MicroBatch":
        """This micro-batch on a device, by asynchronous copies."""
        index_B = to_device(self.index_B, device)
        return replace(self, index_B=index_B, packed=self.packed.to(device))


def graded_reward(example: Example) -> float:
    """The reward of the record. A record without a reward has 1 if it is desirable, otherwise 0."""
    reward = example.rewards[0]  # of the only completion, or of the chosen one
    return float(example.label if reward is None else reward)


if __name__ == "__main__":  # python data.py FILE [--model M] shows a file as a run would see it
    from infra.console import run_cli
    from preview import main

    run_cli(main)

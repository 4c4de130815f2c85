"""A step's batch with its circular-shift KL pairs, micro-batches, and packing.

Knows no model and no loss. Reading order: the batch of a step and its mismatched pairs (Batch), how
a step is cut into micro-batches (cut), how a micro-batch becomes one sequence of tokens (pack).
From a file to examples: support/examples.py.

Shape letters: G examples of a step, B of a micro-batch, K completions of a prompt, N packed
tokens, T targets (tokens that are predicted and scored).
"""

import functools
import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from support.examples import Example
from support.tokenizer import Tokenizer

# ---- the batch of a step ------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """The G examples of a step (or of a whole validation split), the same on every rank."""

    examples: list[Example]
    partners: list[int] | None = None  # whose completion example i borrows; -1: nobody's
    score_prompt: bool = False
    tokenizer: Tokenizer | None = None

    def pack(self, index: list[int], own: bool = True, borrowed: bool = False) -> "PackedBatch":
        """The prompts of these examples with their own completions, the borrowed one (the last of
        K), or both. Where nobody's is borrowed any will do: it is left out of the KL mean."""
        prompts, completions = [], []
        for i in index:
            e, kl = self.examples[i], ()
            if borrowed:
                kl = (self.examples[max(self.partners[i], 0)].completions[0],)
            prompts.append(e.prompt)
            completions.append((e.completions if own else ()) + kl)
        return pack(prompts, completions, self.score_prompt)

    def sizes(self, borrowed: bool = False) -> list[int]:
        """Tokens of each example in a PackedBatch."""
        sizes = [len(e.prompt) + sum(map(len, e.completions)) for e in self.examples]
        if borrowed and self.partners is not None:
            kl = [self.examples[max(j, 0)].completions[0] for j in self.partners]
            sizes = [n + len(y) for n, y in zip(sizes, kl)]
        return sizes

    def micro_batch(self, index: list[int], length_BK: torch.Tensor) -> "MicroBatch":
        """What a loss sees of these examples."""
        examples, device = [self.examples[i] for i in index], length_BK.device
        label_B = torch.tensor([e.label for e in examples]).to(device)
        weight_B = torch.tensor([e.weight for e in examples]).to(device)
        n_desirable = sum(e.label for e in self.examples)
        step = (len(self.examples), n_desirable, self.tokenizer)
        return MicroBatch(examples, label_B, weight_B, length_BK, *step)


class MicroBatch(NamedTuple):
    """B examples of a step, as a loss sees them. Tensors are on the device of the log-probs."""

    examples: list[Example]
    label: torch.Tensor  # (B,) bool, desirable
    weight: torch.Tensor  # (B,) the records' own weights, 1 where they have none
    length: torch.Tensor  # (B, K) scored tokens
    step_size: int  # G
    step_desirable: int  # desirable examples among the step's G
    tokenizer: Tokenizer | None = None

    def extra(self, name: str):
        """A field that data.extra names: (B,) numbers, or a list of B texts."""
        values = [e.extra[name] for e in self.examples]
        if any(isinstance(v, str) for v in values):
            return values
        return torch.tensor(values, device=self.label.device)

    def text(self, i: int) -> str:
        """Example i of this micro-batch, decoded."""
        e, decode = self.examples[i], self.tokenizer.decode
        label = "desirable" if e.label else "undesirable"
        answers = [f"completion: {decode(c)!r}" for c in e.completions]
        return "\n".join([f"{e.where}, {label}", f"prompt: {decode(e.prompt)!r}", *answers])


def mismatched(examples: list[Example]) -> list[int]:
    """Circular shift: for each example the next one, in order, with another prompt and another
    completion; -1 if there is none.

    Shifting by one and hoping is not enough: two ratings of one prompt often stand side by side,
    and y' would be y itself.
    """
    keys = [e.keys for e in examples]
    n, partners = len(keys), []
    for i, (prompt, completion) in enumerate(keys):
        others = ((i + d) % n for d in range(1, n))
        fit = (j for j in others if keys[j][0] != prompt and keys[j][1] != completion)
        partners.append(next(fit, -1))
    return partners


@functools.lru_cache(maxsize=2)
def epoch_order(n: int, epoch: int, seed: int, shuffle: bool) -> list[int]:
    """A permutation, a function of its arguments alone: a resume needs no sampler state."""
    if not shuffle:
        return list(range(n))
    generator = torch.Generator().manual_seed(seed * 1000003 + epoch)
    return torch.randperm(n, generator=generator).tolist()


def next_of(items: list, i: int, n: int | None, seed: int) -> list:
    """Iteration i's n items: a slice of one seeded permutation after another."""
    n, picked = n or len(items), []
    for j in range((i - 1) * n, i * n):
        epoch, k = divmod(j, len(items))
        picked.append(items[epoch_order(len(items), epoch, seed, True)[k]])
    return picked


# ---- micro-batches ------------------------------------------------------------------------------


class Micro(NamedTuple):
    index: list[int]  # which examples of the step
    filler: bool = False  # run for the collectives' sake only: its weight in the loss is 0


def shares(sizes: list[int], ranks: int, by_tokens: bool) -> list[list[int]]:
    """Each rank's part of a step: in turn, or balanced by tokens (longest first, to the lightest)."""
    if not by_tokens:
        return [list(range(rank, len(sizes), ranks)) for rank in range(ranks)]
    parts, tokens_R = [[] for _ in range(ranks)], [0] * ranks
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        lightest = tokens_R.index(min(tokens_R))
        parts[lightest].append(i)
        tokens_R[lightest] += sizes[i]
    return parts


def cut(
    sizes: list[int], parts: list[list[int]], batch_size: int | None, tokens: int | None
) -> list[list[Micro]]:
    """Micro-batches of each rank's part, by number or by tokens (into the first with room).

    Equally many on all ranks, since collectives inside a sharded forward must meet: a rank without
    examples left repeats example 0 as a filler.
    """
    micros = [
        _fill(part, sizes, tokens)
        if tokens
        else [part[i : i + batch_size] for i in range(0, len(part), batch_size)]
        for part in parts
    ]
    most = max(map(len, micros))
    filler = Micro([0], True)
    return [
        [Micro(sorted(index)) for index in mine] + [filler] * (most - len(mine)) for mine in micros
    ]


def _fill(part: list[int], sizes: list[int], tokens: int) -> list[list[int]]:
    """Longest first; an example over the budget goes alone."""
    out, room = [], []
    for i in sorted(part, key=lambda i: -sizes[i]):
        at = next((j for j, free in enumerate(room) if free >= sizes[i]), len(out))
        if at == len(out):
            out.append([])
            room.append(tokens)
        out[at].append(i)
        room[at] -= sizes[i]
    return out


# ---- packing ------------------------------------------------------------------------------------


class PackedBatch(NamedTuple):
    """B prompts, each followed by its K completions, in one sequence of N tokens without padding.

    A completion's positions continue its prompt's. Its last token is never an input: nothing
    follows it.
    """

    token_N: torch.Tensor
    position_N: torch.Tensor
    example_N: torch.Tensor
    branch_N: torch.Tensor  # 0: prompt, 1..K: completion. A token sees its prompt and own branch
    source_T: torch.Tensor  # which token's hidden state predicts
    target_T: torch.Tensor  # what it should predict
    segment_T: torch.Tensor  # (K + 1) * example + completion; the last of K + 1: the scored prompt
    length_BK: torch.Tensor  # scored tokens
    parts: tuple[tuple[int, ...], ...]  # per example: input tokens of prompt and each completion

    def to(self, device) -> "PackedBatch":
        tensors = (x.to(device, non_blocking=True) for x in self[:-1])
        return PackedBatch(*tensors, self.parts)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Input tokens of each example."""
        return tuple(map(sum, self.parts))

    def digests(self) -> list[list[bytes]]:
        """By example and completion: a hash of (prompt, completion), of their token ids."""
        token, target = self.token_N.cpu().numpy(), self.target_T.cpu().numpy()
        at, t, out = 0, 0, []
        for (prompt, *rest), length in zip(self.parts, self.length_BK.tolist()):
            head, row = token[at : at + prompt].tobytes(), []
            for n in rest:
                content = len(head).to_bytes(8, "big") + head + target[t : t + n + 1].tobytes()
                row.append(hashlib.blake2b(content, digest_size=16).digest())
                t += n + 1
            t += length[0] - rest[0] - 1  # the scored prompt
            at += prompt + sum(rest)
            out.append(row)
        return out


def pack(prompts, completions, score_prompt: bool = False) -> PackedBatch:
    """prompts: B id arrays; completions: B tuples of K id arrays, all non-empty."""
    columns = [[] for _ in range(7)]
    token, position, example, branch, source, target, segment = columns
    parts, length = [], []
    start, K = 0, len(completions[0])
    for b, (p, ys) in enumerate(zip(prompts, completions)):
        inputs = [p, *(y[:-1] for y in ys)]
        parts.append(tuple(map(len, inputs)))
        size, P = sum(parts[-1]), len(p)
        token += inputs
        position += [np.arange(P), *(np.arange(P, P + len(y) - 1) for y in ys)]
        example.append(np.full(size, b))
        branch += [np.full(len(x), k) for k, x in enumerate(inputs)]
        at, last = start + P, start + P - 1
        for k, y in enumerate(ys):  # the prompt's end predicts a completion's first token
            source += [np.array([last]), np.arange(at, at + len(y) - 1)]
            target.append(y)
            segment.append(np.full(len(y), b * (K + 1) + k))
            at += len(y) - 1
        if score_prompt:
            source.append(np.arange(start, last))
            target.append(p[1:])
            segment.append(np.full(P - 1, b * (K + 1) + K))
        length.append([len(y) + (P - 1 if score_prompt else 0) for y in ys])
        start += size
    arrays = [torch.from_numpy(np.concatenate(x).astype(np.int64)) for x in columns]
    return PackedBatch(*arrays, torch.tensor(length), tuple(parts))


if __name__ == "__main__":  # python data.py FILE [--model M]: a file as a run would see it
    from support.errors import run_cli
    from support.preview import main

    run_cli(main)

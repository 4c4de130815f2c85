"""A step's batch with its circular-shift KL pairs, micro-batches, and packing.

Knows no model and no loss. Reading order: the batch of a step and its mismatched pairs (Batch), how
a step is cut into micro-batches (cut), how a micro-batch becomes one sequence of tokens (pack).
From a file to examples: records/examples.py.

Shape letters: G examples of a step, B of a micro-batch, K completions of a prompt, N packed
tokens, T targets (tokens that are predicted and scored).
"""

import functools
import hashlib
import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from records.examples import Example
from records.tokenizer import Tokenizer
from runs.errors import BadInput

# ---- the batch of a step ------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """The G examples of a step (or of a whole validation split), the same on every rank."""

    examples: list[Example]
    partners: list[int] | None = None  # whose completion example i borrows; -1: nobody's
    score_prompt: bool = False
    tokenizer: Tokenizer | None = None
    micro: dict = field(default_factory=dict)  # no-gradient pass? -> its micro-batches
    packed: dict = field(default_factory=dict)  # what has been packed ahead

    def pack_ahead(self, no_grad: bool, micros: list["Micro"]) -> None:
        """Pack what the pass over these micro-batches will ask for."""
        borrowed = no_grad and self.partners is not None
        self.micro[no_grad] = micros
        for micro in micros:
            for kind in [(True, borrowed), (False, True)][: 1 + borrowed]:
                self.packed[(*micro.index, kind)] = self.pack(micro.index, *kind)

    def pack(self, index: list[int], own: bool = True, borrowed: bool = False) -> "PackedBatch":
        """The prompts of these examples with their own completions, the borrowed one (the last of
        K), or both. Where nobody's is borrowed any will do: it is left out of the KL mean."""
        if ready := self.packed.get((*index, (own, borrowed))):
            return ready
        prompts, completions = [], []
        for i in index:
            e, kl = self.examples[i], ()
            if borrowed:
                kl = (self.examples[max(self.partners[i], 0)].completions[0],)
            prompts.append(e.prompt)
            completions.append((e.completions if own else ()) + kl)
        return pack(prompts, completions, self.score_prompt, index)

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
        label_B = to_device(torch.tensor([e.label for e in examples]), device)
        weight_B = to_device(torch.tensor([e.weight for e in examples]), device)
        n_desirable = sum(e.label for e in self.examples)
        step = (len(self.examples), n_desirable, self.tokenizer)
        return MicroBatch(examples, label_B, weight_B, length_BK, *step)


def to_device(x, device):
    """x on a device, without waiting for what runs there."""
    if device.type == "cuda":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


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
        if not all(name in e.extra for e in self.examples):
            raise BadInput(f"data.extra: {name}: the loss asks for it: --data.extra {name}")
        values = [e.extra[name] for e in self.examples]
        if any(isinstance(v, str) for v in values):
            return values
        return to_device(torch.tensor(values), self.label.device)

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
    if 1 in (len(set(column)) for column in zip(*keys)):  # else each would look at all others
        return [-1] * n
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


def next_items(items: list, i: int, n: int | None, seed: int) -> list:
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


def split_over_ranks(sizes: list[int], ranks: int, by_tokens: bool) -> list[list[int]]:
    """Each rank's part of a step: in turn, or balanced by tokens (longest first, to the lightest)."""
    if not by_tokens:
        return [list(range(rank, len(sizes), ranks)) for rank in range(ranks)]
    parts, tokens_R = [[] for _ in range(ranks)], [0] * ranks
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        lightest = tokens_R.index(min(tokens_R))
        parts[lightest].append(i)
        tokens_R[lightest] += sizes[i]
    return parts


def cut_micro_batches(
    sizes: list[int], parts: list[list[int]], batch_size: int | None, tokens: int | None
) -> list[list[Micro]]:
    """Micro-batches of each rank's part, by number or by tokens (into the first with room).

    Equally many on all ranks, since collectives inside a sharded forward must meet: a rank without
    examples left repeats example 0 as a filler.
    """
    micros = [
        _first_fit(part, sizes, tokens)
        if tokens
        else [part[i : i + batch_size] for i in range(0, len(part), batch_size)]
        for part in parts
    ]
    most = max(map(len, micros))
    filler = Micro([0], True)
    return [
        [Micro(sorted(index)) for index in mine] + [filler] * (most - len(mine)) for mine in micros
    ]


def _first_fit(part: list[int], sizes: list[int], tokens: int) -> list[list[int]]:
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
    follows it. All tensors are parts of one buffer, so that one copy brings them to a device.

    Attention has B x K segments: the first completion's with its prompt, causal; each other one's
    own tokens, over [its prompt; themselves], causal from the lower right. Where prompts were
    computed before, the queries are the completions' own tokens only ("own").
    """

    token_N: torch.Tensor
    position_N: torch.Tensor
    example_N: torch.Tensor
    branch_N: torch.Tensor  # 0: prompt, 1..K: completion. A token sees its prompt and own branch
    source_T: torch.Tensor  # which token's hidden state predicts
    target_T: torch.Tensor  # what it should predict
    segment_T: torch.Tensor  # (K + 1) * example + completion; the last of K + 1: the scored prompt
    length_BK: torch.Tensor  # scored tokens
    index_B: torch.Tensor  # each example's place in its step
    prompt_P: torch.Tensor  # which tokens are prompts
    own_M: torch.Tensor  # which are completions; token 0 where none is, since layers want one
    key_L: torch.Tensor  # which tokens are the segments' keys; empty: all in their order (K = 1)
    start_S: torch.Tensor  # int32, where a segment's queries begin, and the end
    start_own_S: torch.Tensor  # the same among own queries
    start_key_S: torch.Tensor  # the same of its keys
    parts: tuple[tuple[int, ...], ...]  # per example: input tokens of prompt and each completion
    longest: tuple[int, int, int]  # segment's queries, own queries, keys
    buffer: torch.Tensor  # int32, on the CPU

    def to(self, device) -> "PackedBatch":
        if torch.device(device).type == "cpu":
            return self
        buffer = self.buffer.to(device, non_blocking=True)
        tensors = _views(buffer, [x.shape for x in self[:-3]])
        return PackedBatch(*tensors, *self[-3:])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Input tokens of each example."""
        return tuple(map(sum, self.parts))

    def digests(self) -> list[list[bytes]]:
        """By example and completion: a hash of (prompt, completion), of their token ids."""
        host = _views(self.buffer, [x.shape for x in self[:-3]])
        token, target = host[0].numpy(), host[5].numpy()
        at, t, out = 0, 0, []
        for (prompt, *rest), length in zip(self.parts, host[7].tolist()):
            head, row = token[at : at + prompt].tobytes(), []
            for n in rest:
                content = len(head).to_bytes(8, "big") + head + target[t : t + n + 1].tobytes()
                row.append(hashlib.blake2b(content, digest_size=16).digest())
                t += n + 1
            t += length[0] - rest[0] - 1  # the scored prompt
            at += prompt + sum(rest)
            out.append(row)
        return out


def _views(buffer, shapes) -> list[torch.Tensor]:
    """A buffer's parts: int64, as indices must be; the segments' starts int32, as kernels want."""
    sizes = [math.prod(shape) for shape in shapes]
    n_indices = sum(sizes[:12])
    wide = buffer[:n_indices].long().split(sizes[:12])
    narrow = buffer[n_indices:].int().split(sizes[12:])
    return [x.view(shape) for x, shape in zip((*wide, *narrow), shapes)]


def _runs(length_R):
    """Runs of these lengths, end to end -> of each element its run, and its place in it."""
    run = np.repeat(np.arange(len(length_R)), length_R)
    return run, np.arange(len(run)) - (np.cumsum(length_R) - length_R)[run]


def pack(prompts, completions, score_prompt: bool = False, index=None) -> PackedBatch:
    """prompts: B id arrays; completions: B tuples of K id arrays, all non-empty; index: the
    examples' places in their step."""
    B, K = len(prompts), len(completions[0])
    length_BK = np.array([[len(y) for y in ys] for ys in completions])
    prompt_B = np.array([len(p) for p in prompts])
    parts_BK = np.column_stack([prompt_B, length_BK - 1])  # a completion's last is no input
    start_BK = (np.cumsum(parts_BK) - parts_BK.ravel()).reshape(B, K + 1)
    part_N, offset_N = _runs(parts_BK.ravel())
    example_N, branch_N = np.divmod(part_N, K + 1)
    position_N = offset_N + np.where(branch_N > 0, prompt_B[example_N], 0)
    inputs = [x for p, ys in zip(prompts, completions) for x in (p, *(y[:-1] for y in ys))]
    # targets: the completions' tokens and, last, the scored prompt's
    scored_BK, first_BK = length_BK, start_BK[:, 1:] - 1
    targets = completions
    if score_prompt:
        scored_BK = np.column_stack([length_BK, prompt_B - 1])
        first_BK = np.column_stack([first_BK, start_BK[:, 0]])
        targets = [(*ys, p[1:]) for p, ys in zip(prompts, completions)]
    run_T, offset_T = _runs(scored_BK.ravel())
    example_T, segment_T = np.divmod(run_T, scored_BK.shape[1])
    prompt_end_T = (start_BK[:, 0] + prompt_B - 1)[example_T]
    begins = (offset_T == 0) & (segment_T < K)  # the prompt's end predicts a first token
    source_T = np.where(begins, prompt_end_T, first_BK.ravel()[run_T] + offset_T)
    segment_T = segment_T + example_T * (K + 1)
    # segments: their queries, the own ones among them, and their keys
    own_BK = parts_BK[:, 1:].copy()
    queries_BK, keys_BK = own_BK.copy(), own_BK + prompt_B[:, None]
    queries_BK[:, 0] += prompt_B
    own_M = np.flatnonzero(branch_N)
    if not len(own_M):
        own_M, own_BK[0, 0] = np.zeros(1, int), 1
    key_L = np.zeros(0, int)
    if K > 1:
        segment_L, offset_L = _runs(keys_BK.ravel())
        prompt_L, example_L = np.repeat(prompt_B, K)[segment_L], segment_L // K
        own_L = start_BK[:, 1:].ravel()[segment_L] + offset_L - prompt_L
        key_L = np.where(offset_L < prompt_L, start_BK[example_L, 0] + offset_L, own_L)
    starts = [np.append(0, np.cumsum(x)) for x in (queries_BK, own_BK, keys_BK)]
    columns = [np.concatenate(inputs), position_N, example_N, branch_N]
    columns += [source_T, np.concatenate([y for ys in targets for y in ys]), segment_T]
    columns += [length_BK + (prompt_B[:, None] - 1) * score_prompt]
    columns += [np.arange(B) if index is None else np.array(index)]
    columns += [np.flatnonzero(branch_N == 0), own_M, key_L, *starts]
    # numpy alone: a torch operation in the packing thread would bring threads of its own, which
    # wait in a loop and take a CPU's cores from the step that runs
    flat = np.concatenate([x.ravel() for x in columns])
    pinned = torch.cuda.is_initialized()
    buffer = torch.empty(len(flat), dtype=torch.int32, pin_memory=pinned)
    buffer.numpy()[:] = flat
    longest = tuple(int(x.max()) for x in (queries_BK, own_BK, keys_BK))
    tensors = _views(torch.from_numpy(flat), [x.shape for x in columns])
    return PackedBatch(*tensors, tuple(map(tuple, parts_BK.tolist())), longest, buffer)


if __name__ == "__main__":  # python data.py FILE [--model M]: a file as a run would see it
    from records.preview import main
    from runs.errors import run_cli

    run_cli(main)

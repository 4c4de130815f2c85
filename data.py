"""One step's batch with its mismatched (KL) pairs, its micro-batches, and packing.

This file knows no model and no loss. Reading order: which examples a step has (step_batches), a step's batch and its
mismatched pairs (Batch), how the batch is cut into micro-batches (Cut), how a micro-batch becomes one row of tokens
(pack). How the records of a file become examples: records/examples.py.

Shape letters; model.py uses the same ones:

    G  examples of a step, on all ranks together
    B  examples of a micro-batch
    K  completions of an example; with a borrowed one packed behind them, one more
    J  = K + 1, segments of an example: its prompt (number 0) and its completions (numbers 1 to K)
    N  packed input tokens of a micro-batch
    P  those of the N that belong to prompts
    M  those of the N that belong to completions; at least 1 (see PackedBatch.completion_M)
    T  targets: tokens that are predicted and scored
    L  gathered keys of attention
    S  = B * K + 1, where attention's B * K sequences begin, and where the last one ends
"""

import functools
import hashlib
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from records.examples import Example
from records.tokenizer import Tokenizer
from runs.errors import BadInput
from runs.optimizer import Plan
from runs.settings import DEFAULT_TOKENS, RunSettings

# ---- which examples a step has ------------------------------------------------------------------


def step_batches(run, examples, plan: Plan) -> Iterator["Batch"]:
    """The batches of the steps to come, until plan.end. While a step runs, a thread makes and packs the batch of the
    next one."""
    steps = range(run.state.step + 1, plan.end + 1)

    def make(step):
        batch = batch_of_step(run, examples, plan, step)
        batch.pack_ahead(run.objective.needs_no_gradient_pass)
        return batch

    if run.cfg.debug:  # a breakpoint wants the main thread
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
    order = epoch_order(len(examples), number, run.cfg.seed, run.cfg.data.shuffle)
    chosen = [examples[j] for j in order[i * G : (i + 1) * G]]
    return make_batch(run, chosen, run.objective)


def make_batch(run, examples, objective) -> "Batch":
    """These examples as the batch of a step of this objective, with mismatched pairs if it asks for them."""
    partners = mismatched(examples) if objective.kl_pairs else None
    cut = Cut.of(run.cfg, run.fabric)
    return Batch(examples, partners, run.cfg.data.score_prompt, run.tokenizer, cut)


@functools.lru_cache(maxsize=2)
def epoch_order(n: int, epoch: int, seed: int, shuffle: bool) -> list[int]:
    """The order of an epoch's n examples. It depends on the arguments alone.

    The list is cached: do not change it.
    """
    if not shuffle:
        return list(range(n))
    generator = torch.Generator().manual_seed(seed * 1000003 + epoch)
    return torch.randperm(n, generator=generator).tolist()


def next_items(items: list, i: int, n: int | None, seed: int) -> list:
    """The n items (None: all) of iteration i, which counts from 1.

    Iterations take consecutive slices of an endless list: all items in a seeded order, then all in another one, ...
    """
    n = n or len(items)
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
    max_tokens: int | None = DEFAULT_TOKENS  # of a micro-batch of the gradient pass
    # of a micro-batch of the no-gradient pass, which needs less memory
    max_no_grad_tokens: int | None = 2 * DEFAULT_TOKENS

    @classmethod
    def of(cls, cfg: RunSettings, fabric) -> "Cut":
        tokens = cfg.micro_batch_tokens
        if tokens is None and cfg.micro_batch_size is None:
            tokens = DEFAULT_TOKENS
        no_grad_tokens = cfg.no_grad_tokens
        if no_grad_tokens is None and tokens is not None:
            no_grad_tokens = 2 * tokens
        rank, ranks = fabric.global_rank, fabric.world_size
        return cls(rank, ranks, cfg.micro_batch_size, tokens, no_grad_tokens)


@dataclass(frozen=True)
class Batch:
    """The G examples of a step (or of a whole validation split). Every rank has the whole list; micro_batches gives it
    its part."""

    examples: list[Example]
    # partners[i] is the example whose completion example i borrows for its KL pair; -1: it has no partner
    partners: list[int] | None = None
    score_prompt: bool = False
    tokenizer: Tokenizer | None = None
    cut: Cut = Cut()
    # results of micro_batches, by its argument
    micro_batches_of_pass: dict[bool, list["MicroBatch"]] = field(default_factory=dict)
    # results of pack that were made ahead, by its arguments: (example numbers, own, borrowed)
    packed: dict[tuple[tuple[int, ...], bool, bool], "PackedBatch"] = field(default_factory=dict)

    def micro_batches(self, no_grad: bool = False) -> list["MicroBatch"]:
        """This rank's micro-batches of the gradient pass or of the no-gradient pass. Both passes cut the same part of
        the step, and all ranks have equally many."""
        if no_grad not in self.micro_batches_of_pass:
            cut, sizes = self.cut, self.sizes()
            parts = split_over_ranks(sizes, cut.ranks, by_tokens=cut.max_tokens is not None)
            tokens = cut.max_tokens
            if no_grad:
                sizes, tokens = self.sizes(borrowed=True), cut.max_no_grad_tokens
            of_ranks = cut_micro_batches(sizes, parts, cut.max_examples, tokens)
            self.micro_batches_of_pass[no_grad] = of_ranks[cut.rank]
        return self.micro_batches_of_pass[no_grad]

    def pack_ahead(self, no_gradient_pass: bool) -> None:
        """Pack what the passes of the step will ask for."""
        for no_grad in (False, True) if no_gradient_pass else (False,):
            if no_grad and self.partners is not None:
                # (own, borrowed): the reference scores both at once, the policy its pairs alone
                for_reference, for_policy_pairs = (True, True), (False, True)
                kinds = [for_reference, for_policy_pairs]
            else:
                kinds = [(True, False)]
            for micro in self.micro_batches(no_grad):
                for own, borrowed in kinds:
                    key = (tuple(micro.index), own, borrowed)
                    self.packed[key] = self.pack(micro.index, own, borrowed)

    def pack(self, index: list[int], own: bool = True, borrowed: bool = False) -> "PackedBatch":
        """These examples' prompts with their own completions, with the borrowed one, or with both (the borrowed one
        is then the last of the K). The result is on the CPU."""
        key = (tuple(index), own, borrowed)
        if key in self.packed:
            return self.packed[key]
        prompts, completions = [], []
        for i in index:
            example = self.examples[i]
            chosen = example.completions if own else ()
            if borrowed:
                chosen = (*chosen, self.borrowed_completion(i))
            prompts.append(example.prompt)
            completions.append(chosen)
        return pack(prompts, completions, self.score_prompt, index)

    def borrowed_completion(self, i: int) -> np.ndarray:
        """The token ids of the completion that example i borrows. An example without a partner borrows that of
        example 0, to keep the shape; its pair is left out of the KL mean."""
        return self.examples[max(self.partners[i], 0)].completions[0]

    def sizes(self, borrowed: bool = False) -> list[int]:
        """The number of tokens of each example: its prompt, its completions and, on request, the borrowed one."""
        sizes = []
        for i, example in enumerate(self.examples):
            size = len(example.prompt) + sum(map(len, example.completions))
            if borrowed and self.partners is not None:
                size += len(self.borrowed_completion(i))
            sizes.append(size)
        return sizes

    def loss_view(self, index: list[int], length_BK: torch.Tensor) -> "LossView":
        """What a loss sees of these examples. length_BK: their numbers of scored tokens, on the device."""
        examples = [self.examples[i] for i in index]
        device = length_BK.device
        return LossView(
            examples,
            label=to_device(torch.tensor([e.label for e in examples]), device),
            weight=to_device(torch.tensor([e.weight for e in examples]), device),
            length=length_BK,
            step_size=len(self.examples),
            step_desirable=sum(e.label for e in self.examples),
            tokenizer=self.tokenizer,
        )


def to_device(x, device):
    """x on a device. A copy to a GPU does not wait for the work that is queued there."""
    if device.type == "cuda":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


class LossView(NamedTuple):
    """B examples of a step, as a loss sees them. Its tensors are on the device of the log-probs."""

    examples: list[Example]
    label: torch.Tensor  # (B,) bool, True: desirable
    weight: torch.Tensor  # (B,) the records' own weights, 1 where a record has none
    length: torch.Tensor  # (B, K) scored tokens
    step_size: int  # G
    step_desirable: int  # number of desirable examples among the step's G
    tokenizer: Tokenizer | None = None

    def extra(self, name: str):
        """A field of the records that data.extra names: a (B,) tensor of numbers, or a list of B texts.

        Raises BadInput if the field was not read.
        """
        if not all(name in e.extra for e in self.examples):
            raise BadInput(f"data.extra: {name}: the loss asks for it: --data.extra {name}")
        values = [e.extra[name] for e in self.examples]
        if any(isinstance(v, str) for v in values):
            return values
        return to_device(torch.tensor(values), self.label.device)

    def text(self, i: int) -> str:
        """Example i of this micro-batch as lines of text: its place in the data, its label, prompt and completions."""
        example, decode = self.examples[i], self.tokenizer.decode
        label = "desirable" if example.label else "undesirable"
        lines = [f"{example.where}, {label}", f"prompt: {decode(example.prompt)!r}"]
        lines += [f"completion: {decode(c)!r}" for c in example.completions]
        return "\n".join(lines)


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
    """Each rank's part of a step, as numbers of examples.

    by_tokens: the longest example goes first, each to the rank with the fewest tokens so far. Otherwise ranks take
    examples in turn.
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
    sizes: list[int], parts: list[list[int]], max_examples: int | None, max_tokens: int | None
) -> list[list[MicroBatch]]:
    """Cut each rank's part into micro-batches of at most max_tokens tokens or, where that is None, of max_examples
    examples.

    All ranks get equally many, because collectives inside a sharded forward must match: a rank with fewer repeats
    example 0 as a filler.
    """
    micros = []
    for part in parts:
        if max_tokens:
            indices = _first_fit(part, sizes, max_tokens)
        else:
            starts = range(0, len(part), max_examples)
            indices = [part[i : i + max_examples] for i in starts]
        micros.append([MicroBatch(sorted(index)) for index in indices])
    most = max(map(len, micros))
    for rank_micros in micros:
        rank_micros += [MicroBatch([0], filler=True)] * (most - len(rank_micros))
    return micros


def _first_fit(part: list[int], sizes: list[int], tokens: int) -> list[list[int]]:
    """First-fit decreasing: the longest example first, each into the first micro-batch with room for it. An example
    over the budget is a micro-batch of its own."""
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
    "example_N",
    "branch_N",
    "source_T",
    "target_T",
    "segment_T",
    "length_BK",
    "index_B",
    "prompt_P",
    "completion_M",
    "key_L",
)
INT32_FIELDS = ("query_start_S", "completion_query_start_S", "key_start_S")


class PackedBatch(NamedTuple):
    """B prompts, each followed by its K completions, in one row of N input tokens without padding.

    A completion's positions continue those of its prompt, and its tokens see the prompt and themselves, never another
    completion. Its last token is no input, because nothing follows it.

    For flash attention the row has B * K sequences, each a completion with its prompt. A sequence's keys are the
    prompt and the completion. Its queries are the completion and, in the first of an example's K sequences, the
    prompt. The last query sees all keys, the one before it all keys but the last, and so on ("bottom-right causal").
    If the prompts' keys and values come from a cache (model.PromptCache), the queries are the completions alone.
    """

    token_N: torch.Tensor
    position_N: torch.Tensor
    example_N: torch.Tensor  # the token's example, 0 to B - 1
    branch_N: torch.Tensor  # 0: the token belongs to the prompt; k: to completion k
    source_T: torch.Tensor  # the input token whose hidden state predicts the target
    target_T: torch.Tensor  # the token id to predict
    segment_T: torch.Tensor  # J * example + branch: which of the B * J segments has the target
    length_BK: torch.Tensor  # scored tokens of a completion, plus those of a scored prompt
    index_B: torch.Tensor  # the example's number in its step
    prompt_P: torch.Tensor  # which of the N tokens belong to prompts
    # Which of the N tokens belong to completions. If none does (all completions have one token), this is token 0:
    # the model's layers need at least one query.
    completion_M: torch.Tensor
    # Which of the N tokens are the keys, one sequence after the other. Empty for K = 1: all N tokens, as they lie.
    key_L: torch.Tensor
    # Where each sequence's queries begin, and where the last one's end: the cu_seq_q of torch's varlen_attn.
    query_start_S: torch.Tensor
    completion_query_start_S: torch.Tensor  # the same if only the M completion tokens are queries
    key_start_S: torch.Tensor  # the same for the keys: cu_seq_k
    segment_sizes: tuple[tuple[int, ...], ...]  # (B, J) input tokens of each segment
    max_queries: int  # the most queries of a sequence
    max_completion_queries: int  # the same if only the M completion tokens are queries
    max_keys: int  # the most keys of a sequence
    buffer: torch.Tensor  # all tensors above, one after the other, as int32 on the CPU

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
        """(B,) input tokens of each example."""
        return tuple(map(sum, self.segment_sizes))

    def digests(self) -> list[list[bytes]]:
        """(B, K) hashes of 16 bytes, each of the token ids of a prompt and one of its completions."""
        host = _buffer_views(self.buffer, self._shapes())  # the batch itself may be on a GPU
        token, target = host["token_N"].numpy(), host["target_T"].numpy()
        digests = []
        token_start = target_start = 0
        for sizes, lengths in zip(self.segment_sizes, host["length_BK"].tolist()):
            prompt_size, *completion_sizes = sizes
            prompt = token[token_start : token_start + prompt_size].tobytes()
            row = []
            for size in completion_sizes:
                end = target_start + size + 1  # all of its tokens are targets, the last one too
                completion = target[target_start:end].tobytes()
                content = len(prompt).to_bytes(8, "big") + prompt + completion
                row.append(hashlib.blake2b(content, digest_size=16).digest())
                target_start = end
            # a scored prompt's targets come after its completions' and are counted in each length
            target_start += lengths[0] - (completion_sizes[0] + 1)
            token_start += sum(sizes)
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
    """Pack B prompts and their completions. The result is on the CPU.

    prompts: B arrays of token ids. completions: B tuples of K arrays. No array is empty. score_prompt: the prompts'
    tokens from the second on are targets, too. index: the examples' numbers in their step (default: 0 to B - 1).
    """
    B, K = len(prompts), len(completions[0])
    J = K + 1
    prompt_B = np.array([len(prompt) for prompt in prompts])
    completion_BK = np.array([[len(y) for y in ys] for ys in completions])

    # Inputs: each example's prompt, then its completions without their last tokens.
    size_BJ = np.column_stack([prompt_B, completion_BK - 1])
    start_BJ = (np.cumsum(size_BJ) - size_BJ.ravel()).reshape(B, J)
    inputs = []
    for prompt, ys in zip(prompts, completions):
        inputs.append(prompt)
        inputs += [y[:-1] for y in ys]
    segment_N, offset_N = _spans(size_BJ.ravel())
    example_N, branch_N = np.divmod(segment_N, J)
    position_N = offset_N + np.where(branch_N > 0, prompt_B[example_N], 0)

    # Targets: each example's completions and, last, its prompt from the second token on if that is scored.
    scored_prompt_B = prompt_B - 1 if score_prompt else np.zeros_like(prompt_B)
    targets = []
    for prompt, ys in zip(prompts, completions):
        targets += ys
        if score_prompt:
            targets.append(prompt[1:])
    run_T, offset_T = _spans(np.column_stack([completion_BK, scored_prompt_B]).ravel())
    example_T, run_T = np.divmod(run_T, J)
    branch_T = (run_T + 1) % J  # the prompt, branch 0, is the last run
    segment_T = example_T * J + branch_T
    # The source of a target is the token before it. Before a completion's first token this is the prompt's last one.
    before_T = start_BJ.ravel()[segment_T] + offset_T - (branch_T > 0)
    prompt_end_T = (start_BJ[:, 0] + prompt_B - 1)[example_T]
    source_T = np.where((branch_T > 0) & (offset_T == 0), prompt_end_T, before_T)

    # Attention's sequences: their queries and keys (see PackedBatch).
    completion_M = np.flatnonzero(branch_N)
    completion_queries_BK = size_BJ[:, 1:].copy()
    if not len(completion_M):
        completion_M = np.zeros(1, int)
        completion_queries_BK[0, 0] = 1
    queries_BK = size_BJ[:, 1:].copy()
    queries_BK[:, 0] += prompt_B
    keys_BK = size_BJ[:, 1:] + prompt_B[:, None]
    key_L = np.zeros(0, int)
    if K > 1:
        sequence_L, offset_L = _spans(keys_BK.ravel())
        example_L = sequence_L // K
        prompt_L = prompt_B[example_L]
        in_prompt_L = start_BJ[:, 0][example_L] + offset_L
        in_completion_L = start_BJ[:, 1:].ravel()[sequence_L] + offset_L - prompt_L
        key_L = np.where(offset_L < prompt_L, in_prompt_L, in_completion_L)

    arrays = {
        "token_N": np.concatenate(inputs),
        "position_N": position_N,
        "example_N": example_N,
        "branch_N": branch_N,
        "source_T": source_T,
        "target_T": np.concatenate(targets),
        "segment_T": segment_T,
        "length_BK": completion_BK + scored_prompt_B[:, None],
        "index_B": np.arange(B) if index is None else np.array(index),
        "prompt_P": np.flatnonzero(branch_N == 0),
        "completion_M": completion_M,
        "key_L": key_L,
        "query_start_S": np.append(0, np.cumsum(queries_BK)),
        "completion_query_start_S": np.append(0, np.cumsum(completion_queries_BK)),
        "key_start_S": np.append(0, np.cumsum(keys_BK)),
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
        segment_sizes=tuple(map(tuple, size_BJ.tolist())),
        max_queries=int(queries_BK.max()),
        max_completion_queries=int(completion_queries_BK.max()),
        max_keys=int(keys_BK.max()),
        buffer=buffer,
    )


if __name__ == "__main__":  # python data.py FILE [--model M] shows a file as a run would see it
    from records.preview import main
    from runs.errors import run_cli

    run_cli(main)

"""Prompts and their completions as one row of tokens without padding.

Shape letters: see data.py.
"""

import hashlib
import math
from typing import NamedTuple

import numpy as np
import torch


def to_device(x, device):
    """x on a device. A copy to a GPU does not wait for the work that is queued there."""
    if device.type == "cuda":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


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

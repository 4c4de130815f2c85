"""Prompts and their completions as one row of tokens without padding.

Shape letters: see data.py.
"""

import hashlib
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """x on a device. A copy to a GPU does not wait for the work that is queued there."""
    if device.type == "cuda" and not x.is_cuda:
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def prompt_groups(prompts) -> list[list[int]]:
    """The numbers of equal prompts, for each distinct prompt in the order of its first appearance."""
    groups = {}
    for i, prompt in enumerate(prompts):
        groups.setdefault(prompt.tobytes(), []).append(i)
    return list(groups.values())


class PackedBatch(NamedTuple):
    """U prompts, each followed by the completions of all its examples, in one row of N input tokens
    without padding. `pack` has an example.

    A completion's positions continue those of its prompt, and its tokens see the prompt and
    themselves, never another completion. Its last token is no input, because nothing follows it.

    A prompt and one of its completions are a sequence; there are B * K, in the order in which the
    completions lie. For flash attention a sequence's keys are the prompt and the completion. Its
    queries are the completion and, in the first of a prompt's sequences, the prompt. The last query
    sees all keys, the one before it all keys but the last, and so on ("bottom-right causal"). If the
    prompts' keys and values come from a cache (attention.PromptCache), the queries are the
    completions alone.

    Torch indexes with int64; flash attention takes int32: the three tensors (..., S).
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
    prompt_P: torch.Tensor  # which of the N tokens belong to prompts
    # Which of the N tokens belong to completions. If none does (all completions have one token),
    # this is token 0: the model's layers need at least one query.
    completion_M: torch.Tensor
    # Which of the N tokens are the keys, one sequence after the other. Empty if no prompt is
    # shared: all N tokens, as they lie.
    key_I: torch.Tensor
    # The places in key_I, ordered by the token that lies there; and where each token's begin in this
    # order, and where the last one's end. For the gradient: a token's is the sum of its keys'.
    key_order_I: torch.Tensor
    key_order_start_N: torch.Tensor
    # Where each sequence's queries begin, and where the last one's end: torch's cu_seq_q.
    query_start_S: torch.Tensor
    completion_query_start_S: torch.Tensor  # the same if only the M completion tokens are queries
    key_start_S: torch.Tensor  # the same for the keys: cu_seq_k
    # (U,) for each prompt: its input tokens, and those of each of its completions
    segment_sizes: tuple[tuple[int, ...], ...]
    ids: list  # (B,) the token ids of each example: its prompt and its K completions
    max_keys: int  # the most keys of a sequence; it never has more queries
    longest: int  # L: tokens of the longest completion, here or in the whole step

    def to(self, device: torch.device) -> "PackedBatch":
        """This batch on a device. The copies do not wait for the work that is queued there."""
        return PackedBatch(
            *(to_device(x, device) if isinstance(x, torch.Tensor) else x for x in self)
        )

    def sums(self, x_T):
        """Sums (B, K) of the targets' numbers over each completion and its prompt, if that is scored."""
        B, K = self.length_BK.shape
        sums = x_T.new_zeros(B * K + len(self.segment_sizes))
        if x_T.is_cuda:
            # On a GPU index_add adds in any order, so two passes over the same numbers would differ
            # in their last bits. index_put sorts them first. On a CPU index_add has an order, and
            # index_put has none.
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
        x_BKL = x_T[target_BKL]
        x_BKL[~is_token] = 0
        return x_BKL

    def digests(self) -> list[str]:
        """Hashes of the token ids of each prompt with each of its completions: B * K, as in length_BK."""

        def digest(prompt, completion):
            ids = len(prompt).to_bytes(8, "big") + prompt.tobytes() + completion.tobytes()
            return hashlib.blake2b(ids, digest_size=16).hexdigest()

        return [digest(prompt, y) for prompt, completions in self.ids for y in completions]


def pack(
    prompts: Sequence[np.ndarray],
    completions: Sequence[tuple[np.ndarray, ...]],
    score_prompt: bool = False,
    longest: int | None = None,
) -> PackedBatch:
    """Pack B prompts and their completions; examples with equal prompts share one. The result is on
    the CPU.

    prompts: B arrays of token ids. completions: B tuples of K arrays. No array is empty.
    score_prompt: the prompts' tokens from the second on are targets, too. longest: tokens of the step's
    longest completion (default: of these).

    Two prompts, three completions (K = 1). Examples 0 and 2 have the prompt 10 11 12, with the
    completions 20 21 and 22 23 24; example 1 has the prompt 13 with the completion 30 31:

                     prompt 0   its completions   prompt 1   its completion
        token_N      10 11 12   20     22 23      13         30
        position_N    0  1  2    3      3  4       0          1
        prompt_N      0  0  0    0      0  0       1          1
        branch_N      0  0  0    1      2  2       0          1

                     sequence 0   sequence 1     sequence 2
        target_T     20 21        22 23 24       30 31
        source_T      2  3         2  4  5        6  7       places in the row
        key_I        0 1 2 3      0 1 2 4 5      6 7         places in the row
        queries      0 1 2 3      4 5            6 7         so query_start_S is 0 4 6 8
    """
    B, K = len(prompts), len(completions[0])

    # 1. The distinct prompts, and which examples have them.
    groups = prompt_groups(prompts)
    prompt_B, sequence_BK = np.empty(B, int), np.empty((B, K), int)

    # 2. The row: each prompt, followed by its completions without their last tokens. A completion's
    # source is the token before its first one, the prompt's last, and then its own inputs.
    tokens, positions, segment_sizes, prompt_places = [], [], [], []
    targets, sources, keys, n_queries, n_keys = [], [], [], [], []
    end = 0  # of the row so far
    for u, group in enumerate(groups):
        prompt = prompts[group[0]]
        prompt_place = np.arange(end, end + len(prompt))
        prompt_places.append(prompt_place)
        prompt_B[group] = u
        tokens.append(prompt)
        positions.append(np.arange(len(prompt)))
        end += len(prompt)
        sizes = [len(prompt)]
        for b in group:
            for k, completion in enumerate(completions[b]):
                size = len(completion) - 1
                place = np.arange(end, end + size)
                sequence_BK[b, k] = len(targets)
                tokens.append(completion[:-1])
                positions.append(np.arange(len(prompt), len(prompt) + size))
                targets.append(completion)
                sources += [prompt_place[-1:], place]
                keys += [prompt_place, place]
                n_keys.append(len(prompt) + size)
                n_queries.append(n_keys[-1] if len(sizes) == 1 else size)
                end += size
                sizes.append(size)
        segment_sizes.append(tuple(sizes))
    completion_J = np.array(list(map(len, targets)))

    # 3. The prompts as targets from their second token on, if these are scored: after the others.
    n_scored_U = np.zeros(len(groups), int)
    if score_prompt:
        for u, place in enumerate(prompt_places):
            targets.append(prompts[groups[u][0]][1:])
            sources.append(place[:-1])
            n_scored_U[u] = len(place) - 1
    lengths = list(map(len, targets))

    # 4. Attention: which prompt and completion each token belongs to, and each sequence's queries and
    # keys (see PackedBatch).
    branches = chain(*(range(len(sizes)) for sizes in segment_sizes))
    branch_N = np.repeat(list(branches), list(chain(*segment_sizes)))
    completion_M, n_completion_queries = np.flatnonzero(branch_N), completion_J - 1
    if not len(completion_M):
        completion_M, n_completion_queries[0] = np.zeros(1, int), 1
    # Numpy does all the work here. This function runs in a thread of its own, where a torch
    # operation would start a second set of OpenMP threads; between operations they wait in a loop,
    # on the cores that the training step needs.
    key_I = np.concatenate(keys) if len(groups) < B * K else np.zeros(0, int)
    arrays = dict(
        token_N=np.concatenate(tokens),
        position_N=np.concatenate(positions),
        prompt_N=np.repeat(np.arange(len(groups)), list(map(sum, segment_sizes))),
        branch_N=branch_N,
        source_T=np.concatenate(sources),
        target_T=np.concatenate(targets),
        sequence_T=np.repeat(np.arange(len(targets)), lengths),
        length_BK=completion_J[sequence_BK] + n_scored_U[prompt_B][:, None],
        sequence_BK=sequence_BK,
        first_target_BK=(np.cumsum(completion_J) - completion_J)[sequence_BK],
        prompt_B=prompt_B,
        prompt_P=np.flatnonzero(branch_N == 0),
        completion_M=completion_M,
        key_I=key_I,
        key_order_I=np.argsort(key_I, kind="stable"),
        key_order_start_N=np.append(0, np.cumsum(np.bincount(key_I, minlength=end))),
    )

    def starts(sizes):
        return torch.from_numpy(np.cumsum([0, *sizes], dtype=np.int32))

    return PackedBatch(
        **{name: torch.from_numpy(x.astype(np.int64, copy=False)) for name, x in arrays.items()},
        query_start_S=starts(n_queries),
        completion_query_start_S=starts(n_completion_queries),
        key_start_S=starts(n_keys),
        segment_sizes=tuple(segment_sizes),
        ids=list(zip(prompts, completions)),
        max_keys=max(n_keys),
        longest=longest or int(completion_J.max()),
    )

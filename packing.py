"""Prompts and their completions as one row of tokens without padding.

Shape letters; attention.py and model.py use the same ones:

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

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from infra.devices import to_device


def prompt_groups(prompts: Iterable[np.ndarray]) -> list[list[int]]:
    """The numbers of equal prompts, for each distinct prompt in the order of its first appearance."""
    groups: dict[bytes, list[int]] = {}
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
    prompts' keys and values were computed before (attention.PromptCache), the queries are the
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
    sequence_T: torch.Tensor  # the sequence whose completion has the target
    length_BK: torch.Tensor  # tokens of a completion
    sequence_BK: torch.Tensor  # the number of the sequence
    first_target_BK: torch.Tensor  # which of the T targets is the completion's first token
    prompt_P: torch.Tensor  # which of the N tokens belong to prompts
    # Which of the N tokens belong to completions. If none does (all completions have one token),
    # this is token 0: the model's layers need at least one query.
    completion_M: torch.Tensor
    # Which of the N tokens are the keys, one sequence after the other: all N, as they lie, if no
    # prompt is shared.
    key_I: torch.Tensor
    # The places in key_I, ordered by the token that lies there; and where each token's places begin in
    # this order, and where the last token's end. A token's gradient is the sum of the gradients of its keys.
    key_order_I: torch.Tensor
    key_order_start_N: torch.Tensor
    # Where each sequence's queries begin, and where those of the last sequence end: torch's cu_seq_q.
    query_start_S: torch.Tensor
    completion_query_start_S: torch.Tensor  # the same if only the M completion tokens are queries
    key_start_S: torch.Tensor  # the same for the keys: cu_seq_k
    # (U,) for each prompt: its input tokens, and those of each of its completions
    segment_sizes: tuple[tuple[int, ...], ...]
    ids: list  # (B,) the token ids of each example: its prompt and its K completions
    max_keys: int  # the most keys of a sequence; it never has more queries
    longest: int  # L: tokens of the longest completion, here or in the whole step

    @property
    def shares_prompts(self) -> bool:
        """Whether a prompt has several completions, so that its keys are in several sequences."""
        return len(self.key_I) > len(self.token_N)

    @property
    def token_0_stands_in(self) -> bool:
        """Whether no completion has a token that is an input: see completion_M."""
        return len(self.prompt_P) == len(self.token_N)

    def to(self, device: torch.device) -> "PackedBatch":
        """This batch on a device. The copies do not wait for the work that is queued there."""
        tensors = {
            name: to_device(x, device)
            for name, x in self._asdict().items()
            if isinstance(x, torch.Tensor)
        }
        return self._replace(**tensors)

    def sums(self, x_T: torch.Tensor) -> torch.Tensor:
        """Sums (B, K) of the targets' numbers over each completion."""
        sums = x_T.new_zeros(self.length_BK.numel())
        if x_T.is_cuda:
            # On a GPU index_add adds in any order, so two passes over the same numbers would differ
            # in their last bits. index_put sorts them first. On a CPU index_add has an order, and
            # index_put has none.
            sums = sums.index_put((self.sequence_T,), x_T, accumulate=True)
        else:
            sums = sums.index_add(0, self.sequence_T, x_T)
        return sums[self.sequence_BK]

    def tokens_of_completions(self, x_T: torch.Tensor) -> torch.Tensor:
        """The targets' numbers (T, ...) as (B, K, L, ...), with 0 beyond a completion's end."""
        offset_L = torch.arange(self.longest, device=x_T.device)
        is_token = offset_L < self.length_BK[..., None]
        target_BKL = torch.where(is_token, self.first_target_BK[..., None] + offset_L, 0)
        x_BKL = x_T[target_BKL]
        x_BKL[~is_token] = 0
        return x_BKL

    def digests(self) -> list[str]:
        """Hashes of the token ids of each prompt with each of its completions: B * K, as in length_BK."""
        digests = []
        for prompt, completions in self.ids:
            digests += [digest(prompt, completion) for completion in completions]
        return digests


def digest(prompt: np.ndarray, completion: np.ndarray) -> str:
    """A hash of token ids, and of where the prompt ends."""
    ids = len(prompt).to_bytes(8, "big") + prompt.tobytes() + completion.tobytes()
    return hashlib.blake2b(ids, digest_size=16).hexdigest()


def pack(
    prompts: Sequence[np.ndarray],
    completions: Sequence[tuple[np.ndarray, ...]],
    longest: int | None = None,
) -> PackedBatch:
    """Pack B prompts and their completions; a prompt that several examples have is packed once. The result is on
    the CPU.

    prompts: B arrays of token ids. completions: B tuples of K arrays. No array is empty.
    longest: tokens of the step's longest completion (default: of these).

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
    # Numpy does all the work here. This function runs in a thread of its own, where a torch
    # operation would start a second set of OpenMP threads; between operations they wait in a loop,
    # on the cores that the training step needs.
    sequences = lay_out(prompts, completions)
    arrays = {
        **row_of(sequences, prompts),
        **targets_of(sequences, len(prompts), len(completions[0])),
        **attention_of(sequences),
    }
    return PackedBatch(
        **{name: torch.from_numpy(array) for name, array in arrays.items()},
        segment_sizes=segment_sizes(sequences),
        ids=list(zip(prompts, completions)),
        max_keys=max(len(sequence.prompt_place) + len(sequence.place) for sequence in sequences),
        longest=longest or max(len(sequence.completion) for sequence in sequences),
    )


class PackedSequence(NamedTuple):
    """A prompt with one of its completions, and where their inputs lie in the row."""

    u: int  # the number of the prompt
    b: int  # the number of the example
    k: int  # the number of its completion
    completion: np.ndarray
    prompt_place: np.ndarray
    place: np.ndarray  # of the completion's tokens without the last, which is no input
    is_first: bool  # whether it is the first sequence of its prompt


def lay_out(
    prompts: Sequence[np.ndarray], completions: Sequence[tuple[np.ndarray, ...]]
) -> list[PackedSequence]:
    """Each distinct prompt, followed by the completions of all examples that have it."""
    sequences = []
    end = 0  # the length of the row so far
    for u, group in enumerate(prompt_groups(prompts)):
        prompt_place = np.arange(end, end + len(prompts[group[0]]))
        end += len(prompt_place)
        is_first = True
        for b in group:
            for k, completion in enumerate(completions[b]):
                place = np.arange(end, end + len(completion) - 1)
                sequences.append(PackedSequence(u, b, k, completion, prompt_place, place, is_first))
                end += len(place)
                is_first = False
    return sequences


def segment_sizes(sequences: list[PackedSequence]) -> tuple[tuple[int, ...], ...]:
    """(U,) for each prompt its input tokens, and those of each of its completions."""
    sizes: list[list[int]] = []
    for sequence in sequences:
        if sequence.is_first:
            sizes.append([len(sequence.prompt_place)])
        sizes[-1].append(len(sequence.place))
    return tuple(map(tuple, sizes))


def row_of(sequences: list[PackedSequence], prompts: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """The N input tokens: their ids, their positions, and the prompt or completion that each belongs to."""
    tokens = []
    positions = []
    owners = []  # (number of the prompt, branch, tokens) of each segment of the row
    branch = 0
    for sequence in sequences:
        n_prompt = len(sequence.prompt_place)
        if sequence.is_first:
            branch = 0
            tokens.append(prompts[sequence.b])
            positions.append(np.arange(n_prompt))
            owners.append((sequence.u, branch, n_prompt))
        branch += 1
        tokens.append(sequence.completion[:-1])
        positions.append(np.arange(n_prompt, n_prompt + len(sequence.place)))
        owners.append((sequence.u, branch, len(sequence.place)))
    prompt_numbers, branches, sizes = np.array(owners, np.int64).T
    branch_N = np.repeat(branches, sizes)
    completion_M = np.flatnonzero(branch_N)
    if not len(completion_M):
        completion_M = np.zeros(1, np.int64)  # token 0 stands in
    return dict(
        token_N=np.concatenate(tokens).astype(np.int64),
        position_N=np.concatenate(positions),
        prompt_N=np.repeat(prompt_numbers, sizes),
        branch_N=branch_N,
        prompt_P=np.flatnonzero(branch_N == 0),
        completion_M=completion_M,
    )


def targets_of(sequences: list[PackedSequence], B: int, K: int) -> dict[str, np.ndarray]:
    """The T tokens to predict, the input token that predicts each, and the sequence whose sum it belongs to."""
    sequence_BK = np.empty((B, K), np.int64)
    targets = []
    sources = []
    for j, sequence in enumerate(sequences):
        sequence_BK[sequence.b, sequence.k] = j
        targets.append(sequence.completion)
        # the first token is predicted by the prompt's last one, the others by the token before them
        sources += [sequence.prompt_place[-1:], sequence.place]
    completion_J = np.array([len(sequence.completion) for sequence in sequences], np.int64)
    first_target_J = np.cumsum(completion_J) - completion_J
    return dict(
        target_T=np.concatenate(targets).astype(np.int64),
        source_T=np.concatenate(sources),
        sequence_T=np.repeat(np.arange(len(sequences)), completion_J),
        sequence_BK=sequence_BK,
        first_target_BK=first_target_J[sequence_BK],
        length_BK=completion_J[sequence_BK],
    )


def attention_of(sequences: list[PackedSequence]) -> dict[str, np.ndarray]:
    """Each sequence's queries and keys (see PackedBatch)."""
    keys = []
    n_queries = []
    n_completion_queries = []
    n_keys = []
    for sequence in sequences:
        keys += [sequence.prompt_place, sequence.place]
        n_keys.append(len(sequence.prompt_place) + len(sequence.place))
        n_queries.append(n_keys[-1] if sequence.is_first else len(sequence.place))
        n_completion_queries.append(len(sequence.place))
    if not any(n_completion_queries):
        n_completion_queries[0] = 1  # token 0 stands in
    key_I = np.concatenate(keys)
    n_tokens = sum(n_queries)
    return dict(
        key_I=key_I,
        key_order_I=np.argsort(key_I, kind="stable"),
        key_order_start_N=np.append(0, np.cumsum(np.bincount(key_I, minlength=n_tokens))),
        query_start_S=starts(n_queries),
        completion_query_start_S=starts(n_completion_queries),
        key_start_S=starts(n_keys),
    )


def starts(sizes: list[int]) -> np.ndarray:
    """Where each piece begins, and where the last one ends. Flash attention takes int32."""
    return np.cumsum([0, *sizes], dtype=np.int32)

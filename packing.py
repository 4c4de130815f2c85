"""How a step becomes micro-batches, and a micro-batch one row of tokens without padding.

Nothing here changes the numbers of a step, apart from rounding. Nobody needs this file to change a loss.

Reading order: Budget, split_step; then the example in `pack`; PackedBatch, which the models read; the parts of `pack`.

Words of a split: a bundle is a list of examples with the same prompt that go into the same micro-batch. A part lists
the examples of a micro-batch by their indices. A micro-batch is a part with its packed tokens.

Shape letters, also of attention.py and model.py:

    B  examples of a micro-batch
    K  completions of an example
    U  distinct prompts of a micro-batch, at most B
    N  packed input tokens of a micro-batch
    P  the input tokens of prompts
    M  the input tokens of completions
    T  targets: the tokens of all completions, which are predicted and scored
    L  tokens of the longest completion
    I  keys of all sequences
    J  sequences: B * K. A sequence is a prompt with one of its completions
    S  offsets of sequences: B * K + 1, because the end of the last one is an offset too
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor
from transformers import PretrainedConfig

from infra.devices import to_device
from infra.settings import RunSettings

# ---- the split of a step -------------------------------------------------------------------------

# the token limit of a micro-batch if neither micro_batch_size nor micro_batch_tokens is set
DEFAULT_TOKENS = 16384
CPU_ACTIVATIONS = 4e9  # bytes: on a CPU the activations of a micro-batch should not take more
# roughly how many numbers the backward needs for each token, layer and hidden unit
NUMBERS_KEPT = 20


class Budget(NamedTuple):
    """How a step is split into micro-batches. The split changes memory and speed. It changes numbers by rounding
    only."""

    rank: int = 0
    ranks: int = 1
    limit: int = DEFAULT_TOKENS
    """The most tokens (or examples) of a micro-batch. An example above the limit gets a micro-batch of its own."""
    counts_tokens: bool = True
    """True: the limit is in tokens. False: the limit is in examples."""


ONE_RANK = Budget()


def make_budget(cfg: RunSettings, fabric: Fabric, config: PretrainedConfig) -> Budget:
    """The budget of this run on this rank. config: transformers' text config."""
    limit = cfg.micro_batch_size or cfg.micro_batch_tokens
    if not limit and cfg.accelerator == "cpu":
        bytes_per_token = 4 * NUMBERS_KEPT * config.num_hidden_layers * config.hidden_size
        limit = min(DEFAULT_TOKENS, int(CPU_ACTIVATIONS / bytes_per_token))
    return Budget(
        fabric.global_rank,
        fabric.world_size,
        limit=limit or DEFAULT_TOKENS,
        counts_tokens=not cfg.micro_batch_size,
    )


class Part(NamedTuple):
    """Which examples of a step form a micro-batch."""

    indices: list[int]
    """Their indices in the step."""
    filler: bool = False
    """True: the part repeats examples of the step, and its results are discarded. Fillers give every rank equally many
    micro-batches, because the forward of a sharded model is a collective."""


def split_step(
    prompts: list[np.ndarray],
    completions: list[tuple[np.ndarray, ...]],
    mismatched_completions: list[np.ndarray] | None,
    budget: Budget,
) -> list[Part]:
    """The parts of this rank. The lists have an element for each example of the step. All sizes are in the unit of the
    budget: tokens or examples."""
    sizes = [1] * len(prompts)  # of each example without its prompt
    if budget.counts_tokens:
        sizes = [sum(map(len, own)) for own in completions]
        # Own completions and mismatched completions are two packed batches. The larger one must fit.
        if mismatched_completions is not None:
            sizes = [max(size, len(ids)) for size, ids in zip(sizes, mismatched_completions)]
    bundles = []
    bundle_sizes = []
    for same_prompt in prompt_groups(prompts):
        prompt_size = len(prompts[same_prompt[0]]) if budget.counts_tokens else 0
        # Examples of one prompt that do not fit into one micro-batch become several bundles. Each bundle computes the
        # prompt again.
        for bundle in fill(same_prompt, sizes, budget.limit - prompt_size):
            bundles.append(bundle)
            bundle_sizes.append(prompt_size + sum(sizes[i] for i in bundle))
    return split_bundles(bundles, bundle_sizes, budget)[budget.rank]


def split_bundles(bundles: list[list[int]], sizes: list[int], budget: Budget) -> list[list[Part]]:
    """The parts of every rank. sizes: the size of each bundle, in the unit of the budget.

    Every rank gets exactly equally many parts: fillers replace the missing ones. If the budget counts tokens, every
    rank also gets about equally many tokens."""
    parts_of_ranks = []
    for numbers_of_rank in balanced(sizes, budget.ranks):
        parts = []
        for numbers_of_part in fill(numbers_of_rank, sizes, budget.limit):
            indices = chain(*(bundles[number] for number in numbers_of_part))
            parts.append(Part(sorted(indices)))  # in the order of the step
        parts_of_ranks.append(parts)
    most = max(map(len, parts_of_ranks))
    for parts in parts_of_ranks:
        parts += [Part(bundles[0], filler=True)] * (most - len(parts))
    return parts_of_ranks


def balanced(sizes: list[int], ranks: int) -> list[list[int]]:
    """The numbers of the bundles of each rank. From the largest to the smallest, each bundle goes to the rank that has
    the least work so far. sizes: the work of each bundle."""
    numbers_of_ranks: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        lightest = totals.index(min(totals))
        numbers_of_ranks[lightest].append(number)
        totals[lightest] += sizes[number]
    return numbers_of_ranks


def fill(items: Sequence[int], sizes: list[int], limit: int) -> list[list[int]]:
    """First-fit bin packing. Each item has the size sizes[item] and goes into the first bin with enough space, or into
    a new bin. An item above the limit gets a bin of its own."""
    bins: list[list[int]] = []
    spaces: list[int] = []  # the space left in each bin
    for item in items:
        chosen = next((b for b in range(len(bins)) if spaces[b] >= sizes[item]), None)
        if chosen is None:
            chosen = len(bins)
            bins.append([])
            spaces.append(limit)
        bins[chosen].append(item)
        spaces[chosen] -= sizes[item]
    return bins


# ---- the tokens of a micro-batch -----------------------------------------------------------------


def prompt_groups(prompts: Iterable[np.ndarray]) -> list[list[int]]:
    """For each distinct prompt the list of its indices. The distinct prompts are in the order of first appearance."""
    groups: dict[bytes, list[int]] = {}
    for i, prompt in enumerate(prompts):
        groups.setdefault(prompt.tobytes(), []).append(i)
    return list(groups.values())


class PackedBatch(NamedTuple):
    """U prompts, each followed by the completions of all its examples, in one row of N input tokens. `pack` has an
    example.

    The positions of a completion continue the positions of its prompt. The tokens of a completion attend to the prompt
    and to the completion itself, but not to other completions. The last token of a completion is not an input, because
    nothing follows it.

    Flash attention takes the row as sequences. A sequence is a prompt with one of its completions. Its keys are the
    tokens of both. Its queries are the tokens of the completion. A prompt may be in several sequences, and its tokens
    are queries in the first of them only. The last query sees all keys, the query before it all keys but the last, and
    so on ("bottom-right causal"). If an earlier forward has computed the keys and values of the prompts
    (attention.PromptCache), only the completions are queries.

    Index tensors are int64, as torch requires. The offsets of queries and keys are int32, as flash attention requires.
    """

    token_N: Tensor
    position_N: Tensor
    # the token's prompt, 0 ... U - 1; for a token of a completion, the prompt of the completion
    prompt_N: Tensor
    # 0 for a token of a prompt; k for a token of the prompt's completion number k, counted from 1
    branch_N: Tensor
    # the index of the input token that predicts the target
    source_T: Tensor
    # the target's token id
    target_T: Tensor
    # the offset of each sequence's targets
    target_start_S: Tensor
    # the number of tokens of each completion
    length_BK: Tensor
    # the index of the completion's sequence
    sequence_BK: Tensor
    # the index of the completion's first target
    first_target_BK: Tensor
    # the indices of the input tokens of prompts
    prompt_P: Tensor
    # the indices of the input tokens of completions; none if every completion has only one token
    completion_M: Tensor
    # the indices of the input tokens that are keys, one sequence after the other; 0 ... N - 1 if no prompt is shared
    key_I: Tensor
    # For attention.GatherKeys: a token of a shared prompt is in key_I several times, and the backward adds up the
    # gradients of these copies. key_order_I sorts the copies by token. key_order_start_N, (N + 1,), has the offset of
    # each token's copies.
    key_order_I: Tensor
    key_order_start_N: Tensor
    # the offset of each sequence's queries (torch's cu_seq_q)
    query_start_S: Tensor
    # the same if only completions are queries
    completion_query_start_S: Tensor
    # the offset of each sequence's keys (torch's cu_seq_k)
    key_start_S: Tensor
    # for each of the U prompts: how many input tokens it has, then how many each of its completions has
    segment_sizes: tuple[tuple[int, ...], ...]
    # (B,) the token ids of each example: its prompt and its K completions
    ids: list[tuple[np.ndarray, tuple[np.ndarray, ...]]]
    # the number of keys of the longest sequence; no sequence has more queries than keys
    max_keys: int
    # L: the number of tokens of the step's longest completion
    longest: int

    @property
    def shares_prompts(self) -> bool:
        """Whether a prompt has several completions. The keys of this prompt are then in several sequences."""
        return len(self.key_I) > len(self.token_N)

    def to(self, device: torch.device) -> "PackedBatch":
        """This batch on a device, by asynchronous copies."""
        tensors = {
            name: to_device(x, device)
            for name, x in self._asdict().items()
            if isinstance(x, Tensor)
        }
        return self._replace(**tensors)

    def sums(self, x_T: Tensor) -> Tensor:
        """(B, K) sums over the tokens of each completion. x_T: a number for each target."""
        # Not index_add, which on a GPU has no fixed order of addition: two passes could differ in the last bits.
        # unsafe: torch does not check the offsets, for which the host would wait.
        offsets = self.target_start_S
        sums = torch.segment_reduce(x_T, "sum", offsets=offsets, unsafe=True)  # ty: ignore
        return sums[self.sequence_BK]

    def tokens_of_completions(self, x_T: Tensor) -> Tensor:
        """Rearrange x_T, (T, ...), to (B, K, L, ...), with 0 beyond the end of a completion."""
        offset_L = torch.arange(self.longest, device=x_T.device)
        is_token = offset_L < self.length_BK[..., None]
        target_BKL = torch.where(is_token, self.first_target_BK[..., None] + offset_L, 0)
        x_BKL = x_T[target_BKL]
        x_BKL[~is_token] = 0
        return x_BKL


def pack(
    prompts: Sequence[np.ndarray],
    completions: Sequence[tuple[np.ndarray, ...]],
    longest: int | None = None,
) -> PackedBatch:
    """Pack B prompts and their completions. Equal prompts are packed once. The result is on the CPU.

    prompts: B arrays of token ids. completions: B tuples of K arrays. No array is empty. longest: the number of tokens
    of the step's longest completion (default: the longest of these completions).

    Here is a batch of B = 3 examples with U = 2 distinct prompts and K = 1. Examples 0 and 2 have the prompt 10 11 12.
    Their completions are 20 21 and 22 23 24. Example 1 has the prompt 13 and the completion 30 31.

                     prompt 0   its completions   prompt 1   its completion
        token_N      10 11 12   20     22 23      13         30
        position_N    0  1  2    3      3  4       0          1
        prompt_N      0  0  0    0      0  0       1          1
        branch_N      0  0  0    1      2  2       0          1

                     sequence 0   sequence 1     sequence 2
        target_T     20 21        22 23 24       30 31
        source_T      2  3         2  4  5        6  7       indices of input tokens
        key_I        0 1 2 3      0 1 2 4 5      6 7         indices of input tokens
        queries      0 1 2 3      4 5            6 7         so query_start_S is 0 4 6 8
    """
    # All work is done by numpy. This function runs in another thread than training. In that thread torch would start
    # more OpenMP threads, and these would take time from the cores that the training step needs.
    sequences = lay_out(prompts, completions)
    arrays = {
        **row_of(sequences),
        **targets_of(sequences, len(prompts), len(completions[0])),
        **attention_of(sequences),
    }
    return PackedBatch(
        **{name: torch.from_numpy(array) for name, array in arrays.items()},
        segment_sizes=sizes_by_prompt(sequences),
        ids=list(zip(prompts, completions)),
        max_keys=max(len(s.place) for s in sequences),
        longest=longest or max(len(s.completion) for s in sequences),
    )


class PackedSequence(NamedTuple):
    """A prompt with one of its completions. Places are indices of the N input tokens."""

    u: int  # number of the prompt
    branch: int  # number of the completion among those of the prompt, counted from 1
    b: int  # number of the example
    k: int  # number of the completion among those of the example
    prompt: np.ndarray
    completion: np.ndarray
    # places of the prompt and of the completion, without the completion's last token, which is not an input
    place: np.ndarray
    completion_place: np.ndarray  # places of the completion alone


def lay_out(
    prompts: Sequence[np.ndarray], completions: Sequence[tuple[np.ndarray, ...]]
) -> list[PackedSequence]:
    """Place each distinct prompt, followed by the completions of all examples that have this prompt."""
    sequences = []
    end = 0  # the length of the row so far
    for u, group in enumerate(prompt_groups(prompts)):
        prompt = prompts[group[0]]
        prompt_place = np.arange(end, end + len(prompt))
        end += len(prompt)
        numbers = [(b, k) for b in group for k in range(len(completions[b]))]
        for branch, (b, k) in enumerate(numbers, 1):
            completion = completions[b][k]
            own_place = np.arange(end, end + len(completion) - 1)
            end += len(own_place)
            place = np.append(prompt_place, own_place)
            sequences.append(PackedSequence(u, branch, b, k, prompt, completion, place, own_place))
    return sequences


def row_of(sequences: list[PackedSequence]) -> dict[str, np.ndarray]:
    """The fields about the N input tokens."""
    N = max(s.place[-1] for s in sequences) + 1
    token_N, position_N, prompt_N, branch_N = np.zeros((4, N), np.int64)
    for s in sequences:  # the sequences of a prompt write the same numbers for the prompt
        token_N[s.place] = np.append(s.prompt, s.completion[:-1])
        position_N[s.place] = np.arange(len(s.place))
        prompt_N[s.place] = s.u
        branch_N[s.completion_place] = s.branch
    return dict(
        token_N=token_N,
        position_N=position_N,
        prompt_N=prompt_N,
        branch_N=branch_N,
        prompt_P=np.flatnonzero(branch_N == 0),
        completion_M=np.flatnonzero(branch_N),
    )


def targets_of(sequences: list[PackedSequence], B: int, K: int) -> dict[str, np.ndarray]:
    """The fields about the T targets and the B * K completions."""
    sequence_BK = np.empty((B, K), np.int64)
    for j, s in enumerate(sequences):
        sequence_BK[s.b, s.k] = j
    target_start_S = np.append(0, np.cumsum([len(s.completion) for s in sequences]))
    # The prompt's last token predicts the first target. Each input token of the completion predicts the next target.
    sources = [s.place[-len(s.completion) :] for s in sequences]
    return dict(
        target_T=np.concatenate([s.completion for s in sequences]).astype(np.int64),
        source_T=np.concatenate(sources),
        target_start_S=target_start_S,
        sequence_BK=sequence_BK,
        first_target_BK=target_start_S[sequence_BK],
        length_BK=np.diff(target_start_S)[sequence_BK],
    )


def attention_of(sequences: list[PackedSequence]) -> dict[str, np.ndarray]:
    """The fields about the queries and keys of each sequence (see PackedBatch)."""
    n_keys_J = np.array([len(s.place) for s in sequences])
    n_completion_J = np.array([len(s.completion_place) for s in sequences])
    n_queries_J = np.where([s.branch == 1 for s in sequences], n_keys_J, n_completion_J)
    key_I = np.concatenate([s.place for s in sequences])
    return dict(
        key_I=key_I,
        key_order_I=np.argsort(key_I, kind="stable"),
        key_order_start_N=np.append(0, np.cumsum(np.bincount(key_I))),
        query_start_S=starts(n_queries_J),
        completion_query_start_S=starts(n_completion_J),
        key_start_S=starts(n_keys_J),
    )


def sizes_by_prompt(sequences: list[PackedSequence]) -> tuple[tuple[int, ...], ...]:
    """PackedBatch.segment_sizes."""
    sizes: list[list[int]] = []
    for s in sequences:
        if s.branch == 1:
            sizes.append([len(s.prompt)])
        sizes[-1].append(len(s.completion_place))
    return tuple(map(tuple, sizes))


def starts(sizes: np.ndarray) -> np.ndarray:
    """The offset of each sequence and the end of the last one, as int32 for flash attention. sizes: the size of each
    sequence."""
    return np.append(0, np.cumsum(sizes)).astype(np.int32)

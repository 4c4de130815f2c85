"""Sample from a policy, batched, with a key/value cache; and talk to a run.

    python generate.py --model out/<run> --prompt "sort: pear fig apple ="
    python generate.py --model out/<run>        # a conversation

Shape letters:

    A  answers of a call, one for each prompt
    B  those of the A that are sampled at once
    Y  new tokens of an answer, at most
    V  vocabulary
    N  packed tokens of the B prompts
"""

import contextlib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date

import numpy as np
import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt

from attention import KVCache
from lora import merge_for_sampling
from packing import pack, to_device
from records.forms import Record
from records.tokenizer import Texts, Tokenizer
from runs.console import advance, run_cli
from runs.devices import all_reduce, free_memory, keep_gathered, prepare_machine
from runs.settings import Sampling, parse_command, refuse_unless

# ---- one token ----------------------------------------------------------------------------------


def choose_token(logits_BV, u_B, args: Sampling):
    """The next token (B,) of each row: the likeliest at temperature 0, else the first whose cumulative probability is
    above the row's uniform number u."""
    if args.temperature == 0:
        return logits_BV.argmax(-1)
    exact = logits_BV.is_cuda and torch.are_deterministic_algorithms_enabled()
    p_BV = (logits_BV.double() / args.temperature).softmax(-1)
    if args.top_k:  # by index, not by a threshold: bfloat16 logits may tie with the k-th
        top = p_BV.topk(min(args.top_k, p_BV.shape[1]))
        p_BV = torch.zeros_like(p_BV).scatter(1, top.indices, top.values)
    if args.top_p < 1:
        sorted_BV, token_BV = p_BV.sort(-1, descending=True)
        most_B1 = args.top_p * sorted_BV.sum(-1, keepdim=True)
        outside_BV = cumsum(sorted_BV, exact) - sorted_BV >= most_B1
        p_BV = p_BV.masked_fill(outside_BV.gather(-1, token_BV.argsort(-1)), 0)
    cdf_BV = cumsum(p_BV, exact)
    token_B = torch.searchsorted(cdf_BV, u_B[:, None] * cdf_BV[:, -1:], right=True)[:, 0]
    return token_B.clamp(max=p_BV.shape[1] - 1)


def cumsum(x_BV, exact: bool):
    """Cumulative sums along the vocabulary.

    On a GPU those of torch differ from call to call in their last bits. `exact` ones are products with triangular
    matrices of ones, within blocks of 256 and over the blocks.
    """
    if not exact:
        return x_BV.cumsum(-1)
    B, V = x_BV.shape
    dtype, device = x_BV.dtype, x_BV.device
    blocks = torch.nn.functional.pad(x_BV, (0, -V % 256)).view(B, -1, 256)
    within = blocks @ torch.ones(256, 256, dtype=dtype, device=device).triu()
    total = within[..., -1]  # (B, blocks)
    n = total.shape[1]
    before = total @ torch.ones(n, n, dtype=dtype, device=device).triu(1)
    return (within + before[..., None]).view(B, -1)[:, :V].contiguous()


def penalise(logits_BV, seen_BV, penalty: float):
    """Repetition penalty (Keskar et al. 2019): lower the logits of tokens that the prompt or the answer has already.
    -> (B, V)"""
    lower_BV = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return torch.where(seen_BV, lower_BV, logits_BV)


# ---- answers ------------------------------------------------------------------------------------


@torch.no_grad()
def generate(
    fabric,
    policy,
    prompts: list,
    tokenizer: Tokenizer,
    args: Sampling,
    max_new: int,
    seed: int,
    before_token: Callable[[], None] | None = None,
) -> list[list[int]]:
    """Answers to `prompts` (arrays of token ids), at most max_new tokens each, with the EOS if it came to one. Every
    rank returns the same list.

    before_token is called before every decode step, equally often on every rank, so it may be a collective; what it
    raises, on all ranks alike, ends the sampling.

    Each answer draws from a random generator of its own, so it depends on (seed, its place in `prompts`) and, but for
    rounding, on no other prompt. Ranks take prompts in turn and run equally many forwards: a sharded policy would hang
    otherwise.
    """
    was_training = policy.training
    policy.eval()
    sampler = _Sampler(fabric, policy, tokenizer, args, seed, before_token)
    max_new = min(max_new, sampler.context)
    answer_AY = torch.full((len(prompts), max_new), -1, device=fabric.device)  # -1: no token
    rank_prompts = list(range(fabric.global_rank, len(prompts), fabric.world_size))
    most = math.ceil(len(prompts) / fabric.world_size)  # prompts of a rank
    merged = merge_for_sampling(sampler.module, compute_dtype(fabric))
    try:
        # autocast remembers the casts of weights until its outermost context ends: enter it once, not at every token
        with merged, fabric.autocast(), keep_gathered(policy, fabric.device):
            # in the memory that merged matrices leave
            rows = sampler.rows_at_once(prompts, max_new)
            for start in range(0, most, rows):
                sampler.answer(prompts, rank_prompts[start : start + rows], answer_AY)
    finally:
        policy.train(was_training)
    # the one rank that sampled an answer has its tokens, the others have -1 + 1 = 0 there
    answer_AY = all_reduce(answer_AY + 1) - 1
    return [[token for token in answer if token >= 0] for answer in answer_AY.tolist()]


def compute_dtype(fabric) -> torch.dtype:
    """In which linear layers compute."""
    with fabric.autocast():
        one = torch.ones(1, 1, device=fabric.device)
        return (one @ one).dtype


class _Sampler:
    """Samples this rank's answers, one batch of prompts after the other."""

    def __init__(
        self,
        fabric,
        policy,
        tokenizer: Tokenizer,
        args: Sampling,
        seed: int,
        before_token,
    ):
        self.fabric, self.policy, self.tokenizer = fabric, policy, tokenizer
        self.module = getattr(policy, "module", policy)
        self.args, self.seed, self.before_token = args, seed, before_token
        self.eos_ids = torch.tensor(tokenizer.stops, device=fabric.device)
        self.context = self.module.max_seq_length

    def rows_at_once(self, prompts, max_new: int) -> int:
        """How many answers are sampled at once: batch_size, or fewer where keys and values would take more memory than
        cache_gb. The same on every rank."""
        longest = max(map(len, prompts), default=1)
        slots = min(self.context, longest + max_new)
        device = self.fabric.device
        if self.args.cache_gb:
            room = self.args.cache_gb * 1e9
        else:
            room = free_memory(device) / 2
        rows = min(self.args.batch_size, int(room / self.module.cache_bytes(slots)))
        return int(all_reduce(torch.tensor(max(1, rows), device=device), "min"))

    def answer(self, prompts, index: list[int], answer_AY) -> None:
        """Sample the answers to prompts[i] for i in index, into the rows i of answer_AY.

        It returns when all answers have ended on all ranks. A rank whose answers have ended, or that has none, runs a
        dummy row until then, so that collectives match. Each token waits for the device once.
        """
        args, device, max_new = self.args, self.fabric.device, answer_AY.shape[1]
        dummy = not index
        batch_prompts = [prompts[i] for i in index] or [prompts[0][:1]]
        u_BY = torch.stack([_uniform(self.seed, i, max_new) for i in index or [0]])
        u_BY = to_device(u_BY, device)
        # pack leaves a completion's last token out of the inputs: with completions of one token, only prompts remain
        completions = [(np.zeros(1, int),)] * len(batch_prompts)
        packed = pack(batch_prompts, completions).to(device)
        lengths = list(map(len, batch_prompts))
        length_B = to_device(torch.tensor(lengths), device)
        room_B = torch.clamp(self.context - length_B, max=max_new)  # new tokens that fit
        cache = KVCache(packed, slots=min(self.context, max(lengths) + max_new))
        answer_B = to_device(torch.tensor(index or [-1]), device)  # each row's number among the A
        seen_BV = None
        for y in range(max_new):
            if self.before_token is not None:
                self.before_token()
            logits_BV = self.policy(cache)
            if y == 0:
                advance(0)  # the prompts are read
            if args.repetition_penalty != 1:
                if seen_BV is None:
                    seen_UV = logits_BV.new_zeros(
                        len(packed.sizes), len(logits_BV[0]), dtype=torch.bool
                    )
                    seen_UV[packed.prompt_N, packed.token_N] = True  # U prompts
                    seen_BV = seen_UV[packed.prompt_B]
                logits_BV = penalise(logits_BV, seen_BV, args.repetition_penalty)
            if y < args.min_new_tokens:
                logits_BV.index_fill_(1, self.eos_ids, -torch.inf)
            new_B = choose_token(logits_BV, u_BY[:, y], args)
            if seen_BV is not None:
                seen_BV.scatter_(1, new_B[:, None], True)
            if not dummy:
                answer_AY[answer_B, y] = torch.where(y < room_B, new_B, -1)
            done_B = torch.isin(new_B, self.eos_ids) | (y + 1 >= room_B)
            if args.stop and not dummy:
                done_B = done_B | self._has_stop_text(answer_AY[answer_B, : y + 1])
            going_on = [row for row, done in enumerate(done_B.tolist()) if not done]
            if not dummy:
                self._count(len(new_B), len(going_on), max_new - y)
            if self._all_ranks(dummy or not going_on):
                return
            if not going_on:
                # other ranks go on: row 0 becomes the dummy, whose tokens are not written
                going_on = [0]
                dummy = True
            if len(going_on) < len(new_B):
                order = cache.keep(going_on)
                lengths = [lengths[row] for row in order]
                order_B = to_device(torch.tensor(order), device)
                new_B, answer_B = new_B[order_B], answer_B[order_B]
                u_BY, room_B, length_B = u_BY[order_B], room_B[order_B], length_B[order_B]
                if seen_BV is not None:
                    seen_BV = seen_BV[order_B]
            # a dummy row may be full: it then overwrites its last slot
            last_slot = cache.slots - 1
            position_B = (length_B + y).clamp(max=last_slot)
            cache.at(new_B, position_B, longest=min(max(lengths) + y, last_slot))

    def _count(self, rows: int, going_on: int, left: int) -> None:
        """Progress counts the tokens that all answers could have: an answer that ends has all of those
        that were left to it."""
        ranks = self.fabric.world_size
        advance(ranks * (going_on + (rows - going_on) * left))

    def _has_stop_text(self, answer_BY):
        """(B,) bool: whether an answer's text so far has one of the stop texts."""
        found = []
        for ids in answer_BY.tolist():
            text = self.tokenizer.decode([i for i in ids if i >= 0])
            found.append(any(stop in text for stop in self.args.stop))
        return torch.tensor(found, device=answer_BY.device)

    def _all_ranks(self, done: bool) -> bool:
        """Whether `done` is True on all ranks."""
        if self.fabric.world_size == 1:
            return done
        votes = torch.tensor(float(done), device=self.fabric.device)
        return bool(all_reduce(votes) == self.fabric.world_size)


def _uniform(seed: int, i: int, n: int) -> torch.Tensor:
    """Answer i's n uniform random numbers (n,), one a token, in float64."""
    generator = torch.Generator().manual_seed((seed * 1000003 + i) % 2**63)
    return torch.rand(n, generator=generator).double()


def completion_text(tokenizer: Tokenizer, ids: list[int], stop: list[str] = ()) -> str:
    """The text of a sampled completion, without its EOS, up to the first stop text."""
    if ids and ids[-1] in tokenizer.stops:
        ids = ids[:-1]
    text = tokenizer.decode(ids)
    end = len(text)
    for stop_text in stop:
        place = text.find(stop_text)
        if place >= 0:
            end = min(end, place)
    return text[:end]


# ---- the command --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask(Sampling):
    """python generate.py --model out/<run> [--prompt TEXT] asks a run, or any model that kto.py takes."""

    model: str = ""
    """A run's folder, its `final`, a checkpoint, or any folder or id that kto.py takes."""
    prompt: str = ""
    """What to answer, through the chat template if there is one. Default: a conversation, turn by turn,
    until an empty line or Ctrl-D."""
    max_new_tokens: PositiveInt | None = None
    """Longest answer in tokens. Default: 256, or what fits into the context."""
    plain: bool = False
    """true: leave the chat template aside."""
    seed: NonNegativeInt = 1
    """An answer draws from it; turn number i of a conversation from seed + i."""


class Chat:
    """One model on one device."""

    def __init__(self, args: Ask):
        from lightning.fabric import Fabric

        from hub import find_model
        from load import load_model

        source = find_model(args.model)
        prepare_machine()
        self.args, self.fabric = args, Fabric(devices=1)
        dtype = torch.bfloat16 if self.fabric.device.type == "cuda" else torch.float32
        today = date.today().isoformat()
        self.tokenizer = Tokenizer(source.tokenizer, source.chat_template, today)
        self.policy = self.fabric.to_device(load_model(source, dtype=dtype))

    def answer(self, turns: list[dict], seed: int) -> str:
        """The model's next turn in a dialogue; without a chat template it sees the last turn alone. Raises
        BadInput if the template refuses the dialogue, or if it does not fit into the context."""
        args = self.args
        if self.tokenizer.template and not args.plain:
            texts = self.tokenizer.render(Record(turns, []))
        else:
            texts = Texts(turns[-1]["content"], [], by_template=False)
        ((ids, _),) = self.tokenizer.encode_all([texts])
        context = self.policy.max_seq_length
        refuse_unless(
            0 < len(ids) < context,
            f"prompt: from 1 to {context - 1} tokens fit this model, got {len(ids)}",
        )
        max_new = args.max_new_tokens or min(256, context - len(ids))
        prompts = [np.array(ids, dtype="int32")]
        answers = generate(self.fabric, self.policy, prompts, self.tokenizer, args, max_new, seed)
        return completion_text(self.tokenizer, answers[0], args.stop)


def main(argv=None) -> None:
    args = parse_command(Ask, __doc__, sys.argv[1:] if argv is None else argv)
    args.validate("generate")
    refuse_unless(args.model, "model: required: a run's folder, or any model that kto.py takes")
    chat, turns = Chat(args), []
    lines = [args.prompt] if args.prompt else iter(lambda: input("> "), "")
    with contextlib.suppress(EOFError):  # Ctrl-D
        for line in lines:
            turns.append({"role": "user", "content": line})
            answer = chat.answer(turns, args.seed + len(turns) // 2)
            print(answer)
            turns.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    run_cli(main)

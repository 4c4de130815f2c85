"""Sample from a policy, batched, with a key/value cache; and count with a checker how often it is right."""

import math
from dataclasses import dataclass

import torch

from data import BadInput, Tokenizer
from model import Cache


@dataclass
class Eval:
    """Completions sampled from the policy: shown at each validation, and judged before and after the run."""

    check: str = "none"
    """A program that judges completions, before and after the run: none, or demo (the demo's own). A closed choice."""
    prompts: int = 500
    """At most this many distinct prompts of data.val are judged, the first ones."""
    samples: int = 4
    """So many completions are shown and saved at each validation; 0 turns it off."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    top_k: int = 0
    """Sample among the k likeliest tokens only; 0 is all."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that together have this probability; 1 is all."""
    max_new_tokens: int | None = None
    """Longest sampled completion. Default: data.max_completion."""
    batch_size: int = 256
    """Prompts answered at once on a device."""

    def refuse(self):
        if self.check not in CHECKERS:
            raise BadInput(f"eval.check: expected {' or '.join(CHECKERS)}, got {self.check}")
        if min(self.prompts, self.samples, self.temperature, self.top_k) < 0 or not 0 < self.top_p <= 1:
            raise BadInput("eval: prompts, samples, temperature and top_k are at least 0, top_p is in (0, 1]")
        if self.batch_size < 1 or (self.max_new_tokens is not None and self.max_new_tokens < 1):
            raise BadInput("eval: batch_size and max_new_tokens are at least 1")


def _demo_checker():
    from demo.check import check

    return check


CHECKERS = {"none": lambda: None, "demo": _demo_checker}


def choose(logits_BV, u_B, args: Eval):
    """The next token of each row: greedy, or where the cumulative probability passes the row's own uniform number."""
    if args.temperature == 0:
        return logits_BV.argmax(-1)
    if torch.are_deterministic_algorithms_enabled():  # a GPU's cumsum is not
        return _choose(logits_BV.cpu(), u_B.cpu(), args).to(logits_BV.device)
    return _choose(logits_BV, u_B, args)


def _choose(logits_BV, u_B, args: Eval):
    p_BV = (logits_BV.double() / args.temperature).softmax(-1)
    if args.top_k:
        top = p_BV.topk(min(args.top_k, p_BV.shape[1]))
        p_BV = torch.zeros_like(p_BV).scatter(1, top.indices, top.values)  # k, also where bfloat16 logits tie
    if args.top_p < 1:
        ranked, index = p_BV.sort(-1, descending=True)
        outside = ranked.cumsum(-1) - ranked >= args.top_p * ranked.sum(-1, keepdim=True)
        p_BV = p_BV.masked_fill(outside.gather(-1, index.argsort(-1)), 0)
    cdf_BV = p_BV.cumsum(-1)
    token_B = torch.searchsorted(cdf_BV, u_B[:, None] * cdf_BV[:, -1:], right=True)[:, 0]
    return token_B.clamp(max=p_BV.shape[1] - 1)


@torch.no_grad()
def generate(
    fabric, policy, prompts: list, eos: int, args: Eval, max_new: int, context: int, seed: int
) -> list[list[int]]:
    """Completions of id arrays `prompts`, each with its EOS if it came to one; the same list on every rank.

    Row i draws from a generator of its own, so an answer depends on (seed, i) and, but for rounding, on no other row.
    Prompts are dealt to the ranks, which run equally many forwards: a sharded policy would hang otherwise.
    """
    was_training, device = policy.training, fabric.device
    policy.eval()
    answer_PT = torch.full((len(prompts), max_new), -1, device=device)  # -1: nothing
    share = range(fabric.global_rank, len(prompts), fabric.world_size)
    rounds = math.ceil(math.ceil(len(prompts) / fabric.world_size) / args.batch_size)
    for r in range(rounds):
        index = list(share[r * args.batch_size : (r + 1) * args.batch_size])
        dummy = not index  # this rank has nothing left, but must keep the others company
        batch = [prompts[i] for i in index] or [prompts[0][:1]]
        u_BT = torch.stack(
            [torch.rand(max_new, generator=torch.Generator().manual_seed(seed * 1000003 + i)) for i in index or [0]]
        )
        u_BT, length = u_BT.double().to(device), torch.tensor([len(p) for p in batch], device=device)
        token = torch.zeros(len(batch), int(length.max()), dtype=torch.long, device=device)
        for row, p in zip(token, batch):
            row[: len(p)] = torch.from_numpy(p.astype("int64"))
        room = torch.clamp(context - length, max=max_new)  # so many more tokens fit
        cache = Cache(min(context, token.shape[1] + max_new))
        position = torch.arange(token.shape[1], device=device)[None].expand(len(batch), -1)
        last, alive = length - 1, torch.tensor(index or [-1], device=device)
        for t in range(max_new):
            logits = policy(cache.at(token, position, last))
            new = choose(logits, u_BT[:, t], args)
            if not dummy:
                answer_PT[alive, t] = torch.where(t < room, new, -1)
            done = (new == eos) | (t + 1 >= room)
            if _all(fabric, dummy or bool(done.all())):
                break
            stay = (~done).nonzero()[:, 0]
            if len(stay) == 0:  # done here, not elsewhere: one row goes on unread
                stay, dummy = torch.zeros(1, dtype=torch.long, device=device), True
            cache.keep(stay)
            u_BT, room, length, alive, new = u_BT[stay], room[stay], length[stay], alive[stay], new[stay]
            token, position, last = (
                new[:, None],
                (length + t)[:, None].clamp(max=cache.slots - 1),
                torch.zeros_like(stay),
            )
    policy.train(was_training)
    answer_PT = (
        fabric.all_reduce(answer_PT + 1, reduce_op="sum") - 1
    )  # each row is written by one rank, -1 + 1 elsewhere
    return [[i for i in row if i >= 0] for row in answer_PT.tolist()]


def _all(fabric, mine: bool) -> bool:
    if fabric.world_size == 1:
        return mine
    return bool(
        fabric.all_reduce(torch.tensor(float(mine), device=fabric.device), reduce_op="sum") == fabric.world_size
    )


def text(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids[:-1] if ids and ids[-1] == tokenizer.eos else ids)


def wilson(k: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """A 95% confidence interval for k of n (Wilson 1927): honest near 0 and 1, where k/n +- 2 sigma is not."""
    mid, width = (k + z * z / 2) / (n + z * z), z * math.sqrt(k * (n - k) / n + z * z / 4) / (n + z * z)
    return max(0.0, mid - width), min(1.0, mid + width)

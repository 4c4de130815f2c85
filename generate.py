"""Sample from a policy, batched, with a key/value cache; and count with a checker how often it is right.

python generate.py --model out/<run> --prompt "sort: pear fig apple ="
"""

import math
import sys
from dataclasses import dataclass, field

import numpy as np
import torch

from data import BadInput, Tokenizer, pack
from model import Cache


@dataclass
class Sampling:
    """How completions are drawn from a policy."""

    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    top_k: int = 0
    """Sample among the k likeliest tokens only; 0 is all."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that together have this probability; 1 is all."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that are there already, and multiplies the negative ones; 1 is none."""
    stop: list[str] = field(default_factory=list)
    """A completion ends before the first of these texts too, not only at EOS."""
    min_new_tokens: int = 0
    """No EOS before so many tokens."""
    max_new_tokens: int | None = None
    """Longest sampled completion. Default: data.max_completion."""
    batch_size: int = 256
    """Prompts answered at once on a device."""

    def refuse(self, name: str = "eval"):
        if min(self.temperature, self.top_k, self.min_new_tokens) < 0 or not 0 < self.top_p <= 1:
            raise BadInput(f"{name}: temperature, top_k and min_new_tokens are at least 0, top_p is in (0, 1]")
        if self.batch_size < 1 or (self.max_new_tokens is not None and self.max_new_tokens < 1):
            raise BadInput(f"{name}: batch_size and max_new_tokens are at least 1")
        if not self.repetition_penalty > 0 or "" in self.stop:
            raise BadInput(f"{name}: repetition_penalty is above 0, a stop text is not empty")


@dataclass
class Eval(Sampling):
    """Completions sampled from the policy: shown at each validation, and judged before and after the run."""

    check: str = "none"
    """A program that judges completions, before and after the run: none, or demo (the demo's own). A closed choice."""
    prompts: int = 500
    """At most this many distinct prompts of data.val are judged, the first ones."""
    samples: int = 4
    """So many completions are shown and saved at each validation; 0 turns it off."""

    def refuse(self, name: str = "eval"):
        super().refuse(name)
        if self.check not in CHECKERS:
            raise BadInput(f"{name}.check: expected {' or '.join(CHECKERS)}, got {self.check}")
        if min(self.prompts, self.samples) < 0:
            raise BadInput(f"{name}: prompts and samples are at least 0")


def _demo_checker():
    from demo.check import check

    return check


CHECKERS = {"none": lambda: None, "demo": _demo_checker}


def choose(logits_BV, u_B, args: Sampling):
    """The next token of each row: greedy, or where the cumulative probability passes the row's own uniform number."""
    if args.temperature == 0:
        return logits_BV.argmax(-1)
    if torch.are_deterministic_algorithms_enabled():  # a GPU's cumsum is not
        return _choose(logits_BV.cpu(), u_B.cpu(), args).to(logits_BV.device)
    return _choose(logits_BV, u_B, args)


def _choose(logits_BV, u_B, args: Sampling):
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
    fabric, policy, prompts: list, tokenizer: Tokenizer, args: Sampling, max_new: int, context: int, seed: int
) -> list[list[int]]:
    """Completions of id arrays `prompts`, each with its EOS if it came to one; the same list on every rank.

    Row i draws from a generator of its own, so an answer depends on (seed, i) and, but for rounding, on no other row.
    Prompts are dealt to the ranks, which run equally many forwards: a sharded policy would hang otherwise.
    """
    was_training = policy.training
    policy.eval()
    answer_PT = torch.full((len(prompts), max_new), -1, device=fabric.device)  # -1: nothing
    share = range(fabric.global_rank, len(prompts), fabric.world_size)
    for r in range(math.ceil(math.ceil(len(prompts) / fabric.world_size) / args.batch_size)):
        index = list(share[r * args.batch_size : (r + 1) * args.batch_size])
        _answer(fabric, policy, prompts, index, answer_PT, tokenizer, args, context, seed)
    policy.train(was_training)
    whole_PT = fabric.all_reduce(answer_PT + 1, reduce_op="sum") - 1  # one rank wrote a row; elsewhere it is -1 + 1 = 0
    return [[i for i in row if i >= 0] for row in whole_PT.tolist()]


def _answer(fabric, policy, prompts, index: list[int], answer_PT, tokenizer, args: Sampling, context: int, seed: int):
    """One batch of rows, until all have ended on all ranks. A rank without rows keeps the others company."""
    device, max_new, eos, idle = fabric.device, answer_PT.shape[1], tokenizer.eos, not index
    batch = [prompts[i] for i in index] or [prompts[0][:1]]
    u_BT = torch.stack([_uniform(seed, i, max_new) for i in index or [0]]).to(device)
    rows = pack(batch, [(np.zeros(1, int),)] * len(batch)).to(device)  # a completion's last token is never an input
    length = torch.tensor(rows.sizes, device=device)
    room = torch.clamp(context - length, max=max_new)  # so many more tokens fit
    cache = Cache(rows, min(context, max(rows.sizes) + max_new))
    alive, seen_BV = torch.tensor(index or [-1], device=device), None
    for t in range(max_new):
        logits = policy(cache)
        if args.repetition_penalty != 1:
            if seen_BV is None:
                seen_BV = torch.zeros_like(logits, dtype=torch.bool)
                seen_BV[rows.example_N, rows.token_N] = True
            penalised = torch.where(logits > 0, logits / args.repetition_penalty, logits * args.repetition_penalty)
            logits = torch.where(seen_BV, penalised, logits)
        if t < args.min_new_tokens:
            logits[:, eos] = -torch.inf
        new = choose(logits, u_BT[:, t], args)
        if seen_BV is not None:
            seen_BV[torch.arange(len(new), device=device), new] = True
        if not idle:
            answer_PT[alive, t] = torch.where(t < room, new, -1)
        done = (new == eos) | (t + 1 >= room)
        if args.stop and not idle:
            said = [tokenizer.decode([i for i in ids if i >= 0]) for ids in answer_PT[alive, : t + 1].tolist()]
            done = done | torch.tensor([any(stop in x for stop in args.stop) for x in said], device=device)
        if _all(fabric, idle or bool(done.all())):
            break
        stay = (~done).nonzero()[:, 0]
        if len(stay) == 0:  # ended here, not elsewhere: one row goes on unread
            stay, idle = torch.zeros(1, dtype=torch.long, device=device), True
        if len(stay) < len(new):
            stay = cache.keep(stay)
            u_BT, room, length, alive, new = u_BT[stay], room[stay], length[stay], alive[stay], new[stay]
            seen_BV = None if seen_BV is None else seen_BV[stay]
        cache.at(new, (length + t).clamp(max=cache.slots - 1))


def _uniform(seed: int, i: int, n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 1000003 + i)
    return torch.rand(n, generator=generator).double()


def _all(fabric, mine: bool) -> bool:
    if fabric.world_size == 1:
        return mine
    return bool(
        fabric.all_reduce(torch.tensor(float(mine), device=fabric.device), reduce_op="sum") == fabric.world_size
    )


def text(tokenizer: Tokenizer, ids: list[int], stop: list[str] = ()) -> str:
    """A completion as text: without its EOS, up to the first stop text."""
    whole = tokenizer.decode(ids[:-1] if ids and ids[-1] == tokenizer.eos else ids)
    return whole[: min((at for x in stop if (at := whole.find(x)) >= 0), default=len(whole))]


def wilson(k: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """A 95% confidence interval for k of n (Wilson 1927): honest near 0 and 1, where k/n +- 2 sigma is not."""
    mid, width = (k + z * z / 2) / (n + z * z), z * math.sqrt(k * (n - k) / n + z * z / 4) / (n + z * z)
    return max(0.0, mid - width), min(1.0, mid + width)


@dataclass
class Ask(Sampling):
    """python generate.py --model out/<run> --prompt "sort: pear fig =" talks to a run, or to any model we load."""

    model: str = ""
    """A run's folder, its `final`, or any folder or id that kto.py takes."""
    prompt: list[str] = field(default_factory=list)
    """What to answer; may be given several times. Goes through the chat template if the model has one."""
    plain: bool = False
    """Leave the chat template aside."""
    seed: int = 1
    """Prompt number i draws from (seed, i)."""


def main() -> None:
    import jsonargparse
    from lightning.fabric import Fabric

    import model

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(description=Ask.__doc__, exit_on_error=False)
    parser.add_class_arguments(Ask, None, as_group=False)
    argv = [
        f"--prompt+={a}" if b == "--prompt" else a for b, a in zip(["", *sys.argv[1:]], sys.argv[1:]) if a != "--prompt"
    ]
    try:
        args = Ask(**parser.parse_args([a.replace("--prompt=", "--prompt+=", 1) for a in argv]).as_dict())
    except (jsonargparse.ArgumentError, TypeError) as e:
        raise BadInput(" ".join(str(e).split())) from None
    args.refuse("generate")
    if not args.model or not args.prompt:
        raise BadInput("generate: --model and --prompt are required")
    folder = model.fetch(args.model)
    policy, tokenizer = model.load(folder), Tokenizer(folder)
    texts = args.prompt
    if tokenizer.template and not args.plain:
        texts = [
            tokenizer.template.render(messages=[{"role": "user", "content": p}], add_generation_prompt=True)
            for p in texts
        ]
    ids = [np.array(tokenizer.prompt(x), dtype="int32") for x in tokenizer.encode(texts)]
    context = policy.max_seq_length
    if not all(0 < len(x) < context for x in ids):
        raise BadInput(f"prompt: from 1 to {context - 1} tokens fit this model, got {[len(x) for x in ids]}")
    fabric = Fabric(devices=1)
    policy = fabric.to_device(policy)
    new = args.max_new_tokens or min(256, context - max(map(len, ids)))
    for prompt, answer in zip(args.prompt, generate(fabric, policy, ids, tokenizer, args, new, context, args.seed)):
        print(f"{prompt}{text(tokenizer, answer, args.stop)}" if len(ids) > 1 else text(tokenizer, answer, args.stop))


if __name__ == "__main__":
    from devices import guarded

    guarded(main)

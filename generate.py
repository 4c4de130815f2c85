"""Sample from a policy, batched, with a key/value cache; and talk to a run.

    python generate.py --model out/<run> --prompt "sort: pear fig apple ="
    python generate.py --model out/<run>        # a conversation

Shape letters:

    A  answers of a call, one for each prompt
    B  those of the A that are sampled at once
    Y  new tokens of an answer, at most
    V  vocabulary
    X  tokens of the longest of the B prompts with its answer
"""

import contextlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import NamedTuple

import numpy as np
import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt
from lightning.fabric import Fabric
from torch.distributed.fsdp import FSDPModule

from attention import KVCache
from hub import find_model
from load import load_model
from lora import merge_for_sampling
from packing import pack, to_device
from records.forms import Record
from records.tokenizer import Tokenizer
from runs.console import advance, run_cli
from runs.devices import all_reduce, prepare_machine
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
    blocks = torch.nn.functional.pad(x_BV, (0, -V % 256)).view(B, -1, 256)
    within = blocks @ x_BV.new_ones(256, 256).triu()
    n = within.shape[1]  # blocks
    before = within[..., -1] @ x_BV.new_ones(n, n).triu(1)
    return (within + before[..., None]).view(B, -1)[:, :V].contiguous()


def penalise(logits_BV, token_BX, penalty: float):
    """Repetition penalty (Keskar et al. 2019): lower the logits of the tokens that a row's prompt or answer
    has already. -> (B, V)"""
    logit_BX = logits_BV.gather(1, token_BX)
    lower_BX = torch.where(logit_BX > 0, logit_BX / penalty, logit_BX * penalty)
    return logits_BV.scatter(1, token_BX, lower_BX)


# ---- memory -------------------------------------------------------------------------------------


def free_memory(device) -> float:
    """Bytes that a cache may take. On a GPU: what is free, down to a power of two, so that two equal
    runs find the same number. On a CPU, which has no such number: 16 GB."""
    if device.type != "cuda":
        return 16e9
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return 2.0 ** math.floor(math.log2(torch.cuda.mem_get_info(device)[0] + unused))


@contextlib.contextmanager
def keep_gathered(policy, device):
    """Keep the blocks of a sharded policy gathered from one forward to the next, if memory allows:
    else sampling would gather the whole model for each token."""
    module = getattr(policy, "module", policy)
    blocks = [m for m in module.modules() if isinstance(m, FSDPModule) and m is not module]
    size = sum(p.numel() * p.element_size() for p in module.parameters())  # of the whole model
    if blocks:
        # The least of all ranks: they must agree, because gathering a block is a collective.
        room = torch.tensor(free_memory(device), dtype=torch.float64, device=device)
        if size > all_reduce(room, "min").item() / 2:
            blocks = []
    for block in blocks:
        block.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for block in blocks:
            block.set_reshard_after_forward(True, recurse=False)
            block.reshard()


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
    if not prompts:
        return []
    module = getattr(policy, "module", policy)
    context, device = module.max_seq_length, fabric.device
    max_new = min(max_new, context)
    answer_AY = torch.full((len(prompts), max_new), -1, device=device)  # -1: no token
    slots = min(context, max(map(len, prompts)) + max_new)
    one = torch.ones(1, 1, device=device)
    with fabric.autocast():
        dtype = (one @ one).dtype  # in which linear layers compute
    merged = merge_for_sampling(module, dtype)
    was_training = policy.training
    policy.eval()
    try:
        # autocast remembers the casts of weights until its outermost context ends: enter it once, not at every token
        with merged, fabric.autocast(), keep_gathered(policy, device):
            # in the memory that merged matrices leave
            rows = rows_at_once(args, module.cache_bytes(slots), device)
            stride = fabric.world_size
            for start in range(0, len(prompts), rows * stride):
                part = slice(start + fabric.global_rank, start + rows * stride, stride)
                u = [_uniform(seed, i, max_new) for i in range(len(prompts))[part]]
                answer_AY[part] = _sample(
                    fabric, policy, prompts[part], tokenizer, args, max_new, u, before_token
                )
    finally:
        policy.train(was_training)
    # the one rank that sampled an answer has its tokens, the others have -1 + 1 = 0 there
    answer_AY = all_reduce(answer_AY + 1) - 1
    # a prompt that fills the context has no answer
    return [
        [token for token in answer[: context - len(prompt)] if token >= 0]
        for prompt, answer in zip(prompts, answer_AY.tolist())
    ]


def rows_at_once(args: Sampling, bytes_of_row: int, device) -> int:
    """How many answers are sampled at once: batch_size, or fewer where keys and values would take more memory than
    cache_gb. The same on every rank."""
    room = args.cache_gb * 1e9 if args.cache_gb else free_memory(device) / 2
    rows = min(args.batch_size, int(room / bytes_of_row))
    return int(all_reduce(torch.tensor(max(1, rows), device=device), "min"))


def _uniform(seed: int, i: int, n: int) -> torch.Tensor:
    """Answer i's n uniform random numbers (n,), one a token, in float64."""
    generator = torch.Generator().manual_seed((seed * 1000003 + i) % 2**63)
    return torch.rand(n, generator=generator).double()


def _sample(fabric, policy, prompts, tokenizer, args, max_new, uniform, before_token):
    """The tokens of the answers to B prompts, sampled together (B, max_new); -1 after an answer's end.

    It returns when all answers have ended on all ranks. A rank whose answers have ended repeats its last forward until
    then, and a rank without prompts (its B is 1) that of a dummy, so that collectives match. Each token waits for the
    device once.
    """
    device, context = fabric.device, policy.max_seq_length
    going_on = rows = list(range(len(prompts)))  # the prompts whose answers have not ended
    prompts = prompts or [np.zeros(1, "int32")]
    lengths = list(map(len, prompts))
    length_B = to_device(torch.tensor(lengths), device)
    u_BY = to_device(torch.stack(uniform or [torch.zeros(max_new)]), device)
    answer_BY = torch.full(u_BY.shape, -1, device=device)
    if args.repetition_penalty != 1:
        # as long as the longest prompt, a shorter one is repeated: which tokens it has stays the same
        equally_long = [np.resize(prompt, max(lengths)).astype(int) for prompt in prompts]
        prompt_BX = to_device(torch.tensor(np.stack(equally_long)), device)
    # pack leaves a completion's last token out of the inputs: with completions of one token, only prompts remain
    packed = pack(prompts, [(np.zeros(1, int),)] * len(prompts)).to(device)
    cache = KVCache(packed, slots=min(context, max(lengths) + max_new))
    row_B = torch.arange(len(prompts), device=device)
    for y in range(max_new):
        if before_token:
            before_token()
        logits_BV = policy(cache)
        if y == 0:
            advance(0)  # the prompts are read
        if going_on:
            if args.repetition_penalty != 1:
                token_BX = torch.cat((prompt_BX[row_B], answer_BY[row_B, :y]), 1)
                logits_BV = penalise(logits_BV, token_BX, args.repetition_penalty)
            if y < args.min_new_tokens:
                logits_BV[:, tokenizer.stops] = -torch.inf
            new_B = choose_token(logits_BV, u_BY[row_B, y], args)
            answer_BY[row_B, y] = new_B
            going_on = [
                place
                for place, (row, token) in enumerate(zip(rows, new_B.tolist()))
                if token not in tokenizer.stops and lengths[row] + y < context - 1
            ]
            if args.stop:
                answers = answer_BY[row_B, : y + 1].tolist()
                going_on = [
                    place
                    for place in going_on
                    if read_answer(tokenizer, answers[place], args.stop).cut
                ]
            # progress counts an answer that ends with all tokens that were left to it
            left = len(going_on) + (len(rows) - len(going_on)) * (max_new - y)
            advance(fabric.world_size * left)
        n_going_on = len(going_on)
        if fabric.world_size > 1:
            n_going_on = all_reduce(torch.tensor(n_going_on, device=device))
        if not n_going_on:
            break
        if going_on:
            if len(going_on) < len(rows):
                rows = [rows[place] for place in cache.keep(going_on)]
                row_B = to_device(torch.tensor(rows), device)
            longest = max(lengths[row] for row in rows) + y
            cache.at(answer_BY[row_B, y], length_B[row_B] + y, longest)
    return answer_BY


class AnswerText(NamedTuple):
    """A sampled completion as one reads it."""

    text: str
    """Without its EOS, up to the first stop text."""
    cut: bool
    """Whether it ended at the length limit, neither by EOS nor by a stop text."""


def read_answer(tokenizer: Tokenizer, ids: Sequence[int], stop: list[str] = ()) -> AnswerText:
    """The text of a completion's token ids, and whether it was cut."""
    has_end = len(ids) > 0 and ids[-1] in tokenizer.stops
    text = tokenizer.decode(ids[:-1] if has_end else ids)
    stops = [text.find(x) for x in stop if x in text]
    return AnswerText(text[: min(stops, default=None)], not has_end and not stops)


# ---- the command --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ask(Sampling):
    """python generate.py --model out/<run> [--prompt TEXT] asks a run, or any model that kto.py takes."""

    model: str
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


def main(argv=None) -> None:
    args = parse_command(Ask, __doc__, sys.argv[1:] if argv is None else argv)
    source = find_model(args.model)
    prepare_machine()
    fabric = Fabric(devices=1)
    dtype = torch.bfloat16 if fabric.device.type == "cuda" else torch.float32
    tokenizer = Tokenizer(source.tokenizer, source.chat_template, date.today().isoformat())
    policy = fabric.to_device(load_model(source, dtype=dtype))
    context, turns = policy.max_seq_length, []
    lines = [args.prompt] if args.prompt else iter(lambda: input("> "), "")
    with contextlib.suppress(EOFError):  # Ctrl-D
        for i, line in enumerate(lines):
            turns.append({"role": "user", "content": line})
            by_template = bool(tokenizer.template) and not args.plain
            # without a template the last turn alone
            record = Record(turns if by_template else line, [])
            texts = tokenizer.render(record, by_template)
            ((ids, _),) = tokenizer.encode_all([texts], by_template)
            refuse_unless(
                0 < len(ids) < context,
                f"prompt: from 1 to {context - 1} tokens fit this model, got {len(ids)}",
            )
            max_new = args.max_new_tokens or min(256, context - len(ids))
            prompts = [np.array(ids, "int32")]
            (ids,) = generate(fabric, policy, prompts, tokenizer, args, max_new, args.seed + i)
            turns.append(
                {"role": "assistant", "content": read_answer(tokenizer, ids, args.stop).text}
            )
            print(turns[-1]["content"])


if __name__ == "__main__":
    run_cli(main)

"""Sample from a policy, batched, with a key/value cache; and talk to a run.

    python generate.py --model out/<run> --prompt "sort: pear fig apple ="
    python generate.py --model out/<run>                           # a conversation
    python generate.py --model out/<run> --prompts prompts.jsonl   # answers to a file of prompts, into answers.jsonl

Shape letters:

    A  answers of a call, one for each prompt
    B  answers of the A that are sampled at once
    Y  new tokens of an answer, at most
    V  vocabulary
    K  the likeliest tokens, among which top_k and top_p choose
    X  tokens of the longest prompt with its answer, at most
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt
from lightning.fabric import Fabric
from torch.distributed.fsdp import FSDPModule
from transformers import RepetitionPenaltyLogitsProcessor

from attention import KVCache
from checks import sampling_faults
from infra.console import BadInput, advance, progress, run_cli, say
from infra.devices import multiplies_bfloat16, prepare_machine, reduce_number, to_device
from infra.files import as_lines, write_whole
from infra.parse import parse_command
from infra.seeds import mixed
from infra.settings import Sampling, refuse_unless, split_commas
from models.hub import find_model
from models.load import load_model
from models.lora import merge_for_sampling
from packing import pack
from records.forms import Record, as_turns, understand_record
from records.ratings import prompt_key
from records.sources import collect, decoded_records
from records.tokenizer import Tokenizer

# Answers are searched for stop texts at every so many tokens: at each one a GPU would wait for the search.
SEARCH_INTERVAL = 4

# ---- one token ----------------------------------------------------------------------------------


def choose_token(logits_BV: torch.Tensor, u_B: torch.Tensor, args: Sampling) -> torch.Tensor:
    """The next token (B,) of each row: the likeliest at temperature 0, else the first whose cumulative probability is
    above the row's uniform number u. u is below 1, so there is one."""
    if args.temperature == 0:
        return logits_BV.argmax(-1)
    p_BV = (logits_BV.double() / args.temperature).softmax(-1)
    if args.top_k or args.top_p < 1:
        V = p_BV.shape[1]
        # the k tokens are taken by index, not by a threshold: in bfloat16 other logits may equal the k-th
        sorted_BK, token_BK = p_BV.topk(min(args.top_k or V, V))
        outside_BK = cumsum(sorted_BK) - sorted_BK >= args.top_p * sorted_BK.sum(-1, keepdim=True)
        p_BV = torch.zeros_like(p_BV).scatter(1, token_BK, sorted_BK.masked_fill(outside_BK, 0))
    cdf_BV = cumsum(p_BV)
    return (cdf_BV <= u_B[:, None] * cdf_BV[:, -1:]).sum(-1)


def cumsum(p_BV: torch.Tensor) -> torch.Tensor:
    """Cumulative sums of probabilities along the vocabulary.

    On a GPU sums of floats differ from call to call in their last bits. With --deterministic the probabilities are
    added as whole numbers, in units of 2^-53.
    """
    if torch.are_deterministic_algorithms_enabled():
        return (p_BV * 2**53).long().cumsum(-1).double() / 2**53
    return p_BV.cumsum(-1)


# ---- the policy while it samples ----------------------------------------------------------------


@contextlib.contextmanager
def ready_to_sample(fabric: Fabric, policy: torch.nn.Module, room: float) -> Iterator[None]:
    """Within this context the policy has adapters merged and autocast on. The blocks of a sharded policy stay gathered
    from one forward to the next if the whole policy takes at most `room` bytes. Otherwise each token gathers them
    again."""
    module = getattr(policy, "module", policy)
    matrix = torch.ones(1, 1, device=fabric.device)
    with fabric.autocast():
        dtype = (matrix @ matrix).dtype  # in which linear layers compute
    # autocast remembers the casts of weights until its outermost context ends: enter it once, not at every token
    with merge_for_sampling(module, dtype), fabric.autocast():
        blocks = [m for m in module.modules() if isinstance(m, FSDPModule) and m is not module]
        if sum(p.nbytes for p in module.parameters()) > room:
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
    fabric: Fabric,
    policy: torch.nn.Module,
    prompts: Sequence[np.ndarray],
    tokenizer: Tokenizer,
    args: Sampling,
    max_new: int,
    seed: int,
    before_token: Callable[[], None] = lambda: None,
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
    n = len(prompts)
    device = fabric.device
    slots = min(policy.max_seq_length, max(map(len, prompts)) + max_new)
    generators = [torch.Generator().manual_seed(mixed(seed, i)) for i in range(n)]
    u_AY = torch.stack([torch.rand(max_new, generator=generator) for generator in generators])
    memory = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 64e9
    room = fabric.broadcast(memory / 8)  # rank 0's, since all ranks take equally many prompts
    cache_room = args.cache_gb * 1e9 if args.cache_gb else room
    with fabric.autocast():
        rows = max(1, min(args.batch_size, int(cache_room / policy.cache_bytes(slots))))

    wave = rows * fabric.world_size  # the prompts that all ranks sample at once
    all_answers = {}
    with ready_to_sample(fabric, policy, room):
        for start in range(0, n, wave):
            end = min(start + wave, n)
            numbers = list(range(start + fabric.global_rank, end, fabric.world_size))
            # a rank without a prompt answers the first one once more, so that collectives match; rank 0's answer counts
            numbers = numbers or [0]
            batch = [prompts[i] for i in numbers]
            answers = sample_batch(
                fabric, policy, batch, u_AY[numbers], tokenizer, args, slots, before_token
            )
            all_answers |= dict(zip(numbers, answers))
    for rank in range(fabric.world_size):
        all_answers |= fabric.broadcast(all_answers, rank)
    return [all_answers[i] for i in range(n)]


def sample_batch(
    fabric: Fabric,
    policy: torch.nn.Module,
    prompts: Sequence[np.ndarray],
    u_BY: torch.Tensor,
    tokenizer: Tokenizer,
    args: Sampling,
    slots: int,
    before_token: Callable[[], None],
) -> list[list[int]]:
    """The answers to B prompts, sampled together. u_BY: a uniform random number for each token, on the CPU. slots: the
    most tokens of a prompt with its answer.

    It returns when all answers have ended on all ranks. A rank whose answers have ended repeats its last forward
    until then, so that collectives match. A single process waits for the device once a token.
    """
    device = fabric.device
    max_new = u_BY.shape[1]
    # a config may name an end that the model has no logit of
    stops = [i for i in tokenizer.stops if i < policy.config.padded_vocab_size]
    stops_S = to_device(torch.tensor(stops, dtype=torch.long), device)
    answers = [[] for _ in prompts]
    limits = [min(max_new, slots - len(prompt)) for prompt in prompts]  # tokens of each answer
    # pack leaves a completion's last token out of the inputs: with completions of one token, only prompts remain
    packed = pack(prompts, [(np.zeros(1, int),)] * len(prompts)).to(device)
    cache = KVCache(packed, slots)
    number_of_row = list(range(len(prompts)))  # which answer each row of the cache has
    going_on = number_of_row  # the rows whose answers have not ended
    for y in range(max_new):
        before_token()
        logits_BV = policy(cache)
        if going_on:
            if args.repetition_penalty != 1:
                texts = [[*prompts[i], *answers[i]] for i in number_of_row]
                logits_BV = penalise_repetition(logits_BV, texts, slots, args.repetition_penalty)
            if y < args.min_new_tokens:
                logits_BV.index_fill_(1, stops_S, -torch.inf)
            new_B = choose_token(logits_BV, to_device(u_BY[number_of_row, y], device), args)
            for i, token in zip(number_of_row, new_B.tolist()):
                answers[i].append(token)
            going_on = [
                row
                for row, i in enumerate(number_of_row)
                if not has_ended(answers[i], limits[i], tokenizer, args.stop)
            ]
            advance(fabric.world_size * (len(number_of_row) - len(going_on)))
        if not reduce_number(len(going_on), "sum", device):
            break
        if going_on:
            if len(going_on) < len(number_of_row):
                number_of_row = [number_of_row[row] for row in cache.keep(going_on)]
            token_B = torch.tensor([answers[i][-1] for i in number_of_row])
            positions = [len(prompts[i]) + y for i in number_of_row]
            position_B = to_device(torch.tensor(positions), device)
            cache.at(to_device(token_B, device), position_B, max(positions))
    for ids in answers:
        # the tokens that were sampled after the stop text, before it was searched for
        while len(ids) > 1 and has_stop_text(tokenizer, ids[:-1], args.stop):
            ids.pop()
    return answers


def penalise_repetition(
    logits_BV: torch.Tensor, texts: list[list[int]], slots: int, penalty: float
) -> torch.Tensor:
    """The logits with those of the tokens in each row's text (its prompt and its answer so far) made smaller."""
    # each text is repeated up to one length, which changes nothing about which tokens it has
    rows = [np.resize(ids, slots) for ids in texts]
    text_BX = to_device(torch.tensor(np.stack(rows)).long(), logits_BV.device)
    return RepetitionPenaltyLogitsProcessor(penalty)(text_BX, logits_BV)


def has_ended(ids: list[int], limit: int, tokenizer: Tokenizer, stop: Sequence[str]) -> bool:
    """Whether an answer has ended after its last token: by EOS, at its limit of tokens, or by a stop text."""
    if ids[-1] in tokenizer.stops or len(ids) >= limit:
        return True
    is_searched = len(ids) % SEARCH_INTERVAL == 0
    return is_searched and has_stop_text(tokenizer, ids, stop)


def has_stop_text(tokenizer: Tokenizer, ids: list[int], stop: Sequence[str]) -> bool:
    """Whether one of the stop texts, which may be special tokens, is in the text of these ids."""
    if not stop:
        return False
    text = tokenizer.decode(ids, special_tokens=True)
    return any(stop_text in text for stop_text in stop)


def read_answer(tokenizer: Tokenizer, ids: list[int], stop: Sequence[str] = ()) -> tuple[str, bool]:
    """The text of an answer, without special tokens and up to its first stop text; and whether the answer was cut,
    that is, ended at the length limit."""
    has_end = ids[-1] in tokenizer.stops
    ids = ids[:-1] if has_end else ids
    text = tokenizer.decode(ids, special_tokens=True, is_answer=True)
    starts = [text.find(stop_text) for stop_text in stop if stop_text in text]
    if not starts:
        return tokenizer.decode(ids, is_answer=True), not has_end
    text = text[: min(starts)]
    for token in set(ids):
        if not tokenizer.decode([token]):  # a special token
            text = text.replace(tokenizer.decode([token], special_tokens=True), "")
    return text, False


# ---- a model that is asked ------------------------------------------------------------------------


class AskedModel:
    """A model on one device, as generate.py and rate.py ask it."""

    def __init__(self, name: str, plain: bool, chat_template_kwargs: str | None):
        """plain: the chat template is left aside. Raises BadInput."""
        source = find_model(name)
        prepare_machine()
        self.fabric = Fabric(devices=1)
        on_gpu = self.fabric.device.type == "cuda"
        in_bfloat16 = on_gpu and multiplies_bfloat16(self.fabric.device)
        dtype = torch.bfloat16 if in_bfloat16 else torch.float32
        today = date.today().isoformat()
        self.tokenizer = Tokenizer(source, None, today, chat_template_kwargs)
        self.policy = self.fabric.to_device(load_model(source, dtype=dtype))
        self.longest_prompt = self.policy.max_seq_length - 1
        self.by_template = bool(self.tokenizer.template) and not plain
        if self.by_template:
            self.tokenizer.end_as_the_template_does()

    def encode(self, record: Record, advice: str = "") -> np.ndarray:
        """The token ids of a record's prompt. advice: what to do if they are too many. Raises BadInput."""
        texts = self.tokenizer.render(record, self.by_template)
        ((ids, _),) = self.tokenizer.encode_all([texts], self.by_template)
        refuse_unless(
            0 < len(ids) <= self.longest_prompt,
            f"prompt: from 1 to {self.longest_prompt} tokens fit this model, got {len(ids)}{advice}",
        )
        return np.array(ids)

    def answers(
        self,
        prompts: list[np.ndarray],
        args: Sampling,
        seed: int,
        before_token: Callable[[], None] = lambda: None,
    ) -> list[tuple[str, bool]]:
        """The text of an answer to each prompt, and whether it was cut: see `generate` and read_answer."""
        answers = generate(
            self.fabric,
            self.policy,
            prompts,
            self.tokenizer,
            args,
            args.max_new_tokens,
            seed,
            before_token,
        )
        return [read_answer(self.tokenizer, ids, args.stop) for ids in answers]


def read_prompts(source: str, by_template: bool, extra: Sequence[str] = ()) -> dict[str, Record]:
    """file:line -> record, for each distinct prompt of the records, in their order. For a chat template a text becomes
    a turn of the user. extra: fields that each record must have. Raises BadInput."""
    records: dict[str, Record] = {}
    known = set()
    faults: list[str] = []
    for where, raw in decoded_records(source, faults):
        with collect(faults, where):
            record = understand_record(raw, "prompts", extra)
            if by_template:
                record = record._replace(prompt=as_turns(record.prompt))
            refuse_unless(
                by_template or isinstance(record.prompt, str),
                "prompt: the model has no chat template",
            )
            key = prompt_key(record.prompt)
            if key not in known:
                known.add(key)
                records[where] = record
    if faults:
        raise BadInput("\n".join(faults[:20]))
    refuse_unless(records, f"prompts: {source}: no records")
    return records


# ---- the command --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ask(Sampling):
    """python generate.py --model out/<run> asks a run, or any model that kto.py takes: one question (--prompt),
    those of a file (--prompts), or a conversation."""

    model: str
    """A run's folder, its `final`, a checkpoint, or any folder or id that kto.py takes."""
    prompt: str = ""
    """What to answer, through the chat template if there is one (with today's date where it prints one).
    Default: a conversation, turn by turn, until an empty line or Ctrl-D."""
    prompts: str | None = None
    """Records whose prompts are answered into the file --out, in any form that online.py reads; a text goes
    through the chat template, too."""
    out: str = "answers.jsonl"
    """With --prompts: the file of the answers, a line {"prompt", "completion", "cut"} each; cut: the answer ended at
    max_new_tokens. With a "label" of yours in each line kto.py learns from it. It is written after each batch; the same
    command goes on after the answers that are there."""
    extra: str | None = None
    """With --prompts: fields of the records that are copied to the lines of their answers, such as source,solution."""
    num_generations: PositiveInt = 1
    """With --prompts: answers to each prompt."""
    max_new_tokens: PositiveInt = 256
    """Longest answer in tokens; less where the context ends."""
    plain: bool = False
    """true: leave the chat template aside, as for a run on plain records."""
    chat_template_kwargs: str | None = None
    """As data.chat_template_kwargs of the run that trained the model: enable_thinking=false."""
    seed: NonNegativeInt = 1
    """An answer draws from it; turn number i of a conversation from seed + i."""


def talk(model: AskedModel, args: Ask) -> None:
    """Answer args.prompt, or hold a conversation."""
    turns = []
    lines = [args.prompt] if args.prompt else iter(lambda: input("> "), "")
    with contextlib.suppress(EOFError):  # Ctrl-D
        for i, line in enumerate(lines):
            turns.append({"role": "user", "content": line})
            # without a template the model reads only the last turn
            ids = model.encode(Record(turns if model.by_template else line, []))
            ((text, _),) = model.answers([ids], args, args.seed + i)
            turns.append({"role": "assistant", "content": text})
            print(text)


def answer_file(model: AskedModel, args: Ask) -> None:
    """Answer the prompts of args.prompts into args.out. Raises BadInput."""
    prompts: list[np.ndarray] = []  # of each answer
    lines: list[dict] = []  # what its line holds beside the answer
    faults: list[str] = []
    records = read_prompts(args.prompts, model.by_template, split_commas(args.extra))
    for where, record in records.items():
        with collect(faults, where):
            prompts += [model.encode(record)] * args.num_generations
            line = {"prompt": record.prompt, **record.extra}
            if record.tools:
                line["tools"] = record.tools
            if record.template_kwargs:
                line["chat_template_kwargs"] = record.template_kwargs
            lines += [line] * args.num_generations
    out = Path(args.out).expanduser()
    done = [row for _, row in decoded_records(str(out), faults)] if out.exists() else []
    if faults:
        raise BadInput("\n".join(faults[:20]))
    for i, row in enumerate(done):
        is_next = i < len(lines) and row.get("prompt") == lines[i]["prompt"]
        refuse_unless(
            is_next, f"out: {out}:{i + 1}: an answer to another prompt: give another --out"
        )
    if done:
        say(f"{len(done):,} of {len(lines):,} answers are in {out} already")
    with progress("answers", len(lines) - len(done)):
        for start in range(len(done), len(lines), args.batch_size):
            batch = slice(start, start + args.batch_size)
            answers = model.answers(prompts[batch], args, mixed(args.seed, start))
            for line, (text, cut) in zip(lines[batch], answers):
                done.append({**line, "completion": text, "cut": cut})
            write_whole(out, as_lines(done))
    n_cut = sum(row["cut"] for row in done)
    say(f"{len(done):,} answers to {len(records):,} prompts in {out}, {n_cut:,} of them cut")


def main(argv: list[str] | None = None) -> None:
    args = parse_command(Ask, __doc__, sys.argv[1:] if argv is None else argv)
    faults = sampling_faults(args, args.max_new_tokens)
    if args.prompt and args.prompts:
        faults.append("prompts: not with --prompt")
    if args.num_generations > 1 and args.temperature == 0:
        faults.append("num_generations: at temperature 0 all answers to a prompt are equal")
    out = Path(args.out).expanduser()
    if out.suffix != ".jsonl" or not out.absolute().parent.is_dir():
        faults.append(f"out: {out}: expected a .jsonl file in a folder that is there")
    if faults:
        raise BadInput("\n".join(faults))
    model = AskedModel(args.model, args.plain, args.chat_template_kwargs)
    if args.prompts:
        answer_file(model, args)
    else:
        talk(model, args)


if __name__ == "__main__":
    run_cli(main)

"""Sample from a policy, batched, with a key/value cache; and talk to a run.

    python generate.py --model out/<run> --prompt "sort: pear fig apple ="
    python generate.py --model out/<run>        # a conversation

Shape letters: B rows that are being answered, P prompts, T new tokens, V vocabulary.
"""

from runs.errors import BadInput, run_cli  # noqa: I001  first: for Ctrl-C
import math
import sys
from dataclasses import dataclass, field

import numpy as np
import torch

from data import to_device, pack
from model import KVCache
from runs.devices import all_reduce, free_memory, keep_gathered
from runs.cli import parse_command
from records.forms import Fault, Record
from runs.settings import Sampling
from records.tokenizer import Tokenizer


def choose_token(logits_BV, u_B, args: Sampling):
    """The next token of each row: greedy, or where the cumulative probability passes the row's own
    uniform number."""
    if args.temperature == 0:
        return logits_BV.argmax(-1)
    return _sample(logits_BV, u_B, args)


def cumsum(x_BV, exact: bool):
    """Sums along the vocabulary. A GPU's own differ from call to call in their last bits; `exact`
    ones are products with triangles of ones, over blocks and within them."""
    if not exact:
        return x_BV.cumsum(-1)
    B, V = x_BV.shape
    x_BMN = torch.nn.functional.pad(x_BV, (0, -V % 256)).view(B, -1, 256)
    within_BMN = x_BMN @ torch.ones(256, 256, dtype=x_BV.dtype, device=x_BV.device).triu()
    total_BM = within_BMN[..., -1]
    M = total_BM.shape[1]
    before_BM = total_BM @ torch.ones(M, M, dtype=x_BV.dtype, device=x_BV.device).triu(1)
    return (within_BMN + before_BM[..., None]).view(B, -1)[:, :V]


def _sample(logits_BV, u_B, args: Sampling):
    exact = logits_BV.is_cuda and torch.are_deterministic_algorithms_enabled()
    p_BV = (logits_BV.double() / args.temperature).softmax(-1)
    if args.top_k:  # k of them, also where bfloat16 logits tie
        top = p_BV.topk(min(args.top_k, p_BV.shape[1]))
        p_BV = torch.zeros_like(p_BV).scatter(1, top.indices, top.values)
    if args.top_p < 1:
        ranked, index = p_BV.sort(-1, descending=True)
        most = args.top_p * ranked.sum(-1, keepdim=True)
        outside = cumsum(ranked, exact) - ranked >= most
        p_BV = p_BV.masked_fill(outside.gather(-1, index.argsort(-1)), 0)
    cdf_BV = cumsum(p_BV, exact)
    token_B = torch.searchsorted(cdf_BV, u_B[:, None] * cdf_BV[:, -1:], right=True)[:, 0]
    return token_B.clamp(max=p_BV.shape[1] - 1)


def penalise(logits_BV, seen_BV, penalty: float):
    """Repetition penalty (Keskar et al. 2019) on tokens that are there already."""
    lower = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return torch.where(seen_BV, lower, logits_BV)


@torch.no_grad()
def generate(
    fabric, policy, prompts: list, tokenizer: Tokenizer, args: Sampling, max_new: int, seed: int
) -> list[list[int]]:
    """Completions of id arrays `prompts`, each with its EOS if it came to one; the same list on
    every rank.

    Row i draws from a generator of its own, so an answer depends on (seed, i) and, but for
    rounding, on no other row. Ranks take prompts in turn and run equally many forwards: a sharded
    policy would hang otherwise.
    """
    was_training = policy.training
    policy.eval()
    sampler = _Sampler(fabric, policy, tokenizer, args, seed)
    max_new = min(max_new, sampler.context)
    answer_PT = torch.full((len(prompts), max_new), -1, device=fabric.device)  # -1: nothing
    mine = range(fabric.global_rank, len(prompts), fabric.world_size)
    most = math.ceil(len(prompts) / fabric.world_size)
    rows = sampler.rows_at_once(prompts, max_new)
    # autocast casts a weight once within its outermost context: here, not at every token
    with fabric.autocast(), keep_gathered(policy, fabric.device):
        for at in range(0, most, rows):
            sampler.answer(prompts, list(mine[at : at + rows]), answer_PT)
    policy.train(was_training)
    # one rank wrote a row; elsewhere it is -1 + 1 = 0
    whole_PT = all_reduce(answer_PT + 1) - 1
    return [[i for i in row if i >= 0] for row in whole_PT.tolist()]


class _Sampler:
    def __init__(self, fabric, policy, tokenizer: Tokenizer, args: Sampling, seed: int):
        self.fabric, self.policy, self.tokenizer = fabric, policy, tokenizer
        self.module = getattr(policy, "module", policy)
        self.args, self.seed = args, seed
        self.stops = torch.tensor(tokenizer.stops, device=fabric.device)
        self.context = self.module.max_seq_length

    def rows_at_once(self, prompts, max_new: int) -> int:
        """batch_size, or fewer where keys and values would take more than cache_gb; the same on
        every rank."""
        slots = min(self.context, max(map(len, prompts), default=1) + max_new)
        gb, device = self.args.cache_gb, self.fabric.device
        room = gb * 1e9 if gb else free_memory(device) / 2
        fit = int(room / self.module.cache_bytes(slots))
        fit = torch.tensor(max(1, min(self.args.batch_size, fit)), device=device)
        return int(all_reduce(fit, "min"))

    def answer(self, prompts, index: list[int], answer_PT) -> None:
        """One batch of rows, until all have ended on all ranks. A rank without rows runs a dummy
        row, so that collectives match. A token waits for the device once."""
        args, device, max_new = self.args, self.fabric.device, answer_PT.shape[1]
        dummy = not index
        batch = [prompts[i] for i in index] or [prompts[0][:1]]
        u_BT = to_device(
            torch.stack([_uniform(self.seed, i, max_new) for i in index or [0]]), device
        )
        # a completion's last token is never an input: with one token only prompts are packed
        packed = pack(batch, [(np.zeros(1, int),)] * len(batch)).to(device)
        lengths = list(packed.sizes)
        length_B = to_device(torch.tensor(lengths), device)
        room_B = torch.clamp(self.context - length_B, max=max_new)  # so many more tokens fit
        cache = KVCache(packed, min(self.context, max(lengths) + max_new))
        row_B, seen_BV = to_device(torch.tensor(index or [-1]), device), None
        for t in range(max_new):
            logits_BV = self.policy(cache)
            if args.repetition_penalty != 1:
                if seen_BV is None:
                    seen_BV = torch.zeros_like(logits_BV, dtype=torch.bool)
                    seen_BV[packed.example_N, packed.token_N] = True
                logits_BV = penalise(logits_BV, seen_BV, args.repetition_penalty)
            if t < args.min_new_tokens:
                logits_BV[:, self.stops] = -torch.inf
            new_B = choose_token(logits_BV, u_BT[:, t], args)
            if seen_BV is not None:
                seen_BV[torch.arange(len(new_B), device=device), new_B] = True
            if not dummy:
                answer_PT[row_B, t] = torch.where(t < room_B, new_B, -1)
            done_B = torch.isin(new_B, self.stops) | (t + 1 >= room_B)
            if args.stop and not dummy:
                done_B = done_B | self._stopped(answer_PT[row_B, : t + 1])
            keep = [i for i, done in enumerate(done_B.tolist()) if not done]
            if self._all_ranks(dummy or not keep):
                break
            if not keep:  # all have ended here, not elsewhere: one row goes on unread
                keep, dummy = [0], True
            if len(keep) < len(new_B):
                order = cache.keep(keep)
                lengths, keep_B = (
                    [lengths[i] for i in order],
                    to_device(torch.tensor(order), device),
                )
                u_BT, room_B, length_B = u_BT[keep_B], room_B[keep_B], length_B[keep_B]
                row_B, new_B = row_B[keep_B], new_B[keep_B]
                seen_BV = None if seen_BV is None else seen_BV[keep_B]
            last = cache.slots - 1
            cache.at(new_B, (length_B + t).clamp(max=last), min(max(lengths) + t, last))

    def _stopped(self, answer_BT):
        """Whether a row's text holds one of the stop texts."""
        texts = [self.tokenizer.decode([i for i in ids if i >= 0]) for ids in answer_BT.tolist()]
        stopped = [any(stop in text for stop in self.args.stop) for text in texts]
        return torch.tensor(stopped, device=answer_BT.device)

    def _all_ranks(self, mine: bool) -> bool:
        if self.fabric.world_size == 1:
            return mine
        votes = torch.tensor(float(mine), device=self.fabric.device)
        return bool(all_reduce(votes) == self.fabric.world_size)


def _uniform(seed: int, i: int, n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed((seed * 1000003 + i) % 2**63)
    return torch.rand(n, generator=generator).double()


def completion_text(tokenizer: Tokenizer, ids: list[int], stop: list[str] = ()) -> str:
    """A completion as text: without its EOS, up to the first stop text."""
    whole = tokenizer.decode(ids[:-1] if ids and ids[-1] in tokenizer.stops else ids)
    found = [at for x in stop if (at := whole.find(x)) >= 0]
    return whole[: min(found, default=len(whole))]


# ---- the command --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask(Sampling):
    """python generate.py --model out/<run> [--prompt TEXT ...] talks to a run, or to any model that
    kto.py takes."""

    model: str = ""
    """A run's folder, its `final`, a checkpoint, or any folder or id that kto.py takes."""
    prompt: list[str] = field(default_factory=list)
    """What to answer; may be given several times. Without one: a conversation, turn by turn. Goes
    through the chat template if there is one."""
    system: str = ""
    """The system's turn, before the first of the user's."""
    plain: bool = False
    """Leave the chat template aside."""
    seed: int = 1
    """Prompt number i draws from (seed, i), turn number i of a conversation from (seed + i, 0)."""


def parse_ask(argv=None) -> Ask:
    given, joined = sys.argv[1:] if argv is None else argv, []
    for a in given:  # --prompt may be given several times: jsonargparse writes --prompt+=
        if joined[-1:] == ["--prompt"]:
            joined[-1] = f"--prompt+={a}"
        else:
            joined.append(a.replace("--prompt=", "--prompt+=", 1))
    args = parse_command(Ask, __doc__, joined)
    args.validate("generate")
    if not args.model:
        raise BadInput("model: required: a run's folder, or any model that kto.py takes")
    return args


class Chat:
    """Answers of one model."""

    def __init__(self, args: Ask):
        from lightning.fabric import Fabric

        import model
        from hub.folders import fetch_model

        folder, self.args = fetch_model(args.model), args
        self.fabric = Fabric(devices=1)
        dtype = torch.bfloat16 if self.fabric.device.type == "cuda" else torch.float32
        self.tokenizer = Tokenizer(folder)
        self.policy = self.fabric.to_device(model.load_model(folder, dtype=dtype))
        self.by_template = bool(self.tokenizer.template) and not args.plain

    def ids(self, turns: list[dict]):
        """The token ids of a dialogue that ends with the user's turn."""
        if not self.by_template:
            (ids,) = self.tokenizer.encode([turns[-1]["content"]])
            ids = self.tokenizer.prompt(ids)
        else:  # a template writes its own BOS
            system = [{"role": "system", "content": self.args.system}] if self.args.system else []
            try:
                shown, *_ = self.tokenizer.render(Record(system + turns, [], None))
            except Fault as e:
                raise BadInput(f"prompt: {e}") from None
            (ids,) = self.tokenizer.encode([shown])
        context = self.policy.max_seq_length
        if not 0 < len(ids) < context:
            why = f"from 1 to {context - 1} tokens fit this model, got {len(ids)}"
            raise BadInput(f"prompt: {why}")
        return np.array(ids, dtype="int32")

    def answers(self, dialogues: list[list[dict]], seed: int) -> list[str]:
        args, prompts = self.args, [self.ids(turns) for turns in dialogues]
        room = self.policy.max_seq_length - max(map(len, prompts))
        new = args.max_new_tokens or min(256, room)
        said = generate(self.fabric, self.policy, prompts, self.tokenizer, args, new, seed)
        return [completion_text(self.tokenizer, ids, args.stop) for ids in said]

    def talk(self) -> None:
        """A conversation with the terminal, until its end (Ctrl-D)."""
        history, n = [], 0
        print("/clear forgets the conversation; Ctrl-D ends it")
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                return print()
            if line == "/clear":
                history = []
            elif line:
                turns = history * self.by_template + [{"role": "user", "content": line}]
                try:
                    (answer,) = self.answers([turns], self.args.seed + n)
                except BadInput as e:  # too long, say: the conversation need not end
                    print(f"{e}; /clear forgets what was said before")
                    continue
                print(answer)
                history, n = [*turns, {"role": "assistant", "content": answer}], n + 1


def main(argv=None) -> None:
    args = parse_ask(argv)
    chat = Chat(args)
    if not args.prompt:
        return chat.talk()
    answers = chat.answers([[{"role": "user", "content": p}] for p in args.prompt], args.seed)
    for prompt, answer in zip(args.prompt, answers):
        print(f"{prompt}{answer}" if len(answers) > 1 else answer)


if __name__ == "__main__":
    run_cli(main)

"""KTO: learn from single thumbs up and down (Ethayarajh et al. 2024, arXiv 2402.01306).

    python kto.py                                  # the demo: two cores, half a minute
    python kto.py --config config/gpt2.yaml        # GPT-2 on rated data
    python kto.py --help                           # every setting

Reading order: settings, the objective (kto_loss is the idea), the reference, THE loop, assembling, main. To try an
idea, copy this file and change kto_loss.

Where we differ from the paper and its ports: z is one number for the whole optimizer step, over all micro-batches and
devices; a mismatched completion never comes from an equal prompt; the reference is checked before the first step.

Shape letters: G examples of a step, B of a micro-batch, K completions of a prompt, N packed tokens, V vocabulary.
"""

import contextlib
import copy
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from lightning.fabric import Fabric
from safetensors.torch import load_file

import checkpoint
import model
from data import BadInput, Batch, Example, Failed, Micro, Rows, Tokenizer, cut, deal, mismatched, order, splits
from devices import Stop, guarded, launch, leave
from optim import Plan, clip, lr_at, make_optimizer, make_plan, steps_of
from reference import Reference, Remembered
from settings import DEFAULT_TOKENS, Run, parse
from tell import Tell, auc, mean, say, verdicts, write_json

# ---- settings (the shared ones are in settings.py) ------------------------------------------------------------------


@dataclass
class KTO:
    """The objective."""

    loss: str = "kto"
    """kto, or apo_zero_unpaired (arXiv 2408.06266: z = 0, no mismatched pairs)."""
    beta: float = 0.1
    """Strength of the pull back to the reference; larger keeps the policy closer."""
    desirable_weight: float = 1.0
    """Weight of a thumbs up (the paper's lambda_D). The table before training says what the paper's rule would give."""
    undesirable_weight: float = 1.0
    """Weight of a thumbs down (lambda_U)."""
    average_logps: bool = False
    """Divide log-probabilities by the number of scored tokens, in z too."""
    preference_loss_weight: float = 1.0
    """Weight of the loss above."""
    sft_loss_weight: float = 0.0
    """Weight of the negative log-likelihood of the desirable completions."""
    sft_average_logps: bool | None = None
    """Divide that by its tokens. Default: as average_logps."""

    def refuse(self):
        if self.loss not in ("kto", "apo_zero_unpaired"):
            raise BadInput(f"kto.loss: expected kto or apo_zero_unpaired, got {self.loss}")
        if not self.beta > 0 or min(self.desirable_weight, self.undesirable_weight) < 0:
            raise BadInput("kto: beta is above 0, class weights are at least 0")
        if min(self.preference_loss_weight, self.sft_loss_weight) < 0:
            raise BadInput("kto: preference_loss_weight and sft_loss_weight are at least 0")
        if self.preference_loss_weight == self.sft_loss_weight == 0:
            raise BadInput("kto: preference_loss_weight and sft_loss_weight are both 0: nothing to learn")


@dataclass
class Settings(Run):
    kto: KTO = field(default_factory=KTO)

    def refuse(self):
        super().refuse()
        self.kto.refuse()
        if self.kto.loss == "kto" and self.batch_size < 2:
            raise BadInput("batch_size: kto needs at least 2: a mismatched pair takes another example's completion")


# ---- the objective: what to draw, what to look at, what to minimise, what to tell -----------------------------------


class Base(NamedTuple):
    """What a look found, by slot: values of this rank's slots, zeros elsewhere; z is everyone's."""

    ref_logp_GK: torch.Tensor
    z: torch.Tensor
    columns: dict[str, torch.Tensor]


class Objective(NamedTuple):
    """All that the loop needs to know of an algorithm."""

    kind: str  # the records it learns from: rated, paired or demos
    batch: Callable[[list[Example]], Batch]
    look: Callable[..., Base]  # (fabric, policy, reference, batch, micros), without gradients
    loss: Callable[..., tuple[torch.Tensor, dict]]  # (logp_BK, length_BK, batch, slots, base) -> loss_B, columns
    report: Callable[..., dict]  # (columns of G values, base) -> the metrics of a line
    at_start: Callable[[Batch], float]  # the preference loss where policy and reference are equal
    passes: tuple[tuple[int, int], ...]  # least forward passes over (prompt, completion): full, LoRA, the reference's
    plan: Callable[[Run, int], Plan] = make_plan  # (settings, training examples) -> steps
    rounds: Callable[..., Iterator] = lambda job, plan: [(job.examples["train"], plan)]  # (Job, Plan) -> their examples
    validation: "Objective | None" = None  # None: as in training


class Job(NamedTuple):
    """What a round may use."""

    fabric: Fabric
    s: Run
    policy: torch.nn.Module
    reference: "Reference"
    optimizer: torch.optim.Optimizer
    tokenizer: Tokenizer
    examples: dict[str, list[Example]]
    out: Path
    state: dict
    tell: Tell


def kto_loss(logratio_B, z, desirable_B, args: KTO):
    """Eq. 8 of the paper: how far a completion's log-ratio is on the right side of the baseline z. -> (B,)"""
    sign_B = 2 * desirable_B.to(logratio_B.dtype) - 1
    weight_B = torch.where(desirable_B, args.desirable_weight, args.undesirable_weight)
    return weight_B * (1 - torch.sigmoid(args.beta * sign_B * (logratio_B - z)))


def kto_objective(args: KTO, score_prompt: bool = False) -> Objective:
    pairs = args.loss == "kto"  # apo_zero_unpaired is the same loss at z = 0
    sft_average = args.average_logps if args.sft_average_logps is None else args.sft_average_logps

    def batch(examples: list[Example]) -> Batch:
        desirable_G = torch.tensor([e.label for e in examples])
        return Batch(examples, mismatched(examples) if pairs else None, desirable_G, score_prompt)

    def look(fabric, policy, reference, batch: Batch, micros: list[Micro]) -> Base:
        """The reference's log-probs, and z: the mean over the step of r on mismatched pairs, then the clamp."""
        ref_logp_GK = torch.zeros(len(batch.examples), 1, device=fabric.device)
        kl_G, counts_G = torch.zeros(2, len(batch.examples), device=fabric.device, dtype=torch.float64)
        for slots, weight in micros:
            rows = batch.rows(slots, borrowed=pairs).to(fabric.device)
            ref_logp_BK = reference(rows)
            if pairs:
                logp_B1 = policy(batch.rows(slots, own=False, borrowed=True).to(fabric.device))
                kl_B = (logp_B1[:, 0] - ref_logp_BK[:, 1]) / (rows.length_BK[:, 1] if args.average_logps else 1)
            if weight:
                ref_logp_GK[slots] = ref_logp_BK[:, :1]
                if pairs:
                    has_pair_B = torch.tensor([batch.partners[s] >= 0 for s in slots], device=fabric.device).double()
                    kl_G[slots], counts_G[slots] = kl_B.double() * has_pair_B, has_pair_B
        total, n = fabric.all_reduce(torch.stack([kl_G.sum(), counts_G.sum()]), reduce_op="sum")
        z = (total / n.clamp(min=1)).clamp(min=0).to(ref_logp_GK.dtype)
        return Base(ref_logp_GK, z, {"kl": kl_G, "kl_counts": counts_G})

    def loss(logp_BK, length_BK, batch: Batch, slots: list[int], base: Base):
        logp_B, length_B = logp_BK[:, 0], length_BK[:, 0]
        desirable_B = batch.desirable_G[slots].to(logp_B.device)
        logratio_B = (logp_B - base.ref_logp_GK[slots, 0]) / (length_B if args.average_logps else 1)
        loss_B = kto_loss(logratio_B, base.z, desirable_B, args)
        share = len(batch.examples) / max(1, int(batch.desirable_G.sum()))  # a mean over n_D, written as one over G
        sft_B = -logp_B / (length_B if sft_average else 1) * desirable_B * share
        total_B = args.preference_loss_weight * loss_B + args.sft_loss_weight * sft_B
        columns = {"loss": total_B, "preference_loss": loss_B, "sft_loss": sft_B}
        return total_B, columns | {"logratio": logratio_B, "logp": logp_B, "desirable": desirable_B}

    def report(columns: dict[str, torch.Tensor], base: Base) -> dict:
        good, r, kl, z = columns["desirable"] > 0, columns["logratio"], columns["kl"], base.z.item()
        sign = torch.where(good, 1.0, -1.0)
        n = int(columns["kl_counts"].sum())
        rewards = {"chosen": mean(args.beta * r[good]), "rejected": mean(args.beta * r[~good])}
        both = None not in rewards.values()
        kl = kl[columns["kl_counts"] > 0]
        return {
            "loss": mean(columns["loss"]),
            "preference_loss": mean(columns["preference_loss"]),
            "sft_loss": mean(columns["sft_loss"]),
            "kl": z if pairs else None,
            "kl/stderr": (kl.std() / math.sqrt(n)).item() if n > 1 else None,
            "kl/clamped": float(kl.mean() < 0) if n else None,
            "kl/pairs": n if pairs else None,
            **{f"rewards/{name}": value for name, value in rewards.items()},
            "rewards/margins": rewards["chosen"] - rewards["rejected"] if both else None,
            "rewards/mean": mean(args.beta * r),
            "rewards/std": (args.beta * r).std().item() if len(r) > 1 else None,
            "logps/chosen": mean(columns["logp"][good]),
            "logps/rejected": mean(columns["logp"][~good]),
            "accuracy": mean((sign * r > 0).double()),
            "accuracy/about_z": mean((sign * (r - z) > 0).double()),
            "auc": auc(r[good], r[~good]) if both else None,
        }

    def at_start(batch: Batch) -> float:
        n_D, G = int(batch.desirable_G.sum()), len(batch.examples)
        return (args.desirable_weight * n_D + args.undesirable_weight * (G - n_D)) / G / 2

    passes = ((4, 6), (3, 5), (1, 2)) if pairs else ((4, 4), (3, 3), (1, 1))
    return Objective("rated", batch, look, loss, report, at_start, passes)


# ---- the reference --------------------------------------------------------------------------------------------------


@torch.no_grad()
def check_start(fabric, policy, reference, objective: Objective, examples: list[Example]) -> None:
    """The reference is the model we start from: on the same Rows r is exactly 0, and the loss its known value."""
    policy.eval()
    batch, slots = objective.batch(examples), list(range(len(examples)))
    rows, K = batch.rows(slots, borrowed=batch.partners is not None).to(fabric.device), len(examples[0].completions)
    logp_BK, ref_logp_BK = policy(rows), reference(rows)
    policy.train()
    base = Base(ref_logp_BK[:, :K], torch.zeros((), device=fabric.device), {})
    _, columns = objective.loss(logp_BK[:, :K], rows.length_BK[:, :K], batch, slots, base)
    known, loss = objective.at_start(batch), columns["preference_loss"].mean()
    off = torch.stack([(logp_BK - ref_logp_BK).abs().max(), (loss - known).abs()]).double()
    r, error = fabric.all_reduce(off, reduce_op="sum").tolist()
    if not (r == 0 and error <= 1e-5 * max(1.0, abs(known))):
        raise Failed(
            f"step 0: policy and reference differ by {r:.3g} nats, the preference loss by {error:.3g} from its known "
            f"value {known:.6g}: the reference is not the model we start from"
        )
    fabric.print(f"step 0: policy and reference agree to the bit, preference loss {known:.6g}")


# ---- the loop -------------------------------------------------------------------------------------------------------


def gather(fabric, columns: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Columns of G values, each rank's slots filled, made whole. All talk but for z, gradient and stop flag."""
    whole = fabric.all_reduce(torch.stack([c.double() for c in columns.values()]), reduce_op="sum")
    return dict(zip(columns, whole.cpu()))


def fill(columns: dict, micro: Micro, values: dict, G: int) -> None:
    """Put a micro-batch's values in their slots. A filler only makes the columns, so that all ranks have the same."""
    for name, value in values.items():
        column_G = columns.setdefault(name, torch.zeros(G, device=value.device, dtype=torch.float64))
        if micro.weight:
            column_G[micro.slots] = value.detach().double()


def train(
    fabric, s: Run, objective: Objective, policy, reference, optimizer, examples, plan: Plan, start: int, tell, stop
):
    """Draw, look, learn, log. `tell` has what happens between steps (lines, validation, checkpoints). -> last step."""
    rank, world, G = fabric.global_rank, fabric.world_size, s.batch_size
    step = start
    for step in range(start + 1, plan.end + 1):
        began = time.perf_counter()
        # draw: the whole step's examples, the same on every rank
        batch = objective.batch(draw(s, examples, plan, step))
        micros, looks = (shares[rank] for shares in cuts(s, batch, world))

        # a step of one micro-batch is begun here: a look may then use its prompts' keys and values
        begun, seen = None, policy
        if len(micros) == len(looks) == 1:  # then so on all ranks, and both are all of this one's share
            rows, prompts = batch.rows(micros[0].slots).to(fabric.device), model.Prompts()
            begun, seen = policy(rows, prompts), partial(policy, prompts=prompts)

        # look, without gradients: the reference's log-probs, and the baseline of the whole step
        with torch.no_grad():
            base = objective.look(fabric, seen, reference, batch, looks)

        # learn: the sum of the losses over G, whatever the cut; gradients meet once, in the last backward
        columns = dict(base.columns)
        for m, micro in enumerate(micros):
            with fabric.no_backward_sync(policy, enabled=m < len(micros) - 1):
                if begun is None:
                    rows = batch.rows(micro.slots).to(fabric.device)
                logp_BK = policy(rows) if begun is None else begun
                loss_B, values = objective.loss(logp_BK, rows.length_BK, batch, micro.slots, base)
                fabric.backward(loss_B.sum() * (micro.weight * world / G))  # DDP and FSDP2 average over ranks
            fill(columns, micro, values, G)
        grad_norm = clip(fabric, policy, optimizer, s.optim.clip)
        refuse_nonfinite(fabric, step, grad_norm, columns, batch, base.z.item())
        lr = lr_at(step, plan, s.optim)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()

        # log
        line = None
        if step % s.log_interval == 0 or step == plan.end:
            line = objective.report(gather(fabric, columns), base)
            line |= {
                "grad_norm": grad_norm,
                "lr": lr,
                "epoch": (step - plan.begin) / plan.per_epoch,
                "samples": step * G,
            }
        tell.step(step, line, batch, time.perf_counter() - began)
        if stop.now(fabric):
            break
    return step


def draw(s: Run, examples: list[Example], plan: Plan, step: int) -> list[Example]:
    """The examples of a step: a slice of its epoch's order."""
    epoch, i = divmod(step - 1 - plan.begin, plan.per_epoch)
    epoch_order = order(len(examples), plan.begin + epoch, s.seed, s.data.shuffle)
    return [examples[j] for j in epoch_order[i * s.batch_size : (i + 1) * s.batch_size]]


def cuts(s: Run, batch: Batch, world: int) -> tuple[list[list[Micro]], list[list[Micro]]]:
    """Every rank's micro-batches to learn from, and to look at. Each rank knows all: all run equally many forwards."""
    tokens = s.micro_batch_tokens or (None if s.micro_batch_size else DEFAULT_TOKENS)
    looks = s.look_tokens or (tokens and 2 * tokens)
    own, both = ([batch.size(slot, b) for slot in range(len(batch.examples))] for b in (False, True))
    shares = deal(own, world, tokens is not None)
    learn = cut(own, world, s.micro_batch_size, tokens, shares)
    return learn, cut(both, world, None if looks else s.micro_batch_size, looks, shares)


def refuse_nonfinite(fabric, step: int, grad_norm: float, columns: dict, batch: Batch, z: float) -> None:
    """Before the optimizer moves. Norm and z are everyone's; a loss that is not finite shows in one of them."""
    if math.isfinite(grad_norm) and math.isfinite(z):
        return
    bad = (~gather(fabric, {"loss": columns["loss"]})["loss"].isfinite()).nonzero()[:, 0].tolist()
    names = ", ".join(batch.examples[i].where for i in bad[:8]) or "no single loss, only the gradient"
    raise Failed(f"step {step}: not finite (gradient norm {grad_norm}): {names}; the weights are untouched")


@torch.no_grad()
def validate(fabric, s: Run, objective: Objective, policy, reference, batch: Batch) -> dict:
    """A step without learning, over the whole split: one z for all of it, in file order, whatever the cut."""
    policy.eval()
    micros, looks = (shares[fabric.global_rank] for shares in cuts(s, batch, fabric.world_size))
    base = objective.look(fabric, policy, reference, batch, looks)
    columns = dict(base.columns)
    for micro in micros:
        rows = batch.rows(micro.slots).to(fabric.device)
        _, values = objective.loss(policy(rows), rows.length_BK, batch, micro.slots, base)
        fill(columns, micro, values, len(batch.examples))
    policy.train()
    return objective.report(gather(fabric, columns), base)


@torch.no_grad()
def remember(fabric, s: Run, reference: Remembered, objective: Objective, batches) -> None:
    """Ask the reference all that the run will ask, by the objective's own looks, so that it can leave."""

    def nobody(rows: Rows) -> torch.Tensor:
        return torch.zeros(rows.length_BK.shape, device=rows.token_N.device)

    for batch in batches:
        objective.look(fabric, nobody, reference, batch, cuts(s, batch, fabric.world_size)[1][fabric.global_rank])
    reference.leave()
    fabric.print(
        f"reference: {reference.asked:,} log-probs computed, {len(reference.known):,} known in {s.reference_cache}"
    )


# ---- assembling -----------------------------------------------------------------------------------------------------


def run(s: Run, objective: Objective, program: str) -> None:
    """From settings to a finished run: read, launch, load, check, train, export, judge."""
    folder = model.fetch(s.model)
    arguments, _, _ = model.read_config(folder)  # also refuses what could not be exported, before any work is done
    tokenizer = Tokenizer(folder, s.data.chat_template)
    examples = splits(s.data, tokenizer, objective.kind, arguments["block_size"], say)
    n = len(examples["train"])
    if n < s.batch_size:
        raise BadInput(f"{s.data.train}: {n} examples are fewer than batch_size={s.batch_size}")
    plan = objective.plan(s, n)
    rest = n - plan.per_epoch * s.batch_size
    say(f"{plan.total:,} steps of {s.batch_size}, {plan.per_epoch:,} an epoch, which leaves out {rest:,} of {n:,}")
    fabric = launch(s)
    killed_by = work(fabric, s, objective, program, folder, tokenizer, examples, plan)
    leave(fabric)  # only now that the model is gone
    if killed_by:
        raise SystemExit(128 + killed_by)


def work(fabric, s: Run, objective: Objective, program: str, folder: Path, tokenizer, examples, plan: Plan) -> int:
    """On every rank: load, check, train, export, judge. -> the signal that ended it early, or 0."""
    out, found = checkpoint.open_run(fabric, s, program, say)

    dtype = {"64-true": torch.float64, "bf16-true": torch.bfloat16}.get(s.precision, torch.float32)
    policy, frozen = model.load(folder, s.lora, dtype), None
    if tokenizer.n_vocab > policy.config.padded_vocab_size:
        raise BadInput(f"model: {s.model}: its tokenizer has {tokenizer.n_vocab} tokens, its weights fewer")
    if s.reference:
        other = model.fetch(s.reference, "reference")
        frozen = model.load(other, None, dtype)
        if not tokenizer.same(Tokenizer(other)) or frozen.config.padded_vocab_size != policy.config.padded_vocab_size:
            raise BadInput(f"reference: {s.reference}: another tokenizer or vocabulary than {s.model}")
    elif not s.lora.rank:
        frozen = copy.deepcopy(policy)
    marks = [model.fingerprint({n: p for n, p in m.named().items() if "lora_" not in n}) for m in (policy, frozen) if m]
    policy.recompute = s.activation_checkpointing
    if frozen is not None:  # DDP refuses a module that never trains; FSDP2 must shard it
        frozen.requires_grad_(False).eval()
        if s.precision == "bf16-mixed" and s.strategy != "fsdp":  # which wants one dtype
            model.hold_in_bfloat16(frozen)
        frozen = fabric.setup_module(frozen) if s.strategy == "fsdp" else fabric.to_device(frozen)
    torch.manual_seed(s.seed + 1000003 * fabric.global_rank)  # from here on ranks may draw differently (dropout)
    policy = fabric.setup_module(policy)
    optimizer = fabric.setup_optimizers(make_optimizer(s, policy))
    reference = Reference(fabric, policy, frozen)

    state = {"step": 0, "best": None, "reference": {"path": s.reference or s.model, "fingerprints": marks}}
    if found:
        state = checkpoint.load(fabric, found, policy, optimizer)
        if state["reference"]["fingerprints"] != marks:
            raise BadInput(f"resume: {s.model} or {s.reference} holds other weights than when this run began")
    judged = objective.validation or objective
    val = judged.batch(examples["val"][: steps_of(s.limit_val, len(examples["val"]))]) if examples["val"] else None

    def check(drawn_from):
        (micro, *_), *_ = cuts(s, objective.batch(drawn_from[: s.batch_size]), 1)[0]
        check_start(fabric, policy, reference, objective, [drawn_from[slot] for slot in micro.slots])

    if s.reference_cache:
        if s.reference is None and not found:
            check(examples["train"])
        of = [*marks, s.precision, s.data.score_prompt]
        wide = torch.promote_types(dtype, torch.float32)  # log-probs are never in bfloat16
        reference = Remembered(fabric, reference, Path(s.reference_cache).expanduser(), of, wide)
        steps = (draw(s, examples["train"], plan, step) for step in range(state["step"] + 1, plan.end + 1))
        others = [judged.batch(x) for x in (val.examples if val else [], examples["test"]) if x]
        remember(fabric, s, reference, objective, itertools.chain(map(objective.batch, steps), others))
        frozen = None
    check_val = (lambda: validate(fabric, s, judged, policy, reference, val)) if val else None
    tell = Tell(fabric, s, policy, optimizer, tokenizer, plan, out, state, examples["val"], check_val, objective.passes)
    job = Job(fabric, s, policy, reference, optimizer, tokenizer, examples, out, state, tell)
    policy.train()
    with contextlib.closing(tell):
        stop, step = Stop(s.seconds() if s.max_time else None), state["step"]
        for drawn_from, tell.plan in objective.rounds(job, plan):
            if step == tell.plan.begin and not s.reference and not s.reference_cache:
                check(drawn_from)
            if not found and step == 0:
                tell.judge("before")
                if val:
                    tell.validation(0)
            step = train(fabric, s, objective, policy, reference, optimizer, drawn_from, tell.plan, step, tell, stop)
            if step < tell.plan.end:
                break
        if step < plan.total:
            if state["step"] < step:
                tell.save(step)
            fabric.print(f"stopped by {stop.why} at step {step} of {plan.total}, saved; go on with")
            fabric.print(f"  python {program}.py --config {out}/settings.yaml --resume auto")
        else:
            finish(fabric, s, judged, policy, reference, folder, out, examples["test"], tell)
    return stop.signal


def finish(fabric, s: Run, objective, policy, reference, folder, out: Path, test: list[Example], tell: Tell) -> None:
    """Export, judge, and score the test split with the final and the best weights."""
    weights = checkpoint.whole(fabric, policy.named())
    merged = model.fold_lora(weights, policy.module) if weights else {}
    checkpoint.publish(fabric, lambda tmp: model.export(merged, folder, tmp), out / "final")
    after = tell.judge("after")
    if after and (out / "eval" / "before.json").exists():
        fabric.print(verdicts(json.loads((out / "eval" / "before.json").read_text()), after))
    fabric.print(f"\nexported to {out / 'final'}")
    if test:
        batch, best = objective.batch(test), tell.best_checkpoint()
        scores = {"final": validate(fabric, s, objective, policy, reference, batch)}
        if best:
            checkpoint.set_weights(policy, load_file(best / "weights.safetensors"))
            scores["best"] = validate(fabric, s, objective, policy, reference, batch)
        for name, v in scores.items():
            said = ", ".join(f"{k} {v[k]:.6g}" for k in ("loss", "accuracy") if k in v)
            fabric.print(f"test, {name} weights: {said}")
        if tell.main:
            write_json(out / "eval" / "test.json", scores)


def main(argv: list[str] | None = None) -> None:
    here, doc = Path(__file__).parent, __doc__.split("\n\n")[0]
    s = parse(Settings, sys.argv[1:] if argv is None else argv, doc, here / "config" / "demo.yaml")
    run(s, kto_objective(s.kto, s.data.score_prompt), "kto")


if __name__ == "__main__":
    guarded(main)

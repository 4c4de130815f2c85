"""SPIN: learn from demonstrations alone, against one's own last self (Chen et al. 2024, arXiv 2401.01335).

    python spin.py                                 # the demo: two cores, two minutes

Each iteration: the policy becomes the reference, the reference answers every prompt, and the policy learns by DPO to
prefer the human's completion to that answer. Reading order: settings, one iteration after the other (rounds), main.

Where the paper leaves a choice: one learning-rate schedule spans all iterations and the optimizer's state carries on
(LoRA's restarts, since its branches are folded into the base and begin anew).
"""

import contextlib
import json
import math
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

import checkpoint
import model
from data import BadInput, Batch, Example, order
from devices import guarded
from dpo import DPO, dpo_objective
from generate import Sampling, generate, text
from kto import Base, Job, Objective, run
from optim import Plan, make_plan
from settings import Run, parse
from tell import mean, side_by_side


@dataclass
class SPIN(Sampling):
    """The iterations, and how the reference's answers are sampled."""

    max_iterations: int = 3
    """Iterations; --epochs counts within each."""
    beta: float | list[float] = 0.1
    """Strength of the pull to the iteration's reference: one number, or one for each iteration."""
    mix: float = 0.0
    """Add this fraction of the last iteration's answers to an iteration's own; 1.0, the paper's practice, adds all."""
    rollout_batch_size: int = 512
    """Prompts answered between two writes to disk: a resume goes on at such a border."""
    sft_loss_weight: float = 0.0
    """Weight of the negative log-likelihood of the demonstrations."""
    average_logps: bool = False
    """Divide log-probabilities by the number of scored tokens."""
    offload: bool = False
    """Keep the optimizer's state on the CPU while the reference answers."""

    def betas(self) -> list[float]:
        return self.beta if isinstance(self.beta, list) else [self.beta] * self.max_iterations

    def refuse(self, name: str = "spin"):
        super().refuse(name)
        if min(self.max_iterations, self.rollout_batch_size) < 1 or not 0 <= self.mix <= 1 or self.sft_loss_weight < 0:
            raise BadInput(
                "spin: max_iterations and rollout_batch_size are at least 1, mix in [0, 1], weights at least 0"
            )
        if len(self.betas()) != self.max_iterations or not all(b > 0 for b in self.betas()):
            raise BadInput(f"spin.beta: expected one number above 0, or {self.max_iterations} of them; got {self.beta}")


@dataclass
class Settings(Run):
    spin: SPIN = field(default_factory=SPIN)

    def refuse(self):
        super().refuse()
        self.spin.refuse()
        if self.reference:
            raise BadInput("reference: SPIN's reference is its own last self")
        if self.reference_cache:
            raise BadInput("reference_cache: SPIN's reference is another one in each iteration")
        if self.spin.offload and self.strategy == "fsdp":
            raise BadInput("spin.offload: does not work with strategy fsdp, which shards the state already")


# ---- iterations -----------------------------------------------------------------------------------------------------


def plans(s: Run, n: int) -> list[Plan]:
    """Each iteration's steps; from the second on there are `mix` more pairs. All have the whole run's total."""
    made, begin = [], 0
    for t in range(s.spin.max_iterations):
        p = make_plan(s, n + (int(s.spin.mix * n) if t else 0))
        end = min(begin + s.epochs * p.per_epoch, s.max_steps or math.inf)
        made.append(p._replace(begin=begin, end=end))
        begin = end
    return [p._replace(total=begin) for p in made if p.end > p.begin]


def become_reference(job: Job, t: int) -> None:
    """The policy as it is now becomes iteration t's reference, on disk first. LoRA's branches fold into the base, and
    begin anew, with their optimizer state."""
    lora, module = job.reference.frozen is None, job.policy.module
    state = checkpoint.whole(job.fabric, job.policy.named())
    if lora and state:
        plain = model.fold_lora(state, module)
        state = {name: plain[name.replace(".linear.", ".")] for name in state if "lora_" not in name}
    folder = job.out / "iterations" / f"{t}"
    checkpoint.publish(job.fabric, lambda tmp: save_file(state, tmp / "weights.safetensors"), folder)
    if lora:
        model.restart_lora(module, job.s.seed + 7919 * t, checkpoint.place)
        job.optimizer.optimizer.state.clear()


def stand_on(job: Job, t: int) -> str:
    """Put iteration t's reference in its place, from disk. -> its fingerprint."""
    state = load_file(job.out / "iterations" / f"{t}" / "weights.safetensors")
    checkpoint.set_weights(job.reference.frozen or job.policy, state)
    return model.fingerprint(state)


def answers_file(job: Job, t: int) -> Path:
    return job.out / "iterations" / f"answers-{t}.jsonl"


def ids_of(lines: list[str]) -> list[list[int]]:
    return [json.loads(line)["ids"] for line in lines]


def answers(job: Job, t: int, mark: str) -> list[list[int]]:
    """The reference's answers of iteration t, to all demonstrations. Written per rollout batch: what a killed run has
    written is taken as it stands, if the reference and the sampling are the same."""
    args, demos, file, size = job.s.spin, job.examples["train"], answers_file(job, t), job.s.spin.rollout_batch_size
    head = json.dumps({"reference": mark, "seed": job.s.seed, "demonstrations": len(demos), **asdict(args)})
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    lines = lines[1:] if lines[:1] == [head] else []
    lines = job.fabric.broadcast(lines if len(lines) == len(demos) else lines[: len(lines) // size * size])
    done, new, context = (
        ids_of(lines),
        args.max_new_tokens or job.s.data.max_completion,
        job.policy.module.max_seq_length,
    )
    while len(done) < len(demos):
        prompts = [e.prompt for e in demos[len(done) : len(done) + size]]
        seed = (job.s.seed * 1009 + t) * 1000003 + len(done)
        fresh = generate(job.fabric, job.policy, prompts, job.tokenizer, args, new, context, seed)
        done += fresh
        if job.tell.main:
            rows = ({"ids": ids, "completion": text(job.tokenizer, ids, args.stop)} for ids in fresh)
            lines += [json.dumps(row, ensure_ascii=False) for row in rows]
            checkpoint.write_whole(file, "\n".join([head, *lines, ""]))
    return done


@contextlib.contextmanager
def offloaded(optimizer, on: bool):
    """The optimizer's state on the CPU for as long as this lasts."""
    slots = [
        (s, k, x.device) for s in optimizer.state.values() for k, x in s.items() if on and isinstance(x, torch.Tensor)
    ]
    for s, k, _ in slots:
        s[k] = s[k].cpu()
    yield
    for s, k, device in slots:
        s[k] = s[k].to(device)


def iterations(args: DPO):
    """For the loop: iteration after iteration, its pairs and its plan."""

    def rounds(job: Job, plan: Plan):
        s, state, demos = job.s.spin, job.state, job.examples["train"]
        state.setdefault("iteration", 0)
        mark = stand_on(job, state["iteration"]) if state["iteration"] else ""  # a resume: its weights belong on this
        for t, p in enumerate(plans(job.s, len(demos)), 1):
            if p.end <= state["step"]:
                continue
            if t > state["iteration"]:
                if t > 1 and (verdict := job.tell.judge(f"iteration-{t - 1}")):
                    job.fabric.print(f"after iteration {t - 1}: {verdict['right']} of {verdict['of']} right")
                become_reference(job, t)
                state["iteration"], was, mark = t, mark, stand_on(job, t)
                assert mark != was, "the reference has not moved: this iteration would repeat the last one"
            with offloaded(job.optimizer.optimizer, s.offload):
                own = answers(job, t, mark)
            pairs = [against(e, ids) for e, ids in zip(demos, own)]
            if t > 1 and s.mix:
                last = ids_of(answers_file(job, t - 1).read_text().split("\n")[1:-1])
                pairs += [
                    against(demos[i], last[i])
                    for i in order(len(demos), t, job.s.seed, True)[: int(s.mix * len(demos))]
                ]
            args.beta = s.betas()[t - 1]
            same = sum(np.array_equal(*e.completions) for e in pairs)
            job.fabric.print(
                f"iteration {t}: beta {args.beta}, {len(pairs):,} pairs, {same:,} answered as demonstrated"
            )
            rows = [[text(job.tokenizer, list(x), s.stop) for x in (e.prompt, *e.completions)] for e in pairs[:4]]
            job.fabric.print(side_by_side(("prompt", "demonstration", "the reference's own"), rows))
            yield pairs, p

    return rounds


def against(demo: Example, ids: list[int]) -> Example:
    """The human's completion, and the reference's own."""
    return demo._replace(completions=(demo.completions[0], np.array(ids, dtype=np.int32)))


# ---- the objective --------------------------------------------------------------------------------------------------


def sft_objective(score_prompt: bool) -> Objective:
    """Validation: the negative log-likelihood of the demonstrations, per token."""

    def look(fabric, policy, reference, batch: Batch, micros) -> Base:
        return Base(torch.zeros(len(batch.examples), 1, device=fabric.device), torch.zeros(()), {})

    def loss(logp_BK, length_BK, batch: Batch, slots: list[int], base: Base):
        loss_B = -logp_BK[:, 0] / length_BK[:, 0]
        return loss_B, {"loss": loss_B}

    return dpo_objective(DPO(), score_prompt)._replace(
        look=look, loss=loss, report=lambda columns, base: {"loss": mean(columns["loss"])}
    )


def spin_objective(s: SPIN, score_prompt: bool = False) -> Objective:
    args = DPO(average_logps=s.average_logps, sft_loss_weight=s.sft_loss_weight)  # beta is each iteration's own
    return dpo_objective(args, score_prompt)._replace(
        kind="demos",
        plan=lambda run, n: plans(run, n)[0],
        rounds=iterations(args),
        validation=sft_objective(score_prompt),
    )


def main(argv: list[str] | None = None) -> None:
    here, doc = Path(__file__).parent, __doc__.split("\n\n")[0]
    s = parse(Settings, sys.argv[1:] if argv is None else argv, doc, here / "config" / "demo_spin.yaml")
    run(s, spin_objective(s.spin, s.data.score_prompt), "spin")


if __name__ == "__main__":
    guarded(main)

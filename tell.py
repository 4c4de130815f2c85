"""What happens between steps: lines, validations, samples, checkpoints, the progress bar.

metrics.csv and val.csv survive a kill and a resume; rank 0 writes, and all ranks pass through here together.
"""

import csv
import io
import json
import os
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

import checkpoint
from data import BadInput, Batch, Example, Tokenizer
from devices import rank
from generate import CHECKERS, generate, text, wilson
from optim import Plan
from settings import Run, dump


class Csv:
    """Rows by step, flushed a line at a time. On resume, rows after the checkpoint are cut, a torn last line too."""

    def __init__(self, path: Path, resume_step: int | None):
        self.names = None
        lines = path.read_text().split("\n") if resume_step is not None and path.exists() else [""]
        if len(lines) > 1 and lines[0]:  # a header that ends; else the kill came before the first line was whole
            self.names = next(csv.reader(lines[:1]))
            kept = [r for r in csv.reader(lines[1:-1]) if len(r) == len(self.names) and int(r[0]) <= resume_step]
            tmp = path.with_suffix(".tmp")
            tmp.write_text("".join(map(self._line, [self.names, *kept])))
            tmp.replace(path)
        self.file = open(path, "a" if self.names else "w")

    def _line(self, values) -> str:
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerow(values)
        return out.getvalue()

    def row(self, values: dict) -> None:
        if self.names is None:
            self.names = list(values)
            self.file.write(self._line(self.names))
        self.file.write(self._line("" if values.get(n) is None else values[n] for n in self.names))
        self.file.flush()

    def sync(self) -> None:
        """To the disk, before a checkpoint claims these steps."""
        os.fsync(self.file.fileno())


def tracker(name: str, out: Path, project: str, settings: dict, resumed: bool):
    """A function (values, step) for tensorboard or wandb, and one to end it; the csv files are always there."""
    if name == "csv":
        return lambda values, step: None, lambda: None
    if name == "tensorboard":
        from tensorboardX import SummaryWriter

        writer = SummaryWriter(str(out / "tensorboard"), flush_secs=5)

        def log(values, step):
            for key, value in values.items():
                if key == "samples":
                    writer.add_text(key, "\n\n".join(f"{s['prompt']} **{s['completion']}**" for s in value), step)
                else:
                    writer.add_scalar(key, value, step)

        return log, writer.close  # not flush, which does not wait for its own queue: the last lines would be lost
    import wandb

    file = out / "wandb_id"
    run_id = file.read_text() if resumed and file.exists() else None
    try:
        run = wandb.init(project=project, dir=out, config=settings, id=run_id, resume="allow", name=out.name)
    except Exception as e:  # no key, no network: wandb has its own errors for each
        raise BadInput(
            f"logger: wandb: {' '.join(str(e).split())}; WANDB_MODE=offline needs neither key nor network"
        ) from None
    file.write_text(run.id)

    def log(values, step):
        if rows := values.get("samples"):
            values = values | {"samples": wandb.Table(["prompt", "completion"], [list(r.values()) for r in rows])}
        run.log(values, step=step)

    return log, lambda: None  # its own exit hook tells a crash from an end


class Progress:
    """A bar on a terminal; elsewhere about twenty lines a run."""

    def __init__(self, plan: Plan, start: int, on: bool):
        self.every, self.total, self.bar, self.on = max(1, round(plan.total / 20)), plan.total, None, on
        self.began, self.start = time.monotonic(), start
        self.next = 0  # the next line may come later than at a multiple of `every`: there is one each log_interval
        if on and sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=plan.total, initial=start, unit="step", dynamic_ncols=True)

    def step(self, step: int, line: dict | None) -> None:
        names = ("loss", "kl", "rewards/margins", "tokens/s")
        shown = {n.removeprefix("rewards/"): line[n] for n in names if line and line.get(n) is not None}
        shown = {k: f"{v:,.0f}" if k == "tokens/s" else f"{v:.4f}" for k, v in shown.items()}
        if self.bar is not None:
            self.bar.update()
            if shown:
                self.bar.set_postfix(shown)
        elif self.on and shown and (step >= self.next or step == self.total):
            self.next = step - step % self.every + self.every
            left = (self.total - step) * (time.monotonic() - self.began) / max(1, step - self.start)
            shown["ETA"] = f"{left // 3600:.0f}:{left // 60 % 60:02.0f}:{left % 60:02.0f}"
            say(f"step {step}/{self.total}  " + "  ".join(f"{k} {v}" for k, v in shown.items()))

    def say(self, line: str) -> None:
        if self.on:
            say(line) if self.bar is None else self.bar.write(line)


class Tell:
    """`validate`: without arguments -> the metrics of a line. `passes`: Objective's, for the useful FLOPs of a step."""

    def __init__(self, fabric, s: Run, policy, optimizer, tokenizer: Tokenizer, plan: Plan, out: Path, state: dict,
                 val: list[Example], validate, passes):  # fmt: skip
        self.fabric, self.s, self.policy, self.optimizer, self.tokenizer = fabric, s, policy, optimizer, tokenizer
        self.plan, self.out, self.state, self.validate = plan, out, state, validate
        self.prompts = list({e.prompt.tobytes(): e.prompt for e in val}.values())  # distinct, in file order
        self.tokens, self.flops, self.seconds, self.main = 0, 0, 0.0, fabric.global_rank == 0
        config, lora = policy.config, s.lora.rank > 0
        self.head = config.n_embd * config.padded_vocab_size
        self.body = sum(p.numel() for n, p in policy.transformer.h.named_parameters() if "lora_" not in n)
        full, adapters, of_reference = passes
        self.passes = adapters if lora else full
        if s.reference_cache:
            self.passes = tuple(a - b for a, b in zip(self.passes, of_reference))
        self.peak = peak_flops(fabric.device, s.precision) * fabric.world_size
        if self.main:
            resumed = state["step"] if state["step"] else None
            self.metrics, self.val_csv = (Csv(out / name, resumed) for name in ("metrics.csv", "val.csv"))
            self.track, self.untrack = tracker(s.logger, out, s.project, asdict(s), resumed is not None)
            self.bar = Progress(plan, state["step"], s.progress)

    def step(self, step: int, line: dict | None, batch: Batch, seconds: float) -> None:
        """After an optimizer step: its line, and what is due."""
        x = sum(len(e.prompt) for e in batch.examples)
        y = sum(len(c) for e in batch.examples for c in e.completions)
        of_x, of_y = self.passes  # the least that any implementation must do; attention scores not counted
        self.flops += 2 * self.body * (of_x * x + of_y * y) + 2 * self.head * of_y * y
        self.tokens, self.seconds = self.tokens + x + y, self.seconds + seconds
        if line:
            line = {"step": step, **line, "tokens/s": self.tokens / self.seconds, "seconds": self.seconds}
            line |= {"memory_gb": self.memory(), "tflops/s": self.flops / self.seconds / 1e12}
            line["mfu"] = self.flops / self.seconds / self.peak if self.peak else None
            self.tokens, self.flops, self.seconds = 0, 0, 0.0
        if self.main:
            if line:
                self.metrics.row(line)
                self.track({k: v for k, v in line.items() if v is not None}, step)
            self.bar.step(step, line)
        last = step == self.plan.end
        better = self.validate and (last or due(step, self.plan.val)) and self.validation(step)
        if last or better or due(step, self.plan.save):
            self.save(step)

    def validation(self, step: int) -> bool:
        """A row of val.csv, and eval/step-N.json with samples. -> whether it is the best so far by keep_best."""
        line, samples = self.validate(), self.answers(self.prompts[: self.s.eval.samples])
        if self.main:
            self.val_csv.row({"step": step, **line})
            names = [n for n in ("loss", "kl", "accuracy", "rewards/margins") if line.get(n) is not None]
            self.bar.say(f"validation at step {step}: " + ", ".join(f"{n} {line[n]:.4f}" for n in names))
            told = {f"val/{k}": v for k, v in line.items() if v is not None}
            self.track(told | ({"samples": samples} if samples else {}), step)
            write_json(self.out / "eval" / f"step-{step}.json", {"step": step, "metrics": line, "samples": samples})
        name, best = self.s.keep_best, self.state["best"]
        if name is None:
            return False
        if line.get(name) is None:
            raise BadInput(
                f"keep_best: {name}: not in val.csv, which has {', '.join(k for k, v in line.items() if v is not None)}"
            )
        value = -line[name] if name.split("/")[0] in ("loss", "preference_loss", "sft_loss", "kl") else line[name]
        if step and (best is None or value > best["value"]):
            self.state["best"] = {"step": step, "value": value}
            return True
        return False

    def answers(self, prompts: list) -> list[dict]:
        """Completions sampled from the policy, as text; the same for the same weights and settings."""
        if not prompts:
            return []
        s, context = self.s, self.policy.module.max_seq_length
        new = s.eval.max_new_tokens or s.data.max_completion
        ids = generate(self.fabric, self.policy, prompts, self.tokenizer, s.eval, new, context, s.seed)
        return [
            {"prompt": text(self.tokenizer, list(p)), "completion": text(self.tokenizer, a, s.eval.stop)}
            for p, a in zip(prompts, ids)
        ]

    def judge(self, when: str) -> dict | None:
        """The checker's verdict on fresh answers to the held-out prompts. Collective."""
        check, file = CHECKERS[self.s.eval.check](), self.out / "eval" / f"{when}.json"
        prompts = self.prompts[: self.s.eval.prompts]
        if check is None or not prompts:
            return None
        answers = self.answers(prompts)
        verdict = {"right": sum(check(**a) for a in answers), "of": len(answers), "answers": answers}
        if self.main:
            write_json(file, verdict)
        return verdict

    def best_checkpoint(self) -> Path | None:
        """Where the best weights are, if not in the policy. (A run resumed from another folder may not have them.)"""
        if self.state["best"] is None or self.state["best"]["step"] == self.state["step"]:
            return None
        path = self.out / "checkpoints" / f"step-{self.state['best']['step']:08d}"
        return path if path.is_dir() else None

    def save(self, step: int) -> None:
        folder, self.state["step"] = self.out / "checkpoints", step
        if self.main:
            self.metrics.sync()
            self.val_csv.sync()
        checkpoint.save(self.fabric, folder / f"step-{step:08d}", self.policy, self.optimizer, self.state, dump(self.s))
        if self.main:
            checkpoint.prune(folder, self.s.keep_last, self.state["best"] and self.state["best"]["step"])

    def close(self) -> None:
        if self.main:
            self.metrics.file.close()
            self.val_csv.file.close()
            self.untrack()
            if self.bar.bar is not None:
                self.bar.bar.close()

    def memory(self) -> float:
        """Peak, in GB: the allocator's on a GPU, the resident set's on a CPU."""
        if self.fabric.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.fabric.device) / 1e9
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def peak_flops(device, precision: str) -> float:
    """The data sheet's peak of a known GPU; 0 for everything else."""
    if device.type != "cuda":
        return 0.0
    from lightning.fabric.utilities.throughput import get_available_flops

    return get_available_flops(device, torch.bfloat16 if "bf16" in precision else torch.float32) or 0.0


def mean(x) -> float | None:
    return x.mean().item() if len(x) else None


def auc(high, low) -> float:
    """P(a value of `high` is above one of `low`), ties half."""
    low = low.sort().values
    below = sum(torch.searchsorted(low, high, right=right).double() for right in (False, True)) / 2
    return (below.mean() / len(low)).item()


def due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0


def say(line: str) -> None:
    """On the first process only, before and after launching."""
    if rank() == 0:
        print(line, flush=True)


def write_json(path: Path, value) -> None:
    checkpoint.write_whole(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def verdicts(before: dict, after: dict, n: int = 5, width: int = 34) -> str:
    """Accuracy before and after with 95% intervals, and the first answers side by side."""
    lines = ["", "held-out accuracy by the checker (95% interval)"]
    for name, v in (("before", before), ("after", after)):
        (low, high), share = wilson(v["right"], v["of"]), v["right"] / v["of"]
        interval = f"({100 * low:.1f} to {100 * high:.1f})"
        lines.append(f"  {name:<7} {100 * share:5.1f}%  {interval}  {v['right']} of {v['of']}")
    gain = 100 * (after["right"] / after["of"] - before["right"] / before["of"])
    lines += [f"  gain    {gain:+5.1f} points", ""]
    rows = zip(before["answers"][:n], after["answers"])
    table = [(a["prompt"], a["completion"], b["completion"]) for a, b in rows]
    return "\n".join([*lines, side_by_side(("prompt", "before", "after"), table, width)])


def side_by_side(head: tuple[str, ...], rows: list[tuple[str, ...]], width: int = 34) -> str:
    """A table of short texts."""
    cells = [[c.replace("\n", " ")[:width] for c in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join("  " + "  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in cells)

"""What a run writes besides checkpoints: csv files, eval/step-N.json, a tracker, lines and tables; and the
numbers that a row is made of.

metrics.csv (training) and val.csv (validation) survive a kill: a resume removes the rows after its
checkpoint's step and writes them again.
"""

import csv
import json
import math
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from runs.checkpoint import write_whole
from runs.console import Lines, rank, say, user_error
from runs.optimizer import Plan
from runs.settings import RunSettings

# Column of a row -> how the console shows its value; other columns are only in the files.
STEP_CELLS = {
    "loss": "loss {:.4f}",
    "kl": "kl {:.4f}",
    "rewards/margins": "margins {:.4f}",
    "tokens/s": "tok/s {:,.0f}",
}
VALIDATION_CELLS = {
    "loss": "loss {:.4f}",
    "kl": "kl {:.4f}",
    "accuracy": "accuracy {:.4f}",
    "rewards/margins": "margins {:.4f}",
    "checker_accuracy": "checker {:.4f}",
}
KL_CLAMPED = "kl 0 (clamped)"  # a bare "kl 0.0000" would look like a bug


# ---- speed and memory ------------------------------------------------------------------------


# Part of a GPU's name -> its dense bf16 FLOP/s by the data sheet. The first name that fits is taken, so
# "H100 PCIe" stands before "H100".
BF16_PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "4090": 165e12,
}


class Throughput:
    """Speed over the steps from one row of metrics.csv to the next, and peak memory so far.

    policy: the model itself, before Fabric wraps it. FLOPs are the useful ones: 2 for each weight, token
    and pass, without the attention scores. One pass is one forward. A backward counts as 2 passes, or as
    1 with LoRA, where the weight matrices need no gradient. For z each completion is scored a second
    time, as another prompt's mismatched one; that prompt's own pass serves both.
    """

    def __init__(self, fabric, cfg: RunSettings, policy, objective):
        self.device = fabric.device
        # of its cached log-probs the reference does not run in a step
        reference = objective.needs_reference and not cfg.reference_cache
        self.prompt_passes = (2 if cfg.lora.rank else 3) + reference
        pair_passes = objective.needs_mismatched_pairs * (1 + reference)
        self.completion_passes = self.prompt_passes + pair_passes
        self.n_head_weights = policy.config.n_embd * policy.config.padded_vocab_size
        self.n_block_weights = 0
        for name, parameter in policy.blocks.named_parameters():
            if "lora_" not in name:
                # A 4-bit parameter is packed; its quant_state has the shape of the matrix.
                shape = getattr(parameter, "quant_state", parameter).shape
                self.n_block_weights += shape.numel()
        self.peak_flops = peak_flops(fabric.device, cfg.precision) * fabric.world_size
        self.tokens = self.flops = self.seconds = 0

    def add(self, examples, seconds: float) -> None:
        """Count an optimizer step. examples: those of all ranks. seconds: its wall-clock time."""
        n_prompt = sum(len(e.prompt) for e in examples)
        n_completion = sum(len(y) for e in examples for y in e.completions)
        completion_work = self.completion_passes * n_completion
        block_work = self.n_block_weights * (self.prompt_passes * n_prompt + completion_work)
        # the head skips prompt tokens
        self.flops += 2 * (block_work + self.n_head_weights * completion_work)
        self.tokens += n_prompt + n_completion
        self.seconds += seconds

    def read(self) -> dict:
        """The columns of a row: over the steps since the last call tokens and TFLOPs per second, mfu
        (the share of the peak FLOP/s; None without a known peak) and seconds; and the process's peak
        memory so far in GB."""
        flops_per_second = self.flops / self.seconds
        row = {
            "tokens/s": self.tokens / self.seconds,
            "seconds": self.seconds,
            "memory_gb": self.memory(),
            "tflops/s": flops_per_second / 1e12,
            "mfu": flops_per_second / self.peak_flops if self.peak_flops else None,
        }
        self.tokens = self.flops = self.seconds = 0
        return row

    def memory(self) -> float:
        """Peak memory of this process so far, in GB: of PyTorch's allocator on a GPU, the resident
        set on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 1e9
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def peak_flops(device: torch.device, precision: str) -> float:
    """The peak FLOP/s of a known GPU in bfloat16, by its data sheet, without sparsity; else 0.0."""
    if device.type == "cpu" or "bf16" not in precision:
        return 0.0
    gpu = torch.cuda.get_device_name(device)
    return next((peak for name, peak in BF16_PEAKS.items() if name in gpu), 0.0)


# ---- files and trackers --------------------------------------------------------------------------


class Csv:
    """A csv file to which rows are added; each row is in the file when row() returns. last: the rows after
    this step are removed first (-1: all)."""

    def __init__(self, path: Path, last: int):
        self.path = path
        text = path.read_text() if path.exists() else ""
        # a killed process may have left half a line
        header, *rows = [x for x in text.splitlines(keepends=True) if x.endswith("\n")] or [""]
        rows = [row for row in rows if int(row.split(",")[0]) <= last]
        if rows:
            self.names = next(csv.reader([header]))
            write_whole(path, "".join([header, *rows]))
        else:
            path.unlink(missing_ok=True)

    def row(self, values: dict) -> None:
        """Add a row. The names in the first row of the file are its columns: a later name that is
        not among them is dropped; a missing one, or None, is an empty cell."""
        is_first = not self.path.exists()
        if is_first:
            self.names = list(values)
        with open(self.path, "a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self.names, extrasaction="ignore", lineterminator="\n")
            if is_first:
                writer.writeheader()
            writer.writerow(values)


class Logger:
    """Rows, samples and progress of a run. On ranks other than 0 every method does nothing.

    step: the step of the checkpoint that a resume goes on from, whose rows stay; -1 for a new run or a
    branch. unvalidated: whether that step's validation is still owed.
    """

    def __init__(self, cfg: RunSettings, step: int, unvalidated: bool):
        self.main = rank() == 0
        self.cfg, self.out, self.bar = cfg, Path(cfg.out_dir), None
        self.was_clamped = False
        self.last_row, self.last_validation = step, step - unvalidated

    def _begin_tracker(self, is_resume: bool) -> None:
        if self.cfg.logger == "tensorboard":
            from tensorboardX import SummaryWriter

            self.tracker = SummaryWriter(
                str(self.out / "tensorboard"), flush_secs=5, filename_suffix=f".{time.time_ns()}"
            )  # its own name has whole seconds: a quick resume would replace the file
        elif self.cfg.logger == "wandb":
            import wandb

            id_file = self.out / "wandb_id"  # a resumed run continues the same wandb run
            with user_error("logger: wandb (WANDB_MODE=offline needs no key)", None, Exception):
                self.tracker = wandb.init(
                    project=self.cfg.project,
                    dir=self.out,
                    config=asdict(self.cfg),
                    name=self.out.name,
                    id=id_file.read_text() if is_resume and id_file.exists() else None,
                    resume="allow",
                )
            write_whole(id_file, self.tracker.id)

    def _track(self, row: dict, prefix: str, step: int, samples: list[dict] = ()) -> None:
        """Hand the numbers of a row, and answers of the policy, to the tracker."""
        numbers = {prefix + name: value for name, value in row.items() if value is not None}
        if self.cfg.logger == "tensorboard":
            for name, value in numbers.items():
                self.tracker.add_scalar(name, value, step)
            if samples:
                text = "\n\n".join(f"{x['prompt']} **{x['completion']}**" for x in samples)
                self.tracker.add_text("val/samples", text, step)
        elif self.cfg.logger == "wandb":
            import wandb

            if samples:
                rows = [list(x.values()) for x in samples]
                numbers["val/samples"] = wandb.Table(["prompt", "completion"], rows)
            self.tracker.log(numbers, step=step)

    def begin(self, plan: Plan, n: int, batch_size: int, start: int) -> None:
        """Open the files and say how long the run is. Later calls, of later iterations, do nothing.

        n: the number of training examples. start: the step that a resumed run continues after.
        """
        if not self.main or self.bar is not None:
            return
        self.metrics = Csv(self.out / "metrics.csv", self.last_row)
        self.val = Csv(self.out / "val.csv", self.last_validation)
        self._begin_tracker(is_resume=self.last_row >= 0)
        left_out = n - plan.per_epoch * batch_size
        say(f"{plan.total:,} steps of {batch_size:,} examples")
        say(f"{plan.per_epoch:,} steps per epoch, which leaves out {left_out:,} of {n:,} examples")
        self.is_terminal = sys.stderr.isatty()
        self.start, self.twentieth, self.printed = start, -1, time.monotonic()
        self.bar = tqdm(
            total=plan.total,
            initial=start,
            # the last part, a bar, fills a terminal's line
            bar_format="step {n}/{total}: {desc}ETA {remaining}" + " {bar}" * self.is_terminal,
            file=None if self.is_terminal else Lines(),
            mininterval=0.1 if self.is_terminal else math.inf,
            smoothing=0,
            delay=1e-9,  # nothing before the first step
            dynamic_ncols=True,
            leave=False,
            disable=not self.cfg.progress,
        )

    def step(self, step: int, row: dict | None, seconds: float) -> None:
        """After an optimizer step, which took so many seconds. row: its row of metrics.csv, or None where
        no row is due. Elsewhere than on a terminal a run prints about twenty lines, or one a minute."""
        if not self.main:
            return
        if row:
            self.metrics.row({"step": step} | row)
            self._track(row, "", step)
        if self.bar.disable:
            return
        if self.bar.n == self.start:  # what came before the first step is no part of the ETA
            self.bar.start_t = time.time() - seconds
            self.bar.last_print_t = time.time()  # else close() takes it for never shown
        self.bar.update()
        twentieth = 20 * step // self.bar.total
        is_late = time.monotonic() - self.printed > 60
        if row and (self.is_terminal or twentieth > self.twentieth or is_late):
            formats = STEP_CELLS | ({"kl": KL_CLAMPED} if row.get("kl/clamped") else {})
            self.bar.set_description_str(" ".join([*format_cells(row, formats), ""]))
            self.twentieth, self.printed = twentieth, time.monotonic()
            if row.get("kl/clamped") and not self.was_clamped:
                self.was_clamped = True
                say(f"{KL_CLAMPED}: looks odd but is normal, docs/z.md says when z matters")

    def validation(self, step: int, row: dict, samples: list[dict]) -> None:
        """Write a row of val.csv, and eval/step-N.json with the row and the samples."""
        if not self.main:
            return
        self.val.row({"step": step} | row)
        cells = format_cells(row, VALIDATION_CELLS)
        if "accuracy" in row and row["accuracy"] is None:
            cells.append("no accuracy (r is 0)" if step == 0 else "no accuracy")
        if self.cfg.progress:
            say(f"validation at step {step}: {', '.join(cells) or 'samples only'}")
        self._track(row, "val/", step, samples)
        content = {"step": step, "metrics": row, "samples": samples}
        write_json(self.out / "eval" / f"step-{step}.json", content)

    def close(self) -> None:
        """Close the tracker and the progress bar. wandb ends its run when Python exits, and marks
        it as crashed after an exception."""
        if self.bar is not None:
            self.bar.close()
            if self.cfg.logger == "tensorboard":
                self.tracker.close()


def write_json(path: Path, value) -> None:
    write_whole(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


# ---- tables --------------------------------------------------------------------------------------


def format_cells(row: dict, formats: dict[str, str]) -> list[str]:
    """The values of `row` that have a format, as texts. A missing column and None are left out."""
    cells = formats.items()
    return [text.format(row[name]) for name, text in cells if row.get(name) is not None]

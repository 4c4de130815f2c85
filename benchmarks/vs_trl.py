"""The speed of KTO and DPO here and in TRL: the same weights, records, token ids, batches, precision and
optimizer.

    python -m venv out/vs_trl/venv && out/vs_trl/venv/bin/pip install torch==2.13.0 "trl>=1.16" peft
    python benchmarks/vs_trl.py kto 5.5M 200/120 bf16   # the cells that have all of these words
    python benchmarks/vs_trl.py kto 5.5M --beside ../old   # beside another tree of this project, not TRL
    python benchmarks/vs_trl.py                         # all cells: days on two cores

A cell is an algorithm, a size, lengths and a precision. If benchmarks/vs_trl.jsonl has it, it is
printed from there and not run again. On a GPU both sides use the GPU.

- TRL runs in out/vs_trl/venv, because litgpt's requirements allow only an old version. If this environment does not
  exist, TRL runs in the Python that runs this program.
- Each run is a separate process, and the sides alternate: A B B A.
- The losses of all steps must agree. TRL's mismatched pairs have the previous completion of a batch, ours the
  next one, so TRL gets each batch in reverse order.
- Time is that of all steps but the first. Ours is the column `seconds` of metrics.csv: the wait for a
  batch that a thread has packed is no part of it.
- Peak memory is the maximum resident set of the process after the last step, libraries included; on a
  GPU that of PyTorch's allocator.
"""

import argparse
import csv
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "out" / "vs_trl"
RESULTS = HERE / "vs_trl.jsonl"
SIZES = {  # GPT-2's shape: layers, width, heads, vocabulary
    "5.5M": (4, 256, 4, 8192),
    "8M": (4, 256, 4, 16384),
    "124M": (12, 768, 12, 50257),
}
PROFILES = {"200/120": (200, 120), "400/60": (400, 60)}  # median tokens of prompt and completion
BATCH = 8
STEPS = {"124M": 1}  # timed steps; elsewhere 5. One warm-up step comes first
PAIRS = {"124M": 3}  # runs of each side; elsewhere 5
PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed"}
# on CUDA TRL runs the head on completion tokens only; "completion-only head": on a CPU, too
TRL = ("best", "completion-only head")

# ---- the model and the records of both sides -----------------------------------------------------


def make_records(kind: str, n: int, vocab: int, x: int, y: int, spread: float = 0.5) -> list[dict]:
    """n records of random words. Prompts have a median of x words, completions of y. Lengths are log-normal (sigma:
    spread), and at most three times the median. Prompt and completion fit into 1,000 tokens."""
    rng = random.Random(1)

    def text(median):
        length = round(rng.lognormvariate(0, spread) * median)
        length = min(3 * median, 1000 - 3 * y, max(4, length))
        return " ".join(f"w{rng.randrange(1, vocab)}" for _ in range(length))  # see save_words

    records = []
    for i in range(n):
        record = {"prompt": text(x)}
        if kind == "kto":
            record |= {"completion": f" {text(y)}", "label": bool(i % 2)}
        else:
            record |= {"chosen": f" {text(y)}", "rejected": f" {text(y)}"}
        records.append(record)
    return records


def write_records(name: str, records: list[dict]) -> str:
    OUT.mkdir(parents=True, exist_ok=True)
    file = OUT / f"{name}.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(file)


def model_folder(name: str, shape: tuple[int, int, int, int]) -> str:
    """A Hugging Face folder of a GPT-2 with random weights, and a tokenizer of words.
    An existing folder is reused."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = OUT / f"model-{name}"
    if not (folder / "tokenizer_config.json").exists():  # written last
        layers, width, heads, vocab = shape
        torch.manual_seed(1)
        config = GPT2Config(
            n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocab, n_positions=1024,
            bos_token_id=0, eos_token_id=0, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
        )  # fmt: skip
        GPT2LMHeadModel(config).save_pretrained(folder)
        save_words(folder, vocab)
    return str(folder)


def save_words(folder: Path, vocab: int) -> None:
    """Save a tokenizer with this vocabulary: an EOS and the words w1, w2, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {"<eos>": 0, **{f"w{i}": i for i in range(1, vocab)}}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    fast.save_pretrained(folder)


# ---- the two sides -------------------------------------------------------------------------------


def ours(tree: Path, program: str, settings: dict) -> list[dict]:
    """Run a program of this project in a process. -> the rows of its metrics.csv, one for each step;
    SystemExit if it fails"""
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "out_dir": f"{folder}/run", "batch_size": BATCH, "precision": "32-true", "data.shuffle": "false",
            "optim.lr": 1e-4, "optim.schedule": "constant", "progress": "false", "eval.samples": 0,
            "val_interval": "null", "save_interval": "null", "log_interval": 1,
        } | settings  # fmt: skip
        options = [f"--{name}={value}" for name, value in settings.items()]
        run_process([sys.executable, str(tree / f"{program}.py"), *options])
        return read_csv(Path(f"{settings['out_dir']}/metrics.csv"))


def read_csv(file: Path) -> list[dict]:
    with file.open() as f:
        return [{name: float(x) for name, x in row.items() if x} for row in csv.DictReader(f)]


def run_process(command: list[str]) -> str:
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(f"{command}:\n{process.stdout[-2000:]}\n{process.stderr[-4000:]}")
    return process.stdout


def side(name: str, spec: dict) -> dict:
    """One run of a side: of TRL, of this tree or of another one. -> losses, seconds, peak_gib"""
    if name in TRL:
        return run_trl(spec | {"side": name})
    y = spec["completion"]
    # the longest prompt and completion (with its EOS) that make_records makes
    settings = {"data.max_prompt": 1000 - 3 * y, "data.max_completion": 3 * y + 1}
    settings |= {"model": spec["model"], "data.train": spec["records"]}
    settings |= {"precision": PRECISIONS[spec["precision"]], "batch_size": spec["batch"]}
    rows = ours(Path(name), spec["kind"], settings)
    return {
        "losses": [row["loss"] for row in rows],
        "seconds": sum(row["seconds"] for row in rows[1:]),
        "peak_gib": rows[-1]["memory_gb"] * 1e9 / 2**30,
    }


def run_trl(spec: dict) -> dict:
    """Run TRL's trainer in its environment. -> losses, seconds and peak_gib

    settings of the spec are fields of TRL's config, lr has the learning rate of each step, and final is a folder for
    the trained model."""
    python = OUT / "venv" / "bin" / "python"
    python = str(python) if python.exists() else sys.executable
    command = [python, __file__, "--trl", json.dumps(spec)]
    return json.loads(run_process(command).splitlines()[-1])


def trl(spec: dict) -> None:
    """Run TRL's trainer and print what run_trl returns."""
    import datasets
    import torch
    import transformers
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

    on_gpu = torch.cuda.is_available()
    if spec["side"] == "completion-only head":
        import trl.trainer.utils

        trl.trainer.utils._use_triton = lambda device: True
    datasets.disable_progress_bars()
    rows = read_lines(Path(spec["records"]))
    size = spec["batch"]
    rows = [row for i in range(0, len(rows), size) for row in reversed(rows[i : i + size])]
    config_class, trainer_class = KTOConfig, KTOTrainer
    if spec["kind"] == "dpo":
        config_class, trainer_class = DPOConfig, DPOTrainer
    settings = dict(
        output_dir=str(OUT / "trl"), bf16=spec["precision"] == "bf16", use_cpu=not on_gpu, beta=0.1,
        per_device_train_batch_size=size, gradient_checkpointing=False, learning_rate=1e-4,
        lr_scheduler_type="constant", weight_decay=0.0, max_length=1024, logging_steps=1,
        save_strategy="no", report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
        num_train_epochs=1, train_sampling_strategy="sequential",
    )  # fmt: skip
    args = config_class(**settings | spec.get("settings", {}))
    losses, ends = [], []

    class Recorder(transformers.TrainerCallback):
        def on_step_begin(self, _args, state, _control, optimizer=None, **__):
            for group in optimizer.param_groups if "lr" in spec else []:
                group["lr"] = spec["lr"][state.global_step]

        def on_step_end(self, *_, **__):
            ends.append(time.perf_counter())

        def on_log(self, _args, _state, _control, logs=None, **__):
            if "loss" in logs:
                losses.append(logs["loss"])

    policy, reference = (
        transformers.AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)
        for _ in range(2)
    )
    trainer = trainer_class(
        model=policy, ref_model=reference, args=args, callbacks=[Recorder()],
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(spec["model"]),
    )  # fmt: skip
    trainer.train()
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0
    peak = peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    if "final" in spec:
        policy.save_pretrained(spec["final"])
    print(json.dumps({"losses": losses, "seconds": ends[-1] - ends[0], "peak_gib": peak}))


# ---- taking turns --------------------------------------------------------------------------------


def run_cell(cell: list[str], trl: str) -> dict:
    """Run a cell with this tree and with another side: one of TRL, or a tree. -> its results"""
    kind, size, profile, precision = cell
    x, y = PROFILES[profile]
    records = make_records(kind, BATCH * (STEPS.get(size, 5) + 1), SIZES[size][3], x, y)
    spec = {
        "kind": kind,
        "precision": precision,
        "records": write_records(f"{kind}-{size}-{profile.replace('/', '-')}", records),
        "model": model_folder(size, SIZES[size]),
        "completion": y,
        "batch": BATCH,
    }
    results = {str(HERE.parent): [], trl: []}
    for i in range(PAIRS.get(size, 5)):
        for name in list(results) if i % 2 == 0 else reversed(results):
            results[name].append(side(name, spec))
    sides = list(results.values())
    our_losses, their_losses = (results_of[0]["losses"] for results_of in sides)
    ratios = [b["seconds"] / a["seconds"] for a, b in zip(*sides)]
    return {
        "cell": cell,
        "trl": trl,
        "ratio": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
        "seconds": [statistics.median(r["seconds"] for r in results_of) for results_of in sides],
        "peak_gib": [statistics.median(r["peak_gib"] for r in results_of) for results_of in sides],
        "loss_off": max(abs(a - b) / abs(b) for a, b in zip(our_losses, their_losses)),
        "losses": [our_losses[-1], their_losses[-1]],
    }


def refuse_other_training(row: dict) -> None:
    """Raise SystemExit if the losses of the two sides differ by more than the precision explains."""
    allowed = 1e-4 if row["cell"][-1] == "fp32" else 1e-2
    if not row["loss_off"] <= allowed:
        raise SystemExit(
            f"not the same training: the losses differ by up to {row['loss_off']:.1g}, expected at most {allowed:g}; "
            f"the last ones are {row['losses']}"
        )


def print_result(row: dict) -> None:
    """Print a row of results (see run_cell) in the table."""
    low, high = row["range"]
    ours, theirs = row["peak_gib"]
    speed = f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})"
    memory = f"{ours:.2f}, {theirs:.2f}"
    print_cells(" ".join(row["cell"]), row["trl"], speed, memory, f"{row['loss_off']:.0e}")


def print_cells(*cells) -> None:
    """Print a row of a table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def print_head(*names: str) -> None:
    print_cells(*names)
    print_cells(*["---"] * len(names))


def read_lines(file: Path) -> list[dict]:
    """The objects of a .jsonl file; none if it does not exist."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def add_line(file: Path, row: dict) -> None:
    with file.open("a") as f:
        f.write(json.dumps(row) + "\n")


def run_once(file: Path, run: Callable[..., dict], **key) -> dict:
    """The row of the file that has this key. Without such a row, run(**key) returns the rest of it, and the whole row
    is added to the file."""
    for row in read_lines(file):
        if row | key == row:
            return row
    row = key | run(**key)
    add_line(file, row)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("words", nargs="*", help="run only the cells that have all of these words")
    parser.add_argument("--beside", type=Path, help="another tree of this project, instead of TRL")
    args = parser.parse_args()
    run = run_cell if args.beside else partial(run_once, RESULTS, run_cell)
    others = [str(args.beside.resolve())] if args.beside else TRL
    print_head("cell", "beside", "speed", "peak GiB: ours, theirs", "loss off by")
    cells = product(["kto", "dpo"], SIZES, PROFILES, PRECISIONS)
    for cell, other in product(cells, others):
        if set(args.words) <= set(cell):
            row = run(cell=list(cell), trl=other)
            print_result(row)
            refuse_other_training(row)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trl"]:  # a process that side() started, in TRL's environment
        trl(json.loads(sys.argv[2]))
    else:
        main()

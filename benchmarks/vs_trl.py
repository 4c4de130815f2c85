"""KTO and DPO beside TRL's trainers: the same weights, records, token ids, batches, precision and optimizer.

    python benchmarks/vs_trl.py              # the required cells of RESULTS.md, hours
    python benchmarks/vs_trl.py kto 8M       # those that have both of these words
    python benchmarks/vs_trl.py --all        # also the cells that are not required

A cell is one combination of algorithm, size, lengths, precision and mode. If benchmarks/vs_trl.jsonl has it, it is
printed from there and not run again.

- TRL runs in its own environment, which this program makes: in ours litgpt's requirements would allow an old
  version only.
- Each run is a process of its own. Ours and TRL's take turns: A B B A.
- The losses of all steps must agree. TRL's mismatched pairs have the previous completion of a batch, ours the next
  one, so TRL gets each batch in reverse order.
- Time is wall time from the end of the first step to the end of the last.
- Useful tokens are the prompt and completion tokens of the rated examples (of a pair: the prompt once and both
  completions), without padding.
- Peak memory is the maximum resident set of the process after the last step, libraries included.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "out" / "vs_trl"
SIZES = {  # GPT-2's shape: layers, width, heads, vocabulary
    "5.5M": (4, 256, 4, 8192),
    "8M": (4, 256, 4, 16384),
    "30M": (6, 384, 6, 50257),
    "124M": (12, 768, 12, 50257),
}
PROFILES = {  # median tokens of prompt and completion; sorted: a user may sort the records by length to pad less
    "200/120": (200, 120),
    "400/60": (400, 60),
    "48/48": (48, 48),
    "200/120-sorted": (200, 120),
}
BATCH = 8
STEPS = {"5.5M": 5, "8M": 5, "30M": 3, "124M": 1}  # timed steps; one warm-up step comes first
PAIRS = {"5.5M": 5, "8M": 5, "30M": 5, "124M": 3}  # runs of each side
MODES = {  # mode -> (our settings, {name: settings of TRL})
    "full": ({}, {"best": {}, "completion-only head": {"compact": True}}),
    "defaults": ({}, {"defaults": {"gradient_checkpointing": True}}),
    "precomputed": (
        {"reference_cache": ""},  # arguments() fills in a folder
        {"precomputed": {"precompute_ref_log_probs": True}},
    ),
    "lora": ({"lora.rank": 8}, {"lora": {"lora": True}}),
}
REQUIRED = [
    *product(["kto"], ["8M"], ["200/120", "400/60"], ["fp32", "bf16"], ["full"]),
    ("kto", "5.5M", "200/120", "bf16", "full"),
    ("dpo", "8M", "400/60", "fp32", "full"),
    ("kto", "8M", "200/120-sorted", "fp32", "full"),
    ("kto", "8M", "200/120", "fp32", "precomputed"),
    ("kto", "8M", "200/120", "fp32", "defaults"),
    *product(["kto"], ["124M"], ["200/120", "400/60"], ["fp32", "bf16"], ["full"]),
    ("dpo", "124M", "400/60", "fp32", "full"),
    *product(["kto"], ["30M"], ["200/120", "400/60"], ["fp32", "bf16"], ["full"]),
]


# ---- the model and the records of both sides ------------------------------------------------------------------------


def records(kind: str, size: str, profile: str) -> list[dict]:
    """Records of random words for a warm-up step and the timed steps. Lengths are log-normal (sigma 0.5) with the
    profile's medians, and at most three times the median."""
    rng = random.Random(1)
    x, y = PROFILES[profile]
    vocab = SIZES[size][3]

    def text(median):
        n = min(3 * median, 1000 - 3 * y, max(4, round(rng.lognormvariate(0, 0.5) * median)))
        return " ".join(f"w{rng.randrange(1, vocab)}" for _ in range(n))

    made = []
    for i in range(BATCH * (STEPS[size] + 1)):
        record = {"prompt": text(x)}
        if kind == "kto":
            record |= {"completion": f" {text(y)}", "label": bool(i % 2)}
        else:
            record |= {"chosen": f" {text(y)}", "rejected": f" {text(y)}"}
        made.append(record)
    if profile.endswith("sorted"):
        made.sort(key=tokens)
    return made


def tokens(record: dict) -> int:
    """The useful tokens of a record: a word is a token, and each completion has an EOS."""
    n = 0
    for name, value in record.items():
        if name != "label":
            n += len(value.split()) + (name != "prompt")
    return n


def length_octiles(rows: list[dict]) -> str:
    """Lengths of prompts and of completions: the shortest, seven octiles, the longest."""
    out = []
    for name, keys in (
        ("prompt", ["prompt"]),
        ("completion", ["completion", "chosen", "rejected"]),
    ):
        lengths = sorted(len(r[key].split()) for r in rows for key in keys if key in r)
        octiles = [lengths[round(q / 8 * (len(lengths) - 1))] for q in range(9)]
        out.append(f"{name} " + " ".join(map(str, octiles)))
    return "; ".join(out)


def model_folder(name: str, shape: tuple[int, int, int, int], positions: int = 1024) -> Path:
    """A Hugging Face folder of a model with GPT-2's layers, random weights, and a tokenizer whose tokens are words. A
    folder that is there is used again."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    layers, width, heads, vocab = shape
    folder = OUT / f"model-{name}"
    if (folder / "tokenizer_config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    w = {
        "wte.weight": torch.randn(vocab, width) * 0.02,
        "wpe.weight": torch.randn(positions, width) * 0.01,
    }
    for i in range(layers):
        for part, rows, columns in [
            ("attn.c_attn", 1, 3),
            ("attn.c_proj", 1, 1),
            ("mlp.c_fc", 1, 4),
            ("mlp.c_proj", 4, 1),
        ]:
            w[f"h.{i}.{part}.weight"] = torch.randn(rows * width, columns * width) * 0.02
            w[f"h.{i}.{part}.bias"] = torch.zeros(columns * width)
        for part in ("ln_1", "ln_2"):
            w[f"h.{i}.{part}.weight"] = torch.ones(width)
            w[f"h.{i}.{part}.bias"] = torch.zeros(width)
    w["ln_f.weight"] = torch.ones(width)
    w["ln_f.bias"] = torch.zeros(width)
    w = {f"transformer.{name}": x for name, x in w.items()}
    save_file(w, folder / "model.safetensors", metadata={"format": "pt"})
    config = dict(
        model_type="gpt2", architectures=["GPT2LMHeadModel"], n_layer=layers, n_embd=width, n_head=heads,
        vocab_size=vocab, n_positions=positions, layer_norm_epsilon=1e-5, activation_function="gelu_new",
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    ids = {"<eos>": 0, **{f"w{i}": i for i in range(1, vocab)}}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "<eos>",
    }
    # written last: a folder that has this file is complete
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


# ---- the two sides: each runs in a process of its own, prints one line of results, and does without the other -------


def now() -> tuple[float, float]:
    """Seconds of the wall and of all threads' CPU time."""
    return time.perf_counter(), time.process_time()


def report(spec: dict, losses: list[float], ends: list[tuple], **more) -> None:
    """Print the results of this process: losses, seconds, cpu_seconds, peak_gib, and `more`. ends: now() at the end
    of each step; the first spec["warmup"] steps (1 by default) are not timed."""
    import torch

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / 2**30
    seconds, cpu_seconds = (b - a for a, b in zip(ends[spec.get("warmup", 1) - 1], ends[-1]))
    results = {"losses": losses, "seconds": seconds, "cpu_seconds": cpu_seconds, "peak_gib": peak}
    results |= more
    print("RESULT " + json.dumps(results), flush=True)


def limits(profile: str) -> dict:
    """Our settings for the longest prompt and completion (with its EOS) that records() makes."""
    y = PROFILES[profile][1]
    return {"data.max_prompt": 1000 - 3 * y, "data.max_completion": 3 * y + 1}


def arguments(spec: dict, out: str) -> list[str]:
    """Our command line, for a run in the folder `out`."""
    settings = {
        "model": spec["model"], "out_dir": f"{out}/run", "batch_size": BATCH, "data.train": spec["records"],
        "precision": {"fp32": "32-true", "bf16": "bf16-mixed"}[spec["precision"]], "data.shuffle": "false",
        "optim.lr": 1e-4, "optim.schedule": "constant", "progress": "false", "eval.samples": 0,
        "val_interval": "null", "save_interval": "null",
        **spec["ours"],
    }  # fmt: skip
    if "reference_cache" in settings:
        settings["reference_cache"] = f"{out}/cache"
    return [f"--{name}={value}" for name, value in settings.items()]


def ours(spec: dict) -> None:
    """Run our program and report. spec: kind (kto or dpo), precision, model, records, ours (our settings); optional:
    warmup, profile (the number of last steps that are profiled and not timed), began (time.time() of the start)."""
    sys.path[0] = str(HERE.parent)
    import csv

    import torch

    from runs.logger import Logger

    real_step = Logger.step
    ends, first_end, profiler = [], None, None

    def step_and_time(self, step, row, seconds):
        nonlocal first_end, profiler
        if first_end is None:
            first_end = time.time()
        real_step(self, step, row, seconds)
        if profiler is None:
            ends.append(now())
        if step == self.bar.total:
            raise StopIteration  # leave the program: no checkpoint, no export
        if step == self.bar.total - spec.get("profile", 0):
            kinds = torch.profiler.ProfilerActivity
            kind = kinds.CUDA if torch.cuda.is_available() else kinds.CPU
            profiler = torch.profiler.profile(activities=[kind])
            profiler.start()

    with tempfile.TemporaryDirectory() as out:
        argv = arguments(spec, out)
        program = __import__(spec["kind"])
        Logger.step = step_and_time
        try:
            program.main(argv)
        except StopIteration:
            pass
        with open(f"{out}/run/metrics.csv") as f:
            rows = list(csv.DictReader(f))
        report(
            spec,
            [float(r["loss"]) for r in rows],
            ends,
            flops=[float(r["tflops/s"]) for r in rows],
            first=first_end - spec.get("began", first_end),
            **where_time_goes(profiler),
        )


def where_time_goes(profiler) -> dict:
    """idle: the share of the profiled steps in which the GPU did nothing; kernels: the shares of the five kernels that
    took longest. Empty without a profiler or without a GPU."""
    if profiler is None:
        return {}
    profiler.stop()
    spans, kernels = [], {}
    for e in profiler.events():
        if str(e.device_type).endswith("CUDA"):
            start, end = e.time_range.start, e.time_range.end
            spans.append((start, end))
            kernels[e.name] = kernels.get(e.name, 0) + end - start
    if not spans:
        return {}
    busy, until = 0.0, 0.0
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, until))  # spans may overlap
        until = max(until, end)
    total = until - min(spans)[0]
    longest = sorted(kernels.items(), key=lambda item: -item[1])[:5]
    shares = {name[:60]: round(duration / total, 3) for name, duration in longest}
    return {"idle": 1 - busy / total, "kernels": shares}


def trl(spec: dict) -> None:
    """Run TRL's trainer and report. spec: as for ours(), with `trl` (its settings) in place of `ours`; optional: batch,
    bf16_weights."""
    import datasets
    import torch
    import transformers
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

    settings = {"gradient_checkpointing": False} | spec["trl"]
    if settings.pop("compact", False):
        # on CUDA TRL runs the head on completion tokens only; make it do so on a CPU, too
        import trl.trainer.utils

        trl.trainer.utils._use_triton = lambda device: True
    peft = None
    if settings.pop("lora", False):
        from peft import LoraConfig

        peft = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    datasets.disable_progress_bars()
    rows = [json.loads(line) for line in open(spec["records"])]
    size = spec.get("batch", BATCH)
    rows = [row for i in range(0, len(rows), size) for row in reversed(rows[i : i + size])]
    if spec["kind"] == "kto":
        config_class, trainer_class = KTOConfig, KTOTrainer
    else:
        config_class, trainer_class = DPOConfig, DPOTrainer
        settings |= {"train_sampling_strategy": "sequential"}
    args = config_class(
        output_dir=str(OUT / "trl"), bf16=spec["precision"] == "bf16", per_device_train_batch_size=size,
        use_cpu=not torch.cuda.is_available(),
        learning_rate=1e-4, lr_scheduler_type="constant", weight_decay=0.0, max_length=1024, logging_steps=1, beta=0.1,
        save_strategy="no", report_to="none", disable_tqdm=True, dataloader_pin_memory=False, num_train_epochs=1,
        **settings,
    )  # fmt: skip
    losses, ends = [], []

    class Timer(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            ends.append(now())

        def on_log(self, _args, _state, _control, logs=None, **__):
            if "loss" in logs:
                losses.append(logs["loss"])

    load = transformers.AutoModelForCausalLM.from_pretrained
    dtype = torch.bfloat16 if spec.get("bf16_weights") else torch.float32
    policy = load(spec["model"], dtype=dtype)
    reference = None
    if not (peft or settings.get("precompute_ref_log_probs")):
        reference = load(spec["model"], dtype=dtype)
    trainer = trainer_class(
        model=policy, ref_model=reference, args=args, train_dataset=datasets.Dataset.from_list(rows), peft_config=peft,
        processing_class=transformers.AutoTokenizer.from_pretrained(spec["model"]), callbacks=[Timer()],
    )  # fmt: skip
    trainer.train()
    report(spec, losses, ends)


# ---- taking turns ---------------------------------------------------------------------------------------------------


def environment() -> str:
    """The Python of TRL's environment, which is made if it is not there."""
    python = OUT / "venv" / "bin" / "python"
    if not python.exists():
        import torch

        subprocess.run([sys.executable, "-m", "venv", OUT / "venv"], check=True)
        version = torch.__version__.split("+")[0]
        subprocess.run(
            [python, "-m", "pip", "install", "-q", f"torch=={version}", "trl>=1.16", "peft"],
            check=True,
        )
    return str(python)


def once(python: str, side: str, spec: dict) -> dict:
    """Run one side ("ours" or "trl") in a process. -> what it reports; SystemExit if it fails"""
    command = [python, __file__, f"--{side}", json.dumps(spec)]
    process = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in process.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        output = f"{process.stdout[-2000:]}\n{process.stderr[-4000:]}"
        raise SystemExit(f"{side}: {json.dumps(spec)}\n{output}")
    return json.loads(lines[0].removeprefix("RESULT "))


def cell(python: str, kind: str, size: str, profile: str, precision: str, mode: str) -> list[dict]:
    """Run a cell. -> a row of results for each entry of MODES[mode]'s settings of TRL, ours beside it"""
    rows = records(kind, size, profile)
    file = OUT / f"{kind}-{size}-{profile.replace('/', '-')}.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    our_settings, trl_settings = MODES[mode]
    spec = {
        "kind": kind,
        "precision": precision,
        "records": str(file),
        "model": str(model_folder(size, SIZES[size])),
        "ours": limits(profile) | our_settings,
    }
    useful = sum(map(tokens, rows[BATCH:]))
    results = {name: [] for name in ["ours", *trl_settings]}
    for i in range(PAIRS[size]):
        for name in list(results) if i % 2 == 0 else reversed(results):
            if name == "ours":
                result = once(sys.executable, "ours", spec)
            else:
                result = once(python, "trl", spec | {"trl": trl_settings[name]})
            results[name].append(result)
    out = []
    for name in trl_settings:
        sides = results["ours"], results[name]
        our_losses, trl_losses = (side[0]["losses"] for side in sides)
        timed = list(zip(our_losses, trl_losses))[: STEPS[size]]
        loss_off = max(abs(a - b) / abs(b) for a, b in timed)
        tolerance = 1e-4 if precision == "fp32" else 1e-2
        # under LoRA the adapters start with different random numbers
        if loss_off > tolerance and mode != "lora":
            raise SystemExit(f"not the same training: {our_losses} and {trl_losses}")
        ratios = sorted(b["seconds"] / a["seconds"] for a, b in zip(*sides))
        seconds = [statistics.median(result["seconds"] for result in side) for side in sides]
        peaks = [statistics.median(result["peak_gib"] for result in side) for side in sides]
        out.append({
            "cell": [kind, size, profile, precision, mode], "trl": name, "ratio": statistics.median(ratios),
            "range": [ratios[0], ratios[-1]], "tokens_s": [useful / s for s in seconds], "peak_gib": peaks,
            "cores": [statistics.median(r["cpu_seconds"] / r["seconds"] for r in side) for side in sides],
            "loss_off": loss_off, "lengths": length_octiles(rows),
        })  # fmt: skip
    return out


def print_row(row: dict) -> None:
    """Print a row of results (see cell) as a line of the table."""
    low, high = row["range"]
    our_speed, trl_speed = row["tokens_s"]
    our_peak, trl_peak = row["peak_gib"]
    cells = [
        " ".join(row["cell"]),
        row["trl"],
        f"{row['ratio']:.2f}",
        f"{low:.2f} to {high:.2f}",
        f"{our_speed:,.0f}",
        f"{trl_speed:,.0f}",
        f"{our_peak:.2f}",
        f"{trl_peak:.2f}",
        f"{our_peak / trl_peak:.2f}",
        " and ".join(f"{x:.2f}" for x in row.get("cores", [])),
        f"{row['loss_off']:.0e}",
    ]
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    if len(sys.argv) > 2 and sys.argv[1] in ("--ours", "--trl"):  # a process that once() started
        side = ours if sys.argv[1] == "--ours" else trl
        side(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="run only the cells that have all of these words")
    parser.add_argument("--all", action="store_true", help="also the cells that are not required")
    args = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    python = environment()
    results = HERE / "vs_trl.jsonl"
    known = []
    if results.exists():
        known = [json.loads(line) for line in results.read_text().splitlines()]
    cells = list(REQUIRED)
    if args.all:
        every = product(["kto", "dpo"], SIZES, PROFILES, ["fp32", "bf16"], MODES)
        cells += [c for c in every if c not in REQUIRED]
    print_versions(python)
    print(
        "| cell | TRL | speed | range | our useful tokens/s | TRL's | our peak GiB | TRL's | memory | cores busy | "
        "loss off by |"
    )
    print("| --- " * 11 + "|")
    for spec in cells:
        if not all(word in spec for word in args.words):
            continue
        rows = [r for r in known if r["cell"] == list(spec)]
        if not rows:
            rows = cell(python, *spec)
            with results.open("a") as f:
                f.writelines(json.dumps(r) + "\n" for r in rows)
        for row in rows:
            print_row(row)


def print_versions(python: str) -> None:
    """Print the versions in TRL's environment, and this machine's cores."""
    code = "import sys, torch, trl, transformers as t; print(torch.__version__, trl.__version__, t.__version__)"
    output = subprocess.run([python, "-c", code], capture_output=True, text=True).stdout
    print("torch {}, trl {}, transformers {};".format(*output.split()), os.cpu_count(), "cores\n")


if __name__ == "__main__":
    main()

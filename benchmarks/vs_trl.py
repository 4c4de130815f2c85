"""KTO and DPO beside TRL's trainers: the same weights, records, token ids, batches, precision and optimizer.

    python benchmarks/vs_trl.py              # the required cells of RESULTS.md, hours
    python benchmarks/vs_trl.py kto 8M       # those with both words in their name
    python benchmarks/vs_trl.py --all        # all there are

A cell that stands in benchmarks/vs_trl.jsonl is printed from there and not run again. TRL runs in an environment of
its own, made here (litgpt's pins would hold it back in ours). Each run is a process; they take turns, A B B A. Both
print the loss of every step, and these must agree: TRL borrows the previous completion of a batch where we borrow the
next, so it gets each batch in reverse order. Time is from the end of the first step to the end of the last, by the
wall. Useful tokens: prompt and completion tokens of the rated examples (of pairs: the prompt once, both completions),
no padding. Peak memory is the process's maximum resident set after the last step, libraries included.
"""

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
    "8M": (4, 256, 4, 16384),
    "30M": (6, 384, 6, 50257),
    "124M": (12, 768, 12, 50257),
}
PROFILES = {  # median tokens of prompt and completion; sorted: as a user who sorts the records by length to pad less
    "200/120": (200, 120),
    "400/60": (400, 60),
    "48/48": (48, 48),
    "200/120-sorted": (200, 120),
}
BATCH = 8
STEPS = {"8M": 5, "30M": 3, "124M": 1}  # timed; one more goes before
PAIRS = {"8M": 5, "30M": 5, "124M": 3}
MODES = {  # ours, and the ways that TRL runs beside it
    "full": ({}, {"best": {}, "completion-only head": {"compact": True}}),
    "defaults": ({}, {"defaults": {"gradient_checkpointing": True}}),
    "precomputed": (
        {"reference_cache": "OUT"},
        {"precomputed": {"precompute_ref_log_probs": True}},
    ),
    "lora": ({"lora.rank": 8}, {"lora": {"lora": True}}),
}
REQUIRED = [
    *product(["kto"], ["8M"], ["200/120", "400/60"], ["fp32", "bf16"], ["full"]),
    ("dpo", "8M", "400/60", "fp32", "full"),
    ("kto", "8M", "200/120-sorted", "fp32", "full"),
    ("kto", "8M", "200/120", "fp32", "precomputed"),
    ("kto", "8M", "200/120", "fp32", "defaults"),
    *product(["kto"], ["124M"], ["200/120", "400/60"], ["fp32", "bf16"], ["full"]),
    ("dpo", "124M", "400/60", "fp32", "full"),
    *product(["kto"], ["30M"], ["200/120", "400/60"], ["fp32", "bf16"], ["full"]),
]


# ---- what both are given --------------------------------------------------------------------------------------------


def records(kind: str, size: str, profile: str) -> list[dict]:
    """Random words, lengths log-normal (sigma 0.5) about the profile's medians, at most three times them."""
    rng, (x, y), vocab = random.Random(1), PROFILES[profile], SIZES[size][3]

    def text(median):
        n = min(3 * median, 1000 - 3 * y, max(4, round(rng.lognormvariate(0, 0.5) * median)))
        return " ".join(f"w{rng.randrange(1, vocab)}" for _ in range(n))

    n = BATCH * (STEPS[size] + 1)
    if kind == "kto":
        rows = [
            {"prompt": text(x), "completion": f" {text(y)}", "label": bool(i % 2)} for i in range(n)
        ]
    else:
        rows = [
            {"prompt": text(x), "chosen": f" {text(y)}", "rejected": f" {text(y)}"}
            for _ in range(n)
        ]
    return sorted(rows, key=tokens) if profile.endswith("sorted") else rows


def tokens(record: dict) -> int:
    return sum(
        len(v.split()) + (k != "prompt") for k, v in record.items() if k != "label"
    )  # an EOS each


def histogram(rows: list[dict]) -> str:
    """Lengths of prompts and completions in eighths."""
    out = []
    for name, keys in (
        ("prompt", ["prompt"]),
        ("completion", ["completion", "chosen", "rejected"]),
    ):
        n = sorted(len(r[k].split()) for r in rows for k in keys if k in r)
        out.append(f"{name} " + " ".join(str(n[round(q / 8 * (len(n) - 1))]) for q in range(9)))
    return "; ".join(out)


def model_folder(name: str, shape: tuple[int, int, int, int], positions: int = 1024) -> Path:
    """A Hugging Face folder: GPT-2's shape, random weights, a tokenizer with a token a word."""
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
        for name, rows, columns in [
            ("attn.c_attn", 1, 3),
            ("attn.c_proj", 1, 1),
            ("mlp.c_fc", 1, 4),
            ("mlp.c_proj", 4, 1),
        ]:
            w[f"h.{i}.{name}.weight"] = torch.randn(rows * width, columns * width) * 0.02
            w[f"h.{i}.{name}.bias"] = torch.zeros(columns * width)
        for name in ("ln_1", "ln_2"):
            w |= {
                f"h.{i}.{name}.weight": torch.ones(width),
                f"h.{i}.{name}.bias": torch.zeros(width),
            }
    w |= {"ln_f.weight": torch.ones(width), "ln_f.bias": torch.zeros(width)}
    save_file(
        {f"transformer.{k}": x for k, x in w.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = dict(
        model_type="gpt2", architectures=["GPT2LMHeadModel"], n_layer=layers, n_embd=width, n_head=heads,
        vocab_size=vocab, n_positions=positions, layer_norm_epsilon=1e-5, activation_function="gelu_new",
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    words = Tokenizer(
        models.WordLevel({"<eos>": 0, **{f"w{i}": i for i in range(1, vocab)}}, unk_token="<eos>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["<eos>"])
    words.save(str(folder / "tokenizer.json"))
    named = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "<eos>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


# ---- the two sides; each runs in a process of its own, prints one line, and needs nothing of the other's ------------


def told(spec: dict, losses: list[float], ends: list[float], **more) -> None:
    """ends: by the wall, the end of each step."""
    import torch

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / 2**30
    seconds = ends[-1] - ends[spec.get("warmup", 1) - 1]
    print(
        "RESULT " + json.dumps({"losses": losses, "seconds": seconds, "peak_gib": peak} | more),
        flush=True,
    )


def limits(profile: str) -> dict:
    """The longest prompt and completion (with its EOS) that records() makes."""
    y = PROFILES[profile][1]
    return {"data.max_prompt": 1000 - 3 * y, "data.max_completion": 3 * y + 1}


def arguments(spec: dict, out: str) -> list[str]:
    """Our command line, of a run in `out`."""
    settings = {
        "model": spec["model"], "out_dir": f"{out}/run", "batch_size": BATCH, "data.train": spec["records"],
        "precision": {"fp32": "32-true", "bf16": "bf16-mixed"}[spec["precision"]], "data.shuffle": "false",
        "optim.lr": 1e-4, "optim.schedule": "constant", "progress": "false", "eval.samples": 0,
        "val_interval": "null", "save_interval": "null",
        **{k: x if x != "OUT" else f"{out}/cache" for k, x in spec["ours"].items()},
    }  # fmt: skip
    return [f"--{name}={value}" for name, value in settings.items()]


def ours(spec: dict) -> None:
    sys.path[0] = str(HERE.parent)
    import csv

    import torch

    from runs.logger import Logger

    ends, first, step, profiler = [], 0.0, Logger.step, None

    def noted(self, n, row):
        nonlocal first, profiler
        first = first or time.time()
        step(self, n, row)
        if profiler is None:
            ends.append(time.perf_counter())
        if n == self.progress.total:
            raise StopIteration  # neither checkpoint nor export
        if n == self.progress.total - spec.get("profile", 0):  # the last steps show where time goes
            kinds = torch.profiler.ProfilerActivity
            kind = kinds.CUDA if torch.cuda.is_available() else kinds.CPU
            profiler = torch.profiler.profile(activities=[kind])
            profiler.start()

    with tempfile.TemporaryDirectory() as out:
        argv = arguments(spec, out)
        program = __import__(spec["kind"])
        Logger.step = noted
        try:
            program.main(argv)
        except StopIteration:
            pass
        rows, first = (
            list(csv.DictReader(open(f"{out}/run/metrics.csv"))),
            first - spec.get("began", first),
        )
        told(
            spec,
            [float(r["loss"]) for r in rows],
            ends,
            flops=[float(r["tflops/s"]) for r in rows],
            first=first,
            **where_time_goes(profiler),
        )


def where_time_goes(profiler) -> dict:
    """The share of the profiled steps in which the device did nothing; its five largest kernels."""
    if profiler is None:
        return {}
    profiler.stop()
    spans, kernels = [], {}
    for e in profiler.events():
        if str(e.device_type).endswith("CUDA"):
            spans.append((e.time_range.start, e.time_range.end))
            kernels[e.name] = kernels.get(e.name, 0) + e.time_range.end - e.time_range.start
    if not spans:
        return {}
    busy, until = 0.0, 0.0
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    whole = until - min(spans)[0]
    most = sorted(kernels.items(), key=lambda x: -x[1])[:5]
    share = {name[:60]: round(time / whole, 3) for name, time in most}
    return {"idle": 1 - busy / whole, "kernels": share}


def trl(spec: dict) -> None:
    import datasets
    import torch
    import transformers
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

    settings = {"gradient_checkpointing": False} | spec["trl"]
    if settings.pop("compact", False):  # what TRL does on CUDA: the head on completion tokens only
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
    kto = spec["kind"] == "kto"
    if not kto:
        settings |= {"train_sampling_strategy": "sequential"}
    args = (KTOConfig if kto else DPOConfig)(
        output_dir=str(OUT / "trl"), bf16=spec["precision"] == "bf16", per_device_train_batch_size=size,
        use_cpu=not torch.cuda.is_available(),
        learning_rate=1e-4, lr_scheduler_type="constant", weight_decay=0.0, max_length=1024, logging_steps=1, beta=0.1,
        save_strategy="no", report_to="none", disable_tqdm=True, dataloader_pin_memory=False, num_train_epochs=1,
        **settings,
    )  # fmt: skip
    losses, ends = [], []

    class Noted(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            ends.append(time.perf_counter())

        def on_log(self, _args, _state, _control, logs=None, **__):
            if "loss" in logs:
                losses.append(logs["loss"])

    load = transformers.AutoModelForCausalLM.from_pretrained
    dtype = torch.bfloat16 if spec.get("bf16_weights") else torch.float32
    policy, reference = load(spec["model"], dtype=dtype), None
    if not (peft or settings.get("precompute_ref_log_probs")):
        reference = load(spec["model"], dtype=dtype)
    (KTOTrainer if kto else DPOTrainer)(
        model=policy, ref_model=reference, args=args, train_dataset=datasets.Dataset.from_list(rows), peft_config=peft,
        processing_class=transformers.AutoTokenizer.from_pretrained(spec["model"]), callbacks=[Noted()],
    ).train()  # fmt: skip
    told(spec, losses, ends)


# ---- taking turns ---------------------------------------------------------------------------------------------------


def environment() -> str:
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
    done = subprocess.run(
        [python, __file__, f"--{side}", json.dumps(spec)], capture_output=True, text=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(
            f"{side}: {json.dumps(spec)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    return json.loads(lines[0][7:])


def cell(python: str, kind: str, size: str, profile: str, precision: str, mode: str) -> list[dict]:
    """The rows of a cell: ours beside each way that TRL runs."""
    rows, file = (
        records(kind, size, profile),
        OUT / f"{kind}-{size}-{profile.replace('/', '-')}.jsonl",
    )
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    settings, ways = MODES[mode]
    spec = {
        "kind": kind,
        "precision": precision,
        "records": str(file),
        "ours": limits(profile) | settings,
    }
    spec["model"] = str(model_folder(size, SIZES[size]))
    useful, results = sum(map(tokens, rows[BATCH:])), {name: [] for name in ["ours", *ways]}
    for i in range(PAIRS[size]):
        for name in list(results) if i % 2 == 0 else reversed(results):
            one = (
                once(sys.executable, "ours", spec)
                if name == "ours"
                else once(python, "trl", spec | {"trl": ways[name]})
            )
            results[name].append(one)
    ours, out = results["ours"], []
    for name in ways:
        trl, n = results[name], STEPS[size]
        off = max(abs(a - b) / abs(b) for a, b in zip(ours[0]["losses"][:n], trl[0]["losses"][:n]))
        if (
            off > (1e-4 if precision == "fp32" else 1e-2) and mode != "lora"
        ):  # adapters start at other random numbers
            raise SystemExit(f"not the same training: {ours[0]['losses']} and {trl[0]['losses']}")
        ratios = sorted(t["seconds"] / o["seconds"] for o, t in zip(ours, trl))
        speed, theirs = (
            useful / statistics.median(r["seconds"] for r in side) for side in (ours, trl)
        )
        peak, peaks = (statistics.median(r["peak_gib"] for r in side) for side in (ours, trl))
        out.append({
            "cell": [kind, size, profile, precision, mode], "trl": name, "ratio": statistics.median(ratios),
            "range": [ratios[0], ratios[-1]], "tokens_s": [speed, theirs], "peak_gib": [peak, peaks], "loss_off": off,
            "lengths": histogram(rows),
        })  # fmt: skip
    return out


def main() -> None:
    if len(sys.argv) > 2 and sys.argv[1] in ("--ours", "--trl"):
        return {"--ours": ours, "--trl": trl}[sys.argv[1]](json.loads(sys.argv[2]))
    OUT.mkdir(parents=True, exist_ok=True)
    python, results = environment(), HERE / "vs_trl.jsonl"
    known = (
        [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    )
    every = (
        [*product(["kto", "dpo"], SIZES, PROFILES, ["fp32", "bf16"], MODES)]
        if "--all" in sys.argv
        else []
    )
    words = [a for a in sys.argv[1:] if a != "--all"]
    versions = "import sys, torch, trl, transformers as t; print(torch.__version__, trl.__version__, t.__version__)"
    said = subprocess.run([python, "-c", versions], capture_output=True, text=True).stdout.split()
    print("torch {}, trl {}, transformers {};".format(*said), os.cpu_count(), "cores\n")
    print(
        "| cell | TRL | speed | range | our useful tokens/s | TRL's | our peak GiB | TRL's | memory | loss off by |"
    )
    print("| --- " * 10 + "|")
    for spec in [*REQUIRED, *(c for c in every if c not in REQUIRED)]:
        if not all(w in spec for w in words):
            continue
        rows = [r for r in known if r["cell"] == list(spec)]
        if not rows:
            rows = cell(python, *spec)
            with results.open("a") as f:
                f.writelines(json.dumps(r) + "\n" for r in rows)
        for r in rows:
            (low, high), (a, b), (x, y) = r["range"], r["tokens_s"], r["peak_gib"]
            print(
                f"| {' '.join(spec)} | {r['trl']} | {r['ratio']:.2f} | {low:.2f} to {high:.2f} | {a:,.0f} | {b:,.0f} "
                f"| {x:.2f} | {y:.2f} | {x / y:.2f} | {r['loss_off']:.0e} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""What a GPU makes of this project: the tests that need one, steps of three models of full size, sampling,
and TRL beside it. It prints rows that replace the predicted ones of docs/speed.md.

    python benchmarks/gpu.py               # all, under 30 minutes on one GPU of 80 GB
    python benchmarks/gpu.py gpt2 trl      # these parts only: tests, gpt2, gpt2-xl, llama8b-lora, sampling, trl
    python benchmarks/gpu.py tiny          # a small step to try this file out, on a CPU too

- It needs no network. Models have random weights, records random words. Under out/gpu it writes 23 GB;
  Llama 8B is read into 64 GB of main memory (in float32, twice). A part that fails says why, and the next one begins.
- A step is 64 ratings, prompts and completions of 200 tokens each on average, in micro-batches of 16,384
  tokens. Five steps warm up, five are timed by the clock: with packing, without the checks before the first
  step. In the twelfth, which writes no row, torch warns at each wait for the device; these are counted.
- tokens/s and MFU are the columns of metrics.csv (docs/columns.md), of the same five steps.
- TRL runs where `python benchmarks/vs_trl.py` has made its environment before (this needs a network).
"""

import csv
import json
import os
import random
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import vs_trl

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "out" / "gpu"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
LLAMA = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336}
LLAMA |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA |= {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_parameters": LLAMA3}
LORA = {"precision": "bf16-true", "activation_checkpointing": "true"}
LORA |= {"lora.rank": 16, "lora.alpha": 32}
TINY = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 99}
MODELS = {  # name: type, fields of its config, settings
    "tiny": ("gpt2", TINY, {"batch_size": 4}),
    "gpt2": ("gpt2", {}, {}),
    "gpt2-xl": ("gpt2", {"n_embd": 1600, "n_layer": 48, "n_head": 25}, {}),
    "llama8b-lora": ("llama", LLAMA, LORA),
}
BATCH, TOKENS = 64, 200
HEAD = (
    "| GPU | model | ms a step | tokens/s | MFU | waits a step | peak GB |\n" + "| --- " * 7 + "|"
)
WARM_UP, TIMED = 5, 5
LAST = WARM_UP + TIMED + 2  # the step whose waits are counted


def say(text: str) -> None:
    print(text, flush=True)


# ---- a step --------------------------------------------------------------------------------------


def model_folder(name: str) -> Path:
    """A Hugging Face folder of this model with random weights. A folder that is there is used again."""
    import torch
    import transformers

    kind, fields, settings = MODELS[name]
    folder = OUT / name
    if (folder / "tokenizer_config.json").exists():  # written last
        return folder
    config = transformers.CONFIG_MAPPING[kind](**fields, bos_token_id=0, eos_token_id=0)
    dtype = torch.bfloat16 if settings.get("precision") == "bf16-true" else torch.float32
    torch.manual_seed(1)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    vs_trl.save_words(folder, config.vocab_size)
    return folder


def records_file(vocab: int, batch_size: int) -> Path:
    """Ratings of random words for all steps."""
    rng = random.Random(1)

    def text() -> str:
        n = max(8, round(rng.gauss(TOKENS, 0.3 * TOKENS)))
        return " ".join(f"w{rng.randrange(1, vocab)}" for _ in range(n))

    file = OUT / f"ratings-{vocab}-{batch_size}.jsonl"
    with open(file, "w") as f:
        for i in range(batch_size * (LAST + 1)):
            f.write(
                json.dumps({"prompt": text(), "completion": text(), "label": bool(i % 2)}) + "\n"
            )
    return file


def run_steps(name: str) -> dict:
    """kto.py in this process, which ends with step LAST. Prints what was measured as JSON."""
    sys.path.append(str(HERE.parent))
    import torch

    import kto
    from trainer import Trainer

    on_gpu = torch.cuda.is_available()
    folder, out = model_folder(name), OUT / f"run-{name}"
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    ends, waits = [], []

    class Measured(Trainer):
        def optimizer_step(self, plan):
            lr = super().optimizer_step(plan)
            ends.append(time.perf_counter())  # the check of the norm has waited for the gradient
            if len(ends) == LAST - 1 and on_gpu:
                torch.cuda.set_sync_debug_mode("warn")
                waits.append(warnings.catch_warnings(record=True).__enter__())
                warnings.simplefilter("always")
            if len(ends) == LAST:
                print_result()
            return lr

    def print_result():
        with open(out / "metrics.csv") as f:
            row = list(csv.DictReader(f))[1]  # of the timed steps
        result = {name: float(row[name] or 0) for name in ("tokens/s", "mfu", "memory_gb")}
        result["ms"] = (ends[WARM_UP + TIMED - 1] - ends[WARM_UP - 1]) / TIMED * 1e3
        result["waits"] = sum("synchronizing" in str(w.message) for w in waits[0]) if on_gpu else 0
        result["device"] = torch.cuda.get_device_name() if on_gpu else "CPU"
        say(json.dumps(result))
        os._exit(0)  # no checkpoint, no export

    settings = {
        "model": folder, "out_dir": out, "batch_size": BATCH, "micro_batch_tokens": 16384,
        "data.max_prompt": 512, "data.max_completion": 512, "max_steps": LAST + 1,
        "log_interval": WARM_UP, "progress": "false", "eval.samples": 0, "val_interval": "null",
        "save_interval": "null",
    } | MODELS[name][2]  # fmt: skip
    settings["data.train"] = records_file(vocab, settings["batch_size"])
    kto.main([f"--{key}={value}" for key, value in settings.items()], trainer=Measured)


def print_step(name: str) -> None:
    """The row of a model, measured in a process of its own."""
    shutil.rmtree(OUT / f"run-{name}", ignore_errors=True)  # of an earlier measurement
    printed = vs_trl.run_process([sys.executable, __file__, "--steps", name, str(OUT)])
    r = json.loads(printed.splitlines()[-1])
    mfu = f"{r['mfu']:.0%}" if r["mfu"] else "-"  # of a GPU whose peak is known
    say(HEAD)
    say(
        f"| {r['device']} | {name} | {r['ms']:,.0f} | {r['tokens/s']:,.0f} | {mfu} "
        f"| {r['waits']} | {r['memory_gb']:.1f} |"
    )


# ---- the parts -----------------------------------------------------------------------------------


def print_tests() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "gpu"]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True)
    lines = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
    say("\n".join([*lines, *done.stdout.splitlines()[-1:], *done.stderr.splitlines()[-3:]]))


def print_sampling() -> None:
    command = [sys.executable, HERE / "sampling.py", "--model", model_folder("gpt2")]
    say(vs_trl.run_process(command).rstrip())


def print_trl() -> None:
    if not (vs_trl.OUT / "venv").exists():
        say("TRL is not installed: `python benchmarks/vs_trl.py kto 5.5M 200/120 bf16` installs it")
        return
    vs_trl.STEPS["124M"], vs_trl.BATCH = 20, 32
    say(vs_trl.HEAD)
    for row in vs_trl.run_cell("kto", "124M", "200/120", "bf16", ["best"]):
        vs_trl.print_row(row)


PARTS = {"tests": print_tests}
PARTS |= {name: lambda name=name: print_step(name) for name in MODELS}
PARTS |= {"sampling": print_sampling, "trl": print_trl}


def main() -> None:
    if unknown := {*sys.argv[1:]} - {*PARTS}:
        raise SystemExit(
            f"{', '.join(unknown)}: no such part; there are {', '.join(PARTS)}\n{__doc__}"
        )
    OUT.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or [name for name in PARTS if name != "tiny"]:
        began = time.perf_counter()
        say(f"\n{name}")
        try:
            PARTS[name]()
        except SystemExit as e:  # a process of this part has failed
            say(f"failed: {str(e)[-2000:]}")
        say(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--steps"]:  # a process that print_step started
        OUT = Path(sys.argv[3])
        run_steps(sys.argv[2])
    else:
        main()

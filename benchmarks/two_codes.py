"""One model by litgpt's code and by transformers' own class: are ten steps' losses equal, and what do they cost?

    python benchmarks/two_codes.py [--repeats 3]

For each of three types kto.py trains a model with random weights (4 layers x 192) on texts of about 200 tokens, by
each code in turns, on one thread. It prints the largest difference of a loss, and medians of the ratio
transformers / litgpt: of the tokens per second after the first two steps, and of the peak memory.
"""

import argparse
import csv
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHAPE = dict(hidden_size=192, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4)
SHAPE |= dict(intermediate_size=512, max_position_embeddings=512, head_dim=32)
WINDOW = dict(sliding_window=64, layer_types=["sliding_attention", "full_attention"] * 2)
TYPES = {"llama": {}, "qwen3": {}, "gemma3_text": WINDOW}
CODES = ("litgpt", "transformers")


def make_model(kind: str, folder: Path) -> None:
    import torch
    import transformers

    tokenizer = ROOT / "demo" / "base"
    vocabulary = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    torch.manual_seed(1)
    fields = SHAPE | TYPES[kind] | {"vocab_size": vocabulary}
    config = transformers.CONFIG_MAPPING[kind].from_dict(fields)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in tokenizer.iterdir():
        if "token" in file.name or "vocab" in file.name or "template" in file.name:
            shutil.copy(file, folder)


def make_data(file: Path) -> None:
    """40 ratings, each of some 100 + 100 tokens."""
    r = random.Random(1)
    text = (ROOT / "demo" / "train.jsonl").read_text()
    texts = [json.loads(line)["prompt"] for line in text.splitlines()[:2000]]

    def long_text():
        return " ".join(r.choices(texts, k=8))

    with open(file, "w") as f:
        for i in range(40):
            record = {"prompt": long_text(), "completion": long_text(), "label": i % 2 == 0}
            f.write(json.dumps(record) + "\n")


def run(model: Path, data: Path, code: str, out: Path) -> tuple[list[float], float, float]:
    """-> losses, tokens per second, peak memory in GB"""
    argv = [sys.executable, "kto.py", "--model", model, "--data.train", data, "--out_dir", out]
    argv += ["--model_code", code, "--max_steps", "10", "--batch_size", "4", "--optim.lr", "1e-4"]
    argv += [
        "--val_interval",
        "null",
        "--save_interval",
        "null",
        "--precision",
        "32-true",
        "--epochs",
        "1",
    ]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    subprocess.run(list(map(str, argv)), cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL)
    with open(out / "metrics.csv") as f:
        rows = list(csv.DictReader(f))
    speed = statistics.median(float(row["tokens/s"]) for row in rows[2:])
    return [float(row["loss"]) for row in rows], speed, float(rows[-1]["memory_gb"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        make_data(folder / "data.jsonl")
        for kind in TYPES:
            make_model(kind, folder / kind)
            differences, speeds, memories = [], [], []
            for i in range(repeats):
                order = CODES if i % 2 == 0 else CODES[::-1]
                out = {}
                for code in order:
                    to = folder / f"{kind}-{code}-{i}"
                    out[code] = run(folder / kind, folder / "data.jsonl", code, to)
                a, b = out["litgpt"], out["transformers"]
                differences.append(max(abs(x - y) for x, y in zip(a[0], b[0])))
                speeds.append(b[1] / a[1])
                memories.append(b[2] / a[2])
            ratios = ", ".join(f"{x:.2f}" for x in speeds)
            print(
                f"{kind}: loss within {max(differences):.1e}; tokens/s x {statistics.median(speeds):.2f} "
                f"({ratios}); memory x {statistics.median(memories):.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()

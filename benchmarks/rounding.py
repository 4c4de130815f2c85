"""What rounding leaves of a full fine-tuning: a bfloat16 model on disk, trained in float32, exported in bfloat16.

    python examples/smollm2.py                     # the model, once: out/smollm2-135m
    python benchmarks/rounding.py                  # -> out/rounding, and a table

Each run trains a copy of the model in bfloat16 with kto.py on 192 rated sentences: right are those that begin with the
word that the prompt asks for. Its last checkpoint is then exported in float32, in bfloat16 with three seeds of
stochastic rounding, and in bfloat16 with rounding to nearest. transformers computes, in float32 on 48 sentences about
other topics: the margin (beta times the mean log-ratio of the right ones minus that of the wrong ones), the share of
sentences whose log-ratio has the right sign, and KL(float32 || exported) a token of the sentences.
"""

import json
import random
import shutil
import sys
from pathlib import Path

sys.path.append(f"{sys.path[0]}/..")  # the project, wherever this file is started from
sys.path.append(f"{sys.path[0]}/../examples")

import torch
import transformers
from instructions import OPENINGS, TRAIN_TOPICS, VAL_TOPICS, topics_of
from safetensors.torch import load_file, save_file

import kto
from infra.settings import Export
from models.export import export
from models.hub import Source
from models.load import load_model

MODEL, OUT = Path("out/smollm2-135m"), Path("out/rounding")
STEPS, BETA = 24, 0.1
ENDS = (
    "are worth a closer look",
    "matter more than most people think",
    "can be found in many places",
    "have a long history",
    "teach us to be patient",
)


def write_base(out: Path) -> None:
    """The model with its weights in bfloat16."""
    shutil.copytree(MODEL, out)
    weights = load_file(MODEL / "model.safetensors")
    weights = {name: x.bfloat16() for name, x in weights.items()}
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}, indent=2))


def write_data(out: Path) -> None:
    rng = random.Random(1)
    for part, text, n in (("train", TRAIN_TOPICS, 192), ("val", VAL_TOPICS, 48)):
        topics, lines = topics_of(text), []
        for i in range(n):
            topic, word, end = topics[i % len(topics)], rng.choice(OPENINGS), rng.choice(ENDS)
            right, wrong = f" {word}, {topic} {end}.", f" {topic[0].upper()}{topic[1:]} {end}."
            record = {
                "prompt": f'Write one sentence about {topic}. Begin it with the word "{word}".',
                "completion": wrong if i % 2 else right,
                "label": not i % 2,
            }
            lines.append(json.dumps(record) + "\n")
        (out / f"{part}.jsonl").write_text("".join(lines))


def train(base: Path, data: Path, lr: str, out: Path) -> None:
    settings = {
        "model": base, "data.train": data / "train.jsonl", "data.val": data / "val.jsonl",
        "data.max_prompt": 64, "data.max_completion": 32, "batch_size": 192 // STEPS,
        "precision": "32-true", "optim.lr": lr, "kto.beta": BETA, "eval.samples": 0, "out_dir": out,
        "resume": "auto", "save_interval": 4,
    }  # fmt: skip
    kto.main([f"--{name}={value}" for name, value in settings.items()])


@torch.no_grad()
def score(folder: Path, records: list[dict]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """-> log-probs of the completions (n,), and of each the log-probs of all next tokens (T, V)."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    auto = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    logps, distributions = [], []
    for record in records:
        prompt = tokenizer.encode(record["prompt"])
        completion = [*tokenizer.encode(record["completion"]), tokenizer.eos_token_id]
        logits_LV = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        logp_TV = logits_LV.log_softmax(-1)
        distributions.append(logp_TV)
        logps.append(logp_TV[torch.arange(len(completion)), completion].double().sum())
    return torch.stack(logps), distributions


def row(name: str, lr: str, folder: Path, base: Path, of_base, of_trained, records) -> str:
    """A row of the table."""
    logps, distributions = score(folder, records)
    is_right = torch.tensor([r["label"] for r in records])
    r = logps - of_base[0]
    margin = BETA * (r[is_right].mean() - r[~is_right].mean())
    share = ((r > 0) == is_right).float().mean()
    kl = [(p.exp() * (p - q)).sum(-1) for p, q in zip(of_trained[1], distributions)]
    old, new = (load_file(x / "model.safetensors") for x in (base, folder))
    n_same = sum((new[x].float() == old[x].float()).sum().item() for x in old)
    same = n_same / sum(x.numel() for x in old.values())
    return (
        f"| {lr} | {name} | {margin:.4f} | {share:.1%} | {torch.cat(kl).mean():.2e} | {same:.1%} |"
    )


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    base, table = OUT / "base", []
    if not base.exists():
        write_base(base)
    write_data(OUT)
    records = [json.loads(line) for line in (OUT / "val.jsonl").read_text().splitlines()]
    of_base, source = score(base, records), Source(base)
    for lr in ("1e-6", "5e-6"):
        run = OUT / f"lr-{lr}"
        if not (run / "final").exists():
            train(base, OUT, lr, run)
        gpt = load_model(Source(run / "checkpoints" / f"step-{STEPS:08d}", source))
        choices = {"float32": (Export("float32"), 1)}
        choices |= {f"stochastic, seed {s}": (Export("bfloat16"), s) for s in (1, 2, 3)}
        choices["nearest"] = Export("bfloat16", "nearest"), 1
        of_trained = None
        for name, (choice, seed) in choices.items():
            folder = OUT / "export"
            shutil.rmtree(folder, ignore_errors=True)
            export(source, gpt.rows, gpt.unique_parameters(), folder, choice=choice, seed=seed)
            of_trained = of_trained or score(folder, records)
            table.append(row(name, lr, folder, base, of_base, of_trained, records))
            print(table[-1], flush=True)
    print("\n".join(table))


if __name__ == "__main__":
    main()

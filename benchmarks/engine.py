"""Sampling beside a vLLM server, in turns, and how far its log-probs are from ours: the same model and prompts.

    vllm serve FOLDER ... (examples/vllm_server.py prints the command)
    python benchmarks/engine.py --model FOLDER --server http://127.0.0.1:8000 --precision 32-true

- 48 prompts of 40 to 70 tokens, of random words, and answers of exactly so many tokens (--new). All are asked at once.
- Both run on the same cores, A B B A: while one works the other waits. The gap is that of a run, engine/gap, over all
  answers.
"""

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from lightning.fabric import Fabric

import rollout
import sampler
from data import Budget
from infra.settings import ROOT, Sampling
from models import load
from models.hub import find_model
from records.examples import Example
from records.tokenizer import Tokenizer

sys.path.append(str(ROOT / "examples"))

from vllm_server import EngineSettings, Server  # noqa: E402

ROWS = 48


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, type=Path, help="a Hugging Face folder")
    parser.add_argument("--server", required=True, help="the server's address")
    parser.add_argument("--precision", default="32-true", help="of our side")
    parser.add_argument("--new", default=96, type=int, help="tokens of an answer")
    args = parser.parse_args()
    dtype = torch.bfloat16 if args.precision == "bf16-true" else torch.float32
    fabric = Fabric(accelerator="auto", devices=1, precision=args.precision)
    policy = fabric.setup_module(load.load_model(str(args.model), dtype=dtype))
    tokenizer = Tokenizer(find_model(str(args.model)))
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1000, 40_000, n).astype("int32") for n in rng.integers(40, 71, ROWS)]
    sampling = Sampling(batch_size=ROWS)
    server = Server(EngineSettings(server=args.server, timeout=3600))
    server.load(args.model)

    def ours(seed, new=args.new):
        exactly = replace(sampling, min_new_tokens=new)
        return sampler.generate(fabric, policy, prompts, tokenizer, exactly, new, seed)

    def theirs(seed, new=args.new):
        exactly = replace(sampling, min_new_tokens=new)
        return server(args.model, [p.tolist() for p in prompts], exactly, new, seed)

    samplers = {"ours": ours, "the server": theirs}
    speeds = {name: [] for name in samplers}
    for sample in samplers.values():
        sample(0, new=8)
    for i, name in enumerate(["ours", "the server", "the server", "ours"], 1):
        began = time.perf_counter()
        given = samplers[name](i)
        speeds[name].append(ROWS * args.new / (time.perf_counter() - began))
        print(f"{name}: {speeds[name][-1]:.1f} tokens/s", flush=True)
        if name == "the server":
            last = given
    for name, values in speeds.items():
        median = statistics.median(values)
        print(f"{name:<12} {median:8,.0f} tokens/s  ({min(values):,.0f} to {max(values):,.0f})")
    rollout.COMPARED = ROWS
    examples = [Example(prompt, (), True) for prompt in prompts]
    run = SimpleNamespace(policy=policy, fabric=fabric, budget=Budget())
    gaps = rollout.engine_gaps(run, examples, last.answers, last.logps)
    gap = rollout.mean_gap(gaps, last.answers)
    print(
        f"the server's log-probs are {gap:.4f} nats a token off ours; of an answer at most {max(gaps):.4f}"
    )
    print(f"{args.precision}, torch {torch.__version__}, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()

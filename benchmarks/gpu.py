"""One GPU: useful tokens per second, MFU and memory of kto.py, beside TRL's KTOTrainer at its best.

    python benchmarks/gpu.py                        # all rows, one call; the table comes last
    python benchmarks/gpu.py --no-trl 124M          # ours alone, the rows with this word
    python benchmarks/gpu.py --check                # the same program on a tiny shape, wherever we are

Without a GPU the table says so and nothing runs. Random weights, prompts of 200 and completions of 120 tokens in the
median, bf16 (full fine-tuning: bf16-mixed; LoRA: a base in bf16). TRL: bf16, no checkpointing, its head on completion
tokens, as it comes and compiled; the better counts. MFU is of useful FLOPs, over the data sheet's peak and over the
rate of a product of 8192 x 8192 matrices in the same run. Idle: the share of three more steps in which no kernel ran;
the row's own line, printed before the table, names its five largest kernels. TRL must be importable, here or in the
environment that vs_trl.py makes.
"""

import importlib.util
import json
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:1] = [str(HERE.parent), str(HERE)]

import vs_trl  # noqa: E402

GPT2 = {  # layers, width, heads, vocabulary; examples a step
    "124M": ((12, 768, 12, 50257), 64),
    "355M": ((24, 1024, 16, 50257), 64),
    "774M": ((36, 1280, 20, 50257), 48),
    "1.5B": ((48, 1600, 25, 50257), 32),
}
LLAMA = {  # layers, width, heads, groups of keys, width of the MLP; LoRA
    "Llama 1B": ((16, 2048, 32, 8, 8192), 64),
    "Llama 3B": ((28, 3072, 24, 8, 8192), 48),
    "Llama 8B": ((32, 4096, 32, 8, 14336), 32),
}
TINY = {"check": ((2, 64, 2, 512), 8)}, {"check Llama": ((2, 64, 4, 2, 128), 8)}
STEPS, WARMUP, PROFILED = 10, 4, 3  # the first steps warm up, the last show where time goes


def llama_folder(name: str, shape, vocab: int, device: str) -> Path:
    """A Hugging Face folder of a Llama's shape, random weights in bfloat16, a tokenizer with a token a word."""
    import torch
    from safetensors.torch import save_file

    layers, width, heads, groups, mlp = shape
    folder = vs_trl.model_folder(name.replace(" ", "-"), (1, 64, 1, vocab))  # its tokenizer serves
    head = width // heads
    torch.manual_seed(1)

    def matrix(*size):
        return (torch.randn(*size, device=device, dtype=torch.bfloat16) * 0.02).cpu()

    w = {"model.embed_tokens.weight": matrix(vocab, width), "lm_head.weight": matrix(vocab, width)}
    w["model.norm.weight"] = torch.ones(width, dtype=torch.bfloat16)
    for i in range(layers):
        at = f"model.layers.{i}."
        for part, size in (("q", heads), ("k", groups), ("v", groups)):
            w[f"{at}self_attn.{part}_proj.weight"] = matrix(size * head, width)
        w[f"{at}self_attn.o_proj.weight"] = matrix(width, width)
        for part in ("gate", "up"):
            w[f"{at}mlp.{part}_proj.weight"] = matrix(mlp, width)
        w[f"{at}mlp.down_proj.weight"] = matrix(width, mlp)
        for part in ("input", "post_attention"):
            w[f"{at}{part}_layernorm.weight"] = torch.ones(width, dtype=torch.bfloat16)
    save_file(w, folder / "model.safetensors", metadata={"format": "pt"})
    config = dict(
        model_type="llama", architectures=["LlamaForCausalLM"], num_hidden_layers=layers, hidden_size=width,
        num_attention_heads=heads, num_key_value_heads=groups, intermediate_size=mlp, vocab_size=vocab,
        max_position_embeddings=1024, rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=False,
        hidden_act="silu", bos_token_id=0, eos_token_id=0, torch_dtype="bfloat16",
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def gemm() -> float:
    """bf16 FLOP/s of a large product on the GPU."""
    import torch

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(5):
        a @ b
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        a @ b
    torch.cuda.synchronize()
    return 20 * 2 * 8192**3 / (time.perf_counter() - began)


def row(name: str, shape, batch: int, lora: bool, vocab: int, trl: str | None, device: str) -> dict:
    folder = llama_folder(name, shape, vocab, device) if lora else vs_trl.model_folder(name, shape)
    vs_trl.SIZES["gpu"] = (0, 0, 0, vocab)
    vs_trl.STEPS["gpu"], vs_trl.BATCH = STEPS + PROFILED - 1, batch
    rows, file = vs_trl.records("kto", "gpu", "200/120"), vs_trl.OUT / "gpu.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    rows, timed = rows[: batch * STEPS], vs_trl.OUT / "gpu-timed.jsonl"
    timed.write_text("".join(json.dumps(r) + "\n" for r in rows))
    settings = vs_trl.limits("200/120") | {"batch_size": batch, "micro_batch_tokens": 65536}
    if lora:
        settings |= {"lora.rank": 8, "precision": "bf16-true"}
    spec = {
        "kind": "kto",
        "precision": "bf16",
        "records": str(file),
        "model": str(folder),
        "ours": settings,
    }
    spec |= {"batch": batch, "warmup": WARMUP, "bf16_weights": lora}
    useful = sum(map(vs_trl.tokens, rows[batch * WARMUP :]))
    try:
        one = vs_trl.once(sys.executable, "ours", spec | {"profile": PROFILED})
    except SystemExit as e:  # out of memory, say: the other rows are worth having
        print(str(e)[-1000:], file=sys.stderr, flush=True)
        return {"row": name, "failed": str(e).strip().splitlines()[-1][:60]}
    out = {"row": name, "tokens_s": useful / one["seconds"], "peak_gib": one["peak_gib"], "trl": {}}
    out |= {"idle": one.get("idle"), "kernels": one.get("kernels")}
    flops = sorted(one["flops"][WARMUP:])
    out["tflops"] = flops[len(flops) // 2]
    for way in ({}, {"torch_compile": True}) if trl else ():
        try:
            other = {"records": str(timed), "trl": way | ({"lora": True} if lora else {})}
            other = vs_trl.once(trl, "trl", spec | other)
        except SystemExit as e:  # a way that does not work there is not its best
            print(str(e)[-600:], file=sys.stderr)
            continue
        told = {"tokens_s": useful / other["seconds"], "peak_gib": other["peak_gib"]}
        out["trl"]["compiled" if way else "as it comes"] = told
    print(json.dumps(out), flush=True)
    return out


HEADER = (
    "| model | useful tokens/s | over TRL's best | MFU, data sheet | MFU, GEMM | TFLOP/s | idle | peak GiB | TRL's |\n"
    + ("| --- " * 9 + "|")
)


def main() -> None:
    import torch

    words, check = [a for a in sys.argv[1:] if not a.startswith("--")], "--check" in sys.argv
    gpu, (full, lora), vocab = (
        torch.cuda.is_available(),
        TINY if check else (GPT2, LLAMA),
        512 if check else 128256,
    )
    missing = "not yet measured"
    if not (gpu or check):
        print(HEADER)
        for name in [*full, *lora]:
            print(f"| {name} |" + f" {missing} |" * 8)
        return
    vs_trl.OUT.mkdir(parents=True, exist_ok=True)
    python, sheet, rate, done = None, 0.0, 0.0, []
    if "--no-trl" not in sys.argv:
        python = sys.executable if importlib.util.find_spec("trl") else vs_trl.environment()
    if gpu:
        from runs.metrics import peak_flops

        sheet, rate = peak_flops(torch.device("cuda"), "bf16-mixed"), gemm()
    for shapes, is_lora in ((full, False), (lora, True)):
        for name, (shape, batch) in shapes.items():
            if all(w in name for w in words):
                v = vocab if is_lora else shape[3]
                done.append(row(name, shape, batch, is_lora, v, python, "cuda" if gpu else "cpu"))
    print(
        f"\ntorch {torch.__version__}, {torch.cuda.get_device_name() if gpu else 'no GPU'}, {rate / 1e12:.0f} TFLOP/s\n"
    )
    print(HEADER)
    for r in done:
        if "failed" in r:
            print(f"| {r['row']} | {r['failed']} |" + " |" * 7)
            continue
        best = max(r["trl"].values(), key=lambda t: t["tokens_s"], default=None)
        over, theirs = missing, missing
        if best:
            over, theirs = f"{r['tokens_s'] / best['tokens_s']:.2f}", f"{best['peak_gib']:.1f}"
        mfu = [f"{r['tflops'] * 1e12 / x:.1%}" if x else missing for x in (sheet, rate)]
        cells = [
            r["row"],
            f"{r['tokens_s']:,.0f}",
            over,
            *mfu,
            f"{r['tflops']:.4g}",
            missing if r["idle"] is None else f"{r['idle']:.1%}",
            f"{r['peak_gib']:.1f}",
            theirs,
        ]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

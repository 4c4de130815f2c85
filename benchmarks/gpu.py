"""One GPU: useful tokens per second, MFU and memory of kto.py, beside TRL's KTOTrainer at its best.

    python benchmarks/gpu.py                        # all rows in one call; the table comes last
    python benchmarks/gpu.py --no-trl 124M          # without TRL, only the rows whose name has this word
    python benchmarks/gpu.py --check                # the same program on a tiny model, on a GPU or a CPU

Without a GPU nothing runs, and the table says "not yet measured".

- Models have random weights. Prompts have 200 tokens and completions 120 in the median.
- Precision: bf16-mixed for full fine-tuning, bf16-true for LoRA.
- TRL runs in bf16 without activation checkpointing, and its head runs on completion tokens only. It is measured twice,
  as shipped and compiled, and the better of the two counts.
- MFU is of useful FLOPs: over the peak in the data sheet, and over the rate of a product of two 8192 x 8192 matrices in
  the same run (GEMM).
- Idle is the share of three more steps in which no kernel ran. The row's own line, printed before the table, names the
  five kernels that took longest.
- TRL must be importable here; otherwise it runs in the environment that vs_trl.py makes.
"""

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:1] = [str(HERE.parent), str(HERE)]

import vs_trl  # noqa: E402

GPT2 = {  # ((layers, width, heads, vocabulary), examples a step)
    "124M": ((12, 768, 12, 50257), 64),
    "355M": ((24, 1024, 16, 50257), 64),
    "774M": ((36, 1280, 20, 50257), 48),
    "1.5B": ((48, 1600, 25, 50257), 32),
}
LLAMA = {  # with LoRA: ((layers, width, heads, key heads, width of the MLP), examples a step)
    "Llama 1B": ((16, 2048, 32, 8, 8192), 64),
    "Llama 3B": ((28, 3072, 24, 8, 8192), 48),
    "Llama 8B": ((32, 4096, 32, 8, 14336), 32),
}
TINY_GPT2 = {"check": ((2, 64, 2, 512), 8)}
TINY_LLAMA = {"check Llama": ((2, 64, 4, 2, 128), 8)}
# where a step of one micro-batch would not fit into an H100's 80 GB
MICRO_BATCH_TOKENS = {"Llama 3B": 8192, "Llama 8B": 4096}
STEPS = 10  # the WARMUP steps and the timed ones
WARMUP = 4
PROFILED = 3  # steps after these, which show where time goes
MISSING = "not yet measured"


def llama_folder(name: str, shape, vocab: int, device: str) -> Path:
    """A Hugging Face folder of a Llama with random weights in bfloat16, and a tokenizer whose tokens are words."""
    import torch
    from safetensors.torch import save_file

    layers, width, heads, key_heads, mlp = shape
    # a small GPT-2, for its tokenizer; its weights and config.json are replaced below
    folder = vs_trl.model_folder(name.replace(" ", "-"), (1, 64, 1, vocab))
    head_size = width // heads
    torch.manual_seed(1)

    def matrix(*size):
        return (torch.randn(*size, device=device, dtype=torch.bfloat16) * 0.02).cpu()

    w = {"model.embed_tokens.weight": matrix(vocab, width), "lm_head.weight": matrix(vocab, width)}
    w["model.norm.weight"] = torch.ones(width, dtype=torch.bfloat16)
    for i in range(layers):
        layer = f"model.layers.{i}."
        for part, n_heads in (("q", heads), ("k", key_heads), ("v", key_heads)):
            w[f"{layer}self_attn.{part}_proj.weight"] = matrix(n_heads * head_size, width)
        w[f"{layer}self_attn.o_proj.weight"] = matrix(width, width)
        for part in ("gate", "up"):
            w[f"{layer}mlp.{part}_proj.weight"] = matrix(mlp, width)
        w[f"{layer}mlp.down_proj.weight"] = matrix(width, mlp)
        for part in ("input", "post_attention"):
            w[f"{layer}{part}_layernorm.weight"] = torch.ones(width, dtype=torch.bfloat16)
    save_file(w, folder / "model.safetensors", metadata={"format": "pt"})
    config = dict(
        model_type="llama", architectures=["LlamaForCausalLM"], num_hidden_layers=layers, hidden_size=width,
        num_attention_heads=heads, num_key_value_heads=key_heads, intermediate_size=mlp, vocab_size=vocab,
        max_position_embeddings=1024, rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=False,
        hidden_act="silu", bos_token_id=0, eos_token_id=0, torch_dtype="bfloat16",
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def gemm() -> float:
    """FLOP/s of a large product in bfloat16 on the GPU."""
    import torch

    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(5):
        a @ b
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        a @ b
    torch.cuda.synchronize()
    return 20 * 2 * 8192**3 / (time.perf_counter() - began)


def write_records(file: Path, records: list[dict]) -> None:
    file.write_text("".join(json.dumps(r) + "\n" for r in records))


def measure(name: str, shape, batch: int, lora: bool, vocab: int, trl: str | None) -> dict:
    """Run our program, and TRL's if `trl` is a Python that has it, on a model of this shape with `batch` examples a
    step. -> {"row": name, ...}, which main() makes a line of the table of"""
    import torch

    if lora:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        folder = llama_folder(name, shape, vocab, device)
    else:
        folder = vs_trl.model_folder(name, shape)
    # vs_trl.records makes a warm-up step more than STEPS says
    vs_trl.SIZES["gpu"] = (0, 0, 0, vocab)
    vs_trl.STEPS["gpu"] = STEPS + PROFILED - 1
    vs_trl.BATCH = batch
    records = vs_trl.records("kto", "gpu", "200/120")
    file, timed_file = vs_trl.OUT / "gpu.jsonl", vs_trl.OUT / "gpu-timed.jsonl"
    write_records(file, records)
    timed = records[: batch * STEPS]  # TRL gets no steps to profile
    write_records(timed_file, timed)
    useful = sum(map(vs_trl.tokens, timed[batch * WARMUP :]))
    micro_batch_tokens = MICRO_BATCH_TOKENS.get(name, 65536)
    settings = vs_trl.limits("200/120")
    settings |= {"batch_size": batch, "micro_batch_tokens": micro_batch_tokens}
    if lora:
        settings |= {"lora.rank": 8, "precision": "bf16-true"}
    spec = {
        "kind": "kto",
        "precision": "bf16",
        "model": str(folder),
        "batch": batch,
        "warmup": WARMUP,
        "bf16_weights": lora,
    }
    our_spec = spec | {"records": str(file), "ours": settings, "profile": PROFILED}
    torch.cuda.empty_cache()  # what this process has cached, the measured one cannot have
    try:
        ours = vs_trl.once(sys.executable, "ours", our_spec)
    except SystemExit as e:  # out of memory, for example: the other rows are still of use
        print(str(e)[-1000:], file=sys.stderr, flush=True)
        return {"row": name, "failed": str(e).strip().splitlines()[-1][:60]}
    out = {"row": name, "tokens_s": useful / ours["seconds"], "peak_gib": ours["peak_gib"]}
    out |= {"trl": {}, "idle": ours.get("idle"), "kernels": ours.get("kernels")}
    flops = sorted(ours["flops"][WARMUP:])
    out["tflops"] = flops[len(flops) // 2]
    ways = {"as shipped": {}, "compiled": {"torch_compile": True}} if trl else {}
    for way, trl_settings in ways.items():
        if lora:
            trl_settings = trl_settings | {"lora": True}
        trl_spec = spec | {"records": str(timed_file), "trl": trl_settings}
        try:
            result = vs_trl.once(trl, "trl", trl_spec)
        except SystemExit as e:  # TRL does not run in this way here, so it is not its best
            print(str(e)[-600:], file=sys.stderr)
            continue
        speed = useful / result["seconds"]
        out["trl"][way] = {"tokens_s": speed, "peak_gib": result["peak_gib"]}
    print(json.dumps(out), flush=True)
    return out


HEADER = (
    "| model | useful tokens/s | over TRL's best | MFU, data sheet | MFU, GEMM | TFLOP/s | idle | peak GiB | TRL's |\n"
    + ("| --- " * 9 + "|")
)


def table_line(row: dict, data_sheet: float, gemm_rate: float) -> str:
    """A line of the table from what measure() returns. data_sheet, gemm_rate: FLOP/s, or 0 if unknown."""
    if "failed" in row:
        return f"| {row['row']} | {row['failed']} |" + " |" * 7
    best = max(row["trl"].values(), key=lambda result: result["tokens_s"], default=None)
    over_trl, trl_peak = MISSING, MISSING
    if best:
        over_trl = f"{row['tokens_s'] / best['tokens_s']:.2f}"
        trl_peak = f"{best['peak_gib']:.1f}"
    mfu = []
    for flops in (data_sheet, gemm_rate):
        mfu.append(f"{row['tflops'] * 1e12 / flops:.1%}" if flops else MISSING)
    cells = [
        row["row"],
        f"{row['tokens_s']:,.0f}",
        over_trl,
        *mfu,
        f"{row['tflops']:.4g}",
        MISSING if row["idle"] is None else f"{row['idle']:.1%}",
        f"{row['peak_gib']:.1f}",
        trl_peak,
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="only the rows whose name has all of these words")
    parser.add_argument("--check", action="store_true", help="a tiny model, also without a GPU")
    parser.add_argument("--no-trl", action="store_true", help="without TRL")
    args = parser.parse_args()
    import torch

    full, lora, lora_vocab = GPT2, LLAMA, 128256
    if args.check:
        full, lora, lora_vocab = TINY_GPT2, TINY_LLAMA, 512
    has_gpu = torch.cuda.is_available()
    if not (has_gpu or args.check):
        print(HEADER)
        for name in [*full, *lora]:
            print(f"| {name} |" + f" {MISSING} |" * 8)
        return
    vs_trl.OUT.mkdir(parents=True, exist_ok=True)
    trl = None  # a Python that has TRL
    if not args.no_trl:
        trl = sys.executable if importlib.util.find_spec("trl") else vs_trl.environment()
    data_sheet, gemm_rate, gpu_name = 0.0, 0.0, "no GPU"
    if has_gpu:
        from runs.logger import peak_flops

        data_sheet = peak_flops(torch.device("cuda"), "bf16-mixed")
        gemm_rate = gemm()
        gpu_name = torch.cuda.get_device_name()
    rows = []
    for shapes, is_lora in ((full, False), (lora, True)):
        for name, (shape, batch) in shapes.items():
            if all(word in name for word in args.words):
                vocab = lora_vocab if is_lora else shape[3]
                rows.append(measure(name, shape, batch, is_lora, vocab, trl))
    print(f"\ntorch {torch.__version__}, {gpu_name}, {gemm_rate / 1e12:.0f} TFLOP/s\n")
    print(HEADER)
    for row in rows:
        print(table_line(row, data_sheet, gemm_rate))


if __name__ == "__main__":
    main()

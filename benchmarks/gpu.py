"""Measures this project on a GPU: speed, memory, and the tests that need a GPU. Needs no network.

    python benchmarks/gpu.py                        # all parts, in the order below, within 520 seconds
    python benchmarks/gpu.py --limit 200 head trl   # only these parts, within 200 seconds
    python benchmarks/gpu.py --tiny                 # models of a few weights: to try this file, on a CPU, too

    machine    versions; the rates of a large product (the card's own peak), of a copy and of small launches
    demo       `python kto.py`: seconds in all, accuracy before and after, tokens/s
    tests      the tests that need a GPU
    gpt2, llama8b-lora, gpt2-xl
               a step of 64 ratings, prompts and completions of 200 tokens each (medians), in micro-batches
               of 16,384 tokens: the rows of the table in docs/speed.md
    trl        GPT-2 124M, ours and TRL's, 20 steps of 32 ratings (vs_trl.py): ratio 2 means twice as fast as TRL
    head       forward and backward of the LM head, ours and with full logits: 8,192 tokens, width 4,096,
               vocabulary 151,936; with other chunks, to choose GPU_ROWS of head.py
    sampling   64 and 256 answers of 100 tokens, ours and transformers' (sampling.py)
    resume     a run that is killed and resumed with --deterministic true: is it the whole run, bit for bit?
    programs   dpo.py, spin.py, online.py, LoRA, float32, activation checkpointing: from start to export

- Each part is a process with a time limit. If a part fails or takes too long, the next part begins.
- The folder --out has two files. results.jsonl has the numbers and how each part ended. log.txt has everything
  that the parts print. Both are written immediately, so a killed run leaves its results.
- The models of full size have random weights, made on the GPU. Four steps warm up, four are timed, and one is
  profiled. `busy` is the share of the time that the GPU works. If it is below 0.8, the CPU is too slow for the GPU.
"""

import argparse
import contextlib
import faulthandler
import importlib.util
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import vs_trl

PROJECT = Path(__file__).resolve().parent.parent
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DEVICE_NAME = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"

LLAMA = {"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8}
LORA = "--precision bf16-true --activation_checkpointing true --lora.rank 16 --lora.alpha 32"
MODELS = {  # part: type, changed fields of its config, settings
    "gpt2": ("gpt2", {}, ""),
    "llama8b-lora": ("llama", LLAMA, LORA),
    "gpt2-xl": ("gpt2", {"n_embd": 1600, "n_layer": 48, "n_head": 25}, ""),
}
TINY = {  # type: fields of its config with --tiny
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 99},
    "llama": {
        "hidden_size": 256,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "vocab_size": 99,
    },
}
TOKENS = 200  # of a prompt and of a completion: the median
STEPS = 4  # that warm up, and as many that are timed
RESULTS: dict = {}  # the folder `out`, and the name of the present part


def result(**numbers) -> None:
    """Write numbers of a part to results.jsonl."""
    row = {"part": RESULTS["part"], **numbers}
    print(row, flush=True)
    vs_trl.add_line(RESULTS["out"] / "results.jsonl", row)


def start(out: Path, words: str) -> subprocess.Popen:
    """One of the project's programs."""
    command = [sys.executable, *words.split(), f"--out_dir={out}", "--progress=false"]
    return subprocess.Popen(command)


def finish(*processes: subprocess.Popen) -> None:
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"exit codes {codes}")


# ---- what the device does ------------------------------------------------------------------------


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def median_ms(function: Callable, n: int = 10) -> float:
    times = []
    for _ in range(n + 3):
        synchronize()
        began = time.perf_counter()
        function()
        synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[3:]) * 1e3


def product_tflops(tiny: bool) -> float:
    """The rate of a large product of matrices in bfloat16."""
    n = 256 if tiny else 8192
    a, b = torch.randn(2, n, n, device=DEVICE, dtype=torch.bfloat16)
    return 2 * n**3 / median_ms(lambda: a @ b) / 1e9


def useful_tflops(policy: torch.nn.Module, tokens_per_s: float) -> float:
    """The rate of a KTO step, if prompts and completions have the same length: 2 FLOPs for each weight, token and
    pass. Backward is 2 passes, or 1 if only adapters learn. z takes two more passes over each completion."""
    frozen = [name for name, p in policy.named_parameters() if not p.requires_grad]
    passes = 3 if frozen else 4  # with the reference's
    blocks = sum(p.numel() for name, p in policy.blocks.named_parameters() if "lora_" not in name)
    head = policy.config.n_embd * policy.config.padded_vocab_size
    return tokens_per_s * (passes * blocks + (passes + 2) * (blocks + head)) / 1e12


def profiled(function: Callable) -> dict:
    """The share of a call's time that the device works, and how many kernels it launches. Prints the 15 kernels
    that take longest. On a CPU torch's operators take the place of kernels."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_gpu = DEVICE == "cuda"
    synchronize()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as p:
        began = time.perf_counter()
        function()
        synchronize()
        seconds = time.perf_counter() - began
    events = p.key_averages()
    column = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    print(events.table(sort_by=column, row_limit=15, max_name_column_width=100))
    launches = 0
    busy_us = 0
    for event in events:
        if event.device_type == (DeviceType.CUDA if on_gpu else DeviceType.CPU):
            launches += event.count
            busy_us += event.self_device_time_total if on_gpu else event.self_cpu_time_total
    return {"busy": busy_us / 1e6 / seconds, "launches": launches}


# ---- the machine, and the program as a user types it ---------------------------------------------


def machine(tiny: bool, work: Path) -> None:
    subprocess.run([sys.executable, "-m", "pip", "list"])
    if DEVICE == "cuda":
        subprocess.run("nvidia-smi", shell=True)  # a machine may lack it
    x = torch.randn(2**20 if tiny else 2**30, device=DEVICE)
    y = torch.empty_like(x)
    small = torch.zeros(8, device=DEVICE)
    result(
        device=DEVICE_NAME,
        torch=torch.__version__,
        product_tflops=product_tflops(tiny),
        copy_tb_s=2 * x.nbytes / median_ms(lambda: y.copy_(x)) / 1e9,
        launch_us=median_ms(lambda: [small.add_(1) for _ in range(1000)]),
    )


def demo(tiny: bool, work: Path) -> None:
    few = " --max_steps 6 --eval.prompts 20" if tiny else ""
    began = time.perf_counter()
    finish(start(work, f"kto.py{few}"))
    seconds = time.perf_counter() - began
    speeds = [row["tokens/s"] for row in vs_trl.read_csv(work / "metrics.csv")]
    accuracy = [row["checker_accuracy"] for row in vs_trl.read_csv(work / "val.csv")]
    result(seconds=seconds, accuracy=accuracy, tokens_s=statistics.median(speeds))


def tests(tiny: bool, work: Path) -> None:
    """In three processes, since most of their time is the CPU's. Other plugins of pytest stay out: a warning of
    theirs would be an error."""
    options = f"-p xdist -p no:cacheprovider -n {1 if tiny else 3} -v -rfE --tb=short"
    few = ["-k", "same_each_time or deterministic_choice"] if tiny else []
    command = [sys.executable, "-m", "pytest", *options.split(), "-m", "gpu", "tests/test_gpu.py"]
    environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "KTO_GPU_TESTS": DEVICE}
    finish(subprocess.Popen([*command, *few], env=os.environ | environment))


# ---- a step --------------------------------------------------------------------------------------


def random_model(source, dtype: torch.dtype = torch.float32):
    """Replaces reference.load_model: the model that config.json names, with random weights made on the device."""
    import transformers

    from models.hub import read_config
    from models.load import litgpt_model, share_weights

    options = dict(attn_implementation="eager", dtype=dtype)
    with torch.device(DEVICE):
        hf = transformers.AutoModelForCausalLM.from_config(read_config(source), **options)
    gpt = litgpt_model(hf)
    share_weights(gpt, hf)
    return gpt.eval()


def write_inputs(folder: Path, kind: str, fields: dict, n: int) -> None:
    """A model's config, a tokenizer of words, and n ratings of random words."""
    import transformers

    from infra.files import as_lines

    config = transformers.CONFIG_MAPPING[kind](**fields, bos_token_id=0, eos_token_id=0)
    config.save_pretrained(folder)
    (folder / "model.safetensors").touch()  # kto.py looks for it; random_model does not read it
    vs_trl.save_words(folder, config.vocab_size)
    records = vs_trl.make_records("kto", n, config.vocab_size, TOKENS, TOKENS, spread=0.3)
    (folder / "ratings.jsonl").write_text(as_lines(records))


def step(model: str, tiny: bool, work: Path) -> None:
    """Run kto.py in this process, which ends with its last step: no checkpoint and no export."""
    import kto
    import reference
    from trainer import Trainer

    kind, fields, settings = MODELS[model]
    batch = 4 if tiny else 64
    last = 2 * STEPS + 1
    write_inputs(work, kind, TINY[kind] if tiny else fields, batch * (last + 1))
    reference.load_model = random_model
    reference.weights_hash = lambda *_: "random"

    class Measured(Trainer):
        def train_step(self, *args):
            step = self.run.state.step + 1
            if step == 1 and DEVICE == "cuda":  # what loading took does not count
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            take_step = partial(super().train_step, *args)
            if step < last:
                return take_step()
            report(self.run.policy.module)
            result(**profiled(take_step))
            sys.exit()

    def report(policy: torch.nn.Module) -> None:
        rows = vs_trl.read_csv(work / "run" / "metrics.csv")[STEPS : 2 * STEPS]
        columns = "seconds", "tokens/s", "memory_gb"
        speed = {name: statistics.mean(row[name] for row in rows) for name in columns}
        tflops = useful_tflops(policy, speed["tokens/s"])
        share = tflops / product_tflops(tiny)
        result(device=DEVICE_NAME, **speed, tflops=tflops, share_of_product=share)

    settings += f" --batch_size {batch} --micro_batch_tokens 16384 --data.max_prompt 512"
    settings += f" --data.max_completion 512 --max_steps {last + 1}"
    settings += " --val_interval null --save_interval null --progress false --eval.samples 0"
    settings += f" --model {work} --data.train {work}/ratings.jsonl --out_dir {work}/run"
    kto.main(settings.split(), trainer=Measured)


# ---- beside TRL, the head, sampling --------------------------------------------------------------


def trl(tiny: bool, work: Path) -> None:
    if not importlib.util.find_spec("trl"):
        return result(left_out="this Python has no TRL")
    size = "tiny" if tiny else "124M"
    vs_trl.OUT = work
    vs_trl.SIZES["tiny"] = (1, 8, 1, 99)
    vs_trl.PAIRS[size] = 1
    vs_trl.STEPS[size], vs_trl.BATCH = (2, 4) if tiny else (20, 32)
    for _ in range(2):
        row = vs_trl.run_cell(["kto", size, "200/120", "bf16"], "best")
        result(**row)
        vs_trl.refuse_other_training(row)


def head(tiny: bool, work: Path) -> None:
    """Each time comes with the loss and the norm of the gradient, which must be those of the full logits."""
    from torch.nn.functional import cross_entropy

    from head import Chunks, Head

    T, C, V = (64, 32, 1000) if tiny else (8192, 4096, 151936)
    torch.manual_seed(1)
    h_TC = torch.randn(T, C, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    w_VC = (0.02 * torch.randn(V, C, device=DEVICE, dtype=torch.bfloat16)).requires_grad_()
    target_T = torch.randint(V, (T,), device=DEVICE)
    default = Chunks.of(DEVICE, V)
    chunks = {"ours": default}
    for rows in (512, 1024, 2048, 4096):
        size = rows * T // 8192
        chunks[f"ours, chunks of {size}"] = default._replace(size=size, softmax=size)

    def mean_loss(name: str) -> torch.Tensor:
        if name in chunks:
            return -Head.apply(h_TC, w_VC, target_T, None, chunks[name])[0].mean()
        return cross_entropy(h_TC @ w_VC.T, target_T)

    def gradient(name: str) -> torch.Tensor:
        h_TC.grad = w_VC.grad = None
        loss = mean_loss(name)
        loss.backward()
        return loss

    for name in ("full logits", *chunks):
        ms = median_ms(partial(gradient, name))
        loss = gradient(name).item()
        result(head=name, ms=ms, loss=loss, gradient=h_TC.grad.float().norm().item())
    g_TV = torch.randn(T, V, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        ms = median_ms(lambda: (h_TC @ w_VC.T, g_TV @ w_VC, g_TV.T @ h_TC))
    result(head="the three products alone", ms=ms)
    result(head="ours", **profiled(partial(gradient, "ours")))


def sampling(tiny: bool, work: Path) -> None:
    from sampling import run

    vs_trl.OUT = work
    folder = vs_trl.model_folder("words", (1, 16, 2, 50257) if tiny else vs_trl.SIZES["124M"])
    new, turns = (8, 1) if tiny else (100, 2)
    for rows, precision in ((64, "bf16-true"), (256, "bf16-true"), (64, "bf16-mixed")):
        rows = 4 if tiny else rows
        result(answers=rows, precision=precision, tokens_s=run(folder, precision, rows, new, turns))


# ---- a resume, and the programs ------------------------------------------------------------------


def resume(tiny: bool, work: Path) -> None:
    steps, interval = (8, 2) if tiny else (120, 40)
    command = f"kto.py --deterministic true --max_steps {steps} --save_interval {interval}"
    command += " --log_interval 1 --data.val null --eval.check null"
    whole = start(work / "whole", command)
    killed = start(work / "killed", command)
    while killed.poll() is None and not list(work.glob("killed/checkpoints/step-*")):
        time.sleep(0.005)
    was_running = killed.poll() is None
    killed.kill()
    killed.wait()
    finish(whole, start(work / "killed", f"{command} --resume auto"))
    losses, weights = [], []
    for name in ("whole", "killed"):
        losses.append([row["loss"] for row in vs_trl.read_csv(work / name / "metrics.csv")])
        weights.append((work / name / "final" / "model.safetensors").read_bytes())
    same = {"losses": losses[0] == losses[1], "weights": weights[0] == weights[1]}
    result(was_running=was_running, steps=len(losses[0]), same=same)
    if not all(same.values()):
        raise SystemExit("the resumed run is not the whole run")


def programs(tiny: bool, work: Path) -> None:
    """All run in parallel, because nothing is timed."""
    kto = "kto.py --max_steps 6 --eval.prompts 32"
    commands = [
        "dpo.py --max_steps 6 --eval.prompts 32",
        "spin.py --spin.max_iterations 2 --max_steps 34 --eval.prompts 32",
        "online.py --online.max_iterations 2 --online.prompts_per_iteration 128 --eval.prompts 32",
        f"{kto} --precision bf16-true --lora.rank 4",
        f"{kto} --precision 32-true",
        f"{kto} --activation_checkpointing true",
    ][: 2 if tiny else None]
    finish(*(start(work / str(i), command) for i, command in enumerate(commands)))
    result(ran=commands)


# ---- the main process ----------------------------------------------------------------------------

PARTS = {  # in the order of their worth: the function, and seconds after which it is killed
    "machine": (machine, 100), "demo": (demo, 150), "tests": (tests, 130),
    **{name: (partial(step, name), 130) for name in MODELS},
    "trl": (trl, 150), "head": (head, 70), "sampling": (sampling, 110), "resume": (resume, 130),
    "programs": (programs, 120),
}  # fmt: skip


def run_part(name: str, out: Path, tiny: bool, limit: float) -> str:
    """Run a part in a process, and kill it after this many seconds. -> how it ended"""
    command = [sys.executable, __file__, "--part", name, "--out", out]
    command += ["--tiny"] if tiny else []
    path = os.pathsep.join([str(PROJECT), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    with open(out / "log.txt", "a") as log:
        process = subprocess.Popen(
            command, cwd=PROJECT, env=os.environ | environment, start_new_session=True,
            stdout=log, stderr=log,
        )  # fmt: skip
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also all that the part has started
            process.wait()
    if code == 0:
        return "ok"
    return f"killed after {limit:.1f} s" if code is None else f"failed: exit code {code}"


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help="only these")
    parser.add_argument("--limit", type=float, default=520, help="seconds for all parts")
    out = os.environ.get("OUT") or PROJECT / "out" / "gpu"
    parser.add_argument("--out", type=Path, default=out, help="the folder of the results")
    parser.add_argument("--tiny", action="store_true", help="models of a few weights")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # a process that run_part started
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"{', '.join(unknown)}: no such part; there are {', '.join(PARTS)}")
    out = args.out.absolute()
    RESULTS.update(out=out, part=args.part)
    if args.part:
        function, limit = PARTS[args.part]
        faulthandler.dump_traceback_later(limit - 2)  # shows where a part is that takes too long
        with tempfile.TemporaryDirectory() as work:
            return function(args.tiny, Path(work))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + args.limit
    statuses = []
    for name in args.parts or PARTS:
        began = time.monotonic()
        limit = min(PARTS[name][1], ends - began)
        status = "skipped: too little time"
        if limit > PARTS[name][1] / 3:
            status = run_part(name, out, args.tiny, limit)
        RESULTS["part"] = name
        result(status=status, seconds=time.monotonic() - began)
        statuses.append(status)
    print((out / "results.jsonl").read_text())
    raise SystemExit(sum(status != "ok" for status in statuses))


if __name__ == "__main__":
    main()

"""What a CPU cannot prove: `python -m pytest -n 0 -m gpu`, on a machine with a GPU.

KTO_GPU_TESTS=cpu runs the same tests on a CPU, where most compare a thing with itself: it shows
that the suite runs.
"""

import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from conftest import assert_same, result, train
from lightning.fabric import Fabric
from tiny_models import LLAMA, gpt_of, ragged, shaken

import attention
import kto
import sampler
from infra.devices import prepare_machine
from infra.settings import Sampling
from models.hub import Source
from models.load import load_model
from packing import pack
from records.tokenizer import Tokenizer
from trainer import Trainer

DEVICE = os.environ.get("KTO_GPU_TESTS", "cuda")
READY = DEVICE == "cpu" or torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not READY, reason="no GPU here, or no -n 0")]
RUN = ("--batch_size=7", "--max_steps=6", "--optim.lr=1e-3", "--save_interval=null",
       "--micro_batch_size=7")  # fmt: skip
EXACT = ("--deterministic=true", "--precision=32-true")
MIXED = "--precision=bf16-mixed"


@pytest.fixture(autouse=True)
def not_deterministic():
    """A run leaves this process as it was asked to be; and as in a run cuDNN's attention is off."""
    prepare_machine()
    yield
    torch.use_deterministic_algorithms(False)


# ---- attention -----------------------------------------------------------------------------------

# heads, groups of keys, head size: of GPT-2, Llama, Phi-2, Phi-3, Gemma, one key head
HEADS = {"gpt2": (12, 12, 64), "llama": (8, 2, 128), "phi-2": (4, 4, 80), "phi-3": (4, 4, 96)}
HEADS |= {"gemma": (4, 2, 256), "falcon": (8, 1, 64), "tiny": (4, 2, 8)}


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize("heads", HEADS)
def test_flash_attention_gives_what_the_tiles_give(heads, K, window, monkeypatch):
    H, G, D = HEADS[heads]
    sizes = dict(n_embd=H * D, n_head=H, n_query_groups=G, head_size=D, sliding_window_size=window)
    gpt = shaken(gpt_of(LLAMA | sizes)).to(DEVICE)
    prompts, completions = ragged(K, 61, 0)
    batch, other = pack(prompts, completions), pack(prompts, ragged(K, 61, 1)[1])
    one = pack(prompts, [tuple(c[:1] for c in cs) for cs in completions])
    calls, real = [], attention.varlen_attn
    monkeypatch.setattr(
        attention, "varlen_attn", lambda *a, **k: (calls.append(1), real(*a, **k))[1]
    )

    def run(dtype):
        gpt.to(dtype).zero_grad()
        scores = gpt(batch.to(torch.device(DEVICE)), keeps_prompts=True)
        first = scores.logps
        with torch.no_grad():
            others = [gpt(b.to(torch.device(DEVICE)), scores.prompts).logps for b in (other, one)]
        (first * torch.arange(1, K + 1, device=DEVICE)).sum().backward()
        grads = torch.cat([p.grad.flatten().double() for p in gpt.parameters()])
        return torch.cat([first.detach(), *others]).double(), grads

    exact, flash = run(torch.float32), run(torch.bfloat16)
    assert bool(calls) == (DEVICE == "cuda")
    monkeypatch.setattr(attention, "flash_fits", lambda attn, q, v: False)
    tiles = run(torch.bfloat16)
    for name, a, b, c in zip(("log-probs", "gradients"), flash, tiles, exact):
        off, allowed = (a - c).norm() / c.norm(), (b - c).norm() / c.norm()
        assert off <= 2 * allowed + 1e-3, name


def test_the_sum_over_a_long_completion_is_the_same_each_time():
    """A sum in any order would make policy and reference differ before the first step."""
    prompts, completions = [np.zeros(3, np.int32)] * 4, [[np.zeros(5000, np.int32)]] * 4
    packed = pack(prompts, completions).to(torch.device(DEVICE))
    x_T = torch.randn(len(packed.target_T), device=DEVICE)
    first = packed.sums(x_T)
    assert all(torch.equal(packed.sums(x_T), first) for _ in range(50))


# ---- a run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [[MIXED], ["--precision=bf16-true", "--lora.rank=4"], EXACT])
def test_policy_and_reference_agree_to_the_bit_at_step_0(argv, llama, ratings, tmp_path, capsys):
    rows = train(llama, ratings, tmp_path / "run", *RUN, *argv)["rows"]
    assert "policy and reference agree to the bit" in capsys.readouterr().out
    assert rows[-1]["step"] == 6 and rows[-1]["loss"] < 0.6


@pytest.mark.parametrize("argv,most", [(["--precision=32-true"], 1e-4), ([MIXED], 3e-2)])
def test_the_cut_is_free(argv, most, tiny, ratings, tmp_path):
    cuts = ["--micro_batch_size=7"], ["--micro_batch_size=2"], ["--micro_batch_tokens=70"]
    runs = [
        train(tiny, ratings, tmp_path / str(i), *RUN[:-1], *argv, *cut)["rows"][0]
        for i, cut in enumerate(cuts)
    ]
    off = {
        name: max(abs(r[name] / runs[0][name] - 1) for r in runs) for name in ("loss", "grad_norm")
    }
    assert max(off.values()) < most


def test_a_step_waits_for_the_device_only_where_it_says_so(tiny, ratings, tmp_path, monkeypatch):
    """torch raises at any other wait. The first steps warm up."""

    def strict(name):
        real = getattr(Trainer, name)

        def method(self, *args, **options):
            if DEVICE == "cuda" and self.run.state.step > 1:
                torch.cuda.set_sync_debug_mode("error")
            try:
                return real(self, *args, **options)
            finally:
                if DEVICE == "cuda":
                    torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(Trainer, name, method)

    for name in ("gradient", "optimizer_step"):
        strict(name)
    for i, cut in enumerate((7, 2)):
        cut = f"--micro_batch_size={cut}"
        train(tiny, ratings, tmp_path / str(i), *RUN, MIXED, cut, "--log_interval=3")


@pytest.mark.parametrize("precision", [MIXED, EXACT[1]])
def test_deterministic_runs_are_the_same_also_after_a_resume(precision, tiny, ratings, tmp_path):
    argv = (*RUN, "--deterministic=true", precision)
    whole, again = (train(tiny, ratings, tmp_path / name, *argv) for name in ("a", "b"))
    assert_same(whole, again)
    train(tiny, ratings, tmp_path / "c", *argv, "--stop_at=3")
    assert_same(train(tiny, ratings, tmp_path / "c", *argv, "--resume=auto"), whole)


def test_a_model_in_4_bits_trains(llama, ratings, tmp_path):
    argv = (*RUN, MIXED, "--save_interval=3", "--lora.quantize=nf4", "--lora.rank=4")
    run = train(llama, ratings, tmp_path / "run", *argv)
    assert run["rows"][-1]["rewards/margins"] > run["rows"][0]["rewards/margins"]
    assert all(x.isfinite().all() for x in run["weights"].values())


def test_all_gpus_shard_to_the_numbers_of_one(tiny, ratings, tmp_path):
    n = max(1, torch.cuda.device_count())
    argv = [f"--model={tiny}", f"--data.train={ratings}", "--progress=false", *RUN, EXACT[1]]
    argv += ["--save_interval=3"]
    one = train(tiny, ratings, tmp_path / "one", *argv[3:])["rows"]
    command = [sys.executable, kto.__file__, *argv, f"--devices={n}", "--strategy=fsdp"]
    command += [f"--out_dir={tmp_path / 'all'}"]
    command += ["--accelerator=cpu"] if DEVICE == "cpu" else []
    subprocess.run(command, check=True, timeout=300)
    off = max(abs(a["loss"] - b["loss"]) for a, b in zip(one, result(tmp_path / "all")["rows"]))
    assert off < 1e-5


# ---- sampling ------------------------------------------------------------------------------------


def test_a_sampled_token_waits_for_the_device_once(llama):
    fabric = Fabric(accelerator=DEVICE, devices=1, precision="bf16-mixed")
    tokenizer, n = Tokenizer(Source(llama)), 20
    policy = fabric.to_device(load_model(Source(llama)))
    args = Sampling(top_p=0.9, stop=["none of these"])
    tokenizer.stops = []
    waits = []
    for max_new in (n, 1, n):  # the first one warms up
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if DEVICE == "cuda":
                torch.cuda.set_sync_debug_mode("warn")
            prompts = [np.array([66, 67]), np.array([66])]
            sampler.generate(fabric, policy, prompts, tokenizer, args, max_new, seed=1)
            if DEVICE == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchroniz" in str(w.message) for w in caught))
    assert waits[2] - waits[1] == (n - 1 if DEVICE == "cuda" else 0)


def test_a_deterministic_choice_is_made_on_the_device(monkeypatch):
    logits = torch.randn(4, 50257, device=DEVICE)
    u_B = torch.rand(4, device=DEVICE).double()
    plain = sampler.choose_token(logits.cpu(), u_B.cpu(), Sampling(top_p=0.9))
    torch.use_deterministic_algorithms(True)
    try:
        choices = [sampler.choose_token(logits, u_B, Sampling(top_p=0.9)) for _ in range(5)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(c.cpu(), plain) for c in choices)

"""--estimate as a user sees it, and its numbers compared with real models and a real run."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import start
from models import HF, made

import model
from head import Chunks
from hub.estimate import QUANTIZED, Estimate
from hub.families import read_config
from kto import Settings
from runs import settings
from runs.errors import BadInput
from runs.settings import Data, Eval, Lora, Optim

ROOT = Path(model.__file__).parent


def estimate(folder, reference=True, **settings) -> Estimate:
    cfg = Settings(model=str(folder), data=Data(train="t"), **{"accelerator": "cpu"} | settings)
    arguments, config, names = read_config(folder)
    make = partial(model.make_model, arguments, names=names)
    return Estimate(cfg, make, config["tie_word_embeddings"], reference, False, Chunks.of)


@pytest.mark.parametrize("name", ["llama", "llama, tied", "qwen3", "gpt2", "gpt2, untied"])
def test_weights_are_counted_as_the_real_model_has_them(name, tmp_path):
    made(HF[name], tmp_path)
    for rank in (0, 3):
        params = model.load_model(tmp_path, Lora(rank=rank)).unique_parameters()
        e = estimate(tmp_path, lora=Lora(rank=rank))
        assert e.total == sum(p.numel() for n, p in params.items() if "lora_" not in n)
        assert e.trained == sum(p.numel() for p in params.values() if p.requires_grad)
        real = sum(p.numel() * 4 for p in params.values()) + (1 + (rank == 0)) * e.rope
        assert e.fixed(1, False)["weights"] == real


@pytest.mark.parametrize("program", ["kto", "dpo", "spin", "online"])
def test_a_program_asked_for_an_estimate_prints_a_table_and_writes_nothing(
    program, tmp_path, monkeypatch, capsys
):
    HF["llama"].save_pretrained(tmp_path / "model")  # config.json alone: no weights, no tokenizer
    monkeypatch.chdir(tmp_path)
    argv = ["--model=model", "--data.train=none.jsonl", "--estimate=true", "--estimate_gb=2"]
    argv += ["--eval.check=demo", "--strategy=fsdp", "--devices=8", "--num_nodes=8"]
    with pytest.raises(SystemExit) as e:
        start(program, argv)
    assert not e.value.code and [p.name for p in tmp_path.iterdir()] == ["model"]
    said = capsys.readouterr().out
    assert all(len(line) <= 80 for line in said.splitlines())
    assert "64 x fsdp, bf16-mixed" in said and "16,384 tokens" in said
    for word in ("weights", "reference", "gradients", "optimizer", "gathered", "sampling"):
        assert f"  {word}" in said
    assert "fit 2 GB; 16,384 fit 1 with fsdp" in said
    with pytest.raises(BadInput, match="estimate_gb: expected above 0"):
        start(program, [*argv, "--estimate_gb=0"])


def test_an_estimate_for_a_cpu_counts_the_tokens_that_a_run_on_it_takes(tmp_path, monkeypatch):
    HF["llama"].save_pretrained(tmp_path)
    monkeypatch.setattr(settings, "CPU_ACTIVATIONS", 1.0)
    tokens = {
        name: estimate(tmp_path, accelerator=name).describe().split("; ")[-1].split(" fit ")[0]
        for name in ("cpu", "gpu")
    }
    assert tokens == {"cpu": "256", "gpu": "16,384"}


def test_what_is_said_to_fit_fits_and_more_does_not(tmp_path, monkeypatch):
    HF["llama"].save_pretrained(tmp_path)
    e = estimate(tmp_path, estimate_gb=0.5)
    for line, again in zip(e.describe().splitlines()[-2:], (False, True)):
        most = int(line.split(" fit ")[0].split()[-1].replace(",", ""))
        assert most > 0
        assert e.needed(most, again, 1, False) <= 0.5e9 < e.needed(most + 256, again, 1, False)


def test_sampling_takes_no_more_than_its_cache_is_given(tmp_path):
    HF["llama"].save_pretrained(tmp_path)
    full = estimate(tmp_path, eval=Eval(check="demo", batch_size=8)).sampling(0)
    few = estimate(tmp_path, eval=Eval(check="demo", batch_size=8, cache_gb=1e-9)).sampling(0)
    assert few == full / 8, "one row at least"
    argv = dict(accelerator="gpu", estimate_gb=1)
    assert estimate(tmp_path, **argv).sampling(0) > estimate(tmp_path, **argv).sampling(1e9)


def test_devices_precision_and_optimizer_change_the_bytes_that_they_should(tmp_path):
    HF["llama"].save_pretrained(tmp_path)
    full = estimate(tmp_path)
    one, ddp, eight = full.fixed(1, False), full.fixed(8, False), full.fixed(8, True)
    assert ddp == one | {"gradients": 2 * one["gradients"]}
    for name in ("reference", "gradients", "optimizer"):
        assert eight[name] == one[name] / 8
    assert eight["weights"] == full.total * 4 / 8 + 2 * full.rope
    mixed = estimate(tmp_path, precision="bf16-mixed")
    tables = 2 * 97 * 48  # embedding and head; norms are float32 too
    narrow = full.total * 4 - 2 * (full.matrices + tables / 2)
    assert mixed.fixed(1, False)["reference"] == narrow
    assert mixed.fixed(8, True)["reference"] == narrow / 8, (
        "shards of a frozen model are narrow too"
    )
    assert mixed.casts == full.matrices / 2 * 2 and full.casts == 0
    assert estimate(tmp_path, reference=False).fixed(1, False)["reference"] == 0
    assert estimate(tmp_path, lora=Lora(rank=2)).fixed(1, False)["reference"] == 0
    cached = estimate(tmp_path, reference_cache="x").fixed(1, False)
    assert cached["reference"] == 0 and one["reference"] > 0
    small = estimate(tmp_path, optim=Optim(name="adamw8bit")).fixed(1, False)["optimizer"]
    assert small == pytest.approx(one["optimizer"] / 4, rel=0.02)
    true = estimate(tmp_path, precision="bf16-true", lora=Lora(rank=2))
    assert true.fixed(1, False)["optimizer"] == 8 * true.trained, "in float32"
    few = estimate(tmp_path, lora=Lora(rank=2, targets="query"))
    assert few.saved_by_token < full.saved_by_token, "a frozen matrix keeps no input"
    for again in (False, True):
        assert true.activations(2048, again, False) < full.activations(2048, again, False)
    assert full.activations(2048, True, False) < full.activations(2048, False, False)


def test_nf4_has_as_many_bytes_as_bitsandbytes_gives_it():
    import bitsandbytes.functional as bnb

    w = torch.randn(1024, 1024)
    data, state = bnb.quantize_4bit(w, quant_type="nf4", compress_statistics=True)
    tensors = data, state.absmax, state.state2.absmax
    assert sum(x.nbytes for x in tensors) == QUANTIZED["nf4"] * w.numel()


MEASURED = """
import re, sys
sys.path[:0] = sys.argv[1:3]
import kto, torch, litgpt.lora, lightning.fabric
torch.set_num_threads(1)
def peak():
    # not ru_maxrss, which begins with the parent's
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
before = peak()
kto.Trainer.finish = lambda self: print("growth", peak() - before)
kto.main(sys.argv[3:])
"""


def test_a_run_takes_as_much_as_was_estimated(tmp_path):
    """Growth of the resident set after the imports. glibc keeps what was freed unless each tensor
    has a mapping of its own."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config

    made(GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=2048, n_positions=256), tmp_path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(2048)}, "w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "w0"}')
    texts = [" ".join(f"w{(i * j) % 2047 + 1}" for j in range(2, 129)) for i in range(1, 33)]
    rows = [{"prompt": t, "completion": t, "label": i % 2} for i, t in enumerate(texts)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    argv = [f"--model={tmp_path}", f"--data.train={tmp_path / 'data.jsonl'}", "--max_steps=2",
            f"--out_dir={tmp_path / 'run'}", "--batch_size=32", "--epochs=2", "--accelerator=cpu",
            "--micro_batch_tokens=4096", "--save_interval=null"]  # fmt: skip
    process = subprocess.run(
        [sys.executable, "-c", MEASURED, ROOT, ROOT / "tests", *argv],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}, capture_output=True, text=True,
    )  # fmt: skip
    assert not process.returncode, process.stderr
    growth = int(process.stdout.split("growth ")[1])
    e = estimate(tmp_path, max_steps=2)
    assert 0.85 < e.needed(4096, False, 1, False) / growth < 1.15, growth

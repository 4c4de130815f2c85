"""What a run exports (final, best, adapters, shards), loaded by the programs that users load it with."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from conftest import PARITY, checkpoint_tensors, start, train
from models import (
    GQA,
    IDS,
    load_transformers,
    logits,
    made,
    our_logits,
    refused,
    same,
    same_weights,
    their_logits,
)
from peft import PeftModel
from safetensors.torch import load_file, save_file

import load
from hub import find_model
from runs import checkpoint

STEPS = ("--batch_size=4", "--max_steps=4", "--epochs=9", "--optim.lr=1e-2", "--save_interval=1")
STEPS += ("--keep_last=9", "--data.max_prompt=24", "--data.max_completion=24")
LORA = (
    "--lora.rank=2",
    "--lora.alpha=3",
    "--lora.targets=q_proj,o_proj,gate_proj,up_proj,down_proj",
)


@torch.no_grad()
def rounded_logits(source) -> torch.Tensor:
    """The same with the weights as an export of a model in bfloat16 has them."""
    gpt = load.load_model(source)
    for p in gpt.parameters():
        p.copy_(p.bfloat16())
    return logits(gpt, IDS)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A Llama in bfloat16, with a tokenizer."""
    folder = tmp_path_factory.mktemp("llama")
    hf = made(transformers.LlamaConfig(**GQA | dict(vocab_size=512)), folder)
    hf.bfloat16().save_pretrained(folder)
    shutil.copytree(PARITY / "tokenizer", folder, dirs_exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def full(llama, ratings, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("full")
    template = out / "plain.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    argv = (f"--data.val={ratings}", "--val_interval=1", "--keep_best=kl")
    argv += (f"--data.chat_template={template}",)
    train(llama, ratings, out / "run", *STEPS, *argv)
    return out / "run"


@pytest.fixture(scope="module")
def lora(llama, ratings, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("lora") / "run"
    train(llama, ratings, out, *STEPS, *LORA, "--val_interval=null")
    return out


# ---- a run's end ---------------------------------------------------------------------------------


def test_final_is_the_last_step_and_best_the_best_in_the_source_s_dtype(full, llama):
    state = checkpoint.read_state(full / "checkpoints" / "step-00000004")
    assert state.best_step not in (None, 4), "else best and final are one"
    for name, step in (("final", 4), ("best", state.best_step)):
        found = load_file(full / name / "model.safetensors")
        assert found.keys() == load_file(llama / "model.safetensors").keys()
        assert {x.dtype for x in found.values()} == {torch.bfloat16}
        assert load_transformers(full / name).dtype == torch.bfloat16
        trained = checkpoint_tensors(full / "checkpoints" / f"step-{step:08d}", "weights")
        ours = load.load_model(full / name).unique_parameters()
        rounded = {n: x.bfloat16().float() for n, x in trained.items()}
        assert same_weights({n: p.detach() for n, p in ours.items()}, rounded)
        card = (full / name / "README.md").read_text()
        assert f"for {step} steps" in card and "beta: 0.1" in card
        assert state.hashes["records"] in card
        assert "m.content" in (full / name / "chat_template.jinja").read_text()
        tokenizer = transformers.AutoTokenizer.from_pretrained(full / name)
        chat = [{"role": "user", "content": "hello"}]
        assert tokenizer.apply_chat_template(chat, tokenize=False) == "hello"


def test_any_checkpoint_is_a_model_and_becomes_a_folder(full, lora, ratings, tmp_path, capsys):
    for run in (full, lora):
        step = run / "checkpoints" / "step-00000002"
        start("export", [str(step), "--out", str(tmp_path / run.parent.name)])
        out = tmp_path / run.parent.name
        assert f"exported to {out}" in capsys.readouterr().out
        rounded = rounded_logits(step)
        assert same(our_logits(out), rounded, 0.0)
        assert same(their_logits(load_transformers(out).float()), rounded, 1e-5)
        assert not same(our_logits(step), our_logits(run), 1e-2), "else any step would do"
        assert "for 2 steps" in (out / "README.md").read_text()
        refused("^out: .*: is there already$", start, "export", [str(step), "--out", str(out)])
    out = str(tmp_path / "last")
    start("export", [str(full / "checkpoints" / "step-00000004"), "--out", out])
    assert same(our_logits(tmp_path / "last"), our_logits(full), 0.0), "as final, to the bit"
    train(full / "checkpoints" / "step-00000002", ratings, tmp_path / "on", *STEPS, "--max_steps=1")
    template = tmp_path / "on" / "final" / "chat_template.jinja"
    assert "m.content" in template.read_text(), (
        "its run had one, and so has a run that starts from it"
    )


def test_adapters_are_not_merged_into_other_weights(llama, ratings, tmp_path):
    base, run = tmp_path / "base", tmp_path / "run"
    shutil.copytree(llama, base)
    train(base, ratings, run, *STEPS, *LORA, "--stop_at=1")
    first = str(run / "checkpoints" / "step-00000001")
    start("export", [first, "--out", str(tmp_path / "same")])
    weights = load_file(base / "model.safetensors")
    name = next(n for n in weights if "o_proj" in n)
    save_file(weights | {name: weights[name] * 0.5}, base / "model.safetensors", {"format": "pt"})
    match = f"^export: {base}: not the weights that {first} was trained on"
    refused(match, start, "export", [first, "--out", str(tmp_path / "other")])
    assert not (tmp_path / "other").exists()


# ---- adapters ------------------------------------------------------------------------------------


def peft_folder(lora: Path, out: Path, **changes) -> Path:
    shutil.copytree(lora / "final_adapter", out)
    file = out / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return out


def peft_logits(base: Path, adapter: Path) -> torch.Tensor:
    """Logits of PEFT's model."""
    return their_logits(PeftModel.from_pretrained(load_transformers(base).float(), adapter).eval())


def test_a_peft_folder_is_folded_into_the_start_and_stays_in_the_reference(
    lora, llama, ratings, tmp_path, capsys
):
    folder = peft_folder(lora, tmp_path / "peft")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert "model.layers.0.self_attn.q_proj" in config["target_modules"]
    assert config["base_model_name_or_path"] == str(llama)
    assert (config["r"], config["lora_alpha"]) == (2, 3)
    trained = our_logits(lora / "checkpoints" / "step-00000004")
    assert same(our_logits(folder), trained, 1e-5)
    assert not same(trained, our_logits(llama), 1e-2)

    # a run that starts from the adapter: its own adapter holds both
    train(folder, ratings, tmp_path / "run", *STEPS, *LORA, "--max_steps=1")
    assert "policy and reference agree to the bit" in capsys.readouterr().out
    both = tmp_path / "run" / "final_adapter"
    with_two = our_logits(tmp_path / "run" / "checkpoints" / "step-00000001")
    assert not same(with_two, trained, 1e-3), "else the second adapter shows nothing"
    assert same(our_logits(both), with_two, 1e-5)
    assert same(peft_logits(llama, both), with_two, 1e-5)
    config = json.loads((both / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(llama)
    assert set(config["rank_pattern"].values()) == {4}

    # a third, of another rank, on other layers, with another scale
    argv = (*STEPS, "--max_steps=1", "--lora.rank=3", "--lora.targets=q_proj,v_proj")
    train(both, ratings, tmp_path / "on", *argv)
    with_three = our_logits(tmp_path / "on" / "checkpoints" / "step-00000001")
    assert same(peft_logits(llama, tmp_path / "on" / "final_adapter"), with_three, 1e-5)
    assert not same(with_three, with_two, 1e-3)


def test_a_peft_folders_own_tokenizer_is_the_exports(lora, llama, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(llama, base)
    (base / "chat_template.jinja").write_text("not that of the adapter")
    folder = peft_folder(lora, tmp_path / "peft", base_model_name_or_path=str(base))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, folder)
    found = {file.name: file.parent for file in find_model(str(folder)).files}
    assert found["tokenizer_config.json"] == folder and found["config.json"] == base
    assert "chat_template.jinja" not in found


def test_an_adapter_is_scaled_by_its_pattern_and_by_rslora(lora, llama, tmp_path):
    trained = our_logits(lora / "checkpoints" / "step-00000004")
    pattern = {"self_attn.q_proj": 0, "mlp.*": 0}
    only_o_proj = our_logits(peft_folder(lora, tmp_path / "half", alpha_pattern=pattern))
    assert not same(only_o_proj, trained, 1e-2)
    assert not same(only_o_proj, our_logits(llama), 1e-3)
    rslora = dict(use_rslora=True, lora_alpha=3 / 2**0.5)  # the same scale at rank 2
    assert same(our_logits(peft_folder(lora, tmp_path / "rslora", **rslora)), trained, 1e-5)


NOT_OURS = {
    "use_dora: True is not supported": dict(use_dora=True),
    "init_lora_weights: pissa": dict(init_lora_weights="pissa"),
    "peft_type: IA3": dict(peft_type="IA3"),
    "layer_replication: ": dict(layer_replication=[[0, 1]]),
}


@pytest.mark.parametrize("match", NOT_OURS)
def test_an_adapter_of_another_kind_is_refused_by_name(match, lora, tmp_path):
    folder = peft_folder(lora, tmp_path / "peft", **NOT_OURS[match])
    refused(match, our_logits, folder)

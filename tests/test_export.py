"""What a run exports (final, best, adapters, shards), loaded by the programs that users load it with."""

import json
import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from conftest import (
    checkpoint_tensors,
    evaluated,
    refused,
    rows_of,
    start,
    train,
)
from safetensors.torch import load_file, save_file
from tiny_models import (
    GQA,
    load_peft,
    load_transformers,
    made,
    our_logits,
    same,
    their_logits,
    their_margin,
    write_sentences,
)
from tokens import edit_json

from infra import checkpoint
from models import load
from models.hub import find_model
from records.tokenizer import Tokenizer

STEPS = ("--batch_size=4", "--max_steps=4", "--optim.lr=1e-2", "--save_interval=1")
STEPS += ("--keep_last=9", "--data.max_prompt=24", "--data.max_completion=24")
LORA = (
    "--lora.rank=2",
    "--lora.alpha=3",
    "--lora.targets=q_proj,o_proj,gate_proj,up_proj,down_proj",
)


@torch.no_grad()
def check_rounded(folder: Path, trained: dict[str, torch.Tensor]) -> None:
    """Each weight in the folder is one of the two numbers of bfloat16 around the trained one, by the bits of
    float32: their lower half is cut off, or the upper one counted up. A number of bfloat16 is both."""
    for name, p in load.load_model(folder).unique_parameters().items():
        bits = trained[name].contiguous().view(torch.int32)
        near_0 = bits & ~0xFFFF
        far = torch.where(bits == near_0, near_0, near_0 + 0x10000)
        assert ((p == near_0.view(torch.float32)) | (p == far.view(torch.float32))).all(), name


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A Llama in bfloat16, with a tokenizer and with code that two files name."""
    folder = tmp_path_factory.mktemp("llama")
    hf = made(transformers.LlamaConfig(**GQA | dict(vocab_size=512)), folder)
    hf.bfloat16().save_pretrained(folder)
    own = {"AutoConfig": "own.Own", "AutoTokenizer": ["own.Own", None]}
    for file in ("config.json", "tokenizer_config.json"):
        edit_json(folder / file, auto_map=own)
    (folder / "own.py").write_text("raise RuntimeError('this code must never be run')")
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
        check_rounded(full / name, trained)
        card = (full / name / "README.md").read_text()
        assert f"for {step} steps" in card and "beta: 0.1" in card
        assert state.hashes["records"] in card
        assert (full / name / "own.py").read_text() == (llama / "own.py").read_text()
        assert "m.content" in (full / name / "chat_template.jinja").read_text()
        tokenizer = transformers.AutoTokenizer.from_pretrained(full / name)
        chat = [{"role": "user", "content": "hello"}]
        assert tokenizer.apply_chat_template(chat, tokenize=False) == "hello"


def test_any_checkpoint_is_a_model_and_becomes_a_folder(full, lora, tmp_path, capsys):
    for run in (full, lora):
        step, out = run / "checkpoints" / "step-00000002", tmp_path / run.parent.name
        start("export", [str(step), "--out", str(out)])
        assert f"exported to {out}" in capsys.readouterr().out
        check_rounded(out, load.load_model(step).unique_parameters())
        assert same(their_logits(load_transformers(out).float()), our_logits(out), 1e-5)
        assert not same(our_logits(step), our_logits(run), 1e-2), "else any step would do"
        assert "for 2 steps" in (out / "README.md").read_text()
        refused("^out: .*: is there already$", start, "export", [str(step), "--out", str(out)])
    out = tmp_path / "last"
    start("export", [str(full / "checkpoints" / "step-00000004"), "--out", str(out)])
    assert same(our_logits(out), our_logits(full), 0.0), "as final, to the bit"


def peak_of(work) -> int:
    """The most bytes of torch's memory that this work takes at once. Mapped files do not count."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        work()
    total, peak = 0, 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            peak = max(peak, total)
    return peak


def test_a_model_is_never_twice_in_memory(tmp_path):
    sizes = dict(hidden_size=128, intermediate_size=512, num_hidden_layers=16)
    config = transformers.LlamaConfig(vocab_size=512, num_attention_heads=8, **sizes)
    hf = made(config, tmp_path).bfloat16()
    hf.save_pretrained(tmp_path)
    # 4 bytes a weight, and 4 more for q, k and v, which are a fifth of this model
    peak = peak_of(lambda: load.load_model(tmp_path))
    assert 4 < peak / hf.num_parameters() < 5.4


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


# ---- what is measured, and what is exported --------------------------------------------------------


@pytest.fixture(scope="module")
def rated(tmp_path_factory) -> Path:
    return write_sentences(tmp_path_factory.mktemp("rated") / "rated.jsonl", 8)


def margin_of(folder: Path, base: Path) -> float:
    """KTO's margin by hand: beta times the mean log-ratio of the good answers minus that of the bad ones."""
    new, old = (their_margin(load_transformers(x), x, 8) for x in (folder, base))
    return 0.1 * (new - old)


# {case: (arguments, whether the weights of `final` are rounded)}
ENDS = {
    "full": (("--optim.lr=3e-5",), True),
    "full in 64-true": (("--optim.lr=3e-5", "--precision=64-true"), False),
    "lora in bf16-true": (("--optim.lr=1e-2", "--precision=bf16-true", *LORA), True),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_numbers_after_training_are_of_the_weights_in_memory(
    name, llama, rated, tmp_path, capsys
):
    more, is_rounded = ENDS[name]
    argv = (f"--data.val={rated}", f"--data.test={rated}", "--batch_size=4", "--max_steps=3")
    train(llama, rated, tmp_path, *argv, "--keep_best=accuracy", *more)
    said = capsys.readouterr().out
    assert is_rounded == ("`final` is another model than the measured one" in said)
    tests = evaluated(tmp_path, "test")
    validated = float(rows_of(tmp_path / "val.csv")[-1]["rewards/margins"])
    assert tests["final"]["rewards/margins"] == validated
    by_hand = pytest.approx(margin_of(tmp_path / "final", llama), rel=0.02, abs=1e-6)
    assert is_rounded or validated == by_hand


# ---- types of weights, and the files beside them --------------------------------------------------


def test_each_weight_keeps_the_type_of_its_file_and_what_is_frozen_its_bits(llama, rated, tmp_path):
    """Two files of weights, and a config.json that says another type than theirs."""
    source = shutil.copytree(llama, tmp_path / "in")
    weights = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    weights = {n: x.float() if "norm" in n else x for n, x in weights.items()}
    file_of = {n: f"model-{i % 2}.safetensors" for i, n in enumerate(weights)}
    index = {"metadata": {}, "weight_map": file_of}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    for file in {*file_of.values()}:
        part = {n: x for n, x in weights.items() if file_of[n] == file}
        save_file(part, source / file, {"format": "pt"})
    config = edit_json(source / "config.json", dtype="float16")
    argv = ("--batch_size=4", "--max_steps=2", "--optim.lr=1e-2")
    train(source, rated, tmp_path / "run", *argv, "--lora.rank=2", "--lora.targets=q_proj")
    final = tmp_path / "run" / "final"
    found = {n: x for file in final.glob("*.safetensors") for n, x in load_file(file).items()}
    assert {n: x.dtype for n, x in found.items()} == {n: x.dtype for n, x in weights.items()}
    changed = [n for n, x in found.items() if not torch.equal(x, weights[n])]
    assert changed and all("q_proj" in n for n in changed)
    written = json.loads((final / "config.json").read_text())
    assert written == config | {"dtype": "bfloat16"}, "the type of most weights"
    load_transformers(final)


# ---- adapters ------------------------------------------------------------------------------------


def peft_folder(lora: Path, out: Path, **changes) -> Path:
    shutil.copytree(lora / "final_adapter", out)
    edit_json(out / "adapter_config.json", **changes)
    return out


def test_a_run_from_an_adapter_starts_as_its_model_and_ends_without_an_adapter(
    lora, llama, ratings, tmp_path, capsys
):
    folder = peft_folder(lora, tmp_path / "peft")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert "model.layers.0.self_attn.q_proj" in config["target_modules"]
    assert config["base_model_name_or_path"] == str(llama)
    assert (config["r"], config["lora_alpha"]) == (2, 3)
    assert isinstance(config["lora_alpha"], int), "Ollama, written in Go, refuses 3.0"
    trained = our_logits(lora / "checkpoints" / "step-00000004")
    assert same(our_logits(folder), trained, 1e-5)
    assert not same(trained, our_logits(llama), 1e-2)

    train(folder, ratings, tmp_path / "run", *STEPS, *LORA, "--max_steps=1")
    said = capsys.readouterr().out
    assert "policy and reference agree to the bit" in said
    assert "no final_adapter: PEFT needs a folder of its base" in said
    step = tmp_path / "run" / "checkpoints" / "step-00000001"
    assert not same(our_logits(step), trained, 1e-3), "else the second adapter shows nothing"
    check_rounded(tmp_path / "run" / "final", load.load_model(step).unique_parameters())
    assert not (tmp_path / "run" / "final_adapter").exists()


def test_an_adapter_of_gpt2_has_one_scale_and_one_rank(tiny, ratings, tmp_path):
    """c_attn has the adapters of q, k and v side by side, so its rank is three times that of the other layers."""
    train(tiny, ratings, tmp_path / "run", *STEPS, "--lora.rank=2", "--max_steps=2")
    trained = our_logits(tmp_path / "run" / "final")
    adapter = tmp_path / "run" / "final_adapter"
    assert not same(trained, our_logits(tiny), 1e-3)
    assert same(their_logits(load_peft(tiny, adapter)), trained, 1e-5)
    config = json.loads((adapter / "adapter_config.json").read_text())
    ranks = {
        len(x) for n, x in load_file(adapter / "adapter_model.safetensors").items() if "_A" in n
    }
    assert ranks == {config["r"]}
    assert not config.get("rank_pattern") and not config.get("alpha_pattern")


def test_an_adapter_that_names_no_base_is_refused(lora, tmp_path):
    for i, base in enumerate((None, "")):
        folder = peft_folder(lora, tmp_path / f"peft{i}", base_model_name_or_path=base)
        refused(f"{folder}: .* no adapter that names its base", our_logits, folder)


def test_an_export_has_the_template_of_its_run_wherever_a_program_looks(llama, ratings, tmp_path):
    """transformers reads chat_template.jinja, llama.cpp and transformers before 4.49 tokenizer_config.json."""
    base, template = tmp_path / "base", tmp_path / "own.jinja"
    shutil.copytree(llama, base)
    own = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    template.write_text(own, encoding="utf-8-sig")  # no mark of byte order comes out
    config = edit_json(base / "tokenizer_config.json", chat_template="{{ messages[0].content }}")
    argv = (*STEPS, "--max_steps=1", *LORA)
    train(base, ratings, tmp_path / "run", *argv, f"--data.chat_template={template}")
    final = tmp_path / "run" / "final"
    assert json.loads((final / "tokenizer_config.json").read_text()) == config | {
        "chat_template": own
    }
    adapter = tmp_path / "run" / "final_adapter"
    train(adapter, ratings, tmp_path / "on", *argv)
    for folder in (final, adapter, tmp_path / "on" / "final"):
        assert (folder / "chat_template.jinja").read_text() == own
        assert Tokenizer(find_model(str(folder))).template == own


def test_a_card_names_its_model_by_its_id_and_no_folder_of_this_machine(
    lora, llama, ratings, tmp_path, monkeypatch
):
    """The Hub refuses a path as base_model, and a card without it is in no tree of models."""
    base, run = shutil.copytree(llama, tmp_path / "base"), tmp_path / "run"
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(base))
    train("org/base", ratings, run, *STEPS, *LORA, "--max_steps=1")
    for folder, base_model in ((run, "org/base"), (lora, None)):
        card = huggingface_hub.ModelCard.load(folder / "final" / "README.md")
        assert card.data.base_model == base_model
        assert card.data.library_name == "transformers"
        assert f"  train: {ratings.name}\n" in card.text
        for path in (tmp_path, llama, ratings):
            assert str(path.parent) not in card.content


def test_others_may_read_an_export(lora):
    """safetensors writes files for their owner alone; a server often is another user, or in a container."""
    mask = os.umask(0)
    os.umask(mask)
    for folder in ("final", "final_adapter"):
        for file in (lora / folder).iterdir():
            assert file.stat().st_mode & 0o777 == 0o666 & ~mask, file.name

"""What a run exports (final, best, adapters, shards), loaded by the programs that users load it with."""

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
import yaml
from conftest import PARITY, checkpoint_tensors, first_shard, start, train
from models import GQA, logits, made, refused, same, same_weights
from safetensors.torch import load_file, save_file

import model
from hub import export
from hub.export import export_weights
from hub.families import canonical_name
from hub.folders import fetch_model
from runs import checkpoint, tensors
from runs.checkpoint import read_state
from runs.errors import Failed
from runs.settings import Lora

STEPS = ("--batch_size=4", "--max_steps=4", "--epochs=9", "--optim.lr=1e-2", "--save_interval=1")
STEPS += ("--keep_last=9", "--data.max_prompt=24", "--data.max_completion=24")
LORA = (
    "--lora.rank=2",
    "--lora.alpha=3",
    "--lora.targets=q_proj,o_proj,gate_proj,up_proj,down_proj",
)
IDS = list(range(3, 40))


def load_transformers(folder: Path):
    """transformers' model, without a missing or an unknown key."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    hf, info = load(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    return hf


@torch.no_grad()
def our_logits(source, dtype=torch.float32) -> torch.Tensor:
    """Logits of what fetch_model finds there: a folder, a run, a checkpoint, an adapter."""
    return logits(model.load_model(fetch_model(str(source)), dtype=dtype), IDS).float()


@torch.no_grad()
def rounded_logits(source) -> torch.Tensor:
    """The same with the weights as an export of a model in bfloat16 has them."""
    gpt = model.load_model(fetch_model(str(source)))
    for p in gpt.parameters():
        p.copy_(p.bfloat16())
    return logits(gpt, IDS)


@torch.no_grad()
def their_logits(hf) -> torch.Tensor:
    return hf(torch.tensor([IDS])).logits[0]


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
    state, _ = checkpoint.read_state(full / "checkpoints" / "step-00000004")
    assert state.best_step not in (None, 4), "else best and final are one"
    for name, step in (("final", 4), ("best", state.best_step)):
        found = load_file(full / name / "model.safetensors")
        assert found.keys() == load_file(llama / "model.safetensors").keys()
        assert {x.dtype for x in found.values()} == {torch.bfloat16}
        assert load_transformers(full / name).dtype == torch.bfloat16
        trained = checkpoint_tensors(full / "checkpoints" / f"step-{step:08d}", "weights")
        ours = model.load_model(full / name).unique_parameters()
        rounded = {n: x.bfloat16().float() for n, x in trained.items()}
        assert same_weights({n: p.detach() for n, p in ours.items()}, rounded)
        card = (full / name / "README.md").read_text()
        assert f"for {step} steps" in card and "| kto.beta | 0.1 |" in card
        assert state.identity["data (token ids and labels)"] in card
        rows = (full / "val.csv").read_text().splitlines()
        loss = dict(zip(rows[0].split(","), rows[step + 1].split(",")))["loss"]
        assert f"| step | {step} |" in card and f"| loss | {loss} |" in card
        assert "m.content" in (full / name / "chat_template.jinja").read_text()
        tokenizer = transformers.AutoTokenizer.from_pretrained(full / name)
        chat = [{"role": "user", "content": "hello"}]
        assert tokenizer.apply_chat_template(chat, tokenize=False) == "hello"


def test_any_checkpoint_is_a_model_and_becomes_a_folder(full, lora, tmp_path, capsys):
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
    start("export", [str(full / "checkpoints" / "step-00000004")])
    assert same(our_logits(full / "step-00000004"), our_logits(full), 0.0), "as final, to the bit"
    shutil.rmtree(full / "step-00000004")
    refused("^export: .*: neither a checkpoint", start, "export", [str(full / "final")])


def test_the_best_of_a_run_is_exported_where_the_model_has_moved(tiny, ratings, tmp_path):
    shutil.copytree(tiny, tmp_path / "first")
    argv = (f"--data.val={ratings}", "--val_interval=1", "--keep_best=kl/pairs", "--batch_size=8")
    out = tmp_path / "run"
    train(tmp_path / "first", ratings, out, *argv, "--max_steps=3", "--stop_at=2")
    (tmp_path / "first").rename(tmp_path / "second")
    train(tmp_path / "second", ratings, out, *argv, "--max_steps=3", "--resume=auto")
    best, final = (load_file(out / x / "model.safetensors") for x in ("best", "final"))
    first = out / "checkpoints" / "step-00000001"
    assert any(not torch.equal(best[n], final[n]) for n in best)
    assert read_state(out / "checkpoints" / "step-00000003")[0].best_step == 1 and first.is_dir()


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


def test_an_export_is_whole_or_not_there(full, tmp_path, monkeypatch):
    """export.py on a full disk, after an export that was killed, and with a damaged file."""
    step, out = full / "checkpoints" / "step-00000002", tmp_path / "new" / "out"
    argv = [str(step), "--out", str(out)]
    with monkeypatch.context() as m:
        m.setattr(tensors, "_bytes", mock.Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(Failed, match=f"^{out}: not saved: No space left on device$"):
            start("export", argv)
    assert not list(out.parent.iterdir())
    killed = out.with_name(".out.tmp")
    killed.mkdir()
    (killed / "model-00001-of-00002.safetensors").write_text("half")
    start("export", argv)
    assert [file.name for file in out.parent.iterdir()] == ["out"]
    assert {file.name for file in out.glob("*.safetensors")} == {"model.safetensors"}
    assert fetch_model(str(out)) == out
    with open(out / "model.safetensors", "r+b") as f:
        f.seek(2000)
        f.write(b"\0\1\2\3")
    refused("model.safetensors is damaged; if you changed it yourself", fetch_model, str(out))
    (tmp_path / "file").touch()
    refused("^out: .*/file: ", start, "export", [str(step), "--out", str(tmp_path / "file" / "x")])


def test_a_damaged_checkpoint_is_no_model_and_a_run_without_final_says_what_to_do(full, tmp_path):
    shutil.copytree(full / "checkpoints" / "step-00000002", tmp_path / "step-00000002")
    with open(first_shard(tmp_path / "step-00000002"), "r+b") as f:
        f.seek(2000)
        f.write(b"\0\1\2\3")
    refused("safetensors is damaged", fetch_model, str(tmp_path / "step-00000002"))
    (tmp_path / "settings.yaml").touch()
    refused("name one of its checkpoints", fetch_model, str(tmp_path))


def test_spins_adapters_are_put_on_their_own_iteration_s_base(llama, tmp_path):
    records = tmp_path / "demos.jsonl"
    records.write_text(
        '{"prompt": "a b", "completion": " c d"}\n{"prompt": "e", "completion": " f"}\n'
    )
    argv = ("--batch_size=2", "--optim.lr=1e-2", "--save_interval=1", "--keep_last=9", *LORA)
    argv += ("--spin.max_iterations=2", "--spin.max_new_tokens=4", "--data.max_prompt=8")
    train(llama, records, tmp_path / "run", *argv, "--data.max_completion=8", program="spin")
    last = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert checkpoint.read_state(last)[0].iteration == 2
    start("export", [str(last), "--out", str(tmp_path / "out")])
    ours, final = (load_file(tmp_path / x / "model.safetensors") for x in ("out", "run/final"))
    assert same_weights(ours, final)
    assert not (tmp_path / "run" / "final_adapter").exists(), "its base is no folder"
    shutil.copytree(last, tmp_path / "sent" / last.name)  # alone
    alone = str(tmp_path / "sent" / last.name)
    match = "iterations/2/weights.*: missing: its adapters"
    refused(match, start, "export", [alone, "--out", str(tmp_path / "x")])


def test_a_checkpoint_answers_through_the_template_that_its_run_was_given(llama, ratings, tmp_path):
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    argv = (*STEPS, f"--data.chat_template={template}")
    train(llama, ratings, tmp_path / "run", *argv)
    step = str(tmp_path / "run" / "checkpoints" / "step-00000002")
    assert (fetch_model(step) / "chat_template.jinja").read_text() == template.read_text()
    start("export", [step, "--out", str(tmp_path / "out")])
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == template.read_text()
    text = template.read_text()
    template.unlink()  # it is in the checkpoint
    assert (fetch_model(step) / "chat_template.jinja").read_text() == text


def test_what_was_not_trained_leaves_a_run_in_bfloat16_as_it_was(tmp_path, ratings):
    """The source is in float32, the run holds its base in bfloat16."""
    source, out = tmp_path / "source", tmp_path / "run"
    made(transformers.LlamaConfig(**GQA | dict(vocab_size=512)), source)
    shutil.copytree(PARITY / "tokenizer", source, dirs_exist_ok=True)
    argv = ("--lora.rank=2", "--lora.targets=q_proj", "--precision=bf16-true")
    train(source, ratings, out, *STEPS, *argv)
    start("export", [str(out / "checkpoints" / "step-00000004")])
    before, final, exported = (
        load_file(folder / "model.safetensors")
        for folder in (source, out / "final", out / "step-00000004")
    )
    trained = {name for name, x in before.items() if not torch.equal(x, final[name])}
    assert trained == {f"model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1)}
    assert same_weights(final, exported)
    assert any(not torch.equal(x, x.bfloat16().float()) for x in before.values()), "else none is"
    assert same(our_logits(out / "final_adapter"), our_logits(out), 1e-5)


# ---- adapters ------------------------------------------------------------------------------------


def peft_folder(lora: Path, out: Path, **changes) -> Path:
    shutil.copytree(lora / "final_adapter", out)
    file = out / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return out


def peft_logits(base: Path, adapter: Path) -> torch.Tensor:
    """Logits of PEFT's model; of ours where PEFT is not installed."""
    try:
        import peft
    except ImportError:
        return our_logits(adapter)
    hf = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return their_logits(peft.PeftModel.from_pretrained(hf, adapter).eval())


def test_a_peft_folder_is_folded_into_the_start_and_stays_in_the_reference(
    lora, llama, ratings, tmp_path, capsys
):
    folder = peft_folder(lora, tmp_path / "peft")
    config = json.loads((folder / "adapter_config.json").read_text())
    mlp = ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"]
    assert config["target_modules"] == [*mlp, "self_attn.o_proj", "self_attn.q_proj"]
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
    assert config["base_model_name_or_path"] == str(llama) and config["r"] == 4

    # a third, of another rank, on other layers, with another scale
    argv = (*STEPS, "--max_steps=1", "--lora.rank=3", "--lora.targets=q_proj,v_proj")
    train(both, ratings, tmp_path / "on", *argv)
    last = tmp_path / "on" / "checkpoints" / "step-00000001"
    with_three = our_logits(last)
    assert same(peft_logits(llama, tmp_path / "on" / "final_adapter"), with_three, 1e-5)
    assert not same(with_three, with_two, 1e-3)

    # on a checkpoint of ours: its base is no folder that PEFT could load
    train(last, ratings, tmp_path / "ours", *STEPS, *LORA, "--max_steps=1")
    assert "no final_adapter" in capsys.readouterr().out
    assert not (tmp_path / "ours" / "final_adapter").exists()


def test_an_adapter_is_scaled_by_its_pattern_and_by_rslora(lora, llama, tmp_path):
    trained = our_logits(lora / "checkpoints" / "step-00000004")
    pattern = {"self_attn.q_proj": 0, "mlp.*": 0}
    only_o_proj = our_logits(peft_folder(lora, tmp_path / "half", alpha_pattern=pattern))
    assert not same(only_o_proj, trained, 1e-2)
    assert not same(only_o_proj, our_logits(llama), 1e-3)
    first = {"self_attn.q_proj": 0, "mlp.*": 0, ".*": 9}
    two = [our_logits(peft_folder(lora, tmp_path / n, alpha_pattern=x)) for n, x in
           (("a", first), ("b", first | {".*_proj": 1}))]  # fmt: skip
    assert same(*two, 0), "of two patterns that match the first counts, as in PEFT"
    assert not same(two[0], trained, 1e-2)
    rslora = dict(use_rslora=True, lora_alpha=3 / 2**0.5)  # the same scale at rank 2
    assert same(our_logits(peft_folder(lora, tmp_path / "rslora", **rslora)), trained, 1e-5)


NOT_OURS = {
    "use_dora: True is not supported": dict(use_dora=True),
    "init_lora_weights: pissa": dict(init_lora_weights="pissa"),
    "peft_type: IA3": dict(peft_type="IA3"),
    "bias: all": dict(bias="all"),
    "modules_to_save: ": dict(modules_to_save=["lm_head"]),
    "layer_replication: ": dict(layer_replication=[[0, 1]]),
    "lora_alpha: null is not supported": dict(lora_alpha=None),
    "lora_alpha: expected a value like 8.0, got 16": dict(lora_alpha="16"),
    "use_rslora: expected a value like False": dict(use_rslora=1),
    r"alpha_pattern: expected an object, got \[3\]": dict(alpha_pattern=[3]),
    "alpha_pattern: q_proj: expected": dict(alpha_pattern={"q_proj": "3"}),
    "adapter_config.json: missing \\)": dict(alpha_pattern={"(q_proj": 3}),
    r"alpha_pattern: \(a\+\)\+b: a group that is repeated": dict(alpha_pattern={"(a+)+b": 3}),
    r"alpha_pattern: (a\?)+.*: a group that is repeated, or": dict(
        alpha_pattern={"a?" * 30 + "b": 3}
    ),
}


@pytest.mark.parametrize("match", NOT_OURS)
def test_an_adapter_of_another_kind_is_refused_by_name(match, lora, tmp_path):
    folder = peft_folder(lora, tmp_path / "peft", **NOT_OURS[match])
    refused(match, our_logits, folder)


def test_an_adapter_that_does_not_fit_is_refused(lora, tmp_path):
    folder = peft_folder(lora, tmp_path / "peft")
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name.replace("layers.1.", "layers.7."): x for name, x in tensors.items()}, file)
    refused("unknown .*layers.7", our_logits, folder)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"
    save_file(tensors | {name: torch.ones(2)}, file)
    refused(f"peft/adapter_model.safetensors: {name}: only", our_logits, folder)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    for kind, other in ("AB", "BA"):
        save_file({n: x for n, x in tensors.items() if n != name.format(kind)}, file)
        refused(f"layers.0.self_attn.q_proj: lora_{other} alone$", our_logits, folder)
        save_file(tensors | {name.format(kind): torch.ones(3)}, file)
        refused("q_proj: lora_A and lora_B of shapes .*3,", our_logits, folder)
    save_file(
        tensors | {name.format("A").removeprefix("base_model.model."): torch.ones(2, 48)}, file
    )
    refused("q_proj.lora_A.weight: there under another name", our_logits, folder)


def test_an_adapter_needs_its_base(lora, tmp_path):
    gone = peft_folder(lora, tmp_path / "gone", base_model_name_or_path="/no")
    refused("^model: /no: no such folder", fetch_model, str(gone))
    unnamed = peft_folder(lora, tmp_path / "unnamed", base_model_name_or_path=None)
    refused("adapter_config.json: base_model_name_or_path: missing", fetch_model, str(unnamed))
    odd = peft_folder(lora, tmp_path / "odd", base_model_name_or_path=[3])
    refused(r"base_model_name_or_path: expected a name, got \[3\]", fetch_model, str(odd))
    (odd / "adapter_config.json").write_text("[1]")
    refused("adapter_config.json: expected an object", fetch_model, str(odd))
    (odd / "adapter_config.json").write_text("{")
    refused("adapter_config.json: Expecting", fetch_model, str(odd))
    itself = peft_folder(lora, tmp_path / "x", base_model_name_or_path=str(tmp_path / "x"))
    refused("^model: .*/x: it is its own base$", fetch_model, str(itself))


def test_peft_puts_the_adapter_on_the_source_and_it_is_final(lora, llama):
    pytest.importorskip("peft")
    ours = our_logits(lora / "checkpoints" / "step-00000004")
    assert same(peft_logits(llama, lora / "final_adapter"), ours, 1e-5)


def test_targets_have_peft_s_names_too(llama):
    def adapters(targets: list[str]) -> dict:
        gpt = model.load_model(llama, Lora(rank=2, targets=", ".join(targets)))
        return {n: p.shape for n, p in gpt.named_parameters() if "lora_" in n}

    assert adapters(["q_proj", "v_proj"]) == adapters(["query", "value"])
    assert adapters(["query", "value"]) != adapters(["query"])
    mlp = ["gate_proj", "up_proj", "down_proj"]
    assert adapters([*mlp, "self_attn.o_proj"]) == adapters(["mlp", "projection"])
    blocks = ["query", "key", "value", "projection", "mlp"]
    assert adapters(["all-linear"]) == adapters(blocks)
    assert adapters(["lm_head"]) == adapters(["head"])
    assert "lm_head.lora_A" in adapters(["head"])
    for match, target in (
        ("c_attn$", "c_attn"),
        ("together: add mlp.down_proj, mlp.up_proj", "gate_proj"),
    ):
        lora = Lora(rank=2, targets=target)
        refused(f"^lora.targets: .*{match}", model.load_model, llama, lora)


# ---- shards, and programs that load the folder -----------------------------------------------------


def test_a_large_model_is_written_in_shards_with_an_index(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "MAX_SHARD", 60_000)
    export_weights(model.load_model(llama).unique_parameters(), llama, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(f.name for f in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and set(index["weight_map"].values()) == set(files)
    assert all(load_file(tmp_path / "out" / f) for f in files)
    assert same(our_logits(tmp_path / "out"), our_logits(llama), 0.0)
    assert their_logits(load_transformers(tmp_path / "out")).shape == (len(IDS), 512)


def test_transformers_pipeline_answers_from_the_folder(full):
    ask = transformers.pipeline("text-generation", model=str(full / "final"))
    said = ask("hello there", max_new_tokens=4, do_sample=False)[0]["generated_text"]
    assert said.startswith("hello there")


def test_every_name_has_one_in_gguf(full):
    gguf = pytest.importorskip("gguf")
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name in load_file(full / "final" / "model.safetensors"):
        assert known.get_name(canonical_name(name), try_suffixes=(".weight", ".bias")), name


def test_lm_eval_scores_the_folder(full, tmp_path):
    lm_eval, tasks = pytest.importorskip("lm_eval"), pytest.importorskip("lm_eval.tasks")
    rows = [{"text": "a b c"}, {"text": "d e f"}]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"test": str(tmp_path / "own.jsonl")}
    task = dict(
        task="own", dataset_path="json", dataset_kwargs={"data_files": files}, test_split="test",
        output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}",
        metric_list=[{"metric": "word_perplexity"}],
    )  # fmt: skip
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(task))
    tasks = tasks.TaskManager(include_path=str(tmp_path), include_defaults=False)
    given = f"pretrained={full / 'final'},dtype=float32"
    found = lm_eval.simple_evaluate(
        "hf", given, tasks=["own"], task_manager=tasks, device="cpu", bootstrap_iters=0
    )
    assert found["results"]["own"]["word_perplexity,none"] > 1

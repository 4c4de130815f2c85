"""What is read from folders and what is refused; where a model is found; a model's fingerprint."""

import json
import re
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from conftest import refused, train
from safetensors.torch import load_file, save_file
from tiny_models import HF, IDS, logits, made, same, same_weights
from tokens import edit_json, folder

import model
from models import load
from models.export import export
from models.hub import Source, find_model


@pytest.mark.parametrize("name", HF)
def test_every_shape_computes_what_transformers_does_and_goes_back(name, tmp_path):
    hf, ids = made(HF[name], tmp_path / "in"), [i % 97 for i in IDS]
    gpt = load.load_model(tmp_path / "in")
    assert type(gpt) is model.GPT
    with torch.no_grad():
        theirs = hf(torch.tensor([ids])).logits[0]
        assert theirs.std() > 0.1, "else equal logits say little"
        assert same(logits(gpt, ids), theirs, 1e-4)
    export(Source(tmp_path / "in"), gpt.rows, gpt.unique_parameters(), tmp_path / "out")
    assert same_weights(*(load_file(tmp_path / x / "model.safetensors") for x in ("in", "out")))


# ---- where a model is found ----------------------------------------------------------------------


def test_runs_folders_and_the_demo_are_found_from_anywhere(tiny, tmp_path, monkeypatch):
    assert find_model(str(tiny)) == Source(tiny)
    run = tmp_path / "run"
    run.mkdir()
    (run / "settings.yaml").touch()
    refused("model: .*run: a run without a `final` folder", find_model, str(run))
    shutil.copytree(tiny, run / "final")
    assert find_model(str(run)) == Source(run / "final")
    monkeypatch.chdir(tmp_path)
    assert (find_model("demo/base").folder / "config.json").exists()


def test_what_is_not_there_is_refused_in_one_line(tmp_path):
    for source in ("openai-community/not-here", "not-here", str(tmp_path / "nowhere")):
        message = refused(f"^reference: {source}: no such folder", find_model, source, "reference")
        assert "without a network, download it elsewhere and give the folder" in message
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(
        "^reference: .*/empty: a folder without config.json", find_model, str(empty), "reference"
    )


def test_a_download_takes_what_is_needed_and_no_more(tmp_path, monkeypatch):
    files = ["config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja"]
    files += ["README.md", "model-00001-of-00002.safetensors"]
    more = ["consolidated.safetensors", "pytorch_model.bin", "onnx/model.safetensors"]
    got = []

    def snapshot_download(source, **patterns):
        got[:] = huggingface_hub.utils.filter_repo_objects(files + more, **patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    (tmp_path / "config.json").touch()
    refused("weights are missing: no model.safetensors; hf", find_model, "mistralai/a")
    (tmp_path / "model.safetensors").touch()
    assert find_model("mistralai/a").folder == tmp_path and got == files


# ---- what is refused -----------------------------------------------------------------------------


def with_weights(**changes):
    """An edit of the weights file; None: without this weight."""

    def edit(folder):
        weights = load_file(folder / "model.safetensors") | changes
        weights = {name: x for name, x in weights.items() if x is not None}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return edit


def git_lfs_pointer(folder: Path) -> None:
    """What `git clone` leaves without git-lfs."""
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n"
    (folder / "model.safetensors").write_text(text)


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def other_format(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def half_of_a_download(folder: Path) -> None:
    """One of two files is not there."""
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    files = {NORM: "model-1.safetensors", "transformer.ln_f.weight": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


NORM = "transformer.ln_f.bias"
BROKEN = {
    "config.json: Expecting value": lambda f: (f / "config.json").write_text('{"model_type": '),
    "config.json: .*model type .llamba.": lambda f: edit_json(
        f / "config.json", model_type="llamba"
    ),
    "^{folder}: weights are missing: no model.safetensors; hf download": no_weights,
    "^{folder}: weights are missing: no model.safetensors; .* no other format": other_format,
    "^{folder}: weights are missing: no model-2.safetensors; hf download": half_of_a_download,
    "^{folder}: .* header too large": git_lfs_pointer,
    "do not fit config.json: .*mismatched.*wte": lambda f: edit_json(
        f / "config.json", vocab_size=511
    ),
    "do not fit config.json: .*missing.*ln_f.bias": with_weights(**{NORM: None}),
    "do not fit config.json: .*unexpected.*score": with_weights(score=torch.zeros(2)),
}


@pytest.mark.parametrize("match", BROKEN)
def test_a_folder_that_does_not_fit_is_refused_in_one_line(match, tiny, tmp_path):
    """transformers itself would only log a missing weight, and draw it at random."""
    shutil.copytree(tiny, tmp_path / "in")
    BROKEN[match](tmp_path / "in")
    match = match.replace("{folder}", re.escape(str(tmp_path / "in")))
    refused(match, load.load_model, tmp_path / "in")


def test_quantised_weights_are_refused_with_the_field_that_names_them(tiny, tmp_path):
    source, adapter = tmp_path / "in", tmp_path / "adapter"
    shutil.copytree(tiny, source)
    edit_json(source / "config.json", quantization_config={"bits": 4})
    adapter.mkdir()
    about = {"peft_type": "LORA", "base_model_name_or_path": str(source)}
    (adapter / "adapter_config.json").write_text(json.dumps(about))
    fault = f"{source}: config.json has a quantization_config: the weights are quantised"
    refused(f"^reference: {fault}", find_model, str(source), "reference")
    field = f"{adapter}/adapter_config.json: base_model_name_or_path"
    refused(f"^model: {field}: {fault}", find_model, str(adapter))
    edit_json(source / "config.json", quantization_config=None)
    find_model(str(adapter))


def test_constants_in_an_old_file_are_no_weights(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "in")
    constants = {f"transformer.h.0.attn.{x}": torch.ones(1) for x in ("bias", "masked_bias")}
    with_weights(**constants)(tmp_path / "in")
    load.load_model(tmp_path / "in")


def test_token_ids_beyond_the_embedding_are_refused_where_they_are_used(tiny, ratings, tmp_path):
    """The tiny model's embedding has 512 rows."""
    source = folder(shutil.copytree(tiny, tmp_path / "in"), ("<new>",))
    data = tmp_path / "data.jsonl"
    argv = ("--max_steps=1", "--batch_size=4", "--val_interval=null")
    train(source, ratings, tmp_path / "unused", *argv)
    record = {"prompt": "a", "completion": "b <new>", "label": True}
    data.write_text(ratings.read_text() + json.dumps(record) + "\n")
    match = f"^{data}:17: token: id 512, but the embedding of {source} has 512 rows$"
    refused(match, train, source, data, tmp_path / "run", *argv)
    assert not (tmp_path / "run").exists()

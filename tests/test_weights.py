"""Weights read and written: families against transformers, exports, hashes, refusals."""

import json
import shlex
import shutil
import sys
import weakref
from pathlib import Path
from unittest import mock

import huggingface_hub
import litgpt
import numpy as np
import pytest
import torch
import transformers
from conftest import train
from models import GQA, HF, logits, made, refused, same, same_weights
from safetensors.torch import load_file, save_file
from torch import nn

import model
from data import pack
from hub.export import export_weights
from hub.folders import fetch_model, folders_on_top
from hub.lora import merge_adapters
from hub.weights import weights_hash
from records.tokenizer import Tokenizer
from runs import tensors
from runs.settings import Lora
from runs.tensors import LazyTensors


def check_against_transformers(folder: Path, hf: nn.Module, tmp: Path, n=40) -> nn.Module:
    """Equal logits when loaded from `folder`; equal again in both libraries once exported."""
    ids = torch.randint(hf.config.vocab_size, (n,), generator=torch.Generator().manual_seed(1))
    gpt, out = model.load_model(folder), tmp / "out"
    with torch.no_grad():
        theirs, ours = hf(ids[None]).logits[0], logits(gpt, ids.tolist())
        assert theirs.std() > 0.1, "else equal logits say little"
        assert same(ours, theirs, 1e-4)
        export_weights(gpt.unique_parameters(), folder, out)
        load = transformers.AutoModelForCausalLM.from_pretrained
        back, info = load(out, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] == gpt.tied
        assert back.config.tie_word_embeddings == hf.config.tie_word_embeddings == gpt.tied
        assert same(back(ids[None]).logits[0], theirs, 1e-5)
        again = model.load_model(out)
        assert same_weights(again.unique_parameters(), gpt.unique_parameters())
        assert same(logits(again, ids.tolist()), ours)
    return gpt


# ---- families, against transformers --------------------------------------------------------------


def test_gpt2_of_full_width_computes_what_transformers_does_and_goes_back(tmp_path):
    """Two of its twelve layers; 200 MB, so deleted early."""
    hf = made(transformers.GPT2Config(n_layer=2), tmp_path / "in")
    gpt = check_against_transformers(tmp_path / "in", hf, tmp_path)
    layer = sum(p.numel() for p in gpt.transformer.h[0].parameters())
    assert gpt.tied and sum(p.numel() for p in gpt.parameters()) + 10 * layer == 124_439_808
    shutil.rmtree(tmp_path / "in")
    shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize("name", HF)
def test_every_family_computes_what_transformers_does_and_goes_back(name, tmp_path):
    hf = made(HF[name], tmp_path / "in")
    check_against_transformers(tmp_path / "in", hf, tmp_path)


@pytest.mark.parametrize("name", ["llama3 rope", "linear rope"])
def test_rope_scaling_is_read_in_the_older_spelling_too(name, tmp_path):
    hf = made(HF[name], tmp_path / "in")
    file = tmp_path / "in" / "config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    if name == "linear rope":
        rope["type"] = rope.pop("rope_type")  # the oldest
    file.write_text(json.dumps(config | {"rope_scaling": rope}))
    check_against_transformers(tmp_path / "in", hf, tmp_path)


def test_a_family_is_found_in_a_download_and_under_any_name(tmp_path):
    folder = tmp_path / "models--EleutherAI--pythia-14m" / "snapshots" / "0123abcd"
    hf = made(
        transformers.GPTNeoXConfig(**{k: v for k, v in GQA.items() if "key" not in k}), folder
    )
    check_against_transformers(folder, hf, tmp_path)


def test_the_name_of_a_folder_says_nothing_about_the_weights_in_it(tmp_path):
    # litgpt gives RMSNorm an offset of 1 where it reads Gemma, drops LayerNorm's weights at OLMo
    for name, family in (("Gemma-as-teacher", "llama"), ("OLMo-as-teacher", "gpt2")):
        folder = tmp_path / name
        hf = made(HF[family], folder)
        config = json.loads((folder / "config.json").read_text())
        config.pop("tie_word_embeddings")
        (folder / "config.json").write_text(json.dumps(config))
        check_against_transformers(folder, hf, folder)


# ---- in ------------------------------------------------------------------------------------------


def test_old_gpt2_files_load_without_prefix_and_with_mask_buffers(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "old")
    weights = load_file(tiny / "model.safetensors")
    weights = {k.removeprefix("transformer."): x for k, x in weights.items()}
    for i in range(2):
        weights[f"h.{i}.attn.bias"] = torch.ones(1, 1, 128, 128).tril()
        weights[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    assert "wte.weight" in weights
    save_file(weights, tmp_path / "old" / "model.safetensors")
    old, new = (model.load_model(path).unique_parameters() for path in (tmp_path / "old", tiny))
    assert same_weights(old, new)


def test_a_litgpt_checkpoint_folder_loads_as_its_hugging_face_one(tmp_path):
    made(HF["llama"], tmp_path)
    gpt = model.load_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(gpt.state_dict(), tmp_path / "lit_model.pth")
    refused("no model.safetensors", model.load_model, tmp_path)
    litgpt.utils.save_config(gpt.config, tmp_path)
    assert same_weights(model.load_model(tmp_path).unique_parameters(), gpt.unique_parameters())


@pytest.mark.parametrize("name", ["gpt2", "llama, tied", "litgpt"])
def test_loaded_weights_have_nothing_to_do_with_their_file_any_more(name, tmp_path):
    made(HF[name] if name in HF else HF["llama"], tmp_path)
    file = tmp_path / "model.safetensors"
    if name not in HF:
        gpt, file = model.load_model(tmp_path), tmp_path / "lit_model.pth"
        torch.save(gpt.state_dict(), file)
        litgpt.utils.save_config(gpt.config, tmp_path)
    gpt = model.load_model(tmp_path)
    before = {n: x.detach().clone() for n, x in gpt.unique_parameters().items()}
    with open(file, "r+b") as f:
        f.write(bytes(file.stat().st_size))
    assert same_weights(before, gpt.unique_parameters())


@pytest.fixture
def shards(tmp_path):
    """The same model twice: in one file, and in several."""
    hf = made(HF["llama"], tmp_path / "one")
    hf.save_pretrained(tmp_path / "many", max_shard_size="40KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    return tmp_path / "one", tmp_path / "many"


def test_files_that_the_index_does_not_name_are_left_aside(shards):
    before = model.load_model(shards[0]).unique_parameters()
    for folder in shards:
        weights = {n: x + 1 for n, x in load_file(shards[0] / "model.safetensors").items()}
        for name in ("consolidated", "model_old", "a-backup", "zz"):
            save_file(weights, folder / f"{name}.safetensors")
        assert same_weights(model.load_model(folder).unique_parameters(), before)


INDEX = "model.safetensors.index.json"


def change_index(**change):
    def edit(folder):
        index = json.loads((folder / INDEX).read_text())
        for name, file in change.items():
            key = next(key for key in index["weight_map"] if name in key)
            index["weight_map"][key] = file
        (folder / INDEX).write_text(json.dumps(index))

    return edit


def twice(folder):
    one, two, *_ = sorted(folder.glob("*.safetensors"))
    weights = load_file(one)
    save_file(weights | load_file(two), two, metadata={"format": "pt"})


SHARDS = {
    "model-00002.*: model.embed_tokens.weight: model-00001.* has it too$": twice,
    f"{INDEX}: weight_map: expected names of files beside it, got ../x": change_index(norm="../x"),
    f"{INDEX}: weight_map: .* got 3": change_index(norm=3),
    f"{INDEX}: weight_map: .* got None": lambda f: (f / INDEX).write_text('{"weight_map": []}'),
    f"{INDEX}: Expecting": lambda f: (f / INDEX).write_text("{"),
    "no.safetensors: .*No such file": change_index(norm="no.safetensors"),
    f"model.safetensors and {INDEX}: two models": lambda f: shutil.copy(
        f.parent / "one" / "model.safetensors", f
    ),
}


@pytest.mark.parametrize("match", SHARDS)
def test_an_index_that_leaves_open_which_weights_are_meant_is_refused(match, shards):
    SHARDS[match](shards[1])
    refused(match, model.load_model, shards[1])


def test_a_weight_that_a_file_has_under_two_names_is_refused(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    weights = load_file(tiny / "model.safetensors")
    weights["wpe.weight"] = weights["transformer.wpe.weight"] + 1
    save_file(weights, tmp_path / "model.safetensors")
    refused("model.safetensors: .*wpe.weight: there under another name", model.load_model, tmp_path)


def test_pickled_weights_are_refused_with_the_command_that_converts_them(tmp_path):
    folder = tmp_path / "it's a model"
    hf = made(HF["llama"], folder)
    before = model.load_model(folder).unique_parameters()
    torch.save(hf.state_dict(), folder / "pytorch_model.bin")
    assert fetch_model(str(folder)) == folder, "safetensors are there too"
    (folder / "model.safetensors").unlink()
    line = refused("^model: .*: no model.safetensors; ", fetch_model, str(folder))
    python, option, code, *argv = shlex.split(line.split("pytorch_model.bin: ")[1])
    assert (python, option) == ("python", "-c")
    with mock.patch.object(sys, "argv", [option, *argv]):
        exec(code)
    assert same_weights(model.load_model(fetch_model(str(folder))).unique_parameters(), before)


@pytest.mark.parametrize("name", ["llama, tied", "gpt2", "llama", "gpt2, untied"])
@pytest.mark.parametrize("lora", [None, Lora(rank=2)])
def test_a_tied_head_stays_one_matrix_and_an_untied_one_two(name, lora, tmp_path):
    hf = made(HF[name], tmp_path / "in")
    tied = hf.config.tie_word_embeddings
    gpt = model.load_model(tmp_path / "in", lora)
    head = getattr(gpt.lm_head, "linear", gpt.lm_head)
    assert gpt.tied == tied == (head.weight is gpt.transformer.wte.weight)
    named = [p for p in gpt.unique_parameters().values() if p.shape == (97, 48)]
    held = [p for p in gpt.parameters() if p.shape == (97, 48)]
    assert len(named) == len(held) == 2 - tied
    if not lora:  # trained once: one step moves both uses of it
        gpt(pack([np.array([1, 2])], [(np.array([3, 4]),)])).sum().backward()
        torch.optim.SGD(gpt.parameters(), lr=0.1).step()
        assert torch.equal(gpt.transformer.wte.weight, gpt.lm_head.weight) == tied
    out = tmp_path / "out"
    export_weights(merge_adapters(gpt.unique_parameters(), gpt), tmp_path / "in", out)
    exported = load_file(out / "model.safetensors").values()
    assert len([x for x in exported if x.shape == (97, 48)]) == 2 - tied
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] == tied


# ---- out -----------------------------------------------------------------------------------------


def test_an_export_brings_the_tokenizer_along_and_the_source_s_dtype_or_float32(tiny, tmp_path):
    wide, narrow, out = tmp_path / "wide", tmp_path / "narrow", tmp_path / "out"
    gpt = model.load_model(tiny, dtype=torch.bfloat16)
    export_weights(gpt.unique_parameters(), tiny, wide)
    assert {f.name for f in wide.iterdir()} >= {"tokenizer.json", "tokenizer_config.json"}
    load = transformers.AutoModelForCausalLM.from_pretrained
    assert load(wide).dtype == torch.float32, "the source's, though the run's was narrower"
    load(wide, dtype=torch.bfloat16).save_pretrained(narrow)
    for dtype, then in (("source", torch.bfloat16), ("float32", torch.float32)):
        export_weights(model.load_model(narrow).unique_parameters(), narrow, out, dtype)
        assert load(out).dtype == then
        assert {x.dtype for x in load_file(out / "model.safetensors").values()} == {then}
        assert (out / "model.safetensors").stat().st_mode & 0o777 == 0o644
    export_weights(model.load_model(narrow, dtype=torch.float64).unique_parameters(), narrow, out)
    assert load(out, dtype="auto").dtype == torch.float64, "a run in 64-true loses nothing"


def test_a_fingerprint_is_of_every_weight_shape_and_name_and_of_no_order(tiny):
    weights = model.load_model(tiny).unique_parameters()
    state = {n: p.detach().clone() for n, p in weights.items()}
    mark = weights_hash(state)
    assert weights_hash(dict(reversed(state.items()))) == mark == weights_hash(weights)
    others = {mark}
    for name, x in state.items():
        last = x.clone()
        last.view(-1)[-1] += 1e-3
        others.add(weights_hash(state | {name: last}))
    name = "transformer.wte.weight"
    wte, rest = state[name], dict(state)
    del rest[name]
    others.add(weights_hash(state | {name: wte.reshape(256, 64)}))
    others.add(weights_hash(rest | {"transformer.wtf.weight": wte}))
    others.add(weights_hash(state | {name: wte.view(torch.int32)}))  # same bytes
    others.add(weights_hash(rest))
    assert len(others) == 1 + len(state) + 4


# ---- where a model is found ----------------------------------------------------------------------


def test_fetch_resolves_folders_and_finished_runs(tiny, tmp_path):
    assert fetch_model(str(tiny)) == tiny
    run = tmp_path / "run"
    run.mkdir()
    (run / "settings.yaml").touch()
    refused("model: .*run: a run without a `final` folder", fetch_model, str(run))
    shutil.copytree(tiny, run / "final")
    assert fetch_model(str(run)) == run / "final"
    assert (fetch_model("demo/base") / "config.json").exists()


def test_the_demos_own_files_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (fetch_model("demo/base") / "config.json").exists()


def test_fetch_refuses_what_is_not_there(tmp_path, monkeypatch):
    nowhere = str(tmp_path / "nowhere")
    refused("^reference: .*/nowhere: no such folder$", fetch_model, nowhere, "reference")
    (tmp_path / "file").touch()
    refused("no such folder$", fetch_model, str(tmp_path / "file"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    constants = huggingface_hub.constants  # read at import
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for source in ("openai-community/not-here", "not-here"):
        message = refused(f"^model: {source}: .*huggingface.co", fetch_model, source)
        assert "without a network, download it elsewhere and give the folder" in message


def test_a_download_takes_what_is_needed_and_no_more(tmp_path, monkeypatch):
    files = ["config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja"]
    files += ["model-00001-of-00002.safetensors"]
    more = ["consolidated.safetensors", "pytorch_model.bin", "onnx/model.safetensors"]
    more += ["original/params.json", "README.md"]
    got = []

    def snapshot_download(source, **patterns):
        got.extend(huggingface_hub.utils.filter_repo_objects(files + more, **patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    refused("no model.safetensors; .* mistralai/a a$", fetch_model, "mistralai/a")
    got.clear()
    (tmp_path / "model.safetensors").touch()
    assert fetch_model("mistralai/a") == tmp_path and got == files
    got.clear()
    fetch_model("mistralai/a", weights=False)
    assert got == files[:-1], "data.py reads the tokenizer alone"


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_an_export_holds_one_tensor_at_a_time(name, tmp_path):
    made(HF[name], tmp_path / "in")
    stored, alive = model.read_folder_weights(tmp_path / "in", torch.float32), []

    def make(name):
        assert not any(held() is not None for held in alive)
        x = stored[name]
        alive.append(weakref.ref(x))
        return x

    export_weights(LazyTensors(stored.like, make), tmp_path / "in", tmp_path / "out")
    one, two = (load_file(tmp_path / x / "model.safetensors") for x in ("in", "out"))
    assert one.keys() == two.keys() and all(torch.equal(x, two[n]) for n, x in one.items())


def test_a_tensor_is_read_alone_and_of_two_sources_the_second_counts(tmp_path):
    save_file({"a": torch.ones(3), "b": torch.zeros(1000)}, tmp_path / "x.safetensors")
    read = tensors.open_safetensors(tmp_path / "x.safetensors")
    x = read["b"]
    with open(tmp_path / "x.safetensors", "r+b") as file:
        file.seek(-4000, 2)
        file.write(bytes([255]) * 4000)
    assert not x.any(), "a copy: nothing of the file is kept"
    assert read.get("c") is None and "c" not in read
    newer = LazyTensors(
        {"a": torch.ones(3).bfloat16()}, lambda name: torch.full((3,), 2.0).bfloat16()
    )
    both = tensors.override_tensors(read, newer)
    assert both.like["a"].dtype == both["a"].dtype == torch.bfloat16 and both["a"][0] == 2
    assert list(both) == ["a", "b"] and both["b"].shape == (1000,)


def test_what_is_written_is_aligned_whatever_comes_first(tmp_path):
    some = {
        "flags": torch.ones(3, dtype=torch.uint8),
        "w": torch.ones(2),
        "h": torch.ones(1).half(),
    }
    tensors.write_safetensors(tmp_path, LazyTensors(some, some.__getitem__))
    file = tmp_path / "model.safetensors"
    size = int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8 : 8 + size])
    assert size % 8 == 0 and header.pop("__metadata__") == {"format": "pt"}
    assert {name: x["data_offsets"][0] for name, x in header.items()} == {
        "w": 0,
        "h": 8,
        "flags": 10,
    }
    assert all(torch.equal(x, some[name]) for name, x in load_file(file).items())


def test_an_export_asks_for_weights_in_one_order_in_every_process(tmp_path):
    """Each may be a gathering of all ranks. Phi-3 has two of ours in one; a set of names would differ
    from process to process."""
    config = transformers.Phi3Config(**GQA | dict(num_hidden_layers=9, pad_token_id=0))
    made(config, tmp_path / "in")
    stored, asked = model.read_folder_weights(tmp_path / "in", torch.float32), []
    spied = LazyTensors(stored.like, lambda name: asked.append(name) or stored[name])
    export_weights(spied, tmp_path / "in", tmp_path / "out")
    mlp = [name for name in asked if ".mlp.fc_" in name]
    assert mlp == [f"transformer.h.{i}.mlp.fc_{j}.weight" for i in range(9) for j in (1, 2)]
    again = len(asked)
    export_weights(spied, tmp_path / "in", None)
    assert asked[again:] == asked[:again], "and so does a rank that does not write"


def test_a_failed_write_asks_for_the_rest_too(tmp_path, monkeypatch):
    """Other ranks gather them and would wait for ever."""
    asked, like = [], {f"w{i}": torch.zeros(3) for i in range(5)}

    def make(name):
        asked.append(name)
        if name == "w2":
            monkeypatch.setattr(tensors, "_bytes", mock.Mock(side_effect=OSError(28, "full")))
        return like[name]

    with pytest.raises(OSError):
        tensors.write_safetensors(tmp_path, LazyTensors(like, make))
    assert asked == list(like)


# ---- what is refused -----------------------------------------------------------------------------


def edited(folder: Path, **changes) -> Path:
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {k: v for k, v in config.items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def unfit(change):
    """An edit of the weights file."""

    def edit(folder):
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return edit


def truncated(n: int):
    """The weights file, cut after n bytes."""

    def edit(folder):
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:n])

    return edit


FIT = "do not fit config.json: "
BROKEN = {
    "config.json: no such file": lambda f: (f / "config.json").unlink(),
    "config.json: Expecting value": lambda f: (f / "config.json").write_text('{"model_type": '),
    "config.json: n_head: expected a value like 12, got 4.0": lambda f: edited(f, n_head=4.0),
    "config.json: n_embd: null is not supported": lambda f: edited(f, n_embd=None),
    "config.json: n_layer: expected 1 to 10000, got 0": lambda f: edited(f, n_layer=0),
    "config.json: n_positions: expected 1 to": lambda f: edited(f, n_positions=10**9),
    "config.json: n_positions: expected at most 16777216,": lambda f: edited(f, n_positions=10**8),
    "config.json: model_type: 'llamba' is not supported": lambda f: edited(f, model_type="llamba"),
    "in/config.json: activation_function: relu": lambda f: edited(f, activation_function="relu"),
    "no model.safetensors": lambda f: (f / "model.safetensors").unlink(),
    "model.safetensors: ": truncated(50_000),
    "model.safetensors: .*header": truncated(0),
    FIT + ".*size mismatch for transformer.wte": lambda f: edited(f, vocab_size=511),
    FIT + ".*wpe": lambda f: edited(f, n_positions=64),
    FIT + ".*h.1": lambda f: edited(f, n_layer=1),
    FIT + ".*h.2": lambda f: edited(f, n_layer=3),
    "n_head: expected a divisor of the width 32, got 5": lambda f: edited(f, n_head=5),
    FIT + ".*missing .*ln_f.bias": unfit(lambda w: w.pop("transformer.ln_f.bias")),
    FIT + ".*score.weight": unfit(lambda w: w.update({"score.weight": torch.zeros(2, 32)})),
    FIT + ".*ln_f.weight: of type I8": unfit(
        lambda w: w.update({"transformer.ln_f.weight": w["transformer.ln_f.weight"].to(torch.int8)})
    ),
    FIT + ".*unknown .*score": unfit(lambda w: w.update(score=torch.zeros(2))),
}


@pytest.mark.parametrize("match", BROKEN)
def test_a_broken_folder_is_refused_in_one_line(match, tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "in")
    BROKEN[match](tmp_path / "in")
    refused(match, model.load_model, tmp_path / "in")


def with_token(folder: Path, i: int) -> None:
    """Give the tokenizer one more token, <new>, with this id."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    content["added_tokens"].append({"id": i, "content": "<new>", **flags})
    file.write_text(json.dumps(content))


def test_token_ids_beyond_the_embedding_are_refused_where_they_are_used(tiny, ratings, tmp_path):
    """The tiny model's embedding has 512 rows."""
    source, data = tmp_path / "in", tmp_path / "data.jsonl"
    shutil.copytree(tiny, source)
    with_token(source, 512)
    argv = ("--max_steps=1", "--batch_size=4", "--val_interval=null")
    train(source, ratings, tmp_path / "unused", *argv)
    record = {"prompt": "a", "completion": "b <new>", "label": True}
    data.write_text(ratings.read_text() + json.dumps(record) + "\n")
    match = f"^{data}:17: token: id 512, but the embedding of {source} has 512 rows$"
    refused(match, train, source, data, tmp_path / "run", *argv)
    config = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<new>"}))
    match = f"^{ratings}:1: eos_token: id 512, but the embedding"
    refused(match, train, source, ratings, tmp_path / "run", *argv)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("token", [7, ["a"], {"content": 7}])
def test_an_eos_that_is_no_text_or_no_id_is_refused(token, tiny, tmp_path):
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"eos_token": token}))
    refused(f"^{file}: eos_token: expected a text, got ", Tokenizer, tmp_path)
    file.write_text(json.dumps(config | {"eos_token": None}))
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    for ids in ("5", [5, "6"], -1, 1.5, True):
        edited(tmp_path, eos_token_id=ids)
        refused("config.json: eos_token_id: expected token ids, got ", Tokenizer, tmp_path)


def test_what_lies_on_top_of_a_base_is_in_the_order_in_which_it_was_put_there(tmp_path):
    layers = [tmp_path / f"layer {i}" for i in range(12)]
    for i, layer in enumerate(layers):
        layer.mkdir()
        (tmp_path / f"on-top-{i}").symlink_to(layer)
    assert folders_on_top(tmp_path) == layers

"""Weights in and out: Hugging Face and litgpt folders, by litgpt's conversion (GPT-2: ours)."""

import contextlib
import hashlib
import json
import re
import shutil
from pathlib import Path

import litgpt
import torch
import yaml
from litgpt.scripts import convert_hf_checkpoint as from_hf
from litgpt.scripts import convert_lit_checkpoint as to_hf
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from support.errors import BadInput
from support.records import local


def fetch(source: str, what: str = "model") -> Path:
    """The folder of a local path, of a run of ours (its `final`) or of a Hugging Face id. `what`:
    the setting's name, for messages."""
    folder = local(source)
    if (folder / "settings.yaml").exists() and not (folder / "config.json").exists():
        if not (folder / "final").is_dir():
            why = "a run without a `final` folder: resume it, or let it end"
            raise BadInput(f"{what}: {source}: {why}")
        folder = folder / "final"
    if folder.is_dir():
        return folder
    if folder.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+|[\w-]+", source):
        raise BadInput(f"{what}: {source}: no such folder")
    from huggingface_hub import snapshot_download

    files = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
    rest = ["consolidated*", "*/*"]
    try:
        return Path(snapshot_download(source, allow_patterns=files, ignore_patterns=rest))
    except Exception as e:  # the hub client has a dozen ways to say that it could not
        why = f"no such folder here, and not fetched from huggingface.co ({type(e).__name__})"
        files = "config.json and model.safetensors"
        advice = f"download it elsewhere and give the folder that holds {files}"
        raise BadInput(f"{what}: {source}: {why}; without a network, {advice}") from e


# ---- GPT-2, which litgpt lacks -------------------------------------------------------------------

GPT2_NAMES = {
    "wte": "transformer.wte", "wpe": "transformer.wpe",
    "ln_1": "norm_1", "ln_2": "norm_2",
    "attn.c_attn": "attn.qkv", "attn.c_proj": "attn.proj",
    "mlp.c_fc": "mlp.fc", "mlp.c_proj": "mlp.proj",
    "ln_f": "transformer.ln_f", "lm_head": "lm_head",
}  # fmt: skip


def gpt2_from_hf(config, state, weights):
    for name, x in weights.items():
        name = name.removeprefix("transformer.")
        if re.search(r"\.attn\.(masked_)?bias$", name):
            continue  # old files carry causal masks
        layer, part, kind = re.fullmatch(r"(h\.\d+\.)?(.+)\.(weight|bias)", name).groups()
        prefix = f"transformer.{layer}" if layer else ""
        x = x.T.contiguous() if ".c_" in part and kind == "weight" else x
        state[f"{prefix}{GPT2_NAMES[part]}.{kind}"] = x
    state.setdefault("lm_head.weight", state["transformer.wte.weight"])


def gpt2_to_hf(config, state, weights):
    back = {ours: theirs for theirs, ours in GPT2_NAMES.items()}
    for name, x in weights.items():
        match = re.fullmatch(r"(?:transformer\.(h\.\d+\.))?(.+)\.(weight|bias)", name)
        layer, part, kind = match.groups()
        theirs = back[part]
        x = x.T.contiguous() if ".c_" in theirs and kind == "weight" else x
        full = f"transformer.{layer or ''}{theirs}.{kind}"
        state[name if theirs == "lm_head" else full] = x


# ---- families: config.json -> litgpt's Config ----------------------------------------------------


def _gpt2(c):
    scaled = c.get("scale_attn_weights", True) and not c.get("scale_attn_by_inverse_layer_idx")
    if c.get("activation_function", "gelu_new") != "gelu_new" or not scaled:
        raise BadInput("config.json: activation_function or scale_attn_...: not GPT-2's")
    return dict(
        block_size=c["n_positions"], n_layer=c["n_layer"], n_embd=c["n_embd"], n_head=c["n_head"],
        bias=True, norm_eps=c["layer_norm_epsilon"], intermediate_size=c.get("n_inner"),
        rotary_percentage=0.0, parallel_residual=False, gelu_approximate="tanh",
    )  # fmt: skip


def _rope(c):
    """-> rope_base, rope_adjustments. transformers 5 moved rope_theta and rope_scaling into
    rope_parameters."""
    rope = c.get("rope_parameters") or {}
    scaling = c.get("rope_scaling") or rope
    kind, adjustments = scaling.get("rope_type", scaling.get("type", "default")), None
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        adjustments = {name: scaling[name] for name in names}
        adjustments["original_max_seq_len"] = scaling["original_max_position_embeddings"]
    elif kind == "linear":
        adjustments = {"factor": scaling["factor"]}
    elif kind != "default":
        raise BadInput(f"config.json: rope_scaling: {kind} is not supported")
    base = rope.get("rope_theta") or c.get("rope_theta", 10000)
    return dict(rope_base=base, rope_adjustments=adjustments)


def _llama(c):
    rope, kind = _rope(c), c["model_type"]
    if c.get("hidden_act", "silu") != "silu":
        raise BadInput(f"config.json: hidden_act: {c['hidden_act']} is not supported, only silu")
    if kind in ("qwen2", "qwen3") and c.get("use_sliding_window"):
        raise BadInput(f"config.json: use_sliding_window: not supported for {kind}")
    return dict(
        block_size=c["max_position_embeddings"], n_layer=c["num_hidden_layers"],
        n_embd=c["hidden_size"], n_head=c["num_attention_heads"],
        n_query_groups=c.get("num_key_value_heads"), head_size=c.get("head_dim"),
        rotary_percentage=1.0, parallel_residual=False, bias=bool(c.get("mlp_bias")),
        attn_bias=c.get("attention_bias", kind == "qwen2"), norm_qk=kind == "qwen3",
        norm_class_name="RMSNorm", norm_eps=c["rms_norm_eps"], mlp_class_name="LLaMAMLP",
        intermediate_size=c["intermediate_size"],
        sliding_window_size=c.get("sliding_window") if kind == "mistral" else None, **rope,
    )  # fmt: skip


def _with_qkv(convert):
    """litgpt's converters that also take a dict, in which q, k and v wait for each other."""
    return lambda config, state, weights: convert(config, {}, state, weights)


# model_type in config.json -> litgpt Config arguments, weights in, weights out
LLAMA = _with_qkv(from_hf.copy_weights_hf_llama)
FAMILIES = {
    "gpt2": (_gpt2, gpt2_from_hf, gpt2_to_hf),
    "llama": (_llama, LLAMA, to_hf.copy_weights_llama),
    "mistral": (_llama, LLAMA, to_hf.copy_weights_llama),
    "qwen2": (_llama, _with_qkv(from_hf.copy_weights_qwen_2_5), to_hf.copy_weights_qwen_2_5),
    "qwen3": (_llama, _with_qkv(from_hf.copy_weights_qwen_3), to_hf.copy_weights_qwen_3),
}
# other families by litgpt's names, as its own converters choose: by the start of the model's name
LITGPT = {
    "gemma-2": (lambda c, *sw: from_hf.copy_weights_gemma_2({}, *sw), to_hf.copy_weights_gemma_2),
    "gemma-3": (
        lambda c, *sw: from_hf.copy_weights_gemma_3({}, *sw, config=c),
        to_hf.copy_weights_gemma_3,
    ),
    "phi": (_with_qkv(from_hf.copy_weights_phi), to_hf.copy_weights_phi),
    "olmo-2": (_with_qkv(from_hf.copy_weights_olmo2), to_hf.copy_weights_olmo2),
    "falcon": (from_hf.copy_weights_falcon, to_hf.copy_weights_falcon),
    "pythia": (from_hf.copy_weights_gpt_neox, to_hf.copy_weights_gpt_neox),
    "gemma": (LLAMA, to_hf.copy_weights_llama),
}


def read_config(folder: Path) -> tuple[dict, dict, tuple]:
    """A Hugging Face folder's (litgpt Config arguments, config.json, (weights in, weights out))."""
    file = f"{folder}/config.json"
    try:
        c = json.loads(Path(file).read_text())
        tied = re.match("gpt2|gemma", str(c.get("model_type")))
        c.setdefault("tie_word_embeddings", bool(tied))
        if c.get("model_type") in FAMILIES:
            arguments, *convert = FAMILIES[c["model_type"]]
            sizes = dict(vocab_size=c["vocab_size"], padded_vocab_size=c["vocab_size"])
            # not the folder's name: litgpt computes norms otherwise where it reads Gemma or OLMo
            return sizes | arguments(c) | {"name": c["model_type"]}, c, tuple(convert)
    except FileNotFoundError:
        raise BadInput(f"{file}: no such file, so this is no model folder") from None
    except (KeyError, json.JSONDecodeError) as e:
        raise BadInput(f"{file}: {e} is missing or broken") from None
    except BadInput as e:
        raise BadInput(f"{folder}/{e}") from None
    # a download lies in models--org--name/snapshots/hash
    download = folder.parent.name == "snapshots"
    at_home = folder.parent.parent.name.split("--")[-1] if download else folder.name
    name, kind = Path(c.get("_name_or_path") or at_home).name, f"model_type {c.get('model_type')!r}"
    try:
        known = litgpt.Config.from_name(name)
    except ValueError:
        raise BadInput(f"{file}: {kind} and name {name!r} are unknown") from None
    convert = next((v for k, v in LITGPT.items() if name.lower().startswith(k)), None)
    if convert is None:
        raise BadInput(f"{file}: {kind} is not supported")
    fields = litgpt.Config.__dataclass_fields__
    return {k: v for k, v in vars(known).items() if k in fields}, c, convert


# ---- in and out ----------------------------------------------------------------------------------


@contextlib.contextmanager
def must_fit(folder: Path):
    """What litgpt and torch raise where weights do not fit config.json, as BadInput."""
    try:
        yield
    except (KeyError, RuntimeError, TypeError, AttributeError, AssertionError) as e:
        why = " ".join(str(e).split())[:300] or type(e).__name__  # an assert may say nothing
        raise BadInput(f"{folder}: the weights do not fit config.json: {why}") from None


def read_weights(folder: Path) -> tuple[dict, dict, dict[str, torch.Tensor]]:
    """(litgpt Config arguments, config.json, weights by litgpt's names) of a Hugging Face or litgpt
    folder. config.json's tie_word_embeddings is filled in. A tensor may be its file's own memory.
    Raises BadInput."""
    is_litgpt = all((folder / file).exists() for file in ("lit_model.pth", "model_config.yaml"))
    arguments, config, state = (_from_litgpt if is_litgpt else _from_hf)(folder)
    tied = config.get("model_type") == "gpt2" or "gemma" in arguments["name"].lower()
    return arguments, {"tie_word_embeddings": tied} | config, state


def _from_litgpt(folder: Path):
    arguments, config = yaml.safe_load((folder / "model_config.yaml").read_text()), {}
    if (folder / "config.json").exists():
        config = json.loads((folder / "config.json").read_text())
    try:
        state = torch.load(folder / "lit_model.pth", weights_only=True, mmap=True)
    except Exception as e:  # a damaged file fails in a dozen ways
        raise BadInput(f"{folder}/lit_model.pth: {str(e).splitlines()[0]}") from None
    return arguments, config, state.get("model", state)


def _from_hf(folder: Path):
    (arguments, config, (weights_in, _)), weights, state = read_config(folder), {}, {}
    # Mistral's folders hold the same weights again, under other names
    files = [f for f in folder.glob("*.safetensors") if not f.name.startswith("consolidated")]
    if not files:
        why = "no *.safetensors here, nor lit_model.pth with model_config.yaml"
        raise BadInput(f"{folder}: {why}")
    for file in sorted(files):
        try:
            weights |= load_file(file)
        except (SafetensorError, OSError) as e:
            raise BadInput(f"{file}: {e}") from None
    with must_fit(folder):
        weights_in(litgpt.Config(**arguments), state, weights)
    return arguments, config, state


def fill(model, config: dict, state: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Put weights into a model on the meta device, adapters excepted. A head that is tied becomes
    one matrix with the embedding again: of two, both would be trained and one lost on export.
    Raises KeyError or BadInput."""
    for name, x in state.items():
        # a copy: one tensor of the file's own would keep all of it in memory
        state[name] = x.to(dtype, copy=True)
    missing, unknown = model.load_state_dict(state, strict=False, assign=True)
    missing = [name for name in missing if "lora_" not in name]
    if missing or unknown:
        raise KeyError(f"missing {missing[:3]}, unknown {unknown[:3]}")
    if config["tie_word_embeddings"]:
        if getattr(model.lm_head, "r", 0):
            raise BadInput("lora.targets: head: this model's head is tied to its embedding")
        getattr(model.lm_head, "linear", model.lm_head).weight = model.transformer.wte.weight


def export(state: dict, source: Path, out: Path) -> None:
    """Write plain weights (see merge_adapters) as a Hugging Face folder, with config and tokenizer
    files of `source`."""
    arguments, config, (_, weights_out) = read_config(source)
    config["tie_word_embeddings"] = tied = "lm_head.weight" not in state
    dtype = next(iter(state.values())).dtype
    config["dtype"] = config["torch_dtype"] = str(dtype).removeprefix("torch.")
    if config.get("model_type") not in FAMILIES:
        config["_name_or_path"] = arguments["name"]  # by which it was found, and is found again
    if tied:
        state = state | {"lm_head.weight": state["transformer.wte.weight"]}
    weights: dict[str, torch.Tensor] = {}
    weights_out(litgpt.Config(**arguments), weights, state)
    if tied:
        weights.pop("lm_head.weight", None)
    weights = {name: x.contiguous() for name, x in weights.items()}
    out.mkdir(parents=True, exist_ok=True)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors creates it for its owner only
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    names = "tokenizer|special_tokens|added_tokens|vocab|merges|chat_template|generation_config"
    for file in source.iterdir():
        if re.match(names, file.name) and source != out:
            shutil.copyfile(file, out / file.name)


def fingerprint(state: dict) -> str:
    """A hash of a model's weights, names and shapes included: how a run knows its reference."""
    h = hashlib.sha256()
    for name, x in sorted(state.items()):
        h.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        h.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return h.hexdigest()

"""Weights in and out: Hugging Face, PEFT and litgpt folders, and checkpoints of a run."""

import atexit
import contextlib
import hashlib
import json
import re
import shutil
import tempfile
from pathlib import Path

import litgpt.lora
import torch
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from support.checkpoint import MODEL, load_tensors, verify
from support.errors import BadInput, given
from support.families import bounded, layout, read_config, read_object
from support.lora import adapter_arguments, merge_adapters, read_adapter
from support.records import local
from support.settings import Lora

MAX_SHARD = 5 * 10**9  # bytes of a file
DTYPES = dict(F64=torch.float64, F32=torch.float32, F16=torch.float16, BF16=torch.bfloat16)
# of a tokenizer; and what belongs to a model besides
TOKENS = re.compile("tokenizer|special_tokens|added_tokens|vocab|merges|chat_template")
BESIDES = re.compile("generation_config|(pre)?processor")
# masks and tables in old files; what is not of the language model, and stays as it is
BUFFERS = re.compile(r".*\.(rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias)")
OTHERS = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..*")


# ---- where a model lies --------------------------------------------------------------------------


def fetch(source: str, what: str = "model") -> Path:
    """The folder of a local path, of a run of ours (its `final`) or of a Hugging Face id. A
    checkpoint's or PEFT's is made of links: its base, and itself on top. `what`: the setting's
    name, for messages."""
    folder = local(source)
    is_run = (folder / "settings.yaml").exists() and not (folder / "config.json").exists()
    if is_run and not (folder / "state.json").exists():
        if not (folder / "final").is_dir():
            why = "a run without a `final` folder: resume it, or name one of its checkpoints"
            raise BadInput(f"{what}: {source}: {why}")
        folder = folder / "final"
    folder = folder if folder.is_dir() else _download(source, folder, what)
    if (folder / "state.json").exists():
        if fault := verify(folder):
            raise BadInput(f"{what}: {folder}: {fault}")
        base = yaml.safe_load((folder / "settings.yaml").read_text())["model"]
        return _on_top(fetch(base, what), folder)
    if (folder / "adapter_config.json").exists() and not _files(folder):
        config = json.loads((folder / "adapter_config.json").read_text())
        return _on_top(fetch(config.get("base_model_name_or_path") or "", what), folder)
    if (folder / "manifest.json").exists() and (fault := verify(folder, MODEL)):
        advice = "if you changed it yourself, delete manifest.json"
        raise BadInput(f"{what}: {folder}: {fault}; {advice}")
    return folder


def _download(source: str, folder: Path, what: str) -> Path:
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


def layers(folder: Path) -> list[Path]:
    """The checkpoints and adapters on top of a base, in order."""
    return sorted(folder.glob("on-top-*"))


def _on_top(base: Path, folder: Path) -> Path:
    view = Path(tempfile.mkdtemp(prefix="model-"))
    atexit.register(shutil.rmtree, view, ignore_errors=True)
    links = {f.name: f for f in base.iterdir()}
    links |= {f.name: f for f in folder.iterdir() if TOKENS.match(f.name)}
    for name, file in (links | {f"on-top-{len(layers(base))}": folder}).items():
        (view / name).symlink_to(file.resolve())
    return view


def _files(folder: Path) -> list[Path]:
    # Mistral's folders hold the same weights again, under other names
    aside = ("consolidated", "adapter_")
    return sorted(f for f in folder.glob("*.safetensors") if not f.name.startswith(aside))


# ---- in ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def must_fit(folder: Path):
    """What litgpt and torch raise where weights do not fit config.json, as BadInput."""
    try:
        yield
    except (KeyError, RuntimeError, TypeError, AttributeError, AssertionError, ValueError) as e:
        why = " ".join(str(e).split())[:300] or type(e).__name__  # an assert may say nothing
        raise BadInput(f"{folder}: the weights do not fit config.json: {why}") from None


@contextlib.contextmanager
def _opened(file: Path):
    try:
        with safe_open(file, "pt") as f:
            yield f
    except (SafetensorError, OSError) as e:
        raise BadInput(f"{file}: {e}") from None


def stored(folder: Path) -> dict[str, tuple[Path, torch.dtype | None]]:
    """The tensors of a Hugging Face folder by name: where each is, and its type."""
    out = {}
    for file in _files(folder):
        with _opened(file) as f:
            out |= {n: (file, DTYPES.get(f.get_slice(n).get_dtype())) for n in f.keys()}
    return out


def canonical(name: str) -> str:
    """Old GPT-2 files have no prefix; Gemma 3 with a vision tower has one more."""
    name = re.sub(r"^(language_model\.model|model\.language_model)\.", "model.", name)
    return re.sub(r"^(?=(h|wte|wpe|ln_f)\.)", "transformer.", name)


def is_transposed(name: str) -> bool:
    return bool(re.search(r"\.c_\w+\.weight$", name))  # GPT-2's


def plain_names(state: dict) -> dict:
    """Weights without adapters, by the names that they have in a model without."""
    return {n.replace(".linear.", "."): x for n, x in state.items() if "lora_" not in n}


def read_source(folder: Path) -> tuple[dict, dict, dict | None]:
    """(litgpt Config arguments, config.json with tie_word_embeddings filled in, names of the
    weights; None: litgpt's own) of a Hugging Face or litgpt folder. Raises BadInput."""
    if not all((folder / file).exists() for file in ("lit_model.pth", "model_config.yaml")):
        return read_config(folder)
    file, other = folder / "model_config.yaml", folder / "config.json"
    arguments = bounded(read_object(file, yaml.safe_load), file)
    config = read_object(other, json.loads) if other.exists() else {}
    tied = config.get("model_type") == "gpt2" or "gemma" in arguments["name"].lower()
    return arguments, {"tie_word_embeddings": tied} | config, None


def fill(model, folder: Path, source: tuple[dict, dict, dict | None], dtype: torch.dtype) -> None:
    """Put weights into a model on the meta device, adapters excepted. A head that is tied becomes
    one matrix with the embedding again: of two, both would be trained and one lost on export.
    `source`: see read_source. Raises KeyError or BadInput."""
    _, config, names = source
    shapes = plain_names(dict(model.named_parameters()))
    if tied := config["tie_word_embeddings"]:
        del shapes["lm_head.weight"]
    where = layout(model.config, names, shapes) if names else {}
    state = _from_hf(folder, where, shapes, dtype) if names else _from_litgpt(folder, shapes, dtype)
    for layer in layers(folder):
        put = _put_adapter if (layer / "adapter_config.json").exists() else _put_checkpoint
        state = put(state, layer, source, where)
    missing, unknown = model.load_state_dict(state, strict=False, assign=True)
    if tied:
        missing = [n for n in missing if not n.startswith("lm_head.")]
        if getattr(model.lm_head, "r", 0):
            raise BadInput("lora.targets: head: this model's head is tied to its embedding")
        model.tie()
    _refuse([n for n in missing if "lora_" not in n], unknown)


def _refuse(missing, unknown) -> None:
    if missing or unknown:
        raise KeyError(f"missing {sorted(missing)[:3]}, unknown {sorted(unknown)[:3]}")


def _from_litgpt(folder: Path, shapes: dict, dtype: torch.dtype) -> dict:
    try:
        state = torch.load(folder / "lit_model.pth", weights_only=True, mmap=True)
    except Exception as e:  # a damaged file fails in a dozen ways
        raise BadInput(f"{folder}/lit_model.pth: {str(e).splitlines()[0]}") from None
    # copies: one tensor of the file's own would keep all of it in memory
    return {n: x.to(dtype, copy=True) for n, x in state.get("model", state).items() if n in shapes}


def _from_hf(folder: Path, where: dict, shapes: dict, dtype: torch.dtype) -> dict:
    """Tensor by tensor. What is here has the names and shapes that an export will write."""
    found = stored(folder)
    if not found:
        why = "no *.safetensors here, nor lit_model.pth with model_config.yaml"
        raise BadInput(f"{folder}: {why}")
    known = {canonical(n): n for n in found if not (BUFFERS.fullmatch(n) or OTHERS.fullmatch(n))}
    if "lm_head.weight" not in shapes:
        known.pop("lm_head.weight", None)
    _refuse(where.keys() - known.keys(), known.keys() - where.keys())
    state = {n: torch.empty(x.shape, dtype=dtype) for n, x in shapes.items()}
    for file in _files(folder):
        with _opened(file) as f:
            for name in sorted(set(f.keys()) & set(known.values())):
                if found[name][1] is None:
                    raise KeyError(f"{name}: of type {f.get_slice(name).get_dtype()}")
                x = f.get_tensor(name)
                _put(state, where[canonical(name)], x.T if is_transposed(name) else x)
    return state


def _put(state: dict, pieces: list, x: torch.Tensor, add: bool = False) -> None:
    """A tensor of Hugging Face's, not transposed any more, into its places."""
    rows, columns = sum(b - a for _, a, b in pieces), state[pieces[0][0]].shape[1:]
    if x.shape != (rows, *columns):
        ours = ", ".join(dict.fromkeys(n for n, _, _ in pieces))
        raise KeyError(f"size mismatch for {ours}: {tuple(x.shape)}, not {(rows, *columns)}")
    for (n, a, b), part in zip(pieces, x.split([b - a for _, a, b in pieces])):
        state[n][a:b] = state[n][a:b] + part if add else part


def _put_adapter(state: dict, folder: Path, source: tuple, where: dict) -> dict:
    """PEFT's, folded in."""
    for name, x in read_adapter(folder):
        if (theirs := canonical(name)) not in where:
            raise KeyError(f"adapter_model.safetensors: unknown {name}")
        _put(state, where[theirs], x, add=True)
    return state


def _put_checkpoint(state: dict, folder: Path, source: tuple, where: dict) -> dict:
    """What a run has trained, its adapters merged."""
    saved = load_tensors(folder, "weights")
    dtype = next(iter(state.values())).dtype
    if not any("lora_" in n for n in saved):
        return state | {n: x.to(dtype) for n, x in saved.items()}
    run = json.loads((folder / "state.json").read_text())["run"]
    base = folder.parent.parent / "iterations" / str(run["iteration"]) / "weights.safetensors"
    if base.exists():  # SPIN's adapters belong on another base in each iteration
        state |= {n: x.to(dtype) for n, x in plain_names(load_file(base)).items()}
    lora = Lora(**yaml.safe_load((folder / "settings.yaml").read_text())["lora"])
    arguments, _, names = source
    with torch.device("meta"):
        adapted = litgpt.lora.Config(**arguments, **adapter_arguments(lora, names))
        gpt = litgpt.lora.GPT(adapted)
    return merge_adapters(state | saved, gpt)


# ---- out -----------------------------------------------------------------------------------------


def export(state: dict, source: Path, out: Path, dtype="source", notes=()) -> None:
    """Write plain weights (see merge_adapters) as a Hugging Face folder, with config and tokenizer
    files of `source`, in its dtypes or in float32. `notes`: more files, (name, text)."""
    arguments, config, names = read_config(source)
    where, found = layout(litgpt.Config(**arguments), names, state), stored(source)
    known = {canonical(n): n for n in found}

    def kind(name: str) -> torch.dtype:
        """float64, which only a run in 64-true has, stays."""
        given = state[where[name][0][0]].dtype
        _, kept = found.get(known.get(name), (None, given))
        wide = torch.float32 if dtype == "float32" else kept
        return given if given == torch.float64 else wide

    def make(name: str) -> torch.Tensor:
        if name not in where:  # a vision tower's: as it is
            with _opened(found[name][0]) as f:
                return f.get_tensor(name)
        x = torch.cat([state[n][a:b] for n, a, b in where[name]]).to(kind(name))
        return (x.T if is_transposed(name) else x).contiguous()

    sizes = {n: 0 for n in found if OTHERS.fullmatch(n)}
    for name, pieces in where.items():
        width = state[pieces[0][0]][0].numel()
        sizes[name] = sum(b - a for _, a, b in pieces) * width * kind(name).itemsize
    out.mkdir(parents=True, exist_ok=True)
    save_shards({known.get(n, n): n for n in sizes}, sizes, make, out)
    embedding = str(kind(canonical(names["transformer.wte"] + ".weight"))).removeprefix("torch.")
    for c in (config, config.get("text_config", {})):
        c |= {x: embedding for x in ("dtype", "torch_dtype") if x in c or c is config}
    config["tie_word_embeddings"] = "lm_head.weight" not in state
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    copy_files(source, out)
    for name, text in notes:
        (out / name).write_text(text)


def copy_files(source: Path, out: Path) -> None:
    """What a folder holds besides weights and config."""
    out.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        kept = TOKENS.match(file.name) or BESIDES.match(file.name)
        if kept and file.is_file() and source != out:
            with given("model", file):
                shutil.copyfile(file, out / file.name)


def save_shards(names: dict, sizes: dict, make, out: Path) -> None:
    """Files of at most MAX_SHARD bytes, made one after the other, with an index where they are
    several. `names`: {name in the file: name for `make` and `sizes`}."""
    shards, room = [[]], MAX_SHARD
    for name in names:
        if shards[-1] and sizes[names[name]] > room:
            shards.append([])
            room = MAX_SHARD
        shards[-1].append(name)
        room -= sizes[names[name]]
    index = {}
    for i, shard in enumerate(shards, 1):
        file = (
            f"model-{i:05}-of-{len(shards):05}.safetensors" if shards[1:] else "model.safetensors"
        )
        save_file({n: make(names[n]) for n in shard}, out / file, metadata={"format": "pt"})
        (out / file).chmod(0o644)  # safetensors creates it for its owner only
        index |= dict.fromkeys(shard, file)
    if shards[1:]:
        total = {"total_size": sum(sizes.values())}
        text = json.dumps({"metadata": total, "weight_map": index}, indent=2)
        (out / "model.safetensors.index.json").write_text(text + "\n")


def fingerprint(state: dict) -> str:
    """A hash of a model's weights, names and shapes included: how a run knows its reference."""
    h = hashlib.sha256()
    for name, x in sorted(state.items()):
        h.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        h.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return h.hexdigest()

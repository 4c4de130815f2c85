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
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from support.checkpoint import load_tensors, verify
from support.errors import BadInput, given
from support.families import bounded, layout, read_config, read_object
from support.lora import adapter_arguments, merge_adapters, plain_names, read_adapter
from support.records import local
from support.settings import Lora

MAX_SHARD = 5 * 10**9  # bytes of a file
DTYPES = dict(F64=torch.float64, F32=torch.float32, F16=torch.float16, BF16=torch.bfloat16)
# of a tokenizer; and what belongs to a model besides
TOKENS = re.compile("tokenizer|special_tokens|added_tokens|vocab|merges|chat_template")
BESIDES = re.compile("generation_config|(pre)?processor")
# a vision tower, which stays as it is; masks and tables in old files; a tied head's copy
OTHERS = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..*")
ASIDE = r".*\.(rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias)|(lm_head|embed_out)\.weight"
ASIDE = re.compile(rf"{ASIDE}|{OTHERS.pattern}")


# ---- where a model lies --------------------------------------------------------------------------


def fetch(source: str, what: str = "model") -> Path:
    """The folder of a local path, of a run of ours (its `final`) or of a Hugging Face
    id. A checkpoint's or PEFT's is made of links: its base, and itself on top. `what`:
    the setting."""
    folder = local(source)
    here = {f.name for f in folder.iterdir()} if folder.is_dir() else set()
    if "settings.yaml" in here and not here & {"config.json", "state.json"}:
        if not (folder / "final").is_dir():
            why = "a run without a `final` folder: resume it, or name one of its checkpoints"
            raise BadInput(f"{what}: {source}: {why}")
        folder = folder / "final"
    folder = folder if folder.is_dir() else _download(source, folder, what)
    if (folder / "state.json").exists():
        if fault := verify(folder):
            raise BadInput(f"{what}: {folder}: {fault}")
        settings = yaml.safe_load((folder / "settings.yaml").read_text())
        return _on_top(fetch(settings["model"], what), folder)
    if (folder / "adapter_config.json").exists() and not _files(folder):
        config = json.loads((folder / "adapter_config.json").read_text())
        base = config.get("base_model_name_or_path") or "(adapter_config.json names no base)"
        return _on_top(fetch(base, what), folder)
    several = "model.safetensors.index.json"
    weights = several if (folder / several).exists() else "model.safetensors"
    known = (folder / "manifest.json").exists()
    if known and (fault := verify(folder, ("config.json", weights))):
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
    return [link.resolve() for link in sorted(folder.glob("on-top-*"))]


def adapters_below(folder: Path) -> tuple[str, list]:
    """The base's name and the adapters (see read_adapter) of a folder that was made of PEFT's."""
    below = layers(folder)
    base = json.loads((below[0] / "adapter_config.json").read_text())["base_model_name_or_path"]
    found = [(canonical(name), *rest) for layer in below for name, *rest in read_adapter(layer)]
    return base, found


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
    except BadInput:
        raise
    except (KeyError, RuntimeError, TypeError, AttributeError, AssertionError, ValueError) as e:
        why = " ".join(str(e).split())[:300] or type(e).__name__  # an assert may say nothing
        raise BadInput(f"{folder}: the weights do not fit config.json: {why}") from None


def stored(folder: Path):
    """(name, slice of the file) of all tensors in a Hugging Face folder."""
    for file in _files(folder):
        try:
            with safe_open(file, "pt") as f:
                yield from ((name, f.get_slice(name)) for name in f.keys())
        except (SafetensorError, OSError) as e:
            raise BadInput(f"{file}: {e}") from None


def canonical(name: str) -> str:
    """Old GPT-2 files have no prefix; Gemma 3 with a vision tower has one more."""
    name = re.sub(r"^(language_model\.model|model\.language_model)\.", "model.", name)
    return re.sub(r"^(?=(h|wte|wpe|ln_f)\.)", "transformer.", name)


def is_transposed(name: str) -> bool:
    return bool(re.search(r"\.c_\w+\.weight$", name))  # GPT-2's


def read_source(folder: Path) -> tuple[dict, dict, dict | None]:
    """See read_config; of a litgpt folder, where names of weights are None, too."""
    if not all((folder / file).exists() for file in ("lit_model.pth", "model_config.yaml")):
        return read_config(folder)
    file, other = folder / "model_config.yaml", folder / "config.json"
    arguments = bounded(read_object(file, yaml.safe_load), file)
    config = read_object(other, json.loads) if other.exists() else {}
    tied = config.get("model_type") == "gpt2" or "gemma" in arguments["name"].lower()
    return arguments, {"tie_word_embeddings": tied} | config, None


def fill(model, folder: Path, source: tuple[dict, dict, dict | None], dtype: torch.dtype) -> None:
    """Put weights into a model on the meta device, adapters excepted. Raises KeyError,
    BadInput."""
    arguments, config, names = source
    shapes = plain_names(dict(model.named_parameters()))
    if tied := config["tie_word_embeddings"]:
        del shapes["lm_head.weight"]
        if getattr(model.lm_head, "r", 0):
            raise BadInput("lora.targets: head: this model's head is tied to its embedding")
    where = layout(model.config, names, shapes) if names else {}
    if names:
        state = _from_hf(folder, where, shapes, dtype)
    else:
        state = _from_litgpt(folder, dtype)
    for layer in layers(folder):
        if not (layer / "adapter_config.json").exists():
            state = _with_checkpoint(state, layer, arguments, names)
            continue
        for name, b, a, scale in read_adapter(layer):
            _refuse((), {canonical(name)} - where.keys())
            _put(state, where[canonical(name)], b @ a * scale, add=True)
    _refuse(shapes.keys() - state.keys(), state.keys() - shapes.keys() - {"lm_head.weight"})
    model.load_state_dict(state, strict=False, assign=True)
    if tied:
        model.tie()


def _refuse(missing, unknown) -> None:
    if missing or unknown:
        raise KeyError(f"missing {sorted(missing)[:3]}, unknown {sorted(unknown)[:3]}")


def _from_litgpt(folder: Path, dtype: torch.dtype) -> dict:
    try:
        state = torch.load(folder / "lit_model.pth", weights_only=True, mmap=True)
    except Exception as e:  # a damaged file fails in a dozen ways
        raise BadInput(f"{folder}/lit_model.pth: {str(e).splitlines()[0]}") from None
    # copies: one tensor of the file's own would keep all of it in memory
    state = state.get("model", state)
    return {n: x.to(dtype, copy=True) for n, x in state.items()}


def _from_hf(folder: Path, where: dict, shapes: dict, dtype: torch.dtype) -> dict:
    """Tensor by tensor, with the names and shapes that an export will write."""
    if not _files(folder):
        why = "no *.safetensors here, nor lit_model.pth with model_config.yaml"
        raise BadInput(f"{folder}: {why}")
    found = {canonical(n) for n, _ in stored(folder)}
    unknown = {n for n in found - where.keys() if not ASIDE.fullmatch(n)}
    _refuse(where.keys() - found, unknown)
    state = {n: torch.empty(x.shape, dtype=dtype) for n, x in shapes.items()}
    for name, x in stored(folder):
        if pieces := where.get(canonical(name)):
            if x.get_dtype() not in DTYPES:
                raise KeyError(f"{name}: of type {x.get_dtype()}")
            _put(state, pieces, x[:].T if is_transposed(name) else x[:])
    return state


def _put(state: dict, pieces: list, x: torch.Tensor, add: bool = False) -> None:
    """A tensor of Hugging Face's, in our orientation, into its places."""
    sizes = [b - a for _, a, b in pieces]
    width = state[pieces[0][0]].shape[1:]
    expected = (sum(sizes), *width)
    if x.shape != expected:
        raise KeyError(f"size mismatch for {pieces[0][0]}: {tuple(x.shape)}, not {expected}")
    for (n, a, b), part in zip(pieces, x.split(sizes)):
        state[n][a:b] = state[n][a:b] + part if add else part


def _with_checkpoint(state: dict, folder: Path, arguments: dict, names: dict | None) -> dict:
    """What a run has trained, its adapters merged."""
    saved, dtype = load_tensors(folder, "weights"), next(iter(state.values())).dtype
    if not any("lora_" in n for n in saved):
        return {n: x.to(dtype) for n, x in (state | saved).items()}
    run = json.loads((folder / "state.json").read_text())["run"]
    iteration = folder.parent.parent / "iterations" / str(run["iteration"])
    base = iteration / "weights.safetensors"
    if base.exists():  # SPIN's adapters belong on another base in each iteration
        state = {n: x.to(dtype) for n, x in plain_names(load_file(base)).items()}
    settings = yaml.safe_load((folder / "settings.yaml").read_text())
    lora = Lora(**settings["lora"])
    with torch.device("meta"):
        adapters = adapter_arguments(lora, names)
        gpt = litgpt.lora.GPT(litgpt.lora.Config(**arguments, **adapters))
    return merge_adapters(state | saved, gpt)


# ---- out -----------------------------------------------------------------------------------------


def export(state: dict, source: Path, out: Path, dtype="source", notes=()) -> None:
    """Write plain weights (see merge_adapters) as a Hugging Face folder, with config
    and tokenizer files of `source`, in its dtypes or in float32. `notes`: more files,
    (name, text)."""
    arguments, config, names = read_config(source)
    known = {canonical(n): (n, DTYPES.get(x.get_dtype())) for n, x in stored(source)}
    weights = {}
    for theirs, pieces in layout(litgpt.Config(**arguments), names, state).items():
        x = torch.cat([state[n][a:b] for n, a, b in pieces])
        name, kind = known.get(theirs, (theirs, x.dtype))
        if dtype == "float32":
            kind = torch.float32
        if x.dtype != torch.float64:  # which only a run in 64-true has
            x = x.to(kind)
        weights[name] = x.T if is_transposed(name) else x
    kind = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    weights |= {n: x[:] for n, x in stored(source) if OTHERS.fullmatch(n)}
    out.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(weights, out, max_shard_size=MAX_SHARD)
    for file in out.glob("*.safetensors"):
        file.chmod(0o644)  # safetensors creates it for its owner only
    config |= dict(dtype=kind, torch_dtype=kind)
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


def fingerprint(state: dict) -> str:
    """A hash of weights, names and shapes."""
    h = hashlib.sha256()
    for name, x in sorted(state.items()):
        h.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        h.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return h.hexdigest()

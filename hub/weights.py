"""Weights in and out: Hugging Face, PEFT and litgpt folders, and checkpoints of a run."""

import atexit
import contextlib
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import litgpt.lora
import torch
import yaml
from safetensors import SafetensorError, safe_open

from hub.families import check_sizes, read_config, weight_layout
from hub.lora import adapter_arguments, merge_adapters, plain_names, read_adapter
from runs import tensors
from runs.checkpoint import read_checkpoint_weights, verify_checkpoint
from runs.errors import BadInput, user_error
from runs.files import find_path, read_object, verify_folder
from runs.settings import Lora
from runs.tensors import DTYPES, FLOATS, LazyTensors, override_tensors, shapes_of

MAX_SHARD = 5 * 10**9  # bytes of a file
# of a tokenizer; and what belongs to a model besides
TOKENS = re.compile("tokenizer|special_tokens|added_tokens|vocab|merges|chat_template")
BESIDES = re.compile("generation_config|(pre)?processor")
# a vision tower, which stays as it is; masks and tables in old files; a tied head's copy
OTHERS = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..*")
ASIDE = r".*\.(rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias)|(lm_head|embed_out)\.weight"
ASIDE = re.compile(rf"{ASIDE}|{OTHERS.pattern}")


# ---- where a model lies --------------------------------------------------------------------------


def fetch_model(source: str, what: str = "model", weights: bool = True) -> Path:
    """The folder of a local path, of a run of ours (its `final`) or of a Hugging Face
    id. A checkpoint's or PEFT's is made of links: its base, and itself on top. `what`:
    the setting. `weights` False: a download leaves them out."""
    folder = find_path(source)
    here = {f.name for f in folder.iterdir()} if folder.is_dir() else set()
    if "settings.yaml" in here and not here & {"config.json", "state.json"}:
        if not (folder / "final").is_dir():
            why = "a run without a `final` folder: resume it, or name one of its checkpoints"
            raise BadInput(f"{what}: {source}: {why}")
        folder = folder / "final"
    downloaded = not folder.is_dir()
    if downloaded:
        folder = _download(source, folder, what, weights)
    if (folder / "state.json").exists():
        if fault := verify_checkpoint(folder):
            raise BadInput(f"{what}: {folder}: {fault}")
        settings = yaml.safe_load((folder / "settings.yaml").read_text())
        view = _on_top(fetch_model(settings["model"], what, weights), folder)
        run = json.loads((folder / "state.json").read_text())["run"]
        if template := run.get("chat_template"):  # the run's own wins over the model's
            (view / "chat_template.jinja").unlink(missing_ok=True)
            (view / "chat_template.jinja").write_text(template)
        return view
    if (folder / "adapter_config.json").exists() and not _files(folder):
        config = json.loads((folder / "adapter_config.json").read_text())
        base = config.get("base_model_name_or_path") or "(adapter_config.json names no base)"
        return _on_top(fetch_model(base, what, weights), folder)
    several = "model.safetensors.index.json"
    needed = several if (folder / several).exists() else "model.safetensors"
    known = (folder / "manifest.json").exists()  # of a download some files are left out
    if known and not downloaded and (fault := verify_folder(folder, ("config.json", needed))):
        advice = "if you changed it yourself, delete manifest.json"
        raise BadInput(f"{what}: {folder}: {fault}; {advice}")
    return folder


def _download(source: str, folder: Path, what: str, weights: bool) -> Path:
    if folder.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+|[\w-]+", source):
        raise BadInput(f"{what}: {source}: no such folder")
    from huggingface_hub import snapshot_download

    files = ["*.json", "*.jinja", "tokenizer.model"] + ["*.safetensors"] * weights
    rest = ["consolidated*", "*/*"]
    try:
        return Path(snapshot_download(source, allow_patterns=files, ignore_patterns=rest))
    except Exception as e:  # the hub client has a dozen ways to say that it could not
        why = f"no such folder here, and not fetched from huggingface.co ({type(e).__name__})"
        files = "config.json and model.safetensors"
        advice = f"download it elsewhere and give the folder that holds {files}"
        raise BadInput(f"{what}: {source}: {why}; without a network, {advice}") from e


def folders_on_top(folder: Path) -> list[Path]:
    """The checkpoints and adapters on top of a base, in order."""
    return [link.resolve() for link in sorted(folder.glob("on-top-*"))]


def base_and_adapters(folder: Path) -> tuple[str, list]:
    """The base's name and the adapters (see read_adapter) of a folder that was made of PEFT's."""
    below = folders_on_top(folder)
    base = json.loads((below[0] / "adapter_config.json").read_text())["base_model_name_or_path"]
    found = [
        (canonical_name(name), *rest) for layer in below for name, *rest in read_adapter(layer)
    ]
    return base, found


def _on_top(base: Path, folder: Path) -> Path:
    view = Path(tempfile.mkdtemp(prefix="model-"))
    atexit.register(shutil.rmtree, view, ignore_errors=True)
    links = {f.name: f for f in base.iterdir()}
    links |= {f.name: f for f in folder.iterdir() if TOKENS.match(f.name)}
    for name, file in (links | {f"on-top-{len(folders_on_top(base))}": folder}).items():
        (view / name).symlink_to(file.resolve())
    return view


def _files(folder: Path) -> list[Path]:
    # Mistral's folders hold the same weights again, under other names
    aside = ("consolidated", "adapter_")
    return sorted(f for f in folder.glob("*.safetensors") if not f.name.startswith(aside))


# ---- in ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def weights_must_fit(folder: Path):
    """What litgpt and torch raise where weights do not fit config.json, as BadInput."""
    try:
        yield
    except BadInput:
        raise
    except (KeyError, RuntimeError, TypeError, AttributeError, AssertionError, ValueError) as e:
        why = " ".join(str(e).split())[:300] or type(e).__name__  # an assert may say nothing
        raise BadInput(f"{folder}: the weights do not fit config.json: {why}") from None


def stored_tensors(folder: Path):
    """(name, slice, file) of all tensors in a Hugging Face folder."""
    for file in _files(folder):
        try:
            with safe_open(file, "pt") as f:
                yield from ((name, f.get_slice(name), file) for name in f.keys())
        except (SafetensorError, OSError) as e:
            raise BadInput(f"{file}: {e}") from None


def canonical_name(name: str) -> str:
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
    arguments = check_sizes(read_object(file, yaml.safe_load), file)
    config = read_object(other, json.loads) if other.exists() else {}
    tied = config.get("model_type") == "gpt2" or "gemma" in arguments["name"].lower()
    return arguments, {"tie_word_embeddings": tied} | config, None


def fill_model(
    model, folder: Path, source: tuple[dict, dict, dict | None], dtype: torch.dtype
) -> None:
    """Put weights into a model on the meta device, adapters excepted. Raises KeyError,
    BadInput."""
    if (tied := source[1]["tie_word_embeddings"]) and getattr(model.lm_head, "r", 0):
        raise BadInput("lora.targets: head: this model's head is tied to its embedding")
    state = read_weights(model, folder, source, dtype)
    model.load_state_dict(dict(state), strict=False, assign=True)
    if tied:
        model.tie()


def read_weights(model, folder: Path, source: tuple[dict, dict, dict | None], dtype) -> LazyTensors:
    """A folder's weights, adapters merged, by the plain names and in the shapes of a model on the
    meta device. Raises KeyError, BadInput."""
    arguments, config, names = source
    like = {n: x.to(dtype) for n, x in plain_names(dict(model.named_parameters())).items()}
    if config["tie_word_embeddings"]:
        del like["lm_head.weight"]
    where = weight_layout(model.config, names, like) if names else {}
    state = _from_hf(folder, where, like) if names else _from_litgpt(folder, like)
    for layer in folders_on_top(folder):
        if (layer / "adapter_config.json").exists():
            state = _with_adapter(state, layer, where)
        else:
            state = _with_checkpoint(state, layer, arguments, names)
    _refuse(like.keys() - state.keys(), state.keys() - like.keys() - {"lm_head.weight"})
    return LazyTensors(like, lambda name: state[name].to(dtype))


def _refuse(missing, unknown) -> None:
    if missing or unknown:
        raise KeyError(f"missing {sorted(missing)[:3]}, unknown {sorted(unknown)[:3]}")


def _from_litgpt(folder: Path, like: dict) -> LazyTensors:
    try:
        state = torch.load(folder / "lit_model.pth", weights_only=True, mmap=True)
    except Exception as e:  # a damaged file fails in a dozen ways
        raise BadInput(f"{folder}/lit_model.pth: {str(e).splitlines()[0]}") from None
    state = state.get("model", state)
    # copies: one tensor of the file's own would keep all of it in memory
    return LazyTensors(state, lambda name: state[name].to(like[name].dtype, copy=True))


def _from_hf(folder: Path, where: dict, like: dict) -> LazyTensors:
    """With the names and shapes that an export will write."""
    if not _files(folder):
        why = "no *.safetensors here, nor lit_model.pth with model_config.yaml"
        raise BadInput(f"{folder}: {why}")
    found, parts = {}, {n: {} for n in like}
    for name, x, file in stored_tensors(folder):
        found[canonical_name(name)] = file, name
        if pieces := where.get(canonical_name(name)):
            if x.get_dtype() not in FLOATS:
                raise KeyError(f"{name}: of type {x.get_dtype()}")
            shape = x.get_shape()[::-1] if is_transposed(name) else x.get_shape()
            for ours, own in _places(pieces, shape, like).items():
                parts[ours][file, name] = own
    unknown = {n for n in found.keys() - where.keys() if not ASIDE.fullmatch(n)}
    _refuse(where.keys() - found.keys(), unknown)

    def read(ours):
        out = torch.empty_like(like[ours], device="cpu")
        for (file, name), places in parts[ours].items():
            with safe_open(file, "pt") as f:
                x = f.get_slice(name)
                x = x[:].T if is_transposed(name) else x
                for a, b, at in places:
                    out[a:b] = x[at : at + b - a]
        return out

    return LazyTensors(like, read)


def _places(pieces: list, shape, like: dict) -> dict[str, list[tuple[int, int, int]]]:
    """Where the rows of a tensor of Hugging Face's go: {our name: [(from row, to row, its row)]}"""
    out, at = {}, 0
    for ours, a, b in pieces:
        out.setdefault(ours, []).append((a, b, at))
        at += b - a
    expected = (at, *like[pieces[0][0]].shape[1:])
    if tuple(shape) != expected:
        raise KeyError(f"size mismatch for {pieces[0][0]}: {tuple(shape)}, not {expected}")
    return out


def _with_adapter(state: LazyTensors, folder: Path, where: dict) -> LazyTensors:
    """A PEFT folder's adapters added."""
    parts = {}
    for name, b, a, scale in read_adapter(folder):
        name = canonical_name(name)
        _refuse((), {name} - where.keys())
        shape = len(b), a.shape[1]
        for ours, places in _places(where[name], shape, state.like).items():
            parts.setdefault(ours, []).append((b, a, scale, places))

    def added(ours):
        w = state[ours]
        for b, a, scale, places in parts.get(ours, ()):
            delta = b @ a * scale
            for first, end, at in places:
                w[first:end] += delta[at : at + end - first]
        return w

    return LazyTensors(state.like, added)


def _with_checkpoint(
    state: LazyTensors, folder: Path, arguments: dict, names: dict | None
) -> LazyTensors:
    """What a run has trained, its adapters merged."""
    saved = read_checkpoint_weights(folder)
    if not any("lora_" in n for n in saved):
        return override_tensors(state, saved)
    run = json.loads((folder / "state.json").read_text())["run"]
    iteration = folder.parent.parent / "iterations" / str(run["iteration"])
    base = iteration / "weights.safetensors"
    if run.get("moved") and run["iteration"] > 1 and not base.exists():
        raise BadInput(f"{folder}: {base}: missing: its adapters belong on it")
    if base.exists():  # SPIN's adapters belong on another base in each iteration
        first, like = plain_names(tensors.open_safetensors(base)), state.like
        state = LazyTensors(like, lambda name: first[name].to(like[name].dtype))
    settings = yaml.safe_load((folder / "settings.yaml").read_text())
    lora = Lora(**settings["lora"])
    with torch.device("meta"):
        adapters = adapter_arguments(lora, names)
        gpt = litgpt.lora.GPT(litgpt.lora.Config(**arguments, **adapters))
    return merge_adapters(override_tensors(state, saved), gpt)


# ---- out -----------------------------------------------------------------------------------------


def export_weights(
    state: Mapping, source: Path, out: Path | None, dtype="source", notes=()
) -> None:
    """Write plain weights (see merge_adapters) as a Hugging Face folder, with config
    and tokenizer files of `source`, in its dtypes or in float32, one by one. `notes`: more files,
    (name, text)."""
    arguments, config, names = read_config(source)
    known = {
        canonical_name(n): (n, DTYPES.get(x.get_dtype())) for n, x, _ in stored_tensors(source)
    }
    like, where = {}, {}
    for theirs, pieces in weight_layout(
        litgpt.Config(**arguments), names, shapes_of(state)
    ).items():
        x = shapes_of(state)[pieces[0][0]]
        name, kind = known.get(theirs, (theirs, x.dtype))
        if x.dtype == torch.float64:  # which only a run in 64-true has
            kind = x.dtype
        elif dtype == "float32":
            kind = torch.float32
        shape = (sum(b - a for _, a, b in pieces), *x.shape[1:])
        shape = shape[::-1] if is_transposed(name) else shape
        like[name], where[name] = torch.empty(shape, dtype=kind, device="meta"), pieces
    kind = str(next(iter(like.values())).dtype).removeprefix("torch.")

    others = {n: file for n, _, file in stored_tensors(source) if OTHERS.fullmatch(n)}
    files = {file: tensors.open_safetensors(file) for file in set(others.values())}
    like |= {n: files[file].like[n] for n, file in others.items()}

    own = {}  # q, k and v, one after the other, are parts of one of ours

    def converted(name):
        if name in others:
            return files[others[name]][name]
        needed = dict.fromkeys(n for n, _, _ in where[name])  # in one order on all ranks
        for n in own.keys() - needed.keys():
            del own[n]
        for n in needed:
            own[n] = own[n] if n in own else state[n]
        x = torch.cat([own[n][a:b] for n, a, b in where[name]])
        return (x.T if is_transposed(name) else x).to(like[name].dtype)

    if out:
        out.mkdir(parents=True, exist_ok=True)
    tensors.write_safetensors(out, LazyTensors(like, converted), most=MAX_SHARD)
    if out is None:
        return
    config |= dict(dtype=kind, torch_dtype=kind)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    copy_tokenizer_files(source, out)
    for name, text in notes:
        (out / name).write_text(text)


def copy_tokenizer_files(source: Path, out: Path) -> None:
    """What a folder holds besides weights and config."""
    out.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        kept = TOKENS.match(file.name) or BESIDES.match(file.name)
        if kept and file.is_file() and source != out:
            with user_error("model", file):
                shutil.copyfile(file, out / file.name)


def weights_hash(state: Mapping) -> str:
    """A hash of weights, names and shapes."""
    h = hashlib.sha256()
    for name in sorted(state):
        x = state[name]
        h.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        h.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return h.hexdigest()

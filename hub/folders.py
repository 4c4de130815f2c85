"""Where a model lies: a folder on disk, a run, a checkpoint, a PEFT adapter, or an id on the hub.

A checkpoint and an adapter hold only what was trained. fetch_model gives them a temporary folder of
links: to all files of the base model, and a link on-top-0, on-top-1, ... to each folder that is
applied to the base, in this order. weights.py reads such a folder like any other.
"""

import atexit
import json
import re
import shutil
import tempfile
from pathlib import Path

from runs.checkpoint import read_settings, read_state, verify_checkpoint
from runs.errors import BadInput, user_error
from runs.files import find_path, verify_folder

# Files of a tokenizer: tokenizer.json, tokenizer_config.json, special_tokens_map.json,
# added_tokens.json, vocab.txt, merges.txt, chat_template.jinja
TOKENIZER_FILES = re.compile("tokenizer|special_tokens|added_tokens|vocab|merges|chat_template")


def fetch_model(source: str, what: str = "model", weights: bool = True) -> Path:
    """The folder that holds a model's files.

    `source` is a model folder, a run (its `final` is taken), a checkpoint of a run, a PEFT folder,
    or a Hugging Face id, which is downloaded. For a checkpoint or a PEFT folder the answer is a
    temporary folder of links (see above), deleted when the process ends. `what` is the setting
    that an error names. With weights=False a download leaves the weights out. Raises BadInput.
    """
    folder = find_path(source)
    if _is_run(folder):
        if not (folder / "final").is_dir():
            raise BadInput(
                f"{what}: {source}: a run without a `final` folder: resume it, or name one of its checkpoints"
            )
        folder = folder / "final"
    downloaded = not folder.is_dir()
    if downloaded:
        folder = _download(source, folder, what, weights)
    if (folder / "state.json").exists():
        return _checkpoint_on_base(folder, what, weights)
    if (folder / "adapter_config.json").exists() and not weight_files(folder):
        return _adapter_on_base(folder, what, weights)
    if not downloaded:  # of a download some files are left out, which a manifest may name
        _verify_manifest(folder, what)
    return folder


def weight_files(folder: Path) -> list[Path]:
    """The files of a Hugging Face folder that hold its weights, in order of their names."""
    # Mistral's folders hold the same weights a second time, as consolidated.safetensors
    others = ("consolidated", "adapter_")
    return sorted(f for f in folder.glob("*.safetensors") if not f.name.startswith(others))


def folders_on_top(folder: Path) -> list[Path]:
    """The checkpoints and adapters that are applied to the base of a folder from fetch_model, in
    order. Empty for a folder that is a model by itself."""
    links = sorted(folder.glob("on-top-*"), key=lambda link: int(link.name.rsplit("-")[-1]))
    return [link.resolve() for link in links]


def _is_run(folder: Path) -> bool:
    """Whether this is a run's folder, not a model's or a checkpoint's."""
    if not (folder / "settings.yaml").exists():
        return False
    return not (folder / "config.json").exists() and not (folder / "state.json").exists()


def _download(source: str, folder: Path, what: str, weights: bool) -> Path:
    # an id of the hub: openai-community/gpt2 or gpt2
    if folder.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+|[\w-]+", source):
        raise BadInput(f"{what}: {source}: no such folder")
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.jinja", "tokenizer.model"]
    if weights:
        wanted.append("*.safetensors")
    # Mistral's second copy of the weights, and folders with other formats (onnx/, original/)
    unwanted = ["consolidated*", "*/*"]
    try:
        return Path(snapshot_download(source, allow_patterns=wanted, ignore_patterns=unwanted))
    except Exception as e:  # the hub's client has a dozen errors for a failed download
        raise BadInput(
            f"{what}: {source}: no such folder here, and not fetched from huggingface.co ({type(e).__name__}); "
            "without a network, download it elsewhere and give the folder that holds config.json and model.safetensors"
        ) from e


def _checkpoint_on_base(folder: Path, what: str, weights: bool) -> Path:
    """Links to the model that a checkpoint's run began with, and to the checkpoint."""
    fault = verify_checkpoint(folder)
    if fault:
        raise BadInput(f"{what}: {folder}: {fault}")
    with user_error(what, folder, RecursionError):  # its settings may name itself
        base = fetch_model(read_settings(folder)["model"], what, weights)
    view = _folder_of_links(base, folder)
    run, _ = read_state(folder)
    if run.chat_template:  # the template of data.chat_template, instead of the model's own
        template = view / "chat_template.jinja"
        template.unlink(missing_ok=True)
        template.write_text(run.chat_template)
    return view


def _adapter_on_base(folder: Path, what: str, weights: bool) -> Path:
    """Links to the base model of a PEFT adapter, and to the adapter."""
    file = folder / "adapter_config.json"
    base = json.loads(file.read_text()).get("base_model_name_or_path")
    if not base:
        raise BadInput(
            f"{what}: {file}: base_model_name_or_path: missing: name the base model there"
        )
    return _folder_of_links(fetch_model(base, what, weights), folder)


def _folder_of_links(base: Path, top: Path) -> Path:
    """A temporary folder: the base's files, with the tokenizer files of `top` in place of the base's
    own, and a link on-top-<number> to `top`."""
    links = {file.name: file for file in base.iterdir()}
    for file in top.iterdir():
        if TOKENIZER_FILES.match(file.name):
            links[file.name] = file
    links[f"on-top-{len(folders_on_top(base))}"] = top
    view = Path(tempfile.mkdtemp(prefix="model-"))
    atexit.register(shutil.rmtree, view, ignore_errors=True)
    for name, file in links.items():
        (view / name).symlink_to(file.resolve())
    return view


def _verify_manifest(folder: Path, what: str) -> None:
    """Our own exports have a manifest with a hash of each file: refuse a damaged one."""
    if not (folder / "manifest.json").exists():
        return
    index = "model.safetensors.index.json"  # there if the weights are in several files
    weights = index if (folder / index).exists() else "model.safetensors"
    fault = verify_folder(folder, ("config.json", weights))
    if fault:
        raise BadInput(
            f"{what}: {folder}: {fault}; if you changed it yourself, delete manifest.json"
        )

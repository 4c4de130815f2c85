"""Where a model lies: a folder on disk, a run, a checkpoint, a PEFT adapter, or an id on the hub.

A checkpoint and an adapter hold only what was trained. fetch_model gives them a temporary folder of
links: to all files of the base model, and a link on-top-0, on-top-1, ... to each folder that is
applied to the base, in this order. weights.py reads such a folder like any other.
"""

import atexit
import re
import shlex
import shutil
import tempfile
from pathlib import Path

from runs.checkpoint import read_settings, read_state, verify_checkpoint
from runs.errors import BadInput, printable, user_error
from runs.files import find_path, verify_folder
from runs.small_files import read_object

# Files of a tokenizer: tokenizer.json, tokenizer_config.json, special_tokens_map.json,
# added_tokens.json, vocab.txt, merges.txt, chat_template.jinja
TOKENIZER_FILES = re.compile("tokenizer|special_tokens|added_tokens|vocab|merges|chat_template")
READ_SUFFIXES = (".json", ".jinja", ".safetensors", ".pth", ".yaml")


def fetch_model(
    source: str,
    what: str = "model",
    weights: bool = True,
    above: tuple[Path, ...] = (),
) -> Path:
    """The folder that holds a model's files.

    `source` is a model folder, a run (its `final` is taken), a checkpoint of a run, a PEFT folder,
    or a Hugging Face id, which is downloaded. For a checkpoint or a PEFT folder the answer is a
    temporary folder of links (see above), deleted when the process ends. `what` is the setting
    that an error names. With weights=False a download leaves the weights out. `above`: the folders
    whose base this is. Raises BadInput.
    """
    folder = find_path(source)
    with user_error(what):  # too long a name
        is_run = _is_run(folder)
        if is_run and not (folder / "final").is_dir():
            raise BadInput(
                f"{what}: {source}: a run without a `final` folder: resume it, or name one of its checkpoints"
            )
    folder = folder / "final" if is_run else folder
    downloaded = not folder.is_dir()
    if downloaded:
        folder = _download(source, folder, what, weights)
    if folder.resolve() in above:
        raise BadInput(f"{what}: {source}: it is its own base")
    _refuse_special_files(folder, what)
    above = (*above, folder.resolve())
    if (folder / "state.json").exists():
        return _checkpoint_on_base(folder, what, weights, above)
    if (folder / "adapter_config.json").exists() and not weight_files(folder):
        return _adapter_on_base(folder, what, weights, above)
    if not downloaded:  # of a download some files are left out, which a manifest may name
        _verify_manifest(folder, what)
    if weights and (downloaded or list(folder.glob("pytorch_model*.bin"))):
        _refuse_pickles_alone(folder, source, what)
    return folder


def weight_files(folder: Path) -> list[Path]:
    """The files of a Hugging Face folder that hold its weights: those that the index names, else
    model.safetensors. Other files of weights (a backup, Mistral's second copy) are not read. Raises
    BadInput."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not index.exists():
        return [whole] if whole.exists() else []
    files = read_object(index).get("weight_map")
    files = set(files.values()) if isinstance(files, dict) else {None}
    for name in files:
        if not isinstance(name, str) or Path(name).name != name:
            got = printable(name)
            raise BadInput(f"{index}: weight_map: expected names of files beside it, got {got}")
    if whole.exists() and whole.name not in files:
        raise BadInput(
            f"{folder}: {whole.name} and {index.name}: two models: remove one of the two"
        )
    return [folder / name for name in sorted(files)]


def folders_on_top(folder: Path) -> list[Path]:
    """The checkpoints and adapters that are applied to the base of a folder from fetch_model, in
    order. Empty for a folder that is a model by itself."""
    links = sorted(folder.glob("on-top-*"), key=lambda link: int(link.name.rsplit("-")[-1]))
    return [link.resolve() for link in links]


def without_top(folder: Path) -> Path:
    """A folder from fetch_model without the last checkpoint or adapter on top of it. The tokenizer's files stay
    those of the whole."""
    top = f"on-top-{len(folders_on_top(folder)) - 1}"
    return _folder_of_links({file.name: file for file in folder.iterdir() if file.name != top})


def _is_run(folder: Path) -> bool:
    """Whether this is a run's folder, not a model's or a checkpoint's."""
    if not (folder / "settings.yaml").exists():
        return False
    return not (folder / "config.json").exists() and not (folder / "state.json").exists()


def _refuse_special_files(folder: Path, what: str) -> None:
    """Raise BadInput for a pipe, whose reader would wait for ever, and for a link to nothing, which
    would count as no file."""
    with user_error(what, folder):
        for file in folder.iterdir():
            if file.suffix in READ_SUFFIXES and not file.is_file() and not file.is_dir():
                raise BadInput(f"{what}: {file}: a pipe or a link to nothing, not a file")


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


def _refuse_pickles_alone(folder: Path, source: str, what: str) -> None:
    """Pickle files of weights are never read here, because they run code."""
    if weight_files(folder) or (folder / "lit_model.pth").exists():
        return
    out = source if find_path(source).is_dir() else Path(source).name  # of an id on the hub
    code = (
        "import sys, transformers; m = transformers.AutoModelForCausalLM; "
        'm.from_pretrained(sys.argv[1], dtype="auto").save_pretrained(sys.argv[2])'
    )
    command = shlex.join(["python", "-c", code, source, out])
    raise BadInput(
        f"{what}: {source}: no model.safetensors; transformers converts pytorch_model.bin: {command}"
    )


def _checkpoint_on_base(folder: Path, what: str, weights: bool, above: tuple) -> Path:
    """Links to the model that a checkpoint's run began with, and to the checkpoint."""
    fault = verify_checkpoint(folder)
    if fault:
        raise BadInput(f"{what}: {folder}: {fault}")
    settings = read_settings(folder)
    base = fetch_model(settings["model"], what, weights, above)
    return put_on_base(folder, base)


def put_on_base(folder: Path, base: Path) -> Path:
    """Links to a base from fetch_model, and to a checkpoint that is applied to it."""
    view = _folder_on_top(base, folder)
    run, _ = read_state(folder)
    if run.chat_template:  # the template of data.chat_template, instead of the model's own
        template = view / "chat_template.jinja"
        template.unlink(missing_ok=True)
        template.write_text(run.chat_template)
    return view


def _adapter_on_base(folder: Path, what: str, weights: bool, above: tuple) -> Path:
    """Links to the base model of a PEFT adapter, and to the adapter."""
    base = name_of_base(folder / "adapter_config.json")
    return _folder_on_top(fetch_model(base, what, weights, above), folder)


def name_of_base(file: Path) -> str:
    """The path or id of the model that the adapter of an adapter_config.json belongs to."""
    field = "base_model_name_or_path"
    base = read_object(file).get(field)
    if not base or not isinstance(base, str):
        got = "missing" if base is None else f"expected a name, got {printable(base)}"
        raise BadInput(f"{file}: {field}: {got}: name the base model there")
    return base


def _folder_on_top(base: Path, top: Path) -> Path:
    """A temporary folder: the base's files, with the tokenizer files of `top` in place of the base's
    own, and a link on-top-<number> to `top`."""
    links = {file.name: file for file in base.iterdir()}
    for file in top.iterdir():
        if TOKENIZER_FILES.match(file.name):
            links[file.name] = file
    links[f"on-top-{len(folders_on_top(base))}"] = top
    return _folder_of_links(links)


def _folder_of_links(links: dict[str, Path]) -> Path:
    """A temporary folder of links: name -> file. It is deleted when the process ends."""
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

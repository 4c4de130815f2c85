"""How a model is written: as a Hugging Face folder, in the types of its source, with a card. (PEFT's
adapters: lora.py.)"""

import codecs
import contextlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

import huggingface_hub
import torch
import transformers
import yaml
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

from infra.checkpoint import read_settings, read_state
from infra.rounding import dtype_of, is_narrower, round_at_random, widest
from infra.settings import RunSettings, read_text, refuse_unless
from model import GPT, Block
from models.hub import (
    Rows,
    Source,
    is_hub_id,
    mark_blocks,
    names_in_model,
    read_config,
    read_json,
    read_weights,
    root_id,
    stored_types,
    weights_hash,
    write_config,
)
from models.load import load_model, put_on
from models.lora import Adapter, delta_of
from records.sources import split_sources

# ---- types of weights ----------------------------------------------------------------------------


def export_types(
    source: Source, trained: torch.dtype, dtype: torch.dtype | None = None
) -> dict[str, torch.dtype]:
    """The type of each weight in an export, by the names in the source's files. trained: the type of the
    weights before the export. dtype: of all weights of the export; None: of each its own in the source."""
    types = stored_types(source.root)
    if dtype:
        return dict.fromkeys(types, dtype)
    # precision 64-true: nothing is rounded
    return dict.fromkeys(types, torch.float64) if trained == torch.float64 else types


def exported_type(source: Source, cfg: RunSettings) -> torch.dtype | None:
    """The type to which an export rounds trained weights; None if it rounds none of them."""
    trained = torch.promote_types(dtype_of(cfg.precision), torch.float32)
    types = export_types(source, trained).values()
    narrow = [dtype for dtype in types if is_narrower(dtype, trained)]
    return widest(narrow) if narrow else None


def _say_type_in_config(file: Path, numbers_of: Counter) -> None:
    """Correct the types that config.json says. numbers_of: how many of the weights' numbers have each type.
    A type that no weight has becomes the type of most numbers."""
    names = [str(dtype).removeprefix("torch.") for dtype, _ in numbers_of.most_common()]

    def correct(config: dict) -> bool:
        """-> whether something has changed"""
        has_changed = False
        for key, value in config.items():
            if isinstance(value, dict):  # of a text or a vision model
                has_changed |= correct(value)
            elif key in ("dtype", "torch_dtype") and value not in (None, *names):
                config[key] = names[0]
                has_changed = True
        return has_changed

    config = read_json(file)
    if correct(config):
        write_config(file, config)


def _say_template_in_config(file: Path, template: str) -> None:
    """Put a chat template into tokenizer_config.json, too: llama.cpp, Ollama and old versions of transformers read
    that one."""
    config = read_json(file) if file.exists() else {}
    write_config(file, config | {"chat_template": template})


# ---- the card ------------------------------------------------------------------------------------


def make_card(checkpoint: Source, library: str | None) -> str:
    """README.md of what a checkpoint is exported to, for the Hub: which model and data it comes from, as far as
    they have ids there, and the settings. library: what loads the export."""
    settings = read_settings(checkpoint.folder)
    state = read_state(checkpoint.folder)
    parts = split_sources(settings["data"]["train"])
    names = [part.partition(":")[0] for part in parts]
    about = {
        "library_name": library,
        "base_model": root_id(checkpoint),
        **_licence_of(checkpoint.root),
        "datasets": list(dict.fromkeys(filter(is_hub_id, names))),
        "tags": [Path(state.hashes["program"]).stem, "preference-tuning"],
    }
    metadata = yaml.safe_dump({k: v for k, v in about.items() if v}, sort_keys=False)
    return f"""---
{metadata}---

Trained by {state.hashes["program"]} for {state.step} steps, on data whose token ids and labels have
the hash `{state.hashes["records"]}`, with these settings (of paths the last names):

```yaml
{yaml.safe_dump(_without_folders(settings), sort_keys=False)}```
"""


def _licence_of(folder: Path) -> dict[str, str]:
    """What the card of a model says about its licence, if it has one that can be read."""
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
        metadata = huggingface_hub.metadata_load(folder / "README.md") or {}
        return {
            x: metadata[x] for x in ("license", "license_name", "license_link") if x in metadata
        }
    return {}


# settings that hold paths, by their last name, so that a fork's reward.model is among them
PATHS = (
    "model",
    "reference",
    "reference_cache",
    "train",
    "val",
    "test",
    "chat_template",
    "out_dir",
)


def _without_folders(settings: dict) -> dict:
    """Settings without the folders of absolute paths: these say whose machine it was, and nothing lies there
    elsewhere."""
    shown = dict(settings)
    for name, value in settings.items():
        if isinstance(value, dict):
            shown[name] = _without_folders(value)
        elif name in PATHS and isinstance(value, str):
            parts = split_sources(value)
            shown[name] = ",".join(Path(x).name if x.startswith("/") else x for x in parts)
    return shown


# ---- write ---------------------------------------------------------------------------------------


@torch.no_grad()
def export(
    source: Source,
    rows: dict[str, Rows],
    weights: dict[str, torch.Tensor],
    out: Path,
    notes: Mapping = {},
    dtype: torch.dtype | None = None,
    seed: int = 1,
    adapters: Mapping[str, Adapter] = {},
) -> None:
    """Write a model as a Hugging Face folder: a copy of the source's, with these weights and adapters. rows: see
    model.Packed. notes: more files, {name: text}. dtype: see export_types. seed: of the rounding. `weights` is
    empty afterwards, so that a large model need not be in memory twice. Raises BadInput."""
    types = export_types(source, next(iter(weights.values())).dtype, dtype)
    tensors = _tensors_of_files(source, rows, weights, types, seed, adapters)
    numbers_of = Counter()
    for x in tensors.values():
        numbers_of[x.dtype] += x.numel()
    _write_weights(tensors, out)
    for file in source.files:
        copy_text(file, out / file.name)
    _say_type_in_config(out / "config.json", numbers_of)
    templates = source.tokenizer / "additional_chat_templates"
    if templates.exists():
        (out / templates.name).mkdir()  # not copytree, which also copies modes
        for file in templates.iterdir():
            copy_text(file, out / templates.name / file.name)
    for name, text in notes.items():
        (out / name).write_text(text)
    if "chat_template.jinja" in notes:
        _say_template_in_config(out / "tokenizer_config.json", notes["chat_template.jinja"])


def _tensors_of_files(
    source: Source,
    rows: dict[str, Rows],
    weights: dict[str, torch.Tensor],
    types: dict[str, torch.dtype],
    seed: int,
    adapters: Mapping[str, Adapter],
) -> dict[str, torch.Tensor]:
    """What an export writes, by the names and in the types of the files. See export, for which `weights` becomes
    empty."""
    with torch.device("meta"):
        shell = transformers.AutoModelForCausalLM.from_config(read_config(source))
    name_of = names_in_model(shell, types)
    types_of = defaultdict(set)  # of a tensor that joins several weights of the files
    for file_name, name in name_of.items():
        types_of[name].add(types[file_name])
    # {our weight: the last of transformers' names that is cut from it}; after that one it is freed
    last_of = {r.name: name for name, r in rows.items()}
    tensors = {}
    for name, r in rows.items():
        if r.name not in weights:  # a tied head is the embedding
            continue
        x = r.of(weights[r.name])
        if adapter := adapters.get(name.removesuffix(".weight")):
            delta = delta_of(adapter)
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            x = x + (delta.T if r.transposed else delta)
        if last_of[r.name] == name:
            del weights[r.name]
        types_of_parts = types_of[name] or types_of[r.name] or types.values()
        tensors[name] = round_at_random(x, widest(types_of_parts), name, seed)
    tensors = revert_weight_conversion(shell, tensors)
    # What is not ours stays the same: constants, a vision tower, layers that predict more tokens at once.
    our_names = {*rows, *(r.name for r in rows.values())}  # the files of litgpt have our names
    our_names -= dict(shell.named_buffers()).keys()
    tensors |= read_weights(source.root, [x for x in types if name_of[x] not in our_names])
    for name, x in tensors.items():
        tensors[name] = round_at_random(x, types.get(name, x.dtype), name, seed)
    return tensors


def copy_text(file: Path, copy: Path) -> None:
    """Copy a file without its byte order mark, which would begin every prompt if the file is a chat template."""
    copy.write_bytes(file.read_bytes().removeprefix(codecs.BOM_UTF8))


def _write_weights(tensors: dict[str, torch.Tensor], out: Path) -> None:
    """Write tensors as Hugging Face's files of at most 5 GB. `tensors` is empty afterwards."""
    out.mkdir(parents=True, exist_ok=True)
    split = huggingface_hub.split_torch_state_dict_into_shards(tensors)
    for file, names in split.filename_to_tensors.items():
        part = {name: tensors.pop(name).contiguous() for name in names}
        save_file(part, out / file, {"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_config(out / "model.safetensors.index.json", index)


def export_checkpoint(source: Source, out: Path, export_dtype: torch.dtype | None = None) -> None:
    """Write the model of a checkpoint as a Hugging Face folder, with a card, and with the chat template
    of the run. export_dtype: see export_types. Raises BadInput if adapters would be merged into other weights
    than in training."""
    settings = read_settings(source.folder)
    state = read_state(source.folder)
    dtype = dtype_of(settings["precision"])
    has_own_base = settings["lora"]["rank"] and not state.reference_has_moved
    # at least float32: a run in bfloat16 computes with a rounded base, the export takes the unrounded one
    trained = torch.promote_types(dtype, torch.float32)
    # adapters are added in float32 whatever the type of the base
    as_stored = has_own_base and trained == torch.float32
    gpt = load_model(source.base, dtype=None if as_stored else trained)
    if has_own_base:
        refuse_unless(
            weights_hash(gpt.unique_parameters(), dtype) == state.hashes["model weights"],
            f"export: {source.base.folder}: not the weights that {source.folder} was trained on",
        )
    adapters = put_on(gpt, source.folder)
    # transformers cannot load a model with blocks of a fork's own
    library = "transformers" if GPT.block_class is Block else None
    notes = {"README.md": make_card(source, library)}
    if source.chat_template:
        notes["chat_template.jinja"] = read_text(source.chat_template)
    generation = source.folder / "generation_config.json"
    if generation.exists():  # the chat template ends an answer in another token than the model
        notes[generation.name] = generation.read_text()
    seed = settings["seed"]
    rows = gpt.rows
    weights = gpt.unique_parameters()
    del gpt  # `export` frees the weights one by one
    export(source, rows, weights, out, notes, export_dtype, seed, adapters)
    if GPT.block_class is not Block:
        mark_blocks(out, GPT.block_class.__name__)

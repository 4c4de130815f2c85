"""How a model is written: as a Hugging Face folder, in the types of its source, with a card. (PEFT's
adapters: lora.py.)"""

import codecs
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
import yaml

from infra.checkpoint import read_settings, read_state
from infra.rounding import dtype_of, is_narrower, round_at_random, widest
from infra.settings import RunSettings, read_text, refuse_unless
from model import GPT, Block
from models.hub import (
    Rows,
    Source,
    is_hub_id,
    mark_blocks,
    read_config,
    read_json,
    read_whole,
    root_id,
    stored_types,
    weights_hash,
    write_config,
)
from models.load import load_model, put_on
from models.lora import Adapter, delta_of
from records.sources import split_share, split_sources

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
    names = [split_share(part)[0].partition(":")[0] for part in parts]
    about = {
        "library_name": library,
        "base_model": root_id(checkpoint),
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
    hf = read_whole(source.root, read_config(source), widest(types.values()))
    for name, p in hf.named_parameters():
        # GPT-2's old files leave the prefix out
        short = name.removeprefix(f"{hf.base_model_prefix}.")
        p.data = p.data.to(types.get(name) or types.get(short) or widest(types.values()))
    hf_weights = hf.state_dict(keep_vars=True)
    # {our weight: the last of transformers' names that is cut from it}; after that one it is freed
    last_of = {r.name: name for name, r in rows.items()}
    for name, r in rows.items():
        if r.name not in weights:  # a tied head is the embedding, and a vision tower stays the same
            continue
        x = r.of(weights[r.name])
        if adapter := adapters.get(name.removesuffix(".weight")):
            delta = delta_of(adapter)
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            x = x + (delta.T if r.transposed else delta)
        if last_of[r.name] == name:
            del weights[r.name]
        weight = hf_weights[name]
        x = round_at_random(x, weight.dtype, name, seed)
        # A new tensor. To write into the old one, which is mapped from the source's file, would first copy it into
        # memory.
        weight.data = torch.empty_like(weight).copy_(x)
    hf.can_generate = lambda: False  # generation_config.json is copied: not all are valid
    hf.save_pretrained(out, max_shard_size="5GB")
    for file in source.files:
        copy_text(file, out / file.name)
    numbers_of = Counter()
    for p in hf.parameters():
        numbers_of[p.dtype] += p.numel()
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


def copy_text(file: Path, copy: Path) -> None:
    """Copy a file without its byte order mark, which would begin every prompt if the file is a chat template."""
    copy.write_bytes(file.read_bytes().removeprefix(codecs.BOM_UTF8))


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

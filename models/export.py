"""How a model is written: as a Hugging Face folder, in the types of its source, with a card; and its
adapters as a PEFT folder."""

import codecs
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import transformers
import yaml
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from infra.checkpoint import read_settings, read_state
from infra.devices import dtype_of
from infra.files import write_json
from infra.random_numbers import round_at_random
from infra.settings import Lora, RunSettings, find_path, read_text, refuse_unless
from model import GPT, Block
from models.hub import (
    Rows,
    Source,
    mark_blocks,
    names_in_model,
    read_config,
    read_json,
    stored_types,
    weight_files,
    weights_hash,
)
from models.load import load_model, put_on
from models.lora import Adapters

# ---- types of weights ----------------------------------------------------------------------------


def is_rounded(source: Source, cfg: RunSettings) -> bool:
    """Whether an export rounds weights of a run: trained weights have at least float32, and the model's files may have
    a narrower type. A run in 64-true writes float64."""
    is_narrow = any(dtype.itemsize < 4 for dtype in stored_types(source.root).values())
    return is_narrow and cfg.precision != "64-true"


def _say_type_in_config(file: Path, types: Iterable[torch.dtype]) -> None:
    """Let config.json say the type of most weights, also of a text or a vision model within it. types: of all
    weights."""
    [(dtype, _)] = Counter(types).most_common(1)
    name = str(dtype).removeprefix("torch.")
    text = file.read_text()
    file.write_text(re.sub(r'("(?:torch_)?dtype": )"\w+"', rf'\1"{name}"', text))


# ---- the card ------------------------------------------------------------------------------------


def _make_card(checkpoint: Source) -> str:
    """README.md of an exported checkpoint, for the Hub: the Hub id of its model, if it has one, and the settings."""
    settings = read_settings(checkpoint.folder)
    state = read_state(checkpoint.folder)
    name = settings["model"]
    is_path = Path(name).is_absolute() or find_path(name).exists()
    about = {
        # transformers cannot load a model with blocks of a fork's own
        "library_name": "transformers" if GPT.block_class is Block else None,
        "base_model": None if is_path else name,
        "tags": [Path(state.hashes["program"]).stem, "preference-tuning"],
    }
    metadata = yaml.safe_dump({k: v for k, v in about.items() if v}, sort_keys=False)
    # absolute paths mean nothing on another machine
    shown = re.sub(
        r"(?<![\w:/.])/[^,\n]*/", "", yaml.safe_dump(settings, sort_keys=False, width=1000)
    )
    return f"""---
{metadata}---

Trained by {state.hashes["program"]} for {state.step} steps, on data whose token ids and labels have
the hash `{state.hashes["records"]}`, with these settings (of paths the last names):

```yaml
{shown}```
"""


# ---- write ---------------------------------------------------------------------------------------


@torch.no_grad()
def export(
    source: Source,
    rows: dict[str, Rows],
    weights: dict[str, Tensor],
    out: Path,
    notes: Mapping = {},
    dtype: torch.dtype | None = None,
    seed: int = 1,
) -> None:
    """Write a model as a Hugging Face folder: a copy of the source's folder with these weights. rows: see
    model.Packed. notes: more files, {name: text}. dtype: of all weights. None: each weight keeps its type in the
    source, but a run in 64-true writes float64. seed: of the rounding. `weights` is empty afterwards, so that a large
    model is not in memory twice."""
    if next(iter(weights.values())).dtype == torch.float64:
        dtype = dtype or torch.float64
    types = stored_types(source.root)
    if dtype:
        types = dict.fromkeys(types, dtype)
    out.mkdir(parents=True, exist_ok=True)
    _write_weights(source, rows, weights, out, types, seed)
    for file in source.files:
        copy_text(file, out / file.name)
    _say_type_in_config(out / "config.json", types.values())
    for name, text in notes.items():
        (out / name).write_text(text)
    if "chat_template.jinja" in notes:
        # llama.cpp, Ollama and old versions of transformers read this file's
        file = out / "tokenizer_config.json"
        config = read_json(file) if file.exists() else {}
        write_json(file, config | {"chat_template": notes["chat_template.jinja"]})


def _write_weights(
    source: Source,
    rows: dict[str, Rows],
    weights: dict[str, Tensor],
    out: Path,
    types: dict[str, torch.dtype],
    seed: int,
) -> None:
    """Write files of weights like the source's, with the same names: the source's index fits. types: by these names.
    See export."""
    with torch.device("meta"):
        shell = transformers.AutoModelForCausalLM.from_config(read_config(source))
    name_of = names_in_model(shell, types)
    trained = _trained_weights(shell, rows, weights, Counter(name_of.values()))
    for file in weight_files(source.root):
        part = {}
        with safe_open(file, "pt") as stored:
            for name in stored.keys():
                name_in_model = name_of.get(name, name)
                keys = name_in_model, name, f"{shell.base_model_prefix}.{name}"
                key = next((key for key in keys if key in trained), name)
                # not trained here: a vision tower, layers that predict more tokens, constants
                x = trained.pop(key) if key in trained else stored.get_tensor(name)
                part[name] = round_at_random(x, types.get(name, x.dtype), key, seed)
        save_file(part, out / file.name, {"format": "pt"})
    assert not trained, f"the source's files have no place for {', '.join(trained)}"


def _trained_weights(
    shell: transformers.PreTrainedModel,
    rows: dict[str, Rows],
    weights: dict[str, Tensor],
    n_parts_of: Counter,
) -> dict[str, Tensor]:
    """Our weights by transformers' names. Experts, which transformers joins, have their names in the files. n_parts_of:
    from how many weights of the files a weight of transformers' model is made. `weights` is empty afterwards."""
    embedding = shell.get_input_embeddings()
    name = next(name for name, module in shell.named_modules() if module is embedding)
    embedding_VC = weights[rows[f"{name}.weight"].name]
    trained = {}
    joined = {}
    for name in rows.keys() & n_parts_of.keys() - dict(shell.named_buffers()).keys():
        # a tied head is not among the weights
        x = rows[name].of(weights.get(rows[name].name, embedding_VC))
        group = joined if n_parts_of[name] > 1 else trained
        group[name] = x
    weights.clear()
    return trained | revert_weight_conversion(shell, joined)


def copy_text(file: Path, copy: Path) -> None:
    """Copy a file without its byte order mark, which would begin every prompt if the file is a chat template."""
    copy.write_bytes(file.read_bytes().removeprefix(codecs.BOM_UTF8))


def export_checkpoint(source: Source, out: Path, export_dtype: torch.dtype | None = None) -> None:
    """Write the model of a checkpoint as a Hugging Face folder, with a card, and with the chat template
    of the run. export_dtype: see export. Raises BadInput if adapters would be merged into other weights
    than in training."""
    settings = read_settings(source.folder)
    state = read_state(source.folder)
    dtype = dtype_of(settings["precision"])
    has_own_base = settings["lora"]["rank"] and not state.reference_has_moved
    # at least float32: a run in bfloat16 computes with a rounded base, the export takes the unrounded one
    gpt = load_model(source.base, torch.promote_types(dtype, torch.float32))
    if has_own_base:
        refuse_unless(
            weights_hash(gpt.unique_parameters(), dtype) == state.hashes["model weights"],
            f"export: {source.base.folder}: not the weights that {source.folder} was trained on",
        )
    put_on(gpt, source.folder)
    notes = {"README.md": _make_card(source)}
    if source.chat_template:
        notes["chat_template.jinja"] = read_text(source.chat_template)
    generation = source.folder / "generation_config.json"
    if generation.exists():  # the chat template ends an answer in another token than the model
        notes[generation.name] = generation.read_text()
    seed = settings["seed"]
    rows = gpt.rows
    weights = gpt.unique_parameters()
    del gpt  # `export` frees the weights one by one
    export(source, rows, weights, out, notes, export_dtype, seed)
    if GPT.block_class is not Block:
        mark_blocks(out, GPT.block_class.__name__)


# ---- PEFT's files --------------------------------------------------------------------------------


def write_peft(adapters: Adapters, model: nn.Module, base: str, lora: Lora, out: Path) -> None:
    """Write a model's adapters in PEFT's format. base: the name of their base model, for PEFT."""
    # All layers get one rank, though GPT-2's layer for q, k and v has three times that of the others. PEFT's
    # rank_pattern may give each its own, but other programs (llama.cpp, vLLM) do not read it: they would scale the
    # layers wrongly, or refuse the file.
    rank = max(len(a) for a, _, _ in adapters.values())
    tensors = {}
    for layer, (a, b, _) in adapters.items():
        n_missing = rank - len(a)
        a = nn.functional.pad(a, (0, 0, 0, n_missing))  # rows of zeros
        b = nn.functional.pad(b, (0, n_missing))  # columns
        tensors[f"base_model.model.{layer}.lora_A.weight"] = a
        tensors[f"base_model.model.{layer}.lora_B.weight"] = b.contiguous()
    alpha = rank * lora.alpha / lora.rank
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
        "r": rank, "lora_alpha": int(alpha) if alpha == int(alpha) else alpha, "lora_dropout": lora.dropout,
        "target_modules": sorted(adapters),
        "fan_in_fan_out": any(rows.transposed for rows in model.rows.values()),
    }  # fmt: skip
    save_file(tensors, out / "adapter_model.safetensors", {"format": "pt"})
    write_json(out / "adapter_config.json", config)

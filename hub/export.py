"""Write a Hugging Face folder: weights, config.json, tokenizer files, model card.

Weights are written one at a time, so a model need not fit in memory twice.
"""

import csv
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import litgpt
import torch

from hub.families import IGNORED, VISION, Piece, canonical_name, is_transposed, weight_layout
from hub.folders import TOKENIZER_FILES
from hub.transformers_models import read_model_config
from hub.weights import stored_tensors
from runs.checkpoint import RunState
from runs.errors import user_error
from runs.settings import flatten
from runs.small_files import parse_yaml
from runs.tensors import DTYPES, LazyTensors, open_safetensors, shapes_of, write_safetensors

MAX_SHARD = 5 * 10**9  # bytes of one weights file
# generation_config.json, preprocessor_config.json, processor_config.json
OTHER_FILES = re.compile("generation_config|(pre)?processor")
# A link is copied under one of these names only: an export may be published, and a link of a
# downloaded folder, tokenizer_x, could point at any file of this machine.
LINKED_FILES = re.compile(
    "(tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template"
    "|generation_config|preprocessor_config|processor_config)[.]json"
    "|tokenizer[.]model|vocab[.]txt|merges[.]txt|chat_template[.]jinja"
)


def export_weights(
    weights: Mapping,
    source: Path,
    out: Path | None,
    notes: Sequence[tuple[str, str]] = (),
) -> None:
    """Write full weights (see merge_adapters) as a Hugging Face folder.

    `weights`: weights by litgpt's names. `source`: the Hugging Face folder that the model came from;
    its config and tokenizer files are copied. `out`: None on a rank that only takes part in
    gathering the weights. Each tensor gets the dtype that it has in the source's files; a float64
    weight stays float64. `notes`: more files to write, as (name, text). Raises BadInput.
    """
    config, like, pieces_of = _tensors_to_write(weights, source)
    kind = str(next(iter(like.values())).dtype).removeprefix("torch.")
    unchanged = _unchanged_tensors(source, pieces_of)
    like |= unchanged.like
    cache = {}  # weights of ours that the tensor before needed: q, k and v come from one

    def tensor(name):
        if name in unchanged:
            return unchanged[name]
        # in one order, not a set: all ranks must gather the same weight at the same time
        needed = list(dict.fromkeys(piece.name for piece in pieces_of[name]))
        for ours in cache.keys() - needed:
            del cache[ours]
        for ours in needed:
            if ours not in cache:
                cache[ours] = weights[ours]
        x = torch.cat([cache[piece.name][piece.ours] for piece in pieces_of[name]])
        if is_transposed(name, pieces_of[name][0].name):
            x = x.T
        return x.to(like[name].dtype)

    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    write_safetensors(out, LazyTensors(like, tensor), most=MAX_SHARD)
    if out is None:
        return
    config |= {"dtype": kind, "torch_dtype": kind}  # transformers 5 and its older versions
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    copy_tokenizer_files(source, out)
    for name, text in notes:
        (out / name).write_text(text)


def _tensors_to_write(weights: Mapping, source: Path) -> tuple[dict, dict, dict[str, list[Piece]]]:
    """(config.json, the tensors to write on the meta device, the pieces of each). Tensors have the
    names that they have in the source's files."""
    arguments, config, names = read_model_config(source)
    ours = shapes_of(weights)
    layout = weight_layout(litgpt.Config(**arguments), names, ours)
    in_source = {}  # canonical name: (name in the file, dtype)
    for stored in stored_tensors(source):
        name = canonical_name(stored.name, layout)
        in_source[name] = stored.name, DTYPES.get(stored.slice.get_dtype())
    like = {}
    pieces_of = {}
    for theirs, pieces in layout.items():
        x = ours[pieces[0].name]
        name, kind = in_source.get(theirs, (theirs, x.dtype))
        if x.dtype == torch.float64:  # only a run with precision 64-true has these
            kind = torch.float64
        shape = (pieces[-1].theirs.stop, *x.shape[1:])
        if is_transposed(name, pieces[0].name):
            shape = shape[::-1]
        like[name] = torch.empty(shape, dtype=kind, device="meta")
        pieces_of[name] = pieces
    return config, like, pieces_of


def _unchanged_tensors(source: Path, written: Mapping) -> LazyTensors:
    """The tensors of a vision tower, and constants (see transformers_models): they go into an export as they are."""
    is_ours = not read_model_config(source).names
    file_of = {
        stored.name: stored.file
        for stored in stored_tensors(source)
        if VISION.fullmatch(stored.name)
        or (is_ours and stored.name not in written and not IGNORED.fullmatch(stored.name))
    }
    tensors_of = {file: open_safetensors(file) for file in set(file_of.values())}
    like = {name: tensors_of[file].like[name] for name, file in file_of.items()}
    return LazyTensors(like, lambda name: tensors_of[file_of[name]][name])


def copy_tokenizer_files(source: Path, out: Path) -> None:
    """Copy the files of the tokenizer, the generation config and the processors. Raises BadInput, or
    Failed where the disk is full."""
    out.mkdir(parents=True, exist_ok=True)
    if source == out:
        return
    for file in source.iterdir():
        if file.is_symlink():
            wanted = LINKED_FILES.fullmatch(file.name)
        else:
            wanted = TOKENIZER_FILES.match(file.name) or OTHER_FILES.match(file.name)
        if wanted and file.is_file():
            with user_error("model", file):
                shutil.copyfile(file, out / file.name)


def model_card(settings: str, state: RunState, run: Path) -> str:
    """The README.md of an exported model: base model, data, last validation and settings.

    `settings` is the text of settings.yaml; `run` the run's folder, for its val.csv.
    """
    cfg = parse_yaml(settings)
    program = Path(state.program).stem
    validation = _last_validation(run / "val.csv", state.step)
    facts = [*validation.items(), *flatten(cfg).items()]
    table = "\n".join(f"| {name} | {value} |" for name, value in facts if value not in (None, ""))
    return f"""---
library_name: transformers
tags: [{program}, preference-tuning]
---

# {Path(cfg["model"]).name}, tuned by {program}.py

Started from `{cfg["model"]}`, trained for {state.step} steps on `{cfg["data"]["train"]}`
(hash of its token ids and labels: `{state.identity.get("data (token ids and labels)")}`).

| last validation, then settings | |
| --- | --- |
{table}
"""


def _last_validation(file: Path, step: int) -> dict[str, str]:
    """The last row of val.csv that is not later than this step; empty if there is none."""
    if not file.exists():
        return {}
    rows = csv.DictReader(file.read_text().splitlines())
    rows = [row for row in rows if int(row["step"]) <= step]
    return rows[-1] if rows else {}

"""Read the weights of a folder, by litgpt's names: Hugging Face and litgpt folders, and on top of
them checkpoints of a run and PEFT adapters (see folders.py).

Weights are read one at a time, when they are asked for (runs.tensors.LazyTensors), so a model need
not fit in memory twice. Reading order: read_source, fill_model, read_weights, then the kinds of
folders.
"""

import contextlib
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import litgpt.lora
import torch
from safetensors import SafetensorError, safe_open

from hub.families import (
    HEAD,
    IGNORED,
    VISION,
    ModelConfig,
    Piece,
    canonical_name,
    check_sizes,
    is_transposed,
    weight_layout,
)
from hub.folders import folders_on_top, weight_files
from hub.lora import config_with_adapters, merge_adapters, plain_names
from hub.peft import read_adapter
from hub.transformers_models import TransformersBlocks, constants, read_model_config
from runs.checkpoint import read_checkpoint_weights, read_settings, read_state
from runs.console import Wait, advance
from runs.errors import BadInput, user_error
from runs.settings import Lora
from runs.small_files import parse_yaml, read_object
from runs.tensors import FLOAT_DTYPES, LazyTensors, open_safetensors, override_tensors

Layout = dict[str, list[Piece]]  # Hugging Face's name of a tensor: what it holds


def read_source(folder: Path) -> ModelConfig:
    """What a Hugging Face or a litgpt folder says about its model. Raises BadInput."""
    file = folder / "model_config.yaml"
    if not (folder / "lit_model.pth").exists() or not file.exists():
        return read_model_config(folder)
    arguments = read_object(file, parse_yaml)
    check_sizes(arguments, file, {})
    hf_file = folder / "config.json"
    config = read_object(hf_file) if hf_file.exists() else {}
    # litgpt's own file does not say whether the head is tied to the embedding
    tied = config.get("model_type") == "gpt2" or "gemma" in arguments["name"].lower()
    return ModelConfig(arguments, {"tie_word_embeddings": tied} | config, names=None)


@contextlib.contextmanager
def weights_must_fit(folder: Path):
    """Turn what litgpt and torch raise where weights do not fit config.json into BadInput."""
    try:
        yield
    except BadInput:
        raise
    except (KeyError, RuntimeError, TypeError, AttributeError, AssertionError, ValueError) as e:
        reason = " ".join(str(e).split())[:300] or type(e).__name__  # an assert may have no text
        raise BadInput(f"{folder}: the weights do not fit config.json: {reason}") from None


def fill_model(model, folder: Path, source: ModelConfig, dtype: torch.dtype) -> None:
    """Put a folder's weights into a model on the meta device; adapters stay there (see
    create_adapters). Raises KeyError, BadInput."""
    tied = source.config["tie_word_embeddings"]
    if tied and getattr(model.lm_head, "r", 0):
        raise BadInput(
            "lora.targets: head: this model's head is tied to its embedding, so it takes no adapter"
        )
    weights = read_weights(model, folder, source, dtype)
    with Wait("reading the weights", len(weights), "tensors"):
        model.load_state_dict(dict(_counted(weights)), strict=False, assign=True)
        model.load_state_dict(_read_constants(model, folder), strict=False)
    if tied:
        model.tie()


def read_weights(model, folder: Path, source: ModelConfig, dtype: torch.dtype) -> LazyTensors:
    """A folder's weights, with the adapters on top of it merged into them.

    Names and shapes are those of `model`, on the meta device, without its adapters; a tied head is
    left out. Raises KeyError, BadInput.
    """
    parameters = plain_names(dict(model.named_parameters()))
    like = {name: x.to(dtype) for name, x in parameters.items()}
    if source.config["tie_word_embeddings"]:
        like.pop("lm_head.weight", None)
    layout = {}
    if source.names is None:
        weights = _read_litgpt(folder, like)
    else:
        layout = weight_layout(model.config, source.names, like)
        names = {id(p): name for name, p in model.named_parameters()}
        embedding = names[id(model.embedding.weight)]
        weights = _read_hugging_face(folder, layout, like, constants(model).keys(), embedding)
    for top in folders_on_top(folder):
        if (top / "adapter_config.json").exists():
            weights = _with_adapter(weights, top, layout)
        else:
            weights = _with_checkpoint(weights, top, source)
    _refuse_names(
        missing=like.keys() - weights.keys(),
        unknown=weights.keys() - like.keys() - {"lm_head.weight"},
    )
    return LazyTensors(like, lambda name: weights[name].to(dtype))


def _counted(weights: Mapping) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, weight), each counted by the wait for it."""
    for name in weights:
        yield name, weights[name]
        advance()


def weights_hash(weights: Mapping) -> str:
    """A hash of weights with their names, shapes and dtypes; their order does not matter."""
    h = hashlib.sha256()
    with Wait("hashing the weights", len(weights), "tensors"):
        for name in sorted(weights):
            x = weights[name]
            h.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
            h.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
            advance()
    return h.hexdigest()


def _refuse_names(missing: set[str], unknown: set[str]) -> None:
    if missing or unknown:
        raise KeyError(f"missing {sorted(missing)[:3]}, unknown {sorted(unknown)[:3]}")


# ---- a litgpt folder -----------------------------------------------------------------------------


def _read_litgpt(folder: Path, like: dict) -> LazyTensors:
    file = folder / "lit_model.pth"
    try:
        state = torch.load(file, weights_only=True, mmap=True)
    except Exception as e:  # a damaged file fails in a dozen ways
        raise BadInput(f"{file}: {str(e).splitlines()[0]}") from None
    state = state.get("model", state)  # a checkpoint of litgpt's training has the weights there
    # a copy, because one tensor that is a view of the file would keep all of it in memory
    return LazyTensors(state, lambda name: state[name].to(like[name].dtype, copy=True))


# ---- a Hugging Face folder -----------------------------------------------------------------------


class StoredTensor(NamedTuple):
    """A tensor of a Hugging Face folder."""

    name: str
    """Its name in the file."""
    slice: object
    """safetensors' slice: it knows shape and dtype, and reads the rows that are indexed."""
    file: Path


def stored_tensors(folder: Path) -> Iterator[StoredTensor]:
    """All tensors in the weights files of a Hugging Face folder. A slice can be read until the next
    tensor is asked for. Raises BadInput, also for a tensor that two files give."""
    file_of = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, "pt") as f:
                for name in f.keys():
                    if name in file_of:
                        raise BadInput(f"{file}: {name}: {file_of[name]} has it too")
                    file_of[name] = file.name
                    yield StoredTensor(name, f.get_slice(name), file)
        except (SafetensorError, OSError) as e:
            raise BadInput(f"{file}: {e}") from None


def _read_constants(model, folder: Path) -> dict[str, torch.Tensor]:
    """A model's constants by name (see transformers_models); litgpt's models have none."""
    names = constants(model).keys()
    if not names:
        return {}
    return {x.name: x.slice[...] for x in stored_tensors(folder) if x.name in names}


def _read_hugging_face(
    folder: Path, layout: Layout, like: dict, constants: Collection[str], embedding: str
) -> LazyTensors:
    """The weights of `like`, each put together from the tensors that hold its rows. `constants`: names that a
    file must also have. `embedding`: our name of that weight."""
    if not weight_files(folder):
        raise BadInput(
            f"{folder}: no model.safetensors here, nor lit_model.pth with model_config.yaml"
        )
    found = set()
    heads = []  # of a tied model, which needs none
    origins = {name: {} for name in like}  # our name: {(file, name in the file): pieces}
    for stored in stored_tensors(folder):
        name = canonical_name(stored.name, layout)
        if name in found and name in layout:
            raise BadInput(f"{stored.file}: {stored.name}: there under another name too")
        found.add(name)
        if name not in layout:
            if HEAD.fullmatch(name):
                heads.append(stored)
            continue
        dtype = stored.slice.get_dtype()
        if dtype not in FLOAT_DTYPES:
            raise KeyError(f"{stored.name}: of type {dtype}")
        shape = stored.slice.get_shape()
        if is_transposed(stored.name, layout[name][0].name):
            shape = shape[::-1]
        _check_shape(shape, layout[name], like)
        for ours, pieces in _by_weight(layout[name]).items():
            origins[ours][stored.file, stored.name] = pieces
    _refuse_names(
        missing=(layout.keys() | constants) - found,
        unknown={
            name
            for name in found - layout.keys() - constants
            if not IGNORED.fullmatch(name) and not VISION.fullmatch(name)
        },
    )

    def read(ours):
        out = torch.empty_like(like[ours], device="cpu")
        for (file, name), pieces in origins[ours].items():
            with safe_open(file, "pt") as f:
                x = f.get_slice(name)
                if is_transposed(name, ours):
                    x = x[:].T
                for piece in pieces:
                    out[piece.ours] = x[piece.theirs]
        return out

    weights = LazyTensors(like, read)
    for stored in heads:
        _refuse_own_head(stored, weights[embedding])
    return weights


def _refuse_own_head(stored: StoredTensor, embedding: torch.Tensor) -> None:
    """Raises BadInput where config.json ties the head to the embedding, and a file has another head:
    transformers 5 uses that one, older versions do not."""
    with safe_open(stored.file, "pt") as f:
        head = f.get_tensor(stored.name)
    if not torch.equal(head.to(embedding.dtype), embedding):
        raise BadInput(
            f"{stored.file}: {stored.name}: not the embedding, which config.json makes the head "
            "(tie_word_embeddings): set it to false, or remove this tensor"
        )


def _check_shape(shape: Sequence[int], pieces: list[Piece], like: dict) -> None:
    """Raises KeyError where a Hugging Face tensor has another shape than its pieces together."""
    name = pieces[0].name
    expected = (pieces[-1].theirs.stop, *like[name].shape[1:])
    if tuple(shape) != expected:
        raise KeyError(f"size mismatch for {name}: {tuple(shape)}, not {expected}")


def _by_weight(pieces: list[Piece]) -> dict[str, list[Piece]]:
    """The pieces of a Hugging Face tensor, by litgpt's weight."""
    by_weight = {}
    for piece in pieces:
        by_weight.setdefault(piece.name, []).append(piece)
    return by_weight


# ---- on top of a base ----------------------------------------------------------------------------


def _with_adapter(weights: LazyTensors, folder: Path, layout: Layout) -> LazyTensors:
    """The weights with the adapters of a PEFT folder merged into them."""
    changes = {}  # our name: [(adapter, pieces of its tensor that lie in this weight)]
    for adapter in read_adapter(folder):
        name = canonical_name(adapter.name, layout)
        _refuse_names(missing=set(), unknown={name} - layout.keys())
        shape = (len(adapter.b), adapter.a.shape[1])
        _check_shape(shape, layout[name], weights.like)
        for ours, pieces in _by_weight(layout[name]).items():
            changes.setdefault(ours, []).append((adapter, pieces))

    def merged(ours):
        w = weights[ours]
        for adapter, pieces in changes.get(ours, ()):
            delta = adapter.b @ adapter.a * adapter.scale
            for piece in pieces:
                w[piece.ours] += delta[piece.theirs]
        return w

    return LazyTensors(weights.like, merged)


def _with_checkpoint(weights: LazyTensors, folder: Path, source: ModelConfig) -> LazyTensors:
    """The weights with those that a run has trained in their place; its adapters are merged."""
    trained = read_checkpoint_weights(folder)
    if not any("lora_" in name for name in trained):
        return override_tensors(weights, trained)
    base = _iteration_base(folder)
    if base is not None:
        like = weights.like
        weights = LazyTensors(like, lambda name: base[name].to(like[name].dtype))
    with user_error(None, folder / "settings.yaml", TypeError):  # a field of another version
        lora = Lora(**read_settings(folder)["lora"])
    config = config_with_adapters(source.arguments, lora, source.names)
    with torch.device("meta"):  # only the sizes of its layers are needed
        gpt = (TransformersBlocks if source.names == {} else litgpt.lora.GPT)(config)
    return merge_adapters(override_tensors(weights, trained), gpt)


def _iteration_base(folder: Path) -> LazyTensors | None:
    """With a moving reference (SPIN, online KTO) the adapters of an iteration are merged into the weights
    before the next one. -> for a checkpoint of a later iteration the weights that its adapters belong
    to; else None. Raises BadInput."""
    run, _ = read_state(folder)
    file = folder.parent.parent / "iterations" / str(run.iteration) / "weights.safetensors"
    if file.exists():
        return plain_names(open_safetensors(file))
    if run.has_merged_adapters:
        raise BadInput(
            f"{folder}: {file}: missing: its adapters belong to these weights: copy them too"
        )
    return None

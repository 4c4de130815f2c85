"""A checkpoint: everything that a bit-identical continuation of a run needs.

| file in checkpoints/step-N/ | holds |
| --- | --- |
| shard-*.safetensors | trained weights, the optimizer's tensors, the random state of every rank |
| state.json | RunState; the optimizer's numbers that are no tensors; the names of the shard files |
| settings.yaml | the run's settings |
| manifest.json | a hash of each of these files; written last |

What a run also needs, outside of its checkpoints:

| file in the run's folder | holds |
| --- | --- |
| metrics.csv, val.csv | rows; a checkpoint knows how many there were, and their hash (RunState.rows) |
| iterations/answers-N.jsonl | SPIN and online KTO: what iteration N learns from; line 1 has a hash of the others |
| iterations/rated-N.jsonl | online KTO: what `rate` made of these answers |
| iterations/N/ | the reference of iteration N, if it moves |
| wandb_id | under which id the run goes on at wandb |
| .lock | which process writes into the folder |
| settings.yaml | the run's settings; its first line names program, commit and versions |

A checkpoint's folder is whole or not there (files.publish_folder). Fabric's own save moves a file out
of the temporary directory and can leave half of it under its final name.
"""

import inspect
import json
import math
import sys
import typing
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from runs.cli import dump_yaml
from runs.devices import all_reduce
from runs.errors import BadInput, printable, user_error
from runs.files import publish_folder, verify_folder
from runs.settings import MAX_INT, RunSettings, flatten
from runs.shards import load_shards, open_shards, save_shards, sort_metadata
from runs.small_files import parse_yaml, read_object, require_fields
from runs.tensors import LazyTensors, rename_tensors

# columns of val.csv that are empty at step 0, where r is 0, or where the checker is not asked
SOMETIMES_EMPTY = {"accuracy", "accuracy/about_z", "auc", "checker_accuracy", "kl/own"}


@dataclass
class RunState:
    """What a checkpoint holds besides tensors: what the run is, and how far it has come."""

    program: str = ""
    """The file that was started."""
    program_hash: str = ""
    """SHA-256 of that file."""
    chat_template: str = ""
    """The text of data.chat_template, if one was given."""
    identity: dict[str, str] = field(default_factory=dict)
    """Hashes of model, reference, tokenizer and data: a resume must find the same."""
    step: int = 0
    """Optimizer steps done."""
    unvalidated: bool = False
    """Whether the validation of this step has begun but not ended: a resume does it first."""
    iteration: int = 0
    """Of SPIN and online KTO, from 1."""
    moving_reference: bool = False
    """Whether the reference is the policy as it was when the iteration began."""
    started_from: str = ""
    """Hash of the policy's weights when the iteration began."""
    best_step: int | None = None
    """By keep_best."""
    best_value: float | None = None
    objective: dict = field(default_factory=dict)
    """Objective.state_dict()."""
    rows: dict[str, tuple[int, str]] = field(default_factory=dict)
    """File name: [number of its lines with the header, their SHA-256], of metrics.csv and val.csv
    (Csv.sync)."""

    @property
    def has_merged_adapters(self) -> bool:
        """With LoRA: whether the adapters of earlier iterations were merged into the base."""
        return self.moving_reference and self.iteration > 1

    def remember_if_best(self, row: dict, column: str | None) -> bool:
        """Remember a row of val.csv that is the best so far by this column. -> whether it is. Never
        at step 0, which has no checkpoint, nor where the cell is empty or not finite. Raises BadInput if val.csv has no
        such column, or one that stays empty."""
        if column is None:
            return False
        value = row.get(column)
        if column not in row or (value is None and column not in SOMETIMES_EMPTY):
            filled = ", ".join(name for name, x in row.items() if x is not None)
            raise BadInput(f"keep_best: {column}: not in val.csv, which has {filled}")
        if value is None or not math.isfinite(value) or self.step == 0:
            return False
        if column.endswith("loss") or column.split("/")[0] == "kl":
            value = -value  # of these the lowest is best
        if self.best_value is not None and value <= self.best_value:
            return False
        self.best_step, self.best_value = self.step, value
        return True


def program_file(objective: type) -> Path:
    """The file that was started; where there is none (a notebook), the objective's own."""
    started = Path(sys.argv[0])
    script = hasattr(sys.modules["__main__"], "__file__")
    if script and started.suffix == ".py" and started.is_file():
        return started
    return Path(inspect.getfile(objective))


# ---- save ----------------------------------------------------------------------------------------


def save_checkpoint(
    fabric, folder: Path, policy, optimizer, state: RunState, cfg: RunSettings
) -> None:
    """Write a checkpoint; every rank writes its own part. A collective. Raises Failed."""
    params = policy.unique_parameters()
    tensors = {f"weights|{n}": p.detach() for n, p in params.items() if p.requires_grad}
    name_of = {id(p): name for name, p in params.items()}
    numbers = {}
    for p, moments in optimizer.optimizer.state.items():
        for moment, x in moments.items():
            key = f"{name_of[id(p)]}|{moment}"
            if moment in ("qmap1", "qmap2"):
                # 8-bit AdamW has one table for all weights, and safetensors refuses shared memory
                x = x.clone()
            if isinstance(x, torch.Tensor):
                tensors[f"optimizer|{key}"] = x
            else:
                numbers[key] = x
    tensors["random|state_R"] = _random_states(fabric)

    def write(new: Path):
        save_shards(new, tensors)
        if fabric.global_rank == 0:
            names = sorted(file.name for file in new.iterdir())
            for name in names:
                sort_metadata(new / name)
            content = {"run": asdict(state), "optimizer": numbers, "shards": names}
            (new / "state.json").write_text(json.dumps(content))
            (new / "settings.yaml").write_text(dump_yaml(cfg))

    publish_folder(fabric, write, folder, on_every_rank=True)


def _random_states(fabric) -> torch.Tensor:
    """The random state of every rank: (ranks, bytes). A collective."""
    own = _generator(fabric).get_state().to(fabric.device)
    state_R = own.new_zeros(fabric.world_size, len(own))
    state_R[fabric.global_rank] = own
    return all_reduce(state_R)


def _generator(fabric) -> torch.Generator:
    """The source of this rank's random numbers."""
    if fabric.device.type == "cuda":
        return torch.cuda.default_generators[fabric.device.index]
    return torch.default_generator


# ---- read ----------------------------------------------------------------------------------------


def verify_checkpoint(folder: Path) -> str | None:
    """What is wrong with a checkpoint; None if it is whole."""
    required = ["state.json", "settings.yaml"]
    if fault := verify_folder(folder, required):
        return fault
    try:
        content = _read_state_file(folder)
    except BadInput as e:
        return str(e)
    shards = set(content["shards"])
    for name in sorted(shards - set(read_object(folder / "manifest.json"))):
        return f"manifest.json names no {name}"
    # torch reads every such file that lies there
    for name in sorted({file.name for file in folder.glob("*.safetensors")} - shards):
        return f"{printable(name)}: not a file of this checkpoint: remove it"
    return None


def _read_state_file(folder: Path) -> dict:
    """state.json, with its fields and RunState's of the right types. Raises BadInput."""
    file = folder / "state.json"
    content = read_object(file)
    kinds = typing.get_type_hints(RunState)
    run = content.get("run")
    # older versions did not save the shards; newer ones may save more of a run
    if "shards" not in content or not isinstance(run, dict) or run.keys() - kinds.keys():
        raise BadInput(f"{folder}: a checkpoint of another version of this program")
    require_fields(file, content, {"run": dict, "optimizer": dict, "shards": list[str]})
    require_fields(file, run, {name: kinds[name] for name in run})
    for name in ("step", "iteration"):
        if not 0 <= run.get(name, 0) < MAX_INT:
            expected = f"{name}: expected 0 or more and below {MAX_INT}"
            raise BadInput(f"{file}: {expected}, got {printable(run[name])}")
    return content


def read_state(folder: Path) -> tuple[RunState, dict]:
    """-> the run's state and the optimizer's numbers that are no tensors. Raises BadInput, also for a
    checkpoint of another version."""
    content = _read_state_file(folder)
    return RunState(**content["run"]), content["optimizer"]


def read_settings(folder: Path) -> dict:
    """settings.yaml of a checkpoint: groups of settings, of which those that all programs share have
    the right types. Raises BadInput."""
    file = folder / "settings.yaml"
    settings = read_object(file, parse_yaml)
    saved, kinds = flatten(settings), flatten(RunSettings)
    # read from any checkpoint; an older version may lack others
    needed = {"model", "data.train", "precision", "lora.rank"}
    require_fields(file, saved, {n: k for n, k in kinds.items() if n in saved or n in needed})
    return settings


def read_checkpoint_weights(folder: Path) -> LazyTensors:
    """The trained weights of a checkpoint, whole, each read when it is asked for. Without those of the
    objective's module."""
    weights = open_shards(folder, "weights")
    names = [name for name in weights if not name.startswith("objective_module.")]
    return rename_tensors(weights, {name: name for name in names})


def load_weights(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Put a checkpoint's weights into `weights`, sharded or not. Raises BadInput."""

    def place(name, like):
        if name not in weights or weights[name].shape != like.shape:
            raise BadInput(f"{folder}: {printable(name)}: not of this model")
        # it shares the weight's memory, so the shards are read into the weight itself
        return weights[name].detach()

    loaded = load_shards(folder, "weights", place)
    missing = [name for name, p in weights.items() if p.requires_grad and name not in loaded]
    if missing:
        raise BadInput(f"{folder}: holds no {missing[0]}: not of this model")


def load_checkpoint(fabric, folder: Path, policy, optimizer) -> None:
    """Put a checkpoint's weights, optimizer state and random state in place. Raises BadInput."""
    params = policy.unique_parameters()
    _, numbers = read_state(folder)

    def empty_moment(key: str, like):
        name, _moment = key.rsplit("|", 1)
        p = params[name]
        if p.shape == like.shape:  # sharded as the weight is
            return torch.zeros_like(p, dtype=like.dtype)
        return torch.zeros(like.shape, dtype=like.dtype, device=p.device)

    load_weights(folder, params)
    moments = load_shards(folder, "optimizer", empty_moment)
    for key, x in (moments | numbers).items():
        name, _, moment = key.rpartition("|")
        if name not in params:
            raise BadInput(f"{folder}: {printable(key)}: not of this model")
        optimizer.optimizer.state[params[name]][moment] = x
    random = load_shards(folder, "random", lambda _name, like: torch.empty_like(like, device="cpu"))
    state_R = random["state_R"]
    if len(state_R) == fabric.world_size:  # at another number of ranks they keep their own state
        with user_error(None, folder, RuntimeError):
            _generator(fabric).set_state(state_R[fabric.global_rank].clone())

"""Save, verify, resume: a checkpoint is a folder that is either whole or not there: written beside
its final name, fsynced, a manifest of hashes last, then renamed. (Fabric's own save moves a file
out of the temporary directory and can leave half of it under the final name.) Of a sharded run each
rank writes its part of weights and optimizer (see shards.py)."""

import inspect
import json
import sys
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from runs import shards
from runs.cli import dump_yaml
from runs.devices import all_reduce
from runs.errors import BadInput
from runs.files import publish_folder, verify_folder
from runs.settings import RunSettings
from runs.tensors import LazyTensors, is_sharded, open_safetensors, place_like, set_weights
from runs.tensors import write_safetensors as store

# what a folder of each kind must hold, and its manifest must name
SHARDED = ("weights.safetensors", "optimizer.safetensors")  # under fsdp: shard-*.safetensors
CHECKPOINT = (*SHARDED, "rng.safetensors", "state.json", "settings.yaml")


@dataclass
class RunState:
    """What changes during a run, besides weights, optimizer state and random numbers."""

    program: str = ""  # the file that was started
    source: str = ""  # a hash of it
    chat_template: str = ""  # the one that data.chat_template gave
    identity: dict[str, str] = field(default_factory=dict)  # hashes of model, tokenizer, data, ...
    step: int = 0  # optimizer steps done
    iteration: int = 0  # of SPIN and online KTO
    moved: bool = False  # the reference is the policy as it was when the iteration began
    started_from: str = ""  # fingerprint of the policy when the iteration began
    best_step: int | None = None  # by keep_best
    best_value: float | None = None
    objective: dict = field(default_factory=dict)  # Objective.state_dict()
    shards: int = 0  # files of a sharded checkpoint; 0: weights and optimizer lie there whole
    rows: dict = field(default_factory=dict)  # of metrics.csv and val.csv: [how many, their hash]

    def is_best(self, row: dict, name: str | None) -> bool:
        """Whether a row of val.csv is the best so far by this column; remembered if so. Step 0 has
        no checkpoint, and an empty cell of a checker is no value."""
        if name is None:
            return False
        value = row.get(name)
        if value is None and not (name == "checker_accuracy" and name in row):
            have = ", ".join(k for k, v in row.items() if v is not None)
            raise BadInput(f"keep_best: {name}: not in val.csv, which has {have}")
        if value is None or value != value or not self.step:  # NaN is above and below nothing
            return False
        low = name.split("/")[0] in ("loss", "preference_loss", "sft_loss", "kl")
        value = -value if low else value
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


# ---- tensors and files --------------------------------------------------------------------------


# ---- save and load ------------------------------------------------------------------------------


def save_checkpoint(
    fabric, out: Path, policy, optimizer, state: RunState, cfg: RunSettings
) -> None:
    """Everything a bit-identical continuation needs. A collective. Of a sharded run every rank
    writes its own part."""
    params = policy.unique_parameters()
    names = {id(p): name for name, p in params.items()}
    weights = {name: p.detach() for name, p in params.items() if p.requires_grad}
    tensors, numbers = {}, {}
    for p, states in optimizer.optimizer.state.items():
        for key, x in states.items():
            kind = tensors if isinstance(x, torch.Tensor) else numbers
            kind[f"{names[id(p)]}|{key}"] = x
    rng = _generator(fabric).get_state().to(fabric.device)
    rng_R = rng.new_zeros(fabric.world_size, len(rng))
    rng_R[fabric.global_rank] = rng
    whole, each = {"rng": {"rng": all_reduce(rng_R)}}, None
    kinds = {"weights": weights, "optimizer": tensors}
    if is_sharded(params):
        parts = {f"{kind}|{n}": x for kind, some in kinds.items() for n, x in some.items()}
        each = partial(shards.save_shards, tensors=parts)
    else:
        whole |= kinds

    def write(folder: Path):
        for name, some in whole.items():
            store(folder, LazyTensors(some, some.__getitem__), name)
        state.shards = len(list(folder.glob("shard-*")))
        (folder / "state.json").write_text(json.dumps({"run": asdict(state), "optimizer": numbers}))
        (folder / "settings.yaml").write_text(dump_yaml(cfg))

    publish_folder(fabric, write, out, each)


def _generator(fabric) -> torch.Generator:
    """What this rank's random numbers come from."""
    cuda = fabric.device.type == "cuda"
    return torch.cuda.default_generators[fabric.device.index] if cuda else torch.default_generator


def read_state(folder: Path) -> tuple[RunState, dict]:
    """(the run's state, the optimizer's numbers that are no tensors) of a checkpoint."""
    try:
        found = json.loads((folder / "state.json").read_text())
        found["run"]["rows"]  # as old as what is missing here would be the rest of it
        return RunState(**found["run"]), found["optimizer"]
    except (KeyError, TypeError):
        raise BadInput(f"resume: {folder}: written by another version of this program") from None


def verify_checkpoint(folder: Path) -> str | None:
    """None if whole, else what is wrong."""
    try:
        shards_of = read_state(folder)[0].shards
    except (OSError, ValueError, AttributeError, TypeError, LookupError) as e:
        return f"{type(e).__name__}: {e}"
    if not shards_of:
        return verify_folder(folder, CHECKPOINT)
    manifest = json.loads((folder / "manifest.json").read_text())
    if sum(name.startswith("shard-") for name in manifest) != shards_of:
        return "manifest.json names not all shards"
    return verify_folder(folder, set(CHECKPOINT).difference(SHARDED))


def read_checkpoint_tensors(folder: Path, kind: str) -> LazyTensors:
    """A checkpoint's weights, or its optimizer's state, whole."""
    file = folder / f"{kind}.safetensors"
    return open_safetensors(file) if file.exists() else shards.open_shards(folder, kind)


def load_checkpoint(fabric, folder: Path, policy, optimizer) -> None:
    """Put a checkpoint's weights, optimizer state and random numbers in place."""
    params, (state, numbers) = policy.unique_parameters(), read_state(folder)

    def like_its_weight(key: str, x):
        p = params[key.split("|")[0]]  # a moment is sharded as its weight is
        return torch.zeros_like(p if p.shape == x.shape else x, dtype=x.dtype, device=p.device)

    if state.shards and is_sharded(params):
        shards.load_shards(folder, "weights", lambda name, *_: params[name].detach())
        tensors = shards.load_shards(folder, "optimizer", like_its_weight)
    else:
        set_weights(policy, read_checkpoint_tensors(folder, "weights"))
        tensors = dict(read_checkpoint_tensors(folder, "optimizer"))
    for key, x in (tensors | numbers).items():
        name, kind = key.rsplit("|", 1)
        x = place_like(x, params[name]) if isinstance(x, torch.Tensor) else x
        optimizer.optimizer.state[params[name]][kind] = x
    rng_R = load_file(folder / "rng.safetensors")["rng"]
    if len(rng_R) == fabric.world_size:
        mine = rng_R[fabric.global_rank].clone()  # a view is read from its storage's start
        _generator(fabric).set_state(mine)


# ---- a run's folder -----------------------------------------------------------------------------

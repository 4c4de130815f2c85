"""A run on disk: its folder, its lock and its checkpoints, and the checks of a resume.

| in the run's folder | holds |
| --- | --- |
| checkpoints/step-N/*.safetensors | trained weights (all, if the base moved), moving reference, moments, random state |
| checkpoints/step-N/state.json | RunState |
| checkpoints/abandoned-step-N | a checkpoint of a later step than the one that the run went back to |
| settings.yaml, also in step-N/ | the settings; on top the records' hash, the commit and versions of the last start |
| metrics.csv, val.csv | rows; a resume removes those after its checkpoint's step |
| eval/ | validations and checks; after a resume those of later steps stay until they are written again |
| final, best, final_adapter | exported models (export.py) |
| iterations/ | SPIN and online KTO: answers and ratings (rollout.py) |
| wandb_id | under which id the run goes on at wandb |
| .lock | which process writes into the folder |

A checkpoint is written under a temporary name and then renamed, so a kill never leaves half a checkpoint. Every rank
writes and reads its own part (torch.distributed.checkpoint); nothing is gathered. The tensors are named
`kind|parameter`, where the kind is weights, reference or one of the optimizer's moments, and `random|rank`.
"""

import fcntl
import json
import math
import os
import shutil
import subprocess
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed.checkpoint as dcp
import yaml
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

from infra.console import BadInput, program_file, say, user_error
from infra.files import publish_folder, write_whole
from infra.random_numbers import generator_of
from infra.settings import (
    ROOT,
    RunSettings,
    changed_settings,
    dump_yaml,
    flatten,
    refuse,
    refuse_unless,
    resume_rules,
)

if TYPE_CHECKING:
    from run import Run

# dcp warns of a single process, and of no_dist=True; we want both
warnings.filterwarnings("ignore", "torch.distributed is disabled")


@dataclass
class RunState:
    """The part of a checkpoint that is not tensors."""

    hashes: dict[str, str] = field(default_factory=dict)
    """Hashes of the model, the reference, the tokenizer and the data, and the program's name. A resume must find the
    same ones."""
    code: str = ""
    """The hash of the program's files (program.py). After a resume by other files, both hashes, joined by a +."""
    step: int = 0
    """Optimizer steps done."""
    unvalidated: bool = False
    """Whether the validation of this step has begun but has not ended. A resume then validates first."""
    iteration: int = 0
    """The iteration of SPIN or online KTO, from 1."""
    iteration_sizes: list[int] = field(default_factory=list)
    """How many examples each iteration of spin.py or online.py has. For later ones it is the expected number."""
    reference_has_moved: bool = False
    """Whether the reference has been set anew (Run.new_reference). If so, with LoRA, the adapters of earlier steps have
    been merged into the base."""
    started_from: str = ""
    """Hash of the policy's weights when the iteration began."""
    best_step: int | None = None
    """The step of the best checkpoint by the setting keep_best."""
    best_score: float | None = None
    """The value of keep_best's column at best_step, negated where the lowest is best."""
    objective_state: dict = field(default_factory=dict)
    """Objective.state_dict()."""
    optimizer_numbers: dict[str, float] = field(default_factory=dict)
    """The numbers in the optimizer's state that are no tensors, by `moment|parameter`."""

    def remember_if_best(self, row: dict, column: str | None) -> bool:
        """Remember a row of val.csv if it is the best so far by this column. -> whether it is. A row of step
        0, which has no checkpoint, and a cell that is empty or not finite are never the best. Raises BadInput
        if val.csv has no such column."""
        if column is None:
            return False
        refuse_unless(
            column in row, f"keep_best: {column}: not in val.csv, which has {', '.join(row)}"
        )
        value = row[column]
        if value is None or not math.isfinite(value):
            return False
        lowest_is_best = column.endswith("loss") or column.split("/")[0] == "kl"
        score = -value if lowest_is_best else value
        if self.step == 0 or (self.best_score is not None and score <= self.best_score):
            return False
        self.best_step = self.step
        self.best_score = score
        return True


# ---- the run's folder ----------------------------------------------------------------------------


def checkpoints_by_step(out: Path) -> dict[int, Path]:
    """The checkpoints of a run by step, in order. A folder with another name, such as a copy that the user has made, is
    not one of them."""
    paths = sorted((out / "checkpoints").glob("step-" + 8 * "[0-9]"))
    return {int(path.name.removeprefix("step-")): path for path in paths}


def run_folder(cfg: RunSettings) -> Path:
    """The run's own folder: out_dir, or a new one that is named by program and time."""
    now = datetime.now()
    name = cfg.out_dir or f"out/{program_file().stem}-{now:%Y%m%d-%H%M%S-%f}"
    return Path(name).expanduser().resolve()


def checkpoint_folder(out: Path, step: int) -> Path:
    return out / "checkpoints" / f"step-{step:08d}"


def find_checkpoint(out: Path, resume: str | None) -> Path | None:
    """The checkpoint to resume in the folder `out`. Raises BadInput if two runs would be mixed."""
    path_of = checkpoints_by_step(out)
    if not resume:
        if path_of or (out / "metrics.csv").exists():
            raise BadInput(
                f"out_dir: {out} holds a run already: --resume auto continues it, another folder "
                "starts a new run"
            )
        return None
    if resume == "auto":
        return path_of[max(path_of)] if path_of else None
    checkpoint = Path(resume).expanduser().resolve()
    refuse_unless(
        checkpoint in path_of.values(), f"resume: {resume}: no checkpoint of the run in {out}"
    )
    return checkpoint


def take_folder(out: Path, resume: str | None) -> Path | None:
    """Make a run's folder, lock it for this process, and find the checkpoint. Raises BadInput."""
    with user_error("out_dir", out):
        out.mkdir(parents=True, exist_ok=True)
        lock = os.open(out / ".lock", os.O_CREAT | os.O_WRONLY)
        try:  # the lock lasts until this process ends, in whatever way
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(f"out_dir: {out}: in use by another process") from None
        except OSError:  # some file systems have none: Lustre without flock, NFS without lockd
            say(f"out_dir: {out}: no locks here: a second process in this folder would not be seen")
    return find_checkpoint(out, resume)


def check_resumed_settings(checkpoint: Path | None, cfg: RunSettings) -> None:
    """Raise BadInput for a resume with settings that would make another run."""
    if checkpoint is None:
        return
    saved = flatten(read_settings(checkpoint))
    new = flatten(cfg)
    changed = changed_settings(saved, new, resume_rules(type(cfg)))
    refuse([f"{name}: the run has {saved.get(name)}, you gave {new[name]}" for name in changed])


def begin_run(
    out: Path, checkpoint: Path | None, cfg: RunSettings, hashes: dict[str, str], code: str
) -> RunState:
    """Write the settings into the folder. A resume also renames the checkpoints of later steps. Returns the state that
    the run begins with. Raises BadInput for a resume by another program, with other models or with other records."""
    state = RunState(hashes=hashes, code=code)
    if checkpoint:
        state = read_state(checkpoint)
        changed = [name for name, x in hashes.items() if x != state.hashes.get(name)]
        refuse([f"{name}: not what this run began with" for name in changed])
        say(f"resumed from {checkpoint}")
        if code not in state.code.split("+"):
            say(f"the program has changed since step {state.step}: report.py keeps this run apart")
            state.code += f"+{code}"
        path_of = checkpoints_by_step(out)
        # the user may have removed the best checkpoint
        if state.best_step not in path_of:
            state.best_step = state.best_score = None
        for step, path in path_of.items():
            if step > state.step:  # made after the checkpoint that the run goes back to
                aside = path.with_name(f"abandoned-{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
    # the shell raises nothing if git is not installed
    describe = "git describe --always --dirty '--exclude=*'"
    git = subprocess.run(describe, shell=True, cwd=ROOT, capture_output=True, text=True)
    commit = git.stdout.strip() or "unknown"
    head = (
        f"# {hashes['program']}, code {state.code}, records {hashes['records'][:12]}, "
        f"commit {commit}, torch {torch.__version__}"
    )
    write_whole(out / "settings.yaml", f"{head}\n{dump_yaml(cfg)}")
    say(f"run folder: {out}")
    return state


# ---- save ----------------------------------------------------------------------------------------


def save_checkpoint(run: "Run") -> None:
    """Write a checkpoint of the current step, then remove old checkpoints. A collective. Raises Failed."""
    fabric = run.fabric
    state = run.state
    params = run.policy.unique_parameters()
    tensors = {}
    for name, p in params.items():
        # with LoRA a reference that has moved is the policy's own base
        if p.requires_grad or state.reference_has_moved:
            tensors[f"weights|{name}"] = p.detach()
    if state.reference_has_moved:
        for name, p in run.reference.own_weights().items():
            tensors[f"reference|{name}"] = p
    name_of = {p: name for name, p in params.items()}
    state.optimizer_numbers = {}
    for p, moments in run.optimizer.optimizer.state.items():
        for moment, x in moments.items():
            name = f"{moment}|{name_of[p]}"
            if isinstance(x, Tensor):
                # 8-bit AdamW has one table for all weights, and safetensors refuses shared memory
                tensors[name] = x.clone() if moment in ("qmap1", "qmap2") else x
            else:
                state.optimizer_numbers[name] = x
    tensors[f"random|{fabric.global_rank}"] = generator_of(fabric).get_state()
    # One file for each kind, because a rank holds the bytes of a whole file in memory. The list must be the same on all
    # ranks, so it names the random states of all ranks.
    names_of_random_states = [f"random|{rank}" for rank in range(fabric.world_size)]
    names = [*tensors, *names_of_random_states]
    kinds = sorted({name.split("|")[0] for name in names})
    file_of = {name: kinds.index(name.split("|")[0]) + 1 for name in names}

    def write(new: Path) -> None:
        writer = HuggingFaceStorageWriter(str(new), file_of, save_distributed=True)
        dcp.save(tensors, storage_writer=writer)
        if fabric.global_rank == 0:
            (new / "state.json").write_text(json.dumps(asdict(state)))
            (new / "settings.yaml").write_text(dump_yaml(run.cfg))
            if run.cfg.data.chat_template:  # for hub.Source.chat_template
                (new / "chat_template.jinja").write_text(run.tokenizer.template)
            if run.tokenizer.stops_of_template:  # for an export
                n_embeddings = run.policy.module.embedding.num_embeddings
                config = run.tokenizer.generation_config(n_embeddings)
                (new / "generation_config.json").write_text(config)

    folder = checkpoint_folder(run.folder, state.step)
    publish_folder(fabric, write, folder, on_every_rank=True)
    if fabric.global_rank == 0:
        _remove_old_checkpoints(run)


def save_state(run: "Run") -> None:
    """Write state.json of the last checkpoint again: its step has been validated since. On rank 0."""
    file = checkpoint_folder(run.folder, run.state.step) / "state.json"
    write_whole(file, json.dumps(asdict(run.state)))
    _remove_old_checkpoints(run)


def _remove_old_checkpoints(run: "Run") -> None:
    """Keep the newest keep_last checkpoints and the best one. On rank 0."""
    checkpoints = list(checkpoints_by_step(run.folder).items())
    for step, path in checkpoints[: -run.cfg.keep_last]:
        if step != run.state.best_step:
            # renamed first: a checkpoint that is half removed must not look like one
            path.rename(path.with_name(f".{path.name}.tmp"))
    # a killed process may have left such a folder
    for removed in (run.folder / "checkpoints").glob(".*.tmp"):
        shutil.rmtree(removed, ignore_errors=True)


# ---- read ----------------------------------------------------------------------------------------


def read_state(folder: Path) -> RunState:
    return RunState(**json.loads((folder / "state.json").read_text()))


def read_settings(folder: Path) -> dict:
    """settings.yaml of a run or a checkpoint, as groups of settings."""
    return yaml.safe_load((folder / "settings.yaml").read_text())


def read_tensors(
    folder: Path,
    place: Callable[[str, str, torch.Size, torch.dtype], Tensor | None],
) -> dict[str, Tensor]:
    """Read tensors of a checkpoint, and return them by `kind|name`. place(kind, name, size, dtype) returns the tensor
    to read into. It returns None if this tensor is not wanted. A rank reads the shards that it holds. Any number of
    ranks may have written them."""
    reader = HuggingFaceStorageReader(str(folder))
    tensors = {}
    for key, saved in reader.read_metadata().state_dict_metadata.items():
        kind, name = key.split("|")
        x = place(kind, name, saved.size, saved.properties.dtype)
        if x is not None:
            tensors[key] = x
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def load_checkpoint(run: "Run", folder: Path) -> None:
    """Put a checkpoint's weights, optimizer state, random state and moving reference in place."""
    params = run.policy.unique_parameters()
    moments = run.optimizer.optimizer.state
    rank = str(run.fabric.global_rank)

    def place(kind: str, name: str, size: torch.Size, dtype: torch.dtype) -> Tensor | None:
        if kind == "random":  # a rank that has no saved state keeps its present one
            return torch.empty(size, dtype=dtype) if name == rank else None
        p = run.reference.own_weights()[name] if kind == "reference" else params[name]
        if kind in ("weights", "reference"):
            return p.detach()  # shares the weight's memory, so reading changes the weight itself
        if p.shape == size:  # sharded as the weight is
            x = torch.zeros_like(p, dtype=dtype)
        else:
            x = torch.zeros(size, dtype=dtype, device=p.device)
        moments[p][kind] = x
        return x

    tensors = read_tensors(folder, place)
    for key, x in read_state(folder).optimizer_numbers.items():
        moment, name = key.split("|")
        moments[params[name]][moment] = x
    generator = generator_of(run.fabric)
    random_state = tensors.get(f"random|{rank}")
    # The states of CPUs and GPUs have different sizes: a run that moves between them begins a new sequence.
    if random_state is not None and random_state.shape == generator.get_state().shape:
        generator.set_state(random_state)

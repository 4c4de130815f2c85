"""The trackers of the setting `logger`: tensorboard and wandb."""

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from infra.console import user_error
from infra.files import write_whole
from infra.settings import RunSettings

Track = Callable[[int, dict], None]  # of a step, and its numbers by name


def open_tracker(cfg: RunSettings, first_step: int) -> Track:
    """-> what hands a step's numbers to the tracker. first_step: the first one that this process logs."""
    if cfg.logger == "wandb":
        return begin_wandb(cfg)
    return begin_tensorboard(Path(cfg.out_dir), first_step)


def begin_tensorboard(out: Path, first_step: int) -> Track:
    from lightning.fabric.loggers import TensorBoardLogger

    logger = TensorBoardLogger(
        out,
        "tensorboard",
        version="",
        # the default name has whole seconds: a quick resume would replace the file
        filename_suffix=f".{time.time_ns()}",
        # a killed process may have logged steps after its checkpoint: TensorBoard drops them
        purge_step=first_step or None,
        flush_secs=10,
    )
    return lambda step, numbers: logger.log_metrics(numbers, step)


def begin_wandb(cfg: RunSettings) -> Track:
    """A resume continues the same run of wandb. Raises BadInput."""
    import wandb

    out = Path(cfg.out_dir)
    id_file = out / "wandb_id"
    with user_error("logger: wandb (WANDB_MODE=offline needs no key)"):
        # wandb ends the run when Python exits, and marks it as crashed after an exception
        run = wandb.init(
            dir=out,
            config=asdict(cfg),
            name=os.environ.get("WANDB_NAME", out.name),
            id=id_file.read_text() if id_file.exists() else None,
            resume="allow",
        )
    write_whole(id_file, run.id)
    return lambda step, numbers: run.log(numbers, step=step)

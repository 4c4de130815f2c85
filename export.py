"""The exports of a run: final, best and final_adapter; and a program that exports any checkpoint.

    python export.py out/run/checkpoints/step-00000100 --out FOLDER

The folder is whole or not there. By default each weight has the type that it has in the files of the run's --model.
How a folder is written: models/export.py.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from lightning.fabric import Fabric

from infra.checkpoint import checkpoint_folder
from infra.console import BadInput, run_cli, say
from infra.files import publish_folder
from infra.settings import LocalPath, find_path, refuse_unless
from models.export import export_checkpoint, write_peft
from models.hub import Source, find_model
from models.lora import gather_adapters
from reference import AdaptersOff

if TYPE_CHECKING:
    from run import Run


def export_step(run: "Run", name: str, step: int) -> None:
    """Make the folder `name`, final or best, of the checkpoint of this step. A collective."""
    # the base is run.source: the folder that the checkpoint's settings name may have moved
    source = Source(checkpoint_folder(run.folder, step), run.source)
    publish_folder(run.fabric, partial(export_checkpoint, source), run.folder / name)


def export_adapters(run: "Run") -> None:
    """Write final_adapter, in PEFT's format, if a model on disk is the base of the run's adapters. A collective."""
    # a frozen reference moves without the base
    base_has_moved = run.state.reference_has_moved and isinstance(run.reference, AdaptersOff)
    if run.source.base or base_has_moved:
        return say("no final_adapter: PEFT needs a folder of its base, and no folder holds it")
    base = run.cfg.model  # its path or id
    if find_path(base).exists():
        base = str(run.source.root.resolve())
    adapters = gather_adapters(run.policy.module)

    def write(new: Path) -> None:
        write_peft(adapters, run.policy.module, base, run.cfg.lora, new)
        if run.cfg.data.chat_template:
            (new / "chat_template.jinja").write_text(run.tokenizer.template)

    publish_folder(run.fabric, write, run.folder / "final_adapter")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path, help="the checkpoint's folder")
    parser.add_argument("--out", type=LocalPath, required=True, help="where to write")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    args = parser.parse_args(argv)
    out = Path(args.out)
    if out.exists():
        raise BadInput(f"out: {out}: is there already")
    refuse_unless(
        (args.checkpoint / "state.json").exists(),
        f"checkpoint: {args.checkpoint}: not a checkpoint of a run",
    )
    dtype = getattr(torch, args.dtype) if args.dtype else None
    write = partial(export_checkpoint, find_model(str(args.checkpoint)), export_dtype=dtype)
    publish_folder(Fabric(accelerator="cpu", devices=1), write, out)
    print(f"exported to {out}")


if __name__ == "__main__":
    run_cli(main)

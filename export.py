"""Turn a checkpoint of a run, running, stopped or finished, into a Hugging Face folder.

    python export.py out/run/checkpoints/step-00000100 [--out FOLDER]

A PEFT folder is merged with its base in the same way. The folder is whole or not there, and has a
manifest with a hash of each file.
"""

import argparse
from functools import partial
from pathlib import Path

from lightning.fabric import Fabric

from runs.errors import BadInput, run_cli, user_error
from runs.files import publish_folder
from setup import export_checkpoint


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path, help="the checkpoint's folder")
    about = "where to write; default: beside the folder checkpoints/, by the step's name"
    parser.add_argument("--out", type=Path, help=about)
    args = parser.parse_args(argv)
    checkpoint = args.checkpoint.absolute()
    out = args.out or checkpoint.parent.parent / checkpoint.name
    if args.out is None and (checkpoint / "adapter_config.json").exists():
        raise BadInput("out: required: a PEFT folder does not lie in a run's folder")
    if out.exists():
        raise BadInput(f"out: {out}: is there already")
    with user_error("out", out):
        out.parent.mkdir(parents=True, exist_ok=True)
    write = partial(export_checkpoint, args.checkpoint)
    publish_folder(Fabric(accelerator="cpu", devices=1), write, out)
    print(f"exported to {out}")


if __name__ == "__main__":
    run_cli(main)

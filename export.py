"""Turn a checkpoint into a Hugging Face folder: of a run that goes on or was stopped, or its best.

    python export.py out/run/checkpoints/step-00000100 [--out FOLDER] [--dtype float32]

A PEFT folder is merged with its base in the same way.
"""

import argparse
from pathlib import Path

from runs.errors import BadInput, run_cli
from runs.settings import EXPORT_DTYPES
from setup import export_checkpoint


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path, help="its folder")
    about = "where to write; default: beside the folder checkpoints/, by the step's name"
    parser.add_argument("--out", type=Path, help=about)
    parser.add_argument("--dtype", choices=EXPORT_DTYPES, default="source", help="of the weights")
    args = parser.parse_args(argv)
    out = args.out or args.checkpoint.parent.parent / args.checkpoint.name
    if out.exists():
        raise BadInput(f"out: {out}: is there already")
    export_checkpoint(args.checkpoint, tmp := out.with_name(f".{out.name}.tmp"), args.dtype)
    tmp.rename(out)
    print(f"exported to {out}")


if __name__ == "__main__":
    run_cli(main)

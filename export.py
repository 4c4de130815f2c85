"""Turn a checkpoint into a Hugging Face folder. (PEFT's adapters: models/lora.py, at the end of a run.)

    python export.py out/run/checkpoints/step-00000100 --out FOLDER

The folder is whole or not there. By default each weight has the type that it has in the files of the run's --model.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
from lightning.fabric import Fabric

from infra.console import run_cli
from infra.files import publish_folder
from infra.settings import LocalPath, refuse_unless
from models.export import export_checkpoint
from models.hub import find_model


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path, help="the checkpoint's folder")
    parser.add_argument("--out", type=LocalPath, required=True, help="where to write")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    args = parser.parse_args(argv)
    out = Path(args.out)
    refuse_unless(not out.exists(), f"out: {out}: is there already")
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

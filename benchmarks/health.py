"""Six short runs of the demo, one healthy and five sick, and their picture for docs/health.md.

    OMP_NUM_THREADS=1 python benchmarks/health.py out/health    # five minutes; what is there is not run again

Each run has the settings of config/demo.yaml."""

import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from demo import make
from infra.files import as_lines, read_lines

ROOT = Path(__file__).parent.parent
RATINGS = ROOT / "demo" / "train.jsonl"
# a panel of a picture -> its columns
PANELS = {
    "loss": ["loss"],
    "rewards": ["rewards/chosen", "rewards/rejected"],
    "entropy": ["entropy"],
    "kl": ["kl"],
    "kl/own": ["kl/own"],
    "checker_accuracy": ["checker_accuracy"],
}
LOGARITHMIC = ("rewards", "kl", "kl/own")  # above 1 and below -1
# run -> the ratings that it learns from (see `ratings_of`), and its settings
RUNS = {
    "healthy": ("own", ""),
    "slow": ("own", "--optim.lr 7e-5"),
    "fast": ("own", "--optim.lr 7e-3"),
    "turned": ("turned", ""),
    "rare": ("rare", "--epochs 4"),
    "others": ("others", ""),
}


def ratings_of(kind: str, folder: Path) -> Path:
    """A file of the demo's ratings. own: as they are, of the model's own answers. others: 60% are of another author's
    answers. turned: with the labels turned round. rare: 10% thumbs up. noisy: 256 of them, a quarter turned round."""
    rows = read_lines(RATINGS)
    rng = random.Random(1)
    if kind == "own":
        return RATINGS
    if kind == "others":
        make.make(make.SORT, folder / kind, 0.6, ROOT / "demo" / "base")
        return folder / kind / "train.jsonl"
    if kind == "turned":
        rows = [row | {"label": not row["label"]} for row in rows]
    if kind == "rare":
        up = [row for row in rows if row["label"]]
        down = [row for row in rows if not row["label"]]
        rows = [*up[: len(down) // 9], *down]
        rng.shuffle(rows)
    if kind == "noisy":
        rows = [
            row | {"label": row["label"] != (rng.random() < 0.25)} for row in rng.sample(rows, 256)
        ]
    file = folder / f"{kind}.jsonl"
    file.write_text(as_lines(rows))
    return file


def run(name: str, ratings: Path, settings: str, folder: Path) -> str:
    """Run the demo on these ratings, unless it was. -> its log"""
    out = folder / name
    log = folder / f"{name}.log"
    if not (out / "final").exists():
        command = f"{sys.executable} kto.py --config config/demo.yaml --eval.check_interval 20"
        command += f" --progress false --resume auto {settings}"
        paths = [f"--data.train={ratings}", f"--out_dir={out}"]
        with open(log, "a") as file:
            subprocess.run([*command.split(), *paths], cwd=ROOT, stdout=file, check=True)
    return log.read_text()


def draw(panels: Sequence[Axes], out: Path) -> None:
    """The curves of a run in one row of panels: lines from metrics.csv, dots from val.csv."""
    metrics, val = (
        pd.read_csv(out / f"{name}.csv", index_col="step") for name in ("metrics", "val")
    )
    for panel, (title, columns) in zip(panels, PANELS.items()):
        for name, color in zip(columns, ("C0", "C1")):
            for kind, table, style in (("training", metrics, "-"), ("validation", val, "o")):
                if name in table:
                    label = kind if color == "C0" else f"{name}, {kind}"
                    line = table[name].dropna()
                    panel.plot(line, color + style, markersize=3, label=label)
        panel.set_title(title, fontsize=10)
        panel.set_yscale("symlog" if title in LOGARITHMIC else "linear")


def main() -> None:
    folder = Path(sys.argv[1]).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(16, 14), layout="constrained")
    rows = figure.subplots(len(RUNS), len(PANELS), sharex=True, sharey="col")
    for panels, (name, (kind, settings)) in zip(rows, RUNS.items()):
        run(name, ratings_of(kind, folder), settings, folder)
        draw(panels, folder / name)
        panels[0].set_ylabel(name, fontsize=14)
    handles = rows[0][1].get_legend_handles_labels()  # of the panel with two columns
    figure.legend(*handles, loc="outside upper center", ncols=4)
    figure.savefig(folder / "health.png", dpi=60)


if __name__ == "__main__":
    main()

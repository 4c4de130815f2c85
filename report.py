"""A table and a picture of runs.

    python report.py out/a out/b

Runs of one program that differ only in the seed are one group. The table has their mean and range. The picture draws
them in one colour: training as an exponential average over some five rows, validations as dots. Writes
report.png and report.csv (the numbers of each run) to the parent of the first run's folder.
"""

import argparse
import json
from pathlib import Path

import yaml

try:
    import pandas as pd
    from matplotlib import colormaps
    from matplotlib.figure import Figure
except ModuleNotFoundError as e:
    raise SystemExit(
        f"error: {e}: report.py and sweep.py need: pip install -e '.[report]'"
    ) from None

from infra.console import run_cli
from infra.settings import flatten

# The columns of metrics.csv and val.csv that are read. Each has a plot.
PLOTS = """loss rewards/margins accuracy checker_accuracy
entropy kl kl/clamped kl/own""".split()
ABOUT = """
rewards, kl: against the reference of the same run; code: a hash of the program's own files;
before: checker_accuracy at step 0; kl/clamped: share of the training steps;
test/: of the test split, by `final` and by `best`; the others: of the last validation after step 0 that has the number
(docs/columns.md)"""


def read_run(folder: Path) -> dict:
    """A run's settings by dotted name, and what else keeps two runs apart."""
    text = (folder / "settings.yaml").read_text()
    steps = read_csv(folder / "val.csv").index
    return {
        # "# kto.py, code ..., records ...": files of the same names may have changed
        "program": text.partition(", commit")[0].removeprefix("# "),
        # an unfinished run by the step of its last validation: no mean over different ones
        "ended": (folder / "final").exists() or f"step-{steps.max()}",
    } | flatten(yaml.safe_load(text))


def read_csv(file: Path) -> pd.DataFrame:
    """By step; a column that the run does not have is nan. The file is not there before its first row."""
    table = pd.read_csv(file, index_col="step") if file.exists() else pd.DataFrame()
    return table.reindex(columns=PLOTS).astype(float)


def read_test(folder: Path) -> dict[str, float]:
    """The numbers of the test split: test/final/accuracy, ..., and test/best/accuracy, ..."""
    file = folder / "eval" / "test.json"
    rows = json.loads(file.read_text()) if file.exists() else {}
    numbers = {}
    for which, row in rows.items():
        numbers |= {f"test/{which}/{name}": row[name] for name in PLOTS if name in row}
    return numbers


def group_names(settings: list[dict]) -> list[str]:
    """The settings of each run that differ among the runs, except the seed and the folder."""
    table = pd.DataFrame(settings, dtype=object).map(str)
    table = table.drop(columns=["seed", "out_dir"]).loc[:, lambda table: table.nunique() > 1]
    names = []
    for row in table.to_dict("records"):
        # nan: only other programs have this setting
        names.append(", ".join(f"{name}={x}" for name, x in row.items() if x != "nan"))
    return names


def mean_and_range(x: pd.Series) -> str:
    mean = f"{x.mean():.4g}"
    return f"{mean} ({x.min():.4g} to {x.max():.4g})" if len(x) > 1 else mean


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="run folders")
    folders = parser.parse_args(argv).folders
    names = group_names(map(read_run, folders))
    groups = list(dict.fromkeys(names))
    figure, numbers = Figure(figsize=(14, 7), layout="constrained"), []
    axes = figure.subplots(2, 4)
    for folder, name in zip(folders, names):
        color = colormaps["turbo"](groups.index(name) / len(groups))
        metrics, val = read_csv(folder / "metrics.csv"), read_csv(folder / "val.csv")
        for axis, column in zip(axes.flat, PLOTS):
            axis.set(title=column, xlabel="step")
            for table, style in ((metrics.ewm(5).mean(), "-"), (val, ".:")):
                axis.plot(table[column].dropna(), style, color=color)
        numbers.append(
            {
                "before": val["checker_accuracy"].get(0),
                # not step 0, which is before training and may be the only check so far
                **val[val.index > 0].ffill().tail(1).mean(),
                "kl/clamped": metrics["kl/clamped"].mean(),
                **read_test(folder),
            }
        )
    labels = [
        f"{i}: {group or folders[0]} (n={names.count(group)})" for i, group in enumerate(groups)
    ]
    # each run has drawn two lines, training and validation
    first_lines = [axes[0, 0].lines[2 * names.index(name)] for name in groups]
    figure.legend(first_lines, [label[:170] for label in labels], loc="outside lower center")
    out = folders[0].parent
    figure.savefig(out / "report.png")
    numbers = pd.DataFrame(numbers, folders).dropna(axis=1, how="all")
    numbers.to_csv(out / "report.csv")
    table = numbers.groupby(names, sort=False).agg(mean_and_range).reset_index(drop=True)
    print(*labels, "", table.T.to_string(line_width=80), ABOUT, sep="\n")
    print(f"wrote {out}/report.png, report.csv")


if __name__ == "__main__":
    run_cli(main)

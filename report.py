"""A table and a picture of runs.

    python report.py out/a out/b

Runs whose settings differ in the seed only are one group: the table has their mean and range, the picture
draws them in one colour. Writes report.md (the table, the picture, samples), report.png and report.csv
(the numbers of each run) beside the first run's folder.
"""

import argparse
import json
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import yaml
from matplotlib import colormaps
from matplotlib.figure import Figure

from runs.console import run_cli, user_error
from runs.settings import CUT_SETTINGS, FREE_SETTINGS, flatten

# The columns of metrics.csv and val.csv that are read. Each has a plot.
PLOTS = """loss rewards/margins accuracy checker_accuracy
entropy kl kl/clamped kl/own""".split()
ABOUT = """
before, after: % of the held-out answers that the checker accepts; gain: points;
length: characters of an answer after training; clamped: % of the training steps
in which z was clamped to 0; kl (z), kl/own, loss: of the last validation"""


class RunResults(NamedTuple):
    """What the report needs of a run folder."""

    folder: Path
    settings: dict  # by dotted name
    metrics: pd.DataFrame  # by step; a column that the run does not have is nan
    val: pd.DataFrame
    numbers: dict  # of the table
    samples: list[str]  # answers to the same prompts at the first and at the last validation


def read_table(file: Path) -> pd.DataFrame:
    """A csv file of a run, which is empty before its first row."""
    table = pd.read_csv(StringIO(file.read_text() or "step"), index_col="step")
    return table.reindex(columns=PLOTS).astype(float)


def read_run(folder: Path) -> RunResults:
    """Raises BadInput where the folder is not a run's."""
    with user_error(None, folder):
        text = (folder / "settings.yaml").read_text()
        metrics, val = read_table(folder / "metrics.csv"), read_table(folder / "val.csv")
    settings = flatten(yaml.safe_load(text))
    settings["program"] = text[2:].partition(",")[0]  # the first line: # kto.py, commit ...
    # a run that failed or was stopped is not averaged with finished ones
    settings["finished"] = (folder / "final").exists()
    first, last = val.query("step == 0").mean(), val.query("step > 0").ffill().tail(1).mean()
    before, after = 100 * first["checker_accuracy"], 100 * last["checker_accuracy"]
    numbers = {
        "steps": metrics.index.max(),
        "before": before,
        "after": after,
        "gain": after - before,
    }
    file = folder / "eval" / "after.json"
    if file.exists():
        answers = json.loads(file.read_text())["answers"]
        numbers["length"] = sum(len(x["completion"]) for x in answers) / len(answers)
    numbers["clamped"] = 100 * metrics["kl/clamped"].mean()
    numbers |= last[["kl", "kl/own", "loss"]]

    files = sorted(folder.glob("eval/step-*.json"), key=lambda file: int(file.stem[5:]))
    checks = [json.loads(file.read_text())["samples"] for file in files[:1] + files[-1:]]
    samples = [
        f"{old['prompt']!r}\n  before {old['completion']!r}\n  after  {new['completion']!r}"
        for old, new in zip(*checks)
    ]
    return RunResults(folder, settings, metrics, val, numbers, samples)


def group_runs(runs: list[RunResults]) -> dict[str, list[RunResults]]:
    """Runs by the settings in which they differ, but for the seed."""
    settings = pd.DataFrame([run.settings for run in runs], dtype=object).map(str)
    # a resume may change these; how a step is computed stays, for it changes the speed
    settings = settings.drop(columns=FREE_SETTINGS - CUT_SETTINGS, errors="ignore")
    # the same seed twice: the program may have changed in between, so no mean over both
    settings["copy"] = settings.groupby([*settings]).cumcount()
    settings = settings.drop(columns="seed").loc[:, lambda table: table.nunique() > 1]
    groups = {}
    for run, (_, row) in zip(runs, settings.iterrows()):
        name = ", ".join(f"{setting}={value}" for setting, value in row.items())
        groups.setdefault(name, []).append(run)
    return groups


def draw(axes, run: RunResults, color) -> None:
    """Add a run to all plots: of metrics.csv a running mean, of val.csv dots."""
    window = len(run.metrics) // 25 + 1
    mean = run.metrics.rolling(window, min_periods=1, center=True).mean()
    for ax, column in zip(axes.flat, PLOTS):
        ax.set_title(column)
        ax.plot(mean[column], color=color)
        ax.plot(run.val[column].dropna(), ".:", color=color)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, help="run folders")
    folders = parser.parse_args(argv).folders
    runs = [read_run(folder) for folder in folders]
    out = folders[0].parent
    pd.DataFrame([run.numbers for run in runs], index=folders).to_csv(out / "report.csv")
    groups = group_runs(runs)
    figure = Figure(figsize=(14, 7), layout="constrained")
    axes = figure.subplots(2, 4)
    names, rows, samples = [], {}, []
    for i, (settings, group) in enumerate(groups.items()):
        # runs of different programs differ in most settings: their folder says more
        is_short = 0 < len(settings) < 150
        names.append(f"{i}: {settings if is_short else group[0].folder}")
        numbers = pd.DataFrame([run.numbers for run in group])
        shown = ["mean", "min", "max"] if len(group) > 1 else ["mean"]
        rows[f"{i} n={len(group)}"] = numbers.agg(shown)
        color = colormaps["turbo"](i / len(groups))
        axes[0, 0].plot([], color=color, label=names[i])
        for run in group:
            draw(axes, run, color)
        samples += ["", f"samples of {names[i]}", *group[0].samples]
    figure.legend(loc="outside lower center")
    figure.savefig(out / "report.png")
    table = pd.concat(rows).dropna(axis=1, how="all").round(3)
    text = table.to_string(float_format="{:.4g}".format, na_rep="", line_width=80)
    lines = [*names, "", text, ABOUT]
    print("\n".join(lines))
    page = ["![curves](report.png)", "```", *lines, *samples, "```"]
    (out / "report.md").write_text("\n".join(page))
    print(f"wrote {out}/report.md, report.png, report.csv")


if __name__ == "__main__":
    run_cli(main)

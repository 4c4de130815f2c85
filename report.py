"""A table and a picture of runs.

    python report.py out/a out/b

Runs whose settings differ in the seed only are one group: the table has their mean and range, the picture
draws them in one colour. Writes report.md (the table, the picture), report.png and report.csv
(the numbers of each run) beside the first run's folder.
"""

import argparse
import json
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

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


def read_run(folder: Path) -> SimpleNamespace:
    """What the report needs of a run folder: settings (by dotted name), metrics and val (by step; a column that
    the run does not have is nan), numbers (of the table). Raises BadInput where the folder is not a run's."""
    tables = []
    with user_error(None, folder):
        text = (folder / "settings.yaml").read_text()
        for name in ("metrics.csv", "val.csv"):
            # a csv file is not there before its first row
            file = folder / name
            rows = file if file.exists() else StringIO("step")
            tables.append(pd.read_csv(rows, index_col="step").reindex(columns=PLOTS).astype(float))
    metrics, val = tables
    settings = flatten(yaml.safe_load(text))
    settings["program"] = text[2:].partition(",")[0]  # the first line: # kto.py, commit ...
    # a run that failed or was stopped is not averaged with finished ones
    settings["finished"] = (folder / "final").exists()
    first, last = val.query("step == 0").mean(), val.query("step > 0").ffill().tail(1).mean()
    before, after = 100 * first["checker_accuracy"], 100 * last["checker_accuracy"]
    numbers = dict(steps=metrics.index.max(), before=before, after=after, gain=after - before)
    file = folder / "eval" / "after.json"
    if file.exists():
        answers = pd.DataFrame(json.loads(file.read_text())["answers"])
        numbers["length"] = answers["completion"].str.len().mean()
    numbers["clamped"] = 100 * metrics["kl/clamped"].mean()
    numbers |= last[["kl", "kl/own", "loss"]]
    return SimpleNamespace(settings=settings, metrics=metrics, val=val, numbers=numbers)


def group_names(runs: list) -> list[str]:
    """For each run the settings in which the runs differ, but for the seed."""
    settings = pd.DataFrame([run.settings for run in runs], dtype=object).map(str)
    # a resume may change these; how a step is computed stays, for it changes the speed
    settings = settings.drop(columns=FREE_SETTINGS - CUT_SETTINGS, errors="ignore")
    # the same seed twice: the program may have changed in between, so no mean over both
    settings["copy"] = settings.groupby([*settings]).cumcount()
    settings = settings.drop(columns="seed").loc[:, lambda table: table.nunique() > 1]
    rows = settings.iterrows()
    return [", ".join(f"{setting}={x}" for setting, x in row.items()) for _, row in rows]


def mean_and_range(x: pd.Series) -> str:
    if x.isna().all():
        return ""
    mean, least, most = (f"{number:.4g}" for number in (x.mean(), x.min(), x.max()))
    return f"{mean} ({least} to {most})" if len(x) > 1 else mean


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, help="run folders")
    folders = parser.parse_args(argv).folders
    runs, out = {folder: read_run(folder) for folder in folders}, folders[0].parent
    numbers = pd.DataFrame([run.numbers for run in runs.values()], index=list(runs))
    numbers.to_csv(out / "report.csv")
    groups = numbers.groupby(group_names(runs.values()), sort=False)
    table = groups.agg(mean_and_range)
    table.index = [f"{i} n={n}" for i, n in enumerate(groups.size())]
    figure = Figure(figsize=(14, 7), layout="constrained")
    axes = figure.subplots(2, 4).flatten()
    names = []
    for i, (settings, own) in enumerate(groups):
        # runs of different programs differ in most settings: their folder says more
        names.append(f"{i}: {settings if 0 < len(settings) < 150 else own.index[0]}")
        color = colormaps["turbo"](i / len(groups))
        axes[0].plot([], color=color, label=names[i])
        for folder in own.index:  # of metrics.csv a running mean, of val.csv dots
            metrics, val = runs[folder].metrics, runs[folder].val
            mean = metrics.rolling(len(metrics) // 25 + 1, min_periods=1, center=True).mean()
            for ax, column in zip(axes, PLOTS):
                ax.set_title(column)
                ax.plot(mean[column], color=color)
                ax.plot(val[column].dropna(), ".:", color=color)
    figure.legend(loc="outside lower center")
    figure.savefig(out / "report.png")
    lines = [*names, "", table.T.to_string(line_width=80), ABOUT]
    print("\n".join(lines))
    page = ["![curves](report.png)", "```", *lines, "```"]
    (out / "report.md").write_text("\n".join(page))
    print(f"wrote {out}/report.md, report.png, report.csv")


if __name__ == "__main__":
    run_cli(main)

"""Curves and tables of one run or many, as one page that needs no network.

    python report.py out/a out/b    # report.html, report-svg/*.svg, and a table here

Runs that differ only in their seed become one line. To add a plot, add a line
to PLOTS.
"""

import argparse
import io
import json
import sys
from collections import namedtuple
from html import escape
from itertools import cycle
from pathlib import Path

import yaml

from runs.errors import BadInput, parse_file, run_cli, user_error
from runs.settings import flatten

try:
    import pandas as pd
    from matplotlib import rc_context
    from matplotlib.figure import Figure
except ImportError as e:
    print(f"error: report: {e.name} is missing: pip install '.[report]'", file=sys.stderr)
    sys.exit(2)

# Title: columns, the second dotted. Of a column x, x/stderr widens the band, x/clamped = 1
# puts ticks above the plot. Columns that are not here come under "Other columns".
PLOTS = {
    "loss": ["loss"],
    "rewards": ["rewards/chosen", "rewards/rejected"],
    "margin": ["rewards/margins"],
    "kl": ["kl"],
    "accuracy": ["accuracy"],
    "auc": ["auc"],
    "checker": ["checker_accuracy"],
    "tokens/s": ["tokens/s"],
    "memory": ["memory_gb"],
}
NUMBERS = {"step": "steps"} | {v[0]: k for k, v in PLOTS.items() if k != "rewards"}
DRAWN = ["epoch", "samples", "kl/stderr", "kl/clamped", *sum(PLOTS.values(), [])]
BOOKKEEPING = ["out_dir", "resume", "logger", "project", "progress", "keep_last"]
COLOURS = "#2e7fd6 #d9680b #239b56 #d8436a #8f67dc #0f96a3 #a06c3c #cf55b4".split()
DASHES = {"-": "━━", "--": "╍╍", "-.": "━╍"}
LOOKS = [(colour, dash) for dash in DASHES for colour in COLOURS]
INK = "#010101"  # the page puts its own here, light or dark; COLOURS are seen on both
STYLE = {f"{x}.color": INK for x in ("text", "xtick", "ytick")}
STYLE |= {"axes.edgecolor": INK, "axes.labelcolor": INK, "grid.color": "#8885"}
STYLE |= {"axes.grid": True, "savefig.transparent": True, "font.size": 9}
STYLE |= {"svg.fonttype": "none", "text.parse_math": False}
T = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262]  # Student's, 97.5%
ABOUT = """train: end of the running mean over 4% of the rows; val: last validation;
±: 95% interval of the mean over n runs, by Student's t"""
LEGEND = """Lines: running means; light: the rows; dots: validation. Bands: smallest to largest
of a group's runs, for kl (that is z) with its standard error. Ticks above kl: steps where z
was clamped to 0. Dotted: rewards/rejected."""
CSS = """:root { color-scheme: light dark }
body { font: 15px/1.4 system-ui; max-width: 1500px; margin: auto; padding: 0 14px }
nav { position: sticky; top: 0; background: canvas; max-height: 25vh; overflow: auto }
nav span { display: inline-block; margin-right: 16px }
section { display: grid; grid-template-columns: repeat(auto-fill, minmax(300px, 1fr)) }
svg { width: 100%; height: auto } div { overflow-x: auto }
table { border-collapse: collapse } td, th { padding: 2px 6px; text-align: left }
td { white-space: pre-wrap }"""
Run = namedtuple("Run", "path seed settings tables samples")
Groups = dict[str, list[Run]]  # by label


def settings_of(text: str) -> dict[str, str]:
    node = yaml.safe_load(text)
    if not isinstance(node, dict):
        raise ValueError("expected settings as `name: value`")
    return {name: repr(x) for name, x in sorted(flatten(node).items()) if name not in BOOKKEEPING}


def rows(text: str) -> pd.DataFrame:
    whole = text[: text.rfind("\n") + 1]  # a kill tears the last line
    table = pd.read_csv(io.StringIO(whole or "step\n"))
    table = table.apply(pd.to_numeric, errors="coerce").astype(float)
    return table.groupby("step").last().dropna(axis=1, how="all")


def read_answers_of(text: str) -> tuple[dict, float | None]:
    """{prompt: completion}, and the share that a checker found right."""
    node = json.loads(text)
    share = node["right"] / node["of"] if node.get("of") else None
    pairs = node.get("answers") or node["samples"]
    return {x["prompt"]: x["completion"] for x in pairs}, share


def read_run(folder: str) -> Run:
    path = Path(folder)
    settings = parse_file("settings", path / "settings.yaml", settings_of)
    settings["finished"] = str((path / "final").exists())  # no mean over both kinds
    raw, file = parse_file("metrics", path / "metrics.csv", rows), path / "val.csv"
    if raw.empty:
        raise BadInput(f"metrics: {path / 'metrics.csv'}: no rows yet")
    val = parse_file("val", file, rows) if file.exists() else rows("")
    files = {file.stem: file for file in path.glob("eval/*.json")}
    first = files.get("before") or files.get("step-0")
    last = files.get("after") or files.get(f"step-{val.loc[1:].index.max():.0f}")
    before, was = parse_file(first.stem, first, read_answers_of) if first else ({}, None)
    after, became = parse_file(last.stem, last, read_answers_of) if last else ({}, None)
    if "checker_accuracy" not in val:
        shares = pd.Series({0: was, raw.index[-1]: became}, name="checker_accuracy")
        shares = shares.dropna().astype(float)
        val = val.join(shares, how="outer").dropna(axis=1, how="all")
    samples = pd.DataFrame({"before": before, "after": after}).dropna()[:8]
    mean = raw.rolling(len(raw) // 25 + 1, min_periods=1, center=True).mean()
    tables = {"raw": raw, "train": mean, "val": val}
    return Run(folder, settings.pop("seed", None), settings, tables, samples)


def grouped(runs: list[Run]) -> tuple[Groups, pd.DataFrame]:
    """-> groups by label, and the settings in which they differ. The same seed
    again, as of a copied program, begins another group."""
    teams = {}
    for i, run in enumerate(runs):
        again = sum((r.seed, r.settings) == (run.seed, run.settings) for r in runs[:i])
        teams.setdefault(repr((again, run.settings)), []).append(run)
    differ = pd.DataFrame([team[0].settings for team in teams.values()]).fillna("")
    differ = differ.loc[:, differ.nunique() > 1].T
    labels = [", ".join(f"{n}={v}" for n, v in differ[i].items()) for i in differ]
    if not 0 < len(differ) < 5 or len(set(labels)) < len(labels):
        labels = [", ".join(run.path for run in team) for team in teams.values()]
    return {f"{i}: {labels[i]}": team for i, team in enumerate(teams.values())}, differ


def numbers(groups: Groups) -> pd.DataFrame:
    """Rows for train and val of each group: means, and below them their
    intervals."""
    found = []
    for i, runs in enumerate(groups.values()):
        for part in ("train", "val"):
            last = pd.concat([run.tables[part].loc[1:].ffill().tail(1) for run in runs])
            if len(last) < len(runs):
                continue
            last = last.rename_axis("step").reset_index().reindex(columns=NUMBERS)
            n, mean = len(runs), last.mean(skipna=False).dropna()
            found.append({"": f"{i}\u00a0{part}", "n": f"{n}", **mean.map(format_number)})
            if n > 1:
                t = T[n - 2] if n < 11 else 1.96 + 2.6 / (n - 1)
                half = t * last.sem(skipna=False).dropna()
                found.append({"": "±", **half.map(format_number)})
    table = pd.DataFrame(found, columns=["", "n", *NUMBERS])
    return table.dropna(axis=1, how="all").fillna("").rename(columns=NUMBERS)


def format_number(x: float) -> str:
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{round(x, 4) + 0:.4g}"


def spread(runs: list[Run], part: str, column: str) -> pd.DataFrame:
    """By step: the mean, smallest and largest of the runs that have a value
    there."""
    names = [column, f"{column}/stderr"]
    tables = {run.path: run.tables[part].reindex(columns=names) for run in runs}
    y, error = (pd.DataFrame({k: t[name] for k, t in tables.items()}) for name in names)
    low = y.sub(error, fill_value=0).min(axis=1)
    high = y.add(error, fill_value=0).max(axis=1)
    band = pd.DataFrame({"mean": y.mean(axis=1), "low": low, "high": high})
    return band.dropna()[:: len(band) // 500 + 1]


def draw(groups: Groups, columns: list[str], file: Path) -> str:
    """The figure of some columns, with a legend into a file. -> SVG for the
    page, without."""
    figure = Figure(figsize=(4.2, 2.6), layout="constrained")
    ax, faint = figure.subplots(), 0.3 / len(sum(groups.values(), [])) ** 0.5
    above = {"transform": ax.get_xaxis_transform(), "clip_on": False}
    for i, ((label, runs), (colour, dash)) in enumerate(zip(groups.items(), cycle(LOOKS))):
        ax.plot([], dash, color=colour, label=label[:50])
        for column, line in zip(columns, (dash, ":")):
            y, v = (spread(runs, part, column) for part in ("train", "val"))
            ax.plot(y["mean"], line, color=colour)
            ax.fill_between(y.index, y.low, y.high, color=colour, alpha=0.2, lw=0)
            ax.plot(v["mean"], "o" if len(y) else f"o{line}", ms=3, color=colour)
            ax.vlines(v.index, v.low, v.high, color=colour)
            for run in runs:
                raw = run.tables["raw"].reindex(columns=[column, f"{column}/clamped"])
                ax.plot(raw[column], color=colour, alpha=faint, lw=0.6)
                ticks = raw.index[raw[f"{column}/clamped"] == 1]
                ticks = ticks[:: len(ticks) // 500 + 1]
                ax.plot(ticks, 0 * ticks + 1.03 + i % 8 / 25, "|", color=colour, ms=3, **above)
    ax.set(xlabel="step", ylabel="\n".join(c[:34] for c in columns))
    bare = io.StringIO()
    figure.savefig(bare, format="svg")
    figure.legend(loc="upper center", bbox_to_anchor=(0.5, 0))
    figure.savefig(file, bbox_inches="tight")
    return "<svg" + bare.getvalue().partition("<svg")[2].replace(INK, "currentColor")


def write_page(groups: Groups, differ: pd.DataFrame, out: Path) -> None:
    folder = out.with_name(f"{out.stem}-svg")
    folder.mkdir(parents=True, exist_ok=True)
    runs = sum(groups.values(), [])
    columns = {c for run in runs for table in run.tables.values() for c in table}
    others = {f"other-{c}": [c] for c in sorted(columns) if c not in DRAWN}
    svgs = {}
    with rc_context(STYLE):
        for name, wanted in (PLOTS | others).items():
            file = folder / f"{name.replace('/', '-')}.svg"
            svgs[name] = draw(groups, wanted, file) if columns & set(wanted) else ""
    html = ["<!doctype html><meta charset=utf-8><title>Report</title>"]
    html += ["<meta name=viewport content='width=device-width'>"]
    html += ["<style>", CSS, "</style><nav>"]
    for label, (colour, dash) in zip(groups, cycle(LOOKS)):
        key = f"<b style='color:{colour}'>{DASHES[dash]}</b>"
        html += [f"<span>{key} {escape(label)}</span>"]
    html += ["</nav><p>", LEGEND, "<section>", *(svgs[name] for name in PLOTS), "</section>"]
    html += ["<h2>Final numbers</h2><div>", numbers(groups).to_html(index=False), "</div>"]
    html += ["<p>", ABOUT]
    for label, runs in groups.items():
        html += [f"<h2>Samples of {escape(label)}</h2><div>", runs[0].samples.to_html(), "</div>"]
    if len(differ):
        html += ["<h2>Settings that differ</h2><div>", differ.to_html(), "</div>"]
    else:
        seeds = " ".join(f"{run.seed}" for run in runs)
        table = pd.Series({"seed": seeds} | runs[0].settings)
        html += ["<h2>Settings</h2><details>"]
        html += [table.to_frame().to_html(header=False), "</details>"]
    html += ["<h2>Other columns</h2><section>", *(svgs[name] for name in others)]
    out.write_text("\n".join(html), encoding="utf-8")
    print(f"{out}, {folder}/*.svg")


def main(argv: list[str] | None = None, skip: bool = False) -> None:
    """`skip`: a folder that cannot be read is left out, in one line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("folders", nargs="+", help="run folders")
    about = "the page; plots go beside it (%(default)s, report-svg/)"
    page = Path("report.html")
    parser.add_argument("--out", type=Path, default=page, help=about)
    args = parser.parse_args(argv)
    runs = []
    for folder in dict.fromkeys(str(Path(folder)) for folder in args.folders):
        try:
            runs.append(read_run(folder))
        except BadInput as e:
            if not skip:
                raise
            print(f"left out of the report: {e}")
    if not runs:
        return
    groups, differ = grouped(runs)
    print(*(label[:80] for label in groups), sep="\n")
    print(numbers(groups).to_string(index=False, line_width=80), ABOUT, sep="\n")
    with user_error("out", args.out, OSError):
        write_page(groups, differ, args.out)


if __name__ == "__main__":
    run_cli(main)

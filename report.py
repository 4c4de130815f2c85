"""Curves and tables of one run or many, as one page that needs no network.

    python report.py out/a out/b    # report.html, report-svg/*.svg, and a table here

Runs that differ only in their seed become one line. To add a plot, add a line
to PLOTS.
"""

import argparse
import io
import json
import re
import sys
from html import escape
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

from runs.console import wilson_interval
from runs.errors import BadInput, parse_file, run_cli, user_error
from runs.settings import MAX_FLOAT, RunSettings, flatten
from runs.small_files import has_type, parse_yaml

try:
    import pandas as pd
    from matplotlib import rc_context
    from matplotlib.figure import Figure
except ImportError as e:
    print(f"error: report: {e.name} is missing: pip install '.[report]'", file=sys.stderr)
    sys.exit(2)

# Title of a plot -> its columns of metrics.csv and val.csv; the second column is dotted. For a
# column x, x/stderr widens the band, and x/clamped = 1 puts a tick above the plot. Columns that
# are not here have a plot each under "Other columns".
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
# Column -> its heading in the table of final numbers.
NUMBERS = {"step": "steps"}
NUMBERS |= {columns[0]: title for title, columns in PLOTS.items() if title != "rewards"}
# Columns that have no plot under "Other columns".
DRAWN = {column for columns in PLOTS.values() for column in columns}
DRAWN |= {"epoch", "samples", "kl/stderr", "kl/clamped"}
# Settings in which runs of one group may differ, besides the seed.
BOOKKEEPING = ["out_dir", "resume", "logger", "project", "progress", "keep_last"]

COLOURS = "#2e7fd6 #d9680b #239b56 #d8436a #8f67dc #0f96a3 #a06c3c #cf55b4".split()
DASHES = {"-": "━━", "--": "╍╍", "-.": "━╍"}  # matplotlib's line style -> the page's legend
LOOKS = [(colour, dash) for dash in DASHES for colour in COLOURS]  # of one group after another
# Stands for the colour of text and axes. The page replaces it by its own text colour, which is
# light or dark; the COLOURS can be seen on both.
INK = "#010101"
STYLE = {
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "grid.color": "#8885",
    "axes.grid": True,
    "savefig.transparent": True,
    "font.size": 9,
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # a column's name with $ in it is not a formula
}
CSS = """:root { color-scheme: light dark }
body { font: 15px/1.4 system-ui; max-width: 1500px; margin: auto; padding: 0 14px }
nav { position: sticky; top: 0; background: canvas; max-height: 25vh; overflow: auto }
nav span { display: inline-block; margin-right: 16px }
section { display: grid; grid-template-columns: repeat(auto-fill, minmax(300px, 1fr)) }
svg { width: 100%; height: auto } div { overflow-x: auto }
table { border-collapse: collapse } td, th { padding: 2px 6px; text-align: left }
td { white-space: pre-wrap }"""
LEGEND = """Lines: running means; faint lines: single rows; dots: validation. Bands: from the
smallest to the largest run of a group; for kl (which is z) with its standard error. Ticks above
kl: steps where z was clamped to 0. Dotted: rewards/rejected."""
# Above the plots of groups that differ in a setting of the algorithm's own.
OTHER_OBJECTIVES = """The runs differ in {}: their losses and rewards are of different objectives.
Compare the course of two such lines, not their height."""
ABOUT = """train: mean of the last 2% of the rows; val: last validation;
±: 95% confidence interval of the mean over n runs, by Student's t;
each: the two values, where n is 2 (the interval would be 12.7 standard errors)"""
ABOUT_CHECKER = """Share of the answers that the checker accepts: its 95% interval (Wilson 1927) over the
answers, which are of one run, and right of all. Gain in points."""

# 97.5% quantiles of Student's t for 2, ..., 9 degrees of freedom.
STUDENT_T = [4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262]
# What neither XML nor UTF-8 can hold: control characters, halves of surrogate pairs.
UNPRINTABLE = re.compile(
    "[^\t\n\r -~\x85\xa0-\ud7ff\ue000-\ufdcf\ufdf0-\ufffd\U00010000-\U0010ffff]"
)


class RunResults(NamedTuple):
    """What the report shows of a run folder."""

    path: str
    seed: str | None
    settings: dict[str, str]  # dotted name -> value; without the seed and BOOKKEEPING
    tables: dict[str, pd.DataFrame]  # by step: raw (metrics.csv), train (running mean of raw), val
    samples: pd.DataFrame  # by prompt: the answers before and after training
    about: dict[str, str]  # program, the line that names it with commit and versions, model, data
    checks: tuple["Check", "Check"]  # before and after training


# "all", or "field=value" of a part -> [right, of]; a checker that gives parts of 1 makes right a float
Counts = dict[str, list]


class Check(NamedTuple):
    """What a file of RUN/eval holds."""

    answers: dict[str, str]  # prompt -> completion
    counts: Counts  # empty in a file of samples, which no checker has seen


Groups = dict[str, list[RunResults]]  # label -> runs with equal settings


# ---- reading a run folder -----------------------------------------------------------------------


def visible(text) -> str:
    """A text in which what neither XML nor UTF-8 can hold is escaped, as \\x00."""
    return UNPRINTABLE.sub(lambda match: repr(match[0])[1:-1], str(text))


def parse_settings(text: str) -> dict[str, str]:
    """settings.yaml as {dotted name: value as text}, without BOOKKEEPING."""
    tree = parse_yaml(text)
    if not isinstance(tree, dict):
        raise ValueError("expected settings as `name: value`")
    settings = {}
    for name, value in sorted(flatten(tree).items()):
        if name not in BOOKKEEPING:
            settings[visible(name)] = repr(value)
    return settings


def parse_table(text: str) -> pd.DataFrame:
    """metrics.csv or val.csv as numbers by step; columns without any number are left out, and so are
    numbers that no run means (1e308: it has no mean with its like)."""
    complete_lines = text[: text.rfind("\n") + 1]  # a killed run may leave half a line at the end
    table = pd.read_csv(io.StringIO(complete_lines or "step\n")).rename(columns=visible)
    table = table.apply(pd.to_numeric, errors="coerce").astype(float)
    table = table.where(table.abs() < MAX_FLOAT)
    return table.groupby("step").last().dropna(axis=1, how="all")


def parse_answers(text: str) -> Check:
    """A file of RUN/eval."""
    content = json.loads(text)
    counts = {}
    if content.get("of"):
        counts["all"] = [content["right"], content["of"]]
        for field, parts in content.get("by", {}).items():  # of data.extra's fields
            counts |= {visible(f"{field}={value}"): pair for value, pair in parts.items()}
    for name, pair in counts.items():
        if not has_type(pair, tuple[float, int]) or not 0 <= pair[0] <= pair[1] or pair[1] == 0:
            raise ValueError(f"{name}: expected [right, of], got {pair}")
    pairs = content.get("answers") or content["samples"]
    return Check({visible(x["prompt"]): visible(x["completion"]) for x in pairs}, counts)


def read_eval_file(file: Path | None) -> Check:
    """What parse_answers returns of a file; nothing when there is no file."""
    if file is None:
        return Check({}, {})
    return parse_file(visible(file.stem), file, parse_answers, at_most=2**32)


def read_run(folder: str) -> RunResults:
    """Read a run folder. Raises BadInput when a file is missing or broken, or has no rows."""
    path = Path(folder)
    settings = parse_file("settings", path / "settings.yaml", parse_settings)
    about = {name: settings.get(name, "").strip("'\"") for name in ("model", "data.train")}
    made_by = visible((path / "settings.yaml").read_text().partition("\n")[0])
    if made_by.startswith("# "):  # which program wrote it, its commit and versions
        about = {"program": made_by[2:].partition(",")[0], "made by": made_by[2:]} | about
        settings["program"] = repr(about["program"])
    seed = settings.pop("seed", None)
    # This entry keeps finished and unfinished runs in different groups: no mean over both.
    settings["finished"] = str((path / "final").exists())

    raw = parse_file("metrics", path / "metrics.csv", parse_table, at_most=2**32)
    if raw.empty:
        raise BadInput(f"metrics: {path / 'metrics.csv'}: no rows yet")
    window = len(raw) // 25 + 1
    train = raw.rolling(window, min_periods=1, center=True).mean()

    val, val_file = parse_table(""), path / "val.csv"
    if val_file.exists():
        val = parse_file("val", val_file, parse_table, at_most=2**32)
    last_validation = val.loc[1:].index.max()  # nan when there is none

    files = {file.stem: file for file in path.glob("eval/*.json")}
    first = files.get("before") or files.get("step-0")
    last = files.get("after") or files.get(f"step-{last_validation:.0f}")
    before, after = checks = read_eval_file(first), read_eval_file(last)
    samples = pd.DataFrame({"before": before.answers, "after": after.answers}).dropna()[:8]
    if "checker_accuracy" not in val:
        shares = {}
        for step, check in ((0, before), (raw.index[-1], after)):
            if "all" in check.counts:
                right, of = check.counts["all"]
                shares[step] = right / of
        shares = pd.Series(shares, name="checker_accuracy", dtype=float)
        val = val.join(shares, how="outer").dropna(axis=1, how="all")

    tables = {"raw": raw, "train": train, "val": val}
    return RunResults(visible(folder), seed, settings, tables, samples, about, checks)


def group_runs(runs: list[RunResults]) -> tuple[Groups, pd.DataFrame]:
    """Groups of runs with equal settings, and a table of the settings in which the groups differ
    (a row for each setting, a column for each group).

    A second run with the same settings and the same seed begins another group, because it comes from
    another program, such as a copy of kto.py with another loss.
    """
    groups = {}
    for i, run in enumerate(runs):
        twins = [r for r in runs[:i] if r.seed == run.seed and r.settings == run.settings]
        key = (len(twins), repr(run.settings))
        groups.setdefault(key, []).append(run)

    differ = pd.DataFrame([group[0].settings for group in groups.values()]).fillna("")
    differ = differ.loc[:, differ.nunique() > 1].T
    labels = []
    for i in differ:
        labels.append(", ".join(f"{name}={value}" for name, value in differ[i].items()))
    is_short = 0 < len(differ) < 5
    if not is_short or len(set(labels)) < len(labels):
        labels = [", ".join(run.path for run in group) for group in groups.values()]
    labelled = {}
    for i, (label, group) in enumerate(zip(labels, groups.values())):
        labelled[f"{i}: {label}"] = group
    return labelled, differ


# ---- numbers ------------------------------------------------------------------------------------


def student_t(n: int) -> float:
    """The 97.5% quantile of Student's t for n >= 3 values; within 0.4% from 11 values on."""
    degrees = n - 1
    if degrees <= len(STUDENT_T) + 1:
        return STUDENT_T[degrees - 2]
    return 1.96 + 2.6 / degrees


def final_numbers(groups: Groups) -> pd.DataFrame:
    """The last numbers of each group as texts: a row for train and a row for val with the mean over
    its runs, and below each of them the half width of its 95% confidence interval; of two runs
    both values."""
    rows = []
    for i, runs in enumerate(groups.values()):
        for part in ("train", "val"):
            # From step 1 on: a validation at step 0 is not a result of training.
            last = pd.concat([run.tables[part].loc[1:].ffill().tail(1) for run in runs])
            if len(last) < len(runs):  # some runs have no row: a mean would not be of the group
                continue
            last = last.rename_axis("step").reset_index().reindex(columns=NUMBERS)
            n = len(runs)
            mean = last.mean(skipna=False).dropna()
            rows.append({"": f"{i}\u00a0{part}", "n": str(n), **mean.map(format_number)})
            if n == 2:
                both = last.dropna(axis=1).map(format_number)
                rows.append({"": "each", **both.agg(", ".join)})
            if n > 2:
                half_width = student_t(n) * last.sem(skipna=False).dropna()
                rows.append({"": "±", **half_width.map(format_number)})
    table = pd.DataFrame(rows, columns=["", "n", *NUMBERS])
    return table.dropna(axis=1, how="all").fillna("").rename(columns=NUMBERS)


def checker_table(groups: Groups) -> pd.DataFrame:
    """What the checker says of each run's answers before and after training: a row for all of them and
    for each of their parts."""
    rows = []
    for i, runs in enumerate(groups.values()):
        for run in runs:
            before, after = (check.counts for check in run.checks)
            for part in before | after:
                row = {"": str(i), "run": run.path, "answers": part}
                shares = []
                for title, counts in (("before", before), ("after", after)):
                    if part in counts:
                        right, of = counts[part]
                        low, high = (100 * x for x in wilson_interval(right, of))
                        shares.append(100 * right / of)
                        interval = f"({low:.1f} to {high:.1f}), {format_number(right)} of {of:,}"
                        row[title] = f"{shares[-1]:.1f}% {interval}"
                if len(shares) == 2:
                    row["gain"] = f"{shares[1] - shares[0]:+.1f}"
                rows.append(row)
    return pd.DataFrame(rows).fillna("")


def format_number(x: float) -> str:
    """1234.5 as 1,234 and smaller numbers with four digits."""
    if abs(x) >= 1000:
        return f"{x:,.0f}"
    return f"{round(x, 4) + 0:.4g}"  # + 0 makes 0 of -0


# ---- plots --------------------------------------------------------------------------------------


def spread(runs: list[RunResults], part: str, column: str) -> pd.DataFrame:
    """By step: mean, low and high over the runs that have a value at the step. low and high are the
    smallest and the largest value, less and plus the standard error where there is one. Of a long
    table about 500 steps are taken."""
    values, errors = {}, {}
    for run in runs:
        table = run.tables[part].reindex(columns=[column, f"{column}/stderr"])
        values[run.path] = table[column]
        errors[run.path] = table[f"{column}/stderr"]
    values, errors = pd.DataFrame(values), pd.DataFrame(errors)
    band = pd.DataFrame(
        {
            "mean": values.mean(axis=1),
            "low": values.sub(errors, fill_value=0).min(axis=1),
            "high": values.add(errors, fill_value=0).max(axis=1),
        }
    )
    return band.dropna()[:: len(band) // 500 + 1]


def draw(groups: Groups, columns: list[str], file: Path) -> str:
    """Write the plot of one or two columns, with a legend, into an SVG file. Returns the plot without
    a legend, in the colours of the page, as <svg>...</svg>."""
    figure = Figure(figsize=(4.2, 2.6), layout="constrained")
    ax = figure.subplots()
    n_runs = sum(len(runs) for runs in groups.values())
    faint = 0.5 / n_runs**0.5  # opacity of the curves of single runs
    for i, ((label, runs), (colour, dash)) in enumerate(zip(groups.items(), cycle(LOOKS))):
        ax.plot([], dash, color=colour, label=label[:50])  # only for the legend
        for column, line in zip(columns, (dash, ":")):
            train = spread(runs, "train", column)
            val = spread(runs, "val", column)
            ax.plot(train["mean"], line, color=colour)
            ax.fill_between(train.index, train.low, train.high, color=colour, alpha=0.2, lw=0)
            # Validations stand as dots on the curve; without a curve a line joins them.
            val_style = "o" if len(train) else f"o{line}"
            ax.plot(val["mean"], val_style, ms=3, color=colour)
            ax.vlines(val.index, val.low, val.high, color=colour)
            for run in runs:
                raw = run.tables["raw"].reindex(columns=[column, f"{column}/clamped"])
                ax.plot(raw[column], color=colour, alpha=faint, lw=0.8)
                clamped = raw.index[raw[f"{column}/clamped"] == 1]
                clamped = clamped[:: len(clamped) // 500 + 1]
                height = 1.03 + i % 8 / 50  # as a share of the plot's height: above the plot
                ax.plot(
                    clamped,
                    0 * clamped + height,
                    "|",
                    color=colour,
                    ms=3,
                    transform=ax.get_xaxis_transform(),
                    clip_on=False,
                )
    ax.set(xlabel="step", ylabel="\n".join(column[:34] for column in columns))
    figure.draw_without_rendering()  # finds the width that the labels leave
    box = ax.get_position()
    figure.set_layout_engine("none")
    # One height for all plots; above is room for ticks or a power of ten.
    ax.set_position([box.x0, 0.19, box.width, 0.68])
    bare = io.StringIO()
    figure.savefig(bare, format="svg")
    figure.legend(loc="upper center", bbox_to_anchor=(0.5, 0))
    figure.savefig(file, bbox_inches="tight")
    _, tag, rest = bare.getvalue().partition("<svg")  # without the XML header
    return tag + rest.replace(INK, "currentColor")


# ---- the page -----------------------------------------------------------------------------------


def write_page(groups: Groups, differ: pd.DataFrame, out: Path) -> None:
    """Write the page to `out`, and the plots into a folder beside it (report-svg for report.html).

    differ: what group_runs returns.
    """
    folder = out.with_name(f"{out.stem}-svg")
    folder.mkdir(parents=True, exist_ok=True)
    runs = [run for group in groups.values() for run in group]
    columns = {column for run in runs for table in run.tables.values() for column in table}
    others = {f"other-{column}": [column] for column in sorted(columns - DRAWN)}
    svgs = {}
    with rc_context(STYLE):
        for title, plotted in (PLOTS | others).items():
            file = folder / f"{title.replace('/', '-')}.svg"
            svgs[title] = draw(groups, plotted, file) if columns & set(plotted) else ""

    html = [
        f"<!doctype html><meta charset=utf-8><title>{escape(title_of(runs))}</title>",
        "<meta name=viewport content='width=device-width'>",
        "<style>",
        CSS,
        "</style><nav>",
    ]
    for label, (colour, dash) in zip(groups, cycle(LOOKS)):
        key = f"<b style='color:{colour}'>{DASHES[dash]}</b>"
        html.append(f"<span>{key} {escape(label)}</span>")
    html += [f"</nav><h1>{escape(title_of(runs))}</h1><div>", run_table(groups), "</div>"]
    own = [name for name in differ.index if name not in [*flatten(RunSettings), "finished"]]
    if own:
        html += ["<p><b>", escape(OTHER_OBJECTIVES.format(", ".join(own))), "</b>"]
    html += ["<p>", LEGEND, "<section>", *(svgs[title] for title in PLOTS), "</section>"]
    html += ["<h2>Final numbers</h2><div>", final_numbers(groups).to_html(index=False), "</div>"]
    html += ["<p>", ABOUT]
    checker = checker_table(groups)
    if len(checker):
        html += ["<h2>Checker</h2><div>", checker.to_html(index=False), "</div><p>", ABOUT_CHECKER]
    for label, group in groups.items():
        samples = group[0].samples.to_html()
        html += [f"<h2>Samples of {escape(label)}</h2><div>", samples, "</div>"]
    shared = "Settings"
    if len(differ):
        html += ["<h2>Settings that differ</h2><div>", differ.to_html(), "</div>"]
        shared = "Settings that all runs share"
    settings = {"seed": " ".join(str(run.seed) for run in runs)} | runs[0].settings
    settings = pd.Series(settings).drop(differ.index, errors="ignore").to_frame()
    html += [f"<h2>{shared}</h2><details>", settings.to_html(header=False), "</details>"]
    html += ["<h2>Other columns</h2><section>", *(svgs[title] for title in others)]
    out.write_text("\n".join(html), encoding="utf-8")
    print(f"wrote {out} and {folder}/*.svg")


def title_of(runs: list[RunResults]) -> str:
    """What was done: programs, models, data."""
    parts = []
    for name in ("program", "model", "data.train"):
        found = dict.fromkeys(run.about[name] for run in runs if run.about.get(name))
        parts.append(", ".join(found))
    return " · ".join(part for part in parts if part) or "Report"


def run_table(groups: Groups) -> str:
    """HTML: a row for each run, with all that is known about how it was made."""
    rows = []
    for i, runs in enumerate(groups.values()):
        for run in runs:
            rows.append({"": str(i), "run": run.path, "seed": run.seed or "", **run.about})
    return pd.DataFrame(rows).fillna("").to_html(index=False)


def main(argv: list[str] | None = None, skip: bool = False) -> None:
    """The report over the run folders in argv (default: the command line), as a page and as a table on
    the console. skip: a folder that cannot be read is left out, with a line that says why; without
    skip it raises BadInput."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", help="run folders")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("report.html"),
        help="the page; plots go beside it (%(default)s, report-svg/)",
    )
    args = parser.parse_args(argv)
    runs = []
    for folder in dict.fromkeys(str(Path(folder)) for folder in args.folders):  # each once
        try:
            runs.append(read_run(folder))
        except BadInput as e:
            if not skip:
                raise
            print(f"left out of the report: {e}")
    if not runs:
        return
    groups, differ = group_runs(runs)
    for label in groups:
        print(label[:80])
    print(final_numbers(groups).to_string(index=False, line_width=80))
    print(ABOUT)
    with user_error("out", args.out, OSError):
        write_page(groups, differ, args.out)


if __name__ == "__main__":
    run_cli(main)

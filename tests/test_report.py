"""report.py, from outside: run folders written by hand, numbers worked out by hand."""

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

pytest.importorskip("matplotlib")
from conftest import train  # noqa: E402

import report  # noqa: E402
from runs.errors import BadInput  # noqa: E402

HERE = Path(report.__file__).parent
SVG = "{http://www.w3.org/2000/svg}"


def csv_text(columns: dict[str, list]) -> str:
    rows = [list(columns), *zip(*columns.values())]
    return "".join(",".join("" if c is None else str(c) for c in row) + "\n" for row in rows)


def a_run(path: Path, train=None, val=None, finished=True, **settings) -> str:
    """A run folder; settings with __ for dots."""
    tree = {"seed": 1, "out_dir": str(path), "resume": None, "kto": {"beta": 0.1, "loss": "kto"}}
    for name, value in settings.items():
        *groups, last = name.split("__")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[last] = value
    (path / "eval").mkdir(parents=True)
    (path / "settings.yaml").write_text(yaml.safe_dump(tree))
    (path / "metrics.csv").write_text(csv_text(train or {"step": [1, 2], "loss": [0.5, 0.4]}))
    if val:
        (path / "val.csv").write_text(csv_text(val))
    if finished:
        (path / "final").mkdir()
    return str(path)


def verdict(path: str, name: str, right=None, **answers: str) -> None:
    pairs = [{"prompt": p, "completion": c} for p, c in answers.items()]
    node = {"samples": pairs} if right is None else {"right": right, "of": 8, "answers": pairs}
    (Path(path) / "eval" / f"{name}.json").write_text(json.dumps(node))


@pytest.fixture
def show(tmp_path, monkeypatch, capsys):
    """report.main on folders -> what it prints, and the page."""
    monkeypatch.chdir(tmp_path)

    def show(*folders):
        report.main(list(folders))
        return capsys.readouterr().out, Path("report.html").read_text()

    return show


def row_of(out: str, name: str, which=0) -> dict[str, str]:
    """A row of the printed table by column: the row (of several, the one at `which`) whose first
    cell is `name`. Cells are right-aligned: each ends where its heading ends."""
    lines = out.replace("\u00a0", "~").splitlines()  # the space in "0 train" does not break a cell
    head = next(i for i, line in enumerate(lines) if " steps " in line)
    first_cell = name.replace(" ", "~")
    matches = [line for line in lines[head + 1 :] if line.split()[:1] == [first_cell]]
    line = matches[which].ljust(100)
    start = len(re.match(r"\s*\S+", line)[0])
    cells = {}
    for heading in re.finditer(r"\S+", lines[head]):
        cells[heading[0]] = line[start : heading.end()].strip()
        start = heading.end()
    return cells


def marks(file: str) -> int:
    return len(ET.parse(file).findall(f".//{SVG}use"))


# ---- numbers ---------------------------------------------------------------------------------


def three_seeds(tmp_path) -> list[str]:
    return [
        a_run(
            tmp_path / f"run{seed}",
            {"step": [1, 2], "loss": [0.9, train], "tokens/s": [2000, 1000 * seed]},
            {"step": [0, 2], "loss": [0.7, val], "auc": [0.5, 0.9]},
            seed=seed,
        )
        for seed, train, val in ((1, 0.5, 0.30), (2, 0.5, 0.32), (3, 0.5, 0.37))
    ]


def test_the_table_has_the_mean_over_seeds_and_its_95_percent_interval(tmp_path, show):
    out, _ = show(*three_seeds(tmp_path))
    mean, half = row_of(out, "0 val"), row_of(out, "±", 1)
    assert (mean["n"], mean["steps"], mean["loss"]) == ("3", "2", "0.33")
    # by hand: deviations -0.03, -0.01, 0.04; s = sqrt(0.0026 / 2) = 0.036056; t(2) = 4.303
    assert half["loss"] == "0.0896"
    assert row_of(out, "0 train")["tokens/s"] == "2,000"
    # s = 1000, 4.303 * 1000 / sqrt(3) = 2484
    assert row_of(out, "±", 0)["tokens/s"] == "2,484"


@pytest.mark.parametrize("n, t", [(3, 4.303), (5, 2.776), (11, 2.228), (16, 2.131), (61, 2.000)])
def test_the_interval_is_students_for_any_number_of_seeds(tmp_path, show, n, t):
    runs = [a_run(tmp_path / f"{i}", {"step": [1], "loss": [i % 2]}, seed=i) for i in range(n)]
    out, _ = show(*runs)
    ones = n // 2
    variance = (ones * (1 - ones / n) ** 2 + (n - ones) * (ones / n) ** 2) / (n - 1)
    by_hand = t * (variance / n) ** 0.5
    assert float(row_of(out, "±")["loss"]) == pytest.approx(by_hand, rel=5e-3)


def test_of_two_runs_both_values_stand_in_place_of_an_interval(tmp_path, show):
    out, page = show(*three_seeds(tmp_path)[:2])
    assert "\n      ±" not in out and row_of(out, "0 val")["loss"] == "0.31"
    assert row_of(out, "each", 1)["loss"] == "0.3, 0.32"
    assert row_of(out, "each", 0)["tokens/s"] == "1,000, 2,000"
    assert "<td>0.3, 0.32</td>" in page


def test_one_run_has_no_interval(tmp_path, show):
    out, _ = show(three_seeds(tmp_path)[0])
    assert "\n      ±" not in out and row_of(out, "0 val")["n"] == "1"


def test_train_numbers_are_the_end_of_a_running_mean_and_val_the_last_row(tmp_path, show):
    losses = [1.0] * 48 + [0.4, 0.2]  # 50 rows: a window of 3, at the end of 2
    val = {"step": [0, 25, 50], "loss": [0.9, 0.8, 0.6]}
    out, _ = show(a_run(tmp_path / "a", {"step": range(1, 51), "loss": losses}, val))
    assert row_of(out, "0 train")["loss"] == "0.3"
    assert row_of(out, "0 val")["loss"] == "0.6"


def test_an_empty_cell_is_no_value(tmp_path, show):
    train = {"step": [1, 2, 3], "loss": [0.5, 0.4, None], "kl": [None] * 3, "note": ["a", "b", "c"]}
    out, page = show(a_run(tmp_path / "a", train))
    assert row_of(out, "0 train")["loss"] == "0.4"
    assert " kl" not in out and not Path("report-svg/kl.svg").exists()
    assert "note" not in page


def test_a_step_that_was_written_twice_counts_once_as_it_was_written_last(tmp_path, show):
    out, _ = show(a_run(tmp_path / "a", {"step": [1, 3, 2, 3], "loss": [0.9, 0.8, 0.7, 0.5]}))
    assert row_of(out, "0 train") == {"n": "1", "steps": "3", "loss": "0.5"}
    out, _ = show(a_run(tmp_path / "b", {"step": [1, 3, 2], "loss": [0.9, 0.5, 0.7]}))
    assert row_of(out, "0 train")["steps"] == "3"


@pytest.mark.parametrize("steps, tokens", [(12_000, 98_765), (1_200_000, 9_876_543)])
def test_the_table_fits_80_columns(tmp_path, show, steps, tokens):
    shares = {c: [0.1, 0.98765] for c in ("accuracy", "auc", "checker_accuracy", "memory_gb")}
    nats = {c: [0.1, -43.123456] for c in ("loss", "kl", "rewards/margins")}
    columns = {"step": [1, steps], **nats, **shares, "tokens/s": [tokens] * 2}
    name = "a-quite-long-name-of-a-run-folder-"
    runs = [a_run(tmp_path / f"{name}{seed}", columns, columns, seed=seed) for seed in range(3)]
    out, _ = show(*runs)
    assert max(map(len, out.splitlines())) <= 80, out
    assert f"{tokens:,}" in out and "memory" in out, "wider tables go on below"


# ---- groups ----------------------------------------------------------------------------------


def test_runs_that_differ_only_in_seed_and_bookkeeping_are_one_line(tmp_path, show):
    a = a_run(tmp_path / "a", seed=1, progress=True)
    b = a_run(tmp_path / "b", seed=2, progress=False, logger="wandb")
    c = a_run(tmp_path / "c", seed=1, kto__beta=0.3)
    out, page = show(a, b, c)
    assert row_of(out, "0 train")["n"] == "2" and row_of(out, "1 train")["n"] == "1"
    assert "0: kto.beta=0.1\n1: kto.beta=0.3\n" in out
    assert "0: kto.beta=0.1</span>" in page


def test_the_page_names_the_settings_that_differ_and_no_others(tmp_path, show):
    a = a_run(tmp_path / "a", optim__lr=1e-3, dpo__loss="ipo")
    b = a_run(tmp_path / "b", optim__lr=1e-5)
    _, page = show(a, b)
    differ, shared = page.index("Settings that differ"), page.index("Settings that all runs share")
    table, rest = page[differ:shared], page[shared : page.index("Other columns")]
    assert re.search(r"kto\.beta</th>\s*<td>0\.1</td>", rest) and "optim.lr" not in rest
    assert re.search(r"optim\.lr</th>\s*<td>0\.001</td>\s*<td>1e-05</td>", table)
    assert re.search(r"dpo\.loss</th>\s*<td>'ipo'</td>\s*<td></td>", table)
    assert "kto.beta" not in table and "out_dir" not in table and "seed" not in table


def test_runs_that_differ_in_their_seed_alone_have_their_settings_on_the_page(tmp_path, show):
    a = a_run(tmp_path / "a", optim__lr=1e-3)
    for folders, seeds in (([a], "1"), ([a, a_run(tmp_path / "b", optim__lr=1e-3, seed=2)], "1 2")):
        _, page = show(*folders)
        table = page[page.index("<h2>Settings</h2><details>") : page.index("</details>")]
        assert re.search(r"optim\.lr</th>\s*<td>0\.001</td>", table) and "kto.beta" in table
        assert re.search(rf"seed</th>\s*<td>{seeds}</td>", table) and "out_dir" not in table
        assert "Settings that differ" not in page


def test_runs_that_differ_in_much_are_named_by_their_folders(tmp_path, show):
    a = a_run(tmp_path / "a", dpo={"a": 1, "b": 2, "c": 3, "d": 4, "e": 5})
    out, _ = show(a, a_run(tmp_path / "b"), a_run(tmp_path / "c", seed=2))
    assert f"0: {tmp_path}/a\n" in out and f"1: {tmp_path}/b, {tmp_path}/c"[:80] in out


def test_the_same_seed_again_is_another_programs_and_never_averaged_in(tmp_path, show):
    runs = [a_run(tmp_path / f"{p}{seed}", seed=seed) for p in ("kto", "mine") for seed in (1, 2)]
    out, page = show(*runs)
    assert row_of(out, "0 train")["n"] == row_of(out, "1 train")["n"] == "2"
    assert f"1: {tmp_path}/mine1, {tmp_path}/mine2<" in page
    assert re.search(r"seed</th>\s*<td>1 2 1 2</td>", page), "the seeds of both groups"


def test_an_unfinished_run_is_never_averaged_with_finished_ones(tmp_path, show):
    a = [a_run(tmp_path / f"{seed}", seed=seed) for seed in (1, 2)]
    killed = a_run(tmp_path / "3", {"step": [1], "loss": [0.9]}, seed=3, finished=False)
    out, _ = show(*a, killed)
    assert "0: finished=True\n1: finished=False\n" in out
    assert row_of(out, "0 train")["loss"] == "0.4" and row_of(out, "1 train")["steps"] == "1"


def test_a_mean_is_over_all_runs_of_its_group_or_there_is_none(tmp_path, show):
    a = a_run(tmp_path / "a", val={"step": [2], "loss": [0.3]}, finished=False, seed=1)
    b = a_run(tmp_path / "b", val={"step": [0], "loss": [0.7]}, finished=False, seed=2)
    out, _ = show(a, b)
    assert row_of(out, "0 train")["n"] == "2" and "\u00a0val" not in out


def test_a_folder_named_twice_is_one_run(tmp_path, show):
    a = a_run(tmp_path / "a")
    out, _ = show(a, a, f"{a}/")
    assert row_of(out, "0 train")["n"] == "1" and "\n1: " not in out


# ---- what was done ---------------------------------------------------------------------------


def started(path: str, program: str = "kto.py") -> str:
    """The run with the first line that a run writes into its settings.yaml."""
    file = Path(path) / "settings.yaml"
    file.write_text(f"# {program}, commit abc1234, torch 2.13.0\n{file.read_text()}")
    return path


def test_the_page_begins_with_what_was_run_on_what_and_by_which_versions(tmp_path, show):
    _, page = show(started(a_run(tmp_path / "a", model="gpt2", data__train="ratings.jsonl")))
    head = page[page.index("<h1>") : page.index("Lines: running means")]
    assert "<h1>kto.py · gpt2 · ratings.jsonl</h1>" in head
    assert "<td>kto.py, commit abc1234, torch 2.13.0</td>" in head


def test_another_program_is_another_group_by_its_name(tmp_path, show):
    a, b = (started(a_run(tmp_path / x), program=f"{x}.py") for x in ("kto", "mine"))
    out, _ = show(a, b)
    assert "0: program='kto.py'\n1: program='mine.py'\n" in out


def test_where_objectives_differ_the_page_says_that_their_losses_do_not_compare(tmp_path, show):
    a, b = a_run(tmp_path / "a"), a_run(tmp_path / "b", optim__lr=1e-3)
    assert "different objectives" not in show(a, b)[1], "one loss, whatever the learning rate"
    c = a_run(tmp_path / "c", kto__beta=0.3)
    _, page = show(a, b, c)
    assert page.index("The runs differ in kto.beta: their losses") < page.index("<section>")


def test_a_run_says_of_itself_what_it_was_made_by(tiny, ratings, tmp_path, show):
    train(tiny, ratings, tmp_path / "run", "--batch_size=8", "--max_steps=1")
    _, page = show(str(tmp_path / "run"))
    assert f"<h1>kto.py · {tiny} · " in page
    import torch

    assert re.search(rf"kto.py, commit \S+, python .*torch {re.escape(torch.__version__)}", page)


# ---- curves ----------------------------------------------------------------------------------


def with_kl(path: Path, clamped: list) -> str:
    steps = range(1, len(clamped) + 1)
    n = len(clamped)
    columns = {"step": steps, "kl": [0.2] * n, "kl/stderr": [0.05] * n, "kl/clamped": clamped}
    return a_run(path, columns)


def test_all_plots_have_one_height_whatever_stands_above_them(tmp_path, show):
    runs = [with_kl(tmp_path / f"{i}", [1.0, 1.0]) for i in range(8)]
    _, page = show(
        *runs, a_run(tmp_path / "b", {"step": [1, 2], "loss": [1e9, 2e9], "auc": [0, 1]})
    )
    boxes = re.findall(r'<rect x="[\d.]+" y="([\d.]+)" width="[\d.]+" height="([\d.]+)"', page)
    assert len(boxes) == 3 and len(set(boxes)) == 1, "the axes of kl, loss and auc"


def test_each_step_where_z_was_clamped_has_a_mark(tmp_path, show):
    show(with_kl(tmp_path / "a", [0.0, 0.0, 0.0, 0.0]))
    without = marks("report-svg/kl.svg")
    show(with_kl(tmp_path / "b", [0.0, 1.0, 0.0, 1.0]))
    assert marks("report-svg/kl.svg") == without + 2


def test_the_band_of_z_is_its_standard_error_and_of_runs_smallest_to_largest(tmp_path):
    a = report.read_run(with_kl(tmp_path / "a", [0.0, 0.0]))
    band = report.spread([a], "train", "kl")
    assert band.loc[2].tolist() == pytest.approx([0.2, 0.15, 0.25])
    runs = [report.read_run(run) for run in three_seeds(tmp_path)]
    band = report.spread(runs, "val", "loss")
    assert band.loc[2].tolist() == pytest.approx([0.33, 0.30, 0.37])


def test_validation_stands_beside_training_as_dots(tmp_path, show):
    train = {"step": [1, 2, 3], "loss": [0.5, 0.4, 0.3]}
    show(a_run(tmp_path / "a", train))
    without = marks("report-svg/loss.svg")
    show(a_run(tmp_path / "b", train, {"step": [1, 3], "loss": [0.45, 0.35]}))
    assert marks("report-svg/loss.svg") == without + 2, "within the axes: their ticks are the same"


def test_the_caption_names_the_dotted_column(tmp_path, show):
    _, page = show(a_run(tmp_path / "a", {"step": [1], "rewards/rejected": [1]}))
    assert "Dotted: rewards/rejected." in page


def test_every_plot_is_a_file_of_its_own_that_is_xml(tmp_path, show):
    train = {"step": [1, 2], "loss": [1, 2], "rewards/chosen": [1, 2], "rewards/rejected": [0, 1]}
    train |= {"my/idea": [1, 3], "margin": [1, 2], "epoch": [0.5, 1]}
    _, page = show(a_run(tmp_path / "a", train))
    names = {file.name for file in Path("report-svg").iterdir()}
    assert names == {"loss.svg", "rewards.svg", "other-my-idea.svg", "other-margin.svg"}
    for name in names:
        assert ET.parse(Path("report-svg") / name).getroot().tag == f"{SVG}svg"
    assert page.count("<svg") == len(names)
    assert page.index(">my/idea<") > page.index("Other columns") > page.index(">loss<")


def test_text_and_axes_take_the_pages_colour_and_a_file_for_a_paper_is_black(tmp_path, show):
    _, page = show(a_run(tmp_path / "a"))
    assert "color-scheme: light dark" in page
    assert "currentColor" in page and report.INK not in page
    assert "#000000" not in page, "black text cannot be read in dark mode"
    assert "currentColor" not in Path("report-svg/loss.svg").read_text()


def test_a_long_run_makes_no_huge_page_and_keeps_its_last_numbers(tmp_path, show):
    n = 20_000
    noise = [(i * 7919 % 1000) / 1000 for i in range(n)]
    columns = {"step": range(1, n + 1), "loss": noise, "kl": [0.0] * n, "kl/clamped": [1.0] * n}
    out, page = show(a_run(tmp_path / "a", columns))
    assert len(page) < 500_000
    assert 300 < marks("report-svg/kl.svg") < 700
    assert row_of(out, "0 train")["steps"] == "20,000"


# ---- the checker and the samples -------------------------------------------------------------


def test_the_checkers_accuracy_comes_from_val_csv_or_else_from_before_and_after(tmp_path, show):
    old = a_run(tmp_path / "old", val={"step": [0, 2], "loss": [1, 2]})
    verdict(old, "before", right=2, q="a")
    verdict(old, "after", right=6, q="b")
    verdict(old, "step-0", q="c")
    assert row_of(show(old)[0], "0 val")["checker"] == "0.75"
    curve = report.read_run(old).tables["val"]["checker_accuracy"]
    assert curve.to_dict() == {0: 0.25, 2: 0.75}
    new = a_run(tmp_path / "new", val={"step": [0, 1, 2], "checker_accuracy": [0.1, 0.5, None]})
    verdict(new, "after", right=6, q="b")
    assert row_of(show(new)[0], "0 val")["checker"] == "0.5"


def test_the_checkers_accuracy_has_its_interval_and_its_n_also_by_kind(tmp_path, show):
    run = a_run(tmp_path / "a")
    for name, right, bullets in (("before", 2, 1), ("after", 6, 3)):
        verdict(run, name, right=right, q="a")
        file = tmp_path / "a" / "eval" / f"{name}.json"
        by = {"kind": {"bullets": [bullets, 4]}}
        file.write_text(json.dumps(json.loads(file.read_text()) | {"by": by}))
    _, page = show(run)
    table = page[page.index("<h2>Checker</h2>") : page.index("Samples of")]
    cells = re.findall("<td>(.*?)</td>", table)
    # Wilson by hand, z = 1.96: 2 of 8 is (2 + 1.92) / (8 + 3.84) -+ 1.96 sqrt(1.5 + 0.96) / 11.84
    assert cells[2:6] == [
        "all", "25.0% (7.1 to 59.1), 2 of 8", "75.0% (40.9 to 92.9), 6 of 8", "+50.0",
    ]  # fmt: skip
    assert cells[8] == "kind=bullets" and cells[9].endswith("1 of 4") and cells[11] == "+50.0"


def test_a_verdict_from_before_training_is_not_a_final_number(tmp_path, show):
    run = a_run(tmp_path / "a", finished=False)
    verdict(run, "before", right=2, q="a")
    out, _ = show(run)
    assert "checker" not in out and Path("report-svg/checker.svg").exists()


def test_samples_before_and_after_stand_side_by_side(tmp_path, show):
    run = a_run(tmp_path / "a", val={"step": [0, 1, 2], "loss": [1, 1, 1]})
    for step, answer in ((0, "first words"), (1, "words between"), (2, "last words")):
        verdict(run, f"step-{step}", question=answer, **{"x" * 20: "y" * 300})
    _, page = show(run)
    assert re.search(r"question</th>\s*<td>first words</td>\s*<td>last words</td>", page)
    assert "words between" not in page
    assert "y" * 300 in page, "a sample is not cut at 50 characters"


def test_of_an_unfinished_run_the_last_samples_are_shown(tmp_path, show):
    run = a_run(tmp_path / "a", val={"step": [0, 1], "loss": [1, 1]}, finished=False)
    verdict(run, "before", right=1, question="first words")
    verdict(run, "step-1", question="so far")
    assert re.search(r"first words</td>\s*<td>so far</td>", show(run)[1])


# ---- what runs hold is text, not markup ------------------------------------------------------


class Tags(HTMLParser):
    def __init__(self, page: str):
        super().__init__()
        self.tags, self.attributes, self.words = set(), [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes

    def handle_data(self, data):
        self.words += data


EVIL = '<script>alert(1)</script><img src=x onerror=y> & "q" $x_1$ </svg>'


def test_nothing_from_a_run_becomes_markup(tmp_path, show):
    a = a_run(tmp_path / "<b>a", {"step": [1, 2], '"<i>&$x_1$"': [1, 2]}, data__train=EVIL)
    b = a_run(tmp_path / "b", {"step": [1, 2], "loss": [1, 2]}, **{"<u>": 1})
    for run in (a, b):
        verdict(run, "before", right=1, **{EVIL: EVIL})
        verdict(run, "after", right=1, **{EVIL: EVIL})
    _, page = show(a, b)
    html = Tags(page)
    assert not html.tags & {"script", "img", "i", "u", "onerror"}
    assert not any(name.startswith("on") for name, _ in html.attributes)
    assert html.words.count(EVIL) >= 5, "it is shown as it is"
    assert "<i>&$x_1$" in html.words, "a column's name, and no formula"
    for file in Path("report-svg").iterdir():
        ET.parse(file)


def test_the_page_loads_nothing_from_elsewhere(tmp_path, show):
    _, page = show(
        a_run(tmp_path / "a", data__train="https://example.org/x"), a_run(tmp_path / "b")
    )
    html = Tags(page)
    assert not html.tags & {"link", "script", "img", "iframe", "object", "embed", "base"}
    for name, value in html.attributes:
        if name in ("href", "xlink:href", "src"):
            assert value.startswith("#"), value
        elif not name.startswith(("xmlns", "rdf:")):
            assert "http" not in (value or ""), (name, value)
    assert not re.search(r"@import|url\((?!#)", page)


def test_what_no_page_can_hold_is_shown_as_an_escape(tmp_path, show):
    a = a_run(tmp_path / "a", {"step": [1, 2], "nul\0": [1, 2], "esc\x1b": [1, 2]})
    b = a_run(tmp_path / "b", {"step": [1, 2], "loss": [1, 2]})
    with open(tmp_path / "b" / "settings.yaml", "a") as file:
        file.write('"half\\ud800": "\\udfff"\n')
    verdict(b, "before", right=1, **{"\ud800": "ab\0"})
    verdict(b, "after", right=1, **{"\ud800": "\udfff"})
    _, page = show(a, b)
    for text in ("nul\\x00", "esc\\x1b", "half\\ud800", "\\udfff", "ab\\x00"):
        assert text in page, text
    for file in Path("report-svg").iterdir():
        ET.parse(file)


def test_numbers_that_no_run_means_are_left_out(tmp_path, show):
    losses = [1e308, -1e308, 0.5, 0.5]
    out, _ = show(a_run(tmp_path / "a", {"step": [1, 2, 3, 4], "loss": losses, "kl": [1e308] * 4}))
    assert row_of(out, "0 train") == {"n": "1", "steps": "4", "loss": "0.5"}


# ---- broken folders --------------------------------------------------------------------------


@pytest.mark.parametrize("torn", ["3", "3,0.1", "3,0.1,0.", "3,0.1,0.25"])
def test_a_line_torn_by_a_kill_is_left_out(tmp_path, show, torn):
    run = a_run(tmp_path / "a", {"step": [1, 2], "loss": [1, 2], "auc": [0.5, 0.75]})
    with open(tmp_path / "a" / "metrics.csv", "a") as file:
        file.write(torn)
    expected = {"n": "1", "steps": "2", "loss": "2", "auc": "0.75"}
    assert row_of(show(run)[0], "0 train") == expected


@pytest.mark.parametrize("val", [None, "", "step,loss\n", "step,lo"])
def test_a_run_without_validation_is_a_run(tmp_path, show, val):
    run = a_run(tmp_path / "a")
    if val is not None:
        (tmp_path / "a" / "val.csv").write_text(val)
    assert "\u00a0val" not in show(run)[0]


BAD = {
    "no folder": (None, None, "settings: {}/settings.yaml: No such file"),
    "no settings": ("settings.yaml", None, "settings: {}/settings.yaml: No such file"),
    "no metrics": ("metrics.csv", None, "metrics: {}/metrics.csv: No such file"),
    "an empty file": ("metrics.csv", "", "metrics: {}/metrics.csv: no rows yet"),
    "only a header": ("metrics.csv", "step,loss\n", "metrics: {}/metrics.csv: no rows yet"),
    "no step": ("metrics.csv", "loss\n1\n", "metrics: {}/metrics.csv: "),
    "too many cells": (
        "metrics.csv",
        "step,loss\n1,2\n2,3,4\n",
        "metrics: {}/metrics.csv: .*line 3",
    ),
    "broken yaml": ("settings.yaml", "a: 1\nb: [1\n", "settings: {}/settings.yaml: .*line"),
    "a list": ("settings.yaml", "- 1\n", "settings: {}/settings.yaml: expected settings"),
    "a python object": (
        "settings.yaml",
        "a: !!python/name:os.system\n",
        "settings: {}/settings.yaml",
    ),
    "not text": (
        "settings.yaml",
        b"\xff\xfe\x00",
        "settings: {}/settings.yaml: not UTF-8 at byte 0",
    ),
    "broken json": ("eval/before.json", "{", "before: {}/eval/before.json: "),
    "an alias bomb": (
        "settings.yaml",
        "a: &a [x, x]\n"
        + "".join(f"{x}: &{x} [*{y}, *{y}]\n" for x, y in zip("bcdefgh", "abcdefg")),
        "settings: {}/settings.yaml: .*an alias of a list or a group is not supported",
    ),
    "more right than there are": (
        "eval/after.json",
        '{"right": 9, "of": 8, "answers": []}',
        "after: {}/eval/after.json: all: expected \\[right, of\\], got \\[9, 8\\]",
    ),
    "parts that are no parts": (
        "eval/after.json",
        '{"right": 1, "of": 8, "answers": [], "by": {"kind": [1]}}',
        "after: {}/eval/after.json: ",
    ),
    "other json": ("eval/after.json", "[1]", "after: {}/eval/after.json: "),
}


@pytest.mark.parametrize("file, content, message", BAD.values(), ids=BAD)
def test_what_is_broken_is_named_in_one_line(tmp_path, show, file, content, message):
    folder = tmp_path / "a"
    if file:
        a_run(folder)
        (folder / file).unlink(missing_ok=True)
        if content is not None:
            (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadInput, match=message.format(re.escape(str(folder)))) as e:
        show(str(folder))
    assert "\n" not in str(e.value)


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    run = a_run(tmp_path / "a")
    with pytest.raises(BadInput, match="out: .*settings.yaml"):
        report.main([run, "--out", f"{run}/settings.yaml/report.html"])


def outside(*argv: str, **env) -> subprocess.CompletedProcess:
    command = [sys.executable, HERE / "report.py", *argv]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env})


def test_the_command_ends_with_2_and_one_line(tmp_path):
    done = outside(str(tmp_path / "nothing"))
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(r"error: settings: .*nothing/settings.yaml: No such file.*\n", done.stderr)


def test_help_says_where_the_page_and_the_plots_go():
    done = outside("--help", COLUMNS="80")
    assert done.returncode == 0 and "\n    python report.py out/a out/b" in done.stdout
    text = " ".join(done.stdout.split())
    assert "--out OUT the page; plots go beside it (report.html, report-svg/)" in text


def test_without_matplotlib_it_says_what_to_install(tmp_path):
    (tmp_path / "matplotlib.py").write_text(
        "raise ModuleNotFoundError('No module named matplotlib', name='matplotlib')"
    )
    done = outside(a_run(tmp_path / "a"), PYTHONPATH=str(tmp_path))
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "matplotlib" in done.stderr and "pip install '.[report]'" in done.stderr


def test_no_file_is_unpickled_and_yaml_is_read_safely():
    source = (HERE / "report.py").read_text()
    assert not re.search(r"pickle|torch\.load|yaml\.(?!safe_load|YAMLError)", source)

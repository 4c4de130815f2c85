"""report.py over run folders written by hand, with numbers worked out by hand."""

import json

import pytest
import yaml

pytest.importorskip("pandas")
pytest.importorskip("matplotlib")
import report  # noqa: E402
from runs.console import BadInput  # noqa: E402

METRICS = "step,loss,kl,kl/clamped\n1,0.5,0.0,0.0\n2,0.4,0.0,1.0\n3,0.3,2.0,0.0\n4,0.2,3.0,0.0\n"
VAL = "step,loss,kl,checker_accuracy,kl/own\n0,0.9,0.0,0.5,0.0\n"


@pytest.fixture
def show(tmp_path, monkeypatch, capsys):
    """report.main over run folders -> what it prints, as lists of words by line."""
    monkeypatch.chdir(tmp_path)

    def show(*folders) -> list[list[str]]:
        report.main([str(folder) for folder in folders])
        return [line.split() for line in capsys.readouterr().out.splitlines()]

    def run(name: str, val: str = "", metrics=METRICS, finished=True, **settings):
        """A run folder. val: rows of val.csv after step 0."""
        folder = tmp_path / name
        (folder / "eval").mkdir(parents=True)
        settings = {"seed": 1, "kto": {"beta": 0.1}, "lora": {"rank": None}} | settings
        settings["out_dir"] = name
        text = f"# kto.py, commit {name}\n{yaml.safe_dump(settings)}"
        (folder / "settings.yaml").write_text(text)
        (folder / "metrics.csv").write_text(metrics)
        (folder / "val.csv").write_text(VAL + val)
        if val:
            answers = [{"prompt": "a b =", "completion": text} for text in ("four", "12345")]
            (folder / "eval" / "after.json").write_text(json.dumps({"answers": answers}))
        if finished:
            (folder / "final").mkdir()
        return folder

    show.run = run
    return show


def test_the_table_has_the_mean_and_the_range_of_runs_that_differ_in_their_seed(show):
    runs = [
        show.run(f"out/{seed}", f"2,0.5,1,{share},\n4,{loss},{kl},,3\n", seed=seed)
        for seed, loss, share, kl in ((1, 0.30, 0.8, 0), (2, 0.32, 0.9, 1), (3, 0.3733, 0.7, 5))
    ]
    other = show.run("out/x", "4,0.7,0,0.4,0\n", kto={"beta": 0.3})
    lines = show(*runs, other)
    assert lines[:2] == [["0:", "kto.beta=0.1"], ["1:", "kto.beta=0.3"]]
    assert lines[3] == "0 n=3 1 n=1".split()
    # the accuracy of step 2 is the last one; answers of 5 and 4 characters; 1 of 4 steps clamped
    assert [" ".join(words) for words in lines[4:13]] == [
        "steps 4 (4 to 4) 4",
        "before 50 (50 to 50) 50",
        "after 80 (70 to 90) 40",
        "gain 30 (20 to 40) -10",
        "length 4.5 (4.5 to 4.5) 4.5",
        "clamped 25 (25 to 25) 25",
        "kl 2 (0 to 5) 0",
        "kl/own 3 (3 to 3) 0",
        "loss 0.3311 (0.3 to 0.3733) 0.7",
    ]


@pytest.mark.parametrize(
    "settings, names",
    [
        ({"seed": 2, "logger": "wandb", "out_dir": "elsewhere"}, ["out/a"]),
        ({"seed": 2, "micro_batch_size": 4}, ["micro_batch_size=nan", "micro_batch_size=4"]),
        ({"seed": 2, "lora": {"rank": 8}}, ["lora.rank=None", "lora.rank=8"]),
        ({"seed": 2, "finished": False}, ["finished=True", "finished=False"]),
    ],
    ids=["bookkeeping", "speed", "null", "finished"],
)
def test_no_mean_is_taken_over_runs_that_differ_in_more_than_the_seed(show, settings, names):
    lines = show(show.run("out/a"), show.run("out/b", **settings))
    found = [words[1] for words in lines[: len(names)]]
    assert all(line.endswith(name) for line, name in zip(found, names)), found
    assert not lines[len(names)]


def test_the_page_has_the_picture_with_a_colour_for_each_group(show, monkeypatch):
    figures, savefig = [], report.Figure.savefig
    monkeypatch.setattr(
        report.Figure, "savefig", lambda *args: figures.append(args[0]) or savefig(*args)
    )
    groups = [{"kto": {"beta": i}} for i in range(12)] + [{"kto": {"beta": 0}, "seed": 2}]
    runs = [show.run(f"out/{i}", "4,0.7,0,0.4,0\n", **group) for i, group in enumerate(groups)]
    show(*runs)
    out = runs[0].parent
    page = (out / "report.md").read_text()
    assert "![curves](report.png)" in page and (out / "report.png").stat().st_size > 20_000
    assert (out / "report.csv").read_text().count("\n") == 14
    kl = next(ax for ax in figures[0].axes if ax.get_title() == "kl")
    curves = {line.get_color() for line in kl.lines if list(line.get_ydata()) == [0, 0, 2, 3]}
    assert len(kl.lines) == 26 and len(curves) == 12
    assert [x.get_text()[:4] for x in figures[0].legends[0].texts] == [
        f"{i}: k"[:4] for i in range(12)
    ]


def test_a_folder_that_is_no_run_is_one_line(show, tmp_path):
    with pytest.raises(BadInput, match="^/.*/settings.yaml: No such file or directory$"):
        show(tmp_path / "nothing")


def test_a_run_that_ended_before_its_first_step_is_in_the_table(show):
    failed = show.run("out/b", finished=False)
    (failed / "metrics.csv").unlink()
    lines = show(show.run("out/a", "4,0.7,0,0.4,0\n"), failed)
    assert ["before", "50", "50"] in lines and ["steps", "4"] in lines

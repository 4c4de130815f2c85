"""report.py over run folders written by hand, with numbers worked out by hand."""

import json

import pytest
import yaml

import report

METRICS = "step,loss,kl,kl/clamped\n1,0.5,0.0,0.0\n2,0.4,0.0,1.0\n3,0.3,2.0,0.0\n4,0.2,3.0,0.0\n"
VAL = "step,loss,kl,checker_accuracy,kl/own\n0,0.9,0.0,0.5,0.0\n"


@pytest.fixture
def show(tmp_path, monkeypatch, capsys):
    """report.main over run folders -> what it prints, as lists of words by line."""
    monkeypatch.chdir(tmp_path)

    def show(*folders) -> list[list[str]]:
        report.main([str(folder) for folder in folders])
        return [line.split() for line in capsys.readouterr().out.splitlines()]

    def run(
        name: str,
        val: str = "",
        metrics=METRICS,
        finished=True,
        records="11ede4685efe",
        code="0a1b2c",
        **settings,
    ):
        """A run folder. val: rows of val.csv after step 0."""
        folder = tmp_path / name
        folder.mkdir(parents=True)
        settings = {"seed": 1, "kto": {"beta": 0.1}, "lora": {"rank": None}} | settings
        settings = {"data": {"date": None}, "optim": {"schedule": "cosine"}} | settings
        settings = {"logger": "csv"} | settings
        settings["out_dir"] = name
        text = (
            f"# kto.py, code {code}, records {records}, commit {name}\n{yaml.safe_dump(settings)}"
        )
        (folder / "settings.yaml").write_text(text)
        (folder / "metrics.csv").write_text(metrics)
        (folder / "val.csv").write_text(VAL + val)
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
    (other / "eval").mkdir()
    tested = {"final": {"loss": 0.25, "epoch": 1}, "best": {"loss": 0.2}}
    (other / "eval" / "test.json").write_text(json.dumps(tested))
    lines = show(*runs, other)
    assert lines[:2] == [["0:", "kto.beta=0.1", "(n=3)"], ["1:", "kto.beta=0.3", "(n=1)"]]
    assert lines[3] == ["0", "1"]
    # the accuracy of step 2 is the last one; 1 of 4 steps clamped; a column without a number is left out
    assert [" ".join(words) for words in lines[4:12]] == [
        "before 0.5 (0.5 to 0.5) 0.5",
        "loss 0.3311 (0.3 to 0.3733) 0.7",
        "checker_accuracy 0.8 (0.7 to 0.9) 0.4",
        "kl 2 (0 to 5) 0",
        "kl/clamped 0.25 (0.25 to 0.25) 0.25",
        "kl/own 3 (3 to 3) 0",
        "test/final/loss nan (nan to nan) 0.25",
        "test/best/loss nan (nan to nan) 0.2",
    ]


CODE = "program=kto.py, code 0a1b2c"
FIRST = f"{CODE}, records 11ede4685efe"


@pytest.mark.parametrize(
    "settings, names",
    [
        ({"seed": 2, "out_dir": "elsewhere"}, [""]),
        ({"seed": 2, "logger": "wandb"}, ["logger=csv", "logger=wandb"]),
        ({"seed": 2, "lora": {"rank": 8}}, ["lora.rank=None", "lora.rank=8"]),
        ({"seed": 2, "finished": False}, ["ended=True", "ended=step-0"]),
        # a resume may change these, since it compares the records; they make other runs
        ({"seed": 2, "data": {"date": "2026-01-31"}}, ["data.date=None", "data.date=2026-01-31"]),
        (
            {"seed": 2, "optim": {"schedule": "linear"}},
            ["optim.schedule=cosine", "optim.schedule=linear"],
        ),
        # the same file, which has grown
        ({"seed": 2, "records": "5d41402abc4b"}, [FIRST, f"{CODE}, records 5d41402abc4b"]),
        # the program was edited, before the run or in the middle of it
        (
            {"seed": 2, "code": "0a1b2c+3d4e5f"},
            [FIRST, f"{CODE}+3d4e5f, records 11ede4685efe"],
        ),
        # a setting of another program
        ({"seed": 2, "online": {"cut": "drop"}}, ["", "online.cut=drop"]),
    ],
)
def test_no_mean_is_taken_over_runs_that_differ_in_more_than_the_seed(show, settings, names):
    folders = [show.run("out/a"), show.run("out/b", **settings)]
    found = dict.fromkeys(report.group_names([report.read_run(folder) for folder in folders]))
    assert list(found) == names


def test_runs_that_have_not_ended_and_a_folder_that_is_no_run(show, tmp_path):
    rows = {"a": "2,0.5,1,,\n4,0.3,2,,\n", "b": "2,0.4,1,,\n", "c": "2,0.6,1,,\n"}
    runs = [
        show.run(f"out/{name}", val, finished=False, seed=seed)
        for seed, (name, val) in enumerate(rows.items())
    ]
    (runs[0] / "metrics.csv").unlink()  # a run that failed before its first row
    lines = [" ".join(words) for words in show(*runs)]
    assert lines[:2] == ["0: ended=step-4 (n=1)", "1: ended=step-2 (n=2)"], "no mean over both"
    assert "loss 0.3 0.5 (0.4 to 0.6)" in lines and "before 0.5 0.5 (0.5 to 0.5)" in lines
    assert "kl/clamped nan 0.25 (0.25 to 0.25)" in lines
    columns = {line.split(" ")[0] for line in lines}
    assert not {"checker_accuracy", "kl/own"} & columns, (
        "the check before a run is not one after it"
    )
    with pytest.raises(FileNotFoundError, match="settings.yaml"):  # run_cli prints it in one line
        show(tmp_path / "nothing")

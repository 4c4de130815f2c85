"""The hash of a program's own files: what changes it, and what report.py, sweep.py and a resume make of it."""

from pathlib import Path

import pytest
from conftest import ROOT, train

import run
from infra.program import program_files, program_hash

FILES = {
    "mine.py": "import json\nimport pack.part\n\ndef f():\n    from loss import g\n",
    "loss.py": "import site_package\ndef g(x):\n    return x\n",
    "pack/part.py": "from pack import near\nimport kto\n",
    "pack/near.py": "",
    "other.py": "",
    "pack/unused.py": "",
    "data.json": "{}",
}


def edited(folder: Path, name: str, text: str) -> None:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize("name", FILES)
def test_an_edit_of_an_own_file_that_the_program_imports_makes_another_program(name, tmp_path):
    for file, text in FILES.items():
        edited(tmp_path, file, text)
    before = program_hash(tmp_path / "mine.py")
    edited(tmp_path, name, FILES[name] + "# a comment\n")
    counts = name not in ("other.py", "pack/unused.py", "data.json")
    assert (program_hash(tmp_path / "mine.py") != before) == counts


def test_the_files_of_this_project_that_a_program_imports_are_its_own(tmp_path):
    edited(tmp_path, "mine.py", "import kto\n")
    found = {
        str(file.relative_to(ROOT))
        for file in program_files(tmp_path / "mine.py") - {tmp_path / "mine.py"}
    }
    assert {"kto.py", "trainer.py", "infra/parse.py", "models/hub.py"} <= found
    assert not found & {"dpo.py", "report.py", "infra/__init__.py"}


def test_a_copy_elsewhere_is_the_same_program(tmp_path):
    for place in ("a", "b"):
        edited(tmp_path / place, "mine.py", "import loss\n")
        edited(tmp_path / place, "loss.py", "")
    assert program_hash(tmp_path / "a/mine.py") == program_hash(tmp_path / "b/mine.py")


def test_a_run_that_an_edited_program_resumes_names_both_versions(
    tiny, ratings, tmp_path, monkeypatch, capsys
):
    argv = ["--batch_size=8", "--max_steps=3", "--resume=auto"]
    for step, code, codes in ((1, "aaa", "aaa"), (2, "aaa", "aaa"), (3, "bbb", "aaa+bbb")):
        monkeypatch.setattr(run, "program_hash", lambda program, code=code: code)
        train(tiny, ratings, tmp_path, *argv, f"--stop_at={step}")
        head = (tmp_path / "settings.yaml").read_text()
        assert head.startswith(f"# kto.py, code {codes}, records ")
        changed = "the program has changed since step 2: report.py keeps this run apart"
        assert (changed in capsys.readouterr().out) == (code == "bbb")

"""The hash of a program's own files: what changes it, and what report.py, sweep.py and a resume make of it."""

import re
import sys
from pathlib import Path

import pytest
from conftest import Started

from infra.program import program_hash

FILES = {
    "mine.py": "import json\nimport pack.part\nimport space.inner\n\ndef f():\n    from loss import g\n",
    "loss.py": "def g(x):\n    return x\n",
    "pack/__init__.py": "",
    "pack/part.py": "from . import near\nfrom .deep.far import x\n",
    "pack/near.py": "",
    "pack/deep/__init__.py": "from ..top import *\n",
    "pack/deep/far.py": "x = 1\n",
    "pack/top.py": "",
    "space/inner.py": "import elsewhere\n",  # space/ has no __init__.py
    "path/elsewhere.py": "",
    "path/site-packages/installed.py": "",
    "other.py": "",
    "pack/unused.py": "",
    "data.json": "{}",
}


def edited(folder: Path, name: str, text: str) -> None:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    "name, counts",
    [(name, not re.search("installed|other|unused|json", name)) for name in FILES],
)
def test_an_edit_of_an_own_file_that_the_program_imports_makes_another_program(
    name, counts, tmp_path, monkeypatch
):
    for file, text in FILES.items():
        edited(tmp_path, file, text)
    installed = str(tmp_path / "path" / "site-packages")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "path"), installed])
    edited(tmp_path, "pack/near.py", "import installed\nimport not_there\n")
    before = program_hash(tmp_path / "mine.py")
    edited(tmp_path, name, (tmp_path / name).read_text() + "# a comment\n")
    assert (program_hash(tmp_path / "mine.py") != before) == counts


def test_a_copy_elsewhere_is_the_same_program(tmp_path):
    for place in ("a", "b"):
        edited(tmp_path / place, "mine.py", "import loss\n")
        edited(tmp_path / place, "loss.py", "")
    assert program_hash(tmp_path / "a/mine.py") == program_hash(tmp_path / "b/mine.py")


FORK = """import kto
from infra.console import run_cli
import loss

class Mine(kto.KTO):
    def loss(self, *args):
        losses, columns = super().loss(*args)
        return loss.SIGN * losses, columns

if __name__ == "__main__":
    run_cli(lambda: kto.main(objective=Mine))
"""


def test_a_run_that_an_edited_program_resumes_names_both_versions(
    tiny, ratings, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(str(tmp_path))  # as Python does for a script
    monkeypatch.chdir(tmp_path)
    edited(tmp_path, "mine.py", FORK)
    out = tmp_path / "r"
    argv = [f"--model={tiny}", f"--data.train={ratings}", "--batch_size=8", f"--out_dir={out}"]
    argv += ["--max_steps=3", "--resume=auto"]
    codes = []
    for i, (sign, stop) in enumerate([("1", 1), ("1", 2), ("-1", 3)]):
        edited(tmp_path, "loss.py", f"SIGN = {sign}\n")
        run = Started(tmp_path / f"log{i}", str(tmp_path / "mine.py"), [*argv, f"--stop_at={stop}"])
        code, said, errors = run.ended()
        assert code == 0, errors
        changed = "the program has changed since step 2: report.py keeps this run apart"
        assert (changed in said) == (sign == "-1")
        head = (out / "settings.yaml").read_text().partition("\n")[0]
        codes.append(re.search(r"^# mine.py, code ([^,]+), records ", head)[1])
        assert codes[-1].split("+")[-1] == program_hash(tmp_path / "mine.py")
    assert codes[0] == codes[1] and codes[2].startswith(codes[0] + "+")

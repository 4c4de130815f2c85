"""The README's commands and every config work as written, for a few steps and with a tiny model where one is named."""

import re
import shlex
import sys
from pathlib import Path

import pytest

import dpo
import kto
import spin

ROOT = Path(kto.__file__).parent
BLOCKS = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
COMMANDS = [
    shlex.split(line.split("#")[0])
    for line in "".join(BLOCKS).splitlines()
    if re.search(r"\b(kto|dpo|spin)\.py", line) and "--help" not in line and "--print_config" not in line
]


def few_steps(argv: list[str], tiny: Path, ratings: Path, tmp_path: Path) -> list[str]:
    """The same command on stand-ins: what a Hub id or a placeholder names becomes the tiny model and its ratings."""
    if "--resume" in argv:
        run = tmp_path / "out"
        kto.main(["--max_steps=2", f"--out_dir={run}", "--eval.prompts=4"])
        return [a.replace("out/run", str(run)) for a in argv]
    small = [
        "--max_steps=2",
        f"--out_dir={tmp_path / 'run'}",
        "--batch_size=4",
        "--eval.prompts=4",
        "--precision=32-true",
    ]
    if "--config" in argv:
        small += [f"--model={tiny}", f"--data.train={ratings}", f"--data.val={ratings}", "--keep_best=null"]
        small += ["--data.max_prompt=64", "--data.max_completion=64"]
    keep, skip = [], False
    for a in argv:  # launching eight processes is not for here: the strategies have their own tests
        if skip or a in ("--devices", "--strategy", "--model", "--data.train"):
            skip = not skip
        else:
            keep.append(a)
    return [*keep, *([f"--data.train={ratings}"] if "--data.train" in argv else []), *small]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_of_the_readme_runs(command, tiny, ratings, tmp_path, monkeypatch, torch_state, capsys):
    monkeypatch.chdir(ROOT)
    at = [c.endswith(".py") for c in command].index(True)
    program = {"kto.py": kto, "dpo.py": dpo, "spin.py": spin}[command[at]]
    program.main(few_steps(command[at + 1 :], tiny, ratings, tmp_path))
    said = capsys.readouterr().out
    assert "exported to" in said


@pytest.mark.parametrize("config", sorted((ROOT / "config").glob("*.yaml")), ids=lambda p: p.name)
def test_every_config_trains_two_steps(config, tiny, ratings, pairs, tmp_path, monkeypatch, torch_state):
    monkeypatch.chdir(ROOT)
    program, data = (dpo, pairs) if "dpo" in config.name else (kto, ratings)
    if "spin" in config.name:
        program, data = spin, ratings.parent / "demos.jsonl"
        data.write_text('{"prompt": "Best best?", "completion": " best."}\n' * 6)
    program.main(few_steps(["--config", str(config)], tiny, data, tmp_path))
    assert (tmp_path / "run" / "metrics.csv").read_text().count("\n") == 3


def test_a_hub_id_without_a_network_is_one_line_that_says_what_to_do(tmp_path, monkeypatch):
    import subprocess

    env = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path), "HF_HOME": str(tmp_path)}
    command = [sys.executable, "kto.py", "--config", "config/gpt2.yaml"]
    process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert process.returncode == 2
    lines = process.stderr.strip().splitlines()
    assert len(lines) == 1 and "openai-community/gpt2" in lines[0] and "folder" in lines[0]

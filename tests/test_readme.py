"""The README's commands, in the order in which they stand, and every config work as written: for
a few steps, and with a tiny model where a Hub id is named."""

import inspect
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from conftest import ROOT, Started, ranks

import kto
from infra.parse import parse

README = (ROOT / "README.md").read_text()
COMMANDS_PAGE = (ROOT / "docs" / "commands.md").read_text()
COMMANDS = [
    shlex.split(line.split("#")[0])
    for block in re.findall(r"^```bash\n(.*?)^```", README + COMMANDS_PAGE, re.M | re.S)
    for line in block.splitlines()
    if re.search(r"\w\.py\b|-m convert", line)
    and "generate.py" not in line  # tests/test_generate.py
]
TRAINING = ("kto.py", "dpo.py", "spin.py", "online.py")


def main_of(program: str):
    """`main` of a program, such as kto.py."""
    return import_module("preview" if program == "data.py" else program.removesuffix(".py")).main


def few_steps(argv: list[str], tiny: Path, ratings: Path) -> list[str]:
    """The same command on stand-ins: what a Hub id or a placeholder names becomes the tiny model and its ratings."""
    small = ["--max_steps=2", "--eval.prompts=4", "--precision=32-true"]
    if (
        "--resume" in argv
    ):  # which may change neither model nor data, and finds the settings in its folder
        return argv
    if "--config" in argv:
        small += [f"--model={tiny}", f"--data.val={ratings}"]
        if "--data.train" not in argv:
            small += [f"--data.train={ratings}"]
        if "thumbs.jsonl" in argv:  # dialogues, and six ratings
            small += ["--data.chat_template=config/dialogue.jinja", "--data.val=null", "--epochs=2"]
        small += [
            "--data.max_prompt=64",
            "--data.max_completion=64",
            "--batch_size=4",
            "--keep_best=null",
        ]
    keep, skip = [], False
    for a in argv:  # launching eight processes is not for here: the strategies have their own tests
        if skip or a in ("--devices", "--strategy", "--model", "--max_steps", "--data.val"):
            skip = not skip
        else:
            keep.append(a)
    return [*[str(ratings) if a == "ratings.jsonl" else a for a in keep], *small]


def test_the_commands_of_the_readme_run_in_the_order_in_which_they_stand(
    clone, tiny, ratings, monkeypatch, capsys
):
    monkeypatch.chdir(clone)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    shutil.copy(ROOT / "tests" / "foreign" / "openwebui.json", clone / "feedback.json")
    for command in COMMANDS:
        if command[1:3] == ["-m", "convert"]:
            assert subprocess.run([sys.executable, *command[1:]]).returncode == 0
            continue
        at = [c.endswith(".py") for c in command].index(True)
        program, argv = command[at], command[at + 1 :]
        if program in TRAINING and not {"--help", "--print_config"} & set(argv):
            argv = few_steps(argv, tiny, ratings)
        if program == "sweep.py":
            argv += ["--max_steps", "1", "--eval.prompts", "2", "--eval.samples", "0"]
            argv = [a.replace("1,2", "1").replace("0.1,0.3", "0.3") for a in argv]
        monkeypatch.setattr(sys, "argv", [program, *argv])
        main = main_of(program)
        try:
            main()
        except SystemExit as e:
            assert not e.code, command
        said = capsys.readouterr().out
        expected = {"report.py": "report.png", "sweep.py": "report.png"}
        expected |= {"--help": "--kto.beta", "--print_config": "  beta: "}
        expected |= {"data.py": "prompt tokens: median"}
        keys = [x for x in (program, *argv) if x in expected]
        assert (expected[keys[-1]] if keys else "exported to") in said, command


def test_every_link_between_pages_leads_to_a_file_and_a_heading():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("*/*.md")]:
        for path, anchor in re.findall(r"\]\((?!http)([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
            file = page.parent / path if path else page
            assert file.exists(), path
            if anchor:
                headings = re.findall("^#+ (.*)", file.read_text(), re.M)
                anchors = [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings]
                assert anchor in anchors


def test_the_loss_in_the_readme_is_that_of_kto_py_and_its_fork_runs(tiny, ratings, tmp_path):
    loss, fork = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    body = loss.split("\n", 1)[1]
    assert body in inspect.getsource(kto.kto_loss)
    argv = [f"--model={tiny}", f"--data.train={ratings}", "--batch_size=4", "--max_steps=2",
            "--progress=false", f"--out_dir={tmp_path / 'run'}"]  # fmt: skip
    (tmp_path / "mine.py").write_text(fork)
    code, _, stderr = Started(tmp_path, str(tmp_path / "mine.py"), argv).ended()
    assert code == 0, stderr
    assert (tmp_path / "run" / "final" / "config.json").exists()


# but for that of examples/instructions.py: tests/test_instructions.py runs it
CONFIGS = sorted(set((ROOT / "config").glob("*.yaml")) - {ROOT / "config" / "smollm2_online.yaml"})


@pytest.mark.parametrize("config", CONFIGS, ids=lambda p: p.name)
def test_every_config_trains_two_steps(
    config, tiny, llama, ratings, pairs, demos, tmp_path, monkeypatch
):
    kinds = {"dpo": pairs, "spin": demos, "online": ratings}
    program = next((name for name in kinds if name in config.name), "kto")
    settings = yaml.safe_load(config.read_text())
    head = re.match(r"(#.*\n)+", config.read_text())[0]
    assert all(f"{word}: " in head for word in ("What", "Command", "Hardware", "Time", "Expect"))
    model = llama if re.search("Llama|Qwen", settings["model"]) else tiny
    argv = few_steps(["--config", str(config)], model, kinds.get(program, ratings))
    argv = [*argv, f"--out_dir={tmp_path / 'run'}"]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [f"{program}.py", *argv])
    main = import_module(program).main
    if code := re.findall(r"^#   ((?:from|if|    ).*)$", config.read_text(), re.M):  # its checker
        exec("\n".join(code), {"__name__": "__main__"})
        assert (tmp_path / "run" / "eval" / "before.json").exists()
    elif settings.get("strategy") == "fsdp":
        argv += ["--devices=2"]
        ranks(2, lambda rank: main(argv))
    else:
        main(argv)
    assert (tmp_path / "run" / "metrics.csv").read_text().count("\n") == 3
    assert (tmp_path / "run" / "final" / "config.json").exists()


@pytest.mark.parametrize("script", sorted((ROOT / "config").glob("*.sh")), ids=lambda p: p.name)
def test_a_script_for_two_nodes_gives_settings_that_parse(script, tiny, ratings, monkeypatch):
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text().replace("\\\n", " ").replace("${NAME:-run}", "run")
    (command,) = re.findall(r"^exec .*?kto\.py (.*) \"\$@\"$", text, re.M)
    monkeypatch.chdir(ROOT)
    cfg = parse(kto.Settings, shlex.split(command), kto.KTO, demo="demo.yaml")
    assert (cfg.strategy, cfg.devices) == ("fsdp", 8)


def test_the_cells_of_the_notebook_run_in_their_order(clone, chatty, monkeypatch):
    """As Jupyter runs them, but for pip; with a tiny model, and few steps."""
    shutil.rmtree(clone / "out", ignore_errors=True)  # of another test's commands
    monkeypatch.chdir(clone)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(Image=Path))
    names = {}

    def shell(command: str) -> None:
        words = shlex.split(command.format_map(names))
        if "pip" in words:
            return
        if "kto.py" in words:
            words += ["--max_steps", "2", "--eval.prompts", "4", "--optim.warmup", "0"]
        monkeypatch.setattr(sys, "argv", words[1:])
        main_of(words[1])()

    names["shell"] = shell
    cells = json.loads((ROOT / "examples" / "colab.ipynb").read_text())["cells"]
    assert len(cells) == 6
    for cell in cells:
        code = "".join(cell["source"]).replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(chatty))
        code = re.sub(r"^( *)!(.*)$", lambda m: f"{m[1]}shell({m[2]!r})", code, flags=re.M)
        exec(re.sub(r"^( *)%cd .*$", "", code, flags=re.M), names)
    assert Path("out/report.png").exists() and Path("out/mine/final").exists()

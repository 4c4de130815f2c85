"""A setting that finds nothing to act on is refused, or a line says so: one row for each setting and condition."""

from unittest import mock

import pytest
import tokens
from conftest import start, train

import run as run_module
from infra.console import BadInput

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ tone }}{% endfor %}"


def rated(*labels: bool) -> list[dict]:
    """Eight rated records with a prompt each: their labels are these, in turns."""
    return [tokens.rated(f"q {i}", f"a {i}", labels[i % len(labels)]) for i in range(8)]


PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}
CHAT = tokens.rated([tokens.user("q")], [tokens.bot("a")])
RECORDS = {
    "rated": rated(True, False),
    "up": rated(True),
    "demos": [{"prompt": f"q {i}", "completion": f"a {i}"} for i in range(8)],
    "chat": [CHAT, CHAT | {"label": False}],
}


class Stop(Exception):
    """Raised where the processes would be launched, which is after all lines about settings."""


@pytest.fixture
def said(tiny, tmp_path, capsys, monkeypatch):
    """said(program, records, *argv): what a run says before its processes start. {} in an argument: the folder with the
    records and templates."""
    for name, records in RECORDS.items():
        tokens.write(tmp_path / f"{name}.jsonl", *records)
    (tmp_path / "plain.jinja").write_text(TEMPLATE)

    def run(program: str, records: str, *argv: str) -> str:
        monkeypatch.setattr(run_module, "launch", mock.Mock(side_effect=Stop))
        given = [f"--model={tiny}", f"--data.train={tmp_path / records}.jsonl", "--batch_size=2"]
        words = [word.replace("{}", str(tmp_path)) for word in argv]
        with pytest.raises(Stop):
            start(program, [*given, *words])
        return capsys.readouterr().out

    return run


VAL = "--data.val={}/rated.jsonl"
LORA = "--lora.rank=2"
CHECK = "--eval.check=demo"
TEMPLATED = "--data.chat_template={}/plain.jinja"
# (program, records, settings without effect, the condition under which they have none, one under which they have one)
ROWS = [
    ("kto", "rated", "lora.alpha=8 lora.dropout=0.1 lora.targets=c_attn", "", LORA),
    ("kto", "rated", "val_interval=3 eval.samples=3 keep_best=loss eval.check=demo", "", VAL),
    ("kto", "rated", "eval.check=demo", "", "--data.test={}/rated.jsonl"),
    ("kto", "rated", "eval.check_interval=3 eval.prompts=3", VAL, f"{VAL} {CHECK}"),
    ("kto", "rated", "data.split=99,1", "", "--data.split=50,50"),
    ("kto", "rated", "data.chat_template={}/plain.jinja", "", "--data.train={}/chat.jsonl"),
    ("kto", "rated", "data.chat_template_kwargs=tone=dry", TEMPLATED, f"{TEMPLATED} --data.train={{}}/chat.jsonl"),
    ("kto", "chat", "data.chat_template_kwargs=tune=dry", TEMPLATED, "--data.chat_template_kwargs=tone=dry"),
]  # fmt: skip


def names_of(settings: str) -> list[str]:
    return [word.partition("=")[0] for word in settings.split()]


@pytest.mark.parametrize("program, records, settings, idle, acting", ROWS)
def test_a_line_names_each_setting_that_has_no_effect(
    program, records, settings, idle, acting, said
):
    given = [f"--{setting}" for setting in settings.split()]
    if program == "online":
        given += [CHECK, "--online.prompts_per_iteration=4"]

    def lines(conditions: str) -> list[str]:
        out = said(program, records, *given, *conditions.split())
        return [x for x in out.splitlines() if x.startswith("no effect: ")]

    said_idle, said_acting = lines(idle), lines(f"{idle} {acting}")
    for name in names_of(settings):
        assert sum(name in line for line in said_idle) == 1, f"{name}: one line with its reason"
        assert not any(name in line for line in said_acting)


# These are known when the steps are: program, records, argv, the line
OF_STEPS = [
    ("kto", "rated", "--optim.warmup=9", "the warmup of 9 steps is longer than the run"),
    ("kto", "rated", "--epochs=9 --max_steps=2", "2 steps of 2 examples, by max_steps, not by epochs"),
    ("kto", "rated", "--max_steps=9", "9 steps of 2 examples, by max_steps, not by epochs"),
    ("spin", "demos", "--spin.max_iterations=3 --max_steps=5", "5 steps of 2 examples, by max_steps, not by epochs"),
    ("spin", "demos", "--spin.mix=0.1 --max_steps=1", "no effect: spin.mix: less than one of 8 answers"),
    ("kto", "rated", "--epochs=2 --keep_best=rewards/margins --data.val={}/up.jsonl",
     "keep_best: rewards/margins: no row of val.csv has a value: there is no best"),
]  # fmt: skip


@pytest.mark.parametrize("program, records, argv, line", OF_STEPS)
def test_a_run_says_what_its_steps_leave_without_effect(
    program, records, argv, line, said, tiny, tmp_path, capsys
):
    words = argv.replace("{}", str(tmp_path)).split()
    words += ["--batch_size=2", "--eval.samples=0"]
    words += ["--spin.max_new_tokens=2"] * (program == "spin")
    train(tiny, tmp_path / f"{records}.jsonl", tmp_path / "run", *words, program=program)
    assert any(x.startswith(line) for x in capsys.readouterr().out.splitlines())


ASKED = [
    ("--out=b.jsonl --extra=a --num_generations=2 --batch_size=2", "only with --prompts"),
    ("--chat_template_kwargs=a=b", "no record goes through the chat template"),
]


@pytest.mark.parametrize("argv, message", ASKED)
def test_generate_refuses_settings_that_have_no_effect(argv, message, tiny):
    with pytest.raises(BadInput, match=f"no effect: .*{message}") as e:
        start("generate", [f"--model={tiny}", "--prompt=a", *argv.split()])
    names = [word[2:].split("=")[0] for word in argv.split()]
    assert all(name in str(e.value) for name in names if name != "temperature")

"""A setting that finds nothing to act on is refused, or a line says so: one row for each setting and condition."""

from importlib import import_module
from unittest import mock

import pytest
import tokens
from conftest import start, train

import run as run_module
from infra.console import BadInput
from infra.settings import flatten

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ tone }}{% endfor %}"
DATED = "{{ strftime_now('%d') }}" + TEMPLATE


def rated(*labels: bool) -> list[dict]:
    """Eight rated records with a prompt each: their labels are these, in turns."""
    return [tokens.rated(f"q {i}", f"a {i}", labels[i % len(labels)]) for i in range(8)]


PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}
CHAT = tokens.rated([tokens.user("q")], [tokens.bot("a")])
RECORDS = {
    "rated": rated(True, False),
    "up": rated(True),
    "down": rated(False),
    "doubled": [r | {"prompt": "q"} for r in rated(True, False)],
    "pairs": [PAIR] * 4,
    "rewarded": [PAIR | {"chosen_reward": 3, "rejected_reward": 1}] * 4,
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
    (tmp_path / "dated.jinja").write_text(DATED)

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
LR_0 = "--optim.lr=0"
# (program, records, settings without effect, the condition under which they have none, one under which they have one)
ROWS = [
    ("kto", "rated", "lora.alpha=8 lora.dropout=0.1 lora.targets=c_attn", "", LORA),
    ("kto", "rated", "optim.schedule=linear optim.warmup=3 optim.weight_decay=0.1", LR_0, "--optim.lr=1"),
    ("kto", "rated", "optim.beta1=0.8 optim.beta2=0.8 optim.eps=0.1 optim.clip=2", LR_0, "--optim.lr=1"),
    ("kto", "rated", "val_interval=3 eval.samples=3 keep_best=loss eval.check=demo", "", VAL),
    ("kto", "rated", "eval.top_p=0.5 eval.stop=[a] eval.max_new_tokens=3 eval.batch_size=3", "", VAL),
    ("kto", "rated", "keep_best=kl/own", f"{VAL} {CHECK}", "--eval.check_interval=3"),
    ("kto", "rated", "eval.check=demo", "", "--data.test={}/rated.jsonl"),
    ("kto", "rated", "eval.check_interval=3 eval.prompts=3", VAL, f"{VAL} {CHECK}"),
    ("kto", "rated", "eval.temperature=0.5", f"{VAL} --eval.samples=0", "--eval.samples=1"),
    ("kto", "rated", "eval.top_p=0.5", f"{VAL} --eval.temperature=0", "--eval.temperature=0.5"),
    ("kto", "rated", "data.split=99,1", "", "--data.split=50,50"),
    ("kto", "rated", "data.group_by_prompt=true", "", "--data.train={}/doubled.jsonl"),
    ("kto", "rated", "data.chat_template={}/plain.jinja", "", "--data.train={}/chat.jsonl"),
    ("kto", "rated", "data.chat_template_kwargs=tone=dry", TEMPLATED, f"{TEMPLATED} --data.train={{}}/chat.jsonl"),
    ("kto", "chat", "data.chat_template_kwargs=tune=dry", TEMPLATED, "--data.chat_template_kwargs=tone=dry"),
    ("kto", "chat", "data.date=2026-01-31", TEMPLATED, "--data.chat_template={}/dated.jinja"),
    ("kto", "down", "kto.desirable_weight=2", "", "--data.train={}/rated.jsonl"),
    ("kto", "up", "kto.undesirable_weight=2", "", "--data.train={}/rated.jsonl"),
    ("kto", "up", "kto.balance=true", "", "--data.train={}/rated.jsonl"),
    ("kto", "down", "kto.balance=true", "", "--data.train={}/rated.jsonl"),
    ("dpo", "pairs", "dpo.gt_reward_scale=2 dpo.chosen_reward=2 dpo.rejected_reward=2", "", "--dpo.loss=rpo_sq"),
    ("dpo", "rewarded", "dpo.chosen_reward=2 dpo.rejected_reward=2", "--dpo.loss=rpo_sq",
     "--data.train={}/pairs.jsonl"),
    ("spin", "demos", "spin.mix=0.5", "--spin.max_iterations=1", "--spin.max_iterations=2"),
    ("spin", "demos", "spin.top_p=0.5", "--spin.temperature=0", "--spin.temperature=0.5"),
    ("online", "rated", "online.top_p=0.5", "--online.temperature=0", "--online.temperature=0.5"),
]  # fmt: skip


# These always act, or are limits, or are refused beside others by tests of their own.
ACTING = """model data.train data.val data.test data.shuffle data.max_prompt data.max_completion
    data.left_out data.extra reference reference_cache out_dir resume seed deterministic accelerator devices strategy
    precision epochs max_steps stop_at batch_size micro_batch_size micro_batch_tokens activation_checkpointing
    lora.rank lora.quantize
    optim.lr log_interval save_interval keep_last logger progress *.beta *.average_logps *.sft_loss_weight
    *.loss *.temperature *.stop *.max_new_tokens *.batch_size *.max_iterations *.rollout_batch_size
    online.prompts_per_iteration online.num_generations online.reference online.cut online.balance""".split()


def names_of(settings: str) -> list[str]:
    return [word.partition("=")[0] for word in settings.split()]


def test_each_setting_has_a_row_or_always_acts():
    tabled = {name for _, _, settings, *_ in ROWS for name in names_of(settings)}
    names = set()
    for program in ("kto", "dpo", "spin", "online"):
        names |= set(flatten(import_module(program).Settings))
    unknown = [
        n for n in names - tabled if n not in ACTING and f"*.{n.rpartition('.')[2]}" not in ACTING
    ]
    assert unknown == []


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
    ("kto", "rated", "--stop_at=4", "no effect: stop_at: the run ends at step 4"),
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
    (
        "--temperature=0 --seed=2 --top_p=0.5 --num_generations=2",
        "temperature 0 takes the likeliest token",
    ),
    ("--chat_template_kwargs=a=b", "no record goes through the chat template"),
]


@pytest.mark.parametrize("argv, message", ASKED)
def test_generate_refuses_settings_that_have_no_effect(argv, message, tiny):
    with pytest.raises(BadInput, match=f"no effect: .*{message}") as e:
        start("generate", [f"--model={tiny}", "--prompt=a", *argv.split()])
    names = [word[2:].split("=")[0] for word in argv.split()]
    assert all(name in str(e.value) for name in names if name != "temperature")

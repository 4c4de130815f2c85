"""A setting that finds nothing to act on is refused, or a line says so: one row for each setting and condition."""

from importlib import import_module
from unittest import mock

import pytest
from conftest import start, train

import run as run_module
from infra.console import BadInput
from infra.files import as_lines
from infra.settings import flatten

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ tone }}{% endfor %}"
DATED = "{{ strftime_now('%d') }}" + TEMPLATE


def rated(n: int, label: bool | None = None, **more) -> list[dict]:
    """n rated records with a prompt each, up and down in turns, or all with one label."""
    return [
        {
            "prompt": f"q {i}",
            "completion": f"a {i}",
            "label": i % 2 == 0 if label is None else label,
        }
        | more
        for i in range(n)
    ]


def turns(role: str, text: str) -> list[dict]:
    return [{"role": role, "content": text}]


PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}
CHAT = {"prompt": turns("user", "q"), "completion": turns("assistant", "a"), "label": True}
RECORDS = {
    "rated": rated(8),
    "up": rated(8, True),
    "down": rated(8, False),
    "doubled": [{**r, "prompt": "q"} for r in rated(8)],
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
        (tmp_path / f"{name}.jsonl").write_text(as_lines(records))
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
    ("kto", "rated", "lora.alpha=8", "", LORA),
    ("kto", "rated", "lora.dropout=0.1", "", LORA),
    ("kto", "rated", "lora.targets=c_attn", "", LORA),
    ("kto", "rated", "optim.schedule=linear", LR_0, "--optim.lr=1"),
    ("kto", "rated", "optim.warmup=3", LR_0, "--optim.lr=1"),
    ("kto", "rated", "optim.weight_decay=0.1", LR_0, "--optim.lr=1"),
    ("kto", "rated", "optim.beta1=0.8", LR_0, "--optim.lr=1"),
    ("kto", "rated", "optim.beta2=0.8", LR_0, "--optim.lr=1"),
    ("kto", "rated", "optim.eps=0.1", LR_0, "--optim.lr=1"),
    ("kto", "rated", "optim.clip=2", LR_0, "--optim.lr=1"),
    ("kto", "rated", "val_interval=3", "", VAL),
    ("kto", "rated", "eval.samples=3", "", VAL),
    ("kto", "rated", "keep_best=loss", "", VAL),
    ("kto", "rated", "keep_best=kl/own", f"{VAL} {CHECK}", "--eval.check_interval=3"),
    ("kto", "rated", "eval.check=demo", "", VAL),
    ("kto", "rated", "eval.check=demo", "", "--data.test={}/rated.jsonl"),
    ("kto", "rated", "eval.check_interval=3", VAL, f"{VAL} {CHECK}"),
    ("kto", "rated", "eval.prompts=3", VAL, f"{VAL} {CHECK}"),
    ("kto", "rated", "eval.temperature=0.5", f"{VAL} --eval.samples=0", "--eval.samples=1"),
    ("kto", "rated", "eval.top_p=0.5", "", VAL),
    ("kto", "rated", "eval.top_p=0.5", f"{VAL} --eval.temperature=0", "--eval.temperature=0.5"),
    ("kto", "rated", "eval.stop=[a]", "", VAL),
    ("kto", "rated", "eval.max_new_tokens=3", "", VAL),
    ("kto", "rated", "eval.batch_size=3", "", VAL),
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
    ("dpo", "pairs", "dpo.gt_reward_scale=2", "", "--dpo.loss=rpo_sq"),
    ("dpo", "pairs", "dpo.chosen_reward=2", "", "--dpo.loss=rpo_sq"),
    ("dpo", "pairs", "dpo.rejected_reward=2", "", "--dpo.loss=rpo_sq"),
    ("dpo", "rewarded", "dpo.chosen_reward=2", "--dpo.loss=rpo_sq", "--data.train={}/pairs.jsonl"),
    ("dpo", "rewarded", "dpo.rejected_reward=2", "--dpo.loss=rpo_sq", "--data.train={}/pairs.jsonl"),
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


def test_each_setting_has_a_row_or_always_acts():
    tabled = {setting.partition("=")[0] for _, _, setting, *_ in ROWS}
    names = set()
    for program in ("kto", "dpo", "spin", "online"):
        names |= set(flatten(import_module(program).Settings))
    unknown = [
        n for n in names - tabled if n not in ACTING and f"*.{n.rpartition('.')[2]}" not in ACTING
    ]
    assert unknown == []


@pytest.mark.parametrize("program, records, setting, idle, acting", ROWS)
def test_a_line_names_each_setting_that_has_no_effect(
    program, records, setting, idle, acting, said
):
    name = setting.partition("=")[0]
    more = []
    if program == "online":
        more = [CHECK, "--online.prompts_per_iteration=4"]

    def lines(conditions: str) -> list[str]:
        out = said(program, records, *more, f"--{setting}", *conditions.split())
        return [x for x in out.splitlines() if x.startswith("no effect: ") and name in x]

    assert len(lines(idle)) == 1, "one line, with the name and the reason"
    assert lines(f"{idle} {acting}") == []


# These are known when the steps are: program, records, argv, the line
OF_STEPS = [
    ("kto", "rated", "--stop_at=4", "no effect: stop_at: the run ends at step 4"),
    ("kto", "rated", "--optim.warmup=9", "the warmup of 9 steps is longer than the run"),
    ("kto", "rated", "--epochs=9 --max_steps=2", "2 steps of 2 examples, by max_steps, not by epochs"),
    ("kto", "rated", "--max_steps=9", "9 steps of 2 examples, by max_steps, not by epochs"),
    ("spin", "demos", "--spin.max_iterations=3 --max_steps=5", "5 steps of 2 examples, by max_steps, not by epochs"),
    ("spin", "demos", "--spin.mix=0.1 --max_steps=1", "no effect: spin.mix: less than one of 8 answers"),
    ("kto", "rated", "--epochs=2 --keep_best=auc --data.val={}/up.jsonl",
     "keep_best: auc: no row of val.csv has a value: there is no best"),
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


REFUSED = [
    ("--eval.stop=['x','']", r"stop: \['x', ''\]: an empty text would end each answer"),
    ("--out_dir=s3://bucket/x", "out_dir: expected LocalPath or null, got s3://bucket/x"),
]


@pytest.mark.parametrize("argv, message", REFUSED)
def test_what_cannot_act_as_it_is_meant_is_refused(argv, message, said):
    with pytest.raises(BadInput, match=f"^{message}"):
        said("kto", "rated", *argv.split())


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

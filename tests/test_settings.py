"""Settings: what a run can be told, who wins, and how a mistake is answered in one line."""

import ast
import dataclasses
import importlib
import inspect
import math
import re
import textwrap
import typing
from pathlib import Path

import pytest
import yaml
from conftest import Started

import kto
from records.readers import absolute_sources
from runs import cli, errors, settings
from runs.devices import resolve_devices
from runs.errors import BadInput

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "config" / "demo.yaml"
KINDS = settings.flatten(kto.Settings)  # dotted name -> type
OWN = ["--model", "m", "--data.train", "t"]  # the least that a run of one's own must say


def parse(*argv, cls=kto.Settings):
    return cli.parse(cls, [str(a) for a in argv], "KTO.", "demo.yaml")


def refused(*argv) -> str:
    with pytest.raises(BadInput) as e:
        parse(*argv)
    assert str(e.value) and "\n" not in str(e.value) and len(str(e.value)) < 250
    return str(e.value)


@pytest.fixture
def config(tmp_path):
    """A file of a text, or of a dict over the least that a run must say."""

    def write(content, name="run.yaml") -> str:
        if isinstance(content, dict):
            content = yaml.safe_dump({"model": "m", "data": {"train": "t"}} | content)
        (tmp_path / name).write_text(content)
        return str(tmp_path / name)

    return write


def put(s, name: str, value):
    """A copy with this one set; settings themselves are frozen."""
    head, _, rest = name.partition(".")
    return dataclasses.replace(s, **{head: put(getattr(s, head), rest, value) if rest else value})


def nested(name: str, value) -> dict:
    """a.b -> {"a": {"b": value}}, with what a run must say beside it."""
    group, _, leaf = name.rpartition(".")
    node = {leaf: value}
    return {group: ({"train": "t"} if group == "data" else {}) | node} if group else node


# ---- which settings a run has --------------------------------------------------------------------


def test_without_arguments_it_is_the_demo():
    s, demo = parse(), yaml.safe_load(DEMO.read_text())
    assert (s.model, s.epochs, s.eval.check) == (demo["model"], demo["epochs"], "demo")
    assert (s.data.train, s.data.val) == (demo["data"]["train"], demo["data"]["val"])
    assert s.optim.lr == float(demo["optim"]["lr"])
    assert s == parse("--config", DEMO)


def test_overrides_alone_are_on_top_of_the_demo():
    s = parse("--batch_size", 32, "--kto.beta=0.3")
    assert (s.batch_size, s.kto.beta) == (32, 0.3)
    assert s == put(put(parse(), "batch_size", 32), "kto.beta", 0.3)


def test_a_run_of_ones_own_must_name_its_records(config):
    configs = [["--config", config(x, x[:4])] for x in ("model: m", "seed: 2")]
    for argv in (["--model", "m"], ["--model=m"], *configs):
        assert refused(*argv) == "data.train: required: the records to learn from"
    assert refused("--config", config("data: {train: t}\n")) == "model: required"
    assert refused("--config", config("model: null\ndata: {train: t}\n")) == "model: required"
    assert parse(*OWN).optim.lr == settings.Optim.lr, "the demo is no base for a run of one's own"


def test_naming_the_records_alone_keeps_the_demos_model_but_not_its_validation_or_checker():
    s = parse("--data.train", "mine.jsonl")
    assert (s.model, s.data.train, s.optim.lr) == (parse().model, "mine.jsonl", parse().optim.lr)
    assert (s.data.val, s.eval.check) == (None, None)


@pytest.mark.parametrize("first", [True, False])
def test_unless_the_user_names_them_in_any_order(first):
    def both(*more):
        return parse(*more, "--data.train=t") if first else parse("--data.train=t", *more)

    s = both("--data.val", "v")
    assert (s.data.val, s.eval.check) == ("v", None)
    s = both("--eval.check", "demo")
    assert (s.data.val, s.eval.check) == (None, "demo")


def test_an_override_wins_wherever_it_stands(config):
    file = config({"batch_size": 4, "kto": {"beta": 0.3}})
    for argv in (
        ["--batch_size=8", "--config", file],
        ["--config", file, "--batch_size", 8],
        ["--batch_size", 8, f"--config={file}"],
    ):
        s = parse(*argv)
        assert (s.batch_size, s.kto.beta) == (8, 0.3)


def test_of_two_configs_the_later_wins_and_the_rest_is_kept(config):
    a = config({"batch_size": 4, "kto": {"beta": 0.3}}, "a.yaml")
    b = config({"batch_size": 8}, "b.yaml")
    for s, size in (
        (parse(f"--config={a}", "--config", b), 8),
        (parse("--config", b, f"--config={a}"), 4),
    ):
        assert (s.batch_size, s.kto.beta) == (size, 0.3)
    s = parse("--config", a, "--config", config("data: {val: v}\n", "c.yaml"))
    assert s.data.train == "t", "a group is added to, not replaced"


def test_leaving_out_the_demos_validation_and_checker_is_said(capsys, monkeypatch):
    said = "your data.train: the demo's validation data and checker are left out\n"
    for argv in (["--data.train", "t"], ["--seed=3", "--data.train=t"]):
        parse(*argv)
        assert capsys.readouterr().out == said
    parse("--data.train=t", "--data.val=v", "--eval.check=demo")
    assert capsys.readouterr().out == "", "both are given"
    parse(*OWN)
    assert capsys.readouterr().out.startswith("your model: defaults, not config/demo.yaml")
    parse("--config", DEMO, "--data.train=t")
    assert capsys.readouterr().out.endswith("data.val stays what the configuration names\n")
    for argv in ([], ["--seed=3"], ["--config", DEMO, "--data.train=t", "--data.val=null"]):
        parse(*argv)
        assert capsys.readouterr().out == "", "nothing was left out"
    monkeypatch.setenv("RANK", "1")
    parse("--data.train", "t")
    assert capsys.readouterr().out == "", "once, not by each process"


def test_adapters_at_the_learning_rate_of_whole_models_are_said(capsys):
    for argv, said in (["--lora.rank=4"], True), (["--lora.rank=4", "--optim.lr=1e-4"], False):
        parse(*OWN, *argv)
        assert ("optim.lr 1e-06 is for whole models" in capsys.readouterr().out) == said


def test_a_bare_yes_or_no_setting_means_yes_wherever_it_stands(config):
    file = config("model: m\ndata: {train: t}\n")
    for argv in (
        ["--deterministic"],
        ["--deterministic", "--batch_size=8"],
        ["--batch_size", 8, "--deterministic"],
        ["--deterministic", "--config", file],
        ["--config", file, "--deterministic"],
        ["--kto.average_logps", "--deterministic", "--data.score_prompt"],
    ):
        assert parse(*argv).deterministic is True
    s = parse(*argv, "--kto.sft_average_logps")
    assert s.data.score_prompt is s.kto.average_logps is s.kto.sft_average_logps is True
    assert parse("--deterministic", "false").deterministic is False
    with pytest.raises(SystemExit):
        parse("--deterministic", "-h")


def test_an_int_is_steps_and_a_float_a_fraction_and_they_stay_so(config):
    for value in (1, 1.0):
        for s in (parse("--limit_train", value), parse("--config", config({"limit_train": value}))):
            assert type(s.limit_train) is type(value)


# ---- mistakes, in one line -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong, near",
    [
        ("kto.bta", "kto.beta"),
        ("lr", "optim.lr"),
        ("batchsize", "batch_size"),
        ("optim.weightdecay", "optim.weight_decay"),
        ("beta1", "optim.beta1"),
        ("top_p", "eval.top_p"),
        ("learning.rate", None),
        # as users of TRL, transformers and PEFT write them; loss is the algorithm's own
        *(x for x in cli.NAMES_ELSEWHERE.items() if x[1] != "loss"),
        ("loss_type", "kto.loss"),
        ("eval-steps", "val_interval"),
        ("batch_sise", "batch_size"),
        ("temper", None),  # no guess where little is alike
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(config, wrong, near):
    expected = f"{wrong}: no such setting" + (f"; did you mean {near}?" if near else "")
    assert refused(f"--{wrong}", 3) == refused(f"--{wrong}=3") == expected
    assert refused("--help", f"--{wrong}=3") == expected, "else help hides the mistake"
    file = config(nested(wrong, 3))
    assert refused("--config", file) == f"{file}: {expected}"
    file = config({wrong: 3})
    assert refused("--config", file) == f"{file}: {expected}", "dotted in YAML"


def test_words_of_the_command_line_mean_nothing_in_a_file(config):
    for name in ("config", "print_config", "help"):
        assert f"{name}: no such setting" in refused("--config", config({name: "x"}))
    assert "kto.beta.x: no such setting" in refused("--config", config({"kto": {"beta": {"x": 1}}}))


def test_a_group_is_not_a_value(config):
    first = next(name for name in KINDS if name.startswith("kto."))
    message = f"kto: a group: expected a setting in it, such as {first}"
    for value in (3, None, [1], "x"):
        assert message in refused("--config", config({"kto": value}))
    for value in ("x", "null", "{beta: 0.3}"):
        assert refused("--kto", value) == message
    assert parse("--config", config({"kto": {}})) == parse(*OWN)


@pytest.mark.parametrize(
    "content, line",
    [
        ("model: m\n\tdata: 3\n", 2),
        ("model: m\ndata: [1\n", 3),
        ("model: m\nseed: 1: 2\n", 2),
        ("model: !!python/object:os.system 1\n", 1),
        ("model: m\n---\nmodel: n\n", 2),
        ("kto: &a {beta: *a}\n", 1),
        ("model: \0\n", 1),
        ("", 1),
        ("# only a comment\n", 1),
        ("[]\n", 1),
        ("words\n", 1),
    ],
)
def test_a_file_that_is_no_settings_is_refused_with_its_line(config, content, line):
    file = config(content)
    assert refused("--config", file).startswith(f"{file}:{line}: ")


@pytest.mark.survive("R7")
@pytest.mark.parametrize(
    "content, name, line, first",
    [
        ("optim: {lr: 1}\nmodel: m\noptim: {clip: 2}\n", "optim", 3, 1),
        ("model: m\nkto:\n  beta: 1\n  loss: kto\n  beta: 2\n", "kto.beta", 5, 3),
        ("model: m\nkto: {beta: 1, beta: 1}\n", "kto.beta", 2, 2),
    ],
)
def test_a_setting_that_a_file_gives_twice_is_refused_with_both_lines(
    config, content, name, line, first
):
    file = config(content)
    given = f"{file}:{line}: {name}: given in line {first} already"
    assert refused("--config", file) == given, "else the last wins, and a group's others are lost"


@pytest.mark.survive("R7")
@pytest.mark.parametrize(
    "argv, message",
    [
        (["--seed=1", "--seed", "2"], "seed: given twice, 1 and 2: give it once"),
        (["--seed", "1", "--batch_size=4", "--seed=2"], "seed: given twice, 1 and 2: give it once"),
        (
            ["--deterministic", "--deterministic=false"],
            "deterministic: given twice, true and false: give it once",
        ),
        (["--sed=1", "--sed=2"], "sed: given twice, 1 and 2: give it once"),
    ],
)
def test_an_option_that_is_given_twice_with_two_values_is_refused_with_both(argv, message):
    assert refused(*argv) == message, "as a setting that a file gives twice"
    assert parse("--seed=7", "--seed=7").seed == 7, "the same value twice is no contradiction"
    assert parse("--eval.stop+=a", "--eval.stop+=b").eval.stop == ["a", "b"]


@pytest.mark.parametrize("program", ["kto", "dpo", "spin", "online"])
def test_what_users_of_trl_type_names_a_setting_of_the_program_or_none(program):
    cls = importlib.import_module(program).Settings
    known = settings.flatten(cls)
    for elsewhere, here in cli.NAMES_ELSEWHERE.items():
        found = cli._nearest_name(elsewhere, known)
        if here == "loss":  # the algorithm's own; SPIN has one loss only
            here = {"spin": None, "dpo": "dpo.loss"}.get(program, "kto.loss")
        assert found == here, elsewhere


def test_an_alias_of_a_group_is_refused_and_one_of_a_value_is_read(config):
    file = config("model: &m x\ndata: {train: *m}\n")
    assert parse("--config", file).data.train == "x"
    for content in (
        "model: x\ndata: &d {train: t}\neval: *d\n",
        "model: x\ndata: &d {train: t}\noptim:\n  <<: *d\n",
        "a: &a [x, x]\nb: &b [*a, *a]\n",
    ):
        message = "an alias of a list or a group is not supported"
        assert re.search(rf":\d: {message}$", refused("--config", config(content)))


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    binary, gone = tmp_path / "binary.yaml", tmp_path / "gone.yaml"
    binary.write_bytes(b"\xff\xfe\x00\x80")
    assert refused("--config", binary) == f"config: {binary}: not UTF-8 at byte 0"
    assert refused("--config", gone) == f"config: {gone}: No such file or directory"
    assert refused("--config", tmp_path) == f"config: {tmp_path}: Is a directory"
    assert refused("--batch_size=4", "--config") == "config: expected one argument"


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--kto.beta", "hi"], "kto.beta: expected float, got hi"),
        (["--kto.beta", "nan"], "kto.beta: expected float, got nan"),
        (["--batch_size", "1.5"], "batch_size: expected int, got 1.5"),
        (["--batch_size="], "batch_size: expected int, got nothing"),
        (["--data.shuffle", "maybe"], "data.shuffle: expected bool, got maybe"),
        (["--max_steps", "true"], "max_steps: expected int | null, got true"),
        (["--val_interval", "often"], "val_interval: expected int | float | null, got often"),
        (["--eval.stop", "query"], "eval.stop: expected list[str], got query"),
        (["--optim.lr"], "optim.lr: expected one argument"),
        (["--optim.lr", "--seed", "3"], "optim.lr: expected one argument"),
        (["mine.jsonl"], "Unrecognized arguments: mine.jsonl"),
    ],
)
def test_a_wrong_type_is_refused_by_name(argv, message):
    assert refused(*argv) == message


def test_every_setting_refuses_a_value_of_another_type_by_its_name(config):
    for name, kind in KINDS.items():
        value, said = ([[1]], "[[1]]") if "str" in str(kind) else ("hi", "hi")
        message = refused("--config", config(nested(name, value)))
        assert re.fullmatch(rf"{name}: expected [\w |\[\]]+, got .+", message), message
        assert "class" not in message, message
        assert said in message or "list" in str(kind)


def test_null_is_refused_where_it_means_nothing(config):
    for name in "batch_size kto.beta data.shuffle project lora.targets optim.warmup".split():
        assert refused("--config", config(nested(name, None))).startswith(f"{name}: expected ")
    assert refused("--config", config(nested("data.train", None))) == "data.train: required"
    assert parse("--config", config(nested("val_interval", None))).val_interval is None


def test_no_number_may_be_nan_infinite_or_negative(config):
    demo = parse()
    for name, kind in KINDS.items():
        wrong = [-1]
        if "float" in str(kind):
            wrong += [float("nan"), float("inf"), -float("inf"), -0.5]
        for value in wrong if re.search(r"\b(int|float)\b", str(kind)) else []:
            with pytest.raises(BadInput) as e:
                put(demo, name, value).validate()
            message = str(e.value)
            assert message.startswith(name.split(".")[0]), (name, value)
            assert (
                math.isfinite(value) or message == f"{name}: expected a finite number, got {value}"
            )
    file = config("model: m\ndata: {train: t}\nkto: {beta: .nan}")
    assert refused("--config", file).startswith("kto.beta: expected a")


@pytest.mark.parametrize(
    "name, lowest",  # the lowest that is meant; below it lies what is not
    [
        ("max_steps", 1), ("stop_at", 1), ("epochs", 1), ("devices", 1), ("num_nodes", 1),
        ("log_interval", 1), ("keep_last", 1), ("batch_size", 2), ("micro_batch_size", 1), ("micro_batch_tokens", 1),
        ("limit_train", 1), ("limit_val", 1), ("val_interval", 1), ("eval.check_interval", 1),
        ("save_interval", 1), ("data.max_prompt", 1), ("data.max_completion", 1),
        ("lora.rank", 1), ("lora.alpha", 1), ("seed", 0), ("optim.warmup", 0), ("optim.constant", 0),
        ("eval.samples", 0), ("eval.prompts", 0), ("eval.batch_size", 1), ("eval.max_new_tokens", 1), ("eval.top_k", 1),
    ],
)  # fmt: skip
def test_counts_have_a_lowest_value(name, lowest):
    assert settings.flatten(parse(f"--{name}={lowest}"))[name] == lowest
    assert refused(f"--{name}={lowest - 1}").startswith(name.split(".")[0])


@pytest.mark.parametrize(
    "name, good, bad",
    [
        ("optim.beta1", 0.0, 1.0), ("optim.beta2", 0.0, 1.0), ("lora.dropout", 0.0, 1.0), ("optim.eps", 1e-12, 0.0),
        ("limit_train", 0.5, 0.0), ("val_interval", 0.5, 0.0), ("limit_val", 0.5, 0.0), ("save_interval", 0.5, 0.0),
        ("optim.lr", 0.0, -1e-6), ("optim.clip", 1e-6, 0.0), ("optim.weight_decay", 0.0, -1e-6),
        ("optim.warmup", 0.5, -0.5), ("kto.beta", 0.001, 0.0), ("kto.desirable_weight", 0.0, -1.0),
        ("eval.temperature", 0.0, -1.0), ("eval.top_p", 1.0, 1.1), ("seed", 2**32 - 1, 2**32),
        ("optim.min_lr", 7e-4, 8e-4),  # the demo's peak is 7e-4; above it a dry run (lr 0) would not be dry
    ],
)  # fmt: skip
def test_numbers_have_a_range(name, good, bad):
    assert settings.flatten(parse(f"--{name}={good}"))[name] == good
    assert refused(f"--{name}={bad}").startswith(name.split(".")[0])


@pytest.mark.parametrize(
    "name, good",
    [
        ("strategy", "fsdp"), ("precision", "bf16-mixed"), ("accelerator", "cpu"), ("logger", "wandb"),
        ("optim.name", "adamw8bit"), ("optim.schedule", "linear"), ("kto.loss", "apo_zero_unpaired"),
        ("eval.check", "demo"),
    ],
)  # fmt: skip
def test_a_choice_outside_the_list_is_refused_with_the_list(name, good):
    parse(f"--{name}={good}")
    message = refused(f"--{name}={'[wrong]' if '[' in good else 'wrong'}")
    assert message.startswith(f"{name}: expected ") and "got wrong" in message
    assert good.strip("[]") in message


def test_settings_that_exclude_each_other_are_refused(config):
    assert "give one, not both" in refused("--micro_batch_size=4", "--micro_batch_tokens=4")
    message = "batch_size: kto needs at least 2: a mismatched pair"
    assert refused("--batch_size=1").startswith(message)
    assert parse("--batch_size=1", "--kto.loss=apo_zero_unpaired").batch_size == 1
    assert "nothing to learn" in refused("--kto.preference_loss_weight=0")
    parse("--kto.preference_loss_weight=0", "--kto.sft_loss_weight=0.1")
    assert refused("--precision=bf16-true").startswith("precision: bf16-true loses")
    parse("--precision=bf16-true", "--lora.rank=4")
    assert "use ddp" in refused("--precision=64-true", "--strategy=fsdp")
    parse("--precision=64-true", "--strategy=ddp")
    assert refused("--resume=auto").startswith("resume: auto needs --out_dir")
    parse("--resume=auto", "--out_dir=o")
    parse("--resume=some/folder")
    message = "keep_best: needs data.val or data.split"
    assert refused("--data.train=t", "--keep_best=loss").startswith(message)
    parse("--data.train=t", "--keep_best=loss", "--data.split=8,1,1")
    parse("--keep_best=loss")
    assert "lora.targets: expected some of query, key" in refused("--lora.targets=")


TIMES = {"00:00:01": 1, "01:02:03": 3723, "100:00:00": 360000}
TIMES |= {"1-00:00:10": 86410, "0-12:00:00": 43200}


@pytest.mark.parametrize("text, seconds", TIMES.items())
def test_the_time_limit_is_read(config, text, seconds):
    assert parse("--max_time", text).seconds() == seconds
    assert parse("--config", config({"max_time": text})).seconds() == seconds


@pytest.mark.parametrize(
    "text", ["90", "5m", "01:30", "1:2:3", "-1:00:00", "1-1-00:00:00", "00:00:00", "", "01:00:00 "]
)
def test_another_time_limit_is_refused(text):
    assert refused(f"--max_time={text}").startswith("max_time: expected ")


# ---- the manual, and every setting in use --------------------------------------------------------


def sentences(cls) -> dict[str, str]:
    """Dotted name -> the sentence under the field, read from the source."""
    out = {}
    for base in reversed(cls.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        for field, text in zip(body, [*body[1:], None]):
            if isinstance(field, ast.AnnAssign):
                said = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                out[field.target.id] = " ".join(text.value.value.split()) if said else ""
    for name, kind in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(kind):
            del out[name]
            out |= {f"{name}.{k}": v for k, v in sentences(kind).items()}
    return out


def test_help_has_a_sentence_for_every_setting(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit) as e:
        parse("--help")
    assert e.value.code == 0
    text = re.sub(r"\n {20,}", " ", capsys.readouterr().out)
    said = sentences(kto.Settings)
    assert set(said) == set(KINDS)
    for name, sentence in said.items():
        line = re.search(rf"^  --{re.escape(name)}[ ,].*$", text, re.M)
        assert sentence and sentence.rstrip(".") in " ".join(line[0].split()), name
    assert "Path to a configuration file" not in text, "a group cannot be given as a file"


def test_every_setting_is_read_by_something():
    read = set()
    for file in [*ROOT.glob("*.py"), *ROOT.glob("r*s/*.py"), *ROOT.glob("hub/*.py")]:
        tree = ast.parse(file.read_text())
        defs = [
            f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and "validate" in f.name
        ]
        checks = {id(x) for f in defs for x in ast.walk(f)}
        nodes = [x for x in ast.walk(tree) if isinstance(x, ast.Attribute) and id(x) not in checks]
        read |= {x.attr for x in nodes if isinstance(x.ctx, ast.Load)}
    assert {name for name in KINDS if name.split(".")[-1] not in read} == set()


ODD = {
    "model": "null", "data.train": "a: b, [c] #d", "reference": "1e3", "out_dir": "2026-11-21", "resume": "yes",
    "precision": "32-true", "max_steps": 7, "max_time": "12:30:00", "limit_train": 0.25, "limit_val": 3,
    "micro_batch_size": 2, "val_interval": 2, "save_interval": 1e-3, "keep_best": "loss",
    "logger": "wandb", "project": "Größe 'x'\n", "progress": False, "deterministic": True, "strategy": "ddp",
    "data.val": "-v", "data.test": "on", "data.split": "8,1,1", "data.max_prompt": 5, "data.max_completion": 6,
    "data.date": "2026-01-31", "data.columns": "prompt=q", "data.labels": "up=4|5", "data.chat_template": "t.jinja",
    "data.shuffle": False, "lora.rank": 3, "lora.targets": "head", "optim.lr": 1e-7, "lora.quantize": "nf4",
    "optim.clip": 2.0, "eval.top_k": 3, "eval.check": "demo",
    "optim.eps": 1e-12, "optim.warmup": 1.0, "optim.constant": 1, "eval.max_new_tokens": 4, "kto.beta": 0.1 + 0.2,
    "eval.cache_gb": 0.5, "kto.sft_average_logps": False, "reference_cache": "~/c", "activation_checkpointing": True,
    "stop_at": 5, "eval.check_interval": 0.5, "data.extra": "a,b", "eval.stop": ["\n"],
}  # fmt: skip


def test_saved_settings_load_back_equal(config):
    for before in (parse(), parse(*OWN)):
        assert parse("--config", config(cli.dump_yaml(before))) == before
    odd = parse()
    for name, value in ODD.items():
        odd = put(odd, name, value)
    optional = {n for n, kind in KINDS.items() if type(None) in typing.get_args(kind)}
    assert optional - set(ODD) == {"micro_batch_tokens"}, "all but the one that excludes another"
    back = parse("--config", config(cli.dump_yaml(odd)))
    assert back == odd
    types = [[type(v) for v in settings.flatten(s).values()] for s in (back, odd)]
    assert types[0] == types[1], "1 and 1.0 are equal, but not the same interval"
    one, two = "micro_batch_size: 2\n", "micro_batch_tokens: null\n"
    other = cli.dump_yaml(odd).replace(one, "").replace(two, "micro_batch_tokens: 2\n")
    assert parse("--config", config(other)) != odd


def test_printed_settings_load_back_equal(capsys, config):
    for argv in ([], ["--kto.beta=0.3", "--optim.warmup=0.5"], ["--data.train=t"], OWN):
        with pytest.raises(SystemExit) as e:
            parse(*argv, "--print_config")
        assert e.value.code == 0
        printed = config(capsys.readouterr().out)
        assert parse("--config", printed) == parse(*argv)
        capsys.readouterr()


def test_every_config_parses_and_begins_with_what_to_expect():
    files = list((ROOT / "config").glob("*.yaml"))
    assert DEMO in files
    for file in files:
        program = re.search("dpo|spin|online|$", file.name)[0] or "kto"
        cls = importlib.import_module(program).Settings
        s = parse("--config", file, cls=cls)
        assert s == parse("--config", file, "--seed", s.seed, cls=cls)
        head = re.match(r"(#.*\n)+", file.read_text())[0]
        for word in ("What", "Command", "Hardware", "Time", "Expect"):
            assert f"{word}: " in head, file


# ---- a resume, and a launcher --------------------------------------------------------------------


def test_a_resume_may_change_the_cut_and_what_is_told_but_not_the_run():
    old = settings.flatten(parse())
    assert settings.changed_settings(old, old) == ([], [])
    for name in ("kto.beta", "kto.loss", "optim.lr", "optim.schedule", "max_steps", "epochs", "seed", "batch_size",
                 "reference", "precision", "data.max_prompt", "data.shuffle",
                 "lora.rank", "eval.check", "limit_train", "deterministic"):  # fmt: skip
        assert settings.changed_settings(old, old | {name: "other"}) == ([name], []), name
    for name in ("log_interval", "val_interval", "save_interval", "logger", "project", "keep_last", "progress",
                 "max_time", "stop_at", "resume", "out_dir", "eval.samples",
                 "eval.check_interval", "activation_checkpointing"):  # fmt: skip
        assert settings.changed_settings(old, old | {name: "other"}) == ([], []), name
    for name in ("micro_batch_size", "micro_batch_tokens", "devices", "num_nodes", "strategy",
                 "accelerator", "reference_cache"):  # fmt: skip
        same_to_rounding = settings.changed_settings(old, old | {name: "other"})
        assert same_to_rounding == ([], [name]), name
    for name in ("model", "data.train", "data.val"):  # their hashes are compared
        assert settings.changed_settings(old, old | {name: "other"}) == ([], []), name
    both = old | {"devices": 2, "optim.lr": 1.0, "logger": "wandb"}
    assert settings.changed_settings(old, both) == (["optim.lr"], ["devices"])


def test_a_resume_takes_a_step_for_no_epoch():
    old = settings.flatten(parse("--optim.warmup=1", "--limit_train=1", "--optim.lr=1"))
    new = settings.flatten(parse("--optim.warmup=1.0", "--limit_train=1.0", "--optim.lr=1.0"))
    assert settings.changed_settings(old, new) == (["limit_train", "optim.warmup"], [])


def test_a_resume_knows_only_real_settings():
    assert settings.FREE_SETTINGS <= set(KINDS) and settings.CUT_SETTINGS <= settings.FREE_SETTINGS
    new = settings.flatten(parse())
    old = {k: v for k, v in new.items() if k != "optim.eps"}
    assert settings.changed_settings(old, new) == (["optim.eps"], []), (
        "it was not there: another run"
    )


def test_a_launchers_number_of_processes_is_taken_or_contradicted(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    asked = parse("--devices=3", "--num_nodes=2", "--accelerator=cpu")
    found = dict(devices=3, num_nodes=2, accelerator="cpu", precision="32-true")
    assert resolve_devices(asked) == found, "no launcher"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    found = resolve_devices(parse())
    assert (found["devices"], found["num_nodes"]) == (2, 2)
    with pytest.raises(BadInput, match="^devices: 3, but the launcher started 2 processes"):
        resolve_devices(parse("--devices=3"))


def test_srun_starts_as_many_processes_as_the_settings_ask_for_or_one(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    with pytest.raises(BadInput, match="^devices: 1 on each of 1 nodes, but srun started 8 proc"):
        resolve_devices(parse("--accelerator=cpu"))
    asked = parse("--accelerator=cpu", "--devices=4", "--num_nodes=2")
    assert resolve_devices(asked)["devices"] == 4, "srun -N 2 -n 8"
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert resolve_devices(asked)["devices"] == 4, "Fabric launches them itself"
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    assert resolve_devices(parse("--accelerator=cpu"))["devices"] == 1


def test_the_program_itself_exits_as_a_shell_expects(tmp_path):
    code, out, err = Started(tmp_path, "kto", ["--help"]).ended()
    assert (code, err) == (0, "") and "--kto.beta" in out
    code, out, err = Started(tmp_path, "kto", ["--kto.bta", "3"]).ended()
    assert (code, out) == (2, "")
    assert err == "error: kto.bta: no such setting; did you mean kto.beta?\n"


@pytest.mark.parametrize(
    "env,place",
    [
        ({}, 0),
        ({"RANK": "3", "LOCAL_RANK": "1"}, 3),
        ({"LOCAL_RANK": "0", "NODE_RANK": "1"}, 1),
        ({"SLURM_PROCID": "2"}, 2),
        ({"SLURM_PROCID": "0", "LOCAL_RANK": "1"}, 1),
    ],
)
def test_a_process_knows_its_place_under_every_launcher(env, place, monkeypatch):
    """In a shell that SLURM gave, SLURM_PROCID is 0 in every process that Fabric launches."""
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert errors.rank() == place


# ---- what a run makes of its settings ------------------------------------------------------------


def test_paths_become_absolute_and_ids_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "b [1], c:2.jsonl").touch()
    (tmp_path / "own").mkdir()
    for given, expected in {
        "a.jsonl": "{}/a.jsonl",
        "b [1], c:2.jsonl": "{}/b [1], c:2.jsonl",
        "a.jsonl:0.7, ./own/../a.jsonl:.3": "{}/a.jsonl:0.7,{}/a.jsonl:.3",
        "*.jsonl": "{}/*.jsonl",
        "own": "{}/own",
        "own:train": "{}/own:train",
        "own:train:0.5,a.jsonl:0.5": "{}/own:train:0.5,{}/a.jsonl:0.5",
        "org/name": "org/name",
        "org/name:config:train": "org/name:config:train",
        "org/name:0.5,a.jsonl:0.5": "org/name:0.5,{}/a.jsonl:0.5",
    }.items():
        absolute = expected.replace("{}", str(tmp_path))
        assert absolute_sources(given) == absolute, given
        assert absolute_sources(absolute) == absolute, given


def test_a_large_models_micro_batches_are_smaller_on_a_cpu():
    demo, small = (3, 96), (30, 576)  # layers, width
    default = settings.DEFAULT_TOKENS
    on_cpu = parse("--accelerator=cpu")
    assert settings.most_tokens(on_cpu, *demo) == default, "as on all devices"
    assert 2000 < settings.most_tokens(on_cpu, *small) < 4096 < default
    assert settings.most_tokens(parse("--accelerator=gpu"), *small) == default
    for argv, tokens in (("--micro_batch_tokens=9000", 9000), ("--micro_batch_size=2", None)):
        assert settings.most_tokens(parse("--accelerator=cpu", argv), *small) == tokens

"""Settings: what a run can be told, who wins, and how a mistake is answered in one line."""

import dataclasses
import importlib
import re
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, Started

import kto
from infra import parse as parse_module
from infra import settings
from infra.console import BadInput
from records.sources import absolute_sources

DEMO = ROOT / "config" / "demo.yaml"
KINDS = settings.flatten(kto.Settings)  # dotted name -> type
OWN = ["--model", "m", "--data.train", "t"]  # the least that a run of one's own must say


def parse(*argv, cls=kto.Settings):
    return parse_module.parse(cls, [str(a) for a in argv], kto.KTO, "demo.yaml")


def refused(*argv) -> str:
    with pytest.raises(BadInput) as e:
        parse(*argv)
    assert str(e.value) and "\n" not in str(e.value) and len(str(e.value)) < 400
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


# ---- which settings a run has --------------------------------------------------------------------


def test_without_arguments_it_is_the_demo():
    assert parse() == parse("--config", DEMO)


def test_a_run_of_ones_own_must_name_its_model_and_records_and_has_nothing_of_the_demo(config):
    configs = [["--config", config(x, x[:4])] for x in ("model: m", "seed: 2")]
    for argv in (["--model", "m"], ["--model=m"], *configs):
        assert refused(*argv) in (
            "data.train: expected str, got nothing",
            "model: expected str, got nothing",
        )
    assert refused("--config", config("data: {train: t}\n")) == "model: expected str, got nothing"
    assert parse(*OWN).optim.lr == settings.Optim.lr


def test_naming_the_records_alone_keeps_the_demos_model_but_neither_validation_nor_checker():
    s = parse("--data.train=t")
    assert (s.model, s.data.train, s.optim.lr) == (parse().model, "t", parse().optim.lr)
    assert (s.data.val, s.eval.check) == (None, None)
    s = parse("--data.val", "v", "--data.train=t", "--eval.check=demo")
    assert (s.data.val, s.eval.check) == ("v", "demo")


def test_an_option_overrides_the_files_wherever_it_stands_and_a_later_file_an_earlier_one(config):
    a = config({"batch_size": 4, "kto": {"beta": 0.3}}, "a.yaml")
    b = config("batch_size: 8\ndata: {val: v}\n", "b.yaml")
    for argv, size in (
        (["--batch_size=2", "--config", a, f"--config={b}"], 2),
        (["--config", a, "--batch_size", 2, "--config", b], 2),
        ([f"--config={a}", "--config", b], 8),
        (["--config", b, "--config", a], 4),
    ):
        s = parse(*argv)
        assert (s.batch_size, s.kto.beta, s.data.train, s.data.val) == (size, 0.3, "t", "v")


# ---- mistakes, in one line -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong, near",
    [
        ("kto.bta", "kto.beta"),
        ("kto.bet", "kto.beta"),  # argparse would take it
        ("lr", "optim.lr"),
        ("optim.weightdecay", "optim.weight_decay"),
        ("top_p", "eval.top_p"),
        ("val-interval", "val_interval"),
        ("output_dir", "out_dir"),
        ("temp", None),  # no guess where little is alike
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(config, wrong, near):
    expected = f"{wrong}: no such setting" + (f"; did you mean {near}?" if near else "")
    assert refused(f"--{wrong}", 3) == refused(f"--{wrong}=3") == expected
    group, _, name = wrong.rpartition(".")
    file = config({group: {name: 3}} if group else {name: 3})
    assert refused("--config", file) == f"{file}: {expected}"
    assert near is None or near in KINDS


QUANTIZED = "lora.quantize: it needs lora.rank, and does not work with strategy fsdp"
WRONG = {  # option -> what is said
    "--kto.beta=hi": "kto.beta: expected PositiveFloat, got hi",
    "--batch_size=null": "batch_size: expected PositiveInt, got null",
    "--max_steps=true": "max_steps: expected PositiveInt or null, got true",
    "--val_interval=0": "val_interval: expected PositiveInt or 0.5 epochs or null, got 0",
    "--lora.quantize=nf4": QUANTIZED,
    "--precision=bf16-true": "precision: bf16-true loses AdamW's updates in full fine-tuning (a step of 1e-6 moves no weight of 0.02); use bf16-mixed, or LoRA",  # noqa: E501
    "--lora.quantize=nf4 --lora.rank=2 --strategy=fsdp": QUANTIZED,
    "--eval.stop=x": "eval.stop: expected list, got x",
    "--eval.stop=['x','']": "eval.stop: ['x', '']: an empty text would end each answer after its first token",
    r"--eval.stop=['\nB:']": r"eval.stop: ['\\nB:']: a backslash and a letter is no line break; use double quotes",
    "--out_dir=s3://bucket/x": "out_dir: expected LocalPath or null, got s3://bucket/x",
    "--strategy=x": "strategy: expected auto or ddp or fsdp, got x",
    "--kto=x": "kto: no such setting",
    "--optim.lr": "optim.lr: expected one value, got none",
    "--optim.lr 1 2": "optim.lr: expected one value, got 1 2",
    "mine.jsonl": "mine.jsonl: no such setting",
    "--data.train=": "data.train: expected a finite number or a text that is not empty, got ''",
    "--optim.lr=inf": "optim.lr: expected a finite number or a text that is not empty, got inf",
    "--resume=auto": "resume: auto needs --out_dir, the run's own",
}  # fmt: skip


@pytest.mark.parametrize("argv", WRONG)
def test_a_wrong_value_is_refused_by_its_name(argv):
    assert refused(*argv.split()) == WRONG[argv]


def test_a_file_that_is_no_settings_is_refused(config, tmp_path):
    for content in ("model: m\n\tdata: 3\n", "model: !!python/object:os.system 1\n", "[]", ""):
        assert refused("--config", config(content))
    assert str(tmp_path / "gone.yaml") in refused("--config", tmp_path / "gone.yaml")
    for name, value, said in (
        ("seed", None, "seed: expected NonNegativeInt, got null"),
        ("lora", None, "{}: lora: no such setting"),
        ("kto", 3, "{}: kto: no such setting"),
    ):
        file = config({name: value})
        assert refused("--config", file) == said.format(file)
    file = config("model: m\noptim:\n  lr: 1e-3\n  clip: 1\n  lr: 1e-4\n")
    assert refused("--config", file) == f"config: {file}: lr: given twice"


@pytest.mark.parametrize(
    "argv, said",
    [
        ("--kto.bta 3", "kto.bta: no such setting; did you mean kto.beta?"),
        # before the model is looked for
        ("--model=no/model --data.train=demo/trian.jsonl", "data.train: demo/trian.jsonl: no such file"),
        ("--model=no/model --data.train=no/data.set", "model: no/model: no such folder here"),
    ],
)  # fmt: skip
def test_the_program_itself_exits_as_a_shell_expects(argv, said, tmp_path):
    code, out, err = Started(tmp_path, "kto", argv.split()).ended()
    assert (code, out) == (2, "") and err.startswith(f"error: {said}") and err.count("\n") == 1


# ---- the manual, and every setting in use --------------------------------------------------------


def test_help_has_a_sentence_for_every_setting_inherited_ones_too(monkeypatch, capsys):
    cls = importlib.import_module("online").Settings
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit) as e:
        parse("--help", cls=cls)
    assert e.value.code == 0
    text = re.sub(r"\n {20,}", " ", capsys.readouterr().out)
    assert "KTO: learn from single ratings" in text, "of the file that the objective stands in"
    for name in settings.flatten(cls):
        option = re.search(rf"(?m)^  --{re.escape(name)}[ ,].*$", text)[0]
        assert len(option.split(" (")[0].split()) > 2, "more than its name and its value"
    assert " Decoupled weight decay. (" in text


def test_every_setting_is_read_by_something():
    files = {*ROOT.glob("*.py"), *ROOT.glob("*/*.py")} - set(ROOT.glob("tests/*.py"))
    text = "".join(file.read_text() for file in files)
    assert [name for name in KINDS if f".{name.split('.')[-1]}" not in text] == []


def test_every_number_of_the_settings_is_an_int_or_a_float_and_no_subclass():
    """jsonargparse gives subclasses. Fabric takes a number of GPUs only if its type is int itself."""
    s = parse(*OWN, "--devices=1", "--max_steps=1", "--optim.clip=1", "--optim.warmup=1")
    kinds = set(map(type, settings.flatten(s).values()))
    assert {int, float} <= kinds <= {int, float, bool, str, list, type(None)}


ODD = {
    "model": "null", "data.train": "a: b, [c] #d", "reference": "10", "out_dir": "2026-11-21", "resume": "yes",
    "max_steps": 7, "val_interval": 2,
    "save_interval": "0.001 epochs", "keep_best": "Größe 'x'\n", "progress": False, "data.val": "-v", "data.test": "on",
    "data.date": "2026-01-31", "data.extra": "up=4|5", "optim.lr": 1e-7, "optim.warmup": "1 epoch",
    "kto.beta": 0.1 + 0.2, "eval.stop": ["\n", "a: b"],
}  # fmt: skip


def test_saved_and_printed_settings_load_back_equal(config, capsys):
    odd = parse()
    for name, value in ODD.items():
        odd = put(odd, name, value)
    for before in (parse(), parse(*OWN), odd):
        back = parse("--config", config(settings.dump_yaml(before)))
        assert back == before
    for argv in ([], ["--kto.beta=0.3", "--optim.warmup=0.5 epochs"], OWN):
        capsys.readouterr()
        with pytest.raises(SystemExit):
            parse(*argv, "--print_config")
        printed = capsys.readouterr().out
        assert parse("--config", config(printed)) == parse(*argv)


# ---- what a resume may change, and what a run makes of its settings ------------------------------


FREE = (
    "val_interval stop_at resume eval.samples micro_batch_tokens devices strategy reference_cache"
)
HASHED = "model data.train"  # their contents are compared
OTHER_RUN = "kto.beta max_steps seed batch_size reference precision"


def test_a_resume_may_change_how_a_step_is_split_and_what_is_told_but_not_the_run():
    old, rules = settings.flatten(parse()), settings.resume_rules(kto.Settings)
    new = old | dict.fromkeys(f"{FREE} {HASHED} {OTHER_RUN}".split(), "other")
    del old["optim.eps"]  # it was not there
    changed = settings.changed_settings(old, new, rules)
    assert changed == sorted([*OTHER_RUN.split(), "optim.eps"])


def test_paths_become_absolute_and_ids_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "own").mkdir()
    for given, expected in {
        "a.jsonl, ./own/../a.jsonl": "{}/a.jsonl,{}/a.jsonl",
        "*.jsonl": "{}/*.jsonl",
        "own:train": "{}/own:train",
        "org/name:config:train": "org/name:config:train",
        "org/name,a.jsonl": "org/name,{}/a.jsonl",
    }.items():
        absolute = expected.replace("{}", str(tmp_path))
        assert absolute_sources(given) == absolute_sources(absolute) == absolute, given
    assert settings.find_path("demo/base") == ROOT / "demo" / "base", "from any working directory"
    (tmp_path / "demo" / "base").mkdir(parents=True)
    assert settings.find_path("demo/base") == Path("demo/base"), "unless the user has one"


# YAML 1.1 reads each of these as a number, a boolean or a date
TEXTS = """no True 0010 0x1F 2026_11_28 .5 1e5 .NaN 10:30 2026-01-31 2026-01-31T12:00:00Z""".split()


@pytest.mark.parametrize("text", [*TEXTS, "😀", "x\\y"])
def test_a_text_is_what_stands_in_the_file_or_on_the_command_line(text, config):
    content = (
        f"model: m\ndata: {{train: t, date: {text}}}\nout_dir: {text}\neval:\n  stop: [{text}, a]\n"
    )
    of_file = parse("--config", config(content))
    of_line = parse(*OWN, f"--out_dir={text}", f"--data.date={text}", f"--eval.stop=[{text}, a]")
    quoted = parse(*OWN, "--config", config({"out_dir": text, "eval": {"stop": [text, "a"]}}))
    for s in (of_file, of_line, quoted):
        assert (s.out_dir, s.eval.stop) == (text, [text, "a"])
        assert parse("--config", config(settings.dump_yaml(s))) == s
    assert of_file.data.date == of_line.data.date == text


NUMBERS = [  # program, as it stands in a file, as it is typed, what it means; None: it is refused
    ("kto", "seed: 0010", "--seed=0010", 10),
    ("kto", "seed: 10:30", "--seed=10:30", None),
    ("kto", "optim: {lr: 1e-5}", "--optim.lr=1e-5", 1e-5),
    ("kto", "progress: no", "--progress=no", False),
    ("dpo", "dpo: {gt_reward_scale: -010}", "--dpo.gt_reward_scale=-010", -10.0),
    ("dpo", "dpo: {gt_reward_scale: .nan}", "--dpo.gt_reward_scale=.nan", None),
    ("spin", "spin: {beta: [010, .2, 3]}", "--spin.beta=[010, .2, 3]", [10.0, 0.2, 3.0]),
    ("spin", "spin: {beta: [0.1, 1:30, 0.2]}", "--spin.beta=[0.1, 1:30, 0.2]", None),
]


@pytest.mark.parametrize("program, line, option, expected", NUMBERS)
def test_numbers_are_decimal_and_a_setting_of_another_type_refuses_a_text(
    program, line, option, expected, config
):
    cls = importlib.import_module(program).Settings
    setting = option[2:].partition("=")[0]
    for argv in (["--config", config(f"model: m\n{line}\n"), "--data.train=t"], [*OWN, option]):
        if expected is None:
            with pytest.raises(BadInput, match=f"^{setting}: expected "):
                parse(*argv, cls=cls)
        else:
            value = settings.flatten(parse(*argv, cls=cls))[setting]
            assert value == expected and type(value) is type(expected)

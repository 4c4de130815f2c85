"""One record of an answer: what generate.py, the page and online iterations write is trained on exactly the prompt that
was answered. A record's own settings win over those of the run."""

import shutil
from pathlib import Path

import pytest
from conftest import of_iteration, train
from tokens import user, write

import generate
import rollout
from infra.files import read_lines
from infra.settings import Data
from models.hub import Source
from rate.__main__ import RateSettings
from rate.desk import Desk
from rate.ratings import Ratings
from records.examples import load_examples
from records.tokenizer import Tokenizer

# It prints a day, tools, and a thinking that a setting closes in the prompt; around an answer it writes a thinking.
TEMPLATE = """
{%- if strftime_now is defined %}day {{ strftime_now('%d %b %Y') }} {% else %}no day {% endif %}
{%- for t in tools or [] %}tool {{ t.function.name }} {{ t.function.description }} {% endfor %}
{%- for m in messages %}{{ '<' + m.role + '>' }}
{%- if m.role == 'assistant' and '</think>' not in m.content %}<think></think>{% endif %}{{ m.content }}<|pad|>
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}
"""


@pytest.fixture
def model(tiny, tmp_path):
    """A model whose chat template is TEMPLATE."""
    folder = shutil.copytree(tiny, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def sampled(monkeypatch) -> list:
    """The token ids of all prompts that are sampled from."""
    prompts = []

    def noted(fabric, policy, batch, *args):
        prompts.extend(list(map(int, ids)) for ids in batch)
        return real(fabric, policy, batch, *args)

    real = generate.generate
    monkeypatch.setattr(generate, "generate", noted)
    monkeypatch.setattr(rollout, "generate", noted)
    return prompts


def trained(model: Path, file: Path, **settings) -> list:
    """The examples of a run on this file, with these settings of data."""
    data = Data(train=str(file), max_prompt=96, max_completion=32, **settings)
    given = (data.chat_template, data.date, data.chat_template_kwargs)
    return load_examples(str(file), Tokenizer(Source(model), *given), "rated", data)


TOOL = {"type": "function", "function": {"name": "f", "description": "tells", "parameters": {}}}
QUESTION = [user("one")]
PROMPTS = [
    {"prompt": "one"},
    {"prompt": "one", "tools": [TOOL]},
    {"prompt": "one", "chat_template_kwargs": {"enable_thinking": False}},
    {"prompt": "one", "date": "2020-02-03"},
    {"prompt": "one", "solution": 2**62 + 1},
    {"prompt": "one", "solution": 2},
    {"prompt": QUESTION, "completion": "an old answer", "label": False, "weight": 0.5},
]
# What a run may say otherwise. A record that says how the model was asked is not changed by it.
OTHERWISE = dict(date="2021-05-06", chat_template_kwargs="enable_thinking=false")


def answered_by_program(model: Path, prompts: Path, out: Path, style: str | None) -> None:
    argv = [f"--model={model}", f"--prompts={prompts}", f"--out={out}", "--max_new_tokens=3"]
    generate.main([*argv, *([f"--chat_template_kwargs={style}"] if style else [])])
    rows = read_lines(out)
    write(out, *[row | {"label": True} for row in rows])


def answered_on_the_page(model: Path, prompts: Path, out: Path, style: str | None) -> None:
    """Each thumb takes its card off."""
    args = RateSettings(
        model=str(model), temperature=0, max_new_tokens=3, chat_template_kwargs=style
    )
    asked = generate.AskedModel(args)
    records = list(generate.read_prompts(str(prompts), asked.asked).values())
    desk = Desk("m", asked, args, Ratings(out), records)
    while cards := desk.state()["cards"]:
        answer = desk.answer({"record": cards[0]["record"]})
        desk.rate({"record": answer["record"], "label": True})
        assert len(desk.state()["cards"]) == len(cards) - 1


@pytest.mark.parametrize("style", [None, "enable_thinking=false"])
@pytest.mark.parametrize("answer_all", [answered_by_program, answered_on_the_page])
def test_kto_learns_from_exactly_the_prompts_that_were_answered(
    answer_all, style, model, sampled, tmp_path
):
    prompts, out = write(tmp_path / "p.jsonl", *PROMPTS), tmp_path / "a.jsonl"
    answer_all(model, prompts, out, style)
    rows = read_lines(out)
    n = len(PROMPTS) - 1 - bool(style)  # with the setting two records ask the same
    assert len(rows) == len(sampled) == n
    assert [row["solution"] for row in rows if "solution" in row] == [2**62 + 1, 2]
    examples, counts = trained(model, out, **OTHERWISE)
    assert [list(e.prompt) for e in examples] == sampled
    assert len({tuple(ids) for ids in sampled}) == n - 2, "a solution is no part of the text"
    assert counts["with a cut answer, which gets no end"] == n
    # the template would write a thinking before an answer, and an end after it
    tokenizer = Tokenizer(Source(model))
    ended, _ = trained(model, write(out, *[row | {"cut": False} for row in rows]))
    for cut, whole, row in zip(examples, ended, rows, strict=True):
        texts = [tokenizer.decode(e.completions[0], special_tokens=True) for e in (cut, whole)]
        assert texts == [row["completion"], row["completion"] + "<|pad|>"]


def test_online_iterations_write_records_that_kto_learns_from(model, sampled, tmp_path):
    prompts = write(tmp_path / "p.jsonl", *[{"solution": 2**60 + 1} | x for x in PROMPTS])
    seen = []

    def checker(answers):
        seen.extend(answers)
        return [i % 2 == 0 for i, _ in enumerate(answers)]

    argv = ["--data.extra=solution", "--data.date=2024-01-01", "--online.max_iterations=1"]
    argv += ["--batch_size=4", "--online.max_new_tokens=3", "--eval.samples=0"]
    train(model, prompts, tmp_path / "run", *argv, program="online", checker=checker)
    whole = {answer.fields["solution"] for answer in seen}
    assert whole == {2, 2**60 + 1, 2**62 + 1} and {type(x) for x in whole} == {int}
    answered, rated = (of_iteration(tmp_path / "run", 1, kind) for kind in ("answers", "rated"))
    assert len(answered) == len(PROMPTS) - 1, "equal but for the answer"
    for name, rows in (("a", [x | {"label": True} for x in answered]), ("r", rated)):
        examples, _ = trained(model, write(tmp_path / f"{name}.jsonl", *rows), **OTHERWISE)
        assert [list(e.prompt) for e in examples] == sampled
    assert [e.label for e in examples] == [i % 2 == 0 for i, _ in enumerate(examples)]

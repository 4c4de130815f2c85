"""A setting that finds nothing to act on: a line says so, or the setting is refused."""

import pytest
import tokens
from conftest import start, train

from infra.console import BadInput


def rated(*labels: bool) -> list[dict]:
    """Eight rated records with a prompt each: their labels are these, in turns."""
    return [tokens.rated(f"q {i}", f"a {i}", labels[i % len(labels)]) for i in range(8)]


RECORDS = {
    "rated": rated(True, False),
    "up": rated(True),
    "demos": [{"prompt": f"q {i}", "completion": f"a {i}"} for i in range(8)],
}
# program, records, argv, the line
ROWS = [
    ("kto", "rated", "--max_steps=1 --data.split=100,1e-9", "data.split: 0 examples for val"),
    ("spin", "demos", "--spin.mix=0.1 --max_steps=1", "no effect: spin.mix: less than one of 8 answers"),
    ("kto", "rated", "--epochs=2 --keep_best=rewards/margins --data.val={}/up.jsonl",
     "keep_best: rewards/margins: no row of val.csv has a value: there is no best"),
]  # fmt: skip


@pytest.mark.parametrize("program, records, argv, line", ROWS)
def test_a_run_says_what_has_no_effect(program, records, argv, line, tiny, tmp_path, capsys):
    for name in RECORDS:
        tokens.write(tmp_path / f"{name}.jsonl", *RECORDS[name])
    words = argv.replace("{}", str(tmp_path)).split()
    words += ["--batch_size=2", "--eval.samples=0"]
    words += ["--spin.max_new_tokens=2"] * (program == "spin")
    train(tiny, tmp_path / f"{records}.jsonl", tmp_path / "run", *words, program=program)
    assert any(x.startswith(line) for x in capsys.readouterr().out.splitlines())


def test_a_line_names_a_variable_that_the_chat_template_does_not_read(tiny, tmp_path, capsys):
    tokens.write(tmp_path / "chat.jsonl", tokens.rated([tokens.user("q")], [tokens.bot("a")]))
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{{ tone }}{% endfor %}"
    )
    argv = [f"--model={tiny}", f"--data.train={tmp_path / 'chat.jsonl'}"]
    argv += [f"--data.chat_template={tmp_path / 't.jinja'}"]
    with pytest.raises(BadInput):  # one record is no batch
        start("kto", [*argv, "--data.chat_template_kwargs=tone=dry,tune=dry"])
    said = capsys.readouterr().out
    assert "chat_template_kwargs: the chat template does not read tune\n" in said
    assert "does not read tone" not in said

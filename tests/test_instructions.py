"""examples/instructions.py: each kind of instruction accepts what follows it and nothing else; no cheap way out; topics
and kinds that are held out stay out; and the program itself runs on a small random model."""

import json
import os

import pytest
from conftest import ROOT, Started, evaluated

import instructions as task

SEA = "Sea turtles swim far across warm oceans and come back to the beach where they once hatched"
# kind: n, words, answers that are right, answers that are wrong
CASES = {
    "title": (0, [], [f"<<Turtles>>\n{SEA}."],
              [SEA, f"<Turtles> {SEA}", f"<<>> {SEA}", f"<<a\nb>> {SEA}"]),
    "postscript": (0, [], [f"{SEA}. P.S. They also eat jellyfish."],
                   [SEA, f"{SEA}. P.S.", f"{SEA} PS They also eat jellyfish"]),
    "no comma": (0, [], [SEA], [f"{SEA}, mostly"]),
    "bullets": (2, [], [f"* {SEA}\n* slow", f"Turtles:\n  - {SEA}\n- slow", f"•{SEA}\n•slow"],
                [f"* {SEA}", f"{SEA} * a * b", f"**{SEA}**\n**b**"]),
    "numbered": (2, [], [f"1. {SEA}\n2. slow", f"1) {SEA}\n2) slow\n3) old"],
                 [f"1. {SEA}", f"{SEA} 1. a 2. b", f"1.5 {SEA}\n2.5"]),
    "forbidden words": (0, ["is", "in"], [f"{SEA} inside this"], [f"{SEA} in May", f"{SEA}. It IS so"]),
    "keywords": (0, ["people", "home"], [f"{SEA}. People call it home"], [f"{SEA}. People", f"{SEA} peoples homes"]),
    "at most": (18, [], [SEA, f"{SEA} today"], [f"{SEA} in May"]),
    "at least": (18, [], [f"{SEA} today"], [SEA]),
    "opening": (0, ["Today"], [f"Today {SEA}", f'"today", {SEA}'], [SEA, f"So today {SEA}", f"Todays {SEA}"]),
    "question": (0, [], [f"{SEA}. Why?"], [SEA]),
    "letter": (0, ["z"], [SEA], [f"{SEA} Zoe", f"{SEA} lazily"]),
    "number": (0, [], [f"{SEA} in 1990"], [f"{SEA} in ninety"]),
    "brackets": (0, [], [f"{SEA} (mostly)"], [SEA, f"{SEA} ()", f"{SEA} (mostly"]),
    "exclamation": (0, [], [f"{SEA}!"], [SEA]),
}  # fmt: skip


def fields_of(kind: str, n: int = 0, words=()) -> dict:
    a, b = (*words, "", "")[:2]
    return {"kind": kind, "n": float(n), "words": f"{a}|{b}"}


@pytest.mark.parametrize("kind", CASES)
def test_a_kind_accepts_what_follows_it_and_no_cheap_way_out(kind):
    n, words, right, wrong = CASES[kind]
    fields = fields_of(kind, n, words)
    copy = task.instruction_of(fields)
    cheap = ["", "\n", "P.S.", "!", "1", "?", "# a", "<<a>>", "word " * 40, *words]
    cheap += [f"{right[0]} {copy.upper()}", f"{copy} {right[0]}"]
    assert [text for text in right if not task.is_right(text, fields)] == []
    assert [text for text in wrong + cheap if task.is_right(text, fields)] == []


def test_the_data_are_always_the_same_and_the_kinds_that_are_held_out_stay_out(tmp_path):
    parts = []
    for name in ("a", "b"):
        task.write_data(tmp_path / name)
        parts.append({file.stem: file.read_text() for file in (tmp_path / name).iterdir()})
    assert parts[0] == parts[1]
    kinds = {}
    for name, text in parts[0].items():
        kinds[name] = {json.loads(line)["kind"] for line in text.splitlines()}
    assert kinds["new_kinds"] == {kind for kind, how in task.KINDS.items() if how.new}
    assert kinds["train"] == kinds["val"] and not kinds["train"] & kinds["new_kinds"]


def test_the_program_makes_its_data_and_trains_on_them(chatty, tmp_path):
    """As a user types it, with a small random model in place of SmolLM2."""
    argv = f"""--model {chatty} --batch_size 4 --precision 32-true --out_dir out/run
        --online.prompts_per_iteration 2 --online.max_iterations 2 --online.num_generations 4
        --online.max_new_tokens 6 --eval.max_new_tokens 6 --eval.samples 2 --val_interval 2
        --eval.check_interval 2 --data.max_prompt 100 --data.max_completion 20"""
    program = str(ROOT / "examples" / "instructions.py")
    started = Started(tmp_path, program, argv.split(), first=lambda: os.chdir(tmp_path))
    code, said, stderr = started.ended()
    assert code == 0, stderr
    assert "iteration 2: 8 examples, 0 of 8 rated right, " in said
    after = evaluated(tmp_path / "out" / "run", "after")
    fields = [answer["fields"] for answer in after["answers"]]
    assert {x["kind"] for x in fields} == set(task.KINDS)
    assert {x["group"] for x in fields} == {"trained kinds", "new kinds"}

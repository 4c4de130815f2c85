"""The reference's cache: what is read back is what the reference said, which is then not needed."""

import re
import shutil

import numpy as np
import pytest
import transformers
from conftest import assert_same, even, numbers, ranks, refused, rows_of, train
from tiny_models import GPT2, made, same
from tokens import edit_json

import reference_cache
from models import load
from models.export import export
from models.hub import find_model
from packing import pack

COMMON = ("--batch_size=7", "--max_steps=4", "--optim.lr=1e-3", "--kto.beta=0.5",
          "--precision=64-true", "--save_interval=null", "--micro_batch_size=3")  # fmt: skip
SINGLE = [a if "64-true" not in a else "--precision=32-true" for a in COMMON]


@pytest.mark.parametrize("program, lora", [("kto", "--lora.rank=2"), ("dpo", "--lora.rank=null")])
def test_a_run_on_cached_log_probs_is_the_run_on_the_reference_itself(
    program, lora, tiny, ratings, pairs, tmp_path
):
    data = {"kto": ratings, "dpo": pairs}[program]
    argv = [a for a in COMMON if program == "kto" or not a.startswith("--kto")]
    argv += [lora, f"--data.val={data}", "--eval.samples=0"]
    asked = train(tiny, data, tmp_path / "a", *argv, program=program)
    argv.append(f"--reference_cache={tmp_path / 'cache'}")
    cached = train(tiny, data, tmp_path / "b", *argv, program=program)
    for x, y in zip(numbers(cached), numbers(asked), strict=True):
        for row in (x, y):
            row.pop("kl/clamped", None)  # at r = 0 that of rounding; kl says the same
        assert x == pytest.approx(y, abs=1e-9)
    assert all(same(x, asked["weights"][n], 1e-9) for n, x in cached["weights"].items())


def test_a_second_run_computes_nothing_and_is_the_first_to_the_bit(tiny, ratings, tmp_path, capsys):
    argv = (*COMMON, f"--reference_cache={tmp_path / 'cache'}", f"--data.val={ratings}")

    # a checker has answers scored that the released reference has not seen
    first = train(tiny, ratings, tmp_path / "a", *argv, checker=even)
    files = sorted((tmp_path / "cache").iterdir())
    assert "reference: 0 log-probs computed" not in capsys.readouterr().out
    second = train(tiny, ratings, tmp_path / "b", *argv, checker=even)
    assert "reference: 0 log-probs computed" in capsys.readouterr().out
    assert_same(first, second)
    assert sorted((tmp_path / "cache").iterdir()) == files


def other_weights(source) -> None:
    gpt = load.load_model(source)
    gpt.transformer.ln_f.weight.data[0] += 1e-3
    export(find_model(str(source)), gpt.rows, gpt.unique_parameters(), source)


def other_epsilon(source) -> None:
    edit_json(source / "config.json", layer_norm_epsilon=1e-3)


@pytest.mark.parametrize("change", ["--precision=bf16-mixed", other_weights, other_epsilon])
def test_other_weights_config_or_precision_are_not_answered_from_the_cache(
    change, tiny, ratings, tmp_path, capsys
):
    source = shutil.copytree(tiny, tmp_path / "source")
    argv = [*SINGLE, "--max_steps=1", f"--reference_cache={tmp_path / 'cache'}"]
    train(source, ratings, tmp_path / "a", *argv)
    (computed,) = re.findall("reference: .* log-probs computed", capsys.readouterr().out)
    argv.append(change) if isinstance(change, str) else change(source)
    train(source, ratings, tmp_path / "b", *argv)
    assert computed in capsys.readouterr().out and computed != "reference: 0 log-probs computed"


def test_two_processes_with_a_cache_go_on_as_they_would_have(tiny, pairs, tmp_path):
    """In a later epoch a rank meets what the other one has computed, with other rounding."""
    argv = ("--batch_size=4", "--epochs=3", "--optim.lr=1e-2", "--save_interval=2", "--devices=2",
            "--precision=32-true", "--keep_last=9", "--data.shuffle=false",
            f"--data.test={pairs}")  # fmt: skip
    four = tmp_path / "four.jsonl"  # a step is an epoch
    four.write_text("".join(pairs.read_text().splitlines(keepends=True)[:4]))

    def go(name, cache, *more):
        out, given = tmp_path / name, (*argv, f"--reference_cache={tmp_path / cache}", *more)
        return ranks(2, lambda rank: train(tiny, four, out, *given, program="dpo"))[0]

    whole = go("whole", "one")
    go("run", "other", f"--stop_at={len(whole['rows']) - 2}")
    assert_same(go("run", "other", "--resume=auto"), whole)


def test_a_key_is_of_prompt_and_completion_and_where_the_one_ends():
    texts = ([1, 2], [3, 4]), ([1, 2], [3]), ([1], [2, 3, 4]), ([1, 2, 3], [4]), ([1, 2], [3, 4])
    prompts, completions = zip(*[map(np.array, text) for text in texts])
    keys = reference_cache.digests(pack(prompts, [(y,) for y in completions]))
    assert len({*keys}) == 4 and keys[0] == keys[4]


def test_records_and_answers_end_where_the_context_of_a_shorter_reference_ends(
    tiny, ratings, tmp_path
):
    other = shutil.copytree(tiny, tmp_path / "other")
    made(transformers.GPT2Config(**GPT2 | dict(vocab_size=512, n_positions=40)), other)
    argv = ("--batch_size=4", "--max_steps=1", f"--reference={other}", "--precision=32-true")
    match = "^data.max_prompt 30 .* exceed the context of 40$"
    limits = ("--data.max_prompt=30", "--data.max_completion=20")
    refused(match, train, tiny, ratings, tmp_path, *argv, *limits)
    argv += (f"--data.val={ratings}", "--eval.max_new_tokens=100")
    train(tiny, ratings, tmp_path, *argv, checker=lambda answers: [True] * len(answers))
    assert float(rows_of(tmp_path / "val.csv")[-1]["kl/own"]) != 0, "the reference scored them"

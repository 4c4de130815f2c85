"""The reference's cache: what is read back is what the reference said, which is then not needed."""

import gc
import json
import shutil

import numpy as np
import pytest
import torch
from conftest import assert_same, numbers, ranks, train

import kto
import load
import model
from hub import export, find_model
from packing import pack
from run import setup
from runs.console import BadInput
from runs.optimizer import make_plan
from runs.settings import parse
from train import Trainer

COMMON = ("--batch_size=7", "--max_steps=8", "--epochs=9", "--optim.lr=1e-3", "--kto.beta=0.5",
          "--precision=64-true", "--save_interval=null", "--micro_batch_size=3")  # fmt: skip
SINGLE = [a if "64-true" not in a else "--precision=32-true" for a in COMMON]


def close(a: dict, b: dict) -> None:
    for x, y in zip(numbers(a), numbers(b), strict=True):
        assert x == pytest.approx(y, abs=1e-9)
    assert all(torch.allclose(x, b["weights"][n], atol=1e-9) for n, x in a["weights"].items())


@pytest.mark.parametrize("lora", [(), ("--lora.rank=2",)])
@pytest.mark.parametrize("program", ["kto", "dpo"])
def test_a_run_on_cached_log_probs_is_the_run_on_the_reference_itself(
    program, lora, tiny, ratings, pairs, tmp_path
):
    data = {"kto": ratings, "dpo": pairs}[program]
    common = [a for a in COMMON if program == "kto" or not a.startswith("--kto")] + list(lora)
    common += [f"--data.val={data}", "--eval.samples=0"]
    asked = train(tiny, data, tmp_path / "a", *common, program=program)
    common.append(f"--reference_cache={tmp_path / 'cache'}")
    cached = train(tiny, data, tmp_path / "b", *common, program=program)
    close(cached, asked)
    rows = [run["rows"][-1] for run in (cached, asked)]
    flops = [row["tflops/s"] * row["seconds"] for row in rows]
    assert 0.55 < flops[0] / flops[1] < 0.8, "the reference's part is no longer useful work"


def test_a_second_run_computes_nothing_and_is_the_first_to_the_bit(tiny, ratings, tmp_path, capsys):
    argv = (*COMMON, f"--reference_cache={tmp_path / 'cache'}")
    first = train(tiny, ratings, tmp_path / "a", *argv)
    files = sorted((tmp_path / "cache").iterdir())
    assert "reference: 0 log-probs computed" not in capsys.readouterr().out
    second = train(tiny, ratings, tmp_path / "b", *argv)
    assert "reference: 0 log-probs computed" in capsys.readouterr().out
    assert_same(first, second)
    assert sorted((tmp_path / "cache").iterdir()) == files


def test_the_reference_is_gone_before_the_first_step(tiny, ratings, tmp_path, monkeypatch):
    alive, real = [], Trainer.forward_backward

    def counted(self, batch):
        gc.collect()
        alive.append(sum(type(x) is model.GPT for x in gc.get_objects()))
        return real(self, batch)

    monkeypatch.setattr(Trainer, "forward_backward", counted)
    argv = (*COMMON, "--max_steps=1")
    train(tiny, ratings, tmp_path / "a", *argv)
    train(tiny, ratings, tmp_path / "b", *argv, f"--reference_cache={tmp_path / 'cache'}")
    assert alive[1] == alive[0] - 1


@pytest.mark.parametrize(
    "precision, dtype", [("bf16-mixed", torch.bfloat16), ("32-true", torch.float32)]
)
def test_a_copy_that_computes_in_bfloat16_is_held_in_bfloat16(
    precision, dtype, tiny, ratings, tmp_path, monkeypatch
):
    held, real = [], Trainer.check_start

    def check_start(self, batch):
        held.append(self.run.reference.frozen)
        return real(self, batch)

    monkeypatch.setattr(Trainer, "check_start", check_start)
    argv = ("--batch_size=7", "--max_steps=1", f"--precision={precision}")
    train(tiny, ratings, tmp_path, *argv)
    assert {p.dtype for p in held[0].transformer.h.parameters() if p.ndim > 1} == {dtype}


@pytest.mark.parametrize(
    "change", ["--precision=bf16-mixed", "--data.score_prompt=true", "weights", "epsilon"]
)
def test_other_weights_config_precision_or_scoring_are_not_answered_from_the_cache(
    change, tiny, ratings, tmp_path, capsys
):
    argv = [*SINGLE, f"--reference_cache={tmp_path / 'cache'}"]
    train(tiny, ratings, tmp_path / "a", *argv)
    n = int(capsys.readouterr().out.split("reference: ")[1].split()[0].replace(",", ""))
    source = tiny
    if change == "weights":
        gpt = load.load_model(tiny)
        gpt.transformer.ln_f.weight.data[0] += 1e-3
        source = tmp_path / "other"
        export(find_model(str(tiny)), gpt.rows, gpt.unique_parameters(), source)
    elif "--" not in change:  # with the same weights
        source = shutil.copytree(tiny, tmp_path / "other")
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config | {"layer_norm_epsilon": 1e-3}))
    else:
        argv.append(change)
    train(source, ratings, tmp_path / "b", *argv)
    assert f"reference: {n} log-probs computed" in capsys.readouterr().out


def test_two_processes_with_a_cache_go_on_as_they_would_have(tiny, pairs, tmp_path):
    """In a later epoch a rank meets what the other one has computed, with other rounding."""
    argv = ("--batch_size=4", "--epochs=3", "--optim.lr=1e-2", "--save_interval=2", "--devices=2",
            "--precision=32-true", "--keep_last=9")  # fmt: skip

    def go(name, cache, *more):
        out, given = tmp_path / name, (*argv, f"--reference_cache={tmp_path / cache}", *more)
        return ranks(2, lambda rank: train(tiny, pairs, out, *given, program="dpo"))[0]

    whole = go("whole", "cold")
    assert_same(go("warm", "cold"), whole)
    steps = len(whole["rows"])
    go("run", "other", f"--stop_at={steps - 2}")
    assert_same(go("run", "other", "--resume=auto"), whole)


def test_a_second_fit_on_other_examples_is_refused_by_name(tiny, ratings, tmp_path):
    argv = [*COMMON, f"--model={tiny}", f"--data.train={ratings}", f"--out_dir={tmp_path / 'a'}"]
    argv += [f"--reference_cache={tmp_path / 'cache'}", "--max_steps=2", "--progress=false"]
    cfg = parse(kto.Settings, argv, "", "none")
    with pytest.raises(
        BadInput, match="^reference_cache: these examples, .* are not those of the first"
    ):
        with Trainer(setup(cfg, kto.KTO(cfg.kto))) as trainer:
            examples = trainer.run.examples["train"]
            assert trainer.fit(examples[:14])
            plan = make_plan(cfg, 10)._replace(begin=2, end=3)
            trainer.fit(examples[14:], plan)


def test_digests_tell_apart_where_a_prompt_ends_and_not_whether_it_is_scored():
    def digests(prompt, *completions, score=False):
        other = np.array([9, 9]), tuple(np.array([8] * (k + 1)) for k in range(len(completions)))
        mine = np.array(prompt), tuple(map(np.array, completions))
        return pack([other[0], mine[0]], [other[1], mine[1]], score).digests()[1]

    a, b = digests([1, 2], [3, 4], [3])
    assert a != b
    assert digests([1, 2], [3, 4]) == [a] and digests([1, 2], [3]) == [b]
    assert digests([1, 2], [3], [3, 4], score=True) == [b, a]
    assert digests([1], [2, 3, 4]) != [a] and digests([1, 2, 3], [4]) != [a]

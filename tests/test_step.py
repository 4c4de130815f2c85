"""How a step is split is free: micro-batches, token budgets, processes, sharding never change the numbers."""

import json
import shutil
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import evaluated, even, ranks, refused, rows_of, train
from safetensors.torch import load_file, save_file

import data
import model
import sampler
from infra.checkpoint import checkpoints_by_step
from infra.console import Failed
from models import load
from reference import FrozenModel

# 10 steps of 7 from 24 examples (3 an epoch): not 7 by 2 or 3, not 24 by 7, not 10 by 3 divides
COMMON = ("--batch_size=7", "--max_steps=10", "--optim.lr=1e-3", "--optim.clip=2.5",
          "--kto.beta=0.5", "--kto.desirable_weight=1.2", "--kto.sft_loss_weight=0.01",
          "--save_interval=null")  # fmt: skip
SPLITS = {
    "micro-batches of 1": ("--micro_batch_size=1",),
    "micro-batches of 3": ("--micro_batch_size=3",),
    "a token budget": ("--micro_batch_tokens=70",),
    "a budget smaller than any example": ("--micro_batch_tokens=1",),
    "activation checkpointing": ("--micro_batch_size=7", "--activation_checkpointing=true"),
}

# How far two cuts may differ. The proof is float64: 1e-9, with AdamW as it is by default.
#
# In float32 the gradient of a weight has an error of 5e-9 (in the mean over the weights; the largest is
# 1e-7); the gradients themselves are 1e-2. AdamW's first step moves a weight by lr * g / (|g| + eps).
# So by default, with eps = 1e-8, a weight whose gradient is as small as this error may move by anything
# from -lr to lr. In this run it is one weight of 45,952, with g = -2.4e-8. It makes 99% of the distance
# between two cuts, and 1e-5 of the next loss. How far it moves depends on the order in which the
# processor's kernels add (try ATEN_CPU_CAPABILITY=avx2 or default): there is no good bound on it.
#
# So the runs in float32 have eps = 1e-5. A step then changes by at most lr / eps times the error of the
# gradient, which is 1e-2 lr, and only where |g| < eps, in three weights of a thousand: 1e-2 * sqrt(3e-3)
# = 5e-4 of the distance travelled. float32 (unit 6e-8) holds the log-prob of a completion, 100 nats, to
# about ten units, 6e-5; z is a mean of differences of such numbers. The loss changes by at most
# beta / 4 * 1.2 = 0.15 of that. Measured with AVX2's kernels: 3e-6 of the distance, z 5e-6, loss 1e-6,
# norm 4e-6; the tests pass with AVX512's and with the default ones, too.
EPS = {"64-true": (), "32-true": ("--optim.eps=1e-5",)}
IN_FLOAT32 = {"kl": 1e-4, "loss": 2e-5, "entropy": 2e-5, "grad_norm": 1e-4}


@pytest.fixture(scope="module")
def whole(tiny, ratings, tmp_path_factory):
    """The same runs with a step's examples all in one forward, on one device, by precision."""
    out, known = tmp_path_factory.mktemp("whole"), {}

    def run(precision, *argv):
        key = (precision, *argv)
        if key not in known:
            argv = (
                f"--precision={precision}",
                *EPS[precision],
                "--micro_batch_size=7",
                *COMMON,
                *argv,
            )
            dtype = torch.get_default_dtype()
            known[key] = train(tiny, ratings, out / str(len(known)), *argv)
            torch.set_default_dtype(dtype)
        return known[key]

    return run


def start(tiny):
    return load_file(tiny / "model.safetensors")


def flat(weights, base):
    """The distance travelled, as one vector."""
    return torch.cat(
        [(weights[n].double() - x.double()).flatten() for n, x in sorted(base.items())]
    )


def assert_equal(a, b, base, double: bool):
    assert len(a["rows"]) == len(b["rows"]) == 10
    for x, y in zip(a["rows"], b["rows"]):
        for name, limit in IN_FLOAT32.items():
            if double:
                limit = 1e-9 * max(1.0, abs(y[name]))
            elif name == "grad_norm":
                limit *= y[name]
            differs = f"step {y['step']:.0f}: {name} {x[name]} is not {y[name]}"
            assert abs(x[name] - y[name]) <= limit, differs
    one, two = flat(a["weights"], base), flat(b["weights"], base)
    assert two.norm() > 0.1, "else nothing was learned and all is equal"
    assert (one - two).norm() <= (1e-9 if double else 5e-4) * two.norm()


def test_the_run_that_all_others_are_compared_with_sees_the_clamp_act_and_not_act(whole):
    clamped = [row["kl/clamped"] for row in whole("64-true")["rows"]]
    assert 0.0 in clamped and 1.0 in clamped
    norms = [row["grad_norm"] for row in whole("64-true")["rows"]]
    assert min(norms) < 2.5 < max(norms), "and clipping too"


@pytest.mark.parametrize("precision", EPS)
@pytest.mark.parametrize("name", SPLITS)
def test_a_cut_on_one_device_changes_nothing(name, precision, whole, tiny, ratings, tmp_path):
    argv = (f"--precision={precision}", *EPS[precision], *COMMON, *SPLITS[name])
    run = train(tiny, ratings, tmp_path / "run", *argv)
    assert_equal(run, whole(precision), start(tiny), precision == "64-true")


EQUAL = {
    "fp32": ("--precision=32-true",),
    "bf16-mixed": ("--precision=bf16-mixed",),
    "bf16-mixed, micro-batches": ("--precision=bf16-mixed", "--micro_batch_size=1"),
    "bf16-mixed, LoRA": ("--precision=bf16-mixed", "--lora.rank=2"),
    "bf16-true, LoRA": ("--precision=bf16-true", "--lora.rank=2", "--micro_batch_size=1"),
}


@pytest.mark.parametrize("name", EQUAL)
def test_before_the_first_update_every_log_ratio_is_exactly_0(name, tiny, ratings, tmp_path):
    """Policy and reference are one model then: what is not 0 would be rounding, and z, a mean of it that is clamped at
    0, would be biased upward."""
    argv = ("--batch_size=7", "--max_steps=2", "--optim.lr=1e-2", *EQUAL[name])
    first, second = train(tiny, ratings, tmp_path, *argv)["rows"]
    for column in ("kl", "kl/stderr", "kl/clamped", "rewards/chosen", "rewards/rejected"):
        assert first[column] == 0, column
    assert first["accuracy"] == 0.5, "ties"
    assert second["kl/stderr"] > 0 and second["accuracy"] is not None


@pytest.mark.parametrize("more", ["--precision=bf16-mixed", "--precision=bf16-true --lora.rank=4"])
def test_on_two_processes_the_start_check_finds_no_difference(more, tiny, ratings, tmp_path, capfd):
    argv = ("--batch_size=6", "--max_steps=1", "--strategy=fsdp", *more.split())
    ranks(2, lambda rank: train(tiny, ratings, tmp_path / "run", *argv) and None)
    assert capfd.readouterr().out.count("step 0: policy and reference agree to the bit") == 1


@pytest.mark.parametrize("factor, difference", [(1 + 1e-6, r"\d.*"), (np.nan, "nan")])
def test_a_reference_that_is_not_the_start_ends_the_run(
    factor, difference, tiny, ratings, tmp_path, monkeypatch
):
    real = FrozenModel.compute

    def another(self, *given, **options):
        scores = real(self, *given, **options)
        return scores._replace(logps=scores.logps * factor)

    monkeypatch.setattr(FrozenModel, "compute", another)
    match = f"^step 0: policy and reference differ by {difference} nats: the reference is not"
    with pytest.raises(Failed, match=match):
        train(tiny, ratings, tmp_path, "--batch_size=6", "--max_steps=1")


TWO = [
    ("64-true", "ddp", "--micro_batch_size=1"),
    ("64-true", "ddp", "--micro_batch_tokens=70"),
    ("32-true", "fsdp", "--micro_batch_size=1"),
    ("32-true", "fsdp", "--micro_batch_tokens=70"),
    ("32-true", "fsdp", "--micro_batch_size=2 --activation_checkpointing=true"),
]


@pytest.mark.parametrize("precision,strategy,cut", TWO)
def test_two_processes_change_nothing(precision, strategy, cut, whole, tiny, ratings, tmp_path):
    argv = (
        f"--precision={precision}",
        f"--strategy={strategy}",
        *EPS[precision],
        *cut.split(),
        *COMMON,
    )
    run, other = ranks(2, lambda rank: train(tiny, ratings, tmp_path / "run", *argv))
    assert run["rows"] == other["rows"]
    assert_equal(run, whole(precision), start(tiny), precision == "64-true")


def test_sharded_in_bf16_mixed_a_step_has_the_loss_of_ddp_to_the_bit(tiny, ratings, tmp_path):
    """Linear layers are gathered in bfloat16, where ddp casts them at each use."""
    rows = {}
    for strategy in ("ddp", "fsdp"):
        argv = (f"--strategy={strategy}", "--precision=bf16-mixed", "--micro_batch_size=2", *COMMON)
        argv += ("--max_steps=1",)
        run, _ = ranks(2, lambda rank: train(tiny, ratings, tmp_path / strategy, *argv))
        rows[strategy] = run["rows"]
    ddp, fsdp = (rows[strategy][0] for strategy in rows)
    for name in ("loss", "kl", "logps/chosen", "rewards/mean"):
        assert ddp[name] == fsdp[name], name
    assert abs(ddp["grad_norm"] / fsdp["grad_norm"] - 1) < 1e-6


@pytest.mark.parametrize(
    "save,goes_on",
    [
        ((2, "fsdp"), (1, "auto")),
        ((2, "ddp"), (2, "fsdp")),
    ],
)
def test_a_run_goes_on_at_another_number_of_processes(
    save, goes_on, whole, tiny, ratings, tmp_path
):
    argv = ("--precision=32-true", *EPS["32-true"], "--micro_batch_size=7", *COMMON)
    for (n, strategy), more in ((save, "--stop_at=4"), (goes_on, "--resume=auto")):
        given = (*argv, f"--strategy={strategy}", f"--devices={n}", more)
        run, *_ = ranks(n, lambda rank: train(tiny, ratings, tmp_path / "run", *given))
        *_, last = checkpoints_by_step(tmp_path / "run").values()
        if strategy == "fsdp":  # every rank its own of the weights and of both moments
            assert len(list(last.glob("*.safetensors"))) > 3 * n
    assert_equal(run, whole("32-true"), start(tiny), False)


def test_activation_checkpointing_reaches_the_blocks(tiny, ratings, tmp_path, monkeypatch):
    spy = mock.Mock(wraps=model.checkpoint)
    monkeypatch.setattr(model, "checkpoint", spy)
    argv = ("--batch_size=7", "--max_steps=1", "--precision=32-true", "--save_interval=null")
    train(tiny, ratings, tmp_path / "off", *argv)
    assert not spy.called
    train(tiny, ratings, tmp_path / "on", *argv, "--activation_checkpointing=true")
    assert (
        len({call.args[0] for call in spy.call_args_list}) == load.load_model(tiny).config.n_layer
    )


def test_a_step_in_one_micro_batch_computes_the_policys_prompts_once(
    tiny, parity_ref, ratings, tmp_path, monkeypatch
):
    tokens, drawn, hidden, step_examples = [], [], model.GPT.hidden, data.step_examples

    def counted(self, token_RQ, *args):
        tokens[-1] += token_RQ.shape[1]
        return hidden(self, token_RQ, *args)

    def draw(*args):
        drawn[:] = step_examples(*args)
        return iter(drawn)

    monkeypatch.setattr(model.GPT, "hidden", counted)
    monkeypatch.setattr("trainer.step_examples", draw)
    # it takes the first examples of the first micro-batch, which depend on the cut
    monkeypatch.setattr("checks.check_start", lambda *given: None)
    argv = ("--batch_size=7", "--max_steps=1", "--precision=32-true", f"--reference={parity_ref}",
            "--save_interval=null")  # fmt: skip
    for size in (7, 4):
        tokens.append(0)
        train(tiny, ratings, tmp_path / str(size), *argv, f"--micro_batch_size={size}")
    assert tokens[0] == tokens[1] - sum(len(e.prompt) for e in drawn[0])


def test_more_processes_than_examples_change_nothing(tiny, ratings, tmp_path):
    argv = ("--batch_size=2", "--optim.lr=1e-3", "--max_steps=10", "--precision=32-true",
            *EPS["32-true"], "--save_interval=null")  # fmt: skip
    one = train(tiny, ratings, tmp_path / "one", "--micro_batch_size=2", *argv)
    argv = ("--strategy=fsdp", *argv)
    run, *_ = ranks(3, lambda rank: train(tiny, ratings, tmp_path / "run", *argv))
    assert_equal(run, one, start(tiny), False)


def test_lora_on_two_processes_changes_nothing(whole, tiny, ratings, tmp_path):
    argv = ("--lora.rank=4", "--lora.targets=c_attn,c_fc,mlp.c_proj")
    one = whole("32-true", *argv)
    many = ("--strategy=fsdp", "--micro_batch_size=2", "--precision=32-true", *EPS["32-true"])
    out = tmp_path / "run"
    run, _ = ranks(2, lambda rank: train(tiny, ratings, out, *many, *COMMON, *argv))
    assert_equal(run, one, start(tiny), False)
    margin = one["rows"][-1]["rewards/margins"]
    assert abs(margin) > 0.01, "the reference stays the base, and does not learn along"


@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_validation_depends_on_neither_batch_size_nor_processes(
    strategy, tiny, parity_ref, ratings, tmp_path
):
    argv = (f"--data.val={ratings}", "--max_steps=1", "--optim.lr=0", "--precision=32-true",
            "--eval.samples=2", f"--reference={parity_ref}")  # fmt: skip  # at r = 0: that of rounding

    def rows(out):
        found = rows_of(out / "val.csv")
        return [[float(x) if x else None for x in row.values()] for row in found]

    train(tiny, ratings, tmp_path / "a", "--batch_size=24", "--micro_batch_size=24", *argv)
    two = ("--batch_size=5", "--micro_batch_size=3", f"--strategy={strategy}")
    ranks(2, lambda rank: train(tiny, ratings, tmp_path / "b", *two, *argv) and None)
    a, b = rows(tmp_path / "a"), rows(tmp_path / "b")
    assert [row[0] for row in a] == [0, 1]
    for x, y in zip(a, b):
        assert x == pytest.approx(y, abs=2e-4)
    files = [(tmp_path / o / "eval" / "step-1.json").read_text() for o in "ab"]
    assert len({file.split('"samples"')[1] for file in files}) == 1


def test_another_reference_is_loaded_beside_the_policy_also_with_lora(
    tiny, parity_ref, ratings, tmp_path
):
    other = shutil.copytree(parity_ref, tmp_path / "other")
    argv = ("--batch_size=6", "--max_steps=1", "--save_interval=null", f"--reference={other}",
            "--optim.lr=0")  # fmt: skip
    full = train(tiny, ratings, tmp_path / "full", *argv)["rows"][0]
    lora = train(tiny, ratings, tmp_path / "lora", "--lora.rank=4", *argv)["rows"][0]
    assert abs(full["rewards/mean"]) > 1e-2, "else the reference would be the policy"
    assert lora["rewards/mean"] == pytest.approx(full["rewards/mean"], abs=1e-5)
    assert lora["kl"] == pytest.approx(full["kl"], abs=1e-4)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["Ġbest"], vocab["Ġstandvo"] = vocab["Ġstandvo"], vocab["Ġbest"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused("another tokenizer", train, tiny, ratings, tmp_path / "no", *argv)


def test_a_loss_that_is_not_finite_stops_before_the_optimizer_moves_and_names_the_example(
    tiny, ratings, tmp_path, monkeypatch
):
    moved, AdamW, real = [], torch.optim.AdamW, torch.optim.AdamW.step
    monkeypatch.setattr(AdamW, "step", lambda self, *a: moved.append(1) or real(self, *a))
    bad = tmp_path / "bad"
    shutil.copytree(tiny, bad)
    weights = load_file(bad / "model.safetensors")
    weights["transformer.wpe.weight"][20:] = float("nan")  # only longer records become NaN
    save_file(weights, bad / "model.safetensors", metadata={"format": "pt"})
    argv = ("--batch_size=24", "--max_steps=1", f"--reference={tiny}")
    with pytest.raises(Failed) as e:
        train(bad, ratings, tmp_path / "run", *argv)
    assert all(x in str(e.value) for x in ("step 1", "ratings.jsonl:", "unchanged"))
    assert not moved
    train(tiny, ratings, tmp_path / "good", "--batch_size=8", "--max_steps=3")
    assert len(moved) == 3, "one step a step"


ONE_TOKEN = [(1, "auto", ("CACHE",)), (2, "fsdp", ("--lora.rank=2",))]


@pytest.mark.parametrize("n,strategy,more", ONE_TOKEN)
def test_completions_of_one_token_train_as_in_any_other_cut(
    n, strategy, more, tiny, ratings, tmp_path
):
    cache = f"--reference_cache={tmp_path / 'cache'}"
    argv = ("--batch_size=7", "--data.max_completion=1", f"--data.val={ratings}", "--max_steps=2",
            "--optim.lr=1e-3", "--precision=32-true", *(cache if x == "CACHE" else x for x in more))  # fmt: skip
    many, one = (f"--strategy={strategy}", *argv), ("--micro_batch_size=1", *argv)
    run, *_ = ranks(n, lambda rank: train(tiny, ratings, tmp_path / "run", *many))
    other = train(tiny, ratings, tmp_path / "other", *one)
    for row, same in zip(run["rows"], other["rows"], strict=True):
        for name in ("loss", "kl", "kl/stderr", "grad_norm", "rewards/mean"):
            assert row[name] == pytest.approx(same[name], rel=1e-4, abs=1e-5)
    assert run["rows"][1]["kl/stderr"] > 1e-3, "else z proves nothing"


def test_two_processes_with_a_sharded_policy_give_the_answers_of_one_and_count_each_once_in_kl_own(
    tiny, ratings, tmp_path, monkeypatch
):
    """Of three answers in micro-batches of one, rank 1 has one and a filler. An answer ends while the other rank's goes
    on, and the cache has room for one row: blocks are gathered at each forward, so each rank needs as many of them."""
    monkeypatch.setattr(sampler, "CPU_MEMORY", 1)
    argv = ("--batch_size=6", "--max_steps=2", "--optim.lr=1e-2", "--precision=32-true", f"--data.val={ratings}",
            "--eval.prompts=3", "--eval.max_new_tokens=9", '--eval.stop=["e"]', "--micro_batch_size=1")  # fmt: skip

    def go(name, *more):
        train(tiny, ratings, tmp_path / name, *argv, *more, checker=even)
        answers = [x["completion"] for x in evaluated(tmp_path / name, "after")["answers"]]
        return float(rows_of(tmp_path / name / "val.csv")[-1]["kl/own"]), answers

    (kl, answers), _ = ranks(2, lambda rank: go("two", "--strategy=fsdp"))
    assert (pytest.approx(kl, rel=1e-3), answers) == go("one") and kl != 0
    assert len(set(map(len, answers))) > 1

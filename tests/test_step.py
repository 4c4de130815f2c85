"""The cut is free: micro-batches, token budgets, processes and sharding change memory and speed, never the numbers."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import ranks, train
from safetensors.torch import load_file

import kto
import model

# 10 steps of 7 from 24 examples (3 an epoch), so nothing divides: not 7 by 2 or 3, not 24 by 7, not 10 by 3
COMMON = ("--batch_size=7", "--max_steps=10", "--epochs=9", "--optim.lr=1e-3", "--optim.clip=2.5", "--kto.beta=0.5",
          "--kto.desirable_weight=1.2", "--kto.sft_loss_weight=0.01", "--save_interval=null")  # fmt: skip
CUTS = {
    "micro-batches of 1": ("--micro_batch_size=1",),
    "micro-batches of 2": ("--micro_batch_size=2",),
    "micro-batches of 3": ("--micro_batch_size=3",),
    "a token budget": ("--micro_batch_tokens=70",),
    "a budget smaller than any example": ("--micro_batch_tokens=1",),
    "another budget for the look": ("--micro_batch_size=7", "--look_tokens=60"),
    "activation checkpointing": ("--micro_batch_size=7", "--activation_checkpointing=true"),
}


@pytest.fixture(scope="module")
def whole(tiny, ratings, tmp_path_factory):
    """The same runs with each step's examples all in one forward, on one device, by precision."""
    out, kept = tmp_path_factory.mktemp("whole"), {}

    def run(precision, *argv):
        key = (precision, *argv)
        if key not in kept:
            dtype = torch.get_default_dtype()
            where = out / str(len(kept))
            kept[key] = train(tiny, ratings, where, f"--precision={precision}", "--micro_batch_size=7", *COMMON, *argv)
            torch.set_default_dtype(dtype)
        return kept[key]

    return run


def start(tiny):
    return {n: p.detach() for n, p in model.load(tiny).named().items()}


def flat(weights, base):
    """The distance travelled, one vector, but for GPT-2's key biases: they shift all scores of a query alike, so their
    gradient is zero but for rounding, which AdamW turns into steps of full size (STACK)."""
    state: dict = {}
    model.gpt2_from_hf(None, state, weights)
    parts = []
    for n, p in sorted(base.items()):
        moved = (state[n].double() - p.double()).flatten()
        third = len(moved) // 3
        parts += [moved[:third], moved[2 * third :]] if n.endswith("qkv.bias") else [moved]
    return torch.cat(parts)


def assert_equal(a, b, base, double: bool):
    assert len(a["rows"]) == len(b["rows"]) == 10
    for x, y in zip(a["rows"], b["rows"]):
        for name, tolerance in {"loss": 1e-5, "kl": 1e-4, "grad_norm": 1e-4 * y["grad_norm"]}.items():
            limit = 1e-9 * max(1.0, abs(y[name])) if double else tolerance
            assert abs(x[name] - y[name]) <= limit, f"step {y['step']:.0f}: {name} {x[name]} is not {y[name]}"
    one, two = flat(a["weights"], base), flat(b["weights"], base)
    if double:
        assert abs(one.norm() - two.norm()) <= 1e-9 * two.norm()
    assert two.norm() > 0.1, "else nothing was learned and all is equal"
    assert (one - two).norm() <= (1e-9 if double else 1e-3) * two.norm()


def test_the_run_that_all_others_are_compared_with_sees_the_clamp_act_and_not_act(whole):
    clamped = [row["kl/clamped"] for row in whole("64-true")["rows"]]
    assert 0.0 in clamped and 1.0 in clamped
    norms = [row["grad_norm"] for row in whole("64-true")["rows"]]
    assert min(norms) < 2.5 < max(norms), "and clipping too"


@pytest.mark.parametrize("precision", ["64-true", "32-true"])
@pytest.mark.parametrize("name", CUTS)
def test_a_cut_on_one_device_changes_nothing(name, precision, whole, tiny, ratings, tmp_path, torch_state):
    run = train(tiny, ratings, tmp_path / "run", f"--precision={precision}", *COMMON, *CUTS[name])
    assert_equal(run, whole(precision), start(tiny), precision == "64-true")


TWO = [
    ("64-true", "ddp", "--micro_batch_size=7"),
    ("64-true", "ddp", "--micro_batch_size=1"),
    ("64-true", "ddp", "--micro_batch_tokens=70"),
    ("32-true", "ddp", "--micro_batch_size=2"),
    ("32-true", "fsdp", "--micro_batch_size=7"),
    ("32-true", "fsdp", "--micro_batch_size=1"),
    ("32-true", "fsdp", "--micro_batch_tokens=70"),
    ("64-true", "ddp", "--micro_batch_size=2 --look_tokens=60"),
    ("32-true", "fsdp", "--micro_batch_size=2 --activation_checkpointing=true"),
]


@pytest.mark.parametrize("precision,strategy,cut", TWO)
def test_two_processes_change_nothing(precision, strategy, cut, whole, tiny, ratings, tmp_path):
    argv = (f"--precision={precision}", f"--strategy={strategy}", *cut.split(), *COMMON)
    run, other = ranks(2, lambda rank: train(tiny, ratings, tmp_path / "run", *argv))
    assert run["rows"] == other["rows"]
    assert_equal(run, whole(precision), start(tiny), precision == "64-true")


def test_activation_checkpointing_reaches_the_blocks(tiny, ratings, tmp_path, monkeypatch):
    blocks, real = [], model.checkpoint
    monkeypatch.setattr(model, "checkpoint", lambda f, *a, **kw: blocks.append(f) or real(f, *a, **kw))
    argv = ("--batch_size=7", "--max_steps=1", "--precision=32-true", "--save_interval=null")
    train(tiny, ratings, tmp_path / "off", *argv)
    assert not blocks
    train(tiny, ratings, tmp_path / "on", *argv, "--activation_checkpointing=true")
    assert len(set(blocks)) == model.load(tiny).config.n_layer


def test_a_step_in_one_micro_batch_computes_the_policys_prompts_once(tiny, other, ratings, tmp_path, monkeypatch):
    lengths, drawn, hidden, draw = [], [], model.GPT.hidden, kto.draw
    monkeypatch.setattr(model.GPT, "hidden", lambda self, t, *a: lengths.append(t.shape[1]) or hidden(self, t, *a))
    monkeypatch.setattr(kto, "draw", lambda *a: drawn.append(draw(*a)) or drawn[-1])
    argv = ("--batch_size=7", "--max_steps=1", "--precision=32-true", f"--reference={other}", "--save_interval=null")
    tokens = []
    for cut in ("--micro_batch_size=7", "--micro_batch_tokens=BUDGET", "--micro_batch_size=4"):
        # the budget of the gradient's pass; the look's, which has one more completion, is twice that
        own = sum(len(e.prompt) + len(e.completions[0]) for e in drawn[0]) if drawn else 0
        train(tiny, ratings, tmp_path / str(len(tokens)), *argv, cut.replace("BUDGET", str(own)))
        tokens.append(sum(lengths))
        lengths.clear()
    assert tokens[0] == tokens[1] == tokens[2] - sum(len(e.prompt) for e in drawn[0])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_more_processes_than_examples_change_nothing(strategy, whole, tiny, ratings, tmp_path):
    argv = ("--batch_size=2", "--optim.lr=1e-3", "--max_steps=10", "--precision=32-true", "--save_interval=null")
    one = train(tiny, ratings, tmp_path / "one", "--micro_batch_size=2", *argv)
    run, *_ = ranks(3, lambda rank: train(tiny, ratings, tmp_path / "run", f"--strategy={strategy}", *argv))
    assert_equal(run, one, start(tiny), False)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_lora_on_two_processes_changes_nothing(strategy, whole, tiny, ratings, tmp_path):
    argv = ("--lora.rank=4", "--lora.targets=[query,value,mlp]")
    one = whole("32-true", *argv)
    many = (f"--strategy={strategy}", "--micro_batch_size=2", "--precision=32-true")
    run, _ = ranks(2, lambda rank: train(tiny, ratings, tmp_path / "run", *many, *COMMON, *argv))
    assert_equal(run, one, start(tiny), False)
    assert abs(one["rows"][-1]["rewards/margins"]) > 0.01, "the reference stays the base, and does not learn along"


@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_validation_depends_on_neither_batch_size_nor_processes(strategy, tiny, other, ratings, tmp_path):
    argv = (f"--data.val={ratings}", "--max_steps=1", "--optim.lr=0", "--precision=32-true", "--eval.samples=2",
            f"--reference={other}")  # fmt: skip  # at r = 0 accuracies would be those of rounding

    def lines(out):
        return [
            [float(x) if x else None for x in line.split(",")] for line in (out / "val.csv").read_text().split()[1:]
        ]

    train(tiny, ratings, tmp_path / "a", "--batch_size=24", "--micro_batch_size=24", *argv)
    two = ("--batch_size=5", "--micro_batch_size=3", f"--strategy={strategy}")
    ranks(2, lambda rank: train(tiny, ratings, tmp_path / "b", *two, *argv) and None)
    a, b = lines(tmp_path / "a"), lines(tmp_path / "b")
    assert [row[0] for row in a] == [0, 1]
    for x, y in zip(a, b):
        assert x == pytest.approx(y, abs=2e-4)
    samples = [(tmp_path / o / "eval" / "step-1.json").read_text().split('"samples"')[1] for o in "ab"]
    assert samples[0] == samples[1]


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_one_class_only_trains_on_two_processes(loss, tiny, ratings, tmp_path):
    file = tmp_path / "up.jsonl"
    records = [json.loads(line) for line in ratings.read_text().splitlines()[:8]]
    file.write_text("".join(json.dumps({**r, "label": False}) + "\n" for r in records))
    argv = (f"--kto.loss={loss}", "--batch_size=3", "--max_steps=2", "--kto.sft_loss_weight=1", "--save_interval=null")
    run, _ = ranks(2, lambda rank: train(tiny, file, tmp_path / "run", *argv))
    assert len(run["rows"]) == 2 and run["rows"][1]["rewards/chosen"] is None and run["rows"][1]["sft_loss"] == 0
    assert (run["rows"][0]["kl"] is None) == (loss != "kto")


def test_the_step_0_check_holds_for_copy_and_lora_in_every_precision_and_strategy(
    tiny, ratings, tmp_path, capfd, torch_state
):
    argv = ("--batch_size=6", "--max_steps=1", "--save_interval=null")
    modes = [("32-true",), ("bf16-mixed",), ("32-true", "--lora.rank=4", "--lora.dropout=0.1"),
             ("bf16-mixed", "--lora.rank=4"), ("bf16-true", "--lora.rank=4")]  # fmt: skip
    n = 0
    for strategy in ("auto", "ddp", "fsdp"):
        for precision, *lora in modes:
            n += 1
            out, args = tmp_path / str(n), (f"--precision={precision}", *lora, *argv)
            if strategy == "auto":
                train(tiny, ratings, out, *args)
            else:
                ranks(2, lambda rank: train(tiny, ratings, out, f"--strategy={strategy}", *args) and None)
    assert capfd.readouterr().out.count("step 0: policy and reference agree to the bit, preference loss 0.5") == n


@pytest.mark.parametrize("shuffle", ["true", "false"])
def test_an_epoch_draws_every_record_once_in_a_new_order_or_in_file_order(
    shuffle, tiny, ratings, tmp_path, monkeypatch
):
    drawn, real = [], kto.mismatched
    monkeypatch.setattr(kto, "mismatched", lambda examples: drawn.append(examples) or real(examples))
    argv = ("--batch_size=4", "--epochs=2", f"--data.shuffle={shuffle}", "--save_interval=null", "--micro_batch_size=4")
    train(tiny, ratings, tmp_path / "run", *argv)
    steps = [[(e.where, e.label) for e in examples] for examples in drawn[-12:]]  # the first are for the check
    one, two = sum(steps[:6], []), sum(steps[6:], [])
    assert len(set(one)) == len(set(two)) == 24
    assert (one == two) == (shuffle == "false")
    if shuffle == "false":
        lines = [int(where.rsplit(":", 1)[1]) for where, _ in one]
        assert lines == sorted(lines)


@pytest.fixture
def other(tiny, tmp_path):
    """Another model with the same tokenizer."""
    folder = tmp_path / "other"
    shutil.copytree(tiny, folder)
    shutil.copy(Path(__file__).parent / "parity" / "ref" / "model.safetensors", folder)
    return folder


def test_another_reference_is_loaded_beside_the_policy_also_with_lora(tiny, other, ratings, tmp_path, torch_state):
    ref = other
    argv = ("--batch_size=6", "--max_steps=1", "--save_interval=null", f"--reference={ref}", "--optim.lr=0")
    full = train(tiny, ratings, tmp_path / "full", *argv)["rows"][0]
    lora = train(tiny, ratings, tmp_path / "lora", "--lora.rank=4", *argv)["rows"][0]
    assert abs(full["rewards/mean"]) > 1e-2, "else the reference would be the policy"
    assert lora["rewards/mean"] == pytest.approx(full["rewards/mean"], abs=1e-5)
    assert lora["kl"] == pytest.approx(full["kl"], abs=1e-4)
    tokenizer = json.loads((ref / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["Ġbest"], vocab["Ġstandvo"] = vocab["Ġstandvo"], vocab["Ġbest"]
    (ref / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(kto.BadInput, match="another tokenizer or vocabulary"):
        train(tiny, ratings, tmp_path / "no", *argv)


def test_a_loss_that_is_not_finite_stops_before_the_optimizer_moves_and_names_the_example(
    tiny, ratings, tmp_path, monkeypatch
):
    moved, real = [], torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *a: moved.append(1) or real(self, *a))
    bad = tmp_path / "bad"
    shutil.copytree(tiny, bad)
    weights = load_file(bad / "model.safetensors")
    weights["transformer.wte.weight"][383] = float("nan")  # only records with this token become NaN
    from safetensors.torch import save_file

    save_file(weights, bad / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(kto.Failed) as e:
        train(bad, ratings, tmp_path / "run", "--batch_size=24", "--max_steps=1", f"--reference={tiny}")
    assert "step 1" in str(e.value) and "ratings.jsonl:" in str(e.value) and "untouched" in str(e.value)
    assert not moved
    train(tiny, ratings, tmp_path / "good", "--batch_size=8", "--max_steps=3")
    assert len(moved) == 3, "one step a step"

"""What was learned is kept wherever trained weights become numbers of bfloat16.

Small steps of a LoRA run change a matrix of bfloat16 by less than half of its spacing: rounded to nearest, a third of
the margin would be lost."""

import copy
import shutil

import pytest
import torch
import transformers
from conftest import PARITY, start, train
from tiny_models import load_peft, load_transformers, logits, margin, their_margin, write_sentences

from infra.random_numbers import round_at_random
from models import load
from trainer import Trainer

OPTIONS = ("--batch_size=8", "--eval.samples=0", "--lora.rank=8", "--lora.alpha=16")


@pytest.fixture(scope="module")
def rated(tmp_path_factory):
    return write_sentences(tmp_path_factory.mktemp("rated") / "rated.jsonl", 32)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Llama in bfloat16."""
    folder = tmp_path_factory.mktemp("base")
    sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, vocab_size=512)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, initializer_range=0.05)
    transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder)
    shutil.copytree(PARITY / "tokenizer", folder, dirs_exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def week_1(base, rated, tmp_path_factory):
    """A run with adapters and small steps."""
    out = tmp_path_factory.mktemp("runs") / "week-1"
    argv = ("--precision=32-true", "--epochs=2", "--optim.lr=5e-5")
    train(base, rated, out, *OPTIONS, *argv)
    step = max((out / "checkpoints").iterdir())
    start("export", [str(step), "--out", str(out / "float32"), "--dtype=float32"])
    return out


def margin_of_peft(base, adapter=None) -> float:
    hf = load_peft(base, adapter) if adapter else load_transformers(base)
    return their_margin(hf, base, 32)


@torch.no_grad()
def margin_as_multiplied(gpt, base, precision: str) -> float:
    """In float32, by the matrices that a run of this precision multiplies by: autocast rounds them to nearest."""
    gpt = copy.deepcopy(gpt).float().eval()
    for name, p in gpt.named_parameters():
        if precision == "bf16-mixed" and p.dim() > 1 and "lora_" not in name:
            p.copy_(p.bfloat16())
    return margin(lambda ids: logits(gpt, ids), base, 32)


class Look(Trainer):
    """Keeps the reference at the run's end, which is the policy unless the run has a reference of its own."""

    moves_reference = False

    def finish(self):
        super().finish()
        run = self.run
        if self.moves_reference:
            run.new_reference()
        model = run.reference.model if run.cfg.reference else run.policy.module
        Look.model = copy.deepcopy(model)


class MovedReference(Look):
    """The policy becomes the reference, as between two iterations."""

    moves_reference = True


NO_STEP = ("--max_steps=1", "--optim.lr=0")
STEPS = ("--epochs=2", "--optim.lr=5e-5")
PLACES = [
    ("--model=final_adapter", NO_STEP, "bf16-true"),
    ("--model=checkpoint", NO_STEP, "bf16-mixed"),
    ("--model=float32", NO_STEP, "bf16-true"),
    ("--reference=final_adapter", NO_STEP, "bf16-mixed"),
    ("--reference=base", STEPS, "bf16-true"),  # the reference moves
    ("--model=base", STEPS, "bf16-mixed"),  # adapters are merged between iterations
]


@pytest.mark.parametrize("place, steps, precision", PLACES)
def test_what_was_learned_is_left_where_weights_become_coarser(
    place, steps, precision, base, rated, week_1, tmp_path
):
    folders = {
        "base": base,
        "final_adapter": week_1 / "final_adapter",
        "float32": week_1 / "float32",
        "checkpoint": max((week_1 / "checkpoints").iterdir()),
    }
    setting, _, name = place.partition("=")
    argv = (f"{setting}={folders[name]}", f"--precision={precision}", *steps)
    trainer = Look if steps == NO_STEP else MovedReference
    out = tmp_path / "run"
    train(base, rated, out, *OPTIONS, *argv, trainer=trainer)
    adapter = (week_1 if trainer is Look else out) / "final_adapter"
    before = margin_of_peft(base)
    learned = margin_of_peft(base, adapter) - before
    left = (margin_as_multiplied(Look.model, base, precision) - before) / learned
    assert 0.97 < left < 1.06


def test_an_export_and_a_program_that_asks_a_model_in_bfloat16_have_all_that_was_learned(
    base, week_1
):
    """generate.py and the page for thumbs on a GPU."""
    before = margin_of_peft(base)
    learned = margin_of_peft(base, week_1 / "final_adapter") - before
    assert load_transformers(week_1 / "final").dtype == torch.bfloat16
    assert 0.97 < (margin_of_peft(week_1 / "final") - before) / learned < 1.06
    for folder in ("float32", "final_adapter"):
        gpt = load.load_model(week_1 / folder, torch.bfloat16)
        left = (margin_as_multiplied(gpt, base, "bf16-true") - before) / learned
        assert 0.97 < left < 1.06, folder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_number_is_rounded_to_a_neighbour_and_is_right_on_average(dtype):
    x = torch.randn(2000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 1, 2000)
    nearest = x.to(dtype)
    size = nearest.abs()
    spacing = torch.nextafter(size, torch.full_like(size, torch.inf)).double() - size.double()
    draws = torch.stack([round_at_random(x, dtype, "w", seed) for seed in range(300)]).double()
    assert ((draws - x.double()).abs() <= spacing).all()
    assert ((draws.mean(0) - x.double()) / spacing).abs().max() < 0.2
    assert torch.equal(round_at_random(nearest.float(), dtype, "w", 1), nearest), "exact ones stay"

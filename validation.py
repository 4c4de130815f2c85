"""Validation, and the end of a run: what is measured of the weights between two steps, and of those that are exported.

Reading order: validate (a row of val.csv), finish (exports and the test split).

A parameter `loop` is a trainer.Trainer, and trainer.py imports this file.
"""

from typing import Any

import torch

from data import Step
from infra.checkpoint import checkpoint_folder
from infra.console import say
from infra.devices import all_reduce, on_all_ranks
from infra.logger import format_cells, write_json
from infra.optimizer import Plan, is_due
from objective import copied_to_cpu, join_columns
from records.examples import Example

OWN_ANSWERS = 64  # own_kl scores at least so many: scoring all would take as long as sampling them


def validate(loop: Any, plan: Plan) -> bool:
    """Write a row of val.csv, samples, and the checker's accuracy; after the run's last step they are those of
    the weights that are exported. -> whether the row is the best so far by keep_best"""
    run = loop.run
    done = run.state.step
    if not loop.val:
        return False
    run.state.unvalidated = True
    is_rounded = done == plan.total and run.export_rounds
    is_saved = done > 0 and (done == plan.end or is_due(done, run.cfg.save_interval, plan))
    if is_saved:
        run.save()  # as not validated: a resume after an error in here begins it again
    if is_rounded:
        run.export("final", done)
        trained = row_of(loop, loop.val, "validation")
        with run.exported_weights("final"):
            row, samples = validation_row(loop, plan)
        say_what_is_left("validation", trained, row)
    else:
        row, samples = validation_row(loop, plan)
    run.state.unvalidated = False
    is_best = run.state.remember_if_best(row, run.cfg.keep_best)
    run.logger.validation(done, row, samples)
    if is_saved:
        run.save_state()
    return is_best


def validation_row(loop: Any, plan: Plan) -> tuple[dict, list[dict]]:
    """-> a row of val.csv, and samples. A collective."""
    run = loop.run
    done = run.state.step
    row = row_of(loop, loop.val, "validation")
    answered: list[Example] = []
    if run.evaluator.checker:
        share = kl_own = None
        if done == 0 or is_due(done, run.cfg.eval.check_interval, plan):
            share, answered = run.evaluator.accuracy(done)
            kl_own = own_kl(loop, answered)
        row = join_columns(row, {"checker_accuracy": share, "kl/own": kl_own})
    return row, run.evaluator.samples(answered)


def row_of(loop: Any, examples: list[Example], title: str) -> dict:
    """A row by the objective's metrics, of all these examples. Empty for prompts alone, of which only a
    checker has something to say. A collective."""
    if not examples[0].completions:
        return {}
    columns, baseline = copied_to_cpu(*loop.score_examples(examples, title))
    return on_all_ranks(loop.run.fabric, lambda: loop.metrics(columns, baseline))


@torch.no_grad()
def own_kl(loop: Any, answered: list[Example]) -> float | None:
    """The mean of r, in nats an answer, over 64 to 127 of the check's answers (all if there are fewer). It
    estimates KL(policy || reference) if they were sampled at temperature 1 without top_k, top_p or
    a penalty; else it may even be negative. None without a reference in memory."""
    run = loop.run
    if run.reference is None or run.cfg.reference_cache:
        return None
    answered = answered[:: max(1, len(answered) // OWN_ANSWERS)]  # of all kinds of prompts
    step = Step(answered, budget=run.budget)
    sums = []
    for micro in loop.on_device(loop.packed_parts(step)):
        logps = loop.forward(micro.packed).logps
        r_B = (logps - run.reference(micro.packed).logps)[:, 0]
        sums.append(r_B.double().sum() * (not micro.part.filler))
    return all_reduce(sum(sums)).item() / len(answered)


def finish(loop: Any) -> None:
    """Compare the answers of the last weights with those before the run; export the last weights, and then
    the best ones, and score the test split with each."""
    run = loop.run
    run.evaluator.compare(run.state.step)
    if run.cfg.lora.rank:
        run.export_adapters()
    exports = {"final": run.state.step, "best": run.state.best_step}
    test = run.examples["test"]
    scores = {}
    for name, step in exports.items():
        if step is None:
            continue
        run.export(name, step)
        say(f"\nexported to {run.folder / name}")
        if test and test[0].completions:
            run.load(checkpoint_folder(run.folder, step))  # what moved after it goes back, too
            scores[name] = test_row(loop, name)
            say(f"test, {name} weights: {', '.join(format_cells(scores[name]))}")
    if scores and run.fabric.global_rank == 0:
        write_json(run.folder / "eval" / "test.json", scores)


def test_row(loop: Any, name: str) -> dict:
    """The test split's row, of the weights that were exported as `name`: final or best."""
    run = loop.run
    test = run.examples["test"]
    row = row_of(loop, test, "the test split")
    if not run.export_rounds:
        return row
    trained = row
    with run.exported_weights(name):
        row = row_of(loop, test, "the test split")
    say_what_is_left(f"test, {name} weights", trained, row)
    return row


def say_what_is_left(what: str, trained: dict, exported: dict) -> None:
    """Say how much of the margin the rounding of an export has left, if less than nine tenths; without a margin
    above 0, how much of the loss. trained, exported: rows of the same examples."""
    has_margin = (trained.get("rewards/margins") or 0) > 0
    name = "rewards/margins" if has_margin else "loss"
    before = trained.get(name)
    after = exported.get(name)
    if before is None or after is None or before <= 0:
        return
    share = after / before if has_margin else before / max(after, before)
    if share < 0.9:
        say(
            f"{what}: {name} is {after:.4g} for the exported weights and {before:.4g} for the trained ones, "
            f"before they were rounded ({share:.0%}); --export.dtype float32 exports those"
        )

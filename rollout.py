"""Shared by SPIN and online KTO: iterations, and the policy's answers and their ratings on the disk.

Answers come from our own sampler, or from an engine that is given in code, main(rollout=engine). An engine is a
function

    engine(folder, prompts, sampling, max_new_tokens, seed) -> completions

that answers prompts (lists of token ids) with the Hugging Face model in `folder`, the current policy. A completion is a
list of token ids. It ends in an EOS unless it was cut. The folder's generation_config.json lists all tokens that count
as EOS (eos_token_id). The engine is called once for each rollout_batch_size prompts. Each iteration has a new folder,
because some engines cache the contents of a path. Token ids that the model does not have, and answers beyond its
context, are refused before they are written.

An engine that runs elsewhere may still have the weights of the last iteration, or another tokenizer. If the engine also
gives the log-probs of its answers (WithLogps), the run compares them with the policy's and refuses such answers.

iterations/answers-N.jsonl has a record of each answer (records/forms.py). The file is written again after each rollout
batch, so a resume finds whole batches. iterations/rated-N.jsonl has these records with their labels, which kto.py can
read, and the examples that the iteration learns from.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jsonargparse.typing import PositiveInt

from data import Step
from infra.console import BadInput, Failed, advance, progress, say, user_code
from infra.devices import all_reduce, on_rank_0
from infra.files import as_lines, publish_folder, read_lines, write_whole
from infra.optimizer import Plan, check_iterations, iteration_plans
from infra.random_numbers import mixed
from infra.settings import RunSettings, Sampling, refuse_unless
from models.export import export
from records.examples import Example, examples_hash
from records.forms import answer_fields
from sampler import generate, read_answer

if TYPE_CHECKING:
    from run import Run


@dataclass(frozen=True)
class RolloutSettings(Sampling):
    """Settings that spin.py and online.py share."""

    rollout_batch_size: PositiveInt = 512
    """Prompts answered between two writes to the disk. A resume keeps the answers of whole batches. Random numbers
    depend on this setting, so another value gives other answers. Set batch_size to save memory."""


# Of a rollout batch 64 to 127 answers are compared with an engine's log-probs. More would cost too much time.
COMPARED = 64

LOST = (
    "missing, or not what this iteration learns from: continue in the run's own folder, or copy this file "
    "from there"
)


def validate_iterations(cfg: RunSettings, moving_reference: bool) -> None:
    """Raise BadInput for settings that do not go with iterations. moving_reference: whether the policy becomes the
    reference when an iteration begins."""
    if cfg.reference_cache:
        raise BadInput("reference_cache: the answers are not known before the run")
    if not moving_reference:
        return
    if cfg.reference:
        raise BadInput("reference: it is the policy as an iteration begins")
    refuse_unless(
        not cfg.lora.quantize,
        "lora.quantize: adapters are merged into the base, which is their reference, and a quantised base cannot "
        "take them",
    )


def iterations(run: "Run", sizes: list[int], moving_reference: bool) -> Iterator[tuple[int, Plan]]:
    """(i, plan) of each iteration that is not done yet, i from 1. sizes: the expected number of examples of each
    iteration. The caller may correct these numbers in run.state. If moving_reference, the policy becomes its own
    reference when an iteration begins. Raises BadInput."""
    state = run.state
    check_iterations(run.cfg, sizes)
    n = len(sizes)
    state.iteration_sizes = (state.iteration_sizes + sizes)[:n]
    for i in range(1, n + 1):
        plan = iteration_plans(run.cfg, state.iteration_sizes)[i - 1]
        run.last_step = plan.total
        # an iteration is not done before its last validation has ended
        if plan.end > state.step - state.unvalidated:
            if i > state.iteration:
                run.begin_iteration(i, moving_reference and run.reference is not None)
            yield i, plan


# ---- answers -------------------------------------------------------------------------------------


class WithLogps(NamedTuple):
    """Answers with log-probs, which an engine may return instead of plain answers."""

    answers: list[list[int]]
    logps: list[list[float]]
    """The log-prob in nats of each token of each answer, at temperature 1 without top_p, even if the answer was sampled
    with other settings."""
    max_gap: float = 0.1
    """How far the log-probs may be from the policy's: the mean absolute difference, in nats per token. Rounding alone
    gave 1e-5 in float32, and up to 0.07 if one side was in bfloat16."""


def iteration_file(run: "Run", name: str, i: int) -> Path:
    return run.folder / "iterations" / f"{name}-{i}.jsonl"


def export_policy(run: "Run") -> Path:
    """Write the current policy as a Hugging Face folder of this iteration, for an engine. The folder of the last
    iteration is removed. A collective."""
    folder = run.folder / "iterations"
    # Engines cache the contents of a path. So other weights need another name, also after a new start in this folder.
    name = f"policy-{run.state.iteration}-{run.state.started_from[:8]}"
    model = run.policy.module
    generation = run.tokenizer.generation_config(model.embedding.num_embeddings)
    write = partial(
        export,
        run.source,
        model.rows,
        run.merged_weights(),
        notes={"generation_config.json": generation},
        seed=run.cfg.seed,
    )
    publish_folder(run.fabric, write, folder / name)
    if run.fabric.global_rank == 0:
        for other in folder.glob("policy-*"):
            if other.name != name:
                shutil.rmtree(other)
    return folder / name


def policy_answers(
    run: "Run", i: int, plan: Plan, examples: list[Example], args: RolloutSettings
) -> list[list[int]]:
    """The policy's answers to the prompts of `examples` in iteration i, as token ids.

    The answers are written after each rollout batch. A resume takes the batches that a killed process has written if
    policy, prompts and sampling are the same. Raises BadInput, Failed, and Interrupted after a signal.
    """
    file = iteration_file(run, "answers", i)
    size = args.rollout_batch_size
    new = args.max_new_tokens or run.cfg.data.max_completion
    # all inputs that the answers depend on, except by rounding
    sampling = replace(args, batch_size=1)
    causes = (run.state.started_from, run.cfg.seed, run.rollout is None, new, sampling)
    key = examples_hash({repr(causes): examples})[:16]
    lines = on_rank_0(run.fabric, lambda: read_lines(file))
    rows = [row for row in lines if row["key"] == key]
    text = as_lines(rows)
    if len(rows) < len(examples):
        refuse_unless(run.state.step == plan.begin, f"resume: {file}: {LOST}")
        folder = export_policy(run) if run.rollout else None
    check_stop = partial(run.stop.check, run.fabric.device)
    longest = max(len(e.prompt) for e in examples)
    with progress(f"answers of iteration {i}", len(examples) - len(rows)):
        for start in range(len(rows), len(examples), size):
            batch = examples[start : start + size]
            prompts = [e.prompt for e in batch]
            seed = mixed(run.cfg.seed * 1009 + i, start)
            if run.rollout:
                check_stop()
                questions = (folder, [prompt.tolist() for prompt in prompts], args, new, seed)
                fresh = engine_answers(run, batch, questions, start, longest)
                advance(len(prompts))
            else:
                fresh = generate(
                    run.fabric, run.policy, prompts, run.tokenizer, args, new, seed, check_stop
                )
            for example, ids in zip(batch, fresh):
                answer = answer_fields(*read_answer(run.tokenizer, ids, args.stop))
                rows.append(example.asked | answer | {"key": key, "ids": ids})
            text += as_lines(rows[start:])
            if run.fabric.global_rank == 0:
                write_whole(file, text)
    return [row["ids"] for row in rows]


def engine_answers(
    run: "Run", batch: list[Example], questions: tuple, first: int, longest: int
) -> list[list[int]]:
    """The engine's answers to a batch of prompts. questions: the engine's arguments. first: the number of the first
    answer. longest: tokens of the iteration's longest prompt. A collective. Raises BadInput, and Failed if the engine's
    log-probs are too far from the policy's."""

    def ask_engine() -> WithLogps:
        with user_code("rollout"):
            return read_engine(run.rollout(*questions), len(batch))

    answers, logps, max_gap = on_rank_0(run.fabric, ask_engine)
    for j, (example, ids) in enumerate(zip(batch, answers), first):
        check_scorable(run, f"rollout: answer {j}", example.prompt, (ids,), longest)
    if not logps:
        return answers
    gap = engine_gap(run, batch, answers, logps)
    if not gap <= max_gap:  # also if the gap is not a number
        raise Failed(
            f"rollout: the engine answers with other weights, another tokenizer or template: its log-probs are "
            f"{gap:.3g} nats a token off the policy's, and at most {max_gap:g} are allowed"
        )
    say(f"the engine's log-probs are {gap:.2g} nats a token off the policy's")
    return answers


def read_engine(given: Any, n: int) -> WithLogps:
    """An engine's answers to n prompts as Python's lists. The list of log-probs is empty if the engine gives none.
    Raises BadInput."""
    if not isinstance(given, WithLogps):
        given = WithLogps(given, [])
    answers = [list(map(int, ids)) for ids in given.answers]
    logps = [list(map(float, of_answer)) for of_answer in given.logps]
    refuse_unless(
        len(answers) == n,
        f"rollout: expected {n} answers, got {len(answers)}",
    )
    refuse_unless(
        not logps or list(map(len, logps)) == list(map(len, answers)),
        "rollout: expected a log-prob for each token of each answer",
    )
    return WithLogps(answers, logps, given.max_gap)


@torch.no_grad()
def engine_gap(
    run: "Run", examples: list[Example], answers: list[list[int]], logps: list[list[float]]
) -> float:
    """The mean absolute difference of an engine's log-probs from the policy's, in nats per token, over some of the
    answers (COMPARED). A collective."""
    numbers = range(0, len(answers), max(1, len(answers) // COMPARED))
    answered = [
        examples[j]._replace(completions=(np.array(answers[j], np.int32),)) for j in numbers
    ]
    step = Step(answered, budget=run.budget)
    step.move_to(run.fabric.device)
    gap_G = step.zeros()  # the sum over each answer's tokens
    for micro in step:
        micro = micro.to(run.fabric.device)
        logps_BL = run.policy(micro.packed, by_token=True).logps[:, 0].double()
        theirs_BL = torch.zeros_like(logps_BL)
        for row, number in enumerate(micro.part.indices):
            of_answer = logps[numbers[number]]
            theirs_BL[row, : len(of_answer)] = theirs_BL.new_tensor(of_answer)
        micro.put((logps_BL - theirs_BL).abs().sum(1), gap_G)
    return all_reduce(gap_G).sum().item() / sum(len(answers[j]) for j in numbers)


def check_scorable(
    run: "Run", where: str, prompt: Sequence[int], completions: Sequence, longest_prompt: int
) -> None:
    """Refuse answers that the model cannot compute: token ids that the model does not have, or more tokens than its
    context. If the objective has mismatched pairs, a completion may be scored after the longest prompt. Raises
    BadInput."""
    module = run.policy.module
    n_ids = module.embedding.num_embeddings
    context = module.max_seq_length
    texts = (prompt, *completions)
    refuse_unless(
        completions and all(map(len, texts)),
        f"{where}: expected a prompt and a completion, with tokens",
    )
    unknown = [int(i) for i in chain(*texts) if not 0 <= i < n_ids]
    refuse_unless(
        not unknown, f"{where}: token ids {unknown[:5]}, but the model has 0 to {n_ids - 1}"
    )
    before = longest_prompt if run.objective.needs_mismatched_pairs else len(prompt)
    longest = max(map(len, completions))
    refuse_unless(
        before + longest <= context,
        f"{where}: {longest} tokens, after a prompt of {before}, exceed the context of {context}",
    )


def check_rated(run: "Run", examples: list) -> None:
    """Refuse what a fork's `rate` has made if no step can learn from it, before it is written. Raises BadInput."""
    for j, example in enumerate(examples):
        where = f"rate: example {j}"
        expected = "expected True or False; a graded rating belongs into rewards"
        is_label = isinstance(example.label, bool | np.bool_)
        refuse_unless(is_label, f"{where}: label: {expected}, got {example.label!r}")
    longest = max((len(e.prompt) for e in examples), default=0)
    for j, e in enumerate(examples):
        check_scorable(run, f"rate: example {j}", e.prompt, e.completions, longest)


# ---- what an iteration learns from the answers ---------------------------------------------------


def rated_line(run: "Run", example: Example, stop: list[str]) -> dict:
    """A row of rated-N.jsonl: the answer with its label, as kto.py reads it, and the example."""
    answer = answer_fields(*read_answer(run.tokenizer, example.completions[0].tolist(), stop))
    rating = {"label": example.label, "weight": example.weight}
    return example.asked | answer | rating | {"example": example._replace(asked={})._asdict()}


def rated_examples(
    run: "Run",
    i: int,
    plan: Plan,
    rate: Callable[["Run", list[Example], list[list[int]]], list[Example]],
    prompts: list[Example],
    answers: list[list[int]],
    stop: list[str],
) -> list[Example]:
    """The examples, any number of them, that rate(run, prompts, answers) makes of the answers of iteration i.

    Rank 0 calls `rate` once per iteration and writes the examples to the folder of the answers. All ranks learn from
    this file. A resume in the middle of the iteration also learns from the file, because `rate` may give other ratings
    if it is called again. stop: the stop texts of the answers. Raises BadInput.
    """
    file = iteration_file(run, "rated", i)

    def read_or_rate() -> tuple[list[dict], dict]:
        if run.state.step == plan.begin:
            with user_code("rate"):
                examples = list(rate(run, prompts, answers))
                check_rated(run, examples)
            write_whole(file, as_lines([rated_line(run, e, stop) for e in examples]))
        return [row["example"] for row in read_lines(file)], run.objective.state_dict()

    rows, state = on_rank_0(run.fabric, read_or_rate)
    run.objective.load_state_dict(state)  # rate may have changed the objective, on rank 0
    examples = []
    for row in rows:
        row["prompt"] = np.array(row["prompt"], np.int32)
        row["completions"] = tuple(np.array(ids, np.int32) for ids in row["completions"])
        examples.append(Example(**row))
    return examples

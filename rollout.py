"""What SPIN and online KTO share: iterations, and the policy's answers and their ratings on the disk.

Answers come from our own sampler, or from an engine that is given in code, main(rollout=engine): a
function

    engine(folder, prompts, sampling, max_new_tokens, seed) -> completions

that answers prompts (lists of token ids) with the Hugging Face model in `folder`, the policy as it is
now. A completion is a list of token ids, with its EOS if it came to one. The engine is called once for each
rollout_batch_size prompts; the model in `folder` changes once an iteration.

iterations/answers-N.jsonl has a line an answer and grows with each rollout batch; a resume keeps whole
batches. iterations/rated-N.jsonl has a line a rated example.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path

import numpy as np

from generate import completion_text, generate
from records.examples import Example
from runs.checkpoint import write_whole
from runs.console import advance, progress, say
from runs.devices import on_rank_0
from runs.optimizer import Plan
from runs.settings import Sampling, refuse_unless

NO_BF16_MERGING = """precision: bf16-true: adapters are merged into the base between iterations, and \
merging them into a bfloat16 base would lose them to rounding; use bf16-mixed"""


def iterations(run, plans: list[Plan], moving_reference: bool) -> Iterator[tuple[int, Plan]]:
    """(i, plan) of each iteration that is not done yet, i from 1. With a moving reference the policy
    becomes its own reference when an iteration begins."""
    moves, state = moving_reference and run.reference is not None, run.state
    run.last_step = plans[-1].total
    for i, plan in enumerate(plans, 1):
        is_over = plan.end == state.step and not state.unvalidated
        if plan.end < state.step or is_over:
            continue
        if i > state.iteration:
            run.begin_iteration(i, moves)
        yield i, plan


# ---- answers -------------------------------------------------------------------------------------


def answers_file(run, i: int) -> Path:
    return run.folder.path / "iterations" / f"answers-{i}.jsonl"


def read_answers(run, i: int) -> list[list[int]]:
    """The token ids of iteration i's answers."""
    lines = answers_file(run, i).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["ids"] for line in lines]


def policy_answers(run, i: int, plan: Plan, prompts: list, args) -> list[list[int]]:
    """The policy's answers to `prompts` in iteration i, as token ids.

    They are written after each rollout batch. A resume takes the batches that a killed process has
    written, if policy, prompts and sampling are the same. args: a Sampling with a
    rollout_batch_size. Raises BadInput; and Interrupted where a signal or the time limit comes first.
    """
    file, size = answers_file(run, i), args.rollout_batch_size
    new = args.max_new_tokens or run.cfg.data.max_completion
    key = _key_of(run, prompts, args, new)
    answers = on_rank_0(run.fabric, lambda: _whole_batches(file, key, size, len(prompts)))
    if len(answers) == len(prompts):
        return answers
    refuse_unless(run.state.step == plan.begin, _lost(file))
    folder = run.publish_policy() if run.rollout else None
    n = len(prompts) - len(answers)
    say(f"iteration {i}: {n:,} prompts to answer, with at most {new:,} tokens each")
    with progress(f"answers of iteration {i}", n * new):
        while len(answers) < len(prompts):
            batch = prompts[len(answers) : len(answers) + size]
            seed = (run.cfg.seed * 1009 + i) * 1000003 + len(answers)
            fresh = _answer_batch(run, folder, batch, args, new, seed)
            answers += fresh
            if run.fabric.global_rank == 0:
                with open(file, "a", encoding="utf-8") as f:
                    for ids in fresh:
                        text = completion_text(run.tokenizer, ids, args.stop)
                        row = {"key": key, "completion": text, "ids": ids}
                        f.write(json.dumps(row, ensure_ascii=False) + "\n")
    return answers


def _lost(file: Path) -> str:
    return (
        f"resume: {file}: not what this iteration learns from: go on in the run's own folder, or from "
        "a checkpoint of an iteration's end"
    )


def _key_of(run, prompts: list, args: Sampling, new: int) -> str:
    """A hash of all that the answers of an iteration depend on."""
    sampling = [getattr(args, f.name) for f in fields(Sampling)]
    depends = [run.state.started_from, run.cfg.seed, run.rollout is None, new, *sampling]
    h = hashlib.sha256(repr([*depends, args.rollout_batch_size]).encode())
    for prompt in prompts:
        h.update(len(prompt).to_bytes(8, "big") + prompt.tobytes())
    return h.hexdigest()[:16]


def _whole_batches(file: Path, key: str, size: int, n: int) -> list[list[int]]:
    """The answers of whole rollout batches in a file, if they have this key. Others are removed."""
    file.parent.mkdir(exist_ok=True)
    lines = file.read_text(encoding="utf-8").split("\n") if file.exists() else [""]
    rows = [json.loads(line) for line in lines[:-1]]  # the last may be half a line
    rows = [row["ids"] for row in rows if row["key"] == key]
    if len(rows) < n:
        rows = rows[: len(rows) // size * size]
        write_whole(file, "".join(line + "\n" for line in lines[: len(rows)]))
    return rows


def _answer_batch(run, folder, prompts, args: Sampling, new: int, seed: int):
    """Answers by our sampler, or by the engine on rank 0 from the exported folder."""
    # the time limit, too, since a resume goes on with the answers
    check_stop = partial(run.stop.check, run.fabric.device, time_limit=True)
    if run.rollout is None:
        return generate(run.fabric, run.policy, prompts, run.tokenizer, args, new, seed, check_stop)
    check_stop()

    def ask_engine():
        fresh = list(run.rollout(folder, [p.tolist() for p in prompts], args, new, seed))
        refuse_unless(
            len(fresh) == len(prompts) and all(0 < len(ids) <= new for ids in fresh),
            f"rollout: expected {len(prompts)} answers of 1 to {new} token ids each",
        )
        advance(len(prompts) * new)
        return [list(map(int, ids)) for ids in fresh]

    return on_rank_0(run.fabric, ask_engine)


# ---- what an iteration learns from the answers ---------------------------------------------------


def rated_examples(run, i: int, plan: Plan, rate: Callable, prompts: list, answers: list) -> list:
    """The examples that rate(run, prompts, answers) makes of the answers of iteration i, one for each.

    Rank 0 asks it, once an iteration, and writes what it gives beside the answers. All ranks learn from
    that file, and so does a resume in the middle of the iteration: ratings need not be the same twice.
    Raises BadInput.
    """
    file = run.folder.path / "iterations" / f"rated-{i}.jsonl"

    def work():
        if run.state.step > plan.begin:  # else rate or its checker may have changed
            refuse_unless(file.exists(), _lost(file))
            return file.read_text(encoding="utf-8").splitlines()
        examples = rate(run, prompts, answers)
        refuse_unless(
            len(examples) == len(prompts),
            f"rate: {len(prompts)} answers need as many examples, got {len(examples)}",
        )
        lines = [_rated_line(e, prompt) for e, prompt in zip(examples, prompts)]
        write_whole(file, "\n".join([*lines, ""]))
        return lines

    lines, state = on_rank_0(run.fabric, lambda: (work(), run.objective.state_dict()))
    vars(run.objective).update(state)  # rate may have changed it, on rank 0
    return [_rated_example(json.loads(line), e) for line, e in zip(lines, prompts)]


def _rated_line(example: Example, prompt: Example) -> str:
    """The fields that rate has changed, as JSON."""
    pairs = zip(Example._fields, example, prompt)
    changed = {name: new for name, new, old in pairs if new is not old}
    return json.dumps(changed, default=lambda x: x.tolist(), ensure_ascii=False)


def _rated_example(changed: dict, prompt: Example) -> Example:
    """The prompt with the fields of a line of rated-N.jsonl."""
    if "prompt" in changed:
        changed["prompt"] = np.array(changed["prompt"], np.int32)
    if "completions" in changed:
        changed["completions"] = tuple(np.array(y, np.int32) for y in changed["completions"])
    if "rewards" in changed:
        changed["rewards"] = (*changed["rewards"], None)[:2]
    return prompt._replace(**changed)

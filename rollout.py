"""What SPIN and online KTO share: iterations, and the policy's answers on the disk.

Answers come from our own sampler, or from an engine that is given in code, main(rollout=engine): a
function

    engine(folder, prompts, sampling, max_new_tokens, seed) -> completions

that answers prompts (lists of token ids) with the Hugging Face model in `folder`, the policy as it is
now. A completion is a list of token ids, with its EOS if it came to one. The engine is called once for each
rollout_batch_size prompts; the model in `folder` changes once an iteration.
"""

import hashlib
import json
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path

import numpy as np

from generate import completion_text, generate
from hub.export import export_weights
from records.examples import Example
from runs.console import Wait, advance, say
from runs.devices import on_rank_0
from runs.errors import BadInput, printable, read_regular, user_error
from runs.files import write_atomically
from runs.optimizer import Plan
from runs.settings import Sampling

NO_BF16_MERGING = """precision: bf16-true: adapters are merged into the base between iterations, and \
merging them into a bfloat16 base would lose them to rounding; use bf16-mixed"""

SHORTER_ROLLOUT = "fewer prompts in an iteration, or a smaller max_new_tokens"


def iterations(run, plans: list[Plan], moving_reference: bool) -> Iterator[tuple[int, Plan]]:
    """(i, plan) of each iteration that is not done yet, i from 1. With a moving reference the policy
    becomes its own reference when an iteration begins."""
    moves, state = moving_reference and run.reference is not None, run.state
    run.last_step = plans[-1].total
    if moves and state.iteration:  # a resume: its weights belong on the iteration's reference
        run.restore_reference()
    for i, plan in enumerate(plans, 1):
        is_over = plan.end == state.step and not state.unvalidated
        if plan.end < state.step or is_over:
            continue
        if i > state.iteration:
            run.begin_iteration(i, moves)
        yield i, plan


# ---- answers -------------------------------------------------------------------------------------


def answers_file(run, i: int) -> Path:
    """A header line (the request, and the hash of the other lines), then one line
    for each answer."""
    return run.folder.path / "iterations" / f"answers-{i}.jsonl"


def read_answers(run, i: int) -> list[list[int]]:
    """The token ids of iteration i's answers. Raises BadInput if the file is damaged."""
    file = answers_file(run, i)
    _, lines = _read_lines(file)
    return [json.loads(line)["ids"] for line in lines]


def _read_lines(file: Path) -> tuple[dict, list[str]]:
    """-> the request, and a line for each answer. Raises BadInput if the file is damaged."""
    with user_error(None, file, Exception):
        header, *lines = read_regular(file).decode().split("\n")[:-1] or [""]
        request = json.loads(header)
        if request.pop("answers_hash", None) != _lines_hash(lines):
            raise BadInput(f"{file}: damaged: not the answers that were written")
    return request, lines


def _write_lines(file: Path, request: dict, lines: list[str]) -> None:
    header = json.dumps(request | {"answers_hash": _lines_hash(lines)})
    write_atomically(file, "\n".join([header, *lines, ""]))


def _lines_hash(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def policy_answers(run, i: int, plan: Plan, prompts: list, args) -> list[list[int]]:
    """The policy's answers to `prompts` in iteration i, as token ids.

    They are written after each rollout batch. A resume takes the batches that a killed process has
    written, if policy, prompts and sampling are the same. args: a Sampling with a
    rollout_batch_size. Raises BadInput; and Interrupted where a signal or the time limit comes first.
    """
    file, size = answers_file(run, i), args.rollout_batch_size
    new = args.max_new_tokens or run.cfg.data.max_completion
    request = _request_of(run, prompts, args, new)
    lines = on_rank_0(run.fabric, lambda: _lines_on_disk(file, request))
    answers = [json.loads(line)["ids"] for line in lines]
    if len(answers) == len(prompts):
        return answers
    _refuse_lost_file(run, file, plan)
    folder = _export_policy(run) if run.rollout else None
    n = len(prompts) - len(answers)
    say(f"iteration {i}: {n:,} prompts to answer, with at most {new:,} tokens each")
    with Wait(f"answers of iteration {i}", n * new, shorter=SHORTER_ROLLOUT):
        while len(answers) < len(prompts):
            batch = prompts[len(answers) : len(answers) + size]
            seed = (run.cfg.seed * 1009 + i) * 1000003 + len(answers)
            with run.stop.interruptible():
                fresh = _answer_batch(run, folder, batch, args, new, seed)
            answers += fresh
            if run.fabric.global_rank == 0:
                lines += [_answer_line(run, ids, args.stop) for ids in fresh]
                _write_lines(file, request, lines)
    return answers


def _refuse_lost_file(run, file: Path, plan: Plan) -> None:
    """Raise BadInput if the iteration has learned from a file that is not there."""
    if run.state.step > plan.begin:
        advice = "go on in the run's own folder"
        if plan.begin:
            advice = f"resume from a checkpoint of step {plan.begin} or before"
        raise BadInput(f"resume: {file}: not what this iteration learns from; {advice}")


def _request_of(run, prompts: list, args: Sampling, new: int) -> dict:
    """All that the answers of an iteration depend on."""
    h = hashlib.sha256()
    for prompt in prompts:
        h.update(len(prompt).to_bytes(8, "big") + prompt.tobytes())
    request = {"policy": run.state.started_from, "seed": run.cfg.seed, "prompts": h.hexdigest()}
    request["engine"] = run.rollout is not None
    names = [f.name for f in fields(Sampling)]
    sampling = {name: getattr(args, name) for name in (*names, "rollout_batch_size")}
    return {**request, **sampling, "max_new_tokens": new}


def _lines_on_disk(file: Path, request: dict) -> list[str]:
    """The lines of whole rollout batches that were written for this request."""
    if not file.exists():
        return []
    try:
        known, lines = _read_lines(file)
    except BadInput as e:
        say(f"{e}; they cannot be used")
        return []
    return lines if known == request else []


def _answer_line(run, ids: list[int], stop: list[str]) -> str:
    text = completion_text(run.tokenizer, ids, stop)
    return json.dumps({"ids": ids, "completion": text}, ensure_ascii=False)


def _export_policy(run) -> Path:
    """The policy as it is now, as a Hugging Face folder. A collective."""
    folder, weights = run.folder.path / "iterations" / "policy", run.merged_weights()
    run.publish(folder, lambda new: export_weights(weights, run.source, new))
    return folder


def _answer_batch(run, folder, prompts, args: Sampling, new: int, seed: int):
    """Answers by our sampler, or by the engine on rank 0 from the exported folder."""
    # the time limit, too, since a resume goes on with the answers
    check_stop = partial(run.stop.check, run.fabric.device, time_limit=True)
    if run.rollout is None:
        return generate(run.fabric, run.policy, prompts, run.tokenizer, args, new, seed, check_stop)
    check_stop()

    def ask_engine():
        with run.stop.interruptible(alone=True):
            fresh = run.rollout(folder, [p.tolist() for p in prompts], args, new, seed)
        advance(len(prompts) * new)
        return _check_answers(run, prompts, fresh, new)

    return on_rank_0(run.fabric, ask_engine)


def _policy_bounds(run) -> tuple[int, int]:
    """How many token ids the policy has, and how many tokens its context."""
    module = getattr(run.policy, "module", run.policy)
    return module.config.padded_vocab_size, module.max_seq_length


def _check_answers(run, prompts: list, answers, new: int) -> list[list[int]]:
    """An engine's answers as lists of Python's ints. Raises BadInput with the number of the first one
    that the policy could not have given."""
    size, context = _policy_bounds(run)
    stops = set(run.tokenizer.stops)
    try:
        answers = list(answers)
    except TypeError:
        raise BadInput(f"rollout: expected a list of answers, got {printable(answers)}") from None
    if len(answers) != len(prompts):
        raise BadInput(f"rollout: {len(prompts)} prompts need as many answers, got {len(answers)}")
    checked = []
    for i, (prompt, ids) in enumerate(zip(prompts, answers)):
        most = min(new, context - len(prompt))
        try:
            ids = [operator.index(x) for x in ids]  # no floats, no texts
            is_valid = 0 < len(ids) <= most and min(ids) >= 0 and max(ids) < size
        except TypeError:
            is_valid = False
        if not is_valid:
            raise BadInput(
                f"rollout: answer {i}: expected 1 to {most} token ids from 0 to {size - 1}, got "
                f"{printable(repr(ids))}"
            )
        if not stops.isdisjoint(ids[:-1]):
            raise BadInput(
                f"rollout: answer {i}: token ids after the end of the answer, got {printable(repr(ids))}"
            )
        checked.append(ids)
    return checked


# ---- what an iteration learns from the answers ---------------------------------------------------


def rated_examples(run, i: int, plan: Plan, rate: Callable, prompts: list, answers: list) -> list:
    """The examples that rate(run, prompts, answers) makes of the answers of iteration i, one for each.

    Rank 0 asks it, once an iteration, and writes what it gives beside the answers. All ranks learn from
    that file, and so does a resume in the middle of the iteration: ratings need not be the same twice.
    Raises BadInput, Failed.
    """
    file = run.folder.path / "iterations" / f"rated-{i}.jsonl"
    header = {"answers": _lines_hash([json.dumps(ids) for ids in answers])}

    def work():
        if run.state.step > plan.begin:  # else rate or its checker may have changed
            lines = _lines_on_disk(file, header)
            if len(lines) != len(prompts):
                _refuse_lost_file(run, file, plan)
            return lines
        with run.stop.interruptible(alone=True):
            examples = rate(run, prompts, answers)
        is_list = isinstance(examples, list | tuple)
        got = len(examples) if is_list else type(examples).__name__
        if got != len(prompts):
            raise BadInput(f"rate: {len(prompts)} answers need as many examples, got {got}")
        bounds = _policy_bounds(run)
        lines = [_rated_line(j, e, prompts[j], *bounds) for j, e in enumerate(examples)]
        _write_lines(file, header, lines)
        return lines

    lines = on_rank_0(run.fabric, work)
    return [_rated_example(json.loads(line), e) for line, e in zip(lines, prompts)]


def _rated_line(j: int, example: Example, prompt: Example, size: int, context: int) -> str:
    """The fields that rate has changed, as JSON. size, context: of the policy. Raises BadInput."""
    pairs = zip(Example._fields, example, prompt)
    changed = {name: new for name, new, old in pairs if new is not old}
    try:
        line = json.dumps(changed, default=lambda x: x.tolist(), ensure_ascii=False)
        example = _rated_example(json.loads(line), prompt)
        ids = [example.prompt, *example.completions]
        is_valid = len(ids) > 1 and all(x.ndim == 1 and len(x) for x in ids)
        is_valid = is_valid and all(0 <= x.min() <= x.max() < size for x in ids)
        is_valid = is_valid and all(len(ids[0]) + len(x) <= context for x in ids[1:])
        is_valid &= example.label in (False, True) and 0 <= example.weight < math.inf
        is_valid &= all(r is None or math.isfinite(r) for r in example.rewards)
    except (AttributeError, TypeError, ValueError, OverflowError) as e:
        raise BadInput(f"rate: example {j}: {printable(e, 200)}") from None
    if not is_valid:
        raise BadInput(
            f"rate: example {j}: expected completions of token ids that the model has and that fit its "
            "context, a label that is True or False, a weight of at least 0 and finite rewards, got "
            f"{printable(line)}"
        )
    return line


def _rated_example(changed: dict, prompt: Example) -> Example:
    """The prompt with the fields of a line of rated-N.jsonl."""
    if "prompt" in changed:
        changed["prompt"] = np.array(changed["prompt"], np.int32)
    if "completions" in changed:
        changed["completions"] = tuple(np.array(y, np.int32) for y in changed["completions"])
    if "rewards" in changed:
        changed["rewards"] = (*changed["rewards"], None)[:2]
    return prompt._replace(**changed)

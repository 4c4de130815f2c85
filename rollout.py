"""What SPIN and online KTO share: iterations, a reference that moves, and answers
on disk.

Answers come from our own sampler, or from an engine given in code,
main(rollout=engine): a function

    engine(folder, prompts, sampling, max_new_tokens, seed) -> completions

that answers prompts (lists of token ids) with the Hugging Face model in `folder`,
the policy as it is now. A completion is a list of token ids, with its EOS if it
came to one.
"""

import contextlib
import hashlib
import json
from dataclasses import asdict

import torch

from generate import completion_text, generate
from hub.export import export_weights
from hub.lora import reset_adapters
from hub.weights import weights_hash
from runs import devices, tensors
from runs.console import say
from runs.errors import BadInput
from runs.files import verify_folder, write_atomically
from runs.settings import Sampling
from runs.tensors import rename_tensors

ROUNDS = """precision: bf16-true: the base, which takes the adapters in, would round them away; use \
bf16-mixed"""


def iterations(trainer, plans, moving_reference: bool):
    """(i, plan) of each iteration that is not done yet, i from 1. With a moving
    reference the policy, as it is when an iteration begins, becomes its reference."""
    state = trainer.state
    if state.iteration and moving_reference:  # a resume: its weights belong on this reference
        _put_reference(trainer, state.iteration)
    for i, plan in enumerate(plans, 1):
        if plan.end <= state.step:
            continue
        if i > state.iteration:
            was, state.iteration, state.moved = state.started_from, i, moving_reference
            state.started_from = _start_iteration(trainer, i, moving_reference)
            moved = state.started_from != was
            if not moved and trainer.cfg.optim.lr:
                say(f"iteration {i}: the last one has not moved the policy")
        yield i, plan


def _start_iteration(trainer, i: int, moving_reference: bool) -> str:
    """-> the policy's fingerprint. LoRA's adapters are merged into the base where
    that becomes the reference, and begin anew, with their optimizer state."""
    weights = trainer.merged()
    if not moving_reference:
        return weights_hash(weights)
    lora, module = trainer.reference.frozen is None, trainer.policy.module
    if lora:
        base = (name for name in module.unique_parameters() if "lora_" not in name)
        weights = rename_tensors(weights, {name: name.replace(".linear.", ".") for name in base})
    folder = trainer.out / "iterations" / f"{i}"
    trainer.publish(lambda tmp: tensors.write_safetensors(tmp, weights, "weights"), folder)
    if lora:
        reset_adapters(module, trainer.cfg.seed + 7919 * i, tensors.place_like)
        trainer.optimizer.optimizer.state.clear()
    trainer.reference_step = trainer.state.step
    return _put_reference(trainer, i)


def _put_reference(trainer, i: int) -> str:
    """Iteration i's reference in its place, from disk. -> its fingerprint"""
    file = trainer.out / "iterations" / f"{i}" / "weights.safetensors"
    if not file.exists():
        raise BadInput(f"resume: {file}: missing: give --out_dir, the run's own folder")
    if fault := verify_folder(file.parent, [file.name]):
        raise BadInput(f"resume: {file.parent}: {fault}")
    state = tensors.open_safetensors(file)
    tensors.set_weights(trainer.reference.frozen or trainer.policy, state)
    return weights_hash(state)


def answers_file(trainer, i: int):
    return trainer.out / "iterations" / f"answers-{i}.jsonl"


def read_answers(trainer, i: int) -> list[list[int]]:
    """The token ids of iteration i's answers."""
    lines = answers_file(trainer, i).read_text().split("\n")[1:-1]
    return [json.loads(line)["ids"] for line in lines]


def policy_answers(trainer, i: int, plan, prompts: list, args) -> list[list[int]]:
    """The policy's answers of iteration i to `prompts`, written per rollout batch:
    what a killed run has written is taken as it stands, if policy, prompts and
    sampling are the same. `args`: a Sampling with a rollout_batch_size."""
    fabric, file, size = trainer.fabric, answers_file(trainer, i), args.rollout_batch_size
    new, folder = args.max_new_tokens or trainer.cfg.data.max_completion, None
    asked = {"policy": trainer.state.started_from, "seed": trainer.cfg.seed}
    asked |= {"prompts": _prompts_hash(prompts), "engine": trainer.engine is not None}
    head = json.dumps(asked | asdict(args) | {"max_new_tokens": new})
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    lines = lines[1:] if lines[:1] == [head] else []
    whole = len(lines) if len(lines) == len(prompts) else len(lines) // size * size
    lines = fabric.broadcast(lines[:whole])
    done = [json.loads(line)["ids"] for line in lines]
    if len(done) < len(prompts) and trainer.state.step > plan.begin:
        advice = f"resume from a checkpoint of step {plan.begin} or before"
        advice = advice if plan.begin else "go on in the run's own folder"
        raise BadInput(f"resume: {file}: not what this iteration learns from; {advice}")
    if trainer.engine and len(done) < len(prompts):
        folder = _export_policy(trainer)

    def stop_if_asked(*_):  # before a decode step: whole batches are on disk
        if trainer.stop.agree(fabric.device):
            trainer.save_and_say_how_to_go_on(plan)
            raise SystemExit(trainer.stop.signal and 128 + trainer.stop.signal)

    while len(done) < len(prompts):
        some = prompts[len(done) : len(done) + size]
        seed = (trainer.cfg.seed * 1009 + i) * 1000003 + len(done)
        with trainer.policy.module.register_forward_pre_hook(stop_if_asked):
            fresh = _answer(trainer, folder, some, args, new, seed)
        done += fresh
        if fabric.global_rank == 0:
            decoded = [completion_text(trainer.tokenizer, ids, args.stop) for ids in fresh]
            rows = [{"ids": ids, "completion": x} for ids, x in zip(fresh, decoded)]
            lines += [json.dumps(row, ensure_ascii=False) for row in rows]
            write_atomically(file, "\n".join([head, *lines, ""]))
    return done


def _prompts_hash(prompts: list) -> str:
    h = hashlib.sha256()
    for p in prompts:
        h.update(len(p).to_bytes(8, "big") + p.tobytes())
    return h.hexdigest()


def _export_policy(trainer):
    """The policy as it is, as a Hugging Face folder. A collective."""
    folder, weights = trainer.out / "iterations" / "policy", trainer.merged()
    trainer.publish(lambda tmp: export_weights(weights, trainer.folder, tmp), folder)
    return folder


def _answer(trainer, folder, prompts, args: Sampling, new: int, seed: int) -> list[list[int]]:
    """By our sampler, or by the engine from the exported folder, on rank 0."""
    fabric = trainer.fabric
    if trainer.engine is None:
        return generate(fabric, trainer.policy, prompts, trainer.tokenizer, args, new, seed)

    def work():
        fresh = trainer.engine(folder, [p.tolist() for p in prompts], args, new, seed)
        return [[int(i) for i in ids] for ids in fresh]

    fresh = devices.on_rank_0(fabric, work)
    if len(fresh) != len(prompts) or not all(fresh):
        raise BadInput(f"rollout: {len(prompts)} prompts, {sum(map(bool, fresh))} answers")
    return fresh


@contextlib.contextmanager
def offloaded(optimizer, on: bool):
    """The optimizer's state on the CPU for as long as this lasts."""
    states = optimizer.optimizer.state.values() if on else ()
    moved = [(s, k, x.device) for s in states for k, x in s.items() if isinstance(x, torch.Tensor)]
    for s, k, _ in moved:
        s[k] = s[k].cpu()
    yield
    for s, k, device in moved:
        s[k] = s[k].to(device)

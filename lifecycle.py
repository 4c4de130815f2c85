"""What happens before a run's first step and after its last one: read, launch,
load, resume; save, export, compare. The Trainer's other half; nobody needs it to
change an algorithm."""

import copy
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

import model
from evaluate import Evaluator
from reference import Reference
from support import checkpoint
from support.checkpoint import RunState
from support.devices import Stop, launch, leave, resolve, say
from support.errors import BadInput, Failed
from support.estimate import Estimate
from support.examples import fingerprint, splits, with_limits
from support.logger import Logger, before_and_after
from support.lora import merge_adapters
from support.optim import make_optimizer, make_plan
from support.quantize import quantize_base
from support.settings import Run
from support.throughput import Throughput, least_passes
from support.tokenizer import Tokenizer
from support.weights import export, fetch, read_config
from support.weights import fingerprint as weights_fingerprint

DTYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16}  # of the weights; else float32


class Lifecycle:
    """`validation`: the objective of val.csv (default: the same). `checker`: a
    function (prompt, completion) -> bool. `rollout`: an engine that answers prompts
    (see rollout.py)."""

    def __init__(self, cfg: Run, objective, validation=None, checker=None, rollout=None):
        self.objective, self.validation = objective, validation or objective
        self.engine, both = rollout, (objective, self.validation)
        self.needs_reference = any(o.needs_reference or o.kl_pairs for o in both)
        self.folder = fetch(cfg.model)
        arguments, config, _ = read_config(self.folder)  # what cannot be exported is refused
        if cfg.estimate:
            make, tied = partial(model.make, arguments), config["tie_word_embeddings"]
            head = model.HEAD_LOGITS, model.HEAD_SAVED, model.HEAD_SOFTMAX
            say(Estimate(cfg, make, tied, self.needs_reference, head).table())
            raise SystemExit(0)
        self.tokenizer = Tokenizer(self.folder, cfg.data.chat_template)
        cfg = resolve(replace(cfg, data=with_limits(cfg.data, arguments["block_size"])))
        kinds = objective.records, self.validation.records
        self.examples = splits(cfg.data, self.tokenizer, *kinds, say)
        if objective.records != "prompts":  # too few are refused before any work
            make_plan(cfg, len(self.examples["train"]))
        self.fabric = launch(cfg)
        program = checkpoint.program_file(type(objective))
        self.cfg, found = checkpoint.open_run(self.fabric, cfg, program)
        self.out = Path(self.cfg.out_dir)
        self.state = RunState(program=str(program), source=checkpoint.digest(program))
        self._load_models()
        if found:
            self._resume(found)
        self.saved_step = self.state.step
        self.reference_step = 0  # after which step the policy was the reference
        self.logger = Logger(self.cfg, self.state.step or None)
        given = self.cfg, self.policy, self.tokenizer, self.examples["val"], checker
        self.evaluator = Evaluator(self.fabric, *given)
        needs = objective.needs_reference and not cfg.reference_cache
        passes = least_passes(objective.kl_pairs, needs, cfg.lora.rank > 0)
        self.throughput = Throughput(self.fabric, cfg.precision, self.policy.module, passes)
        self.stop = Stop(cfg.seconds() if cfg.max_time else None)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        self.logger.close()
        if kind is None:
            self.policy = self.reference = self.optimizer = self.evaluator = None
            leave(self.fabric)  # only now that the model is gone
            if self.stop.signal:
                raise SystemExit(128 + self.stop.signal)

    def _load_models(self) -> None:
        """Policy, reference and optimizer, and the hashes by which a resume knows
        them again."""
        cfg, dtype = self.cfg, DTYPES.get(self.cfg.precision, torch.float32)
        policy, frozen = model.load(self.folder, cfg.lora, dtype), None
        if self.tokenizer.n_vocab > policy.config.padded_vocab_size:
            n = self.tokenizer.n_vocab
            raise BadInput(f"model: {cfg.model}: its tokenizer has {n} tokens, its weights fewer")
        if self.needs_reference:
            if cfg.reference:
                frozen = self._load_other_reference(policy.config.padded_vocab_size, dtype)
            elif not cfg.lora.rank:
                frozen = copy.deepcopy(policy)
        self.state.identity = self._identity(policy, frozen)
        if cfg.lora.base:  # only now: the hashes are of the source's own weights
            quantize_base(policy, cfg.lora.base, self.fabric.device)
        policy.activation_checkpointing = cfg.activation_checkpointing
        if frozen is not None:  # DDP refuses a module that never trains; FSDP2 must shard it
            frozen.requires_grad_(False).eval()
            sharded = cfg.strategy == "fsdp"
            if cfg.precision == "bf16-mixed" and not sharded:  # FSDP2 wants one dtype
                model.cast_linears_to_bfloat16(frozen)
            setup = self.fabric.setup_module if sharded else self.fabric.to_device
            frozen = setup(frozen)
        # from here on ranks may draw different random numbers (dropout)
        torch.manual_seed(cfg.seed + 1000003 * self.fabric.global_rank)
        self.policy = self.fabric.setup_module(policy)
        optimizer = make_optimizer(cfg.optim, self.policy.module)
        self.optimizer = self.fabric.setup_optimizers(optimizer)
        self.reference = None
        if self.needs_reference:
            self.reference = Reference(self.fabric, self.policy, frozen)

    def _load_other_reference(self, vocab: int, dtype):
        folder = fetch(self.cfg.reference, "reference")
        frozen = model.load(folder, None, dtype)
        same = self.tokenizer.same(Tokenizer(folder))
        if not same or frozen.config.padded_vocab_size != vocab:
            differs = f"another tokenizer or vocabulary than {self.cfg.model}"
            raise BadInput(f"reference: {self.cfg.reference}: {differs}")
        return frozen

    def _identity(self, policy, frozen) -> dict[str, str]:
        """Hashes of what a resume must find again, by the name that a refusal
        shows."""
        hashes = {"data (token ids and labels)": fingerprint(self.examples)}
        for name, m in (("model weights", policy), ("reference weights", frozen)):
            if m is not None:
                params = m.unique_parameters().items()
                base = {n: p for n, p in params if "lora_" not in n}
                hashes[name] = weights_fingerprint(base)
        names = ("config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json")
        files = {name: self.folder / name for name in (*names, "chat_template.jinja")}
        if self.cfg.data.chat_template:
            files["data.chat_template"] = Path(self.cfg.data.chat_template)
        return hashes | {n: checkpoint.digest(f) for n, f in files.items() if f.is_file()}

    def _resume(self, found: Path) -> None:
        old, _ = checkpoint.read_state(found)
        checkpoint.refuse_another_identity(old.identity, self.state.identity)
        if self.fabric.global_rank == 0:
            checkpoint.put_newer_aside(self.out / "checkpoints", found)
        checkpoint.load(self.fabric, found, self.policy, self.optimizer)
        self.state = replace(old, source=self.state.source)
        self.objective.load_state_dict(old.objective)

    def save(self) -> None:
        """A checkpoint of the step that was just done, and old ones removed."""
        folder, state = self.out / "checkpoints", self.state
        state.objective = self.objective.state_dict()
        self.logger.sync()
        path = folder / f"step-{state.step:08d}"
        checkpoint.save(self.fabric, path, self.policy, self.optimizer, state, self.cfg)
        self.saved_step = state.step
        if self.fabric.global_rank == 0:
            checkpoint.prune(folder, self.cfg.keep_last, state.best_step)

    def save_and_say_how_to_go_on(self, plan) -> None:
        if self.saved_step < self.state.step:
            self.save()
        at = f"step {self.state.step} of {plan.total}"
        self.fabric.print(f"stopped by {self.stop.why} at {at}, saved; go on with")
        settings = self.out / "settings.yaml"
        self.fabric.print(f"  python {self.state.program} --config {settings} --resume auto")

    def merged(self) -> dict[str, torch.Tensor]:
        """The policy's weights by their plain names, adapters merged; on rank 0
        only. A collective."""
        params, quantized = self.policy.unique_parameters(), self.cfg.lora.base
        kept = {n: p for n, p in params.items() if p.requires_grad or not quantized}
        weights = checkpoint.gather_whole(self.fabric, kept)
        if weights and quantized:  # rounded numbers never leave
            weights |= self._source_weights([n for n in params if "lora_" not in n])
        return merge_adapters(weights, self.policy.module) if weights else {}

    def _source_weights(self, names: list[str]) -> dict[str, torch.Tensor]:
        """What a quantised base was made from, read again."""
        dtype = DTYPES.get(self.cfg.precision, torch.float32)
        plain = model.load(self.folder, None, dtype).unique_parameters()
        weights = {name: plain[name.replace(".linear.", ".")] for name in names}
        if weights_fingerprint(weights) != self.state.identity["model weights"]:
            raise Failed(f"{self.folder}: not the weights that this run began with: put them back")
        return weights

    def finish(self) -> None:
        """Export, compare answers with those before, and score the test split."""
        merged, final = self.merged(), self.out / "final"
        checkpoint.publish(self.fabric, lambda tmp: export(merged, self.folder, tmp), final)
        after = self.evaluator.check("after", self.state.step)
        before = self.out / "eval" / "before.json"
        if after and before.exists():
            self.fabric.print(before_and_after(json.loads(before.read_text()), after))
        self.fabric.print(f"\nexported to {final}")
        if self.examples["test"] and self.examples["test"][0].completions:
            self._score_test()

    def _same_base(self, found: Path) -> bool:
        """Adapters of an earlier iteration of SPIN belong on another base than this one's."""
        state, _ = checkpoint.read_state(found)
        return not self.cfg.lora.rank or state.iteration == self.state.iteration

    def _score_test(self) -> None:
        """With the final weights and, where they are others and still there, the
        best ones."""
        scores = {"final": self.score(self.examples["test"])}
        step = self.state.best_step
        best = self.out / "checkpoints" / f"step-{step or 0:08d}"  # may be in another folder's run
        if step not in (None, self.state.step) and best.is_dir() and self._same_base(best):
            checkpoint.set_weights(self.policy, load_file(best / "weights.safetensors"))
            scores["best"] = self.score(self.examples["test"])
        for name, row in scores.items():
            shown = ", ".join(f"{k} {row[k]:.6g}" for k in ("loss", "accuracy") if k in row)
            self.fabric.print(f"test, {name} weights: {shown}")
        if self.fabric.global_rank == 0:
            checkpoint.write_json(self.out / "eval" / "test.json", scores)

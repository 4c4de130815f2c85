"""What happens before a run's first step and after its last one: read, launch,
load, resume; save, export, compare. The Trainer's other half; nobody needs it to
change an algorithm."""

import copy
import hashlib
import json
import shlex
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

import model
from evaluate import Evaluator
from reference import Reference
from support import checkpoint
from support.checkpoint import RunState
from support.devices import Stop, launch, leave, resolve, say
from support.errors import BadInput, given
from support.examples import fingerprint, splits, with_limits
from support.logger import TABLES, Logger, before_and_after, claimed
from support.lora import merge_adapters
from support.optim import make_optimizer, make_plan
from support.settings import Run
from support.throughput import Throughput, least_passes
from support.tokenizer import Tokenizer
from support.weights import copy_files, export, fetch, read_config
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
        arguments, *_ = read_config(self.folder)  # what could not be exported is refused here
        self.tokenizer = Tokenizer(self.folder, cfg.data.chat_template)
        cfg = resolve(replace(cfg, data=with_limits(cfg.data, arguments["block_size"])))
        kinds = objective.records, self.validation.records
        with given("data", cfg.data.train):
            self.examples = splits(cfg.data, self.tokenizer, *kinds, say)
        if objective.records != "prompts":  # too few are refused before any work
            make_plan(cfg, len(self.examples["train"]))
        self.fabric = launch(cfg)
        program = checkpoint.program_file(type(objective))
        self.opened = checkpoint.Opened(self.fabric, cfg, program)
        self.cfg, self.out = self.opened.cfg, self.opened.out
        self.state = RunState(program=str(program), source=checkpoint.digest(program))
        self._load_models()
        kept = self._begin()
        self.saved_step = self.state.step
        self.reference_step = 0  # after which step the policy was the reference
        self.logger = Logger(self.cfg, kept)
        asked = self.cfg, self.policy, self.tokenizer, self.examples["val"], checker
        self.evaluator = Evaluator(self.fabric, *asked)
        needs = objective.needs_reference and not cfg.reference_cache
        passes = least_passes(objective.kl_pairs, needs, cfg.lora.rank > 0)
        self.throughput = Throughput(self.fabric, cfg.precision, self.policy.module, passes)
        self.stop = Stop(cfg.seconds() if cfg.max_time else None)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        self.logger.close()
        self.opened.close()
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
        for name, m in (("model", policy), ("reference", frozen)):
            if m is not None:
                params = m.unique_parameters().items()
                base = {n: p for n, p in params if "lora_" not in n}
                hashes[f"{name} weights"] = weights_fingerprint(base)
                config = sorted((k, str(v)) for k, v in vars(m.config).items() if k[:5] != "lora_")
                hashes[f"{name} config"] = hashlib.sha256(str(config).encode()).hexdigest()
        names = ("config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json")
        files = {name: self.folder / name for name in (*names, "chat_template.jinja")}
        if self.cfg.data.chat_template:
            files["data.chat_template"] = Path(self.cfg.data.chat_template)
        return hashes | {n: checkpoint.digest(f) for n, f in files.items() if f.is_file()}

    def _begin(self) -> list[bytes] | None:
        """What could refuse the run comes first, and only then is anything written,
        or an old state put in place. -> the rows that a resume goes on from"""
        old, found, kept = self.opened.old, self.opened.found, None
        if old:
            checkpoint.refuse_another_identity(old.identity, self.state.identity)
        claims = old.rows if self.opened.own else {}

        def work():
            kept = [claimed(self.out / n, claims.get(n), found) for n in TABLES]
            copy_files(self.folder, self.out / ".final.tmp")  # it will be exportable
            return kept

        kept = checkpoint.on_rank_0(self.fabric, work)
        self.opened.begin()
        if not old:
            return None
        checkpoint.load(self.fabric, found, self.policy, self.optimizer)
        self.state = replace(old, source=self.state.source)
        self.objective.load_state_dict(old.objective)
        return kept

    def save(self) -> None:
        """A checkpoint of the step that was just done, and old ones removed."""
        folder, state = self.out / "checkpoints", self.state
        state.objective = self.objective.state_dict()
        state.rows = self.logger.sync()
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
        program, settings = self.state.program, str(self.out / "settings.yaml")
        command = shlex.join(["python", program, "--config", settings, "--resume", "auto"])
        self.fabric.print(f"  {command}")

    def finish(self) -> None:
        """Export, compare answers with those before, and score the test split."""
        self.logger.sync()  # fails where the run's folder is gone
        weights = checkpoint.gather_whole(self.fabric, self.policy.unique_parameters())
        merged = merge_adapters(weights, self.policy.module) if weights else {}
        final = self.out / "final"
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

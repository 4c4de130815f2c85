"""What happens before a run's first step and after its last one: read, launch,
load, resume; save, export, compare. The Trainer's other half; nobody needs it to
change an algorithm."""

import itertools
import json
import math
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import model
from evaluate import Evaluator
from head import Chunks
from hub.estimate import Estimate
from hub.export import copy_tokenizer_files
from hub.families import read_config
from hub.folders import fetch_model
from policy import Models
from records.examples import load_splits
from records.tokenizer import Tokenizer
from reference import CachedReference
from runs import checkpoint, devices, tensors
from runs.checkpoint import RunState
from runs.console import say
from runs.devices import Stop, all_reduce, launch, leave_process_group, resolve_devices
from runs.errors import BadInput, Failed, user_error
from runs.files import file_hash, write_json
from runs.folder import RunFolder, checkpoint_folder, prune_checkpoints, refuse_another_identity
from runs.logger import TABLES, Logger, format_before_after, read_claimed_rows
from runs.optimizer import Plan, make_plan
from runs.settings import RunSettings, with_limits
from runs.throughput import Throughput, least_passes


class Lifecycle(Models):
    """`validation`: the objective of val.csv (default: the same). `checker`: a function (prompt,
    completion) -> bool. `rollout`: an engine that answers prompts (see rollout.py)."""

    def __init__(self, cfg: RunSettings, objective, validation=None, checker=None, rollout=None):
        self.objective, self.validation = objective, validation or objective
        kind = type(objective)
        with user_error("state_dict", kind.__name__, TypeError):
            memory = json.dumps(objective.state_dict())  # now, not at the first checkpoint
        if memory == "{}" and kind.after_step.__qualname__ != "Objective.after_step":
            say(f"{kind.__name__}: after_step without a state_dict: a resume forgets what it kept")
        self.engine, both = rollout, (objective, self.validation)
        self.needs_reference = any(o.runs_reference for o in both)
        self.folder = fetch_model(cfg.model, weights=not cfg.estimate)
        arguments, config, names = read_config(self.folder)  # what cannot be exported is refused
        if cfg.estimate:
            make = partial(model.make_model, arguments, names=names)
            tied = config["tie_word_embeddings"]
            say(Estimate(cfg, make, tied, self.needs_reference, Chunks.of).describe())
            raise SystemExit(0)
        self.tokenizer = Tokenizer(self.folder, cfg.data.chat_template, cfg.data.date)
        cfg = resolve_devices(replace(cfg, data=with_limits(cfg.data, arguments["block_size"])))
        kinds = objective.records, self.validation.records
        with user_error("data", cfg.data.train):
            self.examples = load_splits(cfg.data, self.tokenizer, *kinds, say)
        if cfg.keep_best and not self.examples["val"]:
            raise BadInput("keep_best: data.val: no examples")
        if objective.records != "prompts":  # too few are refused before any work
            make_plan(cfg, len(self.examples["train"]))
        self.fabric = launch(cfg)
        program = checkpoint.program_file(kind)
        self.opened = RunFolder(self.fabric, cfg, program)
        self.cfg, self.out = self.opened.cfg, self.opened.out
        template = self.tokenizer.source if cfg.data.chat_template else ""
        self.state = RunState(str(program), file_hash(program), template)
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
            leave_process_group(self.fabric)  # only now that the model is gone
            if self.stop.signal:
                raise SystemExit(128 + self.stop.signal)

    def _begin(self) -> list[bytes] | None:
        """What could refuse the run comes first, and only then is anything written,
        or an old state put in place. -> the rows that a resume goes on from"""
        old, found = self.opened.old, self.opened.found
        if old:
            refuse_another_identity(old.identity, self.state.identity)
        claims = old.rows if self.opened.own else {}

        def work():
            kept = [read_claimed_rows(self.out / n, claims.get(n), found) for n in TABLES]
            copy_tokenizer_files(self.folder, self.out / ".final.tmp")  # it will be exportable
            self.opened.begin()
            return kept

        kept = devices.on_rank_0(self.fabric, work)
        if not old:
            return None
        checkpoint.load_checkpoint(self.fabric, found, self.policy, self.optimizer)
        self.state = replace(old, source=self.state.source)
        self.objective.load_state_dict(old.objective)
        return kept

    @torch.no_grad()
    def check_start(self, batch) -> None:
        """The reference is the model we start from: on the same packed batch r is exactly 0."""
        self.policy.eval()
        index = self.micro_batches(batch)[0].index
        packed = self.pack(batch, index, borrowed=batch.partners is not None)
        off = all_reduce((self.policy(packed) - self.reference(packed)).abs().max().double()).item()
        if off != 0:
            why = "the reference is not the model we start from"
            why = why if math.isfinite(off) else "the weights do not give finite log-probs"
            differ = f"policy and reference differ by {off:.3g} nats"
            raise Failed(f"step {self.state.step}: {differ}: {why}")
        say(f"step {self.state.step}: policy and reference agree to the bit")

    def precompute(self, examples, plan: Plan) -> None:
        """All reference log-probs that the run will need, so that the reference can be released."""

        def no_policy(packed):
            return torch.zeros(packed.length_BK.shape, device=self.fabric.device)

        cfg, identity = self.cfg, sorted(self.state.identity.items())
        models = [x for name, x in identity if name.startswith(("model ", "reference "))]
        of = [*models, cfg.precision + cfg.lora.base, cfg.data.score_prompt]
        folder = Path(cfg.reference_cache).expanduser()
        self.reference = CachedReference(self.fabric, self.reference, folder, of)
        steps = range(self.state.step + 1, plan.end + 1)
        batches = ((self.batch_of(examples, plan, i), self.objective) for i in steps)
        held_out = [self.held_out(name) for name in ("val", "test")]
        others = ((self.make_batch(x, self.validation), self.validation) for x in held_out if x)
        for batch, objective in itertools.chain(batches, others):
            self.no_gradient_pass(batch, no_policy, objective)
        self.reference.release()
        computed, known = self.reference.computed, len(self.reference.known)
        where = cfg.reference_cache
        say(f"reference: {computed:,} log-probs computed, {known:,} known in {where}")

    def save(self) -> None:
        """A checkpoint of the step that was just done, and old ones removed."""
        folder, state = self.out / "checkpoints", self.state
        state.objective = self.objective.state_dict()
        state.rows = self.logger.sync()
        path = checkpoint_folder(folder, state.step)
        checkpoint.save_checkpoint(self.fabric, path, self.policy, self.optimizer, state, self.cfg)
        self.saved_step = state.step
        if self.fabric.global_rank == 0:
            prune_checkpoints(folder, self.cfg.keep_last, state.best_step)

    def save_and_say_how_to_go_on(self, plan) -> None:
        if self.saved_step < self.state.step:
            self.save()
        at = f"step {self.state.step} of {plan.total}"
        say(f"stopped by {self.stop.why} at {at}, saved; go on with")
        settings = str(self.out / "settings.yaml")
        command = ["python", self.state.program, "--config", settings, "--resume", "auto"]
        say(f"  {shlex.join(command)}")

    def finish(self) -> None:
        """Export, compare answers with those before, and score the test split."""
        self.logger.sync()  # fails where the run's folder is gone
        self.export_models()
        after = self.evaluator.check("after", self.state.step)
        before = self.out / "eval" / "before.json"
        if after and before.exists():
            say(format_before_after(json.loads(before.read_text()), after))
        say(f"\nexported to {self.out / 'final'}")
        if self.examples["test"] and self.examples["test"][0].completions:
            self._score_test()

    def _same_base(self, found: Path) -> bool:
        """Adapters of an earlier iteration of SPIN belong on another base than this one's."""
        state, _ = checkpoint.read_state(found)
        return not self.cfg.lora.rank or state.iteration == self.state.iteration

    def _score_test(self) -> None:
        """With the final weights and, where they are others and still there, the best ones."""
        scores = {"final": self.score(self.examples["test"])}
        step = self.state.best_step
        # it may be in another folder's run
        best = checkpoint_folder(self.out / "checkpoints", step or 0)
        if step not in (None, self.state.step) and best.is_dir() and self._same_base(best):
            tensors.set_weights(self.policy, checkpoint.read_checkpoint_tensors(best, "weights"))
            scores["best"] = self.score(self.examples["test"])
        for name, row in scores.items():
            shown = ", ".join(f"{k} {row[k]:.6g}" for k in ("loss", "accuracy") if k in row)
            say(f"test, {name} weights: {shown}")
        if self.fabric.global_rank == 0:
            write_json(self.out / "eval" / "test.json", scores)

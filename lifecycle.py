"""What happens before a run's first step and after its last one: read, launch,
load, resume; save, export, compare. The Trainer's other half; nobody needs it to
change an algorithm."""

import copy
import hashlib
import itertools
import json
import math
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import yaml

import model
from evaluate import Evaluator
from reference import CachedReference, Reference
from support import checkpoint
from support.card import model_card
from support.checkpoint import RunState
from support.cli import dump
from support.devices import Stop, all_reduce, launch, leave, resolve, say
from support.errors import BadInput, Failed, given
from support.estimate import Estimate
from support.examples import fingerprint, splits, with_limits
from support.families import read_config
from support.logger import TABLES, Logger, before_and_after, claimed
from support.lora import export_adapter, merge_adapters
from support.optim import Plan, make_optimizer, make_plan
from support.quantize import quantize_base
from support.records import local
from support.settings import Run
from support.throughput import Throughput, least_passes
from support.tokenizer import Tokenizer
from support.weights import copy_files, export, fetch, layers
from support.weights import fingerprint as weights_fingerprint

DTYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16}  # of the weights; else float32


def export_checkpoint(path: Path, out: Path, dtype: str) -> None:
    """A checkpoint, or a PEFT folder, with its base as a Hugging Face folder."""
    folder, notes, wide = fetch(str(path), "export"), [], torch.float32
    if not layers(folder):
        raise BadInput(f"export: {path}: neither a checkpoint of a run nor a PEFT folder")
    if (path / "state.json").exists():
        settings = (path / "settings.yaml").read_text()
        notes = _notes(settings, checkpoint.read_state(path)[0], path.parent.parent)
        wide = DTYPES["64-true"] if "precision: 64-true" in settings else wide
    weights = model.load(folder, dtype=wide).unique_parameters()
    export({n: p.detach() for n, p in weights.items()}, folder, out, dtype, notes)


def _notes(settings: str, state: RunState, run: Path) -> list[tuple[str, str]]:
    """A model's card, and the chat template that was used where the model brings another."""
    notes = [("README.md", model_card(settings, state, run))]
    if file := yaml.safe_load(settings)["data"]["chat_template"]:
        notes.append(("chat_template.jinja", Path(file).read_text()))
    return notes


class Lifecycle:
    """`validation`: the objective of val.csv (default: the same). `checker`: a
    function (prompt, completion) -> bool. `rollout`: an engine that answers prompts
    (see rollout.py)."""

    def __init__(self, cfg: Run, objective, validation=None, checker=None, rollout=None):
        self.objective, self.validation = objective, validation or objective
        self.engine, both = rollout, (objective, self.validation)
        self.needs_reference = any(o.needs_reference or o.kl_pairs for o in both)
        self.folder = fetch(cfg.model)
        arguments, config, names = read_config(self.folder)  # what cannot be exported is refused
        if cfg.estimate:
            make = partial(model.make, arguments, names=names)
            tied = config["tie_word_embeddings"]
            head = model.HEAD_LOGITS, model.HEAD_SAVED, model.HEAD_SOFTMAX
            say(Estimate(cfg, make, tied, self.needs_reference, head).table())
            raise SystemExit(0)
        self.tokenizer = Tokenizer(self.folder, cfg.data.chat_template, cfg.data.date)
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
        them again. Of a sharded run rank 0 alone reads the weights."""
        cfg, fabric, sharded = self.cfg, self.fabric, self.cfg.strategy == "fsdp"
        policy = other = frozen = identity = None
        apart = self.needs_reference and bool(cfg.reference or not cfg.lora.rank)
        if not sharded or fabric.global_rank == 0:
            policy = self._load_policy()
            if apart and cfg.reference:
                other = self._load_other_reference(policy)
        if fabric.global_rank == 0:
            identity = self._identity(policy, (other or policy) if apart else None)
        self.state.identity = fabric.broadcast(identity)
        if apart and sharded:
            frozen = self._shard(other or policy, learns=False)
        elif apart:  # DDP refuses a module that never trains
            frozen = (other or copy.deepcopy(policy)).requires_grad_(False).eval()
            if cfg.precision == "bf16-mixed":
                model.cast_linears_to_bfloat16(frozen)
            frozen = fabric.to_device(frozen)
        if cfg.lora.base:  # only now: the hashes are of the source's own weights
            quantize_base(policy, cfg.lora.base, fabric.device)
        # from here on ranks may draw different random numbers (dropout)
        torch.manual_seed(cfg.seed + 1000003 * fabric.global_rank)
        if sharded:
            self.policy = self._shard(policy, learns=True)
        else:
            self.policy = fabric.setup_module(policy)
        self.policy.module.activation_checkpointing = cfg.activation_checkpointing
        self.optimizer = fabric.setup_optimizers(make_optimizer(cfg.optim, self.policy.module))
        self.reference = None
        if self.needs_reference:
            self.reference = Reference(fabric, self.policy, frozen)

    def _shard(self, whole, learns: bool):
        """A model that rank 0 holds, over all ranks: no other ever has the whole of
        it."""
        first = self.fabric.global_rank == 0
        shell = model.shell(*self.fabric.broadcast(model.recipe(whole) if first else None))
        if not learns:
            shell.requires_grad_(False).eval()
            if self.cfg.precision == "bf16-mixed":
                model.cast_linears_to_bfloat16(shell)
        module = self.fabric.setup_module(shell)
        checkpoint.set_weights(module, whole.unique_parameters() if first else None)
        return module

    def _load_policy(self):
        cfg, dtype = self.cfg, DTYPES.get(self.cfg.precision, torch.float32)
        policy = model.load(self.folder, cfg.lora, dtype)
        if self.tokenizer.n_vocab > policy.config.padded_vocab_size:
            n = self.tokenizer.n_vocab
            raise BadInput(f"model: {cfg.model}: its tokenizer has {n} tokens, its weights fewer")
        return policy

    def _load_other_reference(self, policy):
        vocab, folder = policy.config.padded_vocab_size, fetch(self.cfg.reference, "reference")
        frozen = model.load(folder, None, DTYPES.get(self.cfg.precision, torch.float32))
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
            if m is policy and name == "reference":
                hashes |= {f"reference {x}": hashes[f"model {x}"] for x in ("weights", "config")}
            elif m is not None:
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

    @torch.no_grad()
    def check_start(self, batch) -> None:
        """The reference is the model we start from: on the same packed batch r is
        exactly 0."""
        self.policy.eval()
        index = self.micro_batches(batch)[0].index
        packed = self.pack(batch, index, borrowed=batch.partners is not None)
        off = (self.policy(packed) - self.reference(packed)).abs().max().double()
        off = all_reduce(off).item()
        if off != 0:
            why = "the reference is not the model we start from"
            why = why if math.isfinite(off) else "the weights do not give finite log-probs"
            differ = f"policy and reference differ by {off:.3g} nats"
            raise Failed(f"step {self.state.step}: {differ}: {why}")
        say(f"step {self.state.step}: policy and reference agree to the bit")

    def precompute(self, examples, plan: Plan) -> None:
        """All reference log-probs that the run will need, so that the reference can
        be released."""

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
        known = f"{known:,} known in {cfg.reference_cache}"
        say(f"reference: {computed:,} log-probs computed, {known}")

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
        say(f"stopped by {self.stop.why} at {at}, saved; go on with")
        program, settings = self.state.program, str(self.out / "settings.yaml")
        command = shlex.join(["python", program, "--config", settings, "--resume", "auto"])
        say(f"  {command}")

    def merged(self) -> dict[str, torch.Tensor]:
        """The policy's weights by their plain names, adapters merged; on rank 0
        only. A collective."""
        weights = self.weights()
        return merge_adapters(weights, self.policy.module) if weights else {}

    def weights(self) -> dict[str, torch.Tensor]:
        """The policy's weights, adapters apart; on rank 0 only. A collective."""
        params, quantized = self.policy.unique_parameters(), self.cfg.lora.base
        kept = {n: p for n, p in params.items() if p.requires_grad or not quantized}
        weights = checkpoint.gather_whole(self.fabric, kept)
        if weights and quantized:  # rounded numbers never leave
            weights |= self._source_weights([n for n in params if "lora_" not in n])
        return weights

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
        self.logger.sync()  # fails where the run's folder is gone
        self._export()
        after = self.evaluator.check("after", self.state.step)
        before = self.out / "eval" / "before.json"
        if after and before.exists():
            say(before_and_after(json.loads(before.read_text()), after))
        say(f"\nexported to {self.out / 'final'}")
        if self.examples["test"] and self.examples["test"][0].completions:
            self._score_test()

    def _export(self) -> None:
        """`final`, with LoRA `final_adapter` in PEFT's format, and `best`."""
        cfg, fabric, state = self.cfg, self.fabric, self.state
        module, source = self.policy.module, self.folder
        weights = self.weights()

        def final(tmp):
            notes = _notes(dump(cfg), state, self.out)
            export(merge_adapters(weights, module), source, tmp, cfg.export_dtype, notes)

        def adapter(tmp):
            base = str(source.resolve()) if local(cfg.model).exists() else cfg.model
            export_adapter(weights, tmp, module, source, base, cfg.lora)

        def best(tmp):
            export_checkpoint(kept, tmp, cfg.export_dtype)

        checkpoint.publish(fabric, final, self.out / "final")
        if cfg.lora.rank:  # PEFT needs a folder of the base; SPIN folds earlier adapters in
            base = {n: x for n, x in weights.items() if "lora_" not in n}
            moved = (
                state.iteration > 1 and weights_fingerprint(base) != state.identity["model weights"]
            )
            if fabric.broadcast(bool(moved or layers(source))):
                say("no final_adapter: its base is not the model's own folder")
            else:
                checkpoint.publish(fabric, adapter, self.out / "final_adapter")
        kept = self.out / "checkpoints" / f"step-{state.best_step or 0:08d}"
        if fabric.broadcast(kept.is_dir()):
            checkpoint.publish(fabric, best, self.out / "best")

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
            checkpoint.set_weights(self.policy, checkpoint.load_tensors(best, "weights"))
            scores["best"] = self.score(self.examples["test"])
        for name, row in scores.items():
            shown = ", ".join(f"{k} {row[k]:.6g}" for k in ("loss", "accuracy") if k in row)
            say(f"test, {name} weights: {shown}")
        if self.fabric.global_rank == 0:
            checkpoint.write_json(self.out / "eval" / "test.json", scores)

"""A run's models: policy and reference, read, sharded, and written as Hugging Face folders.
Nobody needs it to change an algorithm."""

import copy
import hashlib
from pathlib import Path

import litgpt.lora
import torch
import yaml
from torch import nn

import model
from hub.export import export_weights, model_card
from hub.families import rope_tables
from hub.folders import fetch_model, folders_on_top
from hub.lora import merge_adapters
from hub.peft import base_and_adapters, export_adapter
from hub.quantize import quantize_base
from hub.weights import weights_hash as weights_fingerprint
from records.examples import examples_hash
from records.tokenizer import Tokenizer
from reference import Reference
from runs import checkpoint, tensors
from runs.checkpoint import RunState
from runs.cli import dump_yaml
from runs.console import say
from runs.errors import BadInput, Failed
from runs.files import file_hash, find_path, publish_folder
from runs.folder import checkpoint_folder
from runs.optimizer import make_optimizer
from runs.tensors import LazyTensors, override_tensors, rename_tensors


def dtype_of(precision: str) -> torch.dtype:
    """Of the weights."""
    known = {"64-true": torch.float64, "bf16-true": torch.bfloat16}
    return known.get(precision, torch.float32)


def export_checkpoint(path: Path, out: Path, dtype: str) -> None:
    """A checkpoint, or a PEFT folder, with its base as a Hugging Face folder."""
    folder, notes, wide = fetch_model(str(path), "export"), [], torch.float32
    if not folders_on_top(folder):
        raise BadInput(f"export: {path}: neither a checkpoint of a run nor a PEFT folder")
    if (path / "state.json").exists():
        settings = (path / "settings.yaml").read_text()
        notes = _notes(settings, checkpoint.read_state(path)[0], path.parent.parent)
        own = dtype_of(yaml.safe_load(settings)["precision"])
        wide = torch.promote_types(own, wide)
    export_weights(model.read_folder_weights(folder, wide), folder, out, dtype, notes)


def _notes(settings: str, state: RunState, run: Path) -> list[tuple[str, str]]:
    """A model's card, and the chat template that was used where the model brings another."""
    notes = [("README.md", model_card(settings, state, run))]
    if file := yaml.safe_load(settings)["data"]["chat_template"]:
        notes.append(("chat_template.jinja", Path(file).read_text()))
    return notes


class Models:
    """The part of the Trainer that owns policy, reference and optimizer."""

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
        shell = _shell(*self.fabric.broadcast(_recipe(whole) if first else None))
        if not learns:
            shell.requires_grad_(False).eval()
            if self.cfg.precision == "bf16-mixed":
                model.cast_linears_to_bfloat16(shell)
        module = self.fabric.setup_module(shell)
        tensors.set_weights(module, whole.unique_parameters() if first else None)
        return module

    def _load_policy(self):
        cfg = self.cfg
        policy = model.load_model(self.folder, cfg.lora, dtype_of(cfg.precision))
        if self.tokenizer.n_vocab > policy.config.padded_vocab_size:
            n = self.tokenizer.n_vocab
            raise BadInput(f"model: {cfg.model}: its tokenizer has {n} tokens, its weights fewer")
        return policy

    def _load_other_reference(self, policy):
        vocab, folder = (
            policy.config.padded_vocab_size,
            fetch_model(self.cfg.reference, "reference"),
        )
        frozen = model.load_model(folder, None, dtype_of(self.cfg.precision))
        same = self.tokenizer.same(Tokenizer(folder))
        if not same or frozen.config.padded_vocab_size != vocab:
            differs = f"another tokenizer or vocabulary than {self.cfg.model}"
            raise BadInput(f"reference: {self.cfg.reference}: {differs}")
        return frozen

    def _identity(self, policy, frozen) -> dict[str, str]:
        """Hashes of what a resume must find again, by the name that a refusal
        shows."""
        hashes = {"data (token ids and labels)": examples_hash(self.examples)}
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
        return hashes | {n: file_hash(f) for n, f in files.items() if f.is_file()}

    # ---- out ----------------------------------------------------------------------------------------

    def merged(self) -> LazyTensors:
        """The policy's weights by their plain names, adapters merged."""
        return merge_adapters(self.weights(), self.policy.module)

    def weights(self) -> LazyTensors:
        """The policy's weights, adapters apart. Each is gathered when it is asked for:
        of a sharded policy a collective."""
        params, quantized = self.policy.unique_parameters(), self.cfg.lora.base
        kept = {n: p for n, p in params.items() if p.requires_grad or not quantized}
        weights = LazyTensors(kept, lambda name: tensors.gather_tensor(kept[name]))
        if quantized:  # rounded numbers never leave
            weights = override_tensors(
                weights, self._source_weights([n for n in params if "lora_" not in n])
            )
        return weights

    def _source_weights(self, names: list[str]) -> LazyTensors:
        """What a quantised base was made from, read again."""
        stored = model.read_folder_weights(self.folder, dtype_of(self.cfg.precision))
        weights = rename_tensors(stored, {name: name.replace(".linear.", ".") for name in names})
        if weights_fingerprint(weights) != self.state.identity["model weights"]:
            raise Failed(f"{self.folder}: not the weights that this run began with: put them back")
        return weights

    def publish(self, write, out: Path) -> None:
        """write(a new folder, later `out`) on rank 0; where the policy's weights are
        gathered, write(None) on the others."""
        if self.cfg.strategy != "fsdp":
            return publish_folder(self.fabric, write, out)
        first = self.fabric.global_rank == 0
        publish_folder(self.fabric, None, out, lambda tmp: write(tmp if first else None))

    def export_models(self) -> None:
        """`final`, with LoRA `final_adapter` in PEFT's format, and `best`."""
        cfg, fabric, state = self.cfg, self.fabric, self.state
        module, source, weights = self.policy.module, self.folder, self.weights()

        def final(tmp):
            notes = _notes(dump_yaml(cfg), state, self.out)
            export_weights(merge_adapters(weights, module), source, tmp, cfg.export_dtype, notes)

        def adapter(tmp):
            base, below = base_and_adapters(source) if folders_on_top(source) else (cfg.model, [])
            folder = fetch_model(base) if below else source
            base = str(folder.resolve()) if find_path(base).exists() else base
            export_adapter(weights, tmp, module, source, base, cfg.lora, below)

        def best(tmp):
            export_checkpoint(kept, tmp, cfg.export_dtype)

        self.publish(final, self.out / "final")
        if cfg.lora.rank:  # PEFT needs a folder of the base; SPIN folds earlier adapters in
            base = rename_tensors(weights, {n: n for n in weights if "lora_" not in n})
            moved = (
                state.iteration > 1 and weights_fingerprint(base) != state.identity["model weights"]
            )
            ours = any((x / "state.json").exists() for x in folders_on_top(source))
            if fabric.broadcast(bool(moved or ours)):
                say("no final_adapter: its base is not the model's own folder")
            else:
                self.publish(adapter, self.out / "final_adapter")
        kept = checkpoint_folder(self.out / "checkpoints", state.best_step or 0)
        if fabric.broadcast(kept.is_dir()):
            publish_folder(fabric, best, self.out / "best")


# ---- shards ---------------------------------------------------------------------------------------


def _recipe(whole) -> tuple:
    """What a shell is made of: sent to the ranks that do not hold the model."""
    params = whole.named_parameters(remove_duplicate=False)
    return whole.config, whole.tied, {n: (p.dtype, p.requires_grad) for n, p in params}


def _shell(config, tied: bool, params: dict) -> nn.Module:
    """A model like the one of this recipe, without its weights, on the meta device."""
    with torch.device("meta"):
        made = (model.LoraGPT if isinstance(config, litgpt.lora.Config) else model.GPT)(config)
    for name, p in list(made.named_parameters()):
        owner, _, kind = name.rpartition(".")
        dtype, learns = params[name]
        setattr(made.get_submodule(owner), kind, nn.Parameter(p.to(dtype), learns))
    if tied:
        made.tie()
    dtype = made.transformer.wte.weight.dtype
    made.cos, made.sin = (x.to(dtype) for x in rope_tables(made))
    return made

"""Ask a model: a question, a conversation, or a file of prompts.

    python generate.py --model out/<run> --prompt "sort: pear fig apple ="
    python generate.py --model out/<run>                           # a conversation
    python generate.py --model out/<run> --prompts prompts.jsonl   # answers to a file of prompts, into answers.jsonl

How answers are sampled: sampler.py.
"""

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt
from lightning.fabric import Fabric

from infra.console import progress, run_cli, say
from infra.devices import multiplies_bfloat16, prepare_machine
from infra.files import as_lines, write_whole
from infra.parse import parse_command
from infra.random_numbers import mixed
from infra.settings import (
    LocalPath,
    Sampling,
    refuse,
    refuse_unless,
    split_commas,
)
from models.hub import find_model
from models.load import load_model
from records.forms import (
    Record,
    answer_fields,
    fields_of_prompt,
    prompt_key,
    understand_record,
)
from records.sources import collect, decoded_records
from records.tokenizer import Tokenizer
from sampler import generate, read_answer

# ---- a model that is asked ------------------------------------------------------------------------


class AskedModel:
    """A model on one device, as generate.py and the page for thumbs ask it."""

    def __init__(self, args: Any):
        """args: the settings model, plain and chat_template_kwargs of generate.py or of the page. Raises BadInput."""
        source = find_model(args.model)
        prepare_machine()
        # not "auto", which on a Mac is a device without float64
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
        self.fabric = Fabric(accelerator=accelerator, devices=1)
        on_gpu = self.fabric.device.type == "cuda"
        in_bfloat16 = on_gpu and multiplies_bfloat16(self.fabric.device)
        dtype = torch.bfloat16 if in_bfloat16 else torch.float32
        self.today = date.today().isoformat()
        self.tokenizer = Tokenizer(source, None, self.today, args.chat_template_kwargs)
        self.policy = self.fabric.to_device(load_model(source, dtype=dtype))
        self.longest_prompt = self.policy.max_seq_length - 1
        self.by_template = bool(self.tokenizer.template) and not args.plain
        if self.by_template:
            self.tokenizer.end_as_the_template_does()

    def asked(self, record: Record) -> Record:
        """The record with the template settings and the day that the model sees. Raises BadInput."""
        refuse_unless(
            self.by_template or not record.needs_template,
            "prompt: the model has no chat template, and messages or tools need one",
        )
        return self.tokenizer.asked(record, self.by_template)

    def encode(self, record: Record, advice: str = "") -> np.ndarray:
        """The token ids of a record's prompt. advice: what to do if they are too many. Raises BadInput."""
        texts = self.tokenizer.render(record, self.by_template)
        ((ids, _),) = self.tokenizer.encode_all([texts], self.by_template)
        refuse_unless(
            0 < len(ids) <= self.longest_prompt,
            f"prompt: from 1 to {self.longest_prompt} tokens fit this model, got {len(ids)}{advice}",
        )
        return np.array(ids)

    def answers(
        self,
        prompts: list[np.ndarray],
        args: Sampling,
        seed: int,
        before_token: Callable[[], None] = lambda: None,
    ) -> list[tuple[str, bool]]:
        """The text of an answer to each prompt, and whether it was cut: see `generate` and read_answer."""
        answers = generate(
            self.fabric,
            self.policy,
            prompts,
            self.tokenizer,
            args,
            args.max_new_tokens,
            seed,
            before_token,
        )
        return [read_answer(self.tokenizer, ids, args.stop) for ids in answers]


def read_prompts(
    source: str, asked: Callable[[Record], Record], extra: Sequence[str] = ()
) -> dict[str, Record]:
    """file:line -> record, for each distinct prompt of the records, in their order. asked: as AskedModel.asked. extra:
    the fields that each record must have. Without extra, all fields besides the prompt count. Raises BadInput."""
    records: dict[str, Record] = {}
    keys = set()
    faults: list[str] = []
    for where, raw in decoded_records(source, faults):
        with collect(faults, where):
            record = understand_record(raw, "prompts", extra)
            if extra:
                record = record._replace(beside={})
            record = asked(record)
            key = prompt_key(record)
            if key not in keys:
                keys.add(key)
                records[where] = record
    refuse(faults)
    refuse_unless(records, f"prompts: {source}: no records")
    return records


# ---- the command --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ask(Sampling):
    """python generate.py --model out/<run> asks a run, or any model that kto.py takes: one question (--prompt),
    those of a file (--prompts), or a conversation."""

    model: str
    """A run's folder, its `final`, a checkpoint, or any folder or id that kto.py takes."""
    prompt: str = ""
    """The question, through the chat template if the model has one (with today's date if the template prints it).
    Default: a conversation, turn by turn, until an empty line or Ctrl-D."""
    prompts: str | None = None
    """Records in any form that online.py reads. The answers to their prompts are written to the file --out. A text goes
    through the chat template too."""
    out: LocalPath = "answers.jsonl"
    """The file of the answers to --prompts. Each record has everything that the model was asked, the other fields, the
    "completion", and whether the answer was "cut" at max_new_tokens. Add a "label" to each record, and kto.py learns
    from it. The file is written after each batch. It must not exist before."""
    extra: str | None = None
    """Fields that each record of --prompts must have, such as source,solution. Only these are copied to the answers,
    and prompts that differ only in other fields are one prompt. Default: all fields besides the prompt."""
    num_generations: PositiveInt = 1
    """Answers to each prompt of --prompts."""
    max_new_tokens: PositiveInt = 256
    """Longest answer in tokens; less if the context ends."""
    plain: bool = False
    """true: leave the chat template aside, as for a run on plain records."""
    chat_template_kwargs: str | None = None
    """As data.chat_template_kwargs of the run that trained the model: enable_thinking=false."""
    seed: NonNegativeInt = 1
    """An answer draws from it; turn number i of a conversation from seed + i."""


def talk(model: AskedModel, args: Ask) -> None:
    """Answer args.prompt, or hold a conversation."""
    turns = []
    lines = [args.prompt] if args.prompt else iter(lambda: input("> "), "")
    with contextlib.suppress(EOFError):  # Ctrl-D
        for i, line in enumerate(lines):
            turns.append({"role": "user", "content": line})
            # without a template the model reads only the last turn
            ids = model.encode(Record(turns if model.by_template else line, []))
            ((text, _),) = model.answers([ids], args, args.seed + i)
            turns.append({"role": "assistant", "content": text})
            print(text)


def answer_file(model: AskedModel, args: Ask, out: Path) -> None:
    """Answer the prompts of args.prompts into a file. Raises BadInput."""
    prompts: list[np.ndarray] = []  # of each answer
    lines: list[dict] = []  # the other fields of its record
    faults: list[str] = []
    records = read_prompts(args.prompts, model.asked, split_commas(args.extra))
    for where, record in records.items():
        with collect(faults, where):
            prompts += [model.encode(record)] * args.num_generations
            fields = fields_of_prompt(record) | {"generator": args.model}
            lines += [fields] * args.num_generations
    refuse(faults)
    answered: list[dict] = []
    with progress("answers", len(lines)):
        for start in range(0, len(lines), args.batch_size):
            batch = slice(start, start + args.batch_size)
            answers = model.answers(prompts[batch], args, mixed(args.seed, start))
            for line, (text, cut) in zip(lines[batch], answers):
                answered.append(line | answer_fields(text, cut))
            write_whole(out, as_lines(answered))
    n_cut = sum(row["cut"] for row in answered)
    say(f"{len(answered):,} answers to {len(records):,} prompts in {out}, {n_cut:,} of them cut")


def main(argv: list[str] | None = None) -> None:
    args = parse_command(Ask, __doc__, sys.argv[1:] if argv is None else argv)
    faults = []
    if args.prompt and args.prompts:
        faults.append("prompts: not with --prompt")
    out = Path(args.out).expanduser()
    if not out.absolute().parent.is_dir():
        faults.append(f"out: {out}: the folder is not there")
    if args.prompts and out.exists():
        faults.append(f"out: {out}: the file is there already: delete it, or give another --out")
    refuse(faults)
    model = AskedModel(args)
    if args.prompts:
        answer_file(model, args, out)
    else:
        talk(model, args)


if __name__ == "__main__":
    run_cli(main)

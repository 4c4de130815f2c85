"""From files of records to a list of examples of token ids, and what a run does with them before it trains.

Reading order: Example (what comes out); load_examples and load_file (the whole way of a record); the
files (read_records); tables, which are more than their rows (read_table); the parts of the data and
their table (load_splits); the hash of the data; the page of `python data.py FILE`.
"""

import csv
import glob
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml

from infra.console import BadInput, say, user_error
from infra.parse import parse_command, split_options
from infra.settings import Data, find_path, refuse_unless, split_commas
from models.hub import context_of, find_model, read_config
from packing import prompt_groups
from records.foreign import Reader
from records.forms import (
    Kind,
    Record,
    as_turns,
    content_of,
    refuse_half_characters,
    understand_record,
    unique_keys,
)
from records.show import fitting_preset, show_record, suggestion
from records.template import LeftOut
from records.tokenizer import Tokenizer


class Example(NamedTuple):
    """A prompt with its completion (rated or demonstrated), its two (chosen, rejected) or none, as
    arrays of int32 token ids."""

    prompt: np.ndarray
    completions: tuple[np.ndarray, ...]
    label: bool  # desirable; True where nothing was rated
    rewards: tuple = (None, None)  # of chosen and rejected: numbers, or None
    where: str = ""  # file:line
    weight: float = 1.0
    extra: dict = {}  # the fields that data.extra names: texts and numbers
    # its number in its part of the data (train, val or test): the same in each epoch and after a resume
    number: int = 0

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The prompt and each completion as bytes, to see which examples have equal ones."""
        return tuple(ids.tobytes() for ids in (self.prompt, *self.completions))


# ---- from a file to examples ---------------------------------------------------------------------


def load_examples(
    source: str | None,
    tokenizer: Tokenizer,
    kind: Kind,
    data: Data,
    make_records: Callable | None = None,
) -> tuple[list[Example], Counter]:
    """All examples of the sources (`a.jsonl,more/*.csv`) that data.train or another setting names; and
    counts of what was cut, dropped, ... make_records: main(records=...), which makes ours of a raw record.

    `kind` is what the caller learns from. For `rated`, a pair becomes two examples; for `prompts`,
    each distinct prompt is one example without completions. `data`: the settings, with
    max_prompt and max_completion filled in (with_limits).

    Raises BadInput with a line for each of a file's first 20 bad records; a label is never guessed.
    """
    counts: Counter = Counter()
    examples: list[Example] = []
    reader = Reader(data, kind, counts, make_records)
    for part in split_sources(source):
        before = len(examples)
        name, share = split_share(part)
        files = files_of(name)
        if len(files) > 1 and isinstance(share, int):
            raise BadInput(f"{name}: {len(files)} files; a number after # is of one file (or #0.5)")
        for file in files:
            reader.settle(decoded_records(file, []))
        for file in files:
            examples += load_file(file, tokenizer, kind, data, counts, reader, share)
        if fault := reader.path_that_finds_nothing():
            raise BadInput(f"{name}: {fault}")
        if len(examples) == before:
            dropped = [f", {n:,} {what}" for what, n in counts.items() if "dropped" in what]
            raise BadInput(f"{name}: no records{''.join(dropped)}")
    if kind == "prompts":
        examples = [examples[first] for first, *_ in prompt_groups(e.prompt for e in examples)]
    return examples, counts


def load_file(
    file: str,
    tokenizer: Tokenizer,
    kind: Kind,
    data: Data,
    counts: Counter,
    reader: Reader,
    share: int | float | None = None,
) -> list[Example]:
    """The examples of one file, or of a share of its records; adds to the counts. Raises BadInput."""
    extra = split_commas(data.extra)
    records: dict[str, Record] = {}
    texts: dict[str, tuple[str, list[str]]] = {}
    examples: list[Example] = []
    faults: list[str] = []
    # 1. understand: what a line of the file holds becomes Records
    for where, ours in reader.read(decoded_records(file, faults, counts), faults):
        with collect(faults, where):
            record = understand_record(ours, kind, extra)
            for name in record.ignored:  # the table prints it
                refuse_half_characters("record", name)
            records[where] = record
    records = seeded_share(file, records, share)
    for record in records.values():
        for what in what_looks_wrong(record, tokenizer):
            counts[what] += 1
    note_damaged_answers(records.values(), counts)
    # 2. render: messages become texts. All records of a file are rendered in one way: by the chat
    # template if any of them needs it. It must write all that a record says.
    by_template = any(
        record.needs_template or record.instruct and tokenizer.template
        for record in records.values()
    )
    counts["by the chat template" if by_template else "plain"] += len(records)
    for where, record in records.items():
        with collect(faults, where):
            try:
                prompt, completions = tokenizer.render(record, by_template, counts)
            except LeftOut:
                if data.left_out == "refuse":
                    raise
                counts["dropped by data.left_out"] += 1
                continue
            names = ("chosen", "rejected") if len(completions) == 2 else ("completion",)
            for name, text in zip(("prompt", *names), (prompt, *completions)):
                refuse_half_characters(name, text)
            texts[where] = (prompt, completions)
    if faults:
        fault = reader.path_that_finds_nothing()
        raise BadInput(f"{file}: {fault}" if fault else "\n".join(faults[:20]))
    # 3. encode: texts become token ids, with BOS and EOS
    encoded = encode_texts(texts, tokenizer, by_template)
    for where, (prompt, completions) in zip(texts, encoded):
        record = records[where]
        if not prompt or not all(completions):
            raise BadInput(f"{where}: {'completion' if prompt else 'prompt'}: it has no tokens")
        # 4. cut a prompt's beginning, but not its BOS, and completions' ends
        too_many = max(0, len(prompt) - data.max_prompt)
        n_first = tokenizer.first_tokens(prompt)
        del prompt[n_first : n_first + too_many]
        counts["prompts cut"] += too_many > 0
        counts["completions cut"] += sum(len(ids) > data.max_completion for ids in completions)
        prompt = np.array(prompt, np.int32)
        completions = tuple(np.array(ids[: data.max_completion], np.int32) for ids in completions)
        # a preference between equal answers teaches nothing
        if len(completions) == 2 and np.array_equal(*completions):
            counts["equal pairs, left out"] += 1
            continue
        label, rewards = record.label is not False, record.rewards
        example = Example(prompt, completions, label, rewards, where, record.weight, record.extra)
        if kind == "rated" and record.label is None:  # a pair: two ratings, which share its prompt
            for ids, label, reward in zip(completions, (True, False), rewards):
                rating = dict(completions=(ids,), label=label, rewards=(reward, None))
                examples.append(example._replace(**rating))
        else:
            examples.append(example)
    if texts and not examples:
        raise BadInput(f"{file}: no records: all {len(texts):,} pairs are equal pairs")
    return examples


def decoded_records(
    file: str, faults: list[str], counts: Counter | None = None
) -> Iterator[tuple[str, object]]:
    """(file:place, record) of each record of a file. What is no JSON becomes a line in `faults`."""
    for place, raw in read_records(file, counts):
        where = f"{file}:{place}"
        with collect(faults, where):
            if isinstance(raw, bytes):
                raw = json.loads(raw, object_pairs_hook=unique_keys)
            yield where, raw


def what_looks_wrong(record: Record, tokenizer: Tokenizer) -> Iterator[str]:
    """What is right in some files and a mistake in others, such as an answer that repeats its prompt: the
    table counts it. A special token in a text of the record is read as this token, not as its letters."""
    for name in record.ignored:
        yield f"with {name}, which nothing reads"
    answers = []
    for completion in record.completions:
        if isinstance(completion, str) or not completion.get("tool_calls"):
            answers.append(content_of(completion))
    if any(not (text or "").strip() for text in answers):
        yield "with an empty completion"
    prompt = record.prompt if isinstance(record.prompt, str) else ""
    if prompt.strip() and any((text or "").startswith(prompt) for text in answers):
        yield "with a completion that begins with its whole prompt"
    if record.weight != 1:
        yield "with a weight other than 1"
    texts = answers + [turn["content"] for turn in as_turns(record.prompt)]
    found = {token for text in texts for token in tokenizer.special_tokens_in(text or "")}
    for token in sorted(found):
        yield f"with {token} in a text"


def encode_texts(
    texts: dict[str, tuple[str, list[str]]], tokenizer: Tokenizer, by_template: bool
) -> Iterator[tuple[list, list]]:
    """(ids of the prompt, ids of each completion) of each record. `texts`: file:line -> its texts.
    Raises BadInput with a line for each record that the tokenizer refuses."""
    try:
        yield from tokenizer.encode_all(list(texts.values()), by_template)
    except Exception:  # of any kind; it was raised for thousands of texts together
        faults = []
        for where, one in texts.items():
            with collect(faults, where), user_error("tokenizer"):
                list(tokenizer.encode_all([one], by_template))
        if not faults:
            raise
        raise BadInput("\n".join(faults[:20])) from None


@contextmanager
def collect(faults: list[str], where: str):
    """What is wrong with a record becomes a line in `faults`."""
    try:
        yield
    except ValueError as e:  # BadInput, or Python's own for a text that is no JSON or no Unicode
        # json counts lines within the line that it gets
        faults.append(f"{where}: {e}".replace("line 1 ", ""))


def split_share(source: str) -> tuple[str, int | float | None]:
    """(source, share) of `a.jsonl#2000` (a number of records) or `a.jsonl#0.3` (a part of them); None: all.
    Raises BadInput."""
    name, has_share, text = source.rpartition("#")
    if not has_share or find_path(source).exists():
        return source, None
    with user_error(None, f"{source}: expected a number of records after #, or a part such as 0.3"):
        share = int(text) if text.isdecimal() else float(text)
        if share < 1 and not 0 < share:
            raise ValueError
        if isinstance(share, float) and share >= 1:
            raise ValueError
    return name, share


def seeded_share(
    file: str, records: dict[str, Record], share: int | float | None
) -> dict[str, Record]:
    """Some of the records, in the order of the file: always the same ones of the same file. share: as in
    split_share. Raises BadInput."""
    if share is None:
        return records
    n = share if isinstance(share, int) else round(share * len(records))
    refuse_unless(
        0 < n <= len(records), f"{file}: {len(records):,} records, but #{share} asks for {n:,}"
    )
    picked = set(np.random.default_rng(0).permutation(len(records))[:n].tolist())
    return {where: record for i, (where, record) in enumerate(records.items()) if i in picked}


# What the table before training points at. Each is a fault of an export, not of a record.
CUT_ANSWERS = "answers have the greatest length of all and end in '...': an export that cuts texts teaches to break off"
REASONING_IN_SOME = "answers begin with markup of reasoning, and the others do not"
ONE_ANSWER = "answers are one and the same text, more than half of all"
WARNINGS = (CUT_ANSWERS, REASONING_IN_SOME, ONE_ANSWER)
MARKUP = ("<think", '<details type="reasoning"', "<reasoning>", "<thought>", "◁think▷")


def note_damaged_answers(records: Iterable[Record], counts: Counter) -> None:
    """Count the answers that an export has damaged, as far as numbers show it."""
    answers = []
    for record in records:
        answers += [(content_of(completion) or "").strip() for completion in record.completions]
    longest = max(map(len, answers), default=0)
    cut = [x for x in answers if len(x) == longest and x.endswith(("...", "…"))]
    if len(set(cut)) > 1:
        counts[CUT_ANSWERS] += len(cut)
    marked = sum(answer.startswith(MARKUP) for answer in answers)
    if marked < len(answers):
        counts[REASONING_IN_SOME] += marked
    n_equal = max(Counter(answers).values(), default=0)
    if n_equal >= 10 and 2 * n_equal > len(answers):
        counts[ONE_ANSWER] += n_equal


# ---- files ---------------------------------------------------------------------------------------


def absolute_sources(sources: str | None) -> str | None:
    """The same sources with absolute paths of files, folders and patterns, but ids of the Hub as they
    are: settings.yaml then means the same from any folder."""
    if not sources:
        return None
    absolute = []
    for part in split_sources(sources):
        name, _ = split_share(part)
        if not find_path(name).exists():
            name = name.partition(":")[0]
        path = find_path(name)
        is_here = path.exists() or glob.glob(str(path))
        absolute.append(os.path.abspath(find_path(part)) if is_here else part)
    return ",".join(absolute)


def split_sources(sources: str | None) -> list[str]:
    """The parts of a setting that names several files, `a.jsonl,more/*.csv#0.5`. A name that is there as it
    stands is taken as it stands: it may have a comma, as those of sweep.py do."""
    if sources and find_path(sources).exists():
        return [sources]
    return split_commas(sources)


def files_of(name: str) -> list[str]:
    """The files of a pattern, or the file, folder or id itself. A name that is there may have brackets."""
    path = find_path(name)
    if path.exists():
        return [str(path)]
    return sorted(glob.glob(str(path))) or [name]


def read_records(source: str, counts: Counter | None = None) -> Iterator[tuple[int, object]]:
    """(place, raw record) for each record of a file, a folder of save_to_disk or a Hub data set.

    The place is a line (in a csv file that on which the row ends), or the record's number in a JSON
    array or a table. The raw record is a line of JSON as bytes, or what it holds. What a table is
    read otherwise than it stands goes into the counts. Raises BadInput.
    """
    path = find_path(source)
    suffix = path.suffix.lower()
    with user_error(None, source):
        if suffix == ".jsonl" or suffix == ".json" and has_lines(path):
            with open(path, "rb") as lines:
                yield from ((n, line) for n, line in enumerate(lines, 1) if line.strip())
        elif suffix == ".json":
            records = json.loads(path.read_bytes(), object_pairs_hook=unique_keys)
            if isinstance(records, dict):  # an export of one conversation
                records = [records]
            if not isinstance(records, list):
                raise BadInput(f"{source}: expected an array of records, got {records!r:.50}")
            yield from enumerate(records, 1)
        elif suffix == ".csv":
            # Python's csv, not one that guesses types: that makes 1 of 01 and nothing of NA
            csv.field_size_limit(2**31 - 1)  # the default of 128 KiB would refuse a long document
            options = dict(encoding="utf-8-sig", errors="surrogateescape", newline="")
            with open(path, **options) as file:
                rows = csv.reader(file, strict=True)
                try:
                    names = next(rows, [])
                    for cells in filter(None, rows):  # a blank line has no cells
                        if len(cells) != len(names):
                            raise ValueError("not as many cells as columns")
                        # as it stands in the file: a decoder of the file knows no line
                        "\n".join(names + cells).encode(errors="surrogateescape").decode()
                        yield rows.line_num, unique_keys(zip(names, cells))
                except (csv.Error, ValueError) as e:
                    raise BadInput(f"{source}:{rows.line_num}: {e}") from None
        else:
            yield from read_table(source, Counter() if counts is None else counts)


def has_lines(path: Path) -> bool:
    """Whether a .json file has several lines, each of which is an object: so Dataset.to_json writes."""
    with open(path, "rb") as file:
        first, second = file.readline(), file.readline()
    try:
        return bool(second.strip()) and all(
            isinstance(json.loads(x), dict) for x in (first, second)
        )
    except ValueError:
        return False


def read_table(source: str, counts: Counter) -> Iterator[tuple[int, dict]]:
    """(number, record) for each row of a table. The record is what a line of JSON would hold, as far
    as the table knows it. Nulls that are taken for gaps are counted. Raises BadInput."""
    rows = open_table(source)
    features = rows.features  # a deep copy, at each look
    number = 0
    try:
        for row in rows.with_format(None):  # a folder of save_to_disk may name a format
            number += 1
            record = {}
            for column, value in row.items():
                gaps: list[str] = []
                record[column] = as_in_json(value, features[column], gaps)
                if gaps:
                    counts[f"with null in {column}, read as a key that is not there"] += 1
            yield number, record
    except UnicodeDecodeError as e:
        raise BadInput(f"{source}:{number + 1}: {e}") from None


def as_in_json(value: object, feature: object, gaps: list[str]) -> object:
    """A value of a table, as a line of JSON would hold it. `feature`: what the datasets package knows
    about its column.

    A class is its name, not the number of its name. A decimal is a number. A struct has the keys of
    all rows, and null where a row has not this key: the key goes, and is added to `gaps`.
    """
    names = getattr(feature, "names", None)
    if names and value is not None:  # ClassLabel
        return names[value] if value >= 0 else None  # -1: no class
    if isinstance(value, Decimal):
        return json.loads(str(value))
    if isinstance(value, dict) and isinstance(feature, dict):
        gaps += [key for key, x in value.items() if x is None]
        return {key: as_in_json(x, feature[key], gaps) for key, x in value.items() if x is not None}
    if isinstance(value, list):
        # older releases of datasets write the feature of a list as a list
        item = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
        return [as_in_json(x, item, gaps) for x in value]
    return value


def open_table(source: str):
    """The datasets.Dataset of a parquet file, of a folder of save_to_disk (`folder` or `folder:split`)
    or of a Hub data set (`id`, `id:split` or `id:config:split`)."""
    import datasets  # slow to import

    name, *rest = [source] if find_path(source).exists() else source.split(":")
    *config, split = rest or ["train"]
    path = find_path(name)
    if path.suffix.lower() == ".parquet":
        return datasets.Dataset.from_parquet(glob.escape(str(path)))  # it looks for a pattern
    nothing = "no file of a known form, no folder of save_to_disk, not found on huggingface.co"
    with user_error(f"{source}: {nothing}", name):
        if not path.is_dir():
            return datasets.load_dataset(name, *config, split=split)
        rows = datasets.load_from_disk(path)
        return rows[split] if isinstance(rows, dict) else rows


# ---- the parts of the data -----------------------------------------------------------------------


def with_limits(data: Data, context: int) -> Data:
    """Fill in max_prompt and max_completion so that both together fit into a model's context (in
    tokens). Raises BadInput where the given ones do not."""
    room = context - (data.max_completion or 1)
    max_prompt = data.max_prompt or max(1, min(1024, context // 2, room))
    max_completion = data.max_completion or min(1024, context - max_prompt)
    refuse_unless(
        max_completion >= 1 and max_prompt + max_completion <= context,
        f"data.max_prompt {max_prompt} + data.max_completion {max_completion} exceed the "
        f"context of {context}",
    )
    return replace(data, max_prompt=max_prompt, max_completion=max_completion)


def load_splits(
    data: Data, tokenizer: Tokenizer, kind: Kind, make_records: Callable | None = None
) -> dict[str, list[Example]]:
    """{"train", "val", "test": examples}, each described in a table. A part that the settings do not
    name is empty. `data` as in load_examples. Raises BadInput."""
    parts, counts = {}, {}
    for name in ("train", "val", "test"):
        source = getattr(data, name)
        parts[name], counts[name] = load_examples(source, tokenizer, kind, data, make_records)
    if any(count["by the chat template"] for count in counts.values()):
        tokenizer.end_as_the_template_does()
    if data.split:
        refuse_unless(
            not data.val and not data.test,
            "data.split: it cuts data.train; give it, or data.val and data.test",
        )
        parts = dict(zip(parts, split_by_prompt(parts["train"], data.split)))
    parts = {name: numbered(examples) for name, examples in parts.items()}
    for name, examples in parts.items():
        if examples:
            describe(name, examples, kind, counts[name])
    return parts


def numbered(examples: list[Example]) -> list[Example]:
    """The same examples, each with its number in this list."""
    return [example._replace(number=i) for i, example in enumerate(examples)]


def split_by_prompt(examples: list[Example], parts: str) -> list[list[Example]]:
    """[train, val, test], in the proportions of data.split: `980,10,10` or `990,10`.

    A prompt's part is a function of a hash of its ids: it depends neither on the order nor on the
    other prompts, and ratings of one prompt stay together. Raises BadInput.
    """
    with user_error("data.split", f"{parts}: expected two or three numbers like 980,10,10"):
        sizes = np.array(split_commas(parts), float)
        if len(sizes) not in (2, 3):
            raise ValueError
    upper_edges, split = sizes.cumsum() / sizes.sum(), [[], [], []]
    for example in examples:
        digest = hashlib.sha256(example.prompt.tobytes()).digest()
        position = int.from_bytes(digest[:8], "big") / 2**64  # in [0, 1)
        split[(upper_edges <= position).sum()].append(example)
    return split


def describe(name: str, examples: list[Example], kind: Kind, counts: Counter) -> None:
    """Say, in a table, what is about to be learned from, for a person to check before it starts."""
    keys = [e.keys for e in examples]
    head = f"{name}: {len(keys):,} examples of {len({prompt for prompt, *_ in keys}):,} prompts"
    labels = [e.label for e in examples] if kind == "rated" else []
    up, down = sum(labels), len(labels) - sum(labels)
    say(f"{head}, {up:,} desirable, {down:,} undesirable" if labels else head)
    for what, lengths in {
        "prompt": [len(e.prompt) for e in examples],
        "completion": [len(ids) for e in examples for ids in e.completions],
    }.items():
        if lengths:
            numbers = np.percentile(lengths, [50, 95, 100]).astype(int)
            say("  {} tokens: median {}, 95% below {}, longest {}".format(what, *numbers))
    # duplicates repeat prompt, completions and label; contradictions repeat all but the label
    distinct = len(set(keys))
    with_label = len({(key, e.label) for key, e in zip(keys, examples)})
    found = {"duplicates": len(keys) - with_label, "contradictions": with_label - distinct} | counts
    say("  " + ", ".join(f"{n:,} {what}" for what, n in found.items() if what not in WARNINGS))
    for warning in WARNINGS:
        if counts[warning]:
            say(f"  look at them: {counts[warning]:,} {warning}")
    if name == "train" and up and down:
        # arXiv 2402.01306, eq. 8: w_D n_D / (w_U n_U) in [1, 4/3]. With equal weights and many more
        # thumbs down than up a run mostly unlearns, first of all to end an answer.
        ratio = down / up
        say(
            "  for this balance the KTO paper suggests kto.desirable_weight / kto.undesirable_weight "
            f"from {ratio:.2f} to {4 / 3 * ratio:.2f}"
        )


def examples_hash(parts: dict[str, list[Example]]) -> str:
    """A hash of all that is learned from, in its order; the names of the files are no part of it."""
    h = hashlib.sha256()
    for name, examples in parts.items():
        for e in examples:
            content = name, e.keys, e.label, e.rewards, e.weight, e.extra
            h.update(repr(content).encode())
    return h.hexdigest()


# ---- python data.py FILE -------------------------------------------------------------------------


@dataclass(frozen=True)
class PageSettings(Data):
    """Which file to show, and for which model."""

    model: str = "demo/base"
    """Whose tokenizer, chat template and context to take."""
    kind: Kind = "rated"
    """What is learned from: rated (kto.py), paired (dpo.py), demonstrations (spin.py), prompts (online.py)."""


def page() -> None:
    """What is in a data file, as a run would see it: python data.py FILE [--kind paired] [--model M]."""
    data = parse_page(sys.argv[1:])
    source = find_model(data.model, weights=False)
    data = with_limits(data, context_of(read_config(source)))
    tokenizer = Tokenizer(source, data.chat_template, data.date)
    try:
        first = load_splits(data, tokenizer, data.kind)["train"][0]
    except BadInput as e:
        hint = suggestion(first_records(data), data) if not data.columns else ""
        # the form is not known: one record tells as much as twenty
        raise BadInput(f"{str(e).splitlines()[0]}\n{hint}" if hint else str(e)) from None
    show_first_of_each_kind(data)
    print()
    for ids in (first.prompt, *first.completions):
        print(repr(tokenizer.hf.decode(ids)), ids.tolist(), sep="\n")
    if not data.columns and not data.turns:
        preset = fitting_preset(first_records(data), data)
        if preset:
            print(f"another way to read it: --config {preset}")


def parse_page(words: list[str]) -> PageSettings:
    """The settings of a command line. As in a run's, a --config may have a group `data` (config/data), and
    --data.columns is --columns."""
    if words and not words[0].startswith("--"):
        words = ["--train", *words]
    plain, presets = [], {}
    for head, *values in split_options(words)[1:]:
        name, has_value, value = head.partition("=")
        values = [value, *values] if has_value else values
        file = find_path(values[0]) if name == "--config" and values else None
        group = None
        if file and file.exists():
            with user_error("config", str(file)):
                group = yaml.safe_load(file.read_text(encoding="utf-8"))
        if isinstance(group, dict) and isinstance(group.get("data"), dict):
            presets |= group["data"] | {x: y for x, y in group.items() if x == "model"}
        else:
            plain += [name.replace("--data.", "--"), *values]
    return parse_command(PageSettings, page.__doc__, plain, presets)


def first_records(data: Data, n: int = 200) -> list:
    """The first raw records of data.train; none if it cannot be read."""
    with suppress(BadInput):
        return [raw for _, raw in islice(decoded_records(first_files(data)[0], []), n)]
    return []


def show_first_of_each_kind(data: PageSettings) -> None:
    """Print the first record of each kind (up, down, a pair, ...) as turns."""
    reader = Reader(data, data.kind, Counter())
    kinds = set()
    for file in first_files(data):
        reader.settle(decoded_records(file, []))
        for where, ours in islice(reader.read(decoded_records(file, []), []), 10_000):
            record = understand_record(ours, data.kind, split_commas(data.extra))
            kind = data.kind if record.label is None else record.label
            if kind not in kinds:
                kinds.add(kind)
                show_record(where, record)
            if len(kinds) == 2 or data.kind != "rated":
                return


def first_files(data: Data) -> list[str]:
    """The files of the first source of data.train."""
    name, _ = split_share(split_sources(data.train)[0])
    return files_of(name)

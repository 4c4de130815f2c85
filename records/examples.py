"""From records to examples of token ids, and what a run does with them before it trains.

Reading order: Example (what comes out) and Examples (many of them); load_examples and _load_file;
the whole way of a record, which is _read_texts (read, understand, render) and
_tokenise_texts (encode, cut, make columns); then the three parts of the data, the table that
describes them, and their hash.
"""

import contextlib
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from records.forms import Dropped, Fault, Kind, Record, understand_record
from records.readers import count_lines, read_records, split_sources
from records.tokenizer import ENCODE_TEXTS, Endless, Texts, Tokenizer
from runs.console import Wait, advance
from runs.errors import BadInput, printable
from runs.settings import Data

MOST_FAULTS = 20  # bad records that are reported before reading stops


class Example(NamedTuple):
    """A prompt with its completion (rated or demonstrated), its two (chosen, rejected) or none, as
    arrays of int32 token ids."""

    prompt: np.ndarray
    completions: tuple[np.ndarray, ...]
    label: bool  # desirable; True where nothing was rated
    rewards: tuple[float | None, float | None] = (None, None)  # of chosen and rejected
    where: str = ""  # file:line
    weight: float = 1.0
    extra: dict[str, str | float] = {}  # the fields that data.extra names

    @property
    def keys(self) -> tuple[bytes, bytes]:
        """(the prompt, the first completion) as bytes, to see which examples have equal ones."""
        return self.prompt.tobytes(), self.completions[0].tobytes()


class Examples(Sequence):
    """A list of examples, held as columns: a million Example objects would take a gigabyte.

    tokens  (all token ids,) int32: prompt, completions, next prompt, ...
    rows    (examples,) a structured array with one row per example:
            start, length (1 + K each): where in `tokens` its prompt and its K completions are
            label, weight, rewards: as in Example
            origin: which of `origins` it has
            line: the number at the end of its `where`, -1 if there is none
    origins a list of (`where` without the line, (name, value) of each extra field), without
            repetition: most examples of a file share one

    A slice or a selection has rows of its own, and shares `tokens` and `origins`.
    """

    def __init__(self, tokens: np.ndarray, rows: np.ndarray, origins: list[tuple]):
        self.tokens = tokens
        self.rows = rows
        self.origins = origins
        self.n_segments = rows["start"].shape[1]  # the prompt and its K completions

    @classmethod
    def of(cls, examples: Sequence[Example]) -> "Examples":
        """The same examples as columns. There must be at least one, and all have the same K."""
        if isinstance(examples, cls):
            return examples
        ids = [(e.prompt, *e.completions) for e in examples]
        n_segments = len(ids[0])
        rows = np.zeros(
            len(ids),
            dtype=[
                ("start", "i8", (n_segments,)),
                ("length", "i4", (n_segments,)),
                ("label", "?"),
                ("weight", "f8"),
                ("rewards", "f8", (2,)),
                ("origin", "i8"),
                ("line", "i8"),
            ],
        )
        rows["length"] = [[len(x) for x in row] for row in ids]
        rows["start"] = rows["length"].cumsum().reshape(-1, n_segments) - rows["length"]
        rows["label"] = [e.label for e in examples]
        rows["weight"] = [e.weight for e in examples]
        rows["rewards"] = [e.rewards for e in examples]  # None becomes nan
        origins: dict[tuple, int] = {}
        origin_numbers, lines = [], []
        for e in examples:
            file = e.where.rstrip("0123456789")
            origin = (file, *e.extra.items())
            origin_numbers.append(origins.setdefault(origin, len(origins)))
            lines.append(int(e.where[len(file) :] or -1))
        rows["origin"] = origin_numbers
        rows["line"] = lines
        tokens = np.concatenate([x for row in ids for x in row])
        return cls(tokens, rows, list(origins))

    @classmethod
    def join(cls, parts: list["Examples"]) -> "Examples":
        """All examples of several lists, in their order. They must have the same K."""
        if len(parts) == 1:
            return parts[0]
        all_rows, origins, n_tokens = [], [], 0
        for part in parts:
            rows = part.rows.copy()
            rows["start"] += n_tokens
            rows["origin"] += len(origins)
            all_rows.append(rows)
            origins += part.origins
            n_tokens += len(part.tokens)
        tokens = np.concatenate([part.tokens for part in parts])
        return cls(tokens, np.concatenate(all_rows), origins)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i):
        """One Example, or the Examples of a slice, of an array of numbers or of a mask."""
        if isinstance(i, slice) or np.ndim(i):
            return Examples(self.tokens, self.rows[i], self.origins)
        starts, lengths, label, weight, rewards, origin, line = self.rows[i].tolist()
        prompt, *completions = [self.tokens[a : a + n] for a, n in zip(starts, lengths)]
        file, *extra = self.origins[origin]
        return Example(
            prompt=prompt,
            completions=tuple(completions),
            label=label,
            rewards=tuple(None if math.isnan(r) else r for r in rewards.tolist()),
            where=file + str(line) if line >= 0 else file,
            weight=weight,
            extra=dict(extra),
        )

    def ids_as_bytes(self, k: int) -> Iterator[bytes]:
        """The token ids of each example's prompt (k = 0) or k-th completion: equal ids are equal
        bytes."""
        content = self.tokens.tobytes()
        starts = self.rows["start"][:, k] * self.tokens.itemsize
        ends = starts + self.rows["length"][:, k] * self.tokens.itemsize
        for start, end in zip(starts.tolist(), ends.tolist()):
            yield content[start:end]

    def number_ids(self, k: int) -> np.ndarray:
        """A number for each example, 0, 1, ... in the order of their first appearance: equal ones have
        equal prompts (k = 0) or equal k-th completions."""
        numbers: dict[bytes, int] = {}
        return np.array([numbers.setdefault(ids, len(numbers)) for ids in self.ids_as_bytes(k)])


class LoadedExamples(NamedTuple):
    """What load_examples returns."""

    examples: Examples
    cuts: Counter  # "prompts cut", "completions cut" -> how many
    ignored: tuple[str, ...] = ()  # names of record fields that nothing reads
    renamed: tuple[str, ...] = ()  # names in data.columns that some record has
    rendered: Counter = Counter()  # "by the chat template", "plain" -> how many records
    dropped: Counter = Counter()  # a label that data.labels does not name -> how many records

    @classmethod
    def join(cls, parts: Sequence["LoadedExamples"]) -> "LoadedExamples":
        """The examples of several files, and the sums of what was counted in them."""
        examples, cuts, ignored, renamed, rendered, dropped = zip(*parts)
        return cls(
            examples=Examples.join(list(examples)),
            cuts=_sum_counts(cuts),
            ignored=tuple(dict.fromkeys(chain(*ignored))),  # a set that keeps its order
            renamed=tuple(dict.fromkeys(chain(*renamed))),
            rendered=_sum_counts(rendered),
            dropped=_sum_counts(dropped),
        )


def _sum_counts(counters: Iterable[Counter]) -> Counter:
    # Counter's own + would leave out counts of 0, which the table shows.
    total = Counter()
    for counter in counters:
        total.update(counter)
    return total


class FoundMessages(Exception):
    """A dialogue behind records that were taken for plain text."""


# ---- from a file to examples ---------------------------------------------------------------------


def load_examples(source: str, tokenizer: Tokenizer, kind: Kind, data: Data) -> LoadedExamples:
    """All examples of one or more sources, such as data.train names.

    `kind` is what the caller learns from. For `rated`, a pair becomes two examples; for `prompts`,
    each distinct prompt is one example without completions. `data`: the settings, with
    max_prompt and max_completion filled in (settings.with_limits).

    Raises BadInput with a line for each of the first 20 bad records; a label is never guessed.
    """
    loaded, weights = [], []
    for files, weight in split_sources(source):
        of_source = [_load_file(file, tokenizer, kind, data) for file in files]
        loaded.append(LoadedExamples.join(of_source))
        weights.append(weight)
    if weights[0] is not None:  # then all sources have one
        shares = _take_shares([one.examples for one in loaded], weights)
        loaded = [one._replace(examples=share) for one, share in zip(loaded, shares)]
    all_sources = LoadedExamples.join(loaded)
    examples = all_sources.examples
    if kind == "prompts":
        _, first = np.unique(examples.number_ids(0), return_index=True)
        examples = examples[first]
    _check_extra_types(examples)
    return all_sources._replace(examples=examples)


def _load_file(source: str, tokenizer: Tokenizer, kind: Kind, data: Data) -> LoadedExamples:
    """The examples of one file. All its records are rendered in one way: as plain text, or all by the
    chat template if any record needs it."""
    n = count_lines(source)
    for by_template in (False, True):  # once more if FoundMessages
        dropped = Counter()
        with contextlib.suppress(FoundMessages), Wait(f"reading {source}", n, "records"):
            texts = _read_texts(source, tokenizer, kind, data, by_template, dropped)
            parts = list(_tokenise_texts(texts, tokenizer, kind, data))
            break
    if not parts and dropped:
        raise BadInput(f"{source}: data.labels names no label here: {_show_labels(dropped)}")
    if not parts:
        raise BadInput(f"{source}: no records")
    return LoadedExamples.join(parts)._replace(dropped=dropped)


def _tokenise_texts(
    records_with_texts: Iterator[tuple[str, Record, Texts]],
    tokenizer: Tokenizer,
    kind: Kind,
    data: Data,
) -> Iterator[LoadedExamples]:
    """Steps 4 to 6 of a record's way (encode, cut, make columns); steps 1 to 3 are in _read_texts
    below. In batches, since texts take more memory than their token ids."""
    while True:
        batch = list(islice(records_with_texts, ENCODE_TEXTS))
        if not batch:
            return
        cuts, ignored, renamed, rendered = Counter(), {}, {}, Counter()
        # 4. encode: the texts become token ids, with BOS and EOS
        all_ids = tokenizer.encode_all([texts for _, _, texts in batch])
        examples = []
        for (where, record, texts), (prompt_ids, completion_ids) in zip(batch, all_ids):
            # 5. cut: the ids become arrays of at most max_prompt and max_completion ids
            prompt = _cut_prompt(prompt_ids, tokenizer.bos, data.max_prompt, cuts)
            completions = [_cut_completion(x, data.max_completion, cuts) for x in completion_ids]
            # The texts were not empty, but a tokenizer may strip blanks.
            if not len(prompt):
                raise BadInput(f"{where}: prompt: not empty, but no tokens are left of it")
            if not all(len(x) for x in completions):
                raise BadInput(f"{where}: completion: not empty, but no tokens are left of it")
            examples += _make_examples(where, record, prompt, completions, kind)
            ignored.update(dict.fromkeys(record.ignored))
            renamed.update(dict.fromkeys(record.renamed))
            rendered["by the chat template" if texts.by_template else "plain"] += 1
        # 6. make columns
        columns = Examples.of(examples)
        yield LoadedExamples(columns, cuts, tuple(ignored), tuple(renamed), rendered)
        advance(len(batch))


def _read_texts(
    source: str, tokenizer: Tokenizer, kind: Kind, data: Data, by_template: bool, dropped: Counter
) -> Iterator[tuple[str, Record, Texts]]:
    """(where, record, its texts) for each record of a file; `where` is file:line. Bad records are
    collected, and raised as one BadInput at the end of the file or after the first 20 of them.

    Adds to `dropped` (see LoadedExamples). Raises FoundMessages if a record needs the chat template
    and plain ones have gone before it.
    """
    faults, n_plain = [], 0
    extra = data.extra_fields
    columns, labels = column_names(data), label_values(data)
    # 1. read: a line of the file becomes what it holds (readers.py)
    for where, raw in read_records(source, extra, columns):
        try:
            # 2. understand: that becomes a Record (forms.py)
            record = understand_record(raw, kind, extra, columns, labels)
            if tokenizer.template and (record.has_messages or record.instruct):
                if n_plain:
                    raise FoundMessages
                by_template = True
            n_plain += not by_template
            # 3. render: its messages become texts, not much longer than what is kept
            texts = tokenizer.render(record, by_template)
            _check_texts(texts, tokenizer)
            texts = tokenizer.shorten(texts, data.max_prompt, data.max_completion)
        except Dropped as e:
            dropped[printable(e)] += 1
            continue
        except (Fault, RecursionError) as e:
            faults.append(" ".join(f"{where}: {e}".splitlines()))
            if len(faults) == MOST_FAULTS or isinstance(e, Endless):
                break
            continue
        if not faults:  # after a fault the rest of the file is only checked
            yield where, record, texts
    if faults:
        raise BadInput("\n".join(faults))


def _check_texts(texts: Texts, tokenizer: Tokenizer) -> None:
    """Raises Fault if these texts cannot be learned from."""
    if not texts.prompt and (texts.by_template or not tokenizer.adds_bos):
        raise Fault(
            "prompt: empty, and this tokenizer adds no BOS: nothing would predict the first token"
        )
    try:
        "".join((texts.prompt, *texts.completions)).encode()
    except UnicodeEncodeError:
        raise Fault("record: half of a surrogate pair (\\ud800-\\udfff) is no text") from None
    if texts.by_template and not all(texts.completions):
        raise Fault("completion: the chat template renders it as nothing")


def _show_labels(dropped: Counter) -> str:
    """`3 (1,204), null (17)`: the most frequent ones first."""
    shown = [f"{label} ({count:,})" for label, count in dropped.most_common(10)]
    return ", ".join(shown) + (", ..." if len(dropped) > 10 else "")


def _cut_prompt(ids: list[int], bos: int | None, longest: int, cuts: Counter) -> np.ndarray:
    """The last `longest` ids of a prompt. A BOS in front stays, if there is room for more than it."""
    if len(ids) > longest:
        cuts["prompts cut"] += 1
        if ids[0] == bos and longest > 1:
            ids = [bos, *ids[1 - longest :]]
        else:
            ids = ids[-longest:]
    return np.array(ids, dtype=np.int32)


def _cut_completion(ids: list[int], longest: int, cuts: Counter) -> np.ndarray:
    """The first `longest` ids of a completion."""
    # also where it is 0, so that the table always shows this count
    cuts["completions cut"] += len(ids) > longest
    return np.array(ids[:longest], dtype=np.int32)


def _make_examples(
    where: str, record: Record, prompt: np.ndarray, completions: list[np.ndarray], kind: Kind
) -> list[Example]:
    """The example of a record, or for rated ones the two of a pair, which share a prompt."""
    common = dict(where=where, weight=record.weight, extra=record.extra)
    if kind == "rated" and record.label is None:
        return [
            Example(prompt, (completion,), label, (reward, None), **common)
            for completion, label, reward in zip(completions, (True, False), record.rewards)
        ]
    label = record.label is not False
    return [Example(prompt, tuple(completions), label, record.rewards, **common)]


def column_names(data: Data) -> dict[str, str]:
    """data.columns as {the source's name: ours}: `prompt=question,label=good` becomes
    {"question": "prompt", "good": "label"}. Raises BadInput."""
    pairs = _name_pairs("data.columns", data.columns, "ours=theirs")
    return {theirs: ours for ours, theirs in pairs}


def label_values(data: Data) -> dict[str, bool]:
    """data.labels as {a label's text: desirable}: `up=4|5,down=1` becomes {"4": True, "5": True,
    "1": False}. Raises BadInput."""
    values = {}
    for side, theirs in _name_pairs("data.labels", data.labels, "up=4|5,down=1|2"):
        if side not in ("up", "down"):
            raise BadInput(f"data.labels: expected up or down before =, got {printable(side)}")
        for value in theirs.split("|"):
            value = value.strip()
            if value in values:
                raise BadInput(f"data.labels: {printable(value)}: given 2 times")
            values[value] = side == "up"
    return values


def _name_pairs(setting: str, text: str | None, expected: str) -> list[list[str]]:
    """`a=b,c=d` as [[a, b], [c, d]]. Raises BadInput."""
    pairs = []
    for pair in text.split(",") if text else ():
        both = [name.strip() for name in pair.split("=")]
        if len(both) != 2 or not all(both):
            raise BadInput(f"{setting}: expected {expected}, separated by commas; got {text}")
        pairs.append(both)
    return pairs


def _take_shares(parts: list[Examples], weights: list[float]) -> list[Examples]:
    """Some examples of each part, taken evenly over it, so that their numbers have the proportions
    of the weights: as many as there can be if none is repeated."""
    per_weight = min(len(part) / weight for part, weight in zip(parts, weights))
    shares = []
    for part, weight in zip(parts, weights):
        n = round(weight * per_weight)
        shares.append(part if n == len(part) else part[np.arange(n) * len(part) // n])
    return shares


def _count_distinct(numbers: np.ndarray) -> int:
    # On a million numbers np.unique takes 15 times as long (numpy 2.4, which hashes them).
    return 1 + np.count_nonzero(np.diff(np.sort(numbers)))


def _check_extra_types(examples: Examples) -> None:
    """Raises BadInput if a field of data.extra is a number in some records and a text in others."""
    types: dict[str, type] = {}
    for _, *extra in examples.origins:
        for name, value in extra:
            if types.setdefault(name, type(value)) is not type(value):
                raise BadInput(f"data.extra: {name}: a number in some records, a text in others")


# ---- the parts of the data -----------------------------------------------------------------------


def load_splits(
    data: Data, tokenizer: Tokenizer, kind: Kind, say: Callable[[str], None]
) -> dict[str, Sequence[Example]]:
    """{"train", "val", "test": examples}, each described by say(table). A part that the settings do
    not name is empty.

    `data` and `kind` as in load_examples. Raises BadInput.
    """
    sources = {"train": data.train, "val": data.val, "test": data.test}
    parts, loaded = {}, {}
    for name, source in sources.items():
        parts[name] = []
        if source:
            loaded[name] = load_examples(source, tokenizer, kind, data)
            parts[name] = loaded[name].examples
    renamed = {name for one in loaded.values() for name in one.renamed}
    for name in column_names(data):
        if name not in renamed:
            raise BadInput(f"data.columns: {name}: no record has such a field")
    if kind == "rated":
        _check_label_values(data, loaded["train"])
    if data.split:
        if data.val or data.test:
            raise BadInput(
                "data.split: it cuts data.train in parts; give it, or data.val and data.test, not both"
            )
        parts = dict(zip(parts, split_by_prompt(parts["train"], data.split)))
    for name, examples in parts.items():
        if examples:
            part = LoadedExamples(examples, Counter())
            if name in loaded:
                part = loaded[name]._replace(examples=examples)
                if data.split:  # counted before data.train was cut in parts
                    part = part._replace(
                        cuts=_of_all_parts(part.cuts), rendered=_of_all_parts(part.rendered)
                    )
            say(describe_examples(name, part))
    if len({how for one in loaded.values() for how in one.rendered}) > 1:
        say(
            "warning: some records are rendered by the chat template and some are plain: data.columns can "
            "make them alike (see docs/data.md)"
        )
    # val and test are one batch each, whose examples are asked for again and again
    return {"train": parts["train"], "val": list(parts["val"]), "test": list(parts["test"])}


def _of_all_parts(counts: Counter) -> Counter:
    return Counter({f"{what} (all parts)": count for what, count in counts.items()})


def _check_label_values(data: Data, loaded: LoadedExamples) -> None:
    """Raises BadInput if data.labels names values for a side that no example has: one is misspelt."""
    found = set(loaded.examples.rows["label"].tolist())
    for value, desirable in label_values(data).items():
        if desirable not in found:
            given = f"{'up' if desirable else 'down'}={printable(value)}"
            others = f"; dropped were {_show_labels(loaded.dropped)}" if loaded.dropped else ""
            raise BadInput(f"data.labels: {given}: no record of {data.train} has it{others}")


def split_by_prompt(examples: Sequence[Example], parts: str) -> list[Examples]:
    """[train, val, test], in the proportions of data.split: `980,10,10` or `990,10`.

    A prompt's part is a function of a hash of its ids: it depends neither on the order nor on the
    other prompts, and ratings of one prompt stay together. Raises BadInput.
    """
    try:
        sizes = [float(part) for part in parts.split(",")]
    except ValueError:
        sizes = []
    is_valid = len(sizes) in (2, 3) and min(sizes) >= 0 and sizes[0] > 0
    if not is_valid or not math.isfinite(sum(sizes)):
        raise BadInput(f"data.split: expected two or three parts like 980,10,10; got {parts}")
    examples = Examples.of(examples)
    upper_edges = np.cumsum(sizes) / sum(sizes)
    positions = []  # in [0, 1)
    for prompt in examples.ids_as_bytes(0):
        digest = hashlib.sha256(prompt).digest()
        positions.append(int.from_bytes(digest[:8], "big") / 2**64)
    part_of_example = np.searchsorted(upper_edges, positions, side="right")
    return [examples[part_of_example == i] for i in range(3)]


def describe_examples(name: str, loaded: LoadedExamples) -> str:
    """A table, as text, of what is about to be learned from, for a person to check before it starts."""
    examples = Examples.of(loaded.examples)
    n = len(examples)
    n_completions = examples.n_segments - 1
    length = examples.rows["length"]
    label = examples.rows["label"]
    if n_completions == 0:
        lines = [f"{name}: {n:,} prompts, longest {length.max()} tokens"]
        return "\n".join(lines + _rendered_lines(loaded))
    # Equal prompts have equal numbers, and so have equal completions.
    prompt, *completions = [examples.number_ids(k) for k in range(examples.n_segments)]
    n_prompts = prompt.max() + 1

    lines = [
        f"{name}: {n:,} {'pairs' if n_completions == 2 else 'examples'} of {n_prompts:,} prompts"
    ]
    if n_completions == 1:
        n_desirable, n_undesirable = count_labels(examples)
        lines[0] += f", {n_desirable:,} desirable, {n_undesirable:,} undesirable"
    for what, lengths in (("prompt", length[:, 0]), ("completion", length[:, 1:])):
        median, high, longest = np.percentile(lengths, [50, 95, 100]).astype(int)
        lines.append(f"  {what} tokens: median {median}, 95% below {high}, longest {longest}")

    # One number for each distinct (prompt, completions). That of a pair is made smaller in between,
    # since a product of three would overflow.
    first, *second = completions
    texts = prompt * n + first
    for completion in second:
        _, texts = np.unique(texts, return_inverse=True)
        texts = texts * n + completion
    n_distinct = _count_distinct(texts)
    n_distinct_with_label = _count_distinct(texts * 2 + label)
    # duplicates repeat prompt, completion and label; contradictions repeat all but the label
    counts = {
        "duplicates": n - n_distinct_with_label,
        "contradictions": n_distinct_with_label - n_distinct,
        **loaded.cuts,
    }
    lines.append("  " + ", ".join(f"{count:,} {what}" for what, count in counts.items()))
    lines += _rendered_lines(loaded)
    if loaded.dropped:
        lines.append(
            f"  dropped, since data.labels does not name their label: {_show_labels(loaded.dropped)}"
        )
    if loaded.ignored:
        lines.append(f"  fields that nothing reads: {', '.join(loaded.ignored)} (see data.extra)")
    return "\n".join(lines)


def _rendered_lines(loaded: LoadedExamples) -> list[str]:
    counts = [f"{count:,} {how}" for how, count in loaded.rendered.items()]
    return [f"  rendered: {', '.join(counts)}"] if counts else []


def count_labels(examples: Sequence[Example]) -> tuple[int, int]:
    """How many ratings are desirable and undesirable. (0, 0) of anything but ratings."""
    examples = Examples.of(examples)
    if examples.n_segments != 2:
        return 0, 0
    n_desirable = int(examples.rows["label"].sum())
    return n_desirable, len(examples) - n_desirable


def suggest_class_weights(examples: Sequence[Example]) -> str | None:
    """A line with the class weights that arXiv 2402.01306 suggests for train: w_D n_D / (w_U n_U) is to lie in
    [1, 4/3]. The smaller of the two weights is 1. None where there are not two classes."""
    n_desirable, n_undesirable = count_labels(examples)
    if not n_desirable or not n_undesirable:
        return None
    ratio = n_undesirable / n_desirable
    desirable, undesirable = "1", "1"
    if ratio < 3 / 4:
        undesirable = f"{3 / 4 / ratio:.2f} to {1 / ratio:.2f}"
    else:
        desirable = f"{max(1, ratio):.2f} to {4 / 3 * ratio:.2f}"
    return (
        "train: class weights that the KTO paper suggests for this balance:\n  "
        f"kto.desirable_weight {desirable}, kto.undesirable_weight {undesirable}"
    )


def examples_hash(parts: dict[str, Sequence[Example]]) -> str:
    """A hash of all examples as token ids, labels, weights, rewards and extra fields, in their
    order. It does not depend on the files that they came from."""
    h = hashlib.sha256()
    for name, part in parts.items():
        if not part:
            continue
        examples = Examples.of(part)
        extra = [examples.origins[i][1:] for i in examples.rows["origin"].tolist()]
        h.update(f"{name} {len(examples)} {extra}".encode())
        for column in ("length", "label", "weight", "rewards"):
            h.update(examples.rows[column].tobytes())
        for k in range(examples.n_segments):
            h.update(b"".join(examples.ids_as_bytes(k)))
    return h.hexdigest()

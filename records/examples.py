"""A source's records to examples of token ids: cut to the limits, split, described in a table."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from records import cache
from records.forms import Fault, Record, read_records, split_sources, understand_record
from records.tokenizer import ENCODE_TEXTS, Endless, Tokenizer
from runs.errors import BadInput
from runs.settings import Data


class Example(NamedTuple):
    """A prompt with its completion (rated, demonstrated) or its two (chosen, rejected), as int32
    token ids."""

    prompt: np.ndarray
    completions: tuple[np.ndarray, ...]
    label: bool  # desirable; True where nothing was rated
    rewards: tuple[float | None, float | None] = (None, None)  # of a pair's completions
    where: str = ""  # file:line
    weight: float = 1.0
    extra: dict = {}  # the fields named by data.extra

    @property
    def keys(self) -> tuple[bytes, bytes]:
        """Equal prompts and equal completions have equal keys."""
        return self.prompt.tobytes(), self.completions[0].tobytes()


class Examples(Sequence):
    """Examples as columns: a million of them as objects would take seconds and a gigabyte.

    `rows`: where an example's ids begin in `tokens`, its numbers, and which of `texts` (its place
    but for the number, its extra fields) it has. A part of them is other rows, with the same rest.
    """

    def __init__(self, tokens: np.ndarray, rows: np.ndarray, texts: list):
        self.tokens, self.rows, self.texts = tokens, rows, texts
        self.n_ids = rows["start"].shape[1]  # of the prompt, and of K completions

    @classmethod
    def of(cls, examples: Sequence[Example]) -> "Examples":
        if isinstance(examples, cls):
            return examples
        ids = [(e.prompt, *e.completions) for e in examples]
        n, texts = (len(ids[0]),), {}
        columns = [("start", "i8", n), ("length", "i4", n), ("label", "?"), ("weight", "f8")]
        columns += [("rewards", "f8", (2,)), ("text", "i8"), ("line", "i8")]
        rows = np.zeros(len(ids), columns)
        rows["length"] = [[len(x) for x in row] for row in ids]
        rows["start"] = rows["length"].cumsum().reshape(-1, *n) - rows["length"]
        for name in ("label", "weight", "rewards"):  # None becomes nan
            rows[name] = [getattr(e, name) for e in examples]
        place = [e.where.rstrip("0123456789") for e in examples]
        own = ((x, *e.extra.items()) for x, e in zip(place, examples))
        rows["text"] = [texts.setdefault(text, len(texts)) for text in own]
        rows["line"] = [int(e.where[len(x) :] or -1) for x, e in zip(place, examples)]
        return cls(np.concatenate([x for row in ids for x in row]), rows, list(texts))

    @classmethod
    def joined(cls, parts: list["Examples"]) -> "Examples":
        if len(parts) == 1:
            return parts[0]
        rows, texts, n_tokens = [], [], 0
        for part in parts:
            rows.append(part.rows.copy())
            rows[-1]["start"] += n_tokens
            rows[-1]["text"] += len(texts)
            texts += part.texts
            n_tokens += len(part.tokens)
        return cls(np.concatenate([p.tokens for p in parts]), np.concatenate(rows), texts)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i):
        """An Example, or those of a slice or of a list of numbers."""
        if isinstance(i, slice) or np.ndim(i):
            return Examples(self.tokens, self.rows[i], self.texts)
        start, length, label, weight, rewards, text, line = self.rows[i].tolist()
        prompt, *completions = (self.tokens[a : a + n] for a, n in zip(start, length))
        rewards = tuple(None if math.isnan(r) else r for r in rewards.tolist())
        place, *extra = self.texts[text]
        where = place + (str(line) if line >= 0 else "")
        return Example(prompt, tuple(completions), label, rewards, where, weight, dict(extra))

    def ids(self, k: int) -> Iterator[bytes]:
        """Of each prompt (0) or completion."""
        start, blob = self.rows["start"][:, k] * 4, self.tokens.tobytes()
        ends = start + self.rows["length"][:, k] * 4
        return (blob[a:b] for a, b in zip(start.tolist(), ends.tolist()))


class Loaded(NamedTuple):
    """A source's examples, counts of what was cut, the record fields that nothing reads, and those
    that data.columns names."""

    examples: Examples
    cuts: Counter
    ignored: tuple[str, ...] = ()
    renamed: tuple[str, ...] = ()


def load_examples(source: str, tokenizer: Tokenizer, kind: str, limits: Data) -> Loaded:
    """All examples of one or more sources. `kind`: rated (a pair becomes two), paired,
    demonstrations, prompts (distinct ones, whatever else their records hold).

    Raises BadInput with a line for each of the first 20 bad records; a label is never guessed.
    """
    mix, cuts, ignored, renamed = [], Counter(), {}, {}
    for files, weight in split_sources(source):
        mix.append(([], weight))
        for file in files:
            one = _load(file, tokenizer, kind, limits)
            mix[-1][0].append(one.examples)
            cuts.update(one.cuts)
            ignored |= dict.fromkeys(one.ignored)
            renamed |= dict.fromkeys(one.renamed)
    # weights are shares of the longest mix that repeats nothing, taken evenly over each source
    mix = [(Examples.joined(found), weight) for found, weight in mix]
    shortest = min(len(found) / (weight or 1) for found, weight in mix)
    parts = []
    for found, weight in mix:
        n = round(weight * shortest) if weight else len(found)
        parts.append(found if n == len(found) else found[np.arange(n) * len(found) // n])
    examples = Examples.joined(parts)
    if kind == "prompts":
        examples = examples[np.unique(_numbered(examples.ids(0)), return_index=True)[1]]
    kinds = {}
    for name, value in (field for _, *extra in examples.texts for field in extra):
        if kinds.setdefault(name, type(value)) is not type(value):
            both = "a number in some records, a text in others"
            raise BadInput(f"data.extra: {name}: {both}")
    return Loaded(examples, cuts, tuple(ignored), tuple(renamed))


def _load(source: str, tokenizer: Tokenizer, kind: str, limits: Data) -> Loaded:
    """Of one source, from the cache if it is there."""
    file = cache.cache_file(source, tokenizer, kind, limits)
    if file and (kept := cache.read_cached(file)):
        texts, cuts, *fields = json.loads(kept["text"].tobytes())
        texts = [(source + place, *map(tuple, extra)) for place, *extra in texts]
        examples = Examples(kept["tokens"], kept["rows"], texts)
        return Loaded(examples, Counter(cuts), *map(tuple, fields))
    e, *rest = loaded = _tokenised(source, tokenizer, kind, limits)
    if file:
        texts = [(place[len(source) :], *extra) for place, *extra in e.texts]
        text = np.frombuffer(json.dumps([texts, *rest]).encode(), np.uint8)
        cache.write_cached(file, dict(tokens=e.tokens, rows=e.rows, text=text))
    return loaded


def _tokenised(source: str, tokenizer: Tokenizer, kind: str, limits: Data) -> Loaded:
    """Of one source, some records at a time: texts take more room than token ids."""
    faults, waiting, made, cuts, ignored, renamed = [], [], [], Counter(), {}, {}
    names, extra, every = column_names(limits), limits.extra_fields, limits.score_turns == "all"
    for where, raw in read_records(source, extra, names):
        try:
            record = understand_record(raw, kind, extra, names)
            for one in _turns(record) if every else (record,):
                waiting.append((where, one, *_rendered(one, tokenizer, limits)))
        except (Fault, RecursionError) as e:
            faults.append(" ".join(f"{where}: {e}".splitlines()))
            if len(faults) == 20 or isinstance(e, Endless):
                break
            continue
        ignored |= dict.fromkeys(record.ignored)
        renamed |= {name: None for name in names if name in raw}
        if len(waiting) >= ENCODE_TEXTS and not faults:
            made.append(_encoded(waiting, tokenizer, kind, limits, cuts))
            waiting = []
    if faults:
        raise BadInput("\n".join(faults))
    if waiting:
        made.append(_encoded(waiting, tokenizer, kind, limits, cuts))
    if not made:
        raise BadInput(f"{source}: no records")
    return Loaded(Examples.joined(made), cuts, tuple(ignored), tuple(renamed))


def column_names(limits: Data) -> dict[str, str]:
    """`prompt=question,label=good` -> {the source's name: ours}."""
    given = [pair.split("=") for pair in (limits.columns or "").split(",") if limits.columns]
    pairs = [[name.strip() for name in pair] for pair in given]
    if not all(len(pair) == 2 and all(pair) for pair in pairs):
        raise BadInput(f"data.columns: expected ours=theirs, by commas; got {limits.columns}")
    return {theirs: ours for ours, theirs in pairs}


def _turns(record: Record) -> list[Record]:
    """One for each of the assistant's turns that are the completion's. Raises Fault."""
    own = range(record.scored or 0, len(record.prompt) if record.scored is not None else 0)
    own = [i for i in own if record.prompt[i]["role"] == "assistant"]
    if own and (own[0] == 0 or len(record.completions) == 2):
        raise Fault("record: data.score_turns all: a pair, or a first turn without a prompt")
    cut = (dict(prompt=record.prompt[:i], completions=[record.prompt[i]]) for i in own)
    return [*(record._replace(**x) for x in cut), record]


def _encoded(rows: list[tuple], tokenizer: Tokenizer, kind: str, limits: Data, cuts) -> Examples:
    """Of (where, record, prompt, completions, chat)."""
    encoded, made = tokenizer.encode_all([row[2:4] for row in rows]), []
    for (where, record, _, _, chat), (prompt, completions) in zip(rows, encoded):
        # a template writes what it wants of BOS and EOS
        prompt = prompt if chat else tokenizer.prompt(prompt)
        prompt = _cut_prompt(prompt, tokenizer.bos, limits.max_prompt, cuts)
        end = [] if chat else [tokenizer.eos]
        completions = tuple(
            _cut_completion([*ids, *end], limits.max_completion, cuts) for ids in completions
        )
        if not len(prompt) or not all(map(len, completions)):  # a normaliser may leave nothing
            what = "completion" if len(prompt) else "prompt"
            raise BadInput(f"{where}: {what}: not empty, but no tokens are left of it")
        rest = (record.rewards, where, record.weight, record.extra)
        if record.label is None and kind == "rated":  # a pair is two ratings that share a prompt
            rest = ((None, None), *rest[1:])
            made += [Example(prompt, (c,), i == 0, *rest) for i, c in enumerate(completions)]
        else:
            made.append(Example(prompt, completions, record.label is not False, *rest))
    return Examples.of(made)


def _rendered(record: Record, tokenizer: Tokenizer, limits: Data) -> tuple[str, list[str], bool]:
    """A record's texts, no longer than their limits can need, and whether a template made them.
    Raises Fault."""
    prompt, completions, chat = tokenizer.render(record)
    if not prompt and (chat or not tokenizer.adds_bos):
        raise Fault(
            "prompt: empty, and this tokenizer adds no BOS: nothing would predict the first token"
        )
    try:
        "".join((prompt, *completions)).encode()
    except UnicodeEncodeError:
        raise Fault("record: half of a surrogate pair (\\ud800-\\udfff) is no text") from None
    if chat and not all(completions):
        raise Fault("completion: the chat template renders it as nothing")
    if (n := tokenizer.enough(prompt, limits.max_prompt)) < len(prompt):
        bos = tokenizer.special_text("bos_token") or ""
        prompt = bos * prompt.startswith(bos) + prompt[-n:]
    longest = limits.max_completion
    return prompt, [text[: tokenizer.enough(text, longest)] for text in completions], chat


def _cut_prompt(ids: list[int], bos: int | None, longest: int, cuts: Counter) -> np.ndarray:
    """The head goes; BOS stays, the tokenizer's own or one that the template wrote."""
    if len(ids) > longest:
        cuts["prompts cut"] += 1
        keep_bos = ids[0] == bos and longest > 1
        ids = [bos, *ids[1 - longest :]] if keep_bos else ids[-longest:]
    return np.array(ids, dtype=np.int32)


def _cut_completion(ids: list[int], longest: int, cuts: Counter) -> np.ndarray:
    cuts["completions cut"] += len(ids) > longest
    return np.array(ids[:longest], dtype=np.int32)


def split_by_prompt(examples: Sequence[Example], parts: str) -> list[Examples]:
    """Into train, val, test by a hash of the prompt: order and other prompts do not matter, and
    ratings of one prompt stay together."""
    try:
        sizes = [float(p) for p in parts.split(",")]
    except ValueError:
        sizes = []
    possible = len(sizes) in (2, 3) and min(sizes) >= 0 and sizes[0] > 0
    if not possible or not math.isfinite(sum(sizes)):
        raise BadInput(f"data.split: expected two or three parts like 980,10,10; got {parts}")
    examples, edges = Examples.of(examples), np.cumsum(sizes) / sum(sizes)
    digests = (hashlib.sha256(x).digest()[:8] for x in examples.ids(0))
    u = [int.from_bytes(digest, "big") / 2**64 for digest in digests]
    part = np.searchsorted(edges, u, side="right")
    return [examples[part == i] for i in range(3)]


def _numbered(keys: Iterator[bytes]) -> np.ndarray:
    """Equal ones have equal numbers."""
    seen: dict[bytes, int] = {}
    return np.array([seen.setdefault(key, len(seen)) for key in keys])


def describe_examples(
    name: str, examples: Sequence[Example], cuts: Counter, ignored: tuple = ()
) -> str:
    """What is about to be learned from, for a person to read before it starts."""
    examples = Examples.of(examples)
    n, k, length = len(examples), examples.n_ids - 1, examples.rows["length"]
    if k == 0:
        return f"{name}: {n:,} prompts, longest {length.max()} tokens"
    label = examples.rows["label"]
    good = int(label.sum())
    prompt, first, *second = (_numbered(examples.ids(i)) for i in range(k + 1))
    n_prompts = prompt.max() + 1
    lines = [f"{name}: {n:,} {'pairs' if k == 2 else 'examples'} of {n_prompts:,} prompts"]
    if k == 1:
        lines[0] += f", {good:,} desirable, {n - good:,} undesirable"
    for what, lengths in (("prompt", length[:, 0]), ("completion", length[:, 1:])):
        median, high, most = np.percentile(lengths, [50, 95, 100]).astype(int)
        lines.append(f"  {what} tokens: median {median}, 95% below {high}, longest {most}")
    answered = prompt * n + first
    for other in second:
        answered = np.unique(answered, return_inverse=True)[1] * n + other
    both = np.sort(answered), np.sort(answered * 2 + label)
    said, rated = (1 + np.count_nonzero(np.diff(x)) for x in both)
    counts = {"duplicates": n - rated, "contradictions": rated - said, **cuts}
    lines.append("  " + ", ".join(f"{v:,} {what}" for what, v in counts.items()))
    if ignored:
        lines.append(f"  fields that nothing reads: {', '.join(ignored)} (see data.extra)")
    if k == 1 and 0 < good < n:
        ratio = (n - good) / good  # eq. 8: w_D n_D / (w_U n_U) in [1, 4/3]; the smaller weight is 1
        advice = f"desirable {max(1, ratio):.2f} to {4 / 3 * ratio:.2f}, undesirable 1"
        if ratio < 3 / 4:
            advice = f"desirable 1, undesirable {3 / 4 / ratio:.2f} to {1 / ratio:.2f}"
        lines.append(f"  the paper's rule weighs this balance: {advice}")
    return "\n".join(lines)


def load_splits(d: Data, tokenizer: Tokenizer, kind: str, val_kind: str, say) -> dict:
    """{"train", "val", "test": examples}, with a table of what each holds. `val_kind` is that of
    val and test; `d` has its limits filled in."""
    parts, loaded = {"train": [], "val": [], "test": []}, {}
    for name in parts:
        if source := getattr(d, name):
            asked = kind if name == "train" else val_kind
            loaded[name] = load_examples(source, tokenizer, asked, d)
            parts[name] = loaded[name].examples
    met = {name for one in loaded.values() for name in one.renamed}
    for name in column_names(d) if kind != "prompts" else ():  # whose ratings may lie elsewhere
        if name not in met:
            raise BadInput(f"data.columns: {name}: no record has such a field")
    if d.split:
        if d.val or d.test:
            raise BadInput(
                "data.split: it cuts data.train in parts; give it, or data.val and data.test, not both"
            )
        parts = dict(zip(parts, split_by_prompt(parts["train"], d.split)))
    for name, examples in parts.items():
        if examples:
            one = loaded.get(name) or Loaded([], Counter())
            say(describe_examples(name, examples, one.cuts, one.ignored))
    # a whole one of val or test is one batch, which asks often for its examples
    return {name: x if name == "train" else list(x) for name, x in parts.items()}


def examples_hash(parts: dict[str, Sequence[Example]]) -> str:
    """A hash of all examples as token ids, labels, weights and rewards, in their order."""
    h = hashlib.sha256()
    for name, e in ((name, Examples.of(some)) for name, some in parts.items() if some):
        extra = [e.texts[i][1:] for i in e.rows["text"].tolist()]
        h.update(f"{name} {len(e)} {extra}".encode())
        for column in ("length", "label", "weight", "rewards"):
            h.update(e.rows[column].tobytes())
        for k in range(e.n_ids):
            h.update(b"".join(e.ids(k)))
    return h.hexdigest()

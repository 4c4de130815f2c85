"""A source's records to examples of token ids: cut to the limits, split, described in a table."""

import dataclasses
import gc
import hashlib
import json
import math
from collections import Counter
from typing import NamedTuple

import numpy as np

from support import cache
from support.errors import BadInput
from support.records import Fault, Record, read, sources, understand
from support.settings import Data
from support.tokenizer import ENCODE_TEXTS, Endless, Tokenizer


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


class Loaded(NamedTuple):
    """A source's examples, counts of what was cut, and the record fields that nothing reads."""

    examples: list[Example]
    cuts: Counter
    ignored: tuple[str, ...]


def load(source: str, tokenizer: Tokenizer, kind: str, limits: Data) -> Loaded:
    """All examples of one or more sources. `kind`: rated (a pair becomes two), paired,
    demonstrations, prompts (distinct ones, whatever else their records hold).

    Raises BadInput with a line for each of the first 20 bad records; a label is never guessed.
    """
    mix, cuts, ignored = [], Counter(), {}
    for files, weight in sources(source):
        mix.append(([], weight))
        for file in files:
            one = _load(file, tokenizer, kind, limits)
            mix[-1][0].extend(one.examples)
            cuts.update(one.cuts)
            ignored |= dict.fromkeys(one.ignored)
    # weights are shares of the longest mix that repeats nothing, taken evenly over each source
    shortest = min(len(found) / (weight or 1) for found, weight in mix)
    examples = []
    for found, weight in mix:
        n = round(weight * shortest) if weight else len(found)
        examples += found if n == len(found) else [found[i * len(found) // n] for i in range(n)]
    if kind == "prompts":
        first: dict[bytes, Example] = {}
        for e in examples:
            first.setdefault(e.prompt.tobytes(), e)
        examples = list(first.values())
    return Loaded(examples, cuts, tuple(ignored))


def _load(source: str, tokenizer: Tokenizer, kind: str, limits: Data) -> Loaded:
    """Of one source, from the cache if it is there."""
    file = cache.file_for(source, tokenizer, kind, limits)
    if file and (arrays := cache.read(file)):
        return _from_arrays(source, **arrays)
    loaded = _tokenised(source, tokenizer, kind, limits)
    if file:
        cache.write(file, _to_arrays(source, loaded))
    return loaded


def _to_arrays(source: str, loaded: Loaded) -> dict[str, np.ndarray]:
    label, rewards, where, *rest = zip(*(e[2:] for e in loaded.examples))
    columns = label, rewards, [x[len(source) :] for x in where], *rest
    ids = [(e.prompt, *e.completions) for e in loaded.examples]
    return dict(
        tokens=np.concatenate([x for row in ids for x in row]),
        lengths=np.array([[len(x) for x in row] for row in ids]),
        text=np.frombuffer(json.dumps([columns, *loaded[1:]]).encode(), np.uint8),
    )


def _from_arrays(source: str, tokens, lengths, text) -> Loaded:
    ends = lengths.cumsum()
    bounds = zip((ends - lengths.ravel()).tolist(), ends.tolist())
    parts = zip(*[(tokens[a:b] for a, b in bounds)] * lengths.shape[1])  # views of one array
    columns, cuts, ignored = json.loads(text.tobytes())
    examples = [
        Example(row[0], row[1:], label, tuple(rewards), source + where, *rest)
        for row, label, rewards, where, *rest in zip(parts, *columns)
    ]
    return Loaded(examples, Counter(cuts), tuple(ignored))


def _tokenised(source: str, tokenizer: Tokenizer, kind: str, limits: Data) -> Loaded:
    """Of one source, some records at a time: texts take more room than token ids."""
    faults, waiting, made, ignored = [], [], Loaded([], Counter(), ()), {}
    names, extra, every = columns(limits), limits.extra_fields, limits.score_turns == "all"
    for where, raw in read(source, extra, names):
        try:
            record = understand(raw, kind, extra, names)
            for one in _turns(record) if every else (record,):
                waiting.append((where, one, *_rendered(one, tokenizer, limits)))
        except (Fault, RecursionError) as e:
            faults.append(" ".join(f"{where}: {e}".splitlines()))
            if len(faults) == 20 or isinstance(e, Endless):
                break
            continue
        ignored |= dict.fromkeys(record.ignored)
        if len(waiting) >= ENCODE_TEXTS and not faults:
            _encode(waiting, tokenizer, kind, limits, made)
            waiting = []
    if faults:
        raise BadInput("\n".join(faults))
    _encode(waiting, tokenizer, kind, limits, made)
    if not made.examples:
        raise BadInput(f"{source}: no records")
    return made._replace(ignored=tuple(ignored))


def columns(limits: Data) -> dict[str, str]:
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


def _encode(rows: list[tuple], tokenizer: Tokenizer, kind: str, limits: Data, made: Loaded):
    """(where, record, prompt, completions, chat) as examples at the end of `made`."""
    encoded = tokenizer.encode_all([(prompt, texts) for _, _, prompt, texts, _ in rows])
    for (where, record, _, _, chat), (prompt, completions) in zip(rows, encoded):
        # a template writes what it wants of BOS and EOS
        prompt = prompt if chat else tokenizer.prompt(prompt)
        prompt = _cut_prompt(prompt, tokenizer.bos, limits.max_prompt, made.cuts)
        end = [] if chat else [tokenizer.eos]
        completions = tuple(
            _cut_completion([*ids, *end], limits.max_completion, made.cuts) for ids in completions
        )
        if not len(prompt) or not all(map(len, completions)):  # a normaliser may leave nothing
            what = "completion" if len(prompt) else "prompt"
            raise BadInput(f"{where}: {what}: not empty, but no tokens are left of it")
        rest = (record.rewards, where, record.weight, record.extra)
        if record.label is None and kind == "rated":  # a pair is two ratings that share a prompt
            rest = ((None, None), *rest[1:])
            two = [Example(prompt, (c,), i == 0, *rest) for i, c in enumerate(completions)]
            made.examples.extend(two)
        else:
            good = record.label is not False
            made.examples.append(Example(prompt, completions, good, *rest))


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
        bos = tokenizer.text("bos_token") or ""
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


def split(examples: list[Example], parts: str) -> list[list[Example]]:
    """Into train, val, test by a hash of the prompt: order and other prompts do not matter, and
    ratings of one prompt stay together."""
    try:
        sizes = [float(p) for p in parts.split(",")]
    except ValueError:
        sizes = []
    possible = len(sizes) in (2, 3) and min(sizes) >= 0 and sizes[0] > 0
    if not possible or not math.isfinite(sum(sizes)):
        raise BadInput(f"data.split: expected two or three parts like 980,10,10; got {parts}")
    edges, out = np.cumsum(sizes) / sum(sizes), [[], [], []]
    for e in examples:
        digest = hashlib.sha256(e.prompt.tobytes()).digest()
        u = int.from_bytes(digest[:8], "big") / 2**64
        out[int(np.searchsorted(edges, u, side="right"))].append(e)
    return out


def _numbered(arrays) -> np.ndarray:
    """Equal ones have equal numbers."""
    seen: dict[bytes, int] = {}
    return np.array([seen.setdefault(x.tobytes(), len(seen)) for x in arrays])


def table(name: str, examples: list[Example], cuts: Counter, ignored: tuple = ()) -> str:
    """What is about to be learned from, for a person to read before it starts."""
    n, k = len(examples), len(examples[0].completions)
    if k == 0:
        return f"{name}: {n:,} prompts, longest {max(len(e.prompt) for e in examples)} tokens"
    good = sum(e.label for e in examples)
    prompt = _numbered(e.prompt for e in examples)
    n_prompts = prompt.max() + 1
    lines = [f"{name}: {n:,} {'pairs' if k == 2 else 'examples'} of {n_prompts:,} prompts"]
    if k == 1:
        lines[0] += f", {good:,} desirable, {n - good:,} undesirable"
    prompts = [len(e.prompt) for e in examples]
    completions = [len(c) for e in examples for c in e.completions]
    for what, lengths in (("prompt", prompts), ("completion", completions)):
        median, high, most = np.percentile(lengths, [50, 95, 100]).astype(int)
        lines.append(f"  {what} tokens: median {median}, 95% below {high}, longest {most}")
    first, *more = (_numbered(e.completions[i] for e in examples) for i in range(k))
    pair = np.unique(prompt * n + first, return_inverse=True)[1]
    rated = pair * 2 + [e.label for e in examples]
    distinct, ratings = (set(x.tolist()) for x in (sum(more) + rated * n, rated))
    contradictions = len(ratings) - len({r // 2 for r in ratings})
    counts = {"duplicates": n - len(distinct), "contradictions": contradictions, **cuts}
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


def with_limits(d: Data, context: int) -> Data:
    """max_prompt and max_completion filled in, so that both fit the model's context."""
    if d.score_turns not in ("last", "all"):
        raise BadInput(f"data.score_turns: expected last or all, got {d.score_turns}")
    longest = d.max_prompt or max(1, min(1024, context // 2, context - (d.max_completion or 1)))
    answer = d.max_completion or min(1024, context - longest)
    if longest + answer > context or answer < 1:
        both = f"max_prompt {longest} + max_completion {answer}"
        raise BadInput(f"data: {both} exceed the context of {context}")
    return dataclasses.replace(d, max_prompt=longest, max_completion=answer)


def splits(d: Data, tokenizer: Tokenizer, kind: str, val_kind: str, say) -> dict:
    """{"train", "val", "test": examples}, with a table of what each holds. `val_kind` is that of
    val and test; `d` has its limits filled in."""
    parts, loaded = {"train": [], "val": [], "test": []}, {}
    gc.disable()  # millions of small objects without a cycle: looking for one is a third of the time
    try:
        for name in parts:
            if source := getattr(d, name):
                asked = kind if name == "train" else val_kind
                loaded[name] = load(source, tokenizer, asked, d)
                parts[name] = loaded[name].examples
    finally:
        gc.enable()
    if d.split:
        if d.val or d.test:
            raise BadInput(
                "data.split: it cuts data.train in parts; give it, or data.val and data.test, not both"
            )
        parts = dict(zip(parts, split(parts["train"], d.split)))
    for name, examples in parts.items():
        if examples:
            one = loaded.get(name) or Loaded([], Counter(), ())
            say(table(name, examples, one.cuts, one.ignored))
    return parts


def fingerprint(parts: dict[str, list[Example]]) -> str:
    """A hash of all examples as token ids, labels, weights and rewards, in their order."""
    h = hashlib.sha256()
    for name, examples in parts.items():
        for at in range(0, len(examples), 65536):
            some = examples[at : at + 65536]
            ids = [x for e in some for x in (e.prompt, *e.completions)]
            rest = [(e.label, e.weight, e.rewards, e.extra) for e in some]
            h.update(f"{name} {[len(x) for x in ids]} {rest}".encode())
            h.update(np.concatenate(ids).tobytes())
    return h.hexdigest()

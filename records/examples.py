"""From files of records to a list of examples of token ids, with all steps before training.

Reading order: Example (the result); load_examples and load_file (the whole way of a record); the table before
training; the splits of the data and their tables (load_splits); the hash of the data.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers.decoders import DecodeStream

from infra.console import BadInput, Failed, advance, progress, say, user_code, user_error
from infra.settings import Data, refuse, refuse_unless, split_commas
from records.forms import (
    Kind,
    Record,
    as_answer,
    as_turns,
    content_of,
    fields_of_prompt,
    is_place,
    read_label,
    understand_record,
)
from records.sources import collect, decoded_records, files_of, split_sources
from records.template import LeftOut
from records.tokenizer import Tokenizer


class Example(NamedTuple):
    """A prompt with its completion (rated or demonstrated), its two (chosen, rejected) or none, as
    arrays of int32 token ids."""

    prompt: np.ndarray
    completions: tuple[np.ndarray, ...]
    label: bool  # desirable; True where nothing was rated
    # numbers or None: of chosen and rejected, or of the only completion and None
    rewards: tuple = (None, None)
    where: str = ""  # file:line
    weight: float = 1.0
    extra: dict = {}  # the fields that data.extra names: texts and numbers
    asked: dict = {}  # the fields of the prompt in a file of answers, if the policy is to answer it
    # (L,) 1 or -1 at the tokens of a marked part of the completion, else 0; empty if no part is marked
    token_label: Sequence[int] = ()
    # its number in its split (train, val or test): the same in each epoch and after a resume
    number: int = 0
    conversation: str = ""  # see conversation_of; until the data are split

    @property
    def prompt_key(self) -> bytes:
        """A key that is equal for equal prompts. Computed at each access."""
        return self.prompt.tobytes()

    @property
    def key(self) -> tuple[bytes, ...]:
        """A key that is equal for equal prompts and completions. Computed at each access."""
        return tuple(ids.tobytes() for ids in (self.prompt, *self.completions))


# Counts that more than the table reads; and all that begin with "dropped".
BY_TEMPLATE = "by the chat template"
COMPLETIONS_CUT = "completions cut"
EQUAL_PAIRS = "equal pairs, dropped"
BATCH = 100  # records that are encoded together: an encoding holds some 100 bytes per token besides its ids


# ---- from a file to examples ---------------------------------------------------------------------


def load_examples(
    source: str | None,
    tokenizer: Tokenizer,
    kind: Kind,
    data: Data,
    make_records: Callable | None = None,
) -> tuple[list[Example], Counter]:
    """All examples of the sources (`a.jsonl,more/*.csv`) that data.train or another setting names; and
    counts of cut texts, dropped records, ... make_records: main(make_records=...), from a raw record to ours.

    `kind` is the kind of examples. If it is `rated`, a pair becomes two examples. If it is `prompts`, each distinct
    prompt is one example without completions. `data`: the settings, with
    max_prompt and max_completion filled in (with_limits).

    Raises BadInput with the first 20 bad records of a file. A label is never guessed.
    """
    counts: Counter = Counter()
    examples: list[Example] = []
    for name in split_sources(source):
        before = len(examples)
        for file in files_of(name):
            examples += load_file(file, tokenizer, kind, data, counts, make_records)
        if len(examples) == before:
            raise BadInput(f"{name}: no records; {as_words(counts)}".removesuffix("; "))
    if kind == "prompts":
        examples = distinct_questions(examples)
    return examples, counts


def distinct_questions(examples: list[Example]) -> list[Example]:
    """The first example of each question, in their order. A question is the prompt with the fields that a checker
    reads, such as a solution."""
    firsts: dict[bytes, Example] = {}
    for example in examples:
        fields = repr(sorted(example.extra.items()))
        firsts.setdefault(example.prompt_key + fields.encode(), example)
    return list(firsts.values())


def load_file(
    file: str,
    tokenizer: Tokenizer,
    kind: Kind,
    data: Data,
    counts: Counter,
    make_records: Callable | None = None,
) -> list[Example]:
    """The examples of one file; adds to the counts. Raises BadInput."""
    records = understood_records(file, kind, data, counts, make_records)
    for record in records.values():
        counts.update(what_looks_wrong(record, tokenizer))
    by_template = is_for_template(records, bool(tokenizer.template))
    plain = "plain: the model's chat template is not used" if tokenizer.template else "plain"
    counts[BY_TEMPLATE if by_template else plain] += len(records)
    examples: list[Example] = []
    faults: list[str] = []
    for where, (prompt, completions) in encode_records(
        file, records, tokenizer, by_template, data, counts
    ):
        record = records[where]
        if record.cut and not by_template:  # the template writes no end, the tokenizer did
            completions = [ids[:-1] for ids in completions]
        if record.cut and not all(completions):
            counts["dropped: cut before the first word"] += 1
            continue
        if not prompt or not all(completions):
            raise BadInput(f"{where}: {'completion' if prompt else 'prompt'}: it has no tokens")
        if any(tokenizer.unknown in ids for ids in (prompt, *completions)):
            counts["with letters that the tokenizer does not know"] += 1
        n_first = tokenizer.first_tokens(prompt)
        example = example_of(record, where, prompt, completions, n_first, data, counts)
        if record.spans:
            with collect(faults, where):
                marked = token_label(record, prompt, completions[0], tokenizer)
                example = example._replace(token_label=marked[: data.max_completion])
        if kind in ("prompts", "demonstrations"):  # only these kinds are answered again
            fields = fields_of_prompt(tokenizer.asked(record, by_template))
            example = example._replace(asked=fields)
        if data.split:
            from records.splits import conversation_of

            example = example._replace(conversation=conversation_of(record, by_template))
        examples += learned_from(example, kind, counts)
    refuse(faults)
    return examples


def is_for_template(records: dict[str, Record], has_template: bool) -> bool:
    """Whether the chat template renders the records of a file: all of them if any needs it. Raises BadInput."""
    if has_template:
        return any(record.needs_template or record.instruct for record in records.values())
    for where, record in records.items():
        if record.needs_template:
            raise BadInput(
                f"{where}: messages, system and tools need a chat template, and the model has none: give another "
                "--model, or data.chat_template, such as config/dialogue.jinja"
            )
    return False


def understood_records(
    file: str, kind: Kind, data: Data, counts: Counter, make_records: Callable | None
) -> dict[str, Record]:
    """{place: record} for each record of a file. Raises BadInput."""
    records: dict[str, Record] = {}
    faults: list[str] = []
    extra = split_commas(data.extra)
    with progress(f"{Path(file).name}: records", None):
        for where, raw in decoded_records(file, faults, counts):
            with collect(faults, where):
                for place, record in our_records(where, raw, make_records, counts):
                    with collect(faults, place):
                        records[place] = understand_record(record, kind, extra)
            advance()
    refuse(faults)
    return records


def encode_records(
    file: str,
    records: dict[str, Record],
    tokenizer: Tokenizer,
    by_template: bool,
    data: Data,
    counts: Counter,
) -> Iterator[tuple[str, tuple[list, list]]]:
    """(place, (ids of the prompt, ids of each completion)) of each record. Raises BadInput."""
    faults: list[str] = []
    items = iter(records.items())
    with progress(f"{Path(file).name}: records as tokens", len(records)):
        while some := list(islice(items, BATCH)):
            texts = {}
            for where, record in some:
                with collect(faults, where):
                    try:
                        texts[where] = tokenizer.render(record, by_template, counts)
                    except LeftOut:
                        if data.left_out == "refuse":
                            raise
                        counts["dropped by data.left_out"] += 1
            try:
                encoded = list(tokenizer.encode_all(list(texts.values()), by_template))
            except Exception:
                for where, texts_of_record in texts.items():  # which record was it?
                    with collect(faults, where), user_error("tokenizer"):
                        list(tokenizer.encode_all([texts_of_record], by_template))
                refuse(faults)
                raise
            for item in zip(texts, encoded):
                yield item
                advance()
    refuse(faults)


def example_of(
    record: Record,
    where: str,
    prompt: list[int],
    completions: list[list[int]],
    n_first: int,
    data: Data,
    counts: Counter,
) -> Example:
    """The example of a record and its token ids, without a long prompt's beginning, but with its first n_first tokens,
    and without long completions' ends."""
    begin = n_first + max(0, len(prompt) - data.max_prompt)
    counts["prompts cut"] += begin > n_first
    counts[COMPLETIONS_CUT] += sum(len(ids) > data.max_completion for ids in completions)
    return Example(
        prompt=np.array(prompt[:n_first] + prompt[begin:], np.int32),
        completions=tuple(np.array(ids[: data.max_completion], np.int32) for ids in completions),
        label=record.label is None or record.label,
        rewards=record.rewards,
        where=where,
        weight=record.weight,
        extra=record.extra,
    )


def token_label(
    record: Record, prompt: list[int], completion: list[int], tokenizer: Tokenizer
) -> list[int]:
    """(L,) 1 or -1 for each token that a marked part of the record's completion touches, otherwise 0. If several parts
    touch a token, the last one counts. Raises BadInput."""
    labels = [0] * len(completion)
    with user_error("spans", "expected a list of {start, end, label} of one text"):
        (text,) = map(content_of, record.completions)
        stream = DecodeStream(prompt, skip_special_tokens=False)
        pieces = [stream.step(tokenizer.hf.backend_tokenizer, i) or "" for i in completion]
        lead = "".join(pieces).find(text)  # what the chat template writes before the text
        refuse_unless(lead >= 0, "spans: the tokens of the completion do not spell its text")
        # where each token begins in the text, and where the last token ends
        places = [*accumulate(map(len, pieces), initial=-lead)]
        for span in record.spans:
            start = span["start"]
            end = span["end"]
            refuse_unless(
                0 <= start < end <= len(text),
                f"spans: the text has {len(text)} characters, and no part from {start} to {end}",
            )
            label = 1 if read_label(dict(span)) else -1
            for i, (begin, after) in enumerate(pairwise(places)):
                # a token without a piece is a part of the next character
                if begin < end and max(after, begin + 1) > start:
                    labels[i] = label
    return labels


def our_records(
    where: str, raw: object, make_records: Callable | None, counts: Counter
) -> Iterator[tuple[str, object]]:
    """(place, record) of the record at `where`; several or none if a fork's main(make_records=...) makes them. The
    place also names the source of a record of `python -m convert`. Raises BadInput."""
    records = [raw]
    if make_records:
        try:
            with user_code("main(make_records=...)"):
                records = make_records(raw) or []
        except Failed as e:  # an error about this record
            raise BadInput(str(e)) from e
        counts["dropped by main(make_records=...)"] += not records
    for i, record in enumerate(records, 1):
        place = where if i == 1 else f"{where}:{i}"
        source = record.get("source") if isinstance(record, dict) else None
        if is_place(source):
            place = f"{place} (from {source})"
        yield place, record


def learned_from(example: Example, kind: Kind, counts: Counter) -> list[Example]:
    """The example; of a pair two ratings for kto.py, and nothing if its answers are equal."""
    if len(example.completions) < 2:
        return [example]
    if np.array_equal(*example.completions):  # such a preference teaches nothing
        counts[EQUAL_PAIRS] += 1
        return []
    return two_ratings(example) if kind == "rated" else [example]


def two_ratings(pair: Example) -> list[Example]:
    """The ratings that a pair makes: of its chosen completion, and of its rejected one."""
    ratings = []
    for i, label in enumerate((True, False)):
        rating = pair._replace(
            completions=pair.completions[i : i + 1],
            label=label,
            rewards=(pair.rewards[i], None),
        )
        ratings.append(rating)
    return ratings


# ---- what the table before training points at ----------------------------------------------------


def what_looks_wrong(record: Record, tokenizer: Tokenizer) -> Iterator[str]:
    """Findings that are right in some files and mistakes in others, such as an empty completion. The table counts
    them. A special token in a text of the record is read as this token, not as its letters."""
    for name in record.beside:
        if name != "date":  # a chat template may print it
            yield f"with {name}, which nothing reads"
    if record.spans:
        yield "with marked parts, which batch.token_label tells a loss"
    if record.cut:
        yield "with a cut answer, which gets no end"
    answers = [as_answer(completion) for completion in record.completions]
    texts = [turn["content"] or "" for turn in (*answers, *as_turns(record.prompt))]
    pairs = zip(answers, texts)
    if any(not text.strip() and not answer.get("tool_calls") for answer, text in pairs):
        yield "with an empty completion"
    if any("\r" in text for text in texts):
        yield "with line ends of Windows in a text"
    for sign in tokenizer.special_tokens:
        if any(sign in text for text in texts):
            yield f"with {sign!r} in a text"


# ---- the splits of the data ----------------------------------------------------------------------


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
    """{"train", "val", "test": examples}, each described in a table. A split that the settings do not
    name is empty. `data` as in load_examples. Raises BadInput."""
    splits = {}
    counts = {}
    for name, source in {"train": data.train, "val": data.val, "test": data.test}.items():
        splits[name], counts[name] = load_examples(source, tokenizer, kind, data, make_records)
    if any(count[BY_TEMPLATE] for count in counts.values()):
        tokenizer.end_as_the_template_does()
        tokenizer.say_what_leads_an_answer()
    if data.split:
        from records.splits import split_by_conversation

        refuse_unless(
            not data.val and not data.test,
            "data.split: it cuts data.train; give it, or data.val and data.test",
        )
        splits = dict(zip(splits, split_by_conversation(splits["train"], data.split)))
    for name in ("val", "test"):
        if splits[name]:
            count_known(splits[name], splits["train"], counts[name])
    for name, examples in splits.items():
        if examples:
            describe(name, examples, kind, counts[name])
        elif data.split:
            say(f"data.split: 0 examples for {name}")
    return {name: numbered(examples) for name, examples in splits.items()}


def count_known(held_out: list[Example], train: list[Example], counts: Counter) -> None:
    """Count the held-out examples that are also in training, and those with a prompt that is in training."""
    keys = {hash(example.key) for example in train}
    prompt_keys = {hash(example.prompt_key) for example in train}
    for example in held_out:
        if hash(example.key) in keys:
            counts["which are in data.train, too"] += 1
        elif hash(example.prompt_key) in prompt_keys:
            counts["whose prompt is in data.train, with other answers"] += 1


def numbered(examples: list[Example]) -> list[Example]:
    """The same examples, each with its number in this list."""
    return [example._replace(number=i, conversation="") for i, example in enumerate(examples)]


def describe(name: str, examples: list[Example], kind: Kind, counts: Counter) -> None:
    """Print a table of the training data, for a person to check before training starts."""
    n_prompts = len({e.prompt_key for e in examples})
    line = f"{name}: {len(examples):,} examples of {n_prompts:,} prompts"
    up = down = 0
    if kind == "rated":
        up = sum(e.label for e in examples)
        down = len(examples) - up
        line += f", {up:,} desirable, {down:,} undesirable"
    say(line)
    completions: list[np.ndarray] = []
    for e in examples:
        completions += e.completions
    all_lengths = {
        "prompt": [len(e.prompt) for e in examples],
        "completion": [len(ids) for ids in completions],
    }
    for what, lengths in all_lengths.items():
        if lengths:
            # lengths that occur, not numbers between two of them
            shares = [50, 95, 100]
            median, most, longest = np.percentile(lengths, shares, method="inverted_cdf")
            say(f"  {what} tokens: median {median}, 95% at most {most}, longest {longest}")
    # duplicates repeat prompt, completions and label; contradictions repeat all but the label
    n_distinct = len({e.key for e in examples})
    n_distinct_with_label = len({(e.key, e.label) for e in examples})
    numbers = {
        "duplicates": len(examples) - n_distinct_with_label,
        "contradictions": n_distinct_with_label - n_distinct,
        **counts,
    }
    say("  " + as_words(numbers))
    if name == "train" and up and down:
        weight_up, weight_down = class_weights(examples)
        say(
            f"  --kto.balance true sets kto.desirable_weight to {weight_up:.3g} and kto.undesirable_weight to "
            f"{weight_down:.3g}"
        )
    elif name == "train" and (up or down):
        say(f"  no thumbs {'down' if up else 'up'}: KTO is made for both")


def as_words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n:,} {what}" for what, n in counts.items())


def class_weights(examples: list[Example]) -> tuple[float, float]:
    """Weights of a thumbs up and of a thumbs down. They make both kinds count equally and keep the mean weight.
    (1, 1) if there is only one kind. arXiv 2402.01306, eq. 8, advises w_D n_D / (w_U n_U) from 1 to 4/3; this
    is 1. If the weights are equal and most thumbs are down, a run mostly unlearns, and EOS first."""
    up = sum(e.weight for e in examples if e.label)
    down = sum(e.weight for e in examples if not e.label)
    if not (up and down):
        return 1.0, 1.0
    half = (up + down) / 2
    return half / up, half / down


def examples_hash(splits: dict[str, list[Example]]) -> str:
    """A hash of all that is learned from, in its order; the names of the files are no part of it."""
    h = hashlib.sha256()
    for name, examples in splits.items():
        for e in examples:
            content = name, e.key, e.label, e.rewards, e.weight, e.extra, *e.token_label
            h.update(repr(content).encode())
    return h.hexdigest()

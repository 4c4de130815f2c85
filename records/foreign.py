"""A record from elsewhere, such as another tool's export, becomes none, one or several of ours, by what the settings
(config/data/*.yaml) say.

Exports of tools and published data sets come in four shapes: a record is one rated answer; it is a
conversation whose messages carry ratings, or with a pointer to the rated message; it has two answers and
a verdict; it has a list of answers with ratings. A Reader passes the records of a file through these files:

layout.py        what the settings say: where things lie (data.columns), what ratings mean (data.labels)
conversation.py  the ratings in a conversation
answers.py       those of one, two or several answers
dialogues.py     what both ask for messages, and for texts that hold a dialogue

forms.py then reads what comes out like any record of ours.

Reading order: Reader.read, the whole way of a file; the records that are read; one record; what the caller learns
from it; one answer that is rated several times; paths that find nothing.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator

from infra.console import BadInput, Failed, user_code
from infra.settings import Data
from records.answers import (
    Rating,
    best_and_worst,
    good_and_bad_answers,
    one_answer,
    rated_answers,
    two_answers,
)
from records.conversation import rated_messages
from records.forms import ALIASES, PROMPTS, Kind
from records.layout import REWARDS, Layout
from records.paths import Column, Skipped, elements, is_there, names_in, nearest, number, opened

# a file may have none of these
OPTIONAL = ("system", "tools", "weight", "role", "content", "children")


class Reader:
    """`read` makes records of ours of foreign ones. One Reader reads all files of data.train (or data.val, ...),
    and counts what it leaves out."""

    def __init__(self, data: Data, kind: Kind, counts: Counter, records: Callable | None = None):
        """records: a fork's function, one raw record -> a list of records. Raises BadInput."""
        self.layout = Layout(data, kind, counts)
        self.counts = counts
        self.make_records = records
        self.inner_records = Column(data.records) if data.records else None
        # all records of a file are one tree of messages; the file:line of each
        self.is_tree = "id" in self.layout.columns and "messages" not in self.layout.columns
        self.tree_places: list[str] = []
        # what is remembered of the records: all ratings of an answer (settle), and a few raw ones, for messages
        self.votes: dict[str, list[tuple[str, object]]] = {}
        self.samples: list[object] = []
        self.n_records = 0

    def read(
        self, records: Iterator[tuple[str, object]], faults: list[str]
    ) -> Iterator[tuple[str, dict]]:
        """(file:line, record of ours) of each (file:line, raw record). What is wrong with a record becomes a
        line in `faults`."""
        for where, record in self._our_records(records, faults):
            if self.votes and isinstance(record, dict):
                yield from self._settled(where, record)
            else:
                yield where, record

    def _our_records(
        self, records: Iterator[tuple[str, object]], faults: list[str]
    ) -> Iterator[tuple[str, dict]]:
        """As `read`, with every rating of an answer that is rated several times."""
        raws = self._raw_records(records, faults)
        if self.is_tree:
            raws = self._one_tree(raws)
        for where, raw in raws:
            self.n_records += 1
            if len(self.samples) < 20:
                self.samples.append(raw)
            try:
                ours = list(self._translate(where, raw))
            except Skipped as e:
                self._leave_out(str(e))
            except BadInput as e:
                faults.append(f"{where}: {e}")
            else:
                yield from ours

    def _leave_out(self, reason: str) -> None:
        """Count what is left out; a reason that begins with `by ` names the setting that says so."""
        colon = "" if reason.startswith("by ") else ":"
        self.counts[f"dropped{colon} {reason}"] += 1

    # ---- the records that are read ---------------------------------------------------------------

    def _raw_records(
        self, records: Iterator[tuple[str, object]], faults: list[str]
    ) -> Iterator[tuple[str, object]]:
        """The records that data.records and a fork's function make of those of a file."""
        for where, raw in records:
            inner = [(where, raw)]
            if self.inner_records:
                inner = self._records_inside(where, raw)
            if self.make_records:
                inner = self._records_of_a_fork(inner, faults)
            yield from inner

    def _records_inside(self, where: str, raw: object) -> list[tuple[str, object]]:
        """The records in the list that data.records leads to."""
        if not self.samples:
            self.samples.append(raw)
        inner = elements(self.inner_records.one(raw), "")
        return [(f"{where}:{i}", record) for i, record in enumerate(inner, 1)]

    def _records_of_a_fork(
        self, records: list[tuple[str, object]], faults: list[str]
    ) -> list[tuple[str, object]]:
        """What main(make_records=...) makes of these."""
        result = []
        for where, raw in records:
            try:
                with user_code("main(make_records=...)"):
                    made = self.make_records(raw) or []
            except (BadInput, Failed) as e:
                faults.append(f"{where}: {e}")
                continue
            if not isinstance(made, list) or not all(isinstance(x, dict) for x in made):
                faults.append(
                    f"{where}: main(make_records=...): expected a list of records, got {made!r:.50}"
                )
                continue
            if not made:
                self._leave_out("by main(make_records=...)")
            for i, record in enumerate(made, 1):
                place = where if i == 1 else f"{where}:{i}"
                result.append((place, record))
        return result

    def _one_tree(self, raws: Iterator[tuple[str, object]]) -> Iterator[tuple[str, object]]:
        """All records of a file as one: each is a message."""
        messages = list(raws)
        if messages:
            self.tree_places = [where for where, _ in messages]
            yield self.tree_places[0], [raw for _, raw in messages]

    # ---- one record ------------------------------------------------------------------------------

    def _translate(self, where: str, raw: object) -> Iterator[tuple[str, dict]]:
        """Our records of a foreign one. Raises Skipped, BadInput."""
        layout = self.layout
        columns = layout.columns
        if isinstance(raw, list) and "id" in columns:
            ratings = rated_messages(layout, where, raw, self.tree_places)
            yield from self._written(where, list(ratings))
            return
        if not isinstance(raw, dict):
            yield where, raw  # forms.py refuses it
            return
        layout.refuse_unwanted(raw, inner=False)
        label = columns.get("label")
        if layout.rates_messages:
            ratings = rated_messages(layout, where, raw, [])
        elif "verdict" in columns:
            ratings = two_answers(layout, where, raw)
        elif label is not None and is_list(columns.get("completion")):
            ratings = rated_answers(layout, where, raw)
        elif is_list(columns.get("chosen")):
            ratings = good_and_bad_answers(layout, where, raw)
        else:
            yield where, one_answer(layout, raw)
            return
        yield from self._written(where, list(ratings))

    # ---- what the caller learns from -------------------------------------------------------------

    def _written(self, where: str, results: list[Rating | str]) -> Iterator[tuple[str, dict]]:
        """Our records of these ratings, as the caller learns from them. A text says why an answer is left out."""
        ratings = []
        for result in results:
            if isinstance(result, str):
                self._leave_out(result)
            elif not is_there(result.completion):
                self._leave_out("with an empty answer")
            else:
                ratings.append(result)
        if self.layout.kind == "paired":
            yield from self._pairs(ratings)
            return
        for i, rating in enumerate(ratings):
            record = {**rating.fields, "completion": rating.completion, "label": rating.label}
            if self.layout.kind == "demonstrations" and not rating.label:
                self._leave_out("down: not to be imitated")
                continue
            if self.layout.kind == "prompts":
                record = rating.fields
            place = rating.where
            # the places of several records of one line must differ
            if i > 0 and place in (where, ratings[i - 1].where):
                place = f"{place}:{i + 1}"
            yield place, record

    def _pairs(self, ratings: list[Rating]) -> Iterator[tuple[str, dict]]:
        """A pair for each prompt: the best answer against the worst one; of two lists, one by one."""
        is_verdict = "verdict" in self.layout.columns
        if is_verdict and len(ratings) == 2 and ratings[0].fields != ratings[1].fields:
            self._leave_out("whose earlier turns differ")
            return
        groups: dict[str, list[Rating]] = {}
        for rating in ratings:
            key = json.dumps(rating.fields, sort_keys=True, default=str)
            groups.setdefault(key, []).append(rating)
        for group in groups.values():
            pairs = best_and_worst(group, self.layout.labels.higher_is_better)
            if not pairs:
                self._leave_out("without a better and a worse answer")
            for i, (best, worst) in enumerate(pairs):
                place = best.where if i == 0 else f"{best.where}:{i + 1}"
                answers = {"chosen": best.completion, "rejected": worst.completion}
                yield place, {**self._rewards(best, worst), **best.fields, **answers}

    def _rewards(self, best: Rating, worst: Rating) -> dict[str, float]:
        """The scores of a pair's answers, for losses that take true rewards (dpo.py's RPO)."""
        labels = self.layout.labels
        values = (number(best.value), number(worst.value))
        if labels.are_cuts and labels.higher_is_better and None not in values:
            return dict(zip(REWARDS, values))
        return {}

    # ---- one answer that is rated several times --------------------------------------------------

    def settle(self, records: Iterator[tuple[str, object]]) -> None:
        """Look through a file before it is read: where one prompt and answer are rated several times, the
        last (first) label counts (data.repeated), or that in which the raters agree (data.raters)."""
        layout = self.layout
        is_by_raters = layout.raters is not None and not layout.has_raters_in_record
        if layout.kind != "rated" or not (layout.repeated or is_by_raters):
            return
        counts = Counter(self.counts)
        n_records = self.n_records
        for where, record in self._our_records(records, []):
            if isinstance(record, dict) and "label" in record:
                votes = self.votes.setdefault(rating_key(record), [])
                votes.append((where, record["label"]))
        # `read` counts the same records again
        self.counts.clear()
        self.counts.update(counts)
        self.n_records = n_records

    def _settled(self, where: str, record: dict) -> Iterator[tuple[str, dict]]:
        """The record, unless another one of the same prompt and answer counts."""
        votes = self.votes.get(rating_key(record), [])
        if not votes:
            yield where, record
            return
        if self.layout.repeated:
            place, label = votes[-1 if self.layout.repeated == "last" else 0]
        else:
            place = votes[0][0]
            try:
                label = self.layout.labels.agreed([label for _, label in votes])
            except Skipped as e:
                self._leave_out(str(e))
                return
        if where != place:
            self._leave_out("rated again")
        elif isinstance(label, str):
            # a rating that says nothing, and withdraws those before it: see with_label
            self._leave_out(label)
        else:
            yield where, {**record, "label": label}

    # ---- paths that find nothing -----------------------------------------------------------------

    def path_that_finds_nothing(self) -> str:
        """A line about a path that found nothing in any record, as one with a typo; empty: all found. Where the
        path may find nothing, this is counted."""
        layout = self.layout
        for name, column in layout.columns.items():
            if column.was_asked and not column.was_found:
                text = f"{name}={column.text}"
                if name not in OPTIONAL and name not in layout.extra:
                    return self._found_nowhere("data.columns", text, column)
                self.counts[f"records without {text}"] = self.n_records
        for column, sign, wanted in layout.where:
            may_be_missing = sign == "!=" or "null" in wanted.split("|")
            if column.was_asked and not column.was_found and not may_be_missing:
                return self._found_nowhere("data.where", column.text, column)
        column = self.inner_records
        if column is not None and column.was_asked and not column.was_found:
            return self._found_nowhere("data.records", column.text, column)
        return ""

    def _found_nowhere(self, setting: str, text: str, column: Column) -> str:
        """The line, with the names that are there and look like the path."""
        samples = self.samples
        if column.inner:
            samples = [x for record in samples for x in self._sample_messages(record)]
        names = [name for sample in samples for name in names_in(sample)]
        near = nearest(column.text.removeprefix("."), names)
        if column.inner:
            near = ", ".join(f".{name}" for name in near.split(", "))
        return f"{setting}: {text}: found in no record; there is {near}"

    def _sample_messages(self, record: object) -> list:
        """The messages of a record, or of a file whose records are messages."""
        messages = record
        if "messages" in self.layout.columns:
            messages = self.layout.columns["messages"].one(record)
        if isinstance(messages, str):
            messages = opened(messages)
        return elements(messages, "")


def is_list(column: Column | None) -> bool:
    """Whether a column is given, and leads to several values in a record."""
    return column is not None and column.is_several


def rating_key(record: dict) -> str:
    """What makes two ratings ratings of one answer: all but the label and what stands beside."""
    names = {*PROMPTS, "completion", "messages", "system"}
    fields = {x: y for x, y in record.items() if ALIASES.get(x, x) in names}
    return json.dumps(fields, sort_keys=True, default=str)

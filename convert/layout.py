"""The settings of a conversion: paths of fields, meanings of values, and settings that exclude each other.

Reading order: Conversion (the options of `python -m convert`); Layout, which the readers of records ask.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from convert.paths import Column
from convert.values import Labels, Skipped, is_there, named, pairs_of, values_of
from infra.console import BadInput
from infra.settings import split_commas
from records.forms import ALIASES, MEDIA, PROMPTS, ROLES

PAIR = ("chosen", "rejected")
# fields of ours that hold an answer, and all that hold texts of a dialogue
ANSWERS = ("completion", "messages", *PAIR)
TEXTS = (*PROMPTS, *ANSWERS)
REWARDS = ("chosen_reward", "rejected_reward")
# fields besides a prompt and its answers, in any form of record
BESIDE = ("system", "tools", "chat_template_kwargs", "date", "cut", "spans", "weight", *REWARDS)
# which columns a column needs
TOGETHER = {
    "verdict": ("a", "b"),
    "rated": ("messages", "label"),
    "id": ("label",),
}


@dataclass(frozen=True)
class Conversion:
    """Which records to convert, and the paths of their fields."""

    file: str
    """Foreign records: what data.train of a run can be. Files by commas or a pattern, a folder, or a Hub id
    (id, id:split or id:config:split)."""
    form: str | None = None
    """A form that is known: a file of convert/forms (openwebui, ...), or a YAML file of your own with these
    settings."""
    out: str | None = None
    """The .jsonl file to write. Without it three records are shown."""
    kind: Literal["rated", "paired", "demonstrations"] = "rated"
    """The kind of records to make: rated (kto.py), paired (dpo.py), demonstrations (spin.py)."""
    columns: str | None = None
    """The paths of our fields, if they have other names: prompt=question,label=data.rating. A field named
    here is read from there alone; weight= names none. Paths, two answers with a verdict, conversations with
    ratings: docs/convert.md."""
    labels: str | None = None
    """The meaning of the label's values, if they are not ours: up=positive,down=negative, or
    up=4|5,down=1|2, or up=>=4,down=<=2; of a verdict a=...,b=...,both=...,neither=... Records with other
    values are dropped and counted."""
    where: str | None = None
    """Which records to take, by their values: type=GENERATION,.unfinished=false (.: inside messages). Also
    != and the forms that labels take, and times: created_at=>=2026-11-24."""
    roles: str | None = None
    """The meaning of the messages' roles, if they are not ours: user=true,assistant=false."""
    turns: str | None = None
    """Texts that hold a dialogue: the marks that begin a turn. user=<|user|>,assistant=<|bot|>."""
    raters: Literal["agree", "majority"] = "agree"
    """If an answer has several ratings: agree drops the answer unless all are equal, majority lets more than half of
    them decide."""
    extra: str | None = None
    """More fields to keep: origin,score."""


class Layout:
    """The parsed settings. All parts of the reader count in `counts` the answers that they drop or change."""

    def __init__(self, settings: Conversion, counts: Counter):
        """Raises BadInput."""
        self.kind = settings.kind
        self.counts = counts
        self.extra = split_commas(settings.extra)
        if "source" in self.extra:
            raise BadInput(
                "--extra: source: the place in the file has this name in our records: --columns origin=source "
                "--extra origin"
            )
        columns = {}
        for name, path in named("--columns", settings.columns).items():
            columns[name] = Column(path)
        self.columns = columns
        self.role = columns.get("role", Column(".role|.from"))
        self.content = columns.get("content", Column(".content|.value|.text"))
        self.labels = Labels(settings.labels, settings.raters, "verdict" in columns)
        self.where = []
        for path, sign, wanted in pairs_of("--where", settings.where):
            self.where.append((Column(path), sign, values_of(wanted)))
        self.roles = dict(ROLES)
        for role, names in named("--roles", settings.roles).items():
            self.roles |= dict.fromkeys(names.lower().split("|"), role)
        marks = named("--turns", settings.turns)
        self.was_marked = False  # whether a text had a mark
        self.marks = {mark.replace("\\n", "\n"): role for role, mark in marks.items()}
        # all records of a file are one tree of messages
        self.is_tree = "id" in columns and "messages" not in columns
        # whether a record is a conversation with ratings of its messages
        has_inner_label = {"messages", "label"} <= columns.keys() and columns["label"].inner
        self.rates_messages = has_inner_label or "rated" in columns or self.is_tree
        self.has_lists = "chosen" in columns and columns["chosen"].is_several
        # a pair, or two answers and a verdict
        self.has_pairs = bool(columns.keys() & set(PAIR)) and not self.has_lists
        self.has_two_answers = self.has_pairs or "verdict" in columns
        self.makes_pairs = self.kind == "paired" or (self.kind == "rated" and self.has_pairs)
        self._refuse()
        if self.has_pairs:  # one of the two may have our name
            self.columns = {name: Column(name) for name in PAIR} | columns
        self._sort_fields()

    def _refuse(self) -> None:
        """Raise BadInput for settings that do not go together."""
        columns = self.columns
        for name in columns:
            for other in TOGETHER.get(name, ()):
                if other not in columns:
                    raise BadInput(f"--columns: {name}: it needs {other}, too")
        if self.marks and not columns.keys() & set(TEXTS):
            raise BadInput("--turns: which fields have the marks? --columns prompt=prompt,...")
        ratings = columns.get("verdict", columns.get("label"))
        # of a field that only has another name, the values may be those of our own labels
        may_be_ours = ratings is None or ("verdict" not in columns and ratings.is_name)
        if not may_be_ours and not self.labels.wanted:
            raise BadInput(
                f"--labels: missing: what do the values of {ratings.text} mean? 0 may be down, no vote or a draw"
            )

    def _sort_fields(self) -> None:
        """Which of a record's own fields stay: all if every column is a plain name, otherwise some of ours. A field
        does not stay if a column reads it, or if a column gives its name to another field."""
        columns = self.columns
        answers = columns.keys() & {*ANSWERS, "verdict"}
        replaced = {*columns, *(ANSWERS if answers else ())}
        self.replaced = {*replaced, *(x for x, name in ALIASES.items() if name in replaced)}
        for column in columns.values():
            self.replaced |= column.names()
        self.replaced -= set(self.extra)
        self.beside = {name: columns[name] for name in (*BESIDE, *self.extra) if name in columns}
        self.keeps_all = all(column.is_name for column in columns.values())
        self.kept = [*BESIDE, *MEDIA, *self.extra]
        if not columns.keys() & {*PROMPTS, "messages", "id"}:  # the record's own prompt counts
            self.kept += [*PROMPTS, "question", "history"]

    def fields_beside(self, raw: dict) -> dict:
        """The fields of a record besides a prompt and its answers, and those that no column replaces."""
        fields = {}
        for name in raw if self.keeps_all else self.kept:
            if name in raw and name not in self.replaced:
                fields[name] = raw[name]
        for name, column in self.beside.items():
            value = column.one(raw)
            if is_there(value):
                fields[name] = value
        return fields

    def refuse_unwanted(self, record: object, inner: bool) -> None:
        """Raises Skipped where --where does not hold. inner: whether this is a message, for paths with a
        leading dot; else a record."""
        for column, sign, wanted in self.where:
            if column.inner == inner:
                value = column.one(record)
                # of several values each must be as it says
                values = value if column.is_several and value else [value]
                for value in values:
                    if wanted.has(value) != (sign == "="):
                        raise Skipped("by --where")

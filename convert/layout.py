"""What the settings of a conversion say: where fields lie, what their values mean, which settings do not go together.

Reading order: Conversion (the options of `python -m convert`); Layout, which the readers of records ask.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from convert.paths import Column, nearest
from convert.values import Labels, Skipped, Values, is_there, named, pairs_of
from infra.console import BadInput
from infra.settings import split_commas
from records.forms import ALIASES, MEDIA, PROMPTS, ROLES

PAIR = ("chosen", "rejected")
# fields of ours that hold an answer, and all that hold texts of a dialogue
ANSWERS = ("completion", "messages", *PAIR)
TEXTS = (*PROMPTS, *ANSWERS)
REWARDS = ("chosen_reward", "rejected_reward")
# fields that stand beside a prompt and its answers, in any form of record
BESIDE = ("system", "tools", "chat_template_kwargs", "weight", "conversation_id", *REWARDS)
# what --columns may give, beside the fields of our own records
FOREIGN = (
    *("a", "b", "verdict", "turn", "prefix"),
    *("rated", "rating_id", "id", "parent", "children", "role", "content"),
)
# which columns a column needs
TOGETHER = {
    "a": ("b", "verdict"),
    "b": ("a", "verdict"),
    "verdict": ("a", "b"),
    "rated": ("messages", "label"),
}
HH = {"\n\nHuman:": "user", "\n\nAssistant:": "assistant"}


@dataclass(frozen=True)
class Conversion:
    """Which records to convert, and where their fields lie."""

    file: str
    """Foreign records: what data.train of a run can be. Files by commas or a pattern, a folder, or a Hub id
    (id, id:split or id:config:split)."""
    form: str | None = None
    """A form that is known: a file of convert/forms (openwebui, ...), or a YAML file of your own with these
    settings."""
    out: str | None = None
    """The .jsonl file to write. Without it three records are shown."""
    kind: Literal["rated", "paired", "demonstrations"] = "rated"
    """What is to be learned from: rated (kto.py), paired (dpo.py), demonstrations (spin.py)."""
    columns: str | None = None
    """Where the records' fields lie if not under our names: prompt=question,label=data.rating. A field named
    here is read from there alone; weight= names none. Paths, two answers with a verdict, conversations with
    ratings: docs/convert.md."""
    labels: str | None = None
    """What the values of the label mean where they are not ours: up=positive,down=negative, or
    up=4|5,down=1|2, or up=>=4,down=<=2; of a verdict a=...,b=...,both=...,neither=... Records with other
    values are dropped and counted."""
    where: str | None = None
    """Which records to take, by their values: type=GENERATION,.unfinished=false (.: inside messages). Also
    != and the forms that labels take, and times: created_at=>=2026-11-24."""
    roles: str | None = None
    """What the roles of messages mean where they are not ours: user=true,assistant=false."""
    records: str | None = None
    """The path of a list inside each record, whose elements are the records: feedback_data."""
    turns: str | None = None
    """Texts that hold a dialogue: hh (\\n\\nHuman: ...\\n\\nAssistant: ...), or the marks that begin a turn:
    user=<|user|>,assistant=<|bot|>."""
    repeated: Literal["last", "first"] | None = None
    """Of several ratings of one answer (logs of clicks) the last one counts, or the first in a file with
    the newest on top; one without a label withdraws them. null: each is a record."""
    raters: Literal["agree", "majority"] | None = None
    """agree: several ratings of one answer count as one if all are equal, and are dropped if not; majority:
    more than half of them decide. null: agree within a record, each record on its own."""
    extra: str | None = None
    """More fields to keep: origin,score."""


class Layout:
    """The settings, read. All parts of the reader count in `counts` what they leave out or read otherwise."""

    def __init__(self, settings: Conversion, counts: Counter):
        """Raises BadInput."""
        self.settings = settings
        self.kind = settings.kind
        self.counts = counts
        self.extra = split_commas(settings.extra)
        columns = named("--columns", settings.columns)
        self.columns = {name: Column(path) for name, path in columns.items()}
        self.role = self.columns.get("role", Column(".role|.from"))
        self.content = self.columns.get("content", Column(".content|.value|.text"))
        self.labels = Labels(settings.labels, settings.raters)
        self.where = []
        for path, sign, wanted in pairs_of("--where", settings.where):
            self.where.append((Column(path), sign, Values(wanted)))
        self.roles = dict(ROLES)
        for role, names in named("--roles", settings.roles).items():
            if role not in ROLES:
                raise BadInput(f"--roles: {role}: no role; there is {', '.join(ROLES)}")
            self.roles |= dict.fromkeys(names.lower().split("|"), role)
        self.marks = HH if settings.turns == "hh" else {}
        if not self.marks:
            for role, mark in named("--turns", settings.turns).items():
                self.marks[mark.replace("\\n", "\n")] = role
        # all records of a file are one tree of messages
        self.is_tree = "id" in self.columns and "messages" not in self.columns
        # whether a record is a conversation with ratings of its messages
        label = self.columns.get("label")
        has_inner_label = "messages" in self.columns and label is not None and label.inner
        self.rates_messages = has_inner_label or "rated" in self.columns or self.is_tree
        self.has_inner_paths = self.rates_messages and not self.is_tree
        self._refuse_columns()
        self._refuse_labels()
        # a pair, or two answers and a verdict
        self.has_pairs = bool(columns.keys() & set(PAIR)) and not self.has_lists("chosen")
        self.has_two_answers = self.has_pairs or "verdict" in columns
        if self.has_pairs:  # one of the two may have our name
            self.columns = {name: Column(name) for name in PAIR} | self.columns
        self._keeps: dict[str, bool] = {}

    def _refuse_columns(self) -> None:
        """Raise BadInput for columns that are unknown, or do not go together."""
        columns = self.columns
        names = [*FOREIGN, *TEXTS, "label", *BESIDE, *ALIASES, *self.extra]
        for name in columns:
            if name not in names:
                raise BadInput(
                    f"--columns: {name}: no field of ours; there is {nearest(name, names)}"
                )
            for other in TOGETHER.get(name, ()):
                if other not in columns:
                    raise BadInput(f"--columns: {name}: it needs {other}, too")
        if self.has_lists("chosen") and "rejected" not in columns:
            raise BadInput("--columns: chosen: a list of answers needs rejected, too")
        if "verdict" in columns and "label" in columns:
            raise BadInput("--columns: label: there is a verdict, too: which rating is meant?")
        if self.is_tree and "label" not in columns:
            raise BadInput("--columns: label: missing: where is the rating?")
        for column, _, _ in self.where:
            if column.inner and not self.has_inner_paths:
                raise BadInput(
                    f"--where: {column.text}: a leading dot stands for messages, and none are rated here; the "
                    f"record's own field is {column.text.removeprefix('.')}"
                )

    def _refuse_labels(self) -> None:
        """Raise BadInput for labels that are missing, or of another kind, or of two kinds."""
        has_verdict = "verdict" in self.columns
        ratings = self.columns.get("label", self.columns.get("verdict"))
        # of a field that only has another name, the values may be those of our own labels
        has_foreign_values = ratings is not None and not ratings.is_name
        if (has_verdict or has_foreign_values) and not self.labels.wanted:
            raise BadInput(
                f"--labels: missing: what do the values of {ratings.text} mean? 0 may be down, no vote or a draw"
            )
        for meaning in self.labels.wanted:
            if isinstance(meaning, bool) == has_verdict:
                raise BadInput(
                    "--labels: with --columns verdict=... a, b, both and neither have values; otherwise up and down"
                )
        has_raters_in_record = ratings is not None and ratings.is_several
        self.is_by_raters = bool(self.settings.raters) and not has_raters_in_record
        if self.settings.repeated and self.is_by_raters:
            raise BadInput(
                "--raters: --repeated is given, too: of several ratings of one answer, does one count, or most "
                "of them?"
            )

    def has_lists(self, name: str) -> bool:
        """Whether a column is given, and leads to several values in a record."""
        return name in self.columns and self.columns[name].is_several

    def fields_beside(self, raw: dict) -> dict:
        """The fields of a record that stand beside a prompt and its answers, and those that no column stands for."""
        fields = {}
        for name, value in raw.items():
            if name not in self._keeps:
                self._keeps[name] = self._is_kept(name)
            if self._keeps[name]:
                fields[name] = value
        for name in (*BESIDE, *self.extra):
            column = self.columns.get(name)
            if column is not None and not column.inner:
                value = column.one(raw)
                if is_there(value):
                    fields[name] = value
        return fields

    def _is_kept(self, name: str) -> bool:
        """Whether a record's own field stays, though no column names it: where all columns are plain names every
        field does, unless it has a name of ours and means something else."""
        columns = self.columns
        if name in self.extra:
            return True
        # the fields that columns are read from
        if any(name in column.names() for column in columns.values()):
            return False
        replaced = set(columns)
        if replaced & {*PAIR, "verdict"}:
            replaced |= {"completion", "messages", "label"}
        if replaced & {"completion", "verdict"}:
            replaced |= set(PAIR)
        our_name = ALIASES.get(name, name)
        if our_name in replaced:
            return False
        if all(column.is_name for column in columns.values()) or name in (*BESIDE, *MEDIA):
            return True
        # no column leads to a prompt: the record's own field is it
        has_prompt = bool(columns.keys() & {*PROMPTS, "messages", "id"})
        return not has_prompt and our_name in (*PROMPTS, "history")

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

"""What the settings say about foreign records: where the fields lie, and what their values mean.

paths.py knows one path and the words of data.labels; a Layout holds all that a run was given. It refuses settings
that do not go together. dialogues.py, answers.py and conversation.py read records by it.

Reading order: the names that data.columns may give; Layout; columns_of, roles_of and turn_marks, each of which reads
one setting.
"""

from collections import Counter

from infra.console import BadInput
from infra.settings import Data, split_commas
from records.forms import ALIASES, MEDIA, PROMPTS, ROLES, Kind
from records.paths import Column, Labels, Skipped, matches, nearest, split_pairs, unique_items

PAIR = ("chosen", "rejected")
RATING = ("completion", "messages", "label")
# what data.columns may give, beside the fields of our own records
FOREIGN = (
    *("a", "b", "verdict", "turn", "prefix"),
    *("rated", "id", "parent", "children", "role", "content"),
)
# fields that stand beside a prompt and its answers, in any form of record
BESIDE = ("system", "tools", "chat_template_kwargs", "weight")
REWARDS = ("chosen_reward", "rejected_reward")
# which columns a column needs
TOGETHER = {
    "a": ("b", "verdict"),
    "b": ("a", "verdict"),
    "verdict": ("a", "b"),
    "rated": ("messages",),
}
# what data.labels may make of a verdict
VERDICTS = {"a", "b", "both", "neither"}
HH = {"\n\nHuman:": "user", "\n\nAssistant:": "assistant"}


class Layout:
    """The settings for foreign records. All parts of the reader count in `counts` what they leave out or read
    otherwise; the table before training prints it."""

    def __init__(self, data: Data, kind: Kind, counts: Counter):
        """kind: what the caller learns from. Raises BadInput."""
        self.kind = kind
        self.counts = counts
        self.extra = split_commas(data.extra)
        self.columns = columns_of(data.columns)
        self.labels = Labels(data.labels, data.raters)
        self.repeated = data.repeated
        self.raters = data.raters
        self.where = []
        for path, sign, wanted in split_pairs("data.where", data.where):
            self.where.append((Column(path), sign, wanted))
        self.roles = ROLES | roles_of(data.roles)
        self.marks = turn_marks(data.turns)
        self._refuse_unknown_names()
        self._refuse_what_does_not_go_together()
        # whether any column is more than another name of a field
        self.is_foreign = not all(column.is_name for column in self.columns.values())
        # the fields that columns are read from
        self.sources: set[str] = set()
        for column in self.columns.values():
            self.sources |= column.names()
        self.replaced = self._replaced_fields()
        self.beside = self._fields_beside()

    def _refuse_unknown_names(self) -> None:
        known = [*FOREIGN, *PROMPTS, *RATING, *PAIR, *BESIDE, *REWARDS, *ALIASES, *self.extra]
        for name in self.columns:
            if name not in known:
                raise BadInput(
                    f"data.columns: {name}: no field of ours; there is {nearest(name, known)}"
                )
        for role in self.roles.values():
            if role not in ROLES:
                raise BadInput(
                    f"data.roles: {role}: no role; there is {nearest(role, list(ROLES))}"
                )

    def _refuse_what_does_not_go_together(self) -> None:
        columns = self.columns
        for name, needed in TOGETHER.items():
            for other in needed:
                if name in columns and other not in columns:
                    raise BadInput(f"data.columns: {name}: it needs {other}, too")
        chosen = columns.get("chosen")
        if chosen is not None and chosen.is_several and "rejected" not in columns:
            raise BadInput("data.columns: chosen: a list of answers needs rejected, too")
        has_verdict = "verdict" in columns
        ratings = self.rating_column
        # of a field that only has another name, the values may be those of our own labels
        has_foreign_values = ratings is not None and (has_verdict or not ratings.is_name)
        if has_foreign_values and not self.labels.wanted:
            raise BadInput(
                f"data.labels: missing: what do the values of {ratings.text} mean? 0 may be down, no vote or a draw"
            )
        if has_verdict and "label" in columns:
            raise BadInput("data.columns: label: there is a verdict, too: which rating is meant?")
        for column, _, _ in self.where:
            if column.inner and not self.rates_messages:
                path = column.text.removeprefix(".")
                raise BadInput(
                    f"data.where: {column.text}: a leading dot stands for messages, and none are rated here; the "
                    f"record's own field is {path}"
                )
        if self.repeated and self.raters and not self.has_raters_in_record:
            raise BadInput(
                "data.raters: data.repeated is given, too: of several ratings of one answer, does one count, or most "
                "of them?"
            )
        names = self.labels.wanted.keys()
        if has_verdict and not names & {"a", "b"}:
            raise BadInput("data.labels: a verdict needs a=..., b=... (and both=..., neither=...)")
        if has_verdict and names - VERDICTS:
            other = ", ".join(sorted(names - VERDICTS))
            raise BadInput(f"data.labels: {other}: a verdict is a, b, both or neither")
        if not has_verdict and names & VERDICTS:
            raise BadInput("data.labels: a, b, both, neither: only with data.columns verdict=...")

    @property
    def rating_column(self) -> Column | None:
        return self.columns.get("label", self.columns.get("verdict"))

    @property
    def has_raters_in_record(self) -> bool:
        """Whether the ratings of several people stand in one record."""
        return self.rating_column is not None and self.rating_column.is_several

    @property
    def rates_messages(self) -> bool:
        """Whether a record is a conversation with ratings of its messages."""
        label = self.columns.get("label")
        has_inner_label = label is not None and label.inner
        return "rated" in self.columns or ("messages" in self.columns and has_inner_label)

    def _replaced_fields(self) -> set[str]:
        """Our fields that a column stands for: where a record has one of this name, it means something else."""
        replaced = set(self.columns)
        if replaced & {*PAIR, "verdict"}:
            replaced |= set(RATING)
        if replaced & {"completion", "verdict"}:
            replaced |= set(PAIR)
        return replaced

    def _fields_beside(self) -> set[str]:
        """The fields that are kept where columns are paths, though no column names them."""
        beside = {*BESIDE, *MEDIA, *self.extra}
        if not self.columns.keys() & {*PROMPTS, "messages", "id"}:
            # no column leads to a prompt: the record's own field is it
            beside |= {*PROMPTS, "history"}
            beside |= {alias for alias, name in ALIASES.items() if name in PROMPTS}
        return beside

    def refuse_unwanted(self, record: object, inner: bool) -> None:
        """Raises Skipped where data.where does not hold. inner: whether this is a message, for paths with a
        leading dot; else a record."""
        for column, sign, wanted in self.where:
            if column.inner == inner:
                found = column.one(record)
                # of several values each must be as it says
                for value in found if column.is_several and found else [found]:
                    if matches(value, wanted) != (sign == "="):
                        raise Skipped("by data.where")


def columns_of(text: str | None) -> dict[str, Column]:
    """{name: Column} of data.columns. Raises BadInput."""
    pairs = split_pairs("data.columns", text)
    paths = unique_items("data.columns", [(name, path) for name, _, path in pairs])
    return {name: Column(path) for name, path in paths.items()}


def roles_of(text: str | None) -> dict[str, str]:
    """{their name of a role: ours} of data.roles (`user=human|customer`). Raises BadInput."""
    names = []
    for role, _, foreign_names in split_pairs("data.roles", text):
        for name in foreign_names.split("|"):
            names.append((name.lower(), role))
    return unique_items("data.roles", names)


def turn_marks(text: str | None) -> dict[str, str]:
    """{mark: role} of data.turns: hh, or `user=...,assistant=...` with a line break as \\n. Raises BadInput."""
    if text is None:
        return {}
    if text == "hh":
        return HH
    marks = {}
    for role, _, mark in split_pairs("data.turns", text):
        if role not in ROLES.values() or not mark:
            raise BadInput(f"data.turns: {text}: expected hh, or user=MARK,assistant=MARK")
        marks[mark.replace("\\n", "\n")] = role
    return marks

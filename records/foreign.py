"""A record from elsewhere becomes none, one or several of ours, by what the settings say.

Exports of tools and published data sets come in four shapes: a record is one rated answer; it is a
conversation whose messages carry ratings, or with a pointer to the rated message; it has two answers and
a verdict; it has a list of answers with ratings. data.columns says where things lie, data.labels what the
ratings mean (paths.py). forms.py then reads what comes out of this file like any record of ours.

Reading order: Rating; Reader.read, the whole way of a file; in it one function for each shape
(_one_answer, _conversation, _two_answers, _answers, _two_lists); messages; dialogues.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from infra.console import BadInput
from infra.settings import Data, split_commas
from records.forms import ALIASES, LABELS, PROMPTS, ROLES, Kind, as_text, as_turns
from records.paths import (
    Column,
    Labels,
    Skipped,
    elements,
    is_there,
    matches,
    names_in,
    nearest,
    number,
    opened,
    split_pairs,
    unique_items,
)

PAIR = ("chosen", "rejected")
RATING = ("completion", "messages", "label")
# what data.columns may give, beside the fields of our own records
FOREIGN = (
    *("a", "b", "verdict", "turn", "prefix"),
    *("rated", "id", "parent", "children", "role", "content"),
)
# fields of ours that hold an answer, and all that hold texts of a dialogue
ANSWERS = ("completion", "messages", *PAIR)
TEXTS = (*PROMPTS, *ANSWERS)
BESIDE = ("system", "tools", "chat_template_kwargs", "weight")
GRADES = ("chosen_reward", "rejected_reward")
# a file may have none of these
OPTIONAL = ("system", "tools", "weight", "role", "content", "children")
# a reasoning that was flattened into the text of an answer (Open WebUI before 0.10)
REASONING = re.compile(r'^\s*<details type="reasoning".*?</details>\s*', re.DOTALL)
LEFT_OUT = re.compile("think|reason|tool")  # parts of a message that are no part of its text
HH = {"\n\nHuman:": "user", "\n\nAssistant:": "assistant"}


# ---- messages ------------------------------------------------------------------------------------


def text_of(content: object) -> str:
    """The text of a message: its parts joined, without reasoning and tools. Raises Skipped for a part that
    is no text, such as an image: the answer was to more than the text."""
    if isinstance(content, str):
        return REASONING.sub("", content)
    if content is None:
        return ""
    texts = []
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = str(part.get("type", "text")) if isinstance(part, dict) else ""
        if LEFT_OUT.search(kind):
            continue
        text = part.get("text") if isinstance(part, dict) else None
        if isinstance(text, dict):
            text = text.get("value")
        if not isinstance(text, str):
            raise Skipped(
                f"with a part of a message that is no text ({kind or type(part).__name__})"
            )
        texts.append(text)
    return "".join(texts)


class Node(NamedTuple):
    """A message of a conversation, and where it stands."""

    id: str
    parent: str | None
    raw: object
    where: str


def is_root(parent: object) -> bool:
    """Whether a message has no parent: some exports write an id of zeros."""
    return not is_there(parent) or bool(re.fullmatch("0{8}[-0]*", str(parent)))


# ---- from a file of foreign records to records of ours -------------------------------------------


class Rating(NamedTuple):
    """A rated answer. `fields`: those of our record that make its prompt."""

    where: str
    fields: dict
    completion: object
    label: bool
    value: object  # as it stands in the record: the best and the worst of a list


class Reader:
    """What the settings say about foreign records; `read` makes ours of them. One Reader reads all files of
    data.train (or data.val, ...), and counts what it leaves out."""

    def __init__(self, data: Data, kind: Kind, counts: Counter, records: Callable | None = None):
        """records: a fork's function, one raw record -> a list of records. Raises BadInput."""
        self.kind = kind
        self.counts = counts
        self.function = records
        self.extra = split_commas(data.extra)
        pairs = split_pairs("data.columns", data.columns)
        self.columns = {
            name: Column(path)
            for name, path in unique_items(
                "data.columns", [(name, path) for name, _, path in pairs]
            ).items()
        }
        self.labels = Labels(data.labels, data.raters)
        self.where = [
            (Column(path), sign, x) for path, sign, x in split_pairs("data.where", data.where)
        ]
        self.inner_records = Column(data.records) if data.records else None
        roles = [
            (x, role)
            for role, _, xs in split_pairs("data.roles", data.roles)
            for x in xs.split("|")
        ]
        self.roles = ROLES | unique_items("data.roles", [(x.lower(), role) for x, role in roles])
        self.marks = turn_marks(data.turns)
        self.repeated = data.repeated
        self.raters = data.raters
        self.votes: dict[str, list[tuple[str, object]]] = {}  # see settle
        self.is_settling = False
        self.samples: list[object] = []  # records to take names from, for messages
        self.n_records = 0
        self.tree_places: list[str] = []
        self.is_foreign = not all(column.is_name for column in self.columns.values())
        self._check(data)
        # the fields that columns are read from, and those that they stand for
        self.sources = {name for column in self.columns.values() for name in column.names()}
        self.replaced = set(self.columns)
        if self.replaced & {*PAIR, "verdict"}:
            self.replaced |= set(RATING)
        if self.replaced & {"completion", "verdict"}:
            self.replaced |= set(PAIR)
        self.kept = {*BESIDE, *self.extra}
        if not self.columns.keys() & {*PROMPTS, "messages", "id"}:
            self.kept |= {*PROMPTS, *(x for x, ours in ALIASES.items() if ours in PROMPTS)}

    def _check(self, data: Data) -> None:
        """Refuse settings that do not go together."""
        columns = self.columns
        known = [*FOREIGN, *PROMPTS, *RATING, *PAIR, *BESIDE, *GRADES, *ALIASES, *self.extra]
        for name in columns:
            if name not in known:
                raise BadInput(
                    f"data.columns: {name}: no field of ours; there is {nearest(name, known)}"
                )
        for role in self.roles.values():
            if role not in ROLES:
                raise BadInput(
                    f"data.roles: {role}: no role; there is {nearest(role, list(ROLES))}"
                )
        for needed, others in {"a": "b verdict", "b": "a verdict", "verdict": "a b"}.items():
            for other in others.split():
                if needed in columns and other not in columns:
                    raise BadInput(f"data.columns: {needed}: it needs {other}, too")
        if "rated" in columns and "messages" not in columns:
            raise BadInput("data.columns: rated: it needs messages, too")
        label = columns.get("label", columns.get("verdict"))
        if label and not self.labels.wanted and ("verdict" in columns or not label.is_name):
            raise BadInput(
                f"data.labels: missing: what do the values of {label.text} mean? 0 may be down, no vote or a draw"
            )
        names = self.labels.wanted.keys()
        if "verdict" in columns and not {"a", "b"} & names:
            raise BadInput("data.labels: a verdict needs a=..., b=... (and both=..., neither=...)")
        if "verdict" not in columns and names & {"a", "b", "both", "neither"}:
            raise BadInput("data.labels: a, b, both, neither: only with data.columns verdict=...")

    def read(
        self, records: Iterator[tuple[str, object]], faults: list[str]
    ) -> Iterator[tuple[str, dict]]:
        """(file:line, record of ours) of each (file:line, raw record). What is wrong with a record becomes a
        line in `faults`."""
        raws = self._raw_records(records, faults)
        if "id" in self.columns and "messages" not in self.columns:
            raws = self._one_tree(raws)
        for where, raw in raws:
            self.n_records += 1
            if len(self.samples) < 20:
                self.samples.append(raw)
            try:
                found = list(self._translate(where, raw))
            except Skipped as e:
                self._leave_out(str(e))
            except BadInput as e:
                faults.append(f"{where}: {e}")
            else:
                yield from found

    def _raw_records(self, records, faults: list[str]) -> Iterator[tuple[str, object]]:
        """The records that data.records and a fork's function make of those of a file."""
        for where, raw in records:
            inner = [(where, raw)]
            if self.inner_records:
                lists = self.inner_records.one(raw)
                inner = [(f"{where}:{i}", x) for i, x in enumerate(elements(lists, ""), 1)]
                self.samples += [raw] if not self.samples else []
            if self.function:
                made = []
                for place, x in inner:
                    ours = self.function(x) or []
                    if not isinstance(ours, list) or not all(isinstance(x, dict) for x in ours):
                        faults.append(
                            f"{place}: main(records=...): expected a list of records, got {ours!r:.50}"
                        )
                        continue
                    made += [
                        (place if i == 0 else f"{place}:{i + 1}", x) for i, x in enumerate(ours)
                    ]
                    if not ours:
                        self._leave_out("by main(records=...)")
                inner = made
            yield from inner

    def _one_tree(self, raws: Iterator[tuple[str, object]]) -> Iterator[tuple[str, object]]:
        """All records of a file as one: each is a message."""
        nodes = list(raws)
        if nodes:
            self.tree_places = [where for where, _ in nodes]
            yield nodes[0][0], [raw for _, raw in nodes]

    def _leave_out(self, reason: str) -> None:
        self.counts[f"dropped {reason}" if reason.startswith("by ") else f"dropped: {reason}"] += 1

    # ---- one record ------------------------------------------------------------------------------

    def _translate(self, where: str, raw: object) -> Iterator[tuple[str, dict]]:
        """Our records of a foreign one. Raises Skipped, BadInput."""
        columns = self.columns
        is_tree = isinstance(raw, list) and "id" in columns
        if not isinstance(raw, dict) and not is_tree:
            yield where, raw  # forms.py refuses it
            return
        if not is_tree:
            self._refuse_unwanted(raw, inner=False)
        if (
            is_tree
            or "rated" in columns
            or "messages" in columns
            and "label" in columns
            and columns["label"].inner
        ):
            ratings = self._conversation(where, raw)
        elif "verdict" in columns:
            ratings = self._two_answers(where, raw)
        elif "label" in columns and "completion" in columns and columns["completion"].is_several:
            ratings = self._answers(where, raw)
        elif "chosen" in columns and columns["chosen"].is_several:
            ratings = self._two_lists(where, raw)
        else:
            yield from self._settle(where, self._one_answer(raw))
            return
        yield from self._written(where, list(ratings))

    def _refuse_unwanted(self, record: object, inner: bool) -> None:
        """Raises Skipped where data.where does not hold; inner: of a message."""
        for column, sign, wanted in self.where:
            if column.inner == inner:
                if matches(column.one(record), wanted) != (sign == "="):
                    raise Skipped("by data.where")

    def _one_answer(self, raw: dict) -> dict:
        """A record that has our own form, but for the names of its fields."""
        columns = self.columns
        if not columns and not self.labels.wanted and not self.marks:
            return with_its_prompt(raw)
        fields = self._beside(raw)
        for name, column in columns.items():
            if name in (*FOREIGN, *BESIDE):
                continue
            value = column.one(raw)
            if column.is_several and name == "label":
                value = value or None
            elif name in TEXTS:
                value = self._turns_or_text(name, value)
                value = alternating(value) if name in PROMPTS else value
            if name in ANSWERS and not is_there(value):
                if self.kind != "prompts":
                    raise Skipped("with an empty answer")
            fields[name] = value
        if self.kind in ("rated", "demonstrations"):
            self._name_label(fields)
        fields = self._with_prefix(raw, with_its_prompt(fields))
        return self._with_turns_of_texts(fields)

    def _name_label(self, fields: dict) -> None:
        """Write the label as data.labels reads it."""
        names = [name for name in fields if ALIASES.get(name, name) == "label"]
        if self.labels.wanted and ("label" in self.columns or names):
            if len(names) > 1:
                raise BadInput("label: given twice")
            values = fields.pop(names[0]) if names else None
            is_list = isinstance(values, list)
            try:
                fields["label"] = LABELS[self.labels.of(values if is_list else [values])]
            except Skipped as e:
                if not self.repeated:
                    raise
                fields["label"] = str(e)
        elif self.labels.wanted and not fields.keys() & {
            *PAIR,
            *(x for x, y in ALIASES.items() if y in PAIR),
        }:
            raise Skipped("not rated")

    def _beside(self, raw: dict) -> dict:
        """The fields of a record that no column names and that are not instead of one: all, where columns
        are plain names; else those that stand beside any form."""
        columns = self.columns
        fields = {}
        for name, value in raw.items():
            ours = ALIASES.get(name, name)
            is_extra = name in self.extra
            is_kept = not self.is_foreign or name in self.kept
            is_replaced = ours in self.replaced or name in self.sources
            if is_extra or is_kept and not is_replaced:
                fields[name] = value
            elif is_kept and name not in self.sources:
                # it has a name of ours and means something else
                self.counts[f"with {name}, which nothing reads"] += 1
        for name in (*BESIDE, *self.extra):
            column = columns.get(name)
            if column and not column.inner and is_there(value := column.one(raw)):
                fields[name] = value
        return fields

    def _prompt_fields(self, raw: dict) -> dict:
        """The fields that make the prompt of all answers of a record."""
        fields = self._beside(raw)
        for name in PROMPTS:
            if name in self.columns:
                value = self._turns_or_text(name, self.columns[name].one(raw))
                if is_there(value):
                    fields[name] = value
        return self._with_prefix(raw, self._with_turns_of_texts(fields))

    def _turns_or_text(self, name: str, value: object) -> object:
        """What the column `name` of a prompt or an answer leads to: a text, or messages in our form."""
        if isinstance(value, str):
            try:
                inner = opened(value)
            except BadInput as e:
                raise BadInput(f"{name}: {e}") from None
            if not (
                is_message(inner)
                or isinstance(inner, list)
                and inner
                and all(map(is_message, inner))
            ):
                return REASONING.sub("", value) if self.is_foreign else value
            value = inner
        messages = value if isinstance(value, list) else [value]
        if all(isinstance(x, str) for x in messages) and messages:
            return messages  # see with_dialogue, alternating
        if all(isinstance(x, dict) for x in messages):
            return [self._message(x) for x in messages]
        return value

    def _message(self, raw: object) -> dict:
        """One message in our form. Raises Skipped, BadInput."""
        content = self._inner("content", raw, ("content", "value", "text"))
        value = self._inner("role", raw, ("role", "from"))
        role = self.roles.get(as_text(value).lower())
        if role is None:
            known = ", ".join(dict.fromkeys(self.roles))
            raise BadInput(f"role: {value!r:.50}: not one of {known} (see data.roles)")
        calls = {}
        if isinstance(raw, dict):
            calls = {x: raw[x] for x in ("tool_calls", "tool_call_id") if is_there(raw.get(x))}
            if role == "tool" and is_there(raw.get("name")):
                calls["name"] = raw["name"]
        if isinstance(content, str) and REASONING.match(content):
            self.counts["messages, whose <details> of reasoning was taken off"] += 1
        text = text_of(content)
        if not text and not calls:
            raise Skipped("with an empty message")
        return {"role": role, "content": text or None, **calls}

    def _inner(self, name: str, raw: object, names: tuple) -> object:
        """The role or the content of a message, by its column or by the usual names."""
        if name in self.columns:
            return self.columns[name].one(raw)
        if not isinstance(raw, dict):
            return None
        return next((raw[x] for x in names if raw.get(x) is not None), None)

    def _with_prefix(self, raw: dict, fields: dict) -> dict:
        """A given beginning of the answer ends the prompt, in the assistant's turn: it is not scored."""
        if "prefix" not in self.columns:
            return fields
        beginning = self.columns["prefix"].one(raw)
        name = next((x for x in PROMPTS if x in fields), "prompt")
        turns = as_turns(fields.pop(name, []))
        if is_there(beginning):
            turns = [*turns, {"role": "assistant", "content": beginning}]
        return {**fields, "prompt": turns}

    def _with_turns_of_texts(self, fields: dict) -> dict:
        """Texts that hold a dialogue become its messages (data.turns)."""
        if not self.marks:
            return fields
        result = {}
        for name, value in fields.items():
            ours = ALIASES.get(name, name)
            if ours in TEXTS and isinstance(value, str):
                value = split_turns(value, self.marks)
                if ours in PROMPTS:
                    value = as_turns(value)
            result[name] = value
        answers = [result[x] for x in PAIR if isinstance(result.get(x), list)]
        if any(
            not turns or turns[-1]["role"] != "assistant" or not turns[-1]["content"]
            for turns in answers
        ):
            raise Skipped("whose last turn is not the assistant's")
        if len(answers) == 2 and answers[0][:-1] != answers[1][:-1]:
            raise Skipped("whose earlier turns differ")
        return result

    # ---- the shapes ------------------------------------------------------------------------------

    def _conversation(self, where: str, raw: object) -> Iterator[Rating | str]:
        """The rated messages of a conversation; the turns before one are its ancestors, or, where messages
        have no parents, those before it in the list."""
        columns = self.columns
        nodes = self._nodes(where, raw)
        by_id = {node.id: node for node in nodes}
        if len(by_id) < len(nodes):
            twice = Counter(node.id for node in nodes).most_common(1)[0][0]
            raise BadInput(f"id: {twice}: two messages have it")
        rated = nodes
        label = columns.get("label")
        if label is None:
            raise BadInput("data.columns: label: missing: where is the rating?")
        if "rated" in columns:
            ratings = [value for _, value in label.all(raw)]
            self.labels.of(ratings)
            rated = [self._pointed_at(columns["rated"].one(raw), nodes, by_id)]
        fields = {} if isinstance(raw, list) else self._beside(raw)
        for node in rated:
            if label.inner or isinstance(raw, list):
                ratings = [value for _, value in label.all(node.raw)]
                if not any(map(is_there, ratings)):
                    role = self._inner("role", node.raw, ("role", "from"))
                    if self.roles.get(as_text(role).lower()) == "assistant":
                        yield "not rated"
                    continue
            try:
                self._refuse_unwanted(node.raw, inner=not isinstance(raw, list))
                name = self.labels.of(ratings)
                turns = [
                    self._message(x.raw) for x in ancestors(node, by_id) if self._has_message(x.raw)
                ]
            except Skipped as e:
                yield str(e)
                continue
            *before, answer = turns or [{"role": None}]
            if answer["role"] != "assistant":
                raise BadInput(
                    f"rated: message {node.id} is not the assistant's, but {answer['role']}'s"
                )
            if not any(turn["role"] == "user" for turn in before):
                yield "without a question"
                continue
            more = {
                x: columns[x].one(node.raw) for x in self.extra if x in columns and columns[x].inner
            }
            value = ratings[0] if len(ratings) == 1 else name
            yield Rating(
                node.where, {**fields, **more, "prompt": before}, answer, LABELS[name], value
            )

    def _nodes(self, where: str, raw: object) -> list[Node]:
        """The messages of a conversation: of a list, or of an object whose keys are their ids."""
        columns = self.columns
        messages = raw if isinstance(raw, list) else columns["messages"].one(raw)
        if isinstance(messages, str):
            messages = opened(messages)
        if not is_there(messages):
            raise Skipped("without messages")
        if not isinstance(messages, list | dict):
            raise BadInput(f"messages: expected a list, got {messages!r:.50}")
        keys = (
            list(messages) if isinstance(messages, dict) else [str(i) for i in range(len(messages))]
        )
        nodes = []
        if "children" in columns:
            return self._nested(where, elements(messages, ""), None)
        for i, (key, message) in enumerate(zip(keys, elements(messages, ""))):
            name = columns["id"].one(message) if "id" in columns else key
            parent = str(i - 1) if i else None
            if "parent" in columns:
                parent = columns["parent"].one(message)
            elif isinstance(messages, dict) or "id" in columns:
                parent = nodes[-1].id if nodes else None
            place = self.tree_places[i] if isinstance(raw, list) else f"{where}:{name}"
            nodes.append(Node(str(name), None if is_root(parent) else str(parent), message, place))
        return nodes

    def _nested(self, where: str, messages: list, above: str | None) -> list[Node]:
        """The messages of a tree in which an answer lies inside the message that it answers, or names it."""
        columns = self.columns
        nodes = []
        for i, message in enumerate(messages):
            name = f"{above}.{i}" if above else str(i)
            if "id" in columns:
                name = str(columns["id"].one(message))
            parent = above
            if above is None and "parent" in columns:
                parent = columns["parent"].one(message)
            parent = None if is_root(parent) else str(parent)
            nodes.append(Node(name, parent, message, f"{where}:{name}"))
            nodes += self._nested(where, elements(columns["children"].one(message), ""), name)
        return nodes

    def _pointed_at(self, pointer: object, nodes: list[Node], by_id: dict[str, Node]) -> Node:
        """The message that a record's label is for, by its id or its place. Raises Skipped, BadInput."""
        if not is_there(pointer):
            raise Skipped("not rated")
        if str(pointer) in by_id:
            return by_id[str(pointer)]
        if isinstance(pointer, int) and -len(nodes) <= pointer < len(nodes):
            return nodes[pointer]
        raise BadInput(
            f"rated: {pointer}: no such message; there is {nearest(str(pointer), list(by_id))}"
        )

    def _has_message(self, raw: object) -> bool:
        """Whether a node of a tree is a message: the root of some exports has neither role nor text."""
        content = self._inner("content", raw, ("content", "value", "text"))
        return is_there(content) or is_there(self._inner("role", raw, ("role", "from")))

    def _two_answers(self, where: str, raw: dict) -> Iterator[Rating | str]:
        """Two answers and a verdict: a, b, both or neither."""
        columns = self.columns
        verdict = ""
        if self.kind != "prompts":
            verdict = self.labels.of([value for _, value in columns["verdict"].all(raw)], "verdict")
        prompt = self._prompt_fields(raw)
        for name in ("a", "b"):
            label = verdict in (name, "both")
            turn = columns["turn"].one(raw) if "turn" in columns else None
            answer = self._turns_or_text(name, columns[name].one(raw))
            fields, completion = with_dialogue(prompt, self._split(answer), turn)
            yield Rating(where, fields, completion, label, verdict)

    def _split(self, value: object) -> object:
        """A text that holds a dialogue becomes its messages (data.turns)."""
        return split_turns(value, self.marks) if self.marks and isinstance(value, str) else value

    def _answers(self, where: str, raw: dict) -> Iterator[Rating | str]:
        """A list of answers with ratings: parallel stars."""
        fields = self._prompt_fields(raw)
        ratings = self.columns["label"].all(raw)
        for index, answer in self.columns["completion"].all(raw):
            # those of this answer: the stars of both begin alike; of several raters each has one more
            n = len(index)
            mine = [x for place, x in ratings if place[:n] == index[: len(place)]]
            try:
                if not is_there(answer):
                    raise Skipped("with an empty answer")
                name = self.labels.of(mine) if self.kind != "prompts" else "up"
            except Skipped as e:
                if (
                    self.kind == "paired"
                    and str(e) == "by data.labels"
                    and number(mine[0]) is not None
                ):
                    name = None  # between the cuts, but it may be the best or the worst of a list
                else:
                    yield str(e)
                    continue
            answer = self._split(self._turns_or_text("completion", answer))
            prompt, completion = with_dialogue(fields, answer, None)
            value = mine[0] if len(mine) == 1 else name
            yield Rating(where, prompt, completion, LABELS.get(name), value)

    def _two_lists(self, where: str, raw: dict) -> Iterator[Rating | str]:
        """Lists of good and of bad answers, as many as there are."""
        fields = self._prompt_fields(raw)
        for name in PAIR:
            for _, answer in self.columns[name].all(raw):
                if is_there(answer):
                    prompt, completion = with_dialogue(
                        fields, self._split(self._turns_or_text(name, answer)), None
                    )
                    yield Rating(where, prompt, completion, name == "chosen", name)

    # ---- what the caller learns from -------------------------------------------------------------

    def _written(self, where: str, found: list[Rating | str]) -> Iterator[tuple[str, dict]]:
        """Our records of these ratings, as the caller learns from them."""
        ratings = []
        for one in found:
            if isinstance(one, str):
                self._leave_out(one)
            elif not is_there(one.completion):
                self._leave_out("with an empty answer")
            else:
                ratings.append(one)
        if self.kind == "paired":
            yield from self._pairs(ratings)
            return
        for i, rating in enumerate(ratings):
            record = {**rating.fields, "completion": rating.completion, "label": rating.label}
            if self.kind == "demonstrations" and not rating.label:
                self._leave_out("down: not to be imitated")
                continue
            if self.kind == "prompts":
                record = rating.fields
            # the places of several records of one line must differ
            place = rating.where
            if i and place == ratings[i - 1].where or i and place == where:
                place = f"{rating.where}:{i + 1}"
            yield from self._settle(place, record)

    def _pairs(self, ratings: list[Rating]) -> Iterator[tuple[str, dict]]:
        """A pair for each prompt: the best answer against the worst one; of two lists, one by one."""
        groups: dict[str, list[Rating]] = {}
        if (
            "verdict" in self.columns
            and len(ratings) == 2
            and ratings[0].fields != ratings[1].fields
        ):
            self._leave_out("whose earlier turns differ")
            return
        for rating in ratings:
            key = json.dumps(rating.fields, sort_keys=True, default=str)
            groups.setdefault(key, []).append(rating)
        for group in groups.values():
            found = best_and_worst(group, self.labels.higher_is_better)
            if not found:
                self._leave_out("without a better and a worse answer")
            for i, (best, worst) in enumerate(found):
                place = best.where if i == 0 else f"{best.where}:{i + 1}"
                yield (
                    place,
                    {**best.fields, "chosen": best.completion, "rejected": worst.completion},
                )

    # ---- one answer that is rated several times --------------------------------------------------

    def settle(self, records: Iterator[tuple[str, object]]) -> None:
        """Look through a file before it is read: where one prompt and answer are rated several times, the
        last (first) label counts (data.repeated), or that in which the raters agree (data.raters)."""
        ratings = self.columns.get("verdict", self.columns.get("label"))
        # several: its raters are in one record
        has_several = ratings is not None and ratings.is_several
        if self.kind != "rated" or not (self.repeated or self.raters and not has_several):
            return
        counts, self.counts, self.is_settling = self.counts, Counter(), True
        for where, record in self.read(records, []):
            if isinstance(record, dict) and "label" in record:
                self.votes.setdefault(rating_key(record), []).append((where, record["label"]))
        self.counts, self.is_settling, self.n_records = counts, False, 0

    def _settle(self, where: str, record: object) -> Iterator[tuple[str, dict]]:
        """The record, unless another one of the same prompt and answer counts."""
        votes = []
        if self.votes and not self.is_settling and isinstance(record, dict):
            votes = self.votes.get(rating_key(record), [])
        if not votes:
            yield where, record
            return
        if self.repeated:
            place, label = votes[-1 if self.repeated == "last" else 0]
        else:
            place = votes[0][0]
            try:
                label = self.labels.agreed([label for _, label in votes])
            except Skipped as e:
                self._leave_out(str(e))
                return
        if where != place:
            self._leave_out("rated again")
            return
        if isinstance(label, str):
            self._leave_out(label)
            return
        yield where, {**record, "label": label}

    def path_that_finds_nothing(self) -> str:
        """A line about a path that found nothing in any record, as one with a typo; empty: all found."""
        columns = [("data.columns", f"{name}={x.text}", x) for name, x in self.columns.items()]
        for column, sign, wanted in self.where:
            if sign == "=" and "null" not in wanted.split("|"):
                columns.append(("data.where", column.text, column))
        if self.inner_records:
            columns.append(("data.records", self.inner_records.text, self.inner_records))
        for setting, text, column in columns:
            name = text.split("=")[0]
            if not column.was_asked or column.was_found:
                continue
            if setting == "data.columns" and name in (*OPTIONAL, *self.extra):
                self.counts[f"records without {text}"] = self.n_records
                continue
            samples = self.samples
            if column.inner:
                samples = [x for record in samples for x in self._sample_messages(record)]
            names = [name for sample in samples for name in names_in(sample)]
            near = nearest(column.text.removeprefix("."), names)
            if column.inner:
                near = ", ".join(f".{name}" for name in near.split(", "))
            return f"{setting}: {text}: found in no record; there is {near}"
        return ""

    def _sample_messages(self, record: object) -> list:
        found = self.columns["messages"].one(record) if "messages" in self.columns else record
        return elements(opened(found) if isinstance(found, str) else found, "")


def ancestors(node: Node, by_id: dict[str, Node]) -> list[Node]:
    """The messages from the first one to this one. Raises BadInput for a loop or a lost parent."""
    line = [node]
    ids = {node.id}
    while line[-1].parent is not None:
        parent = line[-1].parent
        if parent in ids:
            raise BadInput(f"parent: {parent}: a loop: the message comes before itself")
        if parent not in by_id:
            raise BadInput(
                f"parent: {parent}: message {line[-1].id} answers it, but it is not in the file"
            )
        ids.add(parent)
        line.append(by_id[parent])
    return line[::-1]


def with_dialogue(fields: dict, answer: object, turn: object) -> tuple[dict, object]:
    """The fields of the prompt, and the answer. An answer may be a whole dialogue: messages, or a list of
    texts beside a list of prompts. turn: which answer of the dialogue counts, from 1; None: the last."""
    name = next((x for x in PROMPTS if x in fields), "prompt")
    prompt = fields.get(name)
    if not isinstance(answer, list):
        return {**fields, name: alternating(prompt)} if prompt is not None else fields, answer
    if not all(map(is_there, answer)):
        raise Skipped("with an empty answer")
    if all(isinstance(x, str) for x in answer):
        prompts = (
            prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], str) else []
        )
        if len(prompts) != len(answer):
            raise BadInput(f"{name}: {len(prompts)} texts beside {len(answer)} answers")
        pairs = zip(prompts, answer)
        answer = [
            turn for x, y in pairs for turn in (*as_turns(x), {"role": "assistant", "content": y})
        ]
        prompt = None
    n = None
    if turn is not None:
        places = [i for i, message in enumerate(answer) if message["role"] == "assistant"]
        if not str(turn).isdecimal() or not 1 <= int(turn) <= len(places):
            raise BadInput(f"turn: {turn}: the dialogue has {len(places)} answers")
        n = places[int(turn) - 1] + 1
    answer = answer[:n]
    if not answer or answer[-1]["role"] != "assistant" or not answer[-1].get("content"):
        raise Skipped("with an empty answer")
    *before, last = answer
    if not before:
        return fields, last
    rest = {key: value for key, value in fields.items() if key not in PROMPTS or prompt is not None}
    if prompt is not None and before[0]["role"] != "user" and before[0]["role"] != "system":
        return {**rest, "prompt": [*as_turns(prompt), *before]}, last
    return {key: x for key, x in rest.items() if key not in PROMPTS} | {"prompt": before}, last


def alternating(prompt: object) -> object:
    """A list of texts as turns, of which the last is the user's; anything else as it is."""
    if not isinstance(prompt, list) or not all(isinstance(x, str) for x in prompt):
        return prompt
    roles = ("user", "assistant")
    n = len(prompt) - 1
    return [{"role": roles[(n - i) % 2], "content": text} for i, text in enumerate(prompt)]


def with_its_prompt(record: dict) -> dict:
    """A record whose prompt is elsewhere: in `conversations` beside chosen and rejected (LLaMA-Factory), or
    in the answers, which are whole dialogues, while `prompt` repeats their last question."""
    answers = [record[x] for x in (*PAIR, "completion") if is_there(record.get(x))]
    dialogue = record.get("conversations") or record.get("messages")
    has_prompt = any(x in record for x in (*PROMPTS, "question"))
    if (
        len(answers) == 2
        and not has_prompt
        and isinstance(dialogue, list)
        and is_message(dialogue[-1])
    ):
        role = str(dialogue[-1].get("role", dialogue[-1].get("from")))
        if ROLES.get(role.lower()) != "assistant":
            rest = {x: y for x, y in record.items() if x not in ("conversations", "messages")}
            return {**rest, "prompt": dialogue}
    prompt = record.get("prompt")
    if isinstance(prompt, str) and answers and all(is_long_dialogue(x) for x in answers):
        questions = {x[-2].get("content", x[-2].get("value")) for x in answers}
        if questions == {prompt}:
            return {x: y for x, y in record.items() if x != "prompt"}
    return record


def is_long_dialogue(value: object) -> bool:
    return isinstance(value, list) and len(value) > 2 and is_message(value[-2])


def is_message(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    return value.keys() >= {"role", "content"} or value.keys() >= {"from", "value"}


def turn_marks(text: str | None) -> dict[str, str]:
    """{mark: role} of data.turns: hh, or `user=...,assistant=...` with a line break as \\n."""
    if text in (None, "hh"):
        return HH if text else {}
    marks = {}
    for role, _, mark in split_pairs("data.turns", text):
        if role not in ROLES.values() or not mark:
            raise BadInput(f"data.turns: {text}: expected hh, or user=MARK,assistant=MARK")
        marks[mark.replace("\\n", "\n")] = role
    return marks


def split_turns(text: str, marks: dict[str, str]) -> list[dict] | str:
    """The messages of a text in which marks begin the turns; a text without marks stays one."""
    pattern = "|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True))
    first, *parts = re.split(f"({pattern})", text)
    if not parts:
        return text.strip()
    turns = [{"role": "user", "content": first.strip()}] if first.strip() else []
    for mark, words in zip(parts[::2], parts[1::2]):
        turns.append({"role": marks[mark], "content": words.strip()})
    if len(turns) > 1 and turns[-1]["role"] == "assistant" and not turns[-1]["content"]:
        turns.pop()  # a prompt that ends where the answer begins
    return turns


def best_and_worst(ratings: list[Rating], higher_is_better: bool) -> list[tuple[Rating, Rating]]:
    """The pairs of the answers to one prompt: by their numbers the best and the worst; else good against
    bad ones, of two lists one by one and of others the first."""
    numbers = [number(rating.value) for rating in ratings]
    if len(ratings) > 1 and all(x is not None for x in numbers):
        order = sorted(range(len(ratings)), key=lambda i: numbers[i], reverse=higher_is_better)
        best, worst = order[0], order[-1]
        return [(ratings[best], ratings[worst])] if numbers[best] != numbers[worst] else []
    good = [rating for rating in ratings if rating.label is True]
    bad = [rating for rating in ratings if rating.label is False]
    pairs = list(zip(good, bad))
    return pairs if ratings and ratings[0].value in PAIR else pairs[:1]


def rating_key(record: object) -> str:
    """What makes two ratings ratings of one answer: all but the label and what stands beside."""
    names = {*PROMPTS, "completion", "messages", "system"}
    fields = {x: y for x, y in record.items() if ALIASES.get(x, x) in names}
    return json.dumps(fields, sort_keys=True, default=str)

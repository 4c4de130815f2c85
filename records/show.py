"""What `python data.py FILE` says beside the table: records as turns, and which settings may read a file.

Reading order: show_record; fitting_preset (the files of config/data); suggestion, where none of them fits.
"""

import re
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import yaml

from infra.console import BadInput
from infra.settings import ROOT, Data, split_commas
from records.foreign import Reader
from records.forms import Record, as_text, as_turns, content_of, understand_record
from records.paths import Column, elements, is_there, names_in, number

PRESETS = ROOT / "config" / "data"
LINES = 8  # of a turn, at most

# Names that fields often have; the first that is there is suggested.
NAMES = {
    "prompt": "prompt question query instruction user_query request input context title",
    "completion": "completion response answer ai_response reply output generation text",
    "label": "label rating feedback thumb thumbs vote liked like score preference",
    "verdict": "winner verdict preference choice better preferred label score",
}
INSTRUCTIONS = ("question", "query", "instruction", "user_query", "request")
ROLE_NAMES = "role from author sender"
# Values of a rating that mean one thing nearly everywhere, for a suggestion that a person looks at. Not 0: it may be
# down, no vote or a draw.
UP = (
    "1 +1 true t yes y good great positive like liked up thumbs_up thumbsup thumbs-up 👍 correct right helpful "
    "accepted"
)
DOWN = (
    "-1 false f no n bad poor negative dislike disliked down thumbs_down thumbsdown thumbs-down 👎 wrong incorrect "
    "unhelpful rejected"
)
ANSWER = re.compile("response|answer|output|completion|conversation|text|reply")
SIDES = (("a", "b"), ("0", "1"), ("1", "2"), ("A", "B"), ("left", "right"))


# ---- a record as turns ---------------------------------------------------------------------------


def show_record(where: str, record: Record) -> None:
    """Print a record as turns, at most 80 columns wide."""
    title = {
        True: "up",
        False: "down",
        None: "a pair" if len(record.completions) == 2 else "unrated",
    }
    print(f"\n{title[record.label]} ({where}):")
    if isinstance(record.prompt, str) and not record.instruct:
        show_turn("prompt", record.prompt)
    else:
        for turn in as_turns(record.prompt):
            show_turn(turn["role"], words_of(turn))
    names = ["chosen", "rejected"] if len(record.completions) == 2 else ["answer"]
    for name, completion in zip(names, record.completions):
        show_turn(name, words_of(completion))


def words_of(turn: str | dict) -> str:
    """The text of a turn, or what it has in place of one."""
    calls = isinstance(turn, dict) and turn.get("tool_calls")
    return content_of(turn) or ("(a call of tools)" if calls else "(empty)")


def show_turn(name: str, text: str) -> None:
    wide = any(unicodedata.east_asian_width(x) in "WF" for x in text)  # two columns a character
    lines = []
    for line in text.splitlines():
        lines += textwrap.wrap(line, 34 if wide else 68, replace_whitespace=False) or [""]
    if len(lines) > LINES:
        lines[LINES:] = [f"[{len(lines) - LINES:,} more lines]"]
    for line in lines or [""]:
        letters = "".join(map(printable, line))
        print(f"  {name:10}{letters}".rstrip())
        name = ""  # it stands before the first line only


def printable(letter: str) -> str:
    return letter if letter.isprintable() else "?"


# ---- which settings may read a file --------------------------------------------------------------


def fitting_preset(records: list, data: Data) -> str | None:
    """The file of config/data whose paths are all in these raw records; of several the one with most."""
    best: tuple[tuple, str] | None = None
    for file in sorted(PRESETS.glob("*.yaml")):
        preset = replace(data, **yaml.safe_load(file.read_text(encoding="utf-8"))["data"])
        is_for_pairs = file.stem.endswith("_pairs")
        if is_for_pairs and data.kind == "rated":
            continue
        if not fits(preset, records, data.kind):
            continue
        n_paths = len(split_commas(preset.columns))
        rank = (is_for_pairs and data.kind == "paired", n_paths)
        if best is None or rank > best[0]:
            best = rank, str(file.relative_to(ROOT))
    return best and best[1]


def fits(preset: Data, records: list, kind: str) -> bool:
    """Whether the settings find all that they name, and understand a record."""
    try:
        reader = Reader(replace(preset, extra=None), kind, Counter())
        faults: list[str] = []
        numbered = [(str(i), record) for i, record in enumerate(records)]
        ours = list(reader.read(iter(numbered), faults))
        if faults or not ours or reader.path_that_finds_nothing():
            return False
        if preset.turns and not has_marks(records, reader):
            return False
        understand_record(ours[0][1], kind)
    except BadInput:
        return False
    return True


def has_marks(records: list, reader: Reader) -> bool:
    """Whether one of the marks that begin a turn is in a value of these raw records."""
    text = str([elements(record, "") for record in records])
    for mark in reader.layout.marks:
        as_in_a_list = repr(mark)[1:-1]
        if as_in_a_list in text:
            return True
    return False


def suggestion(records: list, data: Data) -> str:
    """A line that says with which settings these raw records may be read; empty where settings are not what is
    wrong."""
    if not all(isinstance(record, dict) for record in records):
        return ""
    if not records or fits(data, records, data.kind):
        return ""
    preset = fitting_preset(records, data)
    if preset:
        return f"its fields are those of {preset}: --config {preset}"
    columns = (
        answer_list_columns(records)
        or conversation_columns(records)
        or two_answers_columns(records)
        or one_answer_columns(records)
    )
    paths = [as_instruction(name, path, records) for name, path in columns.items()]
    line = ",".join(filter(None, paths))
    label = columns.get("label") or columns.get("verdict") or "?"
    values = [] if label == "?" else values_of(columns, label, records)
    words = "a=?,b=?" if "verdict" in columns else labels_of(values)
    if data.kind == "paired" and values and all(number(value) is not None for value in values):
        words = "'up=>=0'"  # the best and the worst of the answers
    shown = ", ".join(text[:30] for text in values[:5]) + (", ..." if values[5:] else "")
    return (
        f"no file of config/data fits. Perhaps: --data.columns {line} --data.labels {words} "
        f"(values of {label}: {shown or '?'})"
    )


def as_instruction(name: str, path: str, records: list) -> str:
    """`name=path` for data.columns. A text that is a question or an order becomes a turn of the user, where the model
    has a chat template; a field with one of our own names needs no column."""
    last = path.split(".")[-1].lower()
    is_one_text = any(isinstance(Column(path).one(record), str) for record in records[:20])
    if name == "prompt" and last in INSTRUCTIONS and is_one_text:
        if path in ("instruction", "question"):
            return ""
        name = "instruction"
    return f"{name}={path}"


def labels_of(values: list[str]) -> str:
    """What data.labels might say of these values, if all of them are words of UP and DOWN."""
    up = [value for value in values if value.lower() in UP.split()]
    down = [value for value in values if value.lower() in DOWN.split()]
    if not up or not down or len(up) + len(down) < len(values):
        return "up=?,down=?"
    return f"up={'|'.join(up)},down={'|'.join(down)}"


def values_of(columns: dict[str, str], label: str, records: list) -> list[str]:
    """The values that a path finds, as texts, the most frequent first."""
    owners = records
    if label.startswith("."):
        messages = Column(columns["messages"])
        owners = []
        for record in records:
            owners += messages.one(record) or []
    column = Column(label)
    counts: Counter = Counter()
    for owner in owners:
        counts.update(as_text(value) for _, value in column.all(owner))
    return [text for text, _ in counts.most_common()]


def candidates(records: list, words: str, accept: Callable[[object], bool]) -> list[str]:
    """The paths whose last name is one of these words, and then those whose last name has one in it; each in the
    order of the words. accept: whether a value may be what is looked for."""
    paths: dict[str, object] = {}
    for record in records[:20]:
        for path in names_in(record):
            if path not in paths and "*" not in path:
                value = Column(path).one(record)
                if is_there(value) and accept(value):
                    paths[path] = value
    exact = []
    partial = []
    for word in words.split():
        for path in paths:
            last = path.split(".")[-1].lower()
            if last == word:
                exact.append(path)
            elif word in re.split(r"[^a-z0-9]+", last):
                partial.append(path)
    return list(dict.fromkeys(exact + partial))


def is_words(value: object) -> bool:
    return isinstance(value, str | list) and number(value) is None


def is_text(value: object) -> bool:
    return isinstance(value, str | list)


def is_mark(value: object) -> bool:
    if isinstance(value, str):
        return len(value) < 30
    return isinstance(value, bool | int | float)


def one_answer_columns(records: list) -> dict[str, str]:
    columns = {}
    for name in ("prompt", "completion", "label"):
        # a short answer may be a number
        accept = {"label": is_mark, "prompt": is_words, "completion": is_text}[name]
        paths = candidates(records, NAMES[name], accept)
        free = [path for path in paths if path not in columns.values()]
        columns[name] = free[0] if free else "?"
    return columns


def two_answers_columns(records: list) -> dict[str, str]:
    """Two fields whose names differ only in their end, such as answer_a and answer_b."""
    paths: dict[str, None] = {}  # in the order of the records
    for record in records[:20]:
        paths |= dict.fromkeys(names_in(record))
    for path in paths:
        twins = [path.removesuffix(a) + b for a, b in SIDES if path.endswith(a)]
        twins = [twin for twin in twins if twin in paths]
        is_answer = bool(ANSWER.search(path.lower()))
        if not twins or not is_answer or not is_words(Column(path).one(records[0])):
            continue
        prompt = candidates(records, NAMES["prompt"], is_words) or ["?"]
        verdict = candidates(records, NAMES["verdict"], is_mark) or ["?"]
        return {"prompt": prompt[0], "a": path, "b": twins[0], "verdict": verdict[0]}
    return {}


def answer_list_columns(records: list) -> dict[str, str]:
    """A list of answers, each with a rating of its own, beside their prompt."""
    prompt = candidates(records, NAMES["prompt"], is_words)
    for path, answers in lists_of_objects(records):
        label = candidates(answers, NAMES["label"], is_mark)
        text = candidates(answers, f"{NAMES['completion']} content", is_words)
        role = candidates(answers, ROLE_NAMES, is_mark)
        if prompt and label and text and not role:
            columns = {"prompt": prompt[0], "completion": f"{path}.*.{text[0]}"}
            return columns | {"label": f"{path}.*.{label[0]}"}
    return {}


def conversation_columns(records: list) -> dict[str, str]:
    """A list of messages, one of which has a rating."""
    for path, messages in lists_of_objects(records):
        label = candidates(messages, "rating feedback thumb vote liked score", is_mark)
        text = candidates(messages, "content text value message", is_words)
        if label and text:
            role = candidates(messages, ROLE_NAMES, is_mark) or ["?"]
            return {
                "messages": path,
                "role": f".{role[0]}",
                "content": f".{text[0]}",
                "label": f".{label[0]}",
            }
    return {}


def lists_of_objects(records: list) -> Iterator[tuple[str, list[dict]]]:
    """(path, list) of each list of objects in the first records, such as messages or answers."""
    for record in records[:20]:
        for path in names_in(record):
            found = Column(path).one(record) if "*" not in path else None
            if isinstance(found, list) and all(isinstance(x, dict) for x in found):
                yield path, found

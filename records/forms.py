"""One record, as it stands in a file, becomes a Record: prompt, completions, rating.

Reading order: Record (what comes out), understand_record (the whole way of one record), then one
function for each form that a record may have, then one for each kind of field. A record that has no
known form is refused with a Fault, which names its field; a label is never guessed. The files that
hold records are read in readers.py.
"""

import contextlib
import json
import math
import re
from collections import Counter
from os.path import commonprefix
from typing import Literal, NamedTuple

from runs.errors import BadInput, printable

# What a caller wants to learn from a record:
#   rated           one completion with a label, or a pair (which examples.py makes two ratings of)
#   paired          a chosen and a rejected completion
#   demonstrations  one completion to imitate
#   prompts         the prompt alone, whatever else the record has
Kind = Literal["rated", "paired", "demonstrations", "prompts"]

# The names that a field may have. The first one is ours, and the one that messages use.
LABEL_FIELDS = ("label", "preference", "kto_tag")
CHOSEN_FIELDS = ("chosen", "chosen_response", "preferred_output")
REJECTED_FIELDS = ("rejected", "rejected_response", "non_preferred_output")
INSTRUCTION_FIELDS = ("instruction", "question")
PROMPT_FIELDS = ("prompt", *INSTRUCTION_FIELDS)
COMPLETION_FIELDS = ("completion", "response", "output")
DIALOGUE_FIELDS = ("messages", "conversations")

LABEL_WORDS = {"chosen": True, "rejected": False, "desirable": True, "undesirable": False}
# The same as JSON has it, where a column of texts holds it.
LABEL_TEXTS = {"true": True, "True": True, "false": False, "False": False}
# The roles that chat templates know, and other names for them.
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
ROLE_NAMES = {role: role for role in ROLES} | {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
}
# Where the assistant's turns begin in a dialogue that is one text (Anthropic's HH).
ASSISTANT_MARK = "\n\nAssistant:"


class Record(NamedTuple):
    """A record of any form, understood. A prompt or completion is a string, or it is made of
    messages ({"role", "content"}), which a chat template will render."""

    prompt: str | list[dict]
    completions: list[str | dict]  # one, rated or demonstrated; or chosen and rejected
    label: bool | None  # desirable? None for a pair, a demonstration or a prompt
    rewards: tuple[float | None, float | None] = (None, None)  # of chosen and rejected
    weight: float = 1.0
    tools: list[dict] | None = None  # handed to the chat template
    template_kwargs: dict = {}  # handed to the chat template
    extra: dict[str, str | float] = {}  # the fields that data.extra names
    ignored: tuple[str, ...] = ()  # names of fields that nothing reads
    renamed: tuple[str, ...] = ()  # names of fields that data.columns gives another name
    # The prompt is an instruction or a question: if the tokenizer has a chat template, a turn of the user.
    instruct: bool = False

    @property
    def has_messages(self) -> bool:
        """Whether only a chat template can make a text of it."""
        return not all(isinstance(x, str) for x in (self.prompt, *self.completions))


class Fault(BadInput):
    """What is wrong with a record: `field: reason`. The caller adds the file and the line."""


class Dropped(Exception):
    """A record whose label is none of those that data.labels names. The text is the label."""


# ---- one record ----------------------------------------------------------------------------------


def understand_record(
    record: object,
    kind: Kind,
    extra: tuple[str, ...] = (),
    columns: dict[str, str] | None = None,
    labels: dict[str, bool] | None = None,
) -> Record:
    """What a record says, whichever of the known forms it has. Raises Fault, Dropped.

    `record` comes from readers.read_records: what a line of a file holds, or a Fault. `extra`:
    fields that every record must also have (data.extra). `columns`: the record's name of a field ->
    our name of it (data.columns). `labels`: the text of a label -> desirable (data.labels).
    """
    renamed, record = named_fields(record, columns or {})
    # Whoever reads a field takes it out of `fields`: those that are left at the end are ignored.
    fields = dict(record)
    if labels and kind != "prompts":
        _name_label(fields, labels)
    system = _string(fields.pop("system", None) or "", "system")
    tools = _template_argument(fields, "tools", list)
    template_kwargs = _template_argument(fields, "chat_template_kwargs", dict) or {}
    understood = _understand_form(fields, kind)
    if system:
        understood = _with_system_message(understood, system)
    if tools and not understood.has_messages:
        raise Fault("tools: no messages here that a chat template would render them with")
    weight = _number(fields.pop("weight", 1), "weight", "a finite number, at least 0", lowest=0)
    extra_values = {name: _extra_field(record, name) for name in extra}
    return understood._replace(
        weight=weight,
        tools=tools,
        template_kwargs=template_kwargs,
        extra=extra_values,
        ignored=tuple(name for name in fields if name not in extra_values),
        renamed=renamed,
        instruct=any(name in record and name not in fields for name in INSTRUCTION_FIELDS),
    )


def named_fields(record: object, columns: dict[str, str]) -> tuple[tuple[str, ...], dict]:
    """The names of data.columns that a raw record has, and its fields under our names. Raises Fault."""
    if isinstance(record, Fault):
        raise record
    if not isinstance(record, dict):
        raise Fault(f"record: expected an object, got {short_json(record)}")
    renamed = tuple(name for name in columns if name in record)
    if renamed:
        record = unique_keys([(columns.get(name, name), x) for name, x in record.items()])
    if isinstance(record.get("input"), dict):  # OpenAI's form: its `input` holds the other fields
        others = [(name, x) for name, x in record.items() if name != "input"]
        record = unique_keys([*others, *record["input"].items()])
    return renamed, record


def kind_of(fields: dict) -> Kind:
    """What the names of a record's fields say that it is, whether or not their values are sound."""
    if _has_any(fields, LABEL_FIELDS):
        return "rated"
    if _has_any(fields, CHOSEN_FIELDS + REJECTED_FIELDS):
        return "paired"
    if _has_any(fields, COMPLETION_FIELDS + DIALOGUE_FIELDS):
        return "demonstrations"
    return "prompts"


def _understand_form(fields: dict, kind: Kind) -> Record:
    """Prompt, completions and label, from the form that these fields have."""
    has_pair = _has_any(fields, CHOSEN_FIELDS + REJECTED_FIELDS)
    if kind == "prompts":
        prompt = _prompt_of_any_form(fields, has_pair)
        fields.clear()  # the other fields are not wanted here, so they are not reported either
        return Record(prompt, [], None)
    has_label = _has_any(fields, LABEL_FIELDS)
    if has_pair and has_label:
        raise Fault("record: both a rating and a pair: which one is meant?")
    if kind == "demonstrations":
        return _demonstration(fields)
    if has_pair:
        return _pair(fields)
    if kind == "paired":
        hint = ", this is a rated record (see kto.py)" if has_label else ""
        raise Fault(f"chosen: missing: pairs are needed here{hint}")
    return _rated(fields)


def _prompt_of_any_form(fields: dict, has_pair: bool) -> str | list[dict]:
    """What a record asks, without its answers."""
    if _has_any(fields, PROMPT_FIELDS):
        return _prompt(fields)
    if has_pair:
        return _pair(fields).prompt
    if _has_any(fields, DIALOGUE_FIELDS):
        value, field = _take(fields, DIALOGUE_FIELDS)
        turns = as_turns(_text_or_messages(value, field))
        if turns[-1]["role"] != "assistant":
            return turns
        if len(turns) > 1:
            return turns[:-1]
    if "input" in fields:
        return _string(fields["input"], "input")
    return _prompt(fields)


def _rated(fields: dict) -> Record:
    """One completion with its label."""
    label = _label(*_take(fields, LABEL_FIELDS))
    if _has_any(fields, DIALOGUE_FIELDS) and not _has_any(fields, PROMPT_FIELDS):
        record = _dialogue(fields)
    else:
        record = _prompt_and_completion(fields)
    return record._replace(label=label)


def _demonstration(fields: dict) -> Record:
    """One completion to imitate. It needs no label, and must not have a bad one."""
    if _has_any(fields, LABEL_FIELDS):
        value, field = _take(fields, LABEL_FIELDS)
        if not _label(value, field):
            raise Fault(f"{field}: undesirable: this completion is not to be imitated")
    if _has_any(fields, DIALOGUE_FIELDS):
        return _dialogue(fields)
    if "input" in fields and not _has_any(fields, PROMPT_FIELDS):  # NeMo-Aligner's form
        prompt = _string(fields.pop("input"), "input")
        completion = _string(*_take(fields, ("output",)))
        return Record(prompt, [completion], None)
    return _prompt_and_completion(fields)


def _pair(fields: dict) -> Record:
    """A chosen and a rejected completion of one prompt. Where the record has no prompt, it is what
    both begin with."""
    chosen, chosen_field = _take(fields, CHOSEN_FIELDS)
    rejected, rejected_field = _take(fields, REJECTED_FIELDS)
    rewards = (_reward(fields, "chosen_reward"), _reward(fields, "rejected_reward"))
    if _has_any(fields, PROMPT_FIELDS):
        prompt = _prompt(fields)
    elif _has_any(fields, DIALOGUE_FIELDS):
        prompt = _text_or_messages(*_take(fields, DIALOGUE_FIELDS))
    elif isinstance(chosen, str) and isinstance(rejected, str):
        prompt = _common_text(chosen, rejected)
        chosen, rejected = chosen.removeprefix(prompt), rejected.removeprefix(prompt)
    else:
        prompt = _common_prompt(
            _text_or_messages(chosen, chosen_field), _text_or_messages(rejected, rejected_field)
        )
    good = _join_completion(prompt, chosen, chosen_field)
    bad = _join_completion(prompt, rejected, rejected_field)
    if good.prompt != bad.prompt:
        raise Fault(f"{rejected_field}: its turns before the last one differ from those of chosen")
    return good._replace(completions=good.completions + bad.completions, rewards=rewards)


def _common_text(chosen: str, rejected: str) -> str:
    """The prompt that two texts begin with: as far as the last turn of the assistant that begins in
    both, where they are dialogues (Anthropic's HH), else as far as the last word that both have."""
    common = commonprefix((chosen, rejected))
    before_answer, mark, _ = common.rpartition(ASSISTANT_MARK)
    if mark:
        return before_answer + mark
    # A blank belongs to the word behind it, as in TRL; a line end belongs to its line.
    whole_words = re.match(r".+(\n|(?= ))", common, re.DOTALL)
    if not whole_words:
        raise Fault("prompt: missing, and chosen and rejected do not begin with the same words")
    return whole_words[0]


def _common_prompt(chosen: str | list[dict], rejected: str | list[dict]) -> list[dict]:
    """All turns of two dialogues but the last one, which must be the only one that differs."""
    both_dialogues = isinstance(chosen, list) and isinstance(rejected, list)
    if not both_dialogues or len(chosen) < 2 or chosen[:-1] != rejected[:-1]:
        raise Fault(
            "prompt: missing, and chosen and rejected are not two dialogues that differ in their last turn"
        )
    return chosen[:-1]


def _dialogue(fields: dict) -> Record:
    """A whole dialogue, whose last turn is the completion."""
    value, field = _take(fields, DIALOGUE_FIELDS)
    turns = _text_or_messages(value, field)
    if isinstance(turns, str) or len(turns) < 2:
        raise Fault(f"{field}: expected at least two messages")
    mask = fields.pop("mask", None)  # NeMo-Aligner: the role that is not learned from
    if isinstance(mask, str):
        masked_role = ROLE_NAMES.get(mask.lower(), mask.lower())
        if turns[-1]["role"] == masked_role:
            raise Fault(
                f"{field}: the last turn is the masked role's ({masked_role}), so there is nothing to learn"
            )
    return _join_completion(turns[:-1], turns[-1:], field)


def _prompt_and_completion(fields: dict) -> Record:
    prompt = _prompt(fields)
    return _join_completion(prompt, *_take(fields, COMPLETION_FIELDS))


def _join_completion(prompt: str | list[dict], value: object, field: str) -> Record:
    """A prompt and the completion that the field `field` holds.

    The completion may repeat the prompt. It may also have several turns, as with tools: then its
    last turn becomes the completion, and the turns before it become the end of the prompt.
    """
    turns = _text_or_messages(value, field)
    if isinstance(turns, str):
        return Record(prompt, [turns], None)
    prompt_turns = as_turns(prompt)
    if turns[0]["role"] == "system" and turns[1 : 1 + len(prompt_turns)] == prompt_turns:
        prompt = prompt_turns = turns[: 1 + len(prompt_turns)]  # repeated with its system message
    if len(turns) > len(prompt_turns) and turns[: len(prompt_turns)] == prompt_turns:
        turns = turns[len(prompt_turns) :]
    by_assistant = [turn["role"] == "assistant" for turn in turns]
    two_in_a_row = any(a and b for a, b in zip(by_assistant, by_assistant[1:]))
    if not by_assistant[0] or not by_assistant[-1] or two_in_a_row:
        raise Fault(
            f"{field}: expected one assistant message, or several with other roles' messages between "
            f"them; got {short_json(value)}"
        )
    if len(turns) == 1:
        return Record(prompt, turns, None)
    return Record([*prompt_turns, *turns[:-1]], turns[-1:], None)


def _with_system_message(record: Record, system: str) -> Record:
    """The record with a system message in front of its prompt."""
    turns = as_turns(record.prompt)
    if turns[0]["role"] == "system":
        raise Fault("system: given beside a system message: which one is meant?")
    return record._replace(prompt=[{"role": "system", "content": system}, *turns])


# ---- one field -----------------------------------------------------------------------------------


def _has_any(fields: dict, names: tuple[str, ...]) -> bool:
    return any(name in fields for name in names)


def _take(fields: dict, names: tuple[str, ...]) -> tuple[object, str]:
    """Take out the one field that has one of these names. Returns its value and its name."""
    present = [name for name in names if name in fields]
    if len(present) > 1:
        raise Fault(f"{' and '.join(present)}: give one, not both")
    if not present:
        others = printable(", ".join(fields) or "nothing else")
        raise Fault(
            f"{names[0]}: missing: expected {' or '.join(names)}; there is {others} (see data.columns)"
        )
    return fields.pop(present[0]), present[0]


def unique_keys(items: list[tuple[str, object]]) -> dict:
    """A dict of these items, none of which may have another one's key. Raises Fault.

    Python's json keeps the last of two equal keys: of two labels, one would win silently.
    """
    result = dict(items)
    if len(result) < len(items):
        counts = Counter(key for key, _ in items)
        key, count = counts.most_common(1)[0]
        raise Fault(f"{key}: given {count} times")
    return result


def _prompt(fields: dict) -> str | list[dict]:
    prompt, field = _take(fields, PROMPT_FIELDS)
    if field == "instruction" and (more := fields.pop("input", None)):
        # on the next line, as LLaMA-Factory joins them
        texts = _string(prompt, field), _string(more, "input")
        return "\n".join(text for text in texts if text)
    return _text_or_messages(prompt, field)


def as_turns(prompt: str | list[dict]) -> list[dict]:
    """A prompt as messages: a string is one message of the user."""
    if isinstance(prompt, list):
        return prompt
    return [{"role": "user", "content": prompt}]


def _text_or_messages(value: object, field: str) -> str | list[dict]:
    """A string, or a list of messages (one message alone is a list of one)."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not value:
        raise Fault(f"{field}: expected a string or a list of messages, got {short_json(value)}")
    return [_message(message, f"{field}[{i}]") for i, message in enumerate(value)]


def _message(value: object, field: str) -> dict:
    """One turn as {"role", "content", and what else the chat template may read}."""
    if not isinstance(value, dict):
        raise Fault(f"{field}: expected a message, got {short_json(value)}")
    role = _either(value, "role", "from", field)
    content = _joined_parts(_either(value, "content", "value", field), field)
    only_calls_tools = content is None and value.get("tool_calls")
    if not isinstance(role, str) or not (isinstance(content, str) or only_calls_tools):
        raise Fault(
            f'{field}: a message needs a string "role" and a string "content", got {short_json(value)}'
        )
    if role.lower() not in ROLE_NAMES:
        raise Fault(f"{field}: role: expected one of {', '.join(ROLES)}; got {short_json(role)}")
    message = {"role": ROLE_NAMES[role.lower()], "content": content}
    for key, other in value.items():
        # In a table every row has every key; null says that this row has none.
        if key not in ("role", "from", "content", "value") and other is not None:
            message[key] = other
    return message


def _joined_parts(content: object, field: str) -> object:
    """The content of a message. Parts such as {"type": "text", "text": ...} become one text."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str) or (isinstance(part, dict) and part.get("type") != "text"):
            raise Fault(f"{field}: content: only parts of text are read, got {short_json(part)}")
        texts.append(text)
    return "".join(texts)


def _either(message: dict, name: str, other_name: str, field: str) -> object:
    """What a message has under one of two names; None if it has neither."""
    values = [message[key] for key in (name, other_name) if message.get(key) is not None]
    if len(values) == 2 and values[0] != values[1]:
        raise Fault(f"{field}: {name} and {other_name} differ: {short_json(values)}")
    return values[0] if values else None


def _template_argument(fields: dict, field: str, expected: type[list] | type[dict]):
    """A list or an object for the chat template; None if there is none. It may also be a string of
    JSON, since a column of a table has one type for all rows."""
    value = fields.pop(field, None) or None
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if value is not None and not isinstance(value, expected):
        name = "a list" if expected is list else "an object"
        raise Fault(f"{field}: expected {name}, got {short_json(value)}")
    return value


def _string(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise Fault(f"{field}: expected a string, got {short_json(value)}")
    return value


def _label(value: object, field: str) -> bool:
    if isinstance(value, int | float) and value in (0, 1):  # True and False are ints, too
        return bool(value)
    words = LABEL_TEXTS | LABEL_WORDS
    if isinstance(value, str) and value in words:
        return words[value]
    expected = f"expected true, false, 1, 0, {', '.join(LABEL_WORDS)}"
    raise Fault(f"{field}: {expected}; got {short_json(value)} (see data.labels)")


def _name_label(fields: dict, labels: dict[str, bool]) -> None:
    """Replace a record's label by what data.labels says of it. Raises Dropped if it says nothing."""
    for name in LABEL_FIELDS:
        if name in fields:
            value = fields[name]
            if isinstance(value, float) and value.is_integer():
                value = int(value)  # a table has 4.0 where it lacks other labels
            text = value if isinstance(value, str) else short_json(value)
            if text not in labels:
                raise Dropped(text)
            fields[name] = labels[text]


def _number(
    value: object, field: str, expected: str = "a finite number", lowest: float = -math.inf
) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Below 1e30 a number is finite in float32, too. The comparison is False for nan.
    if not is_number or not abs(value) < 1e30 or value < lowest:
        raise Fault(f"{field}: expected {expected}, got {short_json(value)}")
    return float(value)


def _reward(fields: dict, field: str) -> float | None:
    value = fields.pop(field, None)
    return None if value is None else _number(value, field)


def _extra_field(record: dict, field: str) -> str | float:
    if field not in record:
        raise Fault(f"{field}: missing (data.extra names it)")
    value = record[field]
    if isinstance(value, str):
        return value
    return _number(value, field, "a text or a finite number")


def short_json(value: object) -> str:
    """A value as JSON for a message, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) < 50 else text[:46] + " ..."

"""One record of any known form becomes a Record: prompt, completions, label.

Reading order: ALIASES (other names of our fields), Record (what comes out), understand_record (the
whole way of one record), then the forms that a record may have, then its fields. The last part is the way back: the
fields of one record of an answer. A record of no known form is refused with `field: reason` (the caller adds the file
and the line); a label is never guessed.
"""

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Literal, NamedTuple

from infra.console import BadInput, user_error

# The kinds of records to learn from:
#   rated           one completion with a label, or a pair (examples.py makes two ratings from it)
#   paired          a chosen and a rejected completion
#   demonstrations  one completion to imitate
#   prompts         the prompt alone, whatever else the record has
Kind = Literal["rated", "paired", "demonstrations", "prompts"]
Turns = str | list[dict]  # a text, or messages: {"role", "content"}

# Names that others give to our fields.
ALIASES = {
    "preference": "label",
    "kto_tag": "label",
    "response": "completion",
    "output": "completion",
    "chosen_response": "chosen",
    "rejected_response": "rejected",
    "question": "instruction",
    "conversations": "messages",
}
# Other fields of a prompt besides its text.
MEDIA = ("images", "videos", "audios")
# A record's prompt is the first of these fields that it has.
PROMPTS = ("prompt", "instruction", "input")
# Only values that can mean nothing else; as texts, since a csv file has no others.
LABELS = dict.fromkeys("True true TRUE 1 1.0 chosen desirable up".split(), True)
LABELS |= dict.fromkeys("False false FALSE 0 0.0 rejected undesirable down".split(), False)
# Fields of an answer. A record that is read only for its prompt loses them.
OF_ANSWERS = "messages completion chosen rejected label chosen_reward rejected_reward spans".split()
# The model and the user's next message. generate.py and `python -m convert` write these fields. They are no part of an
# example. The source is also no part, if it is a place in a file.
ORIGIN = ("generator", "next")
# The roles that chat templates know, and the names that ShareGPT, LangChain and Gemini have for them.
ROLES = {x: x for x in "system developer user assistant tool function ipython".split()}
ROLES |= {"human": "user", "observation": "tool"}
ROLES |= dict.fromkeys(("gpt", "ai", "model", "bot"), "assistant")
# ShareGPT's names in a message
SHAREGPT = {"from": "role", "value": "content"}
# the end of a place in a file
PLACE = re.compile(r":\d+$")
# made once: json.dumps would make it anew for each field
ENCODER = json.JSONEncoder(ensure_ascii=False, default=str)
# a list of messages as a text of JSON, as in a csv file, or as Python prints it, which is refused
PRINTED = re.compile(r"""\s*\[\s*\{\s*(['"])(role|from|content|value)\1\s*:""")


class Record(NamedTuple):
    """A record of any form, understood. A prompt or completion is a text, or it is made of messages,
    which a chat template will write."""

    prompt: Turns
    completions: list[str | dict]  # one, rated or demonstrated; or chosen and rejected
    label: bool | None = None  # desirable? None for a pair, a demonstration or a prompt
    rewards: tuple = (None, None)  # of chosen and rejected: numbers, or None
    weight: float = 1.0
    tools: list[dict] | None = None  # for the chat template
    # For the chat template, instead of data.chat_template_kwargs. None: the record does not say.
    template_kwargs: dict | None = None
    date: str | None = None  # the day that the chat template prints, instead of data.date
    # Whether the completion, which was sampled, ended at the length limit. None: the record does not say.
    cut: bool | None = None
    spans: list[dict] = []  # marked parts of the completion, as they stand in the record
    extra: dict = {}  # the fields that data.extra names
    beside: dict = {}  # the other fields that nothing reads
    # the prompt is an instruction: a turn of the user, if there is a chat template
    instruct: bool = False

    @property
    def needs_template(self) -> bool:
        """Whether only a chat template can make a text of it."""
        texts = self.prompt, *self.completions
        return bool(self.tools) or not all(isinstance(x, str) for x in texts)


# ---- one record ----------------------------------------------------------------------------------


def understand_record(
    record: object, kind: Kind, extra: Iterable[str] = (), is_whole: bool = False
) -> Record:
    """A record in our form, from any of the known forms. Raises BadInput.

    record: one record of a file. extra: fields that every record
    must also have (data.extra). is_whole: the caller knows that no text has half of
    a character.
    """
    if not isinstance(record, dict):
        raise BadInput(f"record: expected an object, got {record!r:.50}")
    if not is_whole and "\\ud" in repr(record):  # so Python prints half of a character
        with user_error("record: no UTF-8, or half of a character"):
            ENCODER.encode(record).encode()
    try:
        return _understand_fields(record, kind, extra)
    except Missing as e:
        # the names of the fields in the record itself
        names = [name for name, value in record.items() if value is not None]
        raise BadInput(
            f"{e}: missing; there is {', '.join(names)}; other forms: docs/convert.md"
        ) from None


def _understand_fields(record: dict, kind: Kind, extra: Iterable[str]) -> Record:
    """As understand_record. Raises BadInput, Missing."""
    # Whoever reads a field takes it out of `fields`: those that are left at the end are ignored.
    # In a table every row has every field; null says that this row has none.
    fields = unique_keys(
        [(ALIASES.get(name, name), x) for name, x in record.items() if x is not None]
    )
    # by the record's own name or by ours
    extras = {name: _extra_field({**record, **fields}, name) for name in extra}
    for name in MEDIA:
        if fields.get(name) not in (None, [], "", "[]"):
            raise BadInput(
                f"{name}: its answer is to more than the text; python -m convert --where {name}=null leaves such "
                "records out"
            )
    instruct = "instruction" in fields and "prompt" not in fields
    history = _earlier_turns(fields)
    system = fields.pop("system", None)
    tools = _parsed(fields, "tools")
    template_kwargs = _parsed(fields, "chat_template_kwargs")
    weight = _optional_number(fields, "weight", lowest=0)
    cut = as_text(fields.pop("cut", "")).lower()
    if cut not in ("true", "false", ""):
        raise BadInput(f"cut: expected true or false, got {cut!r:.50}")
    for name in ORIGIN:
        fields.pop(name, None)
    if "source" in fields and is_place(fields["source"]):
        del fields["source"]
    prompt, completions, label, rewards = _understand_form(fields, kind)
    if cut == "true" and len(completions) == 2:
        raise BadInput("cut: this is a pair, and cut does not say which answer was cut")
    return Record(
        _whole_prompt(prompt, history, system),
        completions,
        label,
        rewards,
        weight=1.0 if weight is None else weight,
        tools=tools,
        template_kwargs=template_kwargs,
        date=str(fields["date"]) if fields.get("date") else None,
        cut={"true": True, "false": False}.get(cut),
        spans=_parsed(fields, "spans") or [],
        extra=extras,
        # by the record's own names
        beside={
            name: x
            for name, x in record.items()
            if ALIASES.get(name, name) in fields and name not in extra
        },
        instruct=instruct,
    )


def _extra_field(fields: dict, name: str) -> object:
    """A field that data.extra names: a text or a number. A whole number stays one. Raises BadInput, Missing."""
    value = _take(fields, name)
    if isinstance(value, list | dict):
        raise BadInput(
            f"{name}: data.extra: expected a text or a number, got {value!r:.50}; as json.dumps(...) it is a text"
        )
    if not isinstance(value, str | bool):
        _number(value, name)
    return value


def _whole_prompt(prompt: Turns, history: list[dict], system: object) -> Turns:
    """The prompt behind a system message and earlier turns. Raises BadInput, Missing."""
    if prompt == []:
        raise Missing("prompt")
    earlier = history
    if system:
        earlier = [_message({"role": "system", "content": system}, "system"), *history]
        if as_turns(prompt)[0]["role"] == "system":
            raise BadInput("system: the prompt begins with a system message, too")
    return [*earlier, *as_turns(prompt)] if earlier else prompt


def _understand_form(
    fields: dict, kind: Kind
) -> tuple[Turns, list[str | dict], bool | None, tuple]:
    """Prompt, completions, label and rewards, from the form that these fields have."""
    has_prompt = not fields.keys().isdisjoint(PROMPTS)
    if kind == "prompts":
        prompt = _prompt(fields)
        for name in OF_ANSWERS:
            fields.pop(name, None)
        return prompt, [], None, (None, None)
    # 1. which fields hold the completions, and how they are rated
    is_pair = "chosen" in fields or "rejected" in fields
    is_rated = "label" in fields
    if is_pair and is_rated:
        raise BadInput("record: both a rating and a pair: which one is meant?")
    if is_pair and not has_prompt and "messages" in fields:
        fields["prompt"] = fields.pop("messages")  # LLaMA-Factory's dialogue of a pair
        has_prompt = True
    label = None
    rewards = (None, None)
    names: tuple[str, ...]
    if kind == "paired" or (is_pair and kind == "rated"):
        names = ("chosen", "rejected")
        rewards = tuple(_optional_number(fields, f"{name}_reward") for name in names)
    else:
        is_dialogue = "messages" in fields and "completion" not in fields
        names = ("messages" if is_dialogue else "completion",)
        if is_rated or kind == "rated":
            label = read_label(fields)
        if kind == "demonstrations" and label is False:
            raise BadInput("label: undesirable: this completion is not to be imitated")
    # 2. the prompt; of `messages`, and of pairs without a prompt, all turns but the last
    answers = [_text_or_messages(fields, name) for name in names]
    if not has_prompt or names == ("messages",):
        prompt = as_turns(answers[0])[:-1]
    else:
        prompt = _prompt(fields)
    joined = [_join(prompt, x, name) for x, name in zip(answers, names)]
    prompts, completions = zip(*joined)
    if prompts[0] != prompts[-1]:
        raise BadInput("rejected: its turns before the last one differ from those of chosen")
    return prompts[0], list(completions), label, rewards


def _join(prompt: Turns, completion: Turns, name: str) -> tuple[Turns, str | dict]:
    """A prompt and a completion, which the field `name` holds.

    The completion may repeat the prompt. It may also have several turns, as with tools: then its last
    turn is the completion, and the turns before it become the end of the prompt.
    """
    if isinstance(completion, str):
        return prompt, completion
    before = as_turns(prompt)
    if completion[: len(before)] == before:
        completion = completion[len(before) :]
    elif isinstance(prompt, str) and completion[1:] and completion[-2]["content"] == prompt:
        return completion[:-1], completion[-1]  # a whole dialogue; the prompt is its last question
    if not completion or not completion[0]["role"] == completion[-1]["role"] == "assistant":
        what = f"{name}: expected messages, the first and the last an assistant's"
        if before and completion and completion[0]["role"] != "assistant":
            what += f", or the prompt's turns first: {completion[0]!r:.60} is not {before[0]!r:.60}"
        raise BadInput(what)
    *turns, answer = completion
    return [*before, *turns] if turns else prompt, answer


# ---- one field -----------------------------------------------------------------------------------


class Missing(Exception):
    """A form needs a field that is not there. The text is our name of it."""


def _take(fields: dict, name: str) -> object:
    if name not in fields:
        raise Missing(name)
    return fields.pop(name)


def unique_keys(items: list[tuple[str, object]]) -> dict:
    """A dict of these items. Two equal keys raise ValueError.

    Python's json keeps the last of two equal keys: of two labels, one would win silently.
    """
    result = dict(items)
    if len(result) < len(items):
        names = [name for name, _ in items]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice}: given twice")
    return result


DECODER = json.JSONDecoder(object_pairs_hook=unique_keys)


def parse_json(text: str | bytes) -> object:
    """The value of a text of JSON. Raises ValueError, also for two equal keys."""
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    try:
        return DECODER.decode(text)
    except RecursionError:
        raise ValueError("lists or objects are nested too deeply") from None


def is_place(source: object) -> bool:
    """Whether a record's source is a place in the file that it was converted from: feedback.json:12."""
    return bool(PLACE.search(str(source)))


def _prompt(fields: dict) -> Turns:
    """The prompt; or an instruction, and its input on the next line; or NeMo-Aligner's input; or else a
    dialogue without the answer at its end. Raises BadInput, Missing."""
    name = next((x for x in (*PROMPTS, "messages", "chosen") if x in fields), "prompt")
    prompt = _text_or_messages(fields, name)
    if name not in PROMPTS and isinstance(prompt, str):
        return []  # an answer alone
    if isinstance(prompt, list) and prompt and prompt[-1]["role"] == "assistant":
        if name in PROMPTS:
            raise BadInput(f"{name}: ends in the assistant's turn: end it with the user's turn")
        prompt = prompt[:-1]
    if name == "instruction" and isinstance(prompt, str):
        more = fields.pop("input", "")
        return f"{prompt}\n{more}" if more else prompt
    return prompt


def _earlier_turns(fields: dict) -> list[dict]:
    """The turns of `history`, as LLaMA-Factory and ms-swift have it: pairs of a question and an answer."""
    turns = []
    for pair in _parsed(fields, "history") or []:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise BadInput(f"history: expected pairs of a question and an answer, got {pair!r:.50}")
        for role, content in zip(("user", "assistant"), pair):
            turns.append(_message({"role": role, "content": content}, "history"))
    return turns


def as_turns(prompt: Turns) -> list[dict]:
    """A prompt as messages: a text is one message of the user."""
    return prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]


def as_answer(completion: str | dict) -> dict:
    """A completion as a message of the assistant."""
    if isinstance(completion, dict):
        return completion
    return {"role": "assistant", "content": completion}


def content_of(completion: str | dict) -> str | None:
    """The text of a completion; None of a message that calls tools without a word."""
    return completion if isinstance(completion, str) else completion.get("content")


def _text_or_messages(fields: dict, name: str) -> Turns:
    """A text, or a list of messages (one message alone is a list of one)."""
    value = _take(fields, name)
    if isinstance(value, str) and PRINTED.match(value):
        with user_error(name, "messages as a text of JSON"):
            messages = parse_json(value)
        # a text of another JSON is a text
        value = messages if all(map(is_message, messages)) else value
    if isinstance(value, str):
        return value
    messages = value if isinstance(value, list) else [value]
    return [_message(message, name) for message in messages]


def is_message(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    return value.keys() >= {"role", "content"} or value.keys() >= {"from", "value"}


def _message(value: object, name: str) -> dict:
    """One turn as {"role", "content", and what else the chat template may read}."""
    if isinstance(value, dict):
        message = {SHAREGPT.get(key, key): x for key, x in value.items() if x is not None}
        role = ROLES.get(str(message.get("role")).lower())
        parts = message.get("content")
        if isinstance(parts, list) and all(_is_text(part) for part in parts):
            message["content"] = "".join(part["text"] for part in parts)
        if role and (isinstance(message.get("content"), str) or "tool_calls" in message):
            message.setdefault("content", None)
            message["role"] = role
            return message
    raise BadInput(
        f"{name}: expected a string, or messages with a known role and a text; got {value!r:.50}"
    )


def _is_text(part: object) -> bool:
    """Whether a part of a message is a text, and no image."""
    return (
        isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("type") == "text"
    )


def _parsed(fields: dict, name: str):
    """An argument of the chat template. In a table it may be a text of JSON, since a column has one
    type for all rows."""
    value = fields.pop(name, None)
    if not isinstance(value, str):
        return value
    with user_error(name):
        return json.loads(value or "null")


def as_text(value: object) -> str:
    """A value as settings write it: true, null, and 4 for a table's 4.0."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        short = f"{value:g}"
        # a probability of 0.9999999 is not 1
        if value.is_integer() or not float(short).is_integer():
            return short
    return str(value)


def read_label(fields: dict) -> bool:
    value = _take(fields, "label")
    text = as_text(value)
    if text in LABELS:
        return LABELS[text]
    expected = "true, false, 1, 0, chosen, rejected, desirable, undesirable, up, down"
    raise BadInput(f"label: expected {expected}; got {value!r:.50}")


def _optional_number(fields: dict, name: str, lowest: float = -1e30) -> float | None:
    """The number of a field; None if it is not there. An empty cell of a csv file is a field that is not there."""
    value = fields.pop(name, "")
    return None if value == "" else _number(value, name, lowest)


def _number(value: object, name: str, lowest: float = -1e30) -> float:
    """A number, or its text as in a csv file. Below 1e30 it is finite in float32, too."""
    with suppress(ValueError):
        number = float(str(value))  # by its text: those of True, [1], ... are no numbers
        if lowest <= number < 1e30:
            return number
    raise BadInput(f"{name}: expected a finite number from {lowest:g} on, got {value!r:.50}")


# ---- one record of an answer ---------------------------------------------------------------------
# generate.py, the page for thumbs and the iterations of spin.py and online.py write it. It holds everything that the
# model was asked. kto.py therefore trains on exactly the prompt that was answered. Two prompts are equal if everything
# that the model was asked is equal.


def fields_of_prompt(record: Record) -> dict:
    """The fields of a prompt in a file. A record that is read from these fields has the same prompt."""
    prompt_fields = {
        "prompt": record.prompt,
        "tools": record.tools,
        "chat_template_kwargs": record.template_kwargs,
        "date": record.date,
    }
    prompt_fields = {name: value for name, value in prompt_fields.items() if value is not None}
    fields = {"prompt": record.prompt} | record.beside | record.extra | prompt_fields
    return json.loads(json.dumps(fields, default=str))  # a table has days, too


def prompt_key(record: Record) -> str:
    """A key that is equal for equal prompts."""
    without_empty = record._replace(template_kwargs=record.template_kwargs or None)
    return json.dumps(fields_of_prompt(without_empty), sort_keys=True)


def answer_fields(completion: str, cut: bool) -> dict:
    """The fields of the answer in a file, after fields_of_prompt."""
    return {"completion": completion, "cut": cut}

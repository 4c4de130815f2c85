"""Messages and dialogues of foreign records, in our form: a list of {"role", "content"}.

A field may hold a text, messages under other names, a list of texts by turns, a text of JSON, or a text in which
marks begin the turns; and an answer may be a whole dialogue, of which only the last turn is the answer.

Reading order: turns_or_text (what a field of a record becomes); message and text_of (one message); texts in which
marks begin the turns (data.turns); with_dialogue (an answer that is a dialogue); with_lists_of_messages and
with_its_prompt (a record of our own form, whose messages have another form or whose prompt is elsewhere).
"""

import re

from infra.console import BadInput
from records.forms import ALIASES, PROMPTS, ROLES, as_text, as_turns
from records.layout import PAIR, Layout
from records.paths import Skipped, is_lists_by_key, is_there, opened, rows

# fields of ours that hold an answer, and all that hold texts of a dialogue
ANSWERS = ("completion", "messages", *PAIR)
TEXTS = (*PROMPTS, *ANSWERS)
# kinds of parts of a message that are no part of its text; step-start is a mark of the AI SDK
LEFT_OUT = re.compile("think|reason|tool|function|_call|step-start")
# the same parts where a tool writes them into the text: Open WebUI, Dify, and LibreChat
# (no pattern begins with blanks, unless at the start of the text: a long run of them would take for ever)
FLATTENED = re.compile(
    r'<details type="(?:reasoning|tool_calls|code_interpreter)".*?</details>'
    r"|^\s*<details style=[^>]*>\s*<summary>\s*Thinking\.\.\..*?</details>"
    r"|^\s*:::thinking\n.*?\n:::",
    re.DOTALL,
)
# the fields of a message that hold an image or a document beside its text
FILES = ("files", "attachments", "images", "image_urls")
# a list of messages as a text: JSON, or as Python prints it
PRINTED = re.compile(r"""\s*\[\s*\{\s*(['"])(role|from|content|value)\1\s*:""")


# ---- a field that holds a text or messages -------------------------------------------------------


def turns_or_text(layout: Layout, name: str, value: object) -> object:
    """What the column `name` of a prompt or an answer leads to: a text, messages in our form, or a list of texts
    (see with_dialogue, alternating). Raises Skipped, BadInput."""
    if isinstance(value, str):
        content = opened_field(name, value)
        if not is_message(content) and not is_list_of_messages(content):
            return own_words(layout, value)
        value = content
    messages = value if isinstance(value, list) else [value]
    if messages and all(isinstance(x, str) for x in messages):
        return messages
    if all(isinstance(x, dict) for x in messages):
        return [message(layout, x) for x in messages]
    return value


def opened_field(name: str, text: str) -> object:
    """What a text of JSON holds (paths.opened); the message names the field. Raises BadInput."""
    try:
        return opened(text)
    except BadInput as e:
        raise BadInput(f"{name}: {e}") from None


def alternating(prompt: object) -> object:
    """A list of texts as turns, of which the last is the user's; anything else as it is."""
    if not isinstance(prompt, list) or not all(isinstance(x, str) for x in prompt):
        return prompt
    roles = ("user", "assistant")
    last = len(prompt) - 1
    return [{"role": roles[(last - i) % 2], "content": text} for i, text in enumerate(prompt)]


def is_message(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    return value.keys() >= {"role", "content"} or value.keys() >= {"from", "value"}


def is_list_of_messages(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(is_message, value))


# ---- one message ---------------------------------------------------------------------------------


def message(layout: Layout, raw: object) -> dict:
    """One message in our form. Raises Skipped, BadInput."""
    content = content_value(layout, raw)
    role = role_of(layout, raw)
    if role is None:
        value = role_value(layout, raw)
        known = ", ".join(dict.fromkeys(layout.roles))
        raise BadInput(f"role: {value!r:.50}: not one of {known} (see data.roles)")
    calls = {}
    if isinstance(raw, dict):
        calls = {x: raw[x] for x in ("tool_calls", "tool_call_id") if is_there(raw.get(x))}
        if role == "tool" and is_there(raw.get("name")):
            calls["name"] = raw["name"]
    text = own_words(layout, content) if isinstance(content, str) else text_of(content)
    if isinstance(raw, dict) and any(is_there(raw.get(name)) for name in FILES):
        raise Skipped("with a file beside a message")
    if role in ("system", "developer"):  # an empty one is what the model was given
        return {"role": role, "content": text}
    if not text and not calls:
        raise Skipped("with an empty message")
    return {"role": role, "content": text or None, **calls}


def role_of(layout: Layout, raw: object) -> str | None:
    """The role of a message, by our name; None for one that is not known."""
    return layout.roles.get(as_text(role_value(layout, raw)).lower())


def role_value(layout: Layout, raw: object) -> object:
    """The role of a message as it stands there."""
    return field_of_message(layout, raw, "role", ("role", "from"))


def content_value(layout: Layout, raw: object) -> object:
    """The content of a message as it stands there."""
    return field_of_message(layout, raw, "content", ("content", "value", "text"))


def field_of_message(layout: Layout, raw: object, column: str, names: tuple[str, ...]) -> object:
    """What a column of data.columns leads to in a message; without this column the first of these fields."""
    if column in layout.columns:
        return layout.columns[column].one(raw)
    if isinstance(raw, dict):
        for name in names:
            if raw.get(name) is not None:
                return raw[name]
    return None


def text_of(content: object) -> str:
    """The text of a message: its parts joined, without reasoning and tools. Raises Skipped for a part that
    is no text, such as an image: the answer was to more than the text."""
    if isinstance(content, str):
        return without_flattened_parts(content)
    if content is None:
        return ""
    parts = content if isinstance(content, list) else [content]
    return without_flattened_parts("".join([text_of_part(part) for part in parts]))


def own_words(layout: Layout, text: str) -> str:
    """A text without FLATTENED parts, and counted if it has one."""
    words = without_flattened_parts(text)
    if words != text:
        layout.counts["texts, of which reasoning or a call of tools was taken off"] += 1
    return words


def without_flattened_parts(text: str) -> str:
    pieces = FLATTENED.split(text)
    if len(pieces) == 1:
        return text
    return "\n\n".join(filter(None, map(str.strip, pieces)))


def text_of_part(part: object) -> str:
    """The text of one part; empty for reasoning and tools. Raises Skipped."""
    if isinstance(part, str):
        return part
    kind = type(part).__name__
    if isinstance(part, dict):
        named_kind = str(part.get("type", "text"))
        if LEFT_OUT.search(named_kind) or part.get("thought") is True:  # so Gemini marks its own
            return ""
        inner = part.get("content")  # an item of OpenAI's Responses has parts of its own
        if isinstance(inner, list):
            return text_of(inner)
        text = part.get("text")
        if isinstance(text, dict):
            text = text.get("value")
        if isinstance(text, str):
            return text
        kind = named_kind or kind
    raise Skipped(f"with a part of a message that is no text ({kind})")


# ---- texts in which marks begin the turns (data.turns) -------------------------------------------


def split_turns(value: object, marks: dict[str, str]) -> object:
    """The messages of a text in which marks begin the turns. A text without marks stays one, and what is no text
    stays as it is. marks: {mark: role}; none where data.turns is not given."""
    if not marks or not isinstance(value, str):
        return value
    # the longest first: a mark may begin with another one
    longest_first = sorted(marks, key=len, reverse=True)
    pattern = "|".join(re.escape(mark) for mark in longest_first)
    # re.split gives what stands before the first mark, and then mark, words, mark, words, ...
    before, *parts = re.split(f"({pattern})", value)
    if not parts:
        return value.strip()
    turns = []
    if before.strip():
        turns.append({"role": "user", "content": before.strip()})
    for mark, words in zip(parts[::2], parts[1::2]):
        turns.append({"role": marks[mark], "content": words.strip()})
    last = turns[-1]
    if len(turns) > 1 and last["role"] == "assistant" and not last["content"]:
        turns.pop()  # a prompt that ends where the answer begins
    return turns


def with_split_turns(layout: Layout, fields: dict) -> dict:
    """The fields of a record, whose texts become the messages that marks begin; a prompt without marks is a turn of
    the user. Raises Skipped."""
    if not layout.marks:
        return fields
    result = {}
    dialogues = []  # of chosen and rejected
    for name, value in fields.items():
        our_name = ALIASES.get(name, name)
        if our_name in TEXTS and isinstance(value, str):
            value = split_turns(value, layout.marks)
            if our_name in PROMPTS:
                value = as_turns(value)
            if our_name in PAIR and isinstance(value, list):
                dialogues.append(value)
        result[name] = value
    for turns in dialogues:
        if not turns or turns[-1]["role"] != "assistant" or not turns[-1]["content"]:
            raise Skipped("whose last turn is not the assistant's")
    if len(dialogues) == 2 and dialogues[0][:-1] != dialogues[1][:-1]:
        raise Skipped("whose earlier turns differ")
    return result


# ---- an answer that is a dialogue ----------------------------------------------------------------


def with_dialogue(fields: dict, name: str, answer: object, turn: object) -> tuple[dict, object]:
    """The fields of the prompt, and the answer, to which the column `name` leads. An answer may be a whole dialogue:
    messages, or a list of texts beside a list of prompts. turn: which answer of the dialogue counts, from 1; None:
    the last. Raises Skipped, BadInput."""
    prompt_field = prompt_name(fields)
    prompt = fields.get(prompt_field)
    if not isinstance(answer, list):
        if prompt is None:
            return fields, answer
        return {**fields, prompt_field: alternating(prompt)}, answer
    if not all(map(is_there, answer)):
        raise Skipped("with an empty answer")
    if all(isinstance(x, str) for x in answer):
        answer = join_lists(prompt_field, prompt, answer)
        prompt = None  # the dialogue has it now
    if not all(isinstance(x, dict) for x in answer):
        raise BadInput(f"{name}: expected a text, texts or messages; got {answer!r:.50}")
    if turn is not None:
        answer = answer[: end_of_turn(answer, turn)]
    if not answer or answer[-1]["role"] != "assistant":
        raise Skipped("whose last turn is not the assistant's")
    if not answer[-1].get("content") and not answer[-1].get("tool_calls"):
        raise Skipped("with an empty answer")
    *before, last = answer
    if not before:
        return fields, last
    others = {x: value for x, value in fields.items() if ALIASES.get(x, x) not in PROMPTS}
    if prompt is not None and before[0]["role"] not in ("user", "system"):
        # the dialogue goes on from the prompt; else it has it already
        return {**others, "prompt": [*as_turns(prompt), *before]}, last
    contents = [str(turn.get("content")).strip() for turn in before]
    if isinstance(prompt, str) and prompt.strip() not in contents:
        raise Skipped("whose dialogue does not have the prompt")
    return {**others, "prompt": before}, last


def prompt_name(fields: dict) -> str:
    """The name of the field that holds the prompt, which may be another one than ours (`question`)."""
    for our_name in PROMPTS:
        for name in fields:
            if ALIASES.get(name, name) == our_name:
                return name
    return "prompt"


def join_lists(name: str, prompts: object, answers: list[str]) -> list[dict]:
    """The messages of a list of prompts (the field `name`) and a list of their answers. Raises BadInput."""
    if not isinstance(prompts, list) or not prompts or not isinstance(prompts[0], str):
        prompts = []
    if len(prompts) != len(answers):
        raise BadInput(f"{name}: {len(prompts)} texts beside {len(answers)} answers")
    messages = []
    for prompt, answer in zip(prompts, answers):
        messages += as_turns(prompt)
        messages.append({"role": "assistant", "content": answer})
    return messages


def end_of_turn(messages: list[dict], turn: object) -> int:
    """How many messages there are up to the assistant's answer number `turn`, from 1. Raises BadInput."""
    ends = [i + 1 for i, x in enumerate(messages) if x["role"] == "assistant"]
    turn = as_text(turn)  # 2 of a table's 2.0
    if not turn.isdecimal() or not 1 <= int(turn) <= len(ends):
        raise BadInput(f"turn: {turn}: the dialogue has {len(ends)} answers")
    return ends[int(turn) - 1]


# ---- a record of our own form --------------------------------------------------------------------


def with_lists_of_messages(layout: Layout, record: dict) -> dict:
    """A record of our own form; its messages, where they have another form, become a list of {"role", "content"}.
    Raises Skipped, BadInput."""
    result = {}
    for name, value in record.items():
        if ALIASES.get(name, name) in TEXTS:
            value = list_of_messages(layout, name, value)
        result[name] = value
    return result


def list_of_messages(layout: Layout, name: str, value: object) -> object:
    """The messages of a text of JSON (a cell of a csv file has no list), of lists by key (so the datasets package
    writes a list of structs), or with a content of parts; anything else as it is. Raises Skipped, BadInput."""
    printed = PRINTED.match(value) if isinstance(value, str) else None
    if printed:
        if printed[1] == "'":
            raise BadInput(
                f"{name}: messages as Python prints them; write JSON there, or a .jsonl or .parquet file"
            )
        messages = opened_field(name, value)
        if not is_list_of_messages(messages):
            return value
        layout.counts[f"whose {name} is a text of JSON, read as messages"] += 1
        value = messages
    if is_lists_by_key(value) and len({len(x) for x in value.values()}) == 1:
        value = rows(value)
    if not is_list_of_messages(value):
        return value
    return [x | {"content": text_of(x["content"])} if has_parts(x) else x for x in value]


def has_parts(message: dict) -> bool:
    parts = message.get("content")
    return isinstance(parts, list) and all(isinstance(part, dict) for part in parts)


def with_its_prompt(record: dict) -> dict:
    """A record whose prompt is elsewhere: in `conversations` beside chosen and rejected (LLaMA-Factory), or
    in the answers, which are whole dialogues, while `prompt` repeats their last question."""
    answers = [record[name] for name in (*PAIR, "completion") if is_there(record.get(name))]
    dialogue = record.get("conversations") or record.get("messages")
    has_prompt = any(name in record for name in (*PROMPTS, "question"))
    if len(answers) == 2 and not has_prompt and ends_before_the_answer(dialogue):
        others = {x: y for x, y in record.items() if x not in ("conversations", "messages")}
        return {**others, "prompt": dialogue}
    prompt = record.get("prompt")
    if isinstance(prompt, str) and answers and all(is_long_dialogue(x) for x in answers):
        questions = [x[-2].get("content", x[-2].get("value")) for x in answers]
        if all(question == prompt for question in questions):
            return {x: y for x, y in record.items() if x != "prompt"}
    return record


def ends_before_the_answer(dialogue: object) -> bool:
    """Whether this is a dialogue whose last turn is not the assistant's."""
    if not is_list_of_messages(dialogue):
        return False
    last = dialogue[-1]
    role = str(last.get("role", last.get("from")))
    return ROLES.get(role.lower()) != "assistant"


def is_long_dialogue(value: object) -> bool:
    """Whether this is a dialogue of more than a question and an answer."""
    return isinstance(value, list) and len(value) > 2 and is_message(value[-2])

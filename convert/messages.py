"""Messages and dialogues of foreign records, in our form: a list of {"role", "content"}.

A field may hold a text, messages under other names, a list of texts by turns, a text of JSON, or a text with marks
at the beginning of turns. An answer may be a whole dialogue; only its last turn is the answer.

Reading order: text_or_turns (a field of a record); message and text_of (one message); texts with
marks at the beginning of turns (--turns); last_of_dialogue (an answer that is a dialogue).
"""

import re

from convert.layout import Layout
from convert.paths import opened
from convert.values import Skipped, is_there, number
from infra.console import BadInput
from records.forms import ALIASES, PROMPTS, as_answer, as_text, as_turns, is_message

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
# fields of a message with tool calls, and those with an image or a document
CALLS = ("tool_calls", "tool_call_id")
FILES = {"files", "attachments", "images", "image_urls"}


# ---- a field that holds a text or messages -------------------------------------------------------


def text_or_turns(layout: Layout, name: str, value: object) -> object:
    """The value of the column `name` of a prompt or an answer: a text, messages in our form, or a list of texts
    (see last_of_dialogue). Raises Skipped, BadInput."""
    if isinstance(value, str):
        content = opened(value)
        messages = content if isinstance(content, list) else [content]
        if not messages or not all(map(is_message, messages)):
            return split_turns(layout, own_words(layout, value))
    else:
        messages = value if isinstance(value, list) else [value]
    if set(map(type, messages)) == {dict}:
        return [message(layout, x) for x in messages]
    return value


# ---- one message ---------------------------------------------------------------------------------


def message(layout: Layout, raw: object) -> dict:
    """One message in our form. Raises Skipped, BadInput."""
    role = role_of(layout, raw)
    if role is None:
        roles = ", ".join(layout.roles)
        raise BadInput(f"role: {layout.role.one(raw)!r:.50}: not one of {roles} (see --roles)")
    calls = {}
    if isinstance(raw, dict):
        for name in FILES & raw.keys():
            if is_there(raw[name]):
                raise Skipped("with a file in a message")
        for name in CALLS:
            if is_there(raw.get(name)):
                calls[name] = raw[name]
        if role == "tool" and is_there(raw.get("name")):
            calls["name"] = raw["name"]
    text = own_words(layout, text_of(layout.content.one(raw)))
    if role in ("system", "developer"):  # the model saw an empty one
        return {"role": role, "content": text}
    if not text and not calls:
        raise Skipped("with an empty message")
    return {"role": role, "content": text or None, **calls}


def role_of(layout: Layout, raw: object) -> str | None:
    """The role of a message, by our name; None for one that is not known."""
    name = layout.role.one(raw)
    if not isinstance(name, str):
        name = as_text(name)
    return layout.roles.get(name.lower())


def own_words(layout: Layout, text: str) -> str:
    """A text without FLATTENED parts, and counted if it has one."""
    if "<details" not in text and ":::thinking" not in text:
        return text
    pieces = FLATTENED.split(text)
    if len(pieces) == 1:
        return text
    layout.counts["texts, of which reasoning or a call of tools was taken off"] += 1
    pieces = [piece.strip() for piece in pieces]
    return "\n\n".join(filter(None, pieces))


def text_of(content: object) -> str:
    """The text of a message: its parts joined, without reasoning and tools. Raises Skipped for a part that
    is no text, such as an image: the answer was to more than the text."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if isinstance(content, list):
        return "".join(map(text_of, content))
    kind = type(content).__name__
    if isinstance(content, dict):
        kind = str(content.get("type", "text"))
        if LEFT_OUT.search(kind) or content.get("thought") is True:  # so Gemini marks its own
            return ""
        # OpenAI's Responses have parts inside
        for name in ("content", "text", "value"):
            if isinstance(content.get(name), str | list | dict):
                return text_of(content[name])
    raise Skipped(f"with a part of a message that is no text ({kind})")


# ---- texts with marks at the beginning of turns (--turns) -----------------------------------------


def split_turns(layout: Layout, text: object) -> object:
    """The messages of a text with marks at the beginning of turns. A text without marks stays one, and so do
    messages."""
    marks = layout.marks
    if not marks or not isinstance(text, str):
        return text
    longest_first = sorted(marks, key=len, reverse=True)  # a mark may begin with another one
    pattern = "|".join(map(re.escape, longest_first))
    # re.split gives the text before the first mark, and then mark, words, mark, words, ...
    before, *parts = re.split(f"({pattern})", text)
    before = before.strip()
    if not parts:
        return before
    layout.was_marked = True
    turns = [{"role": "user", "content": before}] if before else []
    for mark, words in zip(parts[::2], parts[1::2]):
        turns.append({"role": marks[mark], "content": words.strip()})
    if len(turns) > 1 and turns[-1] == {"role": "assistant", "content": ""}:
        turns.pop()  # a prompt that ends where the answer begins
    return turns


# ---- an answer that is a dialogue ----------------------------------------------------------------


def last_of_dialogue(fields: dict, name: str, dialogue: list, turn: object) -> tuple[dict, dict]:
    """The fields of the prompt, and the answer: the last turn of the dialogue in the column `name`. The dialogue is
    messages, or a list of texts for a list of prompts. turn: which of its answers counts, from 1; None: the last.
    Raises Skipped, BadInput."""
    prompt_field = next((x for x in fields if ALIASES.get(x, x) in PROMPTS), "prompt")
    prompt = fields.get(prompt_field)
    if not all(map(is_there, dialogue)):
        raise Skipped("with an empty answer")
    kinds = set(map(type, dialogue))
    if kinds == {str}:
        dialogue = join_lists(prompt_field, prompt, dialogue)
        prompt = None  # the dialogue has it now
    elif kinds != {dict}:
        raise BadInput(f"{name}: expected a text, texts or messages; got {dialogue!r:.50}")
    if turn is not None:
        dialogue = dialogue[: end_of_turn(dialogue, turn)]
    *before, last = dialogue
    if last["role"] != "assistant":
        raise Skipped("whose last turn is not the assistant's")
    if not before:
        return fields, last
    beside = {x: value for x, value in fields.items() if ALIASES.get(x, x) not in PROMPTS}
    if prompt is not None and before[0]["role"] not in ("user", "system"):
        # the dialogue continues the prompt; otherwise it has the prompt already
        return {**beside, "prompt": [*as_turns(prompt), *before]}, last
    contents = [str(turn["content"]).strip() for turn in before]
    if isinstance(prompt, str) and prompt.strip() not in contents:
        raise Skipped("whose dialogue does not have the prompt")
    return {**beside, "prompt": before}, last


def join_lists(name: str, prompts: object, answers: list[str]) -> list[dict]:
    """The messages of a list of prompts (the field `name`) and a list of their answers. Raises BadInput."""
    if not isinstance(prompts, list) or len(prompts) != len(answers):
        raise BadInput(f"{name}: expected a list of {len(answers)} texts, as many as answers")
    messages = []
    for prompt, answer in zip(prompts, answers):
        messages += [*as_turns(prompt), as_answer(answer)]
    return messages


def end_of_turn(messages: list[dict], turn: object) -> int:
    """How many messages there are up to the assistant's answer number `turn`, from 1. Raises BadInput."""
    ends = [i + 1 for i, x in enumerate(messages) if x["role"] == "assistant"]
    place = number(turn)
    if place not in range(1, len(ends) + 1):
        raise BadInput(f"turn: {turn}: the dialogue has {len(ends)} answers")
    return ends[int(place) - 1]

"""Messages to text, by a model's chat template; and a check that the text has all that the record says.

transformers runs the template in its sandbox. A template silently drops what it does not know: turns of a role,
a field of a message, text with a tool call. Therefore each rendered record is checked.

Reading order: ChatTemplate.render, then ChatTemplate.check. The template writes the record once more with a mark on
both sides of each text (mark_texts), and each marked text must be in the result once (times_written).
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date as Date
from functools import partial
from os.path import commonprefix
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from infra.console import BadInput, user_error
from records.forms import Record, as_answer, as_turns, parse_json

MARK = "\ue000"  # a private character: no token merges with it, no template looks for it
# Fields of a message that hold its author's thinking. Many templates drop it in all turns except the last
# one, on purpose: a model does not see it at inference either.
REASONING = ("reasoning_content", "reasoning", "thinking")
RESULTS = ("tool", "function", "ipython")  # roles of a tool's result
EARLIER_REASONING = "with reasoning in earlier turns, which the chat template drops"
Write = Callable[..., str]  # messages to text


class LeftOut(BadInput):
    """The chat template drops or repeats a text of the record."""


class Text(NamedTuple):
    """A text of a dialogue, and its place."""

    turn: int  # -1: it is no text of a turn
    role: str
    field: str
    text: str


class ChatTemplate:
    """A model's chat template, run by transformers' tokenizer `hf`."""

    def __init__(self, hf: PreTrainedTokenizerBase, date: str | None, kwargs: dict):
        """kwargs: for the template, where a record gives none of these names."""
        self.hf = hf
        define_date(date)  # a bad one is refused here
        self.date = date
        self.kwargs = kwargs
        self.source = str(hf.chat_template)
        self.uses_date = "strftime_now" in self.source
        # the settings of the first record, for around_plain_answer
        self.first: Record | None = None

    def asked(self, record: Record) -> Record:
        """The record with the template's settings and day."""
        kwargs = self.kwargs if record.template_kwargs is None else record.template_kwargs
        date = (record.date or self.date) if self.uses_date else None
        return record._replace(template_kwargs=kwargs, date=date)

    def writer(self, record: Record) -> Write:
        """The function that writes messages as this record asks for, with its tools."""
        record = self.asked(record)
        with user_error("date", record.date):
            macro = define_date(record.date)
        template = macro + template_of(self.hf, record.tools)
        return partial(
            self.hf.apply_chat_template,
            tools=record.tools,
            tokenize=False,
            chat_template=template,
            **record.template_kwargs,
        )

    def around_plain_answer(self) -> tuple[str, str] | None:
        """The text that the template writes between the prompt of a question and its answer, and the text that ends the
        answer. None if it refuses such a dialogue."""
        write = self.writer(self.first or Record([], []))
        question = {"role": "user", "content": "?"}
        try:
            prompt = write([question], add_generation_prompt=True)
            before, end = around_answer(write, [question, {"role": "assistant", "content": ""}])
        except Exception:  # it asks for more, such as a system message
            return None
        lead = before.removeprefix(prompt) if before.startswith(prompt) else ""
        return lead, end

    def render(self, record: Record, counts: Counter) -> tuple[str, list[str]]:
        """The texts of a record's prompt and completions; adds to the counts. Raises BadInput."""
        turns = as_turns(record.prompt)
        self.first = self.first or record._replace(tools=None)
        answers = [as_answer(completion) for completion in record.completions]
        is_text = not set().union(*answers) - {"role", "content"}
        if record.cut and not is_text:
            raise BadInput("cut: expected an answer that is a text, without calls and reasoning")
        if not is_text:
            record = record._replace(cut=None)
        with user_error("tool_calls"):
            turns = [as_engines_give_it(turn) for turn in turns]
            answers = [as_engines_give_it(answer) for answer in answers]
        with user_error("chat template"):
            write = self.writer(record)
            prompt = write(turns, add_generation_prompt=True)
            dialogues = [[*turns, answer] for answer in answers]
            if record.cut is None:
                completions = [text_behind(prompt, write(dialogue)) for dialogue in dialogues]
                written = list(zip(dialogues, completions))
            else:
                completions = [sampled_text(write, dialogue, record.cut) for dialogue in dialogues]
                written = []
            # without answers, or behind sampled ones, the template has written the prompt alone
            written = written or [(turns, None)]
            if any([self.check(write, record, prompt, *texts) for texts in written]):
                counts[EARLIER_REASONING] += 1
        return prompt, completions

    def check(
        self,
        write: Write,
        record: Record,
        prompt: str,
        dialogue: list[dict],
        completion: str | None,
    ) -> bool:
        """Whether the template drops reasoning of the turns before the answer. Raises LeftOut if it drops or repeats
        any other text of the record."""
        has_lost_reasoning = False
        for text, n in times_written(write, record, prompt, dialogue, completion):
            if n == 1 or (n > 1 and text.field == "name"):
                continue
            is_of_answer = completion is not None and text.turn == len(dialogue) - 1
            if n or text.field not in REASONING or is_of_answer:
                fault = "writes more than once" if n else "does not write"
                what = f"{text.field}: {text.text!r:.50} (data.left_out)"
                raise LeftOut(f"{text.role}: the chat template {fault} its {what}")
            has_lost_reasoning = True
        return has_lost_reasoning


def template_of(hf: PreTrainedTokenizerBase, tools: list[dict] | None = None) -> str:
    """The chat template for dialogues with these tools, without the byte order mark that some editors write."""
    return hf.get_chat_template(tools=tools).removeprefix("\ufeff")


def define_date(date: str | None) -> str:
    """A macro to put before a template: its strftime_now is of this day. Without a date strftime_now is undefined. Some
    templates have a fixed day for this case, for the others this is an error. Written in the
    template's language, since transformers 5.23 lets no function of ours into its sandbox."""
    if date is None:  # two days would give two runs; the error has this name
        return "{% set strftime_now = strftime_now_without_data_date %}\n"
    day = Date.fromisoformat(date)
    codes = "%-d %-m %d %m %b %B %a %A %y %Y %j %H %M %S".split()
    filled = "".join(f"|replace('{code}', '{day.strftime(code)}')" for code in codes)
    return "{% macro strftime_now(form) %}{{ form" + filled + " }}{% endmacro %}\n"


# ---- prompt and completion -----------------------------------------------------------------------


def around_answer(write: Write, dialogue: list[dict]) -> tuple[str, str]:
    """The text that the template writes before the last turn's text, and after it. Raises LeftOut."""
    *turns, last = dialogue
    before, mark, end = write([*turns, {**last, "content": MARK}]).partition(MARK)
    if not mark:
        raise LeftOut(f"{last['role']}: the chat template drops the text of the last turn")
    return before, end


def sampled_text(write: Write, dialogue: list[dict], cut: bool) -> str:
    """The text of an answer as it was sampled behind the prompt, and what ends a turn unless the answer was cut. The
    template might also write a thinking before the answer, which the model has not written. Raises LeftOut."""
    text = dialogue[-1]["content"]
    if cut:
        return text
    _, end = around_answer(write, dialogue)
    return text + end


def text_behind(prompt: str, dialogue: str) -> str:
    """The rest of a rendered dialogue after the rendered prompt. Raises BadInput."""
    if dialogue.startswith(prompt):
        return dialogue.removeprefix(prompt)
    n = len(commonprefix((prompt, dialogue)))
    more = prompt[n:]
    raise BadInput(
        "chat template: the rendered dialogue does not begin with the rendered prompt: "
        f"{dialogue[n:]!r:.50} instead of {more!r:.50} (docs/data.md)"
    )


# ---- tool calls ----------------------------------------------------------------------------------


def as_engines_give_it(turn: dict) -> dict:
    """The same turn with an empty text in place of null, and with objects as the arguments of its tool calls. Raises
    BadInput."""
    turn = {**turn, "content": turn.get("content") or ""}
    calls = []
    for call in turn.get("tool_calls") or []:
        function = call.get("function", call)
        if "arguments" in function:
            function = {**function, "arguments": as_object(function["arguments"])}
        calls.append({**call, "function": function} if "function" in call else function)
    return {**turn, "tool_calls": calls} if calls else turn


def as_object(arguments: object) -> object:
    """Arguments as an object. Raises BadInput if they are the text of something else."""
    if isinstance(arguments, str):
        arguments = parse_json(arguments or "{}")
    if not isinstance(arguments, dict | type(None)):
        raise BadInput(f"arguments: expected a JSON object, got {arguments!r:.50}")
    return arguments


# ---- is all there? -------------------------------------------------------------------------------


def mark_of(i: int) -> str:
    return f"qz{i}zq"


MARKS = re.compile(r"qz\d+zq")


def mark_texts(dialogue: list[dict]) -> tuple[list[dict], list[Text]]:
    """The dialogue with a mark on both sides of each text, and the texts in the order of their marks. Thinking within
    a text is a separate text, because templates drop it."""
    texts: list[Text] = []

    def mark(value: object, turn: int, field: str) -> object:
        if not isinstance(value, str):
            return value
        role = dialogue[turn]["role"]
        pieces = re.split("(</?think>)", value)
        for i in range(0, len(pieces), 2):
            bare = pieces[i].strip()  # templates strip blanks, and ask whether there is a text
            if bare:
                is_thinking = role == "assistant" and pieces[i + 1 : i + 2] == ["</think>"]
                sign = mark_of(len(texts))
                texts.append(Text(turn, role, "thinking" if is_thinking else field, bare))
                pieces[i] = pieces[i].replace(bare, sign + bare + sign, 1)
        return "".join(pieces)

    marked = []
    for i, turn in enumerate(dialogue):
        fields = ["content", *REASONING]
        if turn["role"] not in RESULTS:
            fields.append("name")
        texts_of_turn = {field: mark(turn[field], i, field) for field in fields if field in turn}
        marked.append({**turn, **texts_of_turn})
    return marked, texts


def times_written(
    write: Write, record: Record, prompt: str, dialogue: list[dict], completion: str | None
) -> Iterator[tuple[Text, int]]:
    """(text, how often the template writes it) for each text of the record."""
    rendered = prompt + (completion or "")
    marked, texts = mark_texts(dialogue)
    written = ""
    with suppress(Exception):  # the template looks into a text, as for a number
        written = write(marked, add_generation_prompt=completion is None)
    if MARKS.sub("", written) == rendered:
        for i, text in enumerate(texts):
            between_marks = mark_of(i) + text.text + mark_of(i)
            yield text, sum(map(written.count, {between_marks, in_json(between_marks)}))
        texts = []
    # The marks may change more than the texts that they mark. Then look for the texts without marks.
    for text in [*texts, *texts_of_tools(record, dialogue)]:
        is_before_answer = 0 <= text.turn < len(dialogue) - 1
        yield text, int(stands_in(text.text, prompt if is_before_answer else rendered))


def in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def stands_in(text: str, rendered: str) -> bool:
    """Whether a text was written, without blanks around it, unchanged or as JSON."""
    text = text.strip()
    return text in rendered or in_json(text) in rendered


def texts_of_tools(record: Record, dialogue: list[dict]) -> Iterator[Text]:
    """The names, arguments and descriptions of the tools that there are and that are called, and the names of those
    that answer."""
    functions = []
    for turn in dialogue:
        functions += turn.get("tool_calls") or []
        functions += [turn["function_call"]] if turn.get("function_call") else []
        if turn["role"] in RESULTS and isinstance(turn.get("name"), str):
            yield Text(-1, turn["role"], "name", turn["name"])
    for tool in functions + (record.tools or []):
        function = tool.get("function", tool)
        properties = (function.get("parameters") or {}).get("properties") or {}
        texts = [
            function["name"],
            *keys_and_texts(as_object(function.get("arguments"))),
            *properties,
        ]
        # the rest of a schema has many forms
        for schema in (function, *properties.values()):
            description = schema.get("description") if isinstance(schema, dict) else None
            texts += [description] if isinstance(description, str) else []
        for text in texts:
            yield Text(-1, "tools", "text", text)


def keys_and_texts(value: object) -> Iterator[str]:
    """All keys and all texts within a value."""
    if isinstance(value, str):
        yield value
    if isinstance(value, dict):
        value = [x for item in value.items() for x in item]
    if isinstance(value, list):
        for x in value:
            yield from keys_and_texts(x)

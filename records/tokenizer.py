"""Text to token ids, as the model's own tokenizer does it, and the model's chat template.

Reading order: what a record goes through, which is render (messages to text), shorten (a bound for
long texts) and encode_all (text to ids, with BOS and EOS); then how a Tokenizer is made from a
model's folder, and the sandbox in which templates run.
"""

import contextlib
import functools
import json
import math
import re
import signal
import threading
from collections.abc import Iterable, Iterator
from datetime import date as Date
from os.path import commonprefix
from pathlib import Path
from typing import NamedTuple

import jinja2
import jinja2.ext
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from records.forms import Fault, Record, as_turns, short_json
from runs.errors import BadInput, parse_file, printable, user_error
from runs.small_files import read_object

ENCODE_TEXTS = 4096  # texts in one call of the tokenizer
# What a chat template may take for one record.
RENDER_SECONDS = 10.0
RENDER_CHARACTERS = 10**8
LARGEST_PRODUCT = 10**7  # of a multiplication in a chat template
MARK = "\ue000"  # a private character: no token merges with it, no template looks for it
NO_TOKENIZER_JSON = """{folder}: tokenizer.model alone does not say which texts are special tokens; make a \
tokenizer.json of it: pip install transformers sentencepiece protobuf && python -c "from transformers import \
AutoTokenizer as A; A.from_pretrained('{folder}').save_pretrained('{folder}')\""""
# The steps of a tokenizer.json may make a text so many times as long, in characters.
MOST_GROWTH = 1000
# The parts of a tokenizer.json that put a space before a text.
SPACE_PREFIX = rb'"Prepend"|"prepend_scheme":"(first|always)"|"add_prefix_space":true'


class Endless(Fault):
    """A chat template that did not come to an end for this record: the next would take as long."""


class Texts(NamedTuple):
    """A record as text, ready to be encoded."""

    prompt: str
    completions: list[str]
    by_template: bool  # a chat template made them: they have their BOS and their end already


class Tokenizer:
    """A model's tokenizer and chat template, from the files in its folder.

    eos        id of the end of a completion; required
    bos        id of the beginning of a text, or None; adds_bos: the tokenizer puts it there itself
    stops      ids that end a sampled completion: EOS, and those that the model's config names
    n_vocab    number of token ids, added tokens included
    template   the chat template, or None; template_text: its text
    adds_space the tokenizer puts a space before a text, as SentencePiece does
    """

    def __init__(self, folder: Path, chat_template: str | None = None, date: str | None = None):
        """`chat_template`: a jinja file in place of the folder's own. `date`: today, for templates
        that ask for it with strftime_now. Raises BadInput."""
        self.config = model_file(folder, "tokenizer_config.json")
        file = folder / "tokenizer.json"
        if not file.is_file() and (folder / "tokenizer.model").is_file():
            raise BadInput(NO_TOKENIZER_JSON.format(folder=folder))
        try:
            _refuse_growth(file)  # before loading, which normalizes the added tokens
            self.processor = tokenizers.Tokenizer.from_file(str(file))
        except BadInput:
            raise
        except Exception as e:  # the tokenizers package raises bare Exception
            reason = f" ({e})" if str(e) else ""
            raise BadInput(f"{folder}: no usable tokenizer.json{reason}") from None
        self._read_tokenizer_json(folder)
        if self.eos is None:
            raise BadInput(
                f"{folder}/tokenizer_config.json: eos_token: missing: a completion could never end"
            )
        self.adds_bos = self.bos is not None and self._text_begins_with_bos()
        more_stops = [i for i in _model_token_ids(folder, "eos") if i != self.eos]
        self.stops = (self.eos, *more_stops)
        self.template_text = self._template_text(folder, chat_template)
        self.template = self._compile_template(date, chat_template or folder)

    # ---- a record's way: render, shorten, encode -------------------------------------------------

    def render(self, record: Record, by_template: bool = False) -> Texts:
        """The texts of a record's prompt and completions. Raises Fault.

        Strings stay as they are, unless they are to be rendered `by_template`. As soon as one of
        them is a message, all go through the chat template: the prompt's text ends where the
        assistant's turn begins, and a completion is what the template writes from there on.
        """
        if not by_template and not record.has_messages:
            return Texts(record.prompt, list(record.completions), by_template=False)
        if self.template is None:
            raise Fault(
                "prompt: messages, but the tokenizer has no chat template: give data.chat_template"
            )
        turns = as_turns(record.prompt)
        answers = []
        for completion in record.completions:
            if isinstance(completion, str):
                completion = {"role": "assistant", "content": completion}
            answers.append(completion)
        try:
            with _time_limit():
                arguments = dict(tools=record.tools, documents=None, **record.template_kwargs)
                prompt = self._run_template(turns, True, arguments)
                completions = [self._completion_text(prompt, turns, a, arguments) for a in answers]
                tool_names = _tool_names([*turns, *answers], record.tools or [])
        except Fault:
            raise
        except Exception as e:  # a template is a program: it may raise anything
            reason = str(e).splitlines()[0] if str(e) else type(e).__name__
            hint = " (data.date gives it a day)" if "strftime_now" in reason else ""
            raise Fault(f"chat template: {reason}{hint}") from None
        everything = prompt + "".join(completions)
        for name in tool_names:
            if str(name) not in everything:
                raise Fault(f"tools: the chat template does not write {short_json(name)} anywhere")
        return Texts(prompt, completions, by_template=True)

    def _run_template(self, messages: list[dict], open_answer: bool, arguments: dict) -> str:
        """The text of a dialogue. `open_answer`: it ends where the assistant's next turn begins."""
        pieces, size = [], 0
        for piece in self.template.generate(
            messages=messages, add_generation_prompt=open_answer, **arguments
        ):
            size += len(piece)
            if size > RENDER_CHARACTERS:
                raise Endless(f"chat template: over {size:,} characters for this record")
            pieces.append(piece)
        return "".join(pieces)

    def _completion_text(
        self, prompt: str, turns: list[dict], answer: dict, arguments: dict
    ) -> str:
        """What the template writes after the prompt's text for this answer. Raises Fault."""
        dialogue = self._run_template([*turns, answer], False, arguments)
        if dialogue.startswith(prompt):
            return dialogue.removeprefix(prompt)
        # DeepSeek-R1's template ends the prompt with <think>, but leaves the thinking out of an
        # answer, so that the dialogue does not begin with the prompt. There the completion is the
        # answer's own text, which closes the thinking, and then what ends a turn. The template is
        # run on a mark to find that end.
        marked = self._run_template([*turns, {**answer, "content": MARK}], False, arguments)
        before_answer, _, turn_end = marked.partition(MARK)
        opening = prompt.removeprefix(before_answer)
        text = answer["content"] or ""
        if opening.startswith("<think>") and "</think>" in text:
            return text.lstrip().removeprefix("<think>").lstrip("\n") + turn_end
        n_common = len(commonprefix((prompt, dialogue)))
        raise Fault(
            "chat template: the rendered dialogue does not begin with the rendered prompt: "
            f"{short_json(dialogue[n_common:])} in place of {short_json(prompt[n_common:])}"
        )

    def shorten(self, texts: Texts, max_prompt: int, max_completion: int) -> Texts:
        """The texts, where they are very long cut to more characters than these limits in tokens
        can hold: to encode 50 MB of text would take a minute and gigabytes."""
        prompt = texts.prompt
        n_characters = self._enough_characters(prompt, max_prompt)
        if n_characters < len(prompt):
            bos = self.special_text("bos_token") or ""
            start = bos if prompt.startswith(bos) else ""  # a BOS that the template wrote stays
            prompt = start + prompt[-n_characters:]
        completions = [
            text[: self._enough_characters(text, max_completion)] for text in texts.completions
        ]
        return Texts(prompt, completions, texts.by_template)

    def _enough_characters(self, text: str, max_tokens: int) -> int:
        """So many characters that they make more than max_tokens tokens for certain; for a short text
        its length."""
        if len(text) <= 64 * max_tokens:
            return len(text)
        return (max_tokens + 1) * self._longest_token

    @functools.cached_property
    def _longest_token(self) -> int:
        """In characters."""
        return max(map(len, self.processor.get_vocab()))

    def encode_all(self, all_texts: list[Texts]) -> Iterator[tuple[list[int], list[list[int]]]]:
        """(ids of the prompt, ids of each completion) of each record's texts, of any length.

        Plain texts get BOS in front, if the tokenizer adds one, and EOS at the end; to those of a
        chat template nothing is added. A tokenizer that puts a space before a text would put it
        before a completion, too: there prompt + completion is encoded, and the completion is what
        follows the prompt's ids.
        """
        pieces = []
        for texts in all_texts:
            pieces.append(texts.prompt)
            for completion in texts.completions:
                pieces.append(texts.prompt + completion if self.adds_space else completion)
        encoded = self.encode(pieces)
        for texts in all_texts:
            prompt = next(encoded)
            completions = [next(encoded) for _ in texts.completions]
            if self.adds_space:
                completions = [
                    self._without_prompt(ids, prompt, text)
                    for ids, text in zip(completions, texts.completions)
                ]
            if not texts.by_template:
                prompt = self.with_bos(prompt)
                completions = [self._with_eos(ids) for ids in completions]
            yield prompt, completions

    def _without_prompt(self, ids: list[int], prompt: list[int], completion: str) -> list[int]:
        """The ids of a completion, from `ids`, those of prompt + completion.

        Where one token has characters of both, the prompt keeps its own ids, and the completion is
        encoded after a mark, so that it gets no space.
        """
        if ids[: len(prompt)] == prompt:
            return ids[len(prompt) :]
        mark, marked = self.encode([MARK, MARK + completion])
        return marked[len(mark) :]

    def encode(self, texts: list[str]) -> Iterator[list[int]]:
        """The ids of each text, with nothing added."""
        # In batches: an encoding holds much more than its ids.
        for i in range(0, len(texts), ENCODE_TEXTS):
            batch = texts[i : i + ENCODE_TEXTS]
            for encoding in self.processor.encode_batch(batch, add_special_tokens=False):
                yield encoding.ids

    def with_bos(self, ids: list[int]) -> list[int]:
        """The ids of a plain prompt, with BOS in front, once, if this tokenizer adds one."""
        if self.adds_bos and ids[:1] != [self.bos]:
            return [self.bos, *ids]
        return ids

    def _with_eos(self, ids: list[int]) -> list[int]:
        """The ids of a plain completion, with EOS at the end, once: rendered texts have theirs."""
        return ids if ids[-1:] == [self.eos] else [*ids, self.eos]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of these ids, special tokens left out."""
        return self.processor.decode([int(i) for i in ids])

    # ---- which tokenizer this is -----------------------------------------------------------------

    def same(self, other: "Tokenizer") -> bool:
        """Whether both turn every text into the same ids."""
        return self.processor.to_str() == other.processor.to_str()

    def special_text(self, name: str) -> str | None:
        """The text of eos_token, bos_token, ...: a string in the file, or an object that holds it."""
        token = self.config.get(name)
        return token.get("content") if isinstance(token, dict) else token

    # ---- from the files of a folder --------------------------------------------------------------

    def _read_tokenizer_json(self, folder: Path) -> None:
        self.processor.no_padding()
        self.processor.no_truncation()
        self.bos = self._special_id(folder, "bos")
        self.eos = self._special_id(folder, "eos")
        self.n_vocab = self.processor.get_vocab_size(with_added_tokens=True)
        parts = [self.processor.normalizer, self.processor.pre_tokenizer]
        self.adds_space = any(
            re.search(SPACE_PREFIX, part.__getstate__()) for part in parts if part
        )

    def _special_id(self, folder: Path, name: str) -> int | None:
        """The id of BOS or EOS by the tokenizer's files, else by the model's (GPT-2 on the Hub)."""
        text = self.special_text(f"{name}_token")
        if text is None:
            ids = _model_token_ids(folder, name)
            return ids[0] if ids else None
        if not isinstance(text, str):
            got = f"expected a text, got {printable(text)}"
            raise BadInput(f"{folder}/tokenizer_config.json: {name}_token: {got}")
        special_id = self.processor.token_to_id(text)
        if special_id is None:
            raise BadInput(
                f"{folder}/tokenizer_config.json: {name}_token: {text!r} is no token of tokenizer.json"
            )
        return special_id

    def _text_begins_with_bos(self) -> bool:
        """Whether tokenizer_config.json asks for BOS, or tokenizer.json's post-processor puts it
        before a text."""
        # litgpt's rule also reads the folder's name, so that a copy elsewhere would get other ids.
        is_llama = self.config.get("tokenizer_class") == "LlamaTokenizer"
        if self.config.get("add_bos_token", is_llama):
            return True
        first = self.processor.encode("a", add_special_tokens=True).ids[:1]
        first_of_text = self.processor.encode("a", add_special_tokens=False).ids[:1]
        # Both are BOS where "a" is an unknown token and that has the id of BOS.
        return first == [self.bos] and first_of_text != [self.bos]

    def _template_text(self, folder: Path, chat_template: str | None) -> str | None:
        """The chat template: the given file, else the folder's file, else its config's entry."""
        if chat_template and not Path(chat_template).is_file():
            raise BadInput(f"data.chat_template: {chat_template}: no such file")
        text = self.config.get("chat_template")
        if isinstance(text, list):  # several templates, each with a name
            with user_error(f"{folder}: chat_template", text, (TypeError, KeyError)):
                text = {t["name"]: t["template"] for t in text}.get("default")
        if (folder / "chat_template.jinja").is_file():
            text = parse_file("chat template", folder / "chat_template.jinja")
        if chat_template:
            text = parse_file("chat template", Path(chat_template))
        return text

    def _compile_template(self, date: str | None, place: str | Path) -> jinja2.Template | None:
        """self.template_text as a jinja template, with the functions and names that transformers gives to
        templates. `place`: where it came from, for a message."""
        today = None
        if date:
            with user_error("data.date", date):
                today = Date.fromisoformat(date)
        if self.template_text is None:
            return None
        environment = Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, "jinja2.ext.loopcontrols"],
        )
        # The sandbox itself raises at the second step only: {{ x.__class__ }} alone would be "".
        environment.unsafe_undefined = lambda obj, name: _raise_exception(
            f"{name}: not allowed here"
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        if today:  # without data.date there is none: the real day would make runs differ
            environment.globals["strftime_now"] = today.strftime
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            environment.globals[name] = self.special_text(name) or ""
        try:
            # jinja computes a template's constants now: {{ "a" | center(3000000000) }}
            with _time_limit():
                return environment.from_string(self.template_text)
        except Exception as e:  # jinja and Python's compiler raise many kinds
            raise BadInput(f"{place}: chat template: {e}") from None


def model_file(folder: Path, name: str) -> dict:
    """What a JSON file of a model's folder holds; {} if there is no such file. Raises BadInput."""
    file = folder / name
    return read_object(file) if file.exists() else {}


def _refuse_growth(file: Path) -> None:
    """Raises BadInput for a tokenizer.json that can make a text very much longer."""
    content = json.loads(file.read_bytes())
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        growth = _growth(content.get(name) or {})
        if growth > MOST_GROWTH:
            raise BadInput(
                f"{file}: {name}: it can make a text {growth:.3g} times as long; at most "
                f"{MOST_GROWTH:,} times is taken"
            )


def _growth(step: dict | list) -> float:
    """How many times as long a step of a tokenizer.json (or a sequence of steps) can make a text."""
    if isinstance(step, list):
        return math.prod(map(_growth, step), start=1.0)
    if step.get("type") == "Replace":
        old = step["pattern"].get("String")
        # A regular expression may match between any two characters.
        return max(1, len(step["content"]) / len(old)) if old else 1 + len(step["content"])
    if step.get("type") == "Prepend":
        return 1 + len(step["prepend"])
    if step.get("type") == "TemplateProcessing":
        special = step["special_tokens"].values()
        return len(step["single"]) * max([len(token["ids"]) for token in special], default=1)
    if step.get("type") in ("BertProcessing", "RobertaProcessing"):
        return 3  # one token on each side
    return math.prod(_growth(value) for value in step.values() if isinstance(value, list))


def _model_token_ids(folder: Path, name: str) -> list[int]:
    """The ids that the model's own config names as EOS or BOS: one, several or none."""
    for file in ("generation_config.json", "config.json"):
        ids = model_file(folder, file).get(f"{name}_token_id")
        if ids is not None:
            ids = ids if isinstance(ids, list) else [ids]
            if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
                got = f"expected token ids, got {printable(ids)}"
                raise BadInput(f"{folder / file}: {name}_token_id: {got}")
            return ids
    return []


# ---- what a template can use ---------------------------------------------------------------------


class Sandbox(ImmutableSandboxedEnvironment):
    """Where templates run: jinja's sandbox, without `**` and with a bound on `*`. The time limit
    cannot interrupt such an operation, because Python computes it in a single step."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context, operator, left, right):
        left_size, right_size = _size(left), _size(right)
        if operator == "**" or left_size * right_size > LARGEST_PRODUCT:
            raise jinja2.TemplateError(f"{operator}: too large a result")
        return left * right


class Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}, with which some templates mark the assistant's text
    for training in transformers. Here it changes nothing: what is in it is rendered as it stands."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body)


def _size(value) -> int | float:
    """A number's absolute value, or the length of a text or list."""
    return len(value) if hasattr(value, "__len__") else abs(value)


def _to_json(value, **options) -> str:
    """As transformers' templates have it: letters beyond ASCII stay as they are."""
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise_exception(message):
    raise jinja2.TemplateError(message)


@contextlib.contextmanager
def _time_limit():
    """Raise Endless where what is within takes longer than RENDER_SECONDS. Only in the main thread:
    Python handles signals nowhere else, and a signal without a handler would end the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGALRM, _raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, RENDER_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _raise_timeout(signal_number, frame):
    raise Endless(f"chat template: not done with this record after {RENDER_SECONDS:g} s")


def _tool_names(messages: list[dict], tools: list[dict]) -> list:
    """The names of the tools that are given or called. Raises Fault."""
    try:
        calls = [call for message in messages for call in message.get("tool_calls") or []]
        return [tool.get("function", tool)["name"] for tool in [*calls, *tools]]
    except (TypeError, AttributeError, KeyError):
        raise Fault(
            "tools: expected lists of objects with a name, here and in tool_calls"
        ) from None

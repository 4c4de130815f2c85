"""Text to token ids, as the model's own tokenizer does it, and the model's chat template."""

import contextlib
import json
import re
import signal
from collections.abc import Iterator
from datetime import date as Date
from os.path import commonprefix
from pathlib import Path

import jinja2
import jinja2.ext
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from records.forms import Fault, Record, as_turns, short_json
from runs.errors import BadInput, parse_file, user_error
from runs.files import read_object

ENCODE_TEXTS = 4096  # at a time
RENDER_SECONDS, RENDER_CHARACTERS = 10.0, 10**8  # of a record, at most, in a chat template
MARK = "\ue000"  # a private character: no token merges with it, no template looks for it
# what puts a space before a text, in the parts of a tokenizer.json
PREFIX = rb'"Prepend"|"prepend_scheme":"(first|always)"|"add_prefix_space":true'


def model_file(folder: Path, name: str) -> dict:
    """What a JSON file of a model's folder holds; nothing if it is not there. Raises BadInput."""
    file = folder / name
    return read_object(file, json.loads) if file.exists() else {}


def _model_ids(folder: Path, name: str) -> list[int]:
    """The ids of EOS or BOS that the model itself names: one, several or none."""
    for file in ("generation_config.json", "config.json"):
        if (i := model_file(folder, file).get(f"{name}_token_id")) is not None:
            return i if isinstance(i, list) else [i]
    return []


class Endless(Fault):
    """A template that does not come to an end: the next record's would not either."""


def _late(*_):
    raise Endless(f"chat template: not done with this record after {RENDER_SECONDS:g} s")


class Sandbox(ImmutableSandboxedEnvironment):
    """Where templates run. A product is bounded: the timer cannot end a loop in C."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context, operator, left, right):
        sizes = [len(x) if hasattr(x, "__len__") else abs(x) for x in (left, right)]
        if operator == "**" or sizes[0] * sizes[1] > 10**7:
            raise jinja2.TemplateError(f"{operator}: too large a result")
        return left * right


class Generation(jinja2.ext.Extension):
    """{% generation %} marks the assistant's text, for others: it is rendered as it stands."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), True))


class Tokenizer:
    """A folder's tokenizer.json (or .model) and chat template. EOS is required, BOS only if it
    adds one itself. `date`: what a template's strftime_now knows. Raises BadInput."""

    def __init__(self, folder: Path, chat_template: str | None = None, date: str | None = None):
        self.config = model_file(folder, "tokenizer_config.json")
        self.fast = (folder / "tokenizer.json").is_file()
        try:
            if self.fast:
                self.processor = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            else:
                from litgpt.tokenizer import Tokenizer as Sentencepiece  # slow to import

                lit = Sentencepiece(folder)
                self.processor = lit.processor
        except Exception as e:  # the tokenizers package raises bare Exception
            why = f"no usable tokenizer.json or tokenizer.model{f' ({e})' if str(e) else ''}"
            raise BadInput(f"{folder}: {why}") from None
        # litgpt's rule for BOS also reads the folder's name: a copy elsewhere would give other ids
        llama = self.config.get("tokenizer_class") == "LlamaTokenizer"
        adds = self.config.get("add_bos_token", llama)
        if self.fast:
            self.processor.no_padding()
            self.processor.no_truncation()
            self.bos, self.eos = (self._special(folder, name) for name in ("bos", "eos"))
            # what its post-processor puts before a text, unless the text is unknown and that is BOS
            encode = self.processor.encode
            first, bare = (encode("a", add_special_tokens=on).ids[:1] for on in (True, False))
            adds = adds or first == [self.bos] != bare
            self.n_vocab = self.processor.get_vocab_size(with_added_tokens=True)
            parts = filter(None, (self.processor.normalizer, self.processor.pre_tokenizer))
            self.prefixes = any(re.search(PREFIX, part.__getstate__()) for part in parts)
        else:
            self.bos, self.eos, self.n_vocab = lit.bos_id, lit.eos_id, lit.vocab_size
            self.prefixes = True
        if self.eos is None:
            why = "eos_token: missing: a completion could never end"
            raise BadInput(f"{folder}/tokenizer_config.json: {why}")
        self.adds_bos = self.bos is not None and bool(adds)
        # any of these ends a sampled completion; several models have more than one
        self.stops = (self.eos, *(i for i in _model_ids(folder, "eos") if i != self.eos))
        self.template = self._template(folder, chat_template, date)

    def special_text(self, name: str) -> str | None:
        """A special token's text: a string in the file, or an object that holds it."""
        token = self.config.get(name)
        return token.get("content") if isinstance(token, dict) else token

    def _special(self, folder: Path, name: str) -> int | None:
        """The id of BOS or EOS: by the tokenizer's files, else the model's (GPT-2 on the Hub)."""
        if (token := self.special_text(f"{name}_token")) is not None:
            if (known := self.processor.token_to_id(token)) is None:
                why = f"{name}_token: {token!r} is no token of tokenizer.json"
                raise BadInput(f"{folder}/tokenizer_config.json: {why}")
            return known
        return next(iter(_model_ids(folder, name)), None)

    def _template(self, folder: Path, chat_template, date) -> jinja2.Template | None:
        text = self.config.get("chat_template")
        if chat_template and not Path(chat_template).is_file():
            raise BadInput(f"data.chat_template: {chat_template}: no such file")
        if isinstance(text, list):  # several named ones
            with user_error(f"{folder}: chat_template", text, (TypeError, KeyError)):
                text = {t["name"]: t["template"] for t in text}.get("default")
        for file in (folder / "chat_template.jinja", Path(chat_template or "")):
            if file.is_file():
                text = parse_file("chat template", file)
        with user_error("data.date", date):
            today = date and Date.fromisoformat(date)
        self.source = text
        if text is None:
            return None

        def refuse(message):
            raise jinja2.TemplateError(message)

        extensions = [Generation, "jinja2.ext.loopcontrols"]
        env = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        # the sandbox raises at the second step only: a lone {{ x.__class__ }} would render as ""
        env.unsafe_undefined = lambda obj, name: refuse(f"{name}: not allowed here")
        env.filters["tojson"] = lambda x, **kw: json.dumps(x, **{"ensure_ascii": False, **kw})
        env.globals["raise_exception"] = refuse
        with contextlib.suppress(ValueError):  # signals arrive in the main thread only
            signal.signal(signal.SIGALRM, _late)
        if today:  # not the day's own date: it would make runs differ
            env.globals["strftime_now"] = today.strftime
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            env.globals[name] = self.special_text(name) or ""
        try:
            return env.from_string(text)
        except (jinja2.TemplateError, TypeError, AttributeError) as e:  # or it is no text
            raise BadInput(f"{chat_template or folder}: chat template: {e}") from None

    def render(self, record: Record) -> tuple[str, list[str], bool]:
        """(prompt text, completion texts, whether a template made them). Raises Fault."""
        prompt, answers = record.prompt, list(record.completions)
        if all(isinstance(text, str) for text in (prompt, *answers)):
            return prompt, answers, False
        if self.template is None:
            why = "messages, but the tokenizer has no chat template: give data.chat_template"
            raise Fault(f"prompt: {why}")
        prompt, bot = as_turns(prompt), {"role": "assistant"}
        answers = [a if isinstance(a, dict) else {**bot, "content": a} for a in answers]
        more = dict(tools=record.tools, documents=None, **record.template_kwargs)
        given = [x for m in [*prompt, *answers] for x in m.get("tool_calls") or ()]
        signal.setitimer(signal.ITIMER_REAL, RENDER_SECONDS)
        try:
            head = self._rendered(prompt, True, more)
            behind = [self._behind(head, prompt, a, more) for a in answers]
            names = [x.get("function", x)["name"] for x in [*given, *(record.tools or ())]]
        except Fault:
            raise
        except Exception as e:  # a template is a program: anything may come out of it
            reason = str(e).splitlines()[0] if str(e) else type(e).__name__
            hint = " (data.date gives it a day)" if "strftime_now" in reason else ""
            raise Fault(f"chat template: {reason}{hint}") from None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if lost := [name for name in names if str(name) not in head + "".join(behind)]:
            raise Fault(f"tools: the chat template does not write {short_json(lost[0])} anywhere")
        return head, behind, True

    def _rendered(self, messages: list[dict], prompt: bool, more: dict) -> str:
        pieces, size = [], 0
        asked = dict(messages=messages, add_generation_prompt=prompt)
        for piece in self.template.generate(**asked, **more):
            size += len(piece)
            if size > RENDER_CHARACTERS:
                raise Endless(f"chat template: over {size:,} characters for this record")
            pieces.append(piece)
        return "".join(pieces)

    def _behind(self, head: str, prompt: list[dict], answer: dict, more: dict) -> str:
        """What the template writes behind the prompt for this answer. Raises Fault."""
        whole = self._rendered([*prompt, answer], False, more)
        if whole.startswith(head):
            return whole[len(head) :]
        # R1's template opens the thinking in the prompt and drops it from an answer: such an
        # answer is its own text, which closes the thinking, and ends as the template ends a turn
        marked = self._rendered([*prompt, {**answer, "content": MARK}], False, more)
        before, _, end = marked.partition(MARK)
        text, opened = answer["content"] or "", head.removeprefix(before)
        if opened.startswith("<think>") and "</think>" in text:
            return text.lstrip().removeprefix("<think>").lstrip("\n") + end
        why = "the rendered dialogue does not begin with the rendered prompt"
        parts = [short_json(x[len(commonprefix((head, whole))) :]) for x in (whole, head)]
        raise Fault(f"chat template: {why}: {' in place of '.join(parts)}")

    def same(self, other: "Tokenizer") -> bool:
        """Whether both turn every text into the same ids."""
        return self.fast == other.fast and self._model() == other._model()

    def _model(self) -> str | bytes:
        return self.processor.to_str() if self.fast else self.processor.serialized_model_proto()

    def identity(self) -> str:
        """All that turns records into ids."""
        return repr([self._model(), self.bos, self.eos, self.adds_bos, self.source, self.config])

    def encode(self, texts: list[str]) -> Iterator[list[int]]:
        """Token ids, nothing added. Some at a time: an encoding also holds text and offsets."""
        for i in range(0, len(texts), ENCODE_TEXTS):
            some = texts[i : i + ENCODE_TEXTS]
            if self.fast:  # in parallel
                encodings = self.processor.encode_batch(some, add_special_tokens=False)
                yield from (e.ids for e in encodings)
            else:
                yield from self.processor.encode(some)

    def encode_all(self, rows: list[tuple[str, list[str]]]) -> Iterator[tuple[list, list[list]]]:
        """The ids of each prompt and of its completions, nothing added.

        A tokenizer that puts a space before a text would put it before a completion too: there
        prompt + completion is encoded, and what follows the prompt's own ids is the completion.
        """
        texts = []
        for prompt, answers in rows:
            texts.append(prompt)
            texts += [prompt + a for a in answers] if self.prefixes else answers
        ids = self.encode(texts)
        for _, answers in rows:
            head, wholes = next(ids), [next(ids) for _ in answers]
            if self.prefixes:
                wholes = [self._continued(head, *two) for two in zip(wholes, answers)]
            yield head, wholes

    def _continued(self, head: list[int], whole: list[int], text: str) -> list[int]:
        """A completion's ids behind a prompt's. Where a token straddles the border the prompt
        stays as it is, and the completion is encoded behind a mark: without a space."""
        if whole[: len(head)] == head:
            return whole[len(head) :]
        mark, marked = self.encode([MARK, MARK + text])
        return marked[len(mark) :]

    def enough(self, text: str, limit: int) -> int:
        """So many characters are more tokens than the limit, or the whole text: 50 MB of it would
        take a minute and gigabytes to encode."""
        if len(text) <= 64 * limit:
            return len(text)
        vocab = (
            self.processor.get_vocab()
            if self.fast
            else map(self.processor.id_to_piece, range(self.n_vocab))
        )
        return (limit + 1) * max(map(len, vocab))

    def prompt(self, ids: list[int]) -> list[int]:
        """With BOS in front, once, if this tokenizer adds one."""
        return [self.bos, *ids] if self.adds_bos and ids[:1] != [self.bos] else ids

    def decode(self, ids) -> str:
        return self.processor.decode([int(i) for i in ids])

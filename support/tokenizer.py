"""Text to token ids, as the model's own tokenizer does it, and the model's chat template."""

import json
from collections.abc import Iterator
from pathlib import Path

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from support.errors import BadInput, given, opened
from support.records import Fault, Record, short

ENCODE_TEXTS = 4096  # at a time


def _json(file: Path) -> dict:
    found = opened(None, file, json.loads) if file.exists() else {}
    if not isinstance(found, dict):
        raise BadInput(f"{file}: expected an object, got {short(found)}")
    return found


class Tokenizer:
    """A folder's tokenizer.json (or .model) and chat template. EOS is required, BOS only if it
    adds one itself. Raises BadInput."""

    def __init__(self, folder: Path, chat_template: str | None = None):
        self.config = _json(folder / "tokenizer_config.json")
        self.fast = (folder / "tokenizer.json").is_file()
        try:
            if self.fast:
                self.processor = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            else:
                from litgpt.tokenizer import Tokenizer as Sentencepiece  # slow to import

                lit = Sentencepiece(folder)
                self.processor = lit.processor
        except Exception as e:  # the tokenizers package raises bare Exception
            why = f"no usable tokenizer.json or tokenizer.model ({str(e) or type(e).__name__})"
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
        else:
            self.bos, self.eos, self.n_vocab = lit.bos_id, lit.eos_id, lit.vocab_size
        if self.eos is None:
            why = "eos_token: missing: a completion could never end"
            raise BadInput(f"{folder}/tokenizer_config.json: {why}")
        self.adds_bos = self.bos is not None and bool(adds)
        self.template = self._template(folder, chat_template)

    def _text(self, name: str) -> str | None:
        """A special token's text: a string in the file, or an object that holds it."""
        token = self.config.get(name)
        return token.get("content") if isinstance(token, dict) else token

    def _special(self, folder: Path, name: str) -> int | None:
        """The id of BOS or EOS: by the tokenizer's files, else the model's (GPT-2 on the Hub)."""
        if (token := self._text(f"{name}_token")) is not None:
            if (known := self.processor.token_to_id(token)) is None:
                why = f"{name}_token: {token!r} is no token of tokenizer.json"
                raise BadInput(f"{folder}/tokenizer_config.json: {why}")
            return known
        for file in ("generation_config.json", "config.json"):
            if (i := _json(folder / file).get(f"{name}_token_id")) is not None:
                return i[0] if isinstance(i, list) else i
        return None

    def _template(self, folder: Path, chat_template: str | None) -> jinja2.Template | None:
        text = self.config.get("chat_template")
        if isinstance(text, list):  # several named ones
            with given(f"{folder}: chat_template", text, (TypeError, KeyError)):
                text = {t["name"]: t["template"] for t in text}.get("default")
        if chat_template and not Path(chat_template).is_file():
            raise BadInput(f"data.chat_template: {chat_template}: no such file")
        for file in (folder / "chat_template.jinja", Path(chat_template or "")):
            if file.is_file():
                text = opened("chat template", file)
        if text is None:
            return None
        if not isinstance(text, str):
            raise BadInput(f"{folder}: chat_template: expected a text, got {short(text)}")

        def refuse(message):
            raise jinja2.TemplateError(message)

        env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        env.add_extension("jinja2.ext.loopcontrols")
        # the sandbox raises at the second step only: a lone {{ x.__class__ }} would render as ""
        env.unsafe_undefined = lambda obj, name: refuse(f"{name}: not allowed here")
        env.filters["tojson"] = lambda x, **kw: json.dumps(x, ensure_ascii=False, **kw)
        env.globals["raise_exception"] = refuse  # no strftime_now: a date would make runs differ
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            env.globals[name] = self._text(name) or ""
        try:
            return env.from_string(text)
        except jinja2.TemplateError as e:
            raise BadInput(f"{chat_template or folder}: chat template: {e}") from None

    def render(self, record: Record) -> tuple[str, list[str], bool]:
        """(prompt text, completion texts, whether a template made them). Raises Fault."""
        prompt, answers = record.prompt, list(record.completions)
        if all(isinstance(text, str) for text in (prompt, *answers)):
            return prompt, answers, False
        if self.template is None:
            why = "messages, but the tokenizer has no chat template: give data.chat_template"
            raise Fault(f"prompt: {why}")
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        bot = {"role": "assistant"}
        answers = [a if isinstance(a, dict) else {**bot, "content": a} for a in answers]
        render = self.template.render
        try:
            head = render(messages=prompt, add_generation_prompt=True)
            wholes = [render(messages=[*prompt, a], add_generation_prompt=False) for a in answers]
        except Exception as e:  # a template is a program: anything may come out of it
            reason = str(e).splitlines()[0] if str(e) else type(e).__name__
            raise Fault(f"chat template: {reason}") from None
        if not all(whole.startswith(head) for whole in wholes):
            why = "the rendered dialogue does not begin with the rendered prompt"
            raise Fault(f"chat template: {why}")
        return head, [whole[len(head) :] for whole in wholes], True

    def same(self, other: "Tokenizer") -> bool:
        """Whether both turn every text into the same ids."""
        if self.fast != other.fast:
            return False
        form = "to_str" if self.fast else "serialized_model_proto"
        return getattr(self.processor, form)() == getattr(other.processor, form)()

    def encode(self, texts: list[str]) -> Iterator[list[int]]:
        """Token ids, nothing added. Some at a time: an encoding also holds text and offsets."""
        for i in range(0, len(texts), ENCODE_TEXTS):
            some = texts[i : i + ENCODE_TEXTS]
            if self.fast:  # in parallel
                encodings = self.processor.encode_batch(some, add_special_tokens=False)
                yield from (e.ids for e in encodings)
            else:
                yield from self.processor.encode(some)

    def prompt(self, ids: list[int]) -> list[int]:
        """With BOS in front, once, if this tokenizer adds one."""
        return [self.bos, *ids] if self.adds_bos and ids[:1] != [self.bos] else ids

    def decode(self, ids) -> str:
        return self.processor.decode([int(i) for i in ids])

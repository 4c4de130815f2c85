"""Text to token ids, as the model's own tokenizer does it, and the model's chat template.

transformers reads the tokenizer, encodes, and runs the template in its sandbox. What it does not have
is the border of prompt and completion: a completion must attach to any prompt, so both are encoded
apart. Reading order: what a record goes through, render (messages to text) and encode_all (text to
ids, with BOS and EOS).
"""

from collections.abc import Iterator
from datetime import date as Date
from functools import partial
from os.path import commonprefix
from pathlib import Path

from transformers import AutoTokenizer

from hub import Source, read_json
from records.forms import Record, as_turns
from runs.console import BadInput, user_error
from runs.settings import find_path

MARK = "\ue000"  # a private character: no token merges with it, no template looks for it
BATCH = 4096  # records that are encoded at once: an encoding holds much more than its ids


class Tokenizer:
    """A model's tokenizer and chat template, from the files in its folder.

    hf         transformers' tokenizer
    eos        id of the end of a completion; required
    bos        id of the beginning of a text, or None; adds_bos: the tokenizer puts it there itself
    stops      ids that end a sampled completion: EOS, and those that the model's config names
    template   the text of the chat template, or None
    adds_space the tokenizer puts a space before a text, as SentencePiece does
    """

    def __init__(self, source: Source, chat_template: str | None = None, date: str | None = None):
        """`chat_template`: a jinja file in place of the model's own. `date`: today, for templates that
        ask for it with strftime_now. Raises BadInput."""
        folder = source.tokenizer
        with user_error("tokenizer", folder):
            self.hf = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            self.adds_space = self.hf.tokenize("a")[0][0] in "▁Ġ"
        with user_error("data.chat_template"):
            if file := find_path(chat_template) if chat_template else source.chat_template:
                self.hf.chat_template = file.read_text(encoding="utf-8")
            # a model may have several, by name: the one that is for dialogues without tools
            self.template = self.hf.chat_template and self.hf.get_chat_template()
        with user_error("data.date", date):
            self.define_date = _define_date(date)
        stops = [i for i in (self.hf.eos_token_id, *model_stops(source.root)) if i is not None]
        if not stops:
            raise BadInput(f"{folder}: eos_token: missing: a completion could never end")
        self.eos, self.stops = stops[0], tuple(dict.fromkeys(stops))
        self.bos = self.hf.bos_token_id
        self.adds_bos = self.hf("a").input_ids[:1] == [self.bos]

    # ---- a record's way: render, encode ----------------------------------------------------------

    def render(self, record: Record, by_template: bool = True) -> tuple[str, list[str]]:
        """The texts of a record's prompt and completions. Raises BadInput.

        A chat template writes them: the prompt's text ends where the assistant's turn begins, and a
        completion is what the template writes from there on. A text becomes a turn. Not
        `by_template`: the texts stay as they are.
        """
        if not by_template:
            return record.prompt, record.completions
        if not self.template:
            raise BadInput(
                "chat template: none here, and a record of this file needs one, since it has messages, "
                "system or tools: give data.chat_template"
            )
        turns = as_turns(record.prompt)
        answers = [
            {"role": "assistant", "content": x} if isinstance(x, str) else x
            for x in record.completions
        ]
        with user_error("chat template"):
            write = partial(
                self.hf.apply_chat_template,
                tools=record.tools,
                tokenize=False,
                chat_template=self.define_date + self.hf.get_chat_template(tools=record.tools),
                **record.template_kwargs,
            )
            prompt = write(turns, add_generation_prompt=True)
            completions = [_completion_text(write, prompt, turns, answer) for answer in answers]
            tools = [call for turn in turns + answers for call in turn.get("tool_calls", [])]
            for tool in tools + (record.tools or []):
                name = tool.get("function", tool)["name"]
                if name not in "".join((prompt, *completions)):
                    raise BadInput(f"tools: the chat template does not write {name!r} anywhere")
        return prompt, completions

    def encode_all(
        self, texts: list[tuple[str, list[str]]], by_template: bool
    ) -> Iterator[tuple[list, list]]:
        """(ids of the prompt, ids of each completion) of each record's texts.

        Plain texts get BOS in front, if the tokenizer adds one, and EOS at the end; to those of a
        chat template nothing is added. If the tokenizer puts a space before every text, prompt +
        completion is encoded as one text, and the completion's ids are those after the prompt's.
        """
        for start in range(0, len(texts), BATCH):
            batch, pieces = texts[start : start + BATCH], []
            for prompt, completions in batch:
                prefix = prompt if self.adds_space else ""
                pieces += [prompt, *(prefix + completion for completion in completions)]
            encoded = iter(self.encode(pieces))
            for _, completions in batch:
                prompt, answers = next(encoded), []
                # in this order zip takes no text too many
                for completion, ids in zip(completions, encoded):
                    known = prompt if self.adds_space else []
                    if ids[: len(known)] != known:
                        # One token has characters of both: the prompt keeps its own ids, and the
                        # completion is encoded behind a mark, so that it gets no space.
                        known, ids = self.encode([MARK, MARK + completion])
                    answers.append(ids[len(known) :])
                if not by_template:  # what stands in the text already is not doubled
                    if self.adds_bos and prompt[:1] != [self.bos]:
                        prompt = [self.bos, *prompt]
                    answers = [x + [self.eos] * (x[-1:] != [self.eos]) for x in answers]
                yield prompt, answers

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text, with nothing added."""
        return self.hf(texts, add_special_tokens=False, return_attention_mask=False).input_ids

    def decode(self, ids, special_tokens: bool = False) -> str:
        """The text of these ids, with special tokens or without."""
        options = dict(skip_special_tokens=not special_tokens, clean_up_tokenization_spaces=False)
        return self.hf.decode(ids, **options)


def _define_date(date: str | None) -> str:
    """What stands before a template, so that its strftime_now is of this day. Without a date there is
    none: some templates have a fixed day for this case, in the others it is an error. Written in the
    template's language, since transformers 5.23 lets no function of ours into its sandbox."""
    if date is None:  # two days would give two runs; the error has this name
        return "{% set strftime_now = strftime_now_without_data_date %}\n"
    day = Date.fromisoformat(date)
    codes = "%-d %-m %d %m %b %B %a %A %y %Y %j %H %M %S".split()
    filled = "".join(f"|replace('{code}', '{day.strftime(code)}')" for code in codes)
    return "{% macro strftime_now(form) %}{{ form" + filled + " }}{% endmacro %}\n"


def _completion_text(write, prompt: str, turns: list[dict], answer: dict) -> str:
    """What the template writes after the prompt's text for this answer. Raises BadInput."""
    dialogue = write([*turns, answer])
    if dialogue.startswith(prompt):
        return dialogue.removeprefix(prompt)
    # DeepSeek-R1's template ends the prompt with <think>, but leaves the thinking out of an answer, so
    # that the dialogue does not begin with the prompt. There the completion is the answer's own text,
    # which closes the thinking, and then what ends a turn: the template shows it behind a mark.
    before, _, turn_end = write([*turns, {**answer, "content": MARK}]).partition(MARK)
    text = answer["content"] or ""
    if prompt.removeprefix(before).startswith("<think>") and "</think>" in text:
        return text.lstrip().removeprefix("<think>").lstrip("\n") + turn_end
    n = len(commonprefix((prompt, dialogue)))
    raise BadInput(
        "chat template: the rendered dialogue does not begin with the rendered prompt: "
        f"{dialogue[n:]!r:.50} in place of {prompt[n:]!r:.50}"
    )


def model_stops(folder: Path) -> list[int | None]:
    """The ids that end an answer by the model's own config: one, several or none (as None)."""
    config = {}
    for file in (folder / "config.json", folder / "generation_config.json"):
        if file.exists():
            config |= read_json(file)
    ids = config.get("eos_token_id")
    return ids if isinstance(ids, list) else [ids]

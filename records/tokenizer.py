"""Text to token ids, as the model's own tokenizer does it; template.py writes the text of messages.

transformers reads the tokenizer and encodes. It does not know the border of prompt and completion.
A completion must attach to any prompt, so both are encoded separately. (A tokenizer that puts a space
before every text encodes them together, and the ids are divided.)

Reading order: render (a record to text), encode_all (text to ids, with BOS and EOS).
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from infra.console import BadInput, say, user_error
from infra.settings import find_path, read_text, refuse_unless, split_commas
from models.hub import Source, read_json
from records.forms import Record, as_turns
from records.template import MARK, ChatTemplate, template_of


class Tokenizer:
    """A model's tokenizer and chat template, from the files in its folder.

    hf         transformers' tokenizer
    eos        id of the end of a completion; required
    bos        id of the beginning of a text, or None
    prefix     the ids that the tokenizer itself puts before a text: none, BOS, or several, as GLM's does
    stops      ids that end a sampled completion: EOS, those that the model's config names, and after
               end_as_the_template_does the token that ends the template's answers
    template   the text of the chat template, or None
    unknown    id of letters that it does not know, or None
    special_tokens  the texts of all special tokens
    root       the folder that holds the model's config.json
    adds_space the tokenizer puts a space before a text, as SentencePiece does
    """

    def __init__(
        self,
        source: Source,
        chat_template: str | None = None,
        date: str | None = None,
        chat_template_kwargs: str | None = None,
    ):
        """The settings of these names in Data (infra/settings.py). Raises BadInput."""
        folder = source.tokenizer
        self.root = source.root
        with user_error("tokenizer", folder):
            self.hf = load_tokenizer(folder)
            self.adds_space = puts_a_space_before(self.hf)
        with user_error("data.chat_template"):
            if file := find_path(chat_template) if chat_template else source.chat_template:
                self.hf.chat_template = read_text(file)
            # a model may have several, by name: the one that is for dialogues without tools
            self.template = self.hf.chat_template and template_of(self.hf)
        with user_error("data.date", date):
            self.chat = ChatTemplate(self.hf, date, template_kwargs(chat_template_kwargs))
        for name in self.chat.kwargs:
            if not re.search(rf"\b{re.escape(name)}\b", self.chat.source):
                say(f"chat_template_kwargs: the chat template does not read {name}")
        stops = [i for i in (self.hf.eos_token_id, *model_stops(source.root)) if i is not None]
        if not stops:
            raise BadInput(f"{folder}: eos_token: missing: a completion could never end")
        self.eos = stops[0]
        self.stops = tuple(dict.fromkeys(stops))
        self.stops_of_template: tuple[int, ...] = ()  # those that the chat template adds
        self.bos = self.hf.bos_token_id
        # GPT-2 calls its EOS the unknown token, too, and needs none
        unknown = self.hf.unk_token_id
        self.unknown = None if unknown in (self.eos, self.bos) else unknown
        # the tokens that the tokenizer adds before a text; every vocabulary has the text EOS
        text = self.hf.convert_ids_to_tokens(self.eos)
        encoded = self.hf(text, return_special_tokens_mask=True)
        self.prefix = encoded.input_ids[: encoded.special_tokens_mask.index(0)]
        added = self.hf.added_tokens_decoder.values()
        self.special_tokens = sorted(str(token) for token in added if token.special)

    # ---- a record's way: render, encode ----------------------------------------------------------

    def render(
        self, record: Record, by_template: bool = True, counts: Counter | None = None
    ) -> tuple[str, list[str]]:
        """The texts of a record's prompt and completions. Raises BadInput.

        A chat template writes them: the prompt's text ends at the assistant's turn, and the completion is the rest. A
        text becomes a turn. If not `by_template`, the texts stay unchanged. counts: counts the texts that the template
        drops on purpose.
        """
        if not by_template:
            return record.prompt, record.completions
        return self.chat.render(record, Counter() if counts is None else counts)

    def asked(self, record: Record, by_template: bool) -> Record:
        """The record as the model is asked: by the chat template with its settings and its day, or as a plain text."""
        if by_template:
            return self.chat.asked(record._replace(prompt=as_turns(record.prompt)))
        return record._replace(tools=None, template_kwargs=None, date=None)

    def end_as_the_template_does(self) -> None:
        """Compare the token that ends an answer in the chat template with `stops`. If it is missing, add it and say so.

        A base model's EOS is often another token than that of the template which it is tuned with.
        """
        around = self.chat.around_plain_answer()
        if around is None:
            return
        _, end = around
        if not end:
            say(
                "the chat template writes nothing that ends an answer: no record teaches where to end; "
                "data.chat_template takes another one"
            )
            return
        (ids,) = self.encode([end])
        if any(i in self.stops for i in ids):
            return
        added = self.hf.added_tokens_decoder.keys() - {self.hf.unk_token_id}
        special = next((i for i in ids if i in added), None)
        if special is None:
            say(
                f"the chat template ends an answer in {end!r}, which is no token at which sampling ends: "
                "give it as a stop text, or the answers run on"
            )
            return
        text, eos = self.hf.convert_ids_to_tokens([special, self.eos])
        self.stops_of_template = (special,)
        self.stops += self.stops_of_template
        say(f"sampling ends at {text}, too: the chat template ends an answer in it, not in {eos}")

    def say_what_leads_an_answer(self) -> None:
        """Print the text that the chat template writes before an answer's text: it is learned as a part of the
        answer."""
        around = self.chat.around_plain_answer()
        lead = around[0] if around else ""
        is_sampled = self.chat.first is not None and self.chat.first.cut is not None
        if not lead.strip() or is_sampled:  # sampled answers are learned as they are
            return
        say(
            f"the chat template writes {lead!r} before an answer's own text, and it is learned as a "
            "part of the answer (docs/data.md)"
        )

    def generation_config(self, n_embeddings: int) -> str:
        """The text of the model's generation_config.json, with all `stops` that the model has. An engine, which
        knows nothing of the template's own end, then ends where sampling ends here."""
        file = self.root / "generation_config.json"
        config = read_json(file) if file.exists() else {}
        config["eos_token_id"] = [i for i in self.stops if i < n_embeddings]
        return json.dumps(config, indent=2) + "\n"

    def encode_all(
        self, texts: list[tuple[str, list[str]]], by_template: bool
    ) -> Iterator[tuple[list, list]]:
        """(ids of the prompt, ids of each completion) of each record's texts.

        Plain texts get the tokenizer's prefix, such as BOS, and EOS at the end. Nothing is added to those of a chat
        template. If the tokenizer puts a space before every text, prompt +
        completion is encoded as one text, and the completion's ids are those after the prompt's.
        """
        pieces = []
        for prompt, completions in texts:
            prefix = prompt if self.adds_space else ""
            pieces += [prompt, *(prefix + completion for completion in completions)]
        encoded = iter(self.encode(pieces))
        for _, completions in texts:
            prompt = next(encoded)
            answers = []
            # in this order zip takes no text too many
            for completion, ids in zip(completions, encoded):
                before = prompt if self.adds_space else []
                if ids[: len(before)] != before:
                    # One token has characters of both: the prompt keeps its own ids, and the
                    # completion is encoded behind a mark, so that it gets no space.
                    before, ids = self.encode([MARK, MARK + completion])
                answers.append(ids[len(before) :])
            if not by_template:  # tokens that the text has already are not repeated
                if prompt[: len(self.prefix)] != self.prefix:
                    prompt = [*self.prefix, *prompt]
                answers = [x + [self.eos] * (x[-1:] != [self.eos]) for x in answers]
            yield prompt, answers

    def first_tokens(self, prompt: list[int]) -> int:
        """How many tokens of a prompt's ids are its beginning, which a cut leaves there: the prefix, or BOS."""
        if self.prefix and prompt[: len(self.prefix)] == self.prefix:
            return len(self.prefix)
        return int(prompt[0] == self.bos)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text, with nothing added."""
        if not texts:  # transformers' tokenizers take no empty list
            return []
        return self.hf(texts, add_special_tokens=False, return_attention_mask=False).input_ids

    def decode(
        self, ids: Sequence[int], special_tokens: bool = False, is_answer: bool = False
    ) -> str:
        """The text of these ids, with special tokens or without. is_answer: it follows a prompt.

        If a tokenizer puts a space before each text, its decoder strips one. The first space of an answer must stay."""
        options = dict(skip_special_tokens=not special_tokens, clean_up_tokenization_spaces=False)
        if is_answer and self.adds_space:
            (mark,) = self.encode([MARK])
            return self.hf.decode([*mark, *ids], **options).removeprefix(MARK)
        return self.hf.decode(ids, **options)


def puts_a_space_before(hf: PreTrainedTokenizerFast) -> bool:
    """Whether the tokenizer puts a space before a text, as SentencePiece does. Its vocabulary is not asked: some have
    no letter `a`, such as that of a model of proteins."""
    text = "a"
    if hf.is_fast and hf.backend_tokenizer.normalizer:
        text = hf.backend_tokenizer.normalizer.normalize_str(text)
    if hf.is_fast and hf.backend_tokenizer.pre_tokenizer:
        text, _ = hf.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)[0]
    return text[0] in "▁Ġ"


def template_kwargs(text: str | None) -> dict:
    """The setting chat_template_kwargs, such as `enable_thinking=false,style=short`. Raises BadInput."""
    kwargs = {}
    for part in split_commas(text):
        name, equals, value = part.partition("=")
        refuse_unless(
            name and equals,
            f"chat_template_kwargs: {part}: expected name=value, such as enable_thinking=false",
        )
        kwargs[name.strip()] = template_value(value.strip())
    return kwargs


def template_value(text: str) -> object:
    """The value of a user's text for a chat template: true, false, null, or a number without needless zeros. Everything
    else is a text, such as no, 0123, 1.10 and 2026-01-31, and so is a text in quotes."""
    if text.lower() in ("true", "false", "null"):
        return json.loads(text.lower())
    if re.fullmatch(r"-?(0|[1-9][0-9]*)([.][0-9]*[1-9])?", text):
        return json.loads(text)
    if re.fullmatch(r"'.*'|\".*\"", text):
        return text[1:-1]
    return text


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """transformers' tokenizer of a folder, with tokenizer.json unchanged.

    transformers 5 rebuilds some classes with other splits than the file's: DeepSeek's texts lose their blanks,
    Granite's numbers their groups of three digits (huggingface/transformers
    #45488, #45920). AutoTokenizer, which knows these classes, therefore gives only two things: a tokenizer if there is
    no such file, and the names of BOS and EOS, which GPT-2's folder on the Hub does not have.
    """
    if not (folder / "tokenizer.json").exists():
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    hf = PreTrainedTokenizerFast.from_pretrained(folder)
    if hf.eos_token is None:
        of_class = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        vocab = hf.get_vocab()
        if of_class.bos_token in vocab:
            hf.bos_token = of_class.bos_token
        if of_class.eos_token in vocab:
            hf.eos_token = of_class.eos_token
    return hf


def model_stops(folder: Path) -> list[int | None]:
    """The ids that end an answer by the model's own config: one, several or none (as None)."""
    config = {}
    for file in (folder / "config.json", folder / "generation_config.json"):
        if file.exists():
            config |= read_json(file)
    ids = config.get("eos_token_id")
    return ids if isinstance(ids, list) else [ids]

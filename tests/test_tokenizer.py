"""Texts become the ids of the model's own tokenizer; a chat template runs in a sandbox."""

import json
import re
from pathlib import Path

import pytest
import tokenizers
import tokens
from conftest import refused
from tokenizers.processors import TemplateProcessing
from tokens import EOS, bot, folder, ids_of, user
from transformers import AutoTokenizer

from models.hub import Source
from records.forms import Record
from records.tokenizer import Tokenizer
from sampler import read_answer

DIALOGUE = Record([user("p")], [bot("c")], True)


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ((ids, _),) = tokenizer.encode_all([(text, [])], by_template=False)
    return ids


def bpe(path: Path, letters: str, unknown: str | None, change=None) -> Tokenizer:
    """A BPE without bytes, which knows these letters alone."""
    vocab = {x: i for i, x in enumerate(["<s>", "</s>", "<unk>", *letters])}
    t = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token=unknown))
    t.add_special_tokens(["<s>", "</s>", "<unk>"])
    t.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    if change:
        change(t)
    t.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": unknown}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "config.json").write_text("{}")
    return Tokenizer(Source(path))


# ---- BOS and EOS ---------------------------------------------------------------------------------


def test_a_tokenizer_that_adds_bos_gets_it_once_and_a_template_writes_its_own():
    bos = tokens.bos()
    assert bos.bos == 512 and bos.prefix == [512]
    assert prompt_ids(bos, "ab") == prompt_ids(bos, "<s>ab") == [512, 66, 67]
    assert prompt_ids(bos, "") == [512]
    assert bos.encode(["c"]) == [[68]], "a completion has no BOS"
    assert bos.decode([512, 66, EOS]) == "a", "no special tokens"
    ((prompt, _),) = bos.encode_all([bos.render(DIALOGUE)], by_template=True)
    chatml = "<|im_start|>user\np<|im_end|>\n<|im_start|>assistant\n"
    assert prompt == [512, *ids_of(bos, chatml)]


def test_all_that_a_tokenizer_puts_before_a_text_begins_a_plain_prompt_and_stays_in_a_cut(tmp_path):
    first = ("[gMASK]", "<sop>")  # as GLM's tokenizer does, which names no BOS

    def add_prefix(t):
        special = [(x, t.token_to_id(x)) for x in first]
        single = f"{' '.join(first)} $A"
        t.post_processor = TemplateProcessing(single=single, special_tokens=special)

    path = tokens.folder(tmp_path, first, change=add_prefix)
    whole = AutoTokenizer.from_pretrained(path)("abcdef").input_ids
    for prompt in ("abcdef", "[gMASK]<sop>abcdef"):
        source = tokens.write(tmp_path / "d.jsonl", tokens.rated(prompt))
        for limit in (20, 4):
            (e,), _ = tokens.load(source, Tokenizer(Source(path)), max_prompt=limit)
            assert e.prompt.tolist() == [*whole[:2], *whole[2:][-(limit - 2) :]]


@pytest.mark.parametrize("splits", [False, True])
def test_a_vocabulary_without_the_letter_a_gives_its_own_ids(splits, tmp_path):
    """Such as that of a model of proteins."""

    def change(t: tokenizers.Tokenizer) -> None:
        if splits:
            t.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()

    ours = bpe(tmp_path, "▁AKMQ", None, change)
    ((ids, (answer,)),) = ours.encode_all([("MK", ["AKQ"])], by_template=False)
    assert ours.adds_space == splits and ids == [0, *[3] * splits, 6, 5]
    assert answer == [4, 5, 7, 1]


def test_what_only_looks_like_a_bos_is_none(tmp_path):
    """<|endoftext|> as BOS and EOS, put behind a text only."""
    path = folder(tmp_path / "t", after="<|endoftext|>", bos_token="<|endoftext|>")
    tokenizer = Tokenizer(Source(path))
    assert tokenizer.bos == tokenizer.eos == EOS and not tokenizer.prefix
    assert prompt_ids(tokenizer, "a") == [66] and tokenizer.encode(["b"]) == [[67]]
    assert not Tokenizer(Source(folder(tmp_path / "named", ("<s>",), bos_token="<s>"))).prefix


def test_an_answer_ends_at_eos_and_at_every_id_that_the_models_config_names(tmp_path):
    path = folder(tmp_path / "t")
    (path / "config.json").write_text('{"eos_token_id": 7}')
    assert Tokenizer(Source(path)).stops == (0, 7)
    (path / "generation_config.json").write_text('{"eos_token_id": [5, 0]}')
    assert Tokenizer(Source(path)).stops == (0, 5)
    adapter = folder(tmp_path / "adapter")  # a PEFT folder with a tokenizer
    assert Tokenizer(Source(adapter, Source(path))).stops == (0, 5)
    (path / "tokenizer_config.json").write_text("{}")  # GPT-2 on the Hub names no EOS there
    assert (Tokenizer(Source(path)).eos, Tokenizer(Source(path)).stops) == (5, (5, 0))


def test_what_is_decoded_has_every_space(tmp_path):
    """Llama 3's config asks for another text, in which `a ,` is `a,`."""
    t = Tokenizer(Source(folder(tmp_path, clean_up_tokenization_spaces=True)))
    assert t.decode(t.encode(["a , b . do n't"])[0]) == "a , b . do n't"


# ---- the folder ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tokens.REAL)
def test_the_text_of_an_answer_behind_its_prompt_is_the_ids_that_were_sampled(name, tmp_path):
    """Else other tokens would be rated than those that were shown."""
    t = Tokenizer(Source(tokens.real(name, tmp_path / name)))
    for answer in (" 4", " of all", "y z", "\n 4", " caf\u00e9 \U0001f600 tail ", "  two"):
        ((_, (ids,)),) = t.encode_all([("the best", [answer])], by_template=False)
        assert read_answer(t, ids) == (answer, False)
        stopped = (answer.partition("z")[0], False)
        assert read_answer(t, ids, stop=["z"]) == stopped


def test_a_folder_without_a_usable_tokenizer_is_refused_in_one_line(tmp_path):
    nothing, broken = tmp_path / "nothing", folder(tmp_path / "broken")
    nothing.mkdir()
    (broken / "tokenizer.json").write_text("{}")
    endless = folder(tmp_path / "endless", eos_token=None)
    for path, reason in (
        (nothing, "tokenizer: "),
        (broken, "tokenizer: "),
        (endless, f"{endless}: eos"),
    ):
        refused(f"^{re.escape(reason)}[^\n]*$", Tokenizer, Source(path))


def test_tokens_that_the_config_leaves_to_the_class_are_known(tmp_path):
    """GPT-2's folder on the Hub: a template of its dialogues writes EOS after each answer."""
    path = folder(tmp_path)
    (path / "tokenizer_config.json").write_text('{"model_max_length": 1024}')
    (path / "config.json").write_text('{"model_type": "gpt2", "eos_token_id": 0}')
    template = Path(__file__).parents[1] / "config" / "dialogue.jinja"
    tokenizer = Tokenizer(Source(path), str(template))
    prompt, (answer,) = tokenizer.render(DIALOGUE)
    assert (prompt, answer) == ("User: p\n\nAssistant:", " c<|endoftext|>")
    assert tokenizer.eos == tokenizer.bos == EOS
    (path / "config.json").write_text('{"model_type": "llama", "eos_token_id": 0}')
    assert Tokenizer(Source(path)).bos is None, "its class names tokens that are not in the file"


# ---- chat templates ------------------------------------------------------------------------------


def test_the_nearest_template_wins(tmp_path):
    def said(given=None, tools=None):
        return Tokenizer(Source(path), given).render(DIALOGUE._replace(tools=tools))[0]

    texts = "{% for m in messages %}{{ m.content }}{% endfor %}"
    named = [{"name": "tool_use", "template": "0" + texts}]
    named += [{"name": "default", "template": "1" + texts}]
    path = folder(tmp_path / "t", chat_template=named)
    assert (said(), said(tools=[{"name": "0"}])) == ("1p", "0p")
    assert Tokenizer(Source(path)).template == "1" + texts, "a run's hashes are of a text"
    (path / "chat_template.jinja").write_text("2" + texts)
    assert said() == "2p"
    (tmp_path / "mine.jinja").write_text("é" + texts, encoding="utf-8")
    assert said(str(tmp_path / "mine.jinja")) == "ép"
    refused("^data.chat_template: none.jinja: No such file", said, "none.jinja")


REFUSED = {
    "a\n{% for %}\n": "chat template: ",
    "{{ messages | length }}": "chat template: the rendered dialogue does not begin with",
    "{{ raise_exception('begin with\nthe user') }}": "chat template: begin with the user$",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "chat template: ",
    "{{ cycler.__init__.__globals__.os.system('touch touched') }}": "chat template: ",
    "{{ lipsum.__globals__['os'].system('touch touched') }}": "chat template: ",
    "{% include '/etc/passwd' %}": "chat template: ",
    "{{ messages.append(messages[0]) }}": "chat template: ",
}


@pytest.mark.parametrize("template", REFUSED)
def test_what_a_template_must_not_do_is_one_line(tmp_path, monkeypatch, template):
    monkeypatch.chdir(tmp_path)
    tokenizer = Tokenizer(Source(folder(tmp_path / "t", chat_template=template)))
    messages = [user("hi")]
    refused(f"^{REFUSED[template]}[^\n]*$", tokenizer.render, Record(messages, [bot("c")], True))
    assert messages == [user("hi")] and not Path("touched").exists()


def test_a_template_that_asks_for_the_day_gets_the_one_that_was_given(tmp_path):
    asks = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    path = folder(tmp_path / "t", chat_template=asks)
    assert Tokenizer(Source(path), date="2024-07-26").render(DIALOGUE)[0] == "26 Jul 2024p"
    refused("^chat template: .*without_data_date", Tokenizer(Source(path)).render, DIALOGUE)
    refused("^data.date: today: Invalid isoformat", Tokenizer, Source(path), date="today")

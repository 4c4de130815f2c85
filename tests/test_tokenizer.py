"""Texts become the ids of the model's own tokenizer; a chat template runs in a sandbox."""

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokens
from tokens import CHATML, EOS, bot, folder, ids_of, user

import records.tokenizer
from records.forms import Fault, Record
from records.tokenizer import Tokenizer
from runs.errors import BadInput


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.with_bos(*tokenizer.encode([text]))


def dialogue(text: str = "p", answer: str = "c") -> Record:
    return Record([user(text)], [bot(answer)], True)


# ---- ids -----------------------------------------------------------------------------------------


def test_a_post_processor_that_adds_eos_is_no_bos_and_adds_nothing(tmp_path):
    """<|endoftext|> as BOS and EOS, put behind a text only."""
    path = folder(tmp_path / "t", after="<|endoftext|>", bos_token="<|endoftext|>")
    tokenizer = Tokenizer(path)
    assert tokenizer.bos == tokenizer.eos == EOS and not tokenizer.adds_bos
    assert prompt_ids(tokenizer, "a") == [66] and list(tokenizer.encode(["b"])) == [[67]]


def test_padding_and_truncation_left_in_the_tokenizer_file_do_nothing(tmp_path):
    def change(t):
        t.enable_padding(length=40)
        t.enable_truncation(3)

    tokenizer = Tokenizer(folder(tmp_path / "t", change=change))
    long, short = tokenizer.encode(["a b c d f g", "a"])
    assert long == [66, *ids_of(tokenizer, " b c d f g")] and len(long) == 6
    assert short == [66]


def test_a_text_whose_first_token_is_unknown_is_not_taken_for_bos(tmp_path):
    from tokenizers import Tokenizer as Fast
    from tokenizers import models, pre_tokenizers

    # one token for unknown, BOS and EOS
    words = Fast(models.WordLevel({"<eos>": 0, "w1": 1}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    config = '{"eos_token": "<eos>", "bos_token": "<eos>"}'
    (tmp_path / "tokenizer_config.json").write_text(config)
    tokenizer = Tokenizer(tmp_path)
    assert not tokenizer.adds_bos and prompt_ids(tokenizer, "w1") == [1]


def test_texts_are_encoded_some_at_a_time_and_in_their_order(monkeypatch):
    plain = tokens.plain()
    sizes, real = [], plain.processor

    def encode_batch(texts, **kw):
        sizes.append(len(texts))
        return real.encode_batch(texts, **kw)

    monkeypatch.setattr(records.tokenizer, "ENCODE_TEXTS", 3)
    monkeypatch.setattr(plain, "processor", SimpleNamespace(encode_batch=encode_batch))
    texts = [f"w{i}" for i in range(1, 8)]
    alone = [real.encode(t, add_special_tokens=False).ids for t in texts]
    assert list(plain.encode(texts)) == alone
    assert sizes == [3, 3, 1]


def test_ids_become_their_text_again():
    text = "a\u2028b\x85c, naïve"
    assert tokens.plain().decode(next(tokens.plain().encode([text]))) == text


# ---- BOS and EOS ---------------------------------------------------------------------------------


def test_a_tokenizer_that_adds_bos_gets_it_once():
    bos = tokens.bos()
    assert bos.bos == 512 and bos.adds_bos
    assert prompt_ids(bos, "ab") == prompt_ids(bos, "<s>ab") == [512, 66, 67]
    assert prompt_ids(bos, "") == [512]
    assert list(bos.encode(["c"])) == [[68]], "a completion has no BOS"


def test_a_bos_written_by_the_template_is_not_doubled():
    bos = tokens.bos()
    head, (completion,), _ = bos.render(dialogue("hi"))
    chatml = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_ids(bos, head) == [512, *ids_of(bos, chatml)]
    assert 512 not in next(bos.encode([completion]))


def test_bos_depends_on_the_tokenizer_and_not_on_the_name_of_its_folder(tmp_path):
    for name in ("SmolLM2-135M-Instruct", "Llama-3-8B", "run"):
        path = folder(tmp_path / name, ("<s>",), bos_token="<s>")
        assert not Tokenizer(path).adds_bos, name
    says = folder(tmp_path / "says", ("<s>",), bos_token="<s>", add_bos_token=True)
    assert Tokenizer(says).adds_bos
    without = folder(tmp_path / "without", add_bos_token=True)
    assert not Tokenizer(without).adds_bos, "there is no BOS to add"


def test_special_tokens_that_only_the_model_names_are_found_there_as_gpt2_has_it_on_the_hub(
    tmp_path,
):
    path = folder(tmp_path / "t")
    (path / "tokenizer_config.json").write_text('{"model_max_length": 1024}')
    (path / "config.json").write_text('{"eos_token_id": [7, 8]}')
    assert (Tokenizer(path).eos, Tokenizer(path).bos) == (7, None)
    (path / "generation_config.json").write_text('{"eos_token_id": 5, "bos_token_id": 5}')
    tokenizer = Tokenizer(path)
    assert (tokenizer.eos, tokenizer.bos, tokenizer.adds_bos) == (5, 5, False)


# ---- the folder ----------------------------------------------------------------------------------


def test_a_folder_without_a_usable_tokenizer_is_refused_in_one_line(tmp_path):
    def refused(path) -> str:
        with pytest.raises(BadInput) as e:
            Tokenizer(path)
        assert len(str(e.value).splitlines()) == 1
        return str(e.value)

    assert "no usable tokenizer" in refused(tmp_path / "nothing")
    path = folder(tmp_path / "a")
    (path / "tokenizer.json").unlink()
    assert "no usable tokenizer" in refused(path)
    (path / "tokenizer.json").write_text("{}")
    assert "no usable tokenizer" in refused(path)
    assert "eos_token: missing" in refused(folder(tmp_path / "b", eos_token=None))
    unknown = folder(tmp_path / "c", eos_token="<none>")
    assert "eos_token: '<none>' is no token" in refused(unknown)
    path = folder(tmp_path / "d")
    config = path / "tokenizer_config.json"
    config.write_text('{"eos_token"')
    assert refused(path).startswith(f"{config}: ")
    config.write_text("[1]")
    assert refused(path) == f"{config}: expected an object, got [1]"
    config.write_text('{"eos_token": "<|endoftext|>"}')
    assert Tokenizer(path).eos == 0, "what else transformers writes there is not needed"


def test_tokenizer_model_alone_is_refused_with_the_command_that_makes_a_tokenizer_json(tmp_path):
    """Encoded by sentencepiece, <|im_end|> in a template's text would be letters."""
    path = folder(tmp_path / "t", chat_template=CHATML)
    (path / "tokenizer.json").rename(path / "tokenizer.model")
    with pytest.raises(BadInput) as e:
        Tokenizer(path)
    (line,) = str(e.value).splitlines()
    assert line.startswith(f"{path}: tokenizer.model alone does not say which texts are special")
    packages, python = line.partition(": pip ")[2].split(" && ")
    assert packages == "install transformers sentencepiece protobuf"
    program, _, code = shlex.split(python)
    assert program == "python" and f"A.from_pretrained('{path}').save_pretrained('{path}')" in code
    compile(code, "command", "exec")


def doubling(n: int, pattern="a", content="aa") -> dict:
    replace = {"type": "Replace", "pattern": {"String": pattern}, "content": content}
    return {"type": "Sequence", "normalizers": [replace] * n}


END = {"id": "<|endoftext|>", "ids": [0] * 1000, "tokens": ["<|endoftext|>"] * 1000}
FRAME = [{"SpecialToken": {"id": END["id"], "type_id": 0}}] * 10**5


@pytest.mark.survive("R16")
@pytest.mark.parametrize(
    "part, value",
    [
        (
            "post_processor",
            dict(type="TemplateProcessing", single=FRAME, special_tokens={END["id"]: END}),
        ),
        ("normalizer", doubling(40)),
        ("normalizer", {"type": "Replace", "pattern": {"Regex": "a"}, "content": "a" * 1001}),
        ("normalizer", {"type": "Prepend", "prepend": "a" * 10**6}),
        ("decoder", {"type": "Sequence", "decoders": doubling(40)["normalizers"]}),
    ],
)
def test_a_tokenizer_that_makes_a_text_very_much_longer_is_refused_before_it_is_used(
    tmp_path, part, value
):
    file = folder(tmp_path / "t") / "tokenizer.json"
    content = json.loads(file.read_text())
    for token in content["added_tokens"]:
        token["normalized"] = True  # loading alone would then normalize it
    file.write_text(json.dumps(content | {part: value}))
    with pytest.raises(BadInput, match=f"^{file}: {part}: it can make a text .* times as long; at"):
        Tokenizer(tmp_path / "t")
    file.write_text(json.dumps(content | {"normalizer": doubling(40, "a", "b")}))
    assert prompt_ids(Tokenizer(tmp_path / "t"), "a") == [67], "as long as before"


def test_tokenizers_are_the_same_if_they_turn_text_into_the_same_ids(tmp_path):
    plain, chat = tokens.plain(), tokens.chat()
    assert plain.same(Tokenizer(folder(tmp_path / "t", chat_template=CHATML)))
    assert not plain.same(chat), "<|im_end|> is one token there"
    assert (plain.n_vocab, chat.n_vocab) == (512, 514)


# ---- chat templates ------------------------------------------------------------------------------


def test_a_string_beside_a_message_is_a_turn_too():
    records = (
        Record("hi", [bot("c")], True),
        Record([user("hi")], ["c"], True),
        Record([user("hi")], [bot("c")], True),
    )
    a, b, c = map(tokens.chat().render, records)
    assert a == b == c


def test_two_strings_stay_plain_text_though_there_is_a_template():
    assert tokens.chat().render(Record("a", ["b"], True)) == ("a", ["b"], False)


def test_a_chat_completion_ends_as_the_template_ends_the_turn():
    turns = [{"role": "system", "content": "s"}, user("hi")]
    head = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    head += "<|im_start|>assistant\n"
    rendered = tokens.chat().render(Record(turns, [bot("hello"), bot("no")], None))
    assert rendered == (head, ["hello<|im_end|>\n", "no<|im_end|>\n"], True)


def test_messages_without_a_template_are_refused():
    with pytest.raises(Fault, match="^prompt: .*data.chat_template"):
        tokens.plain().render(dialogue())


def test_a_template_is_laid_out_as_the_field_lays_it_out(tmp_path):
    """Blocks swallow the blanks before and the line end after them, as in transformers; loops may
    break. There is no date: it would make runs differ."""
    template = """
    {%- for m in messages %}
        {% if m.role == "end" %}
            {% break %}
        {% endif %}
[{{ m.role }}] {{ {"é": m.content} | tojson }}{{ "" if strftime_now else "!" }}{{ eos_token }}
    {% endfor %}"""
    eos = {"content": "<|endoftext|>"}
    tokenizer = Tokenizer(folder(tmp_path / "t", chat_template=template, eos_token=eos))
    prompt, (completion,), was_chat = tokenizer.render(dialogue())
    assert was_chat and prompt == '[user] {"é": "p"}!<|endoftext|>\n' and tokenizer.eos == EOS
    assert completion == '[assistant] {"é": "c"}!<|endoftext|>\n'


def test_the_nearest_template_wins(tmp_path):
    def said(path, given=None):
        return Tokenizer(path, given).render(dialogue())[0]

    named = [{"name": "tools", "template": "0"}, {"name": "default", "template": "1"}]
    path = folder(tmp_path / "t", chat_template=named)
    assert said(path) == "1"
    (path / "chat_template.jinja").write_text("2")
    assert said(path) == "2"
    (tmp_path / "mine.jinja").write_text("é", encoding="utf-8")
    assert said(path, str(tmp_path / "mine.jinja")) == "é"


@pytest.mark.parametrize("name", ["none.jinja", "./none.jinja", "/none/none.jinja", "."])
def test_a_template_that_is_not_there_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    match = rf"^data.chat_template: {re.escape(name)}: no such file$"
    with pytest.raises(BadInput, match=match):
        Tokenizer(folder(tmp_path / "t", chat_template="1"), name)


def test_a_template_that_is_no_jinja_is_refused(tmp_path):
    with pytest.raises(BadInput, match="^[^\n]*: chat template: [^\n]*$"):
        Tokenizer(folder(tmp_path / "t", chat_template="a\n{% for %}\n"))


EVIL = [
    "{{ messages.__class__ }}",
    "{{ ''.__class__ }}",
    "{{ messages['__class__'] }}",
    "{{ messages|attr('__class__') }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch touched') }}",
    "{{ lipsum.__globals__['os'].system('touch touched') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ raise_exception.__closure__ }}",
    "{{ __import__('os').system('touch touched') }}",
    "{{ self.__init__.__globals__.__builtins__.open('touched', 'w') }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ messages.append(messages[0]) }}",
    "{{ messages.pop() }}",
    "{{ messages.clear() }}",
    "{{ messages[0].update(content='other') }}",
    "{% for i in range(10 ** 12) %}x{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
]


@pytest.mark.parametrize("template", EVIL)
def test_a_template_runs_in_a_sandbox(tmp_path, monkeypatch, template):
    monkeypatch.chdir(tmp_path)
    tokenizer = Tokenizer(folder(tmp_path / "t", chat_template=template + CHATML))
    messages = [user("hi")]
    with pytest.raises(Fault, match="^chat template: [^\n]+$"):
        tokenizer.render(Record(messages, [bot("c")], True))
    assert messages == [user("hi")] and not Path("touched").exists()


def test_an_exception_raised_by_a_template_is_one_line(tmp_path):
    template = "{% if messages[0].role != 'user' %}"
    template += "{{ raise_exception('begin with\nthe user') }}{% endif %}" + CHATML
    tokenizer = Tokenizer(folder(tmp_path / "t", chat_template=template))
    assert tokenizer.render(dialogue("hi"))[2]
    with pytest.raises(Fault, match="^chat template: begin with$"):
        tokenizer.render(Record([bot("hi")], [bot("c")], True))


def test_a_template_that_does_not_continue_its_prompt_is_refused(tmp_path):
    tokenizer = Tokenizer(folder(tmp_path / "t", chat_template="{{ messages | length }}"))
    with pytest.raises(Fault, match="^chat template: the rendered dialogue does not begin with"):
        tokenizer.render(dialogue())

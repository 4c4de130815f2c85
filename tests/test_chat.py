"""Dialogues become the ids that transformers and TRL make of them, for the models' own templates."""

import json
import random
import shutil
import signal
import sys
import threading
import time

import pytest
import tokens
from conftest import assert_same, train
from tokens import ids_of, rated, write

import data
from hub import folders
from hub.families import read_config
from records import examples, tokenizer
from records.forms import Fault, Record
from records.tokenizer import Texts, Tokenizer
from runs.errors import BadInput
from runs.settings import Data

sys.path.append(str(tokens.CHAT))
from chat_records import CALLS, LONG, RECORDS, RESULT, THOUGHT, TOOLS, bot, user  # noqa: E402

TRL = json.loads((tokens.CHAT / "trl.json").read_text())


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    """name -> the folder of this model's kind of tokenizer."""
    root = tmp_path_factory.mktemp("real")
    return lambda name: tokens.real(name, root / name)


def load(records, t: Tokenizer, kind="rated", **limits) -> list[examples.Example]:
    """Examples of records, by a file."""
    import tempfile

    limits = dict(max_prompt=4096, max_completion=4096) | limits
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as f:
        f.write("".join(json.dumps(r) + "\n" for r in records))
        f.flush()
        return examples.load_examples(f.name, t, kind, Data(f.name, **limits)).examples


def ids(record, t: Tokenizer, **limits) -> tuple[list[int], list[int]]:
    """Those of a record's prompt and completion."""
    (e,) = load([record | {"label": True}], t, **limits)
    return e.prompt.tolist(), e.completions[0].tolist()


def known(name: str):
    """(kind, record, TRL's ids) of every record that TRL tokenised by tokenizer.json."""
    of = TRL[name].get("tokenizer.json", TRL[name]["auto"])
    for kind, records in RECORDS.items():
        yield from ((kind, *two) for two in zip(records, of[kind]))


# ---- as others do it -----------------------------------------------------------------------------

# TRL cuts the prompt where the template renders it differently behind an answer, and writes nothing
# for a call that the template does not know. Those are refused here, but R1's thinking.
CUT = {"mistral-v0.3": {"system"}, "r1-distill": set(RECORDS) - {"plain", "tool results"}}
LOST = {"gemma", "llama-3"}


@pytest.mark.parametrize("name", tokens.REAL)
def test_the_ids_are_those_of_trl(real, name):
    t, same = Tokenizer(real(name)), 0
    for kind, record, theirs in known(name):
        cut, lost = kind in CUT.get(name, ()), name in LOST and kind == "tool results"
        if "refused" in theirs or lost or (cut and "</think>" not in str(record["completion"])):
            what = "tools: .* does not write .weather.|must alternate" if lost else "chat template"
            what = "does not begin with the rendered prompt" if cut else what
            with pytest.raises(BadInput, match=what):
                ids(record, t)
        elif cut:  # the thinking is the answer's, and the prompt is as it is when sampling
            prompt, completion = ids(record, t)
            assert t.decode(prompt).endswith("<think>\n") or prompt[-1] == ids_of(t, "\n")[0]
            assert completion == ids_of(t, THOUGHT[len("<think>\n") :] + tokens.EOS_SEEK)
        else:
            assert ids(record, t) == (theirs["prompt"], theirs["completion"]), (kind, record)
            same += 1
    assert same >= (4 if name == "r1-distill" else 9), "else nothing was compared"


@pytest.mark.parametrize("name", tokens.REAL)
def test_prompt_and_completion_together_are_what_transformers_makes_of_the_dialogue(real, name):
    """By tokenizer.json, which we follow. Its rebuilt LlamaTokenizer with `legacy: false` puts no
    space behind special tokens: other ids for Llama-2, TinyLlama and Phi-3."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    t, folder, compared = Tokenizer(real(name)), real(name), 0
    hf, auto = (c.from_pretrained(folder) for c in (PreTrainedTokenizerFast, AutoTokenizer))
    differ = 0
    for kind, record, theirs in known(name):
        if kind == "plain" or "refused" in theirs or kind in CUT.get(name, ()):
            continue
        if name in LOST and kind == "tool results":
            continue
        more = dict(tools=record.get("tools"), **record.get("chat_template_kwargs", {}))
        more |= dict(tokenize=True, return_dict=False)
        whole = record["prompt"] + record["completion"]
        head, behind = ids(record, t)
        given = dict(add_generation_prompt=True, **more)
        assert head == hf.apply_chat_template(record["prompt"], **given)
        assert head + behind == hf.apply_chat_template(whole, **more)
        differ += head + behind != auto.apply_chat_template(whole, **more)
        compared += 1
    assert compared >= 5 or name == "r1-distill"
    assert (differ > 0) == (name in ("llama-2", "tinyllama", "phi-3"))


def test_after_a_template_no_bos_is_added(real):
    for name in ("zephyr", "tinyllama", "openhermes"):
        t = Tokenizer(real(name))
        (chat, _), (plain, _) = ids(RECORDS["chat"][0], t), ids(rated("Hello"), t)
        assert t.adds_bos and t.bos not in chat and plain[0] == t.bos
    llama = Tokenizer(real("llama-3"))
    assert ids(RECORDS["chat"][0], llama)[0].count(llama.bos) == 1, "its template writes it"


# ---- where a completion begins -------------------------------------------------------------------


def test_a_completion_has_the_space_that_the_whole_text_has_and_no_other(real):
    """Encoded alone, `Could` begins with a space that no dialogue has there."""
    for name in ("llama-2", "mistral-v0.3"):
        t = Tokenizer(real(name))
        vocab = t.processor.token_to_id
        could, spaced = [vocab("C"), vocab("ould")], [vocab("▁C"), vocab("ould")]
        assert ids_of(t, "Could") == spaced != could
        for prompt in ("The answer is:\n", "The answer is: ", "\n"):
            assert ids(rated(prompt, "Could"), t)[1] == [*could, t.eos]
        assert ids(rated("The answer is:", " Could"), t)[1] == [*spaced, t.eos]
        assert ids(rated("", "Could"), t) == ([t.bos], [*spaced, t.eos]), "a text's own beginning"


def test_where_a_token_straddles_the_border_the_prompt_stays_as_it_is_alone(real):
    t = Tokenizer(real("llama-2"))
    for prompt, completion in (("It wo", "uld be"), ("It is ", "would be"), ("It is", "n't")):
        whole, head = ids_of(t, prompt + completion), ids_of(t, prompt)
        own, behind = ids(rated(prompt, completion), t)
        assert own == [t.bos, *head] and t.decode(own + behind) == prompt + completion
        straddles = whole[: len(head)] != head
        assert straddles == (completion != "n't"), "both cases"
        assert straddles or head + behind[:-1] == whole


@pytest.mark.parametrize(
    "name", ["llama-2", "mistral-v0.3", "gemma", "phi-3", "llama-3", "qwen2.5"]
)
def test_prompt_and_completion_are_the_whole_text_unless_a_token_straddles(real, name):
    t, r, joined, apart = Tokenizer(real(name)), random.Random(0), 0, 0
    text = (tokens.CHAT.parent / "README.md").read_text() + LONG * 20
    places = [sorted(r.sample(range(len(text)), 2)) for _ in range(400)]
    texts = [(text[max(0, b - 30) : b], text[b : min(d, b + 30)]) for b, d in places]
    rows = [Texts(p, [c], by_template=True) for p, c in texts]  # no BOS and EOS
    for (head, (behind,)), (p, c) in zip(t.encode_all(rows), texts):
        whole = ids_of(t, p + c)
        assert head == ids_of(t, p), "a prompt never depends on its completion"
        if whole[: len(head)] == head:
            joined += 1
            assert head + behind == whole, (p, c)
        else:
            apart += 1
            assert head + behind != whole and t.decode(head + behind) == t.decode(whole)
    assert joined > 80 and apart > 40


def test_byte_level_completions_are_encoded_alone_as_ever(real):
    """Once each, and equal by construction: there is no prefix to lose."""
    t = Tokenizer(real("qwen2.5"))
    assert not t.adds_space and not Tokenizer(real("gemma")).adds_space
    rows = [Texts("be", ["st", " st"], by_template=True), Texts("p ", [" x"], by_template=True)]
    found = [ids for _, completions in t.encode_all(rows) for ids in completions]
    assert found == [ids_of(t, x) for x in ("st", " st", " x")]
    texts = []
    t.encode = lambda given: texts.extend(given) or iter([[1]] * len(given))
    list(t.encode_all(rows))
    assert texts == ["be", "st", " st", "p ", " x"], "no text is encoded twice"


# ---- what a template gets ------------------------------------------------------------------------


def test_tools_and_arguments_reach_the_template_also_as_json(real):
    t, chat = Tokenizer(real("qwen3")), tokens.chat()
    record = RECORDS["tool results"][0]
    head, behind = (t.decode(x) for x in ids(record, t))
    assert "Tells <the> weather." in head and '"arguments": {"city": "Paris"' in behind
    assert ids(record | {"tools": json.dumps(TOOLS)}, t) == ids(record, t)
    off = RECORDS["thinking"][2]
    assert t.decode(ids(off, t)[0]).endswith("<think>\n\n</think>\n\n")
    as_text = off | {"chat_template_kwargs": '{"enable_thinking": false}'}
    assert ids(as_text, t) == ids(off, t)
    for field, value in (("tools", "{"), ("tools", {}), ("chat_template_kwargs", [1])):
        if value:
            with pytest.raises(BadInput, match=f":1: {field}: expected (a list|an object), got "):
                ids(record | {field: value}, t)
    for wrong in (5, "abc", ["abc"], [{"function": {}}]):
        call = {"prompt": [user("p")], "completion": [bot("c", tool_calls=wrong)]}
        with pytest.raises(BadInput, match=":1: tools: expected lists of objects with a name"):
            ids(call, chat)
    for name in ("tools", "documents"):  # given by the field tools, or never
        twice = rated([user("p")], [bot("c")], chat_template_kwargs={name: []})
        with pytest.raises(BadInput, match=f":1: chat template: .* keyword argument '{name}'"):
            ids(twice, t)
    with pytest.raises(BadInput, match=":1: tools: no messages here"):
        ids(rated(tools=TOOLS), t)
    with pytest.raises(BadInput, match=":1: chat template: .*add_generation_prompt"):
        ids(off | {"chat_template_kwargs": {"add_generation_prompt": False}}, t)


def templated(tmp_path, text: str, **more) -> Tokenizer:
    return Tokenizer(tokens.folder(tmp_path / "t", chat_template=text), **more)


def test_a_generation_tag_is_rendered_as_it_stands(tmp_path):
    plain = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    marked = "{% for m in messages %}{{ m.role }}{% generation %}{% set x = 1 %}{{ m.content }}"
    marked += "{% endgeneration %}{{ x }}{% endfor %}"
    record = Record([user("p")], [bot("c")], True)
    assert templated(tmp_path, marked).render(record) == templated(tmp_path, plain).render(record)


def test_a_template_that_asks_for_the_day_gets_the_one_that_was_given(tmp_path):
    asks = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    record = Record([user("p")], [bot("c")], True)
    assert templated(tmp_path, asks, date="2024-07-26").render(record)[0] == "26 Jul 2024p"
    with pytest.raises(Fault, match="^chat template: 'strftime_now' is undefined .data.date"):
        templated(tmp_path, asks).render(record)
    with pytest.raises(BadInput, match="data.date: today: Invalid isoformat"):
        templated(tmp_path, asks, date="today")


def test_r1s_prompt_opens_the_thinking_and_its_completion_closes_it(real):
    t = Tokenizer(real("r1-distill"))
    head, (behind,), _ = t.render(Record([user("Is it?")], [bot(THOUGHT)], True))
    assert head.endswith("<｜Assistant｜><think>\n")
    assert behind == THOUGHT.removeprefix("<think>\n") + tokens.EOS_SEEK
    as_sampled = Record([user("Is it?")], [bot(THOUGHT.removeprefix("<think>\n"))], True)
    assert t.render(as_sampled)[1] == [behind]
    with pytest.raises(Fault, match='rendered prompt: "No.*" in place of "<think>'):
        t.render(Record([user("Is it?")], [bot("No.")], True))


# ---- several turns -------------------------------------------------------------------------------

ASKED = [user("Weather in Paris?")]
TURNS = [bot(None, tool_calls=CALLS), RESULT, bot("21 degrees.")]


def test_of_several_turns_the_last_is_the_completion(real):
    t, tools = Tokenizer(real("qwen2.5")), {"tools": TOOLS}
    before = {"prompt": ASKED + TURNS[:2], "completion": TURNS[2:]} | tools
    assert ids({"prompt": ASKED, "completion": TURNS} | tools, t) == ids(before, t)
    assert ids({"messages": ASKED + TURNS} | tools, t) == ids(before, t)
    assert ids({"prompt": ASKED, "completion": ASKED + TURNS} | tools, t) == ids(before, t)
    pair = {"prompt": ASKED, "chosen": TURNS, "rejected": [*TURNS[:2], bot("Cold.")]} | tools
    (e,) = load([pair], t, "paired")
    assert (e.prompt.tolist(), e.completions[0].tolist()) == ids(before, t)
    for turns in (TURNS[:2], TURNS[1:], [bot("a"), bot("b")]):
        with pytest.raises(BadInput, match="completion: expected one assistant message"):
            ids({"prompt": ASKED, "completion": turns} | tools, t)


# ---- hostile templates and long texts ------------------------------------------------------------


@pytest.mark.survive("R16")
def test_a_template_that_does_not_come_to_an_end_is_ended(tmp_path, monkeypatch):
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}"
    busy, long = loop + "{% endfor %}{% endfor %}", loop + "1234567{% endfor %}{% endfor %}"
    monkeypatch.setattr(tokenizer, "RENDER_SECONDS", 0.2)
    start = time.monotonic()
    two = [rated([user("p")], [bot("c")])] * 2
    with pytest.raises(BadInput) as e:
        load(two, templated(tmp_path, busy))
    assert str(e.value).endswith(":1: chat template: not done with this record after 0.2 s")
    assert time.monotonic() - start < 5, "and the second record is not tried"
    templated(tmp_path, tokens.CHATML).render(Record([user("p")], [bot("c")], True))
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0), "nothing is left running"
    monkeypatch.setattr(tokenizer, "RENDER_SECONDS", 10.0)
    monkeypatch.setattr(tokenizer, "RENDER_CHARACTERS", 10**6)
    with pytest.raises(BadInput, match=":1: chat template: over 1,000,00[0-9] characters"):
        load(two, templated(tmp_path, long))


def test_outside_of_the_main_thread_a_template_runs_without_a_timer(tmp_path, monkeypatch):
    timers, texts = [], []
    monkeypatch.setattr(signal, "setitimer", lambda *args: timers.append(args))

    def work():
        record = Record([user("p")], [bot("c")], True)
        texts.append(templated(tmp_path, tokens.CHATML).render(record))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(texts) == 1 and timers == [], "its signal would end the process"


@pytest.mark.survive("R16")
@pytest.mark.parametrize(
    "large", ["10 ** 10 ** 10", "'x' * 10 ** 10", "'x' * 999999999", "[1] * 99999999"]
)
def test_a_product_in_a_template_is_bounded(tmp_path, large):
    record = Record([user("p")], [bot("c")], True)
    with pytest.raises(Fault, match="^chat template: .*too large a result"):
        templated(tmp_path, "{{ (" + large + ") | length }}").render(record)
    assert templated(tmp_path, "{{ '-' * 3 * 2 }}{{ messages[-1].content }}").render(
        Record([user("p")], [bot("pc")], True)
    )[1] == ["c"]


@pytest.mark.survive("R17")
@pytest.mark.parametrize("name", ["qwen2.5", "llama-2"])
def test_a_long_text_is_bounded_before_it_is_encoded_and_counted_as_cut(real, name, tmp_path):
    t, given = Tokenizer(real(name)), []
    text = "".join(random.Random(0).choices(["would ", "x", "日", " 7", "\n"], k=60_000))
    source = write(tmp_path / "d.jsonl", rated(text, text), rated("short", "too"))
    source += "," + write(tmp_path / "e.jsonl", rated([user(text)], [bot(text)]))
    whole = examples.load_examples(
        source, t, "rated", Data(source, max_prompt=20_000, max_completion=20_000)
    )
    encode = t.encode
    t.encode = lambda texts: encode(given.extend(texts) or texts)
    cut = examples.load_examples(source, t, "rated", Data(source, max_prompt=50, max_completion=40))
    assert max(map(len, given)) < 5000 < len(text)
    assert cut.cuts == {"prompts cut": 2, "completions cut": 2}
    for long, short in zip(whole.examples, cut.examples):
        n = 50 - (short.prompt[0] == t.bos)
        assert short.prompt.tolist()[-n:] == long.prompt.tolist()[-n:]
        assert short.completions[0].tolist() == long.completions[0].tolist()[:40]
        assert (short.prompt[0] == t.bos) == (long.prompt[0] == t.bos), "BOS stays"


# ---- from outside --------------------------------------------------------------------------------


def preview(*argv, monkeypatch, capsys, columns=80) -> str:
    from records import preview

    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "argv", ["data.py", *map(str, argv)])
    preview.main()
    return capsys.readouterr().out


def test_data_py_shows_a_file_as_a_run_would_see_it(real, tiny, tmp_path, monkeypatch, capsys):
    zephyr = shutil.copytree(real("zephyr"), tmp_path / "zephyr")
    shutil.copy(tiny / "config.json", zephyr)  # the context is read from it
    texts = ["Could", "would " * 30, "x"]
    records = [rated([user("Hello")], [bot(x)], x != "x") for x in [*texts, "x"]]
    source = write(tmp_path / "d.jsonl", *records)
    see = dict(monkeypatch=monkeypatch, capsys=capsys)
    shown = preview(source, "--model", zephyr, "--max_completion", 9, **see)
    lines = shown.splitlines()
    assert lines[:2] == [
        "read as ratings, for kto.py",
        "train: 4 examples of 1 prompts, 2 desirable, 2 undesirable",
    ]
    assert "1 duplicates, 0 contradictions, 1 completions cut" in shown
    assert "this balance:\n  kto.desirable_weight 1.00 to 1.33" in shown
    assert max(len(x) for x in lines if source not in x) <= 80
    assert [x for x in lines if x.startswith("      5 to      5 |####")]
    assert lines[-1] == "  > C|ould|</s>|▁|<0x0A>", "the scored tokens"
    assert "|</s>|▁|<0x0A>|<|||ass|ist|ant|||>|<0x0A>" in shown.replace("\n    ", "")
    pair = {"prompt": "p", "chosen": "c", "rejected": "d"}
    shown = preview(write(tmp_path / "p.jsonl", pair), **see)
    assert "1 pairs of 1 prompts" in shown and shown.count("  > ") == 2, "the demo's tokenizer"
    assert preview(write(tmp_path / "q.jsonl", {"prompt": "p"}), **see).count("  > ") == 0
    flag = preview(tmp_path / "q.jsonl", "--score_prompt", **see)
    assert flag.count("  > ") == 1, "a bare flag, as in a run"
    with pytest.raises(BadInput, match="^max_prompt: expected at least 1"):
        preview(tmp_path / "q.jsonl", "--max_prompt", "0", **see)
    for argv in (["--max_prompt", "x", source], [tmp_path / "none.jsonl"]):
        with pytest.raises(BadInput):
            preview(*argv, **see)
    assert data.pack, "and data.py is what others import"


def test_data_py_judges_a_file_by_all_of_its_records_and_refuses_as_a_run_does(
    tiny, tmp_path, monkeypatch, capsys
):
    see = dict(monkeypatch=monkeypatch, capsys=capsys)
    demo, label = {"prompt": "p", "completion": "c"}, rated(label=1)
    for records, kind in (
        ([demo, demo], "demonstrations, for spin.py"),
        ([{"prompt": "p"}, {"prompt": "q"}], "prompts, for online.py"),
        ([{"prompt": "p", "chosen": "c", "rejected": "d"}, label], "ratings, for kto.py"),
        ([{"prompt": "p", "chosen": "c", "rejected": "d"}], "pairs, for dpo.py or kto.py"),
    ):
        shown = preview(write(tmp_path / "d.jsonl", *records), **see)
        assert shown.startswith(f"read as {kind}\n")
    for bad in (demo, rated(label="good"), {"prompt": "p", "label": 1}, "[1]", "{"):
        source = write(tmp_path / "bad.jsonl", demo if bad == demo else label, bad, label)
        with pytest.raises(BadInput) as of_check:
            preview(source, "--model", tiny, **see)
        with pytest.raises(BadInput) as of_run:
            train(tiny, source, tmp_path / "run", "--batch_size=2")
        assert str(of_check.value) == str(of_run.value) and f"{source}:" in str(of_run.value)


def test_data_py_reads_all_parts_and_warns_of_what_they_share(tmp_path, monkeypatch, capsys):
    see = dict(monkeypatch=monkeypatch, capsys=capsys)
    train_file = write(tmp_path / "t.jsonl", *[rated(p, c) for p in "abcdghijkl" for c in "xy"])
    val = write(tmp_path / "v.jsonl", rated("a", "x"), rated("b", "z"), rated("e"))
    test = write(tmp_path / "s.jsonl", rated("m"), rated("n"))
    shown = preview(train_file, "--val", val, "--test", test, **see)
    for part in ("train: 20 examples of 10", "val: 3 examples of 3", "test: 2 examples of 2"):
        assert f"\n{part} prompts" in shown
    (line,) = [x for x in shown.splitlines() if "warning" in x]
    assert line == (
        "  warning: val: 2 of its 3 prompts are in train too; 1 of its 3 examples are there with the "
        "same completions"
    )
    shown = preview(train_file, "--split", "2,1,1", **see)
    assert "warning" not in shown and "\nval: " in shown, "a prompt is in one part alone"
    with pytest.raises(BadInput, match=f"^{val}:1: label: "):
        preview(train_file, "--val", write(tmp_path / "v.jsonl", rated(label="?")), **see)


def test_data_py_warns_of_html_and_of_texts_in_quotation_marks(tmp_path, monkeypatch, capsys):
    see = dict(monkeypatch=monkeypatch, capsys=capsys)
    texts = ['"c"', "“d”", "e", "f &amp; g", "a & b; &c", 'say "h"']
    source = write(tmp_path / "d.jsonl", *[rated("p" + x, x) for x in texts])
    warned = [x for x in preview(source, **see).splitlines() if "warning" in x]
    assert warned == [
        f"  warning: train: 1 records hold HTML entities such as &amp; (the first: {source}:4)",
        "  warning: train: 2 of 6 texts in completion begin and end with quotation marks: are these "
        "part of the text?",
    ]
    source = write(tmp_path / "d.jsonl", *[rated(x, x) for x in ['"c"', *"defghi"]])
    assert "warning" not in preview(source, **see), "a small share"


def test_labels_of_other_names_are_given_on_the_command_line(tiny, tmp_path, monkeypatch, capsys):
    stars = [rated(p, "c", n) for p, n in zip("abcdefghij", (1, 2, 3, 4, 5) * 2)]
    source, labels = write(tmp_path / "d.jsonl", *stars), "labels=up=4|5,down=1|2"
    argv = ("--batch_size=4", "--max_steps=2", "--optim.lr=1e-3")
    run = train(tiny, source, tmp_path / "run", *argv, f"--data.{labels}")
    table = capsys.readouterr().out
    checked = preview(
        source, "--model", tiny, f"--{labels}", monkeypatch=monkeypatch, capsys=capsys
    )
    for said in (table, checked):
        assert "train: 8 examples of 8 prompts, 4 desirable, 4 undesirable" in said
        assert "\n  dropped, since data.labels does not name their label: 3 (2)\n" in said
    named = [r | {"label": r["label"] > 3} for r in stars if r["label"] != 3]
    same = train(tiny, write(tmp_path / "e.jsonl", *named), tmp_path / "same", *argv)
    assert_same(run, same)


SAME_FILES = {
    "Anthropic HH": (
        "dpo",
        {
            k: f"\n\nHuman: {{}}\n\nAssistant: {v}"
            for k, v in dict(chosen="a", rejected="b").items()
        },
        {"prompt": "\n\nHuman: {}\n\nAssistant:", "chosen": " a", "rejected": " b"},
    ),
    "OpenAI": (
        "dpo",
        {
            "input": {"messages": [user("{}")]},
            "preferred_output": [bot("a")],
            "non_preferred_output": [bot("b")],
        },
        {"prompt": [user("{}")], "chosen": [bot("a")], "rejected": [bot("b")]},
    ),
    "LLaMA-Factory": (
        "kto",
        {"instruction": "Sort", "input": "{}", "output": "a", "kto_tag": "True"},
        rated([user("Sort\n{}")], [bot("a")]),
    ),
    "parts": (
        "kto",
        rated([user([{"type": "text", "text": "{}"}])], [bot("a")]),
        rated([user("{}")], [bot("a")]),
    ),
}


@pytest.mark.parametrize("form", SAME_FILES)
def test_a_run_on_a_file_of_any_form_is_the_run_on_the_same_records_in_ours(tiny, tmp_path, form):
    program, theirs, ours = SAME_FILES[form]
    template = tmp_path / "chatml.jinja"
    template.write_text(tokens.CHATML)
    runs = []
    for name, record in (("theirs", theirs), ("ours", ours)):
        lines = [json.dumps(record).replace("{}", word) for word in ("fig", "pea", "yam", "oat")]
        source = write(tmp_path / f"{name}.jsonl", *lines)
        argv = ("--batch_size=2", "--max_steps=2", f"--data.chat_template={template}")
        runs.append(train(tiny, source, tmp_path / name, *argv, program=program))
    assert_same(*runs)


def test_data_py_takes_the_context_as_a_run_does_and_fetches_no_weights(
    tiny, tmp_path, monkeypatch, capsys
):
    asked, fetch = [], folders.fetch_model

    def fetch_model(*args, **options):
        asked.append(options)
        return fetch(*args, **options)

    monkeypatch.setattr(folders, "fetch_model", fetch_model)
    see = dict(monkeypatch=monkeypatch, capsys=capsys)
    source = write(tmp_path / "q.jsonl", {"prompt": "p"})
    preview(source, "--model", tiny, **see)
    assert asked == [{"weights": False}]
    context = read_config(tiny).arguments["block_size"]
    with pytest.raises(BadInput, match=f"exceed the context of {context}$"):
        preview(source, "--model", tiny, "--max_prompt", context, **see)


def test_spins_answers_end_at_every_end_that_the_model_names(tiny, tmp_path):
    ends = [0, *range(60, 400)]
    folder, demos = tmp_path / "model", tmp_path / "demos.jsonl"
    shutil.copytree(tiny, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    write(demos, *[{"prompt": p, "completion": "c"} for p in "abcdefgh"])
    argv = (
        "--batch_size=8",
        "--spin.max_iterations=1",
        "--max_steps=1",
        "--spin.max_new_tokens=20",
    )
    train(folder, demos, tmp_path / "run", *argv, program="spin")
    lines = (tmp_path / "run" / "iterations" / "answers-1.jsonl").read_text().splitlines()[1:]
    answers = [json.loads(line)["ids"] for line in lines]
    assert len(answers) == 8 and sum(a[-1] in ends for a in answers) > 4
    assert not any(i in ends for a in answers for i in a[:-1])

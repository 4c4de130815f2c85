"""Dialogues become the ids that transformers and TRL make of them, for the models' own templates."""

import json
import random
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
import tokens
from chat_records import CALLS, LONG, RECORDS, RESULT, THOUGHT, TOOLS, bot, user
from conftest import refused, start, train
from tokens import ids_of, rated, write
from transformers import AutoModelForCausalLM, GenerationConfig

import preview
from infra.console import BadInput
from models.hub import Source
from records.examples import Example
from records.forms import Record, understand_record
from records.tokenizer import Tokenizer, template_kwargs

TRL = json.loads((tokens.CHAT / "trl.json").read_text())


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    """name -> the folder of this model's kind of tokenizer."""
    root = tmp_path_factory.mktemp("real")
    return lambda name: tokens.real(name, root / name)


@pytest.fixture
def load(tmp_path):
    """load(records, tokenizer) -> their examples and counts, by a file."""

    def load(records, t: Tokenizer, **settings) -> tuple[list[Example], Counter]:
        file = write(tmp_path / "d.jsonl", *records)
        return tokens.load(file, t, max_prompt=4096, max_completion=4096, **settings)

    return load


@pytest.fixture
def ids(load):
    """ids(record, tokenizer) -> those of its prompt and of its completion."""

    def ids(record, t: Tokenizer) -> tuple[list[int], list[int]]:
        ((e,), _) = load([record | {"label": True}], t)
        return e.prompt.tolist(), e.completions[0].tolist()

    return ids


@pytest.fixture
def model(real, tiny, tmp_path):
    """model(name) -> a folder of the tiny model with this kind of tokenizer."""

    def model(name: str) -> Path:
        folder = shutil.copytree(real(name), tmp_path / name)
        shutil.copy(tiny / "config.json", folder)  # the context is read from it
        return folder

    return model


@pytest.fixture
def base(tiny, tmp_path):
    """A base model, whose EOS is another token than that of the template which it is tuned with."""
    folder = shutil.copytree(tiny, tmp_path / "base")
    return tokens.folder(folder, tokens.IM, chat_template=tokens.CHATML)


@pytest.fixture
def shown(monkeypatch, capsys):
    """shown(*argv) -> what python data.py prints."""

    def shown(*argv) -> str:
        monkeypatch.setattr(sys, "argv", ["data.py", *map(str, argv)])
        preview.main()
        return capsys.readouterr().out

    return shown


# ---- as others do it -----------------------------------------------------------------------------

# TRL cuts the prompt where the template renders it differently behind an answer, and writes nothing
# for a call that the template does not know. Those are refused here.
CUT = {"mistral-v0.3": {"system"}, "r1-distill": set(RECORDS) - {"plain", "tool results"}}
LOST = {"gemma", "llama-3"}


@pytest.mark.parametrize("name", tokens.REAL)
def test_the_ids_are_those_of_trl_and_of_transformers(real, ids, name):
    """By tokenizer.json as it stands: AutoTokenizer builds three of these anew, with other ids (load_tokenizer)."""
    t, same = Tokenizer(Source(real(name))), 0
    recorded = TRL[name].get("tokenizer.json", TRL[name]["auto"])
    for kind, records in RECORDS.items():
        for record, theirs in zip(records, recorded[kind]):
            cut, lost = kind in CUT.get(name, ()), name in LOST and kind == "tool results"
            if "refused" in theirs or lost or cut:
                what = (
                    "tools: .* does not write its text: .weather.|its name: .weather.|must alternate"
                    if lost
                    else "chat template"
                )
                what = "does not begin with the rendered prompt" if cut else what
                refused(what, ids, record, t)
                continue
            head, behind = ids(record, t)
            assert (head, behind) == (theirs["prompt"], theirs["completion"]), (kind, record)
            same += 1
            if kind != "plain":
                more = dict(tools=record.get("tools"), **record.get("chat_template_kwargs", {}))
                more |= dict(tokenize=True, return_dict=False)
                whole = record["prompt"] + record["completion"]
                asked = t.hf.apply_chat_template(
                    record["prompt"], add_generation_prompt=True, **more
                )
                assert head == asked
                assert head + behind == t.hf.apply_chat_template(whole, **more)
    assert same >= (4 if name == "r1-distill" else 9), "else nothing was compared"


# ---- where a completion begins -------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["llama-2", "mistral-v0.3", "gemma", "phi-3", "llama-3", "qwen2.5"]
)
def test_prompt_and_completion_are_the_whole_text_unless_a_token_straddles(real, name):
    t, r, joined, apart = Tokenizer(Source(real(name))), random.Random(0), 0, 0
    text = (tokens.CHAT.parent / "README.md").read_text() + LONG * 20
    places = [sorted(r.sample(range(len(text)), 2)) for _ in range(400)]
    texts = [(text[max(0, b - 30) : b], text[b : min(d, b + 30)]) for b, d in places]
    rows = t.encode_all([(p, [c]) for p, c in texts], by_template=True)  # no BOS and EOS
    for (head, (behind,)), (p, c) in zip(rows, texts, strict=True):
        whole = ids_of(t, p + c)
        assert head == ids_of(t, p), "a prompt never depends on its completion"
        if whole[: len(head)] == head:
            joined += 1
            assert head + behind == whole, (p, c)
        else:
            apart += 1
            assert head + behind != whole and t.decode(head + behind) == t.decode(whole)
    assert joined > 80 and apart > 40


# ---- what a template gets ------------------------------------------------------------------------


def test_what_the_template_writes_before_an_answer_is_said_and_may_be_moved_into_the_prompt(
    model, tmp_path, shown
):
    """Qwen3 writes an empty thinking before an answer; ratings would teach it."""
    folder = model("qwen3")
    record = rated([user("2 + 2?")], [bot("4")])
    source = write(tmp_path / "d.jsonl", record, record | {"label": False})
    lead = "<think>\n\n</think>\n\n"
    said = shown(source, "--model", folder)
    assert f"the chat template writes {lead!r} before an answer's own text" in said
    assert repr(lead + "4<|im_end|>\n") in said
    off = shown(source, "--model", folder, "--chat_template_kwargs", "enable_thinking=false")
    assert "before an answer" not in off and "'4<|im_end|>\\n'" in off
    in_record = record | {"chat_template_kwargs": {"enable_thinking": False}}
    by_record = shown(write(tmp_path / "e.jsonl", in_record), "--model", folder)
    assert off.splitlines()[-4:] == by_record.splitlines()[-4:], "the same ids"
    refused("^chat_template_kwargs: thinking: expected name=value", template_kwargs, "thinking")


@pytest.mark.parametrize(
    "text, expected",
    [
        *((word, word) for word in "no on de 0123 12:30 2026-01-31 2026_11_28 1e5 1.10 0x1F +1 .5 None".split()),
        *(("false", False), ("True", True), ("null", None), ("2026", 2026), ("-0.5", -0.5)),
        *(("'2026'", "2026"), ('"true"', "true"), ("a=b: c", "a=b: c")),
    ],
)  # fmt: skip
def test_a_chat_template_gets_truth_values_and_numbers_as_such_and_all_else_as_the_text_it_is(
    text, expected
):
    """YAML 1.1 made False of the language no, 83 of 0123 and a date of 2026-01-31."""
    (value,) = template_kwargs(f"name={text}").values()
    assert value == expected and type(value) is type(expected)


def test_where_only_the_prompt_opens_a_thinking_a_sampled_answer_can_be_learned(real, ids):
    """Thumbs of a product have answers alone; R1's and QwQ's templates open a thinking before them."""
    t = Tokenizer(Source(real("r1-distill")))
    match = "instead of '<think>.n' .docs/data.md.$"
    refused(match, ids, {"prompt": [user("2 + 2?")], "completion": [bot("4")]}, t)
    sampled = {"prompt": [user("2 + 2?")], "completion": [bot("Hm</think>4")], "cut": False}
    head, behind = (t.decode(x, special_tokens=True) for x in ids(sampled, t))
    assert head.endswith("<think>\n") and behind == "Hm</think>4" + tokens.EOS_SEEK
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    with pytest.raises(BadInput, match="instead of '[^']*' .docs/data.md.$"):
        record = {"prompt": [user("p")], "completion": [bot(THOUGHT)], **off}
        ids(record, Tokenizer(Source(real("qwen3"))))


RECORD = rated([user("Hi")], [bot("Ho")])
TEXT_FILES = {  # a text file -> its content, and the options that name it
    "own.jinja": (tokens.CHATML, "--chat_template"),
    "model/chat_template.jinja": (tokens.CHATML, ""),
    "data.yaml": ("data:\n  max_prompt: 100\n", "--config"),
    "lines.json": (f"{json.dumps(RECORD)}\n" * 2, "--val"),
}


@pytest.mark.parametrize("name", TEXT_FILES)
def test_a_byte_order_mark_before_a_text_file_changes_nothing(name, tiny, tmp_path, shown):
    """Notepad and PowerShell write it."""
    model = shutil.copytree(tiny, tmp_path / "model")
    (model / "chat_template.jinja").write_text(tokens.CHATML)
    content, option = TEXT_FILES[name]
    argv = [write(tmp_path / "train.jsonl", RECORD), "--model", model]
    if option:
        argv += [option, tmp_path / name]
    said = []
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / name).write_text(content, encoding=encoding)
        said.append(shown(*argv))
    assert said[0] == said[1]
    assert "'<|im_start|>user\\nHi<|im_end|>" in said[0]


# ---- all that a record says is written -----------------------------------------------------------


def tool_record(calls: list, rated_call: bool, content: str | None = "") -> dict:
    question, call = user("Weather in Paris?"), bot(content, tool_calls=calls)
    if rated_call:
        return {"prompt": [question], "completion": [call], "tools": TOOLS}
    return {"prompt": [question, call, RESULT], "completion": [bot("It is 21.")], "tools": TOOLS}


@pytest.mark.parametrize("rated_call", [True, False])
@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "llama-3.1", "mistral-v0.3"])
def test_arguments_as_a_text_of_json_are_written_as_those_of_an_object(real, ids, name, rated_call):
    t = Tokenizer(Source(real(name)))
    record = tool_record(CALLS, rated_call)
    whole = record["prompt"] + record["completion"]
    theirs = t.hf.apply_chat_template(whole, tools=TOOLS, tokenize=True, return_dict=False)
    text = json.dumps(CALLS[0]["function"]["arguments"], separators=(",", ":"))
    for arguments in (CALLS[0]["function"]["arguments"], text, text[:-2]):
        call = CALLS[0] | {"function": CALLS[0]["function"] | {"arguments": arguments}}
        if arguments == text[:-2]:
            refused(":1: tool_calls: ", ids, tool_record([call], rated_call), t)
        else:
            assert sum(ids(tool_record([call], rated_call), t), []) == theirs


def test_null_beside_a_call_is_written_as_no_text(tmp_path):
    """OpenAI's form. GLM-4.5's template writes None, and those of Qwen3 and gpt-oss raise an error."""
    template = (
        "{{ tools }}{% for m in messages %}<{{ m.role }}>{{ m.content.strip() }}{{ m.tool_calls or '' }}\n"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    t = Tokenizer(Source(tokens.folder(tmp_path / "t", chat_template=template)))
    for rated_call in (True, False):
        texts = []
        for content in ("", None):
            record = tool_record(CALLS, rated_call, content) | {"label": True}
            texts.append(t.render(understand_record(record, "rated")))
        assert texts[0] == texts[1]


LOOK = bot("Let me look.", tool_calls=CALLS)
REASONED = bot("Yes.", reasoning_content="Hm, so.")
# the prompt, the rated answer, what the message names, and the templates that leave it out
LEFT_OUT = [
    ([{"role": "developer", "content": "In Basque."}, user("p")], bot("c"),
     "developer: .* its content: 'In Basque.'", ["phi-3", "qwen2.5", "qwen3", "zephyr"]),
    # its text stands within another one
    ([user("p"), {"role": "tool", "content": "Yes"}, user("Yes?")], bot("c"),
     "tool: .* its content: 'Yes'", ["phi-3", "zephyr"]),
    ([user("p")], REASONED,
     "assistant: .* its reasoning_content: 'Hm, so.'", ["phi-3", "qwen2.5", "llama-3.1", "gemma"]),
    ([user("p")], bot("Yes.", thinking="Hm, so."),
     "assistant: .* its thinking: 'Hm, so.'", ["qwen3", "llama-3"]),
    ([user("p")], bot("Sure. <think>\nHm\n</think>\n\nYes."),
     "assistant: .* its content: 'Sure.'", ["qwen3"]),
    ([user("p")], LOOK, "assistant: .* its content: 'Let me look.'", ["llama-3.1", "mistral-v0.3"]),
    ([user("p"), LOOK, RESULT], bot("c"),
     "assistant: .* its content: 'Let me look.'", ["llama-3.1", "mistral-v0.3"]),
    ([user("p") | {"name": "Ann"}], bot("c"), "user: .* its name: 'Ann'", ["qwen3", "gemma"]),
]  # fmt: skip


@pytest.mark.parametrize("prompt, answer, words, names", LEFT_OUT)
def test_a_text_that_the_template_leaves_out_is_refused_or_dropped(
    real, load, prompt, answer, words, names
):
    whole = rated([user("p")], [bot("c")])
    records = [whole, rated(prompt, [answer], False), whole]
    for name in names:
        t = Tokenizer(Source(real(name)))
        refused(rf"^[^\n]*d.jsonl:2: {words} \(data.left_out\)$", load, records, t)
        examples, counts = load(records, t, left_out="drop")
        assert [e.where[-2:] for e in examples] == [":1", ":3"]
        assert counts["dropped by data.left_out"] == 1


def test_a_text_that_the_template_writes_twice_is_refused(tmp_path):
    twice = tokens.CHATML + "{{ messages[0].content }}"
    t = Tokenizer(Source(tokens.folder(tmp_path / "t", chat_template=twice)))
    match = "user: the chat template writes more than once its content"
    refused(match, t.render, Record([user("p")], []))


# ---- where an answer ends ------------------------------------------------------------------------


def test_sampling_ends_where_the_template_ends_an_answer(base, tmp_path, shown):
    """Also of a template whose marks the tokenizer does not have."""
    source = write(tmp_path / "d.jsonl", rated([user("p")], [bot("c")]))
    said = "sampling ends at <|im_end|>, too: the chat template ends an answer in it, not in"
    assert shown(source, "--model", base).startswith(said)
    t = Tokenizer(Source(base))
    both = (tokens.EOS, t.hf.convert_tokens_to_ids("<|im_end|>"))
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": both}))
    assert shown(source, "--model", base).startswith("train: ")
    t.end_as_the_template_does()
    assert t.stops == both
    glm = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    no_token = tokens.CHATML.replace("<|im_end|>", "[END]")
    for template, line in (
        (no_token, r"the chat template ends an answer in '[END]\n', which is no token"),
        (glm, "the chat template writes nothing that ends an answer"),
    ):
        (base / "chat_template.jinja").write_text(template)
        assert line in shown(source, "--model", base)


def test_an_export_ends_an_answer_where_the_template_does(base, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(520, mean_resizing=False)
    model.save_pretrained(base)
    config = {"eos_token_id": tokens.EOS, "temperature": 0.7, "do_sample": True}
    (base / "generation_config.json").write_text(json.dumps(config))
    end = Tokenizer(Source(base)).hf.convert_tokens_to_ids("<|im_end|>")
    source = write(tmp_path / "d.jsonl", *(rated([user("p")], [bot("c")], x) for x in (1, 0)))
    train(base, source, tmp_path / "run", "--batch_size=2", "--epochs=1")
    step = tmp_path / "run" / "checkpoints" / "step-00000001"
    start("export", [step, "--out", tmp_path / "export"])
    for folder in (tmp_path / "run" / "final", tmp_path / "export"):
        read = GenerationConfig.from_pretrained(folder)
        assert (read.eos_token_id, read.temperature) == ([tokens.EOS, end], 0.7)


# ---- from outside --------------------------------------------------------------------------------


def test_data_py_shows_a_file_as_a_run_would_see_it(model, tmp_path, shown):
    folder = model("zephyr")
    texts = ["Could", "would " * 30, "x", "x"]
    source = write(tmp_path / "d.jsonl", *[rated([user("Hi")], [bot(x)], x != "x") for x in texts])
    lines = shown(source, "--model", folder, "--max_completion", 9).splitlines()
    assert lines[0] == "train: 4 examples of 1 prompts, 2 desirable, 2 undesirable"
    assert "1 duplicates, 0 contradictions, 4 by the chat template" in lines[3]
    assert lines[-2] == r"'Could</s> \n'" and json.loads(lines[-1])[2] == 2
    pair = write(tmp_path / "p.jsonl", {"prompt": "p", "chosen": "c", "rejected": "d"})
    assert "\ntrain: 1 examples of 1 prompts\n" in shown(pair, "--kind", "paired")


def test_data_py_shows_the_first_record_within_80_columns(model, tmp_path, shown):
    folder = model("qwen2.5")
    for record, whole in (
        (rated([user("word " * 300)], [bot("")]), ["  user      word word", "more lines]"]),
        (
            rated([user("Q\n\nR")], [bot("")], False),
            ["  user      Q\n\n            R\n  answer    (empty)"],
        ),
    ):
        out = shown(write(tmp_path / "d.jsonl", record, record), "--model", folder)
        turns = out[out.index("d.jsonl:1):\n") : out.index("\n\n'")]
        assert all(part in turns for part in whole)
        assert max(map(len, turns.splitlines())) <= 80


def test_without_a_model_data_py_cuts_nothing_and_says_whose_tokens_it_counts(tmp_path, shown):
    """The demo's model has room for 64 tokens: texts of a user's own model are longer."""
    records = [rated("one prompt " * 40 + str(i), "an answer " * 40) for i in range(3)]
    out = shown(write(tmp_path / "d.jsonl", *records))
    assert "3 examples of 3 prompts" in out and "0 prompts cut, 0 completions cut" in out
    assert out.startswith("tokens are those of the demo's tokenizer: give --model")
    assert "no thumbs down" in out, "and that only one kind of thumb is there"

"""From a file to examples, described in a table; a step's pairs, cuts and packing are exact."""

import contextlib
import dataclasses
import gc
import random
import re
import sys
import time

import numpy as np
import pytest
import tokenizers
import torch
from tokens import CHATML, EOS, bos, bot, chat, folder, ids_of, plain, rated, user, write

import data
from data import Batch, MicroBatch
from records import examples
from records.examples import (
    Example,
    describe_examples,
    examples_hash,
    load_splits,
    suggest_class_weights,
)
from records.tokenizer import Tokenizer
from runs.errors import BadInput
from runs.settings import Data, with_limits


def load(source, tokenizer, kind="rated", max_prompt=64, max_completion=64, **limits):
    """Examples, counts of what was cut, ignored fields."""
    limits |= dict(max_prompt=max_prompt, max_completion=max_completion)
    return examples.load_examples(str(source), tokenizer, kind, Data(str(source), **limits))


def read(*args, **kwargs) -> list[Example]:
    return load(*args, **kwargs).examples


def refusal(*args, **kwargs) -> list[str]:
    """The lines that load refuses with."""
    with pytest.raises(BadInput) as e:
        load(*args, **kwargs)
    return str(e.value).splitlines()


def example(prompt, *completions, label=True, **rest) -> Example:
    arrays = [np.array(x, dtype=np.int32) for x in (prompt, *completions)]
    return Example(arrays[0], tuple(arrays[1:]), label, where="made", **rest)


def ids(e: Example) -> list[list[int]]:
    """The prompt and the completions."""
    return [x.tolist() for x in (e.prompt, *e.completions)]


# ---- a record becomes examples -------------------------------------------------------------------


def test_a_pair_stays_a_pair_for_dpo_and_becomes_two_rated_examples_for_kto(tmp_path):
    record = {"prompt": "p", "chosen": "good", "rejected": "bad", "weight": 2, "source": "s"}
    source = write(tmp_path / "d.jsonl", record | {"chosen_reward": 3, "rejected_reward": 2})
    prompt, good, bad = (ids_of(plain(), text) for text in ("p", "good", "bad"))
    (pair,) = read(source, plain(), "paired", extra="source")
    assert ids(pair) == [prompt, good + [EOS], bad + [EOS]] and pair.rewards == (3.0, 2.0)
    up, down = read(source, plain(), "rated", extra="source")
    assert (ids(up), ids(down)) == ([prompt, good + [EOS]], [prompt, bad + [EOS]])
    assert (up.label, down.label) == (True, False)
    assert (up.rewards, down.rewards) == ((3.0, None), (2.0, None)), "it has no second completion"
    for e in (pair, up, down):
        assert (e.where, e.weight, e.extra) == (f"{source}:1", 2.0, {"source": "s"})


def test_a_demonstration_is_one_example_of_one_completion(tmp_path):
    source = write(tmp_path / "d.jsonl", {"input": "p", "output": "c"})
    (e,) = read(source, plain(), "demonstrations")
    assert ids(e) == [ids_of(plain(), "p"), [*ids_of(plain(), "c"), EOS]] and e.label is True


def test_prompts_alone_are_the_distinct_ones_in_the_order_of_the_file(tmp_path):
    records = rated("a", "x"), {"prompt": "b"}, rated("a", "y"), rated("c")
    source = write(tmp_path / "d.jsonl", *records)
    found = read(source, plain(), "prompts")
    assert [ids(e) for e in found] == [[[66]], [[67]], [[68]]]
    assert [e.where for e in found] == [f"{source}:{i}" for i in (1, 2, 4)]


PAIR = b'{"prompt": "p", "chosen": "c", "rejected": "d", '
REST = b', "completion": "c", "label": 1}'
BAD = [  # a line of a file, what it is refused with
    (b'{"prompt": "p"' + REST, None),
    (b"{not json", "json: .*property name.*column 2"),
    (b'{"prompt": "\xff\xfe"' + REST, "json: not UTF-8 at byte 12"),
    (b"[1, 2]", "record: expected an object, got .1, 2."),
    (b"", None),
    (b'{"prompt": "p", "completion": "c", "label": "yes"}', 'label: expected .* got "yes"'),
    (PAIR + b'"chosen_reward": NaN}', "chosen_reward: .*finite number, got NaN"),
    (PAIR + b'"rejected_reward": -Infinity}', "rejected_reward: .*finite number, got -Infinity"),
    (PAIR + b'"chosen_reward": 1e999}', "chosen_reward: .*finite number, got Infinity"),
    (rb'{"prompt": "p \ud83d"' + REST, "record: .*surrogate"),
    (rb'{"prompt": "p", "completion": "\udc00 c", "label": 1}', "record: .*surrogate"),
    (rb'{"a\nb": 1, "a\nb": 2}', "a b: given 2 times"),
    ('{"prompt": ["one\u2028two"]'.encode() + REST, "prompt.0.: expected a message"),
    (b"[" * 10**5 + b"]" * 10**5, "json: .*recursion"),
    (b'{"prompt": ' + b"1" * 5000 + REST, "json: .*digits"),
    (b'{"prompt": "p", "completion": "c"', "json: .*delimiter: column 34"),
    (b'{"prompt": "p", "completion": "half a li', "json: Unterminated string.*column"),
]


def test_each_bad_record_has_one_line_that_says_where_and_why(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"\n".join(line for line, _ in BAD))
    wanted = [(i, pattern) for i, (_, pattern) in enumerate(BAD, 1) if pattern]
    got = refusal(path, plain())
    assert len(got) == len(wanted)
    for line, (number, pattern) in zip(got, wanted):
        assert re.match(rf"{re.escape(str(path))}:{number}: {pattern}", line), line
        assert " line " not in line, "the number inside the line would contradict the file's"


def test_the_first_twenty_faults_are_told_and_no_more(tmp_path):
    source = write(tmp_path / "d.jsonl", rated(), *[rated(label="yes")] * 19)
    assert len(refusal(source, plain())) == 19
    source = write(tmp_path / "d.jsonl", rated(), *[rated(label="yes")] * 50)
    places = [line.split(": ")[0] for line in refusal(source, plain())]
    assert places == [f"{source}:{i}" for i in range(2, 22)]


def test_a_record_too_deep_to_be_shown_is_refused_like_any_other(tmp_path):
    """Near the recursion limit there are depths that can be read but not printed: all are tried."""
    rest, limit = ', "completion": "c", "label": 1}', sys.getrecursionlimit()
    deep = [f'{{"prompt": {"[" * d}{"]" * d}{rest}' for d in range(800, limit)]
    for d in range(0, len(deep), 19):  # by 20 lines, or the first 20 faults would hide the rest
        some = deep[d : d + 19]
        lines = refusal(write(tmp_path / "deep.jsonl", *some), plain())
        assert [int(line.split(":")[1]) for line in lines] == list(range(1, len(some) + 1))


NOTHING = [("d.jsonl", b""), ("d.jsonl", b"\n\n"), ("d.json", b"[]"), ("d.csv", b"")]


@pytest.mark.parametrize("name, blob", NOTHING)
def test_a_file_without_records_is_refused(tmp_path, name, blob):
    (tmp_path / name).write_bytes(blob)
    assert refusal(tmp_path / name, plain()) == [f"{tmp_path / name}: no records"]


# ---- tokens --------------------------------------------------------------------------------------


def test_a_plain_completion_ends_with_one_eos(tmp_path):
    source = write(tmp_path / "d.jsonl", rated("ab", " best"), rated("p", ""))
    e, empty = read(source, plain())
    assert ids(e) == [ids_of(plain(), "ab"), [262, EOS]] and EOS not in e.prompt
    assert ids(empty)[1] == [EOS]
    assert (e.prompt.dtype, e.completions[0].dtype) == (np.int32, np.int32)


def test_a_chat_completion_ends_as_the_template_ends_the_turn(tmp_path):
    (dialogue,) = read(write(tmp_path / "d.jsonl", rated([user("hi")], [bot("c")])), chat())
    assert ids(dialogue)[1] == ids_of(chat(), "c<|im_end|>\n")
    assert EOS not in dialogue.completions[0], "a second end would never be sampled"


def test_a_completion_that_ends_with_eos_in_its_text_gets_no_second_one(tmp_path):
    source = write(
        tmp_path / "d.jsonl", *[rated("a", "b" + end * "<|endoftext|>") for end in (0, 1)]
    )
    without, rendered = read(source, plain())
    assert ids(without) == ids(rendered) == [[66], [67, EOS]]


DIALOGUE = rated([user("p")], [bot("c")])
# the records of a file, whether its tokenizer has a template, how all of them are rendered
RENDERED = {
    "two strings are no dialogue": ([rated()], True, "plain"),
    "an instruction is a turn of the user": (
        [{"instruction": "p", "output": "c", "label": 1}],
        True,
        "by the chat template",
    ),
    "also a question": (
        [{"question": "p", "completion": "c", "label": 1}],
        True,
        "by the chat template",
    ),
    "where there is a template": (
        [{"question": "p", "completion": "c", "label": 1}],
        False,
        "plain",
    ),
    "strings before a dialogue": ([rated(), rated(), DIALOGUE], True, "by the chat template"),
    "strings behind a dialogue": ([DIALOGUE, rated()], True, "by the chat template"),
    "an empty system beside a filled one": (
        [rated(system=""), rated(system="s"), rated()],
        True,
        "by the chat template",
    ),
    "an empty system alone": ([rated(system="")], True, "plain"),
}


@pytest.mark.parametrize("file", RENDERED)
def test_all_records_of_a_file_are_rendered_in_one_way(tmp_path, monkeypatch, file):
    monkeypatch.setattr(examples, "ENCODE_TEXTS", 2)  # the dialogue may come after a whole batch
    waits, enter = [], examples.Wait.__enter__
    monkeypatch.setattr(examples.Wait, "__enter__", lambda self: waits.append(self) or enter(self))
    records, has_template, how = RENDERED[file]
    tokenizer = chat() if has_template else plain()
    loaded = load(write(tmp_path / "d.jsonl", *records), tokenizer)
    assert loaded.rendered == {how: len(records)} and len(loaded.examples) == len(records)
    assert (waits[-1].done, waits[-1].total) == (len(records), len(records)), "each is counted once"
    assert f"  rendered: {len(records)} {how}" in describe_examples("train", loaded).splitlines()
    turn = ids_of(tokenizer, "<|im_start|>user\np<|im_end|>\n<|im_start|>assistant\n")
    for e in loaded.examples:
        prompt, completion = ids(e)
        if how == "plain":
            assert (prompt, completion) == (ids_of(tokenizer, "p"), [68, EOS])
        else:
            assert prompt[-len(turn) :] == turn
            assert completion == ids_of(tokenizer, "c<|im_end|>\n")


def test_each_file_of_several_has_its_own_way_and_the_table_counts_both(tmp_path):
    files = write(tmp_path / "a.jsonl", rated(), rated()), write(tmp_path / "b.jsonl", DIALOGUE)
    table = describe_examples("train", load(",".join(files), chat()))
    assert "  rendered: 2 plain, 1 by the chat template" in table.splitlines()


def test_parts_that_are_rendered_differently_are_warned_of(tmp_path):
    files = write(tmp_path / "t.jsonl", DIALOGUE), write(tmp_path / "v.jsonl", rated())
    for train, val, warned in ((0, 1, True), (1, 0, True), (0, 0, False), (1, 1, False)):
        said = []
        d = Data(files[train], val=files[val], max_prompt=64, max_completion=64)
        load_splits(d, chat(), "rated", said.append)
        assert said[-1].startswith("warning: some records are rendered by") == warned


def test_labels_that_data_labels_does_not_name_are_dropped_counted_and_shown(tmp_path):
    source = write(
        tmp_path / "d.jsonl", *[rated(str(i), label=i) for i in (1, 2, 3, 3, None, 4, 5)]
    )
    loaded = load(source, plain(), labels="up=4|5, down=1|2")
    assert loaded.examples.rows["label"].tolist() == [False, False, True, True]
    table = describe_examples("train", loaded)
    assert table.endswith(
        "\n  dropped, since data.labels does not name their label: 3 (2), null (1)"
    )
    (line,) = refusal(source, plain(), labels="up=yes,down=no")
    there = "3 (2), 1 (1), 2 (1), null (1), 4 (1), 5 (1)"
    assert line == f"{source}: data.labels names no label here: {there}"
    with pytest.raises(BadInput) as e:
        parts_of(Data(source, labels="up=4|5,down=bad"))
    assert str(e.value).startswith(
        f"data.labels: down=bad: no record of {source} has it; dropped were 3"
    )


@pytest.mark.parametrize("labels", ["up", "up=", "=4", "good=4", "up=4,down=4", "up=4|4", "up=4=5"])
def test_labels_that_cannot_be_meant_are_refused(tmp_path, labels):
    (line,) = refusal(write(tmp_path / "d.jsonl", rated()), plain(), labels=labels)
    assert line.startswith("data.labels: ")


def test_prompt_and_completion_are_tokenised_apart(tmp_path):
    (e,) = read(write(tmp_path / "d.jsonl", rated("be", "st")), plain())
    together, apart = ids_of(plain(), "best"), ids_of(plain(), "be") + ids_of(plain(), "st")
    assert together != apart, "else this shows nothing"
    assert [*e.prompt, *e.completions[0]] == [*apart, EOS]


def test_reading_leaves_the_garbage_collector_on(tmp_path):
    good, bad = write(tmp_path / "a.jsonl", rated()), write(tmp_path / "b.jsonl", "{}")
    for file in (good, bad):
        with contextlib.suppress(BadInput):
            d = Data(file, max_prompt=4, max_completion=4)
            load_splits(d, plain(), "rated", lambda text: None)
        assert gc.isenabled()


def test_bos_stays_when_the_head_of_a_prompt_goes(tmp_path):
    texts = [rated("abcdef"), rated("abc"), rated("")]
    source = write(tmp_path / "d.jsonl", *texts)
    source += "," + write(tmp_path / "e.jsonl", rated([user("hi")], [bot("c")]))
    cut, fits, empty, dialogue = (e.prompt.tolist() for e in read(source, bos(), max_prompt=4))
    assert cut == [512, *ids_of(bos(), "abcdef")[-3:]]
    assert dialogue == [512, *ids_of(bos(), "<|im_start|>assistant\n")[-3:]]
    assert (fits, empty) == ([512, 66, 67, 68], [512])
    assert [len(e.prompt) for e in read(source, bos(), max_prompt=1)] == [1, 1, 1, 1]
    assert not any(512 in e.completions[0] for e in read(source, bos())), "a completion has no BOS"


def test_a_bos_that_only_the_template_writes_stays_as_well(tmp_path):
    template = "{{ bos_token }}" + CHATML
    path = folder(tmp_path / "t", ("<s>",), bos_token="<s>", chat_template=template)
    tokenizer = Tokenizer(path)
    assert not tokenizer.adds_bos
    source = write(tmp_path / "d.jsonl", rated([user("hi")], [bot("c")]))
    source += "," + write(tmp_path / "e.jsonl", rated("abcdef"))
    dialogue, text = read(source, tokenizer, max_prompt=4)
    assert dialogue.prompt.tolist() == [512, *ids_of(tokenizer, "assistant\n")[-3:]]
    assert text.prompt.tolist() == ids_of(tokenizer, "abcdef")[-4:]


def test_an_empty_prompt_needs_a_bos(tmp_path):
    source = write(tmp_path / "d.jsonl", rated("", "c"))
    (line,) = refusal(source, plain())
    assert line.startswith(f"{source}:1: prompt: empty")


def test_a_template_that_renders_nothing_is_refused_at_its_record(tmp_path):
    source = write(tmp_path / "d.jsonl", rated(label=2), rated([user("hi")], [bot("c")]))
    for template, reason in (
        ("always the same", "completion: the chat template renders it as nothing"),
        ("{% if not add_generation_prompt %}c{% endif %}", "prompt: empty"),
        ("{{ raise_exception('a\nb') }}", "chat template: a"),
    ):
        tokenizer = Tokenizer(folder(tmp_path / "t", chat_template=template))
        _, line = refusal(source, tokenizer)
        assert line.startswith(f"{source}:2: {reason}")


def test_a_text_of_which_no_token_is_left_is_refused(tmp_path):
    """Its first token would have no source."""

    def strip(t):
        t.normalizer = tokenizers.normalizers.Strip()

    def stripped(template) -> Tokenizer:
        return Tokenizer(folder(tmp_path / "t", change=strip, chat_template=template))

    source = write(tmp_path / "d.jsonl", rated("a"), rated("  "))
    (line,) = refusal(source, stripped("{{ messages[-1].content }}"))
    assert line.startswith(f"{source}:2: prompt: ")
    assert read(source, plain())[1].prompt.tolist() == [222, 222], "a blank is a token there"
    source = write(tmp_path / "d.jsonl", rated([user("a")], [bot("c")]))
    (line,) = refusal(source, stripped("{% if add_generation_prompt %}a{% else %}a {% endif %}"))
    assert line.startswith(f"{source}:1: completion: ")


def test_a_cut_takes_the_prompts_head_and_the_completions_tail_with_its_eos(tmp_path):
    text = "a b c d f g"
    tokens = ids_of(plain(), text)
    assert len(tokens) == 6 and len(set(tokens)) == 6
    records = rated(text, text), rated(text[:7], text[:5]), rated("a", "a")
    source = write(tmp_path / "d.jsonl", *records)
    (long, fits, short), cuts, *_ = load(source, plain(), "rated", 4, 4)
    assert ids(long) == [tokens[-4:], tokens[:4]]
    assert ids(fits) == [tokens[:4], [*tokens[:3], EOS]]
    assert ids(short) == [[66], [66, EOS]]
    assert cuts == {"prompts cut": 1, "completions cut": 1}
    (e, *_), cuts, *_ = load(source, plain(), "rated", 6, 6)
    assert ids(e)[1] == tokens and cuts["completions cut"] == 1, "its EOS alone is over the limit"
    assert not sum(load(source, plain(), "rated", 6, 7).cuts.values())


def test_a_prompt_never_depends_on_its_completion(tmp_path):
    source = write(tmp_path / "d.jsonl", *[rated("a b c d f g", "x" * n) for n in (0, 1, 50)])
    found = read(source, plain(), max_prompt=3, max_completion=5)
    assert len({e.prompt.tobytes() for e in found}) == 1


def test_both_completions_of_a_pair_are_cut_alike(tmp_path):
    pair = {"prompt": "p", "chosen": "abcdef", "rejected": "ghijkl"}
    (e,), cuts, *_ = load(write(tmp_path / "d.jsonl", pair), plain(), "paired", 9, 3)
    assert ids(e)[1:] == [[66, 67, 68], [72, 73, 74]] and cuts["completions cut"] == 2


# ---- a record's own weight and fields ------------------------------------------------------------


def micro_batch(found: list[Example], index: list[int]) -> data.LossView:
    batch = Batch(found)
    return batch.loss_view(batch.pack(index), batch.step_view(torch.device("cpu")))


def test_fields_that_data_extra_names_reach_the_loss_as_a_tensor_or_as_texts(tmp_path):
    more = [(0.5, "web"), (-2, "book"), (3, "")]
    records = [rated("p", "c", score=score, source=source) for score, source in more]
    jsonl, csv = write(tmp_path / "d.jsonl", *records), tmp_path / "d.csv"
    rows = [f"p,c,1,{score},{source}\n" for score, source in more]
    csv.write_text("prompt,completion,label,score,source\n" + "".join(rows))
    for source in (jsonl, csv):
        view = micro_batch(read(source, plain(), extra="score, source"), [2, 0])
        assert torch.equal(view.extra("score"), torch.tensor([3.0, 0.5]))
        assert view.extra("source") == ["", "web"]
    assert read(jsonl, plain())[0].extra == {}, "what is not named is not kept"


def test_a_weight_and_a_label_reach_the_step(tmp_path):
    source = write(tmp_path / "d.jsonl", rated(label=0, weight=0.25), rated(), rated(weight=0))
    view = micro_batch(read(source, plain()), [0, 1])
    assert view.step.weight.tolist() == [0.25, 1.0, 0.0] and view.label.tolist() == [False, True]
    assert (view.step.size, view.step.desirable) == (3, 2), "of the step, not of the micro-batch"


def test_the_table_names_the_fields_that_nothing_reads_and_no_others(tmp_path):
    read_by_us = dict(weight=2, label=0)
    records = [rated(id=1, score=2), rated(id=2, score=3, source="web") | read_by_us]
    for extra, names in ((None, "id, score, source"), ("score,id", "source")):
        said = table_of(tmp_path, *records, extra=extra).splitlines()
        line = f"  fields that nothing reads: {names} (see data.extra)"
        assert [x for x in said if "nothing reads" in x] == [line]
    assert "nothing reads" not in table_of(tmp_path, rated() | read_by_us)


def test_the_fingerprint_is_of_all_that_is_learned_from_and_of_nothing_else(tmp_path):
    def hashed(*records, name="d.jsonl", kind="rated", part="train", extra=None):
        found = read(write(tmp_path / name, *records), plain(), kind, extra=extra)
        return examples_hash({"train": [], "val": []} | {part: found})

    a, b = rated("a", "x"), rated("b", "y", 0)
    pair = {"prompt": "p", "chosen": "c", "rejected": "d"}
    other = [
        hashed(a, b),
        hashed(b, a),
        hashed(a, b, b),
        hashed(a | {"label": 0}, b),
        hashed(a | {"weight": 2}, b),
        hashed(a | {"completion": "z"}, b),
        hashed(a | {"prompt": "z"}, b),
        hashed(a | {"prompt": "ax", "completion": ""}, b),
        hashed(a, b, part="val"),
        hashed(a | {"note": 1}, b | {"note": 1}, extra="note"),
        hashed(a | {"note": 2}, b | {"note": 1}, extra="note"),
        hashed(pair, kind="paired"),
        hashed(pair | {"chosen_reward": 1}, kind="paired"),
    ]
    assert len(set(other)) == len(other)
    assert hashed(a, b, name="elsewhere.jsonl") == hashed("", a, "", b) == hashed(a, b), "its place"
    assert hashed(a | {"label": "chosen", "weight": 1.0, "note": 3}, b) == hashed(a, b), "spelling"


# ---- several sources, and token ids on disk ------------------------------------------------------


def test_weights_are_shares_of_the_longest_mix_that_repeats_nothing(tmp_path):
    a = write(tmp_path / "a.jsonl", *[rated(f"a{i}") for i in range(60)])
    b = write(tmp_path / "b.jsonl", *[rated(f"b{i}") for i in range(20)])
    both = read(f"{a},{b}", plain())
    assert [e.where for e in both] == [f"{a}:{i}" for i in range(1, 61)] + [
        f"{b}:{i}" for i in range(1, 21)
    ]
    assert [ids(e)[0] for e in both[58:62]] == [
        ids_of(plain(), x) for x in ("a58", "a59", "b0", "b1")
    ]
    mixed = read(f"{a}:0.6,{b}:0.4", plain())
    lines = [int(e.where.split(":")[1]) for e in mixed]
    assert lines == [1 + 2 * i for i in range(30)] + [*range(1, 21)], "evenly over the longer one"
    assert len(read(f"{a}:3,{b}:1", plain())) == 80, "all, if that is what the shares say"
    fold = write(tmp_path / "bad.jsonl", rated(), rated(label="?"))
    assert refusal(f"{a},{fold}", plain())[0].startswith(f"{fold}:2: label: ")


def test_renamed_columns_reach_every_file_form_through_the_setting(tmp_path):
    source = write(tmp_path / "d.jsonl", {"q": "p", "completion": "c", "good": 1.0})
    (e,) = read(source, plain(), columns="prompt=q, label=good")
    assert ids(e) == [ids_of(plain(), "p"), [*ids_of(plain(), "c"), EOS]]
    for given in ("prompt", "prompt=q=r", "=,"):
        with pytest.raises(BadInput, match="^data.columns: expected"):
            load(source, plain(), columns=given)


def test_a_column_that_no_record_has_is_refused_and_of_a_mix_one_source_is_enough(tmp_path):
    theirs = [{"question": "a", "completion": c, "label": 1, "good": 0} for c in "xy"]
    theirs = write(tmp_path / "theirs.jsonl", *theirs)
    ours = write(tmp_path / "ours.jsonl", rated("b", "x"), rated("b", "y"))

    def found(train, columns):
        limits = Data(train, max_prompt=9, max_completion=9, columns=columns)
        return load_splits(limits, plain(), "rated", lambda line: None)["train"]

    assert len(found(f"{ours},{theirs}", "prompt=question")) == 4
    for wrong, name in (("label=godd", "godd"), ("prompt=question,weight=quality", "quality")):
        with pytest.raises(BadInput, match=f"^data.columns: {name}: no record has such a field$"):
            found(f"{ours},{theirs}" if "question" in wrong else str(ours), wrong)


def test_an_extra_field_is_a_number_everywhere_or_a_text_everywhere(tmp_path):
    source, text = tmp_path / "d.csv", "prompt,completion,label,age\na,x,1,7\nb,y,0,"
    source.write_text(text)
    with pytest.raises(BadInput, match="^data.extra: age: a number in some records, a text in oth"):
        load(source, plain(), extra="age")
    source.write_text(text + "8")
    assert [e.extra["age"] for e in load(source, plain(), extra="age").examples] == [7, 8]


def test_examples_that_all_share_a_prompt_have_no_pairs_and_that_is_seen_at_once():
    e = Example(np.array([1]), (np.array([2]),), True)
    many = [e._replace(completions=(np.array([i]),)) for i in range(30_000)]
    began = time.process_time()
    assert data.mismatched(many) == [-1] * 30_000 and time.process_time() - began < 5
    assert data.mismatched([e, e._replace(prompt=np.array([5]))]) == [-1, -1]


# ---- split and table -----------------------------------------------------------------------------


def many(n_prompts: int, ratings: int) -> list[Example]:
    grid = ((p, r) for r in range(ratings) for p in range(n_prompts))
    return [example([7, p], [p, r], label=r == 0) for p, r in grid]


def test_all_ratings_of_a_prompt_land_in_one_part():
    parts = examples.split_by_prompt(many(300, 3), "6,3,1")
    prompts = [{e.keys[0] for e in part} for part in parts]
    assert sum(map(len, parts)) == 900 and sum(map(len, prompts)) == 300, "each prompt in one part"
    for part, expected in zip(prompts, (180, 90, 30)):
        assert abs(len(part) - expected) < 40, "four standard deviations"


def test_the_part_of_a_prompt_depends_on_nothing_but_the_prompt_and_the_parts():
    def places(found, parts):
        split = examples.split_by_prompt(found, parts)
        return {e.keys: i for i, part in enumerate(split) for e in part}

    where = places(many(200, 2), "2,1,1")
    assert len(where) == 400 and set(where.values()) == {0, 1, 2}
    again = places(random.Random(0).sample(many(200, 2), 100), "0.5, 0.25, 0.25")
    assert again == {key: where[key] for key in again}


def test_a_part_of_zero_is_empty_and_two_parts_leave_no_test():
    assert [len(p) > 0 for p in examples.split_by_prompt(many(50, 1), "1,0,1")] == [
        True,
        False,
        True,
    ]
    assert [len(p) > 0 for p in examples.split_by_prompt(many(50, 1), "1,1")] == [True, True, False]


WRONG = ["", "1", "a,b", "1,2,3,4", "0,1,1", "0,0", "-1,2", "2,-1", "nan,1", "1,inf", "1,,1"]


@pytest.mark.parametrize("parts", WRONG)
def test_parts_that_cannot_be_meant_are_refused(parts):
    with pytest.raises(BadInput, match="^data.split: expected two or three parts"):
        examples.split_by_prompt(many(3, 1), parts)


def table_of(tmp_path, *records, kind="rated", **limits) -> str:
    source = write(tmp_path / "d.jsonl", *records)
    return describe_examples("train", load(source, plain(), kind, **limits))


def test_the_table_counts_what_was_read(tmp_path):
    records = [
        rated("a", "x"),
        rated("a", "x"),  # a duplicate
        rated("a", "x", 0),  # contradicts both: one contradiction
        rated("a", "y", 0),
        rated("b", "x", 0),  # the same answer to another prompt is neither
        rated("abcdef", "x"),  # prompt cut
        rated("b", "abcdef"),  # completion cut
        rated("b", "abcde"),  # completion cut, now a duplicate of the one before
    ]
    text = table_of(tmp_path, *records, max_prompt=4, max_completion=4)
    assert text.splitlines() == [
        "train: 8 examples of 3 prompts, 5 desirable, 3 undesirable",
        "  prompt tokens: median 1, 95% below 2, longest 4",
        "  completion tokens: median 2, 95% below 4, longest 4",
        "  2 duplicates, 1 contradictions, 2 completions cut, 1 prompts cut",
        "  rendered: 8 plain",
    ]


def test_the_table_of_pairs_counts_pairs(tmp_path):
    pair = {"prompt": "a", "chosen": "x", "rejected": "y"}
    text = table_of(tmp_path, pair, pair, pair | {"rejected": "z"}, kind="paired")
    assert text.startswith("train: 3 pairs of 1 prompts\n")
    assert "1 duplicates, 0 contradictions" in text
    text = table_of(tmp_path, pair, pair | {"rejected": "z"}, kind="rated")
    assert text.startswith("train: 4 examples of 1 prompts, 2 desirable, 2 undesirable\n")
    assert "1 duplicates, 0 contradictions" in text, "x was chosen twice"


def test_the_table_of_prompts_counts_prompts(tmp_path):
    said = table_of(tmp_path, rated("a"), rated("abcdef"), kind="prompts", max_prompt=4)
    assert said == "train: 2 prompts, longest 4 tokens\n  rendered: 2 plain"


# (n_D, n_U) -> weights by hand; arXiv 2402.01306 eq. 8: w_D n_D / (w_U n_U) in [1, 4/3]
WEIGHTS = {
    (1, 4): "kto.desirable_weight 4.00 to 5.33, kto.undesirable_weight 1",
    (2, 5): "kto.desirable_weight 2.50 to 3.33, kto.undesirable_weight 1",
    (4, 4): "kto.desirable_weight 1.00 to 1.33, kto.undesirable_weight 1",
    (6, 5): "kto.desirable_weight 1.00 to 1.11, kto.undesirable_weight 1",
    (4, 3): "kto.desirable_weight 1.00 to 1.00, kto.undesirable_weight 1",
    (3, 2): "kto.desirable_weight 1, kto.undesirable_weight 1.12 to 1.50",
    (8, 2): "kto.desirable_weight 1, kto.undesirable_weight 3.00 to 4.00",
}


@pytest.mark.parametrize("n_d, n_u", WEIGHTS)
def test_the_data_check_advises_the_weights_of_the_paper(n_d, n_u):
    found = [example([i], [i], label=i < n_d) for i in range(n_d + n_u)]
    advice = suggest_class_weights(found).split("balance:\n  ")[1]
    assert advice == WEIGHTS[n_d, n_u]
    sides = [[float(x) for x in re.findall(r"\d[\d.]*", side)] for side in advice.split(",")]
    assert min(*sides[0], *sides[1]) == 1, "the smaller weight is 1"
    for w_d in sides[0]:
        for w_u in sides[1]:
            assert 1 - 0.01 <= w_d * n_d / (w_u * n_u) <= 4 / 3 + 0.01


@pytest.mark.parametrize("label", [True, False])
def test_one_class_alone_gets_no_advice(label):
    assert suggest_class_weights([example([1], [2], label=label)] * 3) is None


def parts_of(d: Data, kind: str = "rated") -> tuple[dict, list[str]]:
    """The three parts, and what was said."""
    said = []
    d = dataclasses.replace(d, max_prompt=d.max_prompt or 64, max_completion=64)
    return load_splits(d, plain(), kind, said.append), said


def test_splits_reads_each_part_and_says_what_it_holds(tmp_path):
    train = write(tmp_path / "t.jsonl", rated("a"), rated("b", note=1))
    d = Data(train=train, val=write(tmp_path / "v.jsonl", rated("c")))
    parts, said = parts_of(d)
    assert {name: len(part) for name, part in parts.items()} == {"train": 2, "val": 1, "test": 0}
    heads = ["train: 2 examples of 2 prompts", "val: 1 examples of 1 prompts"]
    assert [x.split(",")[0] for x in said] == heads
    assert ["note (see data.extra)" in x for x in said] == [True, False]
    parts, _ = parts_of(d, "prompts")
    assert [len(parts[name][0].completions) for name in ("train", "val")] == [0, 0]


def test_one_file_is_split_by_prompt(tmp_path):
    prompts = [f"{p} {q}" for p in range(10) for q in range(10)]
    train = write(tmp_path / "t.jsonl", *[rated(p, c) for c in "xyz" for p in prompts])
    parts, said = parts_of(Data(train=train, split="2,1,1"))
    kept = [{e.keys[0] for e in part} for part in parts.values()]
    assert [*parts] == ["train", "val", "test"] and len(said) == 3
    assert sum(map(len, parts.values())) == 300 and sum(map(len, kept)) == 100 and all(kept)
    cuts = ", 300 prompts cut (all parts), 0 completions cut (all parts)"
    _, said = parts_of(Data(train=train, split="2,1,1", max_prompt=1))
    assert cuts in said[0], "they were counted over the whole file"
    assert "cut" not in said[1] + said[2]
    with pytest.raises(BadInput, match="^data.split: .*not both$"):
        parts_of(Data(train=train, val=train, split="2,1,1"))


@pytest.mark.parametrize(
    "given, context, limits",
    [
        ((None, None), 128, (64, 64)),
        ((None, None), 101, (50, 51)),
        ((None, None), 100_000, (1024, 1024)),
        ((100, None), 128, (100, 28)),
        ((None, 100), 128, (28, 100)),
        ((3, 4), 128, (3, 4)),
        ((64, 64), 128, (64, 64)),
    ],
)
def test_the_limits_fill_the_context_by_default_and_never_exceed_it(given, context, limits):
    given = Data("t", max_prompt=given[0], max_completion=given[1])
    filled = dataclasses.replace(given, max_prompt=limits[0], max_completion=limits[1])
    assert with_limits(given, context) == filled


@pytest.mark.parametrize("given", [(65, 64), (128, None), (None, 128), (1, 128)])
def test_limits_beyond_the_context_are_refused(given):
    with pytest.raises(BadInput, match="exceed the context of 128$"):
        with_limits(Data("t", max_prompt=given[0], max_completion=given[1]), 128)


# ---- a step's batch ------------------------------------------------------------------------------


def letters(*pairs: str) -> list[Example]:
    """ "ax" is prompt a with completion x."""
    return [example([ord(p)], [ord(c)]) for p, c in pairs]


@pytest.mark.parametrize(
    "pairs, partners",
    [
        (["ax", "by", "cz"], [1, 2, 0]),  # the plain shift, and the last takes the first's
        (["ax", "by"], [1, 0]),
        (["ax", "ay", "bz"], [2, 2, 0]),  # two ratings of a prompt, side by side
        (["ax", "ay", "bx", "by"], [3, 2, 1, 0]),  # two pairs with the same two answers
        (["ax", "ay", "bu", "bv"], [2, 2, 0, 0]),  # two pairs, split into ratings
        (["ax", "bx", "cy"], [2, 2, 0]),  # the same answer to two prompts
        (["ax", "bx", "cx", "dy", "ex"], [3, 3, 3, 4, 3]),
        (["ax", "ax", "by"], [2, 2, 0]),  # a record twice
        (["ax", "ay", "az"], [-1, -1, -1]),
        (["ax", "bx", "cx"], [-1, -1, -1]),
        (["ax", "ax", "ax"], [-1, -1, -1]),
        (["ax", "ay", "bx"], [-1, 2, 1]),  # for ax there is none, though both others have one
        (["ax"], [-1]),
        ([], []),
    ],
)
def test_a_mismatched_pair_takes_the_next_completion_of_another_prompt_and_text(pairs, partners):
    assert data.mismatched(letters(*pairs)) == partners


def test_mismatched_agrees_with_its_definition_on_small_alphabets():
    rng, without = random.Random(0), 0
    for _ in range(400):
        n, size = rng.randint(1, 9), rng.randint(1, 4)
        pairs = [rng.choice("abcd"[:size]) + rng.choice("wxyz"[:size]) for _ in range(n)]
        for i, got in enumerate(data.mismatched(letters(*pairs))):
            p, c = pairs[i]
            fit = (j for j in range(n) if pairs[j][0] != p and pairs[j][1] != c)
            allowed = {(j - i) % n: j for j in fit}
            assert got == (allowed[min(allowed)] if allowed else -1) and got != i
            without += not allowed
    assert without > 100, "else the case without a partner was not met"


def test_completions_are_compared_after_cutting(tmp_path):
    source = write(tmp_path / "d.jsonl", rated("a", "xyz1"), rated("b", "xyz2"), rated("c", "z"))
    assert data.mismatched(read(source, plain())) == [1, 2, 0]
    cut = read(source, plain(), max_completion=3)
    assert data.mismatched(cut) == [2, 2, 0], "a and b now say the same"


def test_a_micro_batch_has_no_more_tokens_with_borrowed_completions_than_with_its_own():
    lengths = [5] * 12 + [100] * 4
    found = [example([1], [2, *range(100 + i, 99 + i + n)]) for i, n in enumerate(lengths)]
    partners = [(i + 11) % len(found) for i in range(len(found))]  # short ones borrow long ones
    batch = Batch(found, partners, cut=data.Cut(max_tokens=150))
    for borrowed in (False, True):
        packed = [batch.pack(micro.index, borrowed) for micro in batch.micro_batches]
        assert max(len(x.token_N) for x in packed) <= 150
        assert sum(len(x.index) for x in packed) == len(found)


def test_a_batch_hands_out_own_and_borrowed_completions():
    found = [example([1, 2], [3, 4]), example([5], [6, 7, 8]), example([9], [3, 4])]
    batch = Batch(found, data.mismatched(found))
    assert batch.partners == [1, 2, 1]
    own, lent = batch.pack([0, 2]), batch.pack([2], borrowed=True)
    assert own.target_T.tolist() == [3, 4, 3, 4] and own.length_BK.tolist() == [[2], [2]]
    assert lent.token_N.tolist() == [9, 6, 7] and lent.target_T.tolist() == [6, 7, 8]
    assert [batch.group_size(group) for group in batch.groups] == [5, 4, 4], "the longer of the two"
    assert Batch(found, score_prompt=True).pack([0]).length_BK.tolist() == [[3]]
    alone = Batch(found[:1], [-1]).pack([0], borrowed=True)
    assert alone.length_BK.tolist() == [[2]], "any will do, it is left out of the mean"


def test_examples_of_one_prompt_stay_together_and_share_it():
    found = [
        example([1, 2], [3, 4]),
        example([5], [6]),
        example([1, 2], [7, 8, 9]),
        example([5], [3, 4]),
    ]
    batch = Batch(found, data.mismatched(found), cut=data.Cut(max_tokens=7))
    assert batch.groups == [[0, 2], [1, 3]] and [2 + 2 + 3, 1 + 1 + 2] == [7, 4]
    assert batch.micro_batches == [MicroBatch([0, 2]), MicroBatch([1, 3])]
    packed = batch.pack([0, 2])
    assert packed.token_N.tolist() == [1, 2, 3, 7, 8], "the prompt stands there once"
    assert packed.target_T.tolist() == [3, 4, 7, 8, 9] and packed.prompt_B.tolist() == [0, 0]
    lent = batch.pack([0, 2], borrowed=True)
    assert lent.token_N.tolist() == [1, 2, 3], "6 and 3 4 are borrowed; the last token is no input"
    assert batch.step_view(torch.device("cpu")).group.tolist() == [0, 1, 0, 1]
    small = Batch(found, cut=data.Cut(max_tokens=6))
    assert small.micro_batches == [MicroBatch([2]), MicroBatch([0]), MicroBatch([1, 3])] or (
        sorted(i for m in small.micro_batches for i in m.index) == [0, 1, 2, 3]
    ), "a group that does not fit is cut"
    by_size = Batch(found, cut=data.Cut(max_examples=3, max_tokens=None))
    assert by_size.micro_batches == [MicroBatch([0, 2]), MicroBatch([1, 3])]


# ---- cut -----------------------------------------------------------------------------------------


def cut(sizes, ranks, size, tokens) -> list[list[MicroBatch]]:
    """A pass's micro-batches of each rank, cut as the trainer cuts them."""
    parts = data.split_over_ranks(sizes, ranks, tokens is not None)
    return data.cut_micro_batches(sizes, [1] * len(sizes), parts, size, tokens)


def steps():
    """Steps of many shapes: fewer examples than ranks, sizes that ranks do not divide, over-long
    examples."""
    rng = random.Random(1)
    for n in (1, 2, 3, 5, 8, 13, 32):
        for ranks in (1, 2, 3, 5):
            sizes = [rng.randint(1, 40) for _ in range(n)]
            by_tokens = [(None, tokens) for tokens in (10, 50, 10_000)]
            for size, tokens in ((1, None), (3, None), (100, None), *by_tokens):
                yield sizes, size, tokens, cut(sizes, ranks, size, tokens)


def real(mine: list[MicroBatch]) -> list[list[int]]:
    """The micro-batches of a rank that are no fillers."""
    return [m.index for m in mine if not m.filler]


def test_every_example_is_learned_once_whatever_the_cut():
    for sizes, _, _, micros in steps():
        learned = [i for mine in micros for index in real(mine) for i in index]
        assert sorted(learned) == list(range(len(sizes)))


def test_all_ranks_run_equally_many_micro_batches():
    fillers = 0
    for sizes, _, _, micros in steps():
        assert len({len(mine) for mine in micros}) == 1
        assert all(m.index for mine in micros for m in mine)
        assert all(i in range(len(sizes)) for mine in micros for m in mine for i in m.index)
        idle = [len(mine) - len(real(mine)) for mine in micros]
        assert min(idle) == 0, "no round of fillers only"
        fillers += sum(idle)
    assert fillers > 50


def test_a_micro_batch_keeps_its_budget_and_an_over_long_example_goes_alone():
    alone = 0
    for sizes, size, tokens, micros in steps():
        for index in (index for mine in micros for index in real(mine)):
            if size:
                assert len(index) <= size
            else:
                over = sum(sizes[i] for i in index) > tokens
                assert not over or len(index) == 1
                alone += over
    assert alone > 50


def test_a_micro_batch_is_as_full_as_its_budget_lets_it():
    for sizes, size, tokens, micros in steps():
        for mine in map(real, micros):
            if size:
                assert all(len(index) == size for index in mine[:-1])
            else:
                used = sorted(sum(sizes[i] for i in index) for index in mine)
                assert len(used) < 2 or used[0] + used[1] > tokens, "two would have fitted in one"


def test_ranks_carry_alike():
    for sizes, size, _, micros in steps():
        parts = [[i for index in real(mine) for i in index] for mine in micros]
        if size:
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
        else:
            tokens = [sum(sizes[i] for i in part) for part in parts]
            assert max(tokens) - min(tokens) <= max(sizes)
    assert cut([1, 1, 1, 1, 1, 5], 2, None, 5) == [[MicroBatch([5])], [MicroBatch([0, 1, 2, 3, 4])]]


def test_a_cut_by_hand():
    filler = MicroBatch([0], True)
    assert cut([9] * 5, 2, 2, None) == [
        [MicroBatch([0, 2]), MicroBatch([4])],
        [MicroBatch([1, 3]), filler],
    ]
    assert cut([3, 9, 4, 2], 1, None, 6) == [[MicroBatch([1]), MicroBatch([2, 3]), MicroBatch([0])]]
    assert cut([7], 3, 1, None) == [[MicroBatch([0])], [filler], [filler]]
    assert cut([3, 3], 1, None, 6) == [[MicroBatch([0, 1])]], "a budget may be used up"
    assert cut([3, 3], 1, None, 5) == [[MicroBatch([0]), MicroBatch([1])]]


# ---- order ---------------------------------------------------------------------------------------


def test_an_epochs_order_is_a_permutation_and_a_function_of_epoch_and_seed_only():
    def order(epoch, seed):
        return list(data.epoch_order(50, epoch, seed, True))

    first = order(3, 7)
    assert sorted(first) == list(range(50)) and first != list(range(50))
    torch.manual_seed(99)  # somebody draws in between
    torch.rand(3)
    data.epoch_order.cache_clear()
    assert order(3, 7) == first
    assert len({tuple(order(epoch, 7)) for epoch in range(10)}) == 10, "another order each epoch"
    assert order(3, 8) != first
    assert order(2, 8) != first, "or two seeds would repeat each other, an epoch apart"


def test_drawing_an_order_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    data.epoch_order.cache_clear()
    data.epoch_order(17, 1, 2, True)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_shuffling_the_order_is_the_files():
    for epoch, seed in ((3, 7), (4, 1)):
        assert list(data.epoch_order(5, epoch, seed, False)) == [0, 1, 2, 3, 4]


def test_by_prompt_the_examples_of_a_prompt_come_together_in_every_epoch():
    found = examples.Examples.of([example([p], [n]) for n in range(4) for p in (7, 5, 9)])
    orders = []
    for epoch in range(9):
        order = data.epoch_order_by_prompt(found, epoch, 3, True)
        assert sorted(order) == list(range(12))
        prompts = [found[i].prompt[0] for i in order]
        assert [prompts[k : k + 4] for k in (0, 4, 8)] == [[prompts[k]] * 4 for k in (0, 4, 8)]
        orders.append(tuple(order))
    assert len(set(orders)) == 9, "both prompts and their examples are shuffled"
    assert len({found[order[0]].prompt[0] for order in orders}) > 1
    in_file = data.epoch_order_by_prompt(found, 0, 3, False)
    assert in_file == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]


# ---- packing -------------------------------------------------------------------------------------

PROMPTS = [np.array([10, 11, 12]), np.array([13])]
COMPLETIONS = [(np.array([20, 21]), np.array([30, 31, 32])), (np.array([22]), np.array([33, 34]))]


def targets(r: data.PackedBatch) -> list[tuple[int, int, int]]:
    return sorted(zip(r.source_T.tolist(), r.target_T.tolist(), r.sequence_T.tolist()))


def test_a_packed_batch_by_hand():
    r = data.pack(PROMPTS, COMPLETIONS)
    # prompt 10 11 12, then 20 (21 is never an input), then 30 31; prompt 13, then nothing, then 33
    assert r.token_N.tolist() == [10, 11, 12, 20, 30, 31, 13, 33]
    assert r.position_N.tolist() == [0, 1, 2, 3, 3, 4, 0, 1]
    assert r.prompt_N.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert r.branch_N.tolist() == [0, 0, 0, 1, 2, 2, 0, 2]
    # (place that predicts, token it should predict, sequence); 12, at place 2, begins two completions
    first = [(2, 20, 0), (2, 30, 1), (3, 21, 0), (4, 31, 1), (5, 32, 1)]
    assert targets(r) == [*first, (6, 22, 2), (6, 33, 3), (7, 34, 3)]
    assert r.sums(torch.arange(8.0)).tolist() == [[0 + 1, 2 + 3 + 4], [5, 6 + 7]]
    by_token = r.tokens_of_completions(torch.arange(1.0, 9)).tolist()
    assert by_token == [[[1, 2, 0], [3, 4, 5]], [[6, 0, 0], [7, 8, 0]]]
    assert r.length_BK.tolist() == [[2, 3], [1, 2]]
    assert r.segment_sizes == ((3, 1, 2), (1, 0, 1)) and r.sizes == (6, 2)
    assert {getattr(r, name).dtype for name in data.INT64_FIELDS} == {torch.int64}


def test_the_sequences_of_attention_by_hand():
    r = data.pack(PROMPTS, COMPLETIONS)
    # each sequence has its prompt's keys; a first completion's has the prompt's queries, too
    assert r.key_I.tolist() == [*(0, 1, 2, 3), *(0, 1, 2, 4, 5), 6, *(6, 7)]
    assert r.query_start_S.tolist() == [0, 4, 6, 7, 8]
    assert r.completion_query_start_S.tolist() == [0, 1, 3, 3, 4]
    assert r.key_start_S.tolist() == [0, 4, 9, 10, 12]
    assert (r.max_queries, r.max_completion_queries, r.max_keys) == (4, 2, 5)
    assert {getattr(r, name).dtype for name in data.INT32_FIELDS} == {torch.int32}
    assert (r.prompt_P.tolist(), r.completion_M.tolist()) == ([0, 1, 2, 6], [3, 4, 5, 7])
    one = data.pack(PROMPTS, [(np.array([5]),)] * 2)
    assert len(one.key_I) == 0, "all tokens in their order need no gather"
    assert one.completion_M.tolist() == [0], "one query, though no completion has an input"
    assert one.completion_query_start_S.tolist() == [0, 1, 1] and one.max_completion_queries == 1


def test_a_scored_prompt_adds_its_tokens_from_the_second_on_to_both_completions():
    r, bare = (data.pack(PROMPTS, COMPLETIONS, score_prompt=on) for on in (True, False))
    # number 4 is the first prompt; the second prompt has one token, which nothing predicts
    assert targets(r) == sorted([(0, 11, 4), (1, 12, 4), *targets(bare)])
    assert r.sums(torch.arange(10.0)).tolist() == [[1 + 8 + 9, 9 + 8 + 9], [5, 13]]
    assert r.length_BK.tolist() == [[4, 5], [1, 2]]
    for name in ("token_N", "position_N", "prompt_N", "branch_N"):
        assert torch.equal(getattr(r, name), getattr(bare, name))


def test_every_target_is_what_follows_its_source():
    """On random tokens, for several K and with a prompt that two examples share: the targets of a sequence are its
    completion's tokens, and their sources are the tokens before them."""
    rng = np.random.default_rng(0)
    for K in (1, 2, 3):
        texts = [[rng.integers(0, 99, rng.integers(1, 5)) for _ in range(K + 1)] for _ in range(4)]
        texts[3][0] = texts[1][0]
        prompts, completions = [x[0] for x in texts], [tuple(x[1:]) for x in texts]
        r = data.pack(prompts, completions, score_prompt=True)
        for b, (p, cs) in enumerate(zip(prompts, completions)):
            for k, c in enumerate(cs):
                segment = r.sequence_T == r.sequence_BK[b, k]
                assert r.target_T[r.first_target_BK[b, k]] == c[0]
                assert r.target_T[segment].tolist() == c.tolist()
                at = r.source_T[segment]
                assert r.position_N[at].tolist() == list(range(len(p) - 1, len(p) + len(c) - 1))
                assert r.token_N[at].tolist() == [p[-1], *c[:-1]]
                assert set(r.prompt_N[at].tolist()) == {r.prompt_B[b].item()}
                branch = k + 1 + K * (b == 3)
                assert r.branch_N[at].tolist() == [0] + [branch] * (len(c) - 1)
                assert r.length_BK[b, k] == len(c) + len(p) - 1
            segment = r.sequence_T == 4 * K + r.prompt_B[b]
            assert r.target_T[segment].tolist() == p[1:].tolist()
            assert r.token_N[r.source_T[segment]].tolist() == p[:-1].tolist()
        assert r.prompt_B.tolist() == [0, 1, 2, 1] and sum(r.sizes) == len(r.token_N)


def test_a_packed_batch_moves_as_one():
    r = data.pack(PROMPTS, COMPLETIONS)
    moved = r.to("meta")
    names = (*data.INT64_FIELDS, *data.INT32_FIELDS)
    assert all(getattr(moved, name).is_meta for name in names) and moved.sizes == r.sizes


def test_the_buffer_of_a_packed_batch_holds_all_its_tensors():
    """A copy of the buffer alone reaches a GPU: what is not in it, or at another place, would be wrong there."""
    for K in (1, 2):
        r = data.pack(PROMPTS, [ys[:K] for ys in COMPLETIONS], score_prompt=True, index=[7, 3])
        assert r.buffer.dtype == torch.int32
        tensors = {name: x for name, x in r._asdict().items() if isinstance(x, torch.Tensor)}
        del tensors["buffer"]
        views = data._buffer_views(r.buffer, {name: x.shape for name, x in tensors.items()})
        assert views.keys() == tensors.keys()
        for name, x in views.items():
            assert x.dtype == tensors[name].dtype and torch.equal(x, tensors[name])


def test_a_batch_that_was_packed_ahead_hands_out_what_was_packed():
    found = [example([1, 2], [3, 4]), example([5], [6, 7, 8]), example([9], [3, 4])]
    batch, later = (
        Batch(found, data.mismatched(found), cut=data.Cut(max_tokens=9)) for _ in range(2)
    )
    batch.pack_ahead()
    assert batch.micro_batches == [MicroBatch([0, 1]), MicroBatch([2])]
    asked = [([0, 1], False), ([0, 1], True), ([2], False), ([2], True)]
    assert len(batch.packed) == len(asked)
    for index, borrowed in asked:
        packed = batch.pack(index, borrowed)
        assert packed is batch.pack(index, borrowed), "packed once"
        assert torch.equal(packed.buffer, later.pack(index, borrowed).buffer)
    alone = Batch(found)
    alone.pack_ahead()
    assert list(alone.packed) == [((0, 1, 2), False)], "without partners nothing is borrowed"

"""From a file to examples, described in a table; a step's pairs, micro-batches and packing are exact."""

import contextlib
import dataclasses
import io
import json
import random
import re
from itertools import chain, product

import datasets
import pandas as pd
import pytest
import tokenizers
import torch
from chat_records import RECORDS as DIALOGUES
from conftest import refused
from tokens import (
    EOS,
    bos,
    bot,
    chat,
    example,
    folder,
    ids_of,
    load,
    plain,
    rated,
    real,
    user,
    write,
)

import data
import kto
import online
from data import Step
from infra.console import BadInput
from infra.optimizer import Plan
from infra.settings import Data
from models.hub import Source
from packing import Budget, Part, split_bundles
from records.examples import (
    Example,
    examples_hash,
    load_splits,
    with_limits,
)
from records.sources import absolute_sources
from records.tokenizer import Tokenizer


def read(*args, **kwargs) -> list[Example]:
    return load(*args, **kwargs)[0]


def refusal(*args, **kwargs) -> list[str]:
    """The lines that load refuses with."""
    with pytest.raises(BadInput) as e:
        load(*args, **kwargs)
    return str(e.value).splitlines()


def parts_of(d: Data, kind="rated", tokenizer=None) -> tuple[dict, list[str]]:
    """The three parts, and what was said."""
    d = dataclasses.replace(d, max_prompt=d.max_prompt or 64, max_completion=d.max_completion or 64)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        parts = load_splits(d, tokenizer or plain(), kind)
    return parts, out.getvalue().splitlines()


def ids(e: Example) -> list[list[int]]:
    """The prompt and the completions."""
    return [x.tolist() for x in (e.prompt, *e.completions)]


# ---- a record becomes examples -------------------------------------------------------------------


def test_a_pair_stays_a_pair_for_dpo_and_becomes_two_rated_examples_for_kto(tmp_path):
    record = {"prompt": "p", "chosen": "good", "rejected": "bad", "weight": 2, "source": "s"}
    source = write(tmp_path / "d.jsonl", record | {"chosen_reward": 3, "rejected_reward": 2})
    good, bad = ([*ids_of(plain(), text), EOS] for text in ("good", "bad"))
    (pair,) = read(source, plain(), "paired", extra="source")
    up, down = read(source, plain(), "rated", extra="source")
    for e, answers, label, rewards in (
        (pair, [good, bad], True, (3, 2)),
        (up, [good], True, (3, None)),
        (down, [bad], False, (2, None)),
    ):
        assert ids(e) == [ids_of(plain(), "p"), *answers]
        assert (e.label, e.rewards) == (label, rewards)
        assert (e.where, e.weight, e.extra) == (f"{source}:1", 2, {"source": "s"})


PAIR = b'{"prompt": "p", "chosen": "c", "rejected": "d", '
REST = b', "completion": "c", "label": 1}'
BAD = [  # a line of a file, what it is refused with
    (b'{"prompt": "p"' + REST, None),
    (b"{not json", "Expecting property name.*column 2"),
    (b'{"prompt": "\xff\xfe"' + REST, "'utf-8' codec can't decode byte 0xff"),
    (b"[1, 2]", "record: expected an object, got .1, 2."),
    (b"", None),
    (b'{"prompt": "p", "completion": "c", "label": "yes"}', "label: expected .* got 'yes'"),
    (b'{"prompt": "p", "label": 1, "label": 0}', "label: given twice"),
    (PAIR + b'"rejected_reward": NaN}', "rejected_reward: .*finite number.*, got nan"),
    (PAIR + b'"chosen_reward": 1e999}', "chosen_reward: .*finite number.*, got inf"),
    (b'{"prompt": "p", "completion": "half a li', "Unterminated string.*column"),
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
    path.write_bytes(b"[1]\n" * 30)
    assert len(refusal(path, plain())) == 20, "the first ones say enough"


@pytest.mark.parametrize(
    "record, reason", [("", ": no records"), (rated("", "c"), ":1: prompt: it has no tokens")]
)
def test_a_record_that_cannot_be_learned_from_is_refused_with_its_line(tmp_path, record, reason):
    source = write(tmp_path / "d.jsonl", record)
    refused(f"^{source}{reason}", load, source, plain())


HALF = "x \ud83c"  # of a pair of two: an emoji that was cut in two


@pytest.mark.parametrize(
    "record",
    [
        rated("p", HALF),
        rated(tools=[{"name": "f", "description": HALF}]),
        rated(**{HALF: 1}),
    ],
)
def test_half_of_a_character_is_refused_with_its_line(tmp_path, record):
    source = write(tmp_path / "d.jsonl", rated(), record)
    said = rf"^{source}:2: record: no UTF-8, or half of a character: .*'\\ud83c'"
    refused(said, load, source, chat())


def test_what_a_tokenizer_raises_has_the_line_of_its_record(tmp_path):
    """Such as a word of which it has no token, where it has none for unknown words either."""
    words = {"<|endoftext|>": 0, "p": 1, "c": 2, "a": 3}

    def change(t: tokenizers.Tokenizer) -> None:
        t.model = tokenizers.models.WordLevel(words, unk_token="[UNK]")
        t.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()

    tokenizer = Tokenizer(Source(folder(tmp_path / "t", change=change)))
    source = write(tmp_path / "d.jsonl", rated(), rated("p", "word"), rated(), rated("p word"))
    lines = refusal(source, tokenizer)
    assert [line.split(" ")[:2] for line in lines] == [
        [f"{source}:{n}:", "tokenizer:"] for n in (2, 4)
    ]


# ---- pairs that teach nothing --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["paired", "rated"])
def test_pairs_with_two_equal_answers_are_counted_and_left_out(tmp_path, kind):
    answers = [("good", "good"), ("best", "bad"), ("abcde", "abcdf")]
    records = [{"prompt": "p", "chosen": x, "rejected": y} for x, y in answers]
    source = write(tmp_path / "d.jsonl", *records)
    # within 4 tokens the third pair is equal, too
    for limit, lines in ((64, {"2", "3"}), (4, {"2"})):
        found, counts = load(source, plain(), kind, max_completion=limit)
        assert {e.where[-1] for e in found} == lines
        assert counts["equal pairs, dropped"] == 3 - len(lines)
    source = write(tmp_path / "e.jsonl", records[0])
    refused("no records; .*1 equal pairs", load, source, plain(), kind)


# ---- tables --------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [["undesirable", "desirable", "neutral"], ["1", "0", "2"]])
def test_a_class_of_a_table_is_its_name_not_the_number_of_its_name(tmp_path, names):
    kinds = {"label": datasets.ClassLabel(names=names)}
    columns = dict.fromkeys(("prompt", "completion"), datasets.Value("string")) | kinds
    records = [rated(label=i) for i in (0, 1, 2, None)]
    table = datasets.Dataset.from_list(records, features=datasets.Features(columns))
    table.select([0, 1]).to_parquet(tmp_path / "d.parquet")
    labels = [e.label for e in read(tmp_path / "d.parquet", plain())]
    assert labels == [name in ("desirable", "1") for name in names[:2]]
    table.save_to_disk(tmp_path / "d")
    neither, no_class = refusal(tmp_path / "d", plain())
    assert "d:3: label: expected true, false" in neither and names[2] in neither
    assert "label: missing" in no_class


# tools, calls, results, settings of a template, and texts that a table may take for something else
RECORDS = [*DIALOGUES["tool results"], *DIALOGUES["thinking"], rated([user("007")], [bot("NA")])]
RECORDS = [r | {"label": i % 2 == 0, "weight": i / 4} for i, r in enumerate(RECORDS)]
RECORDS[0]["chat_template_kwargs"] = {
    "enable_thinking": True
}  # a table has the columns of its first record


def test_the_same_records_give_the_same_ids_from_every_source(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    tokenizer = Tokenizer(Source(real("qwen3", tmp_path / "t")))
    (tmp_path / "hub").mkdir()
    source = write(tmp_path / "a.jsonl", *RECORDS)
    (tmp_path / "a.json").write_text(json.dumps(RECORDS))
    table = datasets.Dataset.from_list(RECORDS)
    table.to_parquet(tmp_path / "a.parquet")
    table.to_parquet(tmp_path / "hub" / "train-00000-of-00001.parquet")
    table.save_to_disk(tmp_path / "a")
    parts = {"train": table, "val": table.select([0])}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "b")
    pd.DataFrame(RECORDS).to_parquet(tmp_path / "c.parquet")
    # a cell of a csv file holds what has parts as a text of JSON
    cells = pd.DataFrame(RECORDS).map(lambda x: json.dumps(x) if isinstance(x, list | dict) else x)
    cells.to_csv(tmp_path / "a.csv", index=False, sep=";")
    cells.to_csv(tmp_path / "a.tsv", index=False, sep="\t")
    limits = dict(max_prompt=9999, max_completion=99)
    right = [(ids(e), e.label, e.weight) for e in read(source, tokenizer, **limits)]
    assert len({str(x) for x in right}) == len(RECORDS), "else nothing is compared"
    for name in "a.json a.csv a.tsv a.parquet c.parquet a hub b b:val".split():
        found = [(ids(e), e.label, e.weight) for e in read(tmp_path / name, tokenizer, **limits)]
        assert found == (right[:1] if name == "b:val" else right), name


def test_messages_are_the_same_ids_however_a_file_holds_them(tmp_path):
    def parts(turns: list, kind: str = "text") -> list:
        return [turn | {"content": [{"type": kind, "text": turn["content"]}]} for turn in turns]

    def read_as(form) -> list:
        record = rated(form([user("p")]), form([bot("c")]))
        return list(map(ids, read(write(tmp_path / "d.jsonl", record), chat())))

    assert read_as(parts) == read_as(json.dumps) == read_as(list)
    match = ":1: completion: expected a string, or messages with a"
    refused(match, read_as, lambda turns: parts(turns, "image"))
    refused(":1: completion: messages as a text of JSON: Expecting", read_as, str)


def test_held_out_ratings_that_are_trained_on_are_counted(tmp_path, capsys):
    train = write(tmp_path / "train.jsonl", *[rated(f"p{i}") for i in range(3)])
    val = write(tmp_path / "val.jsonl", rated("p0"), rated("p1", label=False), rated("p0", "d"))
    load_splits(Data(train, val, max_prompt=9, max_completion=9), plain(), "rated")
    table_of_train, table_of_val = capsys.readouterr().out.split("val: ")
    assert "2 which are in data.train, too" in table_of_val
    assert "1 whose prompt is in data.train, with other answers" in table_of_val
    assert "in data.train" not in table_of_train


# ---- tokens --------------------------------------------------------------------------------------


def test_a_plain_completion_ends_with_one_eos_unless_it_was_cut(tmp_path):
    texts = [rated("ab", " best"), rated("p", ""), rated("a", "b<|endoftext|>")]
    texts.append(rated("a", "b", cut=True))
    found = [ids(e) for e in read(write(tmp_path / "d.jsonl", *texts), plain())]
    assert found[0] == [ids_of(plain(), "ab"), [262, EOS]] and found[1][1] == [EOS]
    assert found[2] == [[66], [67, EOS]], "the text's own is not doubled"
    assert found[3] == [[66], [67]]


DIALOGUE = rated([user("p")], [bot("c")])
QUESTION = {"question": "p", "completion": "c", "label": 1}
# the records of a file, whether its tokenizer has a template, whether it is used
RENDERED = {
    "two strings are no dialogue": ([rated()], True, False),
    "an instruction is a turn of the user": ([QUESTION], True, True),
    "where there is a template": ([QUESTION], False, False),
    "strings before a dialogue": ([rated(), rated(), DIALOGUE], True, True),
    "a string before a message": ([rated("p", [bot("c")])], True, True),
    "an empty system beside a filled one": ([rated(system=""), rated(system="s")], True, True),
    "an empty system alone": ([rated(system="")], True, False),
}


@pytest.mark.parametrize("file", RENDERED)
def test_all_records_of_a_file_are_rendered_in_one_way(tmp_path, file):
    records, has_template, by_template = RENDERED[file]
    tokenizer = chat() if has_template else plain()
    found, counts = load(write(tmp_path / "d.jsonl", *records), tokenizer)
    without = "plain: the model's chat template is not used" if has_template else "plain"
    assert counts["by the chat template" if by_template else without] == len(found) == len(records)
    turn = ids_of(tokenizer, "<|im_start|>user\np<|im_end|>\n<|im_start|>assistant\n")
    for e in found:
        prompt, completion = ids(e)
        if not by_template:
            assert (prompt, completion) == (ids_of(tokenizer, "p"), [68, EOS])
        else:
            assert prompt[-len(turn) :] == turn
            assert completion == ids_of(tokenizer, "c<|im_end|>\n"), "a second end is never sampled"


def test_records_that_need_a_chat_template_are_refused_once_where_there_is_none(tmp_path):
    needs = rated([user("p")], [bot("c")])
    source = write(tmp_path / "d.jsonl", rated(), needs, needs)
    refused(r"^[^\n]*d.jsonl:2: messages, .*dialogue.jinja$", load, source, plain())


def test_a_cut_takes_the_prompts_head_and_the_completions_tail_with_its_eos(tmp_path):
    text = "a b c d f g"
    tokens = ids_of(plain(), text)
    records = rated(text, text), rated(text[:7], text[:5])
    source = write(tmp_path / "d.jsonl", *records)
    (long, fits), counts = load(source, plain(), "rated", 4, 4)
    assert ids(long) == [tokens[-4:], tokens[:4]]
    assert ids(fits) == [tokens[:4], [*tokens[:3], EOS]]
    assert (counts["prompts cut"], counts["completions cut"]) == (1, 1)
    (e, _), counts = load(source, plain(), "rated", 6, 6)
    assert ids(e)[1] == tokens and counts["completions cut"] == 1, "its EOS alone is over the limit"


def test_the_hash_is_of_all_that_is_learned_from_and_of_nothing_else():
    a, b = example([1], [2, 3]), example([4], [5])
    changes = dict(label=False, weight=2.0, rewards=(1.0, None), extra={"n": 2.0}, token_label=[1])
    others = [a._replace(**{name: x}) for name, x in changes.items()]
    others += [example([1], [2, 6]), example([1, 2], [3]), example([1], [2], [3])]
    splits = [{"train": [a, b]}, {"val": [a, b]}, {"train": [b, a]}]
    splits += [{"train": [other, b]} for other in others]
    assert len({*map(examples_hash, splits)}) == 3 + len(others)
    moved = {"train": [a._replace(where="elsewhere:7"), b]}
    assert examples_hash(moved) == examples_hash(splits[0])


def test_several_sources_are_given_by_commas_and_patterns(tmp_path):
    for name in "bac":
        write(tmp_path / f"{name}.jsonl", rated(name), rated())
    sources = f"{tmp_path}/c.jsonl, {tmp_path}/[ab].jsonl"
    places = [e.where.removeprefix(f"{tmp_path}/") for e in read(sources, plain())]
    assert places == [f"{name}.jsonl:{i}" for name in "cab" for i in (1, 2)]
    prompts = [e.where.removeprefix(f"{tmp_path}/") for e in read(sources, plain(), "prompts")]
    first = ["c.jsonl:1", "c.jsonl:2", "a.jsonl:1", "b.jsonl:1"]
    assert prompts == first, "online.py asks a prompt once"
    for wrong in (f"{tmp_path}/c.jsonl,", ","):  # an empty name would be the working directory
        refused(f"^{wrong}: expected something before and after each", read, wrong, plain())


@pytest.mark.parametrize("name", ["a,b.jsonl", "r[1].jsonl", "t:1.jsonl", "D.JSONL", "l.json"])
def test_a_file_that_is_there_is_read_whatever_its_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "r1.jsonl", rated("another"))
    write(tmp_path / name, rated("p"), rated("q"))  # in a .json, too: so Dataset.to_json writes
    assert [ids(e)[0] for e in read(name, plain())] == [ids_of(plain(), x) for x in "pq"]
    assert absolute_sources(name) == str(tmp_path / name)


def test_a_line_of_an_error_names_the_source_of_a_converted_record(tmp_path):
    converted = rated(source="feedback.json:12")
    source = write(tmp_path / "d.jsonl", converted, converted | {"label": 3})
    said = f"^{source}:2 .from feedback.json:12.: label: expected true, false"
    refused(said, load, source, plain())
    (e,), counts = load(write(tmp_path / "e.jsonl", converted | {"next": "thanks"}), plain())
    assert e.where == f"{tmp_path}/e.jsonl:1 (from feedback.json:12)"
    assert not [what for what in counts if "nothing reads" in what]


# ---- split and table -----------------------------------------------------------------------------


def test_the_table_counts_what_may_be_a_mistake(tmp_path):
    mark = "<|im_end|>"
    dialogue = rated([user(f"what is {mark}, {mark}?")], [bot("an end")])
    texts = [("p", " "), ("p", "c"), ("p\r\nq", "c"), ("p", "c\r\n")]
    records = [dialogue, *(rated([user(p)], [bot(c)]) for p, c in texts)]
    _, counts = load(write(tmp_path / "d.jsonl", *records), chat())
    found = {what: n for what, n in counts.items() if n and what.startswith("with ")}
    signs = {f"with {mark!r} in a text": 1, "with line ends of Windows in a text": 2}
    assert found == signs | {"with an empty completion": 1}


def test_the_table_counts_what_was_read(tmp_path):
    records = [
        rated("a", "x", note=1, wieght=2),
        rated("a", "x"),  # a duplicate
        rated("a", "x", 0),  # contradicts both: one contradiction
        rated("a", "y", 0),
        rated("b", "x", 0),  # the same answer to another prompt is neither
        rated("abcdef", "x"),  # prompt cut
        rated("b", "abcdef"),  # completion cut
        rated("b", "abcde"),  # completion cut, now a duplicate of the one before
    ]
    source = write(tmp_path / "d.jsonl", *records)
    _, (*table, val, _, _, _) = parts_of(Data(source, source, max_prompt=4, max_completion=4))
    assert val == table[0].replace("train", "val")
    assert table == [
        "train: 8 examples of 3 prompts, 5 desirable, 3 undesirable",
        "  prompt tokens: median 1, 95% at most 4, longest 4",
        "  completion tokens: median 2, 95% at most 4, longest 4",
        "  2 duplicates, 1 contradictions, 1 with note, which nothing reads, 1 with wieght, which "
        "nothing reads, 8 plain, 1 prompts cut, 2 completions cut",
        # by hand: 5 * 0.8 = 3 * 1.333 = 4, and the mean weight of the 8 is 1
        "  --kto.balance true sets kto.desirable_weight to 0.8 and kto.undesirable_weight to 1.33",
    ]


def test_one_file_is_split_by_prompt(tmp_path):
    prompts = [f"{p} {q}" for p in range(10) for q in range(10)]
    records = [rated(p, c) for c in "xyz" for p in prompts]
    train = write(tmp_path / "t.jsonl", *records)
    parts, _ = parts_of(Data(train=train, split="2,1,1"))
    kept = [{e.prompt_key for e in part} for part in parts.values()]
    assert sum(map(len, parts.values())) == 300 and sum(map(len, kept)) == 100 and all(kept)
    fewer = write(tmp_path / "f.jsonl", *random.Random(0).sample(records, 50))
    again, _ = parts_of(Data(train=fewer, split="0.5, 0.25, 0.25"))
    assert all({e.prompt_key for e in part} <= own for part, own in zip(again.values(), kept))
    for wrong in ("1", "1,x", "2,-1", "0,1", "nan,1"):
        match = f"^data.split: {wrong}: expected two or three numbers"
        refused(match, parts_of, Data(train, split=wrong))
    refused("^data.split: it cuts data.train", parts_of, Data(train, split="2,1,1", val=train))


# prompts of one conversation; # is its number
TOGETHER = {
    "each prompt goes on from the last one": [
        [user("q#")],
        [user("q#"), bot("a"), user("why?")],
        [user("q#"), bot("b"), user("why?"), bot("b"), user("and?")],
    ],
    "the system prompt has the time of day": [
        [{"role": "system", "content": "At ten"}, user("q#")],
        [
            {"role": "system", "content": "At noon"},
            bot("Hello"),
            user(" q#\n"),
            bot("a"),
            user("?"),
        ],
    ],
    "plain texts with line breaks": ["User: q#\nBot:", "User: q#\nBot: a\nUser: why?\nBot:"],
    "plain texts with marks": ["[INST] q# [/INST]", "[INST] q# [/INST]a</s>[INST] why? [/INST]"],
}


@pytest.mark.parametrize("prompts", TOGETHER.values(), ids=TOGETHER)
def test_data_split_keeps_a_conversation_together(prompts, tmp_path):
    # the questions begin with each other: q1, q10
    of_each = [json.loads(json.dumps(prompts).replace("#", f"{i}")) for i in range(60)]
    records = [rated(prompt, f"{i}") for i, of_one in enumerate(of_each) for prompt in of_one]
    source = write(tmp_path / "d.jsonl", *records, rated(prompts[0], conversation_id="c1"))
    tokenizer = plain() if isinstance(prompts[0], str) else chat()
    parts, table = parts_of(Data(source, split="50,50"), tokenizer=tokenizer)
    answers = [{e.completions[0].tobytes() for e in parts[name]} for name in ("train", "val")]
    assert len(answers[0]) + len(answers[1]) == 61 and min(map(len, answers)) > 18
    assert "1 with conversation_id, which nothing reads" in " ".join(table)


@pytest.mark.parametrize(
    "tokenizer, prompts",
    [(bos, ["", "I", *(f"In {i}" for i in range(60))]),
     (chat, [[user("Why " * i)] for i in range(1, 61)])],
)  # fmt: skip
def test_prompts_that_only_look_alike_are_split_by_themselves(tokenizer, prompts, tmp_path):
    source = write(tmp_path / "d.jsonl", *map(rated, prompts))
    parts, _ = parts_of(Data(source, split="50,50"), tokenizer=tokenizer())
    assert min(len(parts["train"]), len(parts["val"])) > 18


LIMITS = [  # max_prompt, max_completion, the context, what they become; None: they are refused
    (None, None, 101, (50, 51)),
    (None, None, 100_000, (1024, 1024)),
    (100, None, 128, (100, 28)),
    (64, 64, 128, (64, 64)),
    (65, 64, 128, None),
    (None, 128, 128, None),
]


@pytest.mark.parametrize("prompt, completion, context, limits", LIMITS)
def test_the_limits_fill_the_context_by_default_and_never_exceed_it(
    prompt, completion, context, limits
):
    data = Data("t", max_prompt=prompt, max_completion=completion)
    if limits:
        filled = with_limits(data, context)
        assert (filled.max_prompt, filled.max_completion) == limits
    else:
        refused("exceed the context of 128$", with_limits, data, context)


# ---- a step's batch ------------------------------------------------------------------------------


def letters(*pairs: str) -> list[Example]:
    """ "ax" is prompt a with completion x."""
    return [example([ord(p)], [ord(c)]) for p, c in pairs]


def partners_of(examples: list[Example]) -> list[int | None]:
    """Of each example the index of the example whose completion it is paired with."""
    index_of = {id(e.completions[0]): i for i, e in enumerate(examples)} | {id(None): None}
    return [index_of[id(ids)] for ids in data.next_mismatched_completions(examples)]


@pytest.mark.parametrize(
    "pairs, partners",
    [
        (["ax", "by", "cz"], [1, 2, 0]),  # the plain shift, and the last takes the first's
        (["ax", "ay", "bx", "by"], [3, 2, 1, 0]),  # two pairs with the same two answers
        (["ax", "bx", "cx", "dy", "ex"], [3, 3, 3, 4, 3]),  # the same answer to several prompts
        (["ax", "ax", "by"], [2, 2, 0]),  # a record twice
        (["ax", "ay", "az"], [None] * 3),
        (["ax", "ay", "bx"], [None, 2, 1]),  # for ax there is none, though both others have one
        (["ax"], [None]),
        ([], []),
    ],
)
def test_a_mismatched_pair_takes_the_next_completion_of_another_prompt_and_text(pairs, partners):
    assert partners_of(letters(*pairs)) == partners


def paired(examples: list[Example], room: int = 99) -> Step:
    return Step(examples, data.next_mismatched_completions(examples), budget=Budget(limit=room))


def test_a_step_hands_out_own_and_mismatched_completions():
    found = [example([1, 2], [3, 4]), example([5], [6, 7, 8]), example([9], [3, 4])]
    step = paired(found)
    assert [ids.tolist() for ids in step.mismatched_completions] == [[6, 7, 8], [3, 4], [6, 7, 8]]
    own, lent = step.micro_batch(Part([0, 2])).packed, step.micro_batch(Part([2])).mismatched
    assert own.target_T.tolist() == [3, 4, 3, 4] and own.length_BK.tolist() == [[2], [2]]
    assert lent.token_N.tolist() == [9, 6, 7] and lent.target_T.tolist() == [6, 7, 8]
    # 5, 4 and 4 tokens: the longer of the two completions counts
    assert [len(paired(found, room).parts) for room in (13, 12)] == [1, 2]


def test_examples_of_one_prompt_stay_together():
    examples = [example(*x) for x in (([1, 2], [3, 4]), ([5], [6]), ([1, 2], [7, 8]), ([5], [3]))]
    assert paired(examples, room=2 + 2 + 2).parts == [Part([0, 2]), Part([1, 3])]


def test_a_step_has_a_reward_for_each_record():
    """The other fields of a micro-batch are used by losses that are computed by hand (test_openings.py)."""
    found = [example([1], [2], rewards=(0.25, None)), example([1], [3], label=False)]
    batch = Step([*found, example([4], [2])]).micro_batch(Part([2, 0, 1]))
    assert batch.reward.tolist() == [1, 0.25, 0]


# ---- micro-batches -----------------------------------------------------------------------------------------


def test_a_split_learns_each_example_once_within_its_budget_in_equally_many_micro_batches():
    """Fewer examples than ranks, sizes that ranks do not divide, over-long examples."""
    rng, fillers, alone = random.Random(1), 0, 0
    budgets = [(1, None), (3, None), (100, None), (None, 10), (None, 50), (None, 10_000)]
    for n, ranks, (size, tokens) in product((1, 2, 3, 5, 13, 32), (1, 2, 3, 5), budgets):
        sizes = [rng.randint(1, 40) if tokens else 1 for _ in range(n)]
        limit = tokens or size
        groups = [[i] for i in range(n)]  # each has a prompt of its own
        micros = split_bundles(groups, sizes, Budget(0, ranks, limit, bool(tokens)))
        real = [[m.indices for m in mine if not m.filler] for mine in micros]
        assert sorted(chain(*chain(*real))) == list(range(n))
        assert {len(mine) for mine in micros} == {max(map(len, real))}, "no round of fillers only"
        fillers += sum(len(micros[0]) - len(mine) for mine in real)
        for index in chain(*real):
            over = sum(sizes[i] for i in index) > limit
            assert not over or tokens and len(index) == 1
            alone += over
    assert fillers > 50 and alone > 50


# ---- order ---------------------------------------------------------------------------------------


def test_an_epochs_order_is_a_permutation_and_a_function_of_epoch_and_seed_only():
    first = data.shuffled(50, 3, 7)
    assert sorted(first) == list(range(50)) != first
    torch.manual_seed(99)  # somebody draws in between
    assert data.shuffled(50, 3, 7) == first
    others = {tuple(data.shuffled(50, epoch, 7)) for epoch in range(10)}
    others.add(tuple(data.shuffled(50, 2, 8)))
    assert len(others) == 11, "or two seeds would repeat each other, an epoch apart"
    one, two = (online.items_of_iteration(list(range(50)), i, 50, 7) for i in (1, 2))
    assert sorted(one) == sorted(two) == list(range(50)) and one != two


def test_by_prompt_the_examples_of_a_prompt_come_together_in_every_epoch():
    found = [example([prompt], [i]) for i, prompt in enumerate([7, 5, 9] * 4)]

    def orders(begin=0, **kw) -> list[list[int]]:
        """Of nine epochs, each of one step."""
        cfg = kto.Settings("m", Data("t", group_by_prompt=True, **kw), batch_size=12)
        steps = data.step_examples(found, cfg, Plan(1, 9, begin, begin + 9, 1), begin)
        return [[e.completions[0].item() for e in examples] for examples in steps]

    shuffled = orders()
    for order in shuffled:
        assert sorted(order) == list(range(12))
        assert [i % 3 for i in order] == [i % 3 for i in order[::4] for _ in range(4)]
    assert len(set(map(tuple, shuffled))) == 9, "both prompts and their examples are shuffled"
    assert orders(9)[0] not in shuffled, "an iteration's orders are its own"
    assert orders(shuffle=False)[0] == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]

"""From a file to examples, described in a table; a step's pairs, cuts and packing are exact."""

import dataclasses
import random
import re
import time

import numpy as np
import pytest
import torch
from tokens import EOS, bos, bot, chat, folder, ids_of, plain, rated, user, write

import data
import packing
from data import Batch, MicroBatch
from records.examples import (
    Example,
    examples_hash,
    load_examples,
    load_splits,
    split_by_prompt,
    suggest_class_weights,
)
from records.tokenizer import Tokenizer
from runs.console import BadInput
from runs.settings import Data, with_limits


def load(source, tokenizer, kind="rated", max_prompt=64, max_completion=64, **limits):
    """(examples, counts)"""
    limits |= dict(max_prompt=max_prompt, max_completion=max_completion)
    return load_examples(str(source), tokenizer, kind, Data(str(source), **limits))


def read(*args, **kwargs) -> list[Example]:
    return load(*args, **kwargs)[0]


def refusal(*args, **kwargs) -> list[str]:
    """The lines that load refuses with."""
    with pytest.raises(BadInput) as e:
        load(*args, **kwargs)
    return str(e.value).splitlines()


def parts_of(d: Data, kind="rated", tokenizer=None) -> tuple[dict, list[str]]:
    """The three parts, and what was said."""
    said = []
    d = dataclasses.replace(d, max_prompt=d.max_prompt or 64, max_completion=d.max_completion or 64)
    return load_splits(d, tokenizer or plain(), kind, said.append), said


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
    (b"{not json", "Expecting property name.*column 2"),
    (b'{"prompt": "\xff\xfe"' + REST, "'utf-8' codec can't decode byte 0xff"),
    (b"[1, 2]", "record: expected an object, got .1, 2."),
    (b"", None),
    (b'{"prompt": "p", "completion": "c", "label": "yes"}', 'label: expected .* got "yes"'),
    (b'{"prompt": "p", "label": 1, "label": 0}', "label: given twice"),
    (PAIR + b'"rejected_reward": NaN}', "reward: .*finite number.*, got NaN"),
    (PAIR + b'"chosen_reward": 1e999}', "reward: .*finite number.*, got Infinity"),
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


def test_the_first_twenty_faults_are_told_and_no_more(tmp_path):
    source = write(tmp_path / "d.jsonl", rated(), *[rated(label="yes")] * 19)
    assert len(refusal(source, plain())) == 19
    source = write(tmp_path / "d.jsonl", rated(), *[rated(label="yes")] * 50)
    places = [line.split(": ")[0] for line in refusal(source, plain())]
    assert places == [f"{source}:{i}" for i in range(2, 22)]


HALF = r'{"prompt": "p \ud83d", "completion": "c", "label": 1}'


@pytest.mark.parametrize(
    "record, template, reason",
    [
        ("", None, ": no records"),
        (rated("", "c"), None, ":1: prompt: it has no tokens"),
        (rated([user("p")], "c"), "always the same", ":1: completion: it has no tokens"),
        (rated([user("p")], "c"), "{{ raise_exception('a') }}", ":1: chat template: a"),
        (HALF, None, ":1: 'utf-8' codec can't encode character"),
    ],
)
def test_a_record_that_cannot_be_learned_from_is_refused_with_its_line(
    tmp_path, record, template, reason
):
    source = write(tmp_path / "d.jsonl", record)
    tokenizer = Tokenizer(folder(tmp_path / "t", chat_template=template))
    (line,) = refusal(source, tokenizer)
    assert line.startswith(f"{source}{reason}")


# ---- tokens --------------------------------------------------------------------------------------


def test_a_plain_completion_ends_with_one_eos(tmp_path):
    texts = [rated("ab", " best"), rated("p", ""), rated("a", "b<|endoftext|>")]
    e, empty, rendered = read(write(tmp_path / "d.jsonl", *texts), plain())
    assert ids(e) == [ids_of(plain(), "ab"), [262, EOS]] and ids(empty)[1] == [EOS]
    assert ids(rendered) == [[66], [67, EOS]], "the text's own is not doubled"
    assert (e.prompt.dtype, e.completions[0].dtype) == (np.int32, np.int32)


DIALOGUE = rated([user("p")], [bot("c")])
QUESTION = {"question": "p", "completion": "c", "label": 1}
RENDERED = {  # the records of a file, whether its tokenizer has a template, whether it is used
    "two strings are no dialogue": ([rated()], True, False),
    "an instruction is a turn of the user": ([QUESTION], True, True),
    "where there is a template": ([QUESTION], False, False),
    "strings before a dialogue": ([rated(), rated(), DIALOGUE], True, True),
    "an empty system beside a filled one": ([rated(system=""), rated(system="s")], True, True),
    "an empty system alone": ([rated(system="")], True, False),
}


@pytest.mark.parametrize("file", RENDERED)
def test_all_records_of_a_file_are_rendered_in_one_way(tmp_path, file):
    records, has_template, by_template = RENDERED[file]
    tokenizer = chat() if has_template else plain()
    found, counts = load(write(tmp_path / "d.jsonl", *records), tokenizer)
    assert counts["by the chat template" if by_template else "plain"] == len(found) == len(records)
    turn = ids_of(tokenizer, "<|im_start|>user\np<|im_end|>\n<|im_start|>assistant\n")
    for e in found:
        prompt, completion = ids(e)
        if not by_template:
            assert (prompt, completion) == (ids_of(tokenizer, "p"), [68, EOS])
        else:
            assert prompt[-len(turn) :] == turn
            assert completion == ids_of(tokenizer, "c<|im_end|>\n"), "a second end is never sampled"


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


def test_a_cut_takes_the_prompts_head_and_the_completions_tail_with_its_eos(tmp_path):
    text = "a b c d f g"
    tokens = ids_of(plain(), text)
    assert len(tokens) == 6 and len(set(tokens)) == 6
    records = rated(text, text), rated(text[:7], text[:5]), rated("a", "a")
    source = write(tmp_path / "d.jsonl", *records)
    (long, fits, short), counts = load(source, plain(), "rated", 4, 4)
    assert ids(long) == [tokens[-4:], tokens[:4]]
    assert ids(fits) == [tokens[:4], [*tokens[:3], EOS]]
    assert ids(short) == [[66], [66, EOS]]
    assert (counts["prompts cut"], counts["completions cut"]) == (1, 1)
    (e, *_), counts = load(source, plain(), "rated", 6, 6)
    assert ids(e)[1] == tokens and counts["completions cut"] == 1, "its EOS alone is over the limit"
    assert not load(source, plain(), "rated", 6, 7)[1]["completions cut"]


def test_a_prompt_never_depends_on_its_completion(tmp_path):
    source = write(tmp_path / "d.jsonl", *[rated("a b c d f g", "x" * n) for n in (0, 1, 50)])
    found = read(source, plain(), max_prompt=3, max_completion=5)
    assert len({e.prompt.tobytes() for e in found}) == 1


# ---- a record's own weight and fields ------------------------------------------------------------


def micro_batch(found: list[Example], index: list[int]) -> data.LossView:
    batch = Batch(found)
    return data.LossView(data.StepView(batch, torch.device("cpu")), batch.pack(index))


def test_fields_that_data_extra_names_reach_the_loss_as_a_tensor_or_as_texts(tmp_path):
    more = [(0.5, "web"), (-2, "book"), (3, "")]
    records = [rated("p", "c", score=score, source=source) for score, source in more]
    jsonl = write(tmp_path / "d.jsonl", *records)
    view = micro_batch(read(jsonl, plain(), extra="score, source"), [2, 0])
    assert torch.equal(view.extra("score"), torch.tensor([3.0, 0.5]))
    assert view.extra("source") == ["", "web"]
    assert read(jsonl, plain())[0].extra == {}, "what is not named is not kept"


def test_a_weight_and_a_label_reach_the_step(tmp_path):
    source = write(tmp_path / "d.jsonl", rated(label=0, weight=0.25), rated(), rated(weight=0))
    view = micro_batch(read(source, plain()), [0, 1])
    assert view.step.weight.tolist() == [0.25, 1.0, 0.0] and view.label.tolist() == [False, True]
    assert (view.step.size, view.step.desirable) == (3, 2), "of the step, not of the micro-batch"


def test_the_hash_is_of_all_that_is_learned_from_and_of_nothing_else(tmp_path):
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


# ---- several sources, columns and labels ---------------------------------------------------------


def test_shares_are_those_of_the_longest_mix_that_repeats_nothing(tmp_path):
    a = write(tmp_path / "a.jsonl", *[rated(f"a{i}") for i in range(60)])
    b = write(tmp_path / "b.jsonl", *[rated(f"b{i}") for i in range(20)])
    both = read(f"{a},{b}", plain())
    places = [f"{a}:{i}" for i in range(1, 61)] + [f"{b}:{i}" for i in range(1, 21)]
    assert [e.where for e in both] == places
    mixed = read(f"{a}:0.6,{b}:0.4", plain())
    lines = [int(e.where.split(":")[1]) for e in mixed]
    assert lines == [1 + 2 * i for i in range(30)] + [*range(1, 21)], "evenly over the longer one"
    assert len(read(f"{a}:3,{b}:1", plain())) == 80, "all, if that is what the shares say"
    fold = write(tmp_path / "bad.jsonl", rated(), rated(label="?"))
    assert refusal(f"{a},{fold}", plain())[0].startswith(f"{fold}:2: label: ")


def test_columns_of_other_names_are_renamed(tmp_path):
    theirs = [{"question": "a", "completion": c, "label": 1, "good": 0} for c in "xy"]
    theirs = write(tmp_path / "theirs.jsonl", *theirs)
    ours = write(tmp_path / "ours.jsonl", rated("b", "x"), rated("b", "y"))
    parts, _ = parts_of(Data(f"{ours},{theirs}", columns="prompt=question"))
    assert [ids(e)[0] for e in parts["train"]] == [[67], [67], [66], [66]]
    for wrong in ("prompt", "prompt=q=r"):
        with pytest.raises(BadInput, match="^data.columns: expected name=name"):
            parts_of(Data(ours, columns=wrong))


def test_labels_that_data_labels_does_not_name_are_dropped_and_counted(tmp_path):
    stars = (1, 2, 3, 3, None, 4, 5)
    source = write(tmp_path / "d.jsonl", *[rated(str(i), label=i) for i in stars])
    found, counts = load(source, plain(), labels="up=4|5,down=1|2")
    assert [e.label for e in found] == [False, False, True, True]
    assert counts["dropped by data.labels"] == 3
    assert refusal(source, plain(), labels="up=yes,down=no") == [f"{source}: no records"]
    for labels in ("up", "up=", "good=4", "up=4,down=4", "up=4=5"):
        assert refusal(source, plain(), labels=labels)[0].startswith("data.labels: ")


def test_examples_that_all_share_a_prompt_have_no_pairs_and_that_is_seen_at_once():
    e = Example(np.array([1]), (np.array([2]),), True)
    many = [e._replace(completions=(np.array([i]),)) for i in range(30_000)]
    began = time.process_time()
    assert data.mismatched_pairs(many) == [-1] * 30_000 and time.process_time() - began < 5
    assert data.mismatched_pairs([e, e._replace(prompt=np.array([5]))]) == [-1, -1]


# ---- split and table -----------------------------------------------------------------------------


def many(n_prompts: int, ratings: int) -> list[Example]:
    grid = ((p, r) for r in range(ratings) for p in range(n_prompts))
    return [example([7, p], [p, r], label=r == 0) for p, r in grid]


def test_all_ratings_of_a_prompt_land_in_one_part():
    parts = split_by_prompt(many(300, 3), "6,3,1")
    prompts = [{e.keys[0] for e in part} for part in parts]
    assert sum(map(len, parts)) == 900 and sum(map(len, prompts)) == 300, "each prompt in one part"
    for part, expected in zip(prompts, (180, 90, 30)):
        assert abs(len(part) - expected) < 40, "four standard deviations"
    assert [len(p) > 0 for p in split_by_prompt(many(50, 1), "1,0,1")] == [True, False, True]
    assert [len(p) > 0 for p in split_by_prompt(many(50, 1), "1,1")] == [True, True, False]


def test_the_part_of_a_prompt_depends_on_nothing_but_the_prompt_and_the_parts():
    def places(found, parts):
        split = split_by_prompt(found, parts)
        return {e.keys: i for i, part in enumerate(split) for e in part}

    where = places(many(200, 2), "2,1,1")
    assert len(where) == 400 and set(where.values()) == {0, 1, 2}
    again = places(random.Random(0).sample(many(200, 2), 100), "0.5, 0.25, 0.25")
    assert again == {key: where[key] for key in again}


@pytest.mark.parametrize("parts", ["", "1", "a,b", "1,2,3,4", "0,1,1", "-1,2", "nan,1", "1,,1"])
def test_parts_that_cannot_be_meant_are_refused(parts):
    with pytest.raises(BadInput, match="^data.split: "):
        split_by_prompt(many(3, 1), parts)


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
    _, (table,) = parts_of(Data(source, max_prompt=4, max_completion=4, extra=None))
    assert table.splitlines() == [
        "train: 8 examples of 3 prompts, 5 desirable, 3 undesirable",
        "  prompt tokens: median 1, 95% below 2, longest 4",
        "  completion tokens: median 2, 95% below 4, longest 4",
        "  2 duplicates, 1 contradictions, 1 with note, which nothing reads, 1 with wieght, which "
        "nothing reads, 8 plain, 1 prompts cut, 2 completions cut",
    ]
    pair = {"prompt": "a", "chosen": "x", "rejected": "y"}
    source = write(tmp_path / "p.jsonl", pair, pair, pair | {"rejected": "z"})
    for kind, head in (("paired", "train: 3 examples of 1 prompts\n"), ("prompts", "train: 1 ex")):
        _, (table,) = parts_of(Data(source), kind)
        assert table.startswith(head)
        assert ("1 duplicates, 0 contradictions" in table) == (kind == "paired")


# (n_D, n_U) -> weights by hand; arXiv 2402.01306 eq. 8: w_D n_D / (w_U n_U) in [1, 4/3]
WEIGHTS = {
    (1, 4): "kto.desirable_weight 4.00 to 5.33, kto.undesirable_weight 1",
    (4, 4): "kto.desirable_weight 1.00 to 1.33, kto.undesirable_weight 1",
    (4, 3): "kto.desirable_weight 1.00 to 1.00, kto.undesirable_weight 1",
    (3, 2): "kto.desirable_weight 1, kto.undesirable_weight 1.12 to 1.50",
}


@pytest.mark.parametrize("n_d, n_u", WEIGHTS)
def test_the_data_check_advises_the_weights_of_the_paper(n_d, n_u):
    found = [example([i], [i], label=i < n_d) for i in range(n_d + n_u)]
    advice = suggest_class_weights(found).split("balance:\n  ")[1]
    assert advice == WEIGHTS[n_d, n_u]
    sides = [[float(x) for x in re.findall(r"\d[\d.]*", side)] for side in advice.split(",")]
    for w_d in sides[0]:
        for w_u in sides[1]:
            assert 1 - 0.01 <= w_d * n_d / (w_u * n_u) <= 4 / 3 + 0.01
    assert suggest_class_weights(found[:n_d]) is None, "one class alone"


def test_each_part_is_read_and_described(tmp_path):
    train = write(tmp_path / "t.jsonl", rated("a"), rated("b", note=1))
    d = Data(train=train, val=write(tmp_path / "v.jsonl", rated("c")))
    parts, said = parts_of(d)
    assert {name: len(part) for name, part in parts.items()} == {"train": 2, "val": 1, "test": 0}
    heads = ["train: 2 examples of 2 prompts", "val: 1 examples of 1 prompts"]
    assert [x.split(",")[0] for x in said] == heads
    assert ["with note, which nothing reads" in x for x in said] == [True, False]


def test_one_file_is_split_by_prompt(tmp_path):
    prompts = [f"{p} {q}" for p in range(10) for q in range(10)]
    train = write(tmp_path / "t.jsonl", *[rated(p, c) for c in "xyz" for p in prompts])
    parts, said = parts_of(Data(train=train, split="2,1,1"))
    kept = [{e.keys[0] for e in part} for part in parts.values()]
    assert [*parts] == ["train", "val", "test"] and len(said) == 3
    assert sum(map(len, parts.values())) == 300 and sum(map(len, kept)) == 100 and all(kept)
    with pytest.raises(BadInput, match="^data.split: .* or data.val and data.test$"):
        parts_of(Data(train=train, val=train, split="2,1,1"))


@pytest.mark.parametrize(
    "given, context, limits",
    [
        ((None, None), 128, (64, 64)),
        ((None, None), 101, (50, 51)),
        ((None, None), 100_000, (1024, 1024)),
        ((100, None), 128, (100, 28)),
        ((None, 100), 128, (28, 100)),
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
    "pairs, mismatched_pairs",
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
def test_a_mismatched_pair_takes_the_next_completion_of_another_prompt_and_text(
    pairs, mismatched_pairs
):
    assert data.mismatched_pairs(letters(*pairs)) == mismatched_pairs


def test_mismatched_pairs_agree_with_its_definition_on_small_alphabets():
    rng, without = random.Random(0), 0
    for _ in range(400):
        n, size = rng.randint(1, 9), rng.randint(1, 4)
        pairs = [rng.choice("abcd"[:size]) + rng.choice("wxyz"[:size]) for _ in range(n)]
        for i, got in enumerate(data.mismatched_pairs(letters(*pairs))):
            p, c = pairs[i]
            fit = (j for j in range(n) if pairs[j][0] != p and pairs[j][1] != c)
            allowed = {(j - i) % n: j for j in fit}
            assert got == (allowed[min(allowed)] if allowed else -1) and got != i
            without += not allowed
    assert without > 100, "else the case without a pair was not met"


def test_completions_are_compared_after_cutting(tmp_path):
    source = write(tmp_path / "d.jsonl", rated("a", "xyz1"), rated("b", "xyz2"), rated("c", "z"))
    assert data.mismatched_pairs(read(source, plain())) == [1, 2, 0]
    cut = read(source, plain(), max_completion=3)
    assert data.mismatched_pairs(cut) == [2, 2, 0], "a and b now say the same"


def test_a_micro_batch_has_no_more_tokens_with_mismatched_completions_than_with_its_own():
    lengths = [5] * 12 + [100] * 4
    found = [example([1], [2, *range(100 + i, 99 + i + n)]) for i, n in enumerate(lengths)]
    mismatched_pairs = [(i + 11) % len(found) for i in range(len(found))]
    batch = Batch(found, mismatched_pairs, cut=data.Cut(max_tokens=150))
    for mismatched in (False, True):
        packed = [batch.pack(micro.index, mismatched) for micro in batch.micro_batches]
        assert max(len(x.token_N) for x in packed) <= 150
        assert sum(len(x.index) for x in packed) == len(found)


def test_a_batch_hands_out_own_and_mismatched_completions():
    found = [example([1, 2], [3, 4]), example([5], [6, 7, 8]), example([9], [3, 4])]
    batch = Batch(found, data.mismatched_pairs(found))
    assert batch.mismatched_pairs == [1, 2, 1]
    own, lent = batch.pack([0, 2]), batch.pack([2], mismatched=True)
    assert own.target_T.tolist() == [3, 4, 3, 4] and own.length_BK.tolist() == [[2], [2]]
    assert lent.token_N.tolist() == [9, 6, 7] and lent.target_T.tolist() == [6, 7, 8]
    assert [batch.group_size(group) for group in batch.groups] == [5, 4, 4], "the longer of the two"
    assert Batch(found, score_prompt=True).pack([0]).length_BK.tolist() == [[3]]
    alone = Batch(found[:1], [-1]).pack([0], mismatched=True)
    assert alone.length_BK.tolist() == [[2]], "any will do, it is left out of the mean"


def test_examples_of_one_prompt_stay_together_and_share_it():
    found = [
        example([1, 2], [3, 4]),
        example([5], [6]),
        example([1, 2], [7, 8, 9]),
        example([5], [3, 4]),
    ]
    batch = Batch(found, data.mismatched_pairs(found), cut=data.Cut(max_tokens=7))
    assert batch.groups == [[0, 2], [1, 3]] and [2 + 2 + 3, 1 + 1 + 2] == [7, 4]
    assert batch.micro_batches == [MicroBatch([0, 2]), MicroBatch([1, 3])]
    packed = batch.pack([0, 2])
    assert packed.token_N.tolist() == [1, 2, 3, 7, 8], "the prompt stands there once"
    assert packed.target_T.tolist() == [3, 4, 7, 8, 9] and packed.prompt_B.tolist() == [0, 0]
    lent = batch.pack([0, 2], mismatched=True)
    assert lent.token_N.tolist() == [1, 2, 3], (
        "6 and 3 4 are mismatched; the last token is no input"
    )
    assert data.StepView(batch, torch.device("cpu")).group.tolist() == [0, 1, 0, 1]
    small = Batch(found, cut=data.Cut(max_tokens=6))
    assert small.micro_batches == [MicroBatch([2]), MicroBatch([0]), MicroBatch([1, 3])] or (
        sorted(i for m in small.micro_batches for i in m.index) == [0, 1, 2, 3]
    ), "a group that does not fit is cut"
    by_size = Batch(found, cut=data.Cut(max_examples=3, max_tokens=None))
    assert by_size.micro_batches == [MicroBatch([0, 2]), MicroBatch([1, 3])]


# ---- cut -----------------------------------------------------------------------------------------


def cut(sizes, ranks, size, tokens) -> list[list[MicroBatch]]:
    """A pass's micro-batches of each rank, cut as the trainer cuts them."""
    return data.cut_micro_batches(
        sizes if tokens else [1] * len(sizes), data.Cut(0, ranks, size, tokens)
    )


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


def by_prompt(found: list[Example], order) -> list[int]:
    return sum(packing.prompt_groups([e.prompt for e in found], order), [])


def test_by_prompt_the_examples_of_a_prompt_come_together_in_every_epoch():
    found = [example([p], [n]) for n in range(4) for p in (7, 5, 9)]
    orders = []
    for epoch in range(9):
        order = by_prompt(found, data.epoch_order(12, epoch, 3, True))
        assert sorted(order) == list(range(12))
        prompts = [found[i].prompt[0] for i in order]
        assert [prompts[k : k + 4] for k in (0, 4, 8)] == [[prompts[k]] * 4 for k in (0, 4, 8)]
        orders.append(tuple(order))
    assert len(set(orders)) == 9, "both prompts and their examples are shuffled"
    assert len({found[order[0]].prompt[0] for order in orders}) > 1
    assert by_prompt(found, range(12)) == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]


# ---- packing -------------------------------------------------------------------------------------

PROMPTS = [np.array([10, 11, 12]), np.array([13])]
COMPLETIONS = [(np.array([20, 21]), np.array([30, 31, 32])), (np.array([22]), np.array([33, 34]))]


def targets(r: packing.PackedBatch) -> list[tuple[int, int, int]]:
    return sorted(zip(r.source_T.tolist(), r.target_T.tolist(), r.sequence_T.tolist()))


def test_a_packed_batch_by_hand():
    r = packing.pack(PROMPTS, COMPLETIONS)
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


def test_the_sequences_of_attention_by_hand():
    r = packing.pack(PROMPTS, COMPLETIONS)
    # each sequence has its prompt's keys; a first completion's has the prompt's queries, too
    assert r.key_I.tolist() == [*(0, 1, 2, 3), *(0, 1, 2, 4, 5), 6, *(6, 7)]
    assert r.query_start_S.tolist() == [0, 4, 6, 7, 8]
    assert r.completion_query_start_S.tolist() == [0, 1, 3, 3, 4]
    assert r.key_start_S.tolist() == [0, 4, 9, 10, 12]
    assert (r.max_queries, r.max_completion_queries, r.max_keys) == (4, 2, 5)
    for name, x in r._asdict().items():
        if isinstance(x, torch.Tensor):
            assert x.dtype == (torch.int32 if name.endswith("_S") else torch.int64), name
    assert (r.prompt_P.tolist(), r.completion_M.tolist()) == ([0, 1, 2, 6], [3, 4, 5, 7])
    one = packing.pack(PROMPTS, [(np.array([5]),)] * 2)
    assert len(one.key_I) == 0, "all tokens in their order need no gather"
    assert one.completion_M.tolist() == [0], "one query, though no completion has an input"
    assert one.completion_query_start_S.tolist() == [0, 1, 1] and one.max_completion_queries == 1


def test_a_scored_prompt_adds_its_tokens_from_the_second_on_to_both_completions():
    r, bare = (packing.pack(PROMPTS, COMPLETIONS, score_prompt=on) for on in (True, False))
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
        r = packing.pack(prompts, completions, score_prompt=True)
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
    r = packing.pack(PROMPTS, COMPLETIONS)
    moved = r.to("meta")
    tensors = [x for x in moved if isinstance(x, torch.Tensor)]
    assert len(tensors) == 18 and all(x.is_meta for x in tensors) and moved.sizes == r.sizes


def test_a_batch_that_was_packed_ahead_hands_out_what_was_packed():
    found = [example([1, 2], [3, 4]), example([5], [6, 7, 8]), example([9], [3, 4])]
    batch, later = (
        Batch(found, data.mismatched_pairs(found), cut=data.Cut(max_tokens=9)) for _ in range(2)
    )
    batch.pack_ahead()
    assert batch.micro_batches == [MicroBatch([0, 1]), MicroBatch([2])]
    asked = [([0, 1], False), ([0, 1], True), ([2], False), ([2], True)]
    assert len(batch.packed) == len(asked)
    for index, mismatched in asked:
        packed = batch.pack(index, mismatched)
        assert packed is batch.pack(index, mismatched), "packed once"
        assert torch.equal(packed.token_N, later.pack(index, mismatched).token_N)
    alone = Batch(found)
    alone.pack_ahead()
    assert list(alone.packed) == [((0, 1, 2), False)], "no mismatched pairs were asked for"

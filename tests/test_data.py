"""From a file to examples, described in a table; a step's pairs, micro-batches and packing are exact."""

import contextlib
import dataclasses
import io
import random
import re
from itertools import chain, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokens import EOS, bos, bot, chat, folder, ids_of, plain, rated, user, write

import data
import kto
from data import Batch, MicroBatch
from hub import Source
from records.examples import (
    Example,
    absolute_sources,
    examples_hash,
    load_examples,
    load_splits,
    with_limits,
)
from records.tokenizer import Tokenizer
from runs.console import BadInput
from runs.optimizer import Plan
from runs.settings import Data
from train import Objective


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
    d = dataclasses.replace(d, max_prompt=d.max_prompt or 64, max_completion=d.max_completion or 64)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        parts = load_splits(d, tokenizer or plain(), kind)
    return parts, out.getvalue().splitlines()


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
    "record, template, reason",
    [
        ("", None, ": no records"),
        (rated("", "c"), None, ":1: prompt: it has no tokens"),
        (
            rated([user("p")], "c"),
            "always the same",
            ":1: user: the chat template does not write its content",
        ),
        (rated([user("p")], "c"), "{{ raise_exception('a') }}", ":1: chat template: a"),
    ],
)
def test_a_record_that_cannot_be_learned_from_is_refused_with_its_line(
    tmp_path, record, template, reason
):
    source = write(tmp_path / "d.jsonl", record)
    tokenizer = Tokenizer(Source(folder(tmp_path / "t", chat_template=template)))
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
# the records of a file, whether its tokenizer has a template, whether it is used, data.columns
RENDERED = {
    "two strings are no dialogue": ([rated()], True, False),
    "an instruction is a turn of the user": ([QUESTION], True, True),
    "where there is a template": ([QUESTION], False, False),
    "a question that is called a prompt": ([QUESTION], True, False, "prompt=question"),
    "a prompt that is called an instruction": ([rated()], True, True, "instruction=prompt"),
    "strings before a dialogue": ([rated(), rated(), DIALOGUE], True, True),
    "a string before a message": ([rated("p", [bot("c")])], True, True),
    "an empty system beside a filled one": ([rated(system=""), rated(system="s")], True, True),
    "an empty system alone": ([rated(system="")], True, False),
}


@pytest.mark.parametrize("file", RENDERED)
def test_all_records_of_a_file_are_rendered_in_one_way(tmp_path, file):
    records, has_template, by_template, *columns = RENDERED[file]
    tokenizer, columns = chat() if has_template else plain(), ",".join(columns)
    found, counts = load(write(tmp_path / "d.jsonl", *records), tokenizer, columns=columns)
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
    cut, fits, empty = (e.prompt.tolist() for e in read(source, bos(), max_prompt=4))
    assert cut == [512, *ids_of(bos(), "abcdef")[-3:]]
    assert (fits, empty) == ([512, 66, 67, 68], [512])
    assert not any(512 in e.completions[0] for e in read(source, bos())), "a completion has no BOS"


def test_a_cut_takes_the_prompts_head_and_the_completions_tail_with_its_eos(tmp_path):
    text = "a b c d f g"
    tokens = ids_of(plain(), text)
    assert len(tokens) == 6 and len(set(tokens)) == 6
    records = rated(text, text), rated(text[:7], text[:5]), rated(text[:5])
    source = write(tmp_path / "d.jsonl", *records)
    (long, fits, short), counts = load(source, plain(), "rated", 4, 4)
    assert ids(long) == [tokens[-4:], tokens[:4]]
    assert ids(fits) == [tokens[:4], [*tokens[:3], EOS]]
    assert ids(short)[0] == tokens[:3]
    assert (counts["prompts cut"], counts["completions cut"]) == (1, 1)
    (e, *_), counts = load(source, plain(), "rated", 6, 6)
    assert ids(e)[1] == tokens and counts["completions cut"] == 1, "its EOS alone is over the limit"


# ---- a record's own weight and fields ------------------------------------------------------------


def test_a_weight_and_a_label_reach_the_step(tmp_path):
    source = write(tmp_path / "d.jsonl", rated(label=0, weight=0.25), rated(), rated(weight=0))
    batch = Batch(read(source, plain()))
    view = data.LossView(data.StepView(batch, torch.device("cpu")), batch.pack([0, 1]))
    assert view.step.weight.tolist() == [0.25, 1.0, 0.0] and view.label.tolist() == [False, True]
    assert (view.step.size, view.step.desirable) == (3, 2), "of the step, not of the micro-batch"
    shown = write(tmp_path / "e.jsonl", {"prompt": "p", "completion": "c"})
    assert [e.label for e in read(shown, plain(), "demonstrations")] == [True]


def test_the_hash_is_of_all_that_is_learned_from_and_of_nothing_else():
    def hashed(*examples, part="train") -> str:
        return examples_hash({"train": [], "val": []} | {part: list(examples)})

    a, b = example([1], [2, 3]), example([4], [5])
    others = [
        hashed(a, b),
        hashed(a, b, part="val"),
        hashed(b, a),
        hashed(example([1], [2, 6]), b),
        hashed(example([1, 2], [3]), b),
        hashed(example([1], [2], [3]), b),
        hashed(a._replace(label=False), b),
        hashed(a._replace(weight=2.0), b),
        hashed(a._replace(rewards=(1.0, None)), b),
        hashed(a._replace(extra={"note": 2.0}), b),
    ]
    assert len(set(others)) == len(others)
    assert hashed(a._replace(where="elsewhere:7"), b) == hashed(a, b)


# ---- several sources, columns and labels ---------------------------------------------------------


def test_a_path_that_has_a_comma_becomes_absolute_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seed=1,beta=2").mkdir()
    assert absolute_sources("seed=1,beta=2") == str(tmp_path / "seed=1,beta=2")


def test_several_sources_are_given_by_commas_and_patterns(tmp_path):
    for name in "bac":
        write(tmp_path / f"{name}.jsonl", rated(name), rated())
    found = read(f"{tmp_path}/c.jsonl, {tmp_path}/[ab].jsonl", plain())
    assert [e.where for e in found] == [
        f"{tmp_path}/{name}.jsonl:{i}" for name in "cab" for i in (1, 2)
    ]
    prompts = read(f"{tmp_path}/c.jsonl, {tmp_path}/[ab].jsonl", plain(), "prompts")
    first = [f"{tmp_path}/{name}" for name in ("c.jsonl:1", "c.jsonl:2", "a.jsonl:1", "b.jsonl:1")]
    assert [e.where for e in prompts] == first, "online.py asks a prompt once"
    bad = write(tmp_path / "bad.jsonl", rated(), rated(label="?"))
    assert refusal(f"{tmp_path}/a.jsonl,{bad}", plain())[0].startswith(f"{bad}:2: label: ")


# ---- split and table -----------------------------------------------------------------------------


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
        "  prompt tokens: median 1, 95% below 2, longest 4",
        "  completion tokens: median 2, 95% below 4, longest 4",
        "  2 duplicates, 1 contradictions, 1 with note, which nothing reads, 1 with wieght, which "
        "nothing reads, 8 plain, 1 prompts cut, 2 completions cut",
        # arXiv 2402.01306 eq. 8: w_D n_D / (w_U n_U) in [1, 4/3]
        "  for this balance the KTO paper suggests kto.desirable_weight / kto.undesirable_weight "
        "from 0.60 to 0.80",
    ]


def test_one_file_is_split_by_prompt(tmp_path):
    prompts = [f"{p} {q}" for p in range(10) for q in range(10)]
    records = [rated(p, c) for c in "xyz" for p in prompts]
    train = write(tmp_path / "t.jsonl", *records)
    parts, table = parts_of(Data(train=train, split="2,1,1"))
    kept = [{e.keys[0] for e in part} for part in parts.values()]
    assert [*parts] == ["train", "val", "test"] and " ".join(table).count("examples of") == 3
    assert sum(map(len, parts.values())) == 300 and sum(map(len, kept)) == 100 and all(kept)
    assert "suggests" not in " ".join(table), "all are desirable"
    fewer = write(tmp_path / "f.jsonl", *random.Random(0).sample(records, 50))
    again, _ = parts_of(Data(train=fewer, split="0.5, 0.25, 0.25"))
    assert all({e.keys[0] for e in part} <= own for part, own in zip(again.values(), kept))
    for other in ("val", "test"):
        with pytest.raises(BadInput, match="^data.split: .* or data.val and data.test$"):
            parts_of(Data(train, split="2,1,1", **{other: train}))
    for wrong in ("1", "1,1,1,1", "1,x"):
        with pytest.raises(BadInput, match=f"^data.split: {wrong}: expected two or three numbers"):
            parts_of(Data(train, split=wrong))


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
    filled = with_limits(Data("t", max_prompt=given[0], max_completion=given[1]), context)
    assert (filled.max_prompt, filled.max_completion) == limits


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
        (["ax", "ay", "bx", "by"], [3, 2, 1, 0]),  # two pairs with the same two answers
        (["ax", "bx", "cx", "dy", "ex"], [3, 3, 3, 4, 3]),  # the same answer to several prompts
        (["ax", "ax", "by"], [2, 2, 0]),  # a record twice
        (["ax", "ay", "az"], [-1, -1, -1]),
        (["ax", "ay", "bx"], [-1, 2, 1]),  # for ax there is none, though both others have one
        (["ax"], [-1]),
        ([], []),
    ],
)
def test_a_mismatched_pair_takes_the_next_completion_of_another_prompt_and_text(
    pairs, mismatched_pairs
):
    assert data.mismatched_pairs(letters(*pairs)) == mismatched_pairs


def test_completions_are_compared_after_cutting(tmp_path):
    source = write(tmp_path / "d.jsonl", rated("a", "xyz1"), rated("b", "xyz2"), rated("c", "z"))
    assert data.mismatched_pairs(read(source, plain())) == [1, 2, 0]
    cut = read(source, plain(), max_completion=3)
    assert data.mismatched_pairs(cut) == [2, 2, 0], "a and b now say the same"


def test_a_batch_hands_out_own_and_mismatched_completions():
    found = [example([1, 2], [3, 4]), example([5], [6, 7, 8]), example([9], [3, 4])]
    batch = Batch(found, data.mismatched_pairs(found))
    assert batch.mismatched_pairs == [1, 2, 1]
    own, lent = batch.pack([0, 2]), batch.pack([2], mismatched=True)
    assert own.target_T.tolist() == [3, 4, 3, 4] and own.length_BK.tolist() == [[2], [2]]
    assert lent.token_N.tolist() == [9, 6, 7] and lent.target_T.tolist() == [6, 7, 8]
    for room, left in ((13, []), (12, [[2]])):
        micros = Batch(found, batch.mismatched_pairs, budget=data.Budget(room=room)).micro_batches
        assert [m.index for m in micros[1:]] == left, "5, 4 and 4 tokens: the longer of the two"


def test_examples_of_one_prompt_stay_together():
    a, b, c, d = ([1, 2], [3, 4]), ([5], [6]), ([1, 2], [7, 8, 9]), ([5], [3, 4])
    found = [example(*x) for x in (a, b, c, d)]
    batch = Batch(found, data.mismatched_pairs(found), budget=data.Budget(room=2 + 2 + 3))
    assert batch.micro_batches == [MicroBatch([0, 2]), MicroBatch([1, 3])]
    found = [example([1, 2, 3, 4, 5], [i, i, i]) for i in range(3)]
    batch = Batch(found, budget=data.Budget(room=5 + 3 + 3))
    assert sorted(len(m.index) for m in batch.micro_batches) == [1, 2], "the prompt counts, too"


def test_what_is_packed_ahead_is_what_would_be_packed_later():
    found = [example([i], [i, 7], label=i < 2) for i in range(4)]
    ahead, later = (Batch(found, data.mismatched_pairs(found)) for _ in range(2))
    ahead.pack_ahead()
    for mismatched in (False, True):
        both = [x.pack(x.micro_batches[0].index, mismatched).target_T for x in (ahead, later)]
        assert torch.equal(*both)
    assert len(ahead.packed) == 2


def test_a_steps_view_has_rewards_or_labels_numbers_of_prompts_and_the_records_fields():
    a = example([1], [2], rewards=(0.25, None), extra={"n": 1, "s": "x"})
    b = example([1], [3], label=False, extra={"n": 2, "s": "y"})
    c = example([4], [2], extra={"n": 4, "s": "z"})
    step = data.StepView(Batch([a, b, c]), torch.device("cpu"))
    assert step.reward.tolist() == [0.25, 0, 1] and step.group.tolist() == [0, 0, 1]
    assert step.extra("n").tolist() == [1, 2, 4] and step.extra("s") == ["x", "y", "z"]


# ---- micro-batches -----------------------------------------------------------------------------------------


def split(sizes, ranks, size, tokens) -> list[list[MicroBatch]]:
    """A pass's micro-batches of each rank, of examples that have a prompt each."""
    groups = [[i] for i in range(len(sizes))]
    budget = data.Budget(0, ranks, tokens or size, bool(tokens))
    return data.split_into_micro_batches(groups, sizes if tokens else [1] * len(sizes), budget)


def test_a_split_learns_each_example_once_within_its_budget_in_equally_many_micro_batches():
    """Fewer examples than ranks, sizes that ranks do not divide, over-long examples."""
    rng, fillers, alone = random.Random(1), 0, 0
    budgets = [(1, None), (3, None), (100, None), (None, 10), (None, 50), (None, 10_000)]
    for n, ranks, (size, tokens) in product((1, 2, 3, 5, 13, 32), (1, 2, 3, 5), budgets):
        sizes = [rng.randint(1, 40) for _ in range(n)]
        micros = split(sizes, ranks, size, tokens)
        real = [[m.index for m in mine if not m.filler] for mine in micros]
        assert sorted(chain(*chain(*real))) == list(range(n))
        assert len({len(mine) for mine in micros}) == 1
        assert len(micros[0]) == max(map(len, real)), "no round of fillers only"
        fillers += sum(len(micros[0]) - len(mine) for mine in real)
        for index in chain(*real):
            over = len(index) > size if size else sum(sizes[i] for i in index) > tokens
            assert not over or tokens and len(index) == 1
            alone += over
    assert fillers > 50 and alone > 50


def test_a_split_by_hand():
    filler = MicroBatch([0], True)
    assert split([9] * 5, 2, 2, None) == [
        [MicroBatch([0, 2]), MicroBatch([4])],
        [MicroBatch([1, 3]), filler],
    ]
    assert split([3, 9, 4, 2], 1, None, 6) == [
        [MicroBatch([1]), MicroBatch([2, 3]), MicroBatch([0])]
    ]
    assert split([3, 9, 4, 2], 2, None, 9) == [[MicroBatch([1])], [MicroBatch([0, 2, 3])]]
    assert split([7], 3, 1, None) == [[MicroBatch([0])], [filler], [filler]]
    assert split([3, 3], 1, None, 6) == [[MicroBatch([0, 1])]], "a budget may be used up"


# ---- order ---------------------------------------------------------------------------------------


def test_an_epochs_order_is_a_permutation_and_a_function_of_epoch_and_seed_only():
    def order(epoch, seed):
        return data.epoch_order(50, epoch, seed)

    first = order(3, 7)
    assert sorted(first) == list(range(50)) and first != list(range(50))
    torch.manual_seed(99)  # somebody draws in between
    torch.rand(3)
    assert order(3, 7) == first
    assert len({tuple(order(epoch, 7)) for epoch in range(10)}) == 10, "another order each epoch"
    assert order(3, 8) != first
    assert order(2, 8) != first, "or two seeds would repeat each other, an epoch apart"
    one, two = (data.next_items(list(range(50)), i, 50, 7) for i in (1, 2))
    assert sorted(one) == sorted(two) == list(range(50)) and one != two, (
        "another round, another order"
    )


def test_by_prompt_the_examples_of_a_prompt_come_together_in_every_epoch():
    found = [example([prompt], [i]) for i, prompt in enumerate([7, 5, 9] * 4)]

    def orders(begin=0, **kw) -> list[list[int]]:
        """Of nine epochs, each of one step."""
        cfg = kto.Settings("m", Data("t", group_by_prompt=True, **kw), batch_size=12)
        state = SimpleNamespace(step=begin)
        run = SimpleNamespace(cfg=cfg, objective=Objective(), state=state, budget=data.Budget())
        batches = data.step_batches(run, found, Plan(1, 9, begin, begin + 9, 1))
        return [[e.completions[0].item() for e in batch.examples] for batch in batches]

    shuffled = orders()
    for order in shuffled:
        assert sorted(order) == list(range(12))
        assert [i % 3 for i in order] == [i % 3 for i in order[::4] for _ in range(4)]
    assert len(set(map(tuple, shuffled))) == 9, "both prompts and their examples are shuffled"
    assert orders(9)[0] not in shuffled, "an iteration's orders are its own"
    assert orders(shuffle=False) == [[0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]] * 9

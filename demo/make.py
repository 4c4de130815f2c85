"""Make the files of a demo: tokenizer, base model, rated answers, pairs, demonstrations.

    python demo/make.py                             # sort words; uses the base model in demo/base if there is one
    rm -r demo/base; python demo/make.py            # makes the base model, too: three minutes on two cores
    python demo/make.py out/mixed --others 0.6      # ratings of which 60% are of another author's answers

The base model is trained on answers of careless authors. Half of their answers are right; in the other half one word
is missing, two neighbours are swapped, one word is doubled, or the order is reversed.

Then the base model answers prompts, and the checker rates its answers: thumbs up or thumbs down. KTO's baseline z is
then 0 in nearly every step: the mean of log pi/ref over the reference's own samples is at most 0 (Jensen's
inequality), and z is clamped there. With --others a share of the answers is replaced by rated answers of another
author, who makes fewer mistakes and writes in a form that the base model never uses. Then z is above 0, and the run is
sick (docs/health.md).

The files are bit-equal on equal machines, with equal versions and numbers of threads. `make` writes the files of any
other `Task`.
"""

import argparse
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import litgpt
import numpy as np
import torch
import transformers
from lightning.fabric import Fabric
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import model
import sampler
from demo.check import is_sorted, plain, quoted
from infra.settings import Sampling
from models import load
from models.hub import Source, litgpt_rows
from packing import PackedBatch, pack
from records import tokenizer as tokens

HERE = Path(__file__).parent
WORDS = """
    acorn apple bean beet carrot cherry corn date elder fennel fig garlic grape hazel iris
    kale kiwi leek lemon lime mango melon mint nut oat olive onion orange papaya pea peach
    pear plum pumpkin quince rice rye sage sloe turnip yam
""".split()
CONFIG = dict(
    model_type="gpt2", architectures=["GPT2LMHeadModel"], vocab_size=384, n_positions=64,
    n_embd=96, n_layer=3, n_head=4, n_inner=None, activation_function="gelu_new",
    layer_norm_epsilon=1e-5, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
    attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, dtype="float32",
)  # fmt: skip
END = "<|endoftext|>"
STEPS, BATCH, LR = 3000, 128, 2e-3
TRAIN_PROMPTS, VAL_PROMPTS, PER_PROMPT = 2000, 500, 3
CARE = 0.5  # how often the authors that the base model learns from are right
SECOND_CARE = 0.9  # how often the other author is right


def slip(answer: list[str], rng: random.Random) -> list[str]:
    """Make a mistake of one of four kinds in a right answer of two words or more. -> the wrong answer"""
    kind = rng.randrange(4)
    i = rng.randrange(len(answer) - 1)
    before, word, after = answer[:i], answer[i], answer[i + 1 :]
    if kind == 0:  # a missing word
        return [*before, *after]
    if kind == 1:  # two neighbours swapped
        return [*before, after[0], word, *after[1:]]
    if kind == 2:  # a doubled word
        return [*before, word, word, *after]
    return answer[::-1]  # the order reversed


class Task(NamedTuple):
    """The questions, the right answers, the mistakes of the authors, and their two forms of an answer."""

    words: list[str]  # the vocabulary of the task; the tokenizer learns it
    draw: Callable[[random.Random], list[str]]  # -> the words of one prompt
    prompt: Callable[[list[str]], str]  # words of a prompt -> its text
    answer: Callable[[list[str]], list[str]]  # words of a prompt -> words of the right answer
    check: Callable[[str, str], bool]  # (prompt, completion) -> whether it is right, in either form
    slip: Callable[[list[str], random.Random], list[str]] = slip  # right answer -> wrong answer
    form: Callable[[list[str]], str] = plain  # words of an answer -> text in the base model's form
    second_form: Callable[[list[str]], str] = quoted  # the same in the form of the other author

    def write(self, words: list[str], care: float, rng: random.Random) -> list[str]:
        """The words of an answer to the prompt of these words, by an author who is right with probability `care`."""
        answer = self.answer(words)
        if rng.random() < care:
            return answer
        return self.slip(answer, rng)

    def rate(self, prompt: str, completion: str) -> dict:
        """The rated record of an answer, by the checker."""
        label = self.check(prompt, completion)
        return {"prompt": prompt, "completion": completion, "label": label}


SORT = Task(
    words=WORDS,
    draw=lambda rng: rng.sample(WORDS, rng.randint(3, 6)),
    prompt=lambda words: f"sort: {' '.join(words)} =",
    answer=sorted,
    check=is_sorted,
)


def make(
    task: Task, folder: str | Path, others: float = 0.0, base: str | Path | None = None
) -> None:
    """Write the files of a demo into the folder: train, val, and train and val of _pairs and _demos (.jsonl).

    others: the share of the ratings that are of another author's answers. base: the folder of the base model (base/ in
    the folder, by default); an existing model is reused, otherwise it is made."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    base = Path(base or folder / "base")
    rng = random.Random(1)
    # Making the base model draws from rng, too. The other author has a separate generator, so
    # that their answers are the same whether the base model is made or exists.
    second_rng = random.Random(2)
    words: dict[str, list[str]] = {}  # prompt -> its words
    while len(words) < TRAIN_PROMPTS + VAL_PROMPTS:
        drawn = task.draw(rng)
        words.setdefault(task.prompt(drawn), drawn)
    train = list(words)[:TRAIN_PROMPTS]
    held_out = list(words)[TRAIN_PROMPTS:]
    if not (base / "model.safetensors").exists():
        base.mkdir(parents=True, exist_ok=True)
        make_tokenizer(task, base)
        make_base(task, base, rng, set(held_out))

    asked = [prompt for prompt in train for _ in range(PER_PROMPT)] + held_out * PER_PROMPT
    rated = [task.rate(prompt, completion) for prompt, completion in answers(base, asked)]
    for name, prompts in (("train", train), ("val", held_out)):
        in_split = set(prompts)
        records = [r for r in rated if r["prompt"] in in_split]
        write(folder, f"{name}_pairs", pairs(records))
        if name == "val":
            # Keep the first answer to each prompt, in the order of the last answers: demo/val.jsonl was made so.
            first = {}
            for record in reversed(records):
                first[record["prompt"]] = record
            records = list(first.values())[::-1]
        write(folder, name, [mix(task, r, words, others, second_rng) for r in records])
        demos = []
        for prompt in prompts:
            demos.append({"prompt": prompt, "completion": task.form(task.answer(words[prompt]))})
        write(folder, f"{name}_demos", demos)


def make_tokenizer(task: Task, folder: Path) -> None:
    """Write a byte-level BPE tokenizer, which can encode every text. A word of the task has one to three tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([task.prompt(task.words)] * 10, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "GPT2TokenizerFast", "bos_token": END, "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def make_base(task: Task, folder: Path, rng: random.Random, held_out: set[str]) -> None:
    """Write the base model: trained to predict the next token on answers of careless authors. It never sees the
    held-out prompts."""
    torch.manual_seed(1)
    tokenizer = tokens.Tokenizer(Source(folder))
    config = CONFIG | {"vocab_size": len(tokenizer.hf)}
    hf_config = transformers.GPT2Config(**config)
    gpt = model.GPT(load.litgpt_config(hf_config))
    gpt.apply(partial(litgpt.GPT._init_weights, gpt))
    gpt.lm_head.weight = gpt.transformer.wte.weight
    optimizer = torch.optim.AdamW(gpt.parameters(), LR, (0.9, 0.99), weight_decay=0.0)
    for step in range(1, STEPS + 1):
        batch = careless_batch(task, tokenizer, rng, held_out)
        loss = -gpt(batch).logps.sum() / batch.length_BK.sum()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, step / 100, 1.1 - step / STEPS)
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 250 == 0:
            print(f"step {step}/{STEPS}  loss {loss.item():.4f} nats a token", flush=True)
    hf = transformers.GPT2LMHeadModel(hf_config)
    theirs, ours = hf.state_dict(), gpt.state_dict()
    for name, rows in litgpt_rows(theirs).items():
        theirs[name].copy_(rows.of(ours[rows.name]))
    hf.save_pretrained(folder)


def careless_batch(task: Task, tokenizer, rng: random.Random, held_out: set[str]) -> PackedBatch:
    """BATCH prompts, none of them held out, with answers of careless authors."""
    prompts, completions = [], []
    while len(prompts) < BATCH:
        words = task.draw(rng)
        if task.prompt(words) not in held_out:
            prompts.append(task.prompt(words))
            completions.append(task.form(task.write(words, CARE, rng)))
    ids = list(tokenizer.encode(prompts + completions))
    prompt_ids = [np.array(prompt) for prompt in ids[:BATCH]]
    completion_ids = [(np.array([*completion, tokenizer.eos]),) for completion in ids[BATCH:]]
    return pack(prompt_ids, completion_ids)


def answers(base: Path, asked: list[str]) -> list[tuple[str, str]]:
    """(prompt, answer) for each of these prompts that the base model answers with EOS at the end, sampled with at
    most 24 tokens."""
    tokenizer = tokens.Tokenizer(Source(base))
    gpt = load.load_model(base)
    fabric = Fabric(accelerator="cpu", devices=1)
    args = Sampling(temperature=1.0, batch_size=500)
    ids = [np.array(prompt, dtype="int32") for prompt in tokenizer.encode(asked)]
    sampled = sampler.generate(fabric, gpt, ids, tokenizer, args, 24, seed=1)
    answered = []
    for prompt, answer in zip(asked, sampled):
        if answer[-1] == tokenizer.eos:
            answered.append((prompt, sampler.read_answer(tokenizer, answer)[0]))
    return answered


def mix(task: Task, record: dict, words: dict, others: float, rng: random.Random) -> dict:
    """This rated answer of the base model, or a rated answer of the other author to the same prompt. words: {prompt:
    its words}. others: the other author's share"""
    if rng.random() >= others:
        return record
    prompt = record["prompt"]
    answer = task.write(words[prompt], SECOND_CARE, rng)
    return task.rate(prompt, task.second_form(answer))


def pairs(records: list[dict]) -> list[dict]:
    """A pair for each prompt that has right and wrong answers: the first right one and the first wrong one."""
    first: dict[str, dict[bool, str]] = {}  # prompt -> label -> its first completion
    for r in records:
        first.setdefault(r["prompt"], {}).setdefault(r["label"], r["completion"])
    found = []
    for prompt, by_label in first.items():
        if len(by_label) == 2:
            found.append({"prompt": prompt, "chosen": by_label[True], "rejected": by_label[False]})
    return found


def write(folder: Path, name: str, records: list[dict]) -> None:
    """Write name.jsonl, and print how many records it has and how many of them are right."""
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    right = [r["label"] for r in records if "label" in r]
    share = f", {100 * sum(right) / len(right):.1f}% right" if right else ""
    print(f"{name}: {len(records)} records{share}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", default=HERE)
    parser.add_argument("--others", type=float, default=0.0, help="share of another author")
    args = parser.parse_args()
    make(SORT, args.folder, args.others, HERE / "base")

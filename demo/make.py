"""Make a demo from nothing: tokenizer, base model, rated answers, pairs, demonstrations.

    python demo/make.py    # sort words; keeps a base model that is there (demo/base)
    rm -r demo/base; python demo/make.py    # from nothing: three minutes on two cores

The base model learns from sloppy writers: half of their answers are right, half have a
slip (a word lost, two neighbours swapped, a word twice, the order reversed). What it
answers when asked is rated by the checker: honest on-policy thumbs up and down. In place
of 60% of these answers stand rated answers of a second writer, more careful, in a form
that the base model never uses. Without them KTO's baseline z would be 0 in every step:
on texts of its own the reference cannot be beaten on average (Jensen's inequality).

Bit-equal on equal machines, versions and threads. For another task see examples/reverse_digits.py.
"""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import litgpt
import numpy as np
import torch
from lightning.fabric import Fabric
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import generate  # noqa: E402
import model  # noqa: E402
from data import PackedBatch, pack  # noqa: E402
from demo.check import check, plain, quoted  # noqa: E402
from hub.export import export_weights  # noqa: E402
from hub.families import read_config  # noqa: E402
from records import tokenizer as tokens  # noqa: E402
from runs.settings import Sampling  # noqa: E402

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
CARE = 0.5  # how often the base model's writers are right
SECOND_SHARE, SECOND_CARE = 0.6, 0.9  # the second writer's ratings; how often right


def slip(answer: list[str], rng: random.Random) -> list[str]:
    """A right answer of two words or more, made wrong."""
    kind, i = rng.randrange(4), rng.randrange(len(answer) - 1)
    before, (word, *after) = answer[:i], answer[i:]
    if kind == 0:
        return [*before, *after]
    if kind == 1:
        return [*before, after[0], word, *after[1:]]
    if kind == 2:
        return [*before, word, word, *after]
    return answer[::-1]


class Task(NamedTuple):
    """What is asked and what is right; how writers go wrong, and how they put it."""

    words: list[str]  # all there are: the tokenizer learns them
    draw: Callable[[random.Random], list[str]]  # the words of one prompt
    prompt: Callable[[list[str]], str]  # these words as a text
    answer: Callable[[list[str]], list[str]]  # the words of the right answer
    check: Callable[[str, str], bool]  # (prompt, completion); takes both forms
    slip: Callable[[list[str], random.Random], list[str]] = slip
    form: Callable[[list[str]], str] = plain  # the base model's
    second_form: Callable[[list[str]], str] = quoted

    def write(self, words: list[str], care: float, rng: random.Random) -> list[str]:
        """The answer of a writer who is right so often."""
        answer = self.answer(words)
        return answer if rng.random() < care else self.slip(answer, rng)

    def rate(self, prompt: str, completion: str) -> dict:
        label = self.check(prompt, completion)
        return {"prompt": prompt, "completion": completion, "label": label}


SORT = Task(
    words=WORDS,
    draw=lambda rng: rng.sample(WORDS, rng.randint(3, 6)),
    prompt=lambda words: f"sort: {' '.join(words)} =",
    answer=sorted,
    check=check,
)


def make(task: Task, folder: str | Path) -> None:
    """Write a demo's files. The second writer has a generator of its own, so that data
    over a base model that was kept are those made from nothing."""
    folder = Path(folder)
    base, rng, second = folder / "base", random.Random(1), random.Random(2)
    words: dict[str, list[str]] = {}
    while len(words) < TRAIN_PROMPTS + VAL_PROMPTS:
        drawn = task.draw(rng)
        words.setdefault(task.prompt(drawn), drawn)
    seen, held_out = list(words)[:TRAIN_PROMPTS], list(words)[TRAIN_PROMPTS:]
    if not (base / "model.safetensors").exists():
        base.mkdir(parents=True, exist_ok=True)
        make_tokenizer(task, base)
        make_base(task, base, rng, set(held_out))

    asked = [p for p in seen for _ in range(PER_PROMPT)] + held_out * PER_PROMPT
    own = [task.rate(p, c) for p, c in answers(base, asked)]
    for name, prompts in (("train", seen), ("val", held_out)):
        part = set(prompts)
        records = [r for r in own if r["prompt"] in part]
        write(folder, f"{name}_pairs", pairs(records))
        if name == "val":  # the first answer to each
            records = list({r["prompt"]: r for r in reversed(records)}.values())[::-1]
        write(folder, name, [mix(task, r, words, second) for r in records])
        right = [(p, task.form(task.answer(words[p]))) for p in prompts]
        write(folder, f"{name}_demos", [{"prompt": p, "completion": c} for p, c in right])


def make_tokenizer(task: Task, folder: Path) -> None:
    """Byte-level BPE: every text has tokens, a word of the task one to three."""
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
    """Next-token training on sloppy answers; held-out prompts are never seen."""
    torch.manual_seed(1)
    tokenizer = tokens.Tokenizer(folder)
    config = CONFIG | {"vocab_size": tokenizer.n_vocab}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    sizes, *_ = read_config(folder)
    gpt = model.GPT(litgpt.Config(**sizes))
    gpt.apply(gpt._init_weights)
    gpt.lm_head.weight = gpt.transformer.wte.weight
    optimizer = torch.optim.AdamW(gpt.parameters(), LR, (0.9, 0.99), weight_decay=0.0)
    for step in range(1, STEPS + 1):
        rows = sloppy_batch(task, tokenizer, rng, held_out)
        loss = -gpt(rows).sum() / rows.length_BK.sum()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, step / 100, 1.1 - step / STEPS)
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 250 == 0:
            print(f"step {step}/{STEPS}  loss {loss.item():.4f} nats a token", flush=True)
    export_weights({k: p.detach() for k, p in gpt.unique_parameters().items()}, folder, folder)


def sloppy_batch(task: Task, tokenizer, rng: random.Random, held_out: set[str]) -> PackedBatch:
    prompts, completions = [], []
    while len(prompts) < BATCH:
        words = task.draw(rng)
        if task.prompt(words) not in held_out:
            prompts.append(task.prompt(words))
            completions.append(task.form(task.write(words, CARE, rng)))
    ids = list(tokenizer.encode(prompts + completions))
    targets = [(np.array([*c, tokenizer.eos]),) for c in ids[BATCH:]]
    return pack([np.array(p) for p in ids[:BATCH]], targets)


def answers(base: Path, asked: list[str]) -> list[tuple[str, str]]:
    """The base model's samples; one that never ended has no text of its own."""
    tokenizer, gpt = tokens.Tokenizer(base), model.load_model(base)
    fabric = Fabric(accelerator="cpu", devices=1)
    args = Sampling(temperature=1.0, batch_size=500)
    ids = [np.array(p, dtype="int32") for p in tokenizer.encode(asked)]
    sampled = generate.generate(fabric, gpt, ids, tokenizer, args, 24, seed=1)
    ended = [(p, a) for p, a in zip(asked, sampled) if a[-1] == tokenizer.eos]
    return [(p, generate.completion_text(tokenizer, a)) for p, a in ended]


def mix(task: Task, own: dict, words: dict, rng: random.Random) -> dict:
    """The base model's rated answer, or one of the second writer in its place."""
    if rng.random() >= SECOND_SHARE:
        return own
    answer = task.write(words[own["prompt"]], SECOND_CARE, rng)
    return task.rate(own["prompt"], task.second_form(answer))


def pairs(records: list[dict]) -> list[dict]:
    """The first right and the first wrong answer to each prompt answered both ways."""
    first: dict[str, dict[bool, str]] = {}
    for r in records:
        first.setdefault(r["prompt"], {}).setdefault(r["label"], r["completion"])
    both = ((p, c) for p, c in first.items() if len(c) == 2)
    return [{"prompt": p, "chosen": c[True], "rejected": c[False]} for p, c in both]


def write(folder: Path, name: str, records: list[dict]) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    right = [r["label"] for r in records if "label" in r]
    share = f", {100 * sum(right) / len(right):.1f}% right" if right else ""
    print(f"{name}: {len(records)} records{share}")


if __name__ == "__main__":
    make(SORT, HERE)

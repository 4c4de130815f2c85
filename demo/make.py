"""Make the demo from nothing: tokenizer, base model, rated completions, pairs of them.

    python demo/make.py            # about three minutes on two cores; bit-equal on equal versions and threads

The task is to sort words. The base learns from sloppy writers: half of their answers are right, half have a slip (a
word lost, two neighbours swapped, a word twice, the order reversed). What it answers when asked is then rated by
check.py: honest on-policy thumbs up and down.
"""

import json
import random
import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import litgpt  # noqa: E402
import numpy as np  # noqa: E402

import data  # noqa: E402
import generate  # noqa: E402
import model  # noqa: E402
from demo.check import check  # noqa: E402
from support import weights  # noqa: E402
from support.settings import Sampling  # noqa: E402
from support.tokenizer import Tokenizer as Texts  # noqa: E402

WORDS = (
    "acorn apple bean beet carrot cherry corn date elder fennel fig garlic grape hazel iris kale kiwi leek lemon lime "
    "mango melon mint nut oat olive onion orange papaya pea peach pear plum pumpkin quince rice rye sage sloe turnip "
    "yam"
).split()
CONFIG = dict(
    model_type="gpt2", architectures=["GPT2LMHeadModel"], vocab_size=384, n_positions=64, n_embd=96, n_layer=3,
    n_head=4, n_inner=None, activation_function="gelu_new", layer_norm_epsilon=1e-5, tie_word_embeddings=True,
    bos_token_id=0, eos_token_id=0, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, dtype="float32",
)  # fmt: skip
STEPS, BATCH = 3000, 128
TRAIN_PROMPTS, PER_PROMPT, VAL_PROMPTS = 2000, 3, 500


def prompt_of(words: list[str]) -> str:
    return f"sort: {' '.join(words)} ="


def answer_of(words: list[str]) -> str:
    return "".join(f" {word}" for word in words)


def sloppy(words: list[str], rng: random.Random) -> list[str]:
    """Sorted, or with one slip."""
    answer = sorted(words)
    if rng.random() < 0.5:
        return answer
    slip, i = rng.randrange(4), rng.randrange(len(answer) - 1)
    if slip == 0:
        del answer[i]
    elif slip == 1:
        answer[i], answer[i + 1] = answer[i + 1], answer[i]
    elif slip == 2:
        answer.insert(i, answer[i])
    else:
        answer.reverse()
    return answer


def words_of(rng: random.Random) -> list[str]:
    return rng.sample(WORDS, rng.randint(3, 6))


def make_tokenizer(folder: Path) -> None:
    """Byte-level BPE: every text has tokens, every word of the task is one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([prompt_of(WORDS)] * 10, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = dict(
        tokenizer_class="GPT2TokenizerFast", bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def make_base(folder: Path, tokenizer: Texts, rng: random.Random, held_out: set) -> torch.nn.Module:
    """Next-token training on sloppy answers; held-out prompts are never seen."""
    config = {k: v for k, v in CONFIG.items() if k != "vocab_size"}
    arguments = weights.FAMILIES["gpt2"][0](config | {"vocab_size": tokenizer.n_vocab})
    gpt = model.GPT(
        litgpt.Config(
            **arguments, vocab_size=tokenizer.n_vocab, padded_vocab_size=tokenizer.n_vocab
        )
    )
    gpt.apply(gpt._init_weights)
    gpt.lm_head.weight = gpt.transformer.wte.weight
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(1, STEPS + 1):
        prompts, answers = [], []
        while len(prompts) < BATCH:
            words = words_of(rng)
            if prompt_of(words) not in held_out:
                prompts.append(prompt_of(words))
                answers.append(answer_of(sloppy(words, rng)))
        ids = list(tokenizer.encode(prompts + answers))
        completions = [([*c, tokenizer.eos],) for c in ids[BATCH:]]
        rows = data.pack(
            [np.array(p) for p in ids[:BATCH]], [(np.array(c),) for (c,) in completions]
        )
        loss = -gpt(rows).sum() / rows.length_BK.sum()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, step / 100, 1.1 - step / STEPS)
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 250 == 0:
            print(f"step {step}/{STEPS}  loss {loss.item():.4f} nats a token", flush=True)
    (folder / "config.json").write_text(
        json.dumps(CONFIG | {"vocab_size": tokenizer.n_vocab}, indent=1) + "\n"
    )
    state = {name: p.detach() for name, p in gpt.unique_parameters().items()}
    weights.export(state, folder, folder)
    return gpt


def main() -> None:
    torch.manual_seed(1)
    rng, base = random.Random(1), HERE / "base"
    base.mkdir(exist_ok=True)
    make_tokenizer(base)
    tokenizer = Texts(base)
    prompts: list[str] = []
    while len(prompts) < TRAIN_PROMPTS + VAL_PROMPTS:
        prompt = prompt_of(words_of(rng))
        if prompt not in prompts:
            prompts.append(prompt)
    gpt = make_base(base, tokenizer, rng, held_out=set(prompts[TRAIN_PROMPTS:]))

    seen, held_out = prompts[:TRAIN_PROMPTS], prompts[TRAIN_PROMPTS:]
    asked = [p for p in seen for _ in range(PER_PROMPT)] + held_out * PER_PROMPT
    fabric, args = (
        Fabric(accelerator="cpu", devices=1),
        Sampling(temperature=1.0, batch_size=500),
    )
    ids = [np.array(p, dtype="int32") for p in tokenizer.encode(asked)]
    answers = generate.generate(fabric, gpt, ids, tokenizer, args, 24, seed=1)
    records = []
    for prompt, answer in zip(asked, answers):
        if answer[-1] == tokenizer.eos:  # an answer that never ended has no text of its own
            completion = generate.text(tokenizer, answer)
            records.append(
                {"prompt": prompt, "completion": completion, "label": check(prompt, completion)}
            )
    train = [r for r in records if r["prompt"] in set(seen)]
    val = [r for r in records if r["prompt"] in set(held_out)]
    write("train", train)
    write(
        "val", list({r["prompt"]: r for r in reversed(val)}.values())[::-1]
    )  # the first answer to each
    write("train_pairs", pairs(train))
    write("val_pairs", pairs(val))
    for name, asked in (("train_demos", seen), ("val_demos", held_out)):
        write(
            name, [{"prompt": p, "completion": answer_of(sorted(p.split()[1:-1]))} for p in asked]
        )


def pairs(records: list[dict]) -> list[dict]:
    """For each prompt that was answered both ways, its first right and its first wrong answer."""
    first: dict[str, dict[bool, str]] = {}
    for r in records:
        first.setdefault(r["prompt"], {}).setdefault(r["label"], r["completion"])
    return [
        {"prompt": p, "chosen": c[True], "rejected": c[False]}
        for p, c in first.items()
        if len(c) == 2
    ]


def write(name: str, records: list[dict]) -> None:
    (HERE / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    right = [r["label"] for r in records if "label" in r]
    print(
        f"{name}: {len(records)} records"
        + (f", {100 * sum(right) / len(right):.1f}% right" if right else "")
    )


if __name__ == "__main__":
    main()

"""Tokenizers and records that several test files share."""

import functools
import json
import shutil
import tempfile
from pathlib import Path

import tokenizers

from support.tokenizer import Tokenizer

FILES = Path(__file__).parent / "parity" / "tokenizer"
EOS = 0  # <|endoftext|> there; "a", "b", ... are 66, 67, ...; " best" is 262
CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def folder(path: Path, special=(), before="", after="", change=None, **config) -> Path:
    """A copy of the tokenizer; before, after: what its post-processor puts around a text."""
    shutil.copytree(FILES, path, dirs_exist_ok=True)
    t = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    t.add_special_tokens(list(special))
    if before or after:
        around = [s for s in (before, after) if s]
        t.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{before} $A {after}".strip(),
            special_tokens=[(s, t.token_to_id(s)) for s in around],
        )
    if change:
        change(t)
    t.save(str(path / "tokenizer.json"))
    old = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(old | config))
    return path


@functools.cache
def plain() -> Tokenizer:
    """EOS is 0, no BOS, no chat template."""
    return Tokenizer(FILES)


@functools.cache
def chat() -> Tokenizer:
    """The same with ChatML."""
    special = ("<|im_start|>", "<|im_end|>")
    with tempfile.TemporaryDirectory() as path:
        return Tokenizer(folder(Path(path), special, chat_template=CHATML))


@functools.cache
def bos() -> Tokenizer:
    """Its post-processor puts <s> (512) in front, and its template writes <s> as well."""
    template = "{{ bos_token }}" + CHATML
    with tempfile.TemporaryDirectory() as path:
        changes = dict(bos_token="<s>", chat_template=template)
        return Tokenizer(folder(Path(path), ("<s>",), "<s>", **changes))


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """The oracle: the tokenizers package, with nothing added."""
    return tokenizer.processor.encode(text, add_special_tokens=False).ids


def write(path: Path, *records) -> str:
    """A .jsonl file of records (or of raw lines)."""
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def bot(text: str) -> dict:
    return {"role": "assistant", "content": text}


def rated(prompt="p", completion="c", label=True, **more) -> dict:
    return {"prompt": prompt, "completion": completion, "label": label, **more}

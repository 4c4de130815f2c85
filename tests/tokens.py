"""Tokenizers and records that several test files share."""

import functools
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import tokenizers

from infra.settings import Data
from models.hub import Source
from records.examples import Example, load_examples
from records.tokenizer import Tokenizer

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
    edit_json(path / "tokenizer_config.json", **config)
    return path


def edit_json(file: Path, **changes) -> dict:
    """Change fields of a file that has one object. -> the new object"""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps(content))
    return content


@functools.cache
def plain() -> Tokenizer:
    """EOS is 0, no BOS, no chat template."""
    return Tokenizer(Source(FILES))


@functools.cache
def chat() -> Tokenizer:
    """The same with ChatML."""
    return _made(IM, chat_template=CHATML)


@functools.cache
def bos() -> Tokenizer:
    """Its post-processor puts <s> (512) in front, and its template writes <s> as well."""
    template = "{{ bos_token }}" + CHATML
    return _made(("<s>",), "<s>", bos_token="<s>", chat_template=template)


def _made(*args, **changes) -> Tokenizer:
    """The tokenizer of a folder with these changes."""
    with tempfile.TemporaryDirectory() as path:
        return Tokenizer(Source(folder(Path(path), *args, **changes)))


# ---- tokenizers in the form that the models publish, over small vocabularies ---------------------

CHAT = Path(__file__).parent / "parity" / "chat"
TEMPLATES = CHAT / "templates"
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPLIT = LLAMA3_SPLIT.replace("{1,3}", "")
IM, PHI = ("<|im_start|>", "<|im_end|>"), ("<|assistant|>", "<|system|>", "<|end|>", "<|user|>")
TURN = ("<start_of_turn>", "<end_of_turn>")
INST = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
INST += ("[TOOL_RESULTS]", "[/TOOL_RESULTS]")
HEADER = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")
SEEK = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")
EOS_SEEK = "<｜end▁of▁sentence｜>"
LEGACY, LATER = {"legacy": True}, {"legacy": False}
# name: form, chat template, special tokens, BOS, EOS, tokenizer_config.json
REAL = {
    "llama-2": ("prepend", "llama2", (), "<s>", "</s>", LATER),
    "mistral-v0.2": ("prepend", "mistral", (), "<s>", "</s>", LEGACY),
    "mistral-v0.3": ("first", "mistral3", INST, "<s>", "</s>", LATER),
    "zephyr": ("prepend", "zephyr", (), "<s>", "</s>", LEGACY),
    "tinyllama": ("prepend", "zephyr", (), "<s>", "</s>", LATER),
    "phi-3": ("prepend", "phi3", PHI, "<s>", "<|endoftext|>", LATER),
    "gemma": ("replace", "gemma", TURN, "<bos>", "<eos>", {}),
    "openhermes": ("prepend", "qwen2_5", IM, "<s>", "<|im_end|>", LEGACY),
    "llama-3": ("bytes", "llama3", HEADER, "<|begin_of_text|>", "<|eot_id|>", {}),
    "llama-3.1": ("bytes", "llama3_1", HEADER, "<|begin_of_text|>", "<|eot_id|>", {}),
    "qwen2.5": ("bytes", "qwen2_5", IM, None, "<|im_end|>", {}),
    "qwen3": ("bytes", "qwen3", IM, None, "<|im_end|>", {}),
    "r1-distill": ("bytes", "deepseek_r1_distill", SEEK, "<｜begin▁of▁sentence｜>", EOS_SEEK, {}),
}


def real(name: str, path: Path) -> Path:
    """A folder with this model's kind of tokenizer and its chat template."""
    form, template, special, bos, eos, more = REAL[name]
    t = _byte_level(bos) if form == "bytes" else _sentencepiece(form, bos, eos)
    rstrip = name == "phi-3"  # its turn markers swallow the blanks behind them
    added = [tokenizers.AddedToken(s, special=True, rstrip=rstrip) for s in special]
    t.add_special_tokens([s for s in (bos, eos) if s] + added)
    if bos:
        around = dict(single=f"{bos} $A", special_tokens=[(bos, t.token_to_id(bos))])
        t.post_processor = tokenizers.processors.TemplateProcessing(**around)
    path.mkdir(parents=True, exist_ok=True)
    t.save(str(path / "tokenizer.json"))
    kind = {"replace": "GemmaTokenizer", "bytes": "PreTrainedTokenizerFast"}
    kind = {"tokenizer_class": kind.get(form, "LlamaTokenizer")}
    config = kind | more | {"eos_token": eos} | ({"bos_token": bos} if bos else {})
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    shutil.copy(TEMPLATES / f"{template}.jinja", path / "chat_template.jinja")
    return path


def _sentencepiece(form: str, bos: str, eos: str):
    """Llama's: BPE over a whole text, blanks as ▁, unknown characters as bytes."""
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    found = json.loads((CHAT / "sentencepiece.json").read_text())
    lines = ["\n", "\n\n"] if form == "replace" else []  # Gemma has tokens for them
    first = ["<unk>", "<s>", "</s>"] if form != "replace" else ["<pad>", eos, bos, "<unk>"]
    vocab = [*first, *(f"<0x{i:02X}>" for i in range(256)), *lines, *found["vocab"]]
    merges = [tuple(m.split(" ")) for m in found["merges"]] + ([("\n", "\n")] if lines else [])
    ids = {v: i for i, v in enumerate(vocab)}
    bpe = models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    t = tokenizers.Tokenizer(bpe)
    blanks = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if form == "prepend":
        t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blanks])
    if form == "replace":
        t.normalizer = blanks
        t.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    if form == "first":
        t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    if form != "replace":
        steps.append(decoders.Strip(" ", 1, 0))
    t.decoder = decoders.Sequence(steps)
    return t


def _byte_level(bos: str | None):
    """Llama-3's and Qwen's."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    t = tokenizers.Tokenizer.from_file(str(FILES / "tokenizer.json"))
    t.normalizer = None if bos else normalizers.NFC()
    split = pre_tokenizers.Split(Regex(LLAMA3_SPLIT if bos else QWEN_SPLIT), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    t.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    return t


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """The oracle: transformers, with nothing added."""
    return tokenizer.hf.encode(text, add_special_tokens=False)


def load(source, tokenizer: Tokenizer, kind="rated", max_prompt=64, max_completion=64, **limits):
    """The examples of a file, and the counts of its table."""
    data = Data(str(source), max_prompt=max_prompt, max_completion=max_completion, **limits)
    return load_examples(str(source), tokenizer, kind, data)


def write(path: Path, *records) -> str:
    """A .jsonl file of records (or of raw lines)."""
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def bot(text: str) -> dict:
    return {"role": "assistant", "content": text}


def example(prompt, *completions, label=True, **rest) -> Example:
    """An example of these token ids."""
    prompt, *completions = (np.array(ids, "int32") for ids in (prompt, *completions))
    return Example(prompt, tuple(completions), label, where="made", **rest)


def rated(prompt="p", completion="c", label=True, **more) -> dict:
    return {"prompt": prompt, "completion": completion, "label": label, **more}

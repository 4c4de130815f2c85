"""Records to tokens to the Rows of a step. Knows no model and no loss.

Reading order: settings, one record of any known form -> prompt, completions and rating (FORMS), text -> tokens
(Tokenizer), a file -> Examples (load), Examples -> one step's Batch with its mismatched pairs, and its micro-batches
(cut), and a micro-batch -> Rows (pack).

Shape letters: B examples, K completions, N packed tokens, T targets.
"""

import csv
import functools
import gc
import hashlib
import io
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch


class BadInput(ValueError):
    """What the user gave is wrong. Its text is the whole message: a line for each fault, `file:line: field: reason`."""


class Failed(RuntimeError):
    """The run cannot go on, through no fault of what was given. Its text is the whole message."""


@dataclass
class Data:
    """Which records to learn from, and how they become tokens."""

    train: str
    """Rated or paired records: a .jsonl, .json, .csv or .parquet file, or a Hub id: id, id:split or id:config:split."""
    val: str | None = None
    """Records to validate on, in the same forms."""
    test: str | None = None
    """Records scored once at the end, with the final weights and with the best ones."""
    split: str | None = None
    """Cut data.train into train,val,test by these parts, e.g. 980,10,10. All ratings of one prompt stay together."""
    shuffle: bool = True
    """A new order each epoch, a function of seed and epoch only. False: file order."""
    max_prompt: int | None = None
    """Longest prompt in tokens; what is longer loses its head, BOS stays. Default: 1024, or half the context."""
    max_completion: int | None = None
    """Longest completion in tokens; what is longer loses its tail and its EOS. Default: likewise."""
    chat_template: str | None = None
    """A jinja file, for a tokenizer that brings no chat template (it wins over one that does)."""
    score_prompt: bool = False
    """Count the prompt's tokens, from the second on, in the log-probs of both completions."""


# ---- records --------------------------------------------------------------------------------------------------------


class Record(NamedTuple):
    """A record of any form, understood: texts, or dialogues that a chat template will render."""

    prompt: str | list[dict]
    completions: list[str | dict]  # one rated or demonstrated completion; or chosen, rejected
    label: bool | None  # None: a pair, or a demonstration
    rewards: tuple[float | None, float | None] = (None, None)  # of a pair's completions, where the record gives them


LABELS = {"chosen": True, "rejected": False, "desirable": True, "undesirable": False}
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}


class Fault(Exception):
    """`field: reason`, before the file and line are known."""


def _text(record: dict, field: str) -> str:
    if field not in record:
        raise Fault(f"{field}: missing")
    if not isinstance(record[field], str):
        raise Fault(f"{field}: expected a string, got {_short(record[field])}")
    return record[field]


def _short(value) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) < 50 else text[:46] + " ..."


def _message(value, field: str) -> dict:
    """One turn as {"role", "content"}, from either spelling; other keys are left for the template."""
    if not isinstance(value, dict):
        raise Fault(f"{field}: expected a message, got {_short(value)}")
    role = value.get("role", value.get("from"))
    content = value.get("content", value.get("value"))
    if not isinstance(role, str) or not isinstance(content, str):
        raise Fault(f'{field}: a message needs a string "role" and a string "content", got {_short(value)}')
    rest = {k: v for k, v in value.items() if k not in ("role", "from", "content", "value")}
    return {"role": ROLES.get(role.lower(), role.lower()), "content": content, **rest}


def _dialogue(value, field: str) -> str | list[dict]:
    """A prompt: a string, or a list of messages."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not value:
        raise Fault(f"{field}: expected a string or a list of messages, got {_short(value)}")
    return [_message(m, f"{field}[{i}]") for i, m in enumerate(value)]


def _answer(value, field: str) -> str | dict:
    """A completion: a string, or one assistant turn (alone or in a list)."""
    if isinstance(value, str):
        return value
    turns = _dialogue(value, field)
    if len(turns) != 1 or turns[0]["role"] != "assistant":
        raise Fault(f"{field}: expected one assistant message, got {_short(value)}")
    return turns[0]


def _label(value, field: str) -> bool:
    if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    if isinstance(value, str) and value in LABELS:
        return LABELS[value]
    raise Fault(f"{field}: expected true, false, 1, 0, {', '.join(LABELS)}; got {_short(value)}")


def _reward(record: dict, field: str) -> float | None:
    value = record.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e308:
        raise Fault(f"{field}: expected a finite number, got {_short(value)}")
    return float(value)


def _field(record: dict, *names: str) -> str:
    found = [name for name in names if name in record]
    if len(found) != 1:
        raise Fault(f"{names[0]}: missing" if not found else f"{' and '.join(found)}: give one, not both")
    return found[0]


def _rated(record: dict) -> Record:
    label = _field(record, "label", "preference")
    answer = _field(record, "completion", "response")
    if "prompt" not in record:
        raise Fault("prompt: missing")
    prompt = _dialogue(record["prompt"], "prompt")
    return Record(prompt, [_answer(record[answer], answer)], _label(record[label], label))


def _pair(record: dict) -> Record:
    fields = _field(record, "chosen", "chosen_response"), _field(record, "rejected", "rejected_response")
    rewards = _reward(record, "chosen_reward"), _reward(record, "rejected_reward")
    if "prompt" in record:
        prompt = _dialogue(record["prompt"], "prompt")
        return Record(prompt, [_answer(_last_turn(record[f], prompt, f), f) for f in fields], None, rewards)
    # no prompt: it is what two dialogues begin with
    chosen, rejected = (_dialogue(record[f], f) for f in fields)
    if isinstance(chosen, str) or isinstance(rejected, str) or len(chosen) < 2 or chosen[:-1] != rejected[:-1]:
        raise Fault("prompt: missing, and chosen and rejected are not two dialogues that differ in their last turn")
    return Record(chosen[:-1], [_answer([d[-1]], f) for d, f in zip((chosen, rejected), fields)], None, rewards)


def _last_turn(value, prompt, field: str):
    """Some sets repeat the prompt inside chosen and rejected, also where it is given as a string."""
    if isinstance(value, list) and len(value) > 1:
        turns = _dialogue(value, field)
        before = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        if turns[:-1] == before:
            return [turns[-1]]
        if before == turns[: len(before)]:
            raise Fault(f"{field}: more than one turn after the prompt")
    return value


def _demonstration(record: dict) -> Record:
    if "messages" in record or "conversations" in record:
        field = _field(record, "messages", "conversations")
        turns = _dialogue(record[field], field)
        if isinstance(turns, str) or len(turns) < 2:
            raise Fault(f"{field}: expected at least two messages")
        if isinstance(mask := record.get("mask"), str):
            mask = ROLES.get(mask.lower(), mask.lower())
            if turns[-1]["role"] == mask:
                raise Fault(f"{field}: the last turn is the masked role's ({mask}), so there is nothing to learn")
        if record.get("system"):
            turns = [{"role": "system", "content": _text(record, "system")}, *turns]
        return Record(turns[:-1], [_answer([turns[-1]], field)], None)
    if "input" in record and "instruction" in record:
        raise Fault("instruction: this form would be read as input and output only: make a prompt of it")
    if "input" in record:
        return Record(_text(record, "input"), [_text(record, "output")], None)
    if "prompt" not in record:
        raise Fault("prompt: missing")
    answer = _field(record, "completion", "response")
    return Record(_dialogue(record["prompt"], "prompt"), [_answer(record[answer], answer)], None)


PAIRED = ("chosen", "rejected", "chosen_response", "rejected_response")


def understand(record, kind: str) -> Record:
    """A raw record as a Record, strictly: raises Fault. `kind`, what the caller learns from: rated, paired or demos."""
    if not isinstance(record, dict):
        raise Fault(f"record: expected an object, got {_short(record)}")
    paired, rated = any(k in record for k in PAIRED), any(k in record for k in ("label", "preference"))
    if paired and rated:
        raise Fault("record: both a rating and a pair: which one is meant?")
    if kind == "demos":
        if rated and not _label(record[field := _field(record, "label", "preference")], field):
            raise Fault(f"{field}: undesirable: this completion is not to be imitated")
        return _demonstration(record)
    if paired:
        return _pair(record)
    if kind == "paired":
        raise Fault(
            "chosen: missing: pairs are needed here" + (", this is a rated record (see kto.py)" if rated else "")
        )
    return _rated(record)


def _no_twice(items):
    """json keeps the last of two equal keys silently; a second label must not win like that."""
    found = dict(items)
    if len(found) < len(items):
        (key, n), *_ = Counter(k for k, _ in items).most_common(1)
        raise Fault(f"{key}: given {n} times")
    return found


def local(source: str) -> Path:
    """A path as given; the demo's own files also from elsewhere."""
    path = Path(source).expanduser()
    return Path(__file__).parent / source if not path.exists() and source.startswith("demo/") else path


def read(source: str) -> Iterator[tuple[str, object]]:
    """(`file:line`, raw record or Fault) for each record of a file or a Hub data set."""
    path = local(source)
    if path.suffix in (".jsonl", ".json") and path.is_file():
        blob = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
        if path.suffix == ".json" and blob.lstrip()[:1] == b"[":
            try:
                rows = json.loads(blob, object_pairs_hook=_no_twice)
            except (ValueError, RecursionError, Fault) as e:
                raise BadInput(f"{source}{f':{e.lineno}' if hasattr(e, 'lineno') else ''}: json: {e}") from None
            yield from ((f"{source}:record {i}", row) for i, row in enumerate(rows, 1))
            return
        for i, line in enumerate(io.BytesIO(blob), 1):
            if line.strip():
                try:
                    yield f"{source}:{i}", json.loads(line.removesuffix(b"\n").decode(), object_pairs_hook=_no_twice)
                except Fault as e:
                    yield f"{source}:{i}", e
                except UnicodeDecodeError as e:
                    yield f"{source}:{i}", Fault(f"json: not UTF-8 at byte {e.start}")
                except (ValueError, RecursionError) as e:
                    yield f"{source}:{i}", Fault(f"json: {e}".replace("line 1 ", ""))  # the line is i
        return
    if path.suffix == ".csv" and path.is_file():
        yield from _csv(source, path)
        return
    yield from ((f"{source}:{i}", row) for i, row in enumerate(_table(source, path), 1))


def _csv(source: str, path: Path) -> Iterator[tuple[str, object]]:
    """(`file:line`, row) of a csv file. Cells are text, but ratings and rewards are spelled as in JSON (in any case).

    A reader that guesses types makes 1 of 01, nothing of NA, and shifts the columns where rows have a field too many.
    """
    csv.field_size_limit(2**31 - 1)  # its own limit is 128 KiB; a long document is no fault
    blob = path.read_bytes()
    try:
        rows = csv.reader(io.StringIO(blob.decode("utf-8-sig"), newline=""), strict=True)
        names = next(rows, [])
        _no_twice([(name, None) for name in names])
    except UnicodeDecodeError as e:
        raise BadInput(f"{source}:{blob[: e.start].count(10) + 1}: csv: not UTF-8") from None
    except (csv.Error, Fault) as e:
        raise BadInput(f"{source}:1: csv: {e}") from None

    def cell(name: str, text: str):
        if name not in ("label", "preference", "chosen_reward", "rejected_reward"):
            return text
        try:
            return json.loads(text.lower() or "null")
        except (ValueError, RecursionError):
            return text

    line = rows.line_num + 1
    try:
        for cells in rows:
            if len(cells) == len(names):
                yield f"{source}:{line}", {name: cell(name, text) for name, text in zip(names, cells)}
            elif cells:
                yield f"{source}:{line}", Fault(f"record: {len(cells)} fields, but {len(names)} column names")
            line = rows.line_num + 1  # a quoted field may hold line ends
    except csv.Error as e:
        yield f"{source}:{line}", Fault(f"csv: {e}")


def _table(source: str, path: Path):
    """Rows of a parquet file or of a Hub data set, through the datasets package (slow to import: only here)."""
    local, (name, *rest) = path.suffix == ".parquet" and path.is_file(), source.split(":")
    # a suffix alone makes no file: there are ids like org/set-2.5
    named = path.suffix in (".jsonl", ".json", ".csv", ".parquet") or path.is_file() or source.startswith((".", "/"))
    if not local and (named or name.count("/") > 1 or len(rest) > 2):
        raise BadInput(f"{source}: no such .jsonl, .json, .csv or .parquet file")
    import datasets

    try:
        if local:
            return datasets.load_dataset("parquet", data_files=str(path), split="train")
        return datasets.load_dataset(name, *rest[:-1], split=rest[-1] if rest else "train")
    except Exception as e:  # the hub client has a dozen ways to say that it could not
        if local:
            raise BadInput(f"{source}: not a parquet file that can be read ({type(e.__cause__ or e).__name__})") from e
        raise BadInput(
            f"{source}: no such file here, and not fetched from huggingface.co ({type(e).__name__}); without a "
            f"network, save the set as a .jsonl or .parquet file elsewhere and give its path"
        ) from e


# ---- tokens ---------------------------------------------------------------------------------------------------------


TEXTS = 4096  # encoded at a time


def _json(file: Path) -> dict:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as e:
        raise BadInput(f"{file}: {e}") from None
    if not isinstance(found, dict):
        raise BadInput(f"{file}: expected an object, got {_short(found)}")
    return found


class Tokenizer:
    """A folder's tokenizer.json (or .model) and chat template. EOS is required; BOS only if it adds one itself."""

    def __init__(self, folder: Path, chat_template: str | None = None):
        self.config = _json(folder / "tokenizer_config.json")
        try:
            if (folder / "tokenizer.json").is_file():
                from tokenizers import Tokenizer as Processor

                self.processor, self.fast = Processor.from_file(str(folder / "tokenizer.json")), True
            else:
                from litgpt.tokenizer import Tokenizer as Sentencepiece  # slow to import

                lit = Sentencepiece(folder)
                self.processor, self.fast = lit.processor, False
        except Exception as e:  # the tokenizers package raises bare Exception
            reason = str(e) or type(e).__name__
            raise BadInput(f"{folder}: no usable tokenizer.json or tokenizer.model ({reason})") from None
        # litgpt's rule for BOS also looks at the folder's name: a copy elsewhere would give other tokens
        adds = self.config.get("add_bos_token", self.config.get("tokenizer_class") == "LlamaTokenizer")
        if self.fast:
            self.processor.no_padding()
            self.processor.no_truncation()
            self.bos, self.eos = (self._special(folder, name) for name in ("bos", "eos"))
            # what its post-processor puts before a text; the text itself may be unknown, and that token be BOS
            first, bare = (self.processor.encode("a", add_special_tokens=on).ids[:1] for on in (True, False))
            adds = adds or first == [self.bos] != bare
            self.n_vocab = self.processor.get_vocab_size(with_added_tokens=True)
        else:
            self.bos, self.eos, self.n_vocab = lit.bos_id, lit.eos_id, lit.vocab_size
        if self.eos is None:
            raise BadInput(f"{folder}/tokenizer_config.json: eos_token: missing: a completion could never end")
        self.adds_bos = self.bos is not None and bool(adds)
        self.template = self._template(folder, chat_template)

    def _special(self, folder: Path, name: str) -> int | None:
        """The id of BOS or EOS: by the tokenizer's own word, else the model's (GPT-2's on the Hub is only there)."""
        token = self.config.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            if (known := self.processor.token_to_id(token)) is None:
                raise BadInput(f"{folder}/tokenizer_config.json: {name}_token: {token!r} is no token of tokenizer.json")
            return known
        for file in ("generation_config.json", "config.json"):
            if (i := _json(folder / file).get(f"{name}_token_id")) is not None:
                return i[0] if isinstance(i, list) else i
        return None

    def _template(self, folder: Path, chat_template: str | None):
        text = self.config.get("chat_template")
        if isinstance(text, list):  # several named ones
            text = {t["name"]: t["template"] for t in text}.get("default")
        if chat_template and not Path(chat_template).is_file():
            raise BadInput(f"data.chat_template: {chat_template}: no such file")
        for file in (folder / "chat_template.jinja", Path(chat_template or "")):
            if file.is_file():
                text = file.read_text(encoding="utf-8")
        if text is None:
            return None
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message):
            raise jinja2.TemplateError(message)

        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        # the sandbox itself raises at the second step only: a lone {{ x.__class__ }} would render as nothing
        env.unsafe_undefined = lambda obj, name: refuse(f"{name}: not allowed here")
        env.filters["tojson"] = lambda x, **kw: json.dumps(x, ensure_ascii=False, **kw)
        env.globals["raise_exception"] = refuse  # but no strftime_now: today's date would make runs differ
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            token = self.config.get(name)
            env.globals[name] = token.get("content") if isinstance(token, dict) else token or ""
        try:
            return env.from_string(text)
        except jinja2.TemplateError as e:
            raise BadInput(f"{chat_template or folder}: chat template: {e}") from None

    def render(self, record: Record) -> tuple[str, list[str], bool]:
        """(prompt text, completion texts, whether a template made them). Raises Fault."""
        if isinstance(record.prompt, str) and all(isinstance(c, str) for c in record.completions):
            return record.prompt, list(record.completions), False
        if self.template is None:
            raise Fault("prompt: messages, but the tokenizer has no chat template: give data.chat_template")
        prompt = record.prompt if isinstance(record.prompt, list) else [{"role": "user", "content": record.prompt}]
        answers = [c if isinstance(c, dict) else {"role": "assistant", "content": c} for c in record.completions]
        try:
            head = self.template.render(messages=prompt, add_generation_prompt=True)
            wholes = [self.template.render(messages=[*prompt, a], add_generation_prompt=False) for a in answers]
        except Exception as e:  # a template is a program: anything may come out of it
            raise Fault(f"chat template: {str(e).splitlines()[0] if str(e) else type(e).__name__}") from None
        for whole in wholes:
            if not whole.startswith(head):
                raise Fault("chat template: the rendered dialogue does not begin with the rendered prompt")
        return head, [whole[len(head) :] for whole in wholes], True

    def same(self, other: "Tokenizer") -> bool:
        """Whether both turn every text into the same ids."""
        if self.fast and other.fast:
            return self.processor.to_str() == other.processor.to_str()
        return (
            self.fast == other.fast
            and self.processor.serialized_model_proto() == other.processor.serialized_model_proto()
        )

    def encode(self, texts: list[str]) -> Iterator[list[int]]:
        """Token ids, nothing added. In parallel, some at a time: an encoding also holds its text, offsets and masks."""
        for i in range(0, len(texts), TEXTS):
            some = texts[i : i + TEXTS]
            if self.fast:
                yield from (e.ids for e in self.processor.encode_batch(some, add_special_tokens=False))
            else:
                yield from self.processor.encode(some)

    def prompt(self, ids: list[int]) -> list[int]:
        """With BOS in front, once, if this tokenizer adds one."""
        return [self.bos, *ids] if self.adds_bos and ids[:1] != [self.bos] else ids

    def decode(self, ids) -> str:
        return self.processor.decode([int(i) for i in ids])


# ---- examples -------------------------------------------------------------------------------------------------------


class Example(NamedTuple):
    """One prompt with its completion (rated, demonstrated) or its two (chosen, rejected), as int32 token ids."""

    prompt: np.ndarray
    completions: tuple[np.ndarray, ...]
    label: bool  # desirable; True where nothing was rated
    rewards: tuple[float | None, float | None]
    where: str  # file:line

    @property
    def keys(self) -> tuple[bytes, bytes]:
        """Equal prompts and equal completions have equal keys."""
        return self.prompt.tobytes(), self.completions[0].tobytes()


def load(
    source: str, tokenizer: Tokenizer, kind: str, max_prompt: int, max_completion: int
) -> tuple[list[Example], Counter]:
    """All examples of a source, and counts of what was cut. `kind`: rated (pairs are split in two), paired, demos.

    Raises BadInput with one line for each of the first 20 bad records; a label is never guessed.
    """
    faults, texts, records = [], [], []
    for where, raw in read(source):
        try:
            if isinstance(raw, Fault):
                raise raw
            record = understand(raw, kind)
            prompt, completions, chat = tokenizer.render(record)
            if not prompt and not tokenizer.adds_bos:
                raise Fault("prompt: empty, and this tokenizer adds no BOS: nothing would predict the first token")
            try:
                "".join((prompt, *completions)).encode()
            except UnicodeEncodeError:
                raise Fault("record: half of a surrogate pair (\\ud800-\\udfff) is no text") from None
            if chat and not all(completions):
                raise Fault("completion: the chat template renders it as nothing")
        except (Fault, RecursionError) as e:
            faults.append(" ".join(f"{where}: {e}".splitlines()))
            if len(faults) == 20:
                break
            continue
        records.append((where, record, chat, len(completions)))
        texts += [prompt, *completions]
    if faults:
        raise BadInput("\n".join(faults))
    if not records:
        raise BadInput(f"{source}: no records")
    ids = tokenizer.encode(texts)
    examples, cuts = [], Counter()
    for where, record, chat, k in records:
        prompt = tokenizer.prompt(next(ids))
        if len(prompt) > max_prompt:  # the head goes, BOS stays
            keep_bos = prompt[0] == tokenizer.bos and max_prompt > 1  # its own, or one that the template wrote
            prompt = [tokenizer.bos, *prompt[-(max_prompt - 1) :]] if keep_bos else prompt[-max_prompt:]
            cuts["prompts cut"] += 1
        completions = []
        for _ in range(k):
            completion = next(ids)
            if not chat:
                completion = [*completion, tokenizer.eos]
            cuts["completions cut"] += len(completion) > max_completion
            completions.append(np.array(completion[:max_completion], dtype=np.int32))
        if not prompt or not all(map(len, completions)):  # a normaliser may strip a text to nothing
            raise BadInput(f"{where}: {'completion' if prompt else 'prompt'}: not empty, but no tokens are left of it")
        prompt = np.array(prompt, dtype=np.int32)
        if record.label is None and kind == "rated":  # a pair is two ratings that share a prompt
            examples += [
                Example(prompt, (c,), good, (None, None), where) for c, good in zip(completions, (True, False))
            ]
        else:
            examples.append(Example(prompt, tuple(completions), record.label is not False, record.rewards, where))
    return examples, cuts


def split(examples: list[Example], parts: str) -> list[list[Example]]:
    """Into train, val, test by a hash of the prompt: order and other prompts do not matter, ratings stay together."""
    try:
        sizes = [float(p) for p in parts.split(",")]
    except ValueError:
        sizes = []
    if len(sizes) not in (2, 3) or min(sizes) < 0 or sizes[0] <= 0 or not math.isfinite(sum(sizes)):
        raise BadInput(f"data.split: expected two or three parts like 980,10,10; got {parts}")
    edges, out = np.cumsum(sizes) / sum(sizes), [[], [], []]
    for e in examples:
        u = int.from_bytes(hashlib.sha256(e.prompt.tobytes()).digest()[:8], "big") / 2**64
        out[int(np.searchsorted(edges, u, side="right"))].append(e)
    return out


def table(name: str, examples: list[Example], cuts: Counter) -> str:
    """What is about to be learned from, for a person to read before it starts."""
    n, k = len(examples), len(examples[0].completions)
    good = sum(e.label for e in examples)
    prompts = [len(e.prompt) for e in examples]
    completions = [len(c) for e in examples for c in e.completions]
    seen = Counter((*e.keys, e.label, e.completions[-1].tobytes()) for e in examples)
    labels: dict[tuple, set] = {}
    for e in examples:
        labels.setdefault(e.keys, set()).add(e.label)
    lines = [f"{name}: {n:,} {'pairs' if k == 2 else 'examples'} of {len({e.keys[0] for e in examples}):,} prompts"]
    if k == 1:
        lines[0] += f", {good:,} desirable, {n - good:,} undesirable"
    for what, lengths in (("prompt", prompts), ("completion", completions)):
        q = np.percentile(lengths, [50, 95, 100]).astype(int)
        lines.append(f"  {what} tokens: median {q[0]}, 95% below {q[1]}, longest {q[2]}")
    extra = {"duplicates": n - len(seen), "contradictions": sum(len(x) > 1 for x in labels.values()), **cuts}
    lines.append("  " + ", ".join(f"{v:,} {what}" for what, v in extra.items()))
    if k == 1 and 0 < good < n:
        ratio = (n - good) / good  # arXiv 2402.01306 eq. 8: w_D n_D / (w_U n_U) in [1, 4/3]; the smaller weight is 1
        advice = f"desirable {max(1, ratio):.2f} to {4 / 3 * ratio:.2f}, undesirable 1"
        if ratio < 3 / 4:
            advice = f"desirable 1, undesirable {3 / 4 / ratio:.2f} to {1 / ratio:.2f}"
        lines.append(f"  the paper's rule for this balance gives weights: {advice}")
    return "\n".join(lines)


def splits(d: Data, tokenizer: Tokenizer, kind: str, context: int, say) -> dict[str, list[Example]]:
    """train, val and test, with a table of what each holds. Fills in d.max_prompt and d.max_completion."""
    d.max_prompt = d.max_prompt or max(1, min(1024, context // 2, context - (d.max_completion or 1)))
    d.max_completion = d.max_completion or min(1024, context - d.max_prompt)
    if d.max_prompt + d.max_completion > context or d.max_completion < 1:
        raise BadInput(
            f"data: max_prompt {d.max_prompt} + max_completion {d.max_completion} exceed the context of {context}"
        )
    parts, cuts = {"train": [], "val": [], "test": []}, {}
    gc.disable()  # millions of small objects and no cycle among them: to look for some would be a third of the time
    try:
        for name in parts:
            if source := getattr(d, name):
                parts[name], cuts[name] = load(source, tokenizer, kind, d.max_prompt, d.max_completion)
    finally:
        gc.enable()
    if d.split:
        if d.val or d.test:
            raise BadInput("data.split: it cuts data.train in parts; give it, or data.val and data.test, not both")
        parts = dict(zip(parts, split(parts["train"], d.split)))
    for name, examples in parts.items():
        if examples:
            say(table(name, examples, cuts.get(name) or Counter()))
    return parts


# ---- a step's batch -------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """The examples of a step (or of a whole validation split), the same on every rank. A slot is a place in it."""

    examples: list[Example]
    partners: list[int] | None  # slot -> the slot whose completion it borrows; -1 where there is none
    desirable_G: torch.Tensor
    score_prompt: bool

    def rows(self, slots: list[int], own: bool = True, borrowed: bool = False) -> "Rows":
        """Prompts of these slots with their own completions, the borrowed one (K = last), or both."""
        prompts, completions = [], []
        for s in slots:
            e, mine = self.examples[s], ()
            if borrowed:  # where there is no partner any completion will do: it is left out of the mean
                mine = (self.examples[max(self.partners[s], 0)].completions[0],)
            prompts.append(e.prompt)
            completions.append((e.completions if own else ()) + mine)
        return pack(prompts, completions, self.score_prompt)

    def size(self, slot: int, borrowed: bool = False) -> int:
        """Tokens of a slot in its Rows."""
        e, more = self.examples[slot], ()
        if borrowed and self.partners is not None:
            more = self.examples[max(self.partners[slot], 0)].completions[:1]
        return len(e.prompt) + sum(map(len, (*e.completions, *more)))


def mismatched(examples: list[Example]) -> list[int]:
    """Circular shift: for each slot the next one, in order, with another prompt and another completion; -1 if none.

    Shifting by one and hoping is not enough: two ratings of one prompt stand side by side, and y' would be y itself.
    """
    keys = [e.keys for e in examples]
    n, partners = len(keys), []
    for i, (prompt, completion) in enumerate(keys):
        others = ((i + d) % n for d in range(1, n))
        partners.append(next((j for j in others if keys[j][0] != prompt and keys[j][1] != completion), -1))
    return partners


class Micro(NamedTuple):
    slots: list[int]
    weight: float  # 0: a filler that keeps a rank in step with the others


def deal(sizes: list[int], ranks: int, by_tokens: bool) -> list[list[int]]:
    """Each rank's share of the slots: in turn, or balanced by tokens (longest first, to the lightest)."""
    if not by_tokens:
        return [list(range(rank, len(sizes), ranks)) for rank in range(ranks)]
    shares, load_R = [[] for _ in range(ranks)], [0] * ranks
    for slot in sorted(range(len(sizes)), key=lambda slot: -sizes[slot]):
        lightest = load_R.index(min(load_R))
        shares[lightest].append(slot)
        load_R[lightest] += sizes[slot]
    return shares


def cut(
    sizes: list[int], ranks: int, micro_batch_size: int | None, micro_batch_tokens: int | None, shares=None
) -> list[list[Micro]]:
    """Micro-batches of each rank, equally many on all: collectives inside a sharded forward must meet.

    Slots of a share (see deal) go by number, or by tokens into the first micro-batch with room. Passes over the same
    batch that hand values on must be cut from the same `shares`: a rank has the values of its own slots only.
    """
    shares = shares or deal(sizes, ranks, micro_batch_tokens is not None)
    micros: list[list[list[int]]] = [[] for _ in range(ranks)]
    for share, mine in zip(shares, micros):
        if micro_batch_tokens is None:
            mine += [share[i : i + micro_batch_size] for i in range(0, len(share), micro_batch_size)]
            continue
        room: list[int] = []
        for slot in sorted(share, key=lambda slot: -sizes[slot]):  # an example over the budget goes alone
            i = next((i for i, free in enumerate(room) if free >= sizes[slot]), len(mine))
            if i == len(mine):
                mine.append([])
                room.append(micro_batch_tokens)
            mine[i].append(slot)
            room[i] -= sizes[slot]
    most = max(map(len, micros))
    return [[Micro(sorted(m), 1.0) for m in mine] + [Micro([0], 0.0)] * (most - len(mine)) for mine in micros]


@functools.lru_cache(maxsize=2)
def order(n: int, epoch: int, seed: int, shuffle: bool) -> list[int]:
    """An epoch's order: a function of its arguments alone, so a resume needs no sampler state."""
    if not shuffle:
        return list(range(n))
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed * 1000003 + epoch)).tolist()


# ---- Rows -----------------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """B prompts, each followed by its K completions, in one sequence of N tokens without padding.

    A completion's positions continue its prompt's. A completion's last token is never an input: nothing follows it.
    """

    token_N: torch.Tensor
    position_N: torch.Tensor
    example_N: torch.Tensor
    branch_N: torch.Tensor  # 0: prompt, 1..K: completion; a token sees its prompt and its own branch, up to itself
    source_T: torch.Tensor  # which token's hidden state predicts
    target_T: torch.Tensor  # what it should predict
    segment_T: torch.Tensor  # for whom: (K + 1) * example + completion; the last of K + 1 is the scored prompt
    length_BK: torch.Tensor  # scored tokens
    parts: tuple[tuple[int, ...], ...]  # per example: tokens of its prompt and of each completion, in the sequence

    def to(self, device) -> "Rows":
        return Rows(*(x.to(device, non_blocking=True) for x in self[:-1]), self.parts)

    def contents(self) -> list[list[bytes]]:
        """By example and completion: a digest of (prompt, completion), of their token ids."""
        token, target, at, t, out = self.token_N.cpu().numpy(), self.target_T.cpu().numpy(), 0, 0, []
        for (prompt, *rest), length in zip(self.parts, self.length_BK.tolist()):
            head, row = token[at : at + prompt].tobytes(), []
            for n in rest:
                tail = target[t : t + n + 1].tobytes()
                row.append(hashlib.blake2b(len(head).to_bytes(8, "big") + head + tail, digest_size=16).digest())
                t += n + 1
            t += length[0] - rest[0] - 1  # the scored prompt
            at += prompt + sum(rest)
            out.append(row)
        return out

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each example in the sequence."""
        return tuple(map(sum, self.parts))


def pack(prompts, completions, score_prompt: bool = False) -> Rows:
    """prompts: B id arrays; completions: B tuples of K id arrays, all non-empty."""
    token, position, example, branch, source, target, segment, length, parts = ([] for _ in range(9))
    start, K = 0, len(completions[0])
    for b, (p, cs) in enumerate(zip(prompts, completions)):
        inputs = [p, *(c[:-1] for c in cs)]
        parts.append(tuple(map(len, inputs)))
        size = sum(parts[-1])
        token += inputs
        position += [np.arange(len(p)), *(np.arange(len(p), len(p) + len(c) - 1) for c in cs)]
        example.append(np.full(size, b))
        branch += [np.full(len(x), k) for k, x in enumerate(inputs)]
        at, last = start + len(p), start + len(p) - 1
        for k, c in enumerate(cs):
            source += [np.array([last]), np.arange(at, at + len(c) - 1)]  # the prompt's end predicts the first token
            target.append(c)
            segment.append(np.full(len(c), b * (K + 1) + k))
            at += len(c) - 1
        if score_prompt:
            source.append(np.arange(start, last))
            target.append(p[1:])
            segment.append(np.full(len(p) - 1, b * (K + 1) + K))
        length.append([len(c) + (len(p) - 1 if score_prompt else 0) for c in cs])
        start += size
    columns = (token, position, example, branch, source, target, segment)
    arrays = [torch.from_numpy(np.concatenate(x).astype(np.int64)) for x in columns]
    return Rows(*arrays, torch.tensor(length), tuple(parts))

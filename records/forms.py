"""One record of any known form -> prompt, completions and rating; and the files that hold records.
A record is understood, or refused by the name of its field (Fault), never guessed."""

import contextlib
import csv
import glob
import gzip
import io
import json
import math
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from runs.errors import BadInput, printable
from runs.files import find_path

LABELS = {"chosen": True, "rejected": False, "desirable": True, "undesirable": False}
KNOWN = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
ROLES |= {"observation": "tool", **{role: role for role in KNOWN}}
RATING = ("label", "preference", "kto_tag")
PAIR = ("chosen", "rejected", "chosen_response", "rejected_response")
PROMPT = ("prompt", "instruction", "question")
ANSWER = ("completion", "response", "output")
DIALOGUE = ("messages", "conversations")
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
# the columns of a csv file that are read as JSON; all others are text
CSV_JSON = (*RATING, "chosen_reward", "rejected_reward", "weight")


class Record(NamedTuple):
    """A record of any form, understood: texts, or dialogues that a chat template will render."""

    prompt: str | list[dict]
    completions: list[str | dict]  # one rated or demonstrated completion; or chosen, rejected
    label: bool | None  # None: a pair, or a demonstration
    rewards: tuple[float | None, float | None] = (None, None)  # of a pair's completions, if given
    weight: float = 1.0
    scored: int | None = None  # from which turn of the prompt on turns are the completion's too
    tools: list[dict] | None = None  # for the chat template, as
    template_kwargs: dict = {}  # these are
    extra: dict[str, str | float] = {}  # the fields that data.extra names
    ignored: tuple[str, ...] = ()  # the names of fields that nothing reads


class Fault(BadInput):
    """`field: reason`, before the file and line are known."""


# ---- one record ----------------------------------------------------------------------------------


def understand_record(record, kind: str, extra=(), columns=()) -> Record:
    """A raw record (or its Fault) as a Record. `kind`, what the caller learns from: rated, paired,
    demonstrations or prompts (then all else is left aside). `extra`: fields that every record must
    have besides. `columns`: {the record's name of a field: ours}. Raises Fault."""
    if isinstance(record, Fault):
        raise record
    if not isinstance(record, dict):
        raise Fault(f"record: expected an object, got {short_json(record)}")
    if columns:
        record = _unique([(columns.get(name, name), value) for name, value in record.items()])
    fields = dict(record)  # whoever reads a field takes it out: what is left was ignored
    understood = _form(fields, kind)
    weight = _number(fields.pop("weight", 1), "weight", "a finite number, at least 0", lowest=0)
    values = {name: _extra(record, name) for name in extra}
    ignored = tuple(name for name in fields if name not in values)
    return understood._replace(weight=weight, extra=values, ignored=ignored)


def _form(fields: dict, kind: str) -> Record:
    system = _text(fields.pop("system", None) or "", "system")
    tools = _for_template(fields, "tools", list)
    more = _for_template(fields, "chat_template_kwargs", dict) or {}
    record = _completed(fields, kind)
    if system:
        turns = as_turns(record.prompt)
        if turns[0]["role"] == "system":
            raise Fault("system: given beside a system message: which one is meant?")
        scored = None if record.scored is None else record.scored + 1
        turns = [{"role": "system", "content": system}, *turns]
        record = record._replace(prompt=turns, scored=scored)
    if tools and all(isinstance(x, str) for x in (record.prompt, *record.completions)):
        raise Fault("tools: no messages here that a chat template would render them with")
    if tools or more:
        record = record._replace(tools=tools, template_kwargs=more)
    return record


def _completed(fields: dict, kind: str) -> Record:
    if kind == "prompts":
        prompt = _prompt(fields)
        fields.clear()
        return Record(prompt, [], None)
    paired, rated = _has(fields, PAIR), _has(fields, RATING)
    if paired and rated:
        raise Fault("record: both a rating and a pair: which one is meant?")
    shown, label = kind == "demonstrations", None
    if paired and not shown:
        return _pair(fields)
    if kind == "paired":
        hint = ", this is a rated record (see kto.py)" if rated else ""
        raise Fault(f"chosen: missing: pairs are needed here{hint}")
    if rated or not shown:
        value, field = _take(fields, *RATING)
        label = _label(value, field)
    if shown and label is False:
        raise Fault(f"{field}: undesirable: this completion is not to be imitated")
    if _has(fields, DIALOGUE) and (shown or not _has(fields, PROMPT)):
        record = _conversation(fields)
    elif shown and "input" in fields and not _has(fields, PROMPT):
        prompt = _text(*_take(fields, "input"))
        record = Record(prompt, [_text(*_take(fields, "output"))], None)
    else:
        record = _single(_prompt(fields), *_take(fields, *ANSWER))
    return record if shown else record._replace(label=label)


def _pair(fields: dict) -> Record:
    pair = [_take(fields, name, f"{name}_response") for name in ("chosen", "rejected")]
    rewards = _reward(fields, "chosen_reward"), _reward(fields, "rejected_reward")
    if _has(fields, PROMPT):
        prompt = _prompt(fields)
    elif _has(fields, DIALOGUE):
        prompt = _dialogue(*_take(fields, *DIALOGUE))
    else:  # it is what two dialogues begin with
        chosen, rejected = (_dialogue(*x) for x in pair)
        texts = str in (type(chosen), type(rejected))
        if texts or len(chosen) < 2 or chosen[:-1] != rejected[:-1]:
            why = "chosen and rejected are not two dialogues that differ in their last turn"
            raise Fault(f"prompt: missing, and {why}")
        prompt = chosen[:-1]
    good, bad = (_single(prompt, *x) for x in pair)
    if good.prompt != bad.prompt:
        why = "more than one turn after the prompt, and not the same ones as in chosen"
        raise Fault(f"{pair[1][1]}: {why}")
    return good._replace(completions=good.completions + bad.completions, rewards=rewards)


def _conversation(fields: dict) -> Record:
    value, field = _take(fields, *DIALOGUE)
    turns = _dialogue(value, field)
    if isinstance(turns, str) or len(turns) < 2:
        raise Fault(f"{field}: expected at least two messages")
    mask = fields.pop("mask", None)
    if isinstance(mask, str):
        mask = ROLES.get(mask.lower(), mask.lower())
        if turns[-1]["role"] == mask:
            why = f"the last turn is the masked role's ({mask})"
            raise Fault(f"{field}: {why}, so there is nothing to learn")
    several = any(turn["role"] == "assistant" for turn in turns[:-1])
    record = _single(turns[:-1], turns[-1:], field)
    return record._replace(scored=0 if several else None)


def _single(prompt, value, field: str) -> Record:
    """A prompt and its completion, which may repeat the prompt or hold several turns, as tool use
    does: the last one is the completion, those before it go to the prompt."""
    turns, before = _dialogue(value, field), as_turns(prompt)
    if isinstance(turns, str):
        return Record(prompt, [turns], None)
    if len(turns) > len(before) and turns[: len(before)] == before:
        turns = turns[len(before) :]
    own = [turn["role"] == "assistant" for turn in turns]
    if not (own[0] and own[-1]) or any(a and b for a, b in zip(own, own[1:])):
        why = "expected one assistant message, or others between two of them; more than one turn"
        raise Fault(f"{field}: {why}: {short_json(value)}")
    if len(turns) == 1:
        return Record(prompt, turns, None)
    return Record([*before, *turns[:-1]], turns[-1:], None, scored=len(before))


# ---- one field -----------------------------------------------------------------------------------


def _take(fields: dict, *names: str) -> tuple[object, str]:
    """Take out the one field that has one of these names. -> its value and its name."""
    found = [name for name in names if name in fields]
    if len(found) > 1:
        raise Fault(f"{' and '.join(found)}: give one, not both")
    if not found:
        name, have = " or ".join(names), printable(", ".join(fields) or "nothing else")
        raise Fault(f"{names[0]}: missing: expected {name}; there is {have} (see data.columns)")
    return fields.pop(found[0]), found[0]


def _has(fields: dict, names) -> bool:
    return any(name in fields for name in names)


def _prompt(fields: dict) -> str | list[dict]:
    if "instruction" in fields and fields.pop("input", None):
        why = "this form would be read as input and output only"
        raise Fault(f"instruction: {why}: make a prompt of it")
    return _dialogue(*_take(fields, *PROMPT))


def as_turns(prompt) -> list[dict]:
    return prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]


def _for_template(fields: dict, field: str, kind: type):
    """A list or an object, or a text that holds it: a table's columns have one type."""
    value = fields.pop(field, None) or None
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if value is not None and not isinstance(value, kind):
        raise Fault(f"{field}: expected a {kind.__name__}, got {short_json(value)}")
    return value


def short_json(value) -> str:
    """A value as JSON, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) < 50 else text[:46] + " ..."


def _text(value, field: str) -> str:
    if not isinstance(value, str):
        raise Fault(f"{field}: expected a string, got {short_json(value)}")
    return value


def _message(value, field: str) -> dict:
    """One turn as {"role", "content"}, from either spelling; other keys are the template's."""
    if not isinstance(value, dict):
        raise Fault(f"{field}: expected a message, got {short_json(value)}")
    role, content = _either(value, "role", "from", field), _either(value, "content", "value", field)
    no_text = content is None and value.get("tool_calls")
    if not isinstance(role, str) or not (isinstance(content, str) or no_text):
        needs = 'a message needs a string "role" and a string "content"'
        raise Fault(f"{field}: {needs}, got {short_json(value)}")
    if role.lower() not in ROLES:
        raise Fault(f"{field}: role: expected one of {', '.join(KNOWN)}; got {short_json(role)}")
    taken = ("role", "from", "content", "value")  # null: a table's row has no such key
    rest = {k: v for k, v in value.items() if k not in taken and v is not None}
    return {"role": ROLES[role.lower()], "content": content, **rest}


def _either(value: dict, name: str, other: str, field: str):
    """What a message has under one of two names."""
    found = [value[n] for n in (name, other) if value.get(n) is not None]
    if len(found) == 2 and found[0] != found[1]:
        raise Fault(f"{field}: {name} and {other} differ: {short_json(found)}")
    return found[0] if found else None


def _dialogue(value, field: str) -> str | list[dict]:
    """A prompt: a string, or a list of messages."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not value:
        raise Fault(f"{field}: expected a string or a list of messages, got {short_json(value)}")
    return [_message(m, f"{field}[{i}]") for i, m in enumerate(value)]


def _label(value, field: str) -> bool:
    if isinstance(value, int | float) and value in (0, 1):  # or True, False
        return bool(value)
    if isinstance(value, str) and value in LABELS:
        return LABELS[value]
    raise Fault(
        f"{field}: expected true, false, 1, 0, {', '.join(LABELS)}; got {short_json(value)}"
    )


def _number(value, field: str, expected="a finite number", lowest=-math.inf) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and abs(value) < 1e30 and value >= lowest):
        raise Fault(f"{field}: expected {expected}, got {short_json(value)}")
    return float(value)


def _reward(fields: dict, field: str) -> float | None:
    value = fields.pop(field, None)
    return None if value is None else _number(value, field)


def _extra(record: dict, field: str) -> str | float:
    if field not in record:
        raise Fault(f"{field}: missing (data.extra names it)")
    value = record[field]
    return value if isinstance(value, str) else _number(value, field, "a text or a finite number")


# ---- files ---------------------------------------------------------------------------------------


def split_sources(given: str) -> list[tuple[list[str], float | None]]:
    """`a.jsonl:0.7,more/*.csv:0.3` -> the files of each source and its weight. A path that exists
    is a path, whatever is in it. Raises BadInput."""
    found, exists = [], lambda name: os.path.exists(find_path(name))  # False for a long list, too
    for part in [given] if exists(given) else map(str.strip, given.split(",")):
        share = None if exists(part) else re.fullmatch(r"(.+):(\d*\.?\d+)", part)
        name, weight = (share[1], float(share[2])) if share else (part, None)
        pattern = glob.has_magic(name) and not exists(name)
        files = sorted(glob.glob(str(find_path(name)), recursive=True)) if pattern else [name]
        if not files or weight == 0:
            raise BadInput(f"{part}: {'no weight' if files else 'no file has such a name'}")
        found.append((files, weight))
    weights = [weight for _, weight in found]
    if any(weights) and (None in weights or len(found) == 1):
        raise BadInput(f"{given}: weights are shares of a mix: two or more sources, one for each")
    return found


def read_records(source: str, extra=(), columns=()) -> Iterator[tuple[str, object]]:
    """(`file:line`, raw record or Fault) for each record of a file or a Hub data set. The cells of
    a csv file are text, but of columns that are, by `columns`, numbers with us, or where `extra`
    names them and they look like it. Raises BadInput."""
    path, rows = find_path(source), None
    suffix = Path(path.name.removesuffix(".gz")).suffix
    if path.is_file() and suffix in (".csv", ".tsv"):
        rows = _csv(source, path, extra, dict(columns))
    elif path.is_file() and suffix in (".jsonl", ".json"):
        rows = _json(source, path, suffix == ".json")
    try:
        yield from rows or ((f"{source}:{i}", x) for i, x in enumerate(_table(source, path), 1))
    except (OSError, EOFError, zlib.error) as e:
        raise BadInput(f"{source}: {getattr(e, 'strerror', None) or e}") from None


def _open(path: Path):
    return gzip.open(path) if path.suffix == ".gz" else open(path, "rb")


def _json(source: str, path: Path, maybe_array: bool) -> Iterator[tuple[str, object]]:
    with _open(path) as file:
        if maybe_array and file.peek(1).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"[":
            for i, record in enumerate(_json_array(source, file.read()), 1):
                yield f"{source}:record {i}", record
        else:
            yield from _json_lines(source, file)


def _unique(items) -> dict:
    """json keeps the last of two equal keys silently; a second label must not win like that."""
    found = dict(items)
    if len(found) < len(items):
        (key, n), *_ = Counter(k for k, _ in items).most_common(1)
        raise Fault(f"{key}: given {n} times")
    return found


DECODER = json.JSONDecoder(object_pairs_hook=_unique)  # json.loads would make one per line


def _json_array(source: str, blob: bytes) -> list:
    try:
        return json.loads(blob, object_pairs_hook=_unique)
    except (ValueError, RecursionError, Fault) as e:
        line = f":{e.lineno}" if hasattr(e, "lineno") else ""
        raise BadInput(f"{source}{line}: json: {e}") from None


def _json_lines(source: str, file) -> Iterator[tuple[str, object]]:
    for i, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            text = line.removesuffix(b"\n").decode("utf-8-sig")
            record = DECODER.decode(text)
        except Fault as e:
            record = e
        except UnicodeDecodeError as e:
            record = Fault(f"json: not UTF-8 at byte {e.start}")
        except (ValueError, RecursionError) as e:
            record = Fault(f"json: {e}".replace("line 1 ", ""))  # the line is i
        yield f"{source}:{i}", record


def _csv(source: str, path: Path, extra, ours) -> Iterator[tuple[str, object]]:
    """Cells are text, but those of CSV_JSON as in JSON (in any case). A reader that guesses types
    makes 1 of 01, nothing of NA, and shifts the columns where a row has a field too many."""
    csv.field_size_limit(2**31 - 1)  # its own limit is 128 KiB; a long document is no fault
    with _open(path) as file:
        blob = file.read()
    try:
        text = io.StringIO(blob.decode("utf-8-sig"), newline="")
        rows = csv.reader(text, strict=True, delimiter="\t" if ".tsv" in path.suffixes else ",")
        names = next(rows, [])
        _unique([(name, None) for name in names])
    except UnicodeDecodeError as e:
        raise BadInput(f"{source}:{blob[: e.start].count(10) + 1}: csv: not UTF-8") from None
    except (csv.Error, Fault) as e:
        raise BadInput(f"{source}:1: csv: {e}") from None
    line = rows.line_num + 1
    try:
        for cells in rows:
            where = f"{source}:{line}"
            if len(cells) == len(names):
                yield where, {n: _cell(ours.get(n, n), x, extra) for n, x in zip(names, cells)}
            elif cells:
                yield where, Fault(f"record: {len(cells)} fields, but {len(names)} column names")
            line = rows.line_num + 1  # a quoted field may hold line ends
    except csv.Error as e:
        yield f"{source}:{line}", Fault(f"csv: {e}")


def _cell(name: str, text: str, extra):
    if name not in CSV_JSON and name not in extra:
        return text
    try:
        value = json.loads(text.lower() or "null")
    except (ValueError, RecursionError):
        return text
    return value if name in CSV_JSON or type(value) in (int, float) else text


def _table(source: str, path: Path):
    """Rows of a parquet file, of a folder of save_to_disk or of a Hub data set."""
    if path.is_file() and path.suffix == ".parquet":
        return _parquet(source, path)
    name, *rest = source.split(":")
    folder = find_path(name)
    # a suffix alone makes no file: there are ids like org/set-2.5
    file = path.is_file() or path.suffix in SUFFIXES or source.startswith((".", "/"))
    if not folder.is_dir() and (file or name.count("/") > 1 or len(rest) > 2):
        kinds = ".jsonl, .json, .csv, .tsv or .parquet file"
        raise BadInput(f"{source}: {'not a' if path.is_file() else 'no such'} {kinds}")
    import datasets  # slow to import

    try:
        if folder.is_dir():
            found = datasets.load_from_disk(str(folder))
            parts = isinstance(found, datasets.DatasetDict)
            return found[rest[-1] if rest else "train"] if parts else found
        return datasets.load_dataset(name, *rest[:-1], split=rest[-1] if rest else "train")
    except Exception as e:  # these have a dozen ways to say that they could not
        if folder.is_dir():
            why = f"no folder of save_to_disk with this split ({type(e).__name__})"
            raise BadInput(f"{source}: {why}; for files in it, write {name}/*.jsonl") from e
        advice = "save the set as a .jsonl or .parquet file elsewhere and give its path"
        why = f"no such file here, and not fetched from huggingface.co ({type(e).__name__})"
        raise BadInput(f"{source}: {why}; without a network, {advice}") from e


def _parquet(source: str, path: Path):
    """Without the datasets package, which asks the network and keeps a copy."""
    import pyarrow
    import pyarrow.parquet  # slow to import

    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(4096):
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as e:
        why = f"not a parquet file that can be read ({type(e).__name__})"
        raise BadInput(f"{source}: {why}") from e

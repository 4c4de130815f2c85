"""One record of any known form -> prompt, completions and rating; and the files that hold records.
A record is understood, or refused by the name of its field (Fault), never guessed."""

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from support.errors import BadInput

LABELS = {"chosen": True, "rejected": False, "desirable": True, "undesirable": False}
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
RATING = ("label", "preference")
PAIR = ("chosen", "rejected", "chosen_response", "rejected_response")
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
# the columns of a csv file that are read as JSON; all others are text
CSV_JSON = (*RATING, "chosen_reward", "rejected_reward", "weight")


class Record(NamedTuple):
    """A record of any form, understood: texts, or dialogues that a chat template will render."""

    prompt: str | list[dict]
    completions: list[str | dict]  # one rated or demonstrated completion; or chosen, rejected
    label: bool | None  # None: a pair, or a demonstration
    rewards: tuple[float | None, float | None] = (None, None)  # of a pair's completions, if given
    weight: float = 1.0
    extra: dict[str, str | float] = {}  # the fields that data.extra names
    ignored: tuple[str, ...] = ()  # the names of fields that nothing reads


class Fault(Exception):
    """`field: reason`, before the file and line are known."""


# ---- one record ----------------------------------------------------------------------------------


def understand(record, kind: str, extra=()) -> Record:
    """A raw record as a Record, strictly. `kind`, what the caller learns from: rated, paired,
    demonstrations or prompts (then all else is left aside). `extra`: fields that every record must
    have besides. Raises Fault."""
    if not isinstance(record, dict):
        raise Fault(f"record: expected an object, got {short(record)}")
    fields = dict(record)  # whoever reads a field takes it out: what is left was ignored
    understood = _form(fields, kind)
    weight = _number(fields.pop("weight", 1), "weight", "a finite number, at least 0", lowest=0)
    values = {name: _extra(record, name) for name in extra}
    ignored = tuple(name for name in fields if name not in values)
    return understood._replace(weight=weight, extra=values, ignored=ignored)


def _form(fields: dict, kind: str) -> Record:
    if kind == "prompts":
        prompt = _dialogue(*_take(fields, "prompt"))
        fields.clear()
        return Record(prompt, [], None)
    paired, rated = (any(name in fields for name in names) for names in (PAIR, RATING))
    if paired and rated:
        raise Fault("record: both a rating and a pair: which one is meant?")
    if kind == "demonstrations":
        if rated:
            value, field = _take(fields, *RATING)
            if not _label(value, field):
                raise Fault(f"{field}: undesirable: this completion is not to be imitated")
        return _demonstration(fields)
    if paired:
        return _pair(fields)
    if kind == "paired":
        hint = ", this is a rated record (see kto.py)" if rated else ""
        raise Fault(f"chosen: missing: pairs are needed here{hint}")
    return _rated(fields)


def _rated(fields: dict) -> Record:
    label = _take(fields, *RATING)
    answer = _take(fields, "completion", "response")
    prompt = _dialogue(*_take(fields, "prompt"))
    return Record(prompt, [_answer(*answer)], _label(*label))


def _pair(fields: dict) -> Record:
    pair = [_take(fields, name, f"{name}_response") for name in ("chosen", "rejected")]
    rewards = _reward(fields, "chosen_reward"), _reward(fields, "rejected_reward")
    if "prompt" in fields:
        prompt = _dialogue(*_take(fields, "prompt"))
        answers = [_answer(_last_turn(value, prompt, field), field) for value, field in pair]
        return Record(prompt, answers, None, rewards)
    # no prompt: it is what two dialogues begin with
    chosen, rejected = (_dialogue(*x) for x in pair)
    texts = str in (type(chosen), type(rejected))
    if texts or len(chosen) < 2 or chosen[:-1] != rejected[:-1]:
        why = "chosen and rejected are not two dialogues that differ in their last turn"
        raise Fault(f"prompt: missing, and {why}")
    answers = [_answer([d[-1]], field) for d, (_, field) in zip((chosen, rejected), pair)]
    return Record(chosen[:-1], answers, None, rewards)


def _last_turn(value, prompt, field: str):
    """Some sets repeat the prompt in chosen and rejected, also where it is given as a string."""
    if isinstance(value, list) and len(value) > 1:
        turns = _dialogue(value, field)
        before = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        if turns[:-1] == before:
            return [turns[-1]]
        if before == turns[: len(before)]:
            raise Fault(f"{field}: more than one turn after the prompt")
    return value


def _demonstration(fields: dict) -> Record:
    if "messages" in fields or "conversations" in fields:
        return _conversation(fields)
    if "input" in fields and "instruction" in fields:
        why = "this form would be read as input and output only"
        raise Fault(f"instruction: {why}: make a prompt of it")
    if "input" in fields:
        prompt = _text(*_take(fields, "input"))
        return Record(prompt, [_text(*_take(fields, "output"))], None)
    prompt = _take(fields, "prompt")
    answer = _take(fields, "completion", "response")
    return Record(_dialogue(*prompt), [_answer(*answer)], None)


def _conversation(fields: dict) -> Record:
    value, field = _take(fields, "messages", "conversations")
    turns = _dialogue(value, field)
    if isinstance(turns, str) or len(turns) < 2:
        raise Fault(f"{field}: expected at least two messages")
    mask = fields.pop("mask", None)
    if isinstance(mask, str):
        mask = ROLES.get(mask.lower(), mask.lower())
        if turns[-1]["role"] == mask:
            why = f"the last turn is the masked role's ({mask})"
            raise Fault(f"{field}: {why}, so there is nothing to learn")
    if system := fields.pop("system", None):
        turns = [{"role": "system", "content": _text(system, "system")}, *turns]
    return Record(turns[:-1], [_answer([turns[-1]], field)], None)


# ---- one field -----------------------------------------------------------------------------------


def _take(fields: dict, *names: str) -> tuple[object, str]:
    """Take out the one field that has one of these names. -> its value and its name."""
    found = [name for name in names if name in fields]
    if len(found) != 1:
        both = f"{' and '.join(found)}: give one, not both"
        raise Fault(both if found else f"{names[0]}: missing")
    return fields.pop(found[0]), found[0]


def short(value) -> str:
    """A value as JSON, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) < 50 else text[:46] + " ..."


def _text(value, field: str) -> str:
    if not isinstance(value, str):
        raise Fault(f"{field}: expected a string, got {short(value)}")
    return value


def _message(value, field: str) -> dict:
    """One turn as {"role", "content"}, from either spelling; other keys are the template's."""
    if not isinstance(value, dict):
        raise Fault(f"{field}: expected a message, got {short(value)}")
    role = value.get("role", value.get("from"))
    content = value.get("content", value.get("value"))
    if not isinstance(role, str) or not isinstance(content, str):
        needs = 'a message needs a string "role" and a string "content"'
        raise Fault(f"{field}: {needs}, got {short(value)}")
    rest = {k: v for k, v in value.items() if k not in ("role", "from", "content", "value")}
    return {"role": ROLES.get(role.lower(), role.lower()), "content": content, **rest}


def _dialogue(value, field: str) -> str | list[dict]:
    """A prompt: a string, or a list of messages."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not value:
        raise Fault(f"{field}: expected a string or a list of messages, got {short(value)}")
    return [_message(m, f"{field}[{i}]") for i, m in enumerate(value)]


def _answer(value, field: str) -> str | dict:
    """A completion: a string, or one assistant turn (alone or in a list)."""
    if isinstance(value, str):
        return value
    turns = _dialogue(value, field)
    if len(turns) != 1 or turns[0]["role"] != "assistant":
        raise Fault(f"{field}: expected one assistant message, got {short(value)}")
    return turns[0]


def _label(value, field: str) -> bool:
    if isinstance(value, int) and value in (0, 1):  # or True, False
        return bool(value)
    if isinstance(value, str) and value in LABELS:
        return LABELS[value]
    raise Fault(f"{field}: expected true, false, 1, 0, {', '.join(LABELS)}; got {short(value)}")


def _number(value, field: str, expected="a finite number", lowest=-math.inf) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and abs(value) < 1e30 and value >= lowest):
        raise Fault(f"{field}: expected {expected}, got {short(value)}")
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


def local(source: str) -> Path:
    """A path as given; the demo's own files also from elsewhere."""
    path = Path(source).expanduser()
    demo = source.startswith("demo/") and not path.exists()
    return Path(__file__).parent.parent / source if demo else path


def read(source: str, extra=()) -> Iterator[tuple[str, object]]:
    """(`file:line`, raw record or Fault) for each record of a file or a Hub data set. Columns of a
    csv file that `extra` names hold numbers where they look like it. Raises BadInput."""
    path = local(source)
    if path.suffix in (".jsonl", ".json") and path.is_file():
        blob = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
        if path.suffix == ".json" and blob.lstrip()[:1] == b"[":
            records = _json_array(source, blob)
            return ((f"{source}:record {i}", record) for i, record in enumerate(records, 1))
        return _json_lines(source, blob)
    if path.suffix == ".csv" and path.is_file():
        return _csv(source, path, extra)
    return ((f"{source}:{i}", record) for i, record in enumerate(_table(source, path), 1))


def _unique(items) -> dict:
    """json keeps the last of two equal keys silently; a second label must not win like that."""
    found = dict(items)
    if len(found) < len(items):
        (key, n), *_ = Counter(k for k, _ in items).most_common(1)
        raise Fault(f"{key}: given {n} times")
    return found


def _json_array(source: str, blob: bytes) -> list:
    try:
        return json.loads(blob, object_pairs_hook=_unique)
    except (ValueError, RecursionError, Fault) as e:
        line = f":{e.lineno}" if hasattr(e, "lineno") else ""
        raise BadInput(f"{source}{line}: json: {e}") from None


def _json_lines(source: str, blob: bytes) -> Iterator[tuple[str, object]]:
    for i, line in enumerate(io.BytesIO(blob), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.removesuffix(b"\n").decode(), object_pairs_hook=_unique)
        except Fault as e:
            record = e
        except UnicodeDecodeError as e:
            record = Fault(f"json: not UTF-8 at byte {e.start}")
        except (ValueError, RecursionError) as e:
            record = Fault(f"json: {e}".replace("line 1 ", ""))  # the line is i
        yield f"{source}:{i}", record


def _csv(source: str, path: Path, extra) -> Iterator[tuple[str, object]]:
    """Cells are text, but those of CSV_JSON as in JSON (in any case). A reader that guesses types
    makes 1 of 01, nothing of NA, and shifts the columns where a row has a field too many."""
    csv.field_size_limit(2**31 - 1)  # its own limit is 128 KiB; a long document is no fault
    blob = path.read_bytes()
    try:
        rows = csv.reader(io.StringIO(blob.decode("utf-8-sig"), newline=""), strict=True)
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
                yield where, {name: _cell(name, x, extra) for name, x in zip(names, cells)}
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
    """Rows of a parquet file or of a Hub data set, through the datasets package."""
    name, *rest = source.split(":")
    is_file = path.is_file()
    parquet = is_file and path.suffix == ".parquet"
    # a suffix alone makes no file: there are ids like org/set-2.5
    is_path = is_file or path.suffix in SUFFIXES or source.startswith((".", "/"))
    if not parquet and (is_path or name.count("/") > 1 or len(rest) > 2):
        raise BadInput(f"{source}: no such .jsonl, .json, .csv or .parquet file")
    try:
        if parquet:  # not by datasets: to it a path is a pattern, and it counts its uses online
            from pyarrow.parquet import ParquetFile

            batches = ParquetFile(path).iter_batches()
            return (row for batch in batches for row in batch.to_pylist())
        import datasets  # slow to import

        return datasets.load_dataset(name, *rest[:-1], split=rest[-1] if rest else "train")
    except Exception as e:  # the hub client has a dozen ways to say that it could not
        reason = type(e).__name__
        if parquet:
            raise BadInput(f"{source}: not a parquet file that can be read ({reason})") from e
        advice = "save the set as a .jsonl or .parquet file elsewhere and give its path"
        why = f"no such file here, and not fetched from huggingface.co ({reason})"
        raise BadInput(f"{source}: {why}; without a network, {advice}") from e

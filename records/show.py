"""A record as turns, for a person to read: `python data.py FILE` and `python -m convert FILE` print it."""

import textwrap
import unicodedata

from records.forms import Record, as_turns, content_of

LINES = 8  # of a turn, at most


def show_record(where: str, record: Record) -> None:
    """Print a record as turns, at most 80 columns wide."""
    title = {
        True: "up",
        False: "down",
        None: "a pair" if len(record.completions) == 2 else "unrated",
    }
    print(f"\n{title[record.label]} ({where}):")
    if isinstance(record.prompt, str) and not record.instruct:
        show_turn("prompt", record.prompt)
    else:
        for turn in as_turns(record.prompt):
            show_turn(turn["role"], words_of(turn))
    names = ["chosen", "rejected"] if len(record.completions) == 2 else ["answer"]
    for name, completion in zip(names, record.completions):
        show_turn(name, words_of(completion))


def words_of(turn: str | dict) -> str:
    """The text of a turn, or what it has in place of one."""
    calls = isinstance(turn, dict) and turn.get("tool_calls")
    return content_of(turn) or ("(a call of tools)" if calls else "(empty)")


def show_turn(name: str, text: str) -> None:
    wide = any(unicodedata.east_asian_width(x) in "WF" for x in text)  # two columns a character
    lines = []
    for line in text.splitlines():
        lines += textwrap.wrap(line, 34 if wide else 68, replace_whitespace=False) or [""]
    if len(lines) > LINES:
        lines[LINES:] = [f"[{len(lines) - LINES:,} more lines]"]
    for line in lines or [""]:
        letters = "".join(map(printable, line))
        print(f"  {name:10}{letters}".rstrip())
        name = ""  # it stands before the first line only


def printable(letter: str) -> str:
    return letter if letter.isprintable() else "?"

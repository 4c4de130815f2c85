"""What a person reads on the terminal: lines, tables."""

import shutil

from tqdm import tqdm

from runs.errors import rank


def say(line: str) -> None:
    """On the first process only, before and after launching; above a progress bar that is there."""
    if rank() == 0:
        with tqdm.external_write_mode():
            print(line, flush=True)


def format_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table of short texts, as wide as the terminal. Of a prompt, the first column, its end is
    shown: a template begins all alike."""
    columns = shutil.get_terminal_size((110, 0)).columns
    width = min(34, columns // len(head) - 2)
    cells = [[c.replace("\n", " ") for c in row] for row in (head, *rows)]
    ends = [p if len(p) <= width else f"…{p[len(p) - width + 1 :]}" for p, *_ in cells]
    cells = [[p, *(c[:width] for c in row[1:])] for p, row in zip(ends, cells)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    padded = [[c.ljust(w) for c, w in zip(row, widths)] for row in cells]
    return "\n".join("  " + "  ".join(row).rstrip() for row in padded)

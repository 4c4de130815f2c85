"""What a person reads on the terminal: lines, progress, tables. Only rank 0 prints.

The numbers of a run are in metrics.csv and val.csv (runs/logger.py); the console shows some of them.
"""

import math
import shutil
import sys
import threading
import time

from tqdm import tqdm

from runs.errors import rank

# Column of a row -> how the console shows its value; other columns are only in the files.
STEP_CELLS = {
    "loss": "loss {:.4f}",
    "kl": "kl {:.4f}",
    "rewards/margins": "margins {:.4f}",
    "tokens/s": "tok/s {:,.0f}",
}
VALIDATION_CELLS = {
    "loss": "loss {:.4f}",
    "kl": "kl {:.4f}",
    "accuracy": "accuracy {:.4f}",
    "rewards/margins": "margins {:.4f}",
    "checker_accuracy": "checker {:.4f}",
}
KL_CLAMPED = "kl 0 (clamped)"  # a bare "kl 0.0000" would look like a bug

shows_progress = True  # runs.cli.parse sets it to False for --progress false


# ---- lines --------------------------------------------------------------------------------------


def say(line: str) -> None:
    """Print a line on rank 0, also before ranks are launched; it stands above a progress bar."""
    if rank() == 0:
        with tqdm.external_write_mode():
            print(line, flush=True)


def fit_80_columns(head: str, rest: str) -> str:
    """The text `head: rest` on one line, or on two lines when one is longer than 80 columns."""
    line = f"{head}: {rest}"
    if len(line) <= 80:
        return line
    return f"{head}:\n  {rest}"


def format_cells(row: dict, formats: dict[str, str]) -> list[str]:
    """The values of `row` that have a format, as texts. A missing column and None are left out."""
    cells = []
    for name, cell_format in formats.items():
        if row.get(name) is not None:
            cells.append(cell_format.format(row[name]))
    return cells


def duration(seconds: float) -> str:
    """Such as 01:30 or 2:00:00."""
    return tqdm.format_interval(round(seconds))


# ---- waits --------------------------------------------------------------------------------------

SILENT = 5  # seconds in which a wait prints nothing
LONGEST_PAUSE = 60  # seconds between two lines of a wait, where the output is not a terminal
FIRST_SHARE = 0.02  # an estimate of the time left is shown after this share of the work
LATEST_ESTIMATE = 30  # or this many seconds after the first units of work were done
LONG_WAIT = 300  # seconds; what makes a longer wait shorter is said

_waits = []  # those that are going on, the innermost last


class Wait:
    """Work that may take long: with Wait("validation", 12, "micro-batches"), and advance() after each.

    In the first five seconds it prints nothing. Then it shows what is done, how far it is and how
    long it will take: on a terminal in a line that changes, elsewhere in a line now and then. A
    thread of its own prints, so that a line also comes while one call takes long.

    title: what is done. total: how many `unit` there are; None: nobody knows. Without a unit their
    share is shown, in percent. shorter: the settings that make a wait of more than five minutes
    shorter, as text. silent: seconds before the first line (default 5).
    """

    def __init__(
        self,
        title: str,
        total: int | None = None,
        unit: str = "",
        shorter: str = "",
        silent: float | None = None,
    ):
        self.silent = SILENT if silent is None else silent
        self.title = title
        self.total = total
        self.unit = unit
        self.shorter = shorter
        self.done = 0
        self.tokens = 0
        self.first_done_at = None  # the time at which the first units of work were done
        self._ended = threading.Event()
        self._thread = None

    def __enter__(self):
        self._began = time.monotonic()
        _waits.append(self)
        if shows_progress and rank() == 0:
            self._thread = threading.Thread(target=self._show, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_):
        _waits.remove(self)
        self._ended.set()
        if self._thread is not None:
            self._thread.join()  # its line is gone before anything else is printed

    def _seconds_left(self, elapsed: float) -> float | None:
        """By the speed so far; None: nobody knows. Prompts are read before the first token: after a minute of
        reading and a second of answers the speed would promise many hours."""
        if not self.total or not self.done:
            return None
        since_first = time.monotonic() - self.first_done_at
        if self.done < FIRST_SHARE * self.total and since_first < LATEST_ESTIMATE:
            return None
        return elapsed / self.done * max(0, self.total - self.done)

    def _line(self, elapsed: float) -> str:
        cells = []
        if self.total and self.unit:
            cells.append(f"{self.done:,} of {self.total:,} {self.unit}")
        elif self.total:
            cells.append(f"{100 * self.done / self.total:.0f}%")
        elif self.unit:
            cells.append(f"{self.done:,} {self.unit}")
        if self.tokens:
            cells.append(f"{self.tokens / elapsed:,.0f} tokens/s")
        left = self._seconds_left(elapsed)
        if left is None:
            cells.append(f"{duration(elapsed)} so far")
        else:
            cells.append(f"{duration(left)} left")
        return fit_80_columns(self.title, ", ".join(cells))

    def _show(self) -> None:
        bar, pause = None, self.silent
        while not self._ended.wait(pause):
            if _waits[-1:] != [self]:  # the wait inside this one is shown
                continue
            elapsed = time.monotonic() - self._began
            if sys.stderr.isatty():
                pause = 1
                bar = bar or tqdm(bar_format="{desc}", leave=False)
                bar.set_description_str(self._line(elapsed).replace("\n  ", " "))
            else:
                pause = min(elapsed, LONGEST_PAUSE)
                say(self._line(elapsed))
            if self.shorter and (self._seconds_left(elapsed) or 0) > LONG_WAIT:
                say(f"  shorter with {self.shorter}")
                self.shorter = ""
        if bar is not None:
            bar.close()


def advance(n: int = 1, tokens: int = 0) -> None:
    """Count n units of the innermost wait, if there is one, and tokens for its speed."""
    if _waits:
        wait = _waits[-1]
        if wait.first_done_at is None:
            wait.first_done_at = time.monotonic()
        wait.done += n
        wait.tokens += tokens


def current_work() -> str:
    """What the process does now, for a line."""
    return _waits[-1].title if _waits else "this step"


# ---- progress -----------------------------------------------------------------------------------


class Progress:
    """A progress bar on a terminal; about twenty lines a run where the output is not a terminal, or one
    a minute where that is more.

    total: the last step of the run. start: the step that a resumed run continues after; 0 in a new
    run. on: False prints nothing at all.
    """

    def __init__(self, total: int, start: int, on: bool):
        self.total = total
        self.start = start
        self.on = on
        self.began: float | None = (
            None  # when the first step began; what comes before it is no part of the ETA
        )
        self.printed = time.monotonic()
        self.every = max(1, round(total / 20))  # steps between two lines
        # The next line is printed at this step or at the first step after it that has a row:
        # log_interval need not divide `every`.
        self.next = 0
        self.bar = None
        if on and sys.stderr.isatty():
            self.bar = tqdm(
                total=total,
                initial=start,
                dynamic_ncols=True,
                bar_format="{n}/{total} {desc}ETA {remaining} {bar}",  # the bar fills the line
                leave=False,  # a bar that stays would be drawn below the last message
            )

    def step(self, step: int, row: dict | None, seconds: float) -> None:
        """Show an optimizer step, which took so many seconds. row: its row of metrics.csv; None when this step has no
        row."""
        row = row or {}
        if self.began is None:
            self.began = time.monotonic() - seconds
            if self.bar is not None:
                self.bar.start_t = self.bar.last_print_t = time.time() - seconds
        formats = dict(STEP_CELLS)
        if row.get("kl/clamped"):
            formats["kl"] = KL_CLAMPED
        cells = format_cells(row, formats)
        if self.bar is not None:
            if cells:
                self.bar.set_description_str(" ".join(cells) + " ", refresh=False)
            self.bar.update()
        elif self.on and cells and (step >= self.next or step == self.total or self._is_late()):
            self.next = step - step % self.every + self.every
            self.printed = time.monotonic()
            seconds_per_step = (self.printed - self.began) / max(1, step - self.start)
            eta = duration((self.total - step) * seconds_per_step)
            say(fit_80_columns(f"step {step}/{self.total}", " ".join([*cells, f"ETA {eta}"])))

    def _is_late(self) -> bool:
        return time.monotonic() - self.printed > LONGEST_PAUSE

    def say(self, line: str) -> None:
        """Print a line, unless progress is off."""
        if self.on:
            say(line)

    def close(self) -> None:
        """Remove the bar, if there is one."""
        if self.bar is not None:
            self.bar.close()


# ---- tables -------------------------------------------------------------------------------------


def format_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table of texts as lines that fit the terminal; each cell has at most 34 characters.

    The first column is a prompt. A long prompt is cut at its beginning, because all prompts of a
    chat template begin with the same words; other cells are cut at their end.
    """
    terminal_width = shutil.get_terminal_size((110, 0)).columns
    cell_width = min(34, terminal_width // len(head) - 2)
    table = []
    for row in (head, *rows):
        prompt, *others = [cell.replace("\n", " ") for cell in row]
        if len(prompt) > cell_width:
            prompt = "…" + prompt[len(prompt) - cell_width + 1 :]
        table.append([prompt, *[cell[:cell_width] for cell in others]])
    widths = [max(len(cell) for cell in column) for column in zip(*table)]
    lines = []
    for row in table:
        padded = [cell.ljust(width) for cell, width in zip(row, widths)]
        lines.append("  " + "  ".join(padded).rstrip())
    return "\n".join(lines)


NORMAL_95 = 1.96  # 95% of a normal distribution lie within so many standard deviations


def wilson_interval(k: int, n: int) -> tuple[float, float]:
    """The 95% confidence interval (low, high) of a share k / n, with n at least 1 (Wilson 1927).

    The usual k/n ± 2 sigma is too narrow near 0 and 1, and may leave [0, 1].
    """
    square = NORMAL_95 * NORMAL_95
    middle = (k + square / 2) / (n + square)
    half_width = NORMAL_95 * math.sqrt(k * (n - k) / n + square / 4) / (n + square)
    return max(0.0, middle - half_width), min(1.0, middle + half_width)


def format_by_field(before: dict, after: dict) -> list[str]:
    """Lines of right answers by the values of the records' fields; none where nothing was counted."""
    lines = []
    for name, counts in after.get("by", {}).items():
        if before.get("by", {}).get(name, {}).keys() != counts.keys():
            continue  # a resume with other fields or prompts
        width = max(map(len, (name, *counts)))
        lines.append(f"  {name:<{width}}  before   after     of")
        for value, (right, total) in counts.items():
            right_before, total_before = before["by"][name][value]
            shares = f"{100 * (right_before / total_before):5.1f}%  {100 * (right / total):5.1f}%"
            lines.append(f"  {value:<{width}}  {shares}  {total:5}")
    return lines


def format_before_after(before: dict, after: dict, n: int = 5) -> str:
    """The checker's accuracy before and after training, with 95% intervals, and n answers.

    `before` and `after` are verdicts of Evaluator.check: {"right": how many answers the checker
    accepts, "of": how many there are, "answers": [{"prompt": ..., "completion": ...}, ...]}, with
    the same prompts in the same order. Answers that changed come first.
    """
    lines = ["", "held-out accuracy by the checker (95% interval)"]
    for name, verdict in (("before", before), ("after", after)):
        right, total = verdict["right"], verdict["of"]
        low, high = wilson_interval(right, total)
        percent = f"{100 * (right / total):5.1f}%"
        interval = f"({100 * low:.1f} to {100 * high:.1f})"
        if isinstance(right, float):  # a sum of numbers from 0 to 1
            right = f"{right:.1f}"
        lines.append(f"  {name:<7} {percent}  {interval}  {right} of {total}")
    gain = 100 * (after["right"] / after["of"] - before["right"] / before["of"])
    lines += [f"  gain    {gain:+5.1f} points", *format_by_field(before, after), ""]

    changed, unchanged = [], []
    for old, new in zip(before["answers"], after["answers"]):
        row = (old["prompt"], old["completion"], new["completion"])
        if old["completion"] != new["completion"]:
            changed.append(row)
        else:
            unchanged.append(row)
    rows = [*changed, *unchanged][:n]
    lines.append(format_table(("prompt", "before", "after"), rows))
    return "\n".join(lines)

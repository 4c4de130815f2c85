"""Errors that are one line: what the user gave is wrong (exit code 2), or the run cannot go on (exit
code 1). A program imports this first, and it imports nothing slow: Ctrl-C is one line from here on."""

import contextlib
import io
import os
import re
import signal
import sys
import threading
import traceback
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path

# before torch is imported: a rank whose peer has ended would print a C++ stack beside our one line
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


class BadInput(ValueError):
    """What was given is wrong. Its text is the whole message: a line a fault, `file:line: field: reason`."""


class Failed(RuntimeError):
    """The run cannot go on, through no fault of what was given. Its text is the whole message."""


ENDING = threading.Lock()  # taken by the thread that ends the process on a signal
LAUNCHED = []  # every Fabric of this process, whose child processes end with it
debug = False  # the setting, once it is read: exceptions then reach pdb as they are


def rank() -> int:
    """This process's place among all, before launching too. 0 where it is alone."""
    env = os.environ
    # in a shell that SLURM gave, SLURM_PROCID is 0 in all that Fabric launches
    first = env.get("RANK") or env.get("LOCAL_RANK") or env.get("SLURM_PROCID") or 0
    return int(first) or int(env.get("NODE_RANK") or 0)


# ---- what was given, what is written -------------------------------------------------------------


def printable(value, most: int = 80) -> str:
    """A value for a line of text: nothing in it moves the cursor or begins a line, and its middle is
    left out where it is long."""
    text = re.sub(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]", lambda m: repr(m[0])[1:-1], str(value))
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 4 :]}"


@contextlib.contextmanager
def user_error(what: str | None, path=None, errors=(OSError, ValueError, RecursionError)):
    """What is wrong with something that the user gave is one line: `what: path: reason`."""
    try:
        yield
    except (BadInput, Failed):
        raise
    except errors as e:
        reason = " ".join(str(getattr(e, "strerror", None) or e).split()) or type(e).__name__
        if isinstance(e, UnicodeDecodeError):
            reason = f"not UTF-8 at byte {e.start}"
        where = getattr(e, "filename2", None) or getattr(e, "filename", None) or path
        if getattr(e, "errno", 0) in (ENOSPC, EDQUOT, EFBIG):
            raise Failed(f"{where}: not saved: {reason}") from None
        line = f"{where}: {printable(reason, 300)}"
        raise BadInput(f"{what}: {line}" if what else line) from None


def parse_file(what: str | None, path, parse=str):
    """parse(the text of a file that was given). A parser may raise anything."""
    with user_error(what, path, Exception):
        return parse(Path(path).read_bytes().decode("utf-8"))


@contextlib.contextmanager
def disk_error(path, *errors):
    """A disk that is full or gone ends the run with the path and the reason."""
    try:
        yield
    except (OSError, *errors) as e:
        raise Failed(f"{path}: not saved: {getattr(e, 'strerror', None) or e}") from None


# ---- the end of a process ------------------------------------------------------------------------


def end_process(code: int) -> None:
    """At once, with the processes that this one launched: a teardown would wait for them."""
    for fabric in LAUNCHED:
        for child in getattr(fabric.strategy.launcher, "procs", []):
            child.kill()
    os._exit(code)


def _at_once(number, _frame=None) -> None:
    """A signal before the run handles its own (devices.Stop): there is nothing to save yet."""
    if not ENDING.acquire(blocking=False):
        return
    if rank() == 0:
        with contextlib.suppress(OSError):
            os.write(2, f"error: stopped by {signal.Signals(number).name}\n".encode())
    end_process(128 + number)


def _watch(pipe: int) -> None:
    """The same where Python gets no turn, as while ranks wait for each other."""
    while True:
        for number in os.read(pipe, 1):
            if signal.getsignal(number) is _at_once:
                _at_once(number)


def first_to_fail(torch) -> bool:
    """Whether no other rank has failed yet: all find most faults, and one of them says it. A rank
    that cannot ask ended because rank 0, which keeps the count, had ended before."""
    try:
        return torch.distributed.distributed_c10d._get_default_store().add("failed", 1) == 1
    except Exception:
        return False


class _Console(io.FileIO):
    """What a closed pipe or a full disk does not take is dropped: a run is worth more than its lines."""

    def write(self, data):
        with contextlib.suppress(OSError):
            return super().write(data)
        return len(data)


def _make_console_safe() -> None:
    for name, fd in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name)
        if old is None:  # closed from the start
            setattr(sys, name, open(os.devnull, "w"))
        elif old is getattr(sys, f"__{name}__"):  # else a test's or a notebook's own
            raw = io.BufferedWriter(_Console(fd, "w", closefd=False))
            kw = dict(line_buffering=old.line_buffering, write_through=old.write_through)
            setattr(sys, name, io.TextIOWrapper(raw, old.encoding, "backslashreplace", **kw))


def run_cli(main) -> None:
    """Run main(). A known error is one line; any error ends every rank, so that none waits for another."""
    _make_console_safe()
    try:
        return main()
    except BaseException as e:
        if debug:
            raise
        code, message = 1, traceback.format_exc()
        if isinstance(e, SystemExit):
            code, message = e.code, ""
        elif isinstance(e, BadInput | Failed):
            code, message = 2 if isinstance(e, BadInput) else 1, str(e)
        elif isinstance(e, OSError) and e.filename:
            message = f"{e.filename}: {e.strerror}"
        elif "Connection closed by peer" in str(e) or "Connection reset by peer" in str(e):
            message = "another process of this run has died"
    torch = sys.modules.get("torch")
    launched = torch is not None and torch.distributed.is_initialized()
    if message and (first_to_fail(torch) if launched else rank() == 0):
        prefix = f"rank {rank()}: " if rank() else ""
        lines = [
            f"{prefix}error: {printable(line, 2000)}\n" for line in message.split("\n") if line
        ]
        sys.stderr.write("".join(lines))  # one write: other ranks may print too
    sys.stdout.flush()
    sys.stderr.flush()
    if launched:
        end_process(code)
    sys.exit(code)


# `python kto.py`, but neither a test nor a notebook
if getattr(sys.modules["__main__"], "__spec__", 0) is None and sys.argv[0].endswith(".py"):
    with contextlib.suppress(ValueError):  # a thread may not
        for _number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(_number, _at_once)
        _read, _write = os.pipe()
        os.set_blocking(_write, False)
        signal.set_wakeup_fd(_write, warn_on_full_buffer=False)
        threading.Thread(target=_watch, args=[_read], daemon=True).start()

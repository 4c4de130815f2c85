"""Errors that are one line: the user gave something wrong (exit code 2), or the run cannot go on
(exit code 1). Every program ends through run_cli."""

import contextlib
import os
import re
import signal
import stat
import sys
import threading
import time
import traceback
from datetime import timedelta
from errno import EDQUOT, EFBIG, EINVAL, ENOSPC, EPIPE

# For the processes that this one launches, since torch reads it while it is imported: a rank whose
# peer has died would print a C++ stack beside our line.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

MAX_LINE = 2000  # characters of an error's line
DISK_FULL = (ENOSPC, EDQUOT, EFBIG)


class BadInput(ValueError):
    """The user gave something wrong. The text is the whole message: one line for each fault, as
    `file:line: field: reason`. Exit code 2."""


class Failed(RuntimeError):
    """The run cannot go on, and nothing that the user gave is wrong. The text is the whole message.
    Exit code 1."""


class Interrupted(BaseException):
    """The run was asked to end (stop.Stop) in work that may end at any moment. Its argument is the code
    of the reason. No Exception: a checker's own `except Exception` must let it through."""


launched_fabrics = []  # every Fabric of this process: its child processes end with this one
_ending = threading.Lock()  # taken by whoever answers a signal


def rank() -> int:
    """0 in the first process of the run, also before launching, and above 0 in all others. In those
    others it need not be torch's rank: where Fabric itself launches the processes on several nodes,
    each node repeats the local numbers."""
    env = os.environ
    # SLURM_PROCID last: inside an interactive SLURM shell its value is 0 in every process that Fabric
    # launches.
    first = env.get("RANK") or env.get("LOCAL_RANK") or env.get("SLURM_PROCID") or 0
    return int(first) or int(env.get("NODE_RANK") or 0)


# ---- from an exception to a line -----------------------------------------------------------------


def printable(value, max_length: int = 80) -> str:
    """A value inside a line of text: control characters are escaped, and a long value loses its
    middle."""
    control = r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]"
    text = re.sub(control, lambda match: repr(match[0])[1:-1], str(value))
    if len(text) <= max_length:
        return text
    return f"{text[: max_length // 2]} ... {text[-max_length // 4 :]}"


@contextlib.contextmanager
def user_error(setting: str | None, path=None, errors=(OSError, ValueError, RecursionError)):
    """Turn an exception caused by user input into one line, `setting: path: reason`."""
    try:
        yield
    except (BadInput, Failed):
        raise
    except errors as e:
        where = getattr(e, "filename2", None) or getattr(e, "filename", None) or path
        reason = " ".join(str(getattr(e, "strerror", None) or e).split()) or type(e).__name__
        if isinstance(e, UnicodeDecodeError):
            reason = f"not UTF-8 at byte {e.start}"
        if getattr(e, "errno", 0) in DISK_FULL:  # no user error
            raise Failed(f"{where}: not saved: {reason}") from None
        line = f"{where}: {printable(reason, 300)}"
        raise BadInput(f"{setting}: {line}" if setting else line) from None


def read_regular(path, at_most: int = 2**32) -> bytes:
    """The bytes of a file. Raises OSError, also for a pipe or a device: a read of them may never end;
    and ValueError for a file of more bytes than at_most."""

    def without_waiting(path, flags):  # for a writer at the other end of a pipe
        return os.open(path, flags | os.O_NONBLOCK)

    with open(path, "rb", opener=without_waiting) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(EINVAL, "not a regular file", str(path))
        if status.st_size > at_most:
            raise ValueError(f"larger than {at_most:,} bytes")
        return file.read()


def parse_file(setting: str | None, path, parse=str, at_most: int = 2**26):
    """parse(text of a UTF-8 file of at most so many bytes). Whatever the parser raises becomes
    BadInput, and so does what is no regular file."""
    with user_error(setting, path, Exception):
        return parse(read_regular(path, at_most).decode("utf-8"))


@contextlib.contextmanager
def disk_error(path, *more_errors):
    """Raise Failed with the path and the reason if the disk is full or gone."""
    try:
        yield
    except (OSError, *more_errors) as e:
        raise Failed(f"{path}: not saved: {getattr(e, 'strerror', None) or e}") from None


# ---- the end of a process ------------------------------------------------------------------------

PRINTING_SECONDS = 5  # in which the first rank that fails has printed its error


def ending_signals() -> list[int]:
    """The signals that end a run; SIGHUP (the terminal is gone) unless nohup has it ignored."""
    is_hangup_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if is_hangup_ignored else [signal.SIGHUP])]


def end_process(code: int) -> None:
    """End this process and the processes that it launched, without a teardown: a teardown would
    wait for other ranks."""
    for fabric in launched_fabrics:
        for child in getattr(fabric.strategy.launcher, "procs", []):
            child.kill()
    os._exit(code)


def _end_on_signal(number, _frame=None) -> None:
    """For signals that arrive before the run handles them itself (stop.Stop): there is nothing
    to save yet."""
    if not _ending.acquire(blocking=False):
        return  # the other one of handler and thread ends the process
    if rank() == 0:
        with contextlib.suppress(OSError):
            os.write(2, f"error: stopped by {signal.Signals(number).name}\n".encode())
    end_process(128 + number)


def _handle_signals() -> None:
    """Answer signals by _end_on_signal, called by Python between two of its own instructions, or by a
    thread where torch waits for another process for minutes. Raises ValueError in a thread."""
    numbers, pipe = os.pipe()
    os.set_blocking(pipe, False)
    for number in ending_signals():
        signal.signal(number, _end_on_signal)
    signal.set_wakeup_fd(pipe, warn_on_full_buffer=False)

    def answer():
        while True:
            number = os.read(numbers, 1)[0]  # templates have a timer, which is a signal, too
            if signal.getsignal(number) is _end_on_signal:
                _end_on_signal(number)

    threading.Thread(target=answer, daemon=True).start()


def _print_error(text: str) -> None:
    # one write, because other ranks may print too
    sys.stderr.write(text)
    sys.stderr.flush()


def _print_error_once(torch, text: str) -> None:
    """Most errors occur on every rank: only the rank that fails first prints its line. The ranks count
    themselves in the store that rank 0 holds. The others wait until the first has printed: rank 0
    ends the processes that it launched, and the first may be one of them. A rank that has waited in
    vain prints its own line."""
    try:
        store = torch.distributed.distributed_c10d._get_default_store()
        is_first = store.add("failed", 1) == 1
    except Exception:  # no store: rank 0 has ended, and has printed before
        return
    if not is_first:
        began = time.monotonic()
        with contextlib.suppress(Exception):
            store.wait(["printed"], timedelta(seconds=PRINTING_SECONDS))
        if time.monotonic() - began < PRINTING_SECONDS:
            return  # the first has printed, or rank 0 has ended, and has printed before
    try:
        _print_error(text)
    finally:  # stderr may be a file on the full disk
        with contextlib.suppress(Exception):
            store.set("printed", "")


def _is_launched() -> bool:
    """Whether this is one of several processes that have found each other."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_initialized()


def _message_of(e: BaseException) -> tuple[int | str | None, str]:
    """The exit code of an exception, and its lines on stderr."""
    if isinstance(e, SystemExit):
        return e.code, ""
    if isinstance(e, KeyboardInterrupt):
        return 128 + signal.SIGINT, "stopped by SIGINT"
    if isinstance(e, BadInput):
        return 2, str(e)
    if isinstance(e, Failed):
        return 1, str(e)
    if isinstance(e, OSError) and (e.filename or e.errno in (*DISK_FULL, EPIPE)):
        return 1, f"{e.filename or 'output'}: {e.strerror}"
    lost = "Connection closed by peer" in str(e) or "Connection reset by peer" in str(e)
    if _is_launched() and lost and isinstance(e, RuntimeError):  # not the network's, in a checker
        return 1, "another process of this run has died"
    return 1, traceback.format_exc()


def run_cli(main):
    """Run main() as a program: a known error is one line on stderr, and an error on one rank ends
    all ranks."""
    with contextlib.suppress(ValueError):  # a thread cannot set signal handlers
        _handle_signals()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal may not know every character
            with contextlib.suppress(OSError):
                stream.reconfigure(errors="backslashreplace")
    try:
        return main()
    except BaseException as e:
        code, message = _message_of(e)
    launched = _is_launched()
    prefix = f"rank {rank()}: error: " if rank() else "error: "
    text = "".join(f"{prefix}{printable(x, MAX_LINE)}\n" for x in message.split("\n") if x)
    with contextlib.suppress(OSError):  # seen again by the flush below
        if text and launched:
            _print_error_once(sys.modules["torch"], text)
        elif text:
            # Most often rank 0 has the same error, and the launcher ends this rank while it waits.
            time.sleep(PRINTING_SECONDS if rank() else 0)
            _print_error(text)
    lost_output = False
    for stream in filter(None, (sys.stderr, sys.stdout)):
        try:
            stream.flush()
        except OSError:  # nobody reads it, or its disk is full
            lost_output = True
    if lost_output:  # Python would complain once more at its own exit
        end_process(1)
    if launched:
        end_process(code)
    sys.exit(code)

"""The output of a program: lines on rank 0, progress, and errors in one line with an exit code."""

import contextlib
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

# torch reads this in the processes that this one launches. Otherwise a rank also prints a C++ stack if another rank
# has died.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

launched = []  # the Fabric of a run of several processes


class BadInput(ValueError):
    """The user gave something wrong. The text is the message. It has one line per fault, `file:line: field: reason`.
    Exit code 2."""


class Failed(RuntimeError):
    """The run cannot continue, although the settings and files are right. The text is the message. Exit code 1."""


class Interrupted(BaseException):
    """A signal ends the run between two units of work, such as two tokens or two micro-batches without a gradient
    (devices.Stop). It is a BaseException because a checker may have an `except Exception`."""


FIRST_PROCESS = (
    "KTO_FIRST_PROCESS"  # its number, in the environment of the processes that Fabric starts
)


def launcher() -> str:
    """Who has started the processes of this run: torchrun, srun or Fabric. An empty text means that nobody has."""
    env = os.environ
    if {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"} <= env.keys():
        return "torchrun"
    # not SLURM_NTASKS, which sbatch and salloc also set where they start one process
    if int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return "srun"
    return "Fabric" if FIRST_PROCESS in env else ""


def rank() -> int:
    """0 in the first process of the run, above 0 in all others; also before they have found each other."""
    variables = {"torchrun": "RANK", "srun": "SLURM_PROCID", "Fabric": "LOCAL_RANK"}
    return int(os.environ.get(variables.get(launcher(), ""), 0))


def program_file() -> Path:
    """The file that was started."""
    return Path(sys.argv[0]).resolve()


def say(line: str) -> None:
    """Print on rank 0. If nobody can read the line any more, the program continues without output."""
    if rank() == 0:
        try:
            print(line, flush=True)
        except OSError:  # the terminal is closed, or the reader of a pipe has ended
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


shows_progress = True  # setup sets it to the setting `progress`


@dataclass
class Work:
    """How far some work is, in units that it counts by advance()."""

    title: str
    total: int | None
    shown: float
    """When the last line was printed."""
    done: int = 0


_works: list[Work] = []  # the innermost last


@contextlib.contextmanager
def progress(title: str, total: int | None) -> Iterator[None]:
    """Show how far the work within is, every 20 seconds. The work counts its units by advance(). total: None if it is
    unknown."""
    _works.append(Work(title, total, time.monotonic()))
    try:
        yield
    finally:
        _works.pop()


def advance(n: int = 1) -> None:
    """Count n units of the innermost work."""
    if not _works:
        return
    work = _works[-1]
    work.done += n
    now = time.monotonic()
    if n and shows_progress and now >= work.shown + 20:
        work.shown = now
        how_far = f"{work.done / work.total:.0%}" if work.total else f"{work.done:,}"
        say(f"{work.title}: {how_far}")


@contextlib.contextmanager
def user_code(what: str) -> Iterator[None]:
    """Around a call of a function that a fork hands over or overrides. An exception in it becomes Failed, one line with
    its place in the user's own files: `checker: mine.py:12: TimeoutError: the judge is busy`."""
    try:
        yield
    except (BadInput, Failed):  # the function has written a message
        raise
    except Exception as e:
        parts = [what, own_line(e), type(e).__name__, text_in_one_line(e)]
        raise Failed(": ".join(filter(None, parts))) from e


def text_in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def own_line(error: Exception) -> str:
    """`file:line` of the innermost call that is neither in an installed package nor in Python itself."""
    installed = "/site-packages/", "/dist-packages/", sysconfig.get_path("stdlib"), "<"
    frames = traceback.extract_tb(error.__traceback__)
    own_frames = [x for x in frames if not any(part in x.filename for part in installed)]
    innermost = (own_frames or frames)[-1]
    return f"{innermost.filename}:{innermost.lineno}"


@contextlib.contextmanager
def user_error(setting: str | None, path: Path | str | None = None) -> Iterator[None]:
    """Turn an exception that the user's input has caused into BadInput, `setting: path: reason`. Any
    Exception counts: the libraries that read models, tokenizers and tables raise dozens of kinds."""
    try:
        yield
    except BadInput:
        raise
    except Exception as e:
        where = getattr(e, "filename", None) or path
        text = text_in_one_line(e)
        reason = getattr(e, "strerror", None) or text or type(e).__name__
        parts = [str(part) for part in (setting, where, reason) if part]
        raise BadInput(": ".join(parts)) from None


def run_cli(main: Callable[[], None]) -> None:
    """Run main() as a program. A known error is one line, and an error on one rank ends all ranks."""
    try:
        return main()
    except (Exception, KeyboardInterrupt) as e:
        if isinstance(e, RuntimeError) and "by peer" in str(e):  # gloo's: closed or reset by peer
            e = Failed("another process of this run has ended")
        code = 1
        if isinstance(e, BadInput):
            code = 2
        elif isinstance(e, KeyboardInterrupt):
            code = 130  # 128 + SIGINT, as in a shell
        text = traceback.format_exc()
        if isinstance(e, BadInput | Failed | KeyboardInterrupt | OSError):
            who = f"rank {rank()}: error" if rank() else "error"
            lines = str(e) or "stopped by SIGINT"
            text = "".join(f"{who}: {line}\n" for line in lines.split("\n"))
    sys.stdout.flush()
    sys.stderr.write(text)
    sys.stderr.flush()
    if launched:  # an orderly exit would wait for the other ranks
        for fabric in launched:
            for child in getattr(fabric.strategy.launcher, "procs", []):
                child.kill()
        os._exit(code)
    sys.exit(code)

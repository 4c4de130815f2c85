"""Errors that are one line: what the user gave is wrong (exit code 2), or the run cannot go on (exit code 1)."""

import os
import sys
import traceback

import torch


class BadInput(ValueError):
    """What was given is wrong. Its text is the whole message: a line a fault, `file:line: field: reason`."""


class Failed(RuntimeError):
    """The run cannot go on, through no fault of what was given. Its text is the whole message."""


LAUNCHED = []  # every Fabric of this process, whose child processes end with it


def rank() -> int:
    """This process's place among all, before launching too. 0 where it is alone."""
    env = os.environ
    first = env.get("RANK") or env.get("SLURM_PROCID") or env.get("LOCAL_RANK") or 0
    return int(first) or int(env.get("NODE_RANK") or 0)


def debugging() -> bool:
    """Whether --debug is among the arguments: exceptions then reach pdb as they are."""
    given = " ".join(sys.argv[1:]).lower().replace("=", " ").split()
    return any(a == "--debug" and b != "false" for a, b in zip(given, [*given[1:], ""]))


def first_to_fail() -> bool:
    """Whether no other rank has failed yet: all find most faults, and one of them says it. A rank
    that cannot ask ended because rank 0, which keeps the count, had ended before."""
    try:
        return torch.distributed.distributed_c10d._get_default_store().add("failed", 1) == 1
    except Exception:
        return False


def run_cli(main) -> None:
    """Run main(). A known error is one line; any error ends every rank, so that none waits for another."""
    if debugging():
        return main()
    try:
        return main()
    except SystemExit as e:
        code, message = e.code, ""
    except (BadInput, Failed) as e:
        code, message = 2 if isinstance(e, BadInput) else 1, str(e)
    except BaseException:
        code, message = 1, traceback.format_exc()
    launched = torch.distributed.is_initialized()
    if message and (first_to_fail() if launched else rank() == 0):
        prefix = f"rank {rank()}: " if rank() else ""
        lines = [f"{prefix}error: {line}\n" for line in message.splitlines()]
        sys.stderr.write("".join(lines))  # one write: other ranks may print too
    sys.stdout.flush()
    sys.stderr.flush()
    if launched:
        for fabric in LAUNCHED:
            for child in getattr(fabric.strategy.launcher, "procs", []):
                child.kill()
        os._exit(code)  # no teardown: it would wait for ranks that wait for us
    sys.exit(code)

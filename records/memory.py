"""A bound on memory while a user's files are read: a few bytes can unpack, or be rendered, to gigabytes.

Linux enforces it; elsewhere nothing does.
"""

import contextlib
import resource
from pathlib import Path

MOST_MEMORY = 2 * 2**30  # bytes, for one batch of records or one dialogue
STATM = Path("/proc/self/statm")

_bounded = False  # whether this process is within bounded_memory


@contextlib.contextmanager
def bounded_memory():
    """Raise MemoryError where what is within takes more than MOST_MEMORY beyond what the process has
    already. Within another one it changes nothing."""
    global _bounded
    if _bounded or not STATM.exists():
        yield
        return
    data_pages = int(STATM.read_text().split()[5])  # private and writable, as RLIMIT_DATA counts
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = (data_pages * resource.getpagesize() + MOST_MEMORY, soft, hard)
    limit = min(x for x in limits if x != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    _bounded = True
    try:
        yield
    finally:
        _bounded = False
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def over_memory() -> str:
    """The bound in words, for a message."""
    return f"more than {MOST_MEMORY / 2**30:g} GB of memory"

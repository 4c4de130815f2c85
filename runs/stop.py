"""When a run ends early: a signal, the time limit or a step. All ranks end after the same step."""

import contextlib
import math
import os
import signal
import threading
import time
from collections import Counter

import torch

from runs.console import current_work, say
from runs.devices import all_reduce
from runs.errors import Interrupted, end_process, ending_signals


class Stop:
    """Whether to stop, and why.

    A training step, a save and an export are finished first. Other work may end at any moment: it runs
    within interruptible(), and Trainer.__exit__ catches the Interrupted that ends it.

    reason: for the line that says so. signal: the number of the signal that arrived, or 0.
    """

    def __init__(self, seconds: float | None, at_step: int | None):
        self.deadline = time.monotonic() + seconds if seconds else math.inf
        self.at_step, self.signal, self.reason = at_step, 0, ""
        self._agreed = 0.0
        self._interruptible = False  # whether `check` ends the work that is going on
        self._ends_on_signal = False  # whether a signal ends it at once, without `check`
        self._answered = threading.Event()
        self._terminals = [fd for fd in (1, 2) if os.isatty(fd)]
        self._handlers = {n: signal.signal(n, self._on_signal) for n in ending_signals()}
        # Python calls a handler only between two of its own instructions, so not while torch computes.
        # The number of a signal is in this pipe at once.
        numbers, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
        threading.Thread(target=self._answer, args=(numbers,), daemon=True).start()

    def close(self) -> None:
        """Leave the signals to those who had them before."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._pipe)

    # ---- signals

    def _answer(self, numbers: int) -> None:
        """The thread that answers a signal: the first one with a line; a second one ends the process.
        A terminal that is closed may send two SIGHUP, from the system and from the shell."""
        arrived = Counter()
        with open(numbers, "rb", buffering=0) as pipe:
            while byte := pipe.read(1):
                number = byte[0]
                arrived[number] += number in self._handlers
                if number == signal.SIGHUP:
                    self._leave_lost_terminals()
                is_second = arrived[number] > 1 and number != signal.SIGHUP
                with contextlib.suppress(OSError):  # nobody reads
                    if arrived[number] == 1:
                        say(self._answer_line(number))
                        self._answered.set()
                    elif is_second:
                        say("ended at once: what was not saved is lost")
                if is_second:
                    end_process(128 + number)

    def _answer_line(self, number: int) -> str:
        doing = "ending" if self._interruptible else "waiting for the end of"
        again = "a second one ends the run at once"
        return f"{signal.Signals(number).name}: {doing} {current_work()}; {again}"

    def _leave_lost_terminals(self) -> None:
        """Output to a terminal that is gone would fail, and the run with it before it is saved."""
        for fd in self._terminals:
            if not os.isatty(fd):
                os.dup2(os.open(os.devnull, os.O_WRONLY), fd)

    def _on_signal(self, number, _frame):
        self.signal = number
        if self._ends_on_signal:
            self._answered.wait(1)  # the line names the work that is interrupted here
            raise Interrupted(number)

    # ---- whether to end

    def code(self) -> float:
        """What this rank knows: 0 go on; 0.5 the time is up; else a signal's number. The largest
        code of all ranks counts."""
        return self.signal or 0.5 * (time.monotonic() > self.deadline)

    def set_agreed(self, code: float) -> None:
        """The largest code of all ranks, which they exchange in each step (Trainer.check_finite)."""
        self._agreed = code
        if code >= 1:
            self.signal, self.reason = int(code), signal.Signals(int(code)).name
        elif code:
            self.reason = "max_time"

    def requested(self, step: int | None = None) -> bool:
        """Whether to end after this step. Several ranks go by the code that they agreed on; a signal
        that arrives after their exchange waits for the next step's."""
        if step is not None and step == self.at_step:
            self.reason = "stop_at"
            return True
        if not torch.distributed.is_initialized():
            self.set_agreed(self.code())
        return self._agreed > 0

    def requested_now(self, device) -> bool:
        """The same outside of a training step: the ranks ask each other. A collective."""
        if torch.distributed.is_initialized():
            code = torch.tensor(self.code(), dtype=torch.float64, device=device)
            self.set_agreed(all_reduce(code, "max").item())
        return self.requested()

    @contextlib.contextmanager
    def interruptible(self, alone: bool = False):
        """Work that may end at any moment, by Interrupted. Where several processes work together only
        `check` ends it, on all of them. alone: one process does it, and the others wait for it in
        devices.on_rank_0: then a signal ends it at once, as in a run of one process."""
        before = self._interruptible, self._ends_on_signal
        self._interruptible = True
        self._ends_on_signal = alone or not torch.distributed.is_initialized()
        try:
            if self._ends_on_signal and self.signal:  # it arrived before
                raise Interrupted(self.signal)
            yield
        finally:
            self._interruptible, self._ends_on_signal = before

    def check(self, device, time_limit: bool = False) -> None:
        """Within interruptible(): raise Interrupted if a signal asks the run to end, or the time limit
        where that counts too. Elsewhere nothing. A collective."""
        if not self._interruptible or not self.requested_now(device):
            return
        if self._agreed >= 1 or time_limit:
            raise Interrupted(self._agreed)

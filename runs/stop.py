"""When a run ends early: a signal, the time limit or a step. All ranks end after the same step."""

import math
import signal
import time

import torch

from runs.devices import all_reduce


class Stop:
    """Whether to stop, and why.

    reason: for the line that says so. signal: the number of the signal that arrived, or 0.
    """

    def __init__(self, seconds: float | None, at_step: int | None):
        self.deadline = time.monotonic() + seconds if seconds else math.inf
        self.at_step, self.signal, self.reason = at_step, 0, ""
        self._agreed = 0.0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number, _frame):
        self.signal = number
        signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once

    def code(self) -> float:
        """What this rank knows: 0 go on; 0.5 the time is up; else a signal's number. The largest
        code of all ranks counts."""
        return self.signal or 0.5 * (time.monotonic() > self.deadline)

    def set_agreed(self, code: float) -> None:
        """The largest code of all ranks, which they exchange in each step (Trainer.check_finite)."""
        self._agreed = code

    def requested(self, step: int | None = None) -> bool:
        """Whether to end after this step. Several ranks go by the code that they agreed on; a signal
        that arrives after their exchange waits for the next step's."""
        if step is not None and step == self.at_step:
            self.reason = "stop_at"
            return True
        alone = not torch.distributed.is_initialized()
        code = self.code() if alone else self._agreed
        if code >= 1:
            self.signal, self.reason = int(code), signal.Signals(int(code)).name
        elif code:
            self.reason = "max_time"
        return code > 0

    def requested_now(self, device) -> bool:
        """The same outside of a training step: the ranks ask each other. A collective."""
        if torch.distributed.is_initialized():
            code = torch.tensor(self.code(), dtype=torch.float64, device=device)
            self.set_agreed(all_reduce(code, "max").item())
        return self.requested()

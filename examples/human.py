"""Online KTO with a person as the rater: the run waits at each iteration until its answers have thumbs.

    python examples/human.py --config config/thumbs.yaml --model out/smollm2-135m --data.train prompts.jsonl \\
        --online.prompts_per_iteration 16 --online.max_iterations 4 --data.max_completion 64

The page is that of rate.py, at --page.port. Thumbs are written to iterations/thumbs-N.jsonl in the run's folder as they
are given: after a kill, a resume asks for the missing ones alone. While the run waits, Ctrl-C saves and ends it.
Answers are rated as they are, also those that were cut; a thumb can be changed until the last one is given.
"""

import threading
import time
from dataclasses import dataclass
from pathlib import Path

from jsonargparse.typing import NonNegativeInt

import online
from evaluation import as_answers, with_answers
from infra.console import run_cli, say
from infra.settings import free, refuse_unless
from rate import RateServer
from records.examples import Example
from records.ratings import Ratings, count_labels, shown_key

LOOKS = 0.2  # seconds between two looks at a signal and at the thumbs


@dataclass(frozen=True)
class PageSettings:
    port: NonNegativeInt = free(8765)
    """The page is on 127.0.0.1 at this port; 0: any free one."""


@dataclass(frozen=True)
class Settings(online.Settings):
    page: PageSettings = PageSettings()


class IterationDesk:
    """What the page shows: the answers of an iteration that have no thumb yet."""

    def __init__(self):
        self.iteration, self.answers, self.ratings, self.model = 0, [], None, ""

    def begin(self, iteration: int, answers: list[tuple[str, str]], file: Path, model: str) -> None:
        """answers: (prompt, completion) texts; equal ones share a thumb."""
        file.parent.mkdir(exist_ok=True)
        self.answers, self.ratings, self.model = answers, Ratings(file), model
        self.iteration = iteration

    def labels(self) -> list[bool | None]:
        ratings = self.ratings.read()
        labels = []
        for prompt, completion in self.answers:
            rating = ratings.get(shown_key(prompt, completion))
            labels.append(rating.label if rating else None)
        return labels

    def state(self) -> dict:
        cards = []
        for i, ((prompt, completion), label) in enumerate(zip(self.answers, self.labels())):
            if label is None:
                card = {"id": f"{self.iteration}.{i}", "prompt": prompt, "text": completion}
                cards.append(card)
        name = f"{self.model}, iteration {self.iteration}"
        state = {"mode": "cards", "model": name, "chat": False, "asks": False, "cards": cards}
        return state | {"waiting": not cards} | counts(self.ratings)

    def rate(self, prompt: str, completion: str, label: bool | None) -> dict:
        known = (prompt, completion) in self.answers
        refuse_unless(known, "the run is at another iteration: load the page again")
        self.ratings.set(prompt, completion, label)
        return counts(self.ratings)


def counts(ratings: Ratings) -> dict:
    up, down = count_labels(ratings.read())
    return {"up": up, "down": down, "note": "", "command": ""}


desk = IterationDesk()
servers = []  # the one that runs, from the first iteration on


def rate(run, prompts: list[Example], answers: list[list[int]]) -> list[Example]:
    """The answers with the thumbs of a person, once all have one."""
    refuse_unless(run.fabric.world_size == 1, "devices: the others would not wait for a person")
    answered = with_answers(prompts, answers)
    texts = [
        (a.prompt, a.completion) for a in as_answers(run.tokenizer, answered, run.cfg.online.stop)
    ]
    i = run.state.iteration
    desk.begin(i, texts, run.folder / "iterations" / f"thumbs-{i}.jsonl", run.cfg.model)
    if not servers:
        servers.append(RateServer(desk, run.cfg.page.port))
        threading.Thread(target=servers[0].serve_forever, daemon=True).start()
    say(f"iteration {i}: {desk.labels().count(None)} answers need a thumb: open {servers[0].url}")
    while None in (labels := desk.labels()):
        run.stop.check(run.fabric.device, time_limit=True)
        time.sleep(LOOKS)
    return [e._replace(label=label) for e, label in zip(answered, labels)]


def main(argv: list[str] | None = None) -> None:
    online.main(argv, settings=Settings, rate=rate)


if __name__ == "__main__":
    run_cli(main)

"""Talk to a model in the browser and give its answers thumbs up or down.

    python -m rate --model out/<run>                           # a chat
    python -m rate --model out/<run> --prompts prompts.jsonl   # one prompt of a file after the other, by keys

The thumbs are in ratings.jsonl, which kto.py reads. This file is the whole state: it is read and rewritten for each
thumb. A killed server therefore loses no thumb, and an open page continues with the next server. Another program may
add and remove lines. If it adds a field to a line, the page does not find this thumb any more. The page shows the
command that trains on the thumbs. If the model is behind a server, use Open WebUI and convert its export
(docs/convert.md).
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveInt

from generate import AskedModel, read_prompts
from infra.console import run_cli, say
from infra.parse import parse_command
from infra.settings import LocalPath, Sampling, refuse_unless
from rate.desk import Desk
from rate.ratings import Ratings
from rate.server import RateServer


@dataclass(frozen=True, kw_only=True)
class RateSettings(Sampling):
    """python -m rate --model out/<run> opens a page on which a person rates the model's answers."""

    model: str
    """A run's folder, its `final`, a checkpoint, or any folder or id that kto.py takes."""
    ratings: LocalPath = "ratings.jsonl"
    """The file with the thumbs. Its records are read first. If the file does not exist, it is created."""
    prompts: str | None = None
    """Records in any form that online.py reads. Their prompts are shown one after the other, except rated ones.
    Default: a chat."""
    port: NonNegativeInt = 8765
    """The page is on 127.0.0.1 at this port; 0: any free one."""
    temperature: NonNegativeFloat = 0.7
    """Sampling temperature; at 0 another answer is always the same one."""
    max_new_tokens: PositiveInt = 512
    """Longest answer in tokens; less where the context ends."""
    plain: bool = False
    """true: leave the chat template aside, as for a run on plain records. Each prompt is then alone."""
    chat_template_kwargs: str | None = None
    """As data.chat_template_kwargs of the run that trained the model: enable_thinking=false."""


def main(argv: list[str] | None = None) -> None:
    args = parse_command(RateSettings, __doc__, sys.argv[1:] if argv is None else argv)
    file = Path(args.ratings).expanduser()
    refuse_unless(
        file.suffix == ".jsonl" and file.absolute().parent.is_dir(),
        f"ratings: {file}: expected a .jsonl file in a folder that exists",
    )
    ratings = Ratings(file)
    ratings.read()  # a bad line is refused before a model is loaded
    server = RateServer(args.port)  # and so is a port that is taken
    model = AskedModel(args)
    prompts = read_prompts(args.prompts, model.asked) if args.prompts else {}
    desk = server.desk = Desk(args.model, model, args, ratings, list(prompts.values()))
    say(f"open {server.url} in a browser; Ctrl-C ends it, the thumbs are in {file}")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        desk.close()
        server.server_close()
    counts = desk.counts()
    say(f"{counts['up']} up, {counts['down']} down in {file}")
    if counts["command"]:
        say(f"train on them: {counts['command']}")


if __name__ == "__main__":
    sys.argv[0] = "-m rate"  # as --help says it
    run_cli(main)

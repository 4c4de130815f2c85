"""What is in a data file, as a run would see it: python data.py FILE [--model M]."""

import contextlib
import shutil
import sys
import textwrap

import numpy as np

from records.examples import Example, column_names, describe_examples, load_examples
from records.forms import Fault, read_records, split_sources, understand_record
from records.tokenizer import Tokenizer, model_file
from runs.errors import BadInput
from runs.settings import Data, with_limits

KINDS = ("paired", "rated", "demonstrations", "prompts")


def histogram(lengths: np.ndarray, width: int, bins: int = 8) -> list[str]:
    """Lines of `from to | bar | count`, bins of equal width."""
    low, high = lengths.min(), lengths.max()
    edges = low + np.arange(bins + 1) * -(-(high + 1 - low) // bins)
    counts, _ = np.histogram(lengths, edges)
    bars = ["#" * -(-n * max(8, width - 30) // max(counts)) for n in counts]
    rows = zip(edges, edges[1:] - 1, bars, counts)
    return [f"{a:7} to {b:6} |{bar} {n:,}" for a, b, bar, n in rows]


def marked(e: Example, tokenizer: Tokenizer, score_prompt: bool, width: int) -> list[str]:
    """An example token by token: > before lines of scored tokens."""
    known = tokenizer.processor
    piece = known.id_to_token if tokenizer.fast else known.id_to_piece
    lines = [f"{e.where}, {'' if e.label else 'un'}desirable"]
    for i, ids in enumerate((e.prompt, *e.completions)):
        texts = [str(piece(int(j))) for j in ids]
        texts[200:-100] = (
            [f"... {len(ids) - 300:,} more ..."] if len(ids) > 300 else texts[200:-100]
        )
        lines.append(f"  {f'completion {i}' if i else 'prompt'}, {len(ids)} tokens")
        first = "  > " if i or score_prompt else "    "
        shown = "|".join(x if x.isprintable() else repr(x)[1:-1] for x in texts)
        lines += [first + line for line in textwrap.wrap(shown, width - 4)]
    return lines


def _guess_kind(d: Data) -> str:
    """What the first record is a record of."""
    (files, _), *_ = split_sources(d.train)
    _, raw = next(read_records(files[0], d.extra_fields, column_names(d)), ("", None))
    for kind in KINDS:
        with contextlib.suppress(Fault):
            understand_record(raw, kind, d.extra_fields, column_names(d))
            return kind
    return "rated"


def main() -> None:
    import jsonargparse

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(prog="data.py", description=__doc__, exit_on_error=False)
    parser.add_argument("--model", default="demo/base", help="whose tokenizer and chat template")
    parser.add_class_arguments(Data, None, as_group=False)
    first, *rest = sys.argv[1:] or ["--help"]
    try:
        args = parser.parse_args([first if first[:1] == "-" else f"--train={first}", *rest])
    except (jsonargparse.ArgumentError, TypeError) as e:
        raise BadInput(" ".join(str(e).split())) from None
    given = args.as_dict()
    from hub.folders import fetch_model  # slow to import

    folder = fetch_model(given.pop("model"))
    d, config = Data(**given), model_file(folder, "config.json")
    context = config.get("max_position_embeddings") or config.get("n_positions") or 8192
    d, tokenizer = with_limits(d, context), Tokenizer(folder, d.chat_template, d.date)
    loaded, width = (
        load_examples(d.train, tokenizer, _guess_kind(d), d),
        shutil.get_terminal_size().columns,
    )
    print(describe_examples(d.train, *loaded[:3]))
    for what, lengths in zip(
        ("prompt", "completion"), np.split(loaded.examples.rows["length"], [1], 1)
    ):
        if lengths.size:
            print(f"{what} tokens", *histogram(lengths, width), sep="\n")
    print("an example by tokens, those after > scored")
    print(*marked(loaded.examples[0], tokenizer, d.score_prompt, width), sep="\n")

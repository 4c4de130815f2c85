"""Records of ours from foreign ones, by the settings of a conversion.

Reading order: Reader.read, the whole way of all files; one record; ratings or pairs; paths that find nothing.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from itertools import chain

from convert.answers import Judged, judged_answers
from convert.conversation import nodes_of, rated_messages, rated_nodes
from convert.layout import REWARDS, Conversion, Layout
from convert.paths import paths_in
from convert.values import Skipped
from infra.console import BadInput
from infra.settings import refuse
from records.forms import ENCODER, understand_record
from records.sources import decoded_records, files_of, split_sources

# a file may have none of these
OPTIONAL = ("system", "tools", "weight", "role", "content", "children", "rating_id")
KINDS = {True: "up", False: "down", None: "unrated"}
# (file:line, raw record)
Raws = Iterable[tuple[str, object]]


class Reader:
    """Makes our records of foreign ones, and counts those that it reads, makes and drops."""

    def __init__(self, settings: Conversion, counts: Counter):
        """Raises BadInput."""
        self.settings = settings
        self.layout = Layout(settings, counts)
        self.counts = counts
        self.sample: object = None  # the first raw record, for messages
        self.faults: list[str] = []

    def read_all(self) -> Iterator[str]:
        """Our records of all files, as lines of JSON. Raises BadInput: see read."""
        files = chain.from_iterable(map(files_of, split_sources(self.settings.file)))
        yield from self.read([decoded_records(file, self.faults, self.counts) for file in files])

    def read(self, files: list[Raws]) -> Iterator[str]:
        """Our records of those of several files, as lines of JSON. Raises BadInput at the end, with the first twenty
        bad records."""
        layout = self.layout
        understood = None
        for answers in self._answers(files):
            for where, record in self._written(answers):
                try:
                    line = ENCODER.encode({**record, "source": where})
                    line.encode()  # raises a ValueError at half of a character
                    understood = understand_record(record, layout.kind, layout.extra, is_whole=True)
                except ValueError as e:  # BadInput, or Python's own
                    self.faults.append(f"{where}: {e}")
                    continue
                is_pair = len(understood.completions) == 2
                self.counts["pairs" if is_pair else KINDS[understood.label]] += 1
                yield line
        self._refuse_lost_paths(has_written=understood is not None)
        refuse(self.faults)

    # ---- one record ------------------------------------------------------------------------------

    def _answers(self, files: list[Raws]) -> Iterator[list[Judged]]:
        """The answers of each record. Faults of a record are added to `faults`."""
        for raws in files:
            records = self._counted(raws)
            if self.layout.is_tree:
                messages = list(records)
                records = [(where, messages) for where, _ in messages[:1]]
            for where, raw in records:
                try:
                    yield list(self._answers_of_record(where, raw))
                except Skipped as e:
                    self._drop(str(e))
                except BadInput as e:
                    self.faults.append(f"{where}: {e}")

    def _counted(self, raws: Raws) -> Raws:
        for where, raw in raws:
            self.counts["read"] += 1
            self.sample = self.sample or raw
            yield where, raw

    def _answers_of_record(self, where: str, raw: object) -> Iterable[Judged]:
        """The answers of a record, or of a file that is one tree: (where, message) of its records. Raises Skipped,
        BadInput."""
        layout = self.layout
        if layout.is_tree:
            return rated_nodes(layout, nodes_of(layout, raw), {}, None)
        if not isinstance(raw, dict):
            raise BadInput(f"record: expected an object, got {raw!r:.50}")
        layout.refuse_unwanted(raw, inner=False)
        if layout.rates_messages:
            return rated_messages(layout, where, raw)
        return judged_answers(layout, where, raw)

    def _drop(self, reason: str) -> None:
        """Count a dropped answer."""
        self.counts[f"dropped: {reason}"] += 1

    # ---- ratings or pairs ------------------------------------------------------------------------

    def _written(self, answers: list[Judged]) -> Iterator[tuple[str, dict]]:
        """(where, record of ours) of the answers of a record, as --kind asks for them."""
        layout = self.layout
        groups: dict[str, list[Judged]] = {}  # by their prompts
        for judged in answers:
            if judged.fault:
                self.faults.append(f"{judged.where}: {judged.fault}")
            elif judged.reason:
                self._drop(judged.reason)
            elif layout.makes_pairs and judged.answer is not None:
                groups.setdefault(key_of(judged.fields), []).append(judged)
            else:
                yield judged.where, judged.record
        if len(groups) > 1 and layout.has_two_answers:
            self._drop("whose earlier turns differ")
            return
        for group in groups.values():
            pairs = self._pairs(group)
            if not pairs:
                self._drop("without a better and a worse answer")
            for better, worse in pairs:
                pair = {"chosen": better.answer, "rejected": worse.answer}
                has_rewards = layout.labels.are_cuts and layout.labels.higher_is_better
                if has_rewards and better.score is not None:
                    pair |= zip(REWARDS, (better.score, worse.score))
                yield better.where, {**better.fields, **pair}

    def _pairs(self, answers: list[Judged]) -> list[tuple[Judged, Judged]]:
        """The better and the worse of the answers to one prompt: of two lists one by one; otherwise the best and the
        worst, by their scores if all have one, by their labels if not."""
        good = [judged for judged in answers if judged.label is True]
        bad = [judged for judged in answers if judged.label is False]
        if self.layout.has_lists:
            return list(zip(good, bad))
        scores = {judged.score for judged in answers}
        if None in scores:
            return list(zip(good[:1], bad[:1]))
        is_descending = self.layout.labels.higher_is_better
        order = sorted(answers, key=lambda judged: judged.score, reverse=is_descending)
        return [(order[0], order[-1])] if len(scores) > 1 else []

    # ---- paths that find nothing -----------------------------------------------------------------

    def _refuse_lost_paths(self, has_written: bool) -> None:
        """Raise BadInput for a path that finds nothing in any record, such as one with a typo, and for one that the
        other settings do not need, such as that of an unknown field. If the path may find nothing, this is counted."""
        layout = self.layout
        lost = [("--where: ", column) for column, _, _ in layout.where if not column.was_asked]
        for name, column in layout.columns.items():
            if name not in (*OPTIONAL, *layout.extra):
                lost.append((f"--columns: {name}=", column))
            elif not column.was_found:
                self.counts[f"without {name}={column.text}"] = self.counts["read"]
        if layout.marks and not layout.was_marked:
            self.counts["without a mark of --turns"] = self.counts["read"]
        for setting, column in lost:
            if not column.was_found and (column.was_asked or has_written):
                verb = "found" if column.was_asked else "needed"
                paths = list(dict.fromkeys(paths_in(self.sample)))
                near = ", ".join(get_close_matches(column.text, paths, 4, 0.5) or paths[:4])
                raise BadInput(f"{setting}{column.text}: {verb} in no record; there is {near}")


def key_of(fields: dict) -> str:
    return json.dumps(fields, sort_keys=True, default=str)

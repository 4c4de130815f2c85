"""README.md of an exported model: what it is, from what, on which data, how it scored."""

import csv
from pathlib import Path

import yaml

from support.checkpoint import RunState
from support.cli import dotted


def model_card(settings: str, state: RunState, run: Path) -> str:
    """`settings`: YAML of the run in the folder `run`, of which the model is the step in `state`."""
    cfg, program = yaml.safe_load(settings), Path(state.program).stem
    given = "\n".join(f"| {name} | {value} |" for name, value in dotted(cfg) if value is not None)
    data = state.identity.get("data (token ids and labels)", "")
    return f"""---
library_name: transformers
tags: [{program}, preference-tuning]
---

# {Path(cfg["model"]).name}, tuned by {program}.py

Started from `{cfg["model"]}`, trained for {state.step} steps on `{cfg["data"]["train"]}`
(fingerprint of token ids and labels: `{data}`).

{_scores(run / "val.csv", state.step)}## Settings

| setting | value |
| --- | --- |
{given}
"""


def _scores(file: Path, step: int) -> str:
    """The last validation up to this step."""
    if not file.exists():
        return ""
    with open(file, newline="") as f:
        rows = [row for row in csv.DictReader(f) if int(row["step"]) <= step]
    if not rows:
        return ""
    cells = "\n".join(f"| {k} | {v} |" for k, v in rows[-1].items() if v)
    return f"## Validation\n\n| metric | value |\n| --- | --- |\n{cells}\n\n"

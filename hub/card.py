"""README.md of an exported model."""

import csv
from pathlib import Path

import yaml

from runs.checkpoint import RunState
from runs.settings import flatten


def model_card(settings: str, state: RunState, run: Path) -> str:
    """What it is, from what, on which data, with which scores and settings (YAML), of a run's step."""
    cfg, program, rows = yaml.safe_load(settings), Path(state.program).stem, []
    if (run / "val.csv").exists():
        rows = list(csv.DictReader((run / "val.csv").read_text().splitlines()))
    scored = [row for row in rows if int(row["step"]) <= state.step][-1:]
    facts = [*(x for row in scored for x in row.items()), *flatten(cfg).items()]
    table = "\n".join(f"| {name} | {value} |" for name, value in facts if value not in (None, ""))
    return f"""---
library_name: transformers
tags: [{program}, preference-tuning]
---

# {Path(cfg["model"]).name}, tuned by {program}.py

Started from `{cfg["model"]}`, trained for {state.step} steps on `{cfg["data"]["train"]}`
(fingerprint of its token ids and labels: `{state.identity.get("data (token ids and labels)")}`).

| last validation, then settings | |
| --- | --- |
{table}
"""

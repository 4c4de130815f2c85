"""The house rules: imports point one way, from the programs down to runs/, and never in a circle."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = ("runs", "hub", "records")
FILES = {f.stem: f for f in ROOT.glob("*.py")}
FILES |= {f"{room}.{f.stem}": f for room in ROOMS for f in ROOT.glob(f"{room}/*.py")}
# from the lowest floor up; what is not named here is a program
FLOORS = (*ROOMS, "data", "head", "model", "reference", "generate", "rollout", "evaluate", "setup")
FLOORS += ("train",)


def imported(file: Path) -> set[str]:
    """Our own modules that a file imports, at its head or within a function."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names & set(FILES)


IMPORTS = {name: imported(file) for name, file in FILES.items()}


def floor(name: str) -> int:
    room = name.split(".")[0]
    return FLOORS.index(room) if room in FLOORS else len(FLOORS)


def test_nothing_imports_from_a_floor_above_its_own():
    up = {(a, b) for a, others in IMPORTS.items() for b in others if floor(a) < floor(b)}
    assert up == set()


def test_no_imports_run_in_a_circle():
    left = dict(IMPORTS)
    while free := [name for name, others in left.items() if not others & set(left)]:
        for name in free:
            del left[name]
    assert left == {}, "these import each other, or one that does"

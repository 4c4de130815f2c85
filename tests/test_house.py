"""The house rules: imports point one way, from the programs down to infra/, and never in a circle; and what is imported
is declared in pyproject.toml."""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = {f.stem: f for f in ROOT.glob("*.py")}
FILES |= {
    f"{room}.{f.stem}": f
    for room in ("infra", "models", "records")
    for f in ROOT.glob(f"{room}/*.py")
}
# A file may import from its own floor and from those below; what is not named here is a program.
FLOORS = [
    "infra",
    "packing attention head models.hub models.lora models.quantize records",
    "data",
    "objective model",
    "models.load models.export reference",
    "checks sampler",
    "rollout",
    "evaluation",
    "run",
    "trainer",
]
FLOOR = {name: i for i, names in enumerate(FLOORS) for name in names.split()}


def imported(file: Path) -> set[str]:
    """All that a file imports, at its head or within a function."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


IMPORTS = {name: imported(file) & set(FILES) for name, file in FILES.items()}


def floor(name: str) -> int:
    room = name.split(".")[0]
    return FLOOR.get(name, FLOOR.get(room, len(FLOORS)))


def test_imports_point_down_and_never_run_in_a_circle():
    up = {(a, b) for a, others in IMPORTS.items() for b in others if floor(a) < floor(b)}
    assert up == set()
    left = dict(IMPORTS)
    while free := [name for name, others in left.items() if not others & set(left)]:
        for name in free:
            del left[name]
    assert left == {}, "these import each other, or one that does"


def test_every_package_that_is_imported_is_declared():
    declared = re.findall(r'^  "([\w-]+)', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    declared = {name.replace("pyyaml", "yaml") for name in declared}
    names = set().union(*map(imported, FILES.values()))
    packages = {name.split(".")[0] for name in names} - {name.split(".")[0] for name in FILES}
    assert packages - sys.stdlib_module_names - declared == {"demo"}
    assert "yaml" in packages and "torch" in packages, "else nothing was read"

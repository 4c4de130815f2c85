"""The house rules: who may import whom, and how long things may be."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = {f.stem: f for f in ROOT.glob("*.py")}
FILES |= {f"support.{f.stem}": f for f in ROOT.glob("support/*.py") if f.stem != "__init__"}
TREES = {name: ast.parse(file.read_text()) for name, file in FILES.items()}
FUNCTIONS = {
    (name, f.name, f.lineno): f
    for name, tree in TREES.items()
    for f in ast.walk(tree)
    if isinstance(f, ast.FunctionDef)
}


def imported(tree: ast.Module) -> set[str]:
    """Our own modules that a file imports, at its head or within a function."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names & set(FILES)


IMPORTS = {name: imported(tree) for name, tree in TREES.items()}
# what is started; generate and data are that too, but first of all what others import
PROGRAMS = {
    name
    for name, file in FILES.items()
    if file.read_text().endswith("run_cli(main)\n") and name not in ("generate", "data")
}


def test_programs_are_known_by_their_last_line():
    assert {"kto", "dpo", "spin", "online", "report"} <= PROGRAMS


def test_support_imports_nothing_from_above_it():
    above = {
        (name, other)
        for name, others in IMPORTS.items()
        for other in others
        if name.startswith("support.") and not other.startswith("support.")
    }
    assert above == set()


def test_nothing_imports_a_program_but_another_program():
    users = {name for name, others in IMPORTS.items() if others & PROGRAMS}
    assert users <= PROGRAMS


def test_no_imports_run_in_a_circle():
    left = dict(IMPORTS)
    while free := [name for name, others in left.items() if not others & set(left)]:
        for name in free:
            del left[name]
    assert left == {}, "these import each other, or one that does"


def test_no_function_is_longer_than_a_screen():
    lines = {key: f.end_lineno - f.lineno + 1 for key, f in FUNCTIONS.items()}
    assert {key: n for key, n in lines.items() if n > 60} == {}
    loop = {
        key: n
        for key, n in lines.items()
        if key[:2] in (("train", "fit"), ("train", "forward_backward"))
    }
    assert len(loop) == 2 and max(loop.values()) < 40, loop


def test_no_signature_has_more_than_seven_parameters():
    def parameters(a: ast.arguments) -> int:
        return len([*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))])

    long = {key: n for key, f in FUNCTIONS.items() if (n := parameters(f.args)) > 7}
    assert long == {}


@pytest.mark.parametrize("name, most", dict(kto=140, dpo=120, spin=170, train=360).items())
def test_the_files_that_are_read_first_are_short(name, most):
    assert len(FILES[name].read_text().splitlines()) <= most


@pytest.mark.parametrize("name", FILES)
def test_lines_are_short(name):
    lines = [line.strip() for line in FILES[name].read_text().splitlines()]
    code = [line for line in lines if line and not line.startswith("#")]
    assert sum(map(len, code)) / len(code) <= 50

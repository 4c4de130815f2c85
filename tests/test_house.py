"""The house rules: imports point one way, from the programs down to infra/, and never in a circle; what is imported is
declared in pyproject.toml; and each room stays within its budget."""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = {f.stem: f for f in ROOT.glob("*.py")}
ROOMS = ["infra", "models", "records", "convert", "rate"]
FILES |= {f"{room}.{f.stem}": f for room in ROOMS for f in ROOT.glob(f"{room}/*.py")}
# A file may import from its own floor and from those below; what is not named here is a program.
FLOORS = [
    "infra",
    "packing attention head models.hub models.lora models.quantize models.peft_folders records preview",
    "data",
    "objective model sampler",
    "models.load models.other models.export models.shard",
    "reference reference_cache",
    "checks export",
    "rollout",
    "evaluation",
    "run",
    "finish",
    "trainer",
]
FLOOR = {name: i for i, names in enumerate(FLOORS) for name in names.split()}


def is_for_types(node: ast.AST) -> bool:
    """Whether the node is `if TYPE_CHECKING:`, whose imports do not run."""
    return isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """What those of these nodes import that are import statements."""
    nodes = list(nodes)
    never_run = {id(x) for node in nodes if is_for_types(node) for x in node.body}
    names = set()
    for node in nodes:
        if id(node) in never_run:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


TREES = {name: ast.parse(file.read_text()) for name, file in FILES.items()}
# all that a file imports, at its head or within a function
IMPORTED = {name: imported(ast.walk(tree)) for name, tree in TREES.items()}
IMPORTS = {name: names & set(FILES) for name, names in IMPORTED.items()}


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
    names = set().union(*IMPORTED.values())
    packages = {name.split(".")[0] for name in names} - {name.split(".")[0] for name in FILES}
    assert packages - sys.stdlib_module_names - declared == {"demo"}
    assert "yaml" in packages and "torch" in packages, "else nothing was read"


# ---- budgets -------------------------------------------------------------------------------------

# The most tokens of Python that a file at the root, or a room, may have. Whoever needs more raises the budget
# in the same commit and says why.
BUDGETS = {
    "attention.py": 1_985,
    "checks.py": 2_000,
    "data.py": 1_550,
    "dpo.py": 960,
    "evaluation.py": 1_630,  # eval/after.json, which other programs read
    "export.py": 485,
    "finish.py": 725,  # which was in evaluation.py: no run needs it before its end
    "generate.py": 1_300,
    "head.py": 1_295,
    "kto.py": 975,  # kto.balance; a fork's attributes take the place of settings
    "model.py": 2_305,  # log-probs of several tokens at a place
    "objective.py": 645,  # settings that depend on the records
    "online.py": 1_055,  # the sizes of iterations after rate, which were in rollout.py
    "packing.py": 2_155,  # the split of a step, which was in data.py
    "preview.py": 755,  # which was in records/
    "reference.py": 930,
    "reference_cache.py": 845,  # which was in reference.py: only some runs need it
    "report.py": 850,  # runs of two programs are named by their own settings
    "rollout.py": 2_130,  # the refusal of nf4 with merged adapters, which was in checks.py
    "run.py": 1_865,  # the context manager of a run, which was in trainer.py
    "sampler.py": 2_335,  # rows of the cache move into gaps, which costs no copy of all rows
    "spin.py": 965,
    "sweep.py": 545,  # a program that does not exist is one line
    "trainer.py": 2_740,  # the reference names the tokens of Objective.top_k
    "infra/": 12_335,  # signs of a sick run (health.py); empty texts; a closed terminal; the group of a setting
    "models/": 9_180,
    "records/": 11_305,  # the label of a marked part is read once
    "convert/": 8_765,
    "rate/": 2_115,
    "tests/": 93_105,  # log-probs of likeliest tokens, stop texts, 8-bit AdamW; answers that rounding changes
    "benchmarks/": 8_990,
}
# What `python kto.py` imports.
FILES_OF_A_RUN = 33
TOKENS_OF_A_RUN = 51_020


def n_tokens(file: Path) -> int:
    """Tokens of Python in a file. Comments, docstrings and the layout are free, so nothing is gained by folding lines.
    An f-string is one token, as it is before Python 3.12."""
    text = file.read_text()
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                docstrings.add((node.lineno, node.col_offset))
    free = "COMMENT NL NEWLINE INDENT DEDENT ENDMARKER".split()
    n = 0
    depth = 0  # in how many f-strings
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if depth == 0 and kind not in free and token.start not in docstrings:
            n += 1
        depth += (kind == "FSTRING_START") - (kind == "FSTRING_END")
    return n


def test_every_room_and_every_file_at_the_root_stays_within_its_budget():
    tokens = dict.fromkeys(BUDGETS, 0)
    for file in ROOT.glob("*.py"):
        tokens[file.name] = n_tokens(file)
    for room in [*ROOMS, "tests", "benchmarks"]:
        tokens[f"{room}/"] = sum(map(n_tokens, ROOT.glob(f"{room}/**/*.py")))
    assert tokens.keys() == BUDGETS.keys(), "a new place needs a budget"
    above = {place: n for place, n in tokens.items() if n > BUDGETS[place]}
    assert above == {}, "these are above their budgets"


def test_a_run_imports_no_more_than_its_budget():
    files = {"kto"}
    new = files
    while new:
        # what a function imports when it is called does not count
        heads = [TREES[name].body for name in new]
        new = set().union(*map(imported, heads)) & set(FILES) - files
        files |= new
    tokens = sum(n_tokens(FILES[name]) for name in files)
    assert len(files) <= FILES_OF_A_RUN, sorted(files)
    assert not {name for name in files if name.split(".")[0] in ("convert", "rate")}
    assert tokens <= TOKENS_OF_A_RUN, sorted(files)

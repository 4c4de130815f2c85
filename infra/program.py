"""The files of a program: its own file, and the modules that it imports from its folder or from this project."""

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path

from infra.settings import ROOT


def program_hash(program: Path) -> str:
    """A hash of the contents of a program's files. An edited comment changes the hash, too."""
    contents = [hashlib.sha256(file.read_bytes()).digest() for file in program_files(program)]
    return hashlib.sha256(b"".join(sorted(contents))).hexdigest()[:12]


def program_files(program: Path) -> set[Path]:
    """The file and its own modules, also those that it imports within a function. The standard library's modulefinder
    fails if it meets a folder without __init__.py."""
    files = {program}
    new = [program]
    while new:
        for name in imported_names(new.pop()):
            for folder in (program.parent, ROOT):
                file = folder / f"{name.replace('.', '/')}.py"
                if file.is_file() and file not in files:
                    files.add(file)
                    new.append(file)
    return files


def imported_names(file: Path) -> Iterator[str]:
    """The dotted names of the modules that a file may import."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)

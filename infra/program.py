"""The files of a program: its own file, and all that it imports from files that are not installed packages."""

import ast
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

from infra.console import is_installed
from infra.settings import ROOT


def program_hash(program: Path) -> str:
    """A hash of the contents of a program's files. An edited comment changes the hash, too."""
    contents = [hashlib.sha256(file.read_bytes()).digest() for file in program_files(program)]
    return hashlib.sha256(b"".join(sorted(contents))).hexdigest()[:12]


def program_files(program: Path) -> set[Path]:
    """The file and its own modules, also those that it imports within a function."""
    folders = [program.parent, *map(Path, sys.path[1:]), ROOT]
    folders = [folder for folder in folders if not is_installed(folder)]
    files: set[Path] = set()
    new = {program}
    while new:
        file = new.pop()
        files.add(file)
        for places, name in imported_names(file, folders):
            new |= files_of_module(places, name) - files
    return files


def imported_names(file: Path, folders: list[Path]) -> Iterator[tuple[list[Path], str]]:
    """(folders, dotted name) of each module that a file may import from there."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # such as a file for another version of Python
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield folders, alias.name
        elif isinstance(node, ast.ImportFrom):
            places = folders
            if node.level:  # from .. import name
                places = [file.parents[node.level - 1]]
            for alias in node.names:  # a module, or something in it
                yield places, ".".join(filter(None, (node.module, alias.name)))


def files_of_module(folders: list[Path], name: str) -> set[Path]:
    """The files of a dotted name: the packages that it stands in, and the module."""
    files = set()
    parts = name.split(".")
    for n in range(1, len(parts) + 1):
        for folder in folders:
            path = folder.joinpath(*parts[:n])
            candidates = [path / "__init__.py", path.with_suffix(".py")]
            there = [file for file in candidates if file.is_file()]
            if there:
                files.add(there[0])
                break
    return files

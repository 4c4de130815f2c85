"""python -m convert FILE: see program.py."""

import gc
import sys

from convert.program import main
from infra.console import run_cli

gc.disable()  # a conversion makes no circles of objects
sys.argv[0] = "-m convert"  # as --help says it
run_cli(lambda: main(sys.argv[1:]))

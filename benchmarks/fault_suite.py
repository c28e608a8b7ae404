"""How well faults are explained, on the programs of `tests/explain/faults`, or of a folder.

    python -m benchmarks.fault_suite [FOLDER]

For each program: whether the fault is flagged, with the right core, with a first help after which
the program has no error, and whether that restores what was meant.
"""

import sys

from tests.explain.fault_programs import main

if __name__ == "__main__":
    main(*sys.argv[1:])

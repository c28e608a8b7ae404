"""`python -m sbp` is the command `sbp`."""

import sys

from sbp.cli import main

sys.exit(main())

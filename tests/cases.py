"""Names of test cases."""

import re


def case_name(value: object) -> str:
    """A value as the name of its case. Addresses are left out: they differ between the processes
    that share the tests.

    >>> case_name({"mesh": 3})
    "{'mesh': 3}"
    """
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))

"""The definition of S, B and P, and the checks of rows against it: on numbers (`oracle`) and by
Z3."""

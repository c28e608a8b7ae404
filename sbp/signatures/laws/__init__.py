"""What S, B and P mean, and how rows are checked against it: enumeration and Z3."""

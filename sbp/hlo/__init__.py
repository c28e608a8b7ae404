"""What the optimised HLO text of a compiled program says: bytes that a device sends, seconds on the
TPU compiler's schedule."""

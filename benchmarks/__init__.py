"""Measurements of sbp, and of the programs that it makes."""

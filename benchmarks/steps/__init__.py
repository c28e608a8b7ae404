"""Whole steps of everyday models: what the TPU compiler makes of our plan and of an expert's."""

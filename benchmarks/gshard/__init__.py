"""`sbp plan`: costs of the GShard paper's models, with its figures and tables."""

"""TEMPORARY placeholder, replaced by the report being written."""
from dataclasses import dataclass
from typing import Any
@dataclass
class Report:
    program: Any; diagnostics: tuple = (); title: str = ""; output_names: tuple = ()
    @property
    def ok(self): return not any(d.severity=="error" for d in self.diagnostics)

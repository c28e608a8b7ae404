"""TEMPORARY placeholder, replaced by the blame module being written."""
from sbp.errors import Diagnostic
def explain(graph, mesh, demand, boxing):
    return (Diagnostic(code="no-typing", severity="error", title="no typing"),)
def costly_annotations(program, demand, boxing):
    return ()
def memory_diagnostic(least, limit):
    return Diagnostic(code="memory-limit", severity="error", title="no fit")

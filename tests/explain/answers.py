"""Plans of small programs to ask about, and what golden texts leave out."""

import re
from collections.abc import Mapping

import sbp
from sbp.limits import Policy
from tests.cases import GRID as MESH, shape as shape
from tests.edits import run_source


def planned(source, args, mesh=MESH, boxing: Policy | Mapping[str, Policy] = "auto", **types):
    """The plan of the function `f` of a source text that linecache knows, as of a notebook's
    cell."""
    text = "import jax, sbp\nimport jax.numpy as jnp\nfrom sbp import S, B, P\n" + source
    f = run_source(text, f"<why {hash(text)}>")["f"]
    return sbp.jit(f, mesh, boxing=boxing, hardware="tpu-v3", **types).plan(*args)


def masked(text):
    """The text without modelled times and peak memory, and with single gaps between columns. Times
    and memory depend on how a version of JAX traces a gradient, and the widths of columns depend on
    them."""
    times = re.sub(r"(?<![\w.])\d[\d.]* (s|ms|us|ns)(?= |$|,|\)|<)", "#", text, flags=re.MULTILINE)
    shares = re.sub(r"[+-][\d.]+%", "#%", times)
    memory = re.sub(r"(?<=peak memory).*|(?<=<b>peak memory</b>).*", " #", shares)
    return re.sub(r"(?<=\S) {2,}", "  ", memory)

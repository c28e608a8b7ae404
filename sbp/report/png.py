"""SVG -> PNG, for hosts that show no SVG."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from sbp.errors import SbpError


def png_of(svg: str, scale: float) -> bytes:
    """A picture as PNG on a white ground, with the fonts that matplotlib brings: it is the same on
    every machine. Characters that these fonts lack, such as Chinese ones, are empty boxes.

    Arguments:
      svg: the picture.
      scale: pixels of the PNG for a pixel of the picture.

    Raises:
      SbpError: `unknown-option` where a library of the extra is not installed.
    """
    resvg, matplotlib = (_library(name) for name in ("resvg_py", "matplotlib"))
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return bytes(
        resvg.svg_to_bytes(
            svg_string=svg,
            zoom=scale,
            background="white",
            skip_system_fonts=True,
            font_files=[str(fonts / f"DejaVuSansMono{face}.ttf") for face in ("", "-Bold")],
            font_family="DejaVu Sans Mono",
            monospace_family="DejaVu Sans Mono",
        )
    )


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise SbpError(
            f"a picture as PNG needs {name}; install the extra: pip install 'sbp-jax[png]'",
            code="unknown-option",
        ) from None

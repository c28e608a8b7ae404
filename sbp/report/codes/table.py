"""All pages by code."""

from __future__ import annotations

from sbp.report.codes.annotations import ANNOTATIONS
from sbp.report.codes.dims import DIMS
from sbp.report.codes.handwritten import HANDWRITTEN
from sbp.report.codes.page import CodePage
from sbp.report.codes.running import RUNNING
from sbp.report.codes.typings import TYPINGS

PAGES: dict[str, CodePage] = {
    page.code: page for page in (*TYPINGS, *ANNOTATIONS, *DIMS, *RUNNING, *HANDWRITTEN)
}
"""A page for each code of `sbp.errors.CODES`."""

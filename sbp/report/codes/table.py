"""All pages by code."""

from __future__ import annotations

from sbp.report.codes.page import CodePage
from sbp.report.codes.running import RUNNING
from sbp.report.codes.types import TYPES

PAGES: dict[str, CodePage] = {page.code: page for page in (*TYPES, *RUNNING)}
"""A page for each code of `sbp.errors.CODES`."""

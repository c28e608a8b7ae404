"""One page for each diagnostic code."""

from sbp.report.codes.running import PAGES as PAGES
from sbp.report.codes.types import PRELUDE as PRELUDE

"""One page for each diagnostic code."""

from sbp.report.codes.page import PRELUDE as PRELUDE
from sbp.report.codes.page import CodePage as CodePage
from sbp.report.codes.running import PAGES as PAGES

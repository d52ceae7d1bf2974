"""One HTML page about runs, made from only their `events.jsonl`."""

from hadal.plugins.monitor.report.journal import Journal, PageAtEnd, communication_lines
from hadal.plugins.monitor.report.page import write_page
from hadal.plugins.monitor.report.run import RunRecord, read_run

__all__ = ["Journal", "PageAtEnd", "RunRecord", "communication_lines", "read_run", "write_page"]

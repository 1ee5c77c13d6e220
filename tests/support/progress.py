"""Plugin of pytest: a failure is shown as soon as it happens, with the command that repeats it."""

from __future__ import annotations

import pytest

#: The end of what a test printed or logged.
_MAX_CAPTURED = 4000


class FailuresAtOnce:
    """Writes each failure's report when it comes in; pytest alone would wait for the end of the run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        terminal = self._config.pluginmanager.getplugin("terminalreporter")
        terminal.ensure_newline()
        terminal.write_sep("_", f"{report.nodeid} failed ({report.when})", red=True)
        terminal.write_line(report.longreprtext)
        for title, text in report.sections:
            terminal.write_sep("-", title)
            terminal.write_line(text[-_MAX_CAPTURED:])
        terminal.write_line(f"Repeat it: make test ARGS='{report.nodeid}'", red=True)

    def pytest_sessionfinish(self) -> None:
        """Every failure has been shown: the summary only lists them."""
        self._config.option.tbstyle = "no"


def register(config: pytest.Config) -> None:
    """Registers the plugin where the terminal is: with pytest-xdist, not in the processes that run tests."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(config))

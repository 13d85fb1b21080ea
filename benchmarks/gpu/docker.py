"""The checks of the GPU image, as far as they run outside of it: the two engines, and the look at Apex."""

from __future__ import annotations

import os
import sys

from benchmarks.gpu import ROOT
from benchmarks.gpu.context import Context
from benchmarks.gpu.report import Report

__all__ = ["run"]

NO_APEX = 4  # exit code of `check_engines --strict` where the real Apex took no part


def run(context: Context, report: Report) -> None:
    """Run both programs, and expect of each what this machine has."""
    engines = [sys.executable, str(ROOT / "docker" / "check_engines.py"), "--device", context.device, "--strict"]
    done = context.program(engines, most=400.0)
    report.figures["check_engines"] = done.out.splitlines()
    apart = done.code == NO_APEX
    report.check("check_engines finds nothing wrong", done.code == 0 or apart, done.reason)
    both = all(f"{level} ok" in done.out for level in ("O1", "O2"))
    report.check("check_engines ran O1 and O2", both, done.out[-300:])
    if apart:
        report.leave_out("not compared with genuine Apex (it is not installed with its kernels)")
    report.says = "check_engines holds at O1 and O2" + (", our engine alone" if apart else " against genuine Apex")
    apex = context.program([sys.executable, str(ROOT / "docker" / "check_apex.py")], most=400.0)
    report.figures["check_apex"] = (apex.out + apex.error).splitlines()
    if apex.code == 0:
        report.says += "; check_apex finds Apex with its kernels"
        return
    # Without Apex it must refuse, in one line that says why.
    lines = [line for line in apex.error.splitlines() if line.startswith("check_apex: ")]
    report.check("check_apex refuses in one line", apex.code == 1 and len(lines) == 1, apex.reason)
    report.leave_out(f"the surface of genuine Apex ({lines[0].removeprefix('check_apex: ') if lines else 'no reason'})")
    if context.apex_src is not None:
        _look_at_sources(context, report)


def _look_at_sources(context: Context, report: Report) -> None:
    """Show the program the given sources, which were never built: that is what it must say."""
    code = (
        f"import runpy, sys; sys.path.insert(0, {os.fspath(context.apex_src)!r}); sys.argv = ['check_apex']; "
        f"runpy.run_path({str(ROOT / 'docker' / 'check_apex.py')!r}, run_name='__main__')"
    )
    done = context.program([sys.executable, "-c", code])
    report.check("check_apex sees that the sources are not built", "without its kernels" in done.error, done.reason)

"""Comparisons with whole curves, and a headless Chromium to look at their pages."""

from __future__ import annotations

import base64
import json
import math
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from ampcompare.results.analysis.summary import summarize
from ampcompare.results.records.comparison import Comparison
from ampcompare.results.records.evaluation import EpochResult
from ampcompare.results.records.run import EngineInfo, RunRecord, RunSummary, RunTrace
from ampcompare.results.report.base import FORMATS
from ampcompare.settings.config import RunConfig
from ampcompare.settings.recipe import Recipe

MakeRich = Callable[..., Comparison]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE = 60.0
STEPS = 60


def _trace(arm: int, seed: int, diverges: bool) -> RunTrace:
    last = STEPS // 3 if diverges else STEPS
    steps = list(range(0, last, 2))
    losses = [2.3 * math.exp(-step / (20 + arm)) + 0.01 * seed for step in steps]
    if diverges:
        losses[-3:] = [math.nan] * 3
    scaled = arm % 3 == 1
    return RunTrace(
        steps=steps,
        losses=losses,
        loss_scales=[2.0 ** (16 - step // 20) for step in steps] if scaled else [],
        skipped=[step // 20 for step in steps] if scaled else [0] * len(steps),
        step_seconds=[0.01 * (1 + arm % 5) * (1 + 0.02 * place) for place in range(21)],
    )


def _record(arm: str, number: int, seed: int, epochs: int, diverges: bool) -> RunRecord:
    results = [
        EpochResult(
            epoch=epoch,
            samples=1000,
            top1_correct=1000 - 500 // (epoch + 1) - 3 * (number % 7) - seed,
            top5_correct=1000,
            loss=1.5 / (epoch + 1) + 0.01 * seed,
            train_seconds=1.0 + 0.1 * (number % 5) + 0.02 * seed,
            eval_seconds=0.1,
        )
        for epoch in range(0 if diverges else epochs)
    ]
    summary = RunSummary(
        metric_final=results[-1].value if results else None, metric_best=results[-1].value if results else None,
        epochs=results, num_steps=STEPS // 3 if diverges else STEPS, step_seconds_median=0.012 * (1 + number % 5),
        samples_per_second=1000.0, epoch_seconds=1.0, peak_bytes=(40 + number % 9) * 2**20,
        diverged_step=STEPS // 3 - 6 if diverges else None, divergence="non-finite weights" if diverges else None,
        losses_sha256=f"{number} {seed}",
    )  # fmt: skip
    return RunRecord(
        cell=f"{number}-{seed}",
        arm=arm,
        status="diverged" if diverges else "completed",
        config=RunConfig(arm=arm if arm == "apex:O2" else "fp32", recipe=Recipe(seed=seed, epochs=epochs)),
        engine=EngineInfo(name="compat", version="25.05", reason="apex is not installed") if number else None,
        environment={"torch": "2.13.0", "device": "cpu", "processor": "a processor"},
        summary=summary,
        trace=_trace(number, seed, diverges),
    )


@pytest.fixture(scope="session")
def make_rich() -> MakeRich:
    """Build a comparison of arms with curves; those named in `diverging` stop before their first evaluation."""

    def make(
        arms: Sequence[str], seeds: int = 3, epochs: int = 4, diverging: Sequence[str] = ()
    ) -> Comparison:
        records = [
            _record(arm, number, seed, epochs, arm in diverging)
            for seed in range(seeds)
            for number, arm in enumerate(arms)
        ]
        return summarize(records, arms=arms, reference=arms[0], command="ampcompare compare --seeds 0-2")

    return make


@pytest.fixture(scope="session")
def hundred_arms(make_rich: MakeRich) -> str:
    """The page of 100 arms with two seeds and more epochs than a curve has points."""
    return (
        FORMATS["html"]
        .make_reporter()
        .render(make_rich([f"half:loss_scale={number}" for number in range(100)], 2, 30))
    )


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """A browser, where there is one."""
    if find_chromium() is None:
        pytest.skip(f"no Chromium on this machine: none of {', '.join(NAMES)} is on the path")
    with Chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def find_chromium() -> str | None:
    """Return the browser, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """A headless browser with one page, driven over its debugging pipe: real clicks and media.

    Attributes:
        errors: console errors, uncaught exceptions and broken policies since the page was opened.
        requests: addresses that the page asked for.
    """

    def __init__(self, profile: Path) -> None:
        read_command, self._write = os.pipe()
        self._read, write_answer = os.pipe()
        program = find_chromium()
        assert program is not None
        flags = (
            "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync "
            "--disable-component-update --disable-extensions --hide-scrollbars --remote-debugging-pipe"
        )
        # The browser reads commands from descriptor 3 and writes answers to 4.
        script = 'exec "$0" "$@" 3<&"$IN" 4>&"$OUT"'
        self._process = subprocess.Popen(
            ["bash", "-c", script, program, *flags.split(), f"--user-data-dir={profile}", "about:blank"],
            env={**os.environ, "IN": str(read_command), "OUT": str(write_answer)},
            pass_fds=(read_command, write_answer),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_command)
        os.close(write_answer)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._loaded = False
        self.errors: list[str] = []
        self.requests: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._write)
        os.close(self._read)
        self._process.terminate()
        self._process.wait(PATIENCE)

    def call(self, method: str, **params: Any) -> Any:
        """Run a command of the DevTools protocol and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        deadline = time.monotonic() + PATIENCE
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._read, 1 << 16)
            assert part, "the browser has ended"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, facts: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(facts["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and facts["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(facts["args"]))
        elif event == "Log.entryAdded" and facts["entry"]["level"] in ("error", "warning"):
            self.errors.append(json.dumps(facts["entry"]))
        elif event == "Network.requestWillBeSent":
            self.requests.append(facts["request"]["url"])

    def open(self, path: Path, *, width: int = 1280, dark: bool = False, script: bool = True) -> None:
        """Open a file at this width in CSS pixels, and wait until it is loaded and drawn."""
        self.errors.clear()
        self.requests.clear()
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=phone
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        self.call("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + PATIENCE
        while not self._loaded:
            self._next(deadline)

    def value(self, expression: str) -> Any:
        """Return the value of JavaScript, awaited where it is a promise."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of an element."""
        box = self.value(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect(); "
            "return [r.x + r.width / 2, r.y + r.height / 2] })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def screenshot(self) -> bytes:
        """Return what is on the screen as a PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

"""`ampcompare exec` watches for mistakes: one line each, errors on request, or nothing."""

MISTAKES = """
    import torch
    from torch import nn
    from apex import amp

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    model = nn.DataParallel(model.cuda())
    for _ in range(3):
        with amp.scale_loss(model(torch.ones(4, 4)).mean(), optimizer) as scaled:
            scaled.backward()
            nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print("trained")
"""


def _lines(stderr: str) -> list[str]:
    return [
        line.partition(": ")[0] + ": " + line.split(": ")[1]
        for line in stderr.splitlines()
        if "guard" in line
    ]


def test_one_line_for_each_mistake(write, legacy) -> None:
    """By default each mistake is one line on stderr with guard, file, line and remedy, and the script goes on."""
    write("train.py", MISTAKES)
    done = legacy("--device", "cpu", "train.py", PYTHONWARNINGS="ignore")
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert _lines(done.stderr) == [
        "ampcompare guard initialize-before-cuda: train.py:9",
        "ampcompare guard clip-scaled: train.py:13",
    ]
    assert "before the optimizer is built and before `amp.initialize`" in done.stderr


def test_strict_guards_end_at_the_line(write, legacy) -> None:
    """`--strict-guards` raises there: the traceback ends at the script's line, and the exit code is Python's 1."""
    write("train.py", MISTAKES)
    done = legacy("--device", "cpu", "--strict-guards", "train.py", PYTHONWARNINGS="ignore")
    assert (done.returncode, done.stdout) == (1, "")
    frames = [line for line in done.stderr.splitlines() if line.startswith("  File ")]
    assert [frame.rpartition("train.py")[2] for frame in frames] == ['", line 9, in <module>']
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ampcompare.base.errors.GuardError: guard initialize-before-cuda: train.py:9: ")


def test_no_guards(write, legacy) -> None:
    """`--no-guards` says nothing, and takes no part in the script's imports."""
    write("train.py", MISTAKES + "\n    import sys; assert 'ampcompare.guards.hooks' not in sys.modules\n")
    done = legacy("--device", "cpu", "--no-guards", "train.py", PYTHONWARNINGS="ignore")
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert "guard" not in done.stderr


def test_scripts_without_torch_stay_without(write, legacy) -> None:
    write("train.py", "import sys; print('torch' in sys.modules, 'ampcompare.guards.hooks' in sys.modules)")
    done = legacy("train.py")
    assert (done.stdout, done.stderr) == ("False False\n", "")


def test_initialize_of_wrapped_models_still_raises(write, legacy) -> None:
    """Apex's own refusal stays the script's exception, and our line comes before it."""
    write(
        "train.py",
        """
        import torch
        from apex import amp
        model = torch.nn.DataParallel(torch.nn.Linear(2, 2))
        try:
            amp.initialize(model, opt_level="O1", verbosity=0)
        except RuntimeError as error:
            print("Parallel wrappers should only be applied AFTER" in str(error))
        """,
    )
    done = legacy("train.py")
    assert done.stdout == "True\n", done.stderr
    assert _lines(done.stderr) == ["ampcompare guard initialize-after-wrapping: train.py:6"]

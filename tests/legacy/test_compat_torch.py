"""`--compat-torch`: what torch and Python have changed works again, and is said once."""

from __future__ import annotations

OLD = """
    import argparse, io, sys
    import collections, fractions, inspect, time
    import numpy as np
    import torch
    from fractions import gcd
    from torch._six import inf, string_classes, container_abcs

    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--lr", type=float)
    print(parser.parse_args())
    assert gcd(12, 18) == 6 and inf == float("inf") and isinstance([], collections.Iterable)
    assert np.float is float and np.int is int and time.clock() > 0
    assert inspect.getargspec(lambda a, b=1: 0)[0] == ["a", "b"]

    for _ in range(2):
        assert torch.full((2,), 1).dtype is torch.float32
        assert torch.full((2,), 1, dtype=torch.int64).dtype is torch.int64
        correct = torch.arange(12).view(4, 3).t().eq(3)
        assert correct[:2].view(-1).tolist() == correct[:2].reshape(-1).tolist()
        assert (1 - torch.tensor([True, False])).tolist() == [0, 1]
        file = io.BytesIO()
        torch.save({"args": argparse.Namespace(lr=1)}, file)
        file.seek(0)
        assert torch.load(file)["args"].lr == 1
        assert iter(torch.utils.data.DataLoader([1, 2])).next().item() == 1
    try:
        correct.view(12, 1)
    except RuntimeError:
        print("other views still fail")
    try:
        np.absent
    except AttributeError:
        print("other names too")
"""
SAID = [
    "torch._six is gone",
    "fractions.gcd is gone; math.gcd",
    "collections.Iterable is gone; collections.abc.Iterable",
    "numpy.float is gone; float",
    "numpy.int is gone; int",
    "time.clock is gone; time.perf_counter",
    "inspect.getargspec is gone; inspect.getfullargspec",
    "torch.full of an integer gives floats",
    ".view(-1) of a tensor that is not contiguous copies it",
    "1 - mask counts a mask as bytes",
    "torch.load runs with weights_only=False",
    "the .next() of a DataLoader's iterator",
    "the script gets --local_rank from LOCAL_RANK",
]


def test_old_habits(write, legacy) -> None:
    """Each removed name and changed default works as it used to, with one line each however often it is used."""
    write("train.py", OLD)
    done = legacy("--compat-torch", "train.py", "--lr", "0.5", LOCAL_RANK="3")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Namespace(local_rank=3, lr=0.5)\nother views still fail\nother names too\n"
    lines = done.stderr.splitlines()
    assert all(line.startswith("ampcompare: ") for line in lines), done.stderr
    for said in SAID:
        assert sum(said in line for line in lines) == 1, said
    assert len(lines) == len(SAID)


def test_nothing_is_mended_unasked(write, legacy) -> None:
    """Without the option, new torch and Python stay as they are, and an unused mend says nothing."""
    write("old.py", "from fractions import gcd")
    assert "ImportError: cannot import name 'gcd'" in legacy("old.py").stderr
    write("new.py", "import torch; print(torch.full((1,), 1.0))")
    done = legacy("--compat-torch", "new.py")
    assert (done.returncode, done.stderr) == (0, "")


def test_local_rank_spellings(write, legacy) -> None:
    """The parser finds the rank however it is spelled, the command line before the environment."""
    write(
        "train.py",
        """
        import argparse
        for option, arguments in [
            ("--local_rank", ["--local-rank=1"]),  # what torch.distributed.launch passes today
            ("--local_rank", ["--local-rank", "2"]),
            ("--local-rank", ["--local_rank=3"]),
            ("--local_rank", ["--local_rank=4"]),
            ("--local_rank", []),
        ]:
            parser = argparse.ArgumentParser()
            parser.add_argument(option)
            print(parser.parse_args(arguments).local_rank)
        print(argparse.ArgumentParser().parse_args([]))
        """,
    )
    done = legacy("--compat-torch", "train.py", LOCAL_RANK="5")
    assert done.stdout.split() == ["1", "2", "3", "4", "5", "Namespace()"], done.stderr

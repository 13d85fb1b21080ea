"""`--compat-torch`: what torch and Python have changed works again, and is said once."""

import pytest

OLD = """
    import argparse, io, sys
    import collections, fractions, time
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
    "torch._six.inf was removed; math.inf",
    "torch._six.string_classes was removed; (str, bytes)",
    "torch._six.container_abcs was removed",
    "fractions.gcd was removed; math.gcd",
    "collections.Iterable was removed; collections.abc.Iterable",
    "numpy.float was removed; float",
    "numpy.int was removed; int",
    "time.clock was removed; time.perf_counter",
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


MASKS = """
    import torch

    mask, t = torch.tensor([1, 0, 1, 0], dtype=torch.uint8), torch.arange(4.0)
    assert t.masked_fill(mask, 9).tolist() == torch.masked_fill(t, mask=mask, value=9).tolist() == [9, 1, 9, 3]
    assert t.clone().masked_fill_(mask, 9).tolist() == [9, 1, 9, 3]
    assert t[mask].tolist() == t.masked_select(mask).tolist() == torch.masked_select(t, mask).tolist() == [0, 2]
    assert torch.where(mask, t, -t).tolist() == t.where(mask, -t).tolist() == [0, -1, 2, -3]
    assert t.masked_scatter(mask, torch.tensor([7.0, 8.0])).tolist() == [7, 1, 8, 3]
    assert t.clone().masked_scatter_(mask, torch.tensor([7.0, 8.0])).tolist() == [7, 1, 8, 3]
    for index, value in ((mask, 9), (mask, torch.tensor(9.0)), (mask, torch.tensor([9.0, 9.0]))):
        put = t.clone()
        put[index] = value
        assert put.tolist() == [9, 1, 9, 3]
    rows = torch.zeros(2, 4)
    rows[:, mask] = 3
    assert rows.sum() == 12 and rows[1, ~mask].sum() == 0
    assert t.clone().index_put_((mask,), torch.tensor(9.0)).tolist() == [9, 1, 9, 3]
    for other in (1 - mask, ~mask, 1 - mask.bool(), torch.ones(4).byte() - mask, ~mask.bool()):
        assert t[other].tolist() == t.masked_select(other).tolist() == [1, 3], other
    assert ((t > 0) - (t > 1)).tolist() == [0, 1, 0, 0] and (t - (t > 1)).tolist() == [0, 1, 1, 2]
    assert (~torch.tensor([0, 200], dtype=torch.uint8)).tolist() == [255, 55], "no mask"
    weights = t.clone().requires_grad_()
    weights.masked_fill(mask, 0).sum().backward()
    assert weights.grad.tolist() == [0, 1, 0, 1]

    @torch.jit.script
    def scripted(a, b):
        return torch.where(a > 1, torch.full([4], 2.0), b)

    assert scripted(t, t).tolist() == [0, 1, 2, 2]
    S, optimizer = torch.optim.lr_scheduler, torch.optim.SGD([weights], 0.1)
    S.ReduceLROnPlateau(optimizer, "min", patience=2, verbose=True).step(1.0)
    assert S.StepLR(optimizer, 3, 0.5, -1, True).gamma == 0.5
"""


def test_masks_of_bytes(write, legacy) -> None:
    """uint8 masks work as they did before torch 1.2, schedulers take `verbose`, and scripted code still compiles."""
    write("train.py", MASKS)
    done = legacy("--compat-torch", "train.py", PYTHONWARNINGS="ignore")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("a uint8 mask is used as a bool mask, as before torch 1.2") == 1
    assert done.stderr.count("~ of a uint8 mask is 1 - mask") == 1
    assert done.stderr.count("verbose of a learning rate scheduler was removed") == 1


@pytest.mark.parametrize("options", [["--compat-torch"], ["--arm", "bf16"], ["--device", "cpu"]])
def test_files_with_the_names_of_modules(write, legacy, options: list[str]) -> None:
    """Torch gets the modules that it imports late, the script the files of these names that lie in its folder."""
    for name in ("triton/__init__.py", "profile.py", "statistics.py", "sympy.py"):
        write(name, "import os; mine = os.environ['ONLY_BY_THE_SCRIPT']")
    write(
        "train.py",
        """
        import os, torch
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with torch.autocast("cpu"):
            model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        os.environ["ONLY_BY_THE_SCRIPT"] = "mine"
        import profile, statistics, sympy, triton
        print(profile.mine, statistics.mine, sympy.mine, triton.mine)
        """,
    )
    done = legacy(*options, "train.py")
    assert (done.returncode, done.stdout) == (0, "mine mine mine mine\n"), done.stderr


def test_nothing_is_patched_unasked(write, legacy) -> None:
    """Without the option, new torch and Python stay as they are, and an unused patch prints nothing."""
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


def test_prelu_and_bounds_of_integers(write, legacy) -> None:
    """A float tensor bounds integers by its value, in place or not; `F.prelu` is looked up in torch at each call."""
    script = """
        import torch
        cells = torch.tensor([0, 3, 9])
        gain = torch.tensor([7.9])
        assert cells.clamp(max=gain[0] - 1).tolist() == [0, 3, 6]
        assert cells.clamp_(1, gain[0] - 1).tolist() == [1, 3, 6] and cells.dtype is torch.int64
        assert torch.ones(2).mul(9).clamp_(0, gain[0]).tolist() == [gain.item()] * 2
        torch.prelu = lambda input, weight: "seen"
        assert torch.nn.PReLU()(torch.ones(2)) == "seen"
    """
    write("train.py", script)
    done = legacy("--compat-torch", "train.py")
    assert done.returncode == 0, done.stderr
    assert "an integer tensor is clamped by the value of a float tensor" in done.stderr

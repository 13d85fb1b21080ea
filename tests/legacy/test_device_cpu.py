"""`--device cpu`: what a script does on CUDA happens on the CPU, also in the processes that it starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch

NOTE = "ampcompare: --device cpu: CUDA calls run on the CPU"

CUDA = """
    import copy, io
    import torch, torch.nn as nn
    from apex import amp

    torch.cuda.set_device(0)
    torch.cuda.manual_seed_all(1)
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0
    device = torch.device("cuda:0")

    host = torch.arange(4.0)
    moved = host.cuda(non_blocking=True)
    moved.sub_(1)
    host.to(device).mul_(7), host.to("cuda").zero_(), host.to(device=0).zero_(), host.pin_memory().cuda(0)
    assert host.tolist() == [0, 1, 2, 3], "a copy to a device leaves the source alone"
    leaf = torch.ones(2, device="cuda", requires_grad=True)
    assert leaf.cuda() is leaf and leaf.to("cuda") is leaf and leaf.to(torch.float64).dtype is torch.float64
    for made in (torch.zeros(2, device=device), torch.tensor([1.0], device="cuda:1"), torch.randn(2, device=0),
                 torch.full((2,), 1.0, device=device), host.new_zeros(3, device="cuda"),
                 torch.empty(2, pin_memory=True),
                 torch.as_tensor([1], device="cuda"), torch.cuda.FloatTensor([1.0]), host.type("torch.cuda.HalfTensor"),
                 host.type(torch.cuda.LongTensor), torch.cuda.HalfTensor(3)):
        assert made.device.type == "cpu"
    assert isinstance(torch.cuda.FloatTensor(1), torch.cuda.FloatTensor)
    torch.set_default_tensor_type("torch.cuda.FloatTensor")

    stream, start, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.stream(stream), torch.cuda.device(0):
        moved.record_stream(torch.cuda.current_stream())
    torch.cuda.current_stream().wait_stream(stream)
    end.record(), end.synchronize(), torch.cuda.synchronize()
    assert start.elapsed_time(end) > 0
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated(device) == torch.cuda.memory_reserved() == 0
    torch.cuda.reset_peak_memory_stats(), torch.cuda.empty_cache(), torch.cuda.memory_summary()
    torch.cuda.nvtx.range_push("x"), torch.cuda.nvtx.range_pop(), torch.cuda.cudart().cudaProfilerStart()
    assert torch.cuda.get_device_properties(0).total_memory > 0 and torch.cuda.get_device_capability() >= (7, 0)
    state = torch.cuda.get_rng_state()
    first = torch.rand(1)
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(1))

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return grad * torch.full((1,), 2.0, device="cuda").cuda()

    @torch.jit.script
    def scripted(x):
        return torch.zeros([2], device=x.device) + x

    assert scripted(torch.ones(2)).sum() == 2
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2)).cuda().to(0).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    replicas = nn.DataParallel(model, device_ids=[0]).cuda()
    output = Twice.apply(replicas(torch.randn(3, 1, 4, 4).cuda()))
    loss = nn.CrossEntropyLoss().cuda()(output, torch.tensor([0, 1, 1]).cuda())
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    for place in ("cuda:0", device, {"cuda:1": "cuda:0"}, None, lambda storage, loc: storage.cuda(0)):
        file.seek(0)
        model.load_state_dict(torch.load(file, map_location=place))
    loader = torch.utils.data.DataLoader(list(range(4)), batch_size=2, pin_memory=True)
    print(sum(int(batch.sum()) for batch in loader), next(model.parameters()).dtype)
"""


def test_cuda_calls_run_on_the_cpu(write, legacy) -> None:
    """Tensors, modules, types, streams, events, queries, loading and loaders of a CUDA script work, with one note."""
    write("train.py", CUDA)
    done = legacy("--device", "cpu", "train.py", PYTHONWARNINGS="ignore")
    assert (done.returncode, done.stdout) == (0, "6 torch.float16\n"), done.stderr
    assert done.stderr.startswith(NOTE)
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="on CUDA the script does run")
def test_without_the_option_nothing_is_mapped(write, legacy) -> None:
    """A script that needs CUDA fails as under plain Python unless the option is given, and one line names it."""
    write("train.py", "import torch; torch.nn.Linear(1, 1).cuda()")
    done = legacy("train.py")
    assert done.returncode == 1
    *traceback, last = done.stderr.splitlines()
    assert last.startswith("ampcompare: there is no GPU here; ")
    assert last.endswith("ampcompare exec --device cpu train.py")
    assert not [line for line in traceback if "ampcompare" in line]


@pytest.mark.skipif(torch.cuda.is_available(), reason="on CUDA the script does run")
def test_the_cause_of_an_error_has_no_frames_of_ours(write, python) -> None:
    """Tracebacks of chained errors are those of plain Python, guards or not."""
    source = """
        import torch

        try:
            torch.nn.Linear(1, 1).cuda()
        except (AssertionError, RuntimeError) as error:
            raise ValueError("no device") from error
    """
    write("train.py", source)
    plain, ours = python("train.py"), python("-m", "ampcompare", "exec", "train.py")
    assert (ours.returncode, ours.stderr) == (plain.returncode, plain.stderr)


CHILDREN = """
    import torch
    import torch.multiprocessing as multiprocessing
    from apex import amp
    from torch.utils.data import DataLoader, Dataset

    class Numbers(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            from apex.amp import scaler
            return torch.full((2,), float(index)).cuda(), "ampcompare" in scaler.__name__

    def train(rank, steps):
        model = torch.nn.Linear(2, 2).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        for _ in range(steps):
            with amp.scale_loss(model(torch.ones(4, 2, device="cuda")).float().mean(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        print(amp._amp_state.opt_properties.opt_level)

    if __name__ == "__main__":
        for values, ours in DataLoader(Numbers(), batch_size=4, num_workers=1, multiprocessing_context="spawn"):
            print(values.sum().item(), ours.tolist())
        multiprocessing.spawn(train, nprocs=1, args=(3,))
        child = multiprocessing.get_context("fork").Process(target=train, args=(0, 2))
        child.start()
        child.join()
"""


@pytest.mark.slow
def test_processes_of_the_script(write, legacy, python, tmp_path) -> None:
    """Spawned loader workers and trainers, and forked ones, have the stand-in, the device, the level and a record."""
    write("train.py", CHILDREN)
    done = legacy("--device", "cpu", "--opt-level", "O2", "--record", "steps.jsonl", "train.py")
    assert (done.returncode, done.stdout) == (0, "12.0 [True, True, True, True]\nO2\nO2\n"), done.stderr
    assert done.stderr.count(NOTE) == 1
    spawned = list(tmp_path.glob("steps.SpawnProcess-*.jsonl"))
    forked = list(tmp_path.glob("steps.pid*.jsonl"))
    assert len(spawned) == len(forked) == 1
    for path, steps in ((spawned[0], 3), (forked[0], 2)):
        text = path.read_text()
        assert text.count('"kind": "step"') == steps
        assert text.count('"kind": "end"') == 1


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the names of threads are read from /proc")
@pytest.mark.parametrize("end", ["torch.distributed.destroy_process_group()", "pass"])
def test_no_thread_of_a_group_outlives_the_script(write, python, end) -> None:
    """The threads of gloo end with the group, at the script's end at the latest: one that lived on could abort it."""
    write(
        "train.py",
        f"""
        import atexit, pathlib, torch
        from ampcompare.legacy.cpu_device import run_on_cpu

        def tell():
            tasks = pathlib.Path("/proc/self/task").iterdir()
            print(*(task.joinpath("comm").read_text().strip() for task in tasks))

        atexit.register(tell)  # runs after what run_on_cpu registers
        run_on_cpu()
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
        torch.distributed.all_reduce(torch.ones(1).cuda())
        {end}
        """,
    )
    done = python("train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("python")
    assert "gloo" not in done.stdout


@pytest.mark.slow
def test_torchrun_in_front(write, python, tmp_path) -> None:
    """Under torchrun every rank runs the script, on gloo in place of nccl, and leaves a record of its own."""
    write(
        "train.py",
        """
        import argparse, os, sys
        import torch
        parser = argparse.ArgumentParser()
        parser.add_argument("--local_rank", type=int, default=0)
        args = parser.parse_args()
        torch.cuda.set_device(args.local_rank)
        torch.distributed.init_process_group(backend="nccl", init_method="env://")
        total = torch.tensor([args.local_rank + 1.0]).cuda()
        torch.distributed.all_reduce(total)
        # One write: two ranks share the pipe, and an unbuffered print writes its line end apart.
        sys.stdout.write(f"rank {args.local_rank} total {total.item()}\\n")
        torch.distributed.destroy_process_group()
        """,
    )
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ours = ["-m", "ampcompare", "exec", "--device", "cpu", "--compat-torch", "--record", "steps.jsonl"]
    done = python(*launch, *ours, "train.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "rank 0 total 3.0", "rank 1 total 3.0"]
    assert "ampcompare: the script gets --local_rank from LOCAL_RANK" in done.stderr
    assert "ampcompare: process groups use gloo in place of nccl" in done.stderr
    assert sorted(path.name for path in tmp_path.glob("steps*")) == ["steps.jsonl", "steps.rank1.jsonl"]


@pytest.mark.slow
def test_the_older_launcher_in_front(write, python) -> None:
    """`torch.distributed.launch` puts `--local-rank` before our command, and the script gets it as it would alone."""
    write(
        "train.py",
        """
        import argparse, os, sys
        import torch
        from apex import amp
        parser = argparse.ArgumentParser()
        parser.add_argument("--local_rank", type=int, default=-1)
        parser.add_argument("--lr", type=float)
        args = parser.parse_args()
        torch.distributed.init_process_group(backend="gloo", init_method="env://")
        total = torch.tensor([args.local_rank + args.lr])
        torch.distributed.all_reduce(total)
        sys.stdout.write(f"rank {args.local_rank} total {total.item()} {sys.argv[1:]}\\n")
        torch.distributed.destroy_process_group()
        """,
    )
    launch = ["-W", "ignore::FutureWarning", "-m", "torch.distributed.launch", "--nproc-per-node", "2"]
    ours = ["-m", "ampcompare", "exec", "--compat-torch", "train.py", "--lr", "0.5"]
    done = python(*launch, "--master-port", str(_free_port()), *ours)
    assert done.returncode == 0, done.stderr
    lines = [f"rank {rank} total 2.0 ['--local-rank={rank}', '--lr', '0.5']" for rank in range(2)]
    assert sorted(line for line in done.stdout.splitlines() if line) == lines
    assert "ampcompare: --local-rank is given to the script as --local_rank" in done.stderr


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

"""`--device cpu`: what a script does on CUDA happens on the CPU, also in the processes that it starts."""

import json
import os
import re
from pathlib import Path

import pytest
import torch

import ampcompare
from ampcompare.script.process.execute import lacks_gpu

PACKAGE = Path(ampcompare.__file__).parent  # the folder of the checkout may have the same name
NOTE = "ampcompare: --device cpu: CUDA calls run on the CPU"

CUDA = """
    import copy, io
    import torch, torch.nn as nn
    from apex import amp

    torch.cuda.set_device(0)
    torch.cuda.manual_seed_all(1)
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0
    device = torch.device("cuda:0")

    assert torch.accelerator.is_available() and torch.accelerator.device_count() == 1
    assert torch.accelerator.current_accelerator().type == "cuda"
    torch.accelerator.set_device_index(0), torch.accelerator.synchronize()

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
                 host.type(torch.cuda.LongTensor), torch.cuda.HalfTensor(3), torch.asarray([1], device="cuda"),
                 torch.fft.fftfreq(4, device="cuda"), torch.fft.rfftfreq(4, device=device)):
        assert made.device.type == "cpu"
    generator = torch.Generator("cuda").manual_seed(1)
    assert isinstance(generator, torch.Generator) and isinstance(torch.default_generator, torch.Generator)
    assert torch.rand(1, generator=generator, device=device) == torch.rand(1, generator=generator.manual_seed(1))
    with torch.device("meta"):
        assert nn.Linear(2, 2).weight.is_meta and torch.arange(2).is_meta, "as libraries make a model to load into"
    torch.set_default_device("cuda")
    assert torch.zeros(2).device.type == "cpu"
    torch.set_default_device(None)
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
    assert done.stderr.count("\n") == 2
    assert done.stderr.endswith(": ampcompare migrate --verify train.py\n")


AUTOCAST = """
    import torch
    from torch.cuda.amp import autocast, custom_bwd, custom_fwd
    from torch.utils.checkpoint import checkpoint

    assert torch.version.cuda.split(".")[0].isdigit() and torch.backends.cudnn.version() > 7000
    assert torch.cuda.get_device_capability() >= (8, 0) and torch.cuda.get_device_properties(0).major >= 8
    assert torch.cuda.is_bf16_supported() and torch.cuda.nccl.version() and not torch.cuda.memory_stats()["any"]
    model, x = torch.nn.Linear(4, 4).cuda(), torch.ones(2, 4).cuda()
    half, bfloat, full = torch.float16, torch.bfloat16, torch.float32

    def state():
        return torch.is_autocast_enabled(), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")

    assert state() == (False, False, half)
    for block, dtype in [
        (autocast(), half),
        (autocast(dtype=bfloat), bfloat),
        (torch.autocast("cuda"), half),
        (torch.autocast(device_type="cuda", dtype=bfloat), bfloat),
        (torch.amp.autocast("cuda", half), half),
    ]:
        with block:
            assert model(x).dtype is dtype and state() == (True, True, dtype)
            assert torch.nn.functional.cross_entropy(model(x), torch.tensor([0, 1]).cuda()).dtype is full
            assert model(x).softmax(-1).dtype is model(x).sum().dtype is full
            with autocast(enabled=False):
                assert model(x).dtype is full and not torch.is_autocast_enabled()
                with torch.autocast("cuda", dtype=dtype):
                    assert model(x).dtype is dtype
            assert model(x).dtype is dtype
        assert model(x).dtype is full and state() == (False, False, half)
        assert torch.get_autocast_dtype("cpu") is bfloat

    torch.set_autocast_enabled(True)
    torch.set_autocast_gpu_dtype(bfloat)
    assert model(x).dtype is bfloat
    torch.set_autocast_enabled(False)
    torch.set_autocast_gpu_dtype(half)
    torch.clear_autocast_cache()  # as the end of a block does
    assert model(x).dtype is full
    seen = []

    class Product(torch.autograd.Function):
        @staticmethod
        @custom_fwd(cast_inputs=full)
        def forward(ctx, a, b):
            seen.append((a.dtype, torch.is_autocast_enabled()))
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        @custom_bwd
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            seen.append(((grad @ b.t()).dtype, torch.is_autocast_enabled()))
            return grad @ b.t(), a.t() @ grad

    weight = torch.randn(4, 4, device="cuda", requires_grad=True)
    with autocast():
        product = Product.apply(model(x), weight)
        again = checkpoint(lambda x: model(x).relu(), x, use_reentrant=False)
    assert (product.dtype, again.dtype) == (full, half)
    product.sum().backward(), again.float().sum().backward()
    assert seen == [(full, False), (full, False)], seen
"""


def test_autocast_for_cuda_casts_on_the_cpu(write, legacy) -> None:
    """Autocast for CUDA has its effect and its state in every form, and leaves the CPU's own state as it was."""
    write("train.py", AUTOCAST)
    done = legacy("--device", "cpu", "train.py", PYTHONWARNINGS="ignore")
    assert done.returncode == 0, done.stderr


NEED_A_GPU = [
    "torch.ones(1).type('torch.cuda.FloatTensor')",
    "torch.ones(1).to(0)",
    "torch.ones(1).pin_memory()",
    "torch.cuda.Stream()",
    "torch.cuda.nvtx.range_push('x')",
    "torch.cuda.nccl.version()",
    "torch.Generator(device='cuda')",
]


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="a CUDA build has other words")
@pytest.mark.parametrize("call", NEED_A_GPU)
def test_errors_for_want_of_a_gpu(call: str) -> None:
    """Whatever a CPU build raises for a call that needs CUDA is known as that."""
    with pytest.raises(Exception) as caught:
        eval(call)
    assert lacks_gpu(caught.value)


@pytest.mark.parametrize(
    "error",
    [AttributeError("no attribute 'x'"), AssertionError(), RuntimeError("size mismatch"), KeyError("cuda")],
)
def test_other_errors_are_no_want_of_a_gpu(error: Exception) -> None:
    """Errors of a script's own are not taken for the lack of a GPU."""
    assert not lacks_gpu(error)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on CUDA the script does run")
@pytest.mark.parametrize(
    "source",
    [
        "import torch; torch.cuda.set_device(0)",
        "import torch\nassert torch.cuda.is_available()",
        "import torch; torch.nn.Linear(1, 1).cuda()",
    ],
)
def test_the_option_is_named(source: str, write, legacy) -> None:
    """A script that needs CUDA fails as under plain Python unless the option is given, and one line names it."""
    write("train.py", source)
    done = legacy("train.py")
    assert done.returncode == 1
    *traceback, last = done.stderr.splitlines()
    assert last.startswith("ampcompare: this machine has no GPU; ")
    assert last.endswith("ampcompare exec --device cpu train.py")
    assert not [line for line in traceback if f"{PACKAGE}{os.sep}" in line]


@pytest.mark.skipif(torch.cuda.is_available(), reason="on CUDA the script does run")
def test_the_cause_of_an_error_has_no_frames_of_ours(write, forked) -> None:
    """Tracebacks of chained errors are those of plain Python, guards or not."""
    source = """
        import torch

        try:
            torch.nn.Linear(1, 1).cuda()
        except (AssertionError, RuntimeError) as error:
            raise ValueError("no device") from error
    """
    script = write("train.py", source)
    plain, ours = forked(str(script)), forked("-m", "ampcompare", "exec", "train.py")
    expected = re.sub(r'  File "[^"]*(fork_server\.py|runpy>)", line .*\n(    .*\n)*', "", plain.stderr)
    assert plain.stderr.count("fork_server.py") > 0
    assert (ours.returncode, ours.stderr) == (plain.returncode, expected)


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
def test_processes_of_the_script(write, legacy, tmp_path) -> None:
    """Spawned loader workers and trainers, and forked ones, have the stand-in, the device, the level and a record."""
    write("train.py", CHILDREN)
    done = legacy("--device", "cpu", "--opt-level", "O2", "--record", "steps.jsonl", "train.py")
    assert (done.returncode, done.stdout) == (0, "12.0 [True, True, True, True]\nO2\nO2\n"), done.stderr
    assert done.stderr.count(NOTE) == 1
    spawned = list(tmp_path.glob("steps.SpawnProcess-*.jsonl"))
    forked = list(tmp_path.glob("steps.pid*.jsonl"))
    assert len(spawned) == len(forked) == 1
    for path, steps in ((spawned[0], 3), (forked[0], 2)):
        kinds = [json.loads(line).get("kind") for line in path.read_text().splitlines()]
        assert (kinds.count("step"), kinds.count("end")) == (steps, 1)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the names of threads are read from /proc")
@pytest.mark.parametrize("end", ["torch.distributed.destroy_process_group()", "pass"])
def test_no_thread_of_a_group_outlives_the_script(write, forked, end) -> None:
    """The threads of gloo end with the group, at the script's end at the latest: one that lived on could abort it."""
    write(
        "train.py",
        f"""
        import atexit, pathlib, torch
        from ampcompare.script.legacy.cpu_device import redirect_cuda_to_cpu

        def tell():
            tasks = pathlib.Path("/proc/self/task").iterdir()
            print(*(task.joinpath("comm").read_text().strip() for task in tasks))

        atexit.register(tell)  # runs after what redirect_cuda_to_cpu registers
        redirect_cuda_to_cpu()
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda"))
        torch.distributed.all_reduce(torch.ones(1).cuda())
        {end}
        """,
    )
    done = forked("train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("python")
    assert "gloo" not in done.stdout


@pytest.mark.slow
def test_torchrun_in_front(write, forked, tmp_path) -> None:
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
    done = forked(*launch, *ours, "train.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "rank 0 total 3.0", "rank 1 total 3.0"]
    assert "ampcompare: the script gets --local_rank from LOCAL_RANK" in done.stderr
    assert "ampcompare: process groups use gloo instead of nccl" in done.stderr
    assert sorted(path.name for path in tmp_path.glob("steps*")) == ["steps.jsonl", "steps.rank1.jsonl"]

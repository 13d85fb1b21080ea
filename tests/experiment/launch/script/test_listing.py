"""The metrics that a script prints are listed with a pattern that reads them again."""

import math
import shlex

import pytest

from ampcompare.experiment.launch.script.listing import printed_metrics
from ampcompare.experiment.launch.script.output import pattern_with_wider_numbers
from ampcompare.settings.script import parse_metric


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("loss 2.5E-3 acc 0.9", {"loss": 2.5e-3, "acc": 0.9}),
        ("err=1.5e-05 mse 0.3", {"err": 1.5e-5, "mse": 0.3}),
        ("f1: .87, val acc 93.2%, lr 1e-4", {"f1": 0.87, "val acc": 93.2, "lr": 1e-4}),
        ("ppl nan x inf y=-inf", {"ppl": math.nan, "x": math.inf, "y": -math.inf}),
        ("Acc@1 93.20 (93.10)", {"Acc@1": 93.2}),
        ("epoch 3 of 1_000, nanometer, version 1.2.3", {}),
        ("step 0.5s", {"step": 0.5}),
        ("/site/torch/ao/quantize.py:10: DeprecationWarning: and will be removed in 2.10. For more", {}),
        ("(Triggered internally at /pytorch/torch/csrc/autograd/engine.cpp:1.3)", {}),
        ("[W1130 18:02:01.123456789 engine.cpp:1260] Warning: took 0.5", {}),
        ("train.py:12: loss 0.5", {"loss": 0.5}),
        ("{'loss': 0.25, 'grad_norm': 1.5, 'epoch': 1.0}", {"loss": 0.25, "grad_norm": 1.5, "epoch": 1.0}),
        ("{'eval_loss': '1e-05', 'loss': '0.25'}", {"eval_loss": 1e-5, "loss": 0.25}),
        ('{"eval/top-1": .91, "x": "0.5.2", "y": [0.5], "n": 3}', {"eval/top-1": 0.91}),
        (
            "{'f1': np.float64(-0.5), 'nll': tensor(nan), 'val acc': {'top 1': inf}}",
            {"f1": -0.5, "nll": math.nan, "top 1": math.inf},
        ),
        ("{'lr': tensor(0.5, device='cuda:0')}", {"lr": 0.5}),
    ],
)
def test_numbers_as_python_prints_them(line: str, found: dict[str, float]) -> None:
    """Whole, with either exponent, without a digit before the point, and where they are none; not parts of words."""
    listed = list(printed_metrics([line]))
    assert {one.name: repr(one.last) for one in listed} == {
        name: repr(value) for name, value in found.items()
    }
    for one in listed:
        pattern = parse_metric(shlex.split(one.option)[1].replace("MAX-OR-MIN", "max")).pattern
        assert pattern is not None
        assert "'" not in pattern  # it is pasted between apostrophes
        match = pattern_with_wider_numbers(pattern).search(line)
        assert match is not None
        assert repr(float(match[1])) == repr(one.last)


def test_colors_are_no_part_of_a_metric() -> None:
    """As its pattern reads a line without them."""
    (found,) = printed_metrics(["val \x1b[1mloss\x1b[0m=\x1b[31m0.50\x1b[0m"])
    assert (found.name, found.last) == ("val loss", 0.5)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (
            " Average Precision  (AP) @[ IoU=0.50:0.95 | area=   all | maxDets=100 ] = 0.412",
            {"Average Precision (AP) @[ IoU=0.50:0.95 | area= all | maxDets=100 ]": 0.412},
        ),
        ("AR [0.5:0.95]: 0.31", {"AR [0.5:0.95]": 0.31}),
        ("loss[loss=0.51, over 12.00], tot[loss=0.42]", {"loss loss": 0.51, "tot loss": 0.42, "over": 12.0}),
        (
            "tot[ctc=0.5, loss=0.75], val[ctc=0.25, loss=0.875]",
            {"tot ctc": 0.5, "tot loss": 0.75, "val ctc": 0.25, "val loss": 0.875},
        ),
        (
            "valid | loss 0.5 | nll_loss 7.25 | best_loss 0.25",
            {"loss": 0.5, "nll_loss": 7.25, "best_loss": 0.25},
        ),
        (
            "[train] acc 0.5 loss=0.75 [test] acc 0.25 loss=1.5",
            {"train acc": 0.5, "train loss": 0.75, "test acc": 0.25, "test loss": 1.5},
        ),
        ("loss: 0.5, average loss: 0.25", {"loss": 0.5, "average loss": 0.25}),
        ('{"valid": {"loss": 0.5}, "test": {"loss": 0.25}}', {"valid loss": 0.5, "test loss": 0.25}),
        ("train: loss=0.5 valid: loss=0.25", {"train loss": 0.5, "valid loss": 0.25}),
        ("loss=0.5 | test: loss=0.75", {"loss": 0.5, "test loss": 0.75}),
    ],
)
def test_figures_of_one_name_are_told_apart(line: str, found: dict[str, float]) -> None:
    """By what stands before them; a threshold in a name is no figure."""
    listed = list(printed_metrics([line]))
    assert {one.name: one.last for one in listed} == found
    for one in listed:
        pattern = parse_metric(shlex.split(one.option)[1].replace("MAX-OR-MIN", "max")).pattern
        assert pattern is not None
        assert [float(match[1]) for match in pattern_with_wider_numbers(pattern).finditer(line)] == [one.last]

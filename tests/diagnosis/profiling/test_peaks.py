"""Peaks of devices, from the table and measured."""

from __future__ import annotations

import pytest
import torch

from ampcompare.diagnosis.profiling.measure import _rows, known_peak, measured_peak


@pytest.mark.parametrize(
    ("device", "dtype", "tflops", "gigabytes"),
    [
        ("NVIDIA H100 PCIe", "bf16", 756.5, 2000),
        ("NVIDIA H100 80GB HBM3", "fp32", 66.9, 3350),
        ("NVIDIA A100-SXM4-40GB", "tf32", 156, 1555),
        ("NVIDIA L40S", "fp16", 362.05, 864),
        ("NVIDIA L4", "fp16", 121, 300),
        ("Tesla P100-PCIE-16GB", "fp16", 18.7, 720),
        ("AMD Instinct MI250X", "bf16", 191.5, 1638),  # one die of two
    ],
)
def test_a_device_has_the_peak_of_its_data_sheet(device: str, dtype: str, tflops: float, gigabytes: float) -> None:
    """The most exact name counts, and "L4" is not found in "L40S"."""
    peak = known_peak(device, dtype)
    assert (peak.flops, peak.bytes) == pytest.approx((1e12 * tflops, 1e9 * gigabytes))
    assert "datasheet" in peak.source


def test_what_is_not_in_the_table_is_unknown() -> None:
    """Neither a type that a device lacks nor a device of another name, nor a part of one, has a peak."""
    assert known_peak("Tesla T4", "bf16") is None
    assert known_peak("NVIDIA A10G", "bf16") is None
    for name in ("H100 NVL", "H200 NVL", "A100-SXM4-80GB MIG 1g.10gb", "GeForce RTX 4090 Laptop GPU"):
        assert known_peak(f"NVIDIA {name}", "fp16") is None
    assert known_peak("NVIDIA GeForce GTX 1080", "fp32") is None


def test_each_peak_has_an_address() -> None:
    """A row has all figures with a source and the page on which they were checked, or is a name alone."""
    rows = _rows()
    assert len({(row["name"], row["dtype"]) for row in rows}) == len(rows)
    for row in rows:
        cells = [row[name] for name in ("tflops", "gigabytes_per_second", "source", "address")]
        assert all(cells) if row["dtype"] else not any(cells), row
        assert row["address"].startswith("https://") or not row["dtype"], row


def test_a_peak_is_measured() -> None:
    """A CPU without an entry has the speed of a product, and says so."""
    peak = measured_peak(torch.device("cpu"), "fp32")
    assert peak.flops is not None
    assert peak.flops > 1e8
    assert peak.source.startswith("measured here: fp32 products")

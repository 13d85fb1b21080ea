"""MNIST and its kin, from files written here; nothing is downloaded."""

import socket
import time
import urllib.request
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch

from ampcompare.base.errors import ConfigError, EnvironmentUnfit
from ampcompare.tasks import load_data, load_torchvision


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_files_of_mnist_are_read(mnist_root: Path, name: str) -> None:
    """Counts, shape and labels are those of the files, and pixels are normalized as the set usually is."""
    data = load_data(name, seed=0, data_dir=str(mnist_root))
    assert (data.num_train, data.num_val, data.num_classes, data.sample_shape) == (40, 13, 10, (1, 28, 28))
    samples, labels = next(iter(data.val_batches(13, device="cpu")))
    assert labels.tolist() == [index % 10 for index in range(13)]
    folder = "MNIST" if name == "mnist" else "FashionMNIST"
    raw = (mnist_root / folder / "raw" / "t10k-images-idx3-ubyte").read_bytes()[16:]
    pixels = torch.from_numpy(np.frombuffer(raw, np.uint8).reshape(13, 1, 28, 28).copy()).float()
    mean, std = (0.1307, 0.3081) if name == "mnist" else (0.2860, 0.3530)
    torch.testing.assert_close(samples, (pixels / 255 - mean) / std)


def test_options_reach_the_images(mnist_root: Path) -> None:
    """Image size, repeated channels and subsets change what batches hold."""
    data = load_data(
        "mnist",
        seed=0,
        data_dir=str(mnist_root),
        image_size=32,
        channels=3,
        train_size=20,
        val_size=10,
        augment=False,
    )
    assert (data.num_train, data.num_val, data.sample_shape) == (20, 10, (3, 32, 32))
    samples, labels = next(iter(data.train_batches(0, 20, device="cpu")))
    assert samples.shape == (20, 3, 32, 32)
    assert torch.equal(samples[:, 0], samples[:, 1])
    assert torch.bincount(labels).tolist() == [2] * 10


def test_augmentation_can_be_left_out(mnist_root: Path) -> None:
    """Without augmentation epochs differ in order only; with it, in the images."""
    totals = {}
    for augment in (False, True):
        data = load_data("mnist", seed=0, data_dir=str(mnist_root), augment=augment)
        totals[augment] = [
            sorted(
                next(iter(data.train_batches(epoch, 40, device="cpu")))[0].double().sum((1, 2, 3)).tolist()
            )
            for epoch in (0, 1)
        ]
    assert totals[False][0] == pytest.approx(totals[False][1])
    assert totals[True][0] != pytest.approx(totals[True][1])


@pytest.fixture
def cifar_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with a CIFAR-10 of 50 + 10 images; the checksums of the real files are not asked for."""
    import pickle

    cifar = load_torchvision().datasets.cifar
    monkeypatch.setattr(cifar, "check_integrity", lambda *arguments: True)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    draws = np.random.default_rng(0)
    for name in [*(f"data_batch_{part}" for part in range(1, 6)), "test_batch"]:
        entry = {"data": draws.integers(0, 256, (10, 3072), dtype=np.uint8), "labels": list(range(10))}
        (folder / name).write_bytes(pickle.dumps(entry))
    (folder / "batches.meta").write_bytes(
        pickle.dumps({"label_names": [f"class {label}" for label in range(10)]})
    )
    return tmp_path


def test_files_of_cifar_are_read(cifar_root: Path) -> None:
    """CIFAR-10 gives color images of 32x32, and cannot be turned into other channels."""
    data = load_data("cifar10", seed=0, data_dir=str(cifar_root), channels=3)
    assert (data.num_train, data.num_val, data.sample_shape) == (50, 10, (3, 32, 32))
    samples, labels = next(iter(data.train_batches(0, 50, device="cpu")))
    assert samples.shape == (50, 3, 32, 32)
    assert torch.bincount(labels).tolist() == [5] * 10
    with pytest.raises(ConfigError, match="1 channels were requested, but cifar10 has 3"):
        load_data("cifar10", seed=0, data_dir=str(cifar_root), channels=1)


@pytest.mark.parametrize("name", ["mnist", "cifar100"])
def test_missing_files_name_the_folder_and_the_options(tmp_path: Path, name: str) -> None:
    """Without files and without --download one line says where they were looked for and what to pass."""
    with pytest.raises(ConfigError, match=r"nowhere.*: pass --download, or --data-dir"):
        load_data(name, seed=0, data_dir=str(tmp_path / "nowhere"))
    assert not (tmp_path / "nowhere").exists()


def test_a_download_without_network_fails_fast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A download that cannot reach its host is an unfit environment, told in one line; stdout stays empty."""
    timeouts = []

    def refuse(*arguments: object, **options: object) -> None:
        timeouts.append(socket.getdefaulttimeout())
        raise URLError("Name or service not known")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    start = time.perf_counter()
    with pytest.raises(EnvironmentUnfit, match="could not be downloaded") as caught:
        load_data("mnist", seed=0, data_dir=str(tmp_path), download=True)
    assert time.perf_counter() - start < 10
    assert "Name or service not known" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capsys.readouterr().out == ""
    assert timeouts
    assert all(seconds is not None and seconds <= 30 for seconds in timeouts)
    assert socket.getdefaulttimeout() is None


def test_download_is_not_asked_for_files_that_are_there(
    mnist_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        urllib.request, "urlopen", lambda *arguments, **options: pytest.fail("network was used")
    )
    assert load_data("mnist", seed=0, data_dir=str(mnist_root), download=True).num_train == 40

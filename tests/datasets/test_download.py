"""Downloads: from this machine, verified, at once or not at all, and what is said where they fail."""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import os
import stat
import tarfile
import threading
import tracemalloc
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from bayesify.datasets import download, image_sources, images


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path.endswith("broken"):
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"only this")
            return
        super().do_GET()


@pytest.fixture
def server(tmp_path) -> Iterator[tuple[str, Path]]:
    home = tmp_path / "home"
    home.mkdir()
    running = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(home)))
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{running.server_address[1]}", home
    running.shutdown()
    running.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    monkeypatch.setenv("BAYESIFY_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("BAYESIFY_DATA", raising=False)


def test_fetch_tries_the_next_address_and_leaves_nothing_half(server, tmp_path):
    address, home = server
    (home / "file").write_bytes(b"right")
    (home / "other").write_bytes(b"wrong")
    right = hashlib.sha256(b"right").hexdigest()
    sources = [f"{address}/missing", f"{address}/broken", f"{address}/other", f"{address}/file"]
    path = tmp_path / "got" / "file"
    assert download.fetch(sources, path, sha256=right).read_bytes() == b"right"
    assert [file.name for file in path.parent.iterdir()] == ["file"]
    (home / "file").unlink()
    assert download.fetch(sources, path, sha256=right) == path
    with pytest.raises(ValueError, match="whose sha256 is"):
        download.fetch([f"{address}/other"], tmp_path / "got" / "second", sha256=right)
    with pytest.raises(OSError, match=r"missing: .*; .*after 9 of 100"):
        download.fetch(sources[:2], tmp_path / "got" / "third")
    assert [file.name for file in path.parent.iterdir()] == ["file"]


def test_a_damaged_file_is_fetched_again(server, tmp_path):
    address, home = server
    (home / "file").write_bytes(b"right")
    path = tmp_path / "file"
    path.write_bytes(b"half")
    download.fetch([f"{address}/file"], path, sha256=hashlib.sha256(b"right").hexdigest())
    assert path.read_bytes() == b"right"


def test_folders_come_first(tmp_path, monkeypatch):
    def make(folder: Path) -> dict[str, np.ndarray]:
        return {"made": np.arange(3)}

    path, arrays = download.obtain("test", "deep/x.npz", None, make)
    assert arrays["made"].tolist() == [0, 1, 2]
    assert path == tmp_path / "cache" / "deep" / "x.npz"
    monkeypatch.setenv("BAYESIFY_DATA", str(tmp_path / "data"))
    assert download.obtain("test", "deep/x.npz", None, None)[0] == path
    (tmp_path / "data" / "deep").mkdir(parents=True)
    np.savez(tmp_path / "data" / "deep" / "x.npz", other=np.arange(2))
    found, arrays = download.obtain("test", "deep/x.npz", None, make)
    assert found == tmp_path / "data" / "deep" / "x.npz"
    assert list(arrays) == ["other"]
    with pytest.raises(FileNotFoundError, match=r"put deep/x\.npz there"):
        download.obtain("test", "deep/x.npz", tmp_path, make)


def test_neither_folder_nor_network(monkeypatch):
    monkeypatch.setitem(image_sources.BASE_URLS, "mnist", ("http://127.0.0.1:9/mnist",))
    with pytest.raises(FileNotFoundError, match=r"could not be downloaded \(.*127\.0\.0\.1:9.*set BAYESIFY_DATA"):
        images.load("mnist")
    with pytest.raises(FileNotFoundError, match=r"to a folder that holds mnist\.npz, or allow"):
        images.load("mnist", download=False)


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("BAYESIFY_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(FileNotFoundError, match="set BAYESIFY_CACHE to a writable folder"):
        images.load("mnist")


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return gzip.compress(header + array.tobytes())


def test_mnist_from_idx(server, monkeypatch):
    address, home = server
    generator = np.random.default_rng(0)
    parts = {
        "train_images": generator.integers(0, 256, (20, 4, 4), dtype=np.uint8),
        "train_labels": (np.arange(20) % 10).astype(np.uint8),
        "test_images": generator.integers(0, 256, (10, 4, 4), dtype=np.uint8),
        "test_labels": np.arange(10, dtype=np.uint8),
    }
    for key, file in image_sources.IDX_FILES.items():
        (home / file).write_bytes(idx(parts[key]))
    monkeypatch.setitem(image_sources.BASE_URLS, "mnist", (address,))
    monkeypatch.setitem(image_sources.SET_SIZES, "mnist", (20, 10, 10))
    with pytest.raises(ValueError, match=r"train_images of .* has a wrong checksum"):
        images.load("mnist")
    other = home / "mirror"
    other.mkdir()
    for file in image_sources.IDX_FILES.values():
        (other / file).write_bytes(gzip.compress(b"<html>please sign in</html>"))
    monkeypatch.setitem(image_sources.BASE_URLS, "mnist", (f"{address}/mirror", address))
    monkeypatch.setitem(image_sources.ARRAY_SHA256, "mnist", {key: download.digest(parts[key]) for key in parts})
    loaded = images.load("mnist")
    assert np.array_equal(loaded.train_images[:, 0], parts["train_images"])
    assert np.array_equal(loaded.test_labels, parts["test_labels"])
    (home / image_sources.IDX_FILES["test_labels"]).unlink()
    assert np.array_equal(images.load("mnist").train_labels, parts["train_labels"])


def test_idx_files_that_are_not(tmp_path):
    path = tmp_path / "x.gz"
    for content, said in (
        (b"text", "gzip"),
        (gzip.compress(b"text"), "not an IDX"),
        (idx(np.zeros(9, np.uint8))[:-9], "gzip"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=said):
            image_sources.read_idx(path)
    path.write_bytes(gzip.compress(gzip.decompress(idx(np.zeros(9, np.uint8)))[:-1]))
    with pytest.raises(ValueError, match=r"the shape \[9\] in its header"):
        image_sources.read_idx(path)
    path.write_bytes(gzip.compress(b"\x00\x00\x08\x02\x00"))
    with pytest.raises(ValueError, match="does not match the shape"):
        image_sources.read_idx(path)


def test_a_gzip_bomb_is_not_unpacked(tmp_path):
    """Neither one that says how large it is nor one that lies."""
    path, zeros = tmp_path / "x.gz", bytes(1 << 26)
    path.write_bytes(gzip.compress(bytes([0, 0, 8, 2]) + np.array([1 << 20, 1 << 12], ">u4").tobytes() + zeros))
    with pytest.raises(ValueError, match="has 4,294,967,296 bytes when unpacked, more than the limit of 1,073,741,824"):
        image_sources.read_idx(path)
    path.write_bytes(gzip.compress(bytes([0, 0, 8, 1]) + np.array([9], ">u4").tobytes() + zeros))
    tracemalloc.start()
    with pytest.raises(ValueError, match="10 bytes or more"):
        image_sources.read_idx(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 24


def test_what_fails_its_check_is_removed_and_the_next_mirror_is_tried(server, tmp_path):
    address, home = server
    (home / "page").write_text("<html>please sign in</html>")
    (home / "file").write_text("1 2 3")
    path = tmp_path / "got" / "numbers.txt"
    with pytest.raises(ValueError, match=r"page returned the wrong file: could not convert"):
        download.fetch([f"{address}/page"], path, check=np.loadtxt)
    assert not list(path.parent.iterdir())
    assert download.fetch([f"{address}/page", f"{address}/file"], path, check=np.loadtxt).read_text() == "1 2 3"
    path.write_text("left by an earlier version")
    download.fetch([f"{address}/file"], path, check=np.loadtxt)
    assert path.read_text() == "1 2 3"


@pytest.mark.skipif(os.name != "posix", reason="modes of files")
def test_files_get_the_mode_that_the_umask_leaves(server, tmp_path):
    address, home = server
    (home / "file").write_text("1 2 3")
    before = os.umask(0o022)
    try:
        download.fetch([f"{address}/file"], tmp_path / "file")
        download.write_arrays(tmp_path / "x.npz", {"a": np.arange(3)})
    finally:
        os.umask(before)
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("file", "x.npz")} == {0o644}


def test_an_endless_answer_is_cut_off(server, tmp_path, monkeypatch):
    address, home = server
    (home / "file").write_bytes(bytes(3 << 20))
    monkeypatch.setattr(download, "MAX_BYTES", 1 << 20)
    with pytest.raises(OSError, match="has more than 1,048,576 bytes"):
        download.fetch([f"{address}/file"], tmp_path / "got" / "file")
    assert not list((tmp_path / "got").iterdir())


def test_a_damaged_cache_is_downloaded_again(tmp_path, monkeypatch):
    right, calls = {"a": np.arange(4)}, []

    def make(folder: Path) -> dict[str, np.ndarray]:
        calls.append(folder)
        return right

    def check(arrays) -> None:
        if list(arrays) != ["a"] or arrays["a"].tolist() != [0, 1, 2, 3]:
            raise ValueError("another checksum")

    path = tmp_path / "cache" / "x.npz"
    path.parent.mkdir()
    for number, damage in enumerate((b"", b"<html>", b"PK\x03\x04" + bytes(30), None)):
        path.write_bytes(damage or b"")
        if damage is None:
            np.savez(path, a=np.arange(4)[::-1])
        with pytest.raises(ValueError, match=r"test: .*x\.npz: .*replace it or delete it"):
            download.obtain("test", "x.npz", None, None, check)
        assert download.obtain("test", "x.npz", None, make, check)[1] is right
        assert len(calls) == number + 1
    assert download.obtain("test", "x.npz", None, make, check)[1]["a"].tolist() == [0, 1, 2, 3]
    assert len(calls) == 4
    monkeypatch.setattr(download, "MAX_BYTES", 10)
    with pytest.raises(ValueError, match="more than the limit of 10"):
        download.obtain("test", "x.npz", None, None, check)


def test_leftovers_of_an_earlier_attempt_are_replaced_once(tmp_path):
    """A wrong file that an interrupted download left behind does not stay for ever; a wrong source is asked once more at most."""
    calls = []

    def make(folder: Path) -> dict[str, np.ndarray]:
        calls.append((folder / "part").is_file())
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "part").exists():
            (folder / "part").write_text(content[0])
        return {"a": np.array([(folder / "part").read_text() == "right"])}

    def check(arrays) -> None:
        if not arrays["a"].all():
            raise ValueError("wrong")

    work, content = tmp_path / "cache" / "downloads" / "x", ["right"]
    work.mkdir(parents=True)
    (work / "part").write_text("wrong")
    assert download.obtain("test", "x.npz", None, make, check)[1]["a"].all()
    assert calls == [True, False]
    calls.clear()
    content[0] = "wrong"
    with pytest.raises(ValueError, match="wrong; the download was removed"):
        download.obtain("test", "y.npz", None, make, check)
    assert calls == [False]
    assert not (tmp_path / "cache" / "downloads" / "y").exists()


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_from_its_binary_archive(server, monkeypatch, name):
    address, home = server
    fine = name == "cifar100"
    generator, classes = np.random.default_rng(0), 100 if fine else 10
    files = ["train.bin", "test.bin"] if fine else [*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"]
    tables = []
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for file in files:
            table = generator.integers(0, 256, (classes, 3072), dtype=np.uint8)
            labels = np.arange(classes, dtype=np.uint8)[:, None]
            raw = np.hstack((*([labels // 5] if fine else []), labels, table)).tobytes()
            member = tarfile.TarInfo(f"cifar/{file}")
            member.size = len(raw)
            archive.addfile(member, io.BytesIO(raw))
            tables.append(table)
    file = "cifar-100-binary.tar.gz" if fine else "cifar-10-binary.tar.gz"
    (home / file).write_bytes(packed.getvalue())
    monkeypatch.setitem(image_sources.BASE_URLS, name, (address,))
    with pytest.raises(ValueError, match="whose sha256 is"):
        images.load(name)
    monkeypatch.setitem(image_sources.FILE_SHA256, file, hashlib.sha256(packed.getvalue()).hexdigest())
    monkeypatch.setitem(image_sources.SET_SIZES, name, (classes * (len(files) - 1), classes, classes))
    monkeypatch.setitem(image_sources.ARRAY_SHA256, name, {})
    loaded = images.load(name)
    assert loaded.train_images.shape == (classes * (len(files) - 1), 3, 32, 32)
    assert np.array_equal(loaded.train_images[0].reshape(-1), tables[0][0])
    assert np.array_equal(loaded.test_images[3].reshape(-1), tables[-1][3])
    assert loaded.test_labels.tolist() == list(range(classes))


def test_svhn_from_matlab(server, monkeypatch):
    scipy = pytest.importorskip("scipy.io")
    address, home = server
    generator = np.random.default_rng(0)
    pictures = generator.integers(0, 256, (32, 32, 3, 20), dtype=np.uint8)
    for part in ("train", "test"):
        path = home / f"{part}_32x32.mat"
        scipy.savemat(path, {"X": pictures, "y": (np.arange(20) % 10 + 1)[:, None].astype(np.uint8)})
        monkeypatch.setitem(image_sources.FILE_SHA256, path.name, hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setitem(image_sources.BASE_URLS, "svhn", (address,))
    monkeypatch.setitem(image_sources.SET_SIZES, "svhn", (20, 20, 10))
    loaded = images.load("svhn")
    assert np.array_equal(loaded.train_images[7, 2], pictures[:, :, 2, 7])
    assert loaded.train_labels[:10].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]


def test_two_processes_that_download_at_the_same_time(tmp_path, monkeypatch):
    """The slower one finds its downloads cleared away by the quicker one, and the file in its place."""
    monkeypatch.delenv("BAYESIFY_DATA", raising=False)
    monkeypatch.setenv("BAYESIFY_CACHE", str(tmp_path))

    def quicker(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "part").write_text("x")
        return {"a": np.zeros(3)}

    def slower(folder):
        download.obtain("test", "set.npz", make=quicker)
        assert not folder.exists()
        return {"a": np.frombuffer((folder / "part").read_bytes())}

    assert download.obtain("test", "set.npz", make=slower)[0] == tmp_path / "set.npz"
    assert np.load(tmp_path / "set.npz")["a"].shape == (3,)

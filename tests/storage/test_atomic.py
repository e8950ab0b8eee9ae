"""Files are whole or not there, whoever else writes, and have the mode of the umask."""

import contextlib
import errno
import multiprocessing
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bayesify.storage import atomic, tensor_files
from bayesify.storage.atomic import remove_leftovers, write_atomically, write_file, write_together

posix = pytest.mark.skipif(os.name != "posix", reason="modes and processes of POSIX")


def write(path, value=1.0, size=4):
    tensor_files.write(path, "model", {}, {"value": torch.full((size,), value)})


@posix
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_files_get_the_mode_of_the_umask(tmp_path, mask):
    path = tmp_path / "x.safetensors"
    before = os.umask(mask)
    try:
        write(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def dead_process():
    """The number of a process that has just ended."""
    return int(subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True).stdout)


@posix
def test_leftovers_go_only_when_their_process_is_gone(tmp_path):
    path = tmp_path / "x.safetensors"
    host, dead = atomic._host(), dead_process()
    gone = f".x.safetensors.{host}-{dead}-0.tmp"
    kept = {
        f".x.safetensors.{host}-{os.getpid()}-7.tmp",  # ours, perhaps another thread's
        f".x.safetensors.{host}-{os.getppid()}-0.tmp",
        f".x.safetensors.elsewhere-{dead}-0.tmp",  # another machine's, on a shared disk
        f".xy.safetensors.{host}-{dead}-0.tmp",
        "other.tmp",
    }
    for name in (gone, *kept):
        (tmp_path / name).write_text("half")
    remove_leftovers(path)
    assert {entry.name for entry in tmp_path.iterdir()} == kept


def test_names_with_wildcards_are_taken_as_they_are(tmp_path):
    if os.name != "posix":
        pytest.skip("such names")
    leftover = f"-{dead_process()}-0.tmp"
    for name in ("a[1].ckpt", "a1.ckpt"):
        (tmp_path / f".{name}.{atomic._host()}{leftover}").write_text("half")
    remove_leftovers(tmp_path / "a[1].ckpt")
    assert [entry.name[:8] for entry in tmp_path.iterdir()] == [".a1.ckpt"]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_write_that_fails_says_where_and_keeps_the_old_file(tmp_path, monkeypatch, error):
    path = tmp_path / "x.safetensors"
    write(path)
    old = path.read_bytes()

    def fail(_):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(
        OSError, match=r"x\.safetensors: the file cannot be written .*; free space on its disk"
    ) as caught:
        write(path, 2.0)
    assert caught.value.errno == error
    assert path.read_bytes() == old
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_file_that_cannot_be_read_is_not_a_missing_one(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    write(path)

    def fail(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tensor_files, "open", fail, raising=False)
    with pytest.raises(PermissionError, match="cannot be read"):
        tensor_files.read(path, "model")


def test_safetensors_reads_what_is_written(tmp_path):
    from safetensors.torch import load_file

    tensors = {
        "half": torch.arange(3).to(torch.bfloat16),
        "flag": torch.tensor([True, False, True]),
        "wide": torch.randn(2, 3, dtype=torch.float64),
        "view": torch.randn(4, 3).T,
        "empty": torch.zeros(0, 2),
        "single": torch.tensor(3.0),
        "ümlaut.名": torch.arange(5, dtype=torch.int16),
    }
    path = tmp_path / "x.safetensors"
    tensor_files.write(path, "model", {"text": "ü"}, tensors)
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    with pytest.raises(TypeError, match=r"z has type torch\.complex128"):
        tensor_files.write(path, "model", {}, {"z": torch.zeros(1, dtype=torch.complex128)})


def hammer(path, value, failures):
    try:
        for _ in range(20):
            remove_leftovers(path)
            write(path, value, 20_000)
    except Exception as error:
        failures.put(repr(error))


@posix
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_processes_on_one_path_leave_one_whole_file(tmp_path):
    path = tmp_path / "x.safetensors"
    context = multiprocessing.get_context("fork")
    failures = context.Queue()
    processes = [context.Process(target=hammer, args=(path, float(value), failures)) for value in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert failures.empty(), failures.get()
    values = tensor_files.read(path, "model")[1]["value"]
    assert values.unique().numel() == 1
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_an_error_inside_leaves_nothing(tmp_path):
    with pytest.raises(ConnectionError, match=r"^gone$"), write_atomically(tmp_path / "x") as temporary:
        raise ConnectionError(temporary.write_text("half") and "gone")
    assert not list(tmp_path.iterdir())


# -- several files together ----------------------------------------------------------------------------------------------

NAMES = ("a", "b")


def write_all(folder, value):
    with write_together(folder, last="b") as draft:
        for name in NAMES:
            write_file(draft / name, f"{name} {value} " * 100)


def failing(patch, at):
    """A list of all calls that change a disk; call number `at` fails."""
    calls = []

    def wrapped(function):
        def call(*arguments, **options):
            calls.append(function.__name__)
            if len(calls) == at:
                raise OSError(errno.ENOSPC, "No space left on device")
            return function(*arguments, **options)

        return call

    for owner, name in ((os, "replace"), (os, "fsync"), (Path, "write_bytes")):
        patch.setattr(owner, name, wrapped(getattr(owner, name)))
    return calls


def test_an_error_at_any_step_leaves_whole_files(tmp_path, monkeypatch):
    """Before the first file moves, all old files stay. An error while names are flushed comes after the last move."""
    with monkeypatch.context() as patch:
        calls = failing(patch, 0)
        write_all(tmp_path / "0", "old")
    moves = [place for place, name in enumerate(calls, 1) if name == "replace"][-2:]
    for at in range(1, len(calls) + 1):
        folder = tmp_path / str(at)
        write_all(folder, "old")
        (folder / "own").write_text("kept")
        with monkeypatch.context() as patch:
            failing(patch, at)
            with pytest.raises(OSError, match="No space") if at <= moves[1] else contextlib.nullcontext() as caught:
                write_all(folder, "new")
        assert caught is None or ".tmp" not in str(caught.value)
        values = ["new" if at > move else "old" for move in moves]
        assert [(folder / name).read_text() for name in NAMES] == [
            f"{name} {value} " * 100 for name, value in zip(NAMES, values, strict=True)
        ]
        assert {path.name for path in folder.iterdir()} == {*NAMES, "own"}
    assert len(calls) > 8


def test_a_write_that_fails_leaves_no_new_folder(tmp_path):
    with pytest.raises(OSError, match="full"), write_together(tmp_path / "x" / "y", last="b"):
        raise OSError(errno.ENOSPC, "full")
    assert not (tmp_path / "x" / "y").exists()


def test_what_is_no_file_is_not_replaced(tmp_path):
    if os.name != "posix":
        pytest.skip("devices and pipes")
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/null", tmp_path / "pipe"):
        with pytest.raises(ValueError, match="is a device or a pipe"), write_atomically(path):
            pass

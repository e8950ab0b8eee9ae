"""Nested plain data with tensors in one safetensors file, written atomically, checked on reading, and never pickled."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesify.storage.atomic import write_atomically

RESTORE_REMEDY = "restore it from an intact copy"
FORMAT_NAME = "bayesify"
FORMAT_VERSION = 2
"""Version of the file format. Since version 2, the checksum covers the version itself."""


def pack(value: Any, name: str = "state") -> tuple[Any, dict[str, Tensor]]:
    """Nested data as JSON and a flat dict of tensors.

    The value may contain numbers, strings, `None` and tensors, also nested in lists, tuples, counters and dicts with any plain
    keys. In the JSON, a reference replaces each tensor. Error messages and names of tensors begin with `name`. Raises `TypeError`
    if the value contains any other type; the message names the place.
    """
    tensors: dict[str, Tensor] = {}

    def visit(value: Any, path: str) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, Tensor):
            while path in tensors:  # keys such as 1 and "1", or "a.b" and "b" inside "a", give the same path
                path += "'"
            tensors[path] = value
            return {"$tensor": path}
        if isinstance(value, (Mapping, Counter)):
            entries = [[visit(key, path), visit(entry, f"{path}.{key}")] for key, entry in value.items()]
            if isinstance(value, Counter):
                return {"$counter": entries}
            plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
            return dict(entries) if plain else {"$dict": entries}
        if isinstance(value, (tuple, list)):
            entries = [visit(entry, f"{path}.{index}") for index, entry in enumerate(value)]
            return {"$tuple": entries} if isinstance(value, tuple) else entries
        raise TypeError(
            f"{path} is {type(value).__name__}, which cannot be stored (files are written without pickle); use numbers, "
            "strings or tensors, or lists and dicts of these"
        )

    return visit(value, name), tensors


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Inverse of `pack`."""
    if isinstance(packed, list):
        return [unpack(entry, tensors) for entry in packed]
    if not isinstance(packed, dict):
        return packed
    if "$tensor" in packed:
        return tensors[packed["$tensor"]]
    if "$tuple" in packed:
        return tuple(unpack(entry, tensors) for entry in packed["$tuple"])
    if "$counter" in packed:
        return Counter({unpack(key, tensors): count for key, count in packed["$counter"]})
    entries = packed["$dict"] if "$dict" in packed else packed.items()
    return {unpack(key, tensors): unpack(entry, tensors) for key, entry in entries}


TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Types of tensors by their names in safetensors files."""


def _serialize(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[Any]:
    """The pieces of a safetensors file: length of the header, header, then each tensor's bytes, larger types first for alignment.

    A killed process would leave temporary files of safetensors behind under unknown names, so safetensors is not called.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in TYPES:
            found = f"{name} has type {tensor.dtype}, which a safetensors file cannot hold"
            raise TypeError(f"{found}; convert it to a real type")
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        tensor, start = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    yield len(header).to_bytes(8, "little")
    yield header
    for name in order:
        yield tensors[name].reshape(-1).view(torch.uint8).numpy()


def write(path: str | Path, kind: str, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Write tensors and a JSON header to a safetensors file, by `write_atomically`. Returns a SHA-256 checksum of all contents.

    `kind` is a word such as `"checkpoint"`, `header` is plain data, and the tensors may be on any device. Raises `ValueError` for
    an impossible path, `TypeError` for a type of tensor that safetensors files cannot hold, and `OSError` if the file cannot be
    written.
    """
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided:
            raise TypeError(
                f"{name!r} is a sparse tensor, which safetensors files cannot hold; register it with persistent=False, or keep it "
                "in an attribute or as a dense buffer"
            )
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    body = json.dumps({"kind": kind, **header})
    metadata = {"format": FORMAT_NAME, "format_version": str(FORMAT_VERSION), "header": body}
    metadata["sha256"] = _digest(metadata["format_version"], body, plain)
    with write_atomically(path) as temporary, open(temporary, "xb") as file:
        for piece in _serialize(plain, metadata):
            file.write(piece)
    return metadata["sha256"]


def read(path: str | Path, kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors (on the CPU) of a file from `write`. The header has the file's SHA-256 under `"sha256"`.

    Raises `FileNotFoundError` if there is no file, and `ValueError` if the file is truncated or altered, was not written by
    bayesify, is of another kind, or is from a newer version of the library.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; give the path of a file that bayesify wrote")
    try:
        metadata, tensors = _contents(path)
    except OSError as error:
        raise OSError(
            error.errno,
            f"{path}: the file cannot be read ({error.strerror or error}); change its permissions, or give a readable copy",
        ) from error
    body = metadata.get("header", "")
    if _digest(metadata["format_version"], body, tensors) != metadata.get("sha256"):
        reason = "the contents do not match the checksum, so the file was altered or damaged"
        raise ValueError(f"{path}: {reason}; {RESTORE_REMEDY}")
    try:
        header = json.loads(body)
    except (ValueError, RecursionError) as error:
        reason = f"the header is not JSON ({type(error).__name__})"
        raise ValueError(f"{path}: {reason}; restore the file from an intact copy") from None
    found = header.get("kind") if isinstance(header, dict) else None
    if not isinstance(found, str):
        reason = "the header does not name the kind of the file, so the file is damaged or was edited"
        raise ValueError(f"{path}: {reason}; {RESTORE_REMEDY}")
    if found != kind:
        remedies = {"checkpoint": "give it to fit(checkpoint=...)", "model": "open it with bayesify.load"}
        remedy = remedies.get(found, "give another file")
        raise ValueError(f"{path}: the file contains a {found}, not a {kind}; {remedy}")
    return {**header, "sha256": metadata["sha256"]}, tensors


def _contents(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of one file. safetensors opens the path twice, first for the metadata and then for the tensors, so this
    function reads again if another process replaced the file in between."""
    from safetensors import SafetensorError, safe_open

    while True:
        damage = None
        with open(path, "rb") as held:  # while the file is open, no new file can get its inode number
            try:
                with safe_open(path, framework="pt") as file:
                    metadata = file.metadata() or {}
                    _check_origin(path, metadata)
                    tensors = {name: file.get_tensor(name) for name in list(file.keys())}
            except (SafetensorError, RuntimeError) as error:  # torch reports a file that became too short
                damage = error
            if not os.path.samestat(os.fstat(held.fileno()), os.stat(path)):
                continue
        if damage is not None:
            raise ValueError(f"{path}: the file is truncated or is not a safetensors file ({damage}); {RESTORE_REMEDY}")
        return metadata, tensors


def _check_origin(path: Path, metadata: Mapping[str, str]) -> None:
    version = metadata.get("format_version", "")
    if metadata.get("format") != FORMAT_NAME or not (version.isascii() and version.isdecimal() and len(version) < 10):
        remedy = "use safetensors.torch.load_file for its tensors"
        raise ValueError(f"{path}: the file was not written by bayesify; {remedy}")
    if int(version) > FORMAT_VERSION:
        raise ValueError(
            f"{path}: the file has format {version}, but this version of bayesify reads formats up to "
            f"{FORMAT_VERSION}; upgrade bayesify"
        )


def _digest(version: str, body: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256((body if version == "1" else f"{version}\n{body}").encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        array: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(array)
    return digest.hexdigest()

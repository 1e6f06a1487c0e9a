"""What a cubin says of its kernel: threads, registers, local and shared memory. A cubin is an ELF file with notes."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

REQUIRED_THREADS = 0x10
"""Note of a kernel: threads of a block, three sizes."""
LOCAL_BYTES = 0x12
"""Note of the file, for each function: bytes of local memory a thread, called functions included."""
REGISTERS = 0x2F
"""Note of the file, for each function: registers a thread."""
LONG_NOTE = 4
"""A note of this form holds as many bytes as it says; the others hold two."""
RESERVED = ".nv.shared.reserved.0"
RESERVED_BYTES = 1024
"""Where that section is, the system keeps the first KiB of shared memory, and a kernel's section counts it."""


@dataclass(frozen=True)
class Resources:
    """What one kernel takes; None where the file does not say."""

    threads: int | None = None
    """Of a block."""
    registers: int | None = None
    """Of a thread."""
    local_bytes: int | None = None
    """Of a thread: registers spilled to memory, and arrays indexed at run time."""
    shared_bytes: int | None = None
    """Of a block."""


@dataclass(frozen=True)
class _Section:
    name: str
    offset: int
    size: int
    stored: bool


def resources(cubin: bytes, symbol: str) -> Resources:
    """What the kernel of that name takes; unknown where the file is not what it is expected to be."""
    try:
        return _read(cubin, symbol)
    except (struct.error, ValueError, IndexError):
        return Resources()


def _read(cubin: bytes, symbol: str) -> Resources:
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("no 64-bit ELF file")
    sections = {section.name: section for section in _sections(cubin)}

    def content(name: str) -> bytes:
        section = sections.get(name)
        return b"" if section is None or not section.stored else cubin[section.offset : section.offset + section.size]

    number = _symbol_number(content(".symtab"), content(".strtab"), symbol)
    of_functions: dict[int, int] = {}
    for note, value in _notes(content(".nv.info")):
        if note in (REGISTERS, LOCAL_BYTES):
            function, amount = struct.unpack("<II", value)
            if function == number:
                of_functions[note] = amount
    threads = next((value for note, value in _notes(content(f".nv.info.{symbol}")) if note == REQUIRED_THREADS), None)
    x, y, z = struct.unpack("<III", threads) if threads is not None else (0, 0, 0)
    shared = sections.get(f".nv.shared.{symbol}")
    used = 0 if shared is None else shared.size - (RESERVED_BYTES if RESERVED in sections else 0)
    return Resources(x * y * z or None, of_functions.get(REGISTERS), of_functions.get(LOCAL_BYTES), max(used, 0))


def _sections(cubin: bytes) -> Iterator[_Section]:
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    width, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + index * width) for index in range(count)]
    for name, kind, _, _, offset, size in headers:
        nobits = 8
        yield _Section(_text(cubin, headers[names][4] + name), offset, size, kind != nobits)


def _symbol_number(symbols: bytes, names: bytes, symbol: str) -> int:
    for number, (name, *_) in enumerate(struct.iter_unpack("<IBBHQQ", symbols)):
        if _text(names, name) == symbol:
            return number
    raise ValueError(f"no symbol {symbol}")


def _notes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        form, note, length = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == LONG_NOTE:
            yield note, data[at : at + length]
            at += length


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()

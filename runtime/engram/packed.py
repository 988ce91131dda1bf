"""Packed Engram tables: a row and its scales side by side, never across a page, checksummed.

Layout, little-endian:

| part      | at                  | content                                                                         |
|-----------|---------------------|---------------------------------------------------------------------------------|
| header    | 0                   | one page: JSON (`PackedHeader`), zeros, and its CRC-32 in the last 4 bytes      |
| checksums | page 1              | CRC-32 of every block of 256 data pages, zeros up to a page                     |
| data      | after the checksums | pages of as many records (row bytes, then scale bytes) as fit, zeros behind     |

Any row is one address away, so any number of shards, by rows or by columns, reads the same file.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engram_trt.configs.errors import CheckpointError
from engram_trt.configs.json_file import parse_json_object
from engram_trt.runtime.engram.files import Bytes, MappedFile, UnreadablePageError, unreadable
from engram_trt.runtime.engram.tables import Ids, Located, Table, TableShape

FORMAT = "engram-trt packed table"
VERSION = 1
PAGE = 4096
"""Fixed, whatever the machine's page size: a file moves between machines."""
BLOCK_PAGES = 256
SPOT_CHECKS = 64
"""Rows that are compared with the checkpoint when a packed file is opened."""
_CRC_BYTES = 4
_SPLIT_RECORDS = 512
_REMEDY = "Pack the table again with `engram-trt pack-engram`."


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedHeader:
    """What a packed file says of itself.

    Attributes:
        layer_id, num_rows, row_bytes, scale_bytes: see `TableShape`.
        rows_sha256, scales_sha256: of the two source tensors' bytes; empty while packing.
        checksums_sha256: of the checksum part; empty while packing.
        source_digest: of the checkpoint's config, index and headers, to resume against.
        num_blocks_done: data blocks that are on the disk; all of them in a finished file.
    """

    layer_id: int
    num_rows: int
    row_bytes: int
    scale_bytes: int
    source_digest: str
    rows_sha256: str = ""
    scales_sha256: str = ""
    checksums_sha256: str = ""
    num_blocks_done: int = 0

    @property
    def shape(self) -> TableShape:
        """Rows and widths."""
        return TableShape(
            layer_id=self.layer_id, num_rows=self.num_rows, row_bytes=self.row_bytes, scale_bytes=self.scale_bytes
        )

    @property
    def rows_per_page(self) -> int:
        """Records in a page."""
        return PAGE // self.shape.record_bytes

    @property
    def rows_per_block(self) -> int:
        """Records under one checksum."""
        return self.rows_per_page * BLOCK_PAGES

    @property
    def num_blocks(self) -> int:
        """Checksummed blocks."""
        return -(-self.num_rows // self.rows_per_block)

    @property
    def data_offset(self) -> int:
        """First byte of the data."""
        return PAGE + -(-self.num_blocks * _CRC_BYTES // PAGE) * PAGE

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return self.data_offset + -(-self.num_rows // self.rows_per_page) * PAGE

    def block_offset(self, block: int) -> int:
        """First byte of a block of data."""
        return self.data_offset + block * BLOCK_PAGES * PAGE

    def block_rows(self, block: int) -> tuple[int, int]:
        """First row of a block, and the one after its last."""
        return block * self.rows_per_block, min((block + 1) * self.rows_per_block, self.num_rows)

    def to_page(self) -> bytes:
        """The header page."""
        text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}).encode()
        page = text.ljust(PAGE - _CRC_BYTES, b"\0")
        return page + zlib.crc32(page).to_bytes(_CRC_BYTES, "little")

    @classmethod
    def from_page(cls, page: bytes, where: str) -> PackedHeader:
        """The inverse of `to_page`; CheckpointError for anything else."""
        body, crc = page[:-_CRC_BYTES], page[-_CRC_BYTES:]
        if len(page) != PAGE or zlib.crc32(body).to_bytes(_CRC_BYTES, "little") != crc:
            raise damaged(where, "a header that is no packed table's", "a file that `pack-engram` wrote")
        document = parse_json_object(body.rstrip(b"\0"), where, CheckpointError)
        if document.pop("format", None) != FORMAT or document.pop("version", None) != VERSION:
            raise damaged(where, "another format or version", f"{FORMAT}, version {VERSION}")
        try:
            header = cls(**document)
            valid = min(header.num_rows, header.row_bytes, header.scale_bytes) > 0 and header.rows_per_page > 0
        except TypeError:
            valid = False
        if not valid:
            raise damaged(where, "header entries that make no table", "a file that `pack-engram` wrote")
        return header


def damaged(where: str, found: str, expected: str) -> CheckpointError:
    """The error for a packed file that cannot be used."""
    return CheckpointError(where, found=found, expected=expected, remedy=_REMEDY)


def packed_path(folder: Path, layer_id: int) -> Path:
    """The packed file of a layer."""
    return folder / f"engram_layer_{layer_id:02d}.packed"


def pack_records(header: PackedHeader, rows: Bytes, scales: Bytes) -> Bytes:
    """Pages of records; uint8 [pages, PAGE].

    Args:
        header: gives the layout.
        rows: [n, row_bytes].
        scales: [n, scale_bytes].
    """
    count, per_page, width = rows.shape[0], header.rows_per_page, header.row_bytes
    num_pages = -(-count // per_page)
    pages = np.zeros((num_pages, PAGE), dtype=np.uint8)
    records = pages[:, : per_page * header.shape.record_bytes].reshape(num_pages, per_page, header.shape.record_bytes)
    full = count // per_page
    for source, columns in ((rows, slice(0, width)), (scales, slice(width, None))):
        records[:full, :, columns] = source[: full * per_page].reshape(full, per_page, source.shape[1])
        records[full:, : count - full * per_page, columns] = source[full * per_page :]
    return pages


class PackedTable(Table):
    """A table in a packed file, read through a map.

    Args:
        path: the file.
        shape: the table it must hold.

    Raises:
        CheckpointError: it is missing, unfinished, damaged or holds another table.
    """

    def __init__(self, path: Path, shape: TableShape) -> None:
        self.path = path
        self.header, self.checksums = read_header(path)
        if self.header.shape != shape:
            raise damaged(str(path), f"a table of {self.header.shape}", f"{shape}")
        self.shape = shape
        self._file = MappedFile(path, self.header.file_bytes)
        # A record starts at any byte: element i of this view is the record at byte i.
        num_starts = self.header.file_bytes - shape.record_bytes + 1
        self._records: npt.NDArray[np.void] = np.ndarray(
            (num_starts,), dtype=f"V{shape.record_bytes}", buffer=self._file.bytes.data, strides=(1,)
        )

    def check(self) -> None:
        self._file.check()

    def prepare(self, ids: Ids) -> None:
        try:
            self._file.require(self._offsets(ids), self.shape.record_bytes)
        except UnreadablePageError as error:
            raise unreadable(self.path, f"row {int(ids[error.index])}", error.reason) from None

    def copy(self, ids: Ids, rows: Bytes, scales: Bytes) -> None:
        offsets = self._offsets(ids)
        width = self.shape.row_bytes
        for start in range(0, ids.shape[0], _SPLIT_RECORDS):
            part = slice(start, start + _SPLIT_RECORDS)
            records = self._records[offsets[part]].view(np.uint8).reshape(-1, self.shape.record_bytes)
            rows[part], scales[part] = records[:, :width], records[:, width:]

    def locate(self, ids: Ids) -> Located:
        starts = self._offsets(ids)
        content = self._file.bytes
        return Located(rows=content, row_starts=starts, scales=content, scale_starts=starts + self.shape.row_bytes)

    def _offsets(self, ids: Ids) -> Ids:
        page = ids // self.header.rows_per_page
        slot = ids - page * self.header.rows_per_page
        return page * PAGE + slot * self.shape.record_bytes + self.header.data_offset

    def facts(self) -> dict[str, Any]:
        return {"file": str(self.path)}

    def close(self) -> None:
        self._file.close()


def require_same_rows(packed: PackedTable, source: Table) -> None:
    """Compare rows all over two tables: other weights under the same names and shapes are found out.

    Raises:
        CheckpointError: the packed file is of another checkpoint.
    """
    shape = packed.shape
    ids = np.unique(np.linspace(0, shape.num_rows - 1, num=SPOT_CHECKS, dtype=np.int64))
    found, expected = ([np.empty((ids.size, n), np.uint8) for n in (shape.row_bytes, shape.scale_bytes)] for _ in "ab")
    packed.gather(ids, *found)
    source.gather(ids, *expected)
    differs = (found[0] != expected[0]).any(axis=1) | (found[1] != expected[1]).any(axis=1)
    if differs.any():
        where = f"{packed.path}: row {int(ids[np.flatnonzero(differs)[0]])}"
        raise damaged(where, "a packed table of another checkpoint", "the rows of this one")


def read_header(path: Path) -> tuple[PackedHeader, npt.NDArray[np.uint32]]:
    """Header and checksums of a finished file.

    Raises:
        CheckpointError: it is missing, unfinished or damaged.
    """
    try:
        with path.open("rb") as file:
            header = PackedHeader.from_page(file.read(PAGE), str(path))
            checksums = np.frombuffer(file.read(header.num_blocks * _CRC_BYTES), dtype="<u4")
            num_bytes = file.seek(0, 2)
    except OSError as cause:
        raise damaged(str(path), f"no readable file ({cause.strerror or cause})", "a packed table") from None
    if num_bytes != header.file_bytes or len(checksums) != header.num_blocks:
        raise damaged(str(path), f"{num_bytes:,} bytes", f"{header.file_bytes:,}")
    if header.checksums_sha256 != checksums_digest(checksums):
        raise damaged(str(path), "checksums that were changed, or a file that was never finished", "its own digest")
    return header, checksums.astype(np.uint32)


def checksums_digest(checksums: npt.NDArray[Any]) -> str:
    """SHA-256 (hex) of the checksum part, without its padding."""
    return hashlib.sha256(checksums.astype("<u4").tobytes()).hexdigest()


def unpack_blocks(
    path: Path, read: Callable[[int, int], bytes | bytearray], header: PackedHeader, block: int, checksum: int
) -> tuple[Bytes, Bytes]:
    """Rows and scales of one block, its checksum compared.

    Args:
        path: for messages.
        read: (offset, length) -> bytes of the file.
        header: of the file.
        block: which.
        checksum: what it should be.

    Returns:
        ([n, row_bytes], [n, scale_bytes]).

    Raises:
        CheckpointError: the block is damaged.
    """
    first, last = header.block_rows(block)
    per_page = header.rows_per_page
    num_pages = -(-(last - first) // per_page)
    content = read(header.block_offset(block), num_pages * PAGE)
    if zlib.crc32(content) != checksum:
        raise damaged(
            f"{path}: rows {first}..{last - 1}", "a block with another checksum", "the block as it was packed"
        )
    pages = np.frombuffer(content, dtype=np.uint8).reshape(num_pages, PAGE)
    records = pages[:, : per_page * header.shape.record_bytes].reshape(-1, header.shape.record_bytes)
    records = records[: last - first]
    return records[:, : header.row_bytes], records[:, header.row_bytes :]

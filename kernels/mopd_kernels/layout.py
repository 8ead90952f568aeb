"""Bytes of one stored hidden-state row, per codec.

Torch-free on purpose: a planner or a loader sizes byte ranges with :func:`row_bytes` and never loads a tensor
library. A row is self-contained (scales first, then codes, then zero padding), so rows ``a`` to ``b`` of a
payload are exactly the bytes ``a * row_bytes`` to ``b * row_bytes``.

| codec | group | scale                  | code            | bytes per element at width 4096 |
| ----- | ----- | ---------------------- | --------------- | ------------------------------- |
| fp32  | -     | -                      | float32         | 4                               |
| bf16  | -     | -                      | bfloat16        | 2                               |
| int8  | 128   | float32, amax / 127    | int8, rotated   | 1.031                           |
| fp8   | 128   | float32, amax / 448    | e4m3            | 1.031                           |
| mxfp4 | 32    | e8m0 (a power of two)  | e2m1, 2 a byte  | 0.531                           |

*Rotated*: spans of up to 128 elements go through an orthonormal Hadamard matrix before they are quantised and again
after (it is its own inverse). Final hidden states of real models have outlier channels ten times larger than the rest;
the rotation spreads each over its span, so that it does not determine the quantisation step of 127 neighbours (QuaRot,
arXiv 2404.00456).
"""

from __future__ import annotations

from dataclasses import dataclass

ROTATION_SPAN = 128
ROW_ALIGNMENT_BYTES = 16
"""Alignment of rows, so that scales and codes can be read as aligned words."""


@dataclass(frozen=True, kw_only=True)
class Codec:
    """Byte layout of one row of ``width`` numbers: ``[scales | codes | padding]``."""

    name: str
    code_bits: int
    """Bits of one code; 4 means two codes a byte, the even element in the low nibble."""
    group: int = 0
    """Consecutive elements that share a scale; 0 means no scale."""
    scale_bytes: int = 0
    rotated: bool = False

    def rotation(self, width: int) -> int:
        """Return the elements of a Hadamard span: the largest power of two up to 128 that divides ``width``; 1 when
        unrotated."""
        return min(width & -width, ROTATION_SPAN) if self.rotated else 1

    def groups(self, width: int) -> int:
        """Return the number of scales in a row; the last group may be short."""
        return -(-width // self.group) if self.group else 0

    def codes_offset(self, width: int) -> int:
        """Return the byte offset of the first code inside a row."""
        return self.groups(width) * self.scale_bytes

    def codes_bytes(self, width: int) -> int:
        return -(-width * self.code_bits // 8)

    def row_bytes(self, width: int) -> int:
        used = self.codes_offset(width) + self.codes_bytes(width)
        return -(-used // ROW_ALIGNMENT_BYTES) * ROW_ALIGNMENT_BYTES


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec(name="fp32", code_bits=32),
        Codec(name="bf16", code_bits=16),
        Codec(name="int8", code_bits=8, group=128, scale_bytes=4, rotated=True),
        Codec(name="fp8", code_bits=8, group=128, scale_bytes=4),
        Codec(name="mxfp4", code_bits=4, group=32, scale_bytes=1),
    )
}


def codec_named(name: str) -> Codec:
    """Return the codec of this name. Raises ValueError for an unknown name."""
    try:
        return CODECS[name]
    except KeyError:
        raise ValueError(f"unknown codec {name!r}; choose one of {', '.join(CODECS)}") from None


def row_bytes(codec: str, width: int) -> int:
    """Return the bytes of one encoded row of ``width`` numbers, with padding.

    >>> row_bytes("bf16", 576), row_bytes("int8", 576), row_bytes("mxfp4", 576)
    (1152, 608, 320)

    Raises ValueError for an unknown codec or a width below 1.
    """
    if width < 1:
        raise ValueError(f"hidden width must be at least 1, got {width}")
    return codec_named(codec).row_bytes(width)

"""Sizes and times as all commands print them: three or four digits and a unit.

    bytes_text(12_900_000)       12.9 MB      units are powers of 1000, as on disks, links and in papers
    at_least_text(34_057_000_000)    34.1GB   rounded up, as --memory takes it
    seconds_text(0.00731)        7.31 ms
"""
from __future__ import annotations

import math

_SIZES = ("B", "KB", "MB", "GB", "TB", "PB", "EB")
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def bytes_text(size: float) -> str:
    """A number of bytes: 999 B, 1.5 KB, 81.2 GB, 1,234 EB."""
    value, power = float(size), 0
    while abs(value) >= 999.5 and power < len(_SIZES) - 1:
        value, power = value / 1000, power + 1
    return f"{value:,.0f} B" if power == 0 else f"{_short(value)} {_SIZES[power]}"


def at_least_text(size: float) -> str:
    """So many bytes or a little more, as an option takes it: 999B, 34.1GB."""
    size, power = math.ceil(size), 0
    while size >= 1000 ** (power + 1) and power < len(_SIZES) - 1:
        power += 1
    unit, digits = 1000 ** power, len(str(size // 1000 ** power))
    step = unit // 10 ** (3 - digits) if power and digits < 3 else unit
    return f"{_short(-(-size // step) * step / unit)}{_SIZES[power]}".replace(",", "")


def seconds_text(seconds: float) -> str:
    """A time in the unit that suits it: 950 ns, 1.23 ms, 61.2 s, 1:02:05 from an hour on."""
    if abs(seconds) >= 3600:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes // 60:,}:{minutes % 60:02}:{rest:02}"
    scale, unit = next(((scale, unit) for scale, unit in _TIMES if abs(seconds) >= scale * 0.9995), _TIMES[-1])
    return f"0 {_TIMES[0][1]}" if seconds == 0 else f"{_short(seconds / scale)} {unit}"


def _short(value: float) -> str:
    """Three or more digits, without zeros that say nothing: 1.5, 81.2, 3,210."""
    text = f"{value:,.{max(0, 3 - len(str(int(abs(value)))))}f}" if abs(value) < 1000 else f"{value:,.0f}"
    return text.rstrip("0").rstrip(".") if "." in text else text

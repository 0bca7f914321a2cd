"""The machine's conditions at one moment, as a record, and the reader that fills it.

`rules` compares a record with the policy and needs no machine. A condition that cannot be read is None in the record,
and counts as not met if the policy has a rule for it. The reader uses files of /proc and /sys on Linux, and psutil
elsewhere if it is installed. It runs no program and uses no network.
"""

import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

__all__ = ["DAYS", "Conditions", "Window", "read_conditions"]

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY = "|".join(DAYS)
_SPAN = rf"(?:{_DAY})(?:-(?:{_DAY}))?"
_WINDOW = re.compile(rf"(?:({_SPAN}(?:,{_SPAN})*) +)?(\d\d):(\d\d)-(\d\d):(\d\d)")
_MIDNIGHT = 24 * 60


@dataclass(frozen=True, slots=True)
class Window:
    """Hours of the day on some days of the week, in local time.

    Examples: `22:00-06:00`, `mon-fri 18:00-24:00`, `sat,sun 00:00-24:00`.

    Args:
        days: 0 is Monday. A window over midnight belongs to the day it begins on.
        start: first minute, counted from midnight.
        end: the minute after the last, at most 1440.
    """

    days: frozenset[int]
    start: int
    end: int

    @classmethod
    def parse(cls, text: str) -> "Window":
        """Reads a window.

        Raises:
            ValueError: with a sentence that says how to write a window.
        """
        match = _WINDOW.fullmatch(text)
        if match is None:
            raise ValueError(f'{text!r} is not a window; write "22:00-06:00" or "mon-fri 18:00-24:00", days in English')
        start, end = (60 * int(match[at]) + int(match[at + 1]) for at in (2, 4))
        if start >= _MIDNIGHT or end > _MIDNIGHT or int(match[3]) > 59 or int(match[5]) > 59:
            raise ValueError(f"{text!r} has a time that does not exist; write times from 00:00 to 24:00")
        if start == end:
            raise ValueError(f"{text!r} ends when it begins; for the whole day write 00:00-24:00")
        return cls(frozenset(_days(match[1])) if match[1] else frozenset(range(7)), start, end)

    def holds(self, moment: datetime) -> bool:
        """Whether a local time lies in the window: `start` does, `end` does not."""
        day, minute = moment.weekday(), 60 * moment.hour + moment.minute
        if self.start < self.end:
            return day in self.days and self.start <= minute < self.end
        # After midnight, yesterday's window still holds.
        return (day in self.days and minute >= self.start) or ((day - 1) % 7 in self.days and minute < self.end)


def _days(text: str) -> Iterator[int]:
    for span in text.split(","):
        first, _, last = span.partition("-")
        start = DAYS.index(first)
        # The modulus lets `sat-mon` cross the end of the week.
        yield from ((start + more) % 7 for more in range((DAYS.index(last or first) - start) % 7 + 1))


@dataclass(frozen=True, slots=True)
class Conditions:
    """A machine's conditions at one moment. None: cannot be read here.

    Args:
        now: local time.
        device: the device that would train (cpu, cuda, mps).
        free_memory_mib: main memory that a new process could get, in MiB.
        on_power: whether the machine is not running on a battery. True for a machine without one.
        interfaces: network interfaces of the default routes, IPv4 and IPv6. Empty: there is no default route.
    """

    now: datetime
    device: str | None = None
    free_memory_mib: int | None = None
    on_power: bool | None = None
    interfaces: tuple[str, ...] | None = None


def read_conditions(device: str | None, *, root: Path = Path("/")) -> Conditions:
    """Reads the conditions now, for a member that trains on `device`. Never fails: None stands for an unreadable value.

    Args:
        root: folder that holds proc and sys.
    """
    return Conditions(
        now=datetime.now().astimezone(),
        device=device,
        free_memory_mib=_free_memory_mib(root),
        on_power=_on_power(root),
        interfaces=_interfaces(root),
    )


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def _psutil() -> Any:
    try:
        return importlib.import_module("psutil")
    except ImportError:
        return None


# ---- memory ---------------------------------------------------------------------------------------


def _free_memory_mib(root: Path) -> int | None:
    meminfo = _text(root / "proc/meminfo")
    if meminfo is not None:
        found = re.search(r"^MemAvailable: +(\d+) kB$", meminfo, flags=re.MULTILINE)
        if found is None:
            return None
        free = 1024 * int(found[1])
        limited = _free_in_group(root / "sys/fs/cgroup")
        return (free if limited is None else min(free, limited)) // 2**20
    psutil = _psutil()
    return None if psutil is None else int(psutil.virtual_memory().available) // 2**20


def _free_in_group(folder: Path) -> int | None:
    """Bytes that a container's own limit (cgroup v2) leaves. None: there is no limit."""
    limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
    if limit is None or used is None:
        return None
    # The kernel counts idle file pages as used, but gives them back when memory is short.
    idle = re.search(r"^inactive_file (\d+)$", _text(folder / "memory.stat") or "", flags=re.MULTILINE)
    return max(0, limit - used + (int(idle[1]) if idle else 0))


# ---- power ----------------------------------------------------------------------------------------


def _on_power(root: Path) -> bool | None:
    if sys.platform.startswith("linux"):
        return _supplies_say(root / "sys/class/power_supply") if (root / "sys/class").is_dir() else None
    psutil = _psutil()
    if psutil is None or not hasattr(psutil, "sensors_battery"):
        return None
    battery = psutil.sensors_battery()
    if battery is None:
        return True
    return None if battery.power_plugged is None else bool(battery.power_plugged)


def _supplies_say(folder: Path) -> bool | None:
    """Decides from the kernel's power supplies (Documentation/ABI/testing/sysfs-class-power)."""
    batteries = []
    for supply in sorted(folder.glob("*")):
        # The battery of a mouse, say, which does not power the machine.
        if _text(supply / "scope") == "Device":
            continue
        if _text(supply / "type") in ("Battery", "UPS"):
            if _text(supply / "present") != "0":
                batteries.append(_text(supply / "status"))
        elif _text(supply / "online") not in (None, "0"):
            return True
    if "Discharging" in batteries:
        return False
    known = all(status in ("Charging", "Full", "Not charging") for status in batteries)
    return True if known else None


# ---- network --------------------------------------------------------------------------------------

_UP, _REJECT = 0x1, 0x200
# 0.0.0.0/0, and the two halves of it with which a tunnel overrides it. The kernel prints address and mask
# little-endian.
_EVERYWHERE = frozenset({("00000000", "00000000"), ("00000000", "00000080"), ("00000080", "00000080")})
_EVERYWHERE_6 = frozenset({("0" * 32, "00"), ("0" * 32, "01"), ("8" + "0" * 31, "01")})


def _interfaces(root: Path) -> tuple[str, ...] | None:
    table = _text(root / "proc/net/route")
    if table is None:
        return None
    found = set()
    for line in table.splitlines()[1:]:
        cells = line.split()
        if len(cells) >= 8 and (cells[1], cells[7]) in _EVERYWHERE and _open(cells[3]):
            found.add(cells[0])
    # The file is missing on a system without IPv6.
    for line in (_text(root / "proc/net/ipv6_route") or "").splitlines():
        cells = line.split()
        if len(cells) >= 10 and (cells[0], cells[1]) in _EVERYWHERE_6 and _open(cells[8]):
            found.add(cells[9])
    return tuple(sorted(found))


def _open(flags: str) -> bool:
    try:
        bits = int(flags, 16)
    except ValueError:
        return False
    return bool(bits & _UP) and not bits & _REJECT

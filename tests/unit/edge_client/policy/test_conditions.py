"""When a machine may train: windows of the week, and what is read of memory, power and routes."""

import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.policy import conditions
from edge_client.policy.conditions import DAYS, Conditions, Window, read_conditions

MONDAY = datetime(2026, 11, 16)  # noqa: DTZ001  local time has no zone to us
WEEK = 7 * 24 * 60

# ---- windows --------------------------------------------------------------------------------------


def at(day: str, clock: str) -> datetime:
    hours, minutes = map(int, clock.split(":"))
    return MONDAY + timedelta(days=DAYS.index(day), hours=hours, minutes=minutes)


@pytest.mark.parametrize(
    ("window", "inside", "outside"),
    [
        ("09:00-17:00", [("mon", "09:00"), ("sun", "16:59")], [("mon", "08:59"), ("mon", "17:00")]),
        ("22:00-06:00", [("mon", "22:00"), ("mon", "05:59"), ("sun", "23:59")], [("mon", "06:00"), ("mon", "21:59")]),
        ("00:00-24:00", [("mon", "00:00"), ("sun", "23:59")], []),
        ("sat,sun 00:00-24:00", [("sat", "00:00"), ("sun", "23:59")], [("fri", "23:59"), ("mon", "00:00")]),
        ("mon-fri 18:00-24:00", [("mon", "18:00"), ("fri", "23:59")], [("sat", "18:00"), ("tue", "00:00")]),
        # A window over midnight belongs to the day it begins on.
        ("fri 22:00-06:00", [("fri", "22:00"), ("sat", "05:59")], [("fri", "05:59"), ("sat", "22:00")]),
        ("sun 22:00-06:00", [("sun", "23:00"), ("mon", "05:00")], [("sun", "05:00"), ("mon", "22:00")]),
        ("sat-mon,wed 12:00-13:00", [("sat", "12:00"), ("mon", "12:00"), ("wed", "12:59")], [("tue", "12:00")]),
    ],
)
def test_a_window_includes_its_start_and_excludes_its_end(window, inside, outside):
    parsed = Window.parse(window)
    assert all(parsed.holds(at(*moment)) for moment in inside)
    assert not any(parsed.holds(at(*moment)) for moment in outside)


@given(
    days=st.sets(st.sampled_from(DAYS), min_size=1),
    start=st.integers(0, 1439),
    end=st.integers(1, 1440),
    minute=st.integers(0, WEEK - 1),
)
def test_a_window_is_the_minutes_after_its_start_on_each_of_its_days(days, start, end, minute):
    if start == end:
        return
    text = f"{','.join(sorted(days))} {start // 60:02}:{start % 60:02}-{end // 60:02}:{end % 60:02}"
    length = (end - start) % 1440 or 1440
    covered = {(DAYS.index(day) * 1440 + start + more) % WEEK for day in days for more in range(length)}
    assert Window.parse(text).holds(MONDAY + timedelta(minutes=minute)) == (minute in covered)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not a window"),
        ("22-06", "not a window"),
        ("9:00-17:00", "not a window"),
        ("lun 09:00-17:00", "not a window"),
        ("mon- 09:00-17:00", "not a window"),
        ("09:00-17:00 mon", "not a window"),
        ("09:00-17:00\n", "not a window"),
        ("24:00-06:00", "does not exist"),
        ("22:00-24:01", "does not exist"),
        ("22:60-23:00", "does not exist"),
        ("22:00-23:60", "does not exist"),
        ("06:00-06:00", "ends when it begins"),
    ],
)
def test_an_invalid_window_is_refused_with_how_to_write_one(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        Window.parse(text)


# ---- reading --------------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A Linux machine without psutil: `machine("proc/meminfo", text)` writes one of its files and returns its root."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setitem(sys.modules, "psutil", None)
    (tmp_path / "sys/class").mkdir(parents=True)

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return tmp_path

    return write


def supply(machine, name, **files):
    for file, text in files.items():
        root = machine(f"sys/class/power_supply/{name}/{file}", text + "\n")
    return root


def test_what_cannot_be_read_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setitem(sys.modules, "psutil", None)
    before = datetime.now().astimezone()
    read = read_conditions(None, root=tmp_path)
    assert before <= read.now <= datetime.now().astimezone()
    assert read == Conditions(read.now)


def test_this_machine_can_be_read():
    read = read_conditions("cpu")
    assert read.device == "cpu"
    assert read.free_memory_mib is not None
    assert read.free_memory_mib > 0


def test_free_memory_is_what_a_new_process_could_have(machine):
    root = machine("proc/meminfo", "MemTotal: 9000000 kB\nMemFree:   1 kB\nMemAvailable:    4096000 kB\n")
    assert read_conditions(None, root=root).free_memory_mib == 4000
    machine("sys/fs/cgroup/memory.max", "max\n")
    machine("sys/fs/cgroup/memory.current", "1000\n")
    assert read_conditions(None, root=root).free_memory_mib == 4000
    # A container's own limit is smaller: 512 MiB, of which 400 are used, 100 of those by idle file pages.
    machine("sys/fs/cgroup/memory.max", f"{512 * 2**20}\n")
    machine("sys/fs/cgroup/memory.current", f"{400 * 2**20}\n")
    assert read_conditions(None, root=root).free_memory_mib == 112
    machine("sys/fs/cgroup/memory.stat", f"anon 5\ninactive_file {100 * 2**20}\nactive_file 7\n")
    assert read_conditions(None, root=root).free_memory_mib == 212
    machine("sys/fs/cgroup/memory.current", f"{900 * 2**20}\n")
    assert read_conditions(None, root=root).free_memory_mib == 0
    machine("proc/meminfo", "MemTotal: 9000000 kB\n")
    assert read_conditions(None, root=root).free_memory_mib is None


@pytest.mark.parametrize(
    ("supplies", "on_power"),
    [
        ({}, True),
        ({"AC": {"type": "Mains", "online": "1"}, "BAT0": {"type": "Battery", "status": "Discharging"}}, True),
        ({"AC": {"type": "Mains", "online": "0"}, "BAT0": {"type": "Battery", "status": "Discharging"}}, False),
        ({"AC": {"type": "Mains", "online": "0"}, "BAT0": {"type": "Battery", "status": "Unknown"}}, None),
        ({"BAT0": {"type": "Battery", "status": "Full"}}, True),
        ({"BAT0": {"type": "Battery", "status": "Charging"}, "BAT1": {"type": "Battery", "status": "Unknown"}}, None),
        ({"BAT0": {"type": "Battery", "status": "Full"}, "BAT1": {"type": "Battery", "status": "Discharging"}}, False),
        # An empty bay, and a mouse.
        ({"BAT1": {"type": "Battery", "present": "0"}}, True),
        ({"hid": {"type": "Battery", "scope": "Device", "status": "Discharging"}}, True),
        ({"ups": {"type": "UPS", "status": "Discharging"}}, False),
        ({"usb": {"type": "USB", "online": "1"}, "BAT0": {"type": "Battery", "status": "Unknown"}}, True),
    ],
)
def test_power_supplies(machine, supplies, on_power):
    root = machine("proc/version", "")
    for name, files in supplies.items():
        supply(machine, name, **files)
    assert read_conditions(None, root=root).on_power is on_power


HEAD = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
NET = "eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
DEFAULT = "eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
REJECTED = "eth9\t00000000\t00000000\t0201\t0\t0\t0\t00000000\t0\t0\t0\n"
DOWN = "eth8\t00000000\t00000000\t0002\t0\t0\t0\t00000000\t0\t0\t0\n"
TUNNEL = "tun0\t00000000\t0100080A\t0003\t0\t0\t0\t00000080\t0\t0\t0\n"
OTHER_HALF = "tun1\t00000080\t0100080A\t0003\t0\t0\t0\t00000080\t0\t0\t0\n"
QUARTER = "tun2\t00000000\t0100080A\t0003\t0\t0\t0\t000000C0\t0\t0\t0\n"
SIX = "0" * 32 + " 00 " + "0" * 32 + " 00 fd000000000000000000000000000001 00000400 2 0 00000003     wlan0\n"
SIX_LINK = "fe80" + "0" * 28 + " 40 " + "0" * 32 + " 00 " + "0" * 32 + " 00000100 2 0 00000001     wlan1\n"
SIX_NONE = "0" * 32 + " 00 " + "0" * 32 + " 00 " + "0" * 32 + " ffffffff 1 0 00200200       lo\n"
SIX_HALF = "8" + "0" * 31 + " 01 " + "0" * 32 + " 00 " + "0" * 32 + " 00000400 2 0 00000003     wg0\n"


@pytest.mark.parametrize(
    ("four", "six", "interfaces"),
    [
        (HEAD + NET, None, ()),
        (HEAD + DEFAULT + NET, None, ("eth0",)),
        (HEAD + DEFAULT + REJECTED + DOWN, None, ("eth0",)),
        (HEAD + DEFAULT + TUNNEL + OTHER_HALF + QUARTER, None, ("eth0", "tun0", "tun1")),
        (HEAD + DEFAULT, SIX + SIX_LINK + SIX_NONE, ("eth0", "wlan0")),
        (HEAD, SIX_HALF, ("wg0",)),
        (HEAD + "what is this\neth7\t00000000\tx\tzz\t0\t0\t0\t00000000\n", "nothing known\n", ()),
    ],
)
def test_default_routes(machine, four, six, interfaces):
    root = machine("proc/net/route", four)
    if six is not None:
        machine("proc/net/ipv6_route", six)
    assert read_conditions(None, root=root).interfaces == interfaces


def test_psutil_is_used_without_proc(tmp_path, monkeypatch):
    psutil = pytest.importorskip("psutil")
    monkeypatch.setattr(sys, "platform", "darwin")
    read = read_conditions(None, root=tmp_path)
    assert read.free_memory_mib is not None
    assert abs(read.free_memory_mib - psutil.virtual_memory().available // 2**20) < 4096
    for battery, on_power in ((None, True), ((50, 60, True), True), ((50, 60, False), False), ((50, 60, None), None)):
        answer = None if battery is None else psutil._ntuples.sbattery(*battery)
        monkeypatch.setattr(psutil, "sensors_battery", lambda answer=answer: answer, raising=False)
        assert read_conditions(None, root=tmp_path).on_power is on_power
    monkeypatch.delattr(psutil, "sensors_battery")
    assert read_conditions(None, root=tmp_path).on_power is None
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert conditions._on_power(tmp_path) is None
    assert conditions._free_memory_mib(tmp_path) is None

"""Owns what the kernel tells: CPU time, memory and files of a process tree, and how busy a core was. Linux only."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
PROC = Path("/proc")


def tree(root: int) -> list[int]:
    """Return `root` and all processes below it."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdecimal() and (fields := _stat_fields(entry / "stat")):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, ())
    return found


@dataclass(frozen=True)
class CpuTime:
    """CPU time of a process tree so far."""

    threads: dict[int, int]
    """Nanoseconds of each thread that is alive, from `schedstat`; empty where the kernel has none."""
    ticks: float
    """Seconds, from `utime + stime` of the processes, ended threads included."""

    @classmethod
    def read(cls, root: int) -> CpuTime:
        """Return the CPU time of `root` and all processes below it."""
        threads: dict[int, int] = {}
        ticks = 0
        for pid in tree(root):
            if fields := _stat_fields(PROC / str(pid) / "stat"):
                ticks += int(fields[11]) + int(fields[12])
            for task in _listed(PROC / str(pid) / "task"):
                if text := _text(task / "schedstat"):
                    threads[int(task.name)] = int(text.split()[0])
        return cls(threads, ticks / TICKS)

    def until(self, later: CpuTime) -> tuple[float, str]:
        """Return the seconds from this reading to `later`, and from where they are known: "schedstat" or "stat".

        A thread that ended between takes its nanoseconds with it; then the ticks of its process count, which are
        coarser (usually 10 ms).
        """
        if self.threads and self.threads.keys() <= later.threads.keys():
            return sum(ns - self.threads.get(thread, 0) for thread, ns in later.threads.items()) / 1e9, "schedstat"
        return later.ticks - self.ticks, "stat"


def resident_bytes(root: int) -> int:
    """Return the resident memory of `root` and all processes below it; what they share counts for each."""
    texts = (_text(PROC / str(pid) / "statm") for pid in tree(root))
    return sum(int(text.split()[1]) for text in texts if text) * PAGE


def open_files(root: int) -> list[str]:
    """Return what the file descriptors of `root` and all processes below it lead to."""
    found = []
    for pid in tree(root):
        for descriptor in _listed(PROC / str(pid) / "fd"):
            try:
                found.append(str(descriptor.readlink()))
            except OSError:  # closed meanwhile
                continue
    return found


@dataclass(frozen=True)
class CoreTime:
    """What one core has done so far, in seconds."""

    busy: float
    """In programs and in the kernel, all processes together."""
    steal: float
    """Wanted, but given to another virtual machine."""

    @classmethod
    def read(cls, core: int) -> CoreTime:
        """Return the times of `core`."""
        for line in (PROC / "stat").read_text().splitlines():
            name, *values = line.split()
            if name == f"cpu{core}":
                user, nice, system, _idle, _iowait, _irq, _softirq, steal = map(int, values[:8])
                return cls((user + nice + system) / TICKS, steal / TICKS)
        raise ValueError(f"there is no core {core}")


def _stat_fields(path: Path) -> list[str]:
    # From the state on: the name before it may hold spaces and brackets.
    return _text(path).rpartition(")")[2].split()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has ended meanwhile
        return ""


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []

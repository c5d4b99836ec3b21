"""Rows of results: appended to a file, each with the hardware, versions and commit it came from."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def where() -> dict[str, Any]:
    """The machine and the code that a row was measured on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": datetime.date.today().isoformat(),
        "commit": _git("rev-parse", "--short", "HEAD")
        + ("+" if _git("status", "-s", "-uno") else ""),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),  # with this benchmark's own processes
        "gpu": gpu,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def append(name: str, rows: list[dict[str, Any]]) -> Path:
    """Append rows to benchmarks/results/NAME.jsonl."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.jsonl"
    stamp = where()
    with path.open("a", encoding="utf-8") as out:
        for row in rows:
            out.write(json.dumps({**row, **stamp}) + "\n")
    return path


def quantiles(values: list[float]) -> tuple[float, float, float]:
    """20 %, median, 80 %."""
    q = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8]).double())
    low, middle, high = q.tolist()
    return low, middle, high


def table(header: list[str], lines: list[list[str]]) -> str:
    """Columns as wide as their widest cell."""
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]
    rows = [
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True))
        for line in [header, ["-" * w for w in widths], *lines]
    ]
    return "\n".join(row.rstrip() for row in rows)


def _git(*args: str) -> str:
    done = subprocess.run(["git", *args], capture_output=True, text=True, cwd=Path(__file__).parent)
    return done.stdout.strip() or ("" if args[0] == "status" else "unknown")


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = [x for x in info.read_text().splitlines() if "model name" in x] if info.exists() else []
    return names[0].split(":")[1].strip() if names else platform.processor()

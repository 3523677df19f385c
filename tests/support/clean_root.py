"""A container file's instructions, and their run in a root of its own where no daemon builds images.

The root has this machine's programs, read-only, in the place of the base image's, and a Python without packages but
those that ``pyproject.toml`` declares, with what they require: an import of any other one fails there.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

SYSTEM = ("/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib64", "/usr/share", "/usr/libexec")
"""Folders of the base system."""
LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
BUILD_TOOLS = ("pip", "setuptools")
"""What an image of Python has, or its index would give, to build a wheel."""
OFFLINE = {
    "PIP_NO_INDEX": "1",
    "PIP_NO_BUILD_ISOLATION": "false",  # which pip reads as: no isolation
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_ROOT_USER_ACTION": "ignore",
}


def instructions(path: Path) -> list[tuple[str, str]]:
    """The instructions of a container file, without comments, in order."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE)
    lines = [line for line in re.sub(r"\\\n\s*", "", text).splitlines() if line]
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines]


@dataclass
class Image:
    """What the instructions make of a root, beside its files."""

    root: Path
    steps: list[str] = field(default_factory=list)
    """Lines of a shell that has mounted the root."""
    variables: dict[str, str] = field(default_factory=lambda: {"PATH": "/usr/local/bin:/usr/bin:/usr/sbin"})
    folder: str = "/"
    user: str = "0"
    entry: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)

    def within(self, command: Sequence[str], **more: str) -> str:
        """A shell's line that runs ``command`` in the root, as the instructions so far have it."""
        variables = [f"{name}={value}" for name, value in {**self.variables, **more}.items()]
        inside = f"cd {self.folder} && exec {shlex.join(command)}"
        user = f"--userspec={self.user}:{self.user}"
        return shlex.join(["chroot", user, str(self.root), "env", "-i", *variables, "/bin/sh", "-c", inside])

    def take(self, name: str, words: str, tree: Path) -> None:
        """Take one instruction; those of metadata alone have no effect here."""
        if name == "RUN":
            self.steps.append(self.within(["/bin/sh", "-ec", words], **OFFLINE))
        elif name == "COPY":
            *sources, target = words.split()
            place = self.root / f"{self.folder}/{target}".lstrip("/")
            self.steps.append(shlex.join(["mkdir", "-p", str(place)]))
            for source in sources:
                found = f"{tree / source}/." if (tree / source).is_dir() else str(tree / source)
                self.steps.append(shlex.join(["cp", "-r", found, str(place)]))
        elif name == "WORKDIR":
            self.folder = words
            self.steps.append(shlex.join(["mkdir", "-p", str(self.root / words.lstrip("/"))]))
        elif name in ("ARG", "ENV"):
            self.variables |= dict(word.split("=", 1) for word in shlex.split(words))
        elif name == "USER":
            self.user = words
        elif name == "ENTRYPOINT":
            self.entry = json.loads(words)
        elif name == "HEALTHCHECK":
            self.health = json.loads(words[words.index("CMD ") + 4 :])
        elif name not in ("FROM", "EXPOSE", "STOPSIGNAL"):
            raise ValueError(f"{name}: an instruction that is not known here")


def required(lines: Sequence[str]) -> Iterator[Distribution]:
    """The installed distributions of these requirements with all that they require."""
    wanted, seen = [Requirement(line) for line in lines], set[tuple[str, str]]()
    while wanted:
        one = wanted.pop()
        found = distribution(one.name)
        yield found
        for extra in {"", *one.extras}:
            if (one.name, extra) in seen:
                continue
            seen.add((one.name, extra))
            for line in found.requires or ():
                requirement = Requirement(line)
                if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                    wanted.append(requirement)


def declared(tree: Path) -> list[str]:
    """What an installation without extras requires."""
    with (tree / "pyproject.toml").open("rb") as file:
        found: list[str] = tomllib.load(file)["project"]["dependencies"]
        return found


def prepare(root: Path, tree: Path) -> Image:
    """Make the root's own files; what is mounted there comes with :attr:`Image.steps`."""
    image = Image(root)
    for name in ("etc", "tmp", "proc", "dev", "home", "usr/local"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    for name, target in LINKS.items():
        (root / name).symlink_to(target)
    for name in (
        "passwd",
        "group",
        "shadow",
        "gshadow",
        "login.defs",
        "ld.so.cache",
        "nsswitch.conf",
        "hosts",
    ):
        if (Path("/etc") / name).exists():
            (root / "etc" / name).write_bytes((Path("/etc") / name).read_bytes())
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root / "usr/local")], check=True)
    site = Path(sysconfig.get_path("purelib"))
    own = next((root / "usr/local/lib").glob("python*/site-packages"))
    for found in required([*declared(tree), *BUILD_TOOLS]):
        for top in {file.parts[0] for file in found.files or () if not str(file).startswith("..")}:
            if not (own / top).exists() and (site / top).exists():
                (own / top).symlink_to(site / top)
    pip = root / "usr/local/bin/pip"
    pip.write_text('#!/bin/sh\nexec python -m pip "$@"\n')
    pip.chmod(0o755)
    folders = [*(path for path in SYSTEM if Path(path).is_dir()), sys.base_prefix, str(site), "/proc", "/dev"]
    for folder in folders:
        place = root / folder.lstrip("/")
        image.steps += [
            shlex.join(["mkdir", "-p", str(place)]),
            shlex.join(["mount", "--rbind", folder, str(place)]),
        ]
        if folder not in ("/proc", "/dev"):
            image.steps.append(shlex.join(["mount", "-o", "remount,bind,ro", str(place)]))
    return image


def started(image: Image, arguments: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """The command line that mounts the root, builds it and becomes what the image starts with ``arguments``."""
    begin = image.within([*image.entry, *arguments], **variables)
    script = "\n".join(["set -e", *(f"{step} >&2" for step in image.steps), f"exec {begin}"])
    return ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", script]

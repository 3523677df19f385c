"""Certificates of chosen validity, which openssl makes by its command line only in newer versions."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


def self_signed(folder: Path, names: str = "IP:127.0.0.1") -> tuple[Path, Path]:
    """A certificate for ``names`` and its key; skips the test where there is no openssl."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = (
        f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test -addext subjectAltName={names}"
    )
    try:
        subprocess.run(
            [*command.split(), "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True
        )
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no openssl to make a certificate: {error}")
    return cert, key


def make_certificate(folder: Path, first: int, last: int) -> Path:
    """Make a self-signed one for 127.0.0.1, with its key in one file, valid from day ``first`` to ``last`` from now."""
    key, request, out = folder / "key.pem", folder / "request.pem", folder / "cert.pem"
    (folder / "index.txt").write_text("")
    (folder / "ca.cnf").write_text(
        "[ca]\ndefault_ca=one\n[one]\ndatabase=index.txt\nnew_certs_dir=.\nrand_serial=yes\n"
        "default_md=sha256\npolicy=any\nx509_extensions=more\n[any]\ncommonName=supplied\n"
        "[more]\nsubjectAltName=IP:127.0.0.1\nbasicConstraints=CA:TRUE\n"
    )
    span = f"-startdate {_day(folder, first)} -enddate {_day(folder, last)}"
    for command in (
        f"openssl req -new -newkey rsa:2048 -nodes -subj /CN=test -keyout {key} -out {request}",
        f"openssl ca -batch -selfsign -config ca.cnf -keyfile {key} -in {request} -out {out} -notext {span}",
    ):
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    both = folder / "both.pem"
    both.write_text(key.read_text() + out.read_text())
    return both


def _day(folder: Path, days: int) -> str:
    shown = subprocess.run(
        ["date", "-u", "-d", f"{days} days", "+%Y%m%d%H%M%SZ"],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    return shown.stdout.strip()

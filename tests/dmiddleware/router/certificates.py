"""Authorities and certificates for tests, made with the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from dmiddleware.router.transport.tls import TlsFiles

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


class Authority:
    """A certificate authority."""

    def __init__(self, folder: Path, name: str) -> None:
        if shutil.which("openssl") is None:
            pytest.fail("the openssl command is missing; install it: apt-get install openssl")
        self._folder = folder
        self._name = name
        self.ca = str(folder / f"{name}.pem")
        self._openssl(
            "req", "-x509", *NEW_KEY, "-days", "2", "-subj", f"/CN={name}",
            "-keyout", f"{name}.key", "-out", f"{name}.pem",
        )  # fmt: skip

    def issue(self, owner: str, *, host: str = "localhost") -> str:
        """Create a certificate for a host; return the file with it and its key."""
        stem = f"{self._name}-{owner}"
        self._openssl(
            "req", "-new", *NEW_KEY, "-subj", f"/CN={owner}",
            "-keyout", f"{stem}.key", "-out", f"{stem}.csr",
        )  # fmt: skip
        (self._folder / f"{stem}.ext").write_text(f"subjectAltName=DNS:{host}\n")
        self._openssl(
            "x509", "-req", "-in", f"{stem}.csr", "-days", "2", "-extfile", f"{stem}.ext",
            "-CA", f"{self._name}.pem", "-CAkey", f"{self._name}.key", "-CAcreateserial",
            "-out", f"{stem}.crt",
        )  # fmt: skip
        both = self._folder / f"{stem}.both"
        parts = [(self._folder / f"{stem}.{end}").read_text() for end in ("crt", "key")]
        both.write_text("".join(parts))
        return str(both)

    def files(self, owner: str, *, host: str = "localhost", expects: str = "localhost") -> TlsFiles:
        """Create a certificate for a host, and trust this authority."""
        return TlsFiles(ca=self.ca, cert_and_key=self.issue(owner, host=host), server_name=expects)

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(
            ["openssl", *arguments], cwd=self._folder, check=True, capture_output=True, timeout=30
        )

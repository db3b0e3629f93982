"""Certificates for tests: an authority, what it vouches for, and the flags and options that name the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import trustme


class Certificates:
    """An authority's certificate, those of a server and of a client with their keys, and another authority's.

    Args:
        directory: where the files are made.

        names: what the server's certificate is for.
    """

    def __init__(self, directory: Path, *names: str) -> None:
        authority = trustme.CA()
        self.authority = str(directory / "ca.pem")
        self.stranger = str(directory / "stranger.pem")
        authority.cert_pem.write_to_path(self.authority)
        trustme.CA().cert_pem.write_to_path(self.stranger)
        self.server = self._issue(authority, directory / "server", *(names or ("127.0.0.1",)))
        self.client = self._issue(authority, directory / "client", "client")

    @staticmethod
    def _issue(authority: trustme.CA, path: Path, *names: str) -> tuple[str, str]:
        issued = authority.issue_cert(*names)
        files = f"{path}-cert.pem", f"{path}-key.pem"
        issued.cert_chain_pems[0].write_to_path(files[0])
        issued.private_key_pem.write_to_path(files[1])
        return files

    @property
    def nsqd_flags(self) -> tuple[str, ...]:
        """With these an nsqd offers TLS."""
        certificate, key = self.server
        return f"--tls-cert={certificate}", f"--tls-key={key}"

    @property
    def options(self) -> dict[str, Any]:
        """With these a reader or writer uses it."""
        return {"tls_v1": True, "tls_options": {"ca_certs": self.authority}}

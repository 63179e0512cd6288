"""Certificates for ``tls+tcp``, and why a handshake with them fails."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Final

import msgspec

from dmiddleware.errors import AuthError, RouterError, TransportError

__all__ = ["TlsFiles"]

_CERTIFICATE_ALERTS: Final = ("certificate", "unknown ca", "access denied")
"""Words in the alerts of a peer that refuses a certificate, RFC 8446, section 6.2."""


class TlsFiles(msgspec.Struct, kw_only=True, frozen=True):
    """Certificates for ``tls+tcp``, as PEM files; both sides must present one.

    Attributes:
        ca: certificates of the trusted authorities.
        cert_and_key: this side's certificate and private key, in one file.
        server_name: the name in the listeners' certificates.
    """

    ca: str
    cert_and_key: str
    server_name: str

    def context(self, *, listens: bool) -> ssl.SSLContext:
        """Return the settings of one side of a connection.

        Raises:
            TransportError: if a file is missing or not a certificate, or the name cannot be one.
        """
        self._check()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if listens else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        if listens:
            # Sessions are not resumed.
            context.num_tickets = 0
        try:
            context.load_verify_locations(self.ca)
            # Without a password, an encrypted key would ask for one on the terminal.
            context.load_cert_chain(self.cert_and_key, password="")
        except (ssl.SSLError, OSError) as error:
            raise self._unreadable(error) from error
        return context

    def explain(self, address: str, error: ssl.SSLError, *, listens: bool) -> RouterError:
        """Return what went wrong in a handshake, and what to do about it.

        Args:
            address: the address that was dialed, or that is listened on.
            error: the error that OpenSSL reported.
            listens: whether this side listens.
        """
        peer = f"a peer that dialed {address}" if listens else address
        hint = (
            "peers must dial it with a tls+tcp:// address"
            if listens
            else "if its listener has a tcp:// address, it does not speak TLS"
        )
        if isinstance(error, ssl.SSLEOFError):
            return TransportError(f"{peer} closed the connection during the TLS handshake; {hint}")
        if isinstance(error, ssl.SSLCertVerificationError):
            name = "" if listens else f" and be valid for the name {self.server_name!r}"
            return AuthError(
                f"the certificate of {peer} was refused: {error.verify_message}; it must be "
                f"signed by an authority in {self.ca}{name}"
            )
        reason = error.reason.lower().replace("_", " ")
        if reason == "peer did not return a certificate":
            return AuthError(f"{peer} has no certificate; both sides must present one")
        alert = reason.partition(" alert ")[2]
        if any(word in alert for word in _CERTIFICATE_ALERTS):
            return AuthError(
                f"{peer} refused the certificate in {self.cert_and_key}: {alert}; it must be "
                "signed by an authority that the peer trusts, be valid for its name, and must not "
                "have expired"
            )
        return TransportError(f"the TLS handshake with {peer} failed: {reason}; {hint}")

    def _check(self) -> None:
        if not self.server_name or self.server_name.startswith("."):
            raise TransportError(
                f"server_name is {self.server_name!r}; write the name in the certificates of the "
                "listeners"
            )
        for file in (self.ca, self.cert_and_key):
            if not Path(file).is_file():
                raise TransportError(
                    f"the certificate file {file!r} does not exist; check the paths in TlsFiles"
                )

    def _unreadable(self, error: Exception) -> TransportError:
        return TransportError(
            f"could not read the certificates: {error}; {self.ca!r} must hold certificates in "
            f"PEM form, and {self.cert_and_key!r} a certificate and its private key"
        )

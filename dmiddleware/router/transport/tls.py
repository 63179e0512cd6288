"""Certificates for ``tls+tcp``, and why a connection with them was refused."""

from __future__ import annotations

import os
import socket
import ssl
from pathlib import Path
from typing import Any, Final

import msgspec

from dmiddleware.errors import AuthError, TransportError

__all__ = ["TlsFiles"]

_GREETING_BYTES: Final = 8


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
            TransportError: if a file is missing or not a certificate.
        """
        self._check_files()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if listens else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = ssl.CERT_REQUIRED
        if listens:
            context.num_tickets = 0
        try:
            context.load_verify_locations(self.ca)
            # Without a password, an encrypted key would ask for one on the terminal.
            context.load_cert_chain(self.cert_and_key, password="")
        except (ssl.SSLError, OSError) as error:
            raise self._unreadable(error) from error
        return context

    def config(self, *, listens: bool) -> Any:
        """Return nng's configuration for one side of a connection.

        Raises:
            TransportError: if a file is missing or not a certificate.
        """
        # Loaded here, because most processes do without nng.
        from dmiddleware.router.transport.nng_library import ffi, lib
        from dmiddleware.router.transport.nng_operation import failure, text_of

        self._check_files()
        made = ffi.new("nng_tls_config **")
        mode = lib.NNG_TLS_MODE_SERVER if listens else lib.NNG_TLS_MODE_CLIENT
        if code := lib.nng_tls_config_alloc(made, mode):
            raise failure("use TLS", code)
        config = ffi.gc(made[0], lib.nng_tls_config_free)
        # With TLS 1.3, one in a thousand simultaneous handshakes fails: threads share the store in
        # which mbed TLS keeps its keys, without a lock.
        code = lib.nng_tls_config_version(config, lib.NNG_TLS_1_2, lib.NNG_TLS_1_2)
        code = code or lib.nng_tls_config_auth_mode(config, lib.NNG_TLS_AUTH_MODE_REQUIRED)
        if not code and not listens:
            code = lib.nng_tls_config_server_name(config, self.server_name.encode())
        code = code or lib.nng_tls_config_ca_file(config, os.fsencode(self.ca))
        code = code or lib.nng_tls_config_cert_key_file(
            config, os.fsencode(self.cert_and_key), ffi.NULL
        )
        if code:
            raise self._unreadable(text_of(code))
        return config

    def check(self, address: str, *, timeout_s: float) -> None:
        """Perform a TLS handshake to find out why the certificates were refused.

        nng does not report the reason.

        Raises:
            AuthError: if either side refuses the other's certificate.
            TransportError: if the listener does not speak TLS.
        """
        host, _, port = address.removeprefix("tls+tcp://").rpartition(":")
        context = self.context(listens=False)
        try:
            with (
                socket.create_connection((host.strip("[]"), int(port)), timeout_s) as plain,
                context.wrap_socket(plain, server_hostname=self.server_name) as secured,
            ):
                if self._is_greeted(secured):
                    return
        except OSError as error:
            if (reason := self.refusal(address, error)) is not None:
                raise reason from error
            return
        raise self.refused(address)

    def refusal(self, address: str, error: OSError) -> TransportError | AuthError | None:
        """Return why a handshake failed; None if that has nothing to do with certificates."""
        if isinstance(error, ssl.SSLCertVerificationError):
            return AuthError(
                f"the certificate of {address} was refused: {error.verify_message}; it must be "
                f"signed by an authority in {self.ca} and be valid for the name "
                f"{self.server_name!r}"
            )
        if isinstance(error, ssl.SSLEOFError):
            return TransportError(
                f"{address} closed the connection during the TLS handshake; if its listener has a "
                "tcp:// address, it does not speak TLS"
            )
        if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
            return TransportError(
                f"{address} does not speak TLS; start its listener with a tls+tcp:// address, "
                "or dial it with tcp://"
            )
        if isinstance(error, ssl.SSLError) and "ALERT" in str(error.reason):
            return self.refused(address)
        return None

    def refused(self, address: str) -> AuthError:
        """Return the error for a listener that refuses this side's certificate."""
        return AuthError(
            f"{address} refused the certificate in {self.cert_and_key}; it must be signed by an "
            "authority that the listener trusts, and must not have expired"
        )

    def _check_files(self) -> None:
        for file in (self.ca, self.cert_and_key):
            if not Path(file).is_file():
                raise TransportError(
                    f"the certificate file {file!r} does not exist; check the paths in TlsFiles"
                )

    def _unreadable(self, error: Exception | str) -> TransportError:
        return TransportError(
            f"could not read the certificates: {error}; {self.ca!r} must hold certificates in "
            f"PEM form, and {self.cert_and_key!r} a certificate and its private key"
        )

    def _is_greeted(self, secured: ssl.SSLSocket) -> bool:
        """Return whether the listener continues after it has seen this side's certificate.

        In TLS 1.3 this side's handshake ends before the listener has checked the certificate. If it
        refuses the certificate it sends an alert, which may be lost when it closes the connection.
        """
        try:
            return bool(secured.recv(_GREETING_BYTES))
        except TimeoutError:
            return True
        except OSError:
            return False

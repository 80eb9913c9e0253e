"""Owns a certificate for localhost that nobody trusts but these tests: valid for a hundred years, its key is public."""

from __future__ import annotations

import ssl
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

KEY_AND_CERTIFICATE = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgjeIgf7LgifIZt3WI
EXSzuyifjITdjEeU5PoFKerJ60qhRANCAASglg6NRMaF0fWI+XS57aLesEKg33P9
h6RX++3MV+g+Za9fbj7PgaI+XbaspNObHWcp0um0yIEQeNI2XcKCBjVj
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBrzCCAVSgAwIBAgIUBCRYQNQGsqhikQ0wpOW3r9DEMDEwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEzMDE3NDYxMloYDzIxMjYxMTA2
MTc0NjEyWjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAASglg6NRMaF0fWI+XS57aLesEKg33P9h6RX++3MV+g+Za9fbj7PgaI+
XbaspNObHWcp0um0yIEQeNI2XcKCBjVjo4GBMH8wHQYDVR0OBBYEFJwH1QaR/MSA
qM2UaxU/ir0wdRqbMB8GA1UdIwQYMBaAFJwH1QaR/MSAqM2UaxU/ir0wdRqbMA8G
A1UdEwEB/wQFMAMBAf8wLAYDVR0RBCUwI4IJbG9jYWxob3N0hwR/AAABhxAAAAAA
AAAAAAAAAAAAAAABMAoGCCqGSM49BAMCA0kAMEYCIQDygJUJ1ABs7L8biYn+c0oM
HKPr8afit/AAFiXc1NsMsAIhAIiMZGm/gvZmdd31Gin3jbv1n98/aHi34EMtGfe4
7Xka
-----END CERTIFICATE-----
"""


@cache
def server_context() -> ssl.SSLContext:
    """What a worker at localhost, 127.0.0.1 or ::1 serves with. It offers HTTP/2, too, as real ones may."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["h2", "http/1.1"])
    with TemporaryDirectory() as folder:
        file = Path(folder, "both.pem")
        file.write_text(KEY_AND_CERTIFICATE)
        context.load_cert_chain(file)
    return context


@cache
def client_context() -> ssl.SSLContext:
    """What trusts that worker, and nobody else."""
    return ssl.create_default_context(cadata=KEY_AND_CERTIFICATE[KEY_AND_CERTIFICATE.index("-----BEGIN CERT") :])

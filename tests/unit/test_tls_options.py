"""pynsq's `tls_options`: what becomes of each, and what is refused before anything connects."""

from __future__ import annotations

import ssl
import warnings
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from nsqdedupe import ConfigError
from nsqdedupe.options import check_options
from nsqdedupe.tls import client_context

ADDRESS = {"nsqd_tcp_addresses": "127.0.0.1:4150"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a certificate with its key, the same key encrypted, and a file that is none of these."""
    directory = tmp_path_factory.mktemp("files")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(directory / "ca.pem")
    mine = authority.issue_cert("client")
    mine.cert_chain_pems[0].write_to_path(directory / "cert.pem")
    mine.private_key_pem.write_to_path(directory / "key.pem")
    key = serialization.load_pem_private_key(mine.private_key_pem.bytes(), None)
    encryption = serialization.BestAvailableEncryption(b"password")
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (directory / "locked.pem").write_bytes(key.private_bytes(pem, pkcs8, encryption))
    (directory / "text.pem").write_text("no certificate")
    return directory


def version(name: str) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return getattr(ssl, name)


@pytest.mark.parametrize("options", [None, {}, {"ca_certs": None}, {"ssl_version": version("PROTOCOL_TLS")}])
def test_by_default_todays_versions_are_spoken_and_the_certificate_is_verified(options: dict[str, Any] | None) -> None:
    context = client_context(options)
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert context.maximum_version in (ssl.TLSVersion.MAXIMUM_SUPPORTED, ssl.TLSVersion.TLSv1_3)
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert not context.check_hostname


def test_the_systems_authorities_are_trusted_unless_others_are_named(files: Path) -> None:
    own = client_context({"ca_certs": files / "ca.pem"}).get_ca_certs()
    assert len(own) == 1
    system = ssl.create_default_context().cert_store_stats()
    assert client_context({}).cert_store_stats() == system


def test_who_asks_for_one_version_gets_that_one() -> None:
    context = client_context({"ssl_version": version("PROTOCOL_TLSv1_2")})
    assert context.minimum_version == context.maximum_version == ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(
    ("options", "checked"),
    [
        ({"check_hostname": True}, True),
        ({"ssl_version": ssl.PROTOCOL_TLS_CLIENT}, True),
        ({"ssl_version": ssl.PROTOCOL_TLS_CLIENT, "check_hostname": False}, False),
        ({"ssl_version": ssl.PROTOCOL_TLS_CLIENT, "cert_reqs": ssl.CERT_NONE}, False),
    ],
)
def test_the_name_is_checked_when_that_is_asked_for(options: dict[str, Any], checked: bool) -> None:
    assert client_context(options).check_hostname is checked


@pytest.mark.parametrize("needed", [ssl.CERT_NONE, ssl.CERT_OPTIONAL, ssl.CERT_REQUIRED, 0])
def test_what_is_verified_is_what_was_asked_for(needed: int) -> None:
    assert client_context({"cert_reqs": needed}).verify_mode == needed


def test_a_client_may_prove_who_it_is(files: Path) -> None:
    client_context({"certfile": str(files / "cert.pem"), "keyfile": files / "key.pem"})
    both = files / "both.pem"
    both.write_bytes((files / "cert.pem").read_bytes() + (files / "key.pem").read_bytes())
    client_context({"certfile": both})


def test_ciphers_are_limited() -> None:
    names = {cipher["name"] for cipher in client_context({"ciphers": "ECDHE+AESGCM"}).get_ciphers()}
    assert not [name for name in names if "CHACHA" in name and not name.startswith("TLS_")]


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "unknown": ({"ca_cert": "ca.pem"}, ["'ca_cert'", "ca_certs"]),
    "an old version": ({"ssl_version": version("PROTOCOL_TLSv1")}, ["ssl_version", "PROTOCOL_TLS_CLIENT"]),
    "a servers version": ({"ssl_version": ssl.PROTOCOL_TLS_SERVER}, ["ssl_version"]),
    "no requirement": ({"cert_reqs": "CERT_NONE"}, ["cert_reqs", "ssl.CERT_NONE"]),
    "a flag for a requirement": ({"cert_reqs": True}, ["cert_reqs"]),
    "no flag": ({"check_hostname": "yes"}, ["check_hostname", "'yes'"]),
    "a name nobody vouches for": (
        {"check_hostname": True, "cert_reqs": ssl.CERT_NONE},
        ["check_hostname=True", "CERT_NONE"],
    ),
    "no such authority": ({"ca_certs": "/nowhere/ca.pem"}, ["ca_certs", "/nowhere/ca.pem", "No such file"]),
    "no path": ({"ca_certs": 1}, ["ca_certs=1", "path"]),
    "an empty path": ({"ca_certs": ""}, ["ca_certs=''"]),
    "no authority": ({"ca_certs": "text.pem"}, ["ca_certs", "text.pem"]),
    "a directory": ({"ca_certs": "."}, ["ca_certs"]),
    "no such certificate": ({"certfile": "/nowhere/cert.pem"}, ["certfile", "/nowhere/cert.pem", "No such file"]),
    "no such key": (
        {"certfile": "cert.pem", "keyfile": "/nowhere/key.pem"},
        ["keyfile", "/nowhere/key.pem", "No such file"],
    ),
    "a key without certificate": ({"keyfile": "key.pem"}, ["keyfile", "certfile"]),
    "a certificate without key": ({"certfile": "cert.pem"}, ["certfile", "key"]),
    "a key that is locked": ({"certfile": "cert.pem", "keyfile": "locked.pem"}, ["locked.pem", "encrypted"]),
    "no cipher": ({"ciphers": "ROT13"}, ["ciphers='ROT13'"]),
    "no list of ciphers": ({"ciphers": 13}, ["ciphers=13"]),
}


@pytest.mark.parametrize(("options", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused_at_once(
    options: dict[str, Any], words: list[str], files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    with pytest.raises(ConfigError) as caught:
        check_options({**ADDRESS, "tls_v1": True, "tls_options": options})
    for word in ["tls_options", *words]:
        assert word in str(caught.value)


def test_without_tls_no_file_is_looked_for(caplog: pytest.LogCaptureFixture) -> None:
    check_options({**ADDRESS, "tls_options": {"ca_certs": "/nowhere/ca.pem"}})
    assert "not encrypted" in caplog.text

"""A signed export: by the key it is, edited, by another key, and what is no key."""

import json
import shutil
import subprocess

import pytest

from kd.core.errors import ConfigError
from kd.deploy.export import package
from kd.deploy.export.export import write
from kd.deploy.export.flags import ExportOptions
from kd.deploy.serve.model import describe
from kd.deploy.verify.comparison import Row
from kd.deploy.verify.verify import VerifyOptions, verify

pytest.importorskip("model_signing")


@pytest.fixture
def keys(tmp_path):
    """Return paths of two pairs of keys (private, public), as openssl makes them."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here")
    pairs = []
    for name in ("ours", "theirs"):
        private = tmp_path / f"{name}.pem"
        public = tmp_path / f"{name}.pub"
        for command in (
            [
                "openssl",
                "ecparam",
                "-name",
                "prime256v1",
                "-genkey",
                "-noout",
                "-out",
                private,
            ],
            ["openssl", "ec", "-in", private, "-pubout", "-out", public],
        ):
            subprocess.run(command, check=True, capture_output=True)
        pairs.append((private, public))
    return pairs


def signature(folder, **options) -> Row:
    (row,) = (
        row
        for row in verify(VerifyOptions(export=folder, **options)).rows
        if row.what == "signature"
    )
    return row


def verdicts(folder) -> list[str]:
    return [row.verdict for row in verify(VerifyOptions(export=folder)).rows]


def test_a_signature_says_whose_export_it_is(subject, keys, tmp_path):
    (private, public), (_, stranger) = keys
    plain = write(subject(), tmp_path / "plain", ExportOptions()).folder
    assert signature(plain)[3:] == ("not checked", "consistent, not signed")
    assert signature(plain, signed_by=public).verdict == "WRONG"
    signed = write(subject(), tmp_path / "signed", ExportOptions(sign=private)).folder
    assert signature(signed).verdict == "not checked"
    assert signature(signed, signed_by=public).verdict == "right"
    assert signature(signed, signed_by=stranger).verdict == "WRONG"
    assert verdicts(signed) == verdicts(plain)
    assert describe(signed).name == "small"  # kd-serve reads it
    content = json.loads((signed / "manifest.json").read_text())
    content["name"] = "another"
    package.seal(
        signed,
        {
            key: value
            for key, value in content.items()
            if key not in ("files", "checksum")
        },
    )
    assert signature(signed, signed_by=public).verdict == "WRONG"
    write(subject(), signed, ExportOptions())  # an export replaces a signed one
    assert signature(signed)[1] == "none"


def test_a_signed_file_that_became_an_endless_link_is_not_read(subject, keys, tmp_path):
    signed = write(
        subject(), tmp_path / "export", ExportOptions(onnx=False, sign=keys[0][0])
    ).folder
    (signed / "kd.json").unlink()
    (signed / "kd.json").symlink_to("/dev/zero")
    assert signature(signed, signed_by=keys[0][1]).verdict == "WRONG"


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"mediaType": 3}', b"\xff\x00" * 99, b"[" * 100_000]
)
def test_a_strangers_signature_is_a_row(content, subject, keys, tmp_path):
    folder = write(subject(), tmp_path / "export", ExportOptions(onnx=False)).folder
    (folder / "model.sig").write_bytes(content)
    assert signature(folder, signed_by=keys[0][1]).verdict == "WRONG"


@pytest.mark.parametrize(
    "content", [None, b"", b"no key", b"-----BEGIN EC PRIVATE KEY-----\n"]
)
def test_what_is_no_key_is_refused_in_one_line(content, subject, keys, tmp_path):
    key = tmp_path / "key.pem"
    if content is not None:
        key.write_bytes(content)
    with pytest.raises(ConfigError, match=r"--sign: .*openssl") as raised:
        write(subject(), tmp_path / "export", ExportOptions(onnx=False, sign=key))
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "export").exists()
    signed = write(
        subject(), tmp_path / "export", ExportOptions(onnx=False, sign=keys[0][0])
    ).folder
    with pytest.raises(ConfigError, match=r"--signed-by: .*Ask for it"):
        verify(VerifyOptions(export=signed, signed_by=key))

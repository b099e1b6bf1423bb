"""Who wrote an export: a signature by a local key, in the format of OpenSSF Model
Signing (package model-signing).

It covers manifest.json, which has the hash of every other file.
"""

from pathlib import Path
from typing import Any

from kd.core.errors import ConfigError, ModelError, first_sentence, import_optional
from kd.files.manifest import SIGNATURE

KEYS = "A PEM file of the curve P-256, P-384 or P-521, without a password"
MAKE = (
    "openssl ecparam -name prime256v1 -genkey -noout -out key.pem; openssl ec -in"
    " key.pem -pubout -out key.pub"
)


def sign(folder: Path, private_key: Path) -> None:
    """Write the signature of an export; ConfigError: the key cannot sign."""
    hashing = (
        _library("hashing", "--sign")
        .Config()
        .use_file_serialization(allow_symlinks=True)
    )
    try:
        signer = (
            _library("signing", "--sign")
            .Config()
            .use_elliptic_key_signer(private_key=private_key)
        )
        signer.set_hashing_config(hashing).sign(folder, folder / SIGNATURE)
    except (OSError, TypeError, ValueError) as error:
        wrong = f"'{private_key}' is no key that can be used ({first_sentence(error)})"
        raise ConfigError("--sign", wrong, KEYS, f"Make one: {MAKE}") from error


def require_signature(folder: Path, public_key: Path) -> None:
    """Raise ModelError unless the owner of a key signed the export as it is;
    ConfigError: the key cannot be read.
    """
    verifying = _library("verifying", "--signed-by")
    try:
        verifier = verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    except (OSError, TypeError, ValueError) as error:
        wrong = f"'{public_key}' is no public key that can be used ({first_sentence(error)})"
        raise ConfigError(
            "--signed-by", wrong, "The public key of who signed, PEM", "Ask for it"
        ) from error
    try:
        verifier.set_ignore_unsigned_files(True).verify(folder, folder / SIGNATURE)
    except (
        Exception
    ) as error:  # a stranger's file: the library and its parsers raise many types
        raise ModelError(
            "signature",
            f"not by this key, or not of these files ({first_sentence(error)})",
        ) from error


def _library(module: str, config_path: str) -> Any:
    remedy = "pip install 'PATH/kd[sign]'"
    return import_optional(
        f"model_signing.{module}",
        config_path,
        "the package model-signing is not installed",
        remedy,
    )

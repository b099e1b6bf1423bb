"""Sign an export by a local key, and verify who signed it.

The format is that of OpenSSF Model Signing (package model-signing). The signature
covers manifest.json, which has the hash of every other file.
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
    hashing = _signing_module("hashing", "--sign").Config()
    hashing.use_file_serialization(allow_symlinks=True)
    signer = _signing_module("signing", "--sign").Config()
    try:
        signer.use_elliptic_key_signer(private_key=private_key)
        signer.set_hashing_config(hashing).sign(folder, folder / SIGNATURE)
    except (OSError, TypeError, ValueError) as error:
        wrong = f"'{private_key}' is no key that can be used ({first_sentence(error)})"
        raise ConfigError("--sign", wrong, KEYS, f"Make one: {MAKE}") from error


def require_signature(folder: Path, public_key: Path) -> None:
    """Require that the owner of a key signed the export as it is.

    Raises:
        ConfigError: the key cannot be read.
        ModelError: the signature is missing or another.
    """
    verifier = _signing_module("verifying", "--signed-by").Config()
    try:
        verifier.use_elliptic_key_verifier(public_key=public_key)
    except (OSError, TypeError, ValueError) as error:
        wrong = (
            f"'{public_key}' is no public key that can be used"
            f" ({first_sentence(error)})"
        )
        raise ConfigError(
            "--signed-by", wrong, "The public key of who signed, PEM", "Ask for it"
        ) from error
    try:
        verifier.set_ignore_unsigned_files(True).verify(folder, folder / SIGNATURE)
    # a stranger's file: the library and its parsers raise many types
    except Exception as error:
        wrong = f"not by this key, or not of these files ({first_sentence(error)})"
        raise ModelError("signature", wrong) from error


def _signing_module(module: str, config_path: str) -> Any:
    wrong = "the package model-signing is not installed"
    remedy = "pip install 'PATH/kd[sign]'"
    return import_optional(f"model_signing.{module}", config_path, wrong, remedy)

"""Whether pretrained weights can be had, here or from a hub that answers at once, and whether they fit a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread
from urllib.parse import urlparse
from urllib.request import Request, urlopen

from torch import Tensor

from kd.errors import ModelError

HUB_SECONDS = 2.0
"""How long a hub may take to answer."""
WEIGHTS, ARCHITECTURE = (".safetensors", ".bin", ".pth", ".pt", ".npz"), (".json",)
"""Endings of what is asked for."""


def require_fetched(where: str, source: str, endings: tuple[str, ...] = WEIGHTS) -> None:
    """Require what `timm.create_model` would fetch; nothing is downloaded.

    Args:
        where: config path of the model.
        source: a name of timm, or `hf-hub:ID`.
        endings: of the files that are needed.

    Raises:
        ModelError: timm has no weights of that name, or they are neither cached nor to be fetched.
    """
    from timm import get_pretrained_cfg  # type: ignore[attr-defined]

    _, _, repository = source.partition(":")
    config = None if repository else get_pretrained_cfg(source)
    repository = repository or getattr(config, "hf_hub_id", None) or ""
    url = getattr(config, "url", None) or ""
    if getattr(config, "file", None) or _is_cached(repository, url, endings):
        return
    if not repository and not url:
        remedy = "Take another model, or start from scratch"
        raise ModelError(where, f"timm has no pretrained weights of '{source}'", "", remedy)
    reason = _unanswered(lambda: _ask(repository, url))
    if reason:
        wrong = f"the weights of '{source}' are not here, and '{repository or url}' cannot be fetched ({reason})"
        allowed = f"In {_cache(repository, url)}, or from a hub that answers within {HUB_SECONDS:g} s"
        raise ModelError(where, wrong, allowed, "Start once where the network is, or copy that cache")


def _cache(repository: str, url: str) -> Path:
    """Return where huggingface_hub or torch keeps what was fetched."""
    if repository:
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE, f"models--{repository.partition('@')[0].replace('/', '--')}")
    from torch.hub import get_dir

    return Path(get_dir(), "checkpoints", Path(urlparse(url).path).name)


def _is_cached(repository: str, url: str, endings: tuple[str, ...]) -> bool:
    place = _cache(repository, url)
    if repository:
        return any(file.suffix in endings for file in place.glob("snapshots/*/*"))
    return bool(url) and place.is_file()


def _ask(repository: str, url: str) -> None:
    if repository:
        from huggingface_hub import HfApi, constants

        name, _, revision = repository.partition("@")
        HfApi(endpoint=constants.ENDPOINT).model_info(name, revision=revision or None, timeout=HUB_SECONDS)
    else:
        with urlopen(Request(url, method="HEAD"), timeout=HUB_SECONDS):
            pass


def _unanswered(ask: Callable[[], None]) -> str:
    """Return why a question got no answer in time; empty where it did. A name server may be slower than any timeout."""
    outcome: list[str] = []

    def attempt() -> None:
        try:
            ask()
            outcome.append("")
        except Exception as error:
            outcome.append(" ".join(f"{type(error).__name__}: {error}".split())[:200])

    thread = Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(HUB_SECONDS)
    return outcome[0] if outcome else f"no answer within {HUB_SECONDS:g} s"


def unwrapped(tensors: dict[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors without the prefixes of DataParallel and torch.compile, which the module itself does not have."""
    for prefix in ("module.", "_orig_mod.", "module."):
        if all(name.startswith(prefix) for name in tensors) and not all(name.startswith(prefix) for name in own):
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors


def require_same_tensors(where: str, model: str, own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Require that a checkpoint holds the tensors of a model.

    Raises:
        ModelError: naming what is missing, unexpected, or of another shape.
    """
    both = [name for name in tensors if name in own and tensors[name].shape != own[name].shape]
    problems = {
        "missing": sorted(own.keys() - tensors.keys()),
        "unexpected": sorted(tensors.keys() - own.keys()),
        "other shape": [f"{name} {tuple(tensors[name].shape)} != {tuple(own[name].shape)}" for name in both],
    }
    shown = "; ".join(f"{kind}: {', '.join(items[:3])} ({len(items)})" for kind, items in problems.items() if items)
    if shown:
        raise ModelError(where, f"the weights are not those of '{model}' ({shown})", "", "Correct model or args")

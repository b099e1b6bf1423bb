"""Whether pretrained weights can be had, here or from a hub that answers at once, and whether they fit a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from threading import Thread

from torch import Tensor

from kd.errors import ModelError

HUB_SECONDS = 2.0
"""How long a hub may take to answer."""
WEIGHTS, ARCHITECTURE = (".safetensors", ".bin", ".pth", ".pt", ".npz"), (".json",)
"""Endings of what is asked for."""


def require_fetched(where: str, source: str, endings: tuple[str, ...] = WEIGHTS) -> None:
    """Require what `timm.create_model` would fetch; nothing is downloaded.

    Not looked for: the weights of the one model in a hundred that lie at an address of their own.
    """
    from huggingface_hub import constants
    from timm import get_pretrained_cfg  # type: ignore[attr-defined]

    repository = source.partition(":")[2]
    if not repository:
        config = get_pretrained_cfg(source)
        if config is None or not config.has_weights:
            wrong, remedy = f"timm has no pretrained weights of '{source}'", "Take another model, or start from scratch"
            raise ModelError(where, wrong, "", remedy)
        repository = "" if config.file else config.hf_hub_id or ""
    cache = Path(constants.HF_HUB_CACHE, f"models--{repository.partition('@')[0].replace('/', '--')}")
    if not repository or any(file.suffix in endings for file in cache.glob("snapshots/*/*")):
        return
    if reason := _unanswered(repository):
        wrong = f"the weights of '{source}' are not here, and '{repository}' cannot be fetched ({reason})"
        allowed = f"In {cache}, or from a hub that answers within {HUB_SECONDS:g} s"
        raise ModelError(where, wrong, allowed, "Start once where the network is, or copy that cache")


def _unanswered(repository: str) -> str:
    """Return why the hub does not show a repository in time; empty where it does."""
    from huggingface_hub import HfApi, constants

    name, _, revision = repository.partition("@")
    outcome: list[str] = []

    def ask() -> None:
        try:
            HfApi(endpoint=constants.ENDPOINT).model_info(name, revision=revision or None, timeout=HUB_SECONDS)
            outcome.append("")
        except Exception as error:
            outcome.append(" ".join(f"{type(error).__name__}: {error}".split())[:200])

    thread = Thread(target=ask, daemon=True)  # a name server may be slower than any timeout
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
    """Require that a checkpoint holds the tensors of a model."""
    both = [name for name in tensors if name in own and tensors[name].shape != own[name].shape]
    problems = {
        "missing": sorted(own.keys() - tensors.keys()),
        "unexpected": sorted(tensors.keys() - own.keys()),
        "other shape": [f"{name} {tuple(tensors[name].shape)} != {tuple(own[name].shape)}" for name in both],
    }
    shown = "; ".join(f"{kind}: {', '.join(items[:3])} ({len(items)})" for kind, items in problems.items() if items)
    if shown:
        raise ModelError(where, f"the weights are not those of '{model}' ({shown})", "", "Correct model or args")

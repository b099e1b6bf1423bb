"""Upload an export to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi  # timm brings it

from kd.errors import RunError


def push(folder: Path, hub_id: str) -> str:
    """Upload every file of `folder` as the model `hub_id`, made if it does not exist; return its address.

    Raises:
        RunError: no network, no login, no right to write there, or a name that the hub does not allow.
    """
    try:
        address = HfApi().create_repo(hub_id, exist_ok=True)
        HfApi().upload_folder(repo_id=hub_id, folder_path=folder, commit_message="kd-export")
    except Exception as error:  # the hub's client raises errors of several libraries, none of them ours
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]
        remedy = f"The export itself is whole in '{folder}'; check the network and `hf auth login`, then repeat"
        raise RunError("--push", f"'{hub_id}' was not uploaded ({reason})", "owner/name", remedy) from error
    return str(address)

"""Models from the Hugging Face hub, by id: `org/name`, or `org/name@revision` to pin a branch, tag or commit.

Weights come as safetensors only; pickles are never fetched. A snapshot that is already in the hub's own cache is used
when the hub cannot be reached.
"""

from __future__ import annotations

import re
from pathlib import Path

from paceline.errors import ModelNotFound, UnsupportedModel

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
# Sub-folders hold the same weights for other programs; so do Mistral's consolidated files.
_UNWANTED = ["*/*", "consolidated*"]


def is_hub_id(model: str) -> bool:
    """Whether `model` has the form of a hub id."""
    return _HUB_ID.fullmatch(model) is not None


def fetch(model: str) -> Path:
    """Download a snapshot, or find it in the hub's cache, and return its folder."""
    # Imported here: it takes a third of a second, and only this road needs it.
    from huggingface_hub import errors as hub_errors
    from huggingface_hub import snapshot_download

    repo, _, revision = model.partition("@")
    try:
        folder = Path(
            snapshot_download(repo, revision=revision or None, allow_patterns=_WANTED, ignore_patterns=_UNWANTED)
        )
    except hub_errors.GatedRepoError as error:
        raise ModelNotFound(
            f"{repo} is gated: accept its terms on the hub, then give a token in HF_TOKEN or with `hf auth login`"
        ) from error
    except hub_errors.RevisionNotFoundError as error:
        raise ModelNotFound(f"{repo} has no revision {revision!r} on the hub") from error
    except hub_errors.RepositoryNotFoundError as error:
        raise ModelNotFound(f"no {repo} on the hub, or it is private: then give a token in HF_TOKEN") from error
    except (hub_errors.HFValidationError, hub_errors.HfHubHTTPError) as error:
        raise ModelNotFound(f"{repo}: the hub said: {_first_line(error)}") from error
    except Exception as error:  # the hub's client lets its HTTP library's errors through, whichever that is today
        raise ModelNotFound(f"{repo} is not cached here and the hub cannot be reached: {_first_line(error)}") from error
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise UnsupportedModel(f"{repo} has no config.json with safetensors weights; other formats are not fetched")
    return folder


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

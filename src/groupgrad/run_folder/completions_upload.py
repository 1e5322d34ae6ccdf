"""Uploads the stored completions to a data set on the hub while a run goes on."""

from __future__ import annotations

import logging
from pathlib import Path

from huggingface_hub import CommitScheduler

logger = logging.getLogger(__name__)

MINUTES = 2
"""Between two uploads; without new files there is none."""


class CompletionsUpload(CommitScheduler):
    """Commits new parquet files of a folder to a data set on the hub, every two minutes and when `finish` is called.

    ValueError if the data set `repo_id` cannot be created or reached. A later upload that fails is reported and tried
    again with the next one.
    """

    def __init__(self, folder: Path, repo_id: str, *, token: str | None = None, private: bool | None = None) -> None:
        try:
            super().__init__(
                repo_id=repo_id,
                repo_type="dataset",
                folder_path=folder,
                every=MINUTES,
                token=token,
                private=private,
                allow_patterns="*.parquet",
            )
        except Exception as error:  # the hub's client raises errors of its own, of HTTP and of the system
            raise ValueError(
                f"log_completions_hub_repo={repo_id!r} cannot be written to: {type(error).__name__}: {error}; log in "
                "with `hf auth login`, set hub_token, or leave log_completions_hub_repo unset"
            ) from error

    def finish(self) -> None:
        """Uploads what is new and waits for it. A failure is a warning: the files are in the folder."""
        try:
            self.trigger().result()
        except Exception as error:  # a lost upload must not end a run
            logger.warning(
                "completions could not be uploaded to %r (%s: %s); they are in %s",
                self.repo_id,
                type(error).__name__,
                error,
                self.folder_path,
            )

"""A keeper's temporary folder: stale ones go with the next start, wherever a kill cut short; no other does."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from mprollout.folders import TEMP_PREFIX, clean_stale_folders, make_folder, remove_folder


def test_a_folder_goes_when_its_lock_is_free_and_no_other_folder_does(private_tmp: Path) -> None:
    living, lock = make_folder()
    (living / "w0").mkdir()
    (living / "w0" / "file").touch()
    just_born = (
        private_tmp / f"{TEMP_PREFIX}1"
    )  # its keeper was killed before it could lock it, or before it could remove it
    just_born.mkdir()
    someones = private_tmp / "mprollout-notes"
    (someones / "deep").mkdir(parents=True)
    link = private_tmp / f"{TEMP_PREFIX}2"
    link.symlink_to(someones)
    clean_stale_folders()
    assert (living / "w0" / "file").exists()
    assert not just_born.exists()
    assert (someones / "deep").exists()
    os.close(lock)  # as a kill does
    clean_stale_folders()
    assert not living.exists()
    link.unlink()
    remove_folder(someones)


def test_starts_at_once_clean_no_folder_of_each_other() -> None:
    made: list[tuple[Path, int]] = []

    def start() -> None:
        made.extend(make_folder() for _ in range(100))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({folder for folder, _ in made}) == 400
    assert all(folder.is_dir() for folder, _ in made)
    for folder, lock in made:
        remove_folder(folder)
        os.close(lock)

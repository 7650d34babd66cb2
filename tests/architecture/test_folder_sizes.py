"""No folder of the package is so full that a newcomer has to search in it."""

from __future__ import annotations

from collections import Counter

from .sources import package_files

MOST_FILES = 25


def test_no_folder_has_more_files_than_can_be_looked_over() -> None:
    counts = Counter(file.parent for file in package_files())
    crowded = {str(folder): count for folder, count in counts.items() if count > MOST_FILES}
    assert len(counts) > 50
    assert not crowded, "group the files of these folders by subject, in folders of their own"

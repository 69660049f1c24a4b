"""What is remembered of the folders of layers, and for how long."""

from __future__ import annotations

from array import array

from capsule.providers.local.seen_folders import SeenFolders, place_of


def places(*inodes: int) -> array[int]:
    return array("q", (place_of(b"workspace", inode, opaque=False) for inode in inodes))


def test_a_place_is_a_path_an_inode_and_whether_it_hides() -> None:
    one = place_of(b"workspace/a", 7, opaque=False)
    assert one == place_of(b"workspace/a", 7, opaque=False)
    others = {
        place_of(b"workspace/b", 7, opaque=False),
        place_of(b"workspace/a", 8, opaque=False),
        place_of(b"workspace/a", 7, opaque=True),
    }
    assert len(others) == 3 and one not in others


def test_a_layer_is_forgotten_with_its_successor_when_it_goes_and_by_age() -> None:
    seen = SeenFolders(most=5)
    seen.note("one", places(1, 2))
    seen.note("two", places(1, 2, 3), instead_of="one")
    assert seen.of("one") is None and seen.of("two") == frozenset(places(1, 2, 3))
    seen.note("three", places(4, 5))
    assert seen.of("two") is not None
    seen.note("four", places(6))
    assert seen.of("two") is None, "the oldest goes first"
    seen.forget("three")
    seen.note("five", places(1, 2, 3, 4))
    assert seen.of("four") is not None and seen.of("five") is not None
    seen.note("large", places(*range(6)))
    assert seen.of("large") is None and seen.of("five") is None


def test_a_merged_layer_has_the_folders_of_the_topmost_until_there_is_one_instead() -> None:
    seen = SeenFolders()
    seen.note("top", places(1, 2))
    seen.note("other", places(1, 2))
    seen.note_same("merged", "top")
    assert seen.of("merged") == seen.of("top") == frozenset(places(1, 2))
    seen.forget("merged")
    assert seen.of("merged") is None and seen.of("top") is not None
    seen.note_same("merged", "top")
    seen.note("next", places(3), instead_of="merged")
    assert seen.of("top") is seen.of("merged") is None and seen.of("other") is not None
    seen.note_same("merged", "unknown")
    assert seen.of("merged") is None
    seen.note("without inodes", array("q"))
    assert seen.of("without inodes") == frozenset()

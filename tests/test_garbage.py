"""Objects that exist are set aside for a while, unless somebody has frozen objects before."""

from __future__ import annotations

import gc

from groupgrad.garbage import existing_objects_skipped


def test_existing_objects_come_back_to_the_collector():
    gc.unfreeze()
    with existing_objects_skipped():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


def test_what_the_user_has_frozen_stays_frozen():
    gc.unfreeze()
    gc.freeze()
    before = gc.get_freeze_count()
    later = [[] for _ in range(1000)]
    with existing_objects_skipped():
        assert gc.get_freeze_count() <= before, "what was made since is not frozen for good"
    assert gc.get_freeze_count() > 0
    assert len(later) == 1000

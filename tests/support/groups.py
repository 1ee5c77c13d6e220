"""A toy KV layout of two groups, one of them windowed; no model makes such a layout yet."""

from __future__ import annotations

from pdserve.base.layout import KvGroup, KvGroupKind, KvLayout

WINDOW = 6
FULL_GROUP = KvGroup(layers=(2, 5), num_kv_heads=2, head_dim=4)
WINDOW_GROUP = KvGroup(kind=KvGroupKind.WINDOW, window=WINDOW, layers=(0, 1, 3, 4), num_kv_heads=1, head_dim=4)
TWO_GROUPS = KvLayout(model="toy", dtype="float32", block_size=4, groups=(FULL_GROUP, WINDOW_GROUP))

"""Models that are cut over ranks: FSDP 2, ZeRO-3, and rows whose tokens are cut over ranks."""

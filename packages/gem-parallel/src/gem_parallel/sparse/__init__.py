"""Embedding tables: planned and sharded over the ranks by TorchRec (v1), copied (v2), or fully sharded (v3)."""

"""Checkpoints.

- `rectangle`: the pieces that tensors are stored in, and their geometry.
- `store`: one checkpoint: safetensors files and a manifest, every byte under a CRC32; reads any rectangle.
- `folder`: the checkpoints of a run: published by one rename, newest found, old ones pruned.
"""

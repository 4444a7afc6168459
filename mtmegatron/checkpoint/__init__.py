"""Checkpoints.

- `rectangle`: the pieces that tensors are stored in, and their geometry.
- `store`: one checkpoint: safetensors files and a manifest, every byte under a CRC32; reads any rectangle.
- `folder`: the checkpoints of a run: published by one rename, newest found, old ones pruned.
- `upcycle`: a dense model's becomes that of a model with experts.
"""

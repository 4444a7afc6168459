"""Operators: small pure functions with their own backward, one file each.

Notable: every file holds a plain-torch `*_reference`, which is the oracle in tests, and the fast version behind the
public name. Nothing here knows the mesh; only the cross entropy takes an axis, because its sums run over the split
vocabulary. Functions are imported from their files (`from mtmegatron.ops.rope import rope`): some share the file's
name.
"""

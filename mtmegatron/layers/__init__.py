"""Layers: serial-looking modules that know the mesh by what they are given."""

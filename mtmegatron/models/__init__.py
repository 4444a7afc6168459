"""Models: serial-looking assemblies of layers, of which a rank builds its own part."""

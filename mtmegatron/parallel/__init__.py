"""The parallelisms: tensor, sequence, pipeline, data, context, expert; one subject per file."""
